"""Arithmetic tasks: exact targets, one draw of the ranges per data set, the stated scales."""

import pytest
import torch
from wellposed_lab.tasks.mathematics import Arithmetic, addition, subtraction

from wellposed.errors import InputError


@pytest.mark.parametrize(("make", "sign"), [(addition, 1), (subtraction, -1)])
def test_target_is_what_the_paper_says(make, sign):
    task = make(seed=4)
    u, y = task.sample(30, generator=torch.Generator().manual_seed(1))
    (i, j), (k, l) = task.first, task.second  # noqa: E741 - the letters of the paper
    expected = u[:, i : j + 1].sum(1) + sign * u[:, k : l + 1].sum(1)
    assert u.shape == (30, 50)
    assert y.shape == (30, 1)
    assert torch.allclose(y[:, 0], expected, atol=1e-5)
    assert torch.allclose(u @ task.coefficients[:, None], y)


def test_one_linear_map_fits_all_samples():
    u, y = addition(seed=2).sample(200, generator=torch.Generator().manual_seed(0))
    fitted = torch.linalg.lstsq(u.double(), y.double()).solution
    assert torch.allclose(fitted[:, 0].float(), addition(seed=2).coefficients, atol=1e-4)


def test_ranges_vary_with_the_seed_and_only_with_it():
    tasks = [addition(seed=seed) for seed in range(20)]
    assert len({(task.first, task.second) for task in tasks}) == 20
    assert tasks == [addition(seed=seed) for seed in range(20)]
    for task in tasks:
        for low, high in (task.first, task.second):
            assert 0 <= low < high < 50
    ends = {bound for seed in range(500) for bound in addition(5, seed).first}
    assert ends == set(range(5))


@pytest.mark.parametrize("scale", [0.5, 1.0, 50.0])
def test_scale_is_the_half_width(scale):
    task = addition(seed=0)
    u, _ = task.sample(2000, scale, torch.Generator().manual_seed(0))
    assert u.abs().max() <= scale
    assert u.abs().max() > 0.99 * scale
    assert u.mean().abs() < 0.02 * scale
    base, _ = task.sample(2000, 1.0, torch.Generator().manual_seed(0))
    assert torch.allclose(u, scale * base)


def test_target_keeps_the_dtype():
    assert addition().target(torch.ones(2, 50, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"first": (2, 2)}, "0 <= i < j < 5"),
        ({"second": (3, 5)}, "0 <= i < j < 5"),
        ({"sign": 2}, "sign must be 1"),
    ],
)
def test_wrong_arguments(arguments, complaint):
    with pytest.raises(InputError, match=complaint):
        Arithmetic(**({"features": 5, "first": (0, 1), "second": (1, 3)} | arguments))


def test_too_few_features():
    with pytest.raises(InputError, match="at least 2"):
        addition(1)
