"""Covering arrays: a few combinations of parameters in which every pair of values still occurs.

A test marked ``@pytest.mark.covering`` runs by default only for such combinations of its arguments; the
others are marked slow. ``@pytest.mark.covering(strength=1)`` asks only that every value occurs.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations, product
from operator import itemgetter

import pytest


def covering(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Chooses rows in which all combinations of `strength` values occur that occur in any row.

    A combination is one of values in certain columns.

    Returns:
        The positions of the chosen rows, in ascending order.
    """
    return min((_greedy(rows, strength, balanced) for balanced in (True, False)), key=len)


def _greedy(rows: Sequence[Sequence[Hashable]], strength: int, balanced: bool) -> list[int]:
    """Takes the row that adds most; of equals the one with the rarest values if `balanced`, then the first."""
    width = min(strength, len(rows[0])) if rows else 0
    columns = list(combinations(range(len(rows[0])), width)) if rows else []
    missing = [{(where, tuple(row[c] for c in where)) for where in columns} for row in rows]
    having: dict[Hashable, list[int]] = defaultdict(list)
    for position, some in enumerate(missing):
        for combination in some:
            having[combination].append(position)
    chosen: list[int] = []
    used: Counter[Hashable] = Counter()

    def merit(position: int) -> tuple[int, int]:
        return len(missing[position]), -sum(used[value] for value in enumerate(rows[position]))

    while having:
        best = max(range(len(rows)), key=merit)
        chosen.append(best)
        used.update(enumerate(rows[best]) if balanced else ())
        for combination in list(missing[best]):
            for position in having.pop(combination):
                missing[position].discard(combination)
    return sorted(chosen)


def pairwise(*factors: Sequence[Hashable]) -> list[tuple[Hashable, ...]]:
    """Returns combinations of one value of each factor in which all pairs of values occur."""
    rows = list(product(*(range(len(factor)) for factor in factors)))
    return [
        tuple(factor[index] for factor, index in zip(factors, rows[position], strict=True))
        for position in covering(rows)
    ]


def first(count: int, values: Iterable[object]) -> list[object]:
    """Returns values for ``parametrize`` of which all but the first `count` are slow."""
    return [
        value if number < count else pytest.param(value, marks=pytest.mark.slow)
        for number, value in enumerate(values)
    ]


def _key(value: object) -> Hashable:
    """Returns what tells a parameter from another: itself, or its identity if it cannot be hashed."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def mark_uncovered(items: Iterable[pytest.Item]) -> None:
    """Marks as slow what the covering combinations of tests marked ``covering`` leave out."""
    tests: dict[tuple[pytest.Item | None, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering") and hasattr(item, "callspec"):
            tests[item.parent, item.originalname].append(item)
    for instances in tests.values():
        strength = instances[0].get_closest_marker("covering").kwargs.get("strength", 2)
        usual = [item for item in instances if not item.get_closest_marker("slow")]
        rows = [
            tuple(_key(value) for _, value in sorted(item.callspec.params.items(), key=itemgetter(0)))
            for item in usual
        ]
        covered = set(covering(rows, strength))
        for position, item in enumerate(usual):
            if position not in covered:
                item.add_marker(pytest.mark.slow)
