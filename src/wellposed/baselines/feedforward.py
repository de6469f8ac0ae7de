"""The feed-forward twin of a fully connected deep equilibrium model (004)."""

from torch import Tensor, nn

from wellposed.activations import Activation
from wellposed.baselines.mlp import activation_layer
from wellposed.errors import InputError


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
