"""The store: one record a line in an append-only file, safe with several writers.

A `Record` is what a finished run leaves behind: its configuration, its `Result` and where it ran. `Store` appends
and reads records; `merged` reads several stores.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellposed.atomic import name_file_in_errors
from wellposed.errors import FileFormatError
from wellposed_lab.tasks.task import Point

Series = dict[str, list[float]]


@dataclass(frozen=True)
class Value:
    """One number: a metric at a point of the task's axis."""

    metric: str
    value: float
    at: Point = None


@dataclass(frozen=True)
class Result:
    """What a run has measured."""

    values: tuple[Value, ...]
    series: Series = field(default_factory=dict)  # per epoch
    facts: dict[str, Any] = field(default_factory=dict)  # in words or numbers: certificates, chosen settings


@dataclass(frozen=True)
class Record:
    """A run with its configuration, its numbers and where it ran.

    Attributes:
        id: the hash of the configuration.
        role: "ours", "baseline" or "control".
        kind: "run", or "search" for the folds of a search.
        error: why the run failed; None if it did not.
    """

    id: str
    suite: str
    scale: str
    task: str
    model: str
    size: str | None
    seed: int
    role: str
    kind: str
    config: dict[str, Any]
    values: tuple[Value, ...]
    series: Series
    facts: dict[str, Any]
    environment: dict[str, Any]
    started: str
    seconds: float
    error: str | None = None

    def value(self, metric: str, at: Point = None) -> float | None:
        """Returns one number, None where it was not measured."""
        for entry in self.values:
            if entry.metric == metric and _same(entry.at, at):
                return entry.value
        return None

    def to_json(self) -> dict[str, Any]:
        """Returns what is written; numbers that JSON does not know become texts."""
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Record":
        """Reads what `to_json` wrote."""
        try:
            data = {
                **data,
                "values": tuple(Value(**{**value, "value": float(value["value"])}) for value in data["values"]),
            }
            data["series"] = {name: [float(x) for x in column] for name, column in data["series"].items()}
            return cls(**data)
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"not a record of a run: {error}") from error


def _same(a: Point, b: Point) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b)
    return a == b


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


if sys.platform != "win32":
    import fcntl

FILE = "records.jsonl"


@dataclass
class Store:
    """Records of finished runs in a JSON-lines file, which pandas and DuckDB read as it is.

    A record is one line with its own checksum, appended under a lock and flushed to the disk before `append`
    returns. Reading skips a line that is damaged, such as the last one after a power cut, and says so in
    `damaged`; of several records of the same run the last one counts.

    Args:
        path: the file, or a folder in which it is `records.jsonl`.

    Example:
        >>> import tempfile
        >>> store = Store(tempfile.mkdtemp())
        >>> len(store.records())
        0
    """

    path: Path
    damaged: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        if self.path.is_dir() or not self.path.suffix:
            self.path = self.path / FILE

    def append(self, *records: Record) -> None:
        """Adds records; they are on the disk when this returns."""
        text = "".join(_line(record) for record in records)
        with name_file_in_errors(self.path):
            self._append(text.encode())

    def _append(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            with _locked(handle):
                _write(handle, _separator(handle) + data)
                os.fsync(handle)
        finally:
            os.close(handle)

    def records(self) -> list[Record]:
        """Reads all records, each run once."""
        self.damaged.clear()
        latest = {record.id: record for record in self._read()}
        return list(latest.values())

    def finished(self) -> dict[str, Record]:
        """Returns the runs that ended well, by the hash of their configuration."""
        return {record.id: record for record in self.records() if record.error is None}

    def _read(self) -> Iterator[Record]:
        if not self.path.exists():
            return
        for number, line in enumerate(self.path.read_bytes().split(b"\n"), start=1):
            if line.strip():
                try:
                    yield _parse(line)
                except FileFormatError as error:
                    self.damaged.append(f"{self.path}, line {number}: {error}")


def _line(record: Record) -> str:
    body = record.to_json()
    return json.dumps({**body, "sha256": _checksum(body)}, separators=(",", ":"), allow_nan=False) + "\n"


def _parse(line: bytes) -> Record:
    try:
        body = json.loads(line)
        checksum = body.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise FileFormatError(f"skipped, not a complete record ({error})") from error
    if checksum != _checksum(body):
        raise FileFormatError("skipped, its checksum does not match")
    return Record.from_json(body)


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def _separator(handle: int) -> bytes:
    """Ends a line that a lost writer has left unfinished."""
    size = os.fstat(handle).st_size
    if size == 0:
        return b""
    os.lseek(handle, size - 1, os.SEEK_SET)
    return b"" if os.read(handle, 1) == b"\n" else b"\n"


def _write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


@contextlib.contextmanager
def _locked(handle: int) -> Iterator[None]:
    """Keeps other writers out; on Windows an append of one write must do."""
    if sys.platform != "win32":
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if sys.platform != "win32":
            fcntl.flock(handle, fcntl.LOCK_UN)


def merged(stores: Iterable[Store]) -> list[Record]:
    """Reads several stores; of a run that is in more than one the last counts."""
    return list({record.id: record for store in stores for record in store.records()}.values())


def trained_alike(records: Sequence[Record], names: Sequence[str]) -> list[Record]:
    """Returns those that agree in some settings: the most models, then the latest.

    Example:
        >>> trained_alike([], ("batch_size",))
        []
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(repr([record.config.get(name) for name in names]), []).append(record)
    ranks = {key: (len({r.model for r in own}), max(r.started for r in own)) for key, own in groups.items()}
    return groups[max(ranks, key=lambda key: ranks[key])] if groups else []


def settings(record: Record) -> str:
    """Returns the same text for runs that differ in their seed only."""
    config = {name: value for name, value in record.config.items() if name not in ("seed", "role")}
    return json.dumps([record.scale, record.suite, record.size, config], sort_keys=True)
