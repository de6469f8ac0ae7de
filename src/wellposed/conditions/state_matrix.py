"""The matrix A of a model: free parameters, and the map that keeps it well-posed.

`StateMatrix` holds both; an `IterationSystem` is what its equation is solved with. `choose_condition` and
`check_matrices` check the options and matrices of a model.
"""

import math
from dataclasses import dataclass
from typing import SupportsFloat

import torch
from torch import Tensor, nn

from wellposed.activations import Activation
from wellposed.conditions.certificate import AffineBound, Certificate, LowRankBound, low_rank_certificate
from wellposed.conditions.conditions import Condition, Triangular, get_condition
from wellposed.conditions.projections import project_rows
from wellposed.equilibrium.affine import Factors
from wellposed.equilibrium.fixed_point import require_finite
from wellposed.equilibrium.tracing import under_transform
from wellposed.errors import IllPosedError, InputError

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
        condition = _fitting(get_condition(proof.condition), A)
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
            return IterationSystem(factors, splitting=_splitting(factors[0].detach()))
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


def _splitting(A: Tensor) -> float:
    """Returns the step 2 / |I - A|_2; NaN where A is not finite, which the solve then reports for every sample."""
    gap = (torch.eye(len(A), dtype=A.dtype, device=A.device) - A).to(torch.promote_types(A.dtype, torch.float32))
    return 2 / float(torch.linalg.matrix_norm(gap, 2)) if bool(gap.isfinite().all()) else math.nan


def _fitting(condition: Condition, A: Tensor) -> Condition:
    """Returns the variant of a condition whose parametrisation leaves A as it is."""
    if not isinstance(condition, Triangular):
        return condition
    return Triangular(lower=bool(A.triu(1).eq(0).all() and A.tril(-1).any()), diagonal=bool(A.diagonal().any()))


def choose_condition(condition: str | Condition, kappa: float | None, triangular: bool) -> Condition:
    """Returns the condition behind the options of a model; raises where they contradict each other."""
    rule = get_condition(condition)
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
