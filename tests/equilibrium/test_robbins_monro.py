"""Stochastic approximation on maps with noise."""

import pytest
import torch
from torch import Tensor

from wellposed.equilibrium import MeanRelative, RobbinsMonro, Status, Steps, fixed_point
from wellposed.errors import InputError


def _noisy(scale: float, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def f(x: Tensor) -> Tensor:
        return -0.5 * x + 3 + scale * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    return f


@pytest.mark.parametrize("decay", [0.0, pytest.param(0.7, marks=pytest.mark.slow), 1.0])
def test_without_noise_it_goes_to_the_equilibrium(decay: float) -> None:
    found = fixed_point(lambda x: -0.5 * x + 3, torch.zeros(2, 3, dtype=torch.float64),
                        solver=RobbinsMonro(0.5, decay), stop=Steps(4000), on_failure="ignore")  # fmt: skip
    torch.testing.assert_close(found.value, torch.full_like(found.value, 2.0), rtol=0, atol=3e-3)


def test_steps_follow_the_schedule() -> None:
    # With f = 0 the state is multiplied by 1 - rate / (1 + m)^decay at step m.
    x0 = torch.ones(1, 1, dtype=torch.float64)
    found = fixed_point(lambda x: 0 * x, x0, solver=RobbinsMonro(0.5, 1.0), stop=Steps(4), on_failure="ignore")
    expected = (1 - 0.5) * (1 - 0.5 / 2) * (1 - 0.5 / 3) * (1 - 0.5 / 4)
    assert float(found.value) == pytest.approx(expected)


def test_shrinking_steps_average_noise_away_and_constant_ones_do_not() -> None:
    x0 = torch.zeros(400, 1, dtype=torch.float64)
    constant, shrinking = (
        fixed_point(_noisy(1.0), x0, solver=RobbinsMonro(0.5, decay), stop=Steps(400), on_failure="ignore").value
        for decay in (0.0, 1.0)
    )
    # AR(1): x <- .25 x + 1.5 + .5 noise has the standard deviation .5 / sqrt(1 - .25^2).
    assert float(constant.std()) == pytest.approx(0.5 / (1 - 0.25**2) ** 0.5, rel=0.1)
    assert float((shrinking - 2).square().mean().sqrt()) < float(constant.std()) / 5


def test_samples_cut_off_report_the_mean_of_the_window() -> None:
    seen: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return -x + 1.0  # jumps between 0 and 1 for ever

    never = MeanRelative(0.0, window=4)
    found = fixed_point(f, torch.zeros(1, 1), solver="picard", stop=never, max_steps=3, on_failure="ignore")
    assert found.status[0] == Status.MAX_STEPS
    assert float(found.value) == pytest.approx(1 / 3)  # of 0, 1, 0: the window is not full yet


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"rate": 1.5}, {"decay": -0.1}, {"decay": 1.1}])
def test_senseless_schedules_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        RobbinsMonro(**options)
