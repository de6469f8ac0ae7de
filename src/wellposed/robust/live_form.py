"""A model's form with gradients, for training with bounds."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from wellposed.forms import Block, Dense, ImplicitForm, Operator, Zero
from wellposed.models import ImplicitModel
from wellposed.robust.query import MethodError, to_form

NAMES: dict[type[nn.Module], Callable[[nn.Module], str]] = {
    nn.ReLU: lambda _: "relu",
    nn.Tanh: lambda _: "tanh",
    nn.Sigmoid: lambda _: "sigmoid",
    nn.LeakyReLU: lambda layer: f"leaky_relu({layer.negative_slope})",
}
IGNORED = (nn.Flatten, nn.Identity)


def live_form(model: ImplicitForm | nn.Module) -> ImplicitForm:
    """Reads a model as a form whose matrices are functions of its parameters.

    `to_implicit` copies weights, so nothing could be trained through it. This reads an `ImplicitModel`, or an
    ``nn.Sequential`` of linear layers with ReLU, leaky ReLU, tanh or sigmoid between them.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> form = live_form(network)
        >>> form, form.B.to_dense().requires_grad
        (ImplicitForm(8 states, 4 inputs, 2 outputs, relu), True)
    """
    if isinstance(model, ImplicitForm | ImplicitModel):
        return to_form(model, None)
    layers = [part for part in model if not isinstance(part, IGNORED)] if isinstance(model, nn.Sequential) else []
    linear, between = layers[::2], layers[1::2]
    fits = len(layers) % 2 and len(layers) > 1 and all(isinstance(part, nn.Linear) for part in linear)
    if not fits or not all(type(part) in NAMES for part in between):
        raise MethodError(
            "gradients of bounds need an ImplicitModel, or an nn.Sequential of Linear layers with ReLU, "
            f"LeakyReLU, Tanh or Sigmoid between them; received {type(model).__name__}"
        )
    return _layered([part for part in linear if isinstance(part, nn.Linear)], between)


def _layered(linear: list[nn.Linear], between: list[nn.Module]) -> ImplicitForm:
    sizes = tuple(part.out_features for part in linear[:-1])
    p, q, weight = linear[0].in_features, linear[-1].out_features, linear[0].weight
    home = weight.dtype, weight.device
    inner: dict[tuple[int, int], Operator] = {(k, k - 1): Dense(linear[k].weight) for k in range(1, len(sizes))}
    A = Block(sizes, sizes, inner, *home)
    B = Block(sizes, (p,), {(0, 0): Dense(weight)}, *home)
    C = Block((q,), sizes, {(0, len(sizes) - 1): Dense(linear[-1].weight)}, *home)
    bias = torch.cat([_bias(part) for part in linear[:-1]])
    phis = [NAMES[type(part)](part) for part in between]
    D = Zero((q, p), *home)
    return ImplicitForm(A, B, C, D, bias, phis, output_bias=_bias(linear[-1]))


def _bias(part: nn.Linear) -> Tensor:
    return part.bias if part.bias is not None else part.weight.new_zeros(part.out_features)
