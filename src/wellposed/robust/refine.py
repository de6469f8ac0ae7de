"""Tightens pre-activations by CROWN, unit by unit, before other blocks read them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.forms.evaluation import Stage
from wellposed.robust.crown import Backward
from wellposed.robust.enclosure import Enclosure
from wellposed.robust.functional import Functionals
from wellposed.robust.interval import Interval
from wellposed.robust.slopes import tightest

CHUNK = {"cpu": 2**17}  # entries of rows that are carried back at a time, for processors what their caches hold
LARGEST_CHUNK = 2**23  # elsewhere


@dataclass
class Refinement:
    """Bounds the pre-activations of units that are not affine on their interval.

    Args:
        everything: whether also those that are, for bounds of the states themselves.
        rounds: how often the units of a loop are refined; other blocks need one round.
        slope_steps: how many steps the slopes are optimised for, for every unit outside of loops.
    """

    backward: Backward
    rounds: int
    everything: bool = False
    slope_steps: int = 0

    @property
    def enclosure(self) -> Enclosure:
        """What is tightened."""
        return self.backward.enclosure

    def __call__(self, stage: Stage) -> None:
        """Tightens the blocks of a stage."""
        for _ in range(self.rounds if stage.system is not None else min(self.rounds, 1)):
            if self.enclosure.query.late:
                return
            for k in stage.blocks:
                if self.backward.lines[k] is not None and self.enclosure.operators.plan.rows[k]:
                    self._block(k, self.slope_steps if stage.system is None else 0)
            if stage.system is not None:
                self.enclosure.enclose(stage)

    def _block(self, k: int, steps: int) -> None:
        lines, z = self.backward.lines[k], self.enclosure.z(k)
        assert lines is not None
        chosen = torch.ones_like(z.lower, dtype=torch.bool) if self.everything else lines.unstable(z)
        sample, unit = chosen.nonzero(as_tuple=True)
        size, low, high = row_chunk(self.enclosure), z.lower, z.upper
        for some, units in zip(*(index.split(size) for index in (sample, unit)), strict=True):
            if len(some) == 0 or self.enclosure.query.late:
                break
            lower, upper = self._both(preactivations(self.enclosure, k, some, units), steps)
            low, high = low.index_put((some, units), lower), high.index_put((some, units), upper)
        self.enclosure.tighten(k, Interval(low, high))  # at the end, or a sample would depend on others

    def _both(self, rows: Functionals, steps: int) -> tuple[Tensor, Tensor]:
        lower, _ = tightest(self.backward, rows.negated, steps)
        upper, _ = tightest(self.backward, rows, steps)
        return -lower, upper


def row_chunk(enclosure: Enclosure) -> int:
    """Returns how many rows are carried back at a time."""
    widest = max(*enclosure.query.form.partition, enclosure.query.form.sizes[1])
    return max(1, CHUNK.get(enclosure.query.set.device.type, LARGEST_CHUNK) // widest)


def preactivations(enclosure: Enclosure, k: int, sample: Tensor, unit: Tensor) -> Functionals:
    """Reads some pre-activations of a block as functionals."""
    operators = enclosure.operators
    size = operators.form_size(k)
    rows = torch.zeros(len(unit), size, dtype=operators.form.dtype, device=unit.device)
    rows = rows.scatter(1, unit[:, None], 1.0)
    states = {j: operators.transposed[k, j].apply(rows) for j in operators.plan.rows[k]}
    inputs = operators.inputs_transposed[k].apply(rows)
    return Functionals(states, inputs, enclosure.biases[k][unit], enclosure.size(k)[sample, unit], sample)
