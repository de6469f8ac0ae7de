"""Other ways to a sparse network, for comparison (003 Table 3.2): magnitude pruning, SSS, SPR and MLA.

MLPs are sequences of linear layers with activations between them. Only weights of hidden layers are pruned and
counted; a hidden unit that goes takes its column in the next layer along. SSS and SPR are losses and steps for any
training loop. A transformer has `Units`: pairs of layers between which nothing mixes them. MLA selects units by
how features are distributed over the positions of a feature map; the layers of an MLP have no positions.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.errors import InputError


def linear_layers(network: nn.Sequential) -> list[nn.Linear]:
    """Returns the linear layers in order; the last one is the output.

    Example:
        >>> len(linear_layers(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))))
        2
    """
    layers = [module for module in network if isinstance(module, nn.Linear)]
    if len(layers) < 2:
        raise InputError(f"a network to prune needs a hidden layer and an output; received {len(layers)} layers")
    return layers


def weight_sparsity(network: nn.Sequential) -> float:
    """Returns the share of zeros among the weights of the hidden layers.

    Example:
        >>> weight_sparsity(prune_by_magnitude(nn.Sequential(nn.Linear(5, 2), nn.ReLU(), nn.Linear(2, 1)), 0.5))
        0.5
    """
    weights = [layer.weight for layer in linear_layers(network)[:-1]]
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


def prune_by_magnitude(network: nn.Sequential, sparsity: float, *, layerwise: bool = False) -> nn.Sequential:
    """Sets the smallest weights of the hidden layers to zero, in a copy.

    Args:
        network: trained.
        sparsity: the share of weights to remove.
        layerwise: whether this share is taken from every layer, or from all of them together.
    """
    _check(sparsity)
    twin = copy.deepcopy(network)
    weights = [layer.weight for layer in linear_layers(twin)[:-1]]
    with torch.no_grad():
        for group in [[weight] for weight in weights] if layerwise else [weights]:
            sizes = torch.cat([weight.abs().flatten() for weight in group])
            remains = torch.ones(len(sizes), dtype=torch.bool)
            remains[sizes.topk(round(sparsity * len(sizes)), largest=False).indices] = False
            for weight, mask in zip(group, remains.split([weight.numel() for weight in group]), strict=True):
                weight.mul_(mask.view_as(weight))
    return twin


def keep_zeros(network: nn.Module) -> None:
    """Keeps zero weights at zero during training: their gradients are masked from now on."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.weight.register_hook(_masking((layer.weight != 0).to(layer.weight)))


def _masking(mask: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient * mask


def prune_units(network: nn.Sequential, scores: Iterable[Tensor], sparsity: float) -> nn.Sequential:
    """Removes whole hidden units, those with the smallest scores first, until enough weights are zero.

    Every hidden layer keeps its best unit.

    Args:
        network: trained.
        scores: of the units, one tensor a hidden layer.
        sparsity: the share of zero weights to reach.
    """
    _check(sparsity)
    twin, known = copy.deepcopy(network), [score.detach() for score in scores]
    layers = linear_layers(twin)
    best = {(k, int(score.argmax())) for k, score in enumerate(known)}
    units = [(float(value), k, i) for k, score in enumerate(known) for i, value in enumerate(score)]
    with torch.no_grad():
        for _, k, i in sorted(units):
            if weight_sparsity(twin) >= sparsity:
                break
            if (k, i) not in best:
                layers[k].weight[i] = 0.0
                layers[k].bias[i] = 0.0
                layers[k + 1].weight[:, i] = 0.0
    return twin


class ScaledUnits(nn.Module):
    """An MLP whose hidden units are multiplied by learnt factors (SSS: Huang and Wang, ECCV 2018, section 3.1).

    Example:
        >>> scaled = ScaledUnits(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)))
        >>> [tuple(factor.shape) for factor in scaled.factors]
        [(2,)]
    """

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        self.network = network
        hidden = linear_layers(network)[:-1]
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(layer.out_features)) for layer in hidden])

    def forward(self, u: Tensor) -> Tensor:
        """Evaluates the network; a factor acts after the activation of its unit."""
        x, pending = u, iter(self.factors)
        for layer in self.network:
            x = layer(x)
            if not isinstance(layer, nn.Linear):
                x = x * next(pending)
        return x

    def merged(self) -> nn.Sequential:
        """Returns a plain network, with the factors in the next layer and without units whose factor is zero."""
        twin = copy.deepcopy(self.network)
        layers = linear_layers(twin)
        with torch.no_grad():
            for factor, layer, after in zip(self.factors, layers, layers[1:], strict=False):
                after.weight.mul_(factor)
                layer.weight.mul_((factor != 0)[:, None])
                layer.bias.mul_(factor != 0)
        return twin


def linear_layer(network: nn.Module, name: str) -> nn.Linear:
    """Returns a linear layer of a network by its name."""
    layer = network.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        raise InputError(f"{name!r} must be a linear layer; received {type(layer).__name__}")
    return layer


@dataclass(frozen=True)
class Units:
    """Units of a network that go one by one: row i of one layer, with what only it serves in another.

    Args:
        rows: name of the layer that computes them.
        other: name of the layer that reads them, or of the keys that only these queries meet.
        behind: name of the layer whose outputs show what is lost.
    """

    rows: str
    other: str
    behind: str

    @property
    def columns(self) -> bool:
        """Whether column i of the other layer goes, or its row i."""
        return self.other == self.behind

    def mask(self, network: nn.Module, remains: Tensor) -> None:  # (units,)
        """Multiplies the units of a network by zero or one, in place."""
        first, second = linear_layer(network, self.rows), linear_layer(network, self.other)
        with torch.no_grad():
            for layer in (first,) if self.columns else (first, second):
                layer.weight.mul_(remains[:, None])
                layer.bias.mul_(remains)
            if self.columns:
                second.weight.mul_(remains)


def transformer_units(layers: int) -> list[Units]:
    """Names the units of encoder layers: queries with their keys, values and hidden units with what reads them.

    Example:
        >>> [units.rows for units in transformer_units(1)]
        ['layers.0.attention.query', 'layers.0.attention.value', 'layers.0.expand']
    """
    names = (("attention.query", "attention.key", "attention.out"),
             ("attention.value", "attention.out", "attention.out"),
             ("expand", "contract", "contract"))  # fmt: skip
    return [Units(*(f"layers.{k}.{part}" for part in each)) for k in range(layers) for each in names]


def rows_with_bias(network: nn.Module, units: Iterable[Units]) -> list[Tensor]:
    """Returns the weights and the bias of every unit, ``(units, inputs + 1)`` a layer."""
    layers = [linear_layer(network, each.rows) for each in units]
    return [torch.cat([layer.weight, layer.bias[:, None]], dim=1) for layer in layers]


def mask_units(network: nn.Module, units: Sequence[Units], scores: Sequence[Tensor], sparsity: float) -> nn.Module:
    """Sets the units with the smallest scores to zero, in a copy.

    All units of an encoder layer of one width have equally many weights, so the share of units that go is that of
    the weights.

    Args:
        network: trained.
        units, scores: those that can go, and what they are worth.
        sparsity: the share of units that go.
    """
    _check(sparsity)
    twin, values = copy.deepcopy(network), torch.cat([score.detach() for score in scores])
    remains = torch.ones(len(values))
    remains[values.topk(round(sparsity * len(values)), largest=False).indices] = 0.0
    for each, part in zip(units, remains.split([len(score) for score in scores]), strict=True):
        each.mask(twin, part)
    return twin


class ScaledRows(nn.Module):
    """A network some of whose rows are multiplied by learnt factors (SSS: Huang and Wang, ECCV 2018, section 3.1).

    Args:
        network: changed in place by `merged`.
        units: whose rows have factors.
    """

    def __init__(self, network: nn.Module, units: Sequence[Units]) -> None:
        super().__init__()
        self.network = network
        layers = [linear_layer(network, each.rows) for each in units]
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(len(layer.weight))) for layer in layers])
        self._hooks = [
            layer.register_forward_hook(lambda _, u, y, factor=factor: y * factor)
            for layer, factor in zip(layers, self.factors, strict=True)
        ]
        self._layers = layers  # of the network, which owns them

    def forward(self, u: Tensor) -> Tensor:
        """Evaluates the network."""
        y: Tensor = self.network(u)
        return y

    def merged(self) -> nn.Module:
        """Returns the plain network, with the factors in its rows."""
        with torch.no_grad():
            for hook, layer, factor in zip(self._hooks, self._layers, self.factors, strict=True):
                hook.remove()
                layer.weight.mul_(factor[:, None])
                layer.bias.mul_(factor)
        return self.network


def select_units(
    network: nn.Module, units: Sequence[Units], u: Tensor, target: Tensor, sparsity: float, *, rounds: int = 8
) -> nn.Module:
    """Selects units layer by layer by three losses (MLA: Hu et al., ICIP 2019), in a copy.

    A layer begins without any unit. In every round those are added whose factor has the largest slope of

        |F - F'|^2 / |F|^2 + |FF^T - F'F'^T|^2 / |FF^T|^2 + |F^T F - F'^T F'|^2 / |F^T F|^2 + cross-entropy,

    F the feature map behind the layer in the network, positions by features, and F' the one of the units so far.
    The losses are those that 003 section 3.4 describes; that they have equal weights and that units are added
    greedily is ours.

    Args:
        network: trained.
        units: those that can go.
        u, target: samples by which they are selected.
        sparsity: the share of the units of every layer that go.
        rounds: in which a layer is filled.
    """
    _check(sparsity)
    whole, twin = copy.deepcopy(network).eval(), copy.deepcopy(network).eval()
    for each in units:
        size = len(linear_layer(whole, each.rows).weight)
        wanted = size - round(sparsity * size)
        chosen = torch.zeros(size)
        expected = _features(whole, each, u, torch.ones(size))[0].detach()
        for step in range(1, rounds + 1):
            factor = chosen.clone().requires_grad_(True)
            features, y = _features(twin, each, u, factor)
            loss = feature_losses(expected, features) + cross_entropy(y, target)
            slope = torch.autograd.grad(loss, factor)[0].abs().masked_fill(chosen > 0, -1.0)
            count = round(step * wanted / rounds) - int(chosen.sum())
            chosen[slope.topk(count).indices] = 1.0
        each.mask(twin, chosen)
    return twin


def feature_losses(expected: Tensor, features: Tensor) -> Tensor:  # (B, T, d) each
    """Compares feature maps, their correlations between positions and those between features.

    Example:
        >>> x = torch.randn(2, 3, 4)
        >>> float(feature_losses(x, x)), round(float(feature_losses(x, 0 * x)), 6)
        (0.0, 3.0)
    """
    pairs = [
        (expected, features),
        (expected @ expected.mT, features @ features.mT),
        (expected.mT @ expected, features.mT @ features),
    ]
    total = expected.new_zeros(())
    for one, other in pairs:
        total = total + (one - other).square().sum() / one.square().sum().clamp(min=1e-12)
    return total


def _features(network: nn.Module, units: Units, u: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Evaluates a network with factors on some units; returns the feature map behind them and the output."""
    seen: list[Tensor] = []
    first, behind = network.get_submodule(units.rows), network.get_submodule(units.behind)
    hooks = [
        first.register_forward_hook(lambda _, inputs, y: y * factor),
        behind.register_forward_hook(lambda _, inputs, y: seen.append(y)),
    ]
    try:
        y = network(u)
    finally:
        for hook in hooks:
            hook.remove()
    return seen[-1], y


class ProximalDescent(torch.optim.Optimizer):
    """Descends on weights by Nesterov's method, on factors by proximal steps (SSS, section 3).

    A factor moves to s = S(l - eta g, eta gamma), S the soft threshold, and on by mu v, where v is s - l + mu v.

    Args:
        model: with factors.
        lr: eta.
        gamma: weight of the l1-norm of the factors.
        momentum: mu.
    """

    def __init__(self, model: ScaledUnits | ScaledRows, lr: float, gamma: float, momentum: float = 0.9) -> None:
        groups: list[dict[str, Any]] = [
            {"params": list(model.network.parameters()), "gamma": None},
            {"params": list(model.factors.parameters()), "gamma": gamma},
        ]
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group["lr"], group["momentum"], group["gamma"])
        return loss

    def _move(self, parameter: Tensor, lr: float, momentum: float, gamma: float | None) -> None:
        velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
        gradient = parameter.grad
        assert gradient is not None
        if gamma is None:
            velocity.mul_(momentum).sub_(gradient, alpha=lr)
            parameter.add_(velocity, alpha=momentum).sub_(gradient, alpha=lr)
            return
        target = nn.functional.softshrink(parameter - lr * gradient, lr * gamma)
        velocity.mul_(momentum).add_(target - parameter)
        parameter.copy_(target + momentum * velocity)


def unit_weights(network: nn.Sequential) -> list[Tensor]:
    """Returns the incoming weights and the bias of every hidden unit, ``(units, inputs + 1)`` a layer."""
    return [torch.cat([layer.weight, layer.bias[:, None]], dim=1) for layer in linear_layers(network)[:-1]]


def perspective_penalty(weights: Iterable[Tensor], alpha: float, largest: float) -> Tensor:
    """Computes the Structured Perspective Regularization (SPR: Cacciola et al., 2022).

    For every unit with weights w it is the least of ``alpha |w|^2 / y + (1 - alpha) y`` over 0 <= y <= 1 with
    ``|w|_inf <= largest y``, the perspective relaxation of the indicator of w != 0; times the unit's share of all
    weights. The best y is ``sqrt(alpha / (1 - alpha)) |w|``, moved into its bounds.

    Args:
        weights: of the units, ``(units, d)`` a layer.
        alpha: between 0 and 1; the rest goes to the count of units.
        largest: bound M on a weight.

    Example:
        >>> w = torch.tensor([[0.3, 0.4]])
        >>> round(float(perspective_penalty([w], alpha=0.5, largest=10.0)), 6)
        0.5
    """
    if not 0 < alpha < 1 or not largest > 0:
        raise InputError(f"alpha lies between 0 and 1 and largest above 0; received {alpha!r}, {largest!r}")
    matrices = list(weights)
    total, count = matrices[0].new_zeros(()), sum(matrix.numel() for matrix in matrices)
    for matrix in matrices:
        square = matrix.square().sum(1).clamp(min=1e-12)  # keeps the slope of the root finite
        y = (alpha / (1 - alpha) * square).sqrt()
        y = y.maximum(matrix.abs().amax(1) / largest).clamp(max=1.0)
        share = matrix.shape[1] / count
        total = total + share * (alpha * square / y + (1 - alpha) * y).sum()
    return total


def _check(sparsity: float) -> None:
    if not 0 <= sparsity < 1:
        raise InputError(f"sparsity is a share from 0 to below 1; received {sparsity!r}")
