"""Functions of the form phi(Ax + v), however they are written, against the plain loop and a dense solve."""

import copy
import gc
import math
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from wellposed.activations import get_activation
from wellposed.equilibrium import (
    Absolute,
    Anderson,
    Broyden,
    Implicit,
    Picard,
    Relative,
    Status,
    Steps,
    fixed_point,
)
from wellposed.equilibrium.compiled import CompiledLoop
from wellposed.equilibrium.loop import iterate
from wellposed.equilibrium.maps import max_norm
from wellposed.equilibrium.method import SolveHooks
from wellposed.equilibrium.stopping import Step
from wellposed.errors import ConvergenceError, ConvergenceWarning, SecondDerivativeError
from wellposed.kernels import recognise
from wellposed.kernels.engine import NUMBA

pytest.importorskip("numba")
BACKEND = "none"  # which torch.compile has not: the plain loop answers where kernels do not
GENERATOR = torch.Generator().manual_seed(0)
A = 0.4 * torch.randn(6, 6, generator=GENERATOR, dtype=torch.float64) / 6**0.5
V = torch.randn(5, 6, generator=GENERATOR, dtype=torch.float64)
BIAS = torch.randn(6, generator=GENERATOR, dtype=torch.float64)

FORMS = {
    "linear": lambda W, x, v: torch.tanh(F.linear(x, W, BIAS) + v),
    "product": lambda W, x, v: torch.relu(v + x @ W.mT),
    "matmul": lambda W, x, v: torch.matmul(x, W.mT).add(v).sigmoid(),
    "addmm": lambda W, x, v: F.relu(torch.addmm(v, x, W.mT)),
    "method": lambda W, x, v: v.addmm(x, W.mT).relu(),
    "residual": lambda W, x, v: torch.tanh(0.3 * x - x.mm(W.t()) + v),
    "two products": lambda W, x, v: torch.tanh(F.linear(x, W) + x @ W / 3 + v),
    "subtracted": lambda W, x, v: (1 - (v - -F.linear(x, W))).relu(),
    "difference": lambda W, x, v: torch.tanh(F.linear(x, W) - v),
    "no activation": lambda W, x, v: F.linear(x, W) + v,
    "metadata": lambda W, x, v: torch.tanh(F.linear(x, W) + v.reshape(x.shape).to(x.dtype)[: len(x)]),
    "module": lambda W, x, v: nn.ReLU()(F.linear(x, W) + v),
}


def solved(f, loop, dtype=torch.float64, **options):
    """The solution of an equation with gradients by A and v, and those."""
    W, v = (tensor.to(dtype).requires_grad_() for tensor in (A.clone(), V.clone()))
    solution = fixed_point(
        lambda x, v: f(W, x, v), torch.zeros_like(v), v, **({"loop": loop} if loop else {}), **options
    )
    (solution.value * torch.linspace(-1, 1, 6, dtype=dtype)).sum().backward()
    return solution, W.grad, v.grad


@pytest.mark.parametrize("solver", [Picard(), Anderson()])
@pytest.mark.parametrize("form", FORMS)
def test_recognised(form, solver):
    loop = CompiledLoop(BACKEND)
    options = {"solver": solver, "stop": Absolute(1e-11), "max_steps": 500}
    found, plain = solved(FORMS[form], loop, **options), solved(FORMS[form], None, **options)
    assert loop.explain().count("(Ax + v) by numba") == 2
    assert found[0].status.tolist() == plain[0].status.tolist() == [Status.CONVERGED] * 5
    assert found[0].steps.tolist() == plain[0].steps.tolist()
    for mine, other in zip((found[0].value, *found[1:]), (plain[0].value, *plain[1:]), strict=True):
        assert torch.allclose(mine, other, rtol=1e-9, atol=1e-10)
    assert torch.allclose(found[0].residuals, plain[0].residuals, rtol=1e-6, atol=1e-12, equal_nan=True)
    assert found[0].adjoint.converged.all()


def test_gradients_are_those_of_a_dense_solve():
    solution, by_A, by_v = solved(FORMS["linear"], CompiledLoop(BACKEND), stop=Relative(1e-13))
    x, g = solution.value.detach(), torch.linspace(-1, 1, 6, dtype=torch.float64).expand(5, 6)
    slope = 1 - torch.tanh(x @ A.mT + BIAS + V) ** 2
    systems = torch.eye(6, dtype=torch.float64) - A.mT * slope[:, None]  # w = A' d w + g
    y = slope * torch.linalg.solve(systems, g)
    assert torch.allclose(by_v, y, atol=1e-11) and torch.allclose(by_A, y.mT @ x, atol=1e-11)


def branches(W, x, v):
    return torch.tanh(F.linear(x, W) + v) if float(x.detach().sum()) < 100 else v


def changes_in_place(W, x, v):
    z = F.linear(x, W)
    z += v
    return torch.tanh(z)


def rounded(W, x, v):
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, W)
    return torch.tanh(y.to(x.dtype) + v)


OTHERS = {
    "two layers": (lambda W, x, v: torch.tanh(F.linear(torch.tanh(F.linear(x, W)), W) + v), "a product of"),
    "a product twice": (lambda W, x, v: torch.tanh(F.linear(F.linear(x, W), W) + v), "a product of"),
    "after phi": (lambda W, x, v: 0.5 * torch.tanh(F.linear(x, W) + v), "after an activation"),
    "norm": (lambda W, x, v: torch.tanh(F.layer_norm(F.linear(x, W) + v, (6,))), "layer_norm"),
    "square": (lambda W, x, v: torch.tanh(0.1 * x * x + F.linear(x, W) + v), "mul"),
    "slices": (lambda W, x, v: torch.tanh(x.roll(1, 1) / 3 + v), "roll"),
    "by sample": (lambda W, x, v: torch.tanh(v[:, :1] * x / 3 + v), "mul"),
    "other activation": (lambda W, x, v: F.gelu(F.linear(x, W) + v), "gelu"),
    "options": (lambda W, x, v: torch.tanh(torch.add(v, F.linear(x, W), alpha=2)), "alpha"),
    "in place": (changes_in_place, "add_"),
    "values": (branches, "item|__float__|sum|detach"),
    "rounded": (rounded, "other numbers"),
    "nothing of x": (lambda W, x, v: torch.tanh(v @ W), "does not depend"),
    "stacked": (lambda W, x, v: torch.stack([x, v]).mean(0) * 0.5, "stack"),
    "transposed": (lambda W, x, v: torch.tanh((W @ x.mT).mT + v), "__get__|matmul|product"),
}


@pytest.mark.parametrize("form", OTHERS)
def test_other_functions_are_solved_as_ever(form):
    f, reason = OTHERS[form]
    loop = CompiledLoop(BACKEND)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fixed_point(lambda x, v: f(A, x, v), torch.zeros_like(V), V, loop=loop)
    plain = fixed_point(lambda x, v: f(A, x, v), torch.zeros_like(V), V)
    assert torch.equal(found.value, plain.value) and found.steps.tolist() == plain.steps.tolist()
    (known,) = loop.not_affine.values()
    assert any(word in known for word in reason.split("|")), known


def test_random_functions_are_not_recognised():
    loop, generator = CompiledLoop(BACKEND), torch.Generator().manual_seed(0)
    for draw in (lambda: torch.rand(5, 6), lambda: torch.rand(5, 6, generator=generator)):
        loop.not_affine.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fixed_point(lambda x: 0.1 * x + draw(), torch.zeros(5, 6), loop=loop, max_steps=3, on_failure="ignore")  # noqa: B023
        assert list(loop.not_affine.values()) == ["it draws random numbers"]


def test_what_a_function_adds_is_its_own():
    """A stand-in of ``Ax + v`` may be changed in place; v may not."""
    v = V.clone()
    f = lambda x, v: torch.addmm(v, x, A.mT).add_(x).add_(1).tanh()  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fixed_point(f, torch.zeros_like(v), v, loop=CompiledLoop(BACKEND))
    assert torch.equal(v, V)


def transposed_without_gradient(W, x, v):
    with torch.no_grad():
        M = W.mT
    return torch.tanh(x @ M + v + x @ W.t() / 3)


def test_matrices_are_followed_as_they_are_differentiated():
    answers = []
    for loop in (CompiledLoop(BACKEND), iterate):
        W = A.clone().requires_grad_()
        solution = third(lambda x, v: transposed_without_gradient(W, x, v), V, loop=loop, stop=Relative(1e-12))  # noqa: B023
        assert by_equation(solution) == (loop is not iterate)
        answers.append((solution.value, *torch.autograd.grad(solution.value.sum(), W)))
    for mine, plain in zip(*answers, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stop", [Absolute(0.1), Relative(0.1), Relative(0.01, atol=0.2)])
def test_points_are_accepted_as_by_the_rule(dtype, stop):
    spec = recognise._spec(get_activation("relu"), Picard(), stop, 100)
    x = torch.rand(7, 6, generator=GENERATOR, dtype=dtype)
    bad = (0.0, 0.05, 0.15, 3.0, torch.nan, torch.inf, -torch.inf)
    for change in bad:
        fx = x + 0.01
        fx[3, 2] += change
        step = Step(x, fx, None, max_norm(fx - x), 0)
        accepted, finite = step.residual <= 0.1, fx.isfinite().all()
        if isinstance(stop, Relative):
            accepted = step.residual <= (stop.rtol * max_norm(fx)).clamp_min(stop.atol or 0)
        assert NUMBA.accepts(spec, x, fx) == bool(accepted.all() & finite)


def test_the_norm_of_a_matrix_is_the_largest_row_sum():
    matrix = torch.randn(5, 9, generator=GENERATOR)
    norms = [NUMBA.norm(M) for M in (matrix, matrix.mT, torch.zeros(3, 2), torch.zeros(0, 4))]
    assert norms == pytest.approx(
        [torch.linalg.matrix_norm(M, torch.inf).item() for M in (matrix, matrix.mT)] + [0, 0]
    )
    for row in range(5):
        changed = matrix.clone()
        changed[row, 4] = torch.nan
        assert math.isnan(NUMBA.norm(changed))


class Counting:
    """Another map from its second call on."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, v):
        self.calls += 1
        return torch.tanh(F.linear(x, A) + (v if self.calls < 2 else 2 * v))


def without_gradient(x, v):
    with torch.no_grad():
        y = F.linear(x, A)
    return torch.tanh(y + x / 3 + v)


def changes_a_weight(x, v):
    W = A.clone()
    y = F.linear(x, W)
    W.mul_(2)
    return torch.tanh(y + v)


@torch.jit.script
def scripted(x):
    return torch.sin(x) / 4


HIDDEN = {
    "vmap": lambda x, v: torch.tanh(x / 3 + v + torch.vmap(torch.sin)(x) / 4),
    "script": lambda x, v: torch.tanh(x / 3 + v + scripted(x)),
    "a part without": without_gradient,
    "hook": lambda x, v: torch.tanh(hooked(F.linear(x, A)) + v),
}


def hooked(z):
    if z.requires_grad:
        z.register_hook(lambda g: g / 2)
    return z


@pytest.mark.parametrize("form", HIDDEN)
def test_what_torch_does_not_report_changes_no_answer(form):
    """Values or derivatives that the recorded operations do not tell are noticed at the solution."""
    results = []
    for options in ({"loop": CompiledLoop(BACKEND)}, {}):
        v = V.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solution = fixed_point(HIDDEN[form], torch.zeros_like(V), v, stop=Absolute(1e-11), **options)
            solution.value.sum().backward()
        results.append((solution, v.grad))
    (mine, by_mine), (plain, by_plain) = results
    assert torch.allclose(mine.value, plain.value, rtol=1e-9, atol=1e-10)
    assert torch.allclose(by_mine, by_plain, rtol=1e-8, atol=1e-9)
    assert mine.status.tolist() == plain.status.tolist()


@pytest.mark.parametrize("make", [Counting, lambda: changes_a_weight])
def test_a_function_that_changes_is_not_solved_as_it_was(make):
    solutions = []
    for options in ({"loop": CompiledLoop(BACKEND)}, {}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solutions.append(fixed_point(make(), torch.zeros_like(V), V, stop=Absolute(1e-11), **options))
    assert torch.allclose(solutions[0].value, solutions[1].value, rtol=1e-9, atol=1e-10)


def subclass(tensor):
    return tensor.as_subclass(type("Other", (torch.Tensor,), {}))


CALLS = {
    "vectors": (lambda x: x / 2 + 1, torch.zeros(3)),
    "images": (lambda x: x / 2 + 1, torch.zeros(3, 2, 2)),
    "two states": (lambda x: (x[0] / 2 + 1, x[0] / 3 + x[1] / 3), (torch.zeros(3, 2), torch.ones(3, 2))),
    "no samples": (lambda x: torch.tanh(F.linear(x, A) + 1), torch.zeros(0, 6).double()),
    "no states": (lambda x: x / 2, torch.zeros(3, 0)),
    "short numbers": (lambda x: torch.tanh(F.linear(x, A.bfloat16()) + 1), torch.zeros(3, 6).bfloat16()),
    "subclass": (lambda x: torch.tanh(F.linear(x, A) + 1), subclass(torch.zeros(3, 6).double())),
    "decay": (lambda x: x / 2, torch.ones(3, 2)),
    "decay of some": (lambda x: x / 2 + torch.tensor([[0.0], [1.0], [1.0]]), torch.ones(3, 2)),
    "a start": (lambda x: torch.tanh(F.linear(x, A) + 1), torch.ones(3, 6).double()),
    "NaN": (lambda x: torch.tanh(F.linear(x, A * torch.nan) + 1), torch.zeros(3, 6).double()),
    "infinity": (lambda x: torch.relu(F.linear(x, A) + torch.inf), torch.zeros(3, 6).double()),
    "not at zero": (lambda x: _checked(x) / 2 + 1, torch.ones(3, 2)),
    "keyword": (lambda x: torch.tanh(input=F.linear(x, weight=A) + 1), torch.zeros(3, 6).double()),
}


def _checked(x):
    if not bool(x.any()):
        raise ValueError
    return x


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("stop", [Relative(), Steps(7)])
def test_statuses_counts_and_values_of_unusual_calls(form, stop):
    f, start = CALLS[form]
    answers = []
    for options in ({"loop": CompiledLoop(BACKEND)}, {}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answers.append(fixed_point(f, start, stop=stop, on_failure="ignore", **options))
    mine, plain = answers
    assert mine.status.tolist() == plain.status.tolist() and mine.steps.tolist() == plain.steps.tolist()
    for one, other in zip(*(s.value if isinstance(start, tuple) else (s.value,) for s in answers), strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_the_function_is_recognised_again_after_a_call_with_autocast():
    loop, W, v = CompiledLoop(BACKEND), A.float(), V.float()
    f = lambda x, v: torch.tanh(F.linear(x, W) + v)  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fixed_point(f, torch.zeros_like(v), v, loop=loop)
    assert "by numba" not in loop.explain()
    fixed_point(f, torch.zeros_like(v), v, loop=loop)
    assert "by numba" in loop.explain()


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_counted_steps_give_the_gradient_of_so_many_steps(start):
    gradients = []
    for loop in (CompiledLoop(BACKEND), iterate):
        W, options = A.clone().requires_grad_(), {"solver": Picard(), "stop": Steps(2)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the backward solve from elsewhere is not compiled
            value = fixed_point(
                lambda x, v, W=W: torch.tanh(x @ W.mT + v), torch.full_like(V, start), V, loop=loop, **options
            ).value
            gradients += torch.autograd.grad(value.sum(), W)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def test_backward_solves_take_the_steps_of_the_plain_loop():
    """They are slow, small and singular in turn; none is factorised behind the back of its solver."""
    for factor, max_steps in ((0.97, 400), (0.97, 30), (1.0, 60)):
        options = {"solver": Picard(), "stop": Absolute(1e-6), "max_steps": max_steps, "on_failure": "ignore"}
        records = []
        for loop in (CompiledLoop(BACKEND), None):
            v = torch.full((3, 2), 1.0, dtype=torch.float64, requires_grad=True)
            f = lambda x, v: torch.tanh(factor * x + v - factor * torch.tanh(v).detach())  # noqa: B023, E731
            shift = lambda x, v: f(x, v) if factor < 1 else F.linear(x, torch.ones(2, 2).double() / 2) + v  # noqa: B023, E731
            solution = fixed_point(shift, torch.zeros_like(v), v, **({"loop": loop} if loop else {}), **options)
            solution.value.sum().backward()
            records.append(solution.adjoint)
        assert records[0].status.tolist() == records[1].status.tolist()
        assert (records[0].steps - records[1].steps).abs().max() <= 1


@pytest.mark.parametrize("solver", [Picard(), Anderson()])
@pytest.mark.parametrize("stop", [Relative(), Absolute(1e-6)])
def test_functions_without_an_equilibrium_have_the_statuses_of_the_plain_loop(solver, stop):
    """x + 1 runs off, along which its relative residual falls; relu(1.5 x + 1) grows; the last one converges."""
    for f in (lambda x, v: x + v, lambda x, v: torch.relu(1.5 * x + v), lambda x, v: torch.tanh(3 * x + v)):
        loop = CompiledLoop(BACKEND)
        options = {"solver": solver, "stop": stop, "on_failure": "ignore"}
        start, v = torch.zeros(3, 2).double(), torch.tensor([[1.0], [2.0], [-1.0]]).double().expand(3, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, plain = fixed_point(f, start, v, loop=loop, **options), fixed_point(f, start, v, **options)
        assert found.status.tolist() == plain.status.tolist()
        assert not bool((found.converged & (found.value.abs().amax(1) > 1e3)).any())


@pytest.mark.parametrize("grows", [False, True])
def test_the_image_is_taken_only_where_its_residual_is_no_larger(grows):
    """The norm of neither matrix proves a contraction; along the long column residuals grow for one step."""
    W = torch.tensor([[0.0, 20.0], [0.0, 0.5]] if grows else [[0.5, 0.6], [0.0, 0.5]], dtype=torch.float64)
    f = lambda x, v: F.linear(x, W) + v  # noqa: E731
    v = torch.tensor([[0.0, 0.1], [1.0, 0.2]], dtype=torch.float64)
    start = torch.tensor([[4.008, 0.2004], [9.008, 0.4004]], dtype=torch.float64) if grows else torch.zeros_like(v)
    loop, options = CompiledLoop(BACKEND), {"solver": Picard(), "stop": Absolute(1e-3)}
    found, plain = fixed_point(f, start, v, loop=loop, **options), fixed_point(f, start, v, **options)
    assert "by numba" in loop.explain() and found.steps.tolist() == plain.steps.tolist()
    wanted = plain.value if grows else f(f(plain.value, v), v)
    torch.testing.assert_close(found.value, wanted, rtol=1e-12, atol=1e-13)


def test_images_are_taken_until_their_residuals_grow():
    """Residuals turn from the last state to the second, half as long, and from there to the first, five times."""
    W = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 0.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
    f, start = lambda x, v: F.linear(x, W) + v, torch.ones(1, 3, dtype=torch.float64)
    v = start - F.linear(start, W) + torch.tensor([[0.0, 0.0, 9e-4]], dtype=torch.float64)
    loop, options = CompiledLoop(BACKEND), {"solver": Picard(), "stop": Absolute(1e-3)}
    found, plain = fixed_point(f, start, v, loop=loop, **options), fixed_point(f, start, v, **options)
    assert "by numba" in loop.explain() and found.steps.tolist() == plain.steps.tolist() == [1]
    torch.testing.assert_close(found.value, f(start, v), rtol=1e-12, atol=1e-13)


def test_residuals_are_those_of_the_solve_after_the_weights_have_changed():
    loop, W, start = CompiledLoop(BACKEND), A.clone(), torch.ones_like(V)
    f = lambda x, v: torch.tanh(F.linear(x, W) + v)  # noqa: E731
    wanted = fixed_point(f, start, V).residuals
    solution = fixed_point(f, start, V, loop=loop)
    W.zero_()
    start.zero_()
    assert "by numba" in loop.explain()
    assert torch.allclose(solution.residuals, wanted, rtol=1e-6, atol=1e-12, equal_nan=True)
    assert torch.allclose(fixed_point(f, start, V, loop=loop).value, torch.tanh(V))


def test_samples_do_not_depend_on_companions():
    loop = CompiledLoop(BACKEND)
    f = lambda x, v: torch.tanh(F.linear(x, A) + v)  # noqa: E731
    together = fixed_point(f, torch.zeros_like(V), V, loop=loop)
    for row in range(5):
        alone = fixed_point(f, torch.zeros_like(V[:1]), V[row : row + 1], loop=loop)
        assert torch.allclose(alone.value[0], together.value[row], rtol=1e-14, atol=1e-15)
        assert alone.steps[0] == together.steps[row]


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_does_not_stop_later_solves_from_being_compiled():
    loop = CompiledLoop(BACKEND)
    f = lambda x, v: torch.tanh(F.linear(x, A) + v)  # noqa: E731
    with Watching(), pytest.warns(UserWarning, match="dispatch mode"):
        fixed_point(f, torch.zeros_like(V), V, loop=loop)
    assert loop.explain().startswith("forward not compiled: inside a dispatch mode")
    fixed_point(f, torch.zeros_like(V), V, loop=loop)
    assert "by numba" in loop.explain()


def third(f, v, **options):
    """The third of three solves of one function: derivatives are compared in the first two."""
    loop = CompiledLoop(BACKEND)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [fixed_point(f, torch.zeros_like(v), v, **{"loop": loop} | options) for _ in range(3)][-1]


def by_equation(solution):
    return solution.value.grad_fn.name() == "_EquationGradientBackward"


@pytest.mark.parametrize("solver", [Picard(), Anderson()])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_the_equation_are_those_of_the_function(form, solver):
    options = {"stop": Relative(1e-12), "solver": solver}
    W, v = A.clone().requires_grad_(), V.clone().requires_grad_()
    solution = third(lambda x, v: FORMS[form](W, x, v), v, **options)
    assert by_equation(solution)
    (solution.value * torch.linspace(-1, 1, 6, dtype=torch.float64)).sum().backward()
    plain, by_W, by_v = solved(FORMS[form], None, **options)
    assert torch.allclose(solution.value, plain.value, rtol=1e-10, atol=1e-11)
    assert torch.allclose(W.grad, by_W, rtol=1e-9, atol=1e-10)
    assert torch.allclose(v.grad, by_v, rtol=1e-9, atol=1e-10)
    assert torch.allclose(solution.residuals, plain.residuals, rtol=1e-6, atol=1e-12, equal_nan=True)
    mine, other = solution.adjoint, plain.adjoint
    assert mine.converged.all() and torch.allclose(mine.value, other.value, rtol=1e-9, atol=1e-10)
    assert float(mine.residual.max()) <= 1e-11


@pytest.mark.parametrize("wanted", ["A", "v", "nothing"])
def test_only_what_is_needed_is_differentiated(wanted):
    W, v = A.clone().requires_grad_(wanted == "A"), V.clone().requires_grad_(wanted == "v")
    value = third(lambda x, v: torch.relu(F.linear(x, W) + v), v).value
    assert value.requires_grad == (wanted != "nothing")
    if value.requires_grad:
        value.sum().backward()
        assert (W.grad is None, v.grad is None) == (wanted != "A", wanted != "v")


def test_a_gradient_of_the_equation_is_that_of_the_weights_it_was_solved_with():
    W, v = A.clone().requires_grad_(), V.clone().requires_grad_()
    gradients = []
    for changes in (False, True):
        solution = third(lambda x, v: torch.tanh(F.linear(x, W) + v), v)
        assert by_equation(solution)
        if changes:
            with torch.no_grad():
                solution.value.mul_(3)  # the tensor of the user is theirs
        gradients.append(torch.autograd.grad(solution.value.sum(), (W, v)) if not changes else None)
        loss = solution.value.sum()
        gradients[-1] = torch.autograd.grad(loss, (W, v)) if changes else gradients[-1]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_solutions_hold_no_more_than_their_values():
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            value = third(lambda x, v: torch.tanh(F.linear(x, A) + v), V).value
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


def test_what_a_solve_has_used_is_freed_with_its_solution():
    inputs = V.clone().requires_grad_()
    solution = fixed_point(
        lambda x, v: torch.tanh(x @ A.mT + v), torch.zeros_like(V), inputs, loop=CompiledLoop(BACKEND)
    )
    solution.value.sum().backward()
    inside = weakref.ref(inputs)
    gc.disable()  # nothing may wait for the collector of cycles
    try:
        del solution, inputs
        assert inside() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("n", [3, 60])
@pytest.mark.parametrize("norm", [0.3, 0.99])
def test_backward_solves_of_contractions_neither_run_off_nor_decay(n, norm, monkeypatch):
    """The plain loop need not be asked about these: |g| / (1 + nL) <= |w| <= n |g| / (1 - L)."""
    generator = torch.Generator().manual_seed(n)
    A = torch.zeros(n, n, dtype=torch.float64)
    A[:, 0] = norm  # the largest column sums that the norm allows
    sizes = []
    monkeypatch.setattr(recognise, "_unusual", lambda *_: pytest.fail("asked"))
    for sign in (1, -1):
        v = torch.rand(4, n, generator=generator, dtype=torch.float64).requires_grad_()
        solution = fixed_point(
            lambda x, v, A=sign * A: x @ A.mT + v, torch.zeros_like(v), v, loop=CompiledLoop(BACKEND)
        )
        solution.value.sum().backward()
        exact = torch.linalg.solve(torch.eye(n) - sign * A.mT, torch.ones(n, dtype=torch.float64))
        torch.testing.assert_close(v.grad, exact.expand_as(v), rtol=1e-8, atol=1e-8)
        sizes.append(exact.abs().max())
    assert 1 / (1 + n * norm) <= min(sizes) and max(sizes) <= n / (1 - norm)


def test_the_record_of_a_backward_solve_can_be_copied():
    inputs = V.clone().requires_grad_()
    solution = fixed_point(
        lambda x, v: torch.tanh(x @ A.mT + v), torch.zeros_like(V), inputs, loop=CompiledLoop(BACKEND)
    )
    solution.value.sum().backward()
    record = copy.deepcopy(solution.adjoint_record)
    assert record.solution.steps.tolist() == solution.adjoint.steps.tolist()


def test_second_derivatives_are_refused():
    v = V.clone().requires_grad_()
    solution = third(lambda x, v: torch.tanh(F.linear(x, A) + v), v)
    (first,) = torch.autograd.grad(solution.value.square().sum(), v, create_graph=True)
    with pytest.raises(SecondDerivativeError):
        first.sum().backward()


@pytest.mark.parametrize("case", ["wide", "starts", "hooks", "other solver backward"])
def test_the_function_itself_is_differentiated_elsewhere(case):
    """Where the call is not small, not from zero, or has its own way backward."""
    rows = 120_000 if case == "wide" else 5
    v = V.repeat(rows // 5, 1).requires_grad_()
    start = torch.ones_like(v) if case == "starts" else torch.zeros_like(v)
    options = {"stop": Absolute(1e-9), "hooks": SolveHooks() if case == "hooks" else None}
    options["gradient"] = Implicit(solver=Broyden()) if case == "other solver backward" else None
    loop = CompiledLoop(BACKEND)
    values = []
    for again in (loop, loop, loop, iterate):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solution = fixed_point(lambda x, v: torch.tanh(F.linear(x, A) + v), start, v, loop=again, **options)
        assert not by_equation(solution)
        values.append(torch.autograd.grad(solution.value.square().sum(), v)[0])
    assert torch.allclose(values[2], values[3], rtol=1e-6, atol=1e-7)


class Frozen:
    """Differentiates a part only when told so."""

    whole = True

    def __call__(self, x, v):
        with torch.set_grad_enabled(self.whole and torch.is_grad_enabled()):
            y = F.linear(x, A)
        return torch.tanh(y + x / 3 + v)


def test_a_part_that_is_no_longer_differentiated_is_noticed():
    f, v, loop = Frozen(), V.clone().requires_grad_(), CompiledLoop(BACKEND)
    assert by_equation(third(f, v, loop=loop))
    f.whole = False
    options = {"stop": Absolute(1e-11)}
    mine, plain = third(f, v, loop=loop, **options), third(f, v, loop=iterate, **options)
    assert not by_equation(mine)
    gradients = [torch.autograd.grad(solution.value.sum(), v)[0] for solution in (mine, plain)]
    assert torch.allclose(*gradients, rtol=1e-8, atol=1e-9)


@torch.jit.script
def vanishing(x):
    """Zero, with a derivative that is not."""
    return (x - x.detach()) / 3


class Changing:
    """Gets a derivative that torch does not report."""

    hidden = False

    def __call__(self, x, v):
        y = F.linear(x, A) + v
        return torch.tanh(y + vanishing(x) if self.hidden else y)


def test_derivatives_are_compared_ever_more_rarely_but_again_and_again():
    f, v, loop = Changing(), V.clone().requires_grad_(), CompiledLoop(BACKEND)
    solved_by = []
    for solve in range(1, 20):
        f.hidden = solve > 12
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solution = fixed_point(f, torch.zeros_like(v), v, loop=loop, stop=Absolute(1e-11))
            solved_by.append(by_equation(solution))
            (gradient,) = torch.autograd.grad(solution.value.sum(), v)
    assert solved_by == 15 * [True] + 4 * [False]
    solution = fixed_point(f, torch.zeros_like(v), v, stop=Absolute(1e-11))
    (plain,) = torch.autograd.grad(solution.value.sum(), v)
    assert torch.allclose(gradient, plain, rtol=1e-8, atol=1e-9)


def test_checkpointed_solves_save_the_same_every_time():
    v, loop = V.clone().requires_grad_(), CompiledLoop(BACKEND)
    f = lambda x, v: torch.tanh(F.linear(x, A) + v)  # noqa: E731
    solve = lambda v: fixed_point(f, torch.zeros_like(v), v, loop=loop, stop=Absolute(1e-11)).value  # noqa: E731
    (wanted,) = torch.autograd.grad(fixed_point(f, torch.zeros_like(v), v, stop=Absolute(1e-11)).value.sum(), v)
    for _ in range(4):
        value = checkpoint(solve, v, use_reentrant=False)
        assert torch.allclose(torch.autograd.grad(value.sum(), v)[0], wanted, rtol=1e-9, atol=1e-10)
    assert "by numba" in loop.explain()


@pytest.mark.parametrize("on_failure", ["warn", "raise"])
def test_a_backward_solve_of_the_equation_that_fails_says_so(on_failure):
    v = V.clone().requires_grad_()
    options = {"gradient": Implicit(max_steps=2), "stop": Absolute(1e-12), "on_failure": on_failure}
    solution = third(
        lambda x, v: torch.relu(F.linear(x, 2 * A.abs() / A.abs().sum(1).max() * 0.45) + v), v, **options
    )
    assert by_equation(solution) and solution.converged.all()
    failure = pytest.raises(ConvergenceError) if on_failure == "raise" else pytest.warns(ConvergenceWarning)
    with failure:
        solution.value.sum().backward()
    assert solution.adjoint.failed.any() and solution.adjoint.steps.max() == 2
    assert on_failure == "raise" or v.grad.isfinite().all()


@pytest.mark.parametrize("growth", [2e3, 2e5])
def test_a_backward_solve_that_runs_off_is_judged_by_the_plain_loop(growth, monkeypatch):
    """Backward one of two states is nearly singular; forward it begins near zero and stays there."""
    calls, by_loop = [], recognise._adjoint_by_loop
    monkeypatch.setattr(recognise, "_adjoint_by_loop", lambda *given: calls.append(1) or by_loop(*given))
    W = torch.tensor([[1 - 1 / growth, 0.0], [0.0, 0.5]], dtype=torch.float64)
    v = torch.tensor([[0.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
    results = []
    for loop in (CompiledLoop(BACKEND), iterate):
        options = {"loop": loop, "stop": Relative(1e-6), "on_failure": "ignore"}
        inputs = v.clone().requires_grad_()
        solution = third(lambda x, v: F.linear(x, W) + v, inputs, **options)
        assert by_equation(solution) == (loop is not iterate)
        solution.value.sum().backward()
        results.append((solution.adjoint, inputs.grad))
    (mine, by_mine), (plain, by_plain) = results
    assert mine.status.tolist() == plain.status.tolist() and mine.steps.tolist() == plain.steps.tolist()
    assert len(calls) == (growth > 1e4)
    assert torch.allclose(by_mine, by_plain, rtol=1e-5)


def test_an_equation_that_the_plain_loop_may_judge_otherwise_is_not_differentiated_in_its_place():
    W = torch.diag(torch.tensor([1 - 1 / 2e5, 0.5], dtype=torch.float64))
    v = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    options = {"stop": Relative(1e-6), "on_failure": "ignore"}
    answers = []
    for loop in (CompiledLoop(BACKEND), iterate):
        solution = third(lambda x, v: F.linear(x, W) + v, v, loop=loop, **options)
        assert not by_equation(solution)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            answers.append((solution.steps.tolist(), torch.autograd.grad(solution.value.sum(), v)[0]))
    assert answers[0][0] == answers[1][0] and torch.equal(answers[0][1], answers[1][1])
