"""Fits of shared rows: against a conic solver, automatic differentiation and the dense matrix of the form."""

from itertools import pairwise

import cvxpy
import pytest
import torch
from torch import nn

from wellposed.convert import to_implicit
from wellposed.convex import (
    FilterNetwork,
    Filters,
    PositionSampler,
    RowUnits,
    fit_shared,
    fit_shared_path,
    shared_layers,
)
from wellposed.convex.shared import given_by_rows, positions, read_by_rows, row_weights, set_rows, widths
from wellposed.errors import IllPosedError, InputError, UnknownNameError

EVERYWHERE = PositionSampler(samples=10**6)


def small_network():
    """Two layers of filters on a 6 x 6 image, the second with a shortcut from the input."""
    torch.manual_seed(0)
    first = Filters([nn.Conv2d(2, 3, 3, 2, padding=1, bias=False)], torch.randn(3))
    second = Filters(
        [nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Conv2d(2, 4, 1, 2, bias=False)], torch.randn(4)
    )
    third = Filters([nn.Conv2d(4, 3, 3, padding=1, bias=False), nn.Conv2d(3, 3, 1, bias=False)], torch.randn(3))
    readout = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    return FilterNetwork([first, second, third], [(0,), (1, 0), (2, 1)], readout).double()


@pytest.fixture
def network():
    return small_network()


@pytest.fixture
def u():
    return torch.randn(40, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def units_of(network, kappa):
    exponents = network.exponents(kappa)
    exponents = (exponents[0], *exponents)
    return {
        f"layers.{k}": RowUnits(
            tuple(exponents[k + 1] - exponents[source] for source in read), tuple(source > 0 for source in read)
        )
        for k, read in enumerate(network.sources)
        if 0 not in read or len(read) == 1
    }


def test_network_equals_its_form(network, u):
    with torch.no_grad():
        assert torch.allclose(to_implicit(network, (2, 6, 6))(u), network(u), atol=1e-12)


@pytest.mark.parametrize(
    "layer", [nn.Linear(5, 3), nn.Conv2d(2, 3, (3, 2), (2, 1), padding=(1, 0), dilation=(1, 2))]
)
def test_rows_times_weights_are_the_layer(layer):
    x = torch.randn(4, 7, 5) if isinstance(layer, nn.Linear) else torch.randn(4, 2, 7, 8)
    z = layer(x)
    count, each = positions(layer, z)
    places = torch.randperm(count * each)[:20]
    read = torch.cat(read_by_rows(layer, (x,), places), dim=1)
    assert torch.allclose(read @ row_weights(layer).mT + layer.bias, given_by_rows(layer, z, places), atol=1e-5)
    assert read.shape[1] == sum(widths(layer))


def test_weights_return_to_their_places(network):
    layer = network.layers[1]
    weights = torch.randn_like(row_weights(layer))
    set_rows(layer, weights, torch.zeros(4))
    assert torch.equal(row_weights(layer), weights)
    plain = nn.Conv2d(2, 3, 3, bias=False)
    set_rows(plain, row_weights(plain), torch.ones(3))
    assert plain.bias.tolist() == [1.0, 1.0, 1.0]


def test_capped_filter_agrees_with_a_conic_solver(network, u):
    """One problem of a layer with bias, both inputs and a cap that binds, stated anew for CVXPY."""
    own = row_weights(network.layers[1]).abs().sum(1)
    kappa = float(own.min()) / 2
    fitted, report = fit_shared(network, [u], layers=["layers.1"], kappa=kappa, bound="row", sampler=EVERYWHERE)
    data = PositionSampler(samples=10**6).run(network, {"layers.1": network.layers[1]}, [u])["layers.1"]
    M, z = torch.cat(data.parts, dim=1).numpy(), data.targets.numpy()
    w, b = cvxpy.Variable((4, M.shape[1])), cvxpy.Variable((4, 1))
    misfit = cvxpy.sum_squares(w @ M.T + b @ torch.ones(1, len(M)).numpy() - z.T)
    problem = cvxpy.Problem(cvxpy.Minimize(misfit), [cvxpy.norm1(w[i]) <= kappa for i in range(4)])
    problem.solve(solver="CLARABEL")
    assert torch.allclose(row_weights(fitted.layers[1]), torch.from_numpy(w.value), atol=2e-5)
    assert torch.allclose(fitted.layers[1].bias, torch.from_numpy(b.value)[:, 0], atol=1e-4)
    assert float(report.relative_gap.max()) < 1e-9 and bool((report.norm > 0.999 * kappa).all())


def test_pruned_filters_are_stationary_in_the_shared_weights(network, u):
    """The gradient by automatic differentiation through the convolutions vanishes on the support."""
    fitted, report = fit_shared(network, [u], target_sparsity=0.6, sampler=EVERYWHERE)
    assert report.sparsity == pytest.approx(0.6, abs=0.01)
    with torch.no_grad():
        wanted = network.layers[1](torch.relu(network.layers[0](u)), u)
        x = torch.relu(fitted.layers[0](u))
    layer = fitted.layers[1]
    loss = (layer(x, u) - wanted).square().sum()
    loss.backward()
    for part in layer.convolutions:
        kept = part.weight.detach() != 0
        assert float(part.weight.grad[kept].abs().max()) < 1e-6 * float(wanted.square().sum())
    gone = layer.convolutions[0].weight.detach() == 0
    assert 10 < int(gone.sum()) < 100
    assert float(layer.convolutions[0].weight.grad[gone].abs().max()) > 0.1  # elsewhere it does not
    assert float(layer.bias.grad.abs().max()) < 1e-6 * float(wanted.square().sum())


def test_a_fit_of_everything_is_the_network_itself(network, u):
    fitted, report = fit_shared(network, list(u.split(10)), sampler=EVERYWHERE)
    with torch.no_grad():
        assert torch.allclose(fitted(u), network(u), atol=1e-8)
    assert max(layer.misfit for layer in report.layers) < 1e-6


def test_certified_rows_bound_the_dense_matrix(network, u):
    """In the units of the fit |A|_inf of the unrolled form is the largest norm of a shared row."""
    torch.manual_seed(3)
    first = Filters([nn.Conv2d(2, 3, 3, padding=1, bias=False)], torch.randn(3))
    second = Filters([nn.Conv2d(3, 4, 3, padding=1, bias=False)], torch.randn(4))
    third = Filters([nn.Conv2d(4, 3, 3, padding=1, bias=False), nn.Conv2d(3, 3, 1, bias=False)], torch.randn(3))
    chain = FilterNetwork([first, second, third], [(0,), (1,), (2, 1)], nn.Flatten()).double()
    kappa = 0.9
    fitted, report = fit_shared(chain, [u], units=units_of(chain, kappa), kappa=kappa, target_sparsity=0.3)
    assert report.certified
    A = to_implicit(fitted, (2, 6, 6)).A.to_dense()
    e = chain.exponents(kappa)
    scale = torch.cat([torch.full((size * 36,), 2.0 ** e[k]) for k, size in ((2, 3), (1, 4), (0, 3))]).double()
    norm = (A.abs() * scale[:, None] / scale).sum(1).max()
    assert float(norm) == pytest.approx(float(report.norm.max()), rel=1e-9) and float(norm) <= kappa
    assert float(A.abs().sum(1).max()) > 1  # without units nothing would be proven
    same, _ = fit_shared(chain, [u], units=units_of(chain, kappa), kappa=kappa, sampler=EVERYWHERE)
    with torch.no_grad():
        assert torch.allclose(same(u), chain(u), atol=1e-8)  # the cap costs nothing in these units


def test_entries_of_a_path_are_nested_and_layerwise_is_even(network, u):
    path = list(fit_shared_path(network, [u], (0.3, 0.6, 0.9), sampler=EVERYWHERE))
    masks = [[row_weights(layer) != 0 for layer in shared_layers(model).values()][:3] for model, _ in path]
    for before, after in pairwise(masks):
        assert all(bool((one | ~other).all()) for one, other in zip(before, after, strict=True))
    _, report = fit_shared(network, [u], target_sparsity=0.5, layerwise=True, sampler=EVERYWHERE)
    shares = [int(layer.nonzeros.sum()) / layer.own for layer in report.layers]
    assert max(shares) - min(shares) < 0.05


def test_network_support_adds_no_entries(network, u):
    with torch.no_grad():
        network.layers[0].convolutions[0].weight[0] = 0.0
    fitted, _ = fit_shared(network, [u], support="network")
    assert bool((row_weights(fitted.layers[0])[0] == 0).all())


def test_sequential_fits_make_good_for_the_layers_before(network, u):
    """The first layers are the same; then the second one is best on what the first gives, or on what it should."""
    errors, firsts = [], []
    with torch.no_grad():
        wanted = network.layers[1](torch.relu(network.layers[0](u)), u)
        for sequential in (True, False):
            how = {"target_sparsity": 0.8, "layerwise": True, "sequential": sequential, "sampler": EVERYWHERE}
            fitted, _ = fit_shared(network, [u], layers=["layers.0", "layers.1"], **how)
            firsts.append(row_weights(fitted.layers[0]))
            errors.append(float((fitted.layers[1](torch.relu(fitted.layers[0](u)), u) - wanted).norm()))
    assert torch.allclose(*firsts) and errors[0] < 0.99 * errors[1], errors


def test_words_that_are_padding_do_not_count():
    torch.manual_seed(0)
    network, u = nn.Sequential(nn.Linear(3, 2)), torch.randn(5, 4, 3)
    u[:, 2:] = 1e6
    how = PositionSampler(samples=100, valid=lambda x: x.abs().amax(-1) < 1e3)
    found = how.run(network, shared_layers(network), [u])["0"]
    assert len(found.targets) == 10 and float(found.parts[0].abs().max()) < 1e3


def test_a_layer_alone_has_the_positions_it_has_among_others(network, u):
    layers = {name: layer for name, layer in shared_layers(network).items() if "layers" in name}
    together = PositionSampler(samples=50).run(network, layers, [u])
    alone = PositionSampler(samples=50).run(network, {"layers.1": layers["layers.1"]}, [u])
    assert torch.equal(together["layers.1"].targets, alone["layers.1"].targets)
    other = PositionSampler(samples=50, seed=1).run(network, {"layers.1": layers["layers.1"]}, [u])
    assert not torch.equal(other["layers.1"].targets, alone["layers.1"].targets)
    assert not any(layer._forward_hooks for layer in layers.values())


def test_report_says_what_came_of_it(network, u):
    _, report = fit_shared(network, [u], target_sparsity=0.5)
    facts = report.facts()
    assert facts["kappa"] is None and len(facts["layers"]) == 4 and not facts["certified"]
    assert "layers.1" in str(report) and "% of the weights gone" in str(report)


def test_errors_say_what_to_do(network, u):
    with pytest.raises(InputError, match=r"there are layers\.0"):
        fit_shared(network, [u], layers=["layers.9"])
    with pytest.raises(InputError, match="target_sparsity"):
        fit_shared(network, [u], target_sparsity=1.0)
    with pytest.raises(UnknownNameError, match="layered"):
        fit_shared(network, [u], support="full")
    with pytest.raises(TypeError, match="positions"):
        fit_shared(network, [u], positions=3)
    with pytest.raises(InputError, match="as many shifts"):
        fit_shared(network, [u], units={"layers.1": RowUnits((0.0,), (True,))})
    with pytest.raises(InputError, match="states come first"):
        RowUnits((0.0, 0.0), (False, True))
    with pytest.raises(InputError, match="one group"):
        fit_shared(nn.Sequential(nn.Conv2d(2, 2, 3, groups=2)), [u.float()])
    with pytest.raises(InputError, match="in numbers"):
        fit_shared(nn.Sequential(nn.Conv2d(2, 2, 3, padding="same")), [u.float()])
    with pytest.raises(InputError, match="must mark 40 x 36"):
        fit_shared(
            nn.Sequential(nn.Conv2d(2, 2, 1)), [u.float()], sampler=PositionSampler(valid=lambda x: x[:, 0, 0] > 0)
        )
    with pytest.raises(InputError, match="without biases"):
        Filters([nn.Conv2d(2, 2, 1)], torch.zeros(2))
    with pytest.raises(InputError, match="source from 0"):
        FilterNetwork([Filters([nn.Conv2d(2, 2, 1, bias=False)], torch.zeros(2))], [(1,)], nn.Flatten())


def test_a_layer_that_is_called_twice_or_never_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, u):
            return self.layer(self.layer(u))

    with pytest.raises(InputError, match="called twice"):
        fit_shared(Twice(), [torch.randn(4, 3)])
    with pytest.raises(InputError, match="never calls other"):
        PositionSampler().run(nn.Sequential(nn.ReLU()), {"other": nn.Linear(3, 3)}, [torch.randn(4, 3)])


def test_a_row_that_rounding_moves_over_the_cap_is_noticed(network, u, monkeypatch):
    monkeypatch.setattr("wellposed.convex.shared.upward", lambda value, terms: value * 1.5)
    with pytest.raises(IllPosedError, match="above"):
        fit_shared(network, [u], kappa=0.1, bound="row")
