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
from wellposed.activations.slopes import is_product, why_no_slopes
from wellposed.conditions.branches import BranchBox
from wellposed.conditions.rounding import convert_outward, rounding_slack, unit_roundoff
from wellposed.errors import IllPosedError
from wellposed.forms import ImplicitForm
from wellposed.forms.evaluation import Stage
from wellposed.forms.gains import COMPOUND, lipschitz_image
from wellposed.robust.boxes import CenterSolve, Distances, box_states, branch_equation, states_of_branch
from wellposed.robust.query import Bounds, Branches, MethodError, Operators, Query, of_states, well_posed
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
        if not is_product(phi):
            raise MethodError(
                f"{phi.name!r} has no Lipschitz constant, so nothing bounds its states; give it bounded arguments"
            ) from error
        size = z.center.detach().abs()
        largest = phi.function(size + z.radius.detach())  # (|P| + p)(|Q| + q) - |P||Q|, and what that rounds
        change = largest - phi.function(size) + (phi.block or 0) * 8 * unit_roundoff(size.dtype) * largest
    middle = phi.function(z.center)
    slack = 2 * unit_roundoff(change.dtype) * change + 2 * torch.finfo(change.dtype).tiny
    return Interval(middle - change, middle + change).widened(slack)


def _rounding(phi: Activation, z: Interval) -> Tensor:
    """Bounds the rounding of phi by ``rounding * u * (|phi(0)| + gamma |z|)``, and more for maps on blocks."""
    roundoff, size = unit_roundoff(z.lower.dtype), z.magnitude.detach()
    if is_product(phi):
        return 4 * ((phi.block or 0) + 2) * roundoff * phi.function(size) + 4 * torch.finfo(size.dtype).tiny
    origin = phi.function(torch.zeros_like(size[:1])).abs()
    spread = lipschitz_image(phi, size.double()).to(size)
    width = 0 if phi.componentwise else (phi.block or size.shape[-1])
    return (phi.rounding + width + 2) * roundoff * (origin + spread) + 4 * torch.finfo(size.dtype).tiny


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

    @property
    def preactivations(self) -> list[Interval]:
        """The pre-activations of all blocks."""
        return [self.z(k) for k in range(len(self._z))]

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

    def take(self, samples: Tensor, other: "IntervalPropagation") -> None:  # (B,)
        """Puts what another enclosure knows of some samples in the place of what is known of them."""
        mask = samples[:, None]
        for k in range(len(self.activations)):
            size = torch.where(mask, other.size(k), self.size(k))
            self.replace(k, other.z(k).where(mask, self.z(k)), other.x(k).where(mask, self.x(k)), size)

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
    """Encloses the states of loops: by the box, else by the Euclidean norm, else by what phi can return.

    Where no certificate holds, those of one branch of equilibria.
    """
    reasons = []
    for method in (box_states, l2_states, image_states, branch_states):
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
    for stage in query.form.order.stages:
        for phi in (query.form.activations[k] for k in stage.blocks if stage.loop is not None):
            if not all(math.isfinite(end) for end in outward_ends(*phi.image, query.form.dtype)):
                raise MethodError(f"{phi.name!r} can return any value")
    return unbounded_states(query)


OPEN = 1e-6  # of their size, what a solver may leave open at the center
LARGEST_BRANCH = 2048  # states of a loop up to which a branch is proven


def branch_states(query: Query) -> list[Interval]:
    """Encloses the states of a form without a certificate along one branch of equilibria.

    The branch is that of the equilibrium at the center of the set, which is found from zero. Loops are proven one
    after the other (`BranchEquation`), and blocks between them enclosed by intervals. Samples of which that proves
    nothing get all numbers. What was proven is noted in `Query.branches`.
    """
    return query.once("branch", _prove_branches)


@torch.no_grad()
def _prove_branches(query: Query) -> list[Interval]:
    if well_posed(query.form):
        raise MethodError("the form has a certificate, so it has no branches")
    form, inputs = query.form.to(torch.float64), query.set.to(torch.float64)
    if reason := _why_no_branch(form):
        raise MethodError(f"and no branch of equilibria: {reason}")
    u = inputs.center.detach()
    x = states_of_branch(form, u)
    enclosure = IntervalPropagation(Query(form, inputs.box(), None), unbounded_states)
    count = len(inputs)
    value, why_not = x.new_zeros(count), [""] * count
    everything = torch.full_like(x, torch.inf).split(form.partition, dim=1)
    boxes = [Interval(-all_, all_) for all_ in everything]
    for stage in enclosure.operators.order.stages:
        if stage.loop is not None:
            for sample, box in enumerate(_branch_boxes(enclosure, stage, x)):
                value[sample] = max(float(value[sample]), box.value)
                why_not[sample] = why_not[sample] or box.why_not
            for k in stage.blocks:
                boxes[k] = enclosure.z(k)
        enclosure.enclose(stage)
    joined = Interval(*(torch.cat(ends, dim=1) for ends in zip(*boxes, strict=True)))
    z = form.A.apply(x) + form.B.apply(u) + (0.0 if form.bias is None else form.bias)
    pairs = zip(form.activations, z.split(form.partition, dim=1), strict=True)
    images = torch.cat([phi.function(part) for phi, part in pairs], dim=1)
    room = OPEN * (1 + z.abs())
    outside = ((z < joined.lower - room) | (z > joined.upper + room)).any(1)
    unsolved = ((x - images).abs() > OPEN * (1 + x.abs())).any(1)
    for sample in range(count):
        if unsolved[sample]:
            why_not[sample] = "no equilibrium was found at the center"
        elif outside[sample] and not why_not[sample]:
            why_not[sample] = "Newton's method did not end at the equilibrium that was found at the center"
    proven = torch.tensor([not reason for reason in why_not], dtype=torch.bool, device=x.device)
    query.branches[:] = [Branches(proven, x, value, tuple(why_not), joined)]
    states = []
    for interval, all_ in zip(enclosure.states, everything, strict=True):
        held = interval.where(proven[:, None], Interval(-all_, all_))
        (lower, below), (upper, above) = (convert_outward(end, query.form.dtype) for end in held)
        states.append(Interval(lower - below, upper + above).proven())
    return states


def _why_no_branch(form: ImplicitForm) -> str:
    for stage in form.order.stages:
        if stage.loop is not None and stage.loop.A.shape[0] > LARGEST_BRANCH:
            return f"it is proven up to {LARGEST_BRANCH} states of a loop; this one has {stage.loop.A.shape[0]}"
        for phi in (form.activations[k] for k in stage.blocks):
            continuous = any(math.isfinite(constant) for constant in phi.constants.values())
            if (stage.loop is not None or not continuous) and (reason := why_no_slopes(phi)):
                return reason
    return ""


def _branch_boxes(enclosure: IntervalPropagation, stage: Stage, x: Tensor) -> list[BranchBox]:
    """Proves a loop for every sample, and replaces what is known of its states."""
    assert stage.loop is not None
    operators, equation = enclosure.operators, branch_equation(stage.loop)
    sizes = [operators.form_size(k) for k in stage.blocks]
    outside = sorted({j for k in stage.blocks for j in operators.order.rows[k]} - set(stage.blocks))
    reaches = [
        enclosure.add(enclosure.drive(k), k, [j for j in operators.order.rows[k] if j in outside])
        for k in stage.blocks
    ]
    v, size = (torch.cat([getattr(reach, name) for reach in reaches], dim=1) for name in ("center", "size"))
    slack = 4 * rounding_slack(2 * size, operators.terms) + operators.lost
    rows = [operators.order.rows[k] for k in stage.blocks]
    gains = [torch.cat([operators.inputs[k].to_dense() for k in stage.blocks])]
    for j in outside:
        gains.append(torch.cat([
            row[j].to_dense() if j in row else x.new_zeros(height, operators.form_size(j))
            for row, height in zip(rows, sizes, strict=True)
        ]))  # fmt: skip
    sources = [enclosure.query.set.box().interval, *(enclosure.x(j) for j in outside)]
    pieces = x.split(enclosure.query.form.partition, dim=1)
    start = torch.cat([pieces[k] for k in stage.blocks], dim=1) @ equation.A.mT + v
    boxes = []
    for sample in range(len(x)):
        drive = [(gain, source.radius[sample]) for gain, source in zip(gains, sources, strict=True)]
        boxes.append(equation.prove(start[sample], v[sample], slack[sample], drive))
    z = _around_boxes([(box.center, box.radius) for box in boxes])
    states = _around_boxes([equation.states(box) for box in boxes])
    ends = (end.split(sizes, dim=1) for end in (*z, *states))
    for k, z0, z1, x0, x1 in zip(stage.blocks, *ends, strict=True):
        states_k = Interval(x0, x1).cut(*enclosure.activations[k].image)
        enclosure.replace(k, Interval(z0, z1), states_k, None)
    return boxes


def _around_boxes(boxes: list[tuple[Tensor, Tensor]]) -> Interval:
    """Encloses ``center +- radius`` of every sample."""
    center, radius = (torch.stack(part) for part in zip(*boxes, strict=True))
    return Interval.around(center, radius, torch.float64)


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
