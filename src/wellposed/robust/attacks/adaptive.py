"""Attacks that know the defence: along another gradient than the model's own, and averaged over its randomness."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.equilibrium.gradients import Gradient, Unrolled
from wellposed.errors import InputError
from wellposed.robust.attacks.attack import Attack, Model, evaluating, under_attack
from wellposed.robust.attacks.gradient import pgd


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
        found = pgd(model, u, target, epsilon, draws=draws, **options)
    with under_attack(model, u, target, draws) as victim:
        victim.try_(found.inputs)
        victim.queries += found.queries
    return victim.attack("adaptive", found.notes)


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
    parts = [part for part in inner if isinstance(getattr(part, "gradient", None), Gradient)]
    before = [part.gradient for part in parts]
    try:
        for part in parts:
            part.gradient = gradient  # type: ignore[assignment]
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
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
