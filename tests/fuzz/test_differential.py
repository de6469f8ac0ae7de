"""Checker and library see the same model in a changed file, or both refuse it."""

import pytest

from tests.fuzz.differential import campaign, seeds
from wellposed.checker import model
from wellposed.forms import storage

pytestmark = pytest.mark.filterwarnings("ignore")


def test_changed_files_are_read_alike_or_not_at_all():
    counts, wrong = campaign(1000, seed=0)
    assert not wrong, "\n".join(wrong.values())
    assert counts["both read"] > 50 and counts["both refuse"] > 500, counts


def test_all_kinds_of_files_are_tried():
    found = seeds()
    assert len(found) > 25 and sum(seed.config is not None for seed in found) > 10


def test_a_reader_that_goes_astray_is_noticed(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(model, "_stored", lambda file, given: file.matrix(given["tensor"]))
        assert campaign(0, seed=0)[1], "a matrix that is not transposed"
    with monkeypatch.context() as patch:
        read = storage._Reader._tensor
        straight = lambda self, value, **options: read(self, {"tensor": value["tensor"]}, **options)  # noqa: E731
        patch.setattr(storage._Reader, "_tensor", straight)
        assert campaign(0, seed=0)[1], "a matrix that is not transposed by the library"
    with monkeypatch.context() as patch:
        patch.setattr(model, "_fits", lambda phi, sizes: False)
        assert campaign(400, seed=0)[1], "one activation for many blocks"
    assert not campaign(0, seed=0)[1]
