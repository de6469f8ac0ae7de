"""The only loop: evaluate, measure, stop, drop finished rows, step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from wellposed.equilibrium.map import Map, max_norm
from wellposed.equilibrium.solution import Status, last_residual
from wellposed.equilibrium.solver import Solver
from wellposed.equilibrium.stopping import Step, Stopping

PERIOD = 8  # stagnation is looked for every so many steps
BUFFER = 1 << 20  # numbers kept before results are written


@dataclass(frozen=True)
class Iterates:
    """What the loop found, per sample."""

    value: Tensor  # (B, n)
    status: Tensor  # (B,)
    steps: Tensor  # (B,)
    trace: Callable[[], Tensor]

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
    value: Tensor  # (K, B, n): what an accepted step reports
    event: Tensor  # (K, B): accepted or not finite
    residual: Tensor  # (K, B)
    last: Tensor  # (B, n): the last iterate


@dataclass
class _Work:
    """The rows at work: everything that is narrowed together when finished rows leave."""

    f: Map
    x: Tensor
    state: tuple[Tensor, ...]
    memo: tuple[Tensor, ...]
    finished: Tensor  # (B,)
    trace: list[Tensor] = field(default_factory=list)  # residuals, (K, B) a block

    def advance(self, solver: Solver, stop: Stopping, index: int, size: int, masked: bool) -> tuple[_Block, Step]:
        """Evaluates the map `size` times and takes a step after each; returns also the last of them."""
        xs, fxs, verdicts, values = [], [], [], []
        for k in range(size):
            fx = self.f(self.x)
            xs.append(self.x)
            fxs.append(fx)
            if not stop.stateless:
                step = _measure(self.f, self.x, fx, index + k)
                accepted, self.memo = stop.check(step, self.memo)
                verdicts.append(accepted)
                values.append(stop.accept(step, self.memo))
            self.x, self.state = solver.step(self.f, self.x, fx, self.state)
        value = torch.stack(values or xs)
        stacked = _measure(self.f, value if stop.stateless else torch.stack(xs), torch.stack(fxs), index)
        residual = stacked.residual
        event = stop.check(stacked, ())[0] if stop.stateless else torch.stack(verdicts)
        if masked or not math.isfinite(residual.sum()):
            event = event | ~residual.isfinite()
        self.finished = self.finished | event.any(0)
        self.trace.append(residual)
        last = Step(xs[-1].detach(), fxs[-1].detach(), self.f, residual[-1], index + size - 1)
        return _Block(index, value, event, residual, xs[-1]), last

    def narrow(self) -> bool:
        """Drops finished rows, if the map can be restricted to the others."""
        keep = ~self.finished
        narrowed = self.f.rows(keep)
        if narrowed is None:
            return False
        self.f, self.x, self.finished = narrowed, self.x[keep], self.finished[keep]
        self.state, self.memo = tuple(s[keep] for s in self.state), tuple(s[keep] for s in self.memo)
        self.trace = [residual[:, keep] for residual in self.trace]
        return True

    def stagnated(self, step: Step, masked: bool) -> Tensor | None:
        """Marks rows whose residual stopped falling at the rounding level of the map.

        Looked for at fixed step numbers, so that the verdict does not depend on batch companions.
        """
        if (step.index + 1) % PERIOD or step.index + 1 < 2 * PERIOD:
            return None
        recent = torch.cat(self.trace[-2 * PERIOD :])[-2 * PERIOD :]
        flat = recent[PERIOD:].amin(0) >= recent[:PERIOD].amin(0)
        if not masked and not bool(flat.any()):
            return None
        return flat & (step.residual <= 4 * step.f.rounding(step.x, step.fx)) & ~self.finished


def _measure(f: Map, x: Tensor, fx: Tensor, index: int) -> Step:
    x, fx = x.detach(), fx.detach()
    return Step(x, fx, f, max_norm(fx - x), index)


class _Board:
    """Results of all samples."""

    def __init__(self, x: Tensor) -> None:
        size, device = x.shape[0], x.device
        self.value = x
        self.status = torch.zeros(size, dtype=torch.int8, device=device)
        self.steps = torch.zeros(size, dtype=torch.int64, device=device)
        self.rows = torch.arange(size, device=device)  # at work
        self.open: list[_Block] = []  # steps whose results are not written yet
        self.segments: list[tuple[Tensor, list[Tensor]]] = [(self.rows, [])]

    def add(self, block: _Block) -> None:
        """Takes note of some steps."""
        self.open.append(block)
        self.segments[-1][1].append(block.residual)

    def write(self, accepted: Status) -> None:
        """Writes the results of all rows that have finished in the open steps."""
        if not self.open:
            return
        event = torch.cat([block.event for block in self.open])
        first = event.to(torch.int8).argmax(0)
        finite = _pick(torch.cat([block.residual for block in self.open]), first).isfinite()
        status = torch.where(finite, accepted, Status.NONFINITE).to(torch.int8)
        value = _pick(torch.cat([block.value for block in self.open]), first)
        self.put(event.any(0), value, status, first + (self.open[0].index + 1))
        self.open = []

    def close(self, rows: Tensor, block: _Block, status: Tensor, accepted: Status) -> None:
        """Ends rows that no stopping rule has accepted, after the last step of a block."""
        self.write(accepted)
        steps = torch.full_like(self.rows, block.index + len(block.residual))
        self.put(rows, block.last, status.to(torch.int8), steps)

    def put(self, newly: Tensor, value: Tensor, status: Tensor, steps: Tensor) -> None:
        """Writes results of rows at work that have none yet."""
        newly = newly & (self._read(self.status) == Status.RUNNING)
        self.value = self._write(self.value, newly[:, None], value)
        self.status = self._write(self.status, newly, status)
        self.steps = self._write(self.steps, newly, steps)

    def _read(self, whole: Tensor) -> Tensor:
        return whole if self.rows.shape[0] == whole.shape[0] else whole[self.rows]

    def _write(self, whole: Tensor, newly: Tensor, new: Tensor) -> Tensor:
        merged = torch.where(newly, new, self._read(whole))
        return merged if self.rows.shape[0] == whole.shape[0] else whole.index_copy(0, self.rows, merged)

    def narrow(self) -> None:
        """Drops finished rows from the rows at work."""
        self.rows = self.rows[self._read(self.status) == Status.RUNNING]
        self.segments.append((self.rows, []))

    def trace(self) -> Tensor:  # (B, K)
        """Assembles the residual trace; entries after a sample finished are NaN."""
        parts = []
        for rows, blocks in self.segments:
            if blocks:
                part = torch.cat(blocks)
                if rows.shape[0] != self.steps.shape[0]:
                    part = part.new_full((part.shape[0], self.steps.shape[0]), torch.nan).index_copy(1, rows, part)
                parts.append(part)
        trace = torch.cat(parts).mT
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
    board = _Board(x)
    if x.shape[0] == 0:
        return Iterates(x, board.status, board.steps, lambda: x.new_zeros(0, 0))
    accepted = Status.CONVERGED if stop.certifies else Status.STEPS_DONE
    work = _Work(f, x, solver.init(x), stop.begin(x), torch.zeros_like(board.rows, dtype=torch.bool))
    index, largest = 0, 1 if masked else min(f.block, solver.block)
    while index < max_steps:
        size = min(largest, PERIOD // 2 if index == PERIOD else PERIOD, PERIOD - index % PERIOD, max_steps - index)
        block, last = work.advance(solver, stop, index, size, masked)
        board.add(block)
        index += size
        stuck = work.stagnated(last, masked)
        if stuck is not None:
            board.close(stuck, block, torch.full_like(board.rows, Status.STAGNATED), accepted)
            work.finished = work.finished | stuck
        left = work.x.shape[0] if masked else work.x.shape[0] - int(work.finished.sum())
        if left == 0:
            break
        thin = 2 * left <= work.x.shape[0] and work.x.numel() >= work.f.bulk and index < max_steps
        if thin or len(board.open) * size * work.x.numel() > BUFFER:
            board.write(accepted)
        if thin and work.narrow():
            board.narrow()
    board.write(accepted)
    if left > 0:
        grown = last.residual > 1e3 * board.segments[0][1][0][0][board.rows]
        ending = torch.where(grown, Status.DIVERGED, Status.MAX_STEPS)
        board.close(torch.ones_like(work.finished), block, ending, accepted)
    return Iterates(board.value, board.status, board.steps, board.trace)
