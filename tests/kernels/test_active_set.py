"""The Newton executor against dense solves in float64, the reference loop and itself in other batches."""

import pytest
import torch
from torch import Tensor

from wellposed.activations import get_activation, leaky_relu
from wellposed.equilibrium.affine import AffineMap, TransposedMap
from wellposed.equilibrium.loop import iterate
from wellposed.equilibrium.maps import max_norm
from wellposed.equilibrium.solution import Status
from wellposed.equilibrium.solvers import Picard
from wellposed.equilibrium.stopping import Absolute, Relative, Steps, default_tolerance
from wellposed.errors import InputError
from wellposed.kernels.cpu import newton
from wellposed.kernels.cpu.newton import (
    NewtonSystems,
    Reference,
    choose_references,
    finish_adjoint,
    finish_forward,
    solve_active_set,
)

ACTIVATIONS = {
    "relu": get_activation("relu"),
    "leaky": leaky_relu(0.2),
    "identity": get_activation("identity"),
    "tanh": get_activation("tanh"),
    "sigmoid": get_activation("sigmoid"),
}
FAMILIES = ("positive", "random", "ring", "shift", "loops")


def matrix(family: str, n: int, norm: float, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    A = {
        "positive": lambda: torch.rand(n, n, generator=generator),
        "random": lambda: torch.randn(n, n, generator=generator),
        "ring": lambda: torch.eye(n).roll(1, 0) + torch.eye(n).roll(-1, 0),
        "shift": lambda: torch.eye(n).roll(1, 0),
        "loops": lambda: torch.eye(n) + torch.randn(n, n, generator=generator).clamp_min(1.5) - 1.5,
    }[family]()
    return (norm * A / A.abs().sum(1, keepdim=True)).to(dtype)


def inputs(batch: int, n: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(batch, n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(x: Tensor, exact: Tensor) -> float:
    return float((max_norm(x.double() - exact) / max_norm(exact).clamp_min(1e-3)).max())


def exact_state(A: Tensor, v: Tensor, activation) -> Tensor:
    """Dense Newton in float64 on one sample after the other, checked at the map."""
    A, v = A.double(), v.double()
    rows = []
    for row in v:
        x = row
        for _ in range(200):
            z = A @ x + row
            if torch.allclose(activation(z), x, rtol=1e-13, atol=1e-14):
                break
            J = torch.eye(len(A)).double() - activation.slope_at(z)[:, None] * A
            x = x + torch.linalg.solve(J, activation(z) - x)
        assert float((activation(A @ x + row) - x).abs().max()) < 1e-10 * float(x.abs().max().clamp_min(1))
        rows.append(x)
    return torch.stack(rows)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", [0.9, 0.999])
@pytest.mark.parametrize("warm", [0, 16])
def test_relu_equilibrium_and_adjoint_are_exact(family, norm, dtype, warm):
    A, v, g = matrix(family, 17, norm, dtype), inputs(24, 17, dtype), inputs(24, 17, dtype, seed=2)
    found = solve_active_set(A, v, ACTIVATIONS["relu"], max_steps=1000, warm=warm)
    assert (found.status == Status.CONVERGED).all()
    exact = exact_state(A, v, ACTIVATIONS["relu"])
    assert relative_error(found.value, exact) < 1.1 * default_tolerance(dtype) / (1 - norm)
    back = found.adjoint(g)
    assert (back.status == Status.CONVERGED).all()
    D = found.slope.double()
    dense = torch.linalg.solve(torch.eye(17).double() - D[:, :, None] * A.double().mT, D * g.double())
    assert relative_error(back.value, dense) < 1.1 * default_tolerance(dtype) / (1 - norm)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("n", "batch"), [(1, 1), (1, 40), (5, 3), (33, 70)])
def test_every_activation_and_odd_size(name, n, batch):
    activation = ACTIVATIONS[name]
    A, v = matrix("random", n, 0.97, torch.float64), 3 * inputs(batch, n, torch.float64)
    found = solve_active_set(A, v, activation, warm=1)
    assert (found.status == Status.CONVERGED).all()
    assert relative_error(found.value, exact_state(A, v, activation)) < 1e-8
    g = inputs(batch, n, torch.float64, seed=3)
    y = found.adjoint(g).value
    assert torch.allclose(y, found.slope * (y @ A + g), atol=1e-9)


def test_residual_status_and_steps_are_those_of_the_true_map():
    A, v = matrix("ring", 20, 0.99, torch.float32), inputs(50, 20, torch.float32)
    found = solve_active_set(A, v, ACTIVATIONS["relu"])
    image = torch.relu(torch.addmm(v, found.value, A.mT))
    rounding = AffineMap((A,), v, ACTIVATIONS["relu"]).rounding(found.value, image)
    assert (max_norm(image - found.value) <= 0.99 * found.residual + rounding).all()  # `value` is an image itself
    assert (found.residual <= 1e-5 * max_norm(image)).all()
    assert (found.steps >= 1).all() and (found.steps <= 60).all()


def test_the_image_of_the_accepted_point_is_returned():
    A, v = matrix("random", 12, 0.2, torch.float64), inputs(50, 12, torch.float64)
    found = solve_active_set(A, v, get_activation("tanh"), stop=Absolute(1e-2), warm=0)
    x = torch.zeros_like(v)
    for _ in range(100):
        x = torch.tanh(x @ A.mT + v)
    assert (max_norm(found.value - x) <= 0.2 / 0.8 * found.residual).all() and found.residual.max() > 1e-6


def test_few_steps_where_picard_needs_many():
    A, v = matrix("shift", 20, 0.99, torch.float64), inputs(16, 20, torch.float64)
    plain = iterate(AffineMap((A,), v, ACTIVATIONS["relu"]), torch.zeros_like(v), Picard(), Relative(), 20_000)
    found = solve_active_set(A, v, ACTIVATIONS["relu"])
    assert found.steps.double().mean() * 5 < plain.steps.double().mean()
    assert relative_error(found.value, plain.value) < 1e-7


def test_a_long_chain_of_switches_is_given_time():
    A, v = matrix("shift", 257, 0.999, torch.float32), inputs(1024, 257, torch.float32)
    found = solve_active_set(A, v[[83, 270, 434, 846]], ACTIVATIONS["relu"])  # the residual rises for 40 steps
    assert (found.status == Status.CONVERGED).all() and (found.steps < 80).all()


@pytest.mark.parametrize("family", ["positive", "shift"])
def test_companions_do_not_matter(family):
    A, v = matrix(family, 40, 0.99, torch.float64), inputs(300, 40, torch.float64)
    v[100:200] = v[100]  # a pattern that is shared, and becomes a reference
    together = solve_active_set(A, v, ACTIVATIONS["relu"])
    for sample in (0, 150, 299):
        alone = solve_active_set(A, v[sample : sample + 1], ACTIVATIONS["relu"])
        assert torch.allclose(alone.value[0], together.value[sample], rtol=1e-11, atol=1e-11)
        assert int(alone.steps) == int(together.steps[sample])


def test_a_trial_that_does_not_help_is_taken_back(monkeypatch):
    A, v = matrix("positive", 12, 0.9, torch.float64), inputs(20, 12, torch.float64)

    def astray(self, samples, slope, r):
        return torch.full_like(r, 1e3)

    monkeypatch.setattr(newton._Newton, "_direction", astray)
    monkeypatch.setattr(newton, "TRIALS", 2)
    found = solve_active_set(A, v, ACTIVATIONS["relu"], max_steps=2000, warm=0)
    assert (found.status == Status.CONVERGED).all()
    assert relative_error(found.value, exact_state(A, v, ACTIVATIONS["relu"])) < 1e-8


def test_a_bad_factorisation_is_replaced_by_a_pivoted_one(monkeypatch):
    A, v = matrix("ring", 12, 0.99, torch.float64), inputs(20, 12, torch.float64)
    right = solve_active_set(A, v, ACTIVATIONS["relu"], warm=0)
    g = inputs(20, 12, torch.float64)
    right_gradient = right.adjoint(g).value
    monkeypatch.setattr(NewtonSystems, "solve", lambda self, r, keep=True: torch.full_like(r, torch.nan))
    monkeypatch.setattr(NewtonSystems, "solve_transposed", lambda self, r: torch.full_like(r, torch.nan))
    found = solve_active_set(A, v, ACTIVATIONS["relu"], warm=0)
    assert torch.equal(found.steps, right.steps)
    assert torch.allclose(found.value, right.value)
    assert torch.allclose(found.adjoint(g).value, right_gradient)


def test_failures_have_a_status():
    relu = ACTIVATIONS["relu"]
    grows = torch.eye(3).double() * 1.5
    v = torch.tensor([[1.0, 1, 1], [-1, -1, -1], [torch.nan, 0, 0]]).double()
    found = solve_active_set(grows, v, relu, max_steps=60)
    assert found.status.tolist()[1:] == [Status.CONVERGED, Status.NONFINITE]
    assert found.status[0] in (Status.DIVERGED, Status.MAX_STEPS)
    assert found.value[:2].isfinite().all()
    at_once = solve_active_set(grows, v[1:], relu, max_steps=60, warm=0)
    assert at_once.status.tolist() == [Status.CONVERGED, Status.NONFINITE]
    nothing = solve_active_set(torch.eye(1).double(), torch.ones(1, 1).double(), relu, max_steps=30)
    assert nothing.status.tolist() == [Status.MAX_STEPS]
    short = solve_active_set(
        matrix("shift", 9, 0.999, torch.float64), torch.ones(2, 9).double(), relu, max_steps=3
    )
    assert short.status.tolist() == [Status.MAX_STEPS] * 2 and short.steps.tolist() == [3, 3]


def test_an_unreachable_tolerance_ends_at_the_rounding_of_the_map():
    A, v = matrix("positive", 30, 0.95, torch.float32), inputs(40, 30, torch.float32)
    found = solve_active_set(A, v, ACTIVATIONS["relu"], stop=Absolute(0.0), max_steps=500, warm=0)
    assert set(found.status.tolist()) <= {int(Status.STAGNATED), int(Status.CONVERGED)}
    assert (found.status == Status.STAGNATED).any()
    assert (found.steps < 100).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stop", [Absolute(1e-9), Relative()])
def test_what_an_iteration_has_left_is_solved_to_the_rounding_of_float32(family, stop):
    A, v, relu = matrix(family, 40, 0.99, torch.float32), inputs(30, 40, torch.float32), ACTIVATIONS["relu"]
    forward = finish_forward(AffineMap((A,), v, relu), torch.zeros_like(v), stop, 200)
    wanted = exact_state(A, v, relu)
    eps = torch.finfo(torch.float32).eps
    assert relative_error(forward.value, wanted) <= eps and (forward.status <= Status.STAGNATED).all()
    g, d = inputs(30, 40, torch.float32, seed=5), relu.slope_at(wanted).float()
    backward = finish_adjoint(A, TransposedMap((A.mT,), d, d * g, 1.0), torch.zeros_like(v), stop, 200)
    systems = torch.eye(40).double() - d.double()[:, :, None] * A.double().mT
    assert relative_error(backward.value, torch.linalg.solve(systems, (d * g).double())) <= eps
    assert (backward.status <= Status.STAGNATED).all()
    relative = type(stop) is Relative
    assert relative == bool(
        (forward.status == Status.CONVERGED).all() & (backward.status == Status.CONVERGED).all()
    )


def test_a_solution_too_large_for_float32_is_not_returned():
    v = torch.full((1, 2), 3e38)
    f = AffineMap((torch.tensor([[0.0, 0.9], [0.9, 0.0]]),), v, ACTIVATIONS["relu"])
    answer = finish_forward(f, torch.zeros_like(v), Relative(), 50)
    assert answer.status.tolist() == [Status.NONFINITE] and answer.value.isfinite().all()


def test_the_backward_pass_reuses_the_factorisations(monkeypatch):
    A, v = matrix("shift", 40, 0.99, torch.float64), inputs(60, 40, torch.float64)
    found = solve_active_set(A, v, ACTIVATIONS["relu"], warm=0)
    monkeypatch.setattr(newton, "factorise", lambda *arguments: pytest.fail("factorised again"))
    g = inputs(60, 40, torch.float64, seed=5)
    back = found.adjoint(g)
    assert (back.status == Status.CONVERGED).all() and (back.steps <= 2).all()


def test_systems_in_chunks_and_without_room_to_keep_them(monkeypatch):
    A, v = matrix("random", 24, 0.99, torch.float64), inputs(100, 24, torch.float64)
    slope = (v > 0).double()
    reference = Reference.at(A, slope[0])
    whole = NewtonSystems(reference, slope - slope[0])
    expected = whole.solve(v)
    monkeypatch.setattr(newton, "CHUNK", 2000)
    monkeypatch.setattr(newton, "CACHED", 0)
    parts = NewtonSystems(reference, slope - slope[0])
    assert torch.equal(parts.solve(v), expected)
    assert len(parts._lists[3]) > 3 and parts.numbers == 0 < whole.numbers
    dense = torch.eye(24).double() - slope[:, :, None] * A
    assert torch.allclose(parts.solve(v), torch.linalg.solve(dense, v))
    assert torch.allclose(parts.solve_transposed(v), torch.linalg.solve(dense.mT, v))


def test_references_pay_where_samples_are_near_them():
    A = matrix("random", 100, 0.9, torch.float64)
    few = (torch.rand(400, 100, generator=torch.Generator().manual_seed(0)) < 0.03).double()
    base = (inputs(1, 100, torch.float64) > 0).double()
    near_base = (base - few).abs()
    references, nearest = choose_references(A, near_base)
    assert len(references) == 2 and (nearest == 1).all() and torch.equal(references[1].slope, base[0])
    references, nearest = choose_references(A, 1 - few)
    assert torch.equal(references[1].slope, torch.ones(100).double()) and (nearest == 1).all()
    assert len(choose_references(A, few)[0]) == 1  # the free reference is the nearest
    halves = torch.cat([base.expand(200, 100), 1 - base.expand(200, 100)])
    references, nearest = choose_references(A, halves)
    assert len(references) == 3 and nearest[0] != nearest[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"A": torch.zeros(2, 3)}, r"A \(n, n\)"),
        ({"v": torch.zeros(1, 2).double()}, "float32 and torch.float64"),
        ({"activation": get_activation("softmax")}, "acts on blocks"),
        ({"stop": Steps(3)}, "counts steps"),
    ],
)
def test_what_it_cannot_do_is_said(change, message):
    arguments = {"A": torch.zeros(2, 2), "v": torch.zeros(1, 2), "activation": ACTIVATIONS["relu"]} | change
    with pytest.raises(InputError, match=message):
        solve_active_set(**arguments)
