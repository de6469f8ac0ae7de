"""What a bound returns, and how bounds of states become bounds of outputs."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wellposed.robust.functional import Functionals
from wellposed.robust.interval import Interval
from wellposed.robust.operators import Operators
from wellposed.robust.query import Query


@dataclass(frozen=True)
class Bounds:
    """Proven bounds ``lower <= value <= upper``, per sample, of the exact equilibrium for every input of a set.

    Args:
        lower, upper: (B, k).
        method: what proved them.
        slack: (B, k), how much each bound was moved outward for rounding where it was evaluated.

    Example:
        >>> found = Bounds(torch.tensor([[0.0]]), torch.tensor([[2.0]]), "box", torch.zeros(1, 1))
        >>> found.width, bool(found.contains(torch.tensor([[1.5]])))
        (tensor([[2.]]), True)
    """

    lower: Tensor
    upper: Tensor
    method: str
    slack: Tensor

    @property
    def width(self) -> Tensor:
        """``upper - lower``."""
        return self.upper - self.lower

    def contains(self, value: Tensor, tolerance: float = 0.0) -> Tensor:  # (B,)
        """Tells for which samples all values lie within the bounds, up to a tolerance."""
        inside = (value >= self.lower - tolerance) & (value <= self.upper + tolerance)
        return inside.all(-1)

    def stated(self) -> "Bounds":
        """Replaces ends that are no numbers, as overflow leaves them, by infinite ones: nothing is proven there.

        Example:
            >>> Bounds(torch.tensor([[torch.nan]]), torch.tensor([[2.0]]), "box", torch.zeros(1, 1)).stated().lower
            tensor([[-inf]])
        """
        lower = torch.where(self.lower.isnan(), -torch.inf, self.lower)
        return replace(self, lower=lower, upper=torch.where(self.upper.isnan(), torch.inf, self.upper))

    def within(self, other: "Bounds") -> "Bounds":
        """Intersects two proofs of the same values."""
        lower, upper = torch.maximum(self.lower, other.lower), torch.minimum(self.upper, other.upper)
        slack = torch.where(other.width < self.width, other.slack, self.slack)
        return Bounds(lower, upper, f"{self.method} + {other.method}", slack)

    def named(self, method: str) -> "Bounds":
        """Changes the name."""
        return replace(self, method=method)


def of_states(query: Query, states: list[Interval], method: str) -> Bounds:
    """Answers a query by intervals of the states."""
    if query.combination is None:
        lower = torch.cat([x.lower for x in states], dim=1)
        upper = torch.cat([x.upper for x in states], dim=1)
        unit = torch.finfo(lower.dtype).eps
        return Bounds(lower, upper, method, unit * torch.maximum(lower.abs(), upper.abs()).detach())
    operators = Operators(query.form)
    rows = query.combination.flatten(0, 1)
    functionals = Functionals.of_outputs(operators, rows, states, query.set, query.sample)
    upper, slack = functionals.largest(states, query.set, operators.terms)
    lower, _ = functionals.negated.largest(states, query.set, operators.terms)
    return shaped(query, -lower, upper, method, slack)


def shaped(query: Query, lower: Tensor, upper: Tensor, method: str, slack: Tensor) -> Bounds:
    """Writes the values of rows as a table."""
    return Bounds(lower.view(query.shape), upper.view(query.shape), method, slack.view(query.shape))
