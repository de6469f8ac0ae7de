"""What ONNX Runtime computes from an exported file is what the model computes."""

import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed.errors import InputError, MissingExtraError
from wellposed.models import DenseCell

TIGHT = {"kappa": 0.5, "stop": wp.Relative(1e-13), "max_steps": 500}
MODELS = {
    "implicit": (lambda: wp.ImplicitModel(3, 2, 6, bias=True, **TIGHT), (4, 3)),
    "recurrent": (lambda: wp.ImplicitRNN(2, 4, 5, out_features=2, batch_first=True, **TIGHT), (4, 3, 2)),
    "inside": (lambda: nn.Sequential(nn.Linear(3, 4), wp.DEQ(DenseCell(4, 6)), nn.Linear(6, 2)), (4, 3)),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["implicit", pytest.param("recurrent", marks=pytest.mark.slow), "inside"])
def test_runtime_agrees_with_the_model(name, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    make, shape = MODELS[name]
    model = make().double()
    error = wp.export_onnx(model, tmp_path / "model.onnx", torch.randn(shape, dtype=torch.float64), steps=40)
    assert model.training, "the model is left as it was"
    assert 0 < error < 1e-7
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    u = torch.randn(7, *shape[1:], dtype=torch.float64)  # another batch size
    expected = model(u) if name != "recurrent" else model(u)[0]
    (found, *_) = session.run(["y"], {"u": u.numpy()})
    torch.testing.assert_close(torch.tensor(found), expected.detach(), atol=1e-7, rtol=0)


def test_too_few_steps_are_told(tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    torch.manual_seed(0)
    model, u = wp.ImplicitModel(3, 2, 6, **TIGHT).double(), torch.randn(4, 3, dtype=torch.float64)
    error = wp.export_onnx(model, tmp_path / "model.onnx", u, steps=2, dynamic_batch=False)
    plain = wp.models.fixed_steps(model, 2)
    assert error == pytest.approx(float((plain(u) - model(u).detach()).abs().max())) and error > 1e-4


def test_wrong_examples(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    model = wp.ImplicitModel(3, 2, 6)
    with pytest.raises(InputError, match="at least two inputs"):
        wp.export_onnx(model, tmp_path / "model.onnx", torch.zeros(1, 3), steps=3)
    with pytest.raises(InputError, match="contains no ImplicitModel"):
        wp.export_onnx(nn.Linear(3, 2), tmp_path / "model.onnx", torch.zeros(2, 3), steps=3)
    assert not list(tmp_path.iterdir())


def test_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"wellposed\[share\]"):
        wp.export_onnx(wp.ImplicitModel(3, 2, 6), tmp_path / "model.onnx", torch.zeros(2, 3), steps=3)


FORMS = {
    "layers": lambda: wp.to_implicit(
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)),
        (2, 4, 4),
    ),
    "loop": lambda: wp.ImplicitForm(torch.tensor([[0.3, 0.4], [-0.5, 0.2]]), torch.eye(2), torch.ones(1, 2)),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", FORMS)
def test_forms_are_exported(name, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    form = FORMS[name]()
    error = wp.export_onnx(form, tmp_path / "form.onnx")  # shape and steps are the form's affair
    assert error < 1e-4
    session = runtime.InferenceSession(tmp_path / "form.onnx", providers=["CPUExecutionProvider"])
    u = torch.randn(7, *form.input_shape)
    (found,) = session.run(["y"], {"u": u.numpy()})
    torch.testing.assert_close(torch.tensor(found), form(u), atol=1e-4, rtol=0)


def test_shapes_that_are_not_known_are_asked_for(tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    with pytest.raises(InputError, match="give an example"):
        wp.export_onnx(wp.DEQ(DenseCell(3, 4)), tmp_path / "model.onnx")
