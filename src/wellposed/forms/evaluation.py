"""The states of a form, block by block: substitution where nothing loops, a fixed point where it does."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.activations.blockwise import piecewise
from wellposed.equilibrium.solution import Solution, Status
from wellposed.equilibrium.tracing import under_transform
from wellposed.forms.block import Block, combine
from wellposed.forms.loop import strong_components
from wellposed.forms.system import System


@dataclass(frozen=True)
class Stage:
    """Some blocks that are computed together; `system` is None where they are one block without a loop."""

    blocks: tuple[int, ...]
    system: System | None


@dataclass(frozen=True)
class Plan:
    """In which order the blocks of ``x = phi(Ax + v)`` are computed (003, Theorems 2 and 3).

    Args:
        A: block matrix of the states.
        activations: phi of every block.
    """

    A: Block
    activations: tuple[Activation, ...]

    @cached_property
    def rows(self) -> list[dict[int, Any]]:
        """The operators of every block row by block column, without those that have no entry."""
        return [{j: part for j, part in row.items() if min(part.shape)} for row in self.A.rows()]

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The loops of A, each after everything it depends on."""
        order = strong_components({k: list(row) for k, row in enumerate(self.rows)})
        return tuple(Stage(blocks, self._system(blocks)) for blocks in order)

    def _system(self, blocks: tuple[int, ...]) -> System | None:
        if len(blocks) == 1 and blocks[0] not in self.rows[blocks[0]]:
            return None
        parts = tuple(self.activations[k] for k in blocks)
        sizes = tuple(self.A.heights[k] for k in blocks)
        inner = self.A.part(blocks[0], blocks[0]) if len(blocks) == 1 else self.A.chosen(blocks, blocks)
        return System(inner, piecewise(parts, sizes), parts)

    @cached_property
    def systems(self) -> tuple[System, ...]:
        """The loops."""
        return tuple(stage.system for stage in self.stages if stage.system is not None)

    @cached_property
    def last_read(self) -> list[list[int]]:
        """The blocks that every stage is the last to read."""
        found: list[list[int]] = [[] for _ in self.stages]
        for k, number in self.last_use.items():
            found[number].append(k)
        return found

    @cached_property
    def last_use(self) -> dict[int, int]:
        """The last stage that reads a block; its own if none does."""
        place = {k: number for number, stage in enumerate(self.stages) for k in stage.blocks}
        found = dict(place)
        for i, j in self.A.parts:
            found[j] = max(found[j], place[i])
        return found


@dataclass
class Evaluation:
    """The states of one batch while they are computed."""

    plan: Plan
    offset: Sequence[Tensor]  # (B, n_k) of every block: Bu + b
    options: dict[str, Any] = field(default_factory=dict)
    kept: frozenset[int] | None = None  # blocks that are needed at the end; None keeps all
    states: list[Tensor | None] = field(default_factory=list)
    solutions: list[Solution] = field(default_factory=list)
    total: Tensor | float = 0.0  # (B,) of all entries, so that it is not finite if one of them is not

    def run(self) -> "Evaluation":
        """Computes every block, and forgets those that nobody needs any more."""
        self.states = [None] * len(self.plan.activations)
        for number, stage in enumerate(self.plan.stages):
            if stage.system is None:
                (k,) = stage.blocks
                row = self.plan.rows[k]
                driven = combine(row, self.states, self.offset[k]) if row else self.offset[k]
                state = self.plan.activations[k].function(driven)
                self.states[k], self.total = state, self.total + state.detach().sum(1)
            else:
                self._close(stage.system, stage.blocks)
            self._forget(number)
        return self

    def _driven(self, k: int, inside: tuple[int, ...]) -> Tensor:
        """Adds up what reaches a block from the input and from blocks outside its loop."""
        row = {j: part for j, part in self.plan.rows[k].items() if j not in inside}
        offset = self.offset[k]
        return combine(row, self.states, offset) if row else offset

    def _close(self, system: System, blocks: tuple[int, ...]) -> None:
        v = torch.cat([self._driven(k, blocks) for k in blocks], dim=1)
        lost = ~v.detach().isfinite().all(1, keepdim=True)  # overflow on the way is no fault of the other samples
        overflow = not under_transform() and bool(lost.any())
        v = v.masked_fill(lost, 0.0) if overflow else v
        options = dict(self.options)
        if (start := options.get("x0")) is not None:
            pieces = start.split(self.plan.A.heights, dim=1)
            options["x0"] = torch.cat([pieces[k] for k in blocks], dim=1)
        solution = system.solve(v, options)
        if overflow:
            solution = _without(solution, lost)
        assert isinstance(solution.value, Tensor)
        sizes = [self.plan.A.heights[k] for k in blocks]
        for k, piece in zip(blocks, solution.value.split(sizes, dim=1), strict=True):
            self.states[k] = piece
        self.total = self.total + solution.value.detach().sum(1)
        self.solutions.append(solution)

    def _forget(self, number: int) -> None:
        if self.kept is None:
            return
        for k in self.plan.last_read[number]:
            if k not in self.kept:
                self.states[k] = None

    def solution(self) -> Solution:
        """Reports on all loops together: the worst status, all steps, the largest residual."""
        value = torch.cat([state for state in self.states if state is not None], dim=1)
        status = torch.full(value.shape[:1], Status.CONVERGED, dtype=torch.int8, device=value.device)
        steps = torch.zeros_like(status, dtype=torch.int64)
        residual = value.new_zeros(value.shape[0])
        for part in self.solutions:
            status = torch.maximum(status, part.status)
            steps, residual = steps + part.steps, torch.maximum(residual, part.residual)
        lost = ~value.detach().isfinite().all(1)
        status = torch.where(lost, torch.tensor(Status.NONFINITE, dtype=torch.int8, device=value.device), status)
        steps = steps.clamp(min=1)
        trace = value.new_full((len(steps), int(steps.max()) if len(steps) else 0), torch.nan)
        return Solution(value, status, steps, trace.scatter(1, steps[:, None] - 1, residual.detach()[:, None]))


def _without(solution: Solution, lost: Tensor) -> Solution:  # (B, 1)
    """Takes the value from samples that have none."""
    assert isinstance(solution.value, Tensor)
    status = solution.status.masked_fill(lost[:, 0], Status.NONFINITE)
    return replace(solution, value=solution.value.masked_fill(lost, torch.nan), status=status)
