"""The rule that picks a solver, on residual traces whose future is known and on real probes."""

import pytest
import torch

from wellposed.activations import get_activation
from wellposed.equilibrium.affine import AffineMap
from wellposed.equilibrium.anderson import Anderson
from wellposed.equilibrium.loop import iterate
from wellposed.equilibrium.map import max_norm
from wellposed.equilibrium.picard import Picard
from wellposed.equilibrium.stopping import Relative
from wellposed.kernels.choice import choose, newton_cost, steps_to_go

GOAL = torch.full((32,), 1e-6)


def trace(*rates):
    """Residuals that fall by each rate for eight steps."""
    falls = torch.tensor([rate for rate in rates for _ in range(8)]).log().cumsum(0).exp()
    return falls.expand(32, -1)


def test_a_finished_probe_needs_nothing_else():
    assert choose(300, 0.9, trace(0.1)[:, :6], GOAL) == "picard"
    done = trace(0.1, 0.1).clone()
    done[:, 8:] = torch.nan
    assert choose(300, 0.9, done, GOAL) == "picard"


def test_acceleration_that_pays_goes_on():
    assert choose(300, 0.99, trace(0.99, 0.5), GOAL) == "anderson"


def test_fast_plain_steps_stay_plain():
    assert choose(300, 0.9, trace(0.6, 0.6), GOAL) == "picard"


def test_newton_where_neither_gets_on():
    assert choose(300, 0.999, trace(0.99, 0.999), GOAL) == "newton"
    assert choose(300, None, trace(1.0, 1.05), GOAL) == "newton"


def test_a_contraction_bounds_the_rate():
    rising = trace(1.1, 1.02)
    assert choose(300, None, rising, GOAL) == "newton"
    assert choose(300, 0.5, rising, GOAL) != "newton"


def test_tiny_problems_have_no_use_for_newton_unless_nothing_else_ends():
    slow = trace(0.95, 0.97)
    assert choose(300, 0.99, slow, GOAL) == "newton"
    assert choose(10, 0.99, slow, GOAL) != "newton"
    assert choose(10, 0.99999, trace(0.99999, 0.99999), GOAL) == "newton"


def test_a_goal_below_rounding_is_dear_for_anderson():
    falling = trace(0.999, 0.5)
    assert choose(300, 0.999, falling, GOAL) == "anderson"
    assert choose(300, 0.999, falling, GOAL, rounding=10 * GOAL) == "newton"


def test_finished_samples_do_not_decide():
    mixed = trace(0.99, 0.999).clone()
    mixed[:16, 3:] = torch.nan
    assert choose(300, 0.999, mixed, GOAL) == "newton"


def test_costs_fall_with_the_size_of_the_problem():
    assert newton_cost(10, 1) > newton_cost(100, 1) > newton_cost(100, 100) > newton_cost(500, 500) > 100
    assert float(steps_to_go(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(0.5))) == 0


@pytest.mark.parametrize(
    ("family", "norm", "expected"),
    [("positive", 0.99, "anderson"), ("shift", 0.999, "newton"), ("shift", 0.3, "picard")],
)
def test_real_probes(family, norm, expected):
    generator = torch.Generator().manual_seed(0)
    n = 200
    A = torch.rand(n, n, generator=generator) if family == "positive" else torch.eye(n).roll(1, 0)
    A, v = norm * A / A.sum(1, keepdim=True), torch.randn(32, n, generator=generator)
    f = AffineMap((A,), v, get_activation("relu"))
    probe = iterate(f, torch.zeros_like(v), Anderson(), Relative(), 16)
    picked = choose(n, norm, probe.residuals, 1e-5 * max_norm(probe.value))
    assert picked == expected
    if picked != "picard":  # the choice must be right: plain steps really take much longer
        assert iterate(f, torch.zeros_like(v), Picard(), Relative(), 400).steps.double().mean() > 100
