"""Shortest paths: scipy finds the same, and the graphs reach as far as they say."""

import dataclasses

import pytest
import torch
from scipy.sparse import csgraph
from wellposed_lab.experiments.beyond.graphs import ShortestPath, distances

from wellposed.errors import InputError

TASK = ShortestPath(nodes=12, samples=20, test_samples=10, layers=(2, 5))


def parts(u):
    """Lengths and the number of the source of every graph."""
    return u[:, :, :-1], u[:, :, -1].argmax(1)


def oracle(lengths, sources, unweighted=False):
    found = [
        torch.tensor(csgraph.dijkstra(graph.double().numpy(), indices=int(source), unweighted=unweighted))
        for graph, source in zip(lengths, sources, strict=True)
    ]
    return torch.stack(found)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.9])
def test_distances_are_those_of_scipy(share):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.rand(30, 9, 9, generator=generator, dtype=torch.float64) + 0.1
    lengths = torch.where(torch.rand(30, 9, 9, generator=generator) < share, lengths, 0.0)
    sources = torch.randint(9, (30,), generator=generator)
    found = distances(lengths, sources)
    assert torch.allclose(found, oracle(lengths.mT, sources))  # scipy's entry (i, j) leads from i to j
    assert share > 0.2 or found.isinf().any()


def test_targets_are_shortest_paths_on_undirected_graphs_of_the_promised_reach():
    for at in (3.0, 11.0, 20.0):
        u, y = TASK.test(0, at)
        lengths, sources = parts(u)
        assert torch.equal(lengths, lengths.mT) and lengths.diagonal(dim1=1, dim2=2).eq(0).all()
        assert torch.allclose(y.double(), oracle(lengths, sources), atol=1e-5)
        assert (oracle(lengths, sources, unweighted=True).amax(1) == at).all()
        assert u.shape == (10, max(12, int(1.5 * at)), max(12, int(1.5 * at)) + 1)
        assert (u[:, :, -1].sum(1) == 1).all()
    used = lengths[lengths > 0]
    assert TASK.lengths[0] <= used.min() < 0.3 and 1.7 < used.max() <= TASK.lengths[1]


def test_fewest_edges_are_not_always_shortest():
    u, _ = TASK.train(0)
    lengths, sources = parts(u)
    counts = torch.where(lengths > 0, 1.0, 0.0)
    shortest, fewest = oracle(lengths, sources), oracle(lengths, sources, unweighted=True)
    along = (shortest[:, None, :] + lengths - shortest[:, :, None]).abs() < 1e-5
    detours = counts.bool() & along & (fewest[:, None, :] + 1 > fewest[:, :, None])
    assert detours.any() and (fewest.amax(1) >= 2).all() and (fewest.amax(1) <= 5).all()


def test_splits_are_repeatable_and_differ():
    again = dataclasses.replace(TASK)
    assert all(torch.equal(a, b) for a, b in zip(TASK.train(3), again.train(3), strict=True))
    kinds = [TASK.train(0)[0][:10], TASK.validation(0)[0], TASK.train(1)[0][:10], TASK.test(0, 3.0)[0]]
    assert len({float(kind.sum()) for kind in kinds}) == 4
    places = parts(TASK.train(0)[0])[1]
    assert len(set(places.tolist())) > 5  # the source is not always the first node


def test_score_leaves_the_source_out():
    target = torch.tensor([[0.0, 2.0, 10.0, 4.0]])
    guess = torch.tensor([[5.0, 2.09, 10.6, float("nan")]])
    scores = TASK.score(guess, target)
    assert scores["test_accuracy"] == pytest.approx(1 / 3) and scores["test_error"] == float("inf")
    assert TASK.score(target + 0.1, target)["test_error"] == pytest.approx((0.05 + 0.01 + 0.025) / 3, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "text"),
    [({"layers": (0, 3)}, "layers"), ({"layers": (2, 12)}, "nodes"), ({"lengths": (0, 1)}, "lengths")],
)
def test_impossible_graphs_are_refused(change, text):
    with pytest.raises(InputError, match=text):
        dataclasses.replace(TASK, **change)
    with pytest.raises(InputError, match="at least one layer"):
        TASK.test(0, 0.0)
