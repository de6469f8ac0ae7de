"""Attacks on a model of unknown parameters, through one that imitates its answers (Papernot et al., 2017)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from wellposed.errors import InputError
from wellposed.robust.attacks.attack import Attack, Model, evaluating, under_attack
from wellposed.robust.attacks.gradient import pgd
from wellposed.robust.attacks.threat import Threat
from wellposed.robust.uncertainty import finite_batch


def transfer_attack(
    model: Model,
    u: Tensor,
    target: Tensor,  # (B,)
    epsilon: float | Tensor,
    surrogate: Model,
    *,
    attack: Callable[..., Attack] = pgd,
    norm: str = "inf",
    lower: float = 0.0,
    upper: float = 1.0,
) -> Attack:
    """Attacks a surrogate and asks the model once about what was found.

    Args:
        surrogate: with as many classes; see `train_surrogate`.
        attack: takes a model, u, target and epsilon, and norm, lower and upper as keywords.

    Example:
        >>> from wellposed.forms import ImplicitForm
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.eye(2))
        >>> transfer_attack(form, torch.tensor([[0.6, 0.5]]), torch.tensor([0]), 0.1, form).success
        tensor([True])
    """
    threat = Threat(u, epsilon, norm, lower, upper)
    with under_attack(model, u, target) as victim:
        found = attack(surrogate, u, target, epsilon, norm=norm, lower=lower, upper=upper)
        if found.outputs.shape[1] != victim.classes:
            raise InputError(
                f"the surrogate has {found.outputs.shape[1]} classes and the model {victim.classes}; "
                "give them as many"
            )
        victim.try_(threat.project(found.inputs))
    return victim.attack(f"transfer of {found.name}", found.notes)


def train_surrogate(
    model: Model,
    u: Tensor,
    *,
    network: nn.Module | None = None,
    rounds: int = 3,
    step: float = 0.1,
    epochs: int = 60,
    lower: float = 0.0,
    upper: float = 1.0,
    seed: int = 0,
) -> nn.Module:
    """Trains a network to give the classes that the model gives, from its answers alone.

    In every round but the first the points are doubled: each moves by `step` along the sign of the surrogate's
    gradient of the class it has, across the border that is to be learnt, and the model is asked again.

    Args:
        u: inputs to begin with; the model is asked ``len(u) 2^(rounds - 1)`` times.
        network: is trained in place; a fresh one with a hidden layer of 128 if None.

    Example:
        >>> from wellposed.forms import ImplicitForm
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.eye(2))
        >>> u = torch.rand(64, 2, generator=torch.Generator().manual_seed(0))
        >>> copy = train_surrogate(form, u)
        >>> bool((copy(u).argmax(1) == form(u).argmax(1)).double().mean() > 0.9)
        True
    """
    if rounds < 1 or epochs < 1 or not step > 0:
        raise InputError(f"rounds and epochs are at least 1, step positive; received {rounds}, {epochs}, {step}")
    points = finite_batch("u", u).detach()
    generator = torch.Generator().manual_seed(seed)
    answers, classes = _answers(model, points)
    copy = network or _network(u, classes, seed)
    for number in range(rounds):
        if number:
            fresh = _across(copy, points, answers, step).clamp(lower, upper)
            answers = torch.cat([answers, _answers(model, fresh)[0]])
            points = torch.cat([points, fresh])
        _fit(copy, points, answers, epochs, generator)
    return copy.eval()


def _answers(model: Model, points: Tensor) -> tuple[Tensor, int]:
    with torch.no_grad(), evaluating(model):
        found = model(points)
    return found.argmax(1), found.shape[1]


def _network(u: Tensor, classes: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(u[0].numel(), 128), nn.ReLU(), nn.Linear(128, classes)
        return nn.Sequential(nn.Flatten(), *layers).to(u.device, u.dtype)


def _across(copy: nn.Module, points: Tensor, answers: Tensor, step: float) -> Tensor:
    with torch.enable_grad():
        moving = points.detach().requires_grad_()
        chosen = copy(moving).gather(1, answers[:, None]).sum()
        (slope,) = torch.autograd.grad(chosen, moving)
    return points - step * slope.sign()


def _fit(copy: nn.Module, points: Tensor, answers: Tensor, epochs: int, generator: torch.Generator) -> None:
    optimizer = torch.optim.Adam(copy.parameters(), lr=3e-3)
    copy.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(points), generator=generator).to(points.device).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(copy(points[rows]), answers[rows]).backward()
            optimizer.step()
