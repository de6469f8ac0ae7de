"""Errors in validation beside that of the mean, which differs from seed to seed: a seed draws what is added up."""

import dataclasses
import functools
from collections.abc import Iterable

from wellposed_lab.engine.store import Record, Value
from wellposed_lab.engine.thresholds import Floor
from wellposed_lab.tasks.mathematics import Addition, HardAddition, HardSubtraction, Subtraction

Operation = Addition | Subtraction | HardAddition | HardSubtraction
OPERATIONS = {kind.__name__: kind for kind in (Addition, Subtraction, HardAddition, HardSubtraction)}
LEARNT = Floor(
    "relative_validation_mse", "at most", 0.95
)  # one is that of the mean, and of any constant by chance


def with_relative_errors(records: Iterable[Record]) -> list[Record]:
    """Adds ``relative_validation_mse``, the error in validation over that of the training samples' mean.

    Example:
        >>> with_relative_errors([])
        []
    """
    return [_extended(record) for record in records]


def _extended(record: Record) -> Record:
    task, error = record.config.get("task") or {}, record.value("validation_mse")
    kind = OPERATIONS.get(task.get("type", ""))
    if kind is None or error is None or record.kind != "run":
        return record
    sizes = {name: task[name] for name in ("features", "samples", "test_samples")}
    share = Value("relative_validation_mse", error / error_of_the_mean(kind(**sizes), record.seed))
    return dataclasses.replace(record, values=(*record.values, share))


@functools.lru_cache(maxsize=256)
def error_of_the_mean(task: Operation, seed: int) -> float:
    """Returns the mean squared error in validation of the mean over the training samples.

    Example:
        >>> round(error_of_the_mean(Addition(), 0), 1), round(error_of_the_mean(Addition(), 4), 1)
        (15.7, 8.2)
    """
    wanted = task.validation(seed)[1].double()
    return float((wanted - task.train(seed)[1].double().mean(0)).square().mean())
