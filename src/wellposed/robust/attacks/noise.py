"""Noise that no attacker chose: salt and pepper, and speckle."""

from collections.abc import Callable

import torch
from torch import Tensor

from wellposed.errors import InputError, unknown_name
from wellposed.robust.attacks.attack import Attack, Model, under_attack
from wellposed.robust.attacks.threat import Threat


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
