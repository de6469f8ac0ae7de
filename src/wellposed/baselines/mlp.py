"""The multilayer perceptron."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from wellposed.activations import Activation, get_activation
from wellposed.errors import InputError


class MLP(nn.Module):
    """Alternates linear layers with an activation; nothing follows the last layer.

    Without biases and with a positively homogeneous activation (ReLU) the whole network is: f(au) = a f(u)
    for a > 0.

    Args:
        sizes: widths from input to output.
        activation: by name or as a registered `Activation`.
        bias: whether the layers have one.

    Example:
        >>> import torch
        >>> model = MLP([50, 20, 20, 1])
        >>> model(torch.zeros(7, 50)).shape, parameter_count(model)
        (torch.Size([7, 1]), 1461)
    """

    def __init__(self, sizes: Sequence[int], activation: str | Activation = "relu", bias: bool = True) -> None:
        super().__init__()
        sizes = tuple(sizes)
        if len(sizes) < 2 or any(not isinstance(size, int) or size < 1 for size in sizes):
            raise InputError(f"sizes must be at least two positive integers; received {sizes}")
        self.activation = get_activation(activation)
        self.layers = nn.ModuleList(nn.Linear(before, after, bias) for before, after in pairwise(sizes))

    def forward(self, u: Tensor) -> Tensor:  # (..., p) -> (..., q)
        """Computes the outputs."""
        *hidden, last = self.layers
        for layer in hidden:
            u = self.activation.function(layer(u))
        return last(u)


def parameter_count(model: nn.Module) -> int:
    """Counts the numbers that training can change; tied ones once.

    Example:
        >>> parameter_count(nn.Linear(3, 2))
        8
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
