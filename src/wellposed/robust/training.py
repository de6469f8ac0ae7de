"""Losses that train robust models: penalised, certified and adversarial; `wellposed.training.fit` takes them.

A loss sees predictions and targets only, so those here that need the inputs watch the model: they remember the
batch of its latest forward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InputError
from wellposed.robust.attacks.attack import Attack
from wellposed.robust.attacks.gradient import pgd
from wellposed.robust.bounds import Method
from wellposed.robust.live_form import live_form
from wellposed.robust.uncertainty import Box
from wellposed.robust.worst_case import worst_case_loss

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Ramp:
    """A radius that grows linearly with the steps of training, after a start without any.

    Args:
        epsilon: the last radius.
        warmup: steps at radius zero.
        steps: over which it grows; 0 for the last radius at once.
        taken: steps so far; set it to resume.

    Example:
        >>> ramp = Ramp(0.1, warmup=1, steps=2)
        >>> [round(ramp.next(), 3) for _ in range(4)]
        [0.0, 0.05, 0.1, 0.1]
    """

    epsilon: float
    warmup: int = 0
    steps: int = 0
    taken: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < float("inf") or min(self.warmup, self.steps, self.taken) < 0:
            raise InputError(f"a ramp has a finite radius and steps that are not negative; received {self}")

    def next(self) -> float:
        """Takes a step and returns its radius."""
        self.taken += 1
        if self.taken <= self.warmup:
            return 0.0
        return self.epsilon * min(1.0, (self.taken - self.warmup) / max(self.steps, 1))


@dataclass(frozen=True)
class Penalised:
    """Adds a penalty to a loss.

    Args:
        penalty: without arguments, such as ``lambda: norm_penalty(model)``.

    Example:
        >>> loss = Penalised(nn.functional.mse_loss, lambda: torch.tensor(3.0), 0.5)
        >>> loss(torch.zeros(1), torch.ones(1))
        tensor(2.5000)
    """

    loss: Loss
    penalty: Callable[[], Tensor]
    weight: float

    def __call__(self, predictions: Tensor, target: Tensor) -> Tensor:
        return self.loss(predictions, target) + self.weight * self.penalty()


class Watch:
    """Remembers what a model was last given, except while it is asked to look away."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"training needs a module; received {type(model).__name__}")
        self.model, self.looking, self._latest = model, True, None
        self._handle = model.register_forward_pre_hook(self._see)

    def _see(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self.looking:
            self._latest = arguments[0].detach()

    def batch(self, predictions: Tensor) -> Tensor:
        """Returns the inputs of these predictions."""
        latest: Tensor | None = self._latest
        if latest is None or len(latest) != len(predictions):
            raise InputError(
                "the loss did not see the inputs of these predictions; build it on the model that is trained, and "
                "call it right after the model (an Ensemble is not supported)"
            )
        return latest

    def close(self) -> None:
        """Stops watching."""
        self._handle.remove()


class CertifiedLoss:
    """Mixes the loss with a proven bound of the cross-entropy on a box around every input (interval or CROWN).

        ``(1 - share) loss(y, target) + share worst_case_loss(Box(u, epsilon), target)``

    While the model is evaluated the radius is the last one of the ramp, so that epochs can be compared.

    Args:
        model: the model that is trained, an `ImplicitModel` or layers that `live_form` reads.
        ramp: the radius, or how it grows.
        method: of the bound; ``"interval"`` is cheap and trains well, ``"crown"`` is tighter.
        share: of the bound.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> loss = CertifiedLoss(model, 0.1, share=1.0)
        >>> u, target = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
        >>> bool(loss(model(u), target) >= nn.functional.cross_entropy(model(u), target))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        ramp: Ramp | float,
        *,
        method: str | Method = "interval",
        share: float = 0.5,
        loss: Loss = nn.functional.cross_entropy,
        lower: float | None = 0.0,
        upper: float | None = 1.0,
    ) -> None:
        live_form(model)  # raises for models whose bounds have no gradients
        self.watch, self.ramp = Watch(model), as_ramp(ramp)
        self.method, self.share, self.loss = method, in_unit("share", share), loss
        self.range = lower, upper

    def __call__(self, predictions: Tensor, target: Tensor) -> Tensor:
        model, u = self.watch.model, self.watch.batch(predictions)
        radius = self.ramp.next() if model.training else self.ramp.epsilon
        clean = self.loss(predictions, target)
        if radius == 0 or self.share == 0:
            return clean
        box = Box.around(u.flatten(1), radius, *self.range)
        worst = worst_case_loss(live_form(model), box, target, method=self.method)
        return (1 - self.share) * clean + self.share * worst.mean()


class AdversarialLoss:
    """Mixes the loss with that on attacked inputs, found along exact gradients (Madry et al., 2018).

    Args:
        model: the model that is trained.
        ramp: the radius, or how it grows.
        attack: takes the model, u, target and the radius and returns an `Attack` or the inputs; `pgd` with ten
            steps by default, `SignSteps` for the plainer attack of Madry et al.
        share: of the attacked inputs.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> loss = AdversarialLoss(model, 0.1, share=1.0)
        >>> u, target = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
        >>> bool(loss(model(u), target) > nn.functional.cross_entropy(model(u), target))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        ramp: Ramp | float,
        *,
        attack: Callable[[nn.Module, Tensor, Tensor, float], Attack | Tensor] | None = None,
        share: float = 1.0,
        loss: Loss = nn.functional.cross_entropy,
    ) -> None:
        self.watch, self.ramp = Watch(model), as_ramp(ramp)
        self.attack, self.share, self.loss = attack or ten_steps, in_unit("share", share), loss

    def __call__(self, predictions: Tensor, target: Tensor) -> Tensor:
        model, u = self.watch.model, self.watch.batch(predictions)
        radius = self.ramp.next() if model.training else self.ramp.epsilon
        clean = self.loss(predictions, target)
        if radius == 0 or self.share == 0:
            return clean
        self.watch.looking = False
        try:
            found = self.attack(model, u, target, radius)
            attacked = self.loss(model(found if isinstance(found, Tensor) else found.inputs), target)
        finally:
            self.watch.looking = True
        return (1 - self.share) * clean + self.share * attacked


def ten_steps(model: nn.Module, u: Tensor, target: Tensor, radius: float) -> Attack:
    """Attacks by ten steps of PGD on the cross-entropy, each a quarter of the radius."""
    return pgd(model, u, target, radius, steps=10, step_size=0.25, restarts=0, loss="cross_entropy")


def added_back(u: Tensor, target: Tensor, *attacks: Attack) -> tuple[Tensor, Tensor]:
    """Adds attacked inputs with the classes they should have had, for another training (003, section 4.4).

    Example:
        >>> found = Attack(torch.ones(2, 3), torch.tensor([True, False]), torch.zeros(2, 2), torch.ones(2), "")
        >>> inputs, classes = added_back(torch.zeros(2, 3), torch.tensor([1, 0]), found)
        >>> inputs.shape, classes
        (torch.Size([3, 3]), tensor([1, 0, 1]))
    """
    if any(found.inputs.shape != u.shape for found in attacks):
        raise InputError(f"attacks must be on these inputs {tuple(u.shape)}; give those of u")
    inputs = [u, *(found.inputs[found.success] for found in attacks)]
    classes = [target, *(target[found.success] for found in attacks)]
    return torch.cat(inputs), torch.cat(classes)


def as_ramp(ramp: Ramp | float) -> Ramp:
    """Reads a radius as one that does not grow.

    Example:
        >>> as_ramp(0.1)
        Ramp(epsilon=0.1, warmup=0, steps=0, taken=0)
    """
    return ramp if isinstance(ramp, Ramp) else Ramp(ramp)


def in_unit(name: str, value: float) -> float:
    """Checks a share.

    Example:
        >>> in_unit("share", 0.5)
        0.5
    """
    if not 0 <= value <= 1:
        raise InputError(f"{name} lies in [0, 1]; received {value}")
    return value
