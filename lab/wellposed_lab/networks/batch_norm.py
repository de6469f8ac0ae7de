"""A residual network as layers of filters: batch normalisation folded in, shortcuts as inputs of their own."""

import copy

import torch
from torch import Tensor, nn

from wellposed.convex import FilterNetwork, Filters, RowUnits
from wellposed.convex.shared import row_weights, widths
from wellposed.errors import InputError
from wellposed_lab.networks.resnet import BasicBlock, ResNet


def fold_batch_norm(network: nn.Module) -> nn.Module:
    """Returns a copy in which the residual network inside is a `FilterNetwork` that computes the same.

    Example:
        >>> network, u = ResNet(8).eval(), torch.rand(2, 3, 16, 16)
        >>> torch.allclose(fold_batch_norm(network)(u), network(u), atol=1e-4)
        True
    """
    if isinstance(network, ResNet):
        return _filters(network)
    twin = copy.deepcopy(network)
    for name, module in twin.named_modules():
        if isinstance(module, ResNet):
            parent = twin.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], _filters(module))
            return twin
    raise InputError(f"{type(network).__name__} holds no ResNet; give a network of wellposed_lab.networks.resnet")


def inner(network: nn.Module) -> tuple[str, FilterNetwork]:
    """Finds the layers of filters in a network, with their name in it."""
    for name, module in network.named_modules():
        if isinstance(module, FilterNetwork):
            return name, module
    raise InputError(f"{type(network).__name__} holds no FilterNetwork; make one by fold_batch_norm()")


def layer_names(network: nn.Module) -> list[str]:
    """Names the layers of filters, in the order of evaluation."""
    name, filters = inner(network)
    start = f"{name}." if name else ""
    return [f"{start}layers.{k}" for k in range(len(filters.layers))]


def layer_units(network: nn.Module, kappa: float) -> dict[str, RowUnits]:
    """Returns units in which the network's own rows have an l1-norm below kappa."""
    filters = inner(network)[1]
    own = filters.exponents(kappa)
    exponents = (own[0], *own)  # inputs have the units of the first layer
    units = {}
    for k, (name, sources) in enumerate(zip(layer_names(network), filters.sources, strict=True), start=1):
        shifts = tuple(exponents[k] - exponents[source] for source in sources)
        units[name] = RowUnits(shifts, tuple(source > 0 for source in sources))
    return units


def raw_sizes(network: nn.Module) -> dict[str, Tensor]:
    """Returns the sizes of all weights before batch normalisation is folded in, by layer, ``(r, d)``.

    Training sees these weights, and pruning by magnitude compares them. A shortcut without weights is infinite.
    """
    twin = copy.deepcopy(network)
    for module in twin.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var = torch.ones_like(module.weight) - module.eps
            nn.init.ones_(module.weight)
    sizes = {}
    plain = fold_batch_norm(twin)
    for name, layer in zip(layer_names(plain), inner(plain)[1].layers, strict=True):
        assert isinstance(layer, Filters)
        sizes[name] = row_weights(layer).abs()
        if len(layer.convolutions) > 1 and _is_identity(layer.convolutions[1]):
            own = widths(layer)[0]
            sizes[name][:, own:] *= torch.inf
    return {name: size.nan_to_num(0.0, posinf=torch.inf) for name, size in sizes.items()}


def _is_identity(layer: nn.Module) -> bool:
    weight = layer.weight.detach() if isinstance(layer, nn.Conv2d) else torch.empty(0)
    return bool(((weight == 0) | (weight == 1)).all())


def _filters(network: ResNet) -> FilterNetwork:
    network = copy.deepcopy(network).eval()
    layers: list[Filters] = [_folded_pair(network.stem)]
    sources: list[tuple[int, ...]] = [(0,)]
    for block in network.blocks:
        assert isinstance(block, BasicBlock)
        x = len(layers)
        layers += [_folded_pair(block.first), _with_shortcut(block)]
        sources += [(x,), (x + 1, x)]
    readout = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), network.readout)
    return FilterNetwork(layers, sources, readout).eval()


def _folded_pair(pair: nn.Sequential) -> Filters:
    convolution, bias = _without_norm(pair)
    return Filters([convolution], bias)


def _without_norm(pair: nn.Sequential) -> tuple[nn.Conv2d, Tensor]:
    """Multiplies a convolution by the slope of the batch normalisation behind it; the rest is a bias."""
    convolution, norm = pair[0], pair[1]
    assert isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None and norm.running_var is not None
    slope = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
    scaled = copy.deepcopy(convolution)
    with torch.no_grad():
        scaled.weight.mul_(slope[:, None, None, None])
    return scaled, norm.bias.detach() - slope * norm.running_mean


def _with_shortcut(block: BasicBlock) -> Filters:
    second, bias = _without_norm(block.second)
    if isinstance(block.shortcut, nn.Sequential):
        shortcut, offset = _without_norm(block.shortcut)
        return Filters([second, shortcut], bias + offset)
    first = block.first[0]
    assert isinstance(first, nn.Conv2d)
    before, after = first.in_channels, first.out_channels
    identity = nn.Conv2d(before, after, 1, first.stride[0], bias=False).to(second.weight)
    with torch.no_grad():
        front = (after - before) // 2
        weight = torch.zeros(after, before).to(second.weight)
        weight[front : front + before] = torch.eye(before)
        identity.weight.copy_(weight[:, :, None, None])
    return Filters([second, identity], bias)
