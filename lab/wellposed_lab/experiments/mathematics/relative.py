"""Validation errors relative to that of the mean, which differs between seeds, as each draws its own ranges."""

import dataclasses
import functools
from collections.abc import Iterable

from wellposed_lab.engine.store import Record, Value
from wellposed_lab.engine.thresholds import Floor
from wellposed_lab.tasks.mathematics import Addition, HardAddition, HardSubtraction, Subtraction

Operation = Addition | Subtraction | HardAddition | HardSubtraction
OPERATIONS = {kind.__name__: kind for kind in (Addition, Subtraction, HardAddition, HardSubtraction)}
LEARNT = Floor("relative_validation_mse", "at most", 0.95)  # predicting the mean has 1


def with_relative_errors(records: Iterable[Record]) -> list[Record]:
    """Adds ``relative_validation_mse``, the validation error over that of predicting the training mean.

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
    """Returns the mean squared validation error of predicting the mean of the training targets.

    Example:
        >>> round(error_of_the_mean(Addition(), 0), 1), round(error_of_the_mean(Addition(), 4), 1)
        (15.7, 8.2)
    """
    target = task.validation(seed)[1].double()
    return float((target - task.train(seed)[1].double().mean(0)).square().mean())
