"""ResNet-20: published size, shapes, and activations that leave their inputs alone."""

import pytest
import torch
from torch import nn
from wellposed_lab.networks.mlp import parameter_count
from wellposed_lab.networks.resnet import BasicBlock, ResNet

from wellposed.errors import InputError, UnknownNameError


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({}, 269722),
        ({"shortcut": "B"}, 272474),
        ({"depth": 32}, 464154),
        ({"depth": 56}, 853018),
        ({"classes": 100}, 269722 + 90 * 65),
        ({"in_channels": 1}, 269722 - 2 * 9 * 16),
    ],
)
def test_parameter_counts(arguments, count):
    assert parameter_count(ResNet(**arguments)) == count


@pytest.mark.parametrize("shortcut", ["A", "B"])
@pytest.mark.parametrize("size", [8, 9, 32])
def test_shapes(shortcut, size):
    model = ResNet(20, 7, in_channels=1, shortcut=shortcut)
    assert model(torch.randn(2, 1, size, size)).shape == (2, 7)
    assert model.blocks(torch.zeros(1, 16, 8, 8)).shape == (1, 64, 2, 2)


def test_twenty_layers_have_weights():
    layers = [m for m in ResNet(20).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 20


def test_without_its_convolutions_a_block_is_its_shortcut():
    block, x = BasicBlock(4, 8, "A").eval(), torch.rand(2, 4, 6, 6)
    nn.init.zeros_(block.second[0].weight)
    y = block(x)
    assert torch.equal(y[:, 2:6], x[..., ::2, ::2])
    assert y[:, :2].abs().max() == y[:, 6:].abs().max() == 0


def test_every_activation_is_a_module_that_copies():
    model, seen = ResNet(20).eval(), []

    def record(module, inputs, output):
        seen.append((inputs[0].min().item() < 0, output.data_ptr() != inputs[0].data_ptr()))

    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(record)
    model(torch.randn(2, 3, 32, 32))
    assert seen == [(True, True)] * 19


def test_wrong_arguments():
    with pytest.raises(InputError, match="6n \\+ 2 with n >= 1; received 21"):
        ResNet(21)
    with pytest.raises(UnknownNameError, match="valid: A, B"):
        ResNet(20, shortcut="C")
