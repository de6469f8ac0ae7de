"""The conditions of well-posedness, and the search for one that holds.

A `Condition` parametrises the matrices that satisfy it, proves it of a given one and bounds errors by it.
`InfNorm`, `WeightedNorm`, `SpectralNorm` and `BlockNorm` make the map itself contract, in |.|_inf, weighted, |.|_2
and blockwise norms. `Mu`, `Monotone` and `Triangular` bound A from above only, so that strong negative feedback is
allowed. `certify` tries them on a matrix, `certificate` on a model or form.

A `StateMatrix` is the A of a model: free parameters, and the condition that keeps it well-posed. An
`IterationSystem` is what its equation is solved with. `choose_condition` and `check_matrices` check the options
and matrices of a model.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol, SupportsFloat

import torch
from torch import Tensor, nn

from wellposed.activations import Activation, get_activation
from wellposed.conditions.certificate import (
    AffineBound,
    Certificate,
    Equivalent,
    ErrorBounder,
    LowRankBound,
    comparison,
    low_rank_certificate,
)
from wellposed.conditions.norms import block_sizes, perron_weights, spectral_norm, symmetric_eigenvalue
from wellposed.conditions.projections import (
    clip_singular_values,
    clip_symmetric_part,
    project_block_rows,
    project_rows,
    project_rows_one_sided,
)
from wellposed.conditions.rounding import EPS, ROOM, above_underflow, double, reciprocal_gap, upward
from wellposed.equilibrium.affine import Factors
from wellposed.equilibrium.method import require_finite
from wellposed.equilibrium.tracing import under_transform
from wellposed.errors import IllPosedError, InputError
from wellposed.registry import Registry


class Condition(ABC):
    """A sufficient condition on A for x = phi(Ax + v) to have exactly one solution for every v."""

    name: ClassVar[str]

    @abstractmethod
    def why_not(self, activation: Activation) -> str:
        """Says why the condition cannot apply to the activation; empty if it can."""

    @abstractmethod
    def parametrise(
        self,
        raw: Tensor,  # (..., n, n)
        kappa: float | None,
        activation: Activation,
        weights: Tensor | None = None,  # (..., n)
    ) -> Tensor:
        """Maps any matrix to one with value gamma * kappa at most, differentiably, vmappable."""

    @abstractmethod
    def certify(self, A: Tensor, activation: Activation) -> Certificate:
        """Checks A and always returns; raises only if the condition cannot apply."""

    def equivalent(self, A: Tensor, activation: Activation) -> Equivalent:
        """Returns a system with the same equilibria on which the damped iteration converges."""
        return Equivalent.unchanged(A)

    def error_bound(
        self,
        certificate: Certificate,
        A: Tensor,
        activation: Activation,
        residual: Tensor,  # (B, n)
        rounding: Tensor,  # (B, n)
    ) -> Tensor:
        """Bounds |x - x*|_inf per sample; see `ErrorBounder`, which is cheaper for repeated calls."""
        return ErrorBounder(certificate, A, activation)(residual, rounding)

    def lipschitz(self, certificate: Certificate, A: Tensor, B: Tensor, activation: Activation) -> float:
        """Bounds the Lipschitz constant of u -> x from the inf norm to the inf norm.

        x*(u) is a state of the system at u' whose residual is at most gamma |B| |u - u'|, so the error
        bound applies.
        """
        change = upward(double(B).abs().sum(-1), B.shape[-1]) * activation.lipschitz(certificate.norm)
        bound = ErrorBounder(certificate, A, activation)(change.unsqueeze(0), torch.zeros_like(change)[None])
        return float(bound)

    def check_kappa(self, kappa: float | None, activation: Activation) -> float:
        """Returns kappa if it is positive with gamma * kappa < 1, and explains otherwise."""
        self.require(activation)
        gamma = activation.lipschitz(self.norm_name(activation))
        if kappa is None or not 0 < kappa * gamma < 1:
            raise InputError(
                f"kappa={kappa} with {activation.name!r} (Lipschitz constant {gamma:g}) gives no unique "
                f"equilibrium under {self.name!r}; choose 0 < kappa < {1 / gamma:g}"
            )
        return kappa

    def norm_name(self, activation: Activation) -> str:
        """Names the norm whose Lipschitz constant multiplies kappa."""
        return "inf"

    def require(self, activation: Activation) -> None:
        """Raises if the condition cannot apply to the activation."""
        if reason := self.why_not(activation):
            raise InputError(f"condition {self.name!r} cannot apply to {activation.name!r}: {reason}")


def square(A: Tensor) -> Tensor:
    """Returns A in float64 after checking that it is one square matrix.

    Example:
        >>> square(torch.eye(2)).dtype
        torch.float64
    """
    if A.ndim != 2 or A.shape[0] != A.shape[1] or not len(A):
        raise InputError(f"expected one square matrix A of at least one state, got {tuple(A.shape)}")
    return double(A)


def _missing(activation: Activation, norm: str) -> str:
    return "" if norm in activation.constants else f"it declares no Lipschitz constant in the norm {norm!r}"


class InfNorm(Condition):
    """gamma |A|_inf < 1 (003, Remark 2).

    Example:
        >>> from wellposed.activations import get_activation
        >>> print(InfNorm().certify(torch.tensor([[0.5, -0.25], [0.0, 0.5]]), get_activation("relu")))
        inf: 0.75 < 1 holds (margin 0.25)
    """

    name = "inf"

    def why_not(self, activation: Activation) -> str:
        return _missing(activation, "inf")

    def parametrise(
        self, raw: Tensor, kappa: float | None, activation: Activation, weights: Tensor | None = None
    ) -> Tensor:
        return project_rows(raw, self.check_kappa(kappa, activation))

    def certify(self, A: Tensor, activation: Activation) -> Certificate:
        self.require(activation)
        sums = above_underflow(upward(square(A).abs().sum(-1), len(A) + 1))
        value = float(sums.amax() * activation.lipschitz("inf"))
        return Certificate.of(self.name, value, gain=reciprocal_gap(value))


class WeightedNorm(Condition):
    """rho(gamma |A|) < 1, proven by weights v with gamma |A| v < v (003, Theorem 1).

    Parametrised by A = diag(e^omega) P diag(e^-omega) with |P|_inf <= kappa, P the row-wise projection of
    the raw matrix in that scale: a contraction in max_i |x_i| e^-omega_i, and rows that fit stay as they are.

    Example:
        >>> from wellposed.activations import get_activation
        >>> A = torch.tensor([[0.0, 4.0], [0.125, 0.0]])
        >>> WeightedNorm().certify(A, get_activation("relu")).holds
        True
    """

    name = "weighted"

    def why_not(self, activation: Activation) -> str:
        return "" if activation.componentwise else "it acts on blocks; use 'block'"

    def parametrise(
        self, raw: Tensor, kappa: float | None, activation: Activation, weights: Tensor | None = None
    ) -> Tensor:
        radius = self.check_kappa(kappa, activation)
        if weights is None:
            return project_rows(raw, radius)
        inner = (-weights).exp().unsqueeze(-1) * raw * weights.exp().unsqueeze(-2)
        fits = inner.abs().sum(-1, keepdim=True) <= radius
        inner = project_rows(inner, radius * (1 - 8 * torch.finfo(raw.dtype).eps))
        return torch.where(fits, raw, weights.exp().unsqueeze(-1) * inner * (-weights).exp().unsqueeze(-2))

    def certify(self, A: Tensor, activation: Activation) -> Certificate:
        self.require(activation)
        matrix = upward(above_underflow(square(A).abs()) * activation.lipschitz("inf"), 1)
        weights, value = perron_weights(matrix)
        return Certificate.of(self.name, value, weights=weights, gain=reciprocal_gap(value))


class SpectralNorm(Condition):
    """gamma |A|_2 < 1, with a singular value that is bounded and not only computed.

    Example:
        >>> from wellposed.activations import get_activation
        >>> A = 0.9 * torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> print(SpectralNorm().certify(A, get_activation("tanh")))
        spectral: 0.9 < 1 holds (margin 0.1)
    """

    name = "spectral"

    def why_not(self, activation: Activation) -> str:
        return _missing(activation, "2")

    def norm_name(self, activation: Activation) -> str:
        return "2"

    def parametrise(
        self, raw: Tensor, kappa: float | None, activation: Activation, weights: Tensor | None = None
    ) -> Tensor:
        return clip_singular_values(raw, self.check_kappa(kappa, activation))

    def certify(self, A: Tensor, activation: Activation) -> Certificate:
        self.require(activation)
        value = float(upward(spectral_norm(square(A)) * activation.lipschitz("2"), 1))
        return Certificate.of(self.name, value, norm="2", gain=reciprocal_gap(value))

    def lipschitz(self, certificate: Certificate, A: Tensor, B: Tensor, activation: Activation) -> float:
        """Bounds the Lipschitz constant of u -> x from the 2-norm to the 2-norm: gamma |B|_2 / (1 - c)."""
        return float(upward(spectral_norm(B) * activation.lipschitz("2") * certificate.gain, 3))


class BlockNorm(Condition):
    """rho(N(A, gamma)) < 1 for a map on blocks (003, eq. 2.6 and Theorem 1).

    N_ij = gamma_p |A_ij|_{p->p}, tried for every norm p in which phi has a constant. The three norms 1->1,
    2->2 and inf->inf are exact.

    Example:
        >>> from wellposed.activations import max_pool
        >>> print(BlockNorm().certify(0.125 * torch.ones(4, 4), max_pool(2)))
        block: 0.5 < 1 holds (margin 0.5) [l1 norm on blocks of 2, induced norms exact]
    """

    name = "block"

    def why_not(self, activation: Activation) -> str:
        return "it acts componentwise; use 'inf' or 'weighted'" if activation.componentwise else ""

    def norm_name(self, activation: Activation) -> str:
        return "inf" if "inf" in activation.constants else min(activation.constants)

    def parametrise(
        self, raw: Tensor, kappa: float | None, activation: Activation, weights: Tensor | None = None
    ) -> Tensor:
        radius, norm = self.check_kappa(kappa, activation), self.norm_name(activation)
        sizes = block_sizes(raw.shape[-1], activation.block or 0)
        if norm == "inf" and len(sizes) == 1:
            return project_rows(raw, radius)
        return project_block_rows(raw, sizes, radius, norm)

    def certify(self, A: Tensor, activation: Activation) -> Certificate:
        self.require(activation)
        matrix = square(A)
        size = block_sizes(len(A), activation.block or 0)[0]
        certificates = {
            norm: perron_weights(comparison(matrix, activation, norm).matrix) for norm in activation.constants
        }
        norm = min(certificates, key=lambda name: certificates[name][1])
        weights, value = certificates[norm]
        note = f"l{norm} norm on blocks of {size}, induced norms exact"
        gain = reciprocal_gap(value)
        return Certificate.of(self.name, value, weights=weights, norm=norm, gain=gain, note=note)


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

    def why_not(self, activation: Activation) -> str:
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
        value = float(activation.lipschitz() * mu + 2 * EPS * (activation.lipschitz() * mu).abs()) + ROOM
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

    def why_not(self, activation: Activation) -> str:
        if activation.componentwise and activation.projection:
            return ""
        return "it is not the projection on an interval (as 'relu' is); use 'mu' or 'spectral'"

    def parametrise(
        self, raw: Tensor, kappa: float | None, activation: Activation, weights: Tensor | None = None
    ) -> Tensor:
        return clip_symmetric_part(raw, self.check_kappa(kappa, activation))

    def certify(self, A: Tensor, activation: Activation) -> Certificate:
        self.require(activation)
        value = symmetric_eigenvalue(square(A)) + ROOM
        gain = (1 + _distance_from_identity(A)) * reciprocal_gap(value) * (1 + 4 * EPS)
        return Certificate.of(self.name, value, norm="2", gain=gain)

    def equivalent(self, A: Tensor, activation: Activation) -> Equivalent:
        certificate = self.certify(A, activation)
        if not certificate.holds:
            raise IllPosedError(f"no step makes the iteration contract: {certificate}")
        lipschitz = _distance_from_identity(A)
        step = certificate.margin / lipschitz / lipschitz  # whose square may overflow
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

    def why_not(self, activation: Activation) -> str:
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
        value = value + ROOM if bool(matrix.diagonal().any()) else value
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


_ALL = (InfNorm(), WeightedNorm(), Triangular(), BlockNorm(), Mu(), SpectralNorm(), Monotone())  # cheapest first
CONDITIONS: Registry[Condition] = Registry.of("condition", Condition, {rule.name: rule for rule in _ALL})


def certify(
    A: Tensor,  # (n, n)
    activation: str | Activation,
    condition: str | Condition | None = None,
) -> Certificate:
    """Proves that x = phi(Ax + v) has exactly one solution for every v, or raises.

    Tries every condition that applies, cheapest first, and returns the first that holds
    (003, Theorem 1 and Remarks 2-3).

    Args:
        condition: check only this one.

    Example:
        >>> print(certify(torch.tensor([[0.0, 5.0], [0.0, 0.0]]), "relu", "triangular"))
        triangular: 0 < 1 holds (margin 1) [upper triangular]
        >>> certify(torch.tensor([[1.5]]), "tanh")
        Traceback (most recent call last):
            ...
        wellposed.errors.IllPosedError: nothing proves that x = phi(Ax + v) has one solution for phi = tanh...
    """
    phi = get_activation(activation)
    if condition is not None:
        candidates = [CONDITIONS.get(condition)]
    else:
        candidates = [CONDITIONS[name] for name in CONDITIONS if not CONDITIONS[name].why_not(phi)]
    failed = []
    for candidate in candidates:
        certificate = candidate.certify(A, phi)
        if certificate.holds:
            return certificate
        failed.append(certificate)
    raise IllPosedError(_explanation(A, phi, failed))


class Certified(Protocol):
    """Anything that can prove its own well-posedness: a model, a form."""

    def certificate(self) -> Certificate:
        """Returns the proof."""


def certificate(model: Certified) -> Certificate:
    """Proves that every input of a model or form has exactly one equilibrium.

    Example:
        >>> from wellposed.models import ImplicitModel
        >>> certificate(ImplicitModel(3, 1, 4)).holds
        True
    """
    return model.certificate()


def _explanation(A: Tensor, activation: Activation, failed: list[Certificate]) -> str:
    lines = [f"nothing proves that x = phi(Ax + v) has one solution for phi = {activation.name}, n = {len(A)}:"]
    lines += [f"  {certificate}" for certificate in failed]
    if not bool(torch.isfinite(A).all()):
        return "\n".join([*lines, "A holds NaN or infinite entries; find where they come from"])
    remedy = "lower kappa, rescale the states (rescaling), or project A (Condition.parametrise)"
    return "\n".join([*lines, f"{remedy}; other conditions: {', '.join(CONDITIONS)}"])


StateBound = AffineBound | LowRankBound


@dataclass(frozen=True)
class IterationSystem:
    """Factors of the matrix to iterate with, and how."""

    factors: Factors
    scale: Tensor | None = None  # of v = Bu + b
    damping: float = 1.0
    splitting: float | None = None


class StateMatrix(nn.Module):
    """Turns free parameters into a well-posed A: `raw`, or `left` and `right` for ``A = L R'``."""

    def __init__(
        self, size: int, activation: Activation, condition: Condition, kappa: float | None, rank: int | None
    ) -> None:
        super().__init__()
        self.activation, self.condition, self.kappa = activation, condition, kappa
        if not isinstance(condition, Triangular):
            condition.check_kappa(kappa, activation)
        elif kappa is not None and not kappa > 0:
            raise InputError(f"kappa must be positive, or None for no cap; received {kappa}")
        self.log_weights = nn.Parameter(torch.zeros(size)) if condition.name == "weighted" else None
        if rank is None:
            self.raw = nn.Parameter(torch.randn(size, size) / size)
            return
        if condition.name != "inf":
            raise InputError(f"rank goes with condition 'inf' only; received {condition.name!r}")
        if not 1 <= rank <= size:
            raise InputError(f"rank must lie between 1 and state_features={size}; received {rank}")
        self.left = nn.Parameter(torch.randn(size, rank) / rank)
        self.right = nn.Parameter(torch.randn(size, rank) / size)

    @classmethod
    def of(cls, A: Tensor, activation: Activation, proof: Certificate, kappa: float | None) -> "StateMatrix":
        """Wraps a certified matrix without changing it."""
        condition = _fitting(CONDITIONS.get(proof.condition), A)
        gamma = activation.lipschitz(condition.norm_name(activation))
        needed = proof.value / gamma * (1 + A.shape[0] * torch.finfo(A.dtype).eps)
        cap = kappa
        if kappa is None and not isinstance(condition, Triangular):
            cap = max(0.95 / gamma, needed)
        matrix = cls(A.shape[0], activation, condition, cap, None).to(A)
        with torch.no_grad():
            matrix.raw.copy_(A)
            if matrix.log_weights is not None and proof.weights is not None:
                matrix.log_weights.copy_(proof.weights.log())
            if not torch.equal(matrix.dense(), A):
                raise IllPosedError(
                    f"A needs kappa of at least {needed:.6g} under condition {condition.name!r}; received {cap}"
                )
        return matrix

    def factors(self) -> Factors:
        """Returns ``(A,)`` or ``(L, R)`` with ``A = L R'``; |L R'|_inf <= |L|_inf |R'|_inf <= kappa."""
        if not (dtype := getattr(self, "raw" if hasattr(self, "raw") else "left").dtype).is_floating_point:
            raise InputError(f"the conditions are about real matrices; received {dtype}: use float32 or float64")
        if hasattr(self, "raw"):
            return (self.condition.parametrise(self.raw, self.kappa, self.activation, self.log_weights),)
        cap = self.condition.check_kappa(self.kappa, self.activation)
        return project_rows(self.left, cap), project_rows(self.right.mT, 1.0).mT

    def dense(self) -> Tensor:  # (n, n)
        """Returns A itself."""
        factors = self.factors()
        return factors[0] if len(factors) == 1 else factors[0] @ factors[1].mT

    def system(self) -> IterationSystem:
        """Returns what to iterate: A itself, or an equivalent system on which the iteration converges."""
        factors = self.factors()
        if self.condition.name in ("mu", "monotone") and under_transform():
            raise InputError(
                f"condition {self.condition.name!r} chooses its iteration by the values of A, which vmap (and so "
                "an Ensemble) hides; use 'inf', 'weighted' or 'spectral' there"
            )
        if self.condition.name == "monotone":
            A = factors[0].detach().to(torch.promote_types(factors[0].dtype, torch.float32))
            gap = torch.eye(len(A), dtype=A.dtype, device=A.device) - A
            finite = bool(gap.isfinite().all())  # else the solve reports every sample
            step = 2 / float(torch.linalg.matrix_norm(gap, 2)) if finite else math.nan
            return IterationSystem(factors, splitting=step)
        if self.shifted:
            system = self.condition.equivalent(factors[0], self.activation)
            return IterationSystem((system.A,), system.scale, system.damping)
        return IterationSystem(factors)

    @property
    def nilpotent(self) -> bool:
        """Whether A is strictly triangular, so that there is no feedback."""
        return isinstance(self.condition, Triangular) and not self.condition.diagonal

    @property
    def row_radius(self) -> float | None:
        """The largest row sum of A, where A is the parameter `raw` with its rows projected; None elsewhere."""
        if self.condition.name != "inf" or not hasattr(self, "raw"):
            return None
        return self.condition.check_kappa(self.kappa, self.activation)

    @property
    def shifted(self) -> bool:
        """Whether another matrix than A is iterated with."""
        rule = self.condition
        return rule.name in ("mu", "monotone") or (isinstance(rule, Triangular) and rule.diagonal)

    def certificate(self) -> Certificate:
        """Checks the matrix that is evaluated."""
        factors = self.factors()
        if len(factors) == 2:
            left, right = factors
            return low_rank_certificate(left.detach(), right.detach(), self.activation)
        return self.condition.certify(factors[0].detach(), self.activation)

    def bound(self, terms: int) -> StateBound:
        """Returns the error bound of a computed state."""
        with torch.no_grad():
            factors, certificate = self.factors(), self.certificate()
        if len(factors) == 2:
            return LowRankBound(certificate, factors[0], factors[1], self.activation, terms)
        return AffineBound(certificate, factors[0], self.activation, terms)

    @torch.no_grad()
    def project_(self) -> None:
        """Moves the free parameters to the values they stand for."""
        if hasattr(self, "raw"):
            self.raw.copy_(self.dense())
            return
        left, right = self.factors()
        self.left.copy_(left)
        self.right.copy_(right)


def _fitting(condition: Condition, A: Tensor) -> Condition:
    """Returns the variant of a condition whose parametrisation leaves A as it is."""
    if not isinstance(condition, Triangular):
        return condition
    return Triangular(lower=bool(A.triu(1).eq(0).all() and A.tril(-1).any()), diagonal=bool(A.diagonal().any()))


def choose_condition(condition: str | Condition, kappa: float | None, triangular: bool) -> Condition:
    """Returns the condition behind the options of a model; raises where they contradict each other."""
    rule = CONDITIONS.get(condition)
    if kappa is not None and not isinstance(kappa, SupportsFloat):
        raise InputError(f"kappa must be a number; received {kappa!r}")
    if triangular:
        if rule.name not in ("inf", "triangular"):
            raise InputError(
                f"triangular=True caps rows of A and cannot be combined with condition={rule.name!r}; drop one"
            )
        return Triangular()
    if kappa is None:
        raise InputError("kappa=None (no cap on A) is possible only with triangular=True; give kappa below one")
    return rule


def check_matrices(A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, bias: Tensor | None) -> None:
    """Raises unless matrices fit together, share a dtype and are finite."""
    if A.dim() != 2 or B.dim() != 2 or C.dim() != 2 or A.shape[0] != A.shape[1]:
        raise InputError(
            f"A is (n, n), B (n, p) and C (q, n); received {tuple(A.shape)}, {tuple(B.shape)}, {tuple(C.shape)}"
        )
    n, p, q = A.shape[0], B.shape[1], C.shape[0]
    expected = {"B": (B, (n, p)), "C": (C, (q, n)), "D": (D, (q, p)), "bias": (bias, (n,))}
    for name, (value, shape) in expected.items():
        if value is None:
            continue
        if tuple(value.shape) != shape:
            raise InputError(f"{name} must have the shape {shape} to fit A; received {tuple(value.shape)}")
        if value.dtype != A.dtype:
            raise InputError(f"all matrices share one dtype; A is {A.dtype} and {name} {value.dtype}")
        require_finite(name, value)
