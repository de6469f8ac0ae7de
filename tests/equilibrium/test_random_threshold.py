"""Solves that give up after a random number of steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from wellposed.equilibrium import (
    Anderson,
    Broyden,
    Implicit,
    MeanRelative,
    Newton,
    Picard,
    RandomThreshold,
    Relative,
    RobbinsMonro,
    Solution,
    Solver,
    Status,
    Steps,
    Stopping,
    fixed_point,
)
from wellposed.errors import InputError


def halve(x: Tensor, u: Tensor) -> Tensor:
    return 0.5 * x + u


def solved(u: Tensor, stop: Stopping, **options: Any) -> tuple[Tensor, Solution]:
    found = fixed_point(halve, torch.zeros_like(u), u, solver="picard", stop=stop, **options)
    assert isinstance(found.value, Tensor)
    return found.value, found


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_iterates_are_those_of_the_drawn_numbers_of_steps() -> None:
    u = torch.ones(300, 1, dtype=torch.float64)
    value, found = solved(u, RandomThreshold(1, 8, Relative(0.0), seeded(3)))
    drawn = torch.randint(1, 9, (300,), generator=seeded(3))
    torch.testing.assert_close(value[:, 0], 2 - 2 * 0.5 ** drawn.double())
    assert set(drawn.tolist()) == set(range(1, 9)) and (found.steps == drawn + 1).all()
    assert (found.status == Status.STEPS_DONE).all()


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden(), Newton(), RobbinsMonro(0.5)], ids=str)
def test_every_solver_stops_where_the_same_number_of_steps_ends(solver: Solver) -> None:
    u = torch.linspace(0.1, 1, 40, dtype=torch.float64)[:, None].expand(-1, 3).clone()

    def f(x: Tensor, u: Tensor) -> Tensor:
        return torch.cos(x) * u

    stop = RandomThreshold(1, 4, Relative(0.0), seeded(0))
    found = fixed_point(f, torch.zeros_like(u), u, solver=solver, stop=stop)
    drawn = torch.randint(1, 5, (40,), generator=seeded(0))
    for count in range(1, 5):
        there = drawn == count
        alone = fixed_point(f, torch.zeros_like(u[there]), u[there], solver=solver, stop=Steps(count))
        torch.testing.assert_close(found.value[there], alone.value)


def test_the_other_rule_may_stop_earlier_and_says_what_is_reported() -> None:
    u = torch.ones(50, 1, dtype=torch.float64)
    plain, reached = solved(u, Relative(0.1))
    value, found = solved(u, RandomThreshold(30, 40, Relative(0.1)))
    assert torch.equal(found.steps, reached.steps) and torch.equal(value, plain)
    value, _ = solved(u, RandomThreshold(3, 3, MeanRelative(0.0, window=2)))
    torch.testing.assert_close(value, torch.full_like(u, (1.5 + 1.75) / 2))


def test_draws_follow_the_generator_of_the_call() -> None:
    stop, u = RandomThreshold(2, 9, generator=seeded(0)), torch.ones(60, 1)
    runs = [solved(u, stop, generator=seeded(seed))[1].steps for seed in (5, 5, 6)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_the_backward_solve_is_not_cut_at_random() -> None:
    u = torch.ones(20, 1, dtype=torch.float64, requires_grad=True)
    value, _ = solved(u, RandomThreshold(1, 2, generator=seeded(0)), gradient=Implicit(max_steps=100))
    (slope,) = torch.autograd.grad(value.sum(), u)
    torch.testing.assert_close(slope, torch.full_like(u, 2.0))


def test_bad_ranges() -> None:
    for low, high in ((5, 3), (-1, 2)):
        with pytest.raises(InputError, match=f"received low={low}"):
            RandomThreshold(low, high)
