"""Losses on several states, the Jacobian penalty, and the spectral radius."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed.registry import Registry

__all__ = ["fp_correction", "jac_reg", "power_method", "register_weight_func"]

WeightFunction = Callable[..., Any]
_WEIGHTS: dict[str, WeightFunction] = {
    "exp": lambda n, k, gamma=0.8: gamma ** (n - 1 - k),
    "linear": lambda n, k, gamma=0.9, bias=0.0: bias + 1 - gamma * (n - 1 - k) / n,
    "const": lambda n, k, c=1.0: c,
}
WEIGHTS: Registry[WeightFunction] = Registry.of("weight function", Callable, _WEIGHTS)


def register_weight_func(name: str, func: WeightFunction) -> None:
    """Adds a weight for `fp_correction`, a function of the number of states n and the index k of a state."""
    if not callable(func):
        raise InputError(f"a weight is a function (n, k) -> float; received {type(func).__name__}")
    WEIGHTS.register(name, lambda: func)


def fp_correction(
    crit: Callable[..., Tensor],
    args: Sequence[Any],
    weight_func: str = "exp",
    return_loss_values: bool = False,
    **kwargs: Any,
) -> Any:
    """Sums a loss over the states that a DEQ returned, weighted; the last counts most.

    Args:
        crit: the loss of one state.
        args: what it takes; of a list or tuple each call takes the next entry, from the start again at its end.
        weight_func: ``"exp"``: gamma^(n - 1 - k), ``"linear"``, ``"const"`` or a registered one.
        return_loss_values: whether to return the single losses too, as numbers.
        kwargs: options of the weight.

    Example:
        >>> states, target = [torch.zeros(3), torch.ones(3)], torch.full((3,), 2.0)
        >>> float(fp_correction(lambda z, y: (z - y).abs().mean(), (states, target), gamma=0.5))
        2.0
    """
    weight = WEIGHTS[weight_func]
    lists = [list(value) if isinstance(value, list | tuple) else [value] for value in args]
    n = max(map(len, lists))
    losses = [crit(*(values[k % len(values)] for values in lists)) for k in range(n)]
    total = sum(weight(n, k, **kwargs) * loss for k, loss in enumerate(losses))
    return (total, [loss.item() for loss in losses]) if return_loss_values else total


def jac_reg(f0: Tensor, z0: Tensor, vecs: int = 1, create_graph: bool = True) -> Tensor:  # ()
    """Estimates ``|J|_F^2`` over the number of entries, with J the Jacobian of `f0` with respect to `z0`.

    See `wellposed.models.jacobian_penalty`, which has a value for every sample.

    Args:
        f0: computed from `z0`.
        z0: requires a gradient.
        vecs: normal vectors to average over.
        create_graph: whether the result is to be differentiated.

    Example:
        >>> z = torch.ones(4, 5, requires_grad=True)
        >>> float(jac_reg(0 * z, z))
        0.0
    """
    if vecs < 1:
        raise InputError(f"vecs must be at least 1; received {vecs}")
    total = z0.new_zeros(())
    for _ in range(vecs):
        (product,) = torch.autograd.grad(
            f0, z0, torch.randn_like(f0), retain_graph=True, create_graph=create_graph
        )
        total = total + product.square().sum()
    return total / (vecs * z0.numel())


def power_method(f0: Tensor, z0: Tensor, n_iters: int = 100) -> tuple[Tensor, Tensor]:  # like z0, (B,)
    """Estimates the eigenvalue of largest modulus of the Jacobian of `f0` with respect to `z0`, per sample.

    ``v <- J' v / |J' v|``; the modulus is the geometric mean of the growth over the later half, which also
    settles where the largest eigenvalues are a complex pair.

    Returns:
        the vector v, and the modulus.

    Example:
        >>> z = torch.ones(1, 2, requires_grad=True)
        >>> _, radius = power_method(z @ torch.tensor([[0.0, 0.5], [-0.5, 0.0]]), z)
        >>> round(float(radius), 4)
        0.5
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    v = torch.randn(z0.shape, generator=generator, dtype=z0.dtype).to(z0.device)
    lengths = []
    for _ in range(n_iters + 1):
        lengths.append(torch.linalg.vector_norm(v.reshape(len(v), -1), dim=1))
        scale = lengths[-1].clamp_min(torch.finfo(v.dtype).tiny)
        v = v / scale.reshape(-1, *(1 for _ in v.shape[1:]))
        if len(lengths) <= n_iters:
            (v,) = torch.autograd.grad(f0, z0, v, retain_graph=True)
    later = torch.stack(lengths[1 + n_iters // 2 :])
    return v, later.log().mean(0).exp()
