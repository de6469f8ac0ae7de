"""eliminate_features: certified removals are right, ranks and the literal rule are kept apart."""

import cvxpy
import pytest
import torch
from torch import nn

from wellposed.convex import eliminate_features, record_states, support_mask
from wellposed.convex.assemble import unchanged
from wellposed.convex.eliminate import FeatureProblem
from wellposed.errors import InputError, UnknownNameError
from wellposed.forms import ImplicitForm

WIDE = torch.float64


def recorded(samples=120, seed=0, dead=()):
    """A network that ignores some of its inputs."""
    torch.manual_seed(seed)
    layers = [nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)]
    network = nn.Sequential(*layers).double()
    with torch.no_grad():
        network[0].weight *= 3
        network[0].weight[:, list(dead)] = 0
    u = torch.randn(samples, 10, dtype=WIDE)
    return network, u, record_states(network, [u])


def columns(states, kappa=0.5, gamma=0.0, bound="row", support="layered"):
    mask = support_mask(states, support)
    return FeatureProblem.of(states, kappa, gamma, bound, mask, unchanged(states).factors)


@pytest.mark.parametrize("gamma", [0.0, 2.0])
@pytest.mark.parametrize("support", ["layered", "full", "hollow"])
def test_certified_entries_are_zero_in_an_independent_solution(gamma, support):
    _, _, states = recorded(dead=(1, 7))
    work = columns(states, gamma=gamma, support=support)
    found = work.screened(work.features)
    M = torch.cat([work.X, work.U], dim=1).numpy()
    marked = 0
    for i in (0, 3, 5, 11):
        allowed = work.mask[i].numpy()
        w = cvxpy.Variable(M.shape[1])
        misfit = cvxpy.sum_squares(M @ w - work.Z[:, i].numpy()) / 2 + gamma / 2 * cvxpy.sum_squares(w)
        rules = [cvxpy.norm1(w) <= 0.5] + ([w[~allowed] == 0] if not allowed.all() else [])
        cvxpy.Problem(cvxpy.Minimize(misfit), rules).solve(solver="CLARABEL")
        zeros = found.zeros[i].numpy()
        marked += int((zeros & allowed).sum())
        assert abs(w.value[zeros]).max() < 1e-4 if zeros.any() else True
        assert torch.allclose(torch.tensor(w.value), found.weights[i], atol=1e-3)
    assert marked > 0


def test_certified_removal_changes_no_solution():
    _, _, states = recorded(dead=(1, 7))
    work = columns(states, kappa=0.3, support="full")
    before = work.screened(work.features)
    kept = work.features & ~before.certified
    assert 0 < int(before.certified.sum()) < len(kept)
    after = work.screened(kept)
    rows = work.rows(kept)
    assert torch.allclose(before.weights[rows], after.weights[rows], atol=1e-7)


def test_removed_column_is_zero_in_every_row_that_matters_and_unread():
    _, _, states = recorded(dead=(1, 7))
    work = columns(states, kappa=0.3, support="full")
    found = work.screened(work.features)
    rows = work.rows(work.features & ~found.certified)
    assert bool(found.zeros[rows][:, found.certified].all())
    gone = ~rows
    assert not bool((work.read[: len(rows)] & gone).any())  # what the output reads keeps its row
    assert bool(rows[:4].all())


def test_state_goes_with_its_row_only_if_nothing_reads_it():
    """Input 2 feeds state 1 alone; state 1 feeds nothing, so both can go; state 0 is the output."""
    B = torch.tensor([[4.0, 0, 0], [0, 0, 4.0]], dtype=WIDE)
    C = torch.tensor([[1.0, 0.0]], dtype=WIDE)
    u = torch.randn(80, 3, generator=torch.Generator().manual_seed(0), dtype=WIDE)
    states = record_states(ImplicitForm(torch.zeros(2, 2, dtype=WIDE), B, C), [u])
    path = eliminate_features(states, kappa=0.5, support="hollow")
    assert path.certified.tolist() == [True, True, False, True, True]  # state 0 is read, but by no row
    assert path.steps[-1].report.blocks == (1,) and path.steps[-1].model.A.shape == (1, 1)


def test_inactive_cap_certifies_nothing_by_the_cap():
    """Where the cap is slack the gradient vanishes at the solution and no entry can be proven zero."""
    _, _, states = recorded()
    work = columns(states, kappa=1e3)
    assert int(work.screened(work.features).zeros[:, :][work.mask].sum()) == 0


def test_literal_rule_removes_what_is_needed():
    _, _, states = recorded(dead=(1, 7))
    path = eliminate_features(states, kappa=0.5, method="dual-literal", retrain=False)
    kept = path.steps[-1].kept
    assert int(kept.sum()) == 2
    work = columns(states)
    needed = work.screened(work.features).share > 0.01
    assert int((needed & ~kept & work.features).sum()) > 0  # true support is gone
    certified = eliminate_features(states, kappa=0.5, retrain=False)
    assert not bool((needed & certified.certified).any())


def test_ranked_steps_follow_keep_and_the_curve():
    network, u, states = recorded(samples=300, dead=(1, 7))
    labels = network(u).argmax(1)
    path = eliminate_features(states, kappa=0.9, method="ranked", keep=(16, 0.5, 4), targets=labels)
    assert [int(step.kept.sum()) for step in path.steps] == [18, 16, 9, 4]
    for one, other in zip(path.steps, path.steps[1:], strict=False):
        assert not bool((other.kept & ~one.kept).any())
    assert not path.steps[1].kept[12 + 1] and not path.steps[1].kept[12 + 7]  # unused inputs go first
    fractions, scores = zip(*path.curve(), strict=True)
    assert scores[0] == 1.0 and scores[1] == 1.0 and scores[-1] < 0.95
    assert fractions == (0.0, 2 / 18, 0.5, 14 / 18)
    model = path.steps[-1].model
    unused = ~path.steps[-1].kept[12:]
    assert not bool(model.B[:, unused].any()) and path.steps[-1].report.certificate.holds
    assert "18 features" in str(path) and "50.0 %" in str(path)


def test_evaluate_replaces_the_score():
    _, _, states = recorded()
    path = eliminate_features(states, kappa=0.9, method="ranked", keep=0.5, evaluate=lambda model: 7.0)
    assert [score for _, score in path.curve()] == [7.0, 7.0]


def test_state_bound_never_removes_inputs():
    _, _, states = recorded(dead=(1,))
    path = eliminate_features(states, kappa=0.3, bound="state", support="full", retrain=False)
    assert not bool(path.certified[12:].any()) and float(path.slack[12:].max()) < 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kappa": 1.0}, "kappa must lie"),
        ({"kappa": 0.5, "gamma": -1.0}, "gamma must be"),
        ({"kappa": 0.5, "method": "ranked", "keep": 99}, "whole numbers up to 18"),
        ({"kappa": 0.5, "method": "ranked", "keep": 1.5}, "fractions up to 1"),
        ({"kappa": 0.5, "method": "ranked", "keep": (0.2, 0.5)}, "must not grow"),
        ({"kappa": 0.5, "keep": 3}, "use method='ranked'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        eliminate_features(recorded()[2], **options)


def test_unknown_method():
    with pytest.raises(UnknownNameError, match="method"):
        eliminate_features(recorded()[2], kappa=0.5, method="rank")
