import dataclasses
import errno
import json
import math
import multiprocessing
import os

import pytest
from wellposed_lab.engine.store import Record, Store, Value, merged

from wellposed.errors import FileFormatError


def record(name="a", **changes):
    values = (Value("test_mse", 0.5, 10.0), Value("test_mse", math.inf, 20.0), Value("parameters", 196.0))
    base = Record(
        id=name, suite="identity", scale="tiny", task="identity", model="implicit", size=None, seed=0, role="ours",
        kind="run", config={"type": "TrainingRun", "seed": 0}, values=values,
        series={"train_loss": [1.0, math.nan]}, facts={"certificate": "inf: 0.5 < 1"},
        environment={"torch": "2"}, started="2026-01-01T00:00:00+00:00", seconds=1.5,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_records_come_back(tmp_path):
    store = Store(tmp_path)
    store.append(record(), record("b", size="001", error="NonFiniteLossError: ..."))
    first, second = Store(tmp_path / "records.jsonl").records()
    assert first.value("test_mse", 10) == 0.5 and first.value("test_mse", 20) == math.inf
    assert first.value("parameters") == 196 and first.value("test_mse") is None
    assert math.isnan(first.series["train_loss"][1])
    assert dataclasses.replace(first, series={}) == dataclasses.replace(record(), series={})
    assert second.size == "001" and list(store.finished()) == ["a"]


def test_plain_json_lines(tmp_path):
    store = Store(tmp_path)
    store.append(record(), record("b"))
    rows = [json.loads(line) for line in store.path.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["a", "b"] and rows[0]["values"][1]["value"] == "inf"


def test_the_last_record_of_a_run_counts(tmp_path):
    store = Store(tmp_path)
    store.append(record(error="broken"))
    store.append(record(seconds=9.0))
    (only,) = store.records()
    assert only.error is None and only.seconds == 9.0
    assert [r.seconds for r in merged([Store(tmp_path), Store(tmp_path)])] == [9.0]
    assert merged([Store(tmp_path / "nothing")]) == []


def test_a_torn_or_flipped_line_is_skipped_and_named(tmp_path):
    store = Store(tmp_path)
    store.append(record("a"), record("b"), record("c"))
    lines = store.path.read_bytes().splitlines(keepends=True)
    store.path.write_bytes(lines[0] + lines[1].replace(b"implicit", b"implicix") + lines[2][:-20])
    store.append(record("d"))  # begins a new line
    assert [r.id for r in store.records()] == ["a", "d"]
    assert len(store.damaged) == 2 and "line 2" in store.damaged[0] and "line 3" in store.damaged[1]
    store.path.write_bytes(b"\xff\xfe\n[1]\n{}\n" + lines[0])
    assert [r.id for r in store.records()] == ["a"] and len(store.damaged) == 3


def test_a_foreign_record_is_refused():
    with pytest.raises(FileFormatError, match="not a record"):
        Record.from_json({"id": "x"})


def _write(folder, name):
    store = Store(folder)
    for k in range(40):
        store.append(record(f"{name}{k}", facts={"text": "x" * 5000}))


def test_two_writers_lose_nothing(tmp_path):
    context = multiprocessing.get_context("spawn" if os.name == "nt" else "fork")
    workers = [context.Process(target=_write, args=(tmp_path, name)) for name in "pq"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    store = Store(tmp_path)
    assert len(store.records()) == 80 and not store.damaged


def test_a_full_disk_is_named_and_leaves_what_was_there(tmp_path, monkeypatch):
    store, plain, room = Store(tmp_path), os.write, [20]
    store.append(record("a"))

    def fill(handle, data):
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(handle, data[: room.pop()])

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(OSError, match=r"records\.jsonl could not be written"):
        store.append(record("b"))
    monkeypatch.undo()
    store.append(record("c"))
    assert [one.id for one in store.records()] == ["a", "c"] and len(store.damaged) == 1
