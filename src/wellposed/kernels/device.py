"""Solves on CUDA devices, by Triton kernels: a whole solve is one launch.

Up to 128 states A stays on the chip (`solve_resident` in `gpu.solve`), up to 1024 it is streamed in tiles from the
cache of the device (`solve_streamed`); both end every sample as the reference loop does. On the chip float32 is
multiplied by three TF32 products; streamed, it is split into two float16 parts, A by a small launch of its own.
float64 is multiplied as it is; bfloat16 and float16 are how numbers are stored, sums and iterates are float32.

A call through Triton looks at the type and alignment of every argument, at all global constants and at settings,
which takes longer than a small solve. `call` does that once for every kind of call; later ones hand numbers and
addresses straight to the compiled kernel.
"""

import functools
import importlib.util
from collections import deque
from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from wellposed.equilibrium.affine import AffineMap, AffineProblem, TransposedMap
from wellposed.equilibrium.loop import Iterates
from wellposed.equilibrium.solvers import Solver
from wellposed.equilibrium.stopping import Stopping
from wellposed.errors import InputError, require
from wellposed.kernels.spec import LINEAR, Recipe, kind_of, make_recipe

RESIDENT = {2: 128, 4: 128, 8: 32}  # states up to which A stays on the chip, by the bytes of a number


@functools.cache
def launcher() -> ModuleType:
    """Imports what needs Triton, on first use."""
    require("triton")
    return require("wellposed.kernels.gpu.launch")


def interpreted() -> bool:
    """Tells whether Triton interprets kernels, on tensors of the CPU."""
    if importlib.util.find_spec("triton") is None:
        return False
    return bool(require("triton").knobs.runtime.interpret)


@functools.cache
def unheard(device: torch.device) -> Tensor:
    """Returns the flag of solves whose statuses are looked at anyway, or by nobody."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _bell() -> tuple[Tensor, Any]:
    """Returns a number in the memory of the host that a device can write, and an event to wait for."""
    return torch.zeros(1, dtype=torch.int32, pin_memory=True), torch.cuda.Event()


@functools.cache
def _bells(device: torch.device) -> deque[tuple[Tensor, Any]]:
    """Returns those that nobody uses: making them takes longer than a launch."""
    return deque(maxlen=64)


class Alarm:
    """Tells the host whether a sample of a solve has failed.

    The kernel writes to a number in the memory of the host, so that a wait for the solve is all it takes: nothing
    is copied, and what was launched after the solve goes on.
    """

    def __init__(self, device: torch.device) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise InputError(
                "a solve in a captured CUDA graph cannot report failures; build the model with "
                'on_failure="ignore" and look at the statuses of equilibrium(u) now and then'
            )
        try:
            self.flag, self.event = _bells(device).pop()
        except IndexError:
            self.flag, self.event = _bell()
        self.device = device

    def arm(self) -> None:
        """Marks the end of the solve in the stream."""
        self.event.record(torch.cuda.current_stream(self.device))

    def rings(self) -> bool:
        """Waits for the solve; tells whether a sample has failed. Asked once."""
        self.event.synchronize()
        if self.flag.item():
            return True
        _bells(self.device).append((self.flag, self.event))
        return False


def run_on_device(
    f: AffineMap | TransposedMap, x: Tensor, solver: Solver, stop: Stopping, max_steps: int, *, trace: bool
) -> Iterates:
    """Solves an equation that has a kernel, from `x`; takes the place of `iterate`."""
    if isinstance(f, AffineMap):
        kind, v, d = kind_of(f.activation), f.v, None
    else:
        kind, v, d = (LINEAR, 0.0), f.offset, f.slope
    assert kind is not None
    recipe = make_recipe(*kind, solver, stop, max_steps, x.dtype)
    return run_recipe(f.factors[0], v, d, x, recipe, trace=trace)


def run_recipe(
    A: Tensor, v: Tensor, d: Tensor | None, x0: Tensor | None, recipe: Recipe, *, trace: bool, scaled: bool = False
) -> Iterates:
    """Solves ``x = phi(Ax + v)``, or ``y = d (Ay) + v``; see `launch` in `kernels.gpu.launch`."""
    parts = [None if part is None else part.detach() for part in (A, v, d, x0)]

    def solve(traced: bool) -> tuple[Iterates, Tensor]:
        found = launcher().launch(*parts, recipe, unheard(v.device), trace=traced, scaled=scaled)
        again = lambda: solve(True)[1]  # noqa: E731
        return Iterates(found.value, found.status, found.steps, again), finished(found.residuals, found.steps)

    found, residuals = solve(trace)
    return Iterates(found.value, found.status, found.steps, lambda: residuals) if trace else found


def finished(residuals: Tensor, steps: Tensor) -> Tensor:  # (B, K), from (max_steps, B)
    """Returns the trace, NaN after a sample has finished."""
    if residuals.numel() == 0:
        return residuals.mT
    kept = residuals[: int(steps.max())].mT
    return kept.masked_fill(torch.arange(kept.shape[1], device=kept.device) >= steps[:, None], torch.nan)


def solve_adjoint_on_device(problem: AffineProblem, x: Tensor, v: Tensor, g: Tensor, A: Tensor) -> Tensor:
    """Solves ``y = d (A'y + g)`` with ``d = phi'(Ax + v)`` and leaves a report."""
    method = problem.backward
    slope = problem.activation.slope_at(torch.addmm(v, x, A.mT))
    recipe = make_recipe(LINEAR, 0.0, method.solver, method.stop, method.max_steps, x.dtype)
    found = run_recipe(A.mT, g, slope, None, recipe, trace=problem.trace, scaled=True)
    method.note_adjoint(found)
    return found.value


ALIGNED = 16  # bytes, on which compiled kernels rely


@functools.cache
def _compiled() -> dict[Hashable, Any]:
    """Returns the kernels that were compiled so far, by the kind of call."""
    return {}


def call(
    kernel: Any, blocks: int, kind: Hashable, tensors: Sequence[Tensor], numbers: Sequence[Any],
    constants: dict[str, Any], options: dict[str, int], flag: Tensor | None = None,
) -> None:  # fmt: skip
    """Launches a kernel.

    Args:
        kernel: whose parameters are the flag if there is one, the tensors, the numbers and the constants.
        blocks: of the grid.
        kind: everything but addresses and unspecialised numbers on which the compiled kernel depends.
        tensors: on the current device.
        numbers: integers and floats.
        constants: by name, in the order of the parameters.
        options: of the compiler.
        flag: a tensor that may lie in the memory of the host.
    """
    pointers = [tensor.data_ptr() for tensor in tensors]
    first = () if flag is None else (flag,)
    index = tensors[0].device.index
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            kernel[(blocks, 1, 1)](*first, *tensors, *numbers, **constants, **options)
        return
    key = kernel, index, kind
    known = _compiled().get(key)
    if known is not None and not any(pointer % ALIGNED for pointer in pointers):
        known[(blocks, 1, 1)](*first, *pointers, *numbers, *constants.values())
        return
    known = kernel[(blocks, 1, 1)](*first, *tensors, *numbers, **constants, **options)
    if known is not None and not any(pointer % ALIGNED for pointer in pointers):
        _compiled()[key] = known
