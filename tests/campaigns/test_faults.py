"""A few of the faults of `faults`; `make campaign` runs them by the thousand."""

import json
import os
import random
import shutil

import damage
import fault_table
import faults
import places
import pytest
import works
import writers

from wellposed.kernels.cpu.cache import njit_cached


@pytest.fixture(scope="module", autouse=True)
def warm():
    works.warm_up()


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(("name", "writers"), faults.KILLED)
def test_killed_work_goes_on_to_the_same_numbers(name, writers):
    row = faults.kill(name, writers, 1, random.Random(1))
    assert row["times"] >= 1 and (row["other result"], row["lost"]) == (0, 0)


OFTEN = (  # the others take seconds, or have tests of their own
    *("checkpoint", "estimator", "network in the cache", "order of an experiment", "pictures of a report"),
    *("records", "save_pretrained, a fresh folder", "travel times in the cache", "write_certificate"),
)


@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(n, marks=pytest.mark.slow) for n in writers.WRITERS if n not in OFTEN)]
)
def test_a_killed_writer_leaves_the_old_version_or_the_new_one(name):
    row = writers.kill_writer(name, 4, random.Random(1))
    assert row["times"] >= 1 and (row["other result"], row["lost"]) == (0, 0), row


def test_a_writer_that_is_not_atomic_is_found_out(monkeypatch):
    def write(folder, number):
        (folder / "a").unlink(missing_ok=True)
        (folder / "a").write_text(str(number))

    monkeypatch.setitem(writers.WRITERS, "plain", writers.Writer(write, lambda folder: (folder / "a").read_text()))
    assert writers.kill_writer("plain", 12, random.Random(0))["lost"] > 0


def test_what_is_gone_is_missed(tmp_path):
    """So that the tests above could fail."""
    for name, work in works.WORKS.items():
        folder, log = tmp_path / name, tmp_path / f"{name}.log"
        with open(log, "w") as told:
            work(folder, lambda text, told=told: print(text, file=told))
        assert works.lost(work, folder, log) == 0
        for path in folder.iterdir():
            path.write_bytes(b"") if path.suffix == ".html" else shutil.rmtree(
                path
            ) if path.is_dir() else path.unlink()
        assert works.lost(work, folder, log) > 0


def test_no_record_that_was_reported_is_lost():
    row = faults.kill_writers(3, random.Random(2))
    assert row["lost"] == 0 and row["records"] > 0


def test_damaged_files_are_refused_or_skipped(tmp_path):
    rows = [judge(random.Random(3)) for judge in damage.damages(8, tmp_path).values()]
    assert [row["fault"] for row in rows if row["other result"]] == []
    assert all(row["refused"] or row["damaged part skipped"] for row in rows)
    assert not any(row["read as written"] for row in rows if row["fault"].startswith("data set"))


def test_a_reader_that_looks_at_nothing_is_found_out(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(200)))
    file = damage.Damaged(tmp_path / "a", (tmp_path / "a").read_bytes)
    assert damage.judge("a", file, "bit flipped", 5, random.Random(0))["other result"] == 5


@pytest.mark.parametrize("name", works.WORKS)
def test_work_on_a_full_disk_says_so_and_goes_on_later(name):
    row = places.full_disk(name, 2, random.Random(0))
    assert (row["other result"], row["lost"]) == (0, 0)
    assert row["stopped"] == 0 or "could not be written" in row["outcome"] or "disk is full" in row["outcome"]


@pytest.mark.parametrize("name", works.WORKS)
def test_work_in_a_folder_that_cannot_be_written_to_says_so(name):
    if os.getuid() != 0:
        pytest.skip("only the superuser can become somebody else")
    assert places.read_only(name)["other result"] == 0


@pytest.mark.parametrize("name", works.WORKS)
def test_a_clock_that_goes_back_and_a_second_run_do_no_harm(name):
    assert places.backwards(name)["other result"] == 0
    row = places.together(name, 1)
    assert (row["other result"], row["lost"]) == (0, 0)


def test_numba_without_a_place_for_its_cache(monkeypatch):
    numba = pytest.importorskip("numba")
    plain = numba.njit

    def refuse(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return plain(**options)

    monkeypatch.setattr(numba, "njit", refuse)
    compiled = njit_cached(nogil=True)(lambda x: x + 1)
    monkeypatch.undo()  # numba decorates functions of its own when it first compiles
    assert compiled(2) == 3


def test_a_part_can_be_run_alone(tmp_path, monkeypatch):
    words = [
        "faults.py",
        "--damages",
        "3",
        "--only",
        "order of an experiment, ",
        "--out",
        str(tmp_path / "f.json"),
    ]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        faults.main()
    facts = json.loads((tmp_path / "f.json").read_text())
    assert not ended.value.code and [row["times"] for row in facts["rows"]] == [3, 3, 3]
    assert fault_table.markdown(facts).count("\n") == 3 and "9 refused" in fault_table.markdown(facts)


def test_the_table_of_the_documentation_is_that_of_the_records():
    written = (faults.RESULT.parents[3] / "docs" / "concepts" / "campaigns.md").read_text()
    facts = json.loads(faults.RESULT.read_text())
    assert fault_table.markdown(facts) in written and facts["command"] in written
    assert not any(row["other result"] or row["lost"] for row in facts["rows"])
