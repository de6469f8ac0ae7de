"""The only loop: evaluate, measure, stop, drop finished rows, step."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from wellposed.equilibrium.maps import Map, distance, max_norm
from wellposed.equilibrium.solution import Status, last_residual
from wellposed.equilibrium.solvers import Solver
from wellposed.equilibrium.stopping import Step, Stopping

PERIOD = 8  # stagnation is looked for every so many steps
RUN_OFF = 1e4  # growth of a state that makes a small relative residual suspicious


@dataclass(frozen=True)
class Iterates:
    """What the loop found, per sample."""

    value: Tensor  # (B, n)
    status: Tensor  # (B,)
    steps: Tensor  # (B,)
    trace: Callable[[], Tensor]
    worst: int = Status.NONFINITE  # no status is larger than this

    @cached_property
    def residuals(self) -> Tensor:  # (B, K)
        """The residual of every step, NaN after a sample has finished; assembled when asked for."""
        return self.trace()

    @property
    def last_residual(self) -> Tensor:  # (B,)
        """The residual of `value`."""
        return last_residual(self.residuals, self.steps)


@dataclass(frozen=True)
class _Block:
    """Some consecutive steps of the rows at work, judged together."""

    index: int  # of the first step
    value: Tensor  # (K, B, n): what a step reports, with its history for differentiation
    event: Tensor  # (K, B): accepted or not finite
    residual: Tensor  # (K, B)
    x: Tensor  # (K, B, n): the points, without history
    finite: bool  # whether all residuals are known to be finite
    last: Step  # the last of them


@dataclass
class _Work:
    """The rows at work: everything that is narrowed together when finished rows leave."""

    f: Map
    x: Tensor
    fx: Tensor | None
    state: tuple[Tensor, ...]
    memo: tuple[Tensor, ...]
    finished: Tensor  # (B,)
    trace: list[Tensor] = field(default_factory=list)  # residuals since the last look, (K, B) a block
    minima: list[Tensor] = field(default_factory=list)  # least residuals, (B,) a period
    first: Tensor | None = None  # residuals of the first evaluation, where states may decay to zero, (B,)
    seconds: float = math.inf  # of the fastest evaluation so far
    reach: tuple[Tensor, ...] = ()  # size of the start and largest residual while the state was of its kind, (B,)

    def advance(self, solver: Solver, stop: Stopping, index: int, size: int, masked: bool) -> _Block:
        """Takes `size` steps and evaluates the map after each (before the first step of all, at the start)."""
        xs, fxs, verdicts, values = [], [], [], []
        for k in range(size):
            if self.fx is not None:
                self.x, self.state = solver.step(self.f, self.x, self.fx, self.state)
            begin = time.perf_counter()
            self.fx = self.f(self.x)
            self.seconds = min(self.seconds, time.perf_counter() - begin)
            xs.append(self.x)
            fxs.append(self.fx)
            if not stop.stateless:
                residual = _measure(self.f, self.x, self.fx, index + k, masked)[0].residual
                step = Step(self.x, self.fx, self.f, residual, index + k, self.first)
                accepted, self.memo = stop.check(step, self.memo)
                verdicts.append(accepted)
                values.append(stop.accept(step, self.memo))
        x = _stack(xs)
        stacked, finite = _measure(self.f, x, _stack(fxs), index, masked)
        if self.f.fades:
            self.first = stacked.residual[0] if index == 0 else self.first
            stacked = replace(stacked, first=self.first)
        event = stop.check(stacked, ())[0] if stop.stateless else _stack(verdicts)
        if not finite:
            event = event | ~stacked.residual.isfinite()
        self.trace.append(stacked.residual)
        last = Step(stacked.x[-1], stacked.fx[-1], self.f, stacked.residual[-1], index + size - 1)
        value = _stack(values) if values else x
        return _Block(index, value, event, stacked.residual, stacked.x, finite, last)

    def runs_off(self, block: _Block, masked: bool) -> Tensor | None:  # (K, B)
        """Marks iterates whose residual is small only beside a state that has grown beyond all measure.

        Without it an accelerated solver "finds" the equilibrium of x + 1 near infinity. None where there are none.
        """
        residual, sizes = block.residual, max_norm(block.x)
        start, largest = self.reach or (sizes[0], residual[0])
        # The bound of a step grows with the residuals before it: below the first bound all are ordinary.
        if not masked and not bool((sizes > RUN_OFF * (start + largest)).any()):
            known = residual if block.finite else residual.nan_to_num(0, posinf=0)
            self.reach = start, torch.maximum(largest, known.amax(0))
            return None
        marks = []
        for size, now in zip(sizes, residual, strict=True):
            ordinary, finite = size <= RUN_OFF * (start + largest), now.isfinite()
            marks.append(~ordinary & finite & (torch.maximum(now, self.f.eps(block.x) * size) > 0.1 * largest))
            largest = torch.where(ordinary & finite, torch.maximum(largest, now), largest)
        self.reach = start, largest
        return torch.stack(marks)

    def narrow(self) -> bool:
        """Drops finished rows, if the map can be restricted to the others."""
        keep = ~self.finished
        narrowed = self.f.rows(keep)
        if narrowed is None or self.fx is None:
            return False
        self.f, self.x, self.fx, self.finished = narrowed, self.x[keep], self.fx[keep], self.finished[keep]
        self.state, self.memo = tuple(s[keep] for s in self.state), tuple(s[keep] for s in self.memo)
        self.trace = [residual[:, keep] for residual in self.trace]
        self.minima = [least[keep] for least in self.minima]
        self.first = None if self.first is None else self.first[keep]
        self.reach = tuple(part[keep] for part in self.reach)
        return True

    def stagnated(self, step: Step, masked: bool) -> Tensor | None:
        """Marks rows whose residual stopped falling at the rounding level of the map.

        Looked for at fixed step numbers, so that the verdict does not depend on batch companions. The longer
        a solve takes, the slower its residual falls and the longer it must have stood still: a quarter of
        all steps so far.
        """
        if (step.index + 1) % PERIOD:
            return None
        self.minima += [
            part.amin(0) for part in torch.cat(self.trace).split(PERIOD)
        ]  # the first block may be longer
        self.trace.clear()
        window = max(1, len(self.minima) // 4)
        if len(self.minima) < 2 * window or len(self.minima) < 2:
            return None
        recent = torch.stack(self.minima[-2 * window :])
        flat = (recent[window:].amin(0) >= recent[:window].amin(0)) & ~self.finished
        if not masked and not bool(flat.any()):
            return None
        return flat & (step.residual <= 4 * step.f.rounding(step.x, step.fx))


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


def _measure(f: Map, x: Tensor, fx: Tensor, index: int, masked: bool) -> tuple[Step, bool]:
    """Describes one step or several; tells also whether all is known to be finite."""
    x, fx = x.detach(), fx.detach()
    residual, finite = (max_norm(fx - x), False) if masked else distance(x, fx)
    return Step(x, fx, f, residual, index), finite


class _Board:
    """Results of all samples, written as they finish."""

    def __init__(self, x: Tensor, masked: bool) -> None:
        size, device = x.shape[0], x.device
        self.value, self.masked = x, masked
        self.status = torch.zeros(size, dtype=torch.int8, device=device)
        self.steps = torch.zeros(size, dtype=torch.int64, device=device)
        self.rows = torch.arange(size, device=device)  # at work
        self.segments: list[tuple[Tensor, list[Tensor]]] = [(self.rows, [])]

    def write(self, block: _Block, accepted: Status) -> None:
        """Writes the results of all rows that finish in a block."""
        if len(block.event) == 1:
            finished, finite = block.event[0], block.residual[0].isfinite()
            value, steps = block.value[0], torch.full_like(self.rows, block.index + 1)
        else:
            first = block.event.to(torch.int8).argmax(0)
            finished, finite = block.event.any(0), _pick(block.residual, first).isfinite()
            value, steps = _pick(block.value, first), first + (block.index + 1)
        self.put(finished, value, torch.where(finite, accepted, Status.NONFINITE), steps)

    def close(self, rows: Tensor, block: _Block, status: Tensor) -> None:
        """Ends rows that no stopping rule has accepted, after the last step of a block."""
        steps = torch.full_like(self.rows, block.last.index + 1)
        self.put(rows, block.value[-1], status, steps)

    def put(self, newly: Tensor, value: Tensor, status: Tensor, steps: Tensor) -> None:
        """Writes results of rows at work that have none yet."""
        newly = newly & (self._at_work(self.status) == Status.RUNNING)
        new = (value, status.to(torch.int8), steps)
        old = (self.value, self.status, self.steps)
        if self.masked:
            mask = (newly[:, None], newly, newly)
            self.value, self.status, self.steps = map(torch.where, mask, new, old)
            return
        chosen = newly.nonzero()[:, 0]
        rows = self.rows[chosen]
        self.value, self.status, self.steps = (
            whole.index_copy(0, rows, part[chosen]) for whole, part in zip(old, new, strict=True)
        )

    def _at_work(self, whole: Tensor) -> Tensor:
        return whole if self.rows.shape[0] == whole.shape[0] else whole[self.rows]

    def narrow(self) -> None:
        """Drops finished rows from the rows at work."""
        self.rows = self.rows[self._at_work(self.status) == Status.RUNNING]
        self.segments.append((self.rows, []))

    def trace(self) -> Tensor:  # (B, K)
        """Assembles the residual trace; entries after a sample finished are NaN."""
        parts = []
        for rows, blocks in self.segments:
            if blocks:
                part = torch.cat(blocks)
                if rows.shape[0] != self.steps.shape[0]:
                    empty = part.new_full((part.shape[0], self.steps.shape[0]), torch.nan)
                    part = empty.index_copy(1, rows, part)
                parts.append(part)
        trace = torch.cat(parts).mT
        trace = trace if self.masked else trace[:, : int(self.steps.max())]
        after = torch.arange(trace.shape[1], device=trace.device) >= self.steps[:, None]
        return trace.masked_fill(after, torch.nan)


def _pick(stack: Tensor, first: Tensor) -> Tensor:  # (B, ...), from (K, B, ...) and (B,)
    return stack[first, torch.arange(first.shape[0], device=first.device)]


def iterate(
    f: Map, x: Tensor, solver: Solver, stop: Stopping, max_steps: int, *, masked: bool = False
) -> Iterates:
    """Iterates until every sample is finished.

    A sample's result is that of the first step which its stopping rule accepts; what happens to its row
    later is not looked at, and the row leaves the computation when half of the rows at work are finished.
    Where evaluations are cheap, several steps are judged together, which changes no value and no count.
    With `masked` the number of steps is fixed and nothing depends on values, as tracing needs.
    """
    board = _Board(x, masked)
    if x.shape[0] == 0:
        return Iterates(x, board.status, board.steps, lambda: x.new_zeros(0, 0))
    work = _Work(f, x, None, solver.init(x), stop.begin(x), torch.zeros_like(board.rows, dtype=torch.bool))
    index, largest = 0, 1 if masked else min(f.steps_per_check, solver.steps_per_check, _block_size(x.numel()))
    timed = _may_be_cheap(f, x, stop) and not masked
    before = torch.get_rng_state() if timed else None
    while index < max_steps:
        if before is not None and index == TRIALS:
            drawn, before = not torch.equal(before, torch.get_rng_state()), None
            largest = min(PERIOD, solver.steps_per_check) if work.seconds < CHEAP and not drawn else 1
        size = min(largest, max_steps - index, PERIOD - index % PERIOD if index else largest)
        block = work.advance(solver, stop, index, size, masked)
        board.segments[-1][1].append(block.residual)
        index += size
        left = _settle(board, work, block, stop.certifies, masked)
        if left == 0:
            break
        thin = 2 * left <= work.x.shape[0] and work.x.numel() >= work.f.min_size_to_gather and index < max_steps
        # A product rounds differently for other numbers of rows: when rows leave must not depend on the clock.
        if thin and (not timed or index % PERIOD == 0) and work.narrow():
            board.narrow()
    if left > 0:
        grown = block.last.residual > 1e3 * board.segments[0][1][0][0][board.rows]
        ending = torch.where(grown, Status.DIVERGED, Status.MAX_STEPS)
        board.close(torch.ones_like(work.finished), block, ending)
    return Iterates(board.value, board.status, board.steps, board.trace)


TRIALS = 2  # evaluations of a map of unknown nature that are timed before steps are judged together
CHEAP = 2e-4  # seconds of an evaluation, of which a look at the results costs about as much


def _may_be_cheap(f: Map, x: Tensor, stop: Stopping) -> bool:
    """Tells whether it is worth timing a map: further evaluations change nothing, and launches take no time apart.

    How long an evaluation takes decides only how many steps are judged together: no value and no count.
    """
    return f.fades and stop.stateless and x.device.type == "cpu" and x.numel() < 1 << 16


def _block_size(numbers: int) -> int:
    """Returns how many evaluations of a cheap map are worth less than a look at the results."""
    return 12 if numbers < 1 << 14 else 4 if numbers < 1 << 16 else 1


def _settle(board: _Board, work: _Work, block: _Block, certifies: bool, masked: bool) -> int:
    """Writes what has finished in a block; returns how many rows are left."""
    watched = certifies and work.f.fades  # the map is one of unknown nature
    astray = work.runs_off(block, masked) if watched else None
    if astray is not None:
        block = replace(block, event=block.event & ~astray)
    hit = block.event[0] if len(block.event) == 1 else block.event.any(0)
    if masked or bool(hit.any()):
        board.write(block, Status.CONVERGED if certifies else Status.STEPS_DONE)
        work.finished = work.finished | hit
    stuck = work.stagnated(block.last, masked) if certifies else None
    if stuck is not None:
        stuck = stuck if astray is None else stuck & ~astray[-1]
        board.close(stuck, block, torch.full_like(board.rows, Status.STAGNATED))
        work.finished = work.finished | stuck
    return work.x.shape[0] if masked else work.x.shape[0] - int(work.finished.sum())
