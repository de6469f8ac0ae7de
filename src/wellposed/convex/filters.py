"""Networks whose rows are shared by all positions of an image: convolutions, sums of them and ReLU."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wellposed.conditions.rescaling import rescaling
from wellposed.convert import to_implicit
from wellposed.convert.rules.convolution import convolved
from wellposed.convert.signal import Signal
from wellposed.errors import InputError


class Filters(nn.Module):
    """One layer: a sum of convolutions, one of each input, and a bias.

    In the implicit form of a residual network a state ``z = W * x + shortcut(x')`` reads two layers, and so does
    this one. A row of A is the filter of its channel at its position.

    Args:
        convolutions: one an input, with equal numbers of output channels and without biases.
        bias: of the channels.

    Example:
        >>> first, second = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Conv2d(2, 4, 1, bias=False)
        >>> layer = Filters([first, second], torch.zeros(4))
        >>> layer(torch.zeros(5, 3, 8, 8), torch.zeros(5, 2, 8, 8)).shape
        torch.Size([5, 4, 8, 8])
    """

    def __init__(self, convolutions: Sequence[nn.Conv2d], bias: Tensor) -> None:  # (C,)
        super().__init__()
        if not convolutions or any(part.bias is not None for part in convolutions):
            raise InputError("a layer of filters needs convolutions without biases; it has one of its own")
        if {part.out_channels for part in convolutions} != {len(bias)}:
            shapes = ", ".join(str(part.out_channels) for part in convolutions)
            raise InputError(f"all convolutions need {len(bias)} output channels, as the bias; received {shapes}")
        self.convolutions = nn.ModuleList(convolutions)
        self.bias = nn.Parameter(bias.detach().clone())

    def forward(self, *inputs: Tensor) -> Tensor:  # (B, C_i, H, W) each -> (B, C, H', W')
        """Computes the pre-activations."""
        parts = [convolution(x) for convolution, x in zip(self.convolutions, inputs, strict=True)]
        z: Tensor = sum(parts[1:], parts[0]) + self.bias[:, None, None]
        return z


@to_implicit.register(Filters)
def _converted(module: Filters, *signals: Signal) -> Signal:
    total: Signal | None = None
    for part, signal in zip(module.convolutions, signals, strict=True):
        assert isinstance(part, nn.Conv2d)
        found = convolved(signal, part.weight, None, part.stride, part.padding, part.dilation, part.groups)
        total = found if total is None else total.plus(found)
    assert total is not None
    return total.shifted(module.bias.detach()[:, None, None].expand(total.shape[1:]))


class FilterNetwork(nn.Module):
    """Layers of filters with ReLU, each reading states before it, and a readout of the last one.

    Args:
        layers: in the order of evaluation.
        sources: of each layer, one an input: 0 is the network's input, k the state of the k-th layer.
        readout: of the last state.

    Example:
        >>> first = Filters([nn.Conv2d(1, 2, 3, padding=1, bias=False)], torch.zeros(2))
        >>> second = Filters([nn.Conv2d(2, 2, 1, bias=False), nn.Conv2d(1, 2, 1, bias=False)], torch.zeros(2))
        >>> network = FilterNetwork([first, second], [(0,), (1, 0)], nn.Flatten())
        >>> network(torch.zeros(3, 1, 4, 4)).shape
        torch.Size([3, 32])
    """

    def __init__(self, layers: Sequence[Filters], sources: Sequence[Sequence[int]], readout: nn.Module) -> None:
        super().__init__()
        for k, (layer, read) in enumerate(zip(layers, sources, strict=True), start=1):
            if len(read) != len(layer.convolutions) or not all(0 <= source < k for source in read):
                raise InputError(
                    f"layer {k} needs a source from 0 to {k - 1} for every input of {len(layer.convolutions)}; "
                    f"received {tuple(read)}"
                )
        self.layers = nn.ModuleList(layers)
        self.sources = tuple(tuple(read) for read in sources)
        self.readout = readout

    def forward(self, u: Tensor) -> Tensor:  # (B, C, H, W)
        """Evaluates layer after layer."""
        states = [u]
        for layer, read in zip(self.layers, self.sources, strict=True):
            states.append(torch.relu(layer(*(states[source] for source in read))))
        y: Tensor = self.readout(states[-1])
        return y

    def norms(self) -> Tensor:  # (L, L) float64
        """Bounds ``|A_kj|_inf`` of every pair of layers: the largest l1-norm of a filter."""
        found = torch.zeros(len(self.layers), len(self.layers), dtype=torch.float64)
        for k, (layer, read) in enumerate(zip(self.layers, self.sources, strict=True)):
            for part, source in zip(_parts(layer), read, strict=True):
                if source:
                    found[k, source - 1] += part.weight.detach().double().abs().sum((1, 2, 3)).amax()
        return found

    def exponents(self, kappa: float) -> tuple[float, ...]:
        """Returns units 2^e of the layers in which every row of A has an l1-norm below kappa.

        They exist for every kappa > 0, since the network has no loop, and are whole numbers, so that the states in
        these units have the same bits (003 section 2.5).
        """
        return tuple(float(e) for e in rescaling(self.norms(), kappa).log2)


def _parts(layer: nn.Module) -> list[nn.Conv2d]:
    assert isinstance(layer, Filters)
    return [part for part in layer.convolutions if isinstance(part, nn.Conv2d)]
