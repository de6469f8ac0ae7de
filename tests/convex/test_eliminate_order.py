"""The order in which features go: rises against refitting from scratch, rows that go with their state."""

import numpy
import pytest
import torch
from torch import nn

from wellposed.convex import eliminate as module
from wellposed.convex import eliminate_features, record_states, support_mask
from wellposed.convex.assemble import unchanged
from wellposed.convex.eliminate import FeatureProblem, Readers, removal_order
from wellposed.errors import UnknownNameError

WIDE = torch.float64


def recorded(samples=200, seed=0, inputs=8):
    torch.manual_seed(seed)
    layers = [nn.Linear(inputs, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)]
    network = nn.Sequential(*layers).double()
    mixing = torch.randn(inputs, inputs, dtype=WIDE)  # correlated inputs
    u = torch.randn(samples, inputs, dtype=WIDE) @ mixing
    return network, u, record_states(network, [u])


def columns(states, support="triangular"):
    mask = support_mask(states, support)
    return FeatureProblem.of(states, 0.9, 0.0, "row", mask, unchanged(states).factors)


def misfit(M, Z, ridge):
    """|MW' - Z|^2 + ridge |W|^2 of every target at its least, by an augmented least-squares problem."""
    d = M.shape[1]
    tall = numpy.vstack([M, numpy.sqrt(ridge) * numpy.eye(d)])
    right = numpy.vstack([Z, numpy.zeros((d, Z.shape[1]))])
    w = numpy.linalg.lstsq(tall, right, rcond=None)[0]
    return ((tall @ w - right) ** 2).sum(0)


def test_rises_equal_refitting_without_the_column_also_after_removals():
    generator = torch.Generator().manual_seed(0)
    M = torch.randn(40, 7, generator=generator, dtype=WIDE) @ torch.randn(7, 7, generator=generator, dtype=WIDE)
    Z, price = torch.randn(40, 3, generator=generator, dtype=WIDE), torch.tensor([1.0, 0.0, 4.0], dtype=WIDE)
    readers = Readers.of(M, Z, torch.arange(3), torch.arange(7), price)
    ridge = module.RIDGE * float(M.square().sum(0).mean())
    left = list(range(7))
    for gone in ([], [4], [1, 6]):
        readers.without(torch.tensor(gone, dtype=torch.long))
        left = [j for j in left if j not in gone]
        whole = misfit(M[:, left].numpy(), Z.numpy(), ridge)
        for j in left:
            rest = [k for k in left if k != j]
            wanted = (price.numpy() * (misfit(M[:, rest].numpy(), Z.numpy(), ridge) - whole)).sum()
            assert float(readers.rises()[j]) == pytest.approx(wanted, rel=1e-6, abs=1e-9)
        assert readers.left.tolist() == [j in left for j in range(7)]


def test_order_is_greedy_against_brute_force(monkeypatch):
    """Inputs of a network with one hidden layer: every round removes what a full refit finds cheapest."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    u = torch.randn(80, 6, dtype=WIDE) @ torch.randn(6, 6, dtype=WIDE)
    work = columns(record_states(network, [u]), "layered")
    order = removal_order(work, (5,), 2)
    M, Z = work.U.numpy(), work.Z.numpy()
    ridge, left = module.RIDGE * float(work.U.square().sum(0).mean()), list(range(6))
    for feature in order:
        costs = {j: misfit(M[:, [k for k in left if k != j]], Z, ridge).sum() for j in left}
        assert min(costs, key=costs.get) == feature - 5
        left.remove(feature - 5)
    assert len(order) == 4


def test_what_only_dead_rows_read_costs_nothing():
    """Input 1 feeds state 1 of the first layer alone; once that state is gone it is the next to go."""
    network, u, _ = recorded()
    with torch.no_grad():
        network[0].weight[:, 1] = 0.0
        network[0].weight[1] = 0.0
        network[0].weight[1, 1] = 5.0
        network[2].weight[:, 1] = 1e-6
    u = torch.randn(200, 8, dtype=WIDE)
    states = record_states(network, [u])
    work = columns(states, "layered")
    order = removal_order(work, states.blocks, 3)
    state, feature = 4 + 1, 10 + 1
    assert order[:2] == [state, feature]


def test_steps_are_nested_and_misfit_beats_share_and_chance():
    wins = 0
    for seed in range(4):
        network, u, states = recorded(samples=400, seed=seed, inputs=12)
        labels = network(u).argmax(1)
        scores = {}
        for order in ("misfit", "share", "random"):
            path = eliminate_features(
                states, kappa=0.9, method="ranked", order=order, keep=(0.7, 0.4), support="triangular",
                targets=labels,
            )  # fmt: skip
            assert [int(step.kept.sum()) for step in path.steps] == [18, 13, 7]
            assert not bool((path.steps[2].kept & ~path.steps[1].kept).any())
            scores[order] = path.steps[2].score
        wins += scores["misfit"] >= max(scores["share"], scores["random"])
    assert wins >= 3


def test_certified_set_does_not_depend_on_the_order():
    _, _, states = recorded()
    found = [
        eliminate_features(states, kappa=0.3, method="ranked", order=order, keep=0.5, retrain=False).certified
        for order in ("misfit", "share", "random")
    ]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_unknown_order():
    with pytest.raises(UnknownNameError, match="order"):
        eliminate_features(recorded()[2], kappa=0.5, method="ranked", order="best")
