"""Intervals that are images of themselves: interval bound propagation, also through loops."""

import torch

from wellposed.errors import IllPosedError
from wellposed.robust.box_bound import box_states
from wellposed.robust.center import Center
from wellposed.robust.enclosure import Enclosure
from wellposed.robust.interval import Interval
from wellposed.robust.l2_bound import Distances
from wellposed.robust.query import MethodError, Query
from wellposed.robust.result import Bounds, of_states


def interval_bounds(query: Query) -> Bounds:
    """Bounds by intervals; without loops that is interval bound propagation, and with them it starts from the box.

    Every iterate is intersected with the one before, so bounds hold wherever the iteration stops. Differentiable.
    """
    return of_states(query, Enclosure(query, starting_states).run().states, "interval")


@torch.no_grad()
def starting_states(query: Query) -> list[Interval]:
    """Encloses the states of loops: by the box, else by the Euclidean norm, else by what phi can return."""
    reasons = []
    for method in (box_states, l2_states, image_states):
        try:
            return method(query)
        except (IllPosedError, MethodError) as error:
            reasons.append(str(error))
    raise IllPosedError("nothing encloses the states of a loop: " + "; ".join(reasons))


def l2_states(query: Query) -> list[Interval]:
    """Encloses all states in the Euclidean norm."""
    states = Distances.of(query, query.once("center", Center.of)).states(query.form.dtype)
    if not all(bool((x.lower.isfinite() & x.upper.isfinite()).all()) for x in states):
        raise MethodError("no loop has a monotone or spectral certificate")
    return states


def image_states(query: Query) -> list[Interval]:
    """Encloses all states by what their activations can return, in well-posed forms."""
    query.form.certificate()
    found, looping = [], {k for stage in query.form.plan.stages if stage.system for k in stage.blocks}
    for k, (phi, size) in enumerate(zip(query.form.activations, query.form.partition, strict=True)):
        ends = torch.tensor(phi.image, dtype=query.form.dtype, device=query.form.device)
        if k in looping and not bool(ends.isfinite().all()):
            raise MethodError(f"{phi.name!r} can return any value")
        found.append(Interval(*(end.expand(len(query.set), size) for end in ends)))
    return found


def loop_states(query: Query) -> list[Interval]:
    """Encloses the states of loops by the box and, where a certificate allows, by the Euclidean norm."""
    found = starting_states(query)
    try:
        other = l2_states(query)
    except (IllPosedError, MethodError):
        return found
    return [one.within(two) for one, two in zip(found, other, strict=True)]
