"""The parameters of compiled kernels: a solve as plain numbers, and sequences.

A `KernelSpec` describes one solve in numbers; `unsupported` says what no kernel can do. A `SequenceSpec` describes
a run over sequences, `CellMatrices` are the matrices of a cell, and a `SequenceResult` holds the result.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.equilibrium.affine import AffineSpec, Engine, Factors
from wellposed.equilibrium.gradients import Implicit
from wellposed.equilibrium.loop import Iterates
from wellposed.equilibrium.method import Solve, SolveOptions, report
from wellposed.equilibrium.solution import Status
from wellposed.equilibrium.solvers import Anderson, Picard, default_ridge
from wellposed.equilibrium.stopping import (
    Absolute,
    Relative,
    Settled,
    Steps,
    default_tolerance,
    smallest_tolerance,
)
from wellposed.equilibrium.tracing import under_forward_mode, under_transform

RELU, SLOPED, LINEAR, TANH, SIGMOID = range(5)  # kinds of maps; LINEAR is the adjoint
TOLERANCE, SETTLED, COUNTED, POINT, CHECKED = range(5)  # stopping rules
KINDS = {"relu": RELU, "sloped": SLOPED, "tanh": TANH, "sigmoid": SIGMOID}  # by the names in `Traits.kernel`


@dataclass(frozen=True)
class KernelSpec:
    """The parameters of a kernel besides matrices and vectors.

    Attributes:
        kind, slope: the activation; the slope is that of leaky ReLU below zero.
        memory: of Anderson's extrapolation, 0 for plain steps; `worth`, `patience` and `ridge` as there.
        rule: accept a residual below ``max(atol, rtol |f(x)|)``, when nothing changes any more or after `limit`
            steps, or exactly after `limit` steps. The result is the image of an accepted point, which is nearer
            to the equilibrium, but for POINT, which is TOLERANCE with the point itself, and CHECKED, for maps of
            which nobody knows whether they contract: it evaluates some times more, and takes the images as long as
            residuals do not grow. On a CPU only.
        goes_on: whether another method takes samples over that are not finished after `max_steps`.
        prepared: a cache for engines.
    """

    kind: int
    slope: float
    memory: int
    worth: float
    patience: float
    ridge: float
    rule: int
    atol: float
    rtol: float
    limit: int
    max_steps: int
    goes_on: bool = False
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


def kind_of(activation: Activation) -> tuple[int, float] | None:
    """Returns the kind and slope of an activation; None if no kernel knows it.

    Example:
        >>> from wellposed.activations import get_activation
        >>> kind_of(get_activation("relu")), kind_of(get_activation("gelu"))
        ((0, 0.0), None)
    """
    kernel, slope = activation.traits.kernel or ("", 0.0)
    return (KINDS[kernel], slope) if kernel in KINDS else None


def kernel_spec(
    kind: tuple[int, float], options: SolveOptions, dtype: torch.dtype, max_steps: int | None = None, *,
    points: bool = False, checked: bool = False,
) -> KernelSpec:  # fmt: skip
    """Describes a solve in numbers; its solver and stopping rule must have kernels.

    Args:
        kind: the activation and its slope, or LINEAR and anything.
        options: of the solve.
        dtype: in which it is solved.
        max_steps: at most that of the options; the same if None.
        points: whether a tolerance returns points.
        checked: whether a tolerance looks at images of accepted points.
    """
    solver, stop, eps = options.solver, options.stop, torch.finfo(dtype).eps
    atol = rtol = 0.0
    rule, limit = POINT if points else CHECKED if checked else TOLERANCE, 0
    if isinstance(stop, Absolute):
        atol = stop.atol
    elif isinstance(stop, Relative):
        rtol = max(default_tolerance(dtype) if stop.rtol is None else stop.rtol, 8 * eps)
        atol = smallest_tolerance(dtype) if stop.atol is None else stop.atol
    elif isinstance(stop, Settled):
        rule, limit = SETTLED, stop.depth
    elif isinstance(stop, Steps):
        rule, limit = COUNTED, stop.n
    steps = options.max_steps if max_steps is None else max_steps
    memory, worth, patience, ridge = 0, 0.0, 0.0, 0.0
    if isinstance(solver, Anderson):
        memory, worth, patience = solver.memory, solver.worth, solver.patience
        ridge = default_ridge(dtype) if solver.ridge is None else solver.ridge
    capped = steps < options.max_steps
    return KernelSpec(*kind, memory, worth, patience, ridge, rule, atol, rtol, limit, steps, capped)


def unsupported(spec: AffineSpec, factors: Factors) -> str:
    """Says why no kernel can solve an equation, whatever the device; empty if one may."""
    A = factors[0]
    if not isinstance(spec.gradient, Implicit):
        return f"gradient {type(spec.gradient).__name__} has no kernel"
    if not spec.activation.componentwise:
        return f"activation {spec.activation.name} acts on blocks and has no kernel"
    if spec.splitting is not None:
        return "operator splitting (condition 'monotone') has no kernel"
    if spec.damping != 1:
        return "damped maps have no kernel"
    if spec.bound is not None:
        return "error bounds have no kernel"
    if len(factors) != 1:
        return "low-rank matrices have no kernel"
    if A.dim() != 2:
        return "ensembles have no kernel"
    if kind_of(spec.activation) is None:
        return f"activation {spec.activation.name} has no kernel"
    return _options_unsupported(spec.forward) or _options_unsupported(spec.backward)


def _options_unsupported(options: SolveOptions) -> str:
    solver, stop = options.solver, options.stop
    if type(solver) not in (Picard, Anderson):
        return f"solver {type(solver).__name__} has no kernel"
    if isinstance(solver, Picard | Anderson) and solver.damping != 1:
        return "damped steps have no kernel"
    if type(stop) not in (Absolute, Relative, Settled, Steps):
        return f"stopping rule {type(stop).__name__} has no kernel"
    if isinstance(stop, Relative) and stop.norm != "inf":
        return f"stopping rule Relative in the norm {stop.norm!r} has no kernel"
    return ""


def transform_why_not() -> str:
    """Says that no kernel runs where values cannot be read; empty elsewhere."""
    return "values cannot be read under vmap, torch.func and torch.compile" if under_transform() else ""


def finished(residuals: Tensor, steps: Tensor) -> Tensor:  # (B, K), from (max_steps, B)
    """Returns the trace, with NaN after a sample has finished."""
    if residuals.numel() == 0:
        return residuals[:0].mT
    trace = residuals[: int(steps.max())].mT
    return trace.masked_fill(torch.arange(trace.shape[1], device=trace.device) >= steps[:, None], torch.nan)


def slopes(kind: int, slope: float, image: Tensor) -> Tensor:
    """Returns phi'(z) where `image` is phi(z).

    Example:
        >>> slopes(TANH, 0.0, torch.tensor([0.0, 0.5]))
        tensor([1.0000, 0.7500])
    """
    if kind == TANH:
        return 1 - image * image
    if kind == SIGMOID:
        return image * (1 - image)
    return torch.where(image > 0, 1.0, slope).to(image.dtype)


class CellMatrices(NamedTuple):
    """The matrices of a cell; the last columns of B and D read the hidden state."""

    A: Tensor  # (n, n)
    B: Tensor  # (n, p + h)
    C: Tensor  # (h, n)
    D: Tensor | None  # (h, p + h)
    bias: Tensor | None  # (n,)

    @property
    def inputs(self) -> int:
        """The number p of inputs."""
        return self.B.shape[1] - self.C.shape[0]


@functools.lru_cache(maxsize=64)
def _offsets(sizes: tuple[int, ...]) -> Any:
    return np.cumsum([0, *sizes], dtype=np.int64)


class SequenceSpec(NamedTuple):
    """A run over sequences.

    Attributes:
        affine: how the equation of an element is solved, forward and backward.
        engine: what solves it.
        solve: logs and label for reports.
        sizes: sequences at each time, longest first.
        backwards: whether the last element comes first.
        warm_start: whether a solve starts from the state before, else from zero.
        trace: whether residuals are wanted.
        radius: of the l1 ball on which the engine projects the rows of A first; None where A is what it is.
    """

    affine: AffineSpec
    engine: "SequenceEngine"
    solve: Solve
    sizes: tuple[int, ...]
    backwards: bool = False
    warm_start: bool = True
    trace: bool = False
    radius: float | None = None

    @property
    def offsets(self) -> Any:  # (T + 1,) int64
        """The first element of every time."""
        return _offsets(self.sizes)

    @property
    def times(self) -> range:
        """The times in the order in which they are taken."""
        count = len(self.sizes)
        return range(count - 1, -1, -1) if self.backwards else range(count)

    def rows(self, time: int) -> slice:
        """Returns the elements of a time."""
        return slice(int(self.offsets[time]), int(self.offsets[time + 1]))

    def last_rows(self) -> slice | Tensor:
        """Tells where the last hidden states of the sequences are."""
        if self.backwards:
            return self.rows(0)
        if self.sizes[0] == self.sizes[-1]:
            return self.rows(len(self.sizes) - 1)
        lengths = (np.asarray(self.sizes)[:, None] > np.arange(self.sizes[0])).sum(0)
        return torch.from_numpy(self.offsets[lengths - 1] + np.arange(self.sizes[0]))

    def report_times(
        self, turns: range, solve: str, result: Iterates, options: SolveOptions, residuals: Callable[[int], Tensor]
    ) -> None:
        """Logs the solves of all times and reports the first that failed.

        Args:
            turns: positions in `times`, in the order in which they were solved.
            solve: "equilibrium" or "adjoint solve".
            result: of all elements.
            options: of the solves.
            residuals: computes the trace of a turn.
        """
        logs = [log.forward if solve == "equilibrium" else log.adjoint for log in self.solve.logs]
        bad = options.on_failure != "ignore" and result.worst >= Status.MAX_STEPS
        bad = bad and int(result.status.max()) >= Status.MAX_STEPS
        if not logs and not bad:
            return
        for turn in turns:
            t = self.times[turn]
            rows = self.rows(t)
            status, steps = result.status[rows], result.steps[rows]
            for log in logs:
                log.append((status, steps))
            if bad:
                element = Iterates(result.value[rows], status, steps, functools.partial(residuals, turn))
                name = f"{solve} at time step {t}{self.solve.label}"
                limit, once = options.max_steps, self.solve.once
                report(element, options.on_failure, solve=name, max_steps=limit, once=once)


class SequenceResult(NamedTuple):
    """The result of a run over sequences, element by element."""

    hidden: Tensor  # (N, h)
    last: Tensor  # (B, h): the last hidden states
    states: Tensor  # (N, n)
    status: Tensor  # (N,)
    steps: Tensor  # (N,)
    residual: Tensor  # (N,), empty unless wanted

    def to(self, dtype: torch.dtype) -> "SequenceResult":
        """Converts hidden states, states and residuals."""
        if dtype == self.hidden.dtype:
            return self
        names = ("hidden", "last", "states", "residual")
        return self._replace(**{name: getattr(self, name).to(dtype) for name in names})


class SequenceEngine(Engine, Protocol):
    """Solves whole sequences in one call each way."""

    def threads(self, work: int) -> AbstractContextManager[None]:
        """Limits the threads of products by their number of multiplications."""

    def project_rows(self, W: Tensor, radius: float) -> tuple[Tensor, Tensor]:
        """Projects rows on the l1 ball; returns A and what the backward pass needs."""

    def project_rows_backward(self, W: Tensor, levels: Tensor, g: Tensor) -> Tensor:
        """Returns the gradient by W from that by A."""

    def sequence_why_not(self, spec: AffineSpec, factors: Factors, hidden: int, batch: int) -> str:
        """Says why sequences must be solved time by time; empty if there is a kernel."""

    def sequence_forward(
        self, spec: SequenceSpec, data: Tensor, h0: Tensor, cell: CellMatrices, *, keep: bool
    ) -> tuple[SequenceResult, Tensor, Tensor]:
        """Solves from the first time to the last.

        Returns:
            the result, ``(n + p + h, N)`` states, inputs and hidden states before (and ones, where there is a
            bias and the engine wants them), and ``(n, N)`` images phi(Ax + v); the last two may be empty unless
            they are to `keep` for the backward pass.
        """

    def sequence_backward(
        self, spec: SequenceSpec, images: Tensor, known: Tensor, gradients: tuple[Tensor | None, ...],
        cell: CellMatrices,
    ) -> tuple[Tensor, Tensor, Callable[[], None]]:  # fmt: skip
        """Solves ``y = d (A'y + g)`` from the last time to the first.

        Args:
            images, known: of the forward pass.
            gradients: of all hidden states ``(N, h)``, of the last ones ``(B, h)`` and of the states ``(N, n)``.

        Returns:
            ``(n + h, N)`` y and the total gradients of the hidden states, the gradients of the first ones, and a
            function that waits for the solves and reports failures, for when all else has been launched.
        """


def common_why_not(spec: AffineSpec, factors: Factors, batch: int) -> str:
    """Says why no kernel can run over sequences; empty if one may."""
    if batch == 0:
        return "the batch is empty"
    if under_forward_mode():
        return "derivatives in forward mode have no kernel"
    return transform_why_not() or unsupported(spec, factors)
