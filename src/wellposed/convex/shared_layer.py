"""Layers whose rows are shared by many positions: what a row reads at a position, and its weights."""

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from wellposed.convex.filters import Filters
from wellposed.errors import InputError

SharedLayer = nn.Linear | nn.Conv2d | Filters


def shared_layers(network: nn.Module) -> dict[str, SharedLayer]:
    """Lists the layers of a network with shared rows: linear ones, convolutions and filters.

    Example:
        >>> list(shared_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))))
        ['0', '2']
    """
    inside = {id(part) for layer in network.modules() if isinstance(layer, Filters) for part in layer.convolutions}
    return {
        name: part
        for name, part in network.named_modules()
        if isinstance(part, nn.Linear | nn.Conv2d | Filters) and id(part) not in inside
    }


def positions(layer: SharedLayer, outputs: Tensor) -> tuple[int, int]:
    """Says how many samples there are and at how many positions each has the rows of a layer.

    Example:
        >>> positions(nn.Conv2d(2, 5, 3), torch.zeros(4, 5, 6, 6))
        (4, 36)
    """
    rows = layer.out_features if isinstance(layer, nn.Linear) else outputs.shape[1]
    return len(outputs), outputs[0].numel() // rows


def read_by_rows(layer: SharedLayer, inputs: tuple[Tensor, ...], places: Tensor) -> tuple[Tensor, ...]:
    """Lays out what the rows of a layer read at some places, ``(m, d_i)`` for each input.

    Args:
        layer: which one.
        inputs: of the layer.
        places: k P + i is position i of sample k, where there are P positions.

    Example:
        >>> x = torch.arange(16.0).reshape(1, 1, 4, 4)
        >>> read_by_rows(nn.Conv2d(1, 5, 2), (x,), torch.tensor([1]))[0]
        tensor([[1., 2., 5., 6.]])
    """
    if isinstance(layer, nn.Linear):
        return (inputs[0].reshape(-1, layer.in_features)[places],)
    found = []
    for part, x in zip(convolutions(layer), inputs, strict=True):
        patches = unfold(x, part.kernel_size, part.dilation, _padding(part), part.stride)
        count = patches.shape[2]
        found.append(patches[places // count, :, places % count])
    return tuple(found)


def given_by_rows(layer: SharedLayer, outputs: Tensor, places: Tensor) -> Tensor:  # (m, r)
    """Lays out what the rows of a layer give at the same places."""
    if isinstance(layer, nn.Linear):
        return outputs.reshape(-1, layer.out_features)[places]
    flat = outputs.flatten(2)
    return flat[places // flat.shape[2], :, places % flat.shape[2]]


def row_weights(layer: SharedLayer) -> Tensor:  # (r, d)
    """Returns the weights of every row, in the order of the columns of `read_by_rows`."""
    if isinstance(layer, nn.Linear):
        return layer.weight.detach().clone()
    return torch.cat([part.weight.detach().flatten(1) for part in convolutions(layer)], dim=1)


def widths(layer: SharedLayer) -> tuple[int, ...]:
    """Says how many columns each input has.

    Example:
        >>> widths(nn.Conv2d(2, 5, 3))
        (18,)
    """
    if isinstance(layer, nn.Linear):
        return (layer.in_features,)
    return tuple(part.weight[0].numel() for part in convolutions(layer))


@torch.no_grad()
def set_rows(layer: SharedLayer, weights: Tensor, bias: Tensor) -> None:  # (r, d), (r,)
    """Gives a layer other weights; one without a bias gets one."""
    if isinstance(layer, nn.Linear):
        layer.weight.copy_(weights)
    else:
        parts = weights.split(list(widths(layer)), dim=1)
        for part, own in zip(convolutions(layer), parts, strict=True):
            part.weight.copy_(own.reshape(part.weight.shape))
    if layer.bias is None:
        layer.bias = nn.Parameter(bias.to(weights))
    else:
        layer.bias.copy_(bias)


def convolutions(layer: nn.Conv2d | Filters) -> list[nn.Conv2d]:
    """Returns the convolutions of a layer, one an input."""
    parts = [layer] if isinstance(layer, nn.Conv2d) else list(layer.convolutions)
    found = [part for part in parts if isinstance(part, nn.Conv2d)]
    for part in found:
        if part.groups != 1 or part.padding_mode != "zeros":
            raise InputError(
                f"a convolution to be fitted has one group and pads with zeros; received groups={part.groups}, "
                f"padding_mode={part.padding_mode!r}"
            )
    return found


def _padding(part: nn.Conv2d) -> tuple[int, ...]:
    if isinstance(part.padding, str):
        raise InputError(f"a convolution to be fitted has its padding in numbers; received {part.padding!r}")
    return tuple(part.padding)
