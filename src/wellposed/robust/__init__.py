"""How far outputs move when inputs do: sets of inputs, proven bounds, sensitivity, worst cases (003 chapter 4)."""

from wellposed.robust.bounds import METHODS, margin_bounds, output_bounds, state_bounds
from wellposed.robust.convex_set import Ball, ConvexSet, SparseBox
from wellposed.robust.crown_bound import Crown
from wellposed.robust.penalty import norm_gain, norm_penalty, sensitivity_penalty
from wellposed.robust.query import MethodError, Query
from wellposed.robust.relaxation import Relaxation
from wellposed.robust.result import Bounds
from wellposed.robust.sensitivity import lipschitz, sensitivity
from wellposed.robust.separable import separable_bound
from wellposed.robust.separable_function import Separable
from wellposed.robust.trades import SignSteps, TradesLoss
from wellposed.robust.training import AdversarialLoss, CertifiedLoss, Penalised, Ramp, added_back
from wellposed.robust.uncertainty import Box, Uncertainty
from wellposed.robust.worst_case import certified, certified_accuracy, worst_case_loss

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
    "added_back",
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
