"""Sentences about records of the algorithmic tasks."""

from collections.abc import Mapping, Sequence

from wellposed_lab.engine.store import Record
from wellposed_lab.report.findings import median_of


def accuracy_sentences(
    records: Sequence[Record], task: str, sizes: Sequence[float], names: Mapping[str, str], unit: str
) -> list[str]:
    """Says how accurate every model is at some sizes, and what an equilibrium is with the steps of its training.

    Example:
        >>> accuracy_sentences([], "mazes", (9, 59), {"deq": "the DEQ"}, "squares")
        []
    """
    lines = []
    for model, name in names.items():
        told = _shares(records, task, model, "accuracy", sizes)
        if told:
            lines.append(f"{name} {told}")
    if not lines:
        return []
    where = " and ".join(f"{size:g}" for size in sizes)
    sentences = [f"Median accuracy at {where} {unit}: {'; '.join(lines)}."]
    solved, fixed = (_shares(records, task, "deq", metric, sizes) for metric in ("solved", "fixed_accuracy"))
    steps = [median_of(records, task, "deq", "steps", size) for size in sizes]
    if solved and fixed and None not in steps:
        counts = " and ".join(f"{count:.0f}" for count in steps if count is not None)
        sentences.append(
            f"The DEQ is right everywhere in {solved} of the samples, after {counts} steps; with no more steps "
            f"than in training its accuracy is {fixed}."
        )
    return sentences


def independence_sentence(records: Sequence[Record], task: str, sizes: Sequence[float], unit: str) -> list[str]:
    """Says whether solves from different starts end at the same point."""
    told = []
    for size in sizes:
        cosine, share = (median_of(records, task, "deq", metric, size) for metric in ("alignment", "independent"))
        if cosine is not None and share is not None:
            told.append(f"{100 * share:.0f} % at {size:g} (cosine {cosine:.4f})")
    if not told:
        return []
    return [
        f"Path independence of the DEQ, the share of samples for which solves from zero, from random states and "
        f"from another sample's equilibrium end at one point, by {unit}: {', '.join(told)}."
    ]


def _shares(records: Sequence[Record], task: str, model: str, metric: str, sizes: Sequence[float]) -> str:
    known = [median_of(records, task, model, metric, size) for size in sizes]
    if None in known:
        return ""
    return " and ".join(f"{100 * value:.1f} %" for value in known if value is not None)
