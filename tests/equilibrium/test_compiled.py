"""The loop under torch.compile against the plain loop; the backend "eager" traces, and generates no code."""

import copy
import warnings

import pytest
import torch
from torch import nn

import wellposed.equilibrium.compiled as compiled
from wellposed import DEQ
from wellposed.equilibrium import (
    Absolute,
    Anderson,
    Broyden,
    Contraction,
    ErrorBound,
    MeanRelative,
    Picard,
    Relative,
    Status,
    Steps,
    Unrolled,
    fixed_point,
)
from wellposed.equilibrium.compiled import CompiledLoop
from wellposed.errors import ConvergenceWarning, MapError

RATES = torch.tensor([0.1, 0.5, 0.9, 0.97])  # samples that converge at very different speeds


# Tracing a cycle of steps takes seconds, so most tests of it are slow ones.
@pytest.fixture(params=[pytest.param("cycle", marks=pytest.mark.slow), "single"])
def loop(request, monkeypatch):
    """A loop whose programs take a cycle of steps, and one whose programs evaluate once."""
    monkeypatch.setattr(compiled, "CHEAP", 0.0 if request.param == "single" else torch.inf)
    return CompiledLoop("eager", recognises=False)


def matrix(dtype=torch.float32):
    W = torch.rand(6, 6, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return W / W.sum(1, keepdim=True)


def mixed(x, u, rate):
    """Mixes states without a matrix product, which would round differently when the plain loop drops rows."""
    return torch.tanh(rate * (0.6 * x + 0.4 * x.roll(1, 1)) + u)


def both(loop, f, x0, *inputs, **options):
    """The solutions of the compiled and of the plain loop."""
    return [fixed_point(f, x0, *inputs, **options, **given) for given in ({"loop": loop}, {})]


def assert_same(found, wanted, apart=1e-6):
    assert found.status.tolist() == wanted.status.tolist()
    assert found.steps.tolist() == wanted.steps.tolist()
    assert torch.allclose(found.value, wanted.value, rtol=apart, atol=apart, equal_nan=True)
    assert torch.allclose(found.residuals, wanted.residuals, rtol=1e-3, atol=apart, equal_nan=True)


@pytest.mark.parametrize("solver", [Picard(), Picard(0.7), Anderson(), Anderson(memory=2), Broyden()])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_values_counts_and_residuals_are_those_of_the_plain_loop(loop, solver, dtype):
    u = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=dtype)
    rate = RATES.to(dtype)[:, None]
    options = {"solver": solver, "stop": Relative(1e-4), "max_steps": 400}
    found, wanted = both(loop, mixed, torch.zeros(4, 6, dtype=dtype), u, rate, **options)
    assert_same(found, wanted)
    assert len(set(found.steps.tolist())) > 2 and found.converged.all()
    assert loop.explain().startswith("forward compiled")


@pytest.mark.parametrize("stop", [Absolute(1e-3), Relative(1e-3, norm="2"), Steps(5), Steps(0), Steps(16)])
def test_stopping_rules(loop, stop):
    u, rate = torch.linspace(-1, 1, 24).reshape(4, 6), RATES[:, None]
    found, wanted = both(loop, mixed, torch.zeros(4, 6), u, rate, solver="anderson", stop=stop, max_steps=300)
    assert_same(found, wanted)
    assert loop.explain().startswith("forward compiled")


def test_known_contraction_stops_by_its_error_bound(loop):
    f = Contraction(lambda x, u: 0.5 * x + u, 0.5)
    found, wanted = both(loop, f, torch.zeros(3, 2), torch.ones(3, 2), solver="picard", stop=ErrorBound(1e-3))
    assert_same(found, wanted)
    assert (found.error_bound <= 1e-3).all() and loop.explain().startswith("forward compiled")


@pytest.mark.parametrize("max_steps", [pytest.param(1, marks=pytest.mark.slow), 8, 40])
def test_max_steps_and_divergence(loop, max_steps):
    """One sample converges, one needs more steps, one grows, one becomes NaN, one has no equilibrium."""

    def f(x, rate, shift):
        return torch.where(rate > 9, torch.sqrt(x - 2), rate * x + shift)

    rate, shift = torch.tensor([[0.1], [0.999], [3.0], [10.0], [1.0]]), torch.ones(5, 1)
    for solver in ("picard", "anderson"):
        options = {"solver": solver, "max_steps": max_steps, "on_failure": "ignore"}
        found, wanted = both(loop, f, torch.full((5, 1), 2.5), rate, shift, **options)
        assert_same(found, wanted)
        assert found.status[3] == (Status.NONFINITE if max_steps > 1 else Status.MAX_STEPS)
    with pytest.warns(ConvergenceWarning, match="5 of 5|4 of 5"):
        fixed_point(f, torch.full((5, 1), 2.5), rate, shift, solver="picard", max_steps=max_steps, loop=loop)


def test_stagnation_is_left_to_the_plain_loop(loop):
    def f(x, u):  # goes to and fro between u and the number after it, where u is odd
        return u + 1.5e-7 * ((x == u) & (u % 2 == 1))

    u = torch.tensor([[1.0], [2.0]])
    found, wanted = both(loop, f, torch.zeros(2, 1), u, solver="picard", stop=Absolute(1e-9), max_steps=100)
    assert_same(found, wanted)
    assert (
        found.status.tolist() == [Status.STAGNATED, Status.CONVERGED] and "then the plain loop" in loop.explain()
    )


def test_chunks_of_steps_forward_and_backward(monkeypatch):
    monkeypatch.setattr(compiled, "CHEAP", torch.inf)
    monkeypatch.setattr(compiled, "PERIOD", 4)
    loop, u, rate = CompiledLoop("eager"), torch.linspace(-1, 1, 24).reshape(4, 6), RATES[:, None]
    u.requires_grad_()
    found, wanted = both(loop, mixed, torch.zeros(4, 6), u, rate, solver=Anderson(memory=2), max_steps=400)
    assert_same(found, wanted)
    gradients = [torch.autograd.grad(solution.value.sum(), u)[0] for solution in (found, wanted)]
    assert torch.allclose(*gradients, rtol=1e-3)
    assert found.adjoint.steps.tolist() == wanted.adjoint.steps.tolist()
    assert loop.explain().count(" compiled: ") == 2 and loop.explain().count("by 4") == 2


@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
def test_gradients_are_those_of_the_implicit_function_theorem(loop, solver):
    generator = torch.Generator().manual_seed(2)
    W = (0.9 * matrix(torch.float64)).requires_grad_()
    u = torch.randn(5, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    f = lambda x, u: torch.tanh(x @ W.mT + u)  # noqa: E731
    solution = fixed_point(f, torch.zeros_like(u), u, solver=solver, stop=Relative(1e-12), loop=loop)
    found = torch.autograd.grad((solution.value * weights).sum(), (W, u))
    x = solution.value.detach()
    slope = 1 - x**2
    systems = torch.eye(6, dtype=torch.float64) - slope[:, None] * W.detach().mT  # (B, n, n), transposed
    w = torch.linalg.solve(systems, weights) * slope
    assert torch.allclose(found[1], w, atol=1e-10)
    assert torch.allclose(found[0], w.mT @ x, atol=1e-10)
    assert "backward compiled" in loop.explain() and solution.adjoint.converged.all()


def test_states_of_several_parts(loop):
    def f(x, v):
        a, b = x
        return torch.tanh(0.4 * a + v), 0.4 * torch.sin(b) + a.mean((1, 2))

    start = torch.zeros(3, 2, 3), torch.zeros(3)
    found, wanted = both(loop, f, start, torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(0)))
    for one, other in zip(found.value, wanted.value, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert found.steps.tolist() == wanted.steps.tolist()


@pytest.mark.slow
def test_other_batches_share_a_program():
    loop = CompiledLoop("eager")
    for batch in (4, 3, 7, 5, 9, 2, 11, 6, 8, 10, 12):
        u = torch.linspace(-1, 1, 6 * batch).reshape(batch, 6)
        found, wanted = both(loop, mixed, torch.zeros(batch, 6), u, torch.full((batch, 1), 0.5), solver="picard")
        assert_same(found, wanted)
        assert loop.explain().startswith("forward compiled"), loop.explain()
    assert len(loop.programs) == 1


@pytest.mark.parametrize("solver", ["picard", "anderson"])
def test_smaller_batches_run_in_the_program_of_the_first(loop, solver):
    compiled_graphs = []

    def backend(graph, _):
        compiled_graphs.append(graph)
        return graph.forward

    loop.backend = backend
    options = {"solver": solver, "stop": Relative(1e-4), "max_steps": 400}
    counts = []
    for batch in (8, 3, 7):
        u, rate = torch.linspace(-1, 1, 6 * batch).reshape(batch, 6), torch.linspace(0.1, 0.97, batch)[:, None]
        assert_same(*both(loop, mixed, torch.zeros(batch, 6), u, rate, **options))
        counts.append(len(compiled_graphs))
    assert counts[0] == counts[2] and loop.explain().startswith("forward compiled")
    for batch in (8, 3):
        u = torch.linspace(-1, 1, 6 * batch).reshape(batch, 6).requires_grad_()
        rate = torch.linspace(0.1, 0.97, batch)[:, None]
        solutions = both(loop, mixed, torch.zeros(batch, 6), u, rate, **options)
        gradients = [torch.autograd.grad(solution.value.sum(), u)[0] for solution in solutions]
        assert torch.allclose(*gradients, rtol=1e-3, atol=1e-6)
    assert loop.explain().count(" compiled: ") == 2


@pytest.mark.parametrize("cheap", [0.0, pytest.param(torch.inf, marks=pytest.mark.slow)])
def test_torch_checks_a_program_once_a_solve(monkeypatch, cheap):
    monkeypatch.setattr(compiled, "CHEAP", cheap)
    loop, rate, scale, calls = CompiledLoop("eager"), RATES[:, None], torch.tensor(0.5), []
    f = lambda x, u, rate: mixed(x, u, rate) * scale  # noqa: E731
    options = {"solver": Anderson(memory=2), "stop": Relative(1e-4), "max_steps": 400}
    for solve in range(3):
        u = torch.linspace(-1, 1, 24).reshape(4, 6).requires_grad_()
        solutions = both(loop, f, torch.zeros(4, 6), u, rate, **options)
        assert_same(*solutions)
        gradients = [torch.autograd.grad(solution.value.sum(), u)[0] for solution in solutions]
        assert torch.allclose(*gradients, rtol=1e-3, atol=1e-6)
        if solve == 0:
            for program in loop.programs.values():
                program.compiled = lambda *given, run=program.compiled: calls.append(1) or run(*given)
        else:
            assert len(calls) == 2 * solve and "steps by" in loop.explain()  # forward and backward
        scale = torch.tensor(0.9)  # is seen at the next solve


def test_a_call_is_repeated_with_new_tensors_of_the_same_layout_only():
    x, y, kept = torch.ones(2, 3), torch.full((2, 3), 2.0), torch.zeros(1)
    run = lambda a, b, c: (a + c, a * b)  # noqa: E731
    outputs = run(x, kept, y)
    repeated = compiled._Repeated((run, (x, kept, y), outputs), [x, y], [y, outputs[1], outputs[0]])
    new = [torch.full((2, 3), 5.0), torch.full((2, 3), 7.0)]
    unchanged, product, total = repeated(new)
    assert unchanged is new[1] and product.eq(0).all() and total.eq(12).all()
    assert repeated([new[0], torch.ones(3, 2).mT]) is None
    elsewhere = compiled._Repeated((run, (x, kept, y), outputs), [x, y], [outputs[0].clone()])
    assert elsewhere(new) is None


def test_a_start_that_is_a_view_makes_no_program_of_its_own(monkeypatch):
    monkeypatch.setattr(compiled, "CHEAP", 0.0)
    torch.compiler.reset()  # which remembers the sizes of earlier tests
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    loop = CompiledLoop(backend)
    for batch in (4, 9, 9):  # the second batch makes a program for all sizes
        u, rate = torch.linspace(-1, 1, 6 * batch).reshape(batch, 6), torch.full((batch, 1), 0.5)
        for start in (torch.zeros(batch, 6), torch.zeros(2 * batch, 6)[:batch]):
            fixed_point(mixed, start, u, rate, solver="picard", loop=loop)
    assert len(graphs) == 2


def test_stagnation_in_a_batch_that_was_filled_up(loop):
    def f(x, u):  # goes to and fro between u and the number after it, where u is odd
        return u + 1.5e-7 * ((x == u) & (u % 2 == 1))

    options = {"solver": "picard", "stop": Absolute(1e-9), "max_steps": 100}
    both(loop, f, torch.zeros(4, 1), 2 * torch.ones(4, 1), **options)
    found, wanted = both(loop, f, torch.zeros(2, 1), torch.tensor([[1.0], [2.0]]), **options)
    assert_same(found, wanted)
    assert found.status.tolist() == [Status.STAGNATED, Status.CONVERGED]
    assert "then the plain loop" in loop.explain()


def test_no_program_computes_the_derivative_of_a_map_that_draws():
    loop, u = CompiledLoop("eager"), torch.ones(2, 1, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solution = fixed_point(
            lambda x, u: 0.1 * x * torch.rand_like(x) + u, torch.zeros(2, 1), u, stop=Steps(3), loop=loop
        )
        solution.value.sum().backward()
    assert loop.explain().count("not compiled: the map draws random numbers") == 2


def test_what_cannot_be_compiled_runs_in_the_plain_loop_and_says_so_once():
    loop, calls = CompiledLoop("eager"), []

    def f(x, u):
        calls.append(1)
        return 0.5 * x + u if float(x.detach().sum()) < 100 else u

    with pytest.warns(UserWarning, match="compile=True: the forward solve is not compiled: ") as caught:
        solution = fixed_point(f, torch.zeros(2, 1), torch.ones(2, 1), loop=loop)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert torch.allclose(solution.value, torch.full((2, 1), 2.0), atol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fixed_point(f, torch.zeros(2, 1), torch.ones(2, 1), loop=loop)
    assert loop.explain().startswith("forward not compiled: ")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stop": MeanRelative()}, "MeanRelative"),
        ({"gradient": Unrolled()}, "differentiated"),
    ],
)
def test_reasons(options, reason):
    loop, u = CompiledLoop("eager"), torch.ones(2, 1, requires_grad=True)
    with pytest.warns(UserWarning, match=reason):
        fixed_point(lambda x, u: 0.5 * x + u, torch.zeros(2, 1), u, loop=loop, **options)


def test_random_maps_are_not_compiled():
    with pytest.warns(UserWarning, match="random numbers"):
        fixed_point(
            lambda x: 0.1 * x + torch.rand_like(x), torch.zeros(2, 1), stop=Steps(3), loop=CompiledLoop("eager")
        )


def test_mistakes_of_the_map_are_told_as_ever():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MapError, match="must return the shape of its state"):
            fixed_point(lambda x: x[:, :1], torch.zeros(2, 3), loop=CompiledLoop("eager"))
        with pytest.raises(MapError, match="dtype"):
            fixed_point(lambda x: x.double(), torch.zeros(2, 3), loop=CompiledLoop("eager"))


def test_no_compiler(monkeypatch):
    def backend(*_):
        raise RuntimeError("no working C++ compiler")

    loop = CompiledLoop("eager")
    loop.backend = backend
    with pytest.warns(UserWarning, match="no working C\\+\\+ compiler"):
        solution = fixed_point(torch.cos, torch.zeros(2, 1), loop=loop)
    assert solution.converged.all()


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.state, self.input = nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, x, u):
        return torch.tanh(0.5 * self.state(x) + self.input(u))


@pytest.mark.parametrize("recognises", [True, False])
def test_deq(monkeypatch, recognises):
    torch.manual_seed(0)
    monkeypatch.setattr(compiled, "CHEAP", 0.0)
    model = DEQ(Cell(), state_shape=4, compile=True).double()  # where answers agree to more digits
    model._compiled.backend, model._compiled.recognises = "eager", recognises
    plain, u = copy.deepcopy(model), torch.randn(5, 3).double()
    plain.compile_loop = False
    assert model.explain(u) == "compiled at the first solve"
    for step in range(3):  # the weights change between solves, and so does the mode
        outputs = []
        for one in (model, plain):
            one.train(step < 2).zero_grad()
            outputs.append(one(u))
            outputs[-1].square().sum().backward()
        assert torch.allclose(*outputs, atol=1e-6)
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine.grad, other.grad, atol=1e-5)
            with torch.no_grad():
                mine.mul_(0.9)
                other.mul_(0.9)
    assert model.explain(u).startswith("forward compiled: ") and "\nbackward compiled: " in model.explain(u)
    assert ("as x = tanh(Ax + v) by numba" in model.explain(u)) == recognises


def test_deq_whose_cell_cannot_be_compiled():
    cell = Cell()
    nn.utils.parametrizations.weight_norm(cell.state)
    model, u = DEQ(cell, state_shape=4, compile=True), torch.randn(5, 3)
    with pytest.warns(UserWarning, match="parametrisation"):
        model(u)
    assert "not compiled: weights under a parametrisation" in model.explain(u)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["picard", "anderson"])
def test_generated_code(solver):
    u, rate = torch.linspace(-1, 1, 24).reshape(4, 6), RATES[:, None]
    W = matrix().requires_grad_()
    f = lambda x, u, rate: torch.tanh(rate * x @ W.mT + u)  # noqa: E731
    gradients = []
    for given in ({"compile": True}, {}):
        solution = fixed_point(f, torch.zeros(4, 6), u, rate, solver=solver, max_steps=400, **given)
        assert solution.converged.all()
        gradients.append(torch.autograd.grad(solution.value.sum(), W)[0])
    assert torch.allclose(*gradients, rtol=1e-3)
    assert "backward compiled" in compiled.loop_of(f).explain()


@pytest.mark.slow
def test_derivatives_that_cannot_be_compiled_are_those_of_autograd(monkeypatch):
    monkeypatch.setattr(compiled, "CHEAP", torch.inf)
    traced = compiled.Chunk._map

    def without_derivative(chunk, function, inputs, point):
        if point:
            raise RuntimeError("no derivative")
        return traced(chunk, function, inputs, point)

    monkeypatch.setattr(compiled.Chunk, "_map", without_derivative)
    loop, u = CompiledLoop("eager", recognises=False), torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
    found, wanted = both(loop, mixed, torch.zeros(2, 6), u, torch.full((2, 1), 0.5), solver="picard")
    gradients = [torch.autograd.grad(solution.value.sum(), u)[0] for solution in (found, wanted)]
    assert "forward compiled" in loop.explain() and "backward compiled" in loop.explain()
    assert torch.allclose(*gradients, rtol=1e-5) and "by 1" in loop.explain().splitlines()[1]


@pytest.mark.slow
def test_a_program_does_not_become_one_for_all_sizes_since_others_have_other_sizes(monkeypatch):
    monkeypatch.setattr(compiled, "CHEAP", torch.inf)
    sizes, fallback = [], compiled._Recorder.__call__

    def noted(recorder, graph, inputs):
        sizes.append(sum(isinstance(one, torch.SymInt) for one in inputs))
        return fallback(recorder, graph, inputs)

    monkeypatch.setattr(compiled._Recorder, "__call__", noted)
    loop = CompiledLoop("eager", recognises=False)
    for n in (3, 5, 6):
        fixed_point(lambda x: torch.cos(x) / 2, torch.zeros(4, n), solver="picard", loop=loop)
    assert sizes == [0, 0, 0]
