"""The implicit box: how far states and outputs move if every input moves by its radius (003, Theorems 5 and 6)."""

from dataclasses import replace

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.conditions.rounding import EPS, upward
from wellposed.forms import Block, Identity
from wellposed.forms.gains import Spread
from wellposed.forms.operators.base import Operator
from wellposed.robust.center import Center
from wellposed.robust.interval import Interval
from wellposed.robust.query import Query
from wellposed.robust.result import Bounds, of_states
from wellposed.robust.uncertainty import Box

LARGEST_GAIN = 2**25  # entries of the matrix from inputs to states that is formed for sets other than boxes


@torch.no_grad()
def box_bounds(query: Query) -> Bounds:
    """Bounds states by the implicit box, and outputs by the rows of the sensitivity matrix (003 eq. 4.8).

    With few changed entries or in a ball, the bound of an output is ``s_k`` of (or the 2-norm of) its row of
    ``S diag(sigma_u)``, which is tighter than what follows from the bounds of the states. As printed, the box is
    not cut to what phi can return; the intervals that start from it are.
    """
    if query.combination is None or isinstance(query.set, Box) or _too_large(query):
        return of_states(query, box_states(query), "box")
    center = query.once("center", Center.of)
    combination = query.combination.double()
    rows = combination.flatten(0, 1)
    C, D = (getattr(center.form, name) for name in "CD")
    coefficients, direct = C.T.apply(rows).abs(), D.T.apply(rows).abs()
    slack = 2 * (center.spread.terms + rows.shape[1]) * EPS
    doubt = center.spread.C.T.apply(rows.abs()), center.spread.D.T.apply(rows.abs())
    weights = (coefficients + slack * doubt[0]) @ state_gains(center) + direct + slack * doubt[1]
    moved = query.set.to(torch.float64).weighted_rows(upward(weights, center.spread.terms), query.sample)
    own = torch.cat(_own_radii(center), dim=1)[query.sample]
    rest = (coefficients * own).sum(1) + slack * (doubt[0] * (own + center.whole.abs()[query.sample])).sum(1)
    rest = rest + slack * (doubt[1] * center.u.abs()[query.sample]).sum(1)
    y = C.apply(center.whole) + D.apply(center.u)
    y = y if center.form.output_bias is None else y + center.form.output_bias
    value = (rows * y[query.sample]).sum(1)
    radius = upward(moved + rest, sum(query.form.sizes)) + slack * (rows.abs() * y.abs()[query.sample]).sum(1)
    found = Interval.around(value.view(query.shape), radius.view(query.shape), query.form.dtype)
    return Bounds(found.lower, found.upper, "box", rest.view(query.shape).to(query.form.dtype))


@torch.no_grad()
def box_states(query: Query) -> list[Interval]:
    """Encloses the states of all blocks by ``x0 +- v`` with ``v >= T(|A| v + |B| sigma_u) + |x0 - f(x0)|``.

    T multiplies by the Lipschitz constants of phi (and spreads over its blocks). Such a v proves that the map
    takes the box into itself for every input of the set, so the only equilibrium lies in it; it is found by
    elimination and checked with outward rounding, as iterating from zero would rise from below. For other sets
    than boxes, with few changed entries or in a ball, v is bounded by the rows of ``(I - |A|)^-1 |B|``.
    """
    center = query.once("center", Center.of)
    pairs = zip(center.states, _state_radii(query, center), strict=True)
    return [Interval.around(x, v, query.form.dtype) for x, v in pairs]


def _too_large(query: Query) -> bool:
    n, p, _ = query.form.sizes
    return n * p > LARGEST_GAIN


def _state_radii(query: Query, center: Center) -> list[Tensor]:  # (B, n_k)
    """Bounds ``|x - x0|`` for the computed equilibrium x0 at the center of the set."""
    if isinstance(query.set, Box) or _too_large(query):
        load = torch.cat([center.radius, residual_load(center)], dim=1)
        return with_residual(center.spread).states(load)
    gains, exact = state_gains(center), query.set.to(torch.float64)
    count = len(gains)
    one = torch.zeros(count, dtype=torch.int64, device=gains.device)
    moved = torch.stack([exact.weighted_rows(gains, one + sample) for sample in range(len(exact))])
    pieces = upward(moved, center.u.shape[1]).split(center.form.partition, dim=1)
    return [upward(a + b, 2) for a, b in zip(_own_radii(center), pieces, strict=True)]


def _own_radii(center: Center) -> list[Tensor]:
    """Bounds how far the computed equilibrium may be from the exact one."""
    load = torch.cat([torch.zeros_like(center.radius), residual_load(center)], dim=1)
    return with_residual(center.spread).states(load)


def state_gains(center: Center) -> Tensor:  # (n, p)
    """Bounds the change of every state by the change of every input, ``(I - gamma |A|)^-1 gamma |B|``."""
    units = torch.eye(center.u.shape[1], dtype=torch.float64, device=center.u.device).split(256)
    return torch.cat([torch.cat(center.spread.states(unit), dim=1) for unit in units]).mT


def with_residual(spread: Spread) -> Spread:
    """Adds an input for every state, through which a residual enters."""
    B, heights = spread.B, spread.A.heights
    parts: dict[tuple[int, int], Operator] = dict(spread.B.parts)
    for k, size in enumerate(heights):
        parts[k, len(B.widths) + k] = Identity(size, torch.float64, spread.device)
    return replace(spread, B=Block(heights, (*B.widths, *heights), parts, torch.float64, spread.device))


def residual_load(center: Center) -> Tensor:  # (B, n)
    """Returns loads of the pre-activations that weigh no less than the residual once phi is applied."""
    pairs = zip(center.form.activations, center.residual, strict=True)
    return torch.cat([_load(phi, residual) for phi, residual in pairs], dim=1)


def _load(phi: Activation, residual: Tensor) -> Tensor:
    if not residual.numel():
        return residual
    if phi.componentwise:
        return upward(residual / max(phi.lipschitz(), 1e-100), 2)
    norm = "inf" if "inf" in phi.constants else next(iter(phi.constants))
    return upward(residual.amax(1, keepdim=True).expand_as(residual) / max(phi.lipschitz(norm), 1e-100), 2)
