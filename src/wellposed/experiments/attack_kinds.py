"""The attacks of the suites by name, along the share of changed inputs, the radius or the level of noise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellposed.experiments.cache import cached
from wellposed.experiments.trained_network import ImageNetwork
from wellposed.robust import sensitivity
from wellposed.robust.attacks import (
    Attack,
    autoattack,
    fgsm,
    jsma,
    lp_attack,
    noise_attack,
    pgd,
    ranked_attack,
    train_surrogate,
    transfer_attack,
)
from wellposed.robust.attacks.attack import Loss, under_attack

Axis = Literal["clean", "share", "radius", "speckle"]
Split = Literal["test", "holdout"]
RANKED = {  # ranking and values of the attacks that change single inputs at once
    "sensitivity-attack": ("sensitivity", "uniform"),
    "gradient-attack": ("gradient", "uniform"),
    "random-attack": ("random", "uniform"),
    "sensitivity-signed": ("sensitivity", "gradient"),
    "gradient-signed": ("gradient", "gradient"),
    "random-signed": ("random", "gradient"),
    "sensitivity-white": ("sensitivity", "white"),
    "gradient-white": ("gradient", "white"),
    "random-white": ("random", "white"),
}
GOALS = 2  # classes that the linear program tries for
QUERIES = 2000  # images about which a surrogate's trainer asks
CHANNELS = (32, 64, 64)  # of a surrogate's convolutions
BATCH = 50  # images of AutoAttack, in which convolutions are quickest


@dataclass(frozen=True)
class Attempt:
    """One attack at one point of its axis.

    Args:
        victim: what is attacked.
        axis: "share" changes a share of the inputs by up to the whole range, cut to [0, 1]; "radius" all inputs
            by up to a radius.
        attack: which one.
        split: the images.
        seed: of the network.
        draw: seed of random values.
        epochs: of a surrogate.
    """

    victim: ImageNetwork
    axis: Axis
    attack: str
    split: Split
    seed: int
    draw: int
    epochs: int

    def __call__(self, u: Tensor, target: Tensor, at: float) -> Attack:
        """Attacks some images."""
        network = self.victim.trained(self.seed)
        if self.attack in RANKED:
            return self._ranked(network, u, target, at)
        return KINDS[self.attack](self, network, u, target, at)

    def reach(self, u: Tensor, at: float) -> tuple[float, int | None]:
        """Returns epsilon, and how many inputs may change, at least one; None for all."""
        return (at, None) if self.axis == "radius" else (1.0, self.few(u, at))

    def few(self, u: Tensor, at: float) -> int:
        """Returns how many inputs a share is."""
        return max(1, round(at * u[0].numel()))

    def _ranked(self, network: nn.Module, u: Tensor, target: Tensor, at: float) -> Attack:
        ranking, values = RANKED[self.attack]
        S = sensitivity_matrix(self.victim, self.seed) if ranking == "sensitivity" else None
        if values == "white":
            return white_attack(network, u, target, self.few(u, at), ranking, S, self.draw)
        how: dict[str, Any] = {"ranking": ranking, "values": values, "seed": self.draw, "S": S}
        return ranked_attack(network, u, target, *self.reach(u, at), **how)


def _fgsm(attempt: Attempt, network: nn.Module, u: Tensor, target: Tensor, at: float) -> Attack:
    epsilon, count = attempt.reach(u, at)
    return fgsm(network, u, target, epsilon, count=count)


def _pgd(attempt: Attempt, network: nn.Module, u: Tensor, target: Tensor, at: float) -> Attack:
    epsilon, count = attempt.reach(u, at)
    return pgd(network, u, target, epsilon, count=count)


def _jsma(attempt: Attempt, network: nn.Module, u: Tensor, target: Tensor, at: float) -> Attack:
    return jsma(network, u, target, attempt.few(u, at), 1.0)


def _lp(attempt: Attempt, network: nn.Module, u: Tensor, target: Tensor, at: float) -> Attack:
    return lp_attack(network, u, target, *attempt.reach(u, at), goals=GOALS)


def _auto(attempt: Attempt, network: nn.Module, u: Tensor, target: Tensor, at: float) -> Attack:
    return autoattack(network, u, target, at, batch_size=BATCH, seed=attempt.draw)


def _transfer(attempt: Attempt, network: nn.Module, u: Tensor, target: Tensor, at: float) -> Attack:
    copy = surrogate(attempt.victim, attempt.seed, attempt.split, QUERIES, attempt.epochs)
    return transfer_attack(network, u, target, at, copy)


def _salt(attempt: Attempt, network: nn.Module, u: Tensor, target: Tensor, at: float) -> Attack:
    return noise_attack(network, u, target, "salt_and_pepper", at, seed=attempt.draw)


def _speckle(attempt: Attempt, network: nn.Module, u: Tensor, target: Tensor, at: float) -> Attack:
    return noise_attack(network, u, target, "speckle", at, seed=attempt.draw)


KINDS: dict[str, Callable[[Attempt, nn.Module, Tensor, Tensor, float], Attack]] = {
    "fgsm": _fgsm,
    "pgd": _pgd,
    "jsma": _jsma,
    "lp": _lp,
    "autoattack": _auto,
    "transfer": _transfer,
    "salt-and-pepper": _salt,
    "speckle": _speckle,
}


def white_attack(
    network: nn.Module, u: Tensor, target: Tensor, count: int, ranking: str, S: Tensor | None, seed: int
) -> Attack:
    """Sets the inputs that rank highest to one: no draws, and all changes have the same sign."""
    with under_attack(network, u, target) as victim:
        if ranking == "sensitivity":
            assert S is not None
            scores = S[target]
        elif ranking == "gradient":
            scores = victim.gradient(u, Loss("margin"))[1].abs().flatten(1)
        else:
            scores = torch.rand(len(u), u[0].numel(), generator=torch.Generator().manual_seed(seed))
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(count, dim=1).indices, True)
        victim.try_(torch.where(chosen.view_as(u), 1.0, u))
    return victim.attack(f"{ranking} ranked, white")


def sensitivity_matrix(victim: ImageNetwork, seed: int) -> Tensor:  # (q, p)
    """Returns the sensitivity matrix of a network."""
    return _sensitivity(victim, victim.own(seed))


def surrogate(victim: ImageNetwork, seed: int, split: Split, count: int, epochs: int) -> nn.Module:
    """Returns a network that learnt the answers of another on images of the other split, and no labels."""
    return _surrogate(victim, seed, "holdout" if split == "test" else "test", count, epochs)


@cached
def _sensitivity(victim: ImageNetwork, seed: int) -> Tensor:
    one = victim.inputs(victim.images("test").subset(1))
    return sensitivity(victim.trained(seed), tuple(one.shape[1:]))


@cached
def _surrogate(victim: ImageNetwork, seed: int, split: str, count: int, epochs: int) -> nn.Module:
    u, _ = victim.sample(split, count, seed)
    network = None if u.dim() == 2 else imitator(tuple(u.shape[1:]), len(victim.classes), seed)
    return train_surrogate(victim.trained(seed), u, network=network, rounds=2, epochs=epochs, step=0.03, seed=seed)


def imitator(shape: tuple[int, ...], classes: int, seed: int) -> nn.Sequential:
    """Builds a small convolutional network for images.

    Example:
        >>> imitator((3, 32, 32), 10, 0)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    before, height, width = shape
    layers: list[nn.Module] = []
    with torch.random.fork_rng(()):
        torch.manual_seed(seed)
        for channels in CHANNELS:
            layers += [nn.Conv2d(before, channels, 3, 2, padding=1), nn.ReLU()]
            before, height, width = channels, -(-height // 2), -(-width // 2)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * height * width, classes))
