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
from wellposed.equilibrium.tracing import under_forward_mode, under_transform

PERIOD = 8  # steps between checks for stagnation
PATIENCE = 8  # periods over which plain steps must bring nothing, once a solver has fallen back on them
RUN_OFF = 1e4  # growth of a state that makes a small relative residual suspicious


@dataclass(frozen=True)
class Iterates:
    """The result of the loop, per sample."""

    value: Tensor  # (B, n)
    status: Tensor  # (B,)
    steps: Tensor  # (B,)
    trace: Callable[[], Tensor]
    worst: int = Status.NONFINITE  # no status is larger than this
    points: Tensor | None = None  # (B, n): the last points, where hooks want them and `value` are images

    @cached_property
    def residuals(self) -> Tensor:  # (B, K)
        """The residual of every step, NaN after a sample has finished; assembled when asked for."""
        return self.trace()

    @property
    def last_residual(self) -> Tensor:  # (B,)
        """The residual of the last point: of `value`, or of the point whose image it is."""
        return last_residual(self.residuals, self.steps)


@dataclass(slots=True)
class _Block:
    """Consecutive steps of the active rows, judged together."""

    index: int  # of the first step
    value: Tensor  # (K, B, n): what a step reports, with its history for differentiation,
    accepted: Tensor  # (K, B, n): and what it reports of rows that it accepts
    event: Tensor  # (K, B): accepted or not finite
    residual: Tensor  # (K, B)
    x: Tensor  # (K, B, n): the points, without history
    fx: Tensor  # (K, B, n): their images
    finite: bool  # whether all residuals are known to be finite
    reach: float  # no entry of x is larger; inf if that is not known

    def last(self, f: Map) -> Step:
        """Returns the last of the steps."""
        return Step(self.x[-1], self.fx[-1], f, self.residual[-1], self.index + len(self.x) - 1)


@dataclass
class _ActiveRows:
    """The rows still being solved: everything that shrinks together when finished rows are dropped."""

    f: Map
    x: Tensor
    fx: Tensor | None
    state: tuple[Tensor, ...]
    memo: tuple[Tensor, ...]
    finished: Tensor  # (B,)
    left: int  # rows that are not
    trace: list[Tensor] = field(default_factory=list)  # residuals since the last check, (K, B) a block
    minima: list[Tensor] = field(default_factory=list)  # least residuals, (B,) a period
    least: Tensor | None = None  # of these, (B,)
    first: Tensor | None = None  # residuals of the first evaluation, where states may decay to zero, (B,)
    seconds: float = math.inf  # of the fastest evaluation so far
    scale: tuple[Tensor, ...] = ()  # size of the start, and the largest residual of a state near that size, (B,)
    unseen: list[Tensor] = field(default_factory=list)  # residuals that the scale does not contain yet, (K, B)
    limit: float = 0.0  # a state whose entries are below is near that size in every row
    since: Tensor | None = None  # periods after which a row fell back on plain steps, 0 where it has not, (B,)

    def advance(self, solver: Solver, stop: Stopping, index: int, size: int, masked: bool) -> _Block:
        """Takes `size` steps and evaluates the map after each (before the first step of all, at the start)."""
        xs, fxs, verdicts, values = [], [], [], []
        for k in range(size):
            if self.fx is not None:
                self.x, self.state = solver.step(self.f, self.x, self.fx, self.state)
            begin = time.perf_counter() if size == 1 else 0.0
            self.fx = self.f(self.x)
            if size == 1:  # the time decides whether steps are taken together, as these are
                self.seconds = min(self.seconds, time.perf_counter() - begin)
            xs.append(self.x)
            fxs.append(self.fx)
            if not stop.stateless:
                residual = max_norm((self.fx - self.x).detach())
                step = Step(self.x, self.fx, self.f, residual, index + k, self.first)
                accepted, self.memo = stop.check(step, self.memo)
                verdicts.append(accepted)
                values.append(stop.accept(step, self.memo))
        stacks, x, fx = _stack_pairs(xs, fxs)
        points, images = x, fx
        if torch.is_grad_enabled() or under_transform() or under_forward_mode():
            stacks, points, images = [stack.detach() for stack in stacks], x.detach(), fx.detach()
        residual, finite, reach = (
            (max_norm(images - points), False, math.inf) if masked else _judge(stacks, points, images)
        )
        if self.f.may_decay and index == 0:
            self.first = residual[0]
        if stop.stateless:
            event = stop.check(Step(points, images, self.f, residual, index, self.first), ())[0]
        else:
            event = _stack(verdicts)
        if not finite:
            event = event | ~residual.isfinite()
        self.trace.append(residual)
        value = _stack(values) if values else x
        # The image of a point is nearer to the equilibrium where the map contracts, and it is known already.
        accepted = fx if stop.stateless and self.f.contracts else value
        return _Block(index, value, accepted, event, residual, points, images, finite, reach)

    def runaway(self, block: _Block, masked: bool) -> Tensor | None:  # (K, B)
        """Marks iterates whose residual is small only relative to a state that has grown out of proportion.

        Without it an accelerated solver "finds" the equilibrium of x + 1 near infinity. None if there are none.
        """
        if block.reach <= self.limit:
            self.unseen.append(block.residual)
            return None
        residual, sizes = block.residual, max_norm(block.x)
        start, largest = self.scale or (sizes[0], residual[0])
        if self.unseen:
            largest = torch.maximum(largest, torch.cat(self.unseen).amax(0))
            self.unseen = []
        # The bound of a step grows with the residuals before it: below the first bound all are ordinary.
        if not masked and not bool((sizes > RUN_OFF * (start + largest)).any()):
            known = residual if block.finite else residual.nan_to_num(0, posinf=0)
            self.scale = start, torch.maximum(largest, known.amax(0))
            self.limit = float((RUN_OFF * (start + largest)).masked_fill(self.finished, torch.inf).amin())
            return None
        marks = []
        for size, now in zip(sizes, residual, strict=True):
            ordinary, finite = size <= RUN_OFF * (start + largest), now.isfinite()
            marks.append(~ordinary & finite & (torch.maximum(now, self.f.eps(block.x) * size) > 0.1 * largest))
            largest = torch.where(ordinary & finite, torch.maximum(largest, now), largest)
        self.scale = start, largest
        return torch.stack(marks)

    def narrow(self) -> bool:
        """Drops finished rows, if the map can be restricted to the others."""
        keep = (~self.finished).nonzero()[:, 0]
        narrowed = self.f.rows(keep)
        if narrowed is None or self.fx is None:
            return False
        self.f, self.x, self.fx, self.finished = narrowed, self.x[keep], self.fx[keep], self.finished[keep]
        self.state, self.memo = tuple(s[keep] for s in self.state), tuple(s[keep] for s in self.memo)
        self.trace = [residual[:, keep] for residual in self.trace]
        self.unseen = [torch.cat(self.unseen).amax(0, keepdim=True)[:, keep]] if self.unseen else []
        self.minima = list(torch.stack(self.minima)[:, keep]) if self.minima else []
        self.least = None if self.least is None else self.least[keep]
        self.first = None if self.first is None else self.first[keep]
        self.scale = tuple(value[keep] for value in self.scale)
        self.since = None if self.since is None else self.since[keep]
        return True

    def stagnated(self, solver: Solver, block: _Block, masked: bool) -> Tensor | None:
        """Marks rows whose residual stopped falling at the rounding level of the map.

        Checked at fixed step numbers, so that the verdict does not depend on batch companions. Extrapolation
        amplifies rounding: rows of a solver that extrapolates go on by plain steps first.
        """
        if (block.index + len(block.x)) % PERIOD:
            return None
        residuals, stalled = _cat(self.trace), self.finished
        for period in residuals.split(PERIOD) if len(residuals) > PERIOD else (residuals,):
            low = period.amin(0)
            # A residual that is lower than ever before is falling.
            stalled = (
                torch.zeros_like(self.finished) if self.least is None else (low >= self.least) > self.finished
            )
            self.least = low if self.least is None else torch.minimum(self.least, low)
            self.minima.append(low)
        self.trace = []
        if not masked and not bool(stalled.any()):
            return None
        step = block.last(self.f)
        near = stalled & (step.residual <= 4 * self.f.rounding(step.x, step.fx))
        if not masked and not bool(near.any()):
            return None
        window = max(1 if self.since is None else PATIENCE, len(self.minima) // 4)
        recent = torch.stack(self.minima[-2 * window :])
        if masked:
            flat = near & flat_rows(recent, len(self.minima), self.since)
        else:  # of the few rows that may be
            rows = near.nonzero()[:, 0]
            since = None if self.since is None else self.since[rows]
            flat = near.index_copy(0, rows, flat_rows(recent[:, rows], len(self.minima), since))
            if not bool(flat.any()):
                return None
        since = torch.zeros_like(flat, dtype=torch.int64) if self.since is None else self.since
        fresh = flat & (since == 0)
        plain = solver.only_plain(self.state, fresh)
        if plain is None:
            return flat
        self.state, self.since = plain, torch.where(fresh, len(self.minima), since)
        return flat & ~fresh


def flat_rows(minima: Tensor, periods: int, since: Tensor | None) -> Tensor:  # (B,), from (K, B)
    """Marks rows whose residual has not fallen lately, given its least values in the latest periods.

    The longer a solve takes, the slower its residual falls, and the longer it must have stood still: a quarter of
    all steps so far; of those since it fell back on plain steps, and then at least `PATIENCE` periods.
    """
    if since is None:
        window = max(1, periods // 4)
        if periods < 2:
            return torch.zeros_like(minima[0], dtype=torch.bool)
        return minima[-window:].amin(0) >= minima[-2 * window : -window].amin(0)
    age = torch.arange(len(minima), 0, -1, device=minima.device)[:, None]  # 1 for the latest period
    known = periods - since
    windows = torch.maximum(known // 4, torch.where(since > 0, PATIENCE, 1))
    late = minima.masked_fill(age > windows, torch.inf).amin(0)
    early = minima.masked_fill((age <= windows) | (age > 2 * windows), torch.inf).amin(0)
    return (late >= early) & (known >= 2 * windows)


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _stack_pairs(xs: list[Tensor], fxs: list[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Stacks points and their images; returns the memory of both, the points and the images, ``(K, B, n)``.

    They overlap in plain steps, and a single step is not copied.
    """
    if len(xs) == 1:
        return [xs[0], fxs[0]], xs[0][None], fxs[0][None]
    if all(fx is x for fx, x in zip(fxs[:-1], xs[1:], strict=True)):
        whole = torch.stack([*xs, fxs[-1]])
        return [whole], whole[:-1], whole[1:]
    whole = torch.stack([*xs, *fxs])
    return [whole], whole[: len(xs)], whole[len(xs) :]


def _judge(stacks: list[Tensor], x: Tensor, fx: Tensor) -> tuple[Tensor, bool, float]:
    """Returns residuals, whether all are known to be finite, and a bound of the entries of x.

    A sum of squares is finite if all of its terms are, and bounds them all: one pass over memory in place of two
    for every row.
    """
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        finite = math.isfinite(fx.sum())
        return distance(x, fx, finite), finite, math.inf
    flat = [stack.reshape(-1) for stack in stacks]
    squares = sum(torch.dot(entries, entries).item() for entries in flat)
    finite = math.isfinite(squares) or math.isfinite(fx.sum())
    tiny = 2 * x.numel() * torch.finfo(x.dtype).tiny  # squares may be lost below it
    return distance(x, fx, finite), finite, math.sqrt(2 * squares + tiny)  # twice: sums are rounded


class _Results:
    """Results of all samples, written as they finish."""

    def __init__(self, x: Tensor, masked: bool) -> None:
        size, device = x.shape[0], x.device
        self.in_place = not (masked or torch.is_grad_enabled() or under_forward_mode())
        self.value, self.masked = x.clone() if self.in_place else x, masked
        self.status = torch.zeros(size, dtype=torch.int8, device=device)
        self.steps = torch.zeros(size, dtype=torch.int64, device=device)
        self.rows = torch.arange(size, device=device)  # active ones
        self.segments: list[tuple[Tensor, list[Tensor]]] = [(self.rows, [])]

    def write_masked(self, block: _Block, accepted: Status) -> None:
        """Writes the results of all rows that finish in a block, whichever these are."""
        ends, first = block.event.max(0)
        finite = _pick(block.residual, first).isfinite()
        value = torch.where(finite[:, None], _pick(block.accepted, first), _pick(block.value, first))
        status = torch.where(finite, accepted, Status.NONFINITE)
        self.put(ends, value, status, first + (block.index + 1))

    def write(self, block: _Block, chosen: Tensor, accepted: Status) -> None:
        """Writes the results of the chosen active rows, which finish in a block."""
        if len(block.event) == 1:
            first, value = torch.zeros_like(chosen), block.accepted[0, chosen]
        else:
            first = block.event.max(0)[1][chosen]
            value = block.accepted[first, chosen]
        rows = chosen if self.whole else self.rows[chosen]
        self.status.index_fill_(0, rows, accepted)
        if not block.finite:
            finite = block.residual[first, chosen].isfinite()
            value = torch.where(finite[:, None], value, block.value[first, chosen])
            self.status.index_fill_(0, rows[~finite], Status.NONFINITE)
        self.value = (self.value.index_copy_ if self.in_place else self.value.index_copy)(0, rows, value)
        self.steps.index_copy_(0, rows, first + (block.index + 1))

    def close(self, rows: Tensor, block: _Block, status: Tensor) -> None:
        """Ends rows that no stopping rule has accepted, after the last step of a block."""
        steps = torch.full_like(self.rows, block.index + len(block.x))
        self.put(rows, block.value[-1], status, steps)

    def put(self, newly: Tensor, value: Tensor, status: Tensor, steps: Tensor) -> None:
        """Writes results of active rows that have none yet."""
        newly = newly & (self._active(self.status) == Status.RUNNING)
        if self.masked:
            mask, new = (newly[:, None], newly, newly), (value, status.to(torch.int8), steps)
            self.value, self.status, self.steps = map(
                torch.where, mask, new, (self.value, self.status, self.steps)
            )
            return
        chosen = newly.nonzero()[:, 0]
        rows, value = self.rows[chosen], value[chosen]
        self.value = (self.value.index_copy_ if self.in_place else self.value.index_copy)(0, rows, value)
        self.status.index_copy_(0, rows, status[chosen].to(torch.int8))
        self.steps.index_copy_(0, rows, steps[chosen])

    def _active(self, whole: Tensor) -> Tensor:
        return whole if self.whole else whole[self.rows]

    @property
    def whole(self) -> bool:
        """Whether all rows are active."""
        return self.rows.shape[0] == self.status.shape[0]

    def narrow(self) -> None:
        """Drops finished rows from the active ones."""
        self.rows = self.rows[self._active(self.status) == Status.RUNNING]
        self.segments.append((self.rows, []))

    def trace(self) -> Tensor:  # (B, K)
        """Assembles the residual trace; entries after a sample finished are NaN."""
        segments = []
        for rows, blocks in self.segments:
            if blocks:
                residuals = torch.cat(blocks)
                if rows.shape[0] != self.steps.shape[0]:
                    empty = residuals.new_full((residuals.shape[0], self.steps.shape[0]), torch.nan)
                    residuals = empty.index_copy(1, rows, residuals)
                segments.append(residuals)
        trace = torch.cat(segments).mT
        trace = trace if self.masked else trace[:, : int(self.steps.max())]
        after = torch.arange(trace.shape[1], device=trace.device) >= self.steps[:, None]
        return trace.masked_fill(after, torch.nan)


def _pick(stack: Tensor, first: Tensor) -> Tensor:  # (B, ...), from (K, B, ...) and (B,)
    return stack[first, torch.arange(first.shape[0], device=first.device)]


@dataclass(frozen=True)
class Progress:
    """A solve that has taken some steps: what the loop needs to go on."""

    x: Tensor  # (B, n): where to evaluate next
    state: tuple[Tensor, ...]  # of the solver
    value: Tensor  # (B, n)
    status: Tensor  # (B,)
    steps: Tensor  # (B,)
    residuals: Tensor  # (K, B): one row a step taken; at least one
    scale: tuple[Tensor, Tensor]  # (B,): size of the start, and the largest residual since

    def restore(self, results: _Results, active: _ActiveRows) -> int:
        """Writes itself into the fresh records of a solve; returns the number of steps taken."""
        residuals, whole = self.residuals, len(self.residuals) - len(self.residuals) % PERIOD
        results.value, results.status, results.steps = self.value, self.status.to(torch.int8), self.steps.clone()
        results.segments[-1][1].append(residuals)
        active.x, active.state, active.scale = self.x, self.state, self.scale
        active.finished = self.status != Status.RUNNING
        active.first = residuals[0]
        active.left -= int(active.finished.sum())
        active.minima = [period.amin(0) for period in residuals[:whole].split(PERIOD)] if whole else []
        active.least = torch.stack(active.minima).amin(0) if whole else None
        active.trace = [residuals[whole:]] if whole < len(residuals) else []
        return len(residuals)


def iterate(
    f: Map,
    x: Tensor,
    solver: Solver,
    stop: Stopping,
    max_steps: int,
    *,
    masked: bool = False,
    progress: Progress | None = None,
) -> Iterates:
    """Iterates until every sample is finished.

    A sample's result is that of the first step which its stopping rule accepts: the point, or its image where the
    map contracts. Later steps of its row are ignored, and the row is dropped once half of the active rows are
    finished. Where evaluations are cheap, several steps are judged together, which changes no value and no count.
    With `masked` the number of steps is fixed and nothing depends on values, as tracing needs. With `progress` the
    solve goes on from there; its stopping rule must be stateless.
    """
    results = _Results(x, masked)
    if x.shape[0] == 0:
        return Iterates(x, results.status, results.steps, lambda: x.new_zeros(0, 0))
    finished = torch.zeros_like(results.rows, dtype=torch.bool)
    active = _ActiveRows(f, x, None, solver.init(x), stop.begin(x), finished, x.shape[0])
    # So many evaluations of a cheap map cost less than reading the results.
    cheap = 12 if x.numel() < 1 << 14 else 4 if x.numel() < 1 << 16 else 1
    begin = index = 0 if progress is None else progress.restore(results, active)
    largest = 1 if masked else min(f.steps_per_check, solver.steps_per_check, cheap)
    # A general map is timed where evaluations have no side effects and do not run asynchronously. The time decides
    # only how many steps are judged together: no value and no count.
    timed = f.may_decay and stop.stateless and x.device.type == "cpu" and x.numel() < 1 << 16 and not masked
    before = torch.get_rng_state() if timed else None
    while index < max_steps:
        if before is not None and index > begin:
            drawn = not torch.equal(before, torch.get_rng_state())
            largest = min(PERIOD, solver.steps_per_check) if active.seconds < CHEAP and not drawn else 1
            before = None if drawn or largest > 1 or index == begin + TRIALS else before
        size = min(largest, max_steps - index, PERIOD - index % PERIOD if index else largest)
        block = active.advance(solver, stop, index, size, masked)
        results.segments[-1][1].append(block.residual)
        index += size
        left = _close_finished(results, active, block, solver, stop.certifies, masked)
        if left == 0:
            break
        gathers = 2 * left <= active.x.shape[0] and active.x.numel() >= active.f.min_size_to_gather
        # A product rounds differently for other numbers of rows, so dropping rows must not depend on the clock.
        if gathers and index < max_steps and (not timed or index % PERIOD == 0) and active.narrow():
            results.narrow()
    if left > 0:
        last = block.last(active.f)
        grown = last.residual > 1e3 * results.segments[0][1][0][0][results.rows]
        status = torch.where(grown, Status.DIVERGED, Status.MAX_STEPS)
        if active.since is not None:
            level = last.residual <= 4 * active.f.rounding(last.x, last.fx)
            status = torch.where(level & (active.since > 0), Status.STAGNATED, status)
        results.close(torch.ones_like(active.finished), block, status)
    return Iterates(results.value, results.status, results.steps, results.trace)


TRIALS = 2  # evaluations of a general map that are timed before steps are judged together
CHEAP = 2e-4  # seconds of an evaluation; reading the results costs about as much


def _close_finished(
    results: _Results, active: _ActiveRows, block: _Block, solver: Solver, certifies: bool, masked: bool
) -> int:
    """Writes the results of rows that finished in a block; returns how many rows are left."""
    runaway = active.runaway(block, masked) if certifies and active.f.may_decay else None
    if runaway is not None:
        block = replace(block, event=block.event & ~runaway)
    ended, accepted = block.event.any(0), Status.CONVERGED if certifies else Status.STEPS_DONE
    if masked:
        results.write_masked(block, accepted)
        active.finished = active.finished | ended
    elif len(chosen := (ended > active.finished).nonzero()[:, 0]):
        results.write(block, chosen, accepted)
        active.finished, active.left = active.finished | ended, active.left - len(chosen)
    stagnated = active.stagnated(solver, block, masked) if certifies else None
    if stagnated is not None:
        stagnated = stagnated if runaway is None else stagnated & ~runaway[-1]
        results.close(stagnated, block, torch.full_like(results.rows, Status.STAGNATED))
        active.finished = active.finished | stagnated
        active.left = active.left if masked else len(active.finished) - int(active.finished.count_nonzero())
    return active.left
