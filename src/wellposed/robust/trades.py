"""Training with attacks by plain steps along signs: the attack itself, and TRADES."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wellposed.errors import InputError
from wellposed.robust.attacks.threat import Threat
from wellposed.robust.training import Loss, Ramp, Watch, as_ramp

TREMBLE = 1e-3  # standard deviation of the start of TRADES, where its gradient would be zero


@dataclass(frozen=True)
class SignSteps:
    """Goes from a random point some steps of one length along the signs of the gradient, and returns the last.

    The attack of Madry et al. (2018), and that of 004 (section 4.2: ten steps of 0.1 within 0.3). It asks the
    model once a step and keeps no best point, so it is cheap, and honest where answers are random; `pgd` is the
    stronger attack. The model is attacked as it is, in training mode where it is in training.

    Args:
        steps: how many.
        length: of a step, in the units of the inputs; a third of the radius if None.
        loss: what is raised, of outputs and targets.
        lower, upper: the valid range.
        generator: of the starts; torch's own if None.

    Example:
        >>> attack = SignSteps(3, 0.1)
        >>> model, u = nn.Linear(2, 2), torch.full((4, 2), 0.5)
        >>> found = attack(model, u, torch.zeros(4, dtype=torch.int64), 0.2)
        >>> bool(((found - u).abs() <= 0.2 + 1e-6).all())
        True
    """

    steps: int = 10
    length: float | None = None
    loss: Loss = nn.functional.cross_entropy
    lower: float = 0.0
    upper: float = 1.0
    generator: torch.Generator | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.steps < 0 or (self.length is not None and not self.length > 0):
            raise InputError(
                f"steps are not negative and their length is positive; received {self.steps}, {self.length}"
            )

    def __call__(self, model: nn.Module, u: Tensor, target: Tensor, radius: float) -> Tensor:
        """Attacks inputs."""
        threat = Threat(u, radius, "inf", self.lower, self.upper)
        length = radius / 3 if self.length is None else self.length
        start = threat.random(self.generator) if self.steps else u
        return climbed(lambda points: self.loss(model(points), target), start, threat, self.steps, length)


def climbed(
    raised: Callable[[Tensor], Tensor], points: Tensor, threat: Threat, steps: int, length: float
) -> Tensor:
    """Raises a function of inputs by steps of one length, each cut to the set, and returns the last point.

    Example:
        >>> threat = Threat(torch.tensor([[0.5, 0.5]]), 0.25)
        >>> climbed(lambda u: (u * torch.tensor([1.0, -2.0])).sum(), threat.u, threat, 3, 0.1)
        tensor([[0.7500, 0.2500]])
    """
    for _ in range(steps):
        with torch.enable_grad():
            moving = points.detach().requires_grad_()
            (slope,) = torch.autograd.grad(raised(moving), moving)
        points = threat.project(points.detach() + length * threat.steepest(slope))
    return points.detach()


class TradesLoss:
    """Adds to the loss how far outputs move within a radius (Zhang et al., 2019).

        ``loss(y, target) + weight KL(softmax y | softmax y')``, y' the outputs at the inputs that raise the second
        term most, found by steps along signs from beside the clean inputs

    With a weight of 6 as in 004 (section D.3). While the model is evaluated the radius is the last of the ramp.

    Args:
        model: the model that is trained.
        ramp: the radius, or how it grows.
        weight: of the second term.
        steps, length: of the attack; the length is a third of the radius if None.
        lower, upper: the valid range.
        generator: of the starts; torch's own if None.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> loss = TradesLoss(model, 0.1)
        >>> u, target = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
        >>> bool(loss(model(u), target) > nn.functional.cross_entropy(model(u), target))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        ramp: Ramp | float,
        *,
        weight: float = 6.0,
        steps: int = 10,
        length: float | None = None,
        loss: Loss = nn.functional.cross_entropy,
        lower: float = 0.0,
        upper: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if not weight >= 0 or steps < 1:
            raise InputError(f"weight is not negative and steps at least 1; received {weight} and {steps}")
        self.watch, self.ramp, self.weight, self.loss = Watch(model), as_ramp(ramp), weight, loss
        self.steps, self.length, self.range, self.generator = steps, length, (lower, upper), generator

    def __call__(self, predictions: Tensor, target: Tensor) -> Tensor:
        model, u = self.watch.model, self.watch.batch(predictions)
        radius = self.ramp.next() if model.training else self.ramp.epsilon
        clean = self.loss(predictions, target)
        if radius == 0 or self.weight == 0:
            return clean
        self.watch.looking = False
        try:
            moved = model(self.attacked(u, predictions.detach(), radius))
        finally:
            self.watch.looking = True
        return clean + self.weight * divergence(predictions, moved)

    def attacked(self, u: Tensor, predictions: Tensor, radius: float) -> Tensor:
        """Returns inputs within the radius whose outputs are far from given ones."""
        threat = Threat(u, radius, "inf", *self.range)
        noise = torch.randn(u.shape, generator=self.generator, dtype=u.dtype, device=u.device)
        start = threat.project(u + TREMBLE * noise)
        length = radius / 3 if self.length is None else self.length
        model = self.watch.model
        return climbed(lambda points: divergence(predictions, model(points)), start, threat, self.steps, length)


def divergence(outputs: Tensor, others: Tensor) -> Tensor:  # (B, q) twice -> ()
    """Returns the mean of ``sum_i p_i log(p_i / q_i)`` with p and q the softmax of two outputs.

    Example:
        >>> divergence(torch.zeros(1, 2), torch.tensor([[0.0, 3.0]]).log())  # p = (1/2, 1/2), q = (0, 1)
        tensor(inf)
    """
    p, q = outputs.log_softmax(1), others.log_softmax(1)
    return nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)
