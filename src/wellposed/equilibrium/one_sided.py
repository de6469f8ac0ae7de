"""Conditions that bound A from above only, so that strong negative feedback is allowed."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.equilibrium.certificate import Certificate, Equivalent
from wellposed.equilibrium.condition import Condition, square
from wellposed.equilibrium.induced_norm import spectral_norm, symmetric_eigenvalue
from wellposed.equilibrium.projection import clip_symmetric_part, project_rows, project_rows_one_sided
from wellposed.equilibrium.rounding import EPS, double, reciprocal_gap, upward
from wellposed.errors import IllPosedError


def _damping(A: Tensor, slope: tuple[float, float]) -> float:
    """Returns 1 / (1 + max(0, -min_i d A_ii)): then 1 - damping + damping d A_ii >= 0 for every slope d."""
    loops = [bound * entry for bound in slope for entry in double(A).diagonal().aminmax()]
    return 1.0 / (1.0 + max(0.0, *(-float(loop) for loop in loops)))


class Mu(Condition):
    """gamma mu_inf(A) < 1 with mu_inf(A) = max_i (A_ii + sum_{j != i} |A_ij|), for slopes in [0, gamma].

    The logarithmic norm of D A is at most gamma mu_inf(A)^+ for every diagonal 0 <= D <= gamma, so
    |(I - D A)^-1|_inf <= 1 / (1 - gamma mu_inf(A)^+), and the damped iteration contracts.

    Example:
        >>> from wellposed.activations import get_activation
        >>> print(Mu().certify(torch.tensor([[-5.0, 4.0], [0.5, 0.0]]), get_activation("tanh")))
        mu: 0.5 < 1 holds (margin 0.5)
    """

    name = "mu"

    def obstacle(self, activation: Activation) -> str:
        if not activation.componentwise:
            return "it acts on blocks; use 'block'"
        return "" if activation.slope[0] >= 0 else "it is not increasing; use 'inf' or 'weighted'"

    def parametrise(
        self, raw: Tensor, kappa: float | None, activation: Activation, weights: Tensor | None = None
    ) -> Tensor:
        return project_rows_one_sided(raw, self.check_kappa(kappa, activation))

    def certify(self, A: Tensor, activation: Activation) -> Certificate:
        self.require(activation)
        matrix = square(A)
        size, loop = matrix.abs().sum(-1), matrix.diagonal()
        mu = (size - loop.abs() + loop + (len(A) + 4) * 2 * EPS * size).amax()
        value = float(activation.lipschitz() * mu + 2 * EPS * (activation.lipschitz() * mu).abs())
        return Certificate.of(self.name, value, gain=reciprocal_gap(max(0.0, value)))

    def equivalent(self, A: Tensor, activation: Activation) -> Equivalent:
        return Equivalent.unchanged(A, _damping(A, activation.slope))


class Monotone(Condition):
    """lambda_max((A + A') / 2) < 1 for the projection on an interval (ReLU, hardtanh, ReLU6).

    x = P(Ax + v) is the variational inequality of F(x) = (I - A) x - v, strongly monotone with
    m = 1 - lambda_max and Lipschitz with L = |I - A|_2. It has the same solutions for every step a > 0:
    x = P((1 - a) x + a (Ax + v)); a = m / L^2 contracts by sqrt(1 - m^2 / L^2) in the 2-norm, and
    |x - x*|_2 <= (1 + L) / m |x - f(x)|_2.

    Example:
        >>> from wellposed.activations import get_activation
        >>> print(Monotone().certify(torch.tensor([[0.5, 7.0], [-7.0, -1.0]]), get_activation("relu")))
        monotone: 0.5 < 1 holds (margin 0.5)
    """

    name = "monotone"

    def obstacle(self, activation: Activation) -> str:
        if activation.componentwise and activation.projection:
            return ""
        return "it is not the projection on an interval (as 'relu' is); use 'mu' or 'spectral'"

    def parametrise(
        self, raw: Tensor, kappa: float | None, activation: Activation, weights: Tensor | None = None
    ) -> Tensor:
        return clip_symmetric_part(raw, self.check_kappa(kappa, activation))

    def certify(self, A: Tensor, activation: Activation) -> Certificate:
        self.require(activation)
        value = symmetric_eigenvalue(square(A))
        gain = (1 + _distance_from_identity(A)) * reciprocal_gap(value) * (1 + 4 * EPS)
        return Certificate.of(self.name, value, norm="2", gain=gain)

    def equivalent(self, A: Tensor, activation: Activation) -> Equivalent:
        certificate = self.certify(A, activation)
        if not certificate.holds:
            raise IllPosedError(f"no step makes the iteration contract: {certificate}")
        reach = _distance_from_identity(A)
        step = certificate.margin / reach / reach  # whose square may overflow
        identity = torch.eye(len(A), dtype=A.dtype, device=A.device)
        return Equivalent((1 - step) * identity + step * A, torch.full_like(A[0, 0].detach(), step), 1.0)

    def lipschitz(self, certificate: Certificate, A: Tensor, B: Tensor, activation: Activation) -> float:
        """Bounds the Lipschitz constant of u -> x from the 2-norm to the 2-norm: |B|_2 / m."""
        return float(upward(spectral_norm(B) * reciprocal_gap(certificate.value), 2))


@dataclass(frozen=True)
class Triangular(Condition):
    """max_i d A_ii < 1 over the slopes d, for a triangular A (003, Remark 3).

    State by state x_i = phi(A_ii x_i + c) has one solution; a strictly triangular A (value 0) is well-posed
    for every componentwise map. For ReLU the rule is exact: diag(A) < 1.

    Args:
        lower: parametrise the lower triangle instead of the upper one.
        diagonal: parametrise the diagonal too, each entry at most kappa.

    Example:
        >>> from wellposed.activations import get_activation
        >>> print(Triangular().certify(torch.tensor([[-9.0, 50.0], [0.0, 0.5]]), get_activation("relu")))
        triangular: 0.5 < 1 holds (margin 0.5) [upper triangular]
    """

    lower: bool = False
    diagonal: bool = False
    name = "triangular"

    def obstacle(self, activation: Activation) -> str:
        return "" if activation.componentwise else "it acts on blocks; use 'block'"

    def parametrise(
        self, raw: Tensor, kappa: float | None, activation: Activation, weights: Tensor | None = None
    ) -> Tensor:
        self.require(activation)
        strict = raw.tril(-1) if self.lower else raw.triu(1)
        if kappa is not None:
            strict = project_rows(strict, kappa)
        if not self.diagonal:
            return strict
        top = 1 - 1e-3 if kappa is None else min(kappa, 1 - 1e-3)
        return strict + torch.diag_embed(raw.diagonal(dim1=-2, dim2=-1).clamp_max(top))

    def certify(self, A: Tensor, activation: Activation) -> Certificate:
        self.require(activation)
        matrix = square(A)
        shapes = {"upper": bool((matrix.tril(-1) == 0).all()), "lower": bool((matrix.triu(1) == 0).all())}
        shape = next((name for name, fits in shapes.items() if fits), None)
        if shape is None or not bool(matrix.isfinite().all()):
            return Certificate.of(self.name, math.inf, note="not triangular" if shape is None else "not finite")
        loops = torch.stack([bound * matrix.diagonal() for bound in activation.slope])
        value = float((loops + EPS * loops.abs()).amax())
        return Certificate.of(self.name, value, note=f"{shape} triangular")

    def equivalent(self, A: Tensor, activation: Activation) -> Equivalent:
        loop = A.diagonal()
        if not bool(loop.any()):
            return Equivalent.unchanged(A)
        if not (activation.projection and activation.homogeneous):
            return Equivalent.unchanged(A, _damping(A, activation.slope))
        scale = 1 / (1 - loop)
        return Equivalent((A - loop.diag()) * scale.unsqueeze(-1), scale, 1.0)


def _distance_from_identity(A: Tensor) -> float:
    identity = torch.eye(len(A), dtype=torch.float64, device=double(A).device)
    difference = identity - double(A)
    return float(spectral_norm(difference) * (1 + (len(A) + 2) * EPS))
