"""Intervals of all pre-activations and states over a set of inputs, block by block, sound at any time."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.conditions.rounding import allowance
from wellposed.forms.evaluation import Stage
from wellposed.robust.image import image
from wellposed.robust.interval import Interval
from wellposed.robust.operators import Operators
from wellposed.robust.query import Query
from wellposed.robust.uncertainty import Box

MAX_SWEEPS, TOLERANCE = 300, 1e-5
LOOK = 8  # sweeps between two looks at a device that computes while the next ones are prepared
LARGEST_ROWS = 2**26  # entries (batch, rows, inputs) up to which every row of B gets its own support


class Reach(NamedTuple):
    """What has been added up of a pre-activation: ``center +- radius``, and the size of the terms."""

    center: Tensor  # (B, n_k)
    radius: Tensor
    size: Tensor

    def interval(self, terms: int) -> Interval:
        """Encloses the exact sums."""
        spread = self.radius + allowance(2 * self.size, terms)
        return Interval(self.center - spread, self.center + spread)


class Enclosure:
    """Encloses z = Ax + Bu + b and x = phi(z) for every u of a set.

    Blocks without a loop are enclosed one after the other, which is interval bound propagation. The states of a
    loop start from an interval that is proven to hold them; every further interval is the image of the one before,
    intersected with it, so it may be stopped anywhere.

    Args:
        start: returns intervals of the states of all blocks; it is called only if there is a loop.
    """

    def __init__(self, query: Query, start: Callable[[Query], list[Interval]]) -> None:
        self.query, self.operators, self._start = query, Operators(query.form), start
        self.activations = query.form.activations
        self.biases = self.operators.biases()
        count = len(self.activations)
        self._z: list[Interval | None] = [None] * count
        self._x: list[Interval | None] = [None] * count
        self._size: list[Tensor | None] = [None] * count
        if query.form.plan.systems:
            self._begin(start(query))

    def _begin(self, states: list[Interval]) -> None:
        for stage in self.operators.plan.stages:
            if stage.system is not None:
                for k in stage.blocks:
                    self._x[k] = states[k]

    def known(self, k: int) -> bool:
        """Whether the pre-activations of a block have been enclosed yet."""
        return self._z[k] is not None

    def z(self, k: int) -> Interval:
        """The pre-activations of a block."""
        found = self._z[k]
        assert found is not None
        return found

    def x(self, k: int) -> Interval:
        """The states of a block."""
        found = self._x[k]
        assert found is not None
        return found

    def size(self, k: int) -> Tensor:
        """Bounds ``|A||x| + |B||u| + |b|`` of a block."""
        found = self._size[k]
        assert found is not None
        return found

    @property
    def states(self) -> list[Interval]:
        """The states of all blocks."""
        return [self.x(k) for k in range(len(self._x))]

    def run(self, refine: Callable[[Stage], None] | None = None) -> "Enclosure":
        """Encloses all blocks; `refine` may tighten the pre-activations of a stage before others read them."""
        for stage in self.operators.plan.stages:
            self.enclose(stage)
            if refine is not None:
                refine(stage)
        return self

    def enclose(self, stage: Stage) -> None:
        """Encloses the blocks of a stage, or tightens what is known of them."""
        if stage.system is None:
            (k,) = stage.blocks
            self.settle(k, self._add(self._drive(k), k, self.operators.plan.rows[k]))
        else:
            self._iterate(stage.blocks)

    def settle(self, k: int, reach: Reach) -> None:
        """Records the pre-activations of a block, and the states they lead to."""
        self._size[k] = reach.size
        self.tighten(k, reach.interval(self.operators.terms))

    def tighten(self, k: int, z: Interval) -> None:
        """Intersects the pre-activations of a block with what else is known to hold them."""
        self._z[k] = z.within(self._z[k])
        self._x[k] = image(self.activations[k], self.z(k)).within(self._x[k])

    def _drive(self, k: int) -> Reach:
        """Encloses ``Bu + b`` of a block, by the support function of the set where the box is no better."""
        row, box, bias = self.operators.inputs[k], self.query.set.box().interval, self.biases[k]
        absolute, outer = (self.operators.cover(row, formed) for formed in (True, False))
        size = outer.apply(box.magnitude) + bias.abs()
        inputs, entries = self.query.set, len(self.query.set) * math.prod(row.shape)
        if isinstance(inputs, Box) or not row.parts or entries > LARGEST_ROWS:
            return Reach(row.apply(box.center) + bias, absolute.apply(box.radius), size)
        exact = inputs.image(row.to_dense())
        return Reach(exact.center + bias, exact.radius, size)

    def _add(self, reach: Reach, k: int, blocks: Iterable[int]) -> Reach:
        center, radius, size = reach
        for j in blocks:
            x, place = self.x(j), (k, j)
            center = self.operators.blocks.A.parts[place].onto(center, x.center)
            radius = radius + self.operators.absolute[place].apply(x.radius)
            size = size + self.operators.size[place].apply(x.magnitude)
        return Reach(center, radius, size)

    def _iterate(self, blocks: tuple[int, ...]) -> None:
        rows = self.operators.plan.rows
        outside = {k: self._add(self._drive(k), k, [j for j in rows[k] if j not in blocks]) for k in blocks}
        inside = {k: [j for j in rows[k] if j in blocks] for k in blocks}
        active = torch.ones(len(self.query.set), 1, dtype=torch.bool, device=self.query.set.device)
        for sweep in range(1, MAX_SWEEPS + 1):
            before = {k: self.x(k) for k in blocks}
            for k in blocks:
                z = self._add(outside[k], k, inside[k]).interval(self.operators.terms)
                self._x[k] = image(self.activations[k], z).within(before[k]).where(active, before[k])
            active = active & _moved([before[k] for k in blocks], [self.x(k) for k in blocks])
            looks = active.device.type == "cpu" or sweep % LOOK == 0
            if self.query.late or (looks and not bool(active.any())):
                break
        for k in blocks:
            self.settle(k, self._add(outside[k], k, inside[k]))


@torch.no_grad()
def _moved(before: list[Interval], after: list[Interval]) -> Tensor:  # (B, 1)
    """Tells for which samples the intervals still shrink."""
    old, new = torch.cat([x.width for x in before], dim=1), torch.cat([x.width for x in after], dim=1)
    return ((old - new).amax(1) > TOLERANCE * new.amax(1))[:, None]
