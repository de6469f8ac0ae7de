"""The cache of a process: results are made once, the oldest ones go, and a new suite begins with none."""

import pytest
from wellposed_lab.cache import CACHE, Cache, cached
from wellposed_lab.engine import runner
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.runner import Order, run_suite


@pytest.fixture
def made():
    CACHE.clear()
    yield []
    CACHE.clear()


def test_a_result_is_made_once_for_equal_arguments(made):
    @cached
    def square(number, *, sign=1):
        made.append((number, sign))
        return sign * number**2

    @cached
    def cube(number):
        return number**3

    assert [square(3), square(3), square(3, sign=-1), cube(3)] == [9, 9, -9, 27]
    assert made == [(3, 1), (3, -1)]


def test_what_was_asked_for_last_stays():
    cache, made = Cache(size=2), []

    def ask(key):
        return cache.get(key, lambda: made.append(key) or key)

    for key in ("a", "b", "a", "c", "a", "b"):
        assert ask(key) == key
    assert made == ["a", "b", "c", "b"] and len(cache) == 2


def test_a_result_may_need_others():
    cache = Cache()
    assert cache.get("outer", lambda: cache.get("inner", lambda: 2) + 1) == 3 and len(cache) == 2


def test_what_fails_is_not_kept():
    cache = Cache()
    with pytest.raises(ZeroDivisionError):
        cache.get("a", lambda: 1 / 0)
    assert cache.get("a", lambda: 5) == 5


def test_the_runner_clears_it_between_suites(made, tmp_path, monkeypatch):
    CACHE.serve("another")
    CACHE.get("old", lambda: 1)
    monkeypatch.setattr(runner, "_record", lambda *args: made.append("old" in CACHE._results))
    monkeypatch.setattr(runner.Store, "append", lambda self, *records: None)
    run_suite(get_suite("noise-solvers"), Order("noise-solvers", "tiny"), tmp_path)
    assert made and not any(made) and CACHE.suite == "noise-solvers"
