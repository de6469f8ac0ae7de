"""What people try who come from torch, numpy or the command line: it works, or one line says what to do."""

import contextlib
import os
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wellposed as wp
from benchmarks.solve import memory
from wellposed.activations import get_activation
from wellposed.errors import InputError, UnknownNameError, unknown_name
from wellposed.models import DenseCell


class Branching(nn.Module):
    """Control flow that depends on values, which no tracer can follow."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, u):
        return torch.relu(self.layer(u)) if u.sum() > 0 else self.layer(u)


NETWORK = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
CONVOLUTIONS = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()


@pytest.mark.parametrize(
    "build",
    [
        lambda **k: wp.ImplicitModel(3, 2, 4, **k),
        lambda **k: wp.ImplicitRNN(3, 4, 5, **{"batch_first": True, **k}),
    ],
)
@pytest.mark.parametrize("kappa", ["0.9", [0.9], (0.9,)])
def test_kappa_is_a_number(build, kappa):
    with pytest.raises(InputError, match="kappa must be a number; received"):
        build(kappa=kappa)
    assert build(kappa=np.float32(0.5)) is not None


@pytest.mark.parametrize(
    ("typed", "meant"), [("Relu", "relu"), ("ReLU", "relu"), ("TANH", "tanh"), ("Elu", "elu")]
)
def test_names_are_compared_without_case(typed, meant):
    with pytest.raises(UnknownNameError, match=f"did you mean '{meant}'"):
        wp.ImplicitModel(3, 2, 4, activation=typed)


def test_the_nearest_name_keeps_its_own_case():
    assert "did you mean 'MNIST'" in str(unknown_name("data set", "minst", ["CIFAR", "MNIST"]))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (nn.ReLU(), "relu"),
        (nn.ReLU, "relu"),
        (torch.relu, "relu"),
        (F.relu, "relu"),
        (nn.Tanh(), "tanh"),
        (torch.sigmoid, "sigmoid"),
        (F.silu, "silu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.LeakyReLU(0.25), "leaky_relu(0.25)"),
        (nn.ELU(0.5), "elu(0.5)"),
        (nn.Hardtanh(0.0, 2.0), "hardtanh(0.0, 2.0)"),
        (nn.Softplus(2.0), "softplus(2.0)"),
        (nn.Softshrink(0.25), "softshrink(0.25)"),
        (nn.Identity(), "identity"),
    ],
)
def test_layers_and_functions_of_torch_are_activations(given, name):
    activation, z = get_activation(given), torch.linspace(-4, 4, 41)
    assert activation.name == name
    function = given() if isinstance(given, type) else given
    torch.testing.assert_close(activation(z), function(z))
    wp.ImplicitModel(3, 2, 4, activation=given, kappa=0.3)
    assert wp.ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.eye(2), activation=given).activation.name == name


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (lambda z: z, "an activation is a name, a layer such as nn.ReLU()"),
        (nn.PReLU(), "received PReLU"),
        (torch.exp, "received exp"),
        (nn.Hardshrink(), "it jumps"),
        (F.hardshrink, "it jumps"),
    ],
)
def test_other_functions_are_refused(given, complaint):
    with pytest.raises(InputError, match=complaint.replace("(", r"\(").replace(")", r"\)")):
        wp.ImplicitModel(3, 2, 4, activation=given)


MODELS = {
    "u": [
        lambda u: wp.ImplicitModel(2, 2, 4)(u),
        lambda u: wp.ImplicitModel(2, 2, 4).equilibrium(u),
        lambda u: wp.DEQ(DenseCell(2, 4))(u),
        lambda u: wp.to_implicit(nn.Linear(2, 2), (2,))(u),
    ],
    "input": [lambda u: wp.ImplicitRNN(2, 2, 4, batch_first=True)(u)],
    "loader": [lambda u: wp.record_states(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), np.asarray(u))],
}


@pytest.mark.parametrize(("name", "call"), [(name, call) for name, calls in MODELS.items() for call in calls])
@pytest.mark.parametrize("u", [np.ones((3, 2), dtype=np.float32), [[1.0, 2.0]]], ids=["array", "list"])
def test_arrays_and_lists_are_told_apart_from_tensors(name, call, u):
    with pytest.raises(InputError, match=rf"{name} must be a tensor; .* torch\.as_tensor\({name}\)"):
        call(u)


def test_states_are_recorded_from_one_tensor():
    data = torch.randn(6, 4)
    torch.testing.assert_close(wp.record_states(NETWORK, data).X, wp.record_states(NETWORK, [data]).X)
    with pytest.raises(InputError, match="u must be a tensor; received ndarray"):
        wp.record_states(NETWORK, [data.numpy()])


@pytest.mark.parametrize(
    ("network", "shape", "complaint"),
    [
        (NETWORK, (5,), "Linear at '0'.* takes 4 features; received 5"),
        (CONVOLUTIONS, (3, 10, 10), "Linear at '3'.* takes 144 features; received 256"),
        (CONVOLUTIONS, (1, 8, 8), "Conv2d at '0'.* takes 3 channels; received 1"),
    ],
)
def test_a_wrong_shape_names_the_layer_and_the_sizes(network, shape, complaint):
    with pytest.raises(wp.convert.UnsupportedError, match=complaint):
        wp.to_implicit(network, shape)


@pytest.mark.parametrize("steps", [0, -1, "10", 2.5])
def test_max_steps_is_at_least_one(steps):
    for call in (
        lambda: wp.ImplicitModel(3, 2, 4, max_steps=steps),
        lambda: wp.fixed_point(torch.cos, torch.zeros(1, 1), max_steps=steps),
        lambda: wp.DEQ(DenseCell(3, 4), max_steps=steps),
    ):
        with pytest.raises(
            InputError, match=r"max_steps must be at least 1, a whole number below 2\^31; received"
        ):
            call()
    if not isinstance(steps, str) and steps < 1:
        with pytest.raises(InputError, match="max_steps must be at least 1"):
            wp.Implicit(max_steps=steps)


def test_a_missing_folder_is_not_a_full_disk(tmp_path):
    model, place = wp.ImplicitModel(3, 2, 4), tmp_path / "nowhere" / "model.safetensors"
    for options in ({}, {"certificate": True}):
        with pytest.raises(FileNotFoundError, match="there is no such folder") as caught:
            wp.save(model, place, **options)
        assert "disk" not in str(caught.value) and "model.safetensors" in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="a file where a folder should be"):
        wp.save(model, tmp_path / "file" / "model.safetensors")


@contextlib.contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.skipif(sys.platform == "win32", reason="rights of files are those of POSIX")
@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_have_the_rights_of_the_user(tmp_path, mask):
    with umask(mask):
        wp.save(wp.ImplicitModel(3, 2, 4), tmp_path / "model.safetensors", certificate=True)
        wp.save(wp.ImplicitModel(3, 2, 4), tmp_path / "model.safetensors", certificate=True)  # over the old one
        wp.models.save_pretrained(wp.ImplicitModel(3, 2, 4), tmp_path / "folder")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 2
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {oct(0o666 & ~mask)}


def test_nothing_is_printed_before_an_error(capfd, tmp_path):
    with pytest.raises(wp.convert.UnsupportedError, match="can be traced neither"):
        wp.to_implicit(Branching(), (4,))
    network = nn.Sequential(wp.ImplicitModel(4, 4, 4), Branching())
    with pytest.raises(InputError, match=r"torch\.onnx cannot export Sequential.* depend on data"):
        wp.export_onnx(network, tmp_path / "model.onnx", torch.randn(3, 4), steps=3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_benchmark_for_a_gpu_says_that_there_is_none(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["memory", "--quick", "--device", "cuda"])
    with pytest.raises(SystemExit, match="this benchmark needs a CUDA device, and torch finds none here"):
        memory.main()


def test_sizes_of_numpy_are_sizes(tmp_path):
    p, q, n = np.int64(3), np.int32(2), np.int64(4)
    model = wp.ImplicitModel(p, q, n)
    assert type(model.in_features) is type(model.out_features) is type(model.state_features) is int
    wp.save(model, tmp_path / "model.safetensors")
    assert wp.load(tmp_path / "model.safetensors").state_features == 4
    assert wp.ImplicitRNN(p, q, n, num_layers=np.int64(2), out_features=q, batch_first=True)(torch.zeros(1, 2, 3))[
        0
    ].shape == (
        1,
        2,
        2,
    )
    assert wp.DEQ(DenseCell(p, n), state_shape=n)(torch.zeros(1, 3)).shape == (1, 4)
    assert wp.to_implicit(NETWORK, (np.int64(4),)).sizes == wp.to_implicit(NETWORK, np.int64(4)).sizes == (8, 4, 2)
    for wrong in (True, 2.0, "3", np.float64(3), 0, -1, None):
        with pytest.raises(InputError, match="in_features must be a positive integer"):
            wp.ImplicitModel(wrong, 2, 4)


def test_forms_convert_like_modules():
    form, u = wp.to_implicit(NETWORK, (4,)), torch.randn(3, 4)
    expected = NETWORK(u)
    wide = form.double()
    assert wide.dtype == torch.float64 and form.dtype == torch.float32
    torch.testing.assert_close(wide(u.double()).float(), expected)
    assert wide.float().dtype == torch.float32 and form.half().dtype == torch.float16
    assert form.bfloat16().dtype == torch.bfloat16 and form.cpu().device.type == "cpu"
    assert form.eval() is form and form.train(False) is form
    with pytest.raises(InputError, match=r"form = form\.to\(torch\.float64\)"):
        form(u.double())
    with pytest.raises(InputError, match="to_model"):
        form.train()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_form_without_a_cuda_device_says_so():
    with pytest.raises(InputError, match="no CUDA device"):
        wp.to_implicit(NETWORK, (4,)).cuda()


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.5), nn.BatchNorm1d(8), nn.RReLU(), wp.models.VariationalDropout(0.5)], ids=str
)
def test_a_network_in_training_mode_is_warned_of(layer):
    network = nn.Sequential(nn.Linear(4, 8), layer, nn.ReLU(), nn.Linear(8, 2)).train()
    with pytest.warns(UserWarning, match=f"{type(layer).__name__} at '1' .* its evaluation mode is converted"):
        form = wp.to_implicit(network, (4,))
    u = torch.randn(5, 4)
    assert network.training
    torch.testing.assert_close(form(u), network.eval()(u))


def test_networks_without_a_difference_are_not_warned_of(recwarn):
    wp.to_implicit(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.ReLU()).train(), (4,))
    wp.to_implicit(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).eval(), (4,))
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]
