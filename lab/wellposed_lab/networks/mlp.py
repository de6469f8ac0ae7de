"""The multilayer perceptron, with every activation of the papers, and EikoNet.

`MLP` takes any of `MLP_ACTIVATIONS`. `EikoNet` is the rival of the earthquake task.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from wellposed.activations import Activation, activation_names, get_activation
from wellposed.errors import InputError, UnknownNameError, unknown_name

MLP_ACTIVATIONS = (
    "hardtanh",
    "sigmoid",
    "relu6",
    "tanh",
    "tanhshrink",
    "hardshrink",
    "leaky_relu",
    "softshrink",
    "softsign",
    "relu",
    "prelu",
    "multiprelu",
    "softplus",
    "elu",
    "selu",
    "logsigmoid",
)
"""The 15 activations of 000 (appendix A.1) and the log-sigmoid of its Table 1."""


class MLP(nn.Module):
    """Alternates linear layers with an activation; nothing follows the last layer.

    Without biases and with a positively homogeneous activation (ReLU) the whole network is: f(au) = a f(u)
    for a > 0. With `skip` the output is f(u) + Du, the control for the feedthrough of an implicit model.

    Args:
        sizes: widths from input to output.
        activation: a registered `Activation`, its name, or one of `MLP_ACTIVATIONS`.
        bias: whether the layers have one.
        skip: whether a linear map leads from the input straight to the output.

    Example:
        >>> import torch
        >>> model = MLP([50, 20, 20, 1])
        >>> model(torch.zeros(7, 50)).shape, parameter_count(model)
        (torch.Size([7, 1]), 1461)
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str | Activation = "relu",
        bias: bool = True,
        skip: bool = False,
    ) -> None:
        super().__init__()
        sizes = require_sizes(sizes)
        self.activation = _known(activation)
        self.layers = nn.ModuleList(nn.Linear(before, after, bias) for before, after in pairwise(sizes))
        self.activations = nn.ModuleList(activation_layer(activation, width) for width in sizes[1:-1])
        self.skip = nn.Linear(sizes[0], sizes[-1], bias=False) if skip else None

    def forward(self, u: Tensor) -> Tensor:  # (..., p) -> (..., q)
        """Computes the outputs."""
        *hidden, last = self.layers
        x = u
        for layer, activation in zip(hidden, self.activations, strict=True):
            x = activation(layer(x))
        y: Tensor = last(x)
        return y if self.skip is None else y + self.skip(u)


class ActivationLayer(nn.Module):
    """Applies a registered `Activation`, as a module that hooks can see.

    Example:
        >>> ActivationLayer(get_activation("relu"))(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, z: Tensor) -> Tensor:
        """Computes phi(z)."""
        return self.activation(z)

    def extra_repr(self) -> str:
        return self.activation.name


class PReLU(nn.Module):
    """Learns the slope of the negative side, ``max(z, 0) + a min(z, 0)`` along the last dimension.

    One slope is the PReLU of 000; a slope for every unit is its "multiPReLU".

    Args:
        slopes: 1, or the size of the last dimension.
        initial: the slope to start from.

    Example:
        >>> PReLU(2)(torch.tensor([-4.0, 2.0]))
        tensor([-1.,  2.], grad_fn=<WhereBackward0>)
    """

    def __init__(self, slopes: int = 1, initial: float = 0.25) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((slopes,), initial))

    def forward(self, z: Tensor) -> Tensor:  # (..., n) -> (..., n)
        """Computes the activation."""
        return torch.where(z > 0, z, self.slope * z)

    def extra_repr(self) -> str:
        return f"slopes={len(self.slope)}"


_OWN: dict[str, Callable[[int], nn.Module]] = {
    "hardshrink": lambda width: nn.Hardshrink(),
    "logsigmoid": lambda width: nn.LogSigmoid(),
    "prelu": lambda width: PReLU(),
    "multiprelu": PReLU,
}


def activation_layer(activation: str | Activation, width: int) -> nn.Module:
    """Builds the activation of a layer of that width.

    An explicit network may use what an implicit one may not: activations that jump (hardshrink) or learn
    (PReLU).

    Example:
        >>> activation_layer("multiprelu", 8), activation_layer("tanh", 8)
        (PReLU(slopes=8), ActivationLayer(tanh))
    """
    known = _known(activation)
    return _OWN[known](width) if isinstance(known, str) else ActivationLayer(known)


def _known(activation: str | Activation) -> str | Activation:
    """Returns the name of one of our own or the registered `Activation`."""
    if isinstance(activation, str) and activation in _OWN:
        return activation
    try:
        return get_activation(activation)
    except UnknownNameError:
        raise unknown_name("activation", activation, [*activation_names(), *_OWN]) from None


def require_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the widths of a network as a tuple, or says what is wrong with them.

    Example:
        >>> require_sizes([3, 2])
        (3, 2)
    """
    sizes = tuple(sizes)
    if len(sizes) < 2 or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise InputError(f"sizes must be at least two positive integers; received {sizes}")
    return sizes


def parameter_count(model: nn.Module) -> int:
    """Counts the numbers that training can change; tied ones once.

    Example:
        >>> parameter_count(nn.Linear(3, 2))
        8
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


class EikoNet(nn.Module):
    """Six linear layers with ELU, the middle two of them a residual block (002 section 4.2).

    ``30 x 32 x 128 x [128 x 128] x 32 x 4``: the tables of 001 and 002 print 270 inputs, those of another
    task with 45 stations; their 42,500 parameters belong to 30. After EikoNet (Smith et al. 2021), which
    solves the eikonal equation with more and wider blocks of this kind.

    Args:
        in_features: six for each of five stations.
        out_features: longitude, latitude, depth and time.
        narrow, wide: the two widths.
        skip: whether a linear map leads from the input straight to the output, the control for the
            feedthrough of an implicit model.

    Example:
        >>> import torch
        >>> model = EikoNet()
        >>> model(torch.zeros(7, 30)).shape, sum(p.numel() for p in model.parameters())
        (torch.Size([7, 4]), 42500)
    """

    def __init__(
        self,
        in_features: int = 30,
        out_features: int = 4,
        *,
        narrow: int = 32,
        wide: int = 128,
        skip: bool = False,
    ) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(in_features, narrow), nn.ELU(), nn.Linear(narrow, wide), nn.ELU())
        self.block = ResidualBlock(wide)
        self.leave = nn.Sequential(nn.Linear(wide, narrow), nn.ELU(), nn.Linear(narrow, out_features))
        self.skip = nn.Linear(in_features, out_features, bias=False) if skip else None

    def forward(self, u: Tensor) -> Tensor:  # (..., p) -> (..., q)
        """Computes the outputs."""
        y: Tensor = self.leave(self.block(self.enter(u)))
        return y if self.skip is None else y + self.skip(u)


class ResidualBlock(nn.Module):
    """Adds two linear layers to their input: ``elu(x + W elu(Vx + a) + b)``.

    Example:
        >>> import torch
        >>> ResidualBlock(8)(torch.zeros(7, 8)).shape
        torch.Size([7, 8])
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, width))
        self.activation = nn.ELU()

    def forward(self, x: Tensor) -> Tensor:
        """Computes the block's output."""
        y: Tensor = self.activation(x + self.layers(x))
        return y
