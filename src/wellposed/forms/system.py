"""One loop of a form: ``x = phi(Ax + v)`` with an operator A, its certificate and its solution."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.conditions.certificate import AffineBound, Certificate
from wellposed.conditions.conditions import certify, get_condition
from wellposed.conditions.norms import perron_weights
from wellposed.conditions.rounding import reciprocal_gap, upward
from wellposed.equilibrium.fixed_point import fixed_point
from wellposed.equilibrium.solution import Solution
from wellposed.equilibrium.solvers import Picard
from wellposed.equilibrium.stopping import Settled
from wellposed.errors import IllPosedError
from wellposed.forms.block import Block
from wellposed.forms.cover import LARGEST_DENSE, cover, sum_length
from wellposed.forms.operator import Operator, Sparse
from wellposed.forms.operators import Dense
from wellposed.forms.selection import Selection


class System:
    """The equation ``x = phi(Ax + v)`` of some states that feed one another.

    Args:
        A: operator from the states to themselves.
        activation: phi of all of them.
        parts: phi of every block where A is a block matrix.
    """

    def __init__(self, A: Operator, activation: Activation, parts: tuple[Activation, ...]) -> None:
        self.A, self.activation, self.parts = A, activation, parts

    @cached_property
    def feedforward(self) -> bool:
        """Whether the states can be put in an order in which none depends on a later one."""
        listed = self.A.shape[0] <= LARGEST_DENSE or isinstance(self.A, Dense | Sparse | Selection)
        return self.activation.componentwise and listed and self.A.is_strictly_triangular()

    @cached_property
    def certificate(self) -> Certificate:
        """The proof of exactly one solution for every v, by norms of blocks where those suffice."""
        if "inf" in self.activation.constants:
            value = _row_norm(self.A) * self.activation.lipschitz("inf")
            if value < 1:
                return Certificate.of("inf", value, gain=reciprocal_gap(value))
        if isinstance(self.A, Block) and len(self.parts) > 1 and all("inf" in p.constants for p in self.parts):
            found = block_certificate(self.A, self.parts)
            if found.holds:
                return found
        if self.feedforward:
            return Certificate.of("triangular", 0.0, note="strictly triangular")
        if self.A.shape[0] > LARGEST_DENSE:
            raise IllPosedError(
                f"norms of blocks do not prove that the loop of {self.A.shape[0]} states has one solution, and "
                f"finer conditions are tried up to {LARGEST_DENSE} states only; rescale or shrink its gains"
            )
        return certify(self.A.to_dense(), self.activation)

    def solve(self, v: Tensor, options: dict[str, Any]) -> Solution:
        """Solves for every row of ``v (B, n)``; `options` are those of `fixed_point`."""
        A, damping, options = self.A, 1.0, dict(options)
        condition = self.certificate.condition
        if condition in ("mu", "monotone", "triangular") and not self.feedforward:
            system = get_condition(condition).equivalent(A.to_dense(), self.activation)
            A, v, damping = Dense(system.A), v * system.scale, system.damping
        if self.feedforward:
            options = {"solver": Picard(), "stop": Settled(A.shape[0]), **options}
        phi = self.activation.function

        def f(x: Tensor, offset: Tensor) -> Tensor:
            image = phi((A @ x) + offset)
            return image if damping == 1 else torch.lerp(x, image, damping)

        start = options.pop("x0", None)
        return fixed_point(f, torch.zeros_like(v) if start is None else start, v, **options)

    def bound(self, x: Tensor, v: Tensor, size: Tensor, terms: int) -> Tensor | None:
        """Bounds the distance of x to the solution; None where only norms of blocks are known."""
        if self.certificate.condition == "blocks" or self.A.shape[0] > LARGEST_DENSE:
            return None
        bound = AffineBound(self.certificate, self.A.to_dense(), self.activation, terms)
        return bound(x, torch.cat([v, size], dim=1).detach())


def _row_norm(A: Operator) -> float:
    """Returns ``|A|_inf``, rounded up; formed in float64, which costs less than what float32 would have to add."""
    place = "cpu" if A.device.type == "mps" else A.device
    with torch.no_grad():
        exact = A.to(device=place, dtype=torch.float64)
        return float(upward(cover(exact).row_sums(), sum_length(A)).max())


def block_norms(A: Block) -> Tensor:  # (L, L)
    """Returns the inf norm of every block, rounded up: N(A) of 003 eq. (2.6) for gamma = 1.

    Example:
        >>> block_norms(Block((1, 1), (1, 1), {(0, 1): Dense(torch.tensor([[-2.0]]))})).round()
        tensor([[0., 2.],
                [0., 0.]], dtype=torch.float64)
    """
    norms = torch.zeros(len(A.heights), len(A.widths), dtype=torch.float64)
    for (i, j), part in A.parts.items():
        norms[i, j] = _row_norm(part) if min(part.shape) else 0.0
    return norms


def block_certificate(A: Block, parts: tuple[Activation, ...]) -> Certificate:
    """Checks rho(N(A, gamma)) < 1 with ``N_ij = gamma_i |A_ij|_inf`` (003, Theorem 1), forming nothing.

    Example:
        >>> from wellposed.activations import get_activation
        >>> gain, loss = Dense(torch.tensor([[4.0]])), Dense(torch.tensor([[0.125]]))
        >>> loop = Block((1, 1), (1, 1), {(0, 1): gain, (1, 0): loss})
        >>> block_certificate(loop, (get_activation("relu"),) * 2).holds
        True
    """
    gamma = torch.tensor([part.lipschitz("inf") for part in parts], dtype=torch.float64)
    norms = block_norms(A)
    gains = torch.where(norms > 0, gamma[:, None] * norms, 0.0)
    if not bool(gains.isfinite().all()):
        return Certificate.of("blocks", torch.inf, note="a map in the loop has no Lipschitz constant")
    weights, value = perron_weights(upward(gains, 1))
    note = f"Perron-Frobenius eigenvalue of the norms of {len(parts)} blocks"
    return Certificate.of("blocks", value, weights=weights, gain=reciprocal_gap(value), note=note)
