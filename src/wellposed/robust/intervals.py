"""Intervals that are images of themselves: interval bound propagation, also through loops.

`image` is what an activation makes of an interval, rounded outward. `IntervalPropagation` computes intervals of
all pre-activations and states over a set of inputs, block by block, sound at any time. `interval_bounds` is the
method.
"""

import math
from collections.abc import Callable, Iterable
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.conditions.rounding import rounding_slack, unit_roundoff
from wellposed.errors import IllPosedError
from wellposed.forms.evaluation import Stage
from wellposed.forms.gains import COMPOUND, lipschitz_image
from wellposed.robust.boxes import CenterSolve, Distances, box_states
from wellposed.robust.query import Bounds, MethodError, Operators, Query, of_states
from wellposed.robust.sets import Box, Interval, outward_ends


def image(phi: Activation, z: Interval) -> Interval:
    """Encloses phi(z) for all z in an interval.

    The ends where phi increases; else phi at the center and its Lipschitz constant times the radius. Values
    outside of what phi can return are cut off.

    Example:
        >>> from wellposed.activations import get_activation
        >>> image(get_activation("relu"), Interval(torch.tensor([[-1.0]]), torch.tensor([[2.0]])))
        Interval(lower=tensor([[0.]]), upper=tensor([[2.]]))
    """
    values = Interval(phi.function(z.lower), phi.function(z.upper)) if phi.increasing else _around(phi, z)
    if phi.rounding:
        values = values.widened(_rounding(phi, z))
    low, high = outward_ends(*phi.image, values.lower.dtype)
    return Interval(values.lower.clamp(min=low), values.upper.clamp(max=high))


def _around(phi: Activation, z: Interval) -> Interval:
    radius = z.radius.detach().double()
    try:
        change = lipschitz_image(phi, radius).to(z.lower)
    except IllPosedError as error:
        raise MethodError(
            f"{phi.name!r} has no Lipschitz constant, so nothing bounds its states; give it bounded arguments"
        ) from error
    middle = phi.function(z.center)
    slack = 2 * unit_roundoff(change.dtype) * change + 2 * torch.finfo(change.dtype).tiny
    return Interval(middle - change, middle + change).widened(slack)


def _rounding(phi: Activation, z: Interval) -> Tensor:
    """Bounds the rounding of phi by ``rounding * u * (|phi(0)| + gamma |z|)``, and more for maps on blocks."""
    unit, size = unit_roundoff(z.lower.dtype), z.magnitude.detach()
    origin = phi.function(torch.zeros_like(size[:1])).abs()
    spread = lipschitz_image(phi, size.double()).to(size)
    width = 0 if phi.componentwise else (phi.block or size.shape[-1])
    return (phi.rounding + width + 2) * unit * (origin + spread) + 4 * torch.finfo(size.dtype).tiny


MAX_SWEEPS, TOLERANCE = 300, 1e-5  # of intervals that shrink in a loop
LOOK = 8  # sweeps between two looks at a device that computes while the next ones are prepared
LARGEST_ROWS = 2**26  # entries (batch, rows, inputs) up to which every row of B gets its own support


class PreActivation(NamedTuple):
    """What has been added up of a pre-activation: ``center +- radius``, and the size of the terms."""

    center: Tensor  # (B, n_k)
    radius: Tensor
    size: Tensor

    def interval(self, terms: int, lost: float) -> Interval:
        """Encloses the exact sums, of which underflow may have taken something."""
        spread = self.radius + rounding_slack(2 * self.size, terms) + lost
        return Interval(self.center - spread, self.center + spread)


class IntervalPropagation:
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
        self._drives: dict[int, PreActivation] = {}
        if query.form.order.loops:
            self._begin(start(query))

    def _begin(self, states: list[Interval]) -> None:
        for stage in self.operators.order.stages:
            if stage.loop is not None:
                for k in stage.blocks:
                    self._x[k] = states[k]

    def known(self, k: int) -> bool:
        """Whether the pre-activations of a block have been enclosed yet."""
        return self._z[k] is not None

    def z(self, k: int) -> Interval:
        """The pre-activations of a block."""
        z = self._z[k]
        assert z is not None
        return z

    def x(self, k: int) -> Interval:
        """The states of a block."""
        x = self._x[k]
        assert x is not None
        return x

    def size(self, k: int) -> Tensor:
        """Bounds ``|A||x| + |B||u| + |b|`` of a block."""
        size = self._size[k]
        assert size is not None
        return size

    @property
    def states(self) -> list[Interval]:
        """The states of all blocks."""
        return [self.x(k) for k in range(len(self._x))]

    def copy(self) -> "IntervalPropagation":
        """Returns another one with the same intervals, which may be tightened by itself."""
        other = copy(self)
        other._z, other._x, other._size = list(self._z), list(self._x), list(self._size)
        return other

    def run(self, refine: Callable[[Stage], None] | None = None) -> "IntervalPropagation":
        """Encloses all blocks; `refine` may tighten the pre-activations of a stage before others read them."""
        for stage in self.operators.order.stages:
            self.enclose(stage)
            if refine is not None:
                refine(stage)
        return self

    def enclose(self, stage: Stage) -> None:
        """Encloses the blocks of a stage, or tightens what is known of them."""
        if stage.loop is None:
            (k,) = stage.blocks
            self.settle(k, self.add(self.drive(k), k, self.operators.order.rows[k]))
        else:
            self._iterate(stage.blocks)

    def settle(self, k: int, reach: PreActivation) -> None:
        """Records the pre-activations of a block, and the states they lead to."""
        self._size[k] = reach.size + self.operators.lost
        self.tighten(k, reach.interval(self.operators.terms, self.operators.lost))

    def replace(self, k: int, z: Interval | None, x: Interval, size: Tensor | None) -> None:
        """Puts other intervals in the place of what is known of a block; whoever does so must prove them."""
        self._z[k], self._x[k], self._size[k] = z, x, size

    def assume(self, boxes: dict[int, Interval]) -> None:
        """Takes the pre-activations of some blocks to lie in boxes and within what is known of them."""
        for k, box in boxes.items():
            z = box.within(self.z(k))
            self.replace(k, z, image(self.activations[k], z).within(self.x(k)), self.size(k))
        for k in boxes:
            size = self.add(self.drive(k), k, self.operators.order.rows[k]).size + self.operators.lost
            self.replace(k, self.z(k), self.x(k), size)

    def forget(self, blocks: tuple[int, ...]) -> None:
        """Takes the pre-activations of some blocks for any numbers."""
        for k in blocks:
            all_ = torch.full_like(self.x(k).lower, torch.inf)
            self.replace(k, Interval(-all_, all_), self.x(k), all_)

    def tighten(self, k: int, z: Interval) -> None:
        """Intersects the pre-activations of a block with what else is known to hold them."""
        self._z[k] = z.proven().within(self._z[k]).proven()
        self._x[k] = image(self.activations[k], self.z(k)).within(self._x[k]).proven()

    def drive(self, k: int) -> PreActivation:
        """Encloses ``Bu + b`` of a block, by the support function of the set where the box is no better."""
        if k not in self._drives:
            self._drives[k] = self._new_drive(k)
        return self._drives[k]

    def _new_drive(self, k: int) -> PreActivation:
        row, box, bias = self.operators.inputs[k], self.query.set.box().interval, self.biases[k]
        absolute, outer = (self.operators.abs_upper_bound(row, formed) for formed in (True, False))
        size = outer.apply(box.magnitude) + bias.abs()
        if any(isinstance(part, COMPOUND) for part in row.parts.values()):
            size = size + (self.operators.lost / unit_roundoff(size.dtype)) * box.magnitude.sum(1, keepdim=True)
        inputs, entries = self.query.set, len(self.query.set) * math.prod(row.shape)
        if isinstance(inputs, Box) or not row.parts or entries > LARGEST_ROWS:
            return PreActivation(row.apply(box.center) + bias, absolute.apply(box.radius), size)
        exact = inputs.image(row.to_dense())
        return PreActivation(exact.center + bias, exact.radius, size)

    def add(self, reach: PreActivation, k: int, blocks: Iterable[int]) -> PreActivation:
        """Adds what the states of some blocks contribute to the pre-activations of block k."""
        center, radius, size = reach
        for j in blocks:
            x, key = self.x(j), (k, j)
            center = self.operators.blocks.A.parts[key].apply_add(center, x.center)
            radius = radius + self.operators.absolute[key].apply(x.radius)
            size = size + self.operators.size[key].apply(x.magnitude)
            if isinstance(self.operators.blocks.A.parts[key], COMPOUND):  # its entries were formed
                radius = radius + self.operators.lost * x.magnitude.sum(1, keepdim=True)
        return PreActivation(center, radius, size)

    def _iterate(self, blocks: tuple[int, ...]) -> None:
        rows = self.operators.order.rows
        outside = {k: self.add(self.drive(k), k, [j for j in rows[k] if j not in blocks]) for k in blocks}
        inside = {k: [j for j in rows[k] if j in blocks] for k in blocks}
        active = torch.ones(len(self.query.set), 1, dtype=torch.bool, device=self.query.set.device)
        for sweep in range(1, MAX_SWEEPS + 1):
            before = {k: self.x(k) for k in blocks}
            for k in blocks:
                z = self.add(outside[k], k, inside[k]).interval(self.operators.terms, self.operators.lost)
                self._x[k] = image(self.activations[k], z).within(before[k]).where(active, before[k])
            active = active & _moved([before[k] for k in blocks], [self.x(k) for k in blocks])
            looks = active.device.type == "cpu" or sweep % LOOK == 0
            if self.query.late or (looks and not bool(active.any())):
                break
        for k in blocks:
            self.settle(k, self.add(outside[k], k, inside[k]))


@torch.no_grad()
def _moved(before: list[Interval], after: list[Interval]) -> Tensor:  # (B, 1)
    """Tells for which samples the intervals still shrink."""
    old, new = torch.cat([x.width for x in before], dim=1), torch.cat([x.width for x in after], dim=1)
    return ((old - new).amax(1) > TOLERANCE * new.amax(1))[:, None]


def interval_bounds(query: Query) -> Bounds:
    """Bounds by intervals; without loops that is interval bound propagation, and with them it starts from the box.

    Every iterate is intersected with the one before, so bounds hold wherever the iteration stops. Differentiable.
    """
    return of_states(query, IntervalPropagation(query, starting_states).run().states, "interval")


@torch.no_grad()
def starting_states(query: Query) -> list[Interval]:
    """Encloses the states of loops: by the box, else by the Euclidean norm, else by what phi can return."""
    reasons = []
    for method in (box_states, l2_states, image_states):
        try:
            return method(query)
        except (IllPosedError, MethodError) as error:
            reasons.append(str(error))
    reasons = list(dict.fromkeys(reasons))
    raise IllPosedError("nothing encloses the states of a loop: " + "; ".join(reasons))


def l2_states(query: Query) -> list[Interval]:
    """Encloses all states in the Euclidean norm."""
    states = Distances.of(query, query.once("center", CenterSolve.of)).states(query.form.dtype)
    if not all(bool((x.lower.isfinite() & x.upper.isfinite()).all()) for x in states):
        raise MethodError("no loop has a monotone or spectral certificate")
    return states


def image_states(query: Query) -> list[Interval]:
    """Encloses all states by what their activations can return, in well-posed forms."""
    query.form.certificate()
    intervals, looping = [], {k for stage in query.form.order.stages if stage.loop for k in stage.blocks}
    for k, (phi, size) in enumerate(zip(query.form.activations, query.form.partition, strict=True)):
        ends = torch.tensor(
            outward_ends(*phi.image, query.form.dtype), dtype=query.form.dtype, device=query.form.device
        )
        if k in looping and not bool(ends.isfinite().all()):
            raise MethodError(f"{phi.name!r} can return any value")
        intervals.append(Interval(*(end.expand(len(query.set), size) for end in ends)))
    return intervals


def loop_states(query: Query) -> tuple[list[Interval], bool]:
    """Encloses the states of loops by the box and, where a certificate allows, by the Euclidean norm.

    Also tells whether there is a box, as for contractions in a weighted inf norm.
    """
    try:
        states, contracting = box_states(query), True
    except (IllPosedError, MethodError):
        states, contracting = starting_states(query), False
    try:
        other = l2_states(query)
    except (IllPosedError, MethodError):
        return states, contracting
    return [one.within(two) for one, two in zip(states, other, strict=True)], contracting


def unbounded_states(query: Query) -> list[Interval]:
    """Returns what activations can return, and all numbers where they can return any."""
    like = query.set.center.detach()
    ends = [outward_ends(*phi.image, query.form.dtype) for phi in query.form.activations]
    shapes = [(len(query.set), size) for size in query.form.partition]
    return [
        Interval(*(like.new_full(shape, end) for end in pair)) for pair, shape in zip(ends, shapes, strict=True)
    ]
