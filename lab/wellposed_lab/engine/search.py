"""Grid search with cross-validation on in-distribution data, the same for every model (001 section 2.1)."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from wellposed.errors import InputError
from wellposed_lab.config import Training
from wellposed_lab.engine.experiment import Suite
from wellposed_lab.engine.run import Run
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.training import TrainingRun

FOLDS = 5


def candidates(run: TrainingRun, suite: Suite) -> Iterator[TrainingRun]:
    """Yields the run with every combination of the suite's grid that means something for its model."""
    fields = {field.name for field in dataclasses.fields(Training)}
    grid = [(name, values) for name, values in suite.grid if name in fields or name in dict(run.model.options)]
    for values in itertools.product(*(values for _, values in grid)):
        changed = run
        for (name, _), value in zip(grid, values, strict=True):
            changed = _with(changed, name, value, name in fields)
        yield changed


def _with(run: TrainingRun, name: str, value: Any, training: bool) -> TrainingRun:
    if training:
        return dataclasses.replace(run, training=dataclasses.replace(run.training, **{name: value}))
    options = tuple((known, value if known == name else old) for known, old in run.model.options)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, options=options))


def search_runs(suite: Suite, runs: Sequence[Run]) -> list[Run]:
    """Returns the folds of all candidates, for every model and task once (at the first seed)."""
    if not suite.grid:
        raise InputError(f"suite {suite.name!r} has no grid to search")
    first = {run.family: run for run in reversed(runs) if isinstance(run, TrainingRun)}
    return [
        dataclasses.replace(candidate, fold=fold, folds=FOLDS, kind="search")
        for run in reversed(first.values())
        if run.trained
        for candidate in candidates(run, suite)
        for fold in range(FOLDS)
    ]


def chosen(suite: Suite, run: Run, records: dict[str, Record]) -> Run:
    """Returns the run with the settings whose folds have the least mean validation error.

    Args:
        run: one of the suite's.
        records: of finished folds, by id.
    """
    if not isinstance(run, TrainingRun) or not run.trained:
        return run
    scores = {}
    for candidate in candidates(run.with_seed(0), suite):
        folds = [dataclasses.replace(candidate, fold=fold, folds=FOLDS, kind="search").id for fold in range(FOLDS)]
        errors = [_error(records[name]) for name in folds if name in records]
        if len(errors) == FOLDS:
            scores[candidate] = sum(errors) / FOLDS
    if not scores:
        return run
    best = min(scores, key=lambda candidate: scores[candidate])
    return best.with_seed(run.seed)


def _error(record: Record) -> float:
    for value in record.values:
        if value.metric.startswith("validation"):
            lower = not value.metric.endswith("accuracy")
            score = value.value if lower else -value.value
            return score if score == score else float("inf")
    return float("inf")
