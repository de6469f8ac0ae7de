"""Attacks along gradients: the model's own, another one, or that of a surrogate.

`fgsm` takes one step along the exact gradient, `pgd` many. `adaptive_attack` knows the defence: it goes along
another gradient than the model's own, and averages over its randomness. `transfer_attack` is for a model of
unknown parameters, through one that imitates its answers (`train_surrogate`; Papernot et al., 2017).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.equilibrium.gradients import Gradient, Unrolled
from wellposed.errors import InputError
from wellposed.robust.attacks.attack import Attack, Loss, Model, Threat, Victim, evaluating, under_attack
from wellposed.robust.sets import finite_batch


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


def adaptive_attack(
    model: Model,
    u: Tensor,
    target: Tensor,  # (B,)
    epsilon: float | Tensor,
    *,
    gradient: Gradient | None = None,
    draws: int = 10,
    **options: Any,
) -> Attack:
    """Attacks equilibria through a gradient of the attacker's choice, averaged over several answers of the model.

    A model whose own gradient is a shortcut (`Phantom`, `Polished`), or whose answers are random (`Noise`,
    `RandomThreshold`), may withstand attacks along that gradient and fall to this one. What was found is run
    through the model as it is, and kept where the mean of new answers is worse than before.

    Args:
        gradient: of the equilibria inside; back-propagation through every step of the solver if None.
        draws: answers that are averaged, see `pgd`.
        options: of `pgd`.

    Example:
        >>> from wellposed.models import ImplicitModel
        >>> model, u = ImplicitModel(4, 3, 8), torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
        >>> target = model(u).argmax(1)
        >>> adaptive_attack(model, u, target, 0.5, draws=1).inputs.shape
        torch.Size([5, 4])
    """
    with through(model, gradient or Unrolled()):
        attack = pgd(model, u, target, epsilon, draws=draws, **options)
    with under_attack(model, u, target, draws) as victim:
        victim.try_(attack.inputs)
        victim.queries += attack.queries
    return victim.attack("adaptive", attack.notes)


@contextmanager
def through(model: Model, gradient: Gradient) -> Iterator[None]:
    """Differentiates all equilibria inside a module in another way, until the block ends.

    Example:
        >>> from wellposed.models import DEQ, DenseCell
        >>> model = DEQ(DenseCell(2, 3))
        >>> with through(model, Unrolled()):
        ...     print(model.gradient)
        Unrolled()
        >>> model.gradient
        Implicit(solver=None, stop=None, max_steps=None)
    """
    inner = list(model.modules()) if isinstance(model, nn.Module) else []
    modules = [part for part in inner if isinstance(getattr(part, "gradient", None), Gradient)]
    before = [part.gradient for part in modules]
    try:
        for part in modules:
            part.gradient = gradient  # type: ignore[assignment]
        yield
    finally:
        for part, own in zip(modules, before, strict=True):
            part.gradient = own


@torch.no_grad()
def survival(model: Model, u: Tensor, target: Tensor, *, draws: int = 1) -> Tensor:  # (B,)
    """Returns the share of answers in which a model with random answers gives every input its class.

    Its mean is the accuracy that a user of the model sees, whatever draws an attack was lucky with.

    Example:
        >>> survival(nn.Identity(), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]), draws=3)
        tensor([1., 0.])
    """
    if draws < 1:
        raise InputError(f"draws is at least 1; received {draws}")
    with evaluating(model):
        return torch.stack([(model(u).argmax(1) == target).float() for _ in range(draws)]).mean(0)


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
        result = attack(surrogate, u, target, epsilon, norm=norm, lower=lower, upper=upper)
        if result.outputs.shape[1] != victim.classes:
            raise InputError(
                f"the surrogate has {result.outputs.shape[1]} classes and the model {victim.classes}; "
                "give them as many"
            )
        victim.try_(threat.project(result.inputs))
    return victim.attack(f"transfer of {result.name}", result.notes)


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
        outputs = model(points)
    return outputs.argmax(1), outputs.shape[1]


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
