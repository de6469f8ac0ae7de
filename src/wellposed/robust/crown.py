"""CROWN at the fixed point: linear bounds carried backwards through blocks and loops.

Between lines, ``nu' x <= lam' z + g`` with lam = s(nu) nu and the intercepts g of `relax_lines`; as
z = Ax + Bu + b,

    ``c' x <= lam' (Bu + b) + sum g + (c + A' lam - nu)' x``

for **any** nu. Without a loop nu = c + A' lam by substitution and the last term vanishes; in a loop nu is iterated
and the last term is bounded by the interval of the states, so that every iterate is sound.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.conditions.rounding import allowance
from wellposed.forms.evaluation import Stage
from wellposed.robust.enclosure import Enclosure
from wellposed.robust.functional import Functionals
from wellposed.robust.interval import Interval
from wellposed.robust.multipliers import Multipliers
from wellposed.robust.relax_lines import Slopes, lines_of

MAX_STEPS, TOLERANCE = 60, 1e-6
CHOICE = dict[int, tuple[Tensor, Tensor]]  # lower and upper slopes of every row, by block


@dataclass
class Sum:
    """The parts of an upper bound while they are added up, and the sizes that its rounding depends on."""

    inputs: Tensor  # (R, p)
    value: Tensor  # (R,)
    size: Tensor  # (R,)
    open: dict[int, Tensor]  # coefficients of blocks that are still to be replaced, (R, n_k)

    def add(self, k: int, coefficients: Tensor) -> None:
        """Adds coefficients of a block."""
        self.open[k] = self.open[k] + coefficients if k in self.open else coefficients


class Backward:
    """Carries functionals back to the inputs, through the lines on the intervals of an enclosure."""

    def __init__(self, enclosure: Enclosure) -> None:
        self.enclosure, self.operators = enclosure, enclosure.operators
        self.lines = [lines_of(phi) for phi in enclosure.activations]
        self.columns: dict[int, list[int]] = {}
        for i, j in self.operators.blocks.A.parts:
            self.columns.setdefault(j, []).append(i)
        self._slopes: dict[int, tuple[Interval, Slopes]] = {}

    def slopes(self, k: int) -> Slopes:
        """The slopes of a block, chosen anew when its interval has changed."""
        z, lines = self.enclosure.z(k), self.lines[k]
        assert lines is not None
        if k not in self._slopes or self._slopes[k][0] is not z:
            self._slopes[k] = z, lines.slopes(z)
        return self._slopes[k][1]

    def upper(self, rows: Functionals, choice: CHOICE | None = None) -> tuple[Tensor, Tensor]:  # (R,), (R,)
        """Bounds functionals from above; also returns how much of that is allowance for rounding."""
        sum_ = Sum(rows.inputs, rows.constant, 4 * rows.size, dict(rows.states))
        for stage in reversed(self.operators.plan.stages):
            if not any(k in sum_.open for k in stage.blocks):
                continue
            if stage.system is None:
                self._substitute(sum_, stage.blocks[0], rows.sample, choice)
            else:
                self._close(sum_, stage, rows.sample, choice)
        p, n = rows.inputs.shape[1], self.enclosure.query.form.sizes[0]
        slack = allowance(sum_.size, self.operators.terms + p + n + 64)
        return sum_.value + self.enclosure.query.set.support_rows(sum_.inputs, rows.sample) + slack, slack

    def _slopes_at(self, k: int, sample: Tensor, choice: CHOICE | None) -> tuple[Tensor, Tensor]:
        if choice is not None and k in choice:
            return choice[k]
        slopes = self.slopes(k)
        return slopes.lower[sample], slopes.upper[sample]

    def _substitute(self, sum_: Sum, k: int, sample: Tensor, choice: CHOICE | None) -> None:
        nu = sum_.open.pop(k)
        if self.lines[k] is None:
            self._stop(sum_, k, nu, sample)
            return
        lower, upper = self._slopes_at(k, sample, choice)
        lam = torch.where(nu > 0, upper, lower) * nu
        self._intercept(sum_, k, nu, lam, sample)
        self._pass_on(sum_, k, lam, list(self.operators.plan.rows[k]))

    def _stop(self, sum_: Sum, k: int, nu: Tensor, sample: Tensor) -> None:
        """Bounds the states of a block by their interval, where no lines are known."""
        x = self.enclosure.x(k).at(sample)
        sum_.value = sum_.value + x.largest(nu)
        sum_.size = sum_.size + 2 * (nu.detach().abs() * x.magnitude.detach()).sum(1)

    def _intercept(self, sum_: Sum, k: int, nu: Tensor, lam: Tensor, sample: Tensor) -> None:
        lines, z = self.lines[k], self.enclosure.z(k).at(sample)
        assert lines is not None
        sum_.value = sum_.value + lines.intercept(nu, lam, z).sum(1) + lam @ self.enclosure.biases[k]
        with torch.no_grad():
            reach, states = self.enclosure.size(k)[sample], self.enclosure.x(k).at(sample).magnitude
            own = z.magnitude + states + self._origin(k)
            sum_.size = sum_.size + (6 * lam.abs() * reach + 2 * (nu.abs() + lam.abs()) * own).sum(1)

    def _origin(self, k: int) -> float:
        """Returns |phi(0)|, to which the rounding of phi is relative."""
        phi = self.enclosure.activations[k]
        return float(phi.function(torch.zeros(1, dtype=torch.float64)).abs()) if phi.rounding else 0.0

    def _pass_on(self, sum_: Sum, k: int, lam: Tensor, blocks: list[int]) -> None:
        """Replaces ``lam' z`` of a block by inputs and by the states of other blocks."""
        if self.operators.inputs[k].parts:
            sum_.inputs = sum_.inputs + self.operators.inputs_transposed[k].apply(lam)
        for j in blocks:
            sum_.add(j, self.operators.transposed[k, j].apply(lam))

    def _close(self, sum_: Sum, stage: Stage, sample: Tensor, choice: CHOICE | None) -> None:
        """Iterates ``nu <- c + A' lam(nu)`` in a loop and bounds what is left over by the states' interval."""
        blocks = stage.blocks
        zero = {k: sum_.value.new_zeros(len(sample), self.operators.form_size(k)) for k in blocks}
        start = {k: sum_.open.pop(k, zero[k]) for k in blocks}
        loop = self._loop(start, sample, choice)
        nu, image = loop.settled(MAX_STEPS, TOLERANCE)
        for k in blocks:
            x = self.enclosure.x(k).at(sample)
            sum_.value = sum_.value + x.largest(image[k] - nu[k])
            sum_.size = sum_.size + 2 * (start[k].detach().abs() * x.magnitude.detach()).sum(1)
            if self.lines[k] is None:
                self._stop(sum_, k, nu[k], sample)
            else:
                lam = loop.lam(k, nu[k])
                self._intercept(sum_, k, nu[k], lam, sample)
                self._pass_on(sum_, k, lam, [j for j in self.operators.plan.rows[k] if j not in blocks])

    def _loop(self, start: dict[int, Tensor], sample: Tensor, choice: CHOICE | None) -> Multipliers:
        slopes = {k: self._slopes_at(k, sample, choice) for k in start if self.lines[k] is not None}
        links = {
            j: [(i, self.operators.transposed[i, j]) for i in self.columns.get(j, []) if i in slopes]
            for j in start
        }
        return Multipliers(start, slopes, links)
