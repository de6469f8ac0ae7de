"""What runs where, and what is said about it."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import wellposed.kernels.cpu.engine as cpu_engine
from wellposed import Absolute, ErrorBound, ImplicitModel, ImplicitRNN, Phantom, Relative
from wellposed.activations import get_activation
from wellposed.equilibrium import Anderson, Picard
from wellposed.errors import InputError, MissingExtraError
from wellposed.kernels.compiled_op import adjoint, equilibrium_op

NEWTON = ", after 64 steps Newton for samples that are not finished"
REASONS = [
    ({"executor": "reference"}, 'reference: executor="reference" was asked for'),
    ({"solver": "broyden"}, "solver Broyden has no kernel"),
    ({"solver": Picard(0.5)}, "damped steps have no kernel"),
    ({"solver": Anderson(damping=0.9)}, "damped steps have no kernel"),
    ({"stop": ErrorBound(1e-3)}, "stopping rule ErrorBound has no kernel"),
    ({"stop": Relative(norm="2")}, "stopping rule Relative in the norm '2' has no kernel"),
    ({"activation": "gelu", "kappa": 0.8}, "activation gelu has no kernel"),
    (
        {"activation": "softmax", "condition": "block"},
        "activation softmax acts on blocks and has no kernel",
    ),
    ({"rank": 2}, "low-rank matrices have no kernel"),
    ({"condition": "monotone"}, "operator splitting (condition 'monotone') has no kernel"),
    ({"gradient": Phantom(9)}, "gradient Phantom has no kernel"),
]


def model(dtype=torch.float64, seed=1, **options):
    torch.manual_seed(seed)
    return ImplicitModel(3, 2, 6, **options).to(dtype)


KERNELS = ("run_kernel", "run_fused")  # all ways to a kernel of a model


def inputs(batch=5, dtype=torch.float64):
    return torch.randn(batch, 3, dtype=dtype, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("options", "reason"), REASONS)
def test_falls_back_with_a_reason(options, reason, monkeypatch):
    implicit, u = model(**options), inputs()
    asked = 'reference: executor="reference" was asked for'
    other = f"reference: the plain loop\nnot triton: {reason}\nnot numba: {reason}"
    assert implicit.explain(u) == (asked if reason == asked else other)
    for name in KERNELS:
        monkeypatch.setattr(cpu_engine, name, lambda *args, **kwargs: pytest.fail("a kernel ran"))
    implicit(u)


def test_half_precision_falls_back():
    text = model(torch.bfloat16).explain(inputs(dtype=torch.bfloat16))
    assert text.startswith("reference") and text.endswith("not numba: bfloat16 has no kernel")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, f"numba: relu, float64, 6 states, batch 5, Anderson{NEWTON}"),
        ({"solver": "anderson"}, "numba: relu, float64, 6 states, batch 5, Anderson"),
        ({"max_steps": 95}, "numba: relu, float64, 6 states, batch 5, Anderson"),
        ({"solver": "picard", "activation": "tanh"}, "numba: tanh, float64, 6 states, batch 5, Picard"),
        ({"triangular": True}, "numba: relu, float64, 6 states, batch 5, Picard"),
    ],
)
def test_explains_the_kernel_and_runs_it(options, text, monkeypatch):
    implicit, u, ran = model(**options), inputs(), []
    assert implicit.explain(u).splitlines() == [text, "not triton: device cpu has no kernel of triton"]
    for name in KERNELS:
        run = getattr(cpu_engine, name)
        monkeypatch.setattr(cpu_engine, name, lambda *args, run=run, **kw: ran.append(1) or run(*args, **kw))
    implicit(u).sum().backward()
    assert len(ran) == 2


def test_without_numba(monkeypatch):
    cpu_engine.installation_why_not.cache_clear()
    cpu_engine.kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    try:
        text = model().explain(inputs())
        assert text.endswith("not numba: numba is not installed; pip install 'wellposed[fast]'")
        assert model()(inputs()).shape == (5, 2)
        with pytest.raises(MissingExtraError, match=r"wellposed\[fast\]"):
            model(executor="numba")
    finally:
        cpu_engine.installation_why_not.cache_clear()
        cpu_engine.kernels.cache_clear()


def test_the_package_does_not_import_numba():
    code = "import sys, wellposed.models.implicit, wellposed.kernels; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_loads_without_the_compiler_of_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import wellposed; wellposed.ImplicitModel\n"
        "added = {name.split('.')[0] for name in set(sys.modules) - before if not name.startswith('torch._C')}\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert not added & {'torch', 'sympy', 'triton', 'scipy', 'rich', 'click'}, added\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Threads(TorchDispatchMode):
    """Keeps the number of threads at every product."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen.add(torch.get_num_threads())
        return function(*args, **(kwargs or {}))


def _one_call(u):
    return ImplicitModel(4, 2, 16)(u)


def _with_products(u):
    return ImplicitModel(4, 2, 16, condition="weighted")(u)


def _sequences(u):
    return ImplicitRNN(4, 2, 16, batch_first=True)(u[:, None])[0]


@pytest.mark.parametrize(
    ("outputs", "batch", "counts"),
    [
        (_one_call, 8000, set()),
        (_one_call, 1 << 15, {2}),
        (_with_products, 8000, {1}),
        (_with_products, 1 << 15, {2}),
        (_sequences, 8000, {1}),
        (_sequences, 1 << 15, {2}),
    ],
)
def test_small_products_stay_on_one_thread(outputs, batch, counts):
    torch.manual_seed(0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with Threads() as threads:
            outputs(torch.randn(batch, 4)).sum().backward()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads.seen == counts


def test_forced_kernel_raises_where_there_is_none():
    u = inputs()
    assert torch.equal(model(executor="numba")(u), model()(u))
    with pytest.raises(InputError, match="solver Broyden has no kernel"):
        model(executor="numba", solver="broyden")(u)
    with pytest.raises(InputError, match="gradient Phantom has no kernel"):
        model(executor="numba", gradient=Phantom(3))(u)


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_gradients_of_both_orders(activation):
    implicit, u = model(activation=activation, stop=Absolute(1e-13), max_steps=2000), inputs(3).requires_grad_()
    assert torch.autograd.gradcheck(implicit, (u,))
    assert torch.autograd.gradgradcheck(implicit, (u,))


@pytest.mark.parametrize("n", [6, 30])  # below and above what is factorised
def test_gradients_agree_with_the_reference(n):
    results = []
    for executor in ("numba", "reference"):
        torch.manual_seed(0)
        implicit = ImplicitModel(3, 2, n, bias=True, executor=executor, stop=Relative(1e-12)).double()
        with torch.no_grad():
            implicit.state.raw.abs_().mul_(50)
        solution = implicit.equilibrium(inputs(40))
        (solution.value * torch.linspace(-1, 1, n)).sum().backward()
        results.append([solution.value, *[p.grad for p in implicit.parameters() if p.grad is not None]])
        assert solution.adjoint is not None and solution.adjoint.converged.all()
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-8, atol=1e-9)


def test_rows_without_gradient_stay_zero():
    implicit, u = model(), inputs().requires_grad_()
    implicit(u)[1].sum().backward()
    assert u.grad[0].eq(0).all() and u.grad[1].ne(0).any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_operator_in_a_compiled_graph(backend):
    torch._dynamo.reset()
    implicit, u = model(), inputs()
    compiled = torch.compile(implicit, backend=backend, fullgraph=True)
    (compiled(u) ** 2).sum().backward()
    found = [p.grad.clone() for p in implicit.parameters()]
    implicit.zero_grad()
    (implicit(u) ** 2).sum().backward()
    for fast, plain in zip(found, (p.grad for p in implicit.parameters()), strict=True):
        torch.testing.assert_close(fast, plain)


def test_operators_keep_their_contracts():
    text, A = model(activation="tanh").spec_text(), torch.rand(4, 4, dtype=torch.float64) / 5
    v = torch.randn(3, 4, dtype=torch.float64).requires_grad_()
    torch.library.opcheck(equilibrium_op, (v, torch.zeros_like(v), A.requires_grad_(), text))
    x = equilibrium_op(v, torch.zeros_like(v), A, text)[0].detach()
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(adjoint, (x, v, torch.ones_like(x), A, text), test_utils=checks)
    assert model(solver="broyden").spec_text() is None


def test_transforms_use_the_reference():
    implicit, u = model(), inputs()
    each = torch.func.vmap(lambda row: implicit(row[None])[0])(u)
    torch.testing.assert_close(each, implicit(u), rtol=1e-6, atol=1e-8)
    jacobian = torch.func.jacrev(lambda row: implicit(row[None])[0])(u[0])
    torch.testing.assert_close(
        jacobian, torch.autograd.functional.jacobian(lambda row: implicit(row[None])[0], u[0])
    )


@pytest.mark.parametrize("name", ["relu", "leaky_relu(0.3)", "sigmoid"])
def test_compiled_operators_find_activations_by_name(name):
    model = ImplicitModel(3, 2, 5, activation=name)
    assert f'"{name}"' in model.spec_text()
    other = ImplicitModel(3, 2, 5, activation=replace(get_activation(name), name="mine"))
    assert other.spec_text() is None


def test_a_first_call_under_a_transform_does_not_spoil_later_ones():
    implicit, u = model(), inputs()
    torch.func.vmap(lambda row: implicit(row[None])[0])(u)
    assert "Layer" in type(implicit(u).grad_fn).__name__
