from itertools import combinations, product

import pytest
from pairwise import covering, first, pairwise

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("sizes", [(3,), (2, 5), (2, 2, 2), (7, 5, 2, 2), (4, 4, 4, 4, 4), (9, 1, 3)])
def test_all_pairs_occur_in_fewer_rows(sizes):
    factors = [[(column, value) for value in range(size)] for column, size in enumerate(sizes)]
    rows = pairwise(*factors)
    occurring = {pair for row in rows for pair in combinations(row, 2)}
    assert occurring == {pair for row in product(*factors) for pair in combinations(row, 2)}
    assert {value for row in rows for value in row} == {value for factor in factors for value in factor}
    assert len(rows) == len(set(rows)) and rows == pairwise(*factors)
    largest = sorted(sizes)[-2:]
    assert len(rows) <= 1.8 * largest[0] * largest[-1] if len(sizes) > 1 else len(rows) == sizes[0]


def test_rows_that_do_not_exist_are_not_asked_for():
    rows = [row for row in product(range(4), range(3), range(2)) if row[0] != row[1]]
    kept = [rows[position] for position in covering(rows)]
    for one, other in combinations(range(3), 2):
        assert {(row[one], row[other]) for row in kept} == {(row[one], row[other]) for row in rows}
    assert covering([]) == [] and covering([()]) == [0]


@pytest.mark.parametrize(("strength", "count"), [(1, 4), (2, 12), (3, 24)])
def test_strength_says_how_many_values_occur_together(strength, count):
    assert len(covering(list(product(range(4), range(3), range(2))), strength)) == count


def test_values_are_chosen_about_equally_often():
    chosen = covering(list(product(range(9), range(3))), strength=1)
    assert [position % 3 for position in chosen] == [0, 1, 2] * 3


def test_all_but_the_first_values_are_slow():
    usual, other, last = first(1, "abc")
    assert usual == "a" and [(one.values, [mark.name for mark in one.marks]) for one in (other, last)] == [
        (("b",), ["slow"]),
        (("c",), ["slow"]),
    ]


def test_what_is_left_out_is_slow_and_nothing_is_lost(pytester):
    pytester.makeconftest(
        """
        import pytest
        from pairwise import mark_uncovered

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(items):
            mark_uncovered(items)
        """
    )
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    covering\n")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.covering
        @pytest.mark.parametrize("a", range(3))
        @pytest.mark.parametrize(("b", "c"), [(0, 1), (2, 3), (4, 5)])
        @pytest.mark.parametrize("d", [pytest.param(7, marks=pytest.mark.slow), 8, 9])
        def test_it(a, b, c, d):
            pass

        def test_another():
            pass
        """
    )
    pytester.runpytest_inprocess("-m", "not slow").assert_outcomes(passed=10, deselected=18)
    pytester.runpytest_inprocess("-m", "slow").assert_outcomes(passed=18, deselected=10)
    some = pytester.runpytest_inprocess("-m", "not slow", "-k", "test_it and 2-3")
    some.assert_outcomes(passed=3, deselected=25)
