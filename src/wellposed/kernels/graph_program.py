"""The loop with masks in place of decisions, in chunks of a few steps: what a CUDA graph can hold."""

from dataclasses import replace

import torch
from torch import Tensor

from wellposed.equilibrium.loop import PERIOD, RUN_OFF, Iterates
from wellposed.equilibrium.maps import Map, piece_norms
from wellposed.equilibrium.solution import Status
from wellposed.equilibrium.solvers import Solver
from wellposed.equilibrium.stopping import Absolute, Relative, Settled, Step, Stopping
from wellposed.equilibrium.tracing import values_unseen

CHUNK = 4  # steps between two looks at the results


class Program:
    """Does what `iterate` does and looks at no value: every sample is computed until all are finished.

    Steps are taken in chunks whose lengths are known beforehand, and judged at the end of a chunk. A sample's
    result is that of the first step that its rule accepts, kept in buffers of fixed address; what its row does
    later is not looked at. The number of a step is part of the program: a chunk is for its own steps only.

    Args:
        f: the map.
        x: where to start, ``(B, n)``.
        memo: what ``stop.begin(x)`` returned.
        solver, stop, max_steps: as in `iterate`.
        chunk: steps of a chunk, at most.
    """

    def __init__(
        self,
        f: Map,
        x: Tensor,
        memo: tuple[Tensor, ...],
        solver: Solver,
        stop: Stopping,
        max_steps: int,
        chunk: int = CHUNK,
    ) -> None:
        self.f, self.solver, self.stop, self.max_steps, self.chunk = f, solver, stop, max_steps, chunk
        self.index, self.x, self.memo = 0, x, memo
        self.fx: Tensor | None = None
        self.state: tuple[Tensor, ...] = ()
        self.reach: tuple[Tensor, Tensor] | None = None  # as in the loop, the first times RUN_OFF
        self.lean = isinstance(stop, Absolute | Settled) or (isinstance(stop, Relative) and stop.norm == "inf")
        self.value = torch.empty_like(x)
        self.status = torch.zeros(x.shape[0], dtype=torch.int8, device=x.device)
        self.steps = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)  # 0: not finished
        self.trace = x.new_empty(max_steps, x.shape[0])
        self.record = torch.zeros(3, dtype=torch.int64, device=x.device)  # least and most steps, largest status

    @property
    def ends(self) -> bool:
        """Whether the last step has been taken."""
        return self.index >= self.max_steps

    @torch.no_grad()
    def advance(self) -> None:
        """Takes the steps of the next chunk and settles which samples they have finished."""
        begin = self.index
        end = min(begin + self.chunk, self.max_steps, begin - begin % PERIOD + PERIOD)
        with values_unseen():
            if begin == 0:
                self.status.zero_()
                self.steps.zero_()
                self.state = self.solver.init(self.x)
            taken, values, verdicts, sizes = [], [], [], []
            for index in range(begin, end):
                step, parts = self._take(index)
                taken.append(step)
                sizes += parts
                if not self.lean:
                    step = replace(step, residual=step.residual.amax(-1))
                    verdict, self.memo = self.stop.check(step, self.memo)
                    verdicts.append(verdict)
                values.append(self.stop.accept(step, self.memo))
            self.index = end
            residuals, before, after = torch.stack(sizes).amax(-1).unflatten(0, (-1, 3)).unbind(1)  # (K, B) each
            self.trace[begin:end] = residuals
            if self.lean:  # rows of one number have the norms that the rule asks for
                stacked = Step(before[..., None], after[..., None], self.f, residuals, begin)
                event = self.stop.check(stacked, ())[0]
            else:
                event = torch.stack(verdicts)
            self._settle(begin, taken[-1], event, residuals, before, values)
            torch.stack([*self.steps.aminmax(), self.status.amax().long()], out=self.record)

    def _take(self, index: int) -> tuple[Step, list[Tensor]]:
        """Takes one step; returns it, its residual still in pieces, and the norms of ``f(x) - x``, x and f(x)."""
        old = self.fx
        if old is not None:
            self.x, self.state = self.solver.step(self.f, self.x, old, self.state)
        if old is None or self.x is not old:
            self.size = piece_norms(self.x)
        self.fx = self.f(self.x)
        residual, before, self.size = piece_norms(self.fx - self.x), self.size, piece_norms(self.fx)
        return Step(self.x, self.fx, self.f, residual, index), [residual, before, self.size]

    def _settle(
        self, begin: int, last: Step, event: Tensor, residuals: Tensor, sizes: Tensor, values: list[Tensor]
    ) -> None:
        """Writes the results of samples that a chunk has finished."""
        finite = residuals < torch.inf
        event, astray = event | ~finite, None
        if self.stop.certifies:
            astray = self._runs_off(residuals, sizes, finite)
            event = event & ~astray
        event = event & (self.steps == 0)
        first = event & (event.cumsum(0) == 1)  # (K, B)
        for chosen, value in zip(first, values, strict=True):
            _put(chosen, value, self.value)
        accepted = Status.CONVERGED if self.stop.certifies else Status.STEPS_DONE
        status = (first * (int(Status.NONFINITE) - finite * int(Status.NONFINITE - accepted))).sum(0)
        numbers = torch.arange(begin + 1, self.index + 1, device=first.device)[:, None]
        self.status += status.to(torch.int8)
        self.steps += (first * numbers).sum(0)
        if astray is not None and self.index % PERIOD == 0:
            self._stagnate(replace(last, residual=residuals[-1]), astray[-1], values[-1])
        if self.ends:
            grown = residuals[-1] > 1e3 * self.trace[0]
            self._close(self.steps == 0, grown + int(Status.MAX_STEPS), values[-1])

    def _close(self, rows: Tensor, status: Tensor, value: Tensor) -> None:
        """Ends samples that no stopping rule has accepted, at the last step of a chunk."""
        _put(rows, value, self.value)
        self.status += (rows * status).to(torch.int8)
        self.steps += rows * self.index

    def _runs_off(self, residuals: Tensor, sizes: Tensor, finite: Tensor) -> Tensor:  # (K, B)
        """Marks iterates whose residual is small only beside a state that has grown beyond all measure."""
        start, largest = self.reach or (RUN_OFF * sizes[0], residuals[0])
        known = torch.cat([largest[None], residuals.masked_fill(~finite, 0)])
        peaks = known.cummax(0).values  # (K + 1, B)
        beyond = sizes > torch.add(start, peaks[:-1], alpha=RUN_OFF)
        beyond = beyond.cumsum(0) > 0  # a sample that has left stays away until the chunk ends
        peaks = known.masked_fill(torch.cat([beyond[:1] & False, beyond]), 0).cummax(0).values
        self.reach = start, peaks[-1]
        resolved = torch.maximum(residuals, self.f.unit(self.x) * sizes)
        return (resolved > 0.1 * peaks[1:]) & finite & beyond

    def _stagnate(self, last: Step, astray: Tensor, value: Tensor) -> None:
        """Ends samples whose residual stopped falling at the rounding level of the map."""
        periods = self.index // PERIOD
        window = max(1, periods // 4)
        if periods < 2 * window:
            return
        recent = self.trace[self.index - 2 * window * PERIOD : self.index]
        before, after = recent[: window * PERIOD].amin(0), recent[window * PERIOD :].amin(0)
        stuck = (after >= before) & (self.steps == 0)
        stuck = stuck & (last.residual <= 4 * self.f.rounding(last.x, last.fx)) & ~astray
        self._close(stuck, torch.full_like(self.status, int(Status.STAGNATED)), value)

    def result(self, most: int, worst: int) -> Iterates:
        """Copies the results out of the buffers, given what the record says of them."""
        steps = self.steps.clone()
        trace = self.trace[:most].mT
        after = torch.arange(most, device=trace.device) >= steps[:, None]
        trace = trace.masked_fill(after, torch.nan)
        return Iterates(self.value.clone(), self.status.clone(), steps, lambda: trace, worst)


def _put(rows: Tensor, value: Tensor, target: Tensor) -> None:
    """Writes some rows; where it can, in elements of 16 bytes, as kernels with a mask count elements."""
    numbers = 16 // value.element_size()
    if value.is_contiguous() and value.shape[1] % numbers == 0 and value.data_ptr() % 16 == 0:
        value, target = value.view(torch.complex128), target.view(torch.complex128)
    torch.where(rows[:, None], value, target, out=target)


def run_program(program: Program) -> Iterates:
    """Carries a program out as it is, a look at the results after every chunk.

    Example:
        >>> from wellposed.equilibrium.gradients import LinearMap
        >>> from wellposed.equilibrium import Picard, Relative
        >>> f, x = LinearMap(lambda x: 0.5 * x, torch.ones(1, 1), 1e-7), torch.zeros(1, 1)
        >>> run_program(Program(f, x, (), Picard(), Relative(), 100)).value.round(decimals=3)
        tensor([[2.]])
    """
    least, most, worst = 0, 0, 0
    while least == 0:
        program.advance()
        least, most, worst = program.record.tolist()
    return program.result(most, worst)
