import pytest
import torch
from problems import FAMILIES, state_matrix

from wellposed.activations import get_activation
from wellposed.equilibrium import Absolute, Anderson, Picard, Relative, fixed_point
from wellposed.equilibrium.affine import AffineMap
from wellposed.equilibrium.loop import iterate


def steps(A, v, activation, solver):
    f = AffineMap((A,), v, get_activation(activation))
    found = iterate(f, torch.zeros_like(v), solver, Absolute(3e-6), 4000)
    assert (found.status == 1).all()
    return found.steps.double()


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", [0.5, 0.9, 0.99])
def test_never_above_twelve_tenths_of_picard(family, norm, activation):
    generator = torch.Generator().manual_seed(7)
    A = state_matrix(family, 24, norm, generator)
    v = torch.randn(64, 24, dtype=torch.float64, generator=generator)
    plain, fast = steps(A, v, activation, Picard()), steps(A, v, activation, Anderson())
    assert fast.mean() <= 1.2 * plain.mean()
    assert fast.max() <= 1.2 * plain.max() + 1
    if family != "shift":  # where plain steps end early by luck of the active set, a jump may cost more
        assert (fast <= 1.2 * plain + 1).all()


@pytest.mark.parametrize(("family", "gain"), [("positive", 10), ("ring", 3), ("sparse", 10)])
def test_slow_problems_need_many_times_fewer_steps(family, gain):
    generator = torch.Generator().manual_seed(0)
    A = state_matrix(family, 20, 0.99, generator)
    v = torch.randn(64, 20, dtype=torch.float64, generator=generator)
    assert gain * steps(A, v, "relu", Anderson()).mean() < steps(A, v, "relu", Picard()).mean()


def test_a_singular_least_squares_problem_falls_back():
    A = torch.full((3, 3), 0.3, dtype=torch.float64)  # all differences are parallel
    v = torch.ones(2, 3, dtype=torch.float64)
    f = AffineMap((A,), v, get_activation("identity"))
    found = iterate(f, torch.zeros_like(v), Anderson(), Absolute(1e-12), 300)
    torch.testing.assert_close(found.value, torch.full_like(v, 10.0))


def test_when_a_sample_jumps_does_not_depend_on_its_companions():
    # falls fast for one cycle, slowly afterwards; the companion is slow from the start
    rate = torch.tensor([[0.2, 0.99], [0.99, 0.98]], dtype=torch.float64)
    u = torch.tensor([[1.0, 1e-7], [1.0, 1.0]], dtype=torch.float64)

    def solve(rows):
        r, v = rate[rows], u[rows]
        return fixed_point(lambda x, r, v: r * x + v, torch.zeros_like(v), r, v, stop=Relative(1e-13))

    together, alone = solve([0, 1]), solve([0])
    assert together.steps[0] == alone.steps[0]
    torch.testing.assert_close(together.value[0], alone.value[0], rtol=1e-14, atol=0)
