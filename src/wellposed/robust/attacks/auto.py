"""AutoAttack by its authors' package (Croce and Hein, 2020), with its warnings as notes."""

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InputError, require, unknown_name
from wellposed.robust.attacks.attack import Attack, Model, Threat, Victim, under_attack

NORMS = {"inf": "Linf", "2": "L2"}
VERSIONS = ("standard", "rand")
ATTACKS = ("apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square")
MOST_ELONGATED = 1.2  # height over width, or the reverse, for which square patches of the first size still fit


def autoattack(
    model: Model,
    u: Tensor,
    target: Tensor,  # (B,)
    epsilon: float,
    *,
    norm: str = "inf",
    version: str = "standard",
    attacks: Sequence[str] | None = None,
    steps: int = 100,
    square_queries: int = 5000,
    batch_size: int = 250,
    seed: int = 0,
) -> Attack:
    """Runs AutoAttack on inputs in [0, 1]: APGD on two losses, FAB and Square Attack, in this order.

    `notes` carries what the package warns of: random outputs, probabilities in place of logits, gradients in the
    forward pass, zero gradients, or Square Attack (which uses no gradient) going beyond the others, which all
    mean that gradients may be masked and an adaptive attack is called for. Fewer than ten classes have fewer
    goals, and with three or fewer the targeted DLR loss does not exist, so the attacks are chosen accordingly.

    Args:
        version: ``"standard"``, or ``"rand"`` for models with random outputs.
        attacks: some of them in place of a version: apgd-ce, apgd-dlr, apgd-t, fab, fab-t, square.
        steps, square_queries: fewer than by default make it quicker and weaker, which the notes then say.

    Example:
        >>> autoattack(nn.Linear(4, 3), torch.rand(2, 4), torch.tensor([0, 3]), 0.1)
        Traceback (most recent call last):
        wellposed.errors.InputError: the classes are 0 to 2; target reaches from 0 to 3
    """
    _check(version, attacks, steps, square_queries)
    threat = Threat(u, epsilon, norm)
    with under_attack(model, u, target) as victim:
        frame = Frame.around(victim)
        evaluation, notes = _evaluation(frame, threat, (version, attacks), seed)
        notes += _reduced(evaluation, steps, square_queries)
        with _quiet(evaluation) as messages, torch.random.fork_rng(devices=[u.device] if u.is_cuda else []):
            images, _ = evaluation.run_standard_evaluation(frame.put(u), target, batch_size=batch_size)
        victim.try_(threat.project(frame.take(images)))
    return victim.attack(f"autoattack {'custom' if attacks else version}", (*notes, *messages))


class Frame(nn.Module):
    """A model that takes images in float32, as the package expects, for other inputs; spare pixels are ignored."""

    def __init__(self, victim: Victim, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.victim, self.shape, self.inner = [victim], shape, tuple(victim.u.shape[1:])

    @classmethod
    def around(cls, victim: Victim) -> "Frame":
        """Keeps images that are about as high as wide, and writes other inputs into a square."""
        inner = tuple(victim.u.shape[1:])
        if len(inner) == 3 and max(inner[1:]) <= MOST_ELONGATED * min(inner[1:]):
            return cls(victim, inner)
        side = math.ceil(math.sqrt(math.prod(inner)))
        return cls(victim, (1, side, side))

    def put(self, u: Tensor) -> Tensor:
        """Writes inputs into images."""
        flat = u.flatten(1).float()
        return nn.functional.pad(flat, (0, math.prod(self.shape) - flat.shape[1])).view(-1, *self.shape)

    def take(self, images: Tensor) -> Tensor:
        """Reads inputs from images."""
        flat = images.flatten(1)[:, : math.prod(self.inner)]
        return flat.reshape(-1, *self.inner).to(self.victim[0].u.dtype)

    def forward(self, images: Tensor) -> Tensor:
        """Runs the model; all samples count as asked, though some attacks go on with few."""
        (victim,) = self.victim
        victim.queries += 1
        outputs: Tensor = victim.model(self.take(images))
        return outputs.float()


def _check(version: str, attacks: Sequence[str] | None, steps: int, square_queries: int) -> None:
    if version not in VERSIONS:
        raise unknown_name("version", version, VERSIONS)
    for name in attacks or ():
        if name not in ATTACKS:
            raise unknown_name("attack", name, ATTACKS)
    if attacks is not None and not attacks:
        raise InputError(f"attacks are some of {', '.join(ATTACKS)}; received none")
    if steps < 1 or square_queries < 1:
        raise InputError(f"steps and square_queries are at least 1; received {steps} and {square_queries}")


def _evaluation(
    frame: Frame, threat: Threat, what: tuple[str, Sequence[str] | None], seed: int
) -> tuple[Any, list[str]]:
    package = require("pyautoattack", extra="robust")
    (victim,), (version, attacks) = frame.victim, what
    if isinstance(threat.epsilon, Tensor):
        raise InputError("AutoAttack takes one epsilon for all entries; use pgd for radii of features")
    options = {"norm": NORMS[threat.norm], "eps": float(threat.epsilon), "seed": seed, "device": victim.u.device}
    notes: list[str] = []
    if attacks is None and victim.classes < 4:
        attacks = ["apgd-ce", "fab", "square"] if version == "standard" else ["apgd-ce"]
        notes.append(f"{victim.classes} classes are too few for the DLR loss; ran {', '.join(attacks)}")
    if attacks is None:
        evaluation = package.AutoAttack(frame, version=version, **options)
    else:
        evaluation = package.AutoAttack(frame, version="custom", attacks=list(attacks), **options)
        evaluation.apgd.eot_iter = 20 if version == "rand" else 1
        evaluation.apgd.n_restarts = evaluation.fab.n_restarts = 1
    for part in (evaluation.apgd_targeted, evaluation.fab):
        part.n_target_classes = min(9, victim.classes - 1)
    return evaluation, notes


def _reduced(evaluation: Any, steps: int, square_queries: int) -> list[str]:
    for part in (evaluation.apgd, evaluation.apgd_targeted, evaluation.fab):
        part.n_iter = steps
    evaluation.square.n_queries = square_queries
    if steps < 100 or square_queries < 5000:
        return [f"reduced: {steps} of 100 steps and {square_queries} of 5000 queries of Square Attack"]
    return []


class _Messages(logging.Handler):
    """Collects the messages of a logger, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().partition(" See flags_doc")[0]
        if text not in self.messages:
            self.messages.append(text)


@contextmanager
def _quiet(evaluation: Any) -> Iterator[list[str]]:
    """Collects warnings of the package, which also takes down the trace function of a debugger."""
    logger, handler, trace = evaluation.logger, _Messages(), sys.gettrace()
    passed_on = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    checks = require("pyautoattack.checks", extra="robust")
    checks.funcs.update(dict.fromkeys(checks.funcs, 0))  # counts would stay from one model to the next
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = passed_on
        sys.settrace(trace)
