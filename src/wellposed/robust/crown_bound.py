"""The method "crown": intervals, refined by linear bounds, and linear bounds of what was asked for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed.robust.crown import Backward
from wellposed.robust.enclosure import Enclosure
from wellposed.robust.functional import Functionals
from wellposed.robust.interval_bound import loop_states
from wellposed.robust.query import Query
from wellposed.robust.refine import Refinement, row_chunk
from wellposed.robust.result import Bounds, of_states, shaped
from wellposed.robust.slopes import tightest


@dataclass(frozen=True)
class Crown:
    """Linear bounds at the fixed point, for ReLU, leaky ReLU, tanh, sigmoid and other maps with known lines.

    Where no lines are known (pooling, softmax) the backward pass ends at the states' interval, and `method` says
    so. Differentiable in all matrices.

    Args:
        rounds: how often the pre-activations of unstable units are refined; 0 takes those of the intervals.
        slope_steps: how many steps the free slopes of every bound are optimised for.

    Example:
        >>> from wellposed.forms import ImplicitForm
        >>> from wellposed.robust import Box, output_bounds
        >>> form = ImplicitForm(torch.tensor([[0.5]]), torch.ones(1, 1), torch.ones(1, 1))
        >>> found = output_bounds(form, Box(torch.ones(1, 1), 2 * torch.ones(1, 1)), Crown(rounds=1))
        >>> found.lower.round(decimals=3), found.upper.round(decimals=3)
        (tensor([[2.]]), tensor([[4.]]))
    """

    rounds: int = 3
    slope_steps: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 0 or self.slope_steps < 0:
            raise InputError(f"rounds and slope_steps are not negative; received {self}")

    def __call__(self, query: Query) -> Bounds:
        """Answers a query."""
        enclosure = Enclosure(query, loop_states)
        backward = Backward(enclosure)
        enclosure.run(Refinement(backward, self.rounds, query.combination is None, self.slope_steps))
        by_states = of_states(query, enclosure.states, "crown")
        name = _name(enclosure, backward, self.slope_steps)
        if query.combination is None:
            return by_states.named(name)
        rows = Functionals.of_outputs(
            enclosure.operators, query.combination.flatten(0, 1), enclosure.states, query.set, query.sample
        )
        upper, slack = self._upper(backward, rows)
        lower, _ = self._upper(backward, rows.negated)
        return shaped(query, -lower, upper, name, slack).within(by_states).named(name)

    def _upper(self, backward: Backward, rows: Functionals) -> tuple[Tensor, Tensor]:
        size = row_chunk(backward.enclosure)
        starts = range(0, len(rows), size)
        parts = [rows.part(slice(start, start + size)) for start in starts]
        found = [tightest(backward, part, self.slope_steps) for part in parts]
        return torch.cat([value for value, _ in found]), torch.cat([slack for _, slack in found])


def _name(enclosure: Enclosure, backward: Backward, steps: int) -> str:
    pairs = zip(enclosure.activations, backward.lines, strict=True)
    stopped = sorted({phi.name for phi, lines in pairs if lines is None})
    kind = "crown, slopes optimised" if steps else "crown"
    return f"{kind} (interval at {', '.join(stopped)})" if stopped else kind
