"""Ready cells for `DEQ`: dense, convolutional, and with recall of the input."""

import torch
from torch import Tensor, nn

from wellposed.activations import Activation
from wellposed.equilibrium.maps import State
from wellposed.errors import InputError
from wellposed.models.cell_parts import (
    Cell,
    Nonlinearity,
    convolution,
    group_norm,
    require_grid,
    require_groups,
    require_positive,
    shape_of,
)
from wellposed.models.dropout import VariationalDropout


class DenseCell(Cell):
    """Computes ``tanh(W x + b + r(u))`` with the input projection ``r(u) = relu(V u + c)`` (004 eq. 57).

    With `depth` above one, further layers ``tanh(W_i x + b_i)`` of the same width follow. The projection has
    no bias of its own if its activation is the identity.

    Args:
        in_features, state_features: widths of input and state.
        activation: of the state, by name or as a registered `Activation`.
        projection: activation of the input projection; 004 uses relu, silu and identity.
        depth: dense layers in the cell.

    Example:
        >>> from wellposed.models.deq import DEQ
        >>> DEQ(DenseCell(3, 8))(torch.zeros(5, 3)).shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        in_features: int,
        state_features: int,
        *,
        activation: str | Activation = "tanh",
        projection: str | Activation = "relu",
        depth: int = 1,
    ) -> None:
        super().__init__()
        require_positive(in_features=in_features, state_features=state_features, depth=depth)
        self.in_features, self.state_features = in_features, state_features
        self.projection, self.activation = Nonlinearity(projection), Nonlinearity(activation)
        self.input = nn.Linear(in_features, state_features, bias=not self.projection.trivial)
        self.layers = nn.ModuleList(nn.Linear(state_features, state_features) for _ in range(depth))

    def state_shape(self, u: State) -> tuple[int, ...]:
        return (*self._checked(u).shape[1:-1], self.state_features)

    def inject(self, u: State) -> Tensor:  # (B, ..., p) -> (B, ..., n)
        return self.projection(self.input(self._checked(u)))

    def step(self, x: Tensor, injection: Tensor) -> Tensor:  # (B, ..., n) twice
        first, *others = self.layers
        x = self.activation(first(x) + injection)
        for layer in others:
            x = self.activation(layer(x))
        return x

    def _checked(self, u: State) -> Tensor:
        if not isinstance(u, Tensor) or u.dim() < 2 or u.shape[-1] != self.in_features:
            raise InputError(f"u must have the shape (batch, ..., {self.in_features}); received {shape_of(u)}")
        return u


class PlainConvCell(Cell):
    """Computes ``tanh(K * x + b + r(u))`` with one convolution K: `DenseCell` for sequences and images.

    With 6 channels in one dimension it is the cell of 004 for prefix sums (E.4), with 32 channels in two
    dimensions that of its adversarial experiments (Table 5).

    Args:
        in_channels, channels: of input and state.
        kernel_size: odd.
        dims: 1 for sequences ``(B, C, T)``, 2 for images ``(B, C, H, W)``.
        activation, projection: as in `DenseCell`.

    Example:
        >>> from wellposed.models.deq import DEQ
        >>> DEQ(PlainConvCell(1, 6))(torch.zeros(5, 1, 32)).shape
        torch.Size([5, 6, 32])
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        kernel_size: int = 3,
        dims: int = 1,
        activation: str | Activation = "tanh",
        projection: str | Activation = "identity",
    ) -> None:
        super().__init__()
        self.in_channels, self.channels, self.dims = in_channels, channels, dims
        self.projection, self.activation = Nonlinearity(projection), Nonlinearity(activation)
        bias = not self.projection.trivial
        self.input = convolution(dims, in_channels, channels, kernel_size, bias=bias)
        self.state = convolution(dims, channels, channels, kernel_size)

    def state_shape(self, u: State) -> tuple[int, ...]:
        return (self.channels, *require_grid(u, self.in_channels, self.dims).shape[2:])

    def inject(self, u: State) -> Tensor:
        return self.projection(self.input(require_grid(u, self.in_channels, self.dims)))

    def step(self, x: Tensor, injection: Tensor) -> Tensor:
        return self.activation(self.state(x) + injection)


class RecallCell(Cell):
    """Sees the input again at every step: ``phi(h + K_d phi(... phi(K_1 h)))`` with ``h = K (x, u)``.

    The block with recall of Bansal et al. (2022) for algorithmic tasks, without normalisation and biases;
    004 (E.4) solves mazes by its two-dimensional form with 128 channels, tanh and two convolutions. The
    convolution of the concatenation ``(x, u)`` is written as the sum of one of x and one of u.

    Args:
        in_channels, channels: of input and state.
        depth: convolutions of the residual branch.
        kernel_size: odd.
        dims: 1 for sequences ``(B, C, T)``, 2 for images ``(B, C, H, W)``.
        activation: phi; a bounded one keeps the states bounded.

    Example:
        >>> from wellposed.models.deq import DEQ
        >>> DEQ(RecallCell(3, 16, dims=2))(torch.zeros(2, 3, 9, 9)).shape
        torch.Size([2, 16, 9, 9])
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        depth: int = 2,
        kernel_size: int = 3,
        dims: int = 1,
        activation: str | Activation = "tanh",
    ) -> None:
        super().__init__()
        require_positive(depth=depth)
        self.in_channels, self.channels, self.dims = in_channels, channels, dims
        self.activation = Nonlinearity(activation)
        self.recall = convolution(dims, in_channels, channels, kernel_size, bias=False)
        self.state = convolution(dims, channels, channels, kernel_size, bias=False)
        self.layers = nn.ModuleList(
            convolution(dims, channels, channels, kernel_size, bias=False) for _ in range(depth)
        )

    def state_shape(self, u: State) -> tuple[int, ...]:
        return (self.channels, *require_grid(u, self.in_channels, self.dims).shape[2:])

    def inject(self, u: State) -> Tensor:
        return self.recall(require_grid(u, self.in_channels, self.dims))

    def step(self, x: Tensor, injection: Tensor) -> Tensor:
        joined = self.state(x) + injection
        first, *others = self.layers
        branch = first(joined)
        for layer in others:
            branch = layer(self.activation(branch))
        return self.activation(joined + branch)


class ResidualBlock(nn.Module):
    """Computes ``N3(relu(x + N2(K2 relu(N1(K1 x)) + injection)))`` with group norms N (Bai et al. 2020).

    The last norm bounds the state. K2 starts at 3 % of its usual size: what N2 normalises is then mostly the
    injection, and depends little on the state. `gain` is what N3 multiplies with at the start.
    """

    def __init__(
        self, channels: int, kernel_size: int, groups: int, dims: int, dropout: float, gain: float
    ) -> None:
        super().__init__()
        self.first = convolution(dims, channels, channels, kernel_size, bias=False)
        self.second = convolution(dims, channels, channels, kernel_size, bias=False)
        with torch.no_grad():
            self.second.weight.mul_(0.03)
        self.norms = nn.ModuleList(group_norm(groups, channels, start) for start in (1.0, 1.0, gain))
        self.inner, self.outer = nn.ReLU(), nn.ReLU()
        self.dropout = VariationalDropout(dropout, shared=tuple(range(-dims, 0)))

    def forward(self, x: Tensor, injection: Tensor | None = None) -> Tensor:  # (B, C, ...)
        """Evaluates the block."""
        y = self.dropout(self.second(self.inner(self.norms[0](self.first(x)))))
        if injection is not None:
            y = y + injection
        return self.norms[2](self.outer(x + self.norms[1](y)))


class ConvCell(Cell):
    """A residual block of two convolutions with group norm and input injection (Bai et al. 2020).

    ``x <- N3(relu(x + N2(K2 relu(N1(K1 x)) + V u)))`` with group norms N, which treat every sample by itself.
    The gain of N3 starts at 1/2, so that the input outweighs the state: at initialisation the map contracts.

    Args:
        in_channels, channels: of input and state.
        kernel_size: odd.
        groups: of the norms; must divide the channels. Few numbers in a group make a stiff map.
        dims: 1 for sequences ``(B, C, T)``, 2 for images ``(B, C, H, W)``.
        dropout: share of channels that `VariationalDropout` zeroes, with one mask for a whole solve.

    Example:
        >>> from wellposed.models.deq import DEQ
        >>> DEQ(ConvCell(3, 16))(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 16, 8, 8])
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        kernel_size: int = 3,
        groups: int = 8,
        dims: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.in_channels, self.channels, self.groups, self.dims = in_channels, channels, groups, dims
        self.input = convolution(dims, in_channels, channels, kernel_size)
        self.block = ResidualBlock(channels, kernel_size, groups, dims, dropout, gain=0.5)

    def state_shape(self, u: State) -> tuple[int, ...]:
        shape = (self.channels, *require_grid(u, self.in_channels, self.dims).shape[2:])
        require_groups(self.groups, shape)
        return shape

    def inject(self, u: State) -> Tensor:
        return self.input(require_grid(u, self.in_channels, self.dims))

    def step(self, x: Tensor, injection: Tensor) -> Tensor:
        return self.block(x, injection)
