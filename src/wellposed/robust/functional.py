"""Linear functions of states and inputs, many rows at a time, each of its own sample."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.conditions.rounding import allowance
from wellposed.robust.interval import Interval
from wellposed.robust.operators import Operators
from wellposed.robust.uncertainty import Uncertainty


@dataclass(frozen=True)
class Functionals:
    """The functions ``sum_k states_k' x_k + inputs' u + constant``.

    Args:
        states: (R, n_k) by block; blocks that are not read are missing.
        inputs: (R, p).
        constant: (R,).
        size: (R,), a bound of the sum of absolute values of all terms, for the rounding.
        sample: (R,), the sample of every row.
    """

    states: dict[int, Tensor]
    inputs: Tensor
    constant: Tensor
    size: Tensor
    sample: Tensor

    @property
    def negated(self) -> "Functionals":
        """The functions times -1."""
        states = {k: -part for k, part in self.states.items()}
        return Functionals(states, -self.inputs, -self.constant, self.size, self.sample)

    def __len__(self) -> int:
        return len(self.constant)

    def part(self, rows: slice) -> "Functionals":
        """Takes some rows."""
        states = {k: part[rows] for k, part in self.states.items()}
        return Functionals(states, self.inputs[rows], self.constant[rows], self.size[rows], self.sample[rows])

    @classmethod
    def of_outputs(
        cls, operators: Operators, combination: Tensor, states: list[Interval], inputs: Uncertainty, sample: Tensor
    ) -> "Functionals":  # (R, q)
        """Reads combinations of the outputs ``y = Cx + Du + c``.

        Args:
            states: intervals of all states, for the size of the terms.
        """
        blocks, pieces = operators.blocks, combination.split(operators.blocks.C.heights, dim=1)
        found: dict[int, Tensor] = {}
        for (i, j), part in blocks.C.parts.items():
            image = part.T.apply(pieces[i])
            found[j] = found[j] + image if j in found else image
        offset = operators.form.output_bias
        constant = combination.new_zeros(len(combination)) if offset is None else combination @ offset
        size = output_size(operators, states, inputs)
        total = (combination.abs() * size[sample]).sum(1)
        return cls(found, blocks.D.T.apply(combination), constant, total, sample)

    def largest(self, states: list[Interval], inputs: Uncertainty, terms: int) -> tuple[Tensor, Tensor]:
        """Returns the largest value for states in intervals, and how much of it is allowance for rounding."""
        value = inputs.support_rows(self.inputs, self.sample) + self.constant
        for k, part in self.states.items():
            value = value + states[k].at(self.sample).largest(part)
        width = self.inputs.shape[1] + sum(part.shape[1] for part in self.states.values())
        slack = allowance(4 * self.size, terms + width)
        return value + slack, slack


def output_size(operators: Operators, states: list[Interval], inputs: Uncertainty) -> Tensor:  # (B, q)
    """Bounds ``|C||x| + |D||u| + |c|``."""
    C, D = (operators.cover(part, False) for part in (operators.blocks.C, operators.blocks.D))
    size = C.apply(torch.cat([x.magnitude for x in states], dim=1)) + D.apply(inputs.box().interval.magnitude)
    offset = operators.form.output_bias
    return size if offset is None else size + offset.abs()
