"""The convolutional twins: structure by hand, any image size, normalisations on and off."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from wellposed_lab.networks.mlp import parameter_count
from wellposed_lab.networks.twins import ConvNet

from wellposed.errors import InputError

SINGLE = {"channels": 32, "final_channels": None, "grid": 4, "batch_norm": False}  # 004 Table 6


@pytest.mark.parametrize("cells", [1, 3])
def test_parameter_counts(cells):
    # filters, their norms (one a channel) and the two numbers of each batch normalisation
    stem, cell, final = 3 * 9 * 128 + 3 * 128, 128 * 9 * 128 + 3 * 128, 128 * 400 + 3 * 400
    assert parameter_count(ConvNet(cells=cells)) == stem + cells * cell + final + 401 * 10
    norm, bias = 32, 32
    single = (9 * 32 + norm + bias) + (32 * 9 * 32 + norm + bias) + 16 * 32 * 10 + 10
    assert parameter_count(ConvNet(1, **SINGLE)) == single


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (1, 28, 28)])
def test_any_image_size(shape):
    u = torch.randn(2, *shape)
    assert ConvNet(shape[0], channels=4, final_channels=6, cells=2)(u).shape == (2, 10)
    assert ConvNet(shape[0], 7, **SINGLE)(u).shape == (2, 7)


@pytest.mark.parametrize("inject", [True, False])
def test_it_is_the_formula(inject):
    model = ConvNet(1, channels=4, cells=2, final_channels=None, grid=2, inject=inject, batch_norm=False)
    u = torch.randn(3, 1, 8, 8)
    first = model.projection[0]
    x = z = torch.relu(F.conv2d(u, first.weight, first.bias, padding=1))
    for cell in model.layers:
        step = F.conv2d(z, cell.convolution.weight, cell.convolution.bias, padding=1)
        z = torch.relu(step + x if inject else step)
    patches = z.unflatten(-1, (2, 4)).unflatten(-3, (2, 4)).mean((-3, -1))  # (B, 4, 2, 2)
    assert torch.allclose(model(u), model.readout[-1](patches.flatten(1)), atol=1e-5)


def test_filters_are_normalised():
    model = ConvNet(1, channels=4, final_channels=6)
    convolution = model.layers[0].convolution[0]
    before = convolution.weight.clone()
    with torch.no_grad():
        convolution.parametrizations.weight.original1.mul_(7)  # the direction, whose length must not count
    assert torch.allclose(convolution.weight, before, atol=1e-6)
    assert not hasattr(ConvNet(1, channels=4, weight_norm=False).layers[0].convolution[0], "parametrizations")


def test_batch_normalisation_has_the_momentum_of_the_paper():
    norms = [m for m in ConvNet(channels=4).modules() if isinstance(m, nn.BatchNorm2d)]
    assert [norm.momentum for norm in norms] == [0.1] * 3
    assert not any(isinstance(m, nn.BatchNorm2d) for m in ConvNet(1, **SINGLE).modules())


def test_noise_goes_between_the_cells():
    model, u = ConvNet(1, channels=4, cells=2, final_channels=6, inject=True).eval(), torch.randn(3, 1, 8, 8)

    def run(noise):
        x = z = model.encode(u)
        for layer in model.layers:
            z = layer.activation(layer.signal(z, x) + noise)
        return model.readout(z)

    assert torch.allclose(run(0.0), model(u))
    assert not torch.allclose(run(0.1), model(u))


def test_wrong_arguments():
    with pytest.raises(InputError, match="kernel odd; received 1 and 4"):
        ConvNet(kernel=4)
