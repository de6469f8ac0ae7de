"""Semismooth Newton for ``x = phi(Ax + v)``; samples, steps and the backward pass share factorisations.

The Jacobian of ``x - phi(Ax + v)`` is ``J = I - D A`` with the slopes D = diag(d) of a sample. Near a reference
``J0 = I - D0 A`` with a known inverse K it is ``J0 - E C A``, where C = d - d0 is not zero at the k states P in
which the slopes differ (E: the columns of I at P). With ``W = A K``,

    J y = r:    (I - C W_PP) q = C (W r)_P,    y = K (r + E q)
    J' w = g:   (I - C W_PP)' w_P = (K' g)_P,  w = K' g + W' E C w_P

so one factorisation of size k serves both passes. The reference D0 = 0 is free (K = I, W = A, P the active states
of a ReLU); others cost an inverse and pay where many samples are near them: all states active, the pattern of the
majority, a pattern that several samples share.

`choose_references` picks the references and `NewtonSystems` solves the reduced systems; `solve_active_set` is the
forward pass, `finish_adjoint` the backward pass.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.equilibrium.affine import AffineMap, TransposedMap
from wellposed.equilibrium.linear import solve_rows
from wellposed.equilibrium.loop import Iterates, iterate
from wellposed.equilibrium.maps import Map, max_norm
from wellposed.equilibrium.method import SolveOptions
from wellposed.equilibrium.solution import Status, failed
from wellposed.equilibrium.solvers import Anderson
from wellposed.equilibrium.stopping import Relative, Step, Stopping, default_tolerance
from wellposed.errors import InputError
from wellposed.kernels.cpu.engine import run_kernel
from wellposed.kernels.cpu.lu import aligned, collect, factorise, substitute
from wellposed.kernels.cpu.simd import VECTOR_BYTES
from wellposed.kernels.spec import LINEAR, kernel_spec, kind_of

CHUNK = 1 << 25  # numbers of factorisations that are alive at once
CACHED = 1 << 26  # numbers of factorisations that are cached for the backward pass
CANDIDATES = 4  # shared patterns that are considered as references


@dataclass(frozen=True)
class Reference:
    """Slopes with the inverse of their Jacobian."""

    slope: Tensor  # (n,)
    inverse: Tensor | None  # (n, n) K; None for the identity
    product: Tensor  # (n, n) A K

    @staticmethod
    def at(A: Tensor, slope: Tensor | None) -> "Reference":
        """Inverts ``I - D0 A``; None means D0 = 0."""
        if slope is None:
            return Reference(A.new_zeros(len(A)), None, A.contiguous())
        wide = A.double()
        inverse = torch.linalg.inv_ex(torch.eye(len(A), dtype=wide.dtype) - slope.double()[:, None] * wide)[0]
        return Reference(slope, _flushed(inverse, A.dtype), _flushed(wide @ inverse, A.dtype))

    def forward(self, right: Tensor) -> Tensor:
        """Multiplies every row by K."""
        return right if self.inverse is None else right @ self.inverse.mT

    def backward(self, right: Tensor) -> Tensor:
        """Multiplies every row by K'."""
        return right if self.inverse is None else right @ self.inverse


def _flushed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to a shorter dtype; negligible entries become zero, since denormal numbers are slow."""
    least = torch.finfo(dtype).eps ** 2 * matrix.abs().amax()
    return matrix.masked_fill(matrix.abs() < least, 0).to(dtype)


@dataclass(frozen=True)
class _Chunk:
    """Consecutive samples (in the order of size) that are factorised together."""

    begin: int
    end: int
    sizes: np.ndarray  # of the systems of every group of lanes
    offsets: np.ndarray  # of their matrices
    numbers: int

    @staticmethod
    def split(counts: np.ndarray, lanes: int) -> "list[_Chunk]":
        """Splits samples with ascending counts so that no chunk is longer than it must be."""
        sizes = np.maximum.reduceat(counts, np.arange(0, len(counts), lanes)).astype(np.int64)
        room = sizes * (sizes + 1) * lanes
        number = np.cumsum(room) // CHUNK
        chunks = []
        for chunk in np.unique(number):
            groups = np.flatnonzero(number == chunk)
            offsets = np.cumsum(room[groups]) - room[groups]
            end = min((groups[-1] + 1) * lanes, len(counts))
            chunks.append(_Chunk(groups[0] * lanes, end, sizes[groups], offsets, int(room[groups].sum())))
        return chunks


@dataclass
class NewtonSystems:
    """The reduced systems of samples that share a reference."""

    reference: Reference
    delta: Tensor  # (B, n) d - d0
    least: float = 0.0  # smaller differences are ignored
    factors: dict[int, np.ndarray] = field(default_factory=dict)

    @cached_property
    def _lists(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[_Chunk]]:
        counts = (self.delta.abs() > self.least).sum(1).numpy()
        order = np.argsort(counts, kind="stable")
        width = int(counts.max(initial=0))
        index = np.empty((len(order), width), np.int64)
        weight = np.empty((len(order), width), self._dtype)
        collect(self.delta.numpy(), self.least, order, counts, index, weight)
        return order, index, weight, _Chunk.split(counts, self._lanes)

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(np.float32 if self.delta.dtype == torch.float32 else np.float64)

    @property
    def _lanes(self) -> int:
        return VECTOR_BYTES // self._dtype.itemsize

    @property
    def numbers(self) -> int:
        """How many numbers the cached factorisations have."""
        return sum(len(work) for work in self.factors.values())

    def _factorised(self, chunk: _Chunk, keep: bool) -> np.ndarray:
        if chunk.begin in self.factors:
            return self.factors[chunk.begin]
        _, index, weight, _ = self._lists
        work = aligned(chunk.numbers, self._dtype)
        rows = slice(chunk.begin, chunk.end)
        matrix = self.reference.product.numpy()
        factorise(matrix, index[rows], weight[rows], chunk.sizes, chunk.offsets, work, self._lanes)
        if keep and self.numbers + chunk.numbers <= CACHED:
            self.factors[chunk.begin] = work
        return work

    def _reduced(self, right: Tensor, transpose: bool, keep: bool) -> Tensor:  # (B, n), zero outside P
        """Solves the reduced systems for the entries of `right` at P."""
        order, index, weight, chunks = self._lists
        positions, solution = torch.from_numpy(index), torch.zeros_like(right)
        if positions.shape[1] == 0:
            return solution
        empty = torch.from_numpy(weight) == 0  # padding of a row
        known = right[torch.from_numpy(order)].gather(1, positions).masked_fill_(empty, 0)
        for chunk in chunks:
            work = self._factorised(chunk, keep)
            block = known[chunk.begin : chunk.end].numpy()
            substitute(work, block, chunk.sizes, chunk.offsets, self._lanes, transpose)
        reduced = torch.zeros_like(right).scatter_add_(1, positions, known.masked_fill_(empty, 0))
        return solution.index_copy_(0, torch.from_numpy(order), reduced)

    def solve(self, right: Tensor, keep: bool = True) -> Tensor:  # (B, n)
        """Solves ``J y = right`` row by row."""
        q = self._reduced(self.delta * (right @ self.reference.product.mT), transpose=False, keep=keep)
        return self.reference.forward(right + q)

    def solve_transposed(self, right: Tensor) -> Tensor:  # (B, n)
        """Solves ``J' w = right`` row by row."""
        w = self.reference.backward(right)
        reduced = self._reduced(w, transpose=True, keep=True)
        return w + (self.delta * reduced) @ self.reference.product


def choose_references(A: Tensor, slope: Tensor) -> tuple[list[Reference], Tensor]:
    """Returns references that pay for their inverse, and the number of the nearest for every sample.

    Costs are nanoseconds on one core: 1.2 k^2 to fill a system, k^3 / 100 to factorise it and n^3 / 8 to prepare a
    reference, about twice that in float64. Which reference is taken changes a result by rounding only.

    Args:
        A: ``(n, n)``.
        slope: ``(B, n)`` of a piecewise linear activation at the current states.
    """
    references, nearest = [Reference.at(A, None)], torch.zeros(len(slope), dtype=torch.int64)
    cost = _cost((slope != 0).sum(1))
    candidates = _candidates(slope)
    costs = torch.stack([_cost((slope != candidate).sum(1)) for candidate in candidates])
    for _ in candidates:
        gain = (cost - costs).clamp_min(0).sum(1)
        best = int(gain.argmax())
        if gain[best] < A.shape[0] ** 3 / 8 + 1e5:
            break
        nearest = nearest.masked_fill(costs[best] < cost, len(references))
        cost = torch.minimum(cost, costs[best])
        references.append(Reference.at(A, candidates[best]))
    return references, nearest


def _cost(size: Tensor) -> Tensor:
    k = size.double()
    return 1.2 * k**2 + k**3 / 100


def _candidates(slope: Tensor) -> list[Tensor]:
    """Lists the extreme patterns, that of the majority and the most frequent ones."""
    low, high = slope.amin(), slope.amax()
    majority = torch.where((slope > (low + high) / 2).double().mean(0) > 0.5, high, low)
    names = torch.randint(1 << 40, (slope.shape[1],), generator=torch.Generator().manual_seed(0)).double()
    keys = (slope > (low + high) / 2).double() @ names  # exact: the sum of 512 such integers fits in 53 bits
    unique, pattern, count = keys.unique(return_inverse=True, return_counts=True)
    shared = count.topk(min(CANDIDATES, len(count)))
    first = torch.zeros_like(unique, dtype=torch.int64).scatter_(0, pattern, torch.arange(len(pattern)))
    frequent = [slope[first[key]] for key, times in zip(shared.indices, shared.values, strict=True) if times > 1]
    return [torch.full_like(slope[0], float(low)), torch.full_like(slope[0], float(high)), majority, *frequent]


IDLE = 3  # evaluations at the rounding level that bring nothing, after which a sample has stagnated
TRIALS = 64  # Newton steps within which the residual must have fallen; for A >= 0 the iterates rise until it does
WARM = 16  # steps after which active patterns are nearly right
DENSE = 1 << 24  # numbers of dense systems at once


@dataclass(frozen=True)
class Answer:
    """An equation solved for every sample."""

    value: Tensor  # (B, n)
    status: Tensor  # (B,)
    steps: Tensor  # (B,) evaluations of the map
    residual: Tensor  # (B,) of the last point


@dataclass(frozen=True)
class ActiveSetAnswer(Answer):
    """The equilibrium, with the factorisations that the backward pass can reuse."""

    A: Tensor
    slope: Tensor  # (B, n) phi'(Ax + v)
    solved: "tuple[_Solved, ...]" = field(repr=False)

    def adjoint(self, gradient: Tensor, stop: Stopping | None = None, max_steps: int = 200) -> Answer:
        """Solves ``y = d (A' y + g)``, directly where there is a factorisation.

        Args:
            gradient: ``(B, n)`` g.
            stop: None means `Relative()`.
            max_steps: the most evaluations.
        """
        return _Adjoint(self, self.slope * gradient, stop or Relative(), max_steps).solve()


@dataclass(frozen=True)
class _Solved:
    """The systems of one Newton step and the samples they belong to."""

    systems: NewtonSystems
    samples: Tensor  # (K,)


def solve_active_set(
    A: Tensor,
    v: Tensor,
    activation: Activation,
    x0: Tensor | None = None,
    stop: Stopping | None = None,
    max_steps: int = 200,
    warm: int = WARM,
) -> ActiveSetAnswer:
    """Solves ``x = phi(Ax + v)`` by semismooth Newton, the active-set method for ReLU.

    A few accelerated steps come first: they finish easy samples and get most of the active patterns right. A
    Newton step is accepted if the residual falls, else replaced by a plain step. A sample is `CONVERGED` only if
    the stopping rule accepts it at the map itself.

    Args:
        A: ``(n, n)`` in float32 or float64 on the CPU.
        v: ``(B, n)``.
        activation: componentwise; piecewise linear ones end after finitely many steps.
        x0: start; None means zero.
        stop: a rule without memory; None means `Relative()`.
        max_steps: the most evaluations of the map for one sample.
        warm: evaluations before the first Newton step.

    Example:
        >>> from wellposed.activations import get_activation
        >>> A = torch.tensor([[0.0, 0.9], [-0.9, 0.0]], dtype=torch.float64)
        >>> answer = solve_active_set(A, torch.ones(1, 2, dtype=torch.float64), get_activation("relu"))
        >>> answer.value, answer.adjoint(torch.ones(1, 2, dtype=torch.float64)).value
        (tensor([[1.0497, 0.0552]], dtype=torch.float64), tensor([[0.0552, 1.0497]], dtype=torch.float64))
    """
    _check(A, v, activation, stop)
    f, start = AffineMap((A,), v, activation), torch.zeros_like(v) if x0 is None else x0
    with torch.no_grad():
        solve = _Newton(f, stop or Relative(), max_steps)
        return solve.run(start, min(warm, max_steps))


def _check(A: Tensor, v: Tensor, activation: Activation, stop: Stopping | None) -> None:
    if A.dim() != 2 or v.dim() != 2 or v.shape[1] != A.shape[0] or A.shape[0] != A.shape[1]:
        raise InputError(
            f"the active-set solve takes A (n, n) and v (B, n); received {tuple(A.shape)}, {tuple(v.shape)}"
        )
    if A.dtype not in (torch.float32, torch.float64) or A.dtype != v.dtype:
        raise InputError(
            f"A and v must both be float32 or float64; received {A.dtype} and {v.dtype}; convert them, or use "
            "the reference loop"
        )
    if not activation.componentwise:
        raise InputError(f"{activation.name!r} acts on blocks, not on single states; use the reference loop")
    if stop is not None and not (stop.stateless and stop.certifies):
        raise InputError(f"{stop} keeps a state or counts steps; use Relative or Absolute, or the reference loop")


def _few_steps(f: AffineMap | TransposedMap, x0: Tensor, stop: Stopping, steps: int) -> Iterates:
    options, A = SolveOptions(Anderson(), stop, steps), f.factors[0]
    if isinstance(f, TransposedMap):
        kernel = kernel_spec((LINEAR, 0.0), options, x0.dtype)
        return run_kernel(A, f.offset, f.slope, x0, kernel, trace=True)
    kind = kind_of(f.activation)
    if kind is None:
        return iterate(f, x0, options.solver, stop, steps)
    return run_kernel(A, f.v, None, x0, kernel_spec(kind, options, x0.dtype), trace=True)


@dataclass
class _Rows:
    """The samples that are running; all fields are narrowed together."""

    samples: Tensor
    x: Tensor  # (K, n)
    safe: Tensor  # (K, n) where to go if the trials fail
    best: Tensor  # (K,) residual to beat; infinite where the last step was plain
    trials: Tensor  # (K,) since the residual fell
    failures: Tensor  # (K,) times that trials were taken back
    wait: Tensor  # (K,) plain steps before the next trial
    least: Tensor  # (K,) least residual so far
    idle: Tensor  # (K,) evaluations since it fell

    @staticmethod
    def begin(samples: Tensor, x: Tensor) -> "_Rows":
        none = torch.zeros_like(samples)
        infinite = x.new_full(samples.shape, torch.inf)
        return _Rows(samples, x, x, infinite, none, none, none, infinite, none)

    def narrow(self, keep: Tensor) -> "_Rows":
        return _Rows(*(value[keep] for value in vars(self).values()))


class _Newton:
    """One solve: warm start, then trial steps until every sample has a status."""

    def __init__(self, f: AffineMap, stop: Stopping, max_steps: int) -> None:
        self.f, self.stop, self.max_steps = f, stop, max_steps
        self.A = f.factors[0]
        low, high = f.activation.slope
        self.linear = f.activation.homogeneous  # componentwise and homogeneous: linear on either side of zero
        self.constant = low == high
        self.references: list[Reference] = []
        self.nearest = torch.zeros(0, dtype=torch.int64)  # (B,) number of every sample's reference
        self.solved: list[_Solved] = []

    def run(self, x0: Tensor, warm: int) -> ActiveSetAnswer:
        """Solves for all samples."""
        self._begin(_few_steps(self.f, x0, self.stop, warm) if warm else None, x0)
        rows = _Rows.begin(
            (self.status == Status.RUNNING).nonzero()[:, 0], self.value[self.status == Status.RUNNING]
        )
        index = max(warm, 1)  # evaluations, the one about to be made included
        while len(rows.samples):  # `rows` are the samples without a status
            rows = self._step(rows, index)
            index += 1
        z = torch.addmm(self.f.v, self.value, self.A.mT)
        slope = self.f.activation.slope_at(z)
        return ActiveSetAnswer(
            self.value, self.status, self.steps, self.residual, self.A, slope, tuple(self.solved)
        )

    def _begin(self, iterates: Iterates | None, x0: Tensor) -> None:
        """Starts with the samples that the first steps have solved; the others are still running."""
        if iterates is None:
            self.value, size = x0.clone(), len(x0)
            self.status = torch.zeros(size, dtype=torch.int8)
            self.steps, self.residual = torch.zeros(size, dtype=torch.int64), x0.new_full((size,), torch.nan)
            self.first = x0.new_full((size,), torch.inf)
            return
        self.value, self.status, self.steps = iterates.value, iterates.status.clone(), iterates.steps.clone()
        self.residual = iterates.last_residual.clone()
        self.first = iterates.residuals[:, 0] if iterates.residuals.numel() else self.residual
        unfinished = (self.status == Status.MAX_STEPS) | (self.status == Status.DIVERGED)
        if int(self.steps.max() if len(self.steps) else 0) < self.max_steps:
            self.status[unfinished] = Status.RUNNING

    def _step(self, rows: _Rows, index: int) -> _Rows:
        """Evaluates the map, writes the samples that are finished and moves the others."""
        f = replace(self.f, v=self.f.v[rows.samples])
        z = torch.addmm(f.v, rows.x, self.A.mT)
        fx = f.activation.function(z)
        residual = max_norm(fx - rows.x)
        ended = self._finish(rows, Step(rows.x, fx, f, residual, index), index)
        fallen = (residual < rows.best) | rows.best.isinf()
        rows.trials = torch.where(fallen, 0, rows.trials + 1)
        rejected = ~fallen & ((rows.trials >= TRIALS) | ~residual.isfinite())
        rows.failures = rows.failures + rejected
        rows.wait = torch.where(rejected, 2 ** rows.failures.clamp_max(4) - 1, rows.wait - 1).clamp_min(0)
        rows.safe = torch.where(fallen[:, None], fx, rows.safe)
        rows.best = torch.where(fallen, residual, rows.best)
        going = (ended == 0).nonzero()[:, 0]
        return self._move(rows.narrow(going), z[going], fx[going], rejected[going])

    def _finish(self, rows: _Rows, step: Step, index: int) -> Tensor:
        """Writes the samples that are finished; returns the statuses, zero for the others."""
        status = torch.zeros_like(rows.samples, dtype=torch.int8)
        lower = step.residual < rows.least
        rows.idle, rows.least = torch.where(lower, 0, rows.idle + 1), torch.minimum(rows.least, step.residual)
        floor = 4 * step.f.rounding(step.x, step.fx)
        status[(rows.idle >= IDLE) & (step.residual <= floor)] = Status.STAGNATED
        if index >= self.max_steps:
            grown = step.residual > 1e3 * self.first[rows.samples]
            status = torch.where(grown, Status.DIVERGED, Status.MAX_STEPS).to(torch.int8)
        # A trial that is not finite is taken back; a plain step that is not, ends the solve.
        status[~step.residual.isfinite() & rows.best.isinf()] = Status.NONFINITE
        status[self.stop.check(step, ())[0] & step.residual.isfinite()] = Status.CONVERGED
        if index == 1:
            self.first[rows.samples] = step.residual
        self._write(rows, step, status, index)
        return status

    def _write(self, rows: _Rows, step: Step, status: Tensor, index: int) -> None:
        ended = (status != 0).nonzero()[:, 0]
        samples, accepted = rows.samples[ended], (status[ended] == Status.CONVERGED)[:, None]
        self.value[samples] = torch.where(accepted, step.fx[ended], rows.x[ended])  # as in the loop
        self.status[samples], self.steps[samples] = status[ended], index
        self.residual[samples] = step.residual[ended]

    def _move(self, rows: _Rows, z: Tensor, fx: Tensor, rejected: Tensor) -> _Rows:
        """Takes failed trials back, takes plain steps where `wait` says so, and tries Newton's step elsewhere."""
        trying = (~rejected & (rows.wait == 0)).nonzero()[:, 0]
        x = torch.where(rejected[:, None], rows.safe, fx)
        best = torch.full_like(rows.best, torch.inf)
        if len(trying):
            y = self._direction(
                rows.samples[trying], self.f.activation.slope_at(z[trying]), fx[trying] - rows.x[trying]
            )
            finite = y.isfinite().all(1)
            trying, y = trying[finite], y[finite]
            x[trying] = rows.x[trying] + y
            best[trying] = rows.best[trying]
        rows.x, rows.best = x, best
        return rows

    def _direction(self, samples: Tensor, slope: Tensor, r: Tensor) -> Tensor:
        """Solves ``(I - D A) y = r``; with pivoting where the reduced systems have lost accuracy."""
        if not self.references:
            self._choose(samples, slope)
        y = torch.empty_like(r)
        least = 0.0 if self.linear else torch.finfo(r.dtype).eps
        for number, reference in enumerate(self.references):
            rows = (self.nearest[samples] == number).nonzero()[:, 0]
            if len(rows):
                systems = NewtonSystems(reference, slope[rows] - reference.slope, least)
                cached = sum(entry.systems.numbers for entry in self.solved)
                y[rows] = systems.solve(r[rows], keep=cached < CACHED)
                self.solved.append(_Solved(systems, samples[rows]))
        defect = max_norm(r - y + slope * (y @ self.A.mT))
        bad = (~(defect <= 0.1 * max_norm(r))).nonzero()[:, 0]
        if len(bad):
            y[bad] = _pivoted(self.A, slope[bad], r[bad])
        return y

    def _choose(self, samples: Tensor, slope: Tensor) -> None:
        self.nearest = torch.zeros(len(self.f.v), dtype=torch.int64)
        if self.constant:
            self.references = [Reference.at(self.A, slope[0])]
        elif self.linear:
            self.references, self.nearest[samples] = choose_references(self.A, slope)
        else:
            self.references = [Reference.at(self.A, None)]


def _pivoted(A: Tensor, slope: Tensor, right: Tensor, transpose: bool = False) -> Tensor:
    """Solves ``(I - D A) y = right`` or its transpose from dense systems, some samples at a time."""
    identity = torch.eye(len(A), dtype=A.dtype)
    solutions = []
    for begin in range(0, len(slope), max(1, DENSE // A.numel())):
        rows = slice(begin, begin + max(1, DENSE // A.numel()))
        system = identity - slope[rows, :, None] * A
        solutions.append(solve_rows(system.mT if transpose else system, right[rows]))
    return torch.cat(solutions)


def finish_forward(f: AffineMap, x: Tensor, stop: Stopping, max_steps: int) -> Answer:
    """Solves ``x = phi(Ax + v)`` from where an iteration has left it, in float64, which takes a step or two.

    In float32 Newton's method would wander about among the roundings of the solution.

    Args:
        f: the map.
        x: ``(B, n)`` start.
        stop: a rule without memory.
        max_steps: the most evaluations.
    """
    wide, rule = replace(f, factors=(f.factors[0].double(),), v=f.v.double()), _rule_of(stop, x.dtype)
    start = x.double()
    answer = solve_active_set(wide.factors[0], wide.v, f.activation, start, rule, max_steps, warm=0)
    return answer if wide.v is f.v else _rounded(answer, f, wide, x, stop)


def finish_adjoint(A: Tensor, f: TransposedMap, y: Tensor, stop: Stopping, max_steps: int) -> Answer:
    """Solves ``y = d (A' y) + offset`` by factorisations in float64, from where an iteration has left it.

    Args:
        A: ``(n, n)`` of the forward equation.
        f: the map of the backward pass.
        y: ``(B, n)`` start.
        stop: a rule without memory.
        max_steps: the most evaluations.
    """
    A, factors = A.double(), (f.factors[0].double(),)
    wide = replace(f, factors=factors, slope=f.slope.double(), offset=f.offset.double())
    references, nearest = choose_references(A, wide.slope)
    solved = []
    for number, reference in enumerate(references):
        rows = (nearest == number).nonzero()[:, 0]
        if len(rows):
            solved.append(_Solved(NewtonSystems(reference, wide.slope[rows] - reference.slope), rows))
    none = torch.empty(0)
    systems = ActiveSetAnswer(none, none, none, none, A, wide.slope, tuple(solved))
    answer = _Adjoint(systems, wide.offset, _rule_of(stop, y.dtype), max_steps).solve(y.double())
    return answer if wide.slope is f.slope else _rounded(answer, f, wide, y, stop)


def _rule_of(stop: Stopping, dtype: torch.dtype) -> Stopping:
    """Returns a rule whose tolerance is that of a dtype, whatever it is asked about."""
    if type(stop) is Relative and stop.rtol is None:
        return replace(stop, rtol=default_tolerance(dtype))
    return stop


def _rounded(answer: Answer, f: Map, wide: Map, start: Tensor, stop: Stopping) -> Answer:
    """Rounds a solution in float64 to the dtype of `start`, and judges it there by its residual in float64."""
    value = answer.value.to(start.dtype)
    image = wide(value.double())
    residual, image = max_norm(image - value.double()).to(start.dtype), image.to(start.dtype)
    accepted = stop.check(Step(value, image, f, residual, 0), ())[0]
    level = residual <= 4 * f.rounding(value, image)
    status = torch.where(level, Status.STAGNATED, Status.MAX_STEPS).masked_fill(accepted, Status.CONVERGED)
    status = torch.where(answer.status == Status.CONVERGED, status.to(answer.status.dtype), answer.status)
    value = torch.where((status == Status.CONVERGED)[:, None], image, value)  # as in the loop
    finite = value.isfinite().all(1)  # a solution may be too large for the dtype
    status, value = status.masked_fill(~finite, Status.NONFINITE), torch.where(finite[:, None], value, start)
    return Answer(value, status, answer.steps, residual)


class _Adjoint:
    """The backward solve: factorisations where there are some, else a few steps and then factorisations."""

    def __init__(self, answer: ActiveSetAnswer, offset: Tensor, stop: Stopping, max_steps: int) -> None:
        self.answer, self.stop, self.max_steps = answer, stop, max_steps
        self.f = TransposedMap((answer.A.mT,), answer.slope, offset, 1.0)
        self.owner = _owners(answer)

    def solve(self, start: Tensor | None = None) -> Answer:
        """Solves for all samples; a solution is refined until the stopping rule accepts it at the map."""
        with torch.no_grad():
            if start is None:
                y, steps = self._first()
            else:
                y, steps = start, torch.zeros(len(start), dtype=torch.int64)
            for _ in range(3):
                _, _, accepted = self._judge(y)
                rest = (~accepted & y.isfinite().all(1) & (steps < self.max_steps)).nonzero()[:, 0]
                if not len(rest):
                    break
                f = self._at(rest)
                correction = self._direct(rest, f(y[rest]) - y[rest])
                y = y.index_add(0, rest, correction)
                steps[rest] += 1
            image, residual, accepted = self._judge(y)
            value = torch.where(accepted[:, None], image, y)  # as in the loop
            return Answer(value, self._status(y, residual, accepted), steps, residual)

    def _first(self) -> tuple[Tensor, Tensor]:
        """Takes a few steps for samples without a factorisation and solves the others."""
        y, steps = torch.zeros_like(self.f.slope), torch.ones(len(self.owner), dtype=torch.int64)
        loose = self.owner < 0
        if bool(loose.any()):
            short = _few_steps(self._at(loose), y[loose], self.stop, min(WARM, self.max_steps))
            y[loose], steps[loose] = short.value, short.steps
            loose = loose.masked_scatter(loose, ~failed(short.status))
        rest = (~loose).nonzero()[:, 0]
        if len(rest):
            f = self._at(rest)
            y[rest] += self._direct(rest, f(y[rest]) - y[rest])
        return y, steps

    def _at(self, rows: Tensor) -> TransposedMap:
        return replace(self.f, slope=self.f.slope[rows], offset=self.f.offset[rows])

    def _judge(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the image of a solution, its residual and whether that is accepted."""
        fy = self.f(y)
        residual = max_norm(fy - y)
        accepted = self.stop.check(Step(y, fy, self.f, residual, 0), ())[0]
        return fy, residual, accepted & residual.isfinite()

    def _status(self, y: Tensor, residual: Tensor, accepted: Tensor) -> Tensor:
        floor = 4 * self.f.rounding(y, y)
        status = torch.where(residual <= floor, Status.STAGNATED, Status.MAX_STEPS)
        status = torch.where(residual.isfinite(), status, Status.NONFINITE)
        return torch.where(accepted, Status.CONVERGED, status).to(torch.int8)

    def _direct(self, samples: Tensor, right: Tensor) -> Tensor:
        """Solves ``(I - D A') y = right``."""
        w, answer = torch.empty_like(right), self.answer
        position = torch.full((len(self.owner),), -1).index_copy_(0, samples, torch.arange(len(samples)))
        for number, entry in enumerate(answer.solved):
            mine = (self.owner[entry.samples] == number) & (position[entry.samples] >= 0)
            if bool(mine.any()):
                # (I - D A') y = b has y = b + D J'^-1 A' b
                whole = right.new_zeros(len(entry.samples), right.shape[1])
                whole[mine] = (right @ answer.A)[position[entry.samples[mine]]]
                w[position[entry.samples[mine]]] = entry.systems.solve_transposed(whole)[mine]
        fresh = (self.owner[samples] < 0).nonzero()[:, 0]
        slope = answer.slope[samples]
        if len(fresh):
            systems = NewtonSystems(Reference.at(answer.A, None), slope[fresh])
            w[fresh] = systems.solve_transposed((right @ answer.A)[fresh])
        y = right + slope * w
        defect = max_norm(right - y + slope * (y @ answer.A))
        bad = (~(defect <= 0.1 * max_norm(right))).nonzero()[:, 0]
        if len(bad):
            w_pivoted = _pivoted(answer.A, slope[bad], (right @ answer.A)[bad], transpose=True)
            y[bad] = right[bad] + slope[bad] * w_pivoted
        return y


def _owners(answer: ActiveSetAnswer) -> Tensor:  # (B,)
    """Returns for every sample the latest systems that were made at its final slopes, -1 without any."""
    owner = torch.full((len(answer.slope),), -1)
    for number, entry in enumerate(answer.solved):
        delta = answer.slope[entry.samples] - entry.systems.reference.slope
        same = (delta == entry.systems.delta).all(1)
        owner[entry.samples[same]] = number
    return owner
