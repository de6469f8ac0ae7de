"""Linear regression: numpy is the oracle of the closed form."""

import numpy as np
import pytest
import torch
from torch.optim import SGD
from wellposed_lab.networks.simple import LinearRegression

from wellposed.errors import InputError


def problem(samples, features, rank=None):
    u = torch.randn(samples, features, dtype=torch.float64)
    if rank is not None:
        u = u[:, :rank] @ torch.randn(rank, features, dtype=torch.float64)
    return u, torch.randn(samples, 2, dtype=torch.float64)


@pytest.mark.parametrize(("samples", "features", "rank"), [(40, 5, None), (40, 5, 3), (4, 9, None)])
def test_without_intercept_it_is_the_minimum_norm_solution(samples, features, rank):
    u, y = problem(samples, features, rank)
    model = LinearRegression(features, 2, intercept=False).double().fit(u, y)
    expected = np.linalg.lstsq(u.numpy(), y.numpy(), rcond=1e-12)[0]
    assert np.allclose(model.linear.weight.mT.detach().numpy(), expected, atol=1e-9)


def test_with_intercept_it_is_least_squares_with_a_column_of_ones():
    u, y = problem(40, 5)
    model = LinearRegression(5, 2).double().fit(u, y)
    expected = np.linalg.lstsq(np.hstack([u.numpy(), np.ones((40, 1))]), y.numpy(), rcond=None)[0]
    assert np.allclose(model.linear.weight.mT.detach().numpy(), expected[:-1])
    assert np.allclose(model.linear.bias.detach().numpy(), expected[-1])


def test_the_intercept_is_not_shrunk():
    u, y = torch.full((6, 3), 5.0), torch.full((6, 1), 7.0)
    model = LinearRegression(3, 1).fit(u, y)
    assert torch.equal(model.linear.weight, torch.zeros(1, 3))
    assert model.linear.bias.item() == 7.0


def test_a_linear_target_is_met_far_away():
    u = torch.rand(200, 50) * 2 - 1
    weight = torch.randint(-1, 2, (50, 1)).float()
    model = LinearRegression(50, 1).fit(u, u @ weight)
    far = 1e4 * u
    assert torch.allclose(model(far), far @ weight, rtol=1e-4, atol=0.1)


def test_gradient_descent_arrives_at_the_same_answer():
    u, y = problem(3, 5)  # fewer samples than features: only the start decides among the solutions
    closed, model = (LinearRegression(5, 2, intercept=False).double() for _ in range(2))
    closed.fit(u, y)
    optimizer = SGD(model.parameters(), lr=0.3)
    for _ in range(500):
        optimizer.zero_grad()
        (model(u) - y).square().mean().backward()
        optimizer.step()
    assert torch.allclose(model.linear.weight, closed.linear.weight, atol=1e-6)


@pytest.mark.parametrize(
    ("u", "y", "complaint"),
    [
        (torch.ones(4, 3), torch.ones(4), "received \\(4, 3\\) and \\(4,\\)"),
        (torch.ones(4, 2), torch.ones(4, 1), "must be \\(m, 3\\)"),
        (torch.ones(4, 3), torch.ones(5, 1), "one m"),
        (torch.ones(0, 3), torch.ones(0, 1), "m > 0"),
        (torch.ones(4, 3), torch.full((4, 1), torch.nan), "NaN or infinite"),
    ],
)
def test_wrong_data(u, y, complaint):
    with pytest.raises(InputError, match=complaint):
        LinearRegression(3, 1).fit(u, y)
