"""What cells are made of: the two halves of a step, convolutions and norms that keep samples apart."""

import abc
import math
from typing import Any

from torch import Tensor, nn

from wellposed.activations import Activation, get_activation
from wellposed.equilibrium.maps import State
from wellposed.errors import InputError

Convolution = nn.Conv1d | nn.Conv2d


class Cell(nn.Module, abc.ABC):
    """A map ``(x, u) -> x`` in two halves: what depends on the input alone, and a step of the state.

    ``cell(x, u)`` is ``cell.step(x, cell.inject(u))``; over the steps of a solve the first half stays the same.
    """

    @abc.abstractmethod
    def state_shape(self, u: State) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        """Returns the shape of the state that belongs to `u`, without the batch dimension."""

    @abc.abstractmethod
    def inject(self, u: State) -> State:
        """Returns what the input adds to every step."""

    @abc.abstractmethod
    def step(self, x: Any, injection: Any) -> State:
        """Takes one step from the state `x`."""

    def forward(self, x: State, u: State) -> State:
        """Evaluates the map."""
        return self.step(x, self.inject(u))


class Nonlinearity(nn.Module):
    """Applies an activation entry by entry; as a layer, so that hooks can reach the signal before it."""

    def __init__(self, activation: str | Activation) -> None:
        super().__init__()
        self.activation = get_activation(activation)
        if not self.activation.componentwise:
            raise InputError(f"a cell needs a componentwise activation; {self.activation.name!r} acts on blocks")

    def forward(self, z: Tensor) -> Tensor:
        return self.activation.function(z)

    @property
    def trivial(self) -> bool:
        """Whether it changes nothing."""
        return self.activation.name == "identity"

    def extra_repr(self) -> str:
        return self.activation.name


def require_positive(**sizes: int) -> None:
    """Raises unless every size is a positive integer."""
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size < 2**31:
            raise InputError(f"{name} must be a positive integer; received {size!r}")


def convolution(
    dims: int, in_channels: int, channels: int, kernel_size: int, *, bias: bool = True, stride: int = 1
) -> Convolution:
    """Builds a convolution that keeps the size of its input or divides it by the stride, rounding up."""
    require_positive(in_channels=in_channels, channels=channels, kernel_size=kernel_size)
    if kernel_size % 2 == 0:
        raise InputError(f"kernel_size must be odd, so that the state keeps its size; received {kernel_size}")
    if dims not in (1, 2):
        raise InputError(f"dims must be 1 (sequences) or 2 (images); received {dims!r}")
    kind = nn.Conv1d if dims == 1 else nn.Conv2d
    return kind(in_channels, channels, kernel_size, stride=stride, padding=kernel_size // 2, bias=bias)


def group_norm(groups: int, channels: int, gain: float = 1.0) -> nn.GroupNorm:
    """Builds a group norm whose output starts with the size `gain`."""
    require_positive(groups=groups, channels=channels)
    if channels % groups:
        raise InputError(f"groups must divide the channels; received {groups} groups and {channels} channels")
    norm = nn.GroupNorm(groups, channels)
    nn.init.constant_(norm.weight, gain)
    return norm


def require_grid(u: State, channels: int, dims: int, name: str = "u") -> Tensor:
    """Raises unless `u` is a batch of sequences or images with that many channels."""
    if not isinstance(u, Tensor) or u.dim() != dims + 2 or u.shape[1] != channels:
        sizes = ", ".join(("length",) if dims == 1 else ("height", "width"))
        raise InputError(f"{name} must have the shape (batch, {channels}, {sizes}); received {shape_of(u)}")
    return u


def require_groups(groups: int, shape: tuple[int, ...]) -> None:
    """Raises if a group norm would have to normalise single numbers."""
    if math.prod(shape) <= groups:
        raise InputError(
            f"{groups} groups leave a single number in each for a state of the shape {shape}; use fewer "
            "groups, more channels or larger inputs"
        )


def shape_of(u: Any) -> str:
    """Describes what was received."""
    return str(tuple(u.shape)) if isinstance(u, Tensor) else type(u).__name__
