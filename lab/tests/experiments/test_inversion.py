"""Linear systems and quadratic programs: inverses and an active-set solver find the same."""

import dataclasses

import pytest
import torch
from scipy.optimize import nnls
from wellposed_lab.experiments.beyond.inversion import LinearSystem, QuadraticProgram

from wellposed.errors import InputError

KINDS = (
    LinearSystem(features=6, samples=300, test_samples=40),
    QuadraticProgram(features=6, samples=300, test_samples=40),
)


def parts(u):
    return u[:, :, :-1].double(), u[:, :, -1].double()


@pytest.mark.parametrize("task", KINDS, ids=lambda task: task.name)
def test_matrices_are_positive_definite_of_the_promised_condition(task):
    for at in (1.0, 7.0, 100.0):
        matrix, _ = parts(task.test(0, at)[0])
        values = torch.linalg.eigvalsh(matrix)
        assert torch.allclose(matrix, matrix.mT, atol=1e-6)
        assert torch.allclose(values[:, -1], torch.ones(40, dtype=torch.float64), atol=1e-5)
        assert torch.allclose(1 / values[:, 0], torch.full((40,), at, dtype=torch.float64), rtol=1e-3)
    trained = torch.linalg.cond(parts(task.train(0)[0])[0])
    assert 1 <= trained.min() < 1.2 and 4 < trained.max() <= 5.001


def test_answers_are_those_of_the_inverse():
    u, y = KINDS[0].test(1, 50.0)
    matrix, vector = parts(u)
    expected = (torch.linalg.inv(matrix) @ vector[:, :, None])[..., 0]
    assert torch.allclose(y.double(), expected, atol=1e-4)


def test_programs_are_solved():
    u, y = KINDS[1].test(1, 50.0)
    matrix, vector = parts(u)
    lower = torch.linalg.cholesky(matrix)  # y'My/2 - b'y is |L'y - L^-1 b|^2/2 and a constant
    right = torch.linalg.solve_triangular(lower, vector[:, :, None], upper=False)[..., 0]
    found = [torch.tensor(nnls(a.mT.numpy(), b.numpy())[0]) for a, b in zip(lower, right, strict=True)]
    assert torch.allclose(y.double(), torch.stack(found), atol=1e-4)
    assert 0.3 < (y == 0).double().mean() < 0.7


@pytest.mark.parametrize("task", KINDS, ids=lambda task: task.name)
def test_splits_are_repeatable_and_differ(task):
    assert all(torch.equal(a, b) for a, b in zip(task.train(3), dataclasses.replace(task).train(3), strict=True))
    sums = {float(u.sum()) for u, _ in (task.train(0), task.validation(0), task.train(1), task.test(0, 5.0))}
    assert len(sums) == 4


def test_score_counts_samples_by_their_relative_error():
    target = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 1.0]])
    guess = target + torch.tensor([[0.4, 0.0], [0.6, 0.0], [float("nan"), 0.0]])
    scores = KINDS[0].score(guess, target)
    assert scores["test_accuracy"] == pytest.approx(1 / 3) and scores["test_error"] == float("inf")
    assert KINDS[0].score(guess[:2], target[:2])["test_error"] == pytest.approx(0.1)


def test_impossible_settings_are_refused():
    with pytest.raises(InputError, match="two features"):
        LinearSystem(features=1)
    with pytest.raises(InputError, match="condition"):
        QuadraticProgram(condition=0.5)
    with pytest.raises(InputError, match="at least 1"):
        KINDS[0].test(0, 0.5)
