"""Chooses how ``x = phi(Ax + v)`` is computed, says why, and runs the compiled loop on tensors.

`lay_out` plans the memory of a group of samples, `run_kernel` divides a batch among threads and collects the
results. `CompiledLoop` takes the place of the reference loop in the forward pass, `solve_adjoint` in the backward
pass. `choose_loop` picks the executor, `explain` gives the reason.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed.equilibrium.affine import AffineMap, AffineProblem, Factors, TransposedMap
from wellposed.equilibrium.gradients import Implicit
from wellposed.equilibrium.loop import PERIOD, Iterates, iterate
from wellposed.equilibrium.maps import Map
from wellposed.equilibrium.method import Loop, Method
from wellposed.equilibrium.solvers import Anderson, Solver
from wellposed.equilibrium.stopping import Stopping
from wellposed.errors import InputError, require
from wellposed.kernels.device import RESIDENT, run_on_device, solve_adjoint_on_device
from wellposed.kernels.handover import hand_over, handover_step, stop_is_plain
from wellposed.kernels.sparse import SparseRows, explain_parts
from wellposed.kernels.spec import (
    LINEAR,
    Recipe,
    engine_of,
    installation_problem,
    kind_of,
    make_recipe,
    map_problem,
    solver_problem,
    stop_problem,
)

MEMORY = 5  # of the buffer where a solver needs none
SPLIT = 1 << 22  # multiplications of a step below which threads are not worth their start


@functools.cache
def kernels() -> ModuleType:
    """Imports what needs numba, on first use."""
    require("numba", extra="fast")
    return require("wellposed.kernels.cpu.solve", extra="fast")


@functools.cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Returns the helpers of the calling thread; a forked process has its own."""
    return ThreadPoolExecutor(count, thread_name_prefix="wellposed")


@dataclass(frozen=True)
class Layout:
    """Where everything lies in the buffer of a group; see `kernels.cpu.solve`."""

    slots: tuple[int, ...]
    at: tuple[int, ...]
    size: int
    width: int


@functools.lru_cache(maxsize=256)
def lay_out(n: int, memory: int, max_steps: int, item: int) -> Layout:
    """Plans the memory of one group of samples."""
    lanes = kernels()
    width = lanes.VECTORS * lanes.VECTOR_BYTES // item
    slots = tuple(point * n * width for point in range(memory + 2))
    v = (memory + 2) * n * width
    single = v + 2 * n * width
    solution = single + (lanes.PROBLEM + memory * (memory + 3) // 2 + 1) * width
    minima = solution + (memory + 1) * width
    size = minima + (max_steps // PERIOD + 1) * width
    return Layout(slots, (v, v + n * width, single, solution, minima), size, width)


@functools.lru_cache(maxsize=256)
def encode(recipe: Recipe, dtype: torch.dtype) -> tuple[tuple[int, ...], Any]:
    """Returns the recipe as the kernel takes it."""
    counts = recipe.kind, recipe.memory, recipe.rule, recipe.limit, recipe.max_steps
    numbers = recipe.slope, recipe.worth, recipe.patience, recipe.ridge, recipe.atol, recipe.rtol
    return counts, torch.tensor([*numbers, torch.finfo(dtype).eps], dtype=dtype).numpy()


def run_kernel(
    A: Tensor | SparseRows, v: Tensor, d: Tensor | None, x0: Tensor | None, recipe: Recipe, *, trace: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solves ``x = phi(Ax + v)``, or ``y = d (Ay) + v`` where `d` is given, from `x0` or from zero.

    Args:
        A: dense or, without `d`, sparse.
        v, d, x0: ``(B, n)``.
        recipe: how.
        trace: whether residuals are wanted.

    Returns:
        states, statuses, steps, and residuals ``(B, K)``, without columns unless a trace is wanted.
    """
    batch, n = v.shape
    cpu, layout = kernels(), lay_out(n, recipe.memory or MEMORY, recipe.max_steps, v.element_size())
    packed, entries = (A.arrays, A.stored) if isinstance(A, SparseRows) else (pack_matrix(A, cpu), n * n)
    value = torch.empty(batch, n, dtype=v.dtype)
    status, steps = np.empty(batch, np.int8), np.empty(batch, np.int64)
    none = torch.empty(0, n, dtype=v.dtype).numpy()
    residuals = np.empty((recipe.max_steps if trace else 0, batch), none.dtype)
    inputs = [none if t is None else t.detach().contiguous().numpy() for t in (v, d, x0)]
    outputs = value.numpy(), status, steps, residuals
    counts, numbers = encode(recipe, v.dtype)

    def part(begin: int, end: int) -> None:
        work = torch.empty(layout.size, dtype=v.dtype).numpy()  # torch aligns it to vectors
        lanes = np.empty(3 * layout.width, np.int64)
        cpu.solve(packed, *inputs, *outputs, work, lanes, layout.slots, layout.at, counts, numbers, begin, end)

    share_out(part, batch, layout.width, batch * entries)
    reports = torch.from_numpy(status), torch.from_numpy(steps), torch.from_numpy(residuals)
    return value, *reports[:2], _finished(reports[2], reports[1]) if trace else reports[2].mT


def multiply_sparse(u: Tensor, W: SparseRows, bias: Tensor | None) -> Tensor:  # (B, columns) -> (B, rows)
    """Computes ``Wu + b`` for every row of a batch."""
    cpu, batch = kernels(), u.shape[0]
    width = cpu.VECTORS * cpu.VECTOR_BYTES // u.element_size()
    y = torch.empty(batch, W.shape[0], dtype=u.dtype)
    added = y.new_empty(0) if bias is None else bias.detach().contiguous()
    arrays = [part.numpy() for part in (u.detach().contiguous(), added, y)]

    def part(begin: int, end: int) -> None:
        work = torch.empty(sum(W.shape) * width, dtype=u.dtype).numpy()
        cpu.spread(W.arrays, *arrays, work, width, begin, end)

    share_out(part, batch, width, batch * W.stored)
    return y


def pack_matrix(A: Tensor, cpu: ModuleType) -> Any:
    """Copies A in tiles; a transposed matrix is read as it lies."""
    n = A.shape[0]
    flipped = n > 1 and A.stride() == (1, n)
    # After .numpy() torch could no longer free the storage of a parameter, as fully_shard does.
    matrix = np.from_dlpack((A.mT if flipped else A.contiguous()).detach())
    packed = np.empty((n + cpu.ROWS - 1) // cpu.ROWS * cpu.ROWS * n, matrix.dtype)
    cpu.pack(matrix, flipped, packed)
    return packed


def share_out(part: Callable[[int, int], None], batch: int, width: int, work: int) -> None:
    """Gives every thread some samples, in whole groups where there is enough to do."""
    count = min(torch.get_num_threads(), batch // width) if work > SPLIT else 1
    if count <= 1:
        part(0, batch)
        return
    ends = [batch * place // count for place in range(count + 1)]
    pool = _threads(os.getpid(), count - 1)
    others = [pool.submit(part, *ends[place : place + 2]) for place in range(1, count)]
    part(*ends[:2])
    for other in others:
        other.result()


@contextlib.contextmanager
def few_threads(work: int) -> Iterator[None]:
    """Has the products of a block run on the calling thread where there is too little to do for several.

    The library behind torch's products forks for the smallest of them, and on a busy machine waits for threads
    that have no core. The number of threads is each thread's own; only one that first calls torch while another
    is in such a block begins with one.

    Args:
        work: multiplications of the products.
    """
    count = torch.get_num_threads()
    if count == 1 or work > SPLIT:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def _finished(residuals: Tensor, steps: Tensor) -> Tensor:  # (B, K)
    """Returns the trace, NaN after a sample has finished."""
    kept = residuals[: int(steps.max()) if steps.numel() else 0].mT
    after = torch.arange(kept.shape[1]) >= steps[:, None]
    return kept.masked_fill(after, torch.nan)


def wrong_engine(only: str, x: Tensor) -> str:
    """Says that an executor is not for the device of `x`; nothing if it is."""
    return "" if only in ("", "auto", engine_of(x)) else f"device {x.device.type} has no kernel of {only}"


@dataclass(frozen=True)
class CompiledLoop:
    """Takes the place of `iterate` for affine maps; whatever has no kernel is iterated as ever.

    Args:
        trace: whether to keep residuals from the start; else they are found by a second solve when asked for.
        only: raise where "numba", or "triton", has no kernel.
        automatic: hand samples that are slow over to Newton's method; see `kernels.handover`.
        sparse: the matrix of the maps that it will meet, as sparse rows, where these are faster.
    """

    trace: bool = False
    only: str = ""
    automatic: bool = False
    sparse: SparseRows | None = None

    def __call__(self, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int) -> Iterates:
        problem = map_problem(f, x) or solver_problem(solver, x.device.type) or stop_problem(stop)
        problem = problem or wrong_engine(self.only, x)
        if problem and self.only:
            raise InputError(f'executor="{self.only}" cannot compute this: {problem}; use executor="auto"')
        if problem:
            return iterate(f, x, solver, stop, max_steps)
        if engine_of(x) == "triton":
            assert isinstance(f, AffineMap | TransposedMap)
            return run_on_device(f, x, solver, stop, max_steps, trace=self.trace)
        limit = handover_step(f, stop, max_steps) if self.automatic else max_steps
        found = _run_map(f, self._matrix(f), x, solver, stop, limit, trace=self.trace)
        if limit == max_steps:
            return found
        assert isinstance(f, AffineMap | TransposedMap)
        return hand_over(f, found, stop, limit, max_steps)

    def _matrix(self, f: Map) -> Tensor | SparseRows:
        assert isinstance(f, AffineMap | TransposedMap)
        if self.sparse is None or isinstance(f, TransposedMap):
            return f.factors[0]
        return self.sparse if self.automatic else self.sparse.plain


def _run_map(
    f: Map, A: Tensor | SparseRows, x: Tensor, solver: Solver, stop: Stopping, max_steps: int, *, trace: bool
) -> Iterates:
    """Solves an equation that has a kernel."""
    if isinstance(f, AffineMap):
        kind, v, d = kind_of(f.activation), f.v, None
    else:
        assert isinstance(f, TransposedMap)
        kind, v, d = (LINEAR, 0.0), f.offset, f.slope
    assert kind is not None
    recipe = make_recipe(*kind, solver, stop, max_steps, x.dtype)
    value, status, steps, residuals = run_kernel(A, v, d, x, recipe, trace=trace)
    if trace:
        return Iterates(value, status, steps, lambda: residuals)
    return Iterates(value, status, steps, lambda: run_kernel(A, v, d, x, recipe, trace=True)[3])


def prepare_adjoint(kind: tuple[int, float], z: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the slopes d = phi'(z), ``d g / scale`` and the scale ``(B, 1)``, the largest entry of rows of g."""
    d, offset, scale = torch.empty_like(z), torch.empty_like(z), z.new_empty(z.shape[0], 1)
    kernels().prepare_adjoint(z.numpy(), g.contiguous().numpy(), *kind, d.numpy(), offset.numpy(), scale.numpy())
    return d, offset, scale


def solve_adjoint(problem: AffineProblem, x: Tensor, v: Tensor, g: Tensor, factors: Factors) -> Tensor | None:
    """Solves ``y = d (A'y + g)`` with ``d = phi'(Ax + v)`` in one call; None where that has no kernel.

    Samples that are not finished after `problem.patience` steps are factorised.
    """
    method, kind = problem.backward, kind_of(problem.activation)
    f, device = TransposedMap(factors, x, x, problem.damping), v.device.type
    if kind is None or map_problem(f, v) or solver_problem(method.solver, device) or stop_problem(method.stop):
        return None
    if engine_of(v) == "triton":
        return solve_adjoint_on_device(problem, x, v, g, factors[0])
    d, offset, scale = prepare_adjoint(kind, torch.addmm(v, x, factors[0].mT), g)
    A = factors[0].mT
    limit = min(problem.patience or method.max_steps, method.max_steps)
    recipe = make_recipe(LINEAR, 0.0, method.solver, method.stop, limit, x.dtype)
    value, status, steps, residuals = run_kernel(A, offset, d, None, recipe, trace=problem.trace)
    again = lambda: run_kernel(A, offset, d, None, recipe, trace=True)[3]  # noqa: E731
    found = Iterates(value, status, steps, (lambda: residuals) if problem.trace else again)
    if problem.patience and stop_is_plain(method.stop):
        found = hand_over(TransposedMap((A,), d, offset, 1.0), found, method.stop, limit, method.max_steps)
    method.note_adjoint(found)
    return found.value.mul_(scale) if not problem.trace else found.value * scale


EXECUTORS = ("auto", "numba", "triton", "reference")


def check_executor(executor: str) -> None:
    """Raises unless an executor of this name exists and can run here.

    Example:
        >>> check_executor("reference")
    """
    if executor not in EXECUTORS:
        raise InputError(f"executor must be one of {', '.join(EXECUTORS)}; received {executor!r}")
    if executor == "numba" and installation_problem():
        kernels()
    if executor == "triton":
        require("triton")


def choose_loop(executor: str, *, trace: bool, automatic: bool = False, sparse: SparseRows | None = None) -> Loop:
    """Returns what runs a solve.

    ``"auto"`` compiles whatever has a kernel and iterates the rest; ``"numba"``, on the CPU, and ``"triton"``, on
    CUDA devices, raise where there is no kernel. With `automatic` nobody has asked for a solver, and slow samples
    may go to Newton's method; `sparse` is the matrix of the maps to be solved, if it is known and sparse.
    """
    if executor == "reference":
        return iterate
    if sparse is not None:
        return CompiledLoop(trace, _ENGINES[executor], automatic, sparse)
    return _LOOPS[_ENGINES[executor], trace, automatic]


_ENGINES = {"auto": "", "numba": "numba", "triton": "triton"}
_LOOPS = {
    (only, trace, automatic): CompiledLoop(trace, only, automatic)
    for only, trace, automatic in product(_ENGINES.values(), (False, True), (False, True))
}


def explain(model: Any, u: Tensor) -> str:
    """Says which executor computes ``model(u)`` and why.

    Args:
        model: an `ImplicitModel`, also `Noisy`, an `ImplicitRNN`, or a `DEQ`, of which the latest solves are told.
        u: inputs, of which only shape, dtype, device and whether they require gradients count. The answer is for
            now: under ``torch.no_grad()`` sparse products may be taken that have no derivatives.

    Example:
        >>> from wellposed import ImplicitModel
        >>> explain(ImplicitModel(3, 2, 8, executor="reference"), torch.zeros(5, 3))
        'reference: executor="reference" was asked for'
    """
    if hasattr(model, "cells") or hasattr(model, "cell"):
        return str(model.explain())
    if hasattr(model, "noise"):
        return str(model.explain(u))
    if model.executor == "reference":
        return 'reference: executor="reference" was asked for'
    method: Method = model.method()
    with torch.no_grad():
        system = model.state.system()
    v = torch.empty(u.shape[:-1].numel(), model.state_features, dtype=model.compute_dtype, device=u.device)
    device = u.device.type
    problem = _model_problem(model, system) or solver_problem(method.solver, device) or stop_problem(method.stop)
    f = AffineMap(system.factors, v, model.activation, system.damping)
    problem = problem or map_problem(f, v) or wrong_engine(model.executor, v)
    if problem:
        return f"reference: {problem}"
    dtype = str(v.dtype).removeprefix("torch.")
    if v.dtype != model.B.dtype:
        dtype += f" (kappa={model.kappa:g} may amplify the rounding of float32 {model.gain:.0f} times)"
    size = f"{v.shape[1]} states, batch {v.shape[0]}"
    if engine_of(v) == "triton":
        parts = "A on the chip" if v.shape[1] <= RESIDENT[v.element_size()] else "A in tiles from the cache"
    else:
        parts = explain_parts(model, u)
    plan = f"{_plan(model, method, f)}{parts and f', {parts}'}"
    return f"{engine_of(v)}: {model.activation.name}, {dtype}, {size}, {plan}"


def _plan(model: Any, method: Method, f: AffineMap) -> str:
    """Says which solvers take part."""
    solver = "Anderson" if isinstance(method.solver, Anderson) else "Picard"
    limit = handover_step(f, method.stop, method.max_steps)
    if model.solver is not None or limit == method.max_steps or engine_of(f.v) == "triton":
        return solver
    return f"{solver}, after {limit} steps Newton for samples that are not finished"


def _model_problem(model: Any, system: Any) -> str:
    """Says why a whole model has no kernel; nothing if it may have one."""
    if not isinstance(model.gradient, Implicit):
        return f"gradient {type(model.gradient).__name__} has no kernel"
    if not model.activation.componentwise:
        return f"activation {model.activation.name} acts on blocks and has no kernel"
    return "" if system.splitting is None else "operator splitting (condition 'monotone') has no kernel"
