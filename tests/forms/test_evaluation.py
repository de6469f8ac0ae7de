"""Forms are evaluated block by block; the oracle iterates the dense matrices."""

import warnings
import weakref

import pytest
import torch
from form_cases import (
    F64,
    FEED_FORWARD,
    FORMS,
    LOOPS,
    build,
    dense_outputs,
    dense_states,
    loop_inside,
    rows,
    two_blocks,
)
from form_cases import feed_forward as layers
from torch.autograd import gradcheck

from wellposed import ImplicitForm, Relative
from wellposed.activations import Activation
from wellposed.equilibrium import Picard, Status
from wellposed.errors import ConvergenceError, ConvergenceWarning, InputError, UnknownNameError
from wellposed.forms import Block, Dense, Diagonal, Zero
from wellposed.forms.evaluation import Evaluation

TIGHT = {"stop": Relative(1e-14), "max_steps": 2000}


def inputs(batch=4, scale=1.0):
    return scale * torch.randn(batch, 3, dtype=F64)


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", FORMS)
def test_states_and_outputs_are_those_of_the_dense_form(case):
    form, u = case(), inputs()
    found, expected = form.equilibrium(u, **TIGHT), dense_states(form, u)
    assert found.value.shape == (4, form.sizes[0])
    close(found.value, expected)
    close(form(u), dense_outputs(form, expected, u), 1e-10 if case in FEED_FORWARD else 1e-4)


@pytest.mark.parametrize("case", FORMS)
def test_reports_per_sample(case):
    form, u = case(), inputs(5)
    found = form.equilibrium(u)
    assert found.status.shape == found.steps.shape == found.residual.shape == (5,)
    assert found.status.dtype == torch.int8 and found.steps.dtype == torch.int64
    assert found.converged.all() and not found.failed.any()
    assert found.residuals.shape == (5, int(found.steps.max()))
    assert (found.residual >= 0).all() and (found.residual < 1e-3).all()


@pytest.mark.parametrize("case", FEED_FORWARD)
def test_substitution_is_exact_and_one_pass(case):
    form, u = case(), inputs()
    found = form.equilibrium(u)
    assert (found.steps == 1).all() and (found.residual == 0).all()
    pieces = ((form.A @ found.value) + (form.B @ u) + form.bias).split(form.partition, 1)
    image = torch.cat([phi(piece) for phi, piece in zip(form.activations, pieces, strict=True)], 1)
    close(found.value, image, 1e-14)
    y = (form.C @ found.value) + (form.D @ u) + form.output_bias
    close(form(u), y, 1e-13)


def test_every_block_is_computed_once():
    calls = []

    def counted(z):
        calls.append(tuple(z.shape))
        return torch.relu(z)

    form, u = build((2, 3, 4), {(0, 1): rows(2, 3, 1.0), (1, 2): rows(3, 4, 1.0)}, ["relu"] * 3), inputs()
    counting = form.replaced(activation=[Activation("counted", counted)] * 3)
    assert torch.equal(counting(u), form(u))
    assert calls == [(4, 4), (4, 3), (4, 2)]


@pytest.mark.parametrize("case", LOOPS)
def test_a_sample_does_not_depend_on_its_companions(case):
    form = case()
    u = torch.cat([inputs(2, 0.1), inputs(2), inputs(2, 30.0)])
    together = form.equilibrium(u)
    for i in range(len(u)):
        alone = form.equilibrium(u[i : i + 1])
        close(alone.value[0], together.value[i], 1e-11)
        assert alone.status[0] == together.status[i]
        assert abs(int(alone.steps[0]) - int(together.steps[i])) <= 1


def test_options_reach_the_loops():
    form, u = loop_inside(), inputs()
    loose, tight = form.equilibrium(u, stop=Relative(1e-2)), form.equilibrium(u, stop=Relative(1e-10))
    assert (loose.steps < tight.steps).all() and (loose.residual > tight.residual).all()
    plain = form.equilibrium(u, solver="picard", stop=Relative(1e-10))
    assert (plain.steps >= tight.steps).all() and (plain.steps > tight.steps).any()
    close(plain.value, tight.value, 1e-7)
    short = form.equilibrium(u, max_steps=2, on_failure="ignore")
    assert (short.status == Status.MAX_STEPS).all() and (short.steps == 2).all()
    with pytest.raises(ConvergenceError):
        form.equilibrium(u, max_steps=2, on_failure="raise")
    with pytest.warns(ConvergenceWarning, match="4 of 4"):
        form.equilibrium(u, max_steps=2)


def test_a_bad_status_of_one_loop_is_that_of_the_sample():
    parts = {(0, 0): Diagonal(torch.full((2,), 0.1, dtype=F64)), (0, 1): rows(2, 2, 1.0)}
    slow = Diagonal(torch.full((2,), 0.999, dtype=F64))
    form = build((2, 2), {**parts, (1, 1): slow}, ["relu", "relu"])
    found = form.equilibrium(inputs(3), solver=Picard(), max_steps=30, on_failure="ignore")
    quick = form.replaced(A=Block((2, 2), (2, 2), parts)).equilibrium(inputs(3), solver=Picard())
    assert (found.status == Status.MAX_STEPS).any() and quick.converged.all()
    assert (found.steps > quick.steps).any() and found.residual.max() > quick.residual.max()


def test_starts_where_it_is_told():
    form, u = loop_inside(), inputs()
    solution = form.equilibrium(u, **TIGHT).value
    cold, warm = form.equilibrium(u), form.equilibrium(u, x0=solution)
    assert (warm.steps < cold.steps).all()
    close(warm.value, solution, 1e-6)
    shuffled = form.equilibrium(u, x0=solution.flip(1))  # pieces of other blocks are no good start
    assert (shuffled.steps > warm.steps).all()


@pytest.mark.parametrize("case", [layers, loop_inside, two_blocks])
def test_options_are_checked_with_and_without_loops(case):
    form, u = case(), inputs()
    n = form.sizes[0]
    with pytest.raises(UnknownNameError, match="did you mean 'solver'"):
        form.equilibrium(u, slover="picard")
    with pytest.raises(UnknownNameError, match="on_failure"):
        form.equilibrium(u, on_failure="shout")
    with pytest.raises(UnknownNameError, match="solver"):
        form.equilibrium(u, solver="magic")
    with pytest.raises(InputError, match="max_steps"):
        form.equilibrium(u, max_steps=0)
    with pytest.raises(InputError, match=f"shape \\(4, {n}\\)"):
        form.equilibrium(u, x0=torch.zeros(4, n + 1, dtype=F64))
    with pytest.raises(InputError, match="float64"):
        form.equilibrium(u, x0=torch.zeros(4, n))


@pytest.mark.parametrize("case", FORMS)
def test_empty_batch(case):
    form = case()
    found = form.equilibrium(inputs(0))
    assert found.value.shape == (0, form.sizes[0]) and found.status.shape == (0,)
    assert form(inputs(0)).shape == (0, 2)


def test_forgets_states_that_nobody_needs():
    alive, most = [], []

    def watched(z):
        x = torch.relu(z)
        alive.append(weakref.ref(x))
        most.append(sum(ref() is not None for ref in alive))
        return x

    phi, layers = Activation("watched", watched), 9
    sizes = (2,) * layers
    chain = {(k, k + 1): rows(2, 2, 1.0) for k in range(layers - 1)}
    B = Block(sizes, (3,), {(layers - 1, 0): rows(2, 3, 1.0)})
    C = Block((2,), sizes, {(0, 0): rows(2, 2, 1.0)})
    form = ImplicitForm(Block(sizes, sizes, chain), B, C, activation=[phi] * layers)
    with torch.no_grad():
        form(inputs())
        assert max(most) == 2 and not any(ref() is not None for ref in alive)
        most.clear()
        kept = form.equilibrium(inputs())
        assert max(most) == layers and kept.value.shape == (4, 2 * layers)
        alive.clear(), most.clear()
        shortcut = form.replaced(A=Block(sizes, sizes, {(0, layers - 1): rows(2, 2, 1.0)} | chain))
        u = inputs()
        y = shortcut(u)
        assert max(most) == 3
        close(y, shortcut.C @ shortcut.equilibrium(u).value)
        alive.clear(), most.clear()
        dead = form.replaced(C=Block((2,), sizes, {(0, layers - 1): rows(2, 2, 1.0)}))
        dead(inputs())
        assert max(most) == 3  # the first layer is kept for the output, the last ones for nobody


def test_a_state_that_nobody_reads_is_forgotten_at_once():
    sizes = (2, 2, 2)
    B = Block(sizes, (3,), {(k, 0): rows(2, 3, 1.0) for k in range(3)})
    form = ImplicitForm(Block(sizes, sizes, {}, F64), B, Block((2,), sizes, {(0, 2): rows(2, 2, 1.0)}))
    evaluation = Evaluation(form.order, form._offset(inputs()), outputs=frozenset({2})).run()
    assert [state is not None for state in evaluation.states] == [False, False, True]


@pytest.mark.parametrize("case", [layers, loop_inside, two_blocks])
def test_gradients_of_the_input(case):
    form = case()
    u = inputs(1).requires_grad_()
    assert gradcheck(lambda u: form.equilibrium(u, **TIGHT).value, u, atol=1e-6)
    y, x = form(u), form.equilibrium(u, **TIGHT).value
    (found,) = torch.autograd.grad(y.sum(), u)
    (expected,) = torch.autograd.grad(((form.C @ x) + (form.D @ u)).sum(), u)
    close(found, expected, 1e-3)


def test_gradients_of_the_weights():
    W = 0.2 * torch.randn(3, 3, dtype=F64)
    V, bias = torch.randn(2, 3, dtype=F64), torch.randn(5, dtype=F64)
    u = inputs(2)

    def states(W, V, bias):
        A = Block((2, 3), (2, 3), {(0, 1): Dense(V), (1, 1): Dense(W)})
        form = ImplicitForm(
            A, torch.ones(5, 3, dtype=F64), torch.ones(1, 5, dtype=F64), None, bias, ["tanh", "relu"]
        )
        return form.equilibrium(u, **TIGHT).value

    assert gradcheck(states, [value.requires_grad_() for value in (W, V, bias)], atol=1e-6)


def test_jacobian_by_torch_func():
    form, u = layers(), inputs(1)[0]
    jacobian = torch.func.jacrev(lambda u: form(u[None])[0])(u)
    forward = torch.func.jacfwd(lambda u: form(u[None])[0])(u)
    direct = torch.autograd.functional.jacobian(lambda u: form(u[None])[0], u)
    close(jacobian, direct), close(forward, direct)
    many = torch.func.vmap(lambda u: form(u[None])[0])(inputs(3))
    assert many.shape == (3, 2)


def steep(activations, out=1.0, dtype=torch.float32):
    """Two layers of which the first overflows float32 for inputs above one."""
    A = Block((1, 1), (1, 1), {(0, 1): Dense(torch.full((1, 1), 1e20, dtype=dtype))})
    B = Block((1, 1), (1,), {(1, 0): Dense(torch.full((1, 1), 1e30, dtype=dtype))})
    C = Block((1,), (1, 1), {(0, 0): Dense(torch.full((1, 1), out, dtype=dtype))})
    return ImplicitForm(A, B, C, activation=activations)


def test_overflow_is_never_silent():
    u = torch.tensor([[1e-20], [1.0], [2.0]])
    for activations in (["relu", "relu"], ["tanh", "relu"], ["hardtanh", "identity"]):
        form = steep(activations)
        big = 1e10 * u if activations[0] != "relu" else u
        with pytest.warns(ConvergenceWarning, match="2 of 3 samples left the range of torch.float32"):
            y = form(big)
        assert y[0].isfinite().all()
        with pytest.warns(ConvergenceWarning, match="2 of 3"):
            found = form.equilibrium(big)
        assert found.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.NONFINITE]
        assert form.equilibrium(big, on_failure="ignore").failed.tolist() == [False, True, True]
        with pytest.raises(ConvergenceError, match="float64"):
            form.equilibrium(big, on_failure="raise")
        assert torch.isfinite(form.to(F64)(big.double())).all()


def test_overflow_of_the_output_alone_is_not_silent():
    form = steep(["tanh", "relu"], out=1.0)
    wide = form.replaced(C=Block((1,), (1, 1), {(0, 1): Dense(torch.full((1, 1), 1e30))}))
    with pytest.warns(ConvergenceWarning, match="1 of 2"):
        wide(torch.tensor([[1.0], [0.0]]))


def test_large_finite_values_do_not_warn():
    B = torch.full((4, 1), 3e38)
    form = ImplicitForm(Zero((4, 4)), B, torch.eye(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert form(torch.ones(1, 1)).isfinite().all()
        assert form.equilibrium(torch.ones(1, 1)).converged.all()


def test_overflow_before_a_loop_leaves_other_samples_alone():
    A = Block((2, 1), (2, 1), {(0, 0): Dense(0.5 * torch.eye(2)), (0, 1): Dense(torch.full((2, 1), 1e20))})
    B = Block((2, 1), (1,), {(1, 0): Dense(torch.full((1, 1), 1e10))})
    C = Block((2,), (2, 1), {(0, 0): Dense(torch.eye(2))})
    form, u = ImplicitForm(A, B, C), torch.tensor([[1.0], [1e10], [2.0]])
    with pytest.warns(ConvergenceWarning, match="1 of 3 samples left the range"):
        found = form.equilibrium(u)
    assert found.failed.tolist() == [False, True, False] and found.status[1] == Status.NONFINITE
    alone = form.equilibrium(u[[0, 2]])
    close(found.value[[0, 2]], alone.value, 1e-6)
    with pytest.warns(ConvergenceWarning, match="1 of 3"):
        y = form(u)
    assert y.isfinite().all(1).tolist() == [True, False, True]


def test_overflow_behind_a_loop_is_reported():
    A = Block((1, 1), (1, 1), {(1, 1): Dense(torch.full((1, 1), 0.5)), (0, 1): Dense(torch.full((1, 1), 1e30))})
    B, C = torch.tensor([[0.0], [1e10]]), torch.tensor([[1.0, 0.0]])
    form = ImplicitForm(A, B, C)
    with pytest.warns(ConvergenceWarning, match="1 of 2 samples left the range"):
        found = form.equilibrium(torch.tensor([[1.0], [0.0]]))
    assert found.status.tolist() == [Status.NONFINITE, Status.CONVERGED]


def test_a_form_without_states_is_linear():
    D, c, u = rows(2, 3, 1.0), torch.randn(2, dtype=F64), inputs()
    nothing = torch.zeros(0, 0, dtype=F64)
    for A in (nothing, Zero((0, 0), F64), Block((), (), {}, F64), Block((0,), (0,), {}, F64)):
        form = ImplicitForm(A, nothing.new_zeros(0, 3), nothing.new_zeros(2, 0), D, output_bias=c)
        close(form(u), u @ D.matrix.mT + c)
        assert form.equilibrium(u).value.shape == (4, 0)
        assert form.certificate().condition == "triangular"


def test_blocks_without_entries_make_no_loop():
    parts = {(1, 1): Dense(torch.zeros(0, 0, dtype=F64)), (0, 1): Dense(torch.zeros(2, 0, dtype=F64))}
    parts[1, 0] = Dense(torch.zeros(0, 2, dtype=F64))
    form = build((2, 0), parts, ["relu", "relu"])
    assert form.order.loops == () and form(inputs()).shape == (4, 2)
