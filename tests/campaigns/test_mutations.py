"""Mutants are drawn by their names, and one that is put in changes what the function does for all who know it."""

import pytest
import torch
from mutant_changes import ROOT, changes, drawn, living, mutants_of, watch

from wellposed.errors import InputError
from wellposed.robust.attacks.sparse import entries

RANKED = ROOT / "src" / "wellposed" / "robust" / "attacks" / "sparse.py"


def test_mutants_have_names_of_their_own_and_an_order_of_names():
    order = [mutant.key for mutant in drawn(0, jit=False)]
    assert len(order) == len(set(order)) > 5000
    other = [mutant.key for mutant in drawn(1, jit=False)]
    assert order != other and sorted(order) == sorted(other)
    compiled = {mutant.file for mutant in drawn(0, jit=True)}
    assert compiled == {"src/wellposed/convex/solvers/path.py"}
    assert compiled.isdisjoint(key.split()[0] for key in order)


def test_a_mutant_takes_effect_and_can_be_taken_out():
    (mutant,) = (part for part in mutants_of(RANKED) if part.after == "0 < count <= 1")
    u = torch.zeros(1, 5)
    assert entries(0.0, u) == 0
    ((function, code),) = changes(mutant, living([mutant]))
    before, function.__code__ = function.__code__, code
    try:
        with pytest.raises(InputError):
            entries(0.0, u)
    finally:
        function.__code__ = before
    assert entries(0.0, u) == 0


def test_a_watched_place_is_noted_when_it_is_executed_and_changes_nothing():
    mutants = mutants_of(RANKED)
    known = living(mutants)
    before = [(function, function.__code__) for functions in known.values() for function in functions]
    reached, u = watch(mutants, known), torch.zeros(1, 5)
    try:
        assert not reached
        assert entries(0.4, u) == 2
        assert {key.split()[1] for key in reached} == {"entries"}
    finally:
        for function, code in before:
            function.__code__ = code
