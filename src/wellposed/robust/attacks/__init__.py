"""Inputs that change what a model says, each in its set and run through the model itself (003, section 4.4)."""

from wellposed.robust.attacks.adaptive import adaptive_attack, survival, through
from wellposed.robust.attacks.attack import Attack
from wellposed.robust.attacks.auto import autoattack
from wellposed.robust.attacks.gradient import fgsm, pgd
from wellposed.robust.attacks.noise import noise_attack, salt_and_pepper, speckle
from wellposed.robust.attacks.ranked import ranked_attack
from wellposed.robust.attacks.relaxed import lp_attack
from wellposed.robust.attacks.saliency import jsma
from wellposed.robust.attacks.threat import Threat
from wellposed.robust.attacks.transfer import train_surrogate, transfer_attack

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
