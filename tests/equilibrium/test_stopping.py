import pytest
import torch

from wellposed.equilibrium import (
    STOPPINGS,
    Absolute,
    Contraction,
    ErrorBound,
    MeanRelative,
    Picard,
    RandomSteps,
    Relative,
    Status,
    Steps,
    Stopping,
    fixed_point,
)
from wellposed.errors import InputError, UnknownNameError


def halve(x, u):
    return 0.5 * x + u


def solve(stop, scale=1.0, dtype=torch.float64, **options):
    u = scale * torch.tensor([[1.0], [2.0]], dtype=dtype)
    return fixed_point(halve, torch.zeros_like(u), u, stop=stop, solver=Picard(), **options)


def test_absolute_is_the_rule_of_the_papers():
    # residual after k steps is 2^-k u
    assert solve(Absolute(2.0**-10)).steps.tolist() == [11, 12]


def test_absolute_steps_grow_with_the_scale_and_relative_steps_do_not():
    assert solve(Absolute(1e-6), 1e6).steps[0] == solve(Absolute(1e-6)).steps[0] + 20
    assert torch.equal(solve(Relative(1e-6), 1e6).steps, solve(Relative(1e-6)).steps)


def test_relative_has_a_floor_at_rounding():
    found = solve(Relative(rtol=0.0, atol=0.0), dtype=torch.float32)
    assert found.converged.all() and found.steps.max() < 40


def test_relative_accepts_a_zero_state():
    zero = torch.zeros(1, 2)
    assert fixed_point(lambda x: 0.5 * x, zero + 1.0, solver="picard").converged.all()
    assert fixed_point(lambda x: 0.5 * x, zero).steps.tolist() == [1]


def test_two_norm():
    u = torch.ones(1, 4, dtype=torch.float64)
    inf = fixed_point(halve, torch.zeros_like(u), u, stop=Absolute(1e-3), solver="picard").steps
    two = fixed_point(halve, torch.zeros_like(u), u, stop=Relative(0, 1e-3, norm="2"), solver="picard").steps
    assert two[0] == inf[0] + 1  # |.|_2 = 2 |.|_inf here


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_steps_does_exactly_that_many_and_claims_nothing(steps):
    found = solve(Steps(steps))
    torch.testing.assert_close(found.value[0, 0], torch.tensor(2 - 2 * 0.5**steps, dtype=torch.float64))
    assert (found.status == Status.STEPS_DONE).all() and not found.converged.any() and not found.failed.any()


def test_random_steps_are_drawn_per_sample_and_reproducible():
    u = torch.ones(200, 1)
    stop = RandomSteps(3, 9)
    runs = [
        fixed_point(halve, torch.zeros_like(u), u, stop=stop, generator=torch.Generator().manual_seed(5)).steps
        for _ in range(2)
    ]
    assert torch.equal(*runs)
    assert runs[0].min() == 4 and runs[0].max() == 10  # one more evaluation measures the residual


def test_mean_relative_tests_the_residual_at_the_windowed_mean():
    sign = torch.tensor([[1.0], [1.0]], dtype=torch.float64)

    def f(x, u):  # period two: iterates never settle, their mean is the equilibrium
        return -x + u

    found = fixed_point(f, torch.zeros_like(sign), sign, stop=MeanRelative(1e-9, window=4), solver="picard")
    assert found.converged.all() and found.steps.tolist() == [4, 4]
    torch.testing.assert_close(found.value, torch.full_like(sign, 0.5))


def test_error_bound_stops_on_the_distance_to_the_solution():
    f = Contraction(halve, factor=0.5)
    u = torch.tensor([[1.0], [100.0]], dtype=torch.float64)
    found = fixed_point(f, torch.zeros_like(u), u, stop=ErrorBound(1e-6), solver="picard")
    error = (found.value - 2 * u).abs().amax(1)
    assert (error <= 1e-6).all() and (error > 1e-7).all()
    assert (error <= found.error_bound).all()


def test_error_bound_needs_a_known_contraction():
    with pytest.raises(InputError, match=r"Contraction\(f, factor\)"):
        solve(ErrorBound(1e-6))


def test_a_rule_of_ones_own():
    class Impatient(Stopping):
        def begin(self, x0):
            return (torch.zeros(len(x0), dtype=torch.int64),)

        def check(self, step, state):
            seen = state[0] + 1
            return (seen >= 3) & (step.residual < 10), (seen,)

    assert solve(Impatient()).steps.tolist() == [3, 3]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Absolute(-1.0),
        lambda: Relative(rtol=-1.0),
        lambda: Relative(norm="1"),
        lambda: Steps(-1),
        lambda: RandomSteps(5, 3),
        lambda: MeanRelative(1e-3, window=0),
        lambda: ErrorBound(float("nan")),
    ],
)
def test_bad_settings(make):
    with pytest.raises(InputError, match="received"):
        make()


def test_names():
    assert isinstance(STOPPINGS.get("relative"), Relative)
    with pytest.raises(UnknownNameError, match="did you mean 'relative'"):
        solve("relativ")
    with pytest.raises(InputError, match="received 3"):
        solve(3)


def test_the_backward_tolerance_of_absolute_is_smaller():
    assert Absolute(8e-6).adjoint() == Absolute(1e-6)
