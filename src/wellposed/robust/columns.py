"""A linear program over points of the graphs of all states, that grows."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wellposed.robust.interval import Interval
from wellposed.robust.linear_program import Array, LinearProgram
from wellposed.robust.relaxed_set import Rows, to_array
from wellposed.robust.separable_function import Separable
from wellposed.robust.uncertainty import Box, Uncertainty


class Master(NamedTuple):
    """The value of a program over some points, which is no larger than over all, and its multipliers."""

    value: float
    lam: Array


class Columns:
    """Mixes points ``(z_i, x_i, f_i)`` of every state so that ``z = Ax + Bu + b``.

    A variable is the weight of a point, of an input, or an input itself where the set is a box; where z has no
    lower end a further one takes z down from zero.
    """

    def __init__(
        self, rows: Rows, inputs: Uncertainty, index: int, f: Separable, x: Interval, z: Interval
    ) -> None:
        self.rows, self.inputs, self.index, self.f = rows, inputs, index, f
        relu = torch.as_tensor(rows.relu)
        every = torch.arange(len(relu))
        low = torch.where(relu, x.lower.clamp(min=0), x.lower)
        ends = torch.where(relu & (z.upper <= 0), 0.0, low), torch.where(relu & (z.upper <= 0), 0.0, x.upper)
        off = torch.where(relu, z.upper.clamp(max=0), low)
        starts = [(every, ends[0], torch.where(relu & (z.upper <= 0), off, ends[0]))]
        starts += [(every, ends[1], torch.where(relu & (z.upper <= 0), off, ends[1]))]
        cut = (relu & (z.lower < 0)).nonzero()[:, 0]
        zero = torch.zeros(len(cut), dtype=low.dtype)
        starts += [(cut, zero, off[cut])]
        bounded = cut[z.lower[cut].isfinite()]
        starts += [(bounded, torch.zeros(len(bounded), dtype=low.dtype), z.lower[bounded])]
        self.rays = to_array(cut[z.lower[cut].isinf()]).astype(int)
        self.unit, self.x, self.z = (torch.cat(parts) for parts in zip(*starts, strict=True))
        self.inputs_seen = inputs.center[index][None]

    def add(self, x: Tensor, z: Tensor, drive: Tensor) -> None:
        """Adds a point for every state, and the input at which ``drive' u`` is largest."""
        self.unit = torch.cat([self.unit, torch.arange(len(x))])
        self.x, self.z = torch.cat([self.x, x]), torch.cat([self.z, z])
        if isinstance(self.inputs, Box):
            return
        with torch.enable_grad():
            functional = drive.detach()[None].requires_grad_()
            support = self.inputs.support_rows(functional, torch.tensor([self.index]))
            (point,) = torch.autograd.grad(support.sum(), functional)
        self.inputs_seen = torch.cat([self.inputs_seen, point])

    def solve(self) -> Master:
        """Solves for the best mixture."""
        n, weights = len(self.rows.A), len(self.unit)
        unit, x, z = to_array(self.unit).astype(int), to_array(self.x), to_array(self.z)
        share = np.zeros((n, weights))
        share[unit, np.arange(weights)] = 1.0
        links = np.zeros((n, weights))
        links[unit, np.arange(weights)] = z
        links -= self.rows.A[:, unit] * x
        drop = np.zeros((n, len(self.rays)))
        drop[self.rays, np.arange(len(self.rays))] = -1.0
        inputs, lower, upper, total = self._inputs()
        top = np.concatenate([links, drop, -inputs], axis=1)
        bottom = np.concatenate([share, np.zeros((n, drop.shape[1] + inputs.shape[1]))], axis=1)
        pieces, sides = [top, bottom], [self.rows.bias, np.ones(n)]
        if total:
            pieces.append(
                np.concatenate([np.zeros((1, weights + drop.shape[1])), np.ones_like(lower)[None]], axis=1)
            )
            sides.append(np.ones(1))
        deepest = np.abs(links).max() * n + np.abs(inputs).sum() + np.abs(self.rows.bias).max() + 1
        ends = np.concatenate([np.ones(weights), np.full(drop.shape[1], deepest), upper])
        starts = np.concatenate([np.zeros(weights + drop.shape[1]), lower])
        side = np.concatenate(sides)
        values = _values(self.f, unit, self.x, n)
        objective = np.concatenate([values, np.zeros(drop.shape[1] + inputs.shape[1])])
        found = LinearProgram(np.concatenate(pieces), side, side, starts, ends).maximum(objective)
        return Master(found.value, found.duals[:n])

    def _inputs(self) -> tuple[Array, Array, Array, bool]:
        """Returns the columns of the inputs with their bounds, and whether they are weights."""
        if isinstance(self.inputs, Box):
            return (
                self.rows.B,
                to_array(self.inputs.lower[self.index]),
                to_array(self.inputs.upper[self.index]),
                False,
            )
        points = self.rows.B @ to_array(self.inputs_seen).T
        return points, np.zeros(points.shape[1]), np.ones(points.shape[1]), True


def _values(f: Separable, unit: np.ndarray, x: Tensor, n: int) -> Array:
    """Evaluates f_i at points of different states: every point in place of its state, the others at its value."""
    table = torch.stack([f.at(value.expand(n)) for value in x.unique()])
    order = torch.searchsorted(x.unique(), x)
    return to_array(table[order, torch.as_tensor(unit)])
