from hypothesis import given
from hypothesis import strategies as st

from wellposed.forms.evaluation import strong_components


def reachable(edges, start):
    """Everything that a node depends on, itself included."""
    found, waiting = {start}, [start]
    while waiting:
        for node in edges[waiting.pop()]:
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found


graphs = st.integers(0, 7).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, max(n - 1, 0)), max_size=n), min_size=n, max_size=n).map(
        lambda rows: dict(enumerate(rows))
    )
)


@given(graphs)
def test_components_are_the_sets_that_reach_one_another(edges):
    found = strong_components(edges)
    assert sorted(node for members in found for node in members) == sorted(edges)
    reached = {node: reachable(edges, node) for node in edges}
    for members in found:
        assert list(members) == sorted(members)
        together = {node for node in edges if node in reached[members[0]] and members[0] in reached[node]}
        assert set(members) == together


@given(graphs)
def test_a_component_comes_after_what_it_depends_on(edges):
    done = set()
    for members in strong_components(edges):
        done |= set(members)
        assert all(node in done for member in members for node in edges[member])


@given(graphs, st.data())
def test_components_come_in_the_order_of_the_keys_where_nothing_else_decides(edges, data):
    edges = {node: edges[node] for node in data.draw(st.permutations(list(edges)))}
    found, done = strong_components(edges), set()
    for node in edges:  # what the first keys depend on comes before anything else
        if node not in done:
            needed = done | reachable(edges, node)
            while done < needed:
                done |= set(found.pop(0))
            assert done == needed
    assert not found


def test_a_long_chain_needs_no_recursion():
    length = 5000
    edges = {k: [k + 1] for k in range(length - 1)} | {length - 1: []}
    assert strong_components(edges) == [(k,) for k in reversed(range(length))]
    assert strong_components(edges | {length - 1: [0]}) == [tuple(range(length))]
