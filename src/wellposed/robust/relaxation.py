"""The methods "lp" and "triangle": linear programs around the equilibria of ReLU forms."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from time import monotonic
from typing import Literal

import torch
from torch import Tensor

from wellposed.conditions.rounding import allowance, outward
from wellposed.errors import InputError
from wellposed.robust.box_bound import box_states
from wellposed.robust.convex_set import SparseBox
from wellposed.robust.crown import Backward
from wellposed.robust.enclosure import Enclosure
from wellposed.robust.functional import Functionals
from wellposed.robust.interval import Interval
from wellposed.robust.interval_bound import loop_states
from wellposed.robust.linear_program import Array
from wellposed.robust.operators import Operators
from wellposed.robust.query import Query
from wellposed.robust.refine import Refinement
from wellposed.robust.relaxed_set import RelaxedSet, Rows, of_sample, printed_set, to_array, triangle_set
from wellposed.robust.result import Bounds, of_states
from wellposed.robust.uncertainty import Box

KINDS = ("lp", "triangle")


@dataclass(frozen=True)
class Relaxation:
    """Bounds by linear programs, two for every bound, solved one after the other from where the last one ended.

    Args:
        kind: ``"lp"`` is the program as printed, ``x >= Ax + Bu + b`` in the box of Theorem 5 (003, section 4.3),
            which lets always-active states exceed their pre-activation and knows no lower end of z;
            ``"triangle"`` is the convex hull of every ReLU on the intervals that CROWN refined.
        rounds: how often the intervals of ``"triangle"`` are refined.

    Example:
        >>> from wellposed.forms import ImplicitForm
        >>> from wellposed.robust import Box, output_bounds
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.ones(1, 1), torch.ones(1, 1))
        >>> around = Box(torch.ones(1, 1), 2 * torch.ones(1, 1))
        >>> output_bounds(form, around, Relaxation("triangle")).upper.round(decimals=3)
        tensor([[4.]])
    """

    kind: Literal["lp", "triangle"] = "triangle"
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.rounds < 0:
            raise InputError(f"kind is one of {', '.join(KINDS)} and rounds not negative; received {self}")

    @torch.no_grad()
    def __call__(self, query: Query) -> Bounds:
        """Answers a query."""
        wide = in_float64(query)
        rows = Rows.of(wide.form, self.kind)
        states, sets = self.sets(wide, rows)
        known = of_states(wide, states, self.kind)
        lower, upper = known.lower.clone(), known.upper.clone()
        asked = Asked.of(wide, states)
        for index, polyhedron in enumerate(sets):
            for sign, row in product((1, -1), range(query.shape[1])):  # like objectives follow each other
                if query.late:
                    break
                found = sign * asked.maximum(polyhedron, index, row, sign, query)
                if sign > 0:
                    upper[index, row] = min(found, float(upper[index, row]))
                else:
                    lower[index, row] = max(found, float(lower[index, row]))
        return _converted(query, lower, upper, self._name(query), asked.slack.view(query.shape))

    def sets(self, wide: Query, rows: Rows) -> tuple[list[Interval], Iterator[RelaxedSet]]:
        """Returns intervals of all states, and a polyhedron for every sample.

        Args:
            wide: a query in float64.
        """
        if self.kind == "lp":
            states = box_states(wide)
            x = side_by_side(states)
            return states, (printed_set(rows, of_sample(x, i), wide.set, i) for i in range(len(wide.set)))
        enclosure = enclosed(wide, self.rounds)
        states = enclosure.states
        x = side_by_side(states)
        z = side_by_side([enclosure.z(k) for k in range(len(states))])
        return states, (
            triangle_set(rows, of_sample(x, i), of_sample(z, i), wide.set, i) for i in range(len(wide.set))
        )

    def _name(self, query: Query) -> str:
        return self.kind if isinstance(query.set, Box | SparseBox) else f"{self.kind} (box around the set)"


@dataclass(frozen=True)
class Asked:
    """The functionals of a query as objectives, with what rounding may take from them."""

    states: Tensor  # (R, n)
    inputs: Tensor  # (R, p)
    constant: Tensor  # (R,)
    slack: Tensor  # (R,)
    count: int

    @classmethod
    def of(cls, wide: Query, states: list[Interval]) -> "Asked":
        """Reads the functionals of a query in float64."""
        n, p, _ = wide.form.sizes
        samples, count = wide.shape
        if wide.combination is None:
            units = torch.eye(n, dtype=torch.float64).repeat(samples, 1)
            zero = torch.zeros(samples * count, dtype=torch.float64)
            return cls(units, zero.new_zeros(len(zero), p), zero, zero, count)
        operators = Operators(wide.form)
        rows = wide.combination.flatten(0, 1)
        found = Functionals.of_outputs(operators, rows, states, wide.set, wide.sample)
        empty = [found.constant.new_zeros(len(rows), size) for size in wide.form.partition]
        pieces = torch.cat([found.states.get(k, part) for k, part in enumerate(empty)], dim=1)
        slack = allowance(4 * found.size, operators.terms + 8)
        return cls(pieces, found.inputs, found.constant, slack, count)

    def objective(self, index: int, row: int) -> tuple[Array, Array]:
        """Returns the coefficients of the states and of the inputs."""
        place = index * self.count + row
        return to_array(self.states[place]), to_array(self.inputs[place])

    def maximum(self, polyhedron: RelaxedSet, index: int, row: int, sign: int, query: Query) -> float:
        """Bounds a functional, or its negative, from above."""
        states, inputs = self.objective(index, row)
        left = query.deadline - monotonic()
        found = polyhedron.program.maximum(polyhedron.objective(sign * states, sign * inputs), left)
        place = index * self.count + row
        return found.bound + sign * float(self.constant[place]) + float(self.slack[place])


def enclosed(wide: Query, rounds: int) -> Enclosure:
    """Encloses all pre-activations and states by intervals that CROWN refined."""
    enclosure = Enclosure(wide, loop_states)
    return enclosure.run(Refinement(Backward(enclosure), rounds, wide.combination is None))


def in_float64(query: Query) -> Query:
    """Asks the same question in float64, on the CPU."""
    combination = None if query.combination is None else query.combination.to("cpu", torch.float64)
    form, inputs = query.form.to(torch.float64).to("cpu"), query.set.to("cpu", torch.float64)
    return Query(form, inputs, combination, query.deadline)


def side_by_side(parts: list[Interval]) -> Interval:
    """Joins the intervals of all blocks."""
    return Interval(torch.cat([x.lower for x in parts], dim=1), torch.cat([x.upper for x in parts], dim=1))


def _converted(query: Query, lower: Tensor, upper: Tensor, method: str, slack: Tensor) -> Bounds:
    dtype, device = query.form.dtype, query.form.device
    (low, below), (high, above) = outward(lower, dtype), outward(upper, dtype)
    return Bounds((low - below).to(device), (high + above).to(device), method, slack.to(device, dtype))
