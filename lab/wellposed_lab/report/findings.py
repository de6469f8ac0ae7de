"""Sentences about records, for the reports."""

import statistics
from collections.abc import Sequence

from wellposed_lab.engine.store import Record
from wellposed_lab.tasks.task import Point


def median_of(
    records: Sequence[Record], task: str, model: str, metric: str, at: Point = None, size: str | None = None
) -> float | None:
    """Returns the median of a number over the seeds; None where it was not measured."""
    chosen = [r for r in records if (r.task, r.model, r.kind) == (task, model, "run") and r.error is None]
    sizes = sorted({r.size or "" for r in chosen})
    wanted = size or (sizes[-1] if sizes else "")
    values = [r.value(metric, at) for r in chosen if (r.size or "") == wanted]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ratio_sentence(
    records: Sequence[Record],
    task: str,
    at: Point,
    model: str,
    reference: str,
    change: str,
    metric: str = "test_mse",
) -> list[str]:
    """Says by which factor a change moves the median error; nothing where a number is missing.

    Example:
        >>> ratio_sentence([], "identity", 205, "implicit-bias", "implicit", "adding a bias")
        []
    """
    changed_error, reference_error = (median_of(records, task, name, metric, at) for name in (model, reference))
    if changed_error is None or reference_error is None or not reference_error > 0 or not changed_error > 0:
        return []
    factor = changed_error / reference_error
    where = "" if at is None else f" at {at:g}"
    verb, way, size = ("multiplies", "larger", factor) if factor >= 1 else ("divides", "smaller", 1 / factor)
    if size < 1.5:
        return [f"On {task}{where}, {change} changes little: the median error is {size:.2g} times {way}."]
    return [f"On {task}{where}, {change} {verb} the median error by {size:.2g}."]
