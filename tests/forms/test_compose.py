import pytest
import torch
from composed_forms import DOUBLE, KINDS, dense, evaluate, inputs, loop, pooled, same, same_forms
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed import ImplicitForm
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import (
    Block,
    Convolution,
    Dense,
    Identity,
    Product,
    add,
    concatenate,
    linear,
    parallel,
    permute,
    product,
    series,
)

kinds, sizes, seeds = st.sampled_from(sorted(KINDS)), st.integers(2, 4), st.integers(0, 10_000)


def build(kind: str, p: int, q: int, seed: int) -> ImplicitForm:
    return KINDS[kind](p, q, seed)


@given(kinds, kinds, sizes, sizes, sizes, seeds)
@settings(max_examples=40)
def test_series_is_one_form_after_the_other(first, second, p, m, q, seed):
    f, g = build(first, p, m, seed), build(second, m, q, seed + 50)
    both, u = series(f, g), inputs(f)
    same(evaluate(both, u), evaluate(g, evaluate(f, u)))
    torch.testing.assert_close(both(u), g(f(u)), rtol=1e-7, atol=1e-7)
    assert both.input_shape == f.input_shape


def test_series_has_the_matrices_of_the_paper():
    f, g = dense(3, 2, 0), dense(2, 4, 9)
    A, B, C, D = ([getattr(form, name).to_dense() for form in (f, g)] for name in "ABCD")
    both = series(f, g)
    upper, lower = torch.cat([A[1], B[1] @ C[0]], 1), torch.cat([torch.zeros(7, 7, dtype=DOUBLE), A[0]], 1)
    same(both.A.to_dense(), torch.cat([upper, lower]))
    same(both.B.to_dense(), torch.cat([B[1] @ D[0], B[0]]))
    same(both.C.to_dense(), torch.cat([C[1], D[1] @ C[0]], 1))
    same(both.D.to_dense(), D[1] @ D[0])
    same(both.bias, torch.cat([g.bias + B[1] @ f.output_bias, f.bias]))
    same(both.output_bias, g.output_bias + D[1] @ f.output_bias)
    assert both.partition == (3, 4, 3, 4) and both.labels == ("top", "bottom", "top", "bottom")
    assert [phi.name for phi in both.activations] == ["tanh", "relu", "tanh", "relu"]


@given(kinds, kinds, kinds, seeds)
@settings(max_examples=25)
def test_series_is_associative(first, second, third, seed):
    f, g, h = build(first, 3, 2, seed), build(second, 2, 4, seed + 50), build(third, 4, 2, seed + 100)
    left, right, u = series(series(f, g), h), series(f, series(g, h)), inputs(f)
    same_forms(left, right)
    same_forms(series(f, g, h), left, atol=0.0)
    same(evaluate(left, u), evaluate(right, u))


@pytest.mark.parametrize("kind", KINDS)
def test_identity_is_neutral(kind):
    f = build(kind, 3, 2, 0)
    for neutral in (
        series(linear(Identity(3, DOUBLE), input_shape=f.input_shape), f),
        series(f, linear(torch.eye(2, dtype=DOUBLE))),
    ):
        same_forms(neutral, f, atol=0.0)


@given(kinds, kinds, kinds, sizes, sizes, seeds)
@settings(max_examples=25)
def test_parallel_acts_on_each_half(first, second, third, p, q, seed):
    f, g, h = build(first, p, q, seed), build(second, 3, 2, seed + 50), build(third, 2, 2, seed + 100)
    both = parallel(f, g, h)
    u, v, w = inputs(f), inputs(g), inputs(h)
    expected = torch.cat([evaluate(f, u), evaluate(g, v), evaluate(h, w)], 1)
    same(evaluate(both, torch.cat([u, v, w], 1)), expected)
    for name in "ABCD":
        blocks = [getattr(form, name).to_dense() for form in (f, g, h)]
        assert torch.equal(getattr(both, name).to_dense(), torch.block_diag(*blocks))
    same_forms(both, parallel(f, parallel(g, h)), atol=0.0)


@given(kinds, kinds, sizes, sizes, seeds)
@settings(max_examples=30)
def test_add_adds_outputs(first, second, p, q, seed):
    f, g = build(first, p, q, seed), build(second, p, q, seed + 50)
    u = inputs(f)
    expected = evaluate(f, u) + evaluate(g, u)
    same(evaluate(add(f, g), u), expected)
    copies = linear(Block((p, p), (p,), {(0, 0): Identity(p, DOUBLE), (1, 0): Identity(p, DOUBLE)}))
    total = linear(Block((q,), (q, q), {(0, 0): Identity(q, DOUBLE), (0, 1): Identity(q, DOUBLE)}))
    side_by_side = series(copies, parallel(f, g), total)
    same(evaluate(side_by_side, u), expected)
    for name in "ABCD":
        torch.testing.assert_close(getattr(side_by_side, name).to_dense(), getattr(add(f, g), name).to_dense())
    same(evaluate(concatenate(f, g), u), torch.cat([evaluate(f, u), evaluate(g, u)], 1))


@pytest.mark.parametrize("second", ["dense", "pooled", "loop", "cut"])
def test_add_commutes_up_to_the_order_of_blocks(second):
    f, g = build("dense", 3, 2, 0), build(second, 3, 2, 7)
    count, others = len(f.partition), len(g.partition)
    swapped = permute(add(g, f), [*range(others, others + count), *range(others)])
    same_forms(swapped.replaced(input_shape=(3,)), add(f, g), atol=0.0)


@given(kinds, kinds, seeds)
@settings(max_examples=20)
def test_linear_forms_distribute(first, second, seed):
    f, g = build(first, 3, 2, seed), build(second, 3, 2, seed + 50)
    h = linear(torch.randn(4, 2, dtype=DOUBLE))
    left, right, u = series(add(f, g), h), add(series(f, h), series(g, h)), inputs(f)
    same(evaluate(left, u), evaluate(right, u))
    same_forms(left, right)


def test_cuts_that_differ_are_joined():
    f = series(build("cut", 3, 4, 0), parallel(build("dense", 1, 2, 1), build("dense", 3, 3, 2)))
    g = parallel(build("cut", 3, 2, 3), build("affine", 2, 2, 4))
    u = inputs(f)
    same(series(f, g)(u), g(f(u)))
    same(add(f, build("cut", 3, 5, 5))(u), f(u) + build("cut", 3, 5, 5)(u))


def test_certificates_come_from_the_parts(monkeypatch):
    image = (1, 64, 64)
    kernel = Convolution(torch.randn(2, 1, 3, 3, dtype=DOUBLE), image, (1, 1), (1, 1), (1, 1))
    rows = kernel.shape[0]
    C = Convolution(torch.randn(1, 2, 64, 64, dtype=DOUBLE), (2, 64, 64), (1, 1), (0, 0), (1, 1))
    f = ImplicitForm(Block((rows,), (rows,), {}, DOUBLE), kernel, C, activation=["relu"], input_shape=image)
    g, h = loop(1, 3, 0), loop(1, 3, 1)
    largest = max(part.certificate().value for part in (g, h))

    def refuse(operator, *args):
        raise AssertionError(f"{operator.shape} was formed")

    for name in ("to_dense", "to_sparse", "coordinates"):
        for kind in (Block, Product, Convolution):
            monkeypatch.setattr(kind, name, refuse)
    whole = series(f, add(g, h))
    proof = whole.certificate()
    assert proof.holds and proof.value == largest and proof.condition == "components"
    assert whole.sizes[0] == rows + 10
    assert series(f, linear(torch.ones(2, 1, dtype=DOUBLE))).certificate().value == 0
    assert whole(torch.zeros(1, *image, dtype=DOUBLE)).shape == (1, 3)


@pytest.mark.parametrize("compose", [series, parallel, add, concatenate])
@pytest.mark.parametrize("ill_first", [True, False])
def test_ill_posed_parts_are_refused(compose, ill_first):
    good, eye = loop(2, 2, 0), torch.eye(2, dtype=DOUBLE)
    ill = ImplicitForm(2 * eye + 0.1, eye, eye)
    whole = compose(ill, good) if ill_first else compose(good, ill)
    with pytest.raises(IllPosedError):
        whole.certificate()
    with pytest.raises(IllPosedError):
        whole(inputs(whole))


def test_float32_and_gradients():
    f, g = dense(3, 2, 0).to(torch.float32), pooled(2, 3, 0).to(torch.float32)
    both, u = add(series(f, g), loop(3, 3, 0).to(torch.float32)), torch.randn(5, 3)
    assert both.dtype == torch.float32 and both(u).dtype == torch.float32
    torch.testing.assert_close(series(f, g)(u), g(f(u)), rtol=1e-5, atol=1e-5)
    W = torch.randn(2, 3, dtype=DOUBLE, requires_grad=True)
    layer, after = ImplicitForm(torch.zeros(2, 2, dtype=DOUBLE), W, torch.eye(2, dtype=DOUBLE)), dense(2, 2, 3)
    v = inputs(layer)
    found = torch.autograd.grad(series(layer, after)(v).square().sum(), W)[0]
    same(found, torch.autograd.grad(after(layer(v)).square().sum(), W)[0])


def test_what_does_not_fit_is_refused():
    f, g = dense(3, 2, 0), dense(3, 4, 0)
    with pytest.raises(InputError, match="2 outputs and 3 inputs"):
        series(f, g)
    with pytest.raises(InputError, match="received 2 and 4"):
        add(f, g)
    with pytest.raises(InputError, match="received 3 and 2"):
        concatenate(f, dense(2, 2, 0))
    with pytest.raises(InputError, match="one type"):
        series(f, dense(2, 2, 0).to(torch.float32))
    with pytest.raises(InputError, match="on one device"):
        add(f, f.to("meta"))


def test_labels_of_forms_without_any_are_their_activations():
    assert series(loop(3, 2, 0), dense(2, 2, 0)).labels == ("top", "bottom", "relu")
    assert series(loop(3, 2, 0), loop(2, 2, 0)).labels == ()
    assert isinstance(series(linear(Dense(torch.eye(3, dtype=DOUBLE))), dense(3, 2, 0)).A, Block)


@pytest.mark.parametrize("kind", KINDS)
def test_operators_compose_as_the_functions_do(kind):
    f, g, bounded = KINDS[kind](3, 2, 0), dense(3, 2, 50), squashed(3, 2)
    same_forms(f >> dense(2, 4, 9), series(f, dense(2, 4, 9)))
    same_forms(f + g, add(f, g))
    u = inputs(f)
    same(evaluate(f + g >> dense(2, 4, 9), u), dense(2, 4, 9)(evaluate(f, u) + g(u)))
    squared = bounded * bounded
    assert [phi.name for phi in squared.activations] == [phi.name for phi in product(bounded, bounded).activations]
    same(squared(u), bounded(u) ** 2)


def squashed(p, q):
    B, C = torch.ones(4, p, dtype=DOUBLE), torch.full((q, 4), 0.5, dtype=DOUBLE)
    return ImplicitForm(torch.zeros(4, 4, dtype=DOUBLE), B, C, activation="tanh")


def test_operators_say_what_does_not_fit():
    f = dense(3, 2, 0)
    with pytest.raises(InputError, match="2 outputs and 3 inputs"):
        f >> f
    with pytest.raises(InputError, match="as many entries in it; received 3 and 4"):
        f + dense(4, 2, 0)
    with pytest.raises(InputError, match="both forms need as many; received 2 and 1"):
        f + dense(3, 1, 0)
    with pytest.raises(InputError, match="bounded factors only"):
        f * f
    for wrong in (2.0, "relu", torch.ones(1)):
        for operator in (lambda a, b: a >> b, lambda a, b: a + b, lambda a, b: a * b):
            with pytest.raises(TypeError):
                operator(f, wrong)
