import pytest
import torch
from composed_forms import DOUBLE, KINDS, dense, evaluate, inputs, loop, pooled, same
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed import ImplicitForm
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import Block, Dense, Product, feedback, gains, linear, series, small_gain


def scaled(form, factor):
    """The form with outputs times a factor."""
    shift = None if form.output_bias is None else factor * form.output_bias
    return form.replaced(C=form.C.scaled(factor), D=form.D.scaled(factor), output_bias=shift)


def tamed(f, g, value=0.8):
    """The pair with the loop gain that is asked for."""
    return f, scaled(g, value / small_gain(f, g).value)


kinds = st.sampled_from(sorted(KINDS))


@given(kinds, kinds, st.sampled_from([(3, 2), (2, 3), (2, 2)]), st.integers(0, 1000))
@settings(max_examples=18)
def test_feedback_solves_its_equation(first, second, sizes, seed):
    p, q = sizes
    f, g = tamed(KINDS[first](p, q, seed), KINDS[second](q, p, seed + 50))
    closed, u = feedback(f, g), inputs(f)
    y = evaluate(closed, u)
    same(y, evaluate(f, u + evaluate(g, y)))
    torch.testing.assert_close(closed(u), y, rtol=1e-6, atol=1e-6)
    assert closed.certificate().holds and closed.sizes == (f.sizes[0] + g.sizes[0], p, q)
    assert all(loop.certificate.condition == "small gain" for loop in closed.order.loops)
    proven = [float(loop.certificate.note.rpartition("= ")[2]) for loop in closed.order.loops]
    assert all(0.8 - 1e-9 <= value < 1 for value in proven)  # an upper bound, chosen for its error bounds


@pytest.mark.parametrize(("first", "second"), [("dense", "pooled"), ("cut", "loop")])
def test_feedback_agrees_with_brute_force(first, second):
    f, g = tamed(KINDS[first](3, 2, 0), KINDS[second](2, 3, 50), 0.5)
    u, y = inputs(f), torch.zeros(4, 2, dtype=DOUBLE)
    for _ in range(45):
        y = evaluate(f, u + evaluate(g, y))
    same(evaluate(feedback(f, g), u), y)


@pytest.mark.parametrize(("p", "q"), [(3, 2), (2, 3), (3, 3)])
def test_linear_loops_have_the_closed_form(p, q):
    def plain(p, q, n):
        A = 0.1 * torch.randn(n, n, dtype=DOUBLE)
        B, C, D = torch.randn(n, p), torch.randn(q, n), torch.randn(q, p)
        bias, shift = torch.randn(n, dtype=DOUBLE), torch.randn(q, dtype=DOUBLE)
        return ImplicitForm(A, B.double(), C.double(), D.double(), bias, "identity", output_bias=shift)

    def affine(form):
        A, B, C, D = (getattr(form, name).to_dense() for name in "ABCD")
        resolvent = C @ torch.linalg.inv(torch.eye(len(A), dtype=DOUBLE) - A)
        return resolvent @ B + D, resolvent @ form.bias + form.output_bias

    f, g = tamed(plain(p, q, 5), plain(q, p, 4))
    (F, a), (G, b) = affine(f), affine(g)
    u = inputs(f)
    whole = torch.linalg.inv(torch.eye(q, dtype=DOUBLE) - F @ G)
    same(evaluate(feedback(f, g), u), (u @ F.mT + F @ b + a) @ whole.mT)


def test_unit_feedback():
    form = scaled(dense(3, 3, 0), 0.01)
    closed, u = feedback(form), inputs(form)
    y = evaluate(closed, u)
    same(y, evaluate(form, u + y))
    assert closed.labels == ("top", "bottom") and closed.partition == (3, 4)
    with pytest.raises(InputError, match="received 2 and 3"):
        feedback(dense(3, 2, 0))


def test_too_much_gain_is_refused_with_its_number():
    f, g = tamed(dense(3, 2, 0), pooled(2, 3, 0), 1.5)
    with pytest.raises(IllPosedError, match=r"lambda_PF\(S_f S_g\) < 1 fails: 1\.5"):
        feedback(f, g)
    assert small_gain(f, g).value == pytest.approx(1.5, rel=1e-6) and not small_gain(f, g).holds


def test_small_gain_is_the_eigenvalue():
    f, g = dense(3, 2, 0), pooled(2, 3, 1)
    expected = torch.linalg.eigvals(gains(f) @ gains(g)).abs().max()
    assert expected * (1 - 1e-12) <= small_gain(f, g).value <= expected * (1 + 1e-2)


def test_loops_that_are_well_posed_by_themselves_are_accepted():
    f = ImplicitForm(torch.zeros(1, 1, dtype=DOUBLE), torch.ones(1, 1).double(), torch.ones(1, 1).double())
    g = linear(torch.tensor([[-4.0]], dtype=DOUBLE))
    closed = feedback(f, g)  # x = relu(u - 4 x)
    assert closed.certificate().condition != "small gain" and small_gain(f, g).value > 3.9
    same(evaluate(closed, torch.tensor([[5.0], [-5.0]], dtype=DOUBLE)), torch.tensor([[1.0], [0.0]], dtype=DOUBLE))
    with pytest.raises(IllPosedError, match="nor is the closed loop"):
        feedback(f, linear(torch.tensor([[4.0]], dtype=DOUBLE)))
    spinning = ImplicitForm(
        0.95 * torch.tensor([[0.6, 0.8], [-0.8, 0.6]], dtype=DOUBLE), torch.eye(2).double(), torch.eye(2).double()
    )
    closed = feedback(spinning, linear(torch.full((2, 2), 1e-3, dtype=DOUBLE)))
    assert closed.certificate().condition in ("spectral", "monotone")


def test_loops_of_feedthroughs():
    f, g = linear(torch.tensor([[2.0]], dtype=DOUBLE), torch.tensor([3.0]).double()), linear(torch.eye(1).double())
    same(feedback(f, g)(torch.ones(1, 1, dtype=DOUBLE)), torch.tensor([[-5.0]], dtype=DOUBLE))  # y = 2 (1 + y) + 3
    for factor in (1.0, 1.0 + 1e-16):
        with pytest.raises(IllPosedError, match="singular"):
            feedback(linear(torch.tensor([[factor]], dtype=DOUBLE)), g)
    wide = linear(torch.tensor([[1.0], [1.0]], dtype=DOUBLE))
    with pytest.raises(IllPosedError, match="I - D_g D_f is singular"):
        feedback(wide, linear(torch.tensor([[0.5, 0.5]], dtype=DOUBLE)))
    counted = torch.arange(1, 10, dtype=DOUBLE).view(3, 3) / 10  # singular but for the rounding of its entries
    with pytest.raises(IllPosedError, match="singular"):
        feedback(linear(torch.eye(3, dtype=DOUBLE) - counted))


@pytest.mark.parametrize("n", [3000, 9000])
def test_large_loops_are_proven_and_solved_without_forming_them(n, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    B = torch.randn(n, 1, generator=generator, dtype=DOUBLE)
    C = torch.rand(1, n, generator=generator, dtype=DOUBLE)
    f = ImplicitForm(Block((n,), (n,), {}, DOUBLE), B, C * (0.9 / (C.abs() @ B.abs())), activation=["tanh"])

    def refuse(operator, *args):
        raise AssertionError(f"{operator.shape} was formed")

    for name in ("abs", "to_dense") if n < 9000 else ("abs", "to_dense", "coordinates"):
        monkeypatch.setattr(Product, name, refuse)
    closed = feedback(f)
    u = torch.tensor([[0.3], [-2.0]], dtype=DOUBLE)
    y = evaluate(closed, u)
    same(y, f(u + y))
    assert 0.9 <= closed.certificate().value < 1


def test_float32_loops():
    f, g = tamed(dense(3, 2, 0), pooled(2, 3, 1))
    f, g = f.to(torch.float32), g.to(torch.float32)
    closed, u = feedback(f, g), torch.randn(4, 3)
    y = closed(u)
    assert closed.dtype == torch.float32 and closed.certificate().holds
    torch.testing.assert_close(y, f(u + g(y)), rtol=1e-4, atol=1e-4)


def test_error_bounds_of_closed_loops_hold():
    f, g = tamed(loop(3, 2, 0), scaled(linear(torch.randn(3, 2, dtype=DOUBLE)), 1.0))
    closed, u = feedback(f, g), inputs(f)
    rough, exact = closed.equilibrium(u, stop="relative", max_steps=200), closed.equilibrium(u, max_steps=2000)
    assert rough.error_bound is None or ((rough.value - exact.value).abs().amax(1) <= rough.error_bound).all()


def test_feedback_composes_with_series():
    f, g, h = *tamed(dense(3, 2, 0), loop(2, 3, 0)), pooled(2, 2, 0)
    closed, u = feedback(f, g), inputs(f)
    whole = series(closed, h)
    same(evaluate(whole, u), evaluate(h, evaluate(closed, u)))
    assert isinstance(whole.A, Block)


def test_sizes_that_do_not_fit():
    with pytest.raises(InputError, match="2 outputs of f to its 3 inputs"):
        feedback(dense(3, 2, 0), dense(3, 2, 0))
    with pytest.raises(InputError, match="one type"):
        feedback(dense(3, 2, 0), dense(2, 3, 0).to(torch.float32))
    assert isinstance(feedback(linear(Dense(torch.zeros(2, 2, dtype=DOUBLE)))), ImplicitForm)
