"""fit_states against the network itself, CVXPY, and what it must refuse."""

import copy
import math
import warnings

import cvxpy
import pytest
import torch
from torch import nn

from wellposed.activations import Activation, get_activation
from wellposed.convex import Design, GroupLasso, States, fit_states, record_states, row_problem, support_mask
from wellposed.convex.matching import Candidates, surviving_entries
from wellposed.errors import InputError, UnknownNameError
from wellposed.models.io.storage import load, save

WIDE = torch.float64


def network(*, bias=True, layer=nn.ReLU, dtype=WIDE, seed=0, gain=3.0):
    torch.manual_seed(seed)
    parts = [nn.Linear(6, 8, bias), layer(), nn.Linear(8, 5, bias), layer(), nn.Linear(5, 3, bias)]
    built = nn.Sequential(*parts).to(dtype)
    with torch.no_grad():
        for part in built:
            if isinstance(part, nn.Linear):
                part.weight *= gain  # so that the network's own rows violate the cap
    return built


def recorded(built=None, samples=80, seed=1, **options):
    built = network(**options) if built is None else built
    dtype = next(built.parameters()).dtype
    u = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed), dtype=WIDE).to(dtype)
    return built, u, record_states(built, [u])


@pytest.mark.parametrize("kappa", [0.3, 0.99])
@pytest.mark.parametrize("support", ["layered", "network", "triangular"])
def test_rescaled_fit_computes_what_the_network_computes(kappa, support):
    built, _u, states = recorded()
    model, report = fit_states(states, kappa=kappa, support=support)
    fresh = torch.randn(40, 6, dtype=WIDE)
    assert torch.allclose(model(fresh), built(fresh), atol=1e-5)
    assert float(model.A.detach().abs().sum(1).max()) <= kappa
    assert report.units == "form" and max(report.exponents) - min(report.exponents) >= 1
    assert report.certificate.holds and report.certificate.value <= kappa * (1 + 1e-12)
    assert float(report.relative_gap.max()) <= 1e-6
    assert float(report.state_error.max()) < 1e-5 and report.output_error < 1e-5


def test_without_rescaling_the_cap_costs_accuracy():
    """The same network in its own units does not fit in the ball, and the report says so."""
    _, _, states = recorded()
    _, report = fit_states(states, kappa=0.3, rescale=False)
    assert report.units == "none" and float(report.state_error.max()) > 1e-2
    assert float(report.norm.max()) <= 0.3 and float(report.norm.max()) > 0.299


def test_row_bound_caps_the_whole_row():
    _, _, states = recorded(bias=False)
    model, report = fit_states(states, kappa=0.5, bound="row", rescale=False)
    whole = (model.A.abs().sum(1) + model.B.abs().sum(1)).detach()
    assert float(whole.max()) <= 0.5 and float(report.state_residual.max()) > 0.05
    model, _ = fit_states(states, kappa=0.5, rescale=False)
    assert float((model.A.abs().sum(1) + model.B.abs().sum(1)).detach().max()) > 0.5


def test_undone_units_are_those_of_the_recording():
    built, u, states = recorded()
    model, _ = fit_states(states, kappa=0.5, rescale="undo")
    assert float(model.A.detach().abs().sum(1).max()) > 1 and model.certificate().holds
    assert torch.allclose(model(u), built(u), atol=1e-5)
    assert torch.allclose(model.equilibrium(u).value[:, :13], states.X, atol=1e-5)


def test_units_from_data_where_there_is_no_form():
    built, u, states = recorded()
    bare = States(states.U, states.Z, states.X, states.Y, states.blocks, states.activations)
    model, report = fit_states(bare, kappa=0.5)
    assert report.units == "data" and float(report.state_error.max()) < 1e-4
    assert torch.allclose(model(u), built(u), atol=1e-3)


def test_float32_stays_within_the_cap():
    _, _u, states = recorded(dtype=torch.float32)
    model, report = fit_states(states, kappa=0.99, support="full", rescale=False)
    assert model.A.dtype == torch.float32
    assert float(model.A.detach().double().abs().sum(1).max()) <= 0.99
    assert float(report.norm.max()) > 0.989


def test_other_activations_keep_their_units_inside():
    built, u, states = recorded(layer=nn.Tanh)
    model, _report = fit_states(states, kappa=0.5)
    assert float(model.A.detach().abs().sum(1).max()) <= 0.5
    assert torch.allclose(model(u), built(u), atol=1e-5)


def test_undone_units_keep_the_activation(tmp_path):
    built, u, states = recorded(layer=nn.Tanh)
    model, _ = fit_states(states, kappa=0.5, rescale="undo")
    assert model.activation.name == "tanh" and torch.allclose(model(u), built(u), atol=1e-5)
    save(model, tmp_path / "fit.safetensors")
    assert torch.equal(load(tmp_path / "fit.safetensors")(u), model(u))


def test_steep_activations_get_a_smaller_cap():
    _, _, states = recorded(layer=nn.GELU)
    gamma = get_activation("gelu").lipschitz()
    model, report = fit_states(states, kappa=0.9, rescale=False)
    assert (
        report.kappa == pytest.approx(0.9 / gamma) and float(model.A.detach().abs().sum(1).max()) <= report.kappa
    )


def test_supports():
    _, _, states = recorded()
    n = 13
    for name in ("full", "hollow", "triangular", "layered"):
        model, _ = fit_states(states, kappa=0.9, support=name)
        allowed = support_mask(states, name)
        weights = torch.cat([model.A, model.B], dim=1).detach()
        assert not bool((weights[:n, :n] * ~allowed[:, :n]).any())
    assert not support_mask(states, "hollow")[:, :n].diagonal().any()
    assert support_mask(states, "layered").sum() == 5 * 8 + 8 * 6
    mask = torch.zeros(n, n, dtype=torch.bool)
    model, _ = fit_states(states, support=mask, rescale=False)
    assert not bool(model.A.any()) and bool(model.B.any())
    empty = torch.zeros(n, n + 6, dtype=torch.bool)
    model, report = fit_states(states, support=empty)
    assert not bool(model.B.any()) and float(report.gap.max()) == 0


def test_lasso_agrees_with_cvxpy_and_leaves_the_bias_free():
    _, _, states = recorded()
    model, report = fit_states(states, kappa=0.9, objective="lasso", strength=0.05, rescale=False)
    rows, x = slice(5, 13), states.U  # the first layer reads the inputs alone
    centred = states.Z[:, rows] - states.Z[:, rows].mean(0)
    lasso = 0.05 * float(((x - x.mean(0)).T @ centred).abs().max())
    for i in (0, 3):
        w, b = cvxpy.Variable(6), cvxpy.Variable()
        misfit = cvxpy.sum_squares(x.numpy() @ w + b - states.Z[:, 5 + i].numpy()) / 2
        cvxpy.Problem(cvxpy.Minimize(misfit + lasso * cvxpy.norm1(w))).solve(solver="CLARABEL")
        assert torch.allclose(model.B[5 + i].detach(), torch.tensor(w.value), atol=1e-4)
        assert float(model.bias[5 + i].detach()) == pytest.approx(float(b.value), abs=1e-4)
    assert float(report.relative_gap.max()) < 1e-8 and report.sparsity > 0


def test_ridge_agrees_with_the_closed_form():
    _, _, states = recorded(bias=False)
    model, _ = fit_states(states, kappa=0.9, objective="ridge", strength=0.3, rescale=False)
    G = states.U.T @ states.U
    level = 0.3 * float(G.diagonal().mean())
    expected = torch.linalg.solve(G + level * torch.eye(6, dtype=WIDE), states.U.T @ states.Z[:, 5:13]).T
    assert torch.allclose(model.B[5:13].detach(), expected, atol=1e-8)


def test_elastic_net_lies_between():
    _, _, states = recorded()
    norms = []
    for mix in (0.0, 0.5, 1.0):
        _, report = fit_states(states, objective="elastic-net", strength=0.1, mix=mix)
        norms.append(report.sparsity)
    assert norms[0] == 0 < norms[1] <= norms[2]


def test_group_agrees_with_cvxpy():
    generator = torch.Generator().manual_seed(0)
    M, z = (torch.randn(30, size, generator=generator, dtype=WIDE) for size in (8, 4))
    for capped, kappa in ((8, 0.4), (5, 0.2), (8, 9.0)):
        problem = row_problem(Design.of(M), z, kappa=kappa, capped=capped)
        weight = 0.3 * float(problem.cross.norm(dim=0).max())
        found = GroupLasso(weight).solve(problem)
        W = cvxpy.Variable((4, 8))
        cost = cvxpy.sum_squares(M.numpy() @ W.T - z.numpy()) / 2 + weight * cvxpy.sum(cvxpy.norm2(W, axis=0))
        caps = [cvxpy.norm1(W[i, :capped]) <= kappa for i in range(4)]
        best = cvxpy.Problem(cvxpy.Minimize(cost), caps).solve(solver="CLARABEL")
        ours = float((M @ found.weights.T - z).square().sum() / 2 + weight * found.weights.norm(dim=0).sum())
        assert best - 1e-6 <= ours <= best + float(found.gap.sum()) + 1e-6
        assert float(found.gap.sum()) < 1e-5 * float(found.scale.sum())
        assert bool((found.weights == 0).all(0).any())


def test_group_fit_drops_whole_features():
    _, _, states = recorded()
    model, _report = fit_states(states, objective="group", strength=0.8)
    B = model.B[5:13].detach()
    zero = B == 0
    assert bool((zero.all(0) | ~zero.any(0)).all()) and bool(zero.all(0).any())


def test_robust_and_own_objectives_go_through_cvxpy():
    _, _, states = recorded(samples=40)
    plain, _ = fit_states(states, kappa=0.9)
    robust, _ = fit_states(states, kappa=0.9, objective="robust", strength=0.1)
    own, _ = fit_states(states, kappa=0.9, objective=lambda a, b: cvxpy.sum_squares(b), strength=50.0)
    for model in (robust, own):
        assert float(model.A.detach().abs().sum(1).max()) <= 0.9
        assert float(model.B.detach().abs().sum(1).max()) < 0.9 * float(plain.B.detach().abs().sum(1).max())


def test_equality_meets_the_states():
    _, _, states = recorded(samples=30)
    _, report = fit_states(states, kappa=0.9, objective="lasso", strength=1e-3, equality=True)
    assert float(report.state_residual.max()) < 1e-6
    with pytest.raises(InputError, match="no solution"):
        fit_states(states, kappa=0.3, equality=True, rescale=False)


def test_target_sparsity_by_strength_beats_shrunk_weights():
    _, _, states = recorded(samples=400)
    model, report = fit_states(states, target_sparsity=0.5, objective="lasso")
    assert abs(report.sparsity - 0.5) < 0.02 and report.objective == "lasso" and report.strength > 0
    _, shrunk = fit_states(states, objective="lasso", strength=report.strength)
    assert report.output_error < shrunk.output_error
    assert float(model.A.detach().abs().sum(1).max()) <= 0.99


def test_target_sparsity_keeps_what_costs_most():
    _, _, states = recorded(samples=400)
    model, report = fit_states(states, target_sparsity=0.5)
    assert abs(report.sparsity - 0.5) < 0.02 and float(model.A.detach().abs().sum(1).max()) <= 0.99
    weights = torch.cat([states.form.A.to_dense(), states.form.B.to_dense()], dim=1).abs()
    largest = weights > weights[weights > 0].median()
    _, other = fit_states(states, support=largest, sequential=True)
    assert report.output_error < other.output_error
    _, less = fit_states(states, target_sparsity=0.2)
    assert less.output_error < report.output_error


def test_rise_of_the_misfit_is_that_of_a_new_fit():
    """Removing one entry and fitting the others again costs what the rule says."""
    generator = torch.Generator().manual_seed(0)
    M, z = (torch.randn(30, size, generator=generator, dtype=WIDE) for size in (6, 1))
    problem = row_problem(Design.of(M), z, kappa=math.inf, capped=0)
    everything = torch.ones(1, 6, dtype=torch.bool)
    whole = float(torch.linalg.lstsq(M, z).solution.T.matmul(M.T @ z))
    rises = []
    for j in range(6):
        rest = M[:, [k for k in range(6) if k != j]]
        rises.append(whole - float(torch.linalg.lstsq(rest, z).solution.T.matmul(rest.T @ z)))
    group = Candidates(torch.tensor([0]), torch.arange(6), problem, 1.0)
    kept = surviving_entries([group], everything, 1 / 6)
    assert kept.tolist() == [[j != min(range(6), key=rises.__getitem__) for j in range(6)]]
    assert surviving_entries([group], everything, 0.5).sum() == 3


def test_sequential_fit_sees_its_own_states():
    _, _, states = recorded(samples=400)
    options = dict(objective="lasso", strength=0.1)
    model, report = fit_states(states, sequential=True, **options)
    _, apart = fit_states(states, sequential=False, **options)
    assert report.state_error[0] < apart.state_error[0]
    own = model.equilibrium(states.U).value[:, :13].detach()
    z = own @ model.A[:13, :13].T + states.U @ model.B[:13].T + model.bias[:13]
    factors = torch.tensor([2.0**e for e in report.exponents]).repeat_interleave(torch.tensor(states.blocks))
    wanted = states.Z * factors
    for k, rows in enumerate((slice(0, 5), slice(5, 13))):
        ratio = (z - wanted)[:, rows].norm() / wanted[:, rows].norm()
        assert float(report.state_residual[k]) == pytest.approx(float(ratio.detach()), rel=1e-5)


def test_output_is_fitted_on_own_states_and_may_be_sparse():
    built, u, states = recorded(samples=400)
    options = dict(objective="lasso", strength=0.1)
    _, refitted = fit_states(states, **options)
    _, kept = fit_states(states, refit_output=False, **options)
    assert refitted.output_error < kept.output_error
    dense, _ = fit_states(states, refit_output=False)
    assert torch.allclose(dense(u), built(u), atol=1e-5)
    sparse, _ = fit_states(states, objective="lasso", strength=0.5, refit_output="sparse")
    assert bool((sparse.C[:, :5] == 0).any())


def test_report_tells_score_and_notes():
    built, u, states = recorded(samples=5)
    labels = built(u).argmax(1)
    model, report = fit_states(states, targets=labels)
    assert report.score == "accuracy" and report.before == 1.0
    assert report.after == float((model(u).argmax(1) == labels).double().mean())
    text = str(report)
    assert "accuracy: 100.00 % before" in text and "5 samples for rows of up to 9" in text and "relu" in text
    real = built(u).detach() + 1
    _, report = fit_states(states, targets=real)
    assert report.score == "mean squared error" and report.before == pytest.approx(1.0)


def test_model_is_saved(tmp_path):
    _, u, states = recorded()
    model, _ = fit_states(states)
    save(model, tmp_path / "fit.safetensors")
    assert torch.equal(load(tmp_path / "fit.safetensors")(u), model(u))


def test_dead_units_are_noted():
    built = network()
    with torch.no_grad():
        built[0].bias[2] = -1e3
    built, u, states = recorded(built)
    model, report = fit_states(states)
    assert any("1 states are zero" in note for note in report.notes)
    assert torch.allclose(model(u), built(u), atol=1e-5)


def test_convolution_with_pooling_is_fitted():
    torch.manual_seed(0)
    built = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)).double()
    u = torch.randn(300, 1, 6, 6, dtype=WIDE)
    states = record_states(built, [u])
    model, _report = fit_states(states, kappa=0.9, support="network")
    assert torch.allclose(model(u.flatten(1)), built(u), atol=1e-4)


def test_jobs_and_solver_are_passed_on():
    _, _, states = recorded(samples=40)
    one, _ = fit_states(states, kappa=0.5, rescale=False)
    other, _report = fit_states(states, kappa=0.5, rescale=False, solver="conic", jobs=2)
    assert torch.allclose(one.A, other.A, atol=1e-4)
    done = []
    fit_states(states, progress=lambda k, total: done.append(k))
    assert done


def replaced(states, **changes):
    same = {name: getattr(states, name) for name in ("U", "Z", "X", "Y", "blocks", "activations")}
    return States(**{**same, **changes})


@pytest.mark.parametrize("kappa", [0.0, 1.0, -0.5, 2.0, math.nan])
def test_kappa_outside_is_refused(kappa):
    with pytest.raises(InputError, match="kappa must lie strictly between 0 and 1"):
        fit_states(recorded()[2], kappa=kappa)


def test_bad_states_are_refused():
    states = recorded()[2]
    broken = states.X.clone()
    broken[7, 2] = math.nan
    with pytest.raises(InputError, match="X has NaN or infinity in 1 of 80 samples, the first is sample 7"):
        fit_states(replaced(states, X=broken))
    constant = [part[:1].expand(80, -1) for part in (states.U, states.Z, states.X, states.Y)]
    with pytest.raises(InputError, match="the same states"):
        fit_states(replaced(states, **dict(zip("UZXY", constant, strict=True))))
    with pytest.raises(InputError, match="no states to fit"):
        fit_states(states.subset(slice(0, 0)))
    jump = Activation("jump", torch.sign, constants={"inf": math.inf})
    with pytest.raises(InputError, match="'jump' has no Lipschitz constant"):
        fit_states(replaced(states, activations=(jump, jump)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "lasso", "strength": -1.0}, "strength must be"),
        ({"target_sparsity": 1.0}, "target_sparsity is a fraction"),
        ({"target_sparsity": 0.5, "objective": "ridge"}, "needs a sparse objective"),
        ({"rescale": "maybe"}, "rescale is"),
        ({"refit_output": "no"}, "refit_output is"),
        ({"bound": "column"}, "bound must be"),
        ({"sequential": True, "support": "full"}, "support without loops"),
        ({"support": torch.ones(2, 2, dtype=torch.bool)}, "a support is a bool mask"),
        ({"targets": torch.zeros(3)}, "as many targets"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        fit_states(recorded()[2], **options)


def test_unknown_names_and_keywords():
    states = recorded()[2]
    with pytest.raises(UnknownNameError, match="objective"):
        fit_states(states, objective="laso")
    with pytest.raises(UnknownNameError, match="support"):
        fit_states(states, support="layers")
    with pytest.raises(TypeError):
        fit_states(states, kapa=0.3)


def test_states_are_not_changed():
    _, _, states = recorded()
    before = copy.deepcopy([states.X, states.Z, states.U, states.Y])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_states(states, target_sparsity=0.5)
    after = (states.X, states.Z, states.U, states.Y)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
