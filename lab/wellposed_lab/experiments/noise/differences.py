"""Equilibrium models beside feed-forward networks, training with noise beside none: from the records of both."""

import dataclasses
import re
from collections.abc import Iterable

from wellposed_lab.engine.store import Record, Value
from wellposed_lab.experiments.noise.models import WIDTHS

SUITE = "noise-mnist"
LAYERS = {width: layers for layers, width in WIDTHS.items()}
EQUILIBRIUM = re.compile(r"deq-(\d+)((?:-noise-[\d.]+db)?(?:-jacobian)?)")
TRAINED = re.compile(r"-noise-[\d.]+db")
Key = tuple[str, str, int, int | None, str]


def with_noise_differences(records: Iterable[Record]) -> list[Record]:
    """Adds to records of noise-mnist what compares them with others of the same seed and batch size.

    ``accuracy_gain`` is the lead of a DEQ over the FFW of its size that was trained alike, ``averaged_gain`` the
    same if it is read out at the mean of its last iterates, ``xavier_gain`` that over the FFW with Xavier's start,
    ``sensitivity_ratio`` its sensitivity over that of the FFW, and ``training_gain`` the lead of a model trained
    with noise over the one without. ``twin_accuracy`` is that of the FFW without noise. With ``inject_`` before
    them, they are about the FFW with the input in every layer. An FFW has one read-out, so its
    ``averaged_accuracy`` is its accuracy.

    Example:
        >>> with_noise_differences([])
        []
    """
    given = list(records)
    known = {_key(record, record.model): record for record in given if _usable(record)}
    return [_extended(record, known) if _usable(record) else record for record in given]


def _usable(record: Record) -> bool:
    return record.suite == SUITE and record.kind == "run" and record.error is None


def _key(record: Record, model: str) -> Key:
    return record.scale, record.task, record.seed, record.config.get("batch_size"), model


def _extended(record: Record, known: dict[Key, Record]) -> Record:
    added: list[Value] = []
    match = EQUILIBRIUM.fullmatch(record.model)
    if match and int(match[1]) in LAYERS:
        network = f"ffw-{LAYERS[int(match[1])]}"
        for start, name in (("", network), ("inject_", f"{network}-inject")):
            added += _beside(record, known.get(_key(record, name + match[2])), start)
        added += _leads(record, known.get(_key(record, f"{network}-xavier{match[2]}")), "xavier_gain")
    if TRAINED.search(record.model):
        added += _leads(record, known.get(_key(record, TRAINED.sub("", record.model))), "training_gain")
    if record.model.startswith("ffw"):
        own = [value for value in record.values if value.metric == "accuracy"]
        added += [dataclasses.replace(value, metric="averaged_accuracy") for value in own]
    return dataclasses.replace(record, values=(*record.values, *added)) if added else record


def _beside(record: Record, twin: Record | None, start: str) -> list[Value]:
    """Compares a DEQ with the FFW of its size; names of values begin with `start`."""
    clean = None if twin is None else twin.value("accuracy")
    return [
        *_leads(record, twin, f"{start}accuracy_gain"),
        *_leads(record, twin, f"{start}averaged_gain", "averaged_accuracy"),
        *_ratio(record, twin, f"{start}sensitivity_ratio"),
        *([] if clean is None else [Value(f"{start}twin_accuracy", clean)]),
    ]


def _leads(record: Record, rival: Record | None, name: str, metric: str = "accuracy") -> list[Value]:
    if rival is None:
        return []
    own = [value for value in record.values if value.metric == metric]
    pairs = [(value, rival.value("accuracy", value.at)) for value in own]
    return [Value(name, value.value - other, value.at) for value, other in pairs if other is not None]


def _ratio(record: Record, rival: Record | None, name: str) -> list[Value]:
    own, other = (None if one is None else one.value("sensitivity") for one in (record, rival))
    return [] if own is None or not other else [Value(name, own / other)]
