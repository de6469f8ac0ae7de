"""Broyden's method with limited memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.equilibrium.map import Map
from wellposed.equilibrium.safeguard import Safeguard
from wellposed.equilibrium.solver import Solver, SolverState
from wellposed.equilibrium.transform import under_functorch
from wellposed.errors import InputError

ROOM = 8  # terms by which the memory grows; one by one, a program that is captured would keep every size of it


@dataclass(frozen=True)
class Broyden(Solver):
    """Solves ``g(x) = f(x) - x = 0`` by rank-one updates of an inverse Jacobian (Broyden 1965).

    Starts from ``H = -I``, which makes the first step a plain one, and keeps ``H = -I + sum u v'`` with at
    most `memory` terms, after which it starts again from ``-I``. A step that more than doubles the
    residual is taken back.

    Args:
        memory: rank-one terms kept before a restart.
    """

    memory: int = 30

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise InputError(f"memory must be at least 1; received {self.memory}")

    @property
    def guard(self) -> Safeguard:
        """The rule that accepts or rejects proposals."""
        return Safeguard(growth=2.0, pause=2)

    def init(self, x: Tensor) -> SolverState:
        terms = x.new_zeros(x.shape[0], 0, x.shape[1])  # grows up to the memory
        count = x.new_zeros(x.shape[0], 0, 0)  # its last size is the number of terms
        unknown = torch.full_like(x, torch.nan)
        return (terms, terms, count, unknown, unknown, *self.guard.init(x))

    def step(self, f: Map, x: Tensor, fx: Tensor, state: SolverState) -> tuple[Tensor, SolverState]:
        left, right, count, old_x, old_g, *old_guard = state
        rejected, guard = self.guard.judge(tuple(old_guard), x, fx)  # type: ignore[arg-type]
        g, used = fx - x, count.shape[2]
        unknown = ~old_g.isfinite().all(1, keepdim=True)
        dx, dg = (x - old_x).masked_fill(unknown, 0), (g - old_g).masked_fill(unknown, 0)
        if used == self.memory:
            full = (left[:, :1] != 0).any(2, keepdim=True)
            left, right = left[:, :used].masked_fill(full, 0)[:, 1:], right[:, 1:used].clone()
            used -= 1
        column, term = _new_term(left[:, :used], right[:, :used], dx, dg)
        left, right = _joined(left, used, column), _joined(right, used, term)
        used += 1
        trial = x - _apply(left[:, :used], right[:, :used], g)
        new_x, guard = self.guard.choose(trial, rejected, fx, guard)
        return new_x, (left, right, x.new_zeros(x.shape[0], 0, used), x, g, *guard)


def _apply(left: Tensor, right: Tensor, vector: Tensor) -> Tensor:  # (-I + sum left right') vector
    return (left.mT @ (right @ vector[:, :, None]))[:, :, 0] - vector


def _new_term(left: Tensor, right: Tensor, dx: Tensor, dg: Tensor) -> tuple[Tensor, Tensor]:  # (B, n) each
    """Returns the rank-one term that makes ``H dg = dx``."""
    image = _apply(left, right, dg)
    term = _apply(right, left, dx)
    denominator = (dx * image).sum(1, keepdim=True)
    sizes = [torch.linalg.vector_norm(part.detach(), dim=1, keepdim=True) for part in (dx, image)]
    sound = denominator.abs() > 1e-8 * sizes[0] * sizes[1]
    return ((dx - image) / denominator.masked_fill(~sound, 1)).masked_fill(~sound, 0), term


def _joined(terms: Tensor, used: int, term: Tensor) -> Tensor:
    """Adds a term to those in use: in place where there is room, but not in steps that are differentiated."""
    if torch.is_grad_enabled() or under_functorch() or torch.compiler.is_compiling():
        return torch.cat([terms[:, :used], term[:, None]], dim=1)
    if used == terms.shape[1]:
        terms = torch.cat([terms, terms.new_zeros(terms.shape[0], ROOM, terms.shape[2])], dim=1)
    terms[:, used] = term
    return terms
