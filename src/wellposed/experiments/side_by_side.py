"""Networks of one design trained as one: their convolutions over sequences become products of stacked matrices."""

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.errors import InputError

Module = TypeVar("Module", bound=nn.Module)


class StackedConvolution(nn.Module):
    """Applies M convolutions, each to its own part of the batch: ``(M B, C, L) -> (M B, D, L)``.

    A few channels leave a processor idle; M of them in one product do less so.

    Example:
        >>> layers = [nn.Conv1d(2, 3, 3, padding=1) for _ in range(4)]
        >>> x = torch.randn(4, 5, 2, 7)
        >>> y = StackedConvolution(layers)(x.flatten(0, 1)).unflatten(0, (4, 5))
        >>> bool(torch.allclose(y[2], layers[2](x[2]), atol=1e-6))
        True
    """

    def __init__(self, layers: Sequence[nn.Conv1d]) -> None:
        super().__init__()
        size = layers[0].kernel_size[0]
        if any(layer.padding != (size // 2,) or layer.stride != (1,) or size % 2 == 0 for layer in layers):
            raise InputError(f"convolutions must keep the length of a sequence; received {layers[0]}")
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))  # (M, D, C, k)
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = nn.Parameter(torch.stack(biases)) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """Computes all of them."""
        members, size = self.weight.shape[0], self.weight.shape[3]
        parts = x.unflatten(0, (members, -1)).transpose(1, 2)  # (M, C, B, L)
        padded, length = F.pad(parts, (size // 2, size // 2)), x.shape[2]
        windows = torch.stack([padded[..., k : k + length] for k in range(size)], 2)  # (M, C, k, B, L)
        y = self.weight.flatten(2) @ windows.flatten(3).flatten(1, 2)
        y = y if self.bias is None else y + self.bias[:, :, None]
        return y.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1)

    @torch.no_grad()
    def give_back(self, layers: Sequence[nn.Conv1d]) -> None:
        """Writes what was learnt into the convolutions."""
        for index, layer in enumerate(layers):
            layer.weight.copy_(self.weight[index])
            if layer.bias is not None and self.bias is not None:
                layer.bias.copy_(self.bias[index])


class Joined(nn.Module):
    """Runs networks that differ in their weights only as one, ``(B, M, ...) -> (B, M, ...)``.

    Each network sees the samples of its own column and is not influenced by the others.
    """

    def __init__(self, networks: Sequence[Module]) -> None:
        super().__init__()
        self.networks = tuple(networks)  # a tuple, so that their own weights are not trained
        self.inner = copy.deepcopy(networks[0])
        for name, layer in [*self.inner.named_modules()]:
            if isinstance(layer, nn.Conv1d):
                above, _, last = name.rpartition(".")
                setattr(self.inner.get_submodule(above), last, StackedConvolution(self._same(name)))

    def forward(self, u: Tensor) -> Tensor:
        """Computes the outputs of every network."""
        y: Tensor = self.inner(u.transpose(0, 1).flatten(0, 1))
        return y.unflatten(0, (len(self.networks), -1)).transpose(0, 1)

    def give_back(self) -> None:
        """Writes what was learnt into the networks."""
        for name, layer in self.inner.named_modules():
            if isinstance(layer, StackedConvolution):
                layer.give_back(self._same(name))

    def _same(self, name: str) -> list[nn.Conv1d]:
        found = [network.get_submodule(name) for network in self.networks]
        return [layer for layer in found if isinstance(layer, nn.Conv1d)]
