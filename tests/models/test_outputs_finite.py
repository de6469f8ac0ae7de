"""Outputs that are not finite are told of as failed solves are, whatever has computed them."""

import warnings

import pytest
import torch

import wellposed as wp
from wellposed.errors import ConvergenceError, ConvergenceWarning
from wellposed.models import DenseCell

ROADS = {
    "compiled": {},
    "plain": {"executor": "reference"},
    "low rank": {"rank": 2},
    "unrolled": {"gradient": "unrolled"},
    "float64": {},
}
SPOILT = {
    "NaN in C": lambda model: model.C.view(-1)[:1].fill_(torch.nan),
    "infinity in C": lambda model: model.C.view(-1)[:1].fill_(torch.inf),
    "NaN in D": lambda model: model.D.view(-1)[:1].fill_(torch.nan),
    "overflow": lambda model: (model.C.fill_(torch.finfo(model.C.dtype).max), model.bias.fill_(9.0)),
}


def spoilt(fault, **options):
    torch.manual_seed(0)
    model = wp.ImplicitModel(3, 2, 6, bias=True, **options)
    with torch.no_grad():
        SPOILT[fault](model)
    return model


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("fault", SPOILT)
@pytest.mark.parametrize("road", ROADS)
def test_outputs_that_are_not_finite_are_told_of_as_asked(road, fault, grad):
    dtype = torch.float64 if road == "float64" else torch.float32
    model, u = spoilt(fault, **ROADS[road]).to(dtype), torch.ones(2, 3, dtype=dtype)
    if fault == "overflow":
        with torch.no_grad():
            SPOILT[fault](model)
    with torch.set_grad_enabled(grad):
        with pytest.warns(ConvergenceWarning, match="2 of 2 samples have NaN or infinite outputs") as told:
            y = model(u)
        assert len(told) == 1 and not y.isfinite().all() and told[0].filename == __file__
        model.on_failure = "raise"
        with pytest.raises(ConvergenceError, match="float64"):
            model(u)
        model.on_failure = "ignore"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(u)


def test_only_the_samples_concerned_are_counted():
    model = wp.ImplicitModel.from_matrices(torch.zeros(1, 1), torch.ones(1, 1), torch.full((1, 1), 1e30))
    with pytest.warns(ConvergenceWarning, match="1 of 3 samples have NaN"):
        model(torch.tensor([[1.0], [1e15], [2.0]]))


def test_large_outputs_are_no_failure():
    """Their sum is infinite and they are not."""
    model = wp.ImplicitModel.from_matrices(torch.zeros(1, 1), torch.ones(1, 1), torch.full((1, 1), 2e38))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(torch.ones(4, 1)).isfinite().all()


@pytest.mark.parametrize("executor", ["auto", "reference"])
def test_a_solve_that_has_failed_is_told_of_once(executor):
    model = wp.ImplicitModel(3, 2, 6, bias=True, executor=executor)
    with torch.no_grad():
        model.bias[0] = torch.nan
    with pytest.warns(ConvergenceWarning) as told:
        model(torch.ones(2, 3))
    assert len(told) == 1 and "equilibrium" in str(told[0].message)


@pytest.mark.parametrize("executor", ["auto", "reference"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("part", ["C", "readout"])
def test_sequences(part, steps, executor):
    torch.manual_seed(0)
    model = wp.ImplicitRNN(3, 4, 6, out_features=2, executor=executor, batch_first=True)
    with torch.no_grad():
        (model.cell(0).C if part == "C" else model.readout.weight).view(-1)[0] = torch.nan
    with pytest.warns(ConvergenceWarning) as told:
        model(torch.ones(1, steps, 3))
    assert len(told) == 1
    model.cell(0).on_failure = "raise"
    with pytest.raises(ConvergenceError):
        model(torch.ones(1, steps, 3))


def test_models_under_noise():
    model = wp.models.Noisy(spoilt("NaN in D", stop=wp.Steps(5)), wp.models.Noise(signal=1e-3))
    with pytest.warns(ConvergenceWarning, match="infinite outputs"):
        model(torch.ones(2, 3))


WEIGHTS = {
    "model": (lambda: wp.ImplicitModel(3, 2, 4, bias=True), (2, 3), ("state.raw", "B", "bias")),
    "low rank": (lambda: wp.ImplicitModel(3, 2, 4, rank=2), (2, 3), ("state.left", "state.right", "B")),
    "reference": (lambda: wp.ImplicitModel(3, 2, 4, executor="reference"), (2, 3), ("state.raw", "B")),
    "monotone": (lambda: wp.ImplicitModel(3, 2, 4, condition="monotone"), (2, 3), ("state.raw", "B")),
    "recurrent": (
        lambda: wp.ImplicitRNN(3, 2, 4, num_layers=2, batch_first=True),
        (2, 5, 3),
        ("cells.0.state.raw", "cells.1.B"),
    ),
    "deq": (
        lambda: wp.DEQ(DenseCell(3, 4)),
        (2, 3),
        ("input.weight", "input.bias", "layers.0.weight", "layers.0.bias"),
    ),
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in WEIGHTS for name in WEIGHTS[kind][2]])
def test_a_weight_that_is_not_finite_is_named(kind, name, grad, value):
    make, shape, _ = WEIGHTS[kind]
    model, u = make(), torch.ones(shape)
    with torch.set_grad_enabled(grad):
        model(u)  # seen while it was sound
        with torch.no_grad():
            dict((model.cell if kind == "deq" else model).named_parameters())[name].view(-1)[1] = value
        with pytest.warns(ConvergenceWarning, match=f"'{name}' holds 1 of .* NaN or infinite") as told:
            y = model(u)
        y = y[0] if kind == "recurrent" else y
        assert len(told) == 1 and "max_steps" not in str(told[0].message) and told[0].filename == __file__
        assert y.isnan().all() and y.requires_grad == grad
        with pytest.warns(ConvergenceWarning, match=name):
            model(u)  # and again, as it is still so


def test_a_spoilt_weight_is_a_status_of_every_sample_and_a_policy():
    model, u = wp.ImplicitModel(3, 2, 4, on_failure="ignore"), torch.ones(2, 3)
    with torch.no_grad():
        model.B[1, 1] = torch.nan
    solution = model.equilibrium(u)
    assert (solution.status == wp.Status.NONFINITE).all() and solution.value.isnan().all()
    model(u).sum().backward()
    assert model.B.grad.isnan().any()
    model.on_failure = "raise"
    with pytest.raises(ConvergenceError, match=r"'B' holds 1 of 12 entries .* the first at \(1, 1\)"):
        model(u)
    with torch.no_grad():
        model.B.fill_(3e38)  # whose sum overflows, and nothing else
    model.on_failure = "ignore"
    assert not model.weight_check.failed(model.state_weights(), "raise")


@pytest.mark.parametrize("executor", ["auto", "reference"])
@pytest.mark.parametrize("grad", [True, False])
def test_compiled_models_and_vmap_tell_of_outputs_too(executor, grad):
    model, u = spoilt("NaN in C", executor=executor), torch.ones(4, 2, 3)
    for call in (torch.compile(model, backend="eager"), torch.func.vmap(model)):
        with torch.set_grad_enabled(grad), pytest.warns(ConvergenceWarning, match="infinite outputs"):
            assert call(u).isnan().any()
    model.on_failure = "raise"
    for call in (torch.compile(model, backend="eager"), torch.func.vmap(model)):
        with pytest.raises(ConvergenceError, match="infinite outputs"):
            call(u)


def test_checked_outputs_pass_gradients_through_compiled_graphs():
    torch.manual_seed(0)
    model, u = wp.ImplicitModel(3, 2, 6), torch.rand(4, 3)
    found = []
    for call in (model, torch.compile(model, backend="eager")):
        call(u).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))


def test_compiled_sequences_tell_of_a_readout_that_is_not_finite():
    torch.manual_seed(0)
    model = wp.ImplicitRNN(3, 4, 6, out_features=2, batch_first=True)
    with torch.no_grad():
        model.readout.weight[0, 0] = torch.nan
    with pytest.warns(ConvergenceWarning, match="infinite outputs"):
        torch.compile(model, backend="eager")(torch.ones(1, 3, 3))
