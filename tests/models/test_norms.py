import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from wellposed.errors import InputError
from wellposed.models import norms
from wellposed.models.cells import ConvCell, DenseCell, TransformerCell
from wellposed.models.deq import DEQ
from wellposed.models.norms import jacobian_penalty, norm_bound, remove_norms, spectral_norm, weight_norm


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
@pytest.mark.parametrize("shape", [(1, 1), (40, 40), (3, 60), (60, 3), (4, 20, 5)])
def test_bound_is_above_the_largest_singular_value_and_close(shape, scale, dtype):
    matrix = scale * draw(*shape, dtype=dtype)
    exact = torch.linalg.matrix_norm(matrix.double(), 2)
    bound = norm_bound(matrix).double()
    slack = min(shape[-2:]) ** (2.0**-9) * (1 + 200 * torch.finfo(dtype).eps)
    assert (bound >= exact).all() and (bound <= slack * exact).all()


def test_bound_in_the_extreme_cases():
    flat = norm_bound(torch.eye(50, dtype=torch.float64))  # all singular values are alike
    assert 1 <= flat <= 50 ** (2.0**-9) * (1 + 1e-12)
    single = norm_bound(torch.outer(draw(30), draw(20)))  # there is only one
    torch.testing.assert_close(single, draw(30).norm() * draw(20).norm())
    zero = torch.zeros(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(norm_bound(zero), zero)
    assert norm_bound(zero) < 1e-30 and gradient.isfinite().all()


def dense_matrix(layer, size):
    """Returns a convolution as a matrix, from the images of all unit vectors."""
    basis = torch.eye(layer.in_channels * size ** len(layer.kernel_size), dtype=torch.float64)
    units = basis.reshape(-1, layer.in_channels, *[size] * len(layer.kernel_size))
    bias, layer.bias = layer.bias, None
    matrix = layer(units).flatten(1).mT
    layer.bias = bias
    return matrix.detach()


CONVOLUTIONS = {
    "sequence": nn.Conv1d(3, 4, 3, padding=1),
    "image": nn.Conv2d(3, 4, 3, padding=1),
    "volume": nn.Conv3d(2, 2, 2),
    "one tap": nn.Conv2d(3, 4, 1),
    "many outputs": nn.Conv2d(2, 12, 3, padding=1),
    "many inputs": nn.Conv2d(12, 2, 3, padding=1),
    "groups": nn.Conv2d(4, 6, 3, padding=1, groups=2),
    "stride": nn.Conv2d(3, 4, 3, padding=1, stride=2),
    "stride beyond the kernel": nn.Conv1d(3, 4, 2, stride=3),
    "dilation": nn.Conv1d(3, 4, 3, padding=2, dilation=2, stride=2),
    "circular": nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    "circular with stride": nn.Conv1d(3, 4, 3, padding=1, stride=2, padding_mode="circular"),
    "same": nn.Conv1d(3, 4, 5, padding="same"),
    "wide padding": nn.Conv1d(3, 4, 3, padding=4),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_bound_of_a_convolution(name):
    layer = copy.deepcopy(CONVOLUTIONS[name]).double()
    with torch.no_grad():
        layer.weight.copy_(draw(*layer.weight.shape))
    exact = torch.linalg.matrix_norm(dense_matrix(layer, 7 if layer.weight.dim() < 5 else 4), 2)
    bound = norms.SpectralNorm(layer, 1.0).operator_bound(layer.weight)
    taps = layer.weight[0, 0].numel()
    assert exact <= bound <= 1.1 * taps**0.5 * exact
    spectral_norm(layer, 0.7)
    assert torch.linalg.matrix_norm(dense_matrix(layer, 7 if layer.weight.dim() < 5 else 4), 2) <= 0.7


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv1d(1, 1, 3, padding=1, stride=3, padding_mode="circular"), 4),  # windows meet at the seam
        (nn.Conv1d(1, 1, 3, dilation=2, stride=2), 31),  # all taps fall on the stride
    ],
)
def test_stride_is_counted_on_only_where_windows_part(layer, size):
    nn.init.ones_(layer.double().weight)
    exact = torch.linalg.matrix_norm(dense_matrix(layer, size), 2)
    assert exact <= norms.SpectralNorm(layer, 1.0).operator_bound(layer.weight)


@pytest.mark.parametrize(
    ("layer", "norm"),
    [
        (nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), 9.0),  # adds up nine neighbours
        (nn.Conv1d(1, 1, 4, stride=4), 2.0),  # windows without overlap
        (nn.Conv1d(3, 5, 1), 15**0.5),
    ],
)
def test_bound_of_a_convolution_can_be_sharp(layer, norm):
    nn.init.ones_(layer.double().weight)
    exact = torch.linalg.matrix_norm(dense_matrix(layer, 8), 2)
    bound = norms.SpectralNorm(layer, 1.0).operator_bound(layer.weight)
    torch.testing.assert_close((exact.item(), bound.item()), (norm, norm))


def test_spectral_norm_scales_only_what_exceeds():
    small, large = nn.Linear(5, 5), nn.Linear(5, 5)
    with torch.no_grad():
        small.weight.mul_(0.1)
        large.weight.mul_(100)
    before = small.weight.detach().clone(), large.weight.detach().clone()
    spectral_norm(nn.ModuleList([small, large]))
    assert torch.equal(small.weight, before[0])
    torch.testing.assert_close(large.weight, before[1] / norm_bound(before[1]))


def test_spectral_norm_is_differentiable():
    for layer, shape in ((nn.Linear(4, 3), (3, 4)), (nn.Conv1d(4, 3, 3), (3, 4, 3))):
        part = norms.SpectralNorm(layer, 0.5)
        torch.autograd.gradcheck(part, draw(*shape).requires_grad_())


def test_spectral_norm_under_autocast_is_computed_in_full_precision():
    layer = spectral_norm(nn.Linear(30, 30), 0.3)
    plain = layer.weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.weight, plain)


def test_second_call_changes_the_bound_and_nothing_else():
    layer = spectral_norm(nn.Linear(5, 5), 1.0)
    with torch.no_grad():
        layer.parametrizations.weight.original.mul_(100)
    spectral_norm(layer, 0.25)
    assert len(layer.parametrizations.weight) == 1
    assert 0.24 < torch.linalg.matrix_norm(layer.weight, 2) <= 0.25


def test_weight_norm_is_that_of_torch():
    ours, theirs = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    theirs.load_state_dict(ours.state_dict())
    before = ours.weight.detach().clone()
    weight_norm(ours)
    nn.utils.parametrizations.weight_norm(theirs)
    torch.testing.assert_close(ours.weight, before)
    for layer in (ours, theirs):
        layer(torch.ones(1, 3, 5, 5)).square().sum().backward()
    pairs = zip(ours.parametrizations.parameters(), theirs.parametrizations.parameters(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one.grad, other.grad)


def test_weight_norm_has_second_derivatives_and_those_in_forward_mode():
    parts = draw(4, 1, 1).requires_grad_(), draw(4, 3, 2, seed=2).requires_grad_()
    torch.autograd.gradcheck(norms.WeightNorm(), parts, check_forward_ad=True)
    torch.autograd.gradgradcheck(norms.WeightNorm(), parts)


def test_weight_norm_twice_is_weight_norm():
    cell = weight_norm(weight_norm(DenseCell(3, 5)))
    assert all(len(layer.parametrizations.weight) == 1 for layer in (cell.input, cell.layers[0]))


@pytest.mark.parametrize("apply", [weight_norm, spectral_norm, lambda m: spectral_norm(weight_norm(m), 0.1)])
def test_normed_module_is_a_good_module(apply):
    cell, x, u = apply(ConvCell(3, 8)), torch.randn(2, 8, 5, 5), torch.randn(2, 3, 5, 5)
    value = cell(x, u)
    assert torch.equal(copy.deepcopy(cell)(x, u), value)
    other = apply(ConvCell(3, 8))
    assert not torch.equal(other(x, u), value)
    other.load_state_dict(cell.state_dict())
    assert torch.equal(other(x, u), value)
    torch.testing.assert_close(cell.double()(x.double(), u.double()).float(), value, rtol=1e-4, atol=1e-4)
    plain = remove_norms(other)
    torch.testing.assert_close(plain(x, u), value)
    assert set(plain.state_dict()) == set(ConvCell(3, 8).state_dict())
    assert torch.equal(pickle.loads(pickle.dumps(plain))(x, u), plain(x, u))
    assert remove_norms(plain) is plain


def test_other_parametrisations_stay():
    layer = nn.Linear(4, 4)
    nn.utils.parametrizations.orthogonal(layer)
    remove_norms(layer)
    assert nn.utils.parametrize.is_parametrized(layer, "weight")


def _zero(layer):
    nn.init.zeros_(layer.weight)
    return layer


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: weight_norm(spectral_norm(nn.Linear(3, 3))), "weight_norm first"),
        (lambda: weight_norm(nn.ReLU()), "no linear or convolutional"),
        (lambda: spectral_norm(nn.ReLU()), "no linear or convolutional"),
        (lambda: spectral_norm(nn.Linear(3, 3), 0.0), "positive; received 0.0"),
        (lambda: spectral_norm(nn.Conv1d(3, 3, 3, padding=1, padding_mode="reflect")), "received 'reflect'"),
        (lambda: spectral_norm(nn.Conv1d(3, 3, 3, padding=2, padding_mode="circular")), "at most half"),
        (lambda: weight_norm(_zero(nn.Linear(2, 2))), "2 of 2 rows"),
        (lambda: jacobian_penalty(torch.tanh, torch.zeros(2, 3), draws=0), "draws"),
    ],
)
def test_misuse_is_named(action, message):
    with pytest.raises(InputError, match=message):
        action()


def test_spectral_norm_makes_a_dense_cell_contract():
    cell, u = DenseCell(3, 20, projection="identity").double(), draw(200, 3)
    with torch.no_grad():
        cell.layers[0].weight.mul_(8)
    x = 1e-3 * draw(200, 20)
    y = x + 1e-3 * draw(200, 20, seed=2)
    stretched = (cell(x, 0 * u) - cell(y, 0 * u)).norm(dim=1) / (x - y).norm(dim=1)
    spectral_norm(cell.layers, 0.8)
    bounded = (cell(x, 0 * u) - cell(y, 0 * u)).norm(dim=1) / (x - y).norm(dim=1)
    assert stretched.max() > 4 and 0.5 < bounded.max() <= 0.8
    assert DEQ(cell, solver="picard").equilibrium(u).converged.all()


@pytest.fixture
def all_signs(monkeypatch):
    """Replaces the random signs of two draws of three entries by all of them, one after the other."""
    signs = itertools.cycle(torch.tensor(row, dtype=torch.float64) for row in itertools.product((-1, 1), repeat=3))
    monkeypatch.setattr(norms, "_signs", lambda like, generator: next(signs).expand_as(like))


def frobenius(function, x):
    """Returns ``|J|_F^2 / n`` by the full Jacobian of every sample."""
    rows = [
        torch.autograd.functional.jacobian(lambda row: function(row[None])[0], row, create_graph=True) for row in x
    ]
    return torch.stack([row.square().sum() / row.shape[0] for row in rows])


@pytest.mark.usefixtures("all_signs")
def test_mean_over_all_signs_is_the_frobenius_norm():
    layer, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double(), draw(5, 4)
    found, exact = jacobian_penalty(layer, x, draws=8), frobenius(layer, x)
    torch.testing.assert_close(found, exact)
    weights = list(layer.parameters())
    for one, other in zip(*(torch.autograd.grad(p.sum(), weights) for p in (found, exact)), strict=True):
        torch.testing.assert_close(one, other)


def test_random_signs_estimate_the_frobenius_norm():
    cell, x, u = DenseCell(3, 12).double(), draw(2, 12), draw(2, 3, seed=2)
    exact = frobenius(lambda row: cell(row, u[:1]), x[:1])
    many = jacobian_penalty(cell, x, u, draws=3000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(many[:1], exact, rtol=0.03, atol=0)
    single = jacobian_penalty(lambda x: torch.tanh(3 * x), x)  # exact where J is diagonal
    torch.testing.assert_close(single, frobenius(lambda row: torch.tanh(3 * row), x))


def test_penalty_is_per_sample_and_repeatable():
    cell, x, u = ConvCell(3, 8).double(), draw(3, 8, 5, 5), draw(3, 3, 5, 5)
    draws = [jacobian_penalty(cell, x, u, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert draws[0].shape == (3,) and torch.equal(*draws)
    alone = jacobian_penalty(cell, x[:1], u[:1], generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(alone, draws[0][:1])
    assert not torch.equal(jacobian_penalty(cell, x, u), draws[0])


def test_penalty_leaves_the_point_alone_and_moves_parameters_and_inputs():
    cell, x, u = DenseCell(3, 8), torch.randn(2, 8, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    jacobian_penalty(cell, x, u).sum().backward()
    assert x.grad is None and u.grad.ne(0).any() and cell.layers[0].weight.grad.ne(0).any()
    with torch.no_grad():
        assert not jacobian_penalty(cell, x, u).requires_grad


def test_penalty_of_a_tuple_is_that_of_the_joined_state():
    W = draw(5, 5)

    def split(state):
        joined = torch.tanh(torch.cat(state, 1) @ W)
        return joined[:, :2], joined[:, 2:]

    x = draw(3, 5)
    parts = jacobian_penalty(split, (x[:, :2], x[:, 2:]), draws=4000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(parts, frobenius(lambda row: torch.tanh(row @ W), x), rtol=0.05, atol=0)


def test_penalty_of_constants_is_zero():
    x, parameter = torch.randn(2, 3), torch.ones(3, requires_grad=True)
    assert jacobian_penalty(lambda x: torch.ones_like(x), x).eq(0).all()
    assert jacobian_penalty(lambda x: parameter.expand(2, 3), x).eq(0).all()
    half = jacobian_penalty(lambda s: (2 * s[0], torch.ones_like(s[1])), (x, x))
    torch.testing.assert_close(half, torch.full((2,), 2.0))  # 3 of 6 entries have the derivative 2
    assert jacobian_penalty(torch.tanh, torch.zeros(0, 3)).shape == (0,)


def test_penalty_differentiates_attention_twice():
    cell, x, u = TransformerCell(8, 2, 16), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    jacobian_penalty(cell, x, u).sum().backward()
    assert cell.state.weight.grad.isfinite().all() and cell.state.weight.grad.ne(0).any()


def test_training_with_the_penalty_shrinks_the_jacobian():
    cell, u = DenseCell(3, 10).double(), draw(8, 3)
    with torch.no_grad():
        cell.layers[0].weight.mul_(1.5)
    model, optimizer = DEQ(cell), torch.optim.Adam(cell.parameters(), 0.02)
    sizes = []
    for _ in range(30):
        x = model(u)
        loss = (x[:, 0] - u[:, 0].sin()).square().mean() + jacobian_penalty(cell, x, u).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sizes.append(frobenius(lambda row: cell(row, u[:1]), x[:1].detach()).item())
    assert sizes[-1] < 0.3 * sizes[0]
