"""One number for all states: the norm bound (003 eqs. 4.3 and 4.4)."""

import torch
from torch import Tensor

from wellposed.conditions.rounding import EPS, reciprocal_gap, upward
from wellposed.forms import Operator
from wellposed.robust.box_bound import LARGEST_GAIN
from wellposed.robust.center import Center
from wellposed.robust.interval import Interval
from wellposed.robust.query import MethodError, Query
from wellposed.robust.result import Bounds, of_states
from wellposed.robust.uncertainty import Box


@torch.no_grad()
def norm_bounds(query: Query) -> Bounds:
    """Bounds every state by ``|x - x0|_inf <= gamma max_i s(|B_i| sigma_u) / (1 - gamma |A|_inf)``.

    s sums a row, or its k largest entries where at most k inputs change. Needs ``gamma |A|_inf < 1``.
    """
    phi = query.form.activation
    if "inf" not in phi.constants:
        raise MethodError(f"the norm bound needs a Lipschitz constant of {phi.name!r} in the inf norm; use 'box'")
    center = query.once("center", Center.of)
    spread, gamma = center.spread, phi.lipschitz("inf")
    kappa = float(upward(spread.A.row_sums(), spread.terms).max()) * gamma * (1 + 2 * EPS)
    if not kappa < 1:
        raise MethodError(
            f"the norm bound needs gamma |A|_inf < 1, and it is {kappa:.4g}; use form.rescale(kappa) or 'box'"
        )
    moved = upward(gamma * _drive(query, center, spread.B).amax(1, keepdim=True), 2)
    residual = torch.cat(center.residual, dim=1).amax(1, keepdim=True)
    radius = upward((moved + residual) * reciprocal_gap(kappa), 4)
    states = [Interval.around(x, radius.expand_as(x), query.form.dtype) for x in center.states]
    return of_states(query, states, "norm")


def _drive(query: Query, center: Center, B: Operator) -> Tensor:  # (B, n)
    n, p, _ = query.form.sizes
    if isinstance(query.set, Box) or n * p > LARGEST_GAIN:
        return upward(B.apply(center.radius), center.spread.terms)
    rows, exact = B.to_dense(), query.set.to(torch.float64)
    sample = torch.zeros(n, dtype=torch.int64, device=rows.device)
    found = [exact.weighted_rows(rows, sample + index) for index in range(len(exact))]
    return upward(torch.stack(found), p + center.spread.terms)
