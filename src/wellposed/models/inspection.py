"""What a cell must not contain if it is to have an equilibrium for each sample by itself."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from wellposed.equilibrium.maps import Packing, State, max_norm
from wellposed.errors import InputError, MapError


def reject_layers(cell: nn.Module) -> None:
    """Raises if a layer couples the samples of a batch or makes every step another map."""
    for name, layer in cell.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or not layer.track_running_stats):
            raise InputError(
                f"the cell has a {_place(layer, name)} that normalises by the statistics of the batch, so the "
                "equilibrium of a sample would depend on its companions; use nn.GroupNorm in the cell, put the "
                "batch norm before or after it, or call .eval() on it to freeze its statistics"
            )
        if layer.training and _random(layer):
            raise InputError(
                f"the cell has a {_place(layer, name)} that draws anew at every step, so there is no equilibrium; "
                "use wellposed.models.VariationalDropout, which holds its mask over the steps of a solve"
            )


def _place(layer: nn.Module, name: str) -> str:
    return f"{type(layer).__name__} at {name!r}" if name else type(layer).__name__


def _random(layer: nn.Module) -> bool:
    if isinstance(layer, nn.RReLU):
        return layer.lower != layer.upper
    if isinstance(layer, nn.MultiheadAttention):
        return layer.dropout > 0
    return isinstance(layer, _DropoutNd) and layer.p > 0


def reject_coupling(alone: State, among: State) -> None:
    """Raises if a sample moves elsewhere when it is alone than among others.

    Args:
        alone: the map of one sample, evaluated for that sample only.
        among: the same, evaluated in company.
    """
    packing = Packing.of(among)
    single, together = packing.pack_result(packing.cast(alone)), packing.pack(among)
    apart, size = float(max_norm(single - together)), float(torch.maximum(max_norm(single), max_norm(together)))
    if apart > 1e-2 * size:
        raise MapError(
            "the cell makes a sample depend on its batch: at its equilibrium the first sample goes elsewhere "
            f"alone than among its companions, {apart:.1e} apart where states have the size {size:.1e}; let the "
            "cell treat every sample by itself (no statistics over dimension 0)"
        )


def first(state: State) -> State:
    """Returns the first sample of a state."""
    return state[:1] if isinstance(state, Tensor) else tuple(part[:1] for part in state)
