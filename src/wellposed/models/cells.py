"""Ready cells for `DEQ`: dense, convolutional, with recall of the input, transformer and multiscale.

A `Cell` separates the injection of the input from the step of the state; `convolution` and `group_norm` build
layers that do not mix samples. `DenseCell`, `PlainConvCell`, `RecallCell` and `ConvCell` are made of them.
`TransformerCell` is a weight-tied transformer block. `MultiscaleCell` is the cell of the multiscale DEQ: a
residual block for every resolution, and their fusion.
"""

import abc
import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed.activations import Activation, get_activation
from wellposed.equilibrium.maps import State
from wellposed.equilibrium.tracing import under_forward_mode, under_functorch
from wellposed.errors import InputError, positive_integer
from wellposed.models.norms import VariationalDropout

Convolution = nn.Conv1d | nn.Conv2d


class Cell(nn.Module, abc.ABC):
    """A map ``(x, u) -> x`` split into an injection, which depends on the input alone, and a step of the state.

    ``cell(x, u)`` is ``cell.step(x, cell.inject(u))``; the injection is the same for all steps of a solve.
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
        return self.activation.is_identity

    def extra_repr(self) -> str:
        return self.activation.name


def require_positive(**sizes: int) -> None:
    """Raises unless every size is a positive integer."""
    for name, size in sizes.items():
        positive_integer(name, size)


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
        self.in_features, self.state_features = int(in_features), int(state_features)
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


class TransformerCell(Cell):
    """A transformer block whose input is injected at every step (the DEQ transformer of Bai et al. 2019).

    With queries, keys and values ``W x + V u`` and layer norms N after the sums, which bound the state,

    ``h = N1(x + R u + attention(W x + V u))``, ``x <- N2(h + F2 relu(F1 h))``.

    The gain of N2 starts at 1/2, so that the input outweighs the state: at initialisation the map contracts.
    Positions are not encoded here; add them to u.

    Args:
        width: of input and state.
        heads: of the attention; must divide the width.
        hidden: width between F1 and F2.
        dropout: of attention and feed-forward output; a solve keeps one mask for all positions and steps.
        causal: whether a position sees only itself and those before it.

    Example:
        >>> from wellposed.models.deq import DEQ
        >>> model = DEQ(TransformerCell(16, 4, 32))
        >>> model(torch.randn(2, 10, 16)).shape
        torch.Size([2, 10, 16])

        A mask ``(B, T)``, False at padding, goes with the input; states at padding are zero.

        >>> mask = torch.arange(10) < torch.tensor([[10], [6]])
        >>> model((torch.randn(2, 10, 16), mask))[1, 6:].abs().max()
        tensor(0., grad_fn=<MaxBackward1>)
    """

    def __init__(self, width: int, heads: int, hidden: int, *, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        require_positive(width=width, heads=heads, hidden=hidden)
        if width % heads:
            raise InputError(f"heads must divide the width; received {heads} heads and width {width}")
        self.width, self.heads, self.causal = width, heads, causal
        self.input = nn.Linear(width, 4 * width)  # V and R
        self.state = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width)
        self.hidden, self.output = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.nonlinearity = nn.ReLU()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        nn.init.constant_(self.norms[1].weight, 0.5)  # type: ignore[arg-type]
        self.dropouts = nn.ModuleList(VariationalDropout(dropout, shared=(1,)) for _ in range(2))

    def state_shape(self, u: State) -> tuple[int, ...]:
        return tuple(self._checked(u)[0].shape[1:])

    def inject(self, u: State) -> State:  # (B, T, d) -> (B, T, 4 d)
        sequence, mask = self._checked(u)
        return self.input(sequence) if mask is None else (self.input(sequence), mask)

    def step(self, x: Tensor, injection: State) -> Tensor:
        projected, mask = (injection, None) if isinstance(injection, Tensor) else injection
        shared, residual = projected.split((3 * self.width, self.width), dim=-1)
        attended = self.mix(self._attend(self.state(x) + shared, mask))
        h = self.norms[0](x + residual + self.dropouts[0](attended))
        x = self.norms[1](h + self.dropouts[1](self.output(self.nonlinearity(self.hidden(h)))))
        return x if mask is None else x * mask[:, :, None]

    def _attend(self, projections: Tensor, mask: Tensor | None) -> Tensor:  # (B, T, 3 d) -> (B, T, d)
        query, key, value = projections.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, d/H)
        visible = None if mask is None else _visible(mask, self.causal)
        with _differentiable_attention(query):
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask=visible, is_causal=self.causal and mask is None
            )
        return attended.transpose(1, 2).flatten(2)

    def _checked(self, u: State) -> tuple[Tensor, Tensor | None]:
        sequence, mask = (u, None) if isinstance(u, Tensor) else u if len(u) == 2 else (None, None)
        if sequence is None or sequence.dim() != 3 or sequence.shape[2] != self.width:
            received = ", ".join(shape_of(part) for part in ((u,) if isinstance(u, Tensor) else u))
            raise InputError(
                f"u must be a tensor (batch, length, {self.width}), or a pair of it and a mask; "
                f"received {received}"
            )
        if mask is not None and (mask.dtype != torch.bool or mask.shape != sequence.shape[:2]):
            raise InputError(
                f"the mask must be boolean with the shape {tuple(sequence.shape[:2])}, False at padding; "
                f"received {tuple(mask.shape)}, {mask.dtype}"
            )
        return sequence, mask


def _visible(mask: Tensor, causal: bool) -> Tensor:  # (B, 1, T, T), from (B, T)
    """Tells which position sees which; each sees itself, so that no row is empty."""
    length = mask.shape[1]
    seen = mask[:, None, :] | torch.eye(length, dtype=torch.bool, device=mask.device)
    return (seen.tril() if causal else seen)[:, None]


def _differentiable_attention(like: Tensor) -> contextlib.AbstractContextManager:
    """Chooses plain attention where derivatives are taken that fast kernels lack: in forward mode, or twice."""
    transformed = under_functorch() or under_forward_mode()
    recorded = torch.is_grad_enabled() and like.device.type == "cpu"  # steps of a solve by Implicit are not
    return sdpa_kernel(SDPBackend.MATH) if transformed or recorded else contextlib.nullcontext()


MAX_SCALES = 4


class MultiscaleCell(Cell):
    """Steps the states of all resolutions and mixes them (Bai et al. 2020).

    With ``b_j`` the residual block of resolution j, of which only the finest gets the input,
    ``x_i <- N(K relu(sum_j s_ij(b_j(x_j))))``: ``s_ij`` are strided convolutions where j is finer than i, a
    1x1 convolution and upsampling where it is coarser, and the identity for j = i. Sizes are halved rounding
    up. The gains of the norms start so that feedback is weak: at initialisation the map contracts.

    Args:
        channels: of the states, from fine to coarse; the first is also that of the input.
        kernel_size, groups, dropout: as in `ConvCell`.

    Example:
        >>> import torch
        >>> from wellposed.models.deq import DEQ
        >>> [tuple(x.shape) for x in DEQ(MultiscaleCell((8, 16)))(torch.randn(2, 8, 7, 7))]
        [(2, 8, 7, 7), (2, 16, 4, 4)]
    """

    def __init__(
        self, channels: Sequence[int], *, kernel_size: int = 3, groups: int = 8, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.channels, self.groups = require_scales("channels", channels), groups
        self.blocks = nn.ModuleList(
            ResidualBlock(count, kernel_size, groups, 2, dropout, gain=0.25 if scale else 1.0)
            for scale, count in enumerate(self.channels)
        )
        self.fusions = nn.ModuleList(
            _Fusion(self.channels, scale, kernel_size, groups) for scale in range(len(self.channels))
        )

    def state_shape(self, u: State) -> tuple[tuple[int, ...], ...]:
        height, width = require_grid(u, self.channels[0], 2).shape[2:]
        least = 2 ** (len(self.channels) - 1)
        if min(height, width) < least:
            raise InputError(
                f"{len(self.channels)} scales need at least {least} x {least} pixels; received "
                f"{height} x {width}; use fewer scales or larger images"
            )
        shapes = tuple((c, _shrink(height, i), _shrink(width, i)) for i, c in enumerate(self.channels))
        for shape in shapes:
            require_groups(self.groups, shape)
        return shapes

    def inject(self, u: State) -> Tensor:
        return require_grid(u, self.channels[0], 2)

    def step(self, x: tuple[Tensor, ...], injection: Tensor) -> tuple[Tensor, ...]:
        if len(x) != len(self.blocks):
            raise InputError(f"the state has one tensor for each of {len(self.blocks)} scales; received {len(x)}")
        injections = [injection] + [None] * (len(self.blocks) - 1)
        states = [block(state, i) for block, state, i in zip(self.blocks, x, injections, strict=True)]
        return tuple(fusion(states) for fusion in self.fusions)


class _Fusion(nn.Module):
    """Brings the states of all resolutions to one of them and adds them up."""

    def __init__(self, channels: tuple[int, ...], target: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.target = target
        self.down = nn.ModuleList(_down(channels, j, target, kernel_size, groups) for j in range(target))
        self.up = nn.ModuleList(
            nn.Sequential(
                convolution(2, coarser, channels[target], 1, bias=False),
                group_norm(groups, channels[target], gain=0.1),
            )
            for coarser in channels[target + 1 :]
        )
        self.nonlinearity = nn.ReLU()
        self.mix = convolution(2, channels[target], channels[target], 1, bias=False)
        self.norm = group_norm(groups, channels[target], gain=0.25)

    def forward(self, states: list[Tensor]) -> Tensor:
        """Returns the next state of the target resolution."""
        own = states[self.target]
        total = own
        for path, state in zip(self.down, states[: self.target], strict=True):
            total = total + path(state)
        for path, state in zip(self.up, states[self.target + 1 :], strict=True):
            total = total + F.interpolate(path(state), size=own.shape[2:], mode="nearest")
        return self.norm(self.mix(self.nonlinearity(total)))


def _down(channels: tuple[int, ...], source: int, target: int, kernel_size: int, groups: int) -> nn.Module:
    """Halves a resolution once or more; all but the last convolution keep the channels of the source."""
    layers: list[nn.Module] = []
    for scale in range(source + 1, target + 1):
        count = channels[target] if scale == target else channels[source]
        layers.append(convolution(2, channels[source], count, kernel_size, bias=False, stride=2))
        layers.append(group_norm(groups, count))
        if scale < target:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def require_scales(name: str, channels: Sequence[int]) -> tuple[int, ...]:
    """Raises unless there are one to four positive channel counts."""
    counts = tuple(channels)
    if not 1 <= len(counts) <= MAX_SCALES:
        raise InputError(f"{name} has one entry for each of 1 to {MAX_SCALES} scales; received {counts}")
    for count in counts:
        require_positive(**{name: count})
    return counts


def _shrink(size: int, scale: int) -> int:
    """Halves a size `scale` times, rounding up as the strided convolutions do."""
    return math.ceil(size / 2**scale)
