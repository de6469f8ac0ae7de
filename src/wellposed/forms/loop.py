"""The order in which blocks of states are computed: loops of blocks that feed one another, first things first."""

from collections.abc import Mapping, Sequence


def strong_components(edges: Mapping[int, Sequence[int]]) -> list[tuple[int, ...]]:
    """Finds the sets of nodes that reach one another, those that a set depends on before it (Tarjan, 1972).

    Args:
        edges: what every node depends on.

    Example:
        >>> strong_components({0: [1], 1: [2], 2: [1], 3: []})
        [(1, 2), (0,), (3,)]
    """
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: list[tuple[int, ...]] = []
    for root in edges:
        if root in index:
            continue
        work = [(root, iter(edges[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, successors = work[-1]
            following = next((n for n in successors if n not in index or n in low), None)
            if following is None:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == index[node]:
                    cut = stack.index(node)
                    members, stack = stack[cut:], stack[:cut]
                    found.append(tuple(sorted(members)))
                    for member in members:
                        del low[member]
            elif following not in index:
                index[following] = low[following] = len(index)
                stack.append(following)
                work.append((following, iter(edges[following])))
            else:
                low[node] = min(low[node], index[following])
    return found
