"""Runs that attack a trained network, along the share of changed inputs, the radius or the level of noise.

`KINDS` are the attacks of the suites by name. `attack_thumbnails` keeps small pictures for a record: attacked
images as PNG in text, so that a report needs records alone. `AttackRun` is the run.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from wellposed.pages.images import png
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
from wellposed.robust.attacks.attack import Loss, Threat, largest, under_attack
from wellposed.robust.crown import enclosed
from wellposed.robust.draw import as_picture, row_correlation, strongest, telling
from wellposed.robust.query import Functionals, Query, as_form, margins
from wellposed_lab.cache import cached
from wellposed_lab.engine.run import Context, Run
from wellposed_lab.engine.statistics import rank_correlation
from wellposed_lab.engine.store import Result, Value
from wellposed_lab.networks.trained import Dense, ImageNetwork

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


def _dual(attempt: Attempt, network: nn.Module, u: Tensor, target: Tensor, at: float) -> Attack:
    return dual_attack(network, u, target, at)


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
    "lp-dual": _dual,
    "autoattack": _auto,
    "transfer": _transfer,
    "salt-and-pepper": _salt,
    "speckle": _speckle,
}


def dual_attack(network: nn.Module, u: Tensor, target: Tensor, epsilon: float) -> Attack:
    """Tries the inputs at which a dual point of the linear program (003 section 4.4) is largest.

    A network of 188 thousand states is too large for the program itself. Any dual point bounds every margin from
    above by a linear function of the input; CROWN carries one back through the triangles of all ReLUs, and the
    input at which its function is largest is tried for every class.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
        >>> _ = network[0].weight.data.copy_(torch.eye(2)), network[2].weight.data.copy_(torch.eye(2))
        >>> dual_attack(network, torch.tensor([[0.6, 0.4]]), torch.tensor([0]), 0.2).inputs
        tensor([[0.4000, 0.6000]])
    """
    threat = Threat(u, epsilon)
    with under_attack(network, u, target) as victim:
        with torch.no_grad():
            form = as_form(network, threat.set())
            query = Query(form, threat.set(), margins(form.sizes[2], target, u))
            backward = enclosed(query, rounds=0, everything=False, continuation=False)[0]
            operators, states = backward.enclosure.operators, backward.enclosure.states
            wanted = query.combination.flatten(0, 1)  # type: ignore[union-attr]
            rows = Functionals.of_outputs(operators, wanted, states, query.set, query.sample)
            slopes = backward.linear(rows).inputs.view(len(u), -1, *u.shape[1:])
        low, high = threat.ends
        for slope in slopes.unbind(1):
            victim.try_(torch.where(slope > 0, high, torch.where(slope < 0, low, u)))
    return victim.attack("dual of the linear program")


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
        victim.try_(torch.where(largest(scores, count).view_as(u), 1.0, u))
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


SHOWN = 8  # images that a record carries
RAISED, LOWERED = (178.0, 24.0, 43.0), (33.0, 102.0, 172.0)  # colours of a change: red, blue


def attack_thumbnails(
    network: nn.Module,
    clean: Tensor,
    attack: Attack,
    target: Tensor,  # (B,)
    classes: Sequence[str],
    at: float,
) -> dict[str, Any]:
    """Keeps a few images before and after an attack, their difference, and the classes that are given.

    Images that were right before and wrong after come first.

    Returns:
        Texts and numbers only: the point, the scale of the differences and, for every image, three PNG files in
        base64 with the classes.

    Example:
        >>> found = Attack(torch.ones(1, 4), torch.tensor([True]), torch.eye(2)[1:], torch.ones(1), "fgsm")
        >>> network = nn.Linear(4, 2)
        >>> kept = attack_thumbnails(network, torch.zeros(1, 4), found, torch.tensor([0]), ("no", "yes"), 0.1)
        >>> kept["scale"], kept["samples"][0]["after"]
        (1.0, 'yes')
    """
    with torch.no_grad():
        before = torch.cat([network(part) for part in clean.split(100)]).argmax(1)
    after = attack.outputs.argmax(1)
    rows = telling(before, attack, target)[:SHOWN].tolist()
    change = attack.inputs - clean
    scale = max(float(change[rows].abs().max()), 1e-12)
    samples = [
        {
            "clean": text(tones(clean[row])),
            "attacked": text(tones(attack.inputs[row])),
            "difference": text(two_coloured(change[row] / scale)),
            "before": classes[int(before[row])],
            "after": classes[int(after[row])],
            "target": classes[int(target[row])],
        }
        for row in rows
    ]
    return {"at": at, "scale": scale, "attack": attack.name, "samples": samples}


def tones(u: Tensor) -> Tensor:
    """Writes an input in [0, 1] as bytes, (height, width) with ink on white or (height, width, 3).

    Example:
        >>> tones(torch.tensor([0.0, 1.0, 0.5, 0.2]))
        tensor([[255,   0],
                [128, 204]], dtype=torch.uint8)
    """
    picture = as_picture(u).double().cpu().clamp(0, 1)
    return (255 * (picture if picture.dim() == 3 else 1 - picture)).round().to(torch.uint8)


def two_coloured(change: Tensor) -> Tensor:  # (height, width, 3)
    """Writes a change in [-1, 1] as bytes: red where it raises, blue where it lowers, white where nothing changed.

    Example:
        >>> two_coloured(torch.tensor([1.0, -1.0, 0.0, 0.0]))[0].tolist()
        [[178, 24, 43], [33, 102, 172]]
    """
    share = strongest(change).double().cpu()[..., None]
    ends = torch.where(share > 0, torch.tensor(RAISED), torch.tensor(LOWERED)).double()
    return (255 + share.abs().clamp(max=1) * (ends - 255)).round().to(torch.uint8)


def text(pixels: Tensor) -> str:
    """Writes bytes (height, width) or (height, width, 3) as a PNG file in base64.

    Example:
        >>> text(torch.zeros(2, 2, dtype=torch.uint8))[:11]
        'iVBORw0KGgo'
    """
    return base64.b64encode(png(pixels.numpy())).decode()


PART = 100  # images at a time
NOISE = 0.2  # standard deviation of the noise under which classes are compared


@dataclass(frozen=True, kw_only=True)
class AttackRun(Run):
    """Attacks one network in one way.

    Of the images that were right before, ``success_rate`` is the share that are wrong afterwards;
    ``lost_accuracy`` counts the same images against all. Of the network itself, ``class_spread`` is the largest
    row sum of the sensitivity matrix over the smallest, ``class_noise_correlation`` their rank correlation with
    the accuracy that a class loses under noise, ``class_error_correlation`` with its errors without noise.

    Args:
        victim: the network and its images.
        axis: "clean" only measures; the others are those of `Attempt`.
        attack: which one.
        points: on the axis.
        samples: images; fewer than there are are drawn by the seed.
        split: "test", or "holdout", which has not been trained on either.
        gallery: the point at which a few attacked images are kept for the report, with seed 0 only.
        epochs: of a surrogate.
    """

    victim: ImageNetwork
    axis: Axis
    attack: str
    points: tuple[float, ...] = ()
    samples: int = 10_000
    split: Split = "test"
    gallery: float | None = None
    epochs: int = 10

    @property
    def labels(self) -> tuple[str, str, str | None]:
        split = "" if self.split == "test" else f"-{self.split}"
        axis = f"-{self.axis}" if self.axis in ("radius", "speckle") else ""
        return f"{self.victim.data}{split}{axis}", self.attack, None

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as data; records have an MLP under attack inside an `AttackedDense`."""
        config = super().config
        if isinstance(self.victim, Dense):
            config["victim"] = {"type": "AttackedDense", "dense": config["victim"]}
        return config

    def execute(self, runs: Sequence[Self], context: Context) -> list[Result]:
        return [run.measured() for run in runs]

    def measured(self) -> Result:
        """Returns all numbers of this run, and pictures where they are wanted."""
        if self.axis == "clean":
            clean = _clean_accuracy(self.victim, self.victim.own(self.seed), self.split, self.samples)
            return Result((Value("accuracy", clean), *self._about_sensitivity()))
        network = self.victim.trained(self.seed)
        u, target = self.victim.sample(self.split, self.samples, self.seed)
        right = _right(network, u, target)
        values: list[Value] = []
        facts: dict[str, Any] = {}
        for at in self.points:
            found = self.attacked(u, target, at)
            values += self._counted(found, u, right, at)
            if at == self.gallery and self.seed == 0:
                facts["gallery"] = attack_thumbnails(network, u, found, target, self.victim.classes, at)
            if found.notes:
                facts["notes"] = sorted({*facts.get("notes", ()), *found.notes})
        return Result(tuple(values), facts=facts)

    def attacked(self, u: Tensor, target: Tensor, at: float) -> Attack:
        """Attacks all images, some at a time, each time with other random values."""
        parts = []
        for number, (some, classes) in enumerate(zip(u.split(PART), target.split(PART), strict=True)):
            draw = 1000 * self.seed + number
            attempt = Attempt(self.victim, self.axis, self.attack, self.split, self.seed, draw, self.epochs)
            parts.append(attempt(some, classes, at))
        return _joined(parts)

    def _counted(self, found: Attack, u: Tensor, right: Tensor, at: float) -> list[Value]:
        changed = int((right & found.success).sum())
        return [
            Value("success_rate", changed / max(int(right.sum()), 1), at),
            Value("lost_accuracy", changed / len(u), at),
            Value("changed_pixels", float((found.inputs != u).sum()) / len(u), at),
        ]

    def _about_sensitivity(self) -> list[Value]:
        S = sensitivity_matrix(self.victim, self.seed)
        sizes = Value("sensitivity_outputs", float(len(S))), Value("sensitivity_inputs", float(S.shape[1]))
        return [Value("row_correlation", row_correlation(S)), *sizes, *self._about_classes(S.sum(1))]

    def _about_classes(self, sums: Tensor) -> list[Value]:
        """Says how the row sums of the sensitivity matrix differ, and whether they rank what classes lose."""
        network = self.victim.trained(self.seed)
        u, target = self.victim.sample(self.split, self.samples, self.seed)
        noise = NOISE * torch.randn(u.shape, generator=torch.Generator().manual_seed(self.seed))
        clean, noisy = (_class_errors(network, images, target, len(sums)) for images in (u, u + noise))
        return [
            Value("class_spread", float(sums.max() / sums.min())),
            Value("class_error_correlation", rank_correlation(sums.tolist(), clean.tolist())),
            Value("class_noise_correlation", rank_correlation(sums.tolist(), (noisy - clean).tolist())),
            *(
                Value("class_sensitivity", float(s), name)
                for s, name in zip(sums, self.victim.classes, strict=True)
            ),
        ]


def _joined(parts: Sequence[Attack]) -> Attack:
    names = ("inputs", "success", "outputs", "queries")
    inputs, success, outputs, queries = (torch.cat([getattr(part, name) for part in parts]) for name in names)
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    return Attack(inputs, success, outputs, queries, parts[0].name, notes)


@cached
def _clean_accuracy(victim: ImageNetwork, seed: int, split: Split, samples: int) -> float:
    u, target = victim.sample(split, samples, seed)
    return float(_right(victim.trained(seed), u, target).double().mean())


def _class_errors(network: nn.Module, u: Tensor, target: Tensor, classes: int) -> Tensor:  # (classes,)
    """Returns the share of wrong answers in every class."""
    wrong = ~_right(network, u, target)
    return torch.stack([wrong[target == k].double().mean() for k in range(classes)])


@torch.no_grad()
def _right(network: nn.Module, u: Tensor, target: Tensor) -> Tensor:  # (B,)
    return torch.cat([network(part).argmax(1) for part in u.split(PART)]) == target
