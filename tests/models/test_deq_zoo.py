"""What every ready cell and the multiscale model must satisfy."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call

from wellposed import Anderson, Broyden, Implicit, Newton, Phantom, Picard, Relative, Unrolled
from wellposed.equilibrium import watch
from wellposed.models.cells import ConvCell, DenseCell, MultiscaleCell, PlainConvCell, RecallCell, TransformerCell
from wellposed.models.deq import DEQ
from wellposed.models.multiscale import MultiscaleDEQ
from wellposed.models.norms import VariationalDropout, remove_norms, spectral_norm, weight_norm

CELLS = {
    "dense": (lambda **_: DenseCell(3, 6), (3,)),
    "deep dense": (lambda **_: DenseCell(3, 6, depth=2, projection="silu"), (3,)),
    "plain convolution": (lambda **_: PlainConvCell(1, 4), (1, 7)),
    "recall": (lambda **_: RecallCell(2, 4, dims=2), (2, 4, 3)),
    "convolution": (lambda **options: ConvCell(2, 4, groups=2, **options), (2, 4, 3)),
    "sequence convolution": (lambda **options: ConvCell(2, 4, groups=2, dims=1, **options), (2, 7)),
    "transformer": (lambda **options: TransformerCell(6, 2, 8, **options), (5, 6)),
    "causal transformer": (lambda **options: TransformerCell(6, 2, 8, causal=True, **options), (5, 6)),
    "multiscale": (lambda **options: MultiscaleCell((4, 6), groups=2, **options), (4, 6, 5)),
}
WITH_DROPOUT = ["convolution", "sequence convolution", "transformer", "multiscale"]
EVERYTHING = [*CELLS, "model"]
TIGHT = {"stop": Relative(1e-12), "max_steps": 500}


def build(name, dtype=torch.float64, cell_options=None, **options):
    torch.manual_seed(1)
    if name == "model":
        sizes = {"channels": (4, 6), "head_channels": (4, 5), "final_channels": 8, "groups": 2}
        return MultiscaleDEQ(2, 3, weight_norm=False, **sizes, **{"solver": "anderson", **options}).to(dtype)
    return DEQ(CELLS[name][0](**(cell_options or {})), **options).to(dtype)


def inputs(name, batch=4, dtype=torch.float64, seed=2):
    shape = (2, 6, 5) if name == "model" else CELLS[name][1]
    return torch.randn(batch, *shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def flat(value):
    """Joins the parts of an output."""
    parts = (value,) if isinstance(value, torch.Tensor) else value
    return torch.cat([part.flatten(1) for part in parts], 1)


def parameter_gradients(model, u):
    model.zero_grad()
    flat(model(u)).sin().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", EVERYTHING)
def test_copies_agree(name):
    model, u = build(name).eval(), inputs(name)
    value = flat(model(u))
    assert torch.equal(flat(copy.deepcopy(model)(u)), value)
    assert torch.equal(flat(pickle.loads(pickle.dumps(model))(u)), value)
    other = build(name).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.2)
    assert not torch.allclose(flat(other(u)), value)
    other.load_state_dict(model.state_dict())
    assert torch.equal(flat(other(u)), value)


@pytest.mark.parametrize("name", EVERYTHING)
def test_precision_can_be_changed(name):
    model, u = build(name).eval(), inputs(name)
    value = flat(model(u))
    single = flat(model.float()(u.float()))
    assert value.dtype == torch.float64 and single.dtype == torch.float32
    torch.testing.assert_close(single.double(), value, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", EVERYTHING)
def test_functional_call(name):
    model, u = build(name).eval(), inputs(name)
    changed = {key: value.detach() * 0.9 for key, value in model.named_parameters()}
    value = flat(functional_call(model, changed, (u,)))
    assert not torch.allclose(value, flat(model(u)))
    model.load_state_dict(changed, strict=False)
    torch.testing.assert_close(value, flat(model(u)))


@pytest.mark.parametrize("name", CELLS)
def test_value_is_a_fixed_point_in_both_modes(name):
    model, u = build(name, **TIGHT), inputs(name)
    for training in (True, False):
        found = model.train(training).equilibrium(u)
        assert found.converged.all()
        torch.testing.assert_close(flat(model.cell(found.value, u)), flat(found.value), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", EVERYTHING)
def test_implicit_gradient_equals_the_unrolled_one(name):
    model, other, u = build(name, **TIGHT), build(name, gradient=Unrolled(), **TIGHT), inputs(name)
    implicit, unrolled = parameter_gradients(model, u), parameter_gradients(other, u)
    assert implicit.keys() == unrolled.keys() == dict(model.named_parameters()).keys()
    for key, gradient in implicit.items():
        torch.testing.assert_close(gradient, unrolled[key], rtol=1e-7, atol=1e-7, msg=key)


@pytest.mark.parametrize("name", CELLS)
def test_gradient_of_the_input_equals_the_unrolled_one(name):
    u = inputs(name).requires_grad_()
    one, other = (
        torch.autograd.grad(flat(build(name, gradient=rule, **TIGHT)(u)).sin().sum(), u)[0]
        for rule in (Implicit(), Unrolled())
    )
    assert one.ne(0).any()
    torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("gradient", [Implicit(), Unrolled(), Phantom(60)], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden(), Newton()], ids=lambda s: type(s).__name__)
def test_gradcheck(solver, gradient):
    torch.manual_seed(0)
    cell = DenseCell(2, 3, projection="identity").double()
    model = DEQ(cell, solver=solver, gradient=gradient, stop=Relative(1e-13), max_steps=300)
    names = [name for name, _ in model.named_parameters()]

    def value(u, *parameters):
        return functional_call(model, dict(zip(names, parameters, strict=True)), (u,))

    parameters = [p.detach().requires_grad_() for p in model.parameters()]
    u = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(value, (u, *parameters), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("name", EVERYTHING)
def test_sample_alone_equals_sample_in_company(name):
    model, u = build(name, **TIGHT).eval(), inputs(name, batch=6)
    u = u * torch.logspace(-0.5, 0.5, 6).double().reshape(-1, *[1] * (u.dim() - 1))
    together, alone = model.equilibrium(u), [model.equilibrium(sample[None]) for sample in u]
    values = torch.cat([flat(solution.value) for solution in alone])
    torch.testing.assert_close(values, flat(together.value), rtol=1e-8, atol=1e-8)
    assert torch.equal(torch.cat([solution.steps for solution in alone]), together.steps)


class AbsoluteForm(nn.Module):
    """x = rate W drop(x) + u, with a rate for every sample: some are done at once and some go on for long."""

    def __init__(self, size):
        super().__init__()
        W = torch.randn(size, size, dtype=torch.float64)
        self.W, self.drop = W / torch.linalg.matrix_norm(W, 2), VariationalDropout(0.4)

    def forward(self, x, u):
        rate, offset = u
        return rate * self.drop(x) @ self.W.mT + offset


def test_dropout_is_held_when_companions_leave():
    torch.manual_seed(0)
    cell, rate, offset = (
        AbsoluteForm(12),
        torch.linspace(0, 0.97, 64).double()[:, None],
        torch.randn(64, 12).double(),
    )
    model, batches, masks = DEQ(cell, state_shape=12, solver="picard", **{**TIGHT, "max_steps": 2000}), [], []
    cell.register_forward_pre_hook(lambda module, arguments: batches.append(len(arguments[0])))
    cell.drop.register_forward_hook(lambda module, arguments, output: masks.append((arguments[0], output)))
    found = model.equilibrium((rate, offset))
    assert found.converged.all() and len(set(batches)) >= 4 and found.steps.max() > 20 * found.steps.min()
    x, dropped = next(pair for pair in masks if len(pair[0]) == 64 and pair[0].ne(0).all())
    systems = torch.eye(12).double() - rate[:, :, None] * cell.W * (dropped / x)[:, None, :]
    torch.testing.assert_close(found.value, torch.linalg.solve(systems, offset), rtol=1e-8, atol=1e-9)
    assert 0.5 < dropped.ne(0).double().mean() < 0.7
    assert not torch.allclose(model.equilibrium((rate, offset)).value, found.value)  # new masks


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_has_the_gradient_of_its_mask(name):
    u, gradients = inputs(name), []
    for rule in (Implicit(), Unrolled()):
        model = build(name, cell_options={"dropout": 0.3}, gradient=rule, **TIGHT)
        torch.manual_seed(3)
        gradients.append(parameter_gradients(model, u))
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][key], rtol=1e-6, atol=1e-7, msg=key)


class Counted(nn.Module):
    """A parametrisation that counts its evaluations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, weight):
        self.count += 1
        return weight


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("apply", [weight_norm, lambda module: spectral_norm(module, 0.5)])
@pytest.mark.parametrize("name", CELLS)
def test_norms_inside_a_solve(name, apply):
    """Weights are computed once a solve, stay the same over its steps and get exact gradients."""
    u, models = inputs(name), [build(name, gradient=rule, **TIGHT) for rule in (Implicit(), Unrolled())]
    for model in models:
        apply(model.cell)
    layers = [layer for layer in models[0].cell.modules() if nn.utils.parametrize.is_parametrized(layer)]
    layer = layers[-1]  # of the state; those of the input are evaluated once
    counter, seen = Counted(), []
    nn.utils.parametrize.register_parametrization(layer, "weight", counter)
    layer.register_forward_hook(lambda module, arguments, output: seen.append(module.weight))
    counter.count = 0
    found = models[0].equilibrium(u)
    assert counter.count == 1 and len(seen) > 2 and all(weight is seen[0] for weight in seen)
    assert found.converged.all()
    one, other = (parameter_gradients(model, u) for model in models)
    for (key, gradient), unrolled in zip(one.items(), other.values(), strict=True):
        torch.testing.assert_close(gradient, unrolled, rtol=1e-6, atol=1e-7, msg=key)
    assert all(gradient.ne(0).any() for key, gradient in one.items() if "original" in key)
    plain = build(name, **TIGHT)
    plain.load_state_dict(remove_norms(models[1]).state_dict())
    torch.testing.assert_close(flat(plain(u)), flat(found.value), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CELLS)
def test_the_input_half_is_computed_once_unless_a_hook_wants_every_call(name):
    model, u, calls = build(name), inputs(name), []
    inject = model.cell.inject
    model.cell.inject = lambda u: calls.append(1) or inject(u)
    plain = flat(model(u))
    assert len(calls) == 1
    handle = model.cell.register_forward_hook(lambda module, arguments, output: None)
    torch.testing.assert_close(flat(model(u)), plain, rtol=1e-8, atol=1e-8)
    assert len(calls) > 3
    handle.remove()


@pytest.mark.parametrize("name", EVERYTHING)
def test_solves_are_watched_forward_and_backward(name):
    model, u = build(name), inputs(name)
    with watch() as log:
        flat(model(u)).square().sum().backward()
    assert len(log.forward) == len(log.adjoint) == 1 and log.failed_share == 0
