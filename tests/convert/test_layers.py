"""Every layer alone, over its settings, against the layer itself."""

import itertools

import pytest
import torch
from torch import nn

from wellposed.convert import UnsupportedError, to_implicit
from wellposed.errors import InputError


def check(network, shape, dtype=torch.float64, batch=3):
    """Compares a network in evaluation mode with its form; returns the form."""
    torch.manual_seed(0)
    network = network.to(dtype).eval()
    for part in network.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name.startswith("running"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.LayerNorm | nn.GroupNorm):
            for parameter in part.parameters():
                parameter.data.uniform_(-1.5, 1.5)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # of layers without weights
    form = to_implicit(network, shape)
    torch.set_default_dtype(before)
    u = 2 * torch.randn(batch, *shape, dtype=dtype)
    with torch.no_grad():
        expected = network(u.clone())
    expected = (expected[0] if isinstance(expected, tuple) else expected).reshape(batch, -1)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-10}[dtype] * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(form(u), expected, rtol=0, atol=tolerance)
    return form


CONVOLUTIONS = {1: (nn.Conv1d, (4, 11)), 2: (nn.Conv2d, (4, 9, 8)), 3: (nn.Conv3d, (4, 5, 6, 5))}
SETTINGS = [
    {},
    {"stride": 2},
    {"padding": 2},
    {"stride": 3, "padding": 1},
    {"dilation": 2},
    {"stride": 2, "padding": 1, "dilation": 2},
    {"groups": 2},
    {"groups": 4, "stride": 2, "padding": 1},
    {"bias": False},
    {"padding": "same"},
    {"padding": "same", "dilation": 2, "kernel_size": 2},
    {"padding": "same", "kernel_size": 2},
    {"padding": "valid"},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 2, "padding_mode": "replicate", "stride": 2},
    {"padding": 1, "padding_mode": "circular", "groups": 2},
]


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_convolution(dimensions, settings):
    kind, shape = CONVOLUTIONS[dimensions]
    check(kind(4, 8, **{"kernel_size": 3, **settings}), shape)


def test_convolution_with_different_settings_in_each_dimension():
    layer = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 3))
    check(layer, (2, 9, 8), torch.float32)
    check(nn.Conv2d(2, 3, (3, 4), padding="same", padding_mode="replicate"), (2, 9, 8))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stride": 2},
        {"stride": 3, "padding": 1, "output_padding": 2},
        {"stride": 2, "dilation": 3, "padding": 2, "output_padding": 1},
        {"dilation": 2, "output_padding": 1},
        {"groups": 2, "stride": 2, "bias": False},
    ],
    ids=str,
)
def test_transposed_convolution(dimensions, settings):
    kinds = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
    shape = (4, 7, 5, 4)[: dimensions + 1]
    check(kinds[dimensions](4, 6, 3, **settings), shape)


POOLS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 2, "stride": 3},
    {"kernel_size": 1, "stride": 2},
]


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("settings", [*POOLS, {"kernel_size": 2, "dilation": 3, "padding": 1}], ids=str)
def test_max_pool(dimensions, settings):
    kinds = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
    form = check(kinds[dimensions](**settings), (2, 8, 7, 6)[: dimensions + 1])
    assert all(phi.lipschitz("inf") == 1 for phi in form.activations)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        *POOLS,
        {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
        {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False, "ceil_mode": True},
        {"kernel_size": 3, "padding": 1, "divisor_override": 5},
    ],
    ids=str,
)
def test_average_pool(dimensions, settings):
    if dimensions == 1 and "divisor_override" in settings:
        pytest.skip("torch has no such setting in one dimension")
    kinds = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
    form = check(kinds[dimensions](**settings), (2, 8, 7, 6)[: dimensions + 1])
    assert form.sizes[0] == 0


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("output", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["Avg", "Max"])
def test_adaptive_pool(dimensions, output, kind):
    layer = getattr(nn, f"Adaptive{kind}Pool{dimensions}d")(output)
    check(layer, (2, 8, 7, 6)[: dimensions + 1])


def test_adaptive_pool_of_each_dimension():
    check(nn.AdaptiveAvgPool2d((3, None)), (2, 8, 7))
    check(nn.AdaptiveMaxPool2d((None, 2)), (2, 8, 7))


NORMS = {
    "BatchNorm1d of features": (nn.BatchNorm1d(5), (5,)),
    "BatchNorm1d": (nn.BatchNorm1d(5), (5, 4)),
    "BatchNorm2d": (nn.BatchNorm2d(5, eps=0.1), (5, 4, 3)),
    "BatchNorm3d": (nn.BatchNorm3d(5), (5, 4, 3, 2)),
    "BatchNorm without weights": (nn.BatchNorm2d(5, affine=False), (5, 4, 3)),
    "LayerNorm": (nn.LayerNorm(6), (5, 6)),
    "LayerNorm of two dimensions": (nn.LayerNorm((5, 6), eps=1e-2), (4, 5, 6)),
    "LayerNorm without weights": (nn.LayerNorm(6, elementwise_affine=False), (5, 6)),
    "LayerNorm without bias": (nn.LayerNorm(6, bias=False), (5, 6)),
    "GroupNorm": (nn.GroupNorm(2, 6), (6, 4, 3)),
    "GroupNorm of sequences": (nn.GroupNorm(3, 6, eps=0.1), (6, 4)),
    "InstanceNorm1d": (nn.InstanceNorm1d(5), (5, 4)),
    "InstanceNorm2d": (nn.InstanceNorm2d(5, affine=True), (5, 4, 3)),
    "InstanceNorm2d with statistics": (nn.InstanceNorm2d(5, affine=True, track_running_stats=True), (5, 4, 3)),
    "InstanceNorm3d": (nn.InstanceNorm3d(5), (5, 4, 3, 2)),
    "RMSNorm": (nn.RMSNorm(6), (5, 6)),
    "RMSNorm with eps": (nn.RMSNorm((5, 6), eps=0.3), (5, 6)),
}


@pytest.mark.parametrize("name", NORMS)
def test_normalisation(name):
    layer, shape = NORMS[name]
    check(layer, shape)


def test_batch_norm_is_folded():
    form = check(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (3, 8, 8))
    assert type(form.B.parts[0, 0]).__name__ == "Convolution" and len(form.partition) == 1
    form = check(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()), (3,))
    assert type(form.B.parts[0, 0]).__name__ == "Dense"


def test_batch_norm_without_statistics_is_refused():
    with pytest.raises(UnsupportedError, match=r"BatchNorm2d at '1'.*running statistics"):
        to_implicit(nn.Sequential(nn.Identity(), nn.BatchNorm2d(3, track_running_stats=False)), (3, 4, 4))


ACTIVATIONS = [
    nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.LeakyReLU(), nn.LeakyReLU(0.3), nn.LeakyReLU(-0.2),
    nn.PReLU(), nn.PReLU(4), nn.ELU(), nn.ELU(0.4), nn.CELU(), nn.CELU(2.5), nn.SELU(), nn.GELU(),
    nn.GELU(approximate="tanh"), nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.Hardsigmoid(), nn.Hardtanh(),
    nn.Hardtanh(-0.3, 1.4), nn.Softplus(), nn.Softplus(2.0), nn.Softsign(), nn.Tanh(), nn.Tanhshrink(),
    nn.Softshrink(), nn.Softshrink(0.2), nn.Sigmoid(), nn.LogSigmoid(), nn.Softmax(1), nn.Softmax(-1),
    nn.Softmax2d(), nn.Softmin(2), nn.LogSoftmax(1), nn.LogSoftmax(-1), nn.GLU(1), nn.GLU(-1), nn.RReLU(),
    nn.Threshold(0.3, 0.3), nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout(), nn.Identity(),
]  # fmt: skip


@pytest.mark.parametrize("layer", ACTIVATIONS, ids=str)
def test_activation(layer):
    if isinstance(layer, nn.PReLU):
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-0.4, 1.5, len(layer.weight)))
    check(layer, (4, 3, 6))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Hardshrink(), "jumps at"),
        (nn.Threshold(0.1, 0.0), "jumps"),
        (nn.Bilinear(3, 3, 2), "Bilinear at '0' has no implicit form yet; register a rule with"),
        (nn.MaxPool1d(2, return_indices=True), "MaxPool1d at '0': .* indices"),
        (nn.CosineSimilarity(), "CosineSimilarity at '0'"),
        (nn.Softplus(threshold=3.0), "Softplus at '0'.*threshold"),
        (nn.Softmax(0), "mixes samples"),
    ],
    ids=str,
)
def test_refused_layers_say_where_and_why(layer, reason):
    with pytest.raises(UnsupportedError, match=reason):
        to_implicit(nn.Sequential(layer), (4, 3))


RESHAPING = {
    "flatten": (nn.Flatten(), (2, 3, 4)),
    "flatten some": (nn.Flatten(2), (2, 3, 4)),
    "unflatten": (nn.Unflatten(1, (2, 3)), (6, 4)),
    "pixel shuffle": (nn.PixelShuffle(2), (8, 3, 4)),
    "pixel unshuffle": (nn.PixelUnshuffle(2), (2, 4, 6)),
    "channel shuffle": (nn.ChannelShuffle(2), (6, 3, 3)),
    "reflection pad": (nn.ReflectionPad2d((1, 2, 0, 1)), (2, 4, 5)),
    "replication pad": (nn.ReplicationPad1d(2), (2, 4)),
    "circular pad": (nn.CircularPad2d(1), (2, 4, 5)),
    "zero pad": (nn.ZeroPad2d((1, 0, 2, 1)), (2, 4, 5)),
    "constant pad": (nn.ConstantPad1d((2, 1), -1.5), (2, 4)),
    "cropping pad": (nn.ZeroPad2d((-1, 0, 2, -1)), (2, 4, 5)),
    "nearest": (nn.Upsample(scale_factor=2), (2, 3, 4)),
    "nearest to a size": (nn.Upsample(size=(5, 3)), (2, 3, 4)),
    "nearest-exact": (nn.Upsample(size=7, mode="nearest-exact"), (2, 4)),
    "linear": (nn.Upsample(scale_factor=3, mode="linear"), (2, 4)),
    "bilinear": (nn.Upsample(scale_factor=(2, 1.5), mode="bilinear"), (2, 3, 4)),
    "bilinear, corners": (nn.Upsample(size=(5, 7), mode="bilinear", align_corners=True), (2, 3, 4)),
    "trilinear": (nn.Upsample(scale_factor=2, mode="trilinear"), (2, 3, 2, 3)),
    "bicubic": (nn.Upsample(scale_factor=2, mode="bicubic"), (2, 3, 4)),
    "bicubic, corners": (nn.Upsample(size=(4, 6), mode="bicubic", align_corners=True), (2, 3, 4)),
    "area": (nn.Upsample(size=(2, 3), mode="area"), (2, 5, 4)),
}


@pytest.mark.parametrize("name", RESHAPING)
def test_layers_that_move_or_mix_entries(name):
    layer, shape = RESHAPING[name]
    assert check(layer, shape).sizes[0] == 0


@pytest.mark.parametrize(("shape", "bias"), list(itertools.product([(4,), (3, 4), (2, 3, 4)], [True, False])))
def test_linear(shape, bias):
    check(nn.Sequential(nn.Linear(4, 5, bias=bias), nn.Tanh(), nn.Linear(5, 2, bias=bias)), shape)


def test_input_shape_must_fit():
    with pytest.raises(UnsupportedError, match="Linear at '0': it takes 4 features; received 3"):
        to_implicit(nn.Sequential(nn.Linear(4, 5)), (3,))
    with pytest.raises(InputError, match="without the batch"):
        to_implicit(nn.Linear(4, 5), (-1, 4))
