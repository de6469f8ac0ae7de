"""The feed-forward twins of the deep equilibrium models of 004.

`FeedForward` is the twin of a fully connected model, `ConvNet` that of a convolutional one.
"""

from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from wellposed.activations import Activation
from wellposed.errors import InputError
from wellposed_lab.networks.mlp import activation_layer


class FeedForward(nn.Module):
    """Projects the input, applies `depth` hidden layers and reads the last one out (004 Table 2).

    ``x = projection(Uu + c)``, ``z_0 = x``, ``z_{m+1} = tanh(W_m z_m + b_m + [x])``: 004 adds x in every layer
    in eq. (41) and (57) and leaves it out in (10) and (32), so both are here. With `inject` and `tied` this is
    the unrolled equilibrium model, started at x.

    Noise goes where the layers are called one by one::

        x = z = model.encode(u)
        for layer in model.layers:
            z = layer.activation(disturb(layer.signal(z, x)))
        y = model.readout(z)

    Args:
        width: of every hidden layer.
        depth: number of hidden layers.
        activation: of the hidden layers.
        projection: activation of the input projection; ReLU for classification, also SiLU ("silu") or none
            ("identity") for regression (004 appendix E.2).
        inject: whether the projected input is added in every layer.
        tied: whether all layers share their weights.

    Example:
        >>> import torch
        >>> model = FeedForward(784, 10, depth=3)
        >>> model(torch.zeros(7, 784)).shape, sum(p.numel() for p in model.parameters())
        (torch.Size([7, 10]), 151306)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        width: int = 128,
        depth: int = 1,
        activation: str | Activation = "tanh",
        projection: str | Activation = "relu",
        inject: bool = False,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if depth < 1:
            raise InputError(f"depth must be at least 1; received {depth}")
        self.projection = nn.Linear(in_features, width)
        self.projection_activation = activation_layer(projection, width)
        self.layers = nn.ModuleList(HiddenLayer(width, activation, inject) for _ in range(depth))
        if tied:
            _tie(self.layers)
        self.readout = nn.Linear(width, out_features)

    def forward(self, u: Tensor) -> Tensor:  # (..., p) -> (..., q)
        """Computes the outputs."""
        x = self.encode(u)
        z = x
        for layer in self.layers:
            z = layer(z, x)
        y: Tensor = self.readout(z)
        return y

    def encode(self, u: Tensor) -> Tensor:  # (..., p) -> (..., width)
        """Computes x, the projected input."""
        x: Tensor = self.projection_activation(self.projection(u))
        return x


class HiddenLayer(nn.Module):
    """One layer ``activation(signal)`` with ``signal = Wz + b``, and + x where it is injected.

    Example:
        >>> import torch
        >>> layer = HiddenLayer(4, "tanh", inject=True)
        >>> z, x = torch.zeros(7, 4), torch.ones(7, 4)
        >>> torch.equal(layer(z, x), torch.tanh(layer.linear(z) + x))
        True
    """

    def __init__(self, width: int, activation: str | Activation, inject: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.activation = activation_layer(activation, width)
        self.inject = inject

    def forward(self, z: Tensor, x: Tensor) -> Tensor:  # (..., width) each
        """Computes the next state."""
        y: Tensor = self.activation(self.signal(z, x))
        return y

    def signal(self, z: Tensor, x: Tensor) -> Tensor:
        """Computes what enters the activation, which signal noise disturbs."""
        signal: Tensor = self.linear(z)
        return signal + x if self.inject else signal


def _tie(layers: nn.ModuleList) -> None:
    """Gives all layers the parameters of the first; they stay modules of their own, for hooks and vmap."""
    for name, parameter in layers[0].named_parameters():
        path, _, last = name.rpartition(".")
        for layer in layers[1:]:
            setattr(layer.get_submodule(path), last, parameter)


class ConvNet(nn.Module):
    """Projects the image, applies convolutional cells and reads them out (004 Tables 4 and 6).

    ``x = relu(norm(conv(u)))``, ``z_0 = x``, ``z_{m+1} = relu(norm(conv(z_m)) + [x])``, then a 1 x 1
    convolution to the final channels, the mean over a grid and a linear map to the logits. Convolutions keep
    the image size and the grid is fixed, so one network serves images of any size. The tables give channels,
    kernel, normalisations and cells; the ReLU, the pooling and the projection are choices of this library.

    Args:
        in_channels: of the images.
        classes: number of logits.
        channels: of every cell.
        cells: how many, n in Table 4.
        final_channels: of the last convolution; None leaves it out.
        kernel: odd size of the cells' filters.
        grid: the features are averaged over grid x grid patches.
        inject: whether the projected image is added in every cell.
        batch_norm: whether batch normalisation (momentum 0.1) follows the convolutions.
        weight_norm: whether the convolutions' filters are normalised.

    Example:
        >>> import torch
        >>> model = ConvNet(3, 10, cells=2)
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        *,
        channels: int = 128,
        cells: int = 1,
        final_channels: int | None = 400,
        kernel: int = 3,
        grid: int = 1,
        inject: bool = False,
        batch_norm: bool = True,
        weight_norm: bool = True,
    ) -> None:
        super().__init__()
        if cells < 1 or kernel % 2 == 0:
            raise InputError(f"cells must be at least 1 and kernel odd; received {cells} and {kernel}")
        norms = (weight_norm, batch_norm)
        self.projection = nn.Sequential(_convolution(in_channels, channels, kernel, *norms), nn.ReLU())
        self.layers = nn.ModuleList(ConvCell(channels, kernel, inject, *norms) for _ in range(cells))
        final: list[nn.Module] = []
        if final_channels is not None:
            final = [_convolution(channels, final_channels, 1, *norms), nn.ReLU()]
        features = (final_channels or channels) * grid**2
        pool = [nn.AdaptiveAvgPool2d(grid), nn.Flatten(), nn.Linear(features, classes)]
        self.readout = nn.Sequential(*final, *pool)

    def forward(self, u: Tensor) -> Tensor:  # (B, C, H, W) -> (B, classes)
        """Computes the logits."""
        x = self.encode(u)
        z = x
        for layer in self.layers:
            z = layer(z, x)
        y: Tensor = self.readout(z)
        return y

    def encode(self, u: Tensor) -> Tensor:  # (B, C, H, W) -> (B, channels, H, W)
        """Computes x, the projected image."""
        x: Tensor = self.projection(u)
        return x


class ConvCell(nn.Module):
    """One cell ``relu(signal)`` with ``signal = norm(conv(z))``, and + x where it is injected.

    Example:
        >>> import torch
        >>> z = torch.zeros(2, 4, 8, 8)
        >>> ConvCell(4, 3, False, True, True)(z, z).shape
        torch.Size([2, 4, 8, 8])
    """

    def __init__(self, channels: int, kernel: int, inject: bool, weight_norm: bool, batch_norm: bool) -> None:
        super().__init__()
        self.convolution = _convolution(channels, channels, kernel, weight_norm, batch_norm)
        self.activation = nn.ReLU()
        self.inject = inject

    def forward(self, z: Tensor, x: Tensor) -> Tensor:  # (B, channels, H, W) each
        """Computes the next state."""
        y: Tensor = self.activation(self.signal(z, x))
        return y

    def signal(self, z: Tensor, x: Tensor) -> Tensor:
        """Computes what enters the activation, which signal noise disturbs."""
        signal: Tensor = self.convolution(z)
        return signal + x if self.inject else signal


def _convolution(before: int, after: int, kernel: int, normed: bool, batch_norm: bool) -> nn.Module:
    convolution: nn.Module = nn.Conv2d(before, after, kernel, padding="same", bias=not batch_norm)
    if normed:
        convolution = weight_norm(convolution)
    return nn.Sequential(convolution, nn.BatchNorm2d(after, momentum=0.1)) if batch_norm else convolution
