"""Comparators of sparse fits: shares of zeros, units that go, penalties against their definition."""

import copy

import pytest
import torch
from torch import nn
from wellposed_lab.networks.pruning import (
    ProximalDescent,
    ScaledRows,
    ScaledUnits,
    keep_zeros,
    linear_layers,
    mask_units,
    perspective_penalty,
    prune_by_magnitude,
    prune_units,
    select_units,
    transformer_units,
    unit_weights,
    weight_sparsity,
)
from wellposed_lab.networks.transformers import TextClassifier, TextShape

from wellposed.errors import InputError


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.9])
def test_magnitude_removes_the_smallest_weights(network, layerwise, sparsity):
    twin = prune_by_magnitude(network, sparsity, layerwise=layerwise)
    assert weight_sparsity(twin) == pytest.approx(sparsity, abs=0.03)
    pairs = list(zip(linear_layers(network)[:-1], linear_layers(twin)[:-1], strict=True))
    for group in [[pair] for pair in pairs] if layerwise else [pairs]:
        gone = torch.cat([one.weight[other.weight == 0].abs() for one, other in group])
        kept = torch.cat([one.weight[other.weight != 0].abs() for one, other in group])
        assert not len(gone) or gone.max() <= kept.min()
    assert torch.equal(network[-1].weight, twin[-1].weight)
    if layerwise:
        shares = [float((other.weight == 0).double().mean()) for _, other in pairs]
        assert max(shares) - min(shares) < 0.05


def test_training_leaves_zeros_alone(network):
    twin = prune_by_magnitude(network, 0.5)
    before = [layer.weight.detach().clone() for layer in linear_layers(twin)]
    keep_zeros(twin)
    optimiser = torch.optim.Adam(twin.parameters(), 0.1)
    for _ in range(3):
        optimiser.zero_grad()
        twin(torch.randn(8, 6)).square().sum().backward()
        optimiser.step()
    for old, layer in zip(before, linear_layers(twin), strict=True):
        assert torch.equal(old == 0, layer.weight == 0)
        assert not torch.equal(old, layer.weight)


def test_units_go_in_the_order_of_their_scores(network):
    scores = [torch.tensor([5.0, 1, 2, 9, 8]), torch.tensor([6.0, 7, 0.5, 9])]
    twin = prune_units(network, scores, 0.4)  # units 2 of the second layer, then 1 and 2 of the first
    first, second, last = linear_layers(twin)
    assert (first.weight == 0).all(1).tolist() == [False, True, True, False, False]
    assert (second.weight == 0).all(1).tolist() == [False, False, True, False]
    assert bool((second.weight[:, 1:3] == 0).all()) and bool((last.weight[:, 2] == 0).all())
    assert first.bias[1] == 0 and second.bias[2] == 0
    assert 0.4 <= weight_sparsity(twin) < 0.55
    full = prune_units(network, scores, 0.99)
    assert [int((layer.weight != 0).any(1).sum()) for layer in linear_layers(full)[:-1]] == [1, 1]


def test_merged_factors_compute_the_same(network):
    scaled = ScaledUnits(network)
    with torch.no_grad():
        scaled.factors[0].copy_(torch.tensor([0.5, 0.0, -2.0, 1.0, 3.0]))
        scaled.factors[1].mul_(0.7)
    u = torch.randn(7, 6)
    assert torch.allclose(scaled(u), scaled.merged()(u), atol=1e-6)
    assert bool((scaled.merged()[0].weight[1] == 0).all())


def test_proximal_steps_reach_the_lasso_solution():
    """One input, one unit: min (f w - t)^2 / 2 + gamma |f| with w fixed has the solution S(t w, gamma) / w^2."""
    unit = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        unit[0].weight.copy_(torch.tensor([[1.0], [1.0]]))
        unit[0].bias.zero_()
        unit[2].weight.copy_(torch.eye(2))
    scaled = ScaledUnits(unit)
    target, optimiser = torch.tensor([[2.0, 0.3]]), ProximalDescent(scaled, lr=0.05, gamma=0.5)
    for parameter in unit.parameters():
        parameter.requires_grad_(False)
    for _ in range(400):
        optimiser.zero_grad()
        ((scaled(torch.ones(1, 1)) - target).square().sum() / 2).backward()
        optimiser.step()
    assert scaled.factors[0].tolist() == pytest.approx([1.5, 0.0], abs=1e-4)


@pytest.mark.parametrize(("alpha", "largest"), [(0.1, 5.0), (0.5, 0.2), (0.9, 1.0), (0.3, 0.05)])
def test_perspective_penalty_is_the_least_over_y(alpha, largest):
    torch.manual_seed(1)
    w = torch.randn(6, 4).double() * torch.tensor([0.01, 0.05, 0.1, 0.3, 1.0, 3.0])[:, None]
    w = w.clamp(-largest, largest)  # else no y is allowed
    y = torch.linspace(1e-4, 1, 20001).double()
    least = 0.0
    for row in w:
        allowed = row.abs().max() <= largest * y + 1e-12
        least += float((alpha * row.square().sum() / y + (1 - alpha) * y)[allowed].min())
    found = float(perspective_penalty([w], alpha, largest))
    assert found == pytest.approx(least * 4 / w.numel(), rel=2e-3)


def test_penalty_has_a_gradient_at_zero_and_units_their_bias(network):
    with torch.no_grad():
        network[0].weight[0] = 0.0
        network[0].bias[0] = 0.0
    perspective_penalty(unit_weights(network), 0.1, 5.0).backward()
    assert bool(network[0].weight.grad.isfinite().all()) and float(network[0].bias.grad.abs().sum()) > 0


def test_bad_input_is_refused(network):
    with pytest.raises(InputError, match="sparsity is a share"):
        prune_by_magnitude(network, 1.0)
    with pytest.raises(InputError, match="needs a hidden layer"):
        linear_layers(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(InputError, match="alpha lies between"):
        perspective_penalty([torch.ones(1, 1)], 1.0, 1.0)


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return TextClassifier(TextShape(30, 6, 8, 1, 2, 16, 3)).eval()


WORDS = torch.tensor([[4, 7, 9, 2, 0, 0], [5, 6, 3, 8, 11, 2]])


def test_masked_units_of_a_transformer_take_along_what_only_they_serve(encoder):
    """Those with the smallest scores go, and the network is as if they had never been."""
    units = transformer_units(1)
    scores = [torch.arange(8.0) + 20, torch.arange(8.0) + 40, torch.arange(16.0)]
    twin = mask_units(encoder, units, scores, 0.5)  # 16 of 32 units, all of which are hidden ones
    layer = twin.layers[0]
    assert not layer.expand.weight.any() and not layer.expand.bias.any() and not layer.contract.weight.any()
    assert torch.equal(layer.attention.key.weight, encoder.layers[0].attention.key.weight)
    twin = mask_units(encoder, units, [-score for score in scores], 0.5)  # values, then queries
    layer = twin.layers[0].attention
    for part in (layer.value.weight, layer.out.weight, layer.query.weight, layer.key.weight):
        assert not part.any()
    assert twin.layers[0].expand.weight.all()


def test_merged_factors_leave_a_network_as_it_was(encoder):
    units, before = transformer_units(1), encoder(WORDS)
    scaled = ScaledRows(copy.deepcopy(encoder), units)
    assert torch.equal(scaled(WORDS), before)
    with torch.no_grad():
        for factor in scaled.factors:
            factor.copy_(torch.rand_like(factor))
    changed = scaled(WORDS)
    assert not torch.allclose(changed, before)
    plain = scaled.merged()
    assert torch.allclose(plain(WORDS), changed, atol=1e-6)
    assert not any(module._forward_hooks for module in plain.modules())


def test_units_are_selected_that_the_output_needs(encoder):
    """Of hidden units that are copies of each other or read by nobody, those are selected that are read."""
    needed = torch.arange(16) % 4 == 0
    with torch.no_grad():
        encoder.layers[0].contract.weight.mul_(needed)
    labels, units = torch.tensor([0, 2]), transformer_units(1)[2:]
    twin = select_units(encoder, units, WORDS, labels, 0.75)
    remains = twin.layers[0].expand.weight.any(1)
    assert torch.equal(remains, needed)
    assert torch.allclose(twin(WORDS), encoder(WORDS), atol=1e-6)
