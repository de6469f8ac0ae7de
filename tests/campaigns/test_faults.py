"""A few of the faults of `faults` and of the mutants of `mutants`; `make campaign` runs them by the thousand."""

import ast
import random

import faults
import mutants
import pytest

from wellposed.kernels.keeping import keeping


@pytest.mark.parametrize("name", ["training", "sparsification", "report"])
def test_killed_work_goes_on_to_the_same_numbers(name):
    row = faults.kill(name, 2, random.Random(1))
    assert (row["times"], row["other result"], row["lost"]) == (2, 0, 0)


def test_no_record_that_was_reported_is_lost():
    row = faults.kill_writers(3, random.Random(2))
    assert row["lost"] == 0 and row["records"] > 0


def test_damaged_files_are_refused_or_skipped():
    rows = faults.damage(12, random.Random(3))
    assert [row["fault"] for row in rows if row["other result"]] == []
    assert all(row["refused"] or row["damaged part skipped"] for row in rows)


@pytest.mark.parametrize("prepare", [faults.fill_disk, faults.lock_folder])
def test_work_that_cannot_write_says_so(prepare):
    if prepare is faults.lock_folder and faults.os.getuid() != 0:
        pytest.skip("only the superuser can become somebody else")
    outcome = faults.stopped(faults.train, prepare)
    assert outcome.startswith("OSError") and "cannot be written to" in outcome


def test_a_clock_that_goes_back_does_no_harm():
    assert faults.stopped(faults.train, faults.turn_back) == "went on"


def test_numba_without_a_place_for_its_cache(monkeypatch):
    numba = pytest.importorskip("numba")
    plain = numba.njit

    def refuse(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return plain(**options)

    monkeypatch.setattr(numba, "njit", refuse)
    compiled = keeping(nogil=True)(lambda x: x + 1)
    monkeypatch.undo()  # numba decorates functions of its own when it first compiles
    assert compiled(2) == 3


def test_mutants_are_put_in():
    path = mutants.SOURCE / "equilibrium" / "stopping.py"
    found = mutants.mutants_of(path)
    assert len(found) > 20 and len({(mutant.line, mutant.before, mutant.after) for mutant in found}) > 20
    assert all(mutant.compiled().co_filename == str(path) for mutant in found[:5])
    assert ast.unparse(found[0].tree) == ast.unparse(ast.parse(path.read_text()))  # itself never changed


def test_a_mutant_is_killed_by_its_test(tmp_path):
    found = mutants.mutants_of(mutants.SOURCE / "equilibrium" / "stopping.py")
    test = tmp_path / "test_small.py"
    test.write_text("def test_fails():\n    raise ValueError\n")
    assert mutants.judge(found[0], [str(test)], 1.0) == "killed"
    test.write_text("def test_passes():\n    pass\n")
    assert mutants.judge(found[0], [str(test)], 1.0) == "survived"
