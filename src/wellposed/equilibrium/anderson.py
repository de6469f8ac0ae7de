"""Anderson extrapolation alternating with plain steps, batched, regularised and safeguarded."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.equilibrium.linear import eliminate
from wellposed.equilibrium.map import Map, pieces
from wellposed.equilibrium.solver import Solver, SolverState
from wellposed.equilibrium.transform import under_transform
from wellposed.errors import InputError


@dataclass(frozen=True)
class Anderson(Solver):
    """Takes plain steps and, from time to time, the combination of them whose residuals cancel.

    With the residuals ``r_i = f(x_i) - x_i`` of the latest `memory` + 1 plain steps, jumps to
    ``sum a_i f(x_i)`` where the weights minimise ``|sum a_i r_i|_2`` and add up to one (Anderson 1965; the
    alternation with plain steps is that of Pratapa, Suryanarayana and Pask 2016). The next evaluation
    judges the jump: it must have gained at least what `worth` plain steps gain, else the solve goes on
    from the last plain point. A failed jump thus costs one evaluation in ``memory + 3``, after repeated
    failures ever fewer jumps are tried, and the solver needs at most about 1.2 times the evaluations of
    `Picard`.

    Residuals are judged in the l1 norm: averaging iterates whose residual merely moves from state to
    state (a cyclic shift) shrinks the other norms and gains nothing.

    Args:
        memory: differences that a jump combines.
        damping: ``(1 - damping) x + damping f(x)`` takes the place of ``f(x)``.
        worth: plain steps that a jump must be worth.
        patience: samples that need no more plain steps than this to the accuracy of the dtype are left alone.
        ridge: regularisation of the least squares problem, relative to its trace; None means 1e-12, or the
            rounding unit of the dtype if that is larger.
    """

    memory: int = 5
    damping: float = 1.0
    worth: float = 2.0
    patience: float = 12.0
    ridge: float | None = None

    block = 16

    def __post_init__(self) -> None:
        if self.memory < 1 or not 0 < self.damping <= 1:
            raise InputError(
                "memory must be at least 1 and damping in (0, 1]; received "
                f"memory={self.memory}, damping={self.damping}"
            )

    # The state: cycles to sit out, failures in a row, and then either the plain points (x, f(x), f(f(x)), ...)
    # or, after a jump, where to go if it fails, the residual to beat and the samples that jumped. Cycles have the
    # same length for all samples, jump or not, so that a sample does not depend on its companions.

    def init(self, x: Tensor) -> SolverState:
        none = x.new_zeros(x.shape[0])
        return none, none

    def step(self, f: Map, x: Tensor, fx: Tensor, state: SolverState) -> tuple[Tensor, SolverState]:
        if self.damping != 1:
            fx = torch.lerp(x, fx, self.damping)
        if state[-1].dtype == torch.bool:
            return self._judge(x, fx, *state)
        plain = (*state, fx) if len(state) > 2 else (*state, x, fx)
        if len(plain) < self.memory + 4:
            return fx, plain
        return self._jump(plain[0], plain[1], plain[-1], _stacked(plain[2:], pieces(x)))

    def _jump(self, rest: Tensor, failures: Tensor, last: Tensor, points: Tensor) -> tuple[Tensor, SolverState]:
        """Extrapolates from the plain points ``(B, pieces, memory + 2, n / pieces)``, the last of them `last`."""
        residuals = points.diff(dim=2)  # (B, pieces, memory + 1, n / pieces)
        norms = residuals[:, :, -2:].detach().abs().sum((1, 3))
        rate = (norms[:, 1] / norms[:, 0]).clamp_max(1)
        goal = 8 * torch.finfo(points.dtype).eps * last.detach().abs().sum(1)
        jumps = (norms[:, 1] * rate**self.patience > goal) & (rest <= 0)
        target = rate**self.worth * norms[:, 1]
        if not under_transform() and not bool(jumps.any()):
            return last, (rest - 1, failures, last, target, jumps)
        ridge = default_ridge(points.dtype) if self.ridge is None else self.ridge
        latest = -min(self.memory, last.shape[1])  # more differences than states determine nothing
        gamma = least_squares(residuals.diff(dim=2)[:, :, latest:], residuals[:, :, -1], ridge)
        images = points[:, :, 1:].diff(dim=2)[:, :, latest:]
        jump = last - _combination(images, gamma).reshape(last.shape)
        jumps = jumps & jump.detach().isfinite().all(1)
        return torch.where(jumps[:, None], jump, last), (rest - 1, failures, last, target, jumps)

    @staticmethod
    def _judge(
        x: Tensor, fx: Tensor, rest: Tensor, failures: Tensor, safe: Tensor, target: Tensor, jumped: Tensor
    ) -> tuple[Tensor, SolverState]:
        """Goes on from the jump where it paid, from the last plain point elsewhere."""
        norm = (fx - x).detach().abs().sum(1)
        failed = jumped & ~(norm <= target)
        failures = torch.where(jumped, (failures + 1) * failed, failures)
        rest = torch.where(failed, 2 ** (failures - 1).clamp_max(3) - 1, rest)
        return torch.where(failed[:, None], safe, fx), (rest, failures)


def default_ridge(dtype: torch.dtype) -> float:
    """Returns a ridge that leaves differences of use alone and keeps rounding out of the others."""
    return max(1e-12, torch.finfo(dtype).eps)


def _stacked(points: tuple[Tensor, ...], count: int) -> Tensor:  # (B, count, k, n / count)
    """Stacks points whose rows are cut into pieces."""
    if count == 1:
        return torch.stack(points, dim=1)[:, None]
    return torch.stack([point.unflatten(1, (count, -1)) for point in points], dim=2)


def least_squares(columns: Tensor, right: Tensor, ridge: float) -> Tensor:  # (B, s, m, c), (B, s, c) -> (B, m)
    """Minimises ``|right - sum gamma_i columns_i|`` per sample by regularised normal equations."""
    gram = (columns @ columns.mT).double().sum(1)
    size = gram.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    gram = gram + (ridge * size + torch.finfo(torch.float64).tiny) * torch.eye(gram.shape[1], device=gram.device)
    image = (columns @ right[..., None]).double().sum(1)
    solution = eliminate(gram, image) if gram.is_cuda else torch.linalg.solve_ex(gram, image)[0]
    return solution[:, :, 0].to(right.dtype)


def _combination(parts: Tensor, weights: Tensor) -> Tensor:  # (B, s, m, c), (B, m) -> (B, s, c)
    """Adds up weighted parts; as a matrix product where that is faster."""
    if not parts.is_cuda:
        return (parts * weights[:, None, :, None]).sum(2)
    return (weights[:, None, None].expand(-1, parts.shape[1], -1, -1) @ parts)[:, :, 0]
