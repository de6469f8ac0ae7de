"""Noise that no attacker chose, and attacks from linear programs.

`noise_attack` tries `salt_and_pepper` or `speckle`. `lp_attack` tries the inputs at which a relaxation of the
model does worst (003, section 4.4).
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import InputError, unknown_name
from wellposed.robust.attacks.attack import Attack, Model, Threat, Victim, under_attack
from wellposed.robust.attacks.sparse import entries
from wellposed.robust.linear_programs import Objectives, Relaxation, RelaxedSet, ReluConstraints, in_float64
from wellposed.robust.query import Query, as_form, margins


def salt_and_pepper(
    u: Tensor, share: float, *, lower: float = 0.0, upper: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Sets a share of the entries to one end of the range or the other, each with probability one half.

    Example:
        >>> noisy = salt_and_pepper(torch.full((1, 1000), 0.5), 0.3, generator=torch.Generator().manual_seed(0))
        >>> sorted(set(noisy.flatten().tolist())), 0.25 < float((noisy != 0.5).float().mean()) < 0.35
        ([0.0, 0.5, 1.0], True)
    """
    if not 0 <= share <= 1:
        raise InputError(f"the share of noisy entries lies in [0, 1]; received {share}")
    chance = torch.rand(u.shape, generator=generator, dtype=u.dtype, device=u.device)
    noisy = torch.where(chance < share / 2, lower, torch.where(chance < share, upper, u))
    return noisy.to(u)


def speckle(
    u: Tensor, scale: float, *, lower: float = 0.0, upper: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Multiplies every entry by ``1 + scale N(0, 1)`` and cuts it to the range.

    Example:
        >>> speckle(torch.zeros(1, 3), 0.5).abs()
        tensor([[0., 0., 0.]])
    """
    if not 0 <= scale < float("inf"):
        raise InputError(f"the scale of speckle is finite and not negative; received {scale}")
    noise = torch.randn(u.shape, generator=generator, dtype=u.dtype, device=u.device)
    return (u * (1 + scale * noise)).clamp(lower, upper)


NOISES: dict[str, Callable[..., Tensor]] = {"salt_and_pepper": salt_and_pepper, "speckle": speckle}


def noise_attack(
    model: Model,
    u: Tensor,
    target: Tensor,  # (B,)
    noise: str,
    level: float,
    *,
    draws: int = 1,
    lower: float = 0.0,
    upper: float = 1.0,
    seed: int = 0,
) -> Attack:
    """Tries noise and keeps the worst of some draws.

    Args:
        noise: ``"salt_and_pepper"`` or ``"speckle"``.
        level: the share of the one, the scale of the other.

    Example:
        >>> from wellposed.forms import ImplicitForm
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.eye(2))
        >>> noise_attack(form, torch.tensor([[0.9, 0.1]]), torch.tensor([0]), "speckle", 0.0).success
        tensor([False])
    """
    if noise not in NOISES:
        raise unknown_name("noise", noise, NOISES)
    if draws < 1:
        raise InputError(f"draws is at least 1; received {draws}")
    Threat(u, upper - lower, "inf", lower, upper)  # raises for inputs that are not valid
    generator = torch.Generator(u.device).manual_seed(seed)
    with under_attack(model, u, target) as victim:
        for _ in range(draws):
            victim.try_(NOISES[noise](u, level, lower=lower, upper=upper, generator=generator))
    return victim.attack(noise)


def lp_attack(
    model: Model,
    u: Tensor,
    target: Tensor,  # (B,)
    epsilon: float | Tensor,
    count: int | float | None = None,
    *,
    relaxation: Relaxation | None = None,
    goals: int | None = None,
    lower: float = 0.0,
    upper: float = 1.0,
) -> Attack:
    """Maximises margins ``y_i - y_target`` over a relaxation of a ReLU model and tries the inputs it proposes.

    A point of a relaxation need not be an equilibrium, so it counts only after the model itself has been run. The
    paper's objective ``|x - x0|^2`` has a chord that is constant on a symmetric interval, and gives no direction;
    margins do. Where few entries may change the program spreads shares of them; the largest changes are kept.

    Args:
        epsilon, count: how far entries may move, and how many (or which share); all if None.
        relaxation: ``Relaxation("triangle")`` by default; ``Relaxation("lp")`` is the program as printed.
        goals: how many other classes are tried, those with the largest outputs first; all by default.

    Example:
        >>> from wellposed.forms import ImplicitForm
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.eye(2))
        >>> lp_attack(form, torch.full((1, 2), 0.5), torch.tensor([0]), 0.2).inputs
        tensor([[0.3000, 0.7000]])
    """
    if goals is not None and goals < 1:
        raise InputError(f"goals is a number of classes, at least 1; received {goals}")
    threat = Threat(u, epsilon, "inf", lower, upper, entries(count, u))
    kind = relaxation or Relaxation("triangle")
    with under_attack(model, u, target) as victim:
        with torch.no_grad():
            form = as_form(model, threat.set())
        rows = margins(form.sizes[2], target, u)
        wide = in_float64(Query(form, threat.set(), rows))
        states, sets = kind.sets(wide, ReluConstraints.of(wide.form, f"lp_attack with {kind.kind!r}"))
        asked = Objectives.of(wide, states)
        order = _order(victim, goals)
        proposed = torch.stack([_points(s, asked, i, order[i]) for i, s in enumerate(sets)]).to(u)  # (B, G, p)
        for points in proposed.unbind(1):
            victim.try_(threat.project(points.reshape(u.shape)))
    return victim.attack(f"{kind.kind} attack")


def _order(victim: Victim, goals: int | None) -> Tensor:  # (B, G)
    """Sorts the other classes by their outputs."""
    others = victim.best_outputs.scatter(1, victim.target[:, None], -torch.inf)
    order = others.argsort(dim=1, descending=True)
    return order[:, : min(goals or victim.classes, victim.classes - 1)]


def _points(polyhedron: RelaxedSet, asked: Objectives, index: int, classes: Tensor) -> Tensor:  # (G, p)
    points = []
    for goal in classes.tolist():
        objective = polyhedron.objective(*asked.objective(index, goal))
        points.append(polyhedron.input(polyhedron.program.maximum(objective).point))
    return torch.as_tensor(np.stack(points))
