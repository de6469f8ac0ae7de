"""What a finished run leaves behind."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from wellposed.errors import FileFormatError
from wellposed.tasks.task import Point

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
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
