"""The saliency-map attack: one entry after the other, the most telling first (Papernot et al., 2016)."""

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed.robust.attacks.attack import Attack, Model, Victim, under_attack
from wellposed.robust.attacks.ranked import entries
from wellposed.robust.attacks.threat import Threat
from wellposed.robust.query import check_target


def jsma(
    model: Model,
    u: Tensor,
    target: Tensor,  # (B,)
    count: int | float,
    epsilon: float | Tensor = 1.0,
    *,
    goal: Tensor | None = None,  # (B,)
    lower: float = 0.0,
    upper: float = 1.0,
) -> Attack:
    """Moves entries to the end of their range, one at a time, that raise the goal and lower the sum of the others.

    With a = dy_goal / du_j and b = sum_{i != goal} dy_i / du_j the saliency is ``|a b|`` where raising u_j has
    ``a > 0 > b``, or lowering it ``a < 0 < b``. The Jacobian is taken anew after every entry; a sample whose
    saliency is zero everywhere takes the entry with the largest rise of ``y_goal - y_target``.

    Args:
        count: how many entries may change, or which share of them.
        goal: classes to reach; the best other class by default. Success is any class other than the target.

    Example:
        >>> from wellposed.forms import ImplicitForm
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.eye(2))
        >>> jsma(form, torch.full((1, 2), 0.5), torch.tensor([0]), 1).inputs
        tensor([[0.0000, 0.5000]])
    """
    number = entries(count, u)
    if number is None:
        raise InputError("a saliency attack changes a number of entries; give count")
    threat = Threat(u, epsilon, "inf", lower, upper, number)
    with under_attack(model, u, target) as victim:
        goals = _goals(victim, goal)
        points, free = u.clone(), torch.ones_like(u, dtype=torch.bool).flatten(1)
        for _ in range(number):
            rise, others, lead = _slopes(victim, points, goals)
            points, free = _step(threat, points, free, (rise, others, lead))
            victim.try_(points)
            if len(victim.standing) == 0:
                break
    return victim.attack("jsma")


def _goals(victim: Victim, goal: Tensor | None) -> Tensor:
    if goal is not None:
        check_target(goal, len(victim.u), victim.classes)
        if bool((goal == victim.target).any()):
            raise InputError("a goal must differ from the target of its sample")
        return goal
    own = torch.zeros_like(victim.best_outputs, dtype=torch.bool).scatter(1, victim.target[:, None], True)
    return victim.best_outputs.masked_fill(own, -torch.inf).argmax(1)


def _slopes(victim: Victim, points: Tensor, goals: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (B, p) each
    _, of_goal = victim.gradient(points, lambda y, _: y.gather(1, goals[:, None])[:, 0])
    _, of_all = victim.gradient(points, lambda y, _: y.sum(1))
    _, of_target = victim.gradient(points, lambda y, target: y.gather(1, target[:, None])[:, 0])
    rise = of_goal.flatten(1)
    return rise, of_all.flatten(1) - rise, rise - of_target.flatten(1)


def _step(
    threat: Threat, points: Tensor, free: Tensor, slopes: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Moves one entry of every sample to an end."""
    rise, others, lead = slopes
    flat = points.flatten(1)
    ends = tuple(end.flatten(1) for end in threat.ends)
    up, down = free & (flat < ends[1]), free & (flat > ends[0])
    telling = (rise * others < 0) & torch.where(rise > 0, up, down)
    salient = torch.where(telling, -rise * others, 0.0)
    usable = torch.where(lead > 0, up, down)
    spare = torch.where(usable, lead.abs(), 0.0)
    found = (salient > 0).any(1, keepdim=True)
    direction = torch.where(found, rise, lead)
    score, place = torch.where(found, salient, spare).max(1, keepdim=True)
    value = torch.where(direction > 0, ends[1], ends[0]).gather(1, place)
    value = torch.where(score > 0, value, flat.gather(1, place))
    return flat.scatter(1, place, value).view_as(points), free.scatter(1, place, False)
