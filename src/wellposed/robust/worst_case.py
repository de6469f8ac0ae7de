"""The largest loss on a set of inputs, and which samples provably keep their class (003, section 4.3)."""

import torch
from torch import Tensor, nn

from wellposed.errors import InputError, unknown_name
from wellposed.forms import ImplicitForm
from wellposed.robust.bounds import Method, margin_bounds, output_bounds
from wellposed.robust.query import check_target
from wellposed.robust.result import Bounds
from wellposed.robust.uncertainty import Uncertainty

LOSSES = ("cross_entropy", "cross_entropy_box", "squared_error")


def worst_case_loss(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    target: Tensor,
    loss: str = "cross_entropy",
    method: str | Method = "crown",
    budget: float | None = None,
) -> Tensor:  # (B,)
    """Bounds the loss of every sample from above, over its whole set. Differentiable where the method is.

    Args:
        target: classes (B,); for ``"squared_error"`` values (B, q).
        loss: ``"cross_entropy"`` bounds the margins ``y_i - y_target``; ``"cross_entropy_box"`` is the exact
            maximum over the box of the outputs, and ``"squared_error"`` that of ``|y - target|_2^2``.
        method, budget: as in `output_bounds`.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1))
        >>> around = Box(torch.ones(1, 1), 2 * torch.ones(1, 1))
        >>> worst_case_loss(form, around, torch.zeros(1, 1), "squared_error").round(decimals=3)
        tensor([4.])
    """
    if loss == "cross_entropy":
        return margin_loss(margin_bounds(model, inputs, target, method, budget).upper, target)
    if loss not in LOSSES:
        raise unknown_name("loss", loss, LOSSES)
    bounds = output_bounds(model, inputs, method, budget)
    if loss == "squared_error":
        return squared_error(bounds, target)
    check_target(target, *bounds.upper.shape)
    return margin_loss(bounds.upper - bounds.lower.gather(1, target[:, None]), target)


def squared_error(bounds: Bounds, target: Tensor) -> Tensor:  # (B,)
    """Returns the largest ``|y - target|_2^2`` of all y within bounds, attained at a corner.

    Example:
        >>> bounds = Bounds(torch.tensor([[-1.0]]), torch.tensor([[3.0]]), "box", torch.zeros(1, 1))
        >>> squared_error(bounds, torch.tensor([[0.0]]))
        tensor([9.0000])
    """
    if tuple(target.shape) != tuple(bounds.upper.shape) or not target.is_floating_point():
        raise InputError(
            f"squared_error takes targets of the outputs' shape {tuple(bounds.upper.shape)}; received "
            f"{target.dtype} {tuple(target.shape)}"
        )
    farthest = torch.maximum((bounds.upper - target).abs(), (bounds.lower - target).abs())
    return _raised(farthest.square().sum(1), bounds.upper.shape[1])


def margin_loss(margins: Tensor, target: Tensor) -> Tensor:  # (B, q), (B,) -> (B,)
    """Returns ``log(1 + sum_{i != y} exp(margin_i))``, the cross-entropy of the largest margins.

    Example:
        >>> margin_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([1])).round(decimals=3)
        tensor([0.6930])
    """
    own = torch.zeros_like(margins, dtype=torch.bool).scatter(1, target[:, None], True)
    return _raised(torch.logsumexp(margins.masked_fill(own, 0.0), dim=1), margins.shape[1])


def certified(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    target: Tensor,  # (B,)
    method: str | Method = "crown",
    budget: float | None = None,
) -> Tensor:  # (B,)
    """Tells which samples provably have the class `target` on their whole set.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[1.0], [-1.0]]))
        >>> certified(form, Box(torch.ones(1, 1), 2 * torch.ones(1, 1)), torch.tensor([0]))
        tensor([True])
    """
    with torch.no_grad():
        upper = margin_bounds(model, inputs, target, method, budget).upper
    own = torch.zeros_like(upper, dtype=torch.bool).scatter(1, target[:, None], True)
    return ((upper < 0) | own).all(1)


def certified_accuracy(
    model: ImplicitForm | nn.Module,
    inputs: Uncertainty,
    target: Tensor,  # (B,)
    method: str | Method = "crown",
    budget: float | None = None,
) -> float:
    """Returns the share of samples that `certified` proves.

    Example:
        >>> from wellposed.robust import Box
        >>> form = ImplicitForm(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[1.0], [-1.0]]))
        >>> certified_accuracy(form, Box(torch.ones(1, 1), 2 * torch.ones(1, 1)), torch.tensor([1]))
        0.0
    """
    if not len(inputs):
        raise InputError("a share of no samples is no number; give at least one")
    return float(certified(model, inputs, target, method, budget).double().mean())


def _raised(value: Tensor, terms: int) -> Tensor:
    """Pays for the rounding of a loss; a loss near zero may be off by a multiple of the unit."""
    unit = torch.finfo(value.dtype).eps
    return value + 2 * (terms + 8) * unit * (1 + value.detach().abs())
