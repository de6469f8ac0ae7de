"""Attacks that change few entries.

`ranked_attack` changes the entries that rank highest: by sensitivity, by gradient, or at random for comparison.
`jsma` is the saliency-map attack: one entry after the other, the most telling first (Papernot et al., 2016).
"""

import math

import torch
from torch import Tensor

from wellposed.errors import InputError, positive_integer, unknown_name
from wellposed.robust.attacks.attack import Attack, Loss, Model, Threat, Victim, largest, under_attack
from wellposed.robust.query import check_target
from wellposed.robust.sensitivity import sensitivity

VALUES = ("uniform", "gradient")
RANKINGS = ("sensitivity", "gradient", "random")


def ranked_attack(
    model: Model,
    u: Tensor,
    target: Tensor,  # (B,)
    epsilon: float | Tensor,
    count: int | float | None = None,
    *,
    ranking: str = "sensitivity",
    values: str = "uniform",
    draws: int = 1,
    S: Tensor | None = None,
    lower: float = 0.0,
    upper: float = 1.0,
    seed: int = 0,
) -> Attack:
    """Changes the entries that rank highest, by random values or along the gradient (003, section 4.4).

    The sensitivity matrix has no sign, and the paper leaves the values open: "small random values". Here they are
    uniform within epsilon or at its end, and always cut to the valid range, which changes the results. Compare
    with ``ranking="random"``: changing as many entries at random is what a ranking has to beat.

    Args:
        epsilon: how far an entry may move; 1 for the whole range.
        count: how many entries, a share of them if it is a fraction, or None for all (a dense attack).
        ranking: ``"sensitivity"`` ranks by the target's row of S, ``"gradient"`` by the absolute gradient of the
            margin, ``"random"`` not at all.
        values: ``"uniform"`` draws in ``[-epsilon, epsilon]``, ``"gradient"`` moves by epsilon where the margin of
            the best other class rises.
        draws: how many random values are tried.
        S: the sensitivity matrix, if it is known.

    Example:
        >>> from wellposed.forms import ImplicitForm
        >>> form = ImplicitForm(torch.zeros(2, 2), torch.tensor([[5.0, 0.1], [0.1, 1.0]]), torch.eye(2))
        >>> attack = ranked_attack(form, torch.full((1, 2), 0.5), torch.tensor([0]), 0.5, 1, values="gradient")
        >>> attack.inputs, bool(attack.success)
        (tensor([[0.0000, 0.5000]]), True)
    """
    if ranking not in RANKINGS:
        raise unknown_name("ranking", ranking, RANKINGS)
    if values not in VALUES:
        raise unknown_name("values", values, VALUES)
    draws = positive_integer("draws", draws)
    threat = Threat(u, epsilon, "inf", lower, upper, entries(count, u))
    generator = torch.Generator(u.device).manual_seed(seed)
    with under_attack(model, u, target) as victim:
        slope = None
        if "gradient" in (ranking, values):
            slope = victim.gradient(u, Loss("margin"))[1]
        scores = _scores(victim, ranking, slope, S, generator)
        chosen = _chosen(scores, threat)
        for _ in range(draws if values == "uniform" else 1):
            points = _moved(threat, slope if values == "gradient" else None, generator)
            victim.try_(torch.where(chosen, points, u))
    return victim.attack(f"{ranking} ranked, {values} values")


def entries(count: int | float | None, u: Tensor) -> int | None:
    """Reads a number or a share of entries.

    Example:
        >>> entries(0.1, torch.zeros(1, 28, 28)), entries(3, torch.zeros(1, 28, 28))
        (78, 3)
    """
    if count is None or isinstance(count, int):
        return count
    if not 0 <= count <= 1:
        raise InputError(f"a share of entries lies in [0, 1]; received {count}")
    return round(count * math.prod(u.shape[1:]))  # of no samples too


def _scores(
    victim: Victim, ranking: str, slope: Tensor | None, S: Tensor | None, generator: torch.Generator
) -> Tensor:  # (B, p)
    if ranking == "random":
        return torch.rand(victim.u.flatten(1).shape, generator=generator, device=victim.u.device)
    if ranking == "gradient":
        assert slope is not None
        return slope.flatten(1).abs()
    matrix = sensitivity(victim.model, tuple(victim.u.shape[1:])) if S is None else S
    shape = (victim.classes, victim.u[0].numel())
    if tuple(matrix.shape) != shape:
        raise InputError(f"S has the shape (classes, inputs), here {shape}; received {tuple(matrix.shape)}")
    return matrix.to(victim.u.device)[check_target(victim.target, len(victim.u), victim.classes)]


def _chosen(scores: Tensor, threat: Threat) -> Tensor:
    if threat.count is None:
        return torch.ones_like(threat.u, dtype=torch.bool)
    return largest(scores, threat.count).view_as(threat.u)


def _moved(threat: Threat, slope: Tensor | None, generator: torch.Generator) -> Tensor:
    """Moves all entries, and cuts them to the set."""
    if slope is None:
        noise = torch.rand(threat.u.shape, generator=generator, dtype=threat.u.dtype, device=threat.u.device)
        slope = 2 * noise - 1
    else:
        slope = slope.sign()
    lower, upper = threat.ends
    return torch.minimum(
        torch.maximum(threat.u + torch.as_tensor(threat.epsilon).to(threat.u) * slope, lower), upper
    )


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
    return victim.best_outputs.scatter(1, victim.target[:, None], -torch.inf).argmax(1)


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
    salient_left = (salient > 0).any(1, keepdim=True)
    direction = torch.where(salient_left, rise, lead)
    score, entry = torch.where(salient_left, salient, spare).max(1, keepdim=True)
    value = torch.where(direction > 0, ends[1], ends[0]).gather(1, entry)
    value = torch.where(score > 0, value, flat.gather(1, entry))
    return flat.scatter(1, entry, value).view_as(points), free.scatter(1, entry, False)
