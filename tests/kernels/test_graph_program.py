"""The loop in chunks of masked steps against the reference loop; what a CUDA graph will hold, run on the CPU."""

import copy
import pickle

import pytest
import torch
from deq_cells import Cell, Pair
from torch import nn

from wellposed import DEQ
from wellposed.equilibrium import (
    SOLVERS,
    Absolute,
    Anderson,
    Contraction,
    ErrorBound,
    MeanRelative,
    Picard,
    RandomSteps,
    Relative,
    Status,
    Steps,
)
from wellposed.equilibrium.gradients import LinearMap, vector_jacobian
from wellposed.equilibrium.linear import eliminate
from wellposed.equilibrium.loop import iterate
from wellposed.equilibrium.maps import FunctionMap, Packing
from wellposed.equilibrium.stopping import Settled
from wellposed.errors import InputError
from wellposed.kernels.graphs import GraphLoop, Program, rebuild, solve_inputs
from wellposed.models import VariationalDropout, spectral_norm
from wellposed.models.deq import CellFunction, weights_computed_once

RULES = [
    Relative(),
    Relative(1e-4, norm="2"),
    Absolute(1e-7),
    MeanRelative(1e-5, 3),
    Steps(0),
    Steps(13),
    Settled(9),
    RandomSteps(2, 20),
]


def run_program(program):
    """Runs a program without a capture and reads its record after every chunk."""
    least, most, worst = 0, 0, 0
    while least == 0:
        program.advance()
        least, most, worst = program.record.tolist()
    return program.result(most, worst)


def in_chunks(f, x, solver, stop, max_steps, chunk=4):
    return run_program(Program(f, x, stop.begin(x), solver, stop, max_steps, chunk))


def mixed_map(dtype=torch.float64, n=6):
    """Rows that converge at many rates, one that diverges, one that turns NaN and one that is at rest."""
    generator = torch.Generator().manual_seed(3)
    rates = torch.tensor([0.0, 0.1, 0.5, 0.9, 0.97, 1.5, -0.9, 0.7], dtype=dtype)[:, None]
    offset = torch.randn(8, n, dtype=dtype, generator=generator)
    mixing = torch.linalg.qr(torch.randn(n, n, dtype=dtype, generator=generator))[0]

    def f(x, rates, offset, poison):
        y = rates * (x @ mixing) + offset
        return torch.where(poison & (y.abs().amax(1, keepdim=True) > 1.5), torch.nan, y)

    poison = (torch.arange(8) == 7)[:, None]
    x = torch.zeros(8, n, dtype=dtype)
    return FunctionMap(f, (rates, offset, poison), Packing.of(x)), x


def agree(mine, reference, within=0):
    assert mine.status.equal(reference.status)
    assert (mine.steps - reference.steps).abs().max() <= within
    if within == 0:
        torch.testing.assert_close(mine.residuals, reference.residuals, equal_nan=True)
    torch.testing.assert_close(mine.value, reference.value, equal_nan=True)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
def test_agrees_with_the_reference_loop(solver, rule):
    f, x = mixed_map()
    limit = rule.limit() or 90
    seeded = rule.seeded(torch.Generator().manual_seed(1))
    expected = iterate(f, x, SOLVERS.get(solver), seeded, limit)
    found = in_chunks(f, x, SOLVERS.get(solver), rule.seeded(torch.Generator().manual_seed(1)), limit)
    agree(found, expected)
    if isinstance(rule, Relative):
        kinds = {Status(int(s)) for s in found.status}
        assert {Status.CONVERGED, Status.NONFINITE} <= kinds


@pytest.mark.parametrize("chunk", [1, 3, 4, 8, 50])
def test_chunks_of_any_length_give_the_same(chunk):
    f, x = mixed_map()
    for max_steps in (1, 7, 60):
        agree(
            in_chunks(f, x, Anderson(), Relative(), max_steps, chunk),
            iterate(f, x, Anderson(), Relative(), max_steps),
        )


def test_divergence_is_told_from_slowness():
    f, x = mixed_map()
    found = in_chunks(f, x, Picard(), Relative(), 40)
    assert Status(int(found.status[5])) == Status.DIVERGED and Status(int(found.status[4])) == Status.MAX_STEPS
    agree(found, iterate(f, x, Picard(), Relative(), 40))


def test_stagnation_at_the_rounding_level_is_seen_at_the_same_step():
    f, x = mixed_map(torch.float32)
    f.min_size_to_gather = 10**9  # rows stay together, so that every bit is the same
    expected = iterate(f, x, Picard(), Absolute(1e-12), 203)
    assert (expected.status == Status.STAGNATED).any()
    for chunk in (3, 4, 5, 7):
        agree(in_chunks(f, x, Picard(), Absolute(1e-12), 203, chunk), expected)


@pytest.mark.parametrize("solver", ["anderson", "broyden"])
def test_a_state_that_runs_off_is_not_accepted(solver):
    x, scale = torch.zeros(3, 2, dtype=torch.float64), torch.tensor([[1.0], [0.5], [1e3]], dtype=torch.float64)
    f = FunctionMap(lambda x, c: torch.sqrt(x * x + 1) + c, (scale,), Packing.of(x))
    f.min_size_to_gather = 10**9
    for stop in (Relative(), Relative(1e-3)):
        expected = iterate(f, x, SOLVERS.get(solver), stop, 60)
        found = in_chunks(f, x, SOLVERS.get(solver), stop, 60)
        assert found.status.equal(expected.status) and found.steps.equal(expected.steps)
        assert (found.status >= Status.MAX_STEPS).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leaving_an_unstable_state_is_no_run_off(dtype):
    u = torch.tensor([[1e-7], [1e-6], [1e-4], [1e-1]], dtype=dtype)
    f, x = FunctionMap(lambda x, u: torch.tanh(3 * x + u), (u,), Packing.of(u)), torch.zeros_like(u)
    found = in_chunks(f, x, Picard(), Relative(), 200)
    assert (found.status == Status.CONVERGED).all()
    agree(found, iterate(f, x, Picard(), Relative(), 200))


def test_error_bounds_of_a_declared_contraction():
    x = torch.zeros(3, 2)
    f = FunctionMap(Contraction(lambda x, u: 0.5 * x + u, 0.5), (torch.randn(3, 2),), Packing.of(x))
    agree(in_chunks(f, x, Picard(), ErrorBound(1e-4), 100), iterate(f, x, Picard(), ErrorBound(1e-4), 100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tuple_states(dtype):
    cell, u = Pair().to(dtype), (torch.randn(9, 2, 3, dtype=dtype), torch.randn(9, dtype=dtype))
    start = (torch.zeros(9, 2, 3, dtype=dtype), torch.zeros(9, dtype=dtype))
    packing = Packing.of(start)
    f = FunctionMap(lambda x, *u: cell(x, u), u, packing)
    with torch.no_grad():
        expected = iterate(f, packing.pack(start), Anderson(), Relative(), 100)
    found = in_chunks(f, packing.pack(start), Anderson(), Relative(), 100)
    agree(found, expected, within=int(dtype == torch.float32))


def function_of(cell, u):
    with weights_computed_once(cell) as weights:
        return CellFunction(cell, cell, True, (), tuple(weights), tuple(weights.values()))


def test_a_rebuilt_equation_reads_its_buffers_forward_and_backward():
    cell, u, x = spectral_norm(Cell(width=5)).double(), torch.randn(7, 3).double(), torch.zeros(7, 5).double()
    function = function_of(cell, u)
    f = FunctionMap(function, (u,), Packing.of(x))
    point = torch.randn(7, 5).double().requires_grad_()
    fx = f(point)
    backward = LinearMap(vector_jacobian(fx, point), torch.randn(7, 5).double(), 1e-16, (f, point))
    for equation in (f, backward):
        solver, stop = Anderson(), Relative()
        with function.using_weights(), torch.no_grad():
            expected = iterate(equation, x, solver, stop, 100)
        buffers = [torch.zeros_like(part) for part in solve_inputs(equation, x, ())]
        static, start, memo, held = rebuild(equation, buffers, 0)
        for buffer, part in zip(buffers, solve_inputs(equation, x, ()), strict=True):
            buffer.copy_(part)
        program = Program(static, start, memo, solver, stop, 100)
        cell.train()
        before = copy.deepcopy(cell.state_dict())
        with held.using_weights():
            found = run_program(program)
        agree(found, expected)
        assert found.converged if hasattr(found, "converged") else (found.status == Status.CONVERGED).all()
        assert all(torch.equal(value, before[name]) for name, value in cell.state_dict().items())


def test_weights_are_read_from_elsewhere_only_in_the_block():
    cell = spectral_norm(Cell(width=5)).eval()
    twin = copy.deepcopy(cell)  # shares the class of its parametrised layer
    ones = torch.ones(5, 5)
    function = function_of(cell, None).with_weights(tuple(ones for _ in function_of(cell, None).weights))
    own, other = cell.state.weight.clone(), twin.state.weight.clone()
    with function.using_weights():
        assert cell.state.weight is ones and twin.state.weight.equal(other)
    assert cell.state.weight.equal(own)


def test_small_systems_are_eliminated():
    factor = torch.randn(20, 5, 5, dtype=torch.float64)
    system, right = factor @ factor.mT + 1e-3 * torch.eye(5), torch.randn(20, 5, 2, dtype=torch.float64)
    torch.testing.assert_close(eliminate(system, right), torch.linalg.solve(system, right))


def test_what_makes_another_kind_of_equation():
    cell = Cell(nn.ReLU())
    function = CellFunction(cell, cell, True, (), (), ())
    seen = {function.fingerprint()}

    def changed():
        new = function.fingerprint() not in seen
        seen.add(function.fingerprint())
        return new

    with torch.no_grad():
        cell.state.weight.add_(1)
    assert not changed()
    cell.eval()
    assert changed()
    cell.state.weight = nn.Parameter(cell.state.weight.detach().clone())
    assert changed()
    cell.scale = 0.5
    assert changed()
    cell.scale = 0.6
    assert changed()
    cell.table = {"mask": torch.ones(3)}
    assert changed()
    cell.table["mask"].zero_()
    assert not changed()
    cell.table["mask"] = torch.ones(3)
    assert changed()


def test_what_cannot_be_captured_is_named():
    def why_not(cell):
        masks = tuple(layer for layer in cell.modules() if isinstance(layer, VariationalDropout))
        return CellFunction(cell, cell, True, masks, (), ()).why_not()

    assert why_not(Cell()) == "" and why_not(Cell(VariationalDropout(0.2)).eval()) == ""
    assert "VariationalDropout" in why_not(Cell(VariationalDropout(0.2)))
    hooked = Cell()
    hooked.state.register_forward_hook(lambda *_: None)
    assert "hook at 'state'" in why_not(hooked)
    assert "equilibrium of its own" in why_not(Cell(DEQ(Cell(), state_shape=4)))


def test_executors_of_a_model():
    with pytest.raises(InputError, match="auto, graph, reference"):
        DEQ(Cell(), state_shape=4, executor="cuda")
    u = torch.randn(5, 3)
    model = DEQ(Cell(), state_shape=4)
    model(u).sum().backward()
    assert "graphs are for CUDA devices" in model.explain(u)
    model.executor = "reference"
    assert "was asked for" in model.explain(u)
    model.executor = "graph"
    with pytest.raises(InputError, match="forward solve: the state is on the cpu"):
        model(u)


def test_a_loop_is_copied_without_its_graphs():
    loop = GraphLoop(chunk=3, keep=2)
    loop.captured["kind"] = object()
    for twin in (copy.deepcopy(loop), pickle.loads(pickle.dumps(loop))):
        assert (twin.chunk, twin.keep, len(twin.captured)) == (3, 2, 0)
