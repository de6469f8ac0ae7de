"""Runs ``x = phi(Ax + v)`` under noise: by a compiled loop where there is one, else as ever."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.equilibrium.loop import PERIOD, Iterates, iterate
from wellposed.equilibrium.map import FunctionMap, Map
from wellposed.equilibrium.picard import Picard
from wellposed.equilibrium.robbins_monro import RobbinsMonro
from wellposed.equilibrium.solver import Solver
from wellposed.equilibrium.stopping import MeanRelative, Stopping, default_tolerance
from wellposed.equilibrium.transform import under_transform
from wellposed.errors import InputError, require
from wellposed.kernels.counter import MASK, normals
from wellposed.kernels.executor import Layout, kernels, pack_matrix, share_out, wrong_engine
from wellposed.kernels.gpu import RESIDENT, finished, launcher
from wellposed.kernels.recipe import AVERAGED, Recipe, kind_of, make_recipe
from wellposed.kernels.support import (
    DTYPES,
    engine_of,
    engine_problem,
    installation_problem,
    stop_problem,
    tensor_problem,
)


@dataclass(frozen=True)
class Strength:
    """The noise of a solve in numbers.

    Attributes:
        seed: of the draws.
        state, signal: standard deviations, of multiplicative noise relative to the l2 norm of what it disturbs;
            -1 for none.
        additive, held: whether it is additive, and whether all steps have the draws of the first.
    """

    seed: int
    state: float
    signal: float
    additive: bool
    held: bool


@dataclass(frozen=True)
class NoisyRecipe:
    """A solve under noise in numbers: steps of the size ``rate / (1 + m) ** decay`` and everything else."""

    plain: Recipe
    noise: Strength
    rate: float
    decay: float


def noisy_recipe(
    activation: Activation, solver: Solver, stop: Stopping, max_steps: int, noise: Strength, dtype: torch.dtype
) -> NoisyRecipe:
    """Writes a solve down in numbers; it must have a kernel."""
    kind = kind_of(activation)
    assert kind is not None and isinstance(solver, Picard | RobbinsMonro)
    recipe = make_recipe(*kind, Picard(), stop, max_steps, dtype)
    if isinstance(stop, MeanRelative):
        rtol = default_tolerance(dtype) if stop.rtol is None else stop.rtol
        recipe = replace(recipe, rule=AVERAGED, rtol=rtol, limit=stop.window)
    rate, decay = (solver.damping, 0.0) if isinstance(solver, Picard) else (solver.rate, solver.decay)
    return NoisyRecipe(recipe, noise, rate, decay)


def noise_problem(activation: Activation, solver: Solver, stop: Stopping, x: Tensor) -> str:
    """Says why states like `x` ``(B, n)`` have no kernel under noise; nothing if they have one.

    Example:
        >>> from wellposed.activations import get_activation
        >>> noise_problem(get_activation("relu"), Picard(), MeanRelative(), torch.zeros(2, 3))
        ''
    """
    if type(solver) not in (Picard, RobbinsMonro):
        return f"under noise solver {type(solver).__name__} has no kernel; 'picard' and RobbinsMonro have"
    if type(stop) is not MeanRelative and stop_problem(stop):
        return stop_problem(stop)
    if kind_of(activation) is None:
        return f"activation {activation.name} has no kernel"
    if x.dtype not in DTYPES:
        return f"noise in {str(x.dtype).removeprefix('torch.')} has no kernel"
    if engine_of(x) == "triton" and x.shape[-1] > RESIDENT[x.element_size()]:
        return f"noise in more than {RESIDENT[x.element_size()]} states has no kernel on the GPU"
    return engine_problem(x, *(kind_of(activation) or ()))


@functools.cache
def noisy_kernels() -> ModuleType:
    """Imports what needs numba, on first use."""
    require("numba", extra="fast")
    return require("wellposed.kernels.noisy_lanes", extra="fast")


@functools.lru_cache(maxsize=256)
def lay_out(n: int, window: int, max_steps: int, item: int) -> Layout:
    """Plans the memory of one group of samples, in the order of the names in `noisy_lanes`."""
    cpu = kernels()
    width, padded = cpu.VECTORS * cpu.VECTOR_BYTES // item, (n + 3) // 4 * 4
    rows = [n, n, noisy_kernels().ROWS, 0, max_steps // PERIOD + 1, n, n, n, padded, padded, n, n, n, window * n]
    starts = [width * sum(rows[:place]) for place in range(len(rows))]
    return Layout((), tuple(starts), width * sum(rows), width)


@functools.lru_cache(maxsize=64)
def encode(recipe: NoisyRecipe, dtype: torch.dtype) -> tuple[tuple[int, ...], Any]:
    """Returns the recipe as the kernel takes it."""
    plain, noise = recipe.plain, recipe.noise
    counts = plain.kind, 0, plain.rule, plain.limit, plain.max_steps, int(noise.additive), int(noise.held)
    numbers = plain.slope, 0.0, 0.0, 0.0, plain.atol, plain.rtol, torch.finfo(dtype).eps
    noisy = noise.state, noise.signal, recipe.rate, recipe.decay
    words = noise.seed & MASK, noise.seed >> 32, int(recipe.rate != 1 or recipe.decay != 0)
    return (*counts, *words), torch.tensor([*numbers, *noisy], dtype=dtype).numpy()


def run_noisy_kernel(A: Tensor, v: Tensor, x0: Tensor, recipe: NoisyRecipe) -> Iterates:
    """Solves ``x = phi(Ax + v)`` under noise on the CPU, from `x0`."""
    (batch, n), plain = v.shape, recipe.plain
    cpu, averaged = noisy_kernels(), plain.rule == AVERAGED
    layout = lay_out(n, plain.limit if averaged else 0, plain.max_steps, v.element_size())
    packed, value = pack_matrix(A, kernels()), torch.empty(batch, n, dtype=v.dtype)
    status, steps = np.empty(batch, np.int8), np.empty(batch, np.int64)
    inputs = [part.detach().contiguous().numpy() for part in (v, x0)]
    residuals = np.empty((plain.max_steps, batch), inputs[0].dtype)
    outputs = value.numpy(), status, steps, residuals
    counts, numbers = encode(recipe, v.dtype)

    def part(begin: int, end: int) -> None:
        work = torch.zeros(layout.size, dtype=v.dtype).numpy()
        lanes = np.empty(3 * layout.width, np.int64)
        cpu.solve(packed, *inputs, *outputs, work, lanes, layout.at, counts, numbers, begin, end)

    share_out(part, batch, layout.width, batch * n * n)
    ends = torch.from_numpy(steps)
    trace = finished(torch.from_numpy(residuals), ends)
    return Iterates(value, torch.from_numpy(status), ends, lambda: trace)


@dataclass(frozen=True)
class NoisyLoop:
    """Takes the place of `iterate` for one noisy map; all others are iterated as ever.

    Args:
        function: the map with its noise, of the state, v and the numbers of the samples.
        A: ``(n, n)``.
        activation: phi.
        noise: its strength; None if its draws are torch's, which no kernel knows.
        only: an executor; "numba" and "triton" raise where they have no kernel.
        after: called with the number of steps when a solve has ended.
    """

    function: Callable[..., Any]
    A: Tensor
    activation: Activation
    noise: Strength | None
    only: str
    after: Callable[[int], None]

    def __call__(self, f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int) -> Iterates:
        if not isinstance(f, FunctionMap) or f.function is not self.function:
            return iterate(f, x, solver, stop, max_steps)
        problem = self.problem(x, solver, stop)
        if problem and self.only in ("numba", "triton"):
            raise InputError(f'executor="{self.only}" cannot compute this: {problem}; use executor="auto"')
        found = iterate(f, x, solver, stop, max_steps) if problem else self._run(f, x, solver, stop, max_steps)
        self.after(max_steps)
        return found

    def problem(self, x: Tensor, solver: Solver, stop: Stopping) -> str:
        """Says why a solve has no kernel; nothing if it has one."""
        if self.only == "reference":
            return 'executor="reference" was asked for'
        if self.noise is None:
            return "noise of torch's generators has no kernel; Noise(counter=True) has"
        if torch.is_grad_enabled():
            return "steps that are differentiated have no kernel"
        return noise_problem(self.activation, solver, stop, x) or wrong_engine(self.only, x)

    def _run(self, f: FunctionMap, x: Tensor, solver: Solver, stop: Stopping, max_steps: int) -> Iterates:
        assert self.noise is not None
        recipe = noisy_recipe(self.activation, solver, stop, max_steps, self.noise, x.dtype)
        A, v = self.A.detach(), f.inputs[0].detach()
        if engine_of(x) == "triton":
            return run_noisy_on_device(A, v, x, recipe)
        return run_noisy_kernel(A, v, x, recipe)


def run_noisy_on_device(A: Tensor, v: Tensor, x0: Tensor, recipe: NoisyRecipe) -> Iterates:
    """Solves ``x = phi(Ax + v)`` under noise by a Triton kernel, from `x0`."""
    launcher()
    launched = require("wellposed.kernels.gpu_noisy_launch").launch_noisy(A, v, x0, recipe)
    value, status, steps, residuals = launched
    trace = finished(residuals, steps)
    return Iterates(value, status, steps, lambda: trace)


def draw_normals(seed: int, samples: Tensor, step: int, site: int, count: int, dtype: torch.dtype) -> Tensor:
    """Returns `counter.normals`, compiled where that is possible; the two differ by rounding alone."""
    y = torch.empty(samples.shape[0], count, dtype=dtype, device=samples.device)
    if tensor_problem(y) or installation_problem() or under_transform():
        return normals(seed, samples, step, site, count, dtype)
    cpu = kernels()
    width, rows = cpu.VECTORS * cpu.VECTOR_BYTES // y.element_size(), (count + 3) // 4 * 4
    work, lanes = torch.empty(rows * width, dtype=dtype).numpy(), np.empty(2 * width, np.int64)
    fill = require("wellposed.kernels.random_vectors", extra="fast").fill
    fill(y.numpy(), samples.contiguous().numpy(), step, site, seed & MASK, seed >> 32, work, lanes, 0)
    return y
