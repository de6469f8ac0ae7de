"""Whole networks: same outputs, last layer first, nothing changed on the way."""

import copy
import math

import pytest
import torch
from architectures import ARCHITECTURES, LOOPS, randomised
from torch import nn

from wellposed.checker import check
from wellposed.cli.stored import as_stored
from wellposed.convert import to_implicit
from wellposed.errors import InputError
from wellposed.models import load, save


def network_of(name, dtype):
    build, shape = ARCHITECTURES[name]
    torch.manual_seed(0)
    return randomised(build()).to(dtype), shape


def error(form, network, u):
    """The largest difference in units of the largest output."""
    with torch.no_grad():
        expected = network.eval()(u).reshape(len(u), -1)
    return float((form(u) - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_equal_those_of_the_network(name, dtype, tolerance):
    network, shape = network_of(name, dtype)
    form = to_implicit(network, shape)
    assert form.input_shape == shape and form.dtype == dtype
    assert error(form, network, torch.randn(3, *shape, dtype=dtype)) < tolerance


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_states_come_last_layer_first(name):
    network, shape = network_of(name, torch.float32)
    form = to_implicit(network, shape)
    if name in LOOPS:
        assert any(i == j for i, j in form.A.parts) and all(i <= j for i, j in form.A.parts)
    else:
        assert all(i < j for i, j in form.A.parts)
        assert form.A.is_strictly_triangular()
        assert form.certificate().value == 0
    assert len(set(form.labels)) == len(form.partition)


@pytest.mark.parametrize("name", ["ResNet-8 of one channel", "normalised weights", "control flow", "ShuffleNet"])
def test_network_is_left_as_it_was(name):
    network, shape = network_of(name, torch.float32)
    network.train()
    before = copy.deepcopy(network.state_dict())
    form = to_implicit(network, shape)
    assert all(part.training for part in network.modules())
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    y = form(u := torch.randn(2, *shape))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2)
    assert torch.equal(form(u), y)  # the form has weights of its own


def test_resnet_has_the_matrices_of_the_paper():
    network, shape = network_of("ResNet-20", torch.float32)
    form = to_implicit(network, shape)
    assert form.sizes == (188416, 3072, 10) and len(form.partition) == 19
    assert {phi.name for phi in form.activations} == {"relu"}
    kinds = {key: type(part).__name__ for key, part in form.A.parts.items()}
    assert kinds[0, 1] == "Convolution" and kinds[0, 2] == "Identity"
    assert form.labels[0] == "blocks.8.activation" and form.labels[-1] == "stem.2"
    weights = sum(p.numel() for name, p in network.named_parameters())
    assert sum(getattr(form, name).stored() for name in "ABCD") < 3 * weights


def test_mlp_has_the_matrices_of_the_paper():
    network, shape = network_of("MLP of 13 layers", torch.float64)
    form = to_implicit(network, shape)
    layers = list(network.layers)
    assert form.partition == (16,) * 12
    assert torch.equal(form.B.part(11, 0).to_dense(), layers[0].weight)
    for k in range(1, 12):
        assert torch.equal(form.A.part(11 - k, 12 - k).to_dense(), layers[k].weight)
    assert torch.equal(form.C.part(0, 0).to_dense(), layers[12].weight)
    assert len(form.A.parts) == 11 and torch.equal(form.output_bias, layers[12].bias)


def test_shared_weights_make_blocks_of_their_own():
    network, shape = network_of("shared residual block", torch.float32)
    form = to_implicit(network, shape)
    assert [label for label in form.labels if label.startswith("block.1")] == [
        "block.1 (4)", "block.1 (3)", "block.1 (2)", "block.1 (1)"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["pre-activation", "MobileNet", "DenseNet", "shared residual block"])
def test_nothing_is_computed_again_for_every_reader(name):
    """A residual stream is not multiplied out: the form has the weights of the layers, once each."""
    network, shape = network_of(name, torch.float32)
    form = to_implicit(network, shape)
    parts = [factor for part in form.A.parts.values() for factor in getattr(part, "factors", (part,))]
    heavy = sum(part.stored() for part in parts if type(part).__name__ in ("Convolution", "Dense"))
    calls = 4 if name == "shared residual block" else 1
    assert 0 < heavy <= calls * sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(4, 6), (4,)), (nn.Linear(4, 6), (3, 4)), (nn.Conv1d(2, 3, 3), (2, 5)), (nn.MaxPool1d(2), (2, 6))],
    ids=str,
)
def test_layer_after_a_sum_is_applied_once(layer, shape):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(torch.relu(x) + torch.tanh(x))

    form = to_implicit(network := Network(), shape)
    assert error(form, network, torch.randn(3, *shape)) < 1e-5
    names = [phi.name for phi in form.activations]
    total = names.index("identity")  # of relu and tanh, which nothing else reads
    assert names.count("identity") == 1
    assert {i for i, j in form.A.parts if names[j] in ("relu", "tanh")} == {total}


SMALL = [name for name in ARCHITECTURES if not name.startswith(("ResNet-20", "LeNet", "VGG"))]


@pytest.mark.parametrize("name", SMALL)
def test_whatever_is_converted_can_be_saved_loaded_and_proven(name, tmp_path):
    network, shape = network_of(name, torch.float32)
    form, path, u = to_implicit(network.eval(), shape), tmp_path / "form.safetensors", torch.randn(2, *shape)
    save(form, path, certificate=True)
    assert torch.equal(load(path)(u), form(u)) and {finding.claim for finding in check(path)} == {"well-posed"}
    assert as_stored(path, folder=False).stated == "a form"
    if not 0 < form.sizes[0] < 200 or math.isinf(form.activation.lipschitz()):
        return
    model = form.to_model()
    save(model, path, certificate=True)
    assert torch.equal(load(path)(u.flatten(1)), model(u.flatten(1)))
    assert as_stored(path, folder=False).stated == "bit for bit"


def test_a_form_without_a_lipschitz_constant_makes_no_model():
    network = nn.Sequential(nn.Linear(4, 6), nn.GLU(), nn.Linear(3, 2))
    with pytest.raises(InputError, match="has no Lipschitz constant"):
        to_implicit(network, (4,)).to_model()
