"""How far outputs move when inputs do: sets of inputs, proven bounds, sensitivity, worst cases (003 chapter 4)."""

from wellposed.robust.bounds import (
    METHODS,
    certified,
    certified_accuracy,
    margin_bounds,
    output_bounds,
    state_bounds,
    worst_case_loss,
)
from wellposed.robust.crown import Crown
from wellposed.robust.linear_programs import Relaxation
from wellposed.robust.query import Bounds, MethodError, Query
from wellposed.robust.sensitivity import lipschitz, norm_gain, norm_penalty, sensitivity, sensitivity_penalty
from wellposed.robust.separable import Separable, separable_bound
from wellposed.robust.sets import Ball, Box, ConvexSet, SparseBox, Uncertainty
from wellposed.robust.training import (
    AdversarialLoss,
    CertifiedLoss,
    Penalised,
    Ramp,
    SignSteps,
    TradesLoss,
    augment_with_attacks,
)

__all__ = [
    "METHODS",
    "AdversarialLoss",
    "Ball",
    "Bounds",
    "Box",
    "CertifiedLoss",
    "ConvexSet",
    "Crown",
    "MethodError",
    "Penalised",
    "Query",
    "Ramp",
    "Relaxation",
    "Separable",
    "SignSteps",
    "SparseBox",
    "TradesLoss",
    "Uncertainty",
    "augment_with_attacks",
    "certified",
    "certified_accuracy",
    "lipschitz",
    "margin_bounds",
    "norm_gain",
    "norm_penalty",
    "output_bounds",
    "sensitivity",
    "sensitivity_penalty",
    "separable_bound",
    "state_bounds",
    "worst_case_loss",
]
