"""Numbers of a model beside those of its rival, made from the records of both."""

import dataclasses
from collections.abc import Iterable

from wellposed_lab.engine.store import Record, Value

RIVAL = "eikonet"
DIFFERENCES = {  # of which number, and whether it is the rival's minus the model's
    "test_mse_gain": ("test_mse", True),
    "longitude_gain": ("longitude_error", True),
    "latitude_gain": ("latitude_error", True),
    "depth_excess": ("depth_error", False),
    "time_excess": ("time_error", False),
}


def with_differences(records: Iterable[Record]) -> list[Record]:
    """Adds the numbers of `DIFFERENCES` to records whose rival was run with the same seed on the same task.

    Example:
        >>> with_differences([])
        []
    """
    given = list(records)
    rivals = {_key(record): record for record in given if record.model == RIVAL and _usable(record)}
    return [_extended(record, rivals.get(_key(record))) for record in given]


def _extended(record: Record, rival: Record | None) -> Record:
    if rival is None or record.model == RIVAL or not _usable(record):
        return record
    values = list(record.values)
    for name, (metric, gain) in DIFFERENCES.items():
        for own in record.values:
            other = rival.value(metric, own.at) if own.metric == metric else None
            if other is not None:
                values.append(Value(name, other - own.value if gain else own.value - other, own.at))
    return dataclasses.replace(record, values=tuple(values))


def _usable(record: Record) -> bool:
    return record.kind == "run" and record.error is None


def _key(record: Record) -> tuple[str, str, str, int]:
    return record.suite, record.scale, record.task, record.seed
