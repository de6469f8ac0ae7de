"""Groups of features: whole or not at all, the cheapest first, against brute force."""

import pytest
import torch

from wellposed.activations import get_activation
from wellposed.convex import States, eliminate_features, record_states, support_mask
from wellposed.convex.eliminate import FeatureGroups, FeatureProblem, Readers, removal_order
from wellposed.errors import InputError


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_layer(seed=0):
    """Three ReLU units on six inputs; units do not read each other."""
    u, weights = draw(200, 6, seed=seed), draw(3, 6, seed=seed + 1)
    weights[:, 4:] *= 0.05
    z = u @ weights.T
    return States(u, z, z.relu(), z.relu(), (3,), (get_activation("relu"),))


def columns(states):
    mask = support_mask(states, "layered")
    return FeatureProblem.of(states, 0.9, 0.0, "row", mask, torch.ones(3, dtype=torch.float64))


def test_labels_become_groups():
    features = torch.tensor([True, True, False, True, True, True])
    groups = FeatureGroups.of(torch.tensor([-1, 7, 7, 2, 7, 2]), features)
    assert [own.tolist() for own in groups.members] == [[3, 5], [1, 4]]
    assert groups.removable == 4 and groups.fixed.tolist() == [True, *[False] * 5] and not groups.single
    alone = FeatureGroups.of(None, features)
    assert [own.tolist() for own in alone.members] == [[0], [1], [3], [4], [5]] and alone.single


@pytest.mark.parametrize("labels", [torch.zeros(5, dtype=torch.long), torch.zeros(6), torch.full((6,), -2)])
def test_wrong_labels(labels):
    with pytest.raises(InputError, match="groups must be"):
        FeatureGroups.of(labels, torch.ones(6, dtype=torch.bool))


def test_groups_are_never_cut():
    groups = FeatureGroups.of(torch.tensor([0, 0, 1, 1, 1, 2]), torch.ones(6, dtype=torch.bool))
    kept = torch.ones(6, dtype=torch.bool)
    order = [5, 2, 3, 4, 0, 1]
    assert [int(groups.without(kept, order, count).sum()) for count in (6, 5, 4, 3, 2, 1)] == [6, 5, 5, 5, 2, 2]
    gone = torch.tensor([True, False, True, True, True, False])
    assert groups.whole(gone).tolist() == [False, False, True, True, True, False]


def test_rise_of_a_group_is_what_a_fit_without_it_loses():
    M, Z, price = draw(80, 6), draw(80, 2, seed=1), torch.tensor([2.0, 0.5], dtype=torch.float64)
    readers = Readers.of(M, Z, torch.arange(2), torch.arange(6), price)

    def misfit(left):
        """The damped misfit of the best weights on some columns."""
        gram = M[:, left].T @ M[:, left]
        damping = 1e-3 * float((M.T @ M).diagonal().mean()) * torch.eye(len(left), dtype=torch.float64)
        weights = torch.linalg.solve(gram + damping, M[:, left].T @ Z)
        return (price * ((Z - M[:, left] @ weights).square().sum(0) + (damping @ weights.square()).sum(0))).sum()

    for gone in ([0], [1, 4], [2, 3, 5]):
        rise = float(misfit([j for j in range(6) if j not in gone]) - misfit(list(range(6))))
        assert readers.rise(torch.tensor(gone)) == pytest.approx(rise, rel=1e-9)
    readers.without(torch.tensor([0]))
    rise = float(misfit([3, 5]) - misfit([1, 2, 3, 4, 5]))
    assert readers.rise(torch.tensor([1, 2, 4])) == pytest.approx(rise, rel=1e-9)


def test_the_cheapest_group_goes_first():
    states = one_layer()
    work = columns(states)
    labels = torch.tensor([-1, -1, -1, 0, 0, 1, 1, 2, 2])
    order = removal_order(work, (3,), 2, FeatureGroups.of(labels, work.features))
    assert sorted(order[:2]) == [7, 8]  # the inputs with small weights
    assert len(order) == 4 and {frozenset(order[:2]), frozenset(order[2:])} <= {
        frozenset(pair) for pair in ((3, 4), (5, 6), (7, 8))
    }


@pytest.mark.parametrize("order", ["misfit", "share", "random"])
def test_steps_remove_whole_groups(order):
    labels = torch.tensor([-1, -1, -1, 0, 0, 1, 1, 2, 2])
    path = eliminate_features(
        one_layer(), kappa=0.9, method="ranked", order=order, keep=(5, 3), groups=labels, retrain=False
    )
    inputs = [step.kept[3:].view(3, 2) for step in path.steps]
    assert all(bool((pair[:, 0] == pair[:, 1]).all()) for pair in inputs)
    assert [step.removed for step in path.steps] == [0, 0, 2]
    assert [step.fraction for step in path.steps] == [0, 0, pytest.approx(1 / 3)]


def test_groups_of_one_are_no_groups():
    states = one_layer()
    alone, given = (
        eliminate_features(states, kappa=0.9, method="ranked", keep=(4, 2), groups=groups, retrain=False)
        for groups in (None, torch.arange(9))
    )
    assert all(torch.equal(a.kept, b.kept) for a, b in zip(alone.steps, given.steps, strict=True))


def test_certified_features_do_not_depend_on_groups():
    network = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
    states = record_states(network, [draw(100, 6)])
    labels = torch.tensor([*range(4), 4, 4, 4, 5, 5, 5])
    plain, grouped = (
        eliminate_features(states, kappa=0.3, groups=groups, retrain=False) for groups in (None, labels)
    )
    assert torch.equal(plain.certified, grouped.certified)
    assert torch.equal(plain.steps[1].kept, plain.features & ~plain.certified)
    whole = [bool(plain.certified[labels == name].all()) for name in range(6)]
    left = [bool(plain.features[j]) and not whole[name] for j, name in enumerate(labels.tolist())]
    assert grouped.steps[1].kept.tolist() == left
