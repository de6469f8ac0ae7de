import math

import pytest
import torch
from composed_forms import DOUBLE, KINDS, dense, evaluate, inputs, loop, low_rank, same

from wellposed import ImplicitForm
from wellposed.activations import get_activation
from wellposed.errors import InputError
from wellposed.forms import gains, linear, product, product_lipschitz, series
from wellposed.forms.compose import output_bound


def squashed(p, q, scale, activation="tanh", dtype=DOUBLE):
    B, C = torch.randn(5, p, dtype=dtype), scale * torch.randn(q, 5, dtype=dtype)
    return ImplicitForm(
        torch.zeros(5, 5, dtype=dtype), B, C, activation=activation, output_bias=torch.randn(q, dtype=dtype)
    )


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", ["dense", "loop", "cut"])
def test_product_multiplies_outputs(first, second):
    f, g = KINDS[first](3, 2, 0), KINDS[second](3, 2, 50)
    whole, u = product(f, g, bounds=(1e6, 1e6)), inputs(f)
    same(evaluate(whole, u), evaluate(f, u) * evaluate(g, u))
    assert whole.certificate().holds and whole.partition[0] == 4


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "relu6", "softmax(5)"])
def test_derived_bounds_clip_nothing(activation, dtype):
    f, g = squashed(3, 2, 10.0, activation, dtype), squashed(3, 2, 0.1, "sin", dtype)
    u = 1e3 * torch.randn(200, 3, dtype=dtype)
    for form in (f, g):
        largest, bound = float(form(u).abs().max()), output_bound(form)
        assert largest <= bound <= 10 * largest
    torch.testing.assert_close(product(f, g)(u), f(u) * g(u), rtol=1e-6, atol=0)


def test_bound_is_that_of_the_images():
    f = squashed(3, 2, 1.0, "relu6")
    exact = (6 * f.C.to_dense().abs().sum(1) + f.output_bias.abs()).max()
    assert exact <= output_bound(f) <= exact * (1 + 1e-12)


def test_factors_are_clipped_at_given_bounds():
    factor, u = linear(torch.eye(1, dtype=DOUBLE)), torch.tensor([[1.5], [2.5], [-9.0]], dtype=DOUBLE)
    square = product(factor, factor, bounds=(2.0, 3.0))
    assert square(u).flatten().tolist() == [2.25, 5.0, 6.0]


@pytest.mark.parametrize("unbounded", [loop(3, 2, 0), dense(3, 2, 0), linear(torch.zeros(2, 3, dtype=DOUBLE) + 1)])
def test_unbounded_factors_are_refused(unbounded):
    bounded = low_rank(3, 2, 0)
    for factors in ((unbounded, bounded), (bounded, unbounded)):
        with pytest.raises(InputError, match=r"bounds=\(c1, c2\)"):
            product(*factors)
    wrapped = series(unbounded, squashed(2, 2, 1.0))
    assert product(wrapped, bounded).certificate().holds
    with pytest.raises(InputError, match="Lipschitz"):
        product(bounded, bounded, bounds=(1.0, math.inf))
    with pytest.raises(InputError, match="received 2 and 3"):
        product(bounded, low_rank(3, 3, 0))


def test_lipschitz_constant_of_a_product():
    tanh, wide = get_activation("tanh"), get_activation("rescaled('sigmoid', 2.0)")
    constant = product_lipschitz(1.0, 1.0, 4.0, 0.25)
    assert constant == 4.0 and product_lipschitz(3.0, 0.5, 1.0, 2.0) == 6.0
    a, b = 3 * torch.randn(2, 50_000, 2, dtype=DOUBLE)
    value = tanh(a[:, 0]) * wide(a[:, 1]) - tanh(b[:, 0]) * wide(b[:, 1])
    ratio = (value.abs() / (a - b).abs().sum(1)).max()
    near = (tanh(a[:, 0] * 1e-4) * wide(a[:, 1].abs() + 9)).abs() / (a[:, 0] * 1e-4).abs()
    assert ratio <= constant and near.max() > 0.99 * constant


def test_gains_of_a_product_bound_its_slopes():
    f, g = squashed(3, 2, 1.0), squashed(3, 2, 1.0)
    whole, u = product(f, g), inputs(f, 50)
    slopes = torch.autograd.functional.jacobian(lambda u: (f(u) * g(u)).sum(0), u).permute(1, 0, 2)
    assert (slopes.abs().amax(0) <= gains(whole)).all() and slopes.shape == (50, 2, 3)
