import copy
import pickle

import pytest
import torch
from oracles import picard

from wellposed import (
    Absolute,
    ErrorBound,
    Implicit,
    ImplicitModel,
    Phantom,
    Picard,
    Relative,
    Unrolled,
    certificate,
    load,
    save,
)
from wellposed.errors import FileFormatError, IllPosedError, InputError, UnknownNameError

VARIANTS = {
    "plain": {},
    "bias": {"bias": True},
    "no feedthrough": {"feedthrough": False},
    "low rank": {"rank": 2},
    "triangular": {"triangular": True},
    "triangular without cap": {"triangular": True, "kappa": None},
    "weighted": {"condition": "weighted"},
    "mu": {"condition": "mu"},
    "spectral": {"condition": "spectral"},
    "monotone": {"condition": "monotone"},
    "tanh": {"activation": "tanh"},
    "sigmoid above one": {"activation": "sigmoid", "kappa": 3.0},
    "softmax": {"activation": "softmax", "condition": "block"},
    "newton": {"solver": "newton"},
    "broyden": {"solver": "broyden"},
    "phantom": {"gradient": Phantom(40)},
    "unrolled": {"gradient": "unrolled"},
}


def build(variant, dtype=torch.float64, large=True, **options):
    torch.manual_seed(1)
    model = ImplicitModel(3, 2, 6, **{**VARIANTS[variant], **options}).to(dtype)
    if large:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(4 if name.startswith("state") and "log" not in name else 1)
                if name == "bias" or "log" in name:
                    parameter.normal_()
    return model


def inputs(batch=5, dtype=torch.float64):
    return torch.randn(batch, 3, dtype=dtype, generator=torch.Generator().manual_seed(2))


def reference(model, u):
    """Evaluates the model by its matrices alone."""
    bias = 0 if model.bias is None else model.bias
    x = model.equilibrium(u).value.detach()
    v = u @ model.B.mT + bias
    torch.testing.assert_close(x, model.activation(x @ model.A.mT + v).detach(), rtol=1e-8, atol=1e-8)
    return x @ model.C.mT + (0 if model.D is None else u @ model.D.mT)


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluates_its_own_matrices(variant):
    model, u = build(variant, stop=Relative(1e-12), max_steps=2000), inputs()
    torch.testing.assert_close(model(u), reference(model, u))
    assert certificate(model).holds
    assert model.equilibrium(u).converged.all()


def test_agrees_with_plain_iteration():
    model, u = build("bias", stop=Relative(1e-13)), inputs()
    x = picard(model.A.detach(), u @ model.B.detach().mT + model.bias.detach())
    torch.testing.assert_close(model.equilibrium(u).value.detach(), x, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("fast_mode", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fast", "whole"])
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ("broyden", "phantom")])
def test_gradcheck_above_kappa(variant, fast_mode):
    gradient = VARIANTS[variant].get("gradient", Implicit())
    model = build(variant, stop=Relative(1e-14), max_steps=4000, gradient=gradient)
    u = inputs(3).requires_grad_()
    names = [name for name, _ in model.named_parameters()]
    if "state.raw" in names and variant not in ("triangular without cap",):
        assert not torch.equal(model.A, model.state.raw)  # the projection is at work

    def run(u, *values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (u,))

    assert torch.autograd.gradcheck(run, (u, *model.parameters()), fast_mode=fast_mode)


@pytest.mark.parametrize("variant", ["plain", "low rank", "tanh", "weighted", "monotone"])
def test_implicit_equals_unrolled(variant):
    grads = []
    for gradient in (Implicit(), Unrolled()):
        model = build(variant, stop=Relative(1e-14), max_steps=4000, gradient=gradient)
        model(inputs()).square().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-8)


def test_second_derivatives():
    model = build("tanh", stop=Relative(1e-14))
    u = inputs(2).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda u: model(u), (u,))


def test_projection_in_place_keeps_the_function():
    for variant in ("plain", "low rank", "weighted", "mu", "spectral", "monotone", "triangular"):
        model, u = build(variant, stop=Relative(1e-12), max_steps=2000), inputs()
        before, A = model(u), model.A
        model.project_()
        torch.testing.assert_close(model.A, A)
        torch.testing.assert_close(model(u), before, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("variant", VARIANTS)
def test_module_hygiene(variant, tmp_path):
    model, u = build(variant), inputs()
    y = model(u)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(u), y)
    fresh = build(variant, large=False)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(u), y)
    save(model, tmp_path / "model.safetensors")
    loaded = load(tmp_path / "model.safetensors")
    assert torch.equal(loaded(u), y) and repr(loaded) == repr(model)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    torch.optim.swa_utils.AveragedModel(model).update_parameters(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    model = build("bias").to(dtype)
    y = model(inputs(dtype=dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), build("bias")(inputs()), rtol=0.1, atol=0.1)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_autocast():
    model, u = build("plain").float(), inputs().float()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(u)
        assert y.dtype == torch.bfloat16
        assert model.equilibrium(u).value.dtype == torch.float32
    torch.testing.assert_close(y.float(), model(u), rtol=0.05, atol=0.05)
    y.float().sum().backward()


def test_averaged_model_and_compile():
    model, u = build("plain"), inputs()
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    ema.update_parameters(model)
    assert torch.equal(ema(u), model(u))
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(u), model(u))
    compiled(u).sum().backward()
    assert model.B.grad is not None


def test_func_transforms():
    model, u = build("plain", stop=Relative(1e-13)), inputs()
    torch.testing.assert_close(torch.func.vmap(model)(u), model(u))
    jacobians = torch.func.vmap(torch.func.jacrev(model))(u)
    expected = torch.autograd.functional.jacobian(model, u)
    for i in range(len(u)):
        torch.testing.assert_close(jacobians[i], expected[i, :, i])


def test_leading_dimensions_and_empty_batch():
    model, u = build("plain"), inputs(6)
    torch.testing.assert_close(model(u.reshape(2, 3, 3)), model(u).reshape(2, 3, 2))
    assert model(u[0]).shape == (2,)
    assert model(u[:0]).shape == (0, 2)
    assert model.equilibrium(u[:0]).status.shape == (0,)
    model(u[:0]).sum().backward()


def test_warm_start_saves_steps():
    model, u = build("plain"), inputs()
    found = model.equilibrium(u)
    assert (model.equilibrium(u, x0=found.value.detach()).steps == 1).all()


def test_positive_homogeneity_without_bias():
    model, u = build("plain", stop=Relative(1e-13)), inputs()
    torch.testing.assert_close(model(1e4 * u), 1e4 * model(u), rtol=1e-10, atol=1e-10)


def test_from_matrices_keeps_every_bit():
    generator = torch.Generator().manual_seed(0)
    B, C = torch.randn(4, 3, generator=generator), torch.randn(2, 4, generator=generator)
    draw = torch.randn(4, 4, generator=generator)
    cases = {
        "inf": 0.2 * draw / draw.abs().sum(1).max(),
        "weighted": torch.tensor([[0, 4.0, 0, 0], [0.1, 0, 0, 0], [0, 0, 0.5, 0], [0, 0, 0, 0.9]]),
        "triangular": torch.diag(torch.tensor([-3.0, 0.5, 0.0, 0.9])) + 5 * draw.triu(1),
        "mu": torch.tensor([[-4.0, 2, 2, 0], [0.3, 0, 0.3, 0], [0, 0.9, 0, 0], [0.5, 0, 0, -2]]),
    }
    for condition, A in cases.items():
        model = ImplicitModel.from_matrices(A, B, C, solver=Picard())
        assert torch.equal(model.A, A)
        assert model.certificate().condition == condition
        u = torch.randn(5, 3, generator=generator)
        x = model.equilibrium(u)
        assert x.converged.all()
        torch.testing.assert_close(x.value, torch.relu(x.value @ A.mT + u @ B.mT), rtol=1e-4, atol=1e-4)
        model(u).sum().backward()


def test_from_matrices_refuses_what_it_cannot_certify():
    eye = torch.eye(2)
    with pytest.raises(IllPosedError, match=r"inf: 1\.5 >= 1 fails"):
        ImplicitModel.from_matrices(torch.tensor([[1.2, 0.3], [0.4, 1.1]]), eye, eye)
    with pytest.raises(IllPosedError, match="needs kappa of at least"):
        ImplicitModel.from_matrices(0.9 * eye, eye, eye, kappa=0.5, condition="inf")
    with pytest.raises(InputError, match="B must have the shape"):
        ImplicitModel.from_matrices(0.5 * eye, torch.ones(3, 1), eye)
    with pytest.raises(ValueError, match="finite"):
        ImplicitModel.from_matrices(0.5 * eye, eye * torch.nan, eye)
    with pytest.raises(InputError, match="leave rank out"):
        ImplicitModel.from_matrices(0.5 * eye, eye, eye, rank=1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_bad_inputs_are_refused(value):
    model = build("plain")
    u = inputs()
    with pytest.raises(InputError, match=r"width 3 \(in_features\); received \(5, 4\)"):
        model(torch.zeros(5, 4, dtype=torch.float64))
    u[2, 1] = value
    with pytest.raises(ValueError, match=r"u must be finite.*first at \(2, 1\)"):
        model(u)
    with pytest.raises(InputError, match=r"float32 and the model torch.float64"):
        model(inputs().float())
    with pytest.raises(InputError, match="x0 must have the shape"):
        model.equilibrium(inputs(), x0=torch.zeros(5, 2, dtype=torch.float64))
    with pytest.raises(InputError, match="u must have the shape"):
        model.equilibrium(inputs()[0])


def test_large_but_finite_inputs_pass():
    u = torch.full((4, 3), 3e38)
    model = build("plain").float()
    with torch.no_grad():
        model.B.mul_(1e-3)
    assert model(u).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kappa": 1.0}, "choose 0 < kappa < 1"),
        ({"activation": "sigmoid", "kappa": 4.0}, "choose 0 < kappa < 4"),
        ({"kappa": None}, "triangular=True"),
        ({"rank": 7}, "between 1 and state_features=6"),
        ({"rank": 2, "condition": "spectral"}, "condition 'inf' only"),
        ({"triangular": True, "condition": "mu"}, "cannot be combined"),
        ({"condition": "monotone", "activation": "tanh"}, "cannot apply"),
        ({"executor": "gpu"}, "unknown executor 'gpu'"),
        ({"max_steps": 0}, "at least 1"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises((InputError, UnknownNameError), match=message):
        ImplicitModel(3, 2, 6, **options)


def test_unknown_names():
    with pytest.raises(UnknownNameError, match="did you mean 'spectral'"):
        ImplicitModel(3, 2, 6, condition="spectrl")
    with pytest.raises(UnknownNameError, match="did you mean 'newton'"):
        ImplicitModel(3, 2, 6, solver="newtn")
    with pytest.raises(UnknownNameError, match="unknown activation"):
        ImplicitModel(3, 2, 6, activation="rleu")
    with pytest.raises(TypeError, match="kapa"):
        ImplicitModel(3, 2, 6, kapa=0.5)
    with pytest.raises(InputError, match="in_features must be a positive integer"):
        ImplicitModel(0, 2, 6)


def test_stop_by_error_bound():
    for variant in ("plain", "low rank", "bias", "monotone", "triangular"):
        model, u = build(variant, stop=ErrorBound(1e-6), max_steps=2000), inputs()
        found = model.equilibrium(u)
        exact = build(variant, stop=Relative(1e-14), max_steps=4000).equilibrium(u).value
        error = (found.value - exact).abs().amax(1)
        assert found.converged.all() and (error <= 1e-6).all() and (found.error_bound <= 1e-6).all()
        found.value.sum().backward()
        assert found.adjoint is not None and found.adjoint.converged.all()


def test_adjoint_is_reported():
    model = build("plain", gradient=Implicit(solver=Picard(), stop=Absolute(1e-12)))
    found = model.equilibrium(inputs())
    assert found.adjoint is None
    found.value.sum().backward()
    assert found.adjoint.converged.all() and found.adjoint.steps.min() > 1


def test_loading_a_bad_file(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError, match="no model file"):
        load(path)
    path.write_bytes(b"not a model")
    with pytest.raises(FileFormatError, match="damaged"):
        load(path)
    save(build("plain"), path)
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    with pytest.raises(FileFormatError):
        load(path)
    from safetensors.torch import save_file

    save_file({"B": torch.zeros(1)}, path)
    with pytest.raises(FileFormatError, match="was not written by"):
        load(path)
    with pytest.raises(InputError, match="received Linear"):
        save(torch.nn.Linear(1, 1), path)
