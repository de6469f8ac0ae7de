"""The largest value of a separable function of the states, by a dual (003, Theorem 7)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from wellposed.conditions.rounding import allowance, outward
from wellposed.errors import InputError
from wellposed.forms import ImplicitForm
from wellposed.robust.box_bound import box_states
from wellposed.robust.columns import Columns
from wellposed.robust.interval import Interval
from wellposed.robust.query import Query, as_form
from wellposed.robust.relaxation import enclosed, in_float64, side_by_side
from wellposed.robust.relaxed_set import Rows, of_sample
from wellposed.robust.separable_function import Separable
from wellposed.robust.uncertainty import Uncertainty

SETS = ("theorem", "triangle")


@torch.no_grad()
def separable_bound(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    f: Separable,
    relaxation: Literal["theorem", "triangle"] = "triangle",
    rounds: int = 50,
    tolerance: float = 1e-7,
) -> Tensor:  # (B,)
    """Bounds ``max sum_i f_i(x_i)`` over all equilibria of a ReLU form, for every sample, by Theorem 7 (003).

    For any multiplier lam,

        ``p* <= support_U(B' lam) + lam' b + sum_i g_i(lam_i, (A' lam)_i)``,
        ``g_i(a, c) = max_z f_i(z_+) - a z + c z_+``;

    the least such bound is sought by linear programs over more and more points of the graphs of ``(z, z_+, f)``,
    whose dual values are the next lam. Every lam proves a bound, so it may be stopped anywhere. For linear f and
    ``"triangle"`` the least one is the triangle program's; ``"theorem"`` lies between that and the printed one,
    since ``z_+ = x > 0`` implies ``z = x``, which the printed program forgets.

    Args:
        f: convex or concave functions of the states, taken as exact.
        relaxation: which z the maximum in g runs over: ``"theorem"`` all with ``|z_+ - x0| <= sigma_x``,
            ``"triangle"`` those in the intervals that CROWN refined.
        rounds, tolerance: when to stop; the gap is relative.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.ones(1, 1), torch.ones(1, 1))
        >>> around = Box(torch.ones(1, 1), 2 * torch.ones(1, 1))
        >>> separable_bound(form, around, Separable(torch.square, "convex")).round(decimals=3)
        tensor([16.])
    """
    if relaxation not in SETS or rounds < 1 or not tolerance > 0:
        raise InputError(
            f"relaxation is one of {', '.join(SETS)}, rounds at least 1 and tolerance positive; received "
            f"{relaxation!r}, {rounds}, {tolerance}"
        )
    query = Query(as_form(model, inputs), inputs, None)
    wide = in_float64(query)
    rows = Rows.of(wide.form, "separable_bound")
    x, z = _intervals(wide, relaxation)
    found = [
        _Dual(rows, wide.set, index, f, of_sample(x, index), of_sample(z, index)).least(rounds, tolerance)
        for index in range(len(inputs))
    ]
    value, lost = outward(torch.tensor(found, dtype=torch.float64), query.form.dtype)
    return (value + lost).to(query.form.device)


def _intervals(wide: Query, relaxation: str) -> tuple[Interval, Interval]:
    """Returns intervals of the states and of the pre-activations, with no lower end where the theorem has none."""
    if relaxation == "triangle":
        enclosure = enclosed(wide, 3)
        states = enclosure.states
        return side_by_side(states), side_by_side([enclosure.z(k) for k in range(len(states))])
    x = side_by_side(box_states(wide))
    return x, Interval(torch.where(x.lower > 0, x.lower, -torch.inf), x.upper)


class Peaks(NamedTuple):
    """The inner maxima of a multiplier, and where they are attained."""

    value: float
    x: Tensor
    z: Tensor


@dataclass(frozen=True)
class _Dual:
    """The dual problem of one sample."""

    rows: Rows
    set: Uncertainty
    index: int
    f: Separable
    x: Interval  # (n,)
    z: Interval

    def least(self, rounds: int, tolerance: float) -> float:
        columns = Columns(self.rows, self.set, self.index, self.f, self.x, self.z)
        best = torch.inf
        for _ in range(rounds):
            optimum = columns.solve()
            lam = torch.as_tensor(optimum.lam)
            peaks = self.value(lam)
            best = min(best, peaks.value)
            if best - optimum.value <= tolerance * (1 + abs(best)):
                break
            columns.add(peaks.x, peaks.z, lam @ torch.as_tensor(self.rows.B))
        return best

    def value(self, lam: Tensor) -> Peaks:
        """Evaluates the dual function, rounded up."""
        relu = torch.as_tensor(self.rows.relu)
        lam = torch.where(relu & self.z.lower.isinf() & (lam > 0), 0.0, lam)  # else the bound is infinite
        through = lam @ torch.as_tensor(self.rows.A)
        on = Interval(torch.where(relu, self.x.lower.clamp(min=0), self.x.lower), self.x.upper)
        point, above = self.f.peak(through - lam, on)
        off = torch.where(lam > 0, self.z.lower, self.z.upper.clamp(max=0))
        below = self.f.at(torch.zeros_like(lam)) - torch.where(lam == 0, 0.0, lam * off)
        cut = relu & (self.z.lower < 0)
        below = torch.where(cut, below, -torch.inf)
        above = torch.where(relu & (self.z.upper <= 0), below, above)
        drive = (lam @ torch.as_tensor(self.rows.B))[None]
        sample = torch.tensor([self.index])
        support = float(self.set.support_rows(drive, sample))
        total = torch.maximum(above, below)
        value = support + float(lam @ torch.as_tensor(self.rows.bias)) + float(total.sum())
        first = above >= below
        x, z = torch.where(first, point, 0.0), torch.where(first, point, off.clamp(min=-self._reach()))
        return Peaks(value + self._lost(lam, total), x, z)

    def _lost(self, lam: Tensor, total: Tensor) -> float:
        u = self.set.box().interval.magnitude[self.index]
        size = (
            torch.as_tensor(self.rows.absolute_states) @ self.x.magnitude
            + torch.as_tensor(self.rows.absolute_inputs) @ u
        )
        size = size + torch.as_tensor(self.rows.bias).abs() + self.x.magnitude + self.z.upper.abs()
        ends = torch.where(self.z.lower.isinf(), 0.0, self.z.lower.abs())
        magnitude = (lam.abs() * (size + ends)).sum() + total.abs().sum()
        return float(allowance(2 * magnitude, self.rows.terms + len(lam) + len(u) + 64))

    def _reach(self) -> Tensor:
        """Bounds |z|, where a point without an end is put."""
        u = self.set.box().interval.magnitude[self.index]
        size = (
            torch.as_tensor(self.rows.absolute_states) @ self.x.magnitude
            + torch.as_tensor(self.rows.absolute_inputs) @ u
        )
        return 2 * (size + torch.as_tensor(self.rows.bias).abs()) + 1
