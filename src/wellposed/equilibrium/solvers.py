"""Solvers propose the next iterate; the loop decides when to stop.

`Picard` is plain or damped fixed-point iteration. `Anderson` alternates extrapolation with plain steps, batched,
regularised and safeguarded. `Broyden` has limited memory; its `Safeguard` rejects bad steps, sample by sample.
`Newton` is semismooth: dense for small states, matrix-free above. `RobbinsMonro` is stochastic approximation:
damped steps that shrink, for maps whose values are noisy.
"""

import abc
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.equilibrium.linear import eliminate, gmres, solve_rows
from wellposed.equilibrium.maps import Map, max_norm, pieces
from wellposed.equilibrium.tracing import under_functorch, under_transform
from wellposed.errors import InputError
from wellposed.registry import Registry

SolverState = tuple[Tensor, ...]


class Solver(abc.ABC):
    """Proposes the next iterate from ``x`` and ``f(x)``.

    The state is a tuple of batch-first tensors, so that the loop can drop finished rows.
    """

    steps_per_check: int = 1  # steps that may be taken between checks of the loop; 1 where a step is expensive

    @property
    def cycle(self) -> int:
        """Steps after which the state has the shapes of `init` again; 0 if that is never or not known."""
        return 0

    def init(self, x: Tensor) -> SolverState:
        """Returns the solver's own state for a solve that starts at `x`."""
        return ()

    @abc.abstractmethod
    def step(self, f: Map, x: Tensor, fx: Tensor, state: SolverState) -> tuple[Tensor, SolverState]:
        """Returns the next iterate and the next state."""

    def only_plain(self, state: SolverState, rows: Tensor) -> SolverState | None:
        """Returns the state after which some rows take plain steps; None if the solver has no others, or none."""
        return None


@dataclass(frozen=True)
class Picard(Solver):
    """Iterates ``x <- (1 - damping) x + damping f(x)`` (003 Theorem 1 with damping 1)."""

    damping: float = 1.0

    steps_per_check = 16

    def __post_init__(self) -> None:
        if not 0 < self.damping <= 1:
            raise InputError(f"damping must lie in (0, 1]; received {self.damping}")

    @property
    def cycle(self) -> int:
        return 1

    def step(self, f: Map, x: Tensor, fx: Tensor, state: SolverState) -> tuple[Tensor, SolverState]:
        return (fx if self.damping == 1 else torch.lerp(x, fx, self.damping)), state


@dataclass(frozen=True)
class Anderson(Solver):
    """Takes plain steps and, from time to time, the combination of them whose residuals cancel.

    With the residuals ``r_i = f(x_i) - x_i`` of the latest `memory` + 1 plain steps, jumps to
    ``sum a_i f(x_i)`` where the weights minimise ``|sum a_i r_i|_2`` and add up to one (Anderson 1965; the
    alternation with plain steps is that of Pratapa, Suryanarayana and Pask 2016). The next evaluation
    judges the jump: it must have gained at least what `worth` plain steps gain, else the solve goes on
    from the last plain point. A failed jump thus costs one evaluation in ``memory + 3``, after repeated
    failures ever fewer jumps are tried, and the solver needs at most about 1.2 times the evaluations of
    `Picard`.

    Residuals are judged in the l1 norm: averaging iterates whose residual merely moves from state to
    state (a cyclic shift) shrinks the other norms and gains nothing.

    Args:
        memory: differences that a jump combines.
        damping: ``(1 - damping) x + damping f(x)`` replaces ``f(x)``.
        worth: plain steps that a jump must be worth.
        patience: a sample that plain steps bring to the accuracy of the dtype within so many makes no jumps.
        ridge: regularisation of the least squares problem, relative to its trace; None means 1e-12, or the
            rounding unit of the dtype if that is larger.
    """

    memory: int = 5
    damping: float = 1.0
    worth: float = 2.0
    patience: float = 12.0
    ridge: float | None = None

    steps_per_check = 16

    def __post_init__(self) -> None:
        if self.memory < 1 or not 0 < self.damping <= 1:
            raise InputError(
                "memory must be at least 1 and damping in (0, 1]; received "
                f"memory={self.memory}, damping={self.damping}"
            )

    # The state: cycles to sit out, failures in a row, and then either the plain points (x, f(x), f(f(x)), ...)
    # or, after a jump, where to go if it fails, the residual to beat and the samples that jumped. Cycles have the
    # same length for all samples, jump or not, so that a sample does not depend on its companions.

    @property
    def cycle(self) -> int:
        return self.memory + 2

    def init(self, x: Tensor) -> SolverState:
        none = x.new_zeros(x.shape[0])
        return none, none

    def step(self, f: Map, x: Tensor, fx: Tensor, state: SolverState) -> tuple[Tensor, SolverState]:
        if self.damping != 1:
            fx = torch.lerp(x, fx, self.damping)
        if state[-1].dtype == torch.bool:
            return self._judge(x, fx, *state)
        plain = (*state, fx) if len(state) > 2 else (*state, x, fx)
        if len(plain) < self.memory + 4:
            return fx, plain
        return self._jump(*plain)

    def _jump(self, rest: Tensor, failures: Tensor, *points: Tensor) -> tuple[Tensor, SolverState]:
        """Extrapolates from the plain points, `memory` + 2 of them."""
        last = points[-1]
        norm, before = _l1_norm(last - points[-2]), _l1_norm(points[-2] - points[-3])
        rate = (norm / before).clamp_max(1)
        goal = 8 * torch.finfo(last.dtype).eps * _l1_norm(last)
        jumps = (norm * rate**self.patience > goal) & (rest <= 0)
        target = rate**self.worth * norm
        if not under_transform() and not bool(jumps.any()):
            return last, (rest - 1, failures, last, target, jumps)
        compiled = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
        if compiled and not last.is_cuda:  # a device would wait for the condition
            branches = lambda *points: self._extrapolate(points, jumps), lambda *points: points[-1].clone()
            jump = torch.cond(jumps.any(), *branches, points)
        else:
            jump = self._extrapolate(points, jumps)
        jumps = jumps & _finite_rows(jump)
        return torch.where(jumps[:, None], jump, last), (rest - 1, failures, last, target, jumps)

    def _extrapolate(self, points: tuple[Tensor, ...], wanted: Tensor) -> Tensor:  # (B, n)
        """Combines the points of the wanted rows, of others only where that is not dearer."""
        last = points[-1]
        if _readable(last) and 2 * len(rows := wanted.nonzero()[:, 0]) <= len(last):
            few = tuple(point[rows] for point in points)
            return last.index_copy(0, rows, self._extrapolate(few, wanted[rows]))
        residuals = _stacked(points, pieces(last)).diff(dim=2)  # (B, pieces, memory + 1, n / pieces)
        ridge = default_ridge(last.dtype) if self.ridge is None else self.ridge
        latest = -min(self.memory, last.shape[1])  # more differences than states determine nothing
        gamma = least_squares(residuals.diff(dim=2)[:, :, latest:], residuals[:, :, -1], ridge)
        return last - _combination(residuals[:, :, latest:], gamma).reshape(last.shape)  # differences of images

    def only_plain(self, state: SolverState, rows: Tensor) -> SolverState:
        rest, failures, *others = state
        if others and others[-1].dtype == torch.bool:
            others[-1] = others[-1] & ~rows
        return (rest.masked_fill(rows, torch.inf), failures, *others)

    @staticmethod
    def _judge(
        x: Tensor, fx: Tensor, rest: Tensor, failures: Tensor, safe: Tensor, target: Tensor, jumped: Tensor
    ) -> tuple[Tensor, SolverState]:
        """Goes on from the jump where it paid, from the last plain point elsewhere."""
        if _readable(jumped) and not bool(jumped.any()):
            return fx, (rest, failures)
        failed = jumped & ~(_l1_norm(fx - x) <= target)
        if _readable(failed) and not bool(failed.any()):
            return fx, (rest, failures.masked_fill(jumped, 0))
        failures = torch.where(jumped, (failures + 1) * failed, failures)
        rest = torch.where(failed, (failures - 1).clamp_max(3).exp2() - 1, rest)
        return torch.where(failed[:, None], safe, fx), (rest, failures)


def default_ridge(dtype: torch.dtype) -> float:
    """Returns a ridge that suppresses rounding and leaves useful differences alone."""
    return max(1e-12, torch.finfo(dtype).eps)


def _l1_norm(vector: Tensor) -> Tensor:  # (B,), from (B, n)
    return vector.detach().abs().sum(1)


def _finite_rows(x: Tensor) -> Tensor:  # (B,), from (B, n)
    """Tells which rows are finite; rows whose sum leaves the range of the dtype count as not."""
    total = max_norm(x.detach()) if x.is_cuda else x.detach().sum(1)
    return total * 0 == 0


def _readable(x: Tensor) -> bool:
    """Tells whether values can be read on the host without a wait, which is cheaper than masks."""
    return not x.is_cuda and not under_transform()


def _stacked(points: tuple[Tensor, ...], count: int) -> Tensor:  # (B, count, k, n / count)
    """Stacks points whose rows are cut into pieces."""
    if count == 1:
        return torch.stack(points, dim=1)[:, None]
    return torch.stack([point.unflatten(1, (count, -1)) for point in points], dim=2)


def least_squares(columns: Tensor, right: Tensor, ridge: float) -> Tensor:  # (B, s, m, c), (B, s, c) -> (B, m)
    """Minimises ``|right - sum gamma_i columns_i|`` per sample by regularised normal equations."""
    vectors = torch.cat([columns, right[:, :, None]], dim=2)
    if right.dtype == torch.float64 or right.is_cuda:
        vectors = vectors * _power_of_two(right)[:, None, None, None]  # squares could leave the range of the dtype
    else:
        vectors = vectors.double()  # cheap on a CPU
    if vectors.shape[1] == 1:
        products = torch.bmm(vectors[:, 0], vectors[:, 0].mT).double()
    else:
        products = (vectors @ vectors.mT).double().sum(1)
    gram, image = products[:, :-1, :-1], products[:, :-1, -1:]
    sizes = gram.diagonal(dim1=1, dim2=2)
    shift = ridge * sizes.sum(1, keepdim=True) + torch.finfo(torch.float64).tiny
    if torch.is_grad_enabled() or under_transform():
        gram = gram + shift.expand_as(sizes).diag_embed()
    else:
        sizes += shift
    by_hand = gram.is_cuda or torch.compiler.is_compiling()  # the library waits for the device, or calls LAPACK
    solution = eliminate(gram, image) if by_hand else torch.linalg.solve_ex(gram, image)[0]
    return solution[:, :, 0].to(right.dtype)


def _power_of_two(values: Tensor) -> Tensor:  # (B,), from (B, s, c)
    """Returns a power of two that brings the largest entry of every sample near one, exactly."""
    size = max_norm(values.detach().flatten(1))
    info = torch.finfo(values.dtype)
    return torch.exp2(-torch.where(size > 0, size, 1).clamp(info.smallest_normal, info.max).log2().floor())


def _combination(vectors: Tensor, weights: Tensor) -> Tensor:  # (B, s, m, c), (B, m) -> (B, s, c)
    """Adds up weighted vectors; as a matrix product where that is faster."""
    if not vectors.is_cuda and vectors.shape[-1] < 1024:
        return (vectors * weights[:, None, :, None]).sum(2)
    return (weights[:, None, None].expand(-1, vectors.shape[1], -1, -1) @ vectors)[:, :, 0]


Guard = tuple[Tensor, ...]


@dataclass(frozen=True)
class Safeguard:
    """Rejects a trial step whose residual has grown too much, and pauses after it.

    Args:
        growth: the growth of the residual that is tolerated.
        pause: plain steps after a rejected trial.
    """

    growth: float
    pause: int

    def init(self, x: Tensor) -> Guard:
        """Returns the plain image of the best point, its residual, whether a trial is pending, steps to wait.

        The last two are left out while trials are pending for all samples, as is the rule.
        """
        size = x.new_zeros(x.shape[0])
        return x, torch.full_like(size, torch.inf), size.bool(), size

    def judge(self, guard: Guard, g: Tensor, fx: Tensor) -> tuple[Tensor, Guard]:
        """Judges the point that has just been evaluated, given ``g = fx - x``; returns the rejected samples."""
        safe, best, *others = guard
        norm = _l1_norm(g)
        paid = norm <= self.growth * best
        if len(others) == 0:
            if bool(paid.all()):
                return ~paid, (fx, norm)
            others = [torch.ones_like(paid), torch.zeros_like(norm)]
        pending, wait = others
        rejected = pending & ~paid
        if _readable(fx) and not bool(rejected.any()):
            return rejected, (fx, norm, pending, wait - 1)
        wait = (wait - 1).masked_fill(rejected, self.pause)
        best = torch.where(rejected, best, norm)
        return rejected, (torch.where(rejected[:, None], safe, fx), best, pending, wait)

    def choose(self, trial: Tensor, rejected: Tensor, guard: Guard) -> tuple[Tensor, Guard]:
        """Takes the trial where it may be tried and is finite, the plain image of the best point elsewhere."""
        safe, best, *others = guard
        finite = _readable(trial) and math.isfinite(trial.detach().sum())
        if len(others) == 0 and finite:
            return trial, (safe, best)
        wait = others[1] if others else torch.zeros_like(best)
        taken = (wait <= 0) & ~rejected
        if finite and bool(taken.all()):
            return trial, (safe, best)
        taken = taken if finite else taken & _finite_rows(trial)
        return torch.where(taken[:, None], trial, safe), (safe, best, taken, wait)


ROOM = 8  # terms by which the memory grows at a time; a captured program would keep a copy of every size


@dataclass(frozen=True)
class Broyden(Solver):
    """Solves ``g(x) = f(x) - x = 0`` by rank-one updates of an inverse Jacobian (Broyden 1965).

    Starts from ``H = -I``, which makes the first step a plain one, and keeps ``H = -I + sum u v'`` with at
    most `memory` terms, after which it starts again from ``-I``. A step that more than doubles the
    residual is taken back.

    Args:
        memory: rank-one terms before a restart.
    """

    memory: int = 30

    steps_per_check = 8

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise InputError(f"memory must be at least 1; received {self.memory}")

    @property
    def guard(self) -> Safeguard:
        """The rule that accepts or rejects proposals."""
        return Safeguard(growth=2.0, pause=2)

    def init(self, x: Tensor) -> SolverState:
        terms = x.new_zeros(x.shape[0], 0, x.shape[1])  # grows up to the memory
        count = x.new_zeros(x.shape[0], 0, 0)  # its last size is the number of terms
        zeros = torch.zeros_like(x)  # the first step has moved nowhere, so it adds a term of zeros
        return (terms, terms, count, x, zeros, zeros, *self.guard.init(x))

    def step(self, f: Map, x: Tensor, fx: Tensor, state: SolverState) -> tuple[Tensor, SolverState]:
        left, right, count, old_x, old_g, old_image, *old_guard = state  # the image is H g
        g, used = fx - x, count.shape[2]
        rejected, guard = self.guard.judge(tuple(old_guard), g, fx)
        dx = x - old_x
        if used == self.memory:
            full = (left[:, :1] != 0).any(2, keepdim=True)
            left, right = left[:, :used].masked_fill(full, 0)[:, 1:], right[:, 1:used].clone()
            old_image = torch.where(full[:, 0], -old_g, old_image)
            used -= 1
        in_use = left[:, :used], right[:, :used]
        image, term = _apply(*in_use, g), _apply(*in_use[::-1], dx)
        column = _new_column(dx, image - old_image)
        left, right = _append(left, used, column), _append(right, used, term)
        image = torch.addcmul(image, column, (term * g).sum(1, keepdim=True))
        new_x, guard = self.guard.choose(x - image, rejected, guard)
        return new_x, (left, right, x.new_zeros(x.shape[0], 0, used + 1), x, g, image, *guard)


def _apply(left: Tensor, right: Tensor, vector: Tensor) -> Tensor:  # (-I + sum left right') vector
    if right.shape[1] == 0:
        return -vector
    if vector.shape[1] <= 64 and not vector.is_cuda:  # faster than products of many small matrices
        weights = (right.transpose(0, 1) * vector).sum(2, keepdim=True)  # (k, B, 1)
        return (left.transpose(0, 1) * weights).sum(0) - vector
    return torch.bmm(left.mT, torch.bmm(right, vector[:, :, None]))[:, :, 0] - vector


def _new_column(dx: Tensor, image: Tensor) -> Tensor:  # (B, n)
    """Returns the left vector of the rank-one term that makes ``H dg = dx``; `image` is ``H dg`` before."""
    denominator = (dx * image).sum(1, keepdim=True)
    sizes = torch.linalg.vector_norm(dx.detach(), dim=1, keepdim=True)
    sizes = sizes * torch.linalg.vector_norm(image.detach(), dim=1, keepdim=True)
    safe = denominator.detach().abs() > 1e-8 * sizes
    if _readable(dx) and bool(safe.all()):
        return (dx - image) / denominator
    return ((dx - image) / denominator.masked_fill(~safe, 1)).masked_fill(~safe, 0)


def _append(terms: Tensor, used: int, term: Tensor) -> Tensor:
    """Appends a term to those in use, in place if there is room and the step is not differentiated.

    In memory a term of all samples is one piece: the tensor is the transpose of ``(k, B, n)``.
    """
    if torch.is_grad_enabled() or under_functorch() or torch.compiler.is_compiling():
        return torch.cat([terms[:, :used], term[:, None]], dim=1)
    if used == terms.shape[1]:
        room = terms.new_zeros(ROOM, terms.shape[0], terms.shape[2])
        terms = torch.cat([terms.transpose(0, 1), room]).transpose(0, 1)
    terms[:, used] = term
    return terms


@dataclass(frozen=True)
class Newton(Solver):
    """Proposes ``x + (I - J)^-1 (f(x) - x)`` with ``J`` an element of the generalised Jacobian of f.

    For piecewise linear maps such as ReLU this is an active-set method and ends after finitely many
    steps. A step that does not reduce the residual is halved, up to `halvings` times, and then replaced
    by a plain step from the point it started at.

    Args:
        dense: states up to this size factorise the Jacobian; larger ones use GMRES.
        krylov_steps: the most products with the Jacobian in one GMRES solve.
        halvings: the most evaluations spent on shortening one step.
    """

    dense: int = 64
    krylov_steps: int = 40
    halvings: int = 6

    def __post_init__(self) -> None:
        if self.dense < 0 or self.krylov_steps < 1 or self.halvings < 0:
            raise InputError(
                "dense and halvings must not be negative and krylov_steps at least 1; received "
                f"dense={self.dense}, krylov_steps={self.krylov_steps}, halvings={self.halvings}"
            )

    def init(self, x: Tensor) -> SolverState:
        # where the step started, its direction, its length (zero: the last step was plain), the
        # residual there and the plain image of that point
        size = x.new_zeros(x.shape[0])
        return x, torch.zeros_like(x), size, torch.full_like(size, torch.inf), x

    def step(self, f: Map, x: Tensor, fx: Tensor, state: SolverState) -> tuple[Tensor, SolverState]:
        origin, direction, length, best, safe = state
        norm = torch.linalg.vector_norm((fx - x).detach(), dim=1)
        worse = (length > 0) & ~(norm < best)
        half = worse & (length > 0.5**self.halvings)
        plain = worse & ~half
        if under_transform() or not bool(worse.all()):
            newton_step = self._solve(f, x.detach(), fx - x)
            fresh = ~worse & newton_step.detach().isfinite().all(1)
            keep = worse[:, None]
            origin, safe = torch.where(keep, origin, x), torch.where(keep, safe, fx)
            best = torch.where(worse, best, norm)
            direction = torch.where(keep, direction, torch.where(fresh[:, None], newton_step, fx - x))
        length = torch.where(half, length / 2, torch.where(plain, 0, 1))
        proposal = torch.where(plain[:, None], safe, origin + length[:, None] * direction)
        return proposal, (origin, direction, length, best, safe)

    def _solve(self, f: Map, x: Tensor, r: Tensor) -> Tensor:
        if x.shape[1] <= self.dense:
            with torch.no_grad():
                system = torch.eye(x.shape[1], dtype=x.dtype, device=x.device) - f.jacobian(x)
            return solve_rows(system, r)
        if r.requires_grad:
            raise InputError(
                f"Newton on {x.shape[1]} states uses GMRES, which gradient=Unrolled() cannot differentiate; "
                "use gradient=Implicit(), or raise Newton(dense=...)"
            )
        return gmres(lambda tangent: tangent - f.jvp(x, tangent), r, self.krylov_steps)


@dataclass(frozen=True)
class RobbinsMonro(Solver):
    """Iterates ``x <- (1 - a) x + a f(x)`` with ``a = rate / (1 + m) ** decay`` at step m.

    The "stochastic unrolling" of 004 (eq. 7, whose printed signs run away from the equilibrium). With `decay` in
    (0.5, 1] the iterates converge to the root of the mean map (Robbins and Monro 1951); with ``decay=0``, which
    004 uses, they keep moving around it, and a mean over the last of them, `MeanRelative`, is the answer.

    Args:
        rate: the first step.
        decay: how fast steps shrink.

    Example:
        >>> RobbinsMonro(0.5).step(None, torch.zeros(1, 2), torch.ones(1, 2), (torch.zeros(1, 1),))[0]
        tensor([[0.5000, 0.5000]])
    """

    rate: float = 0.5
    decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise InputError(f"rate must lie in (0, 1]; received {self.rate}")
        if not 0 <= self.decay <= 1:
            raise InputError(f"decay must lie in [0, 1]; received {self.decay}")

    @property
    def cycle(self) -> int:
        return 1

    def init(self, x: Tensor) -> SolverState:
        return (x.new_zeros(x.shape[0], 1),)

    def step(self, f: Map, x: Tensor, fx: Tensor, state: SolverState) -> tuple[Tensor, SolverState]:
        (count,) = state
        share = self.rate / (1 + count) ** self.decay
        return torch.lerp(x, fx, share.expand_as(x)), (count + 1,)


SOLVERS: Registry[Solver] = Registry(
    "solver", Solver, {"picard": Picard, "anderson": Anderson, "broyden": Broyden, "newton": Newton}
)
