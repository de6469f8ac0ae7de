"""Inputs that change what a model says, each in its set and run through the model itself (003, section 4.4)."""

from wellposed.robust.attacks.attack import Attack, Threat
from wellposed.robust.attacks.auto import autoattack
from wellposed.robust.attacks.gradient import (
    adaptive_attack,
    fgsm,
    pgd,
    survival,
    through,
    train_surrogate,
    transfer_attack,
)
from wellposed.robust.attacks.other import lp_attack, noise_attack, salt_and_pepper, speckle
from wellposed.robust.attacks.sparse import jsma, ranked_attack

__all__ = [
    "Attack",
    "Threat",
    "adaptive_attack",
    "autoattack",
    "fgsm",
    "jsma",
    "lp_attack",
    "noise_attack",
    "pgd",
    "ranked_attack",
    "salt_and_pepper",
    "speckle",
    "survival",
    "through",
    "train_surrogate",
    "transfer_attack",
]
