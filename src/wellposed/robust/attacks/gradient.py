"""Attacks along exact gradients: one step (FGSM) and many (PGD)."""

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed.robust.attacks.attack import Attack, Loss, Model, Victim, under_attack
from wellposed.robust.attacks.threat import Threat


def fgsm(
    model: Model,
    u: Tensor,
    target: Tensor,  # (B,)
    epsilon: float | Tensor,
    *,
    norm: str = "inf",
    loss: str = "cross_entropy",
    lower: float = 0.0,
    upper: float = 1.0,
    count: int | None = None,
) -> Attack:
    """Goes to the point of the set where the linearised loss is largest (Goodfellow et al., 2015).

    On a linear model with two classes that is the worst point.

    Args:
        epsilon: in the units of the inputs; see `Threat`, also for norm, lower, upper and count.
        loss: ``"cross_entropy"`` or ``"margin"``, the lead of the best other class.

    Example:
        >>> from wellposed.forms import ImplicitForm
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.eye(2))
        >>> fgsm(form, torch.tensor([[0.6, 0.5]]), torch.tensor([0]), 0.1).inputs
        tensor([[0.5000, 0.6000]])
    """
    threat, raised = Threat(u, epsilon, norm, lower, upper, count), Loss(loss)
    with under_attack(model, u, target) as victim:
        _, slope = victim.gradient(u, raised)
        victim.try_(threat.extreme(slope))
    return victim.attack("fgsm", _zero_gradients(slope))


def pgd(
    model: Model,
    u: Tensor,
    target: Tensor,  # (B,)
    epsilon: float | Tensor,
    *,
    norm: str = "inf",
    steps: int = 40,
    step_size: float | None = None,
    restarts: int = 1,
    momentum: float = 0.0,
    loss: str = "margin",
    lower: float = 0.0,
    upper: float = 1.0,
    count: int | None = None,
    draws: int = 1,
    seed: int = 0,
) -> Attack:
    """Raises the loss by projected gradient steps (Madry et al., 2018) and keeps the worst point.

    Gradients are those of the equilibrium, not of a cut-off iteration. The first run starts at the clean inputs.

    Args:
        epsilon: in the units of the inputs; see `Threat`, also for norm, lower, upper and count.
        step_size: as a share of epsilon; 2.5 / steps if None.
        restarts: runs from further random points, for samples that still have their class.
        momentum: share of the last direction that is kept (Dong et al., 2018).
        loss: ``"margin"`` or ``"cross_entropy"``.
        draws: answers of a random model over which outputs and gradients are averaged (Athalye et al., 2018);
            what counts is the class of the mean, so ask anew about the points that were found (`survival`).

    Example:
        >>> from wellposed.forms import ImplicitForm
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.eye(2))
        >>> u, target = torch.tensor([[0.6, 0.5], [0.9, 0.5]]), torch.tensor([0, 0])
        >>> pgd(form, u, target, 0.1).success
        tensor([ True, False])
    """
    _check_steps(steps, restarts, momentum, step_size)
    threat, raised = Threat(u, epsilon, norm, lower, upper, count), Loss(loss)
    generator = torch.Generator(u.device).manual_seed(seed)
    share = 2.5 / steps if step_size is None else step_size
    slope = torch.ones_like(u)
    with under_attack(model, u, target, draws) as victim:
        rows = torch.arange(len(u), device=u.device)
        for run in range(restarts + 1):
            here = threat.of(rows)
            start = here.u if run == 0 else here.random(generator)
            first = _climb(victim, here, start, rows, raised, (steps, share, momentum))
            slope = first if run == 0 else slope
            rows = victim.standing
            if len(rows) == 0:
                break
    return victim.attack("pgd", _zero_gradients(slope))


def _check_steps(steps: int, restarts: int, momentum: float, step_size: float | None) -> None:
    whole = hasattr(steps, "__index__") and hasattr(restarts, "__index__")
    length = 1.0 if step_size is None else step_size
    if not whole or steps < 1 or restarts < 0 or not 0 <= momentum < 1 or not length > 0:
        raise InputError(
            "steps are at least 1 and whole, restarts not negative, momentum in [0, 1) and step_size positive; "
            f"received {steps}, {restarts}, {momentum}, {step_size}"
        )


def _climb(
    victim: Victim, threat: Threat, points: Tensor, rows: Tensor, raised: Loss, how: tuple[int, float, float]
) -> Tensor:
    """Takes steps, the last one to the extreme point of the linearised loss, and returns the first gradient."""
    steps, share, momentum = how
    length = share * (float(threat.epsilon) if not isinstance(threat.epsilon, Tensor) else threat.epsilon)
    direction, first = torch.zeros_like(points), None
    for step in range(steps):
        outputs, slope = victim.gradient(points, raised, rows)
        victim.consider(points, outputs, rows)
        first = slope if first is None else first
        direction = momentum * direction + _unit_sum(slope) if momentum else slope
        decay = 1.0 if step < steps / 2 else 2 * (1 - step / steps)
        points = threat.project(points + decay * length * threat.steepest(direction))
    outputs, slope = victim.gradient(points, raised, rows)
    victim.consider(points, outputs, rows)
    victim.try_(threat.extreme(slope), rows)
    assert first is not None
    return first


def _unit_sum(slope: Tensor) -> Tensor:
    size = slope.flatten(1).abs().sum(1).clamp(min=torch.finfo(slope.dtype).tiny)
    return slope / size.view(-1, *[1] * (slope.dim() - 1))


def _zero_gradients(slope: Tensor) -> tuple[str, ...]:
    """Warns where an attack along gradients has nothing to go by."""
    flat = int((slope.flatten(1) == 0).all(1).sum())
    return (
        (f"{flat} of {len(slope)} samples have a zero gradient; try an attack without gradients",) if flat else ()
    )
