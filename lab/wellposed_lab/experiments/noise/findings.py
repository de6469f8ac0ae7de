"""What the records of noise-mnist show, in sentences and pictures.

`noise_findings` are sentences about leads by depth, the crossover, and the honest controls. `draw_depths` and
`draw_sensitivity` draw accuracy by depth, sensitivity and eigenvalues of the pairs of 004 (Figures 1, 2 and 13).
"""

import io
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from wellposed.errors import require
from wellposed_lab.config import JUDGED_SCALES
from wellposed_lab.engine.statistics import rank_correlation
from wellposed_lab.engine.store import Record, settings, trained_alike
from wellposed_lab.experiments.noise.differences import with_noise_differences
from wellposed_lab.experiments.noise.models import TOTALS, WIDTHS
from wellposed_lab.report.figures import PALETTE
from wellposed_lab.report.findings import median_of

DATA = "mnist"
ALIKE = ("batch_size",)  # in what two models are comparable, whose epochs differ in 004 too
LEARNT = 0.93  # accuracy without noise
TRAINED = {"": "no noise", "-noise-10db": "10 dB", "-noise-0db": "0 dB"}
CHANGES = {
    "": "as it is",
    "-xavier": "with Xavier's start",
    "-inject": "with the input in every layer",
    "-inject-tied": "with the input and one weight for all layers",
    "-inject-wide": "with the input and the width of the DEQ",
    "-xavier-mean-10": "with Xavier's start and the mean of ten passes",
}


def noise_findings(records: Sequence[Record]) -> list[str]:
    """Says from which depth on the DEQ leads, and which changes of the FFW take its lead away.

    Example:
        >>> noise_findings([])
        []
    """
    known = with_noise_differences(of_one_scale(records))
    compared = [*_crossovers(known), *_averaged(known), *_penalised(known), *_deep(known), *_sized(known)]
    return [*_schedule(known), *compared, *_clean(known), *_ratios(known), *_ranks(known), *_bound(known)]


def of_one_scale(records: Sequence[Record]) -> list[Record]:
    """Returns the records of the largest scale that there is, of one batch size, and of each model the latest.

    Medians must not mix scales and schedules.
    """
    scales = [[record for record in records if record.scale == scale] for scale in JUDGED_SCALES]
    found = trained_alike(next((own for own in scales if own), list(records)), ALIKE)
    latest: dict[str, Record] = {}
    for record in sorted(found, key=lambda record: record.started):
        latest[record.model] = record
    return [record for record in found if settings(record) == settings(latest[record.model])]


def _median(
    records: Sequence[Record], model: str, metric: str = "accuracy", at: float | None = 0.0
) -> float | None:
    return median_of(records, DATA, model, metric, at)


def _schedule(records: Sequence[Record]) -> list[str]:
    """Says how the judged models were trained, beside what is published."""
    sentences = []
    for kind, published in (("deq", 30), ("ffw", 64)):
        found = {
            (r.scale, r.config["images"], r.config["epochs"], r.config["batch_size"])
            for r in records
            if r.task == DATA and r.model.startswith(kind) and "epochs" in r.config
        }
        for scale, images, epochs, batch in sorted(found):
            sentences.append(
                f"At scale {scale} each {kind.upper()} saw {images} images {epochs} times in batches of {batch}; "
                f"published are all 60000 images, {published} times, in batches of 16."
            )
    return sentences


def _crossovers(records: Sequence[Record]) -> list[str]:
    sentences = []
    for noise, trained in TRAINED.items():
        leads = {n: _median(records, f"deq-{w}{noise}", "accuracy_gain") for n, w in WIDTHS.items()}
        known = {n: 100 * value for n, value in leads.items() if value is not None}
        if not known:
            continue
        sentence = f"Trained with {trained}, the lead of the DEQ at 0 dB in points, by layers of the FFW"
        sentences.append(f"{sentence}: {_told(known)}.")
    return sentences


def crossover(leads: dict[int, float]) -> str:
    """Says between which depths the lead changes hands.

    Example:
        >>> crossover({1: -5.0, 3: 2.0, 5: 4.0}), crossover({1: 1.0})
        ('the lead changes hands between 1 and 3 layers', 'the DEQ leads at every depth')
    """
    depths = sorted(leads)
    changes = [f"{a} and {b}" for a, b in pairwise(depths) if (leads[a] > 0) != (leads[b] > 0)]
    if changes:
        return f"the lead changes hands between {', and between '.join(changes)} layers"
    return "the DEQ leads at every depth" if leads[depths[0]] > 0 else "the FFW leads at every depth"


def _ranks(records: Sequence[Record]) -> list[str]:
    """Says how far radii and sensitivity order the recorded models by their accuracy under noise (004 eq. 12)."""
    sentences = []
    for kind in ("deq", "ffw"):
        own = [
            r for r in records
            if r.task == DATA and r.model.startswith(kind) and (r.value("accuracy") or 0.0) >= LEARNT
        ]  # fmt: skip
        told = []
        for metric in ("jacobian_radius", "weight_radius", "sensitivity"):
            pairs = [(r.value(metric), r.value("accuracy", 0.0)) for r in own]
            known = [(x, y) for x, y in pairs if x is not None and y is not None]
            if len(known) > 5:
                told.append(
                    f"{rank_correlation(*zip(*known, strict=True)):+.2f} with the {metric.replace('_', ' ')}"
                )
        if told:
            count = len([r for r in own if r.value("jacobian_radius") is not None])
            sentences.append(
                f"Over the {count} recorded {kind.upper()}s that were trained without noise and learnt, the rank "
                f"correlation of the accuracy at 0 dB is {', '.join(told)}."
            )
    return sentences


def _bound(records: Sequence[Record]) -> list[str]:
    """Says for how many equilibrium models bound (12) of 004 is finite: their weights have a radius below one."""
    own = [r for r in records if r.task == DATA and r.model.startswith("deq")]
    weights, slopes = (
        [value for value in (r.value(name) for r in own) if value is not None]
        for name in ("weight_radius", "jacobian_radius")
    )
    if not weights:
        return []
    below = [sum(radius < 1 for radius in radii) for radii in (weights, slopes)]
    return [
        f"Bound (12) of 004 sums powers of the spectral radius of the weights, {min(weights):.2g} to "
        f"{max(weights):.2g} in {len(weights)} DEQs: at the solution it is finite in {below[0]} of them. The "
        f"radius of the Jacobian there is below one in {below[1]} of {len(slopes)}."
    ]


def _penalised(records: Sequence[Record]) -> list[str]:
    """Says what the penalty of 004 Table 1 does to DEQs of several widths, beside FFWs as they are."""
    leads = _leads(records, "-jacobian", "accuracy")
    start = (
        "Trained with a Jacobian penalty of weight one and no noise, the lead of the DEQ over the FFW without one"
    )
    return [] if len(leads) < 2 else [f"{start} at 0 dB in points, by layers: {_told(leads)}."]


def _averaged(records: Sequence[Record]) -> list[str]:
    """Says what a DEQ gains where it is read out at a mean over iterates."""
    leads = _leads(records, "", "averaged_accuracy")
    start = "Trained with no noise and read out at the mean of its last ten iterates, the lead of the DEQ"
    return [f"{start} at 0 dB in points, by layers: {_told(leads)}."] if leads else []


def _leads(records: Sequence[Record], ending: str, metric: str) -> dict[int, float]:
    """Returns the leads of DEQs over FFWs that were trained without noise and penalty, in points, by layers."""
    leads = {}
    for layers, width in WIDTHS.items():
        own, other = _median(records, f"deq-{width}{ending}", metric), _median(records, f"ffw-{layers}")
        if own is not None and other is not None:
            leads[layers] = 100 * (own - other)
    return leads


def _told(leads: dict[int, float]) -> str:
    numbers = ", ".join(f"{layers} {lead:+.1f}" for layers, lead in leads.items())
    return f"{numbers}; {crossover(leads)}"


def _deep(records: Sequence[Record]) -> list[str]:
    sentences = []
    for layers in (9, 13):
        deq = _median(records, f"deq-{WIDTHS[layers]}")
        found = {how: _median(records, f"ffw-{layers}{ending}") for ending, how in CHANGES.items()}
        told = ", ".join(f"{how} {100 * value:.1f} %" for how, value in found.items() if value is not None)
        if deq is not None and told:
            narrow = _median(records, "deq-128")
            also = "" if narrow is None else f", of width 128 {100 * narrow:.1f} %"
            sentences.append(
                f"Accuracy at 0 dB of the FFW of {layers} layers: {told}; of the DEQ of width {WIDTHS[layers]} "
                f"{100 * deq:.1f} %{also}."
            )
    return sentences


def _sized(records: Sequence[Record]) -> list[str]:
    told = []
    for layers, width in TOTALS.items():
        small, network = _median(records, f"deq-{width}"), _median(records, f"ffw-{layers}")
        if small is not None and network is not None:
            told.append(f"{layers} layers {100 * (small - network):+.1f}")
    lead = "A DEQ with as many parameters in all as the FFW leads it at 0 dB, in points, by"
    return [f"{lead}: {', '.join(told)}."] if told else []


def _clean(records: Sequence[Record]) -> list[str]:
    """Names models that did not learn the task, whose noisy accuracy means little."""
    models = sorted({r.model for r in records if r.task == DATA and r.error is None})
    found = {model: _median(records, model, at=None) for model in models}
    poor = [f"{model} {100 * value:.1f} %" for model, value in found.items() if value is not None and value < 0.93]
    return [f"Below 93 % without noise, so that little follows from them: {', '.join(poor)}."] if poor else []


def _ratios(records: Sequence[Record]) -> list[str]:
    found = {n: _median(records, f"deq-{w}", "sensitivity_ratio", None) for n, w in WIDTHS.items()}
    told = ", ".join(f"{n} {value:.2f}" for n, value in found.items() if value is not None)
    if not told:
        return []
    return [
        f"Sensitivity of the DEQ over that of the FFW, by layers: {told}; the ratio does not predict accuracies "
        "after training with noise."
    ]


Points = dict[int, float]
SHOWN = {"deq-128": "DEQ 128", "deq-467": "DEQ 467", "ffw-1": "FFW of 1 layer", "ffw-13": "FFW of 13 layers"}


def draw_depths(records: Sequence[Record]) -> bytes | None:
    """Draws accuracy at 0 dB by depth, one panel a training noise, as a PNG; None without such records."""
    judged = of_one_scale(records)
    curves = {noise: _curves(judged, noise) for noise in TRAINED}
    shown = {noise: found for noise, found in curves.items() if any(found.values())}
    if not shown:
        return None
    page, axes = _page(len(shown))
    for place, (noise, found) in zip(axes, shown.items(), strict=True):
        for index, (name, points) in enumerate(found.items()):
            place.plot(list(points), list(points.values()), marker="o", color=PALETTE[index], label=name)
        _finish(place, f"trained with {TRAINED[noise]}", "layers of the FFW")
    axes[0].set_ylabel("accuracy at 0 dB", fontsize=9)
    axes[0].legend(fontsize=8)
    return _png(page)


def draw_sensitivity(records: Sequence[Record]) -> bytes | None:
    """Draws the sensitivity ratio by depth and the eigenvalues of weights; None without such records."""
    known = with_noise_differences(of_one_scale(records))
    ratios = _along(known, "deq-{width}", "sensitivity_ratio", None)
    histograms = {r.model: r.series["eigenvalues"] for r in known if r.seed == 0 and "eigenvalues" in r.series}
    if not ratios and not histograms:
        return None
    page, (left, right) = _page(2)
    left.plot(list(ratios), list(ratios.values()), marker="o", color=PALETTE[0])
    left.axhline(1, color="#4b5563", linewidth=0.8, linestyle=":")
    _finish(left, "sensitivity of the DEQ over that of the FFW", "layers of the FFW")
    for index, (model, label) in enumerate(SHOWN.items()):
        if model in histograms:
            shares = histograms[model]
            edges = [3.0 * k / len(shares) for k in range(len(shares) + 1)]
            right.stairs(shares, edges, color=PALETTE[index], label=label, linewidth=1.4)
    _finish(right, "eigenvalues of the weights", "modulus")
    right.legend(fontsize=8)
    return _png(page)


def _curves(records: Sequence[Record], noise: str) -> dict[str, Points]:
    return {
        "DEQ": _along(records, "deq-{width}" + noise, "accuracy", 0.0),
        "FFW": _along(records, "ffw-{layers}" + noise, "accuracy", 0.0),
        "FFW with the input in every layer": _along(records, "ffw-{layers}-inject" + noise, "accuracy", 0.0),
    }


def _along(records: Sequence[Record], model: str, metric: str, at: float | None) -> Points:
    names = {layers: model.format(layers=layers, width=width) for layers, width in WIDTHS.items()}
    found = {layers: median_of(records, DATA, name, metric, at) for layers, name in names.items()}
    return {layers: value for layers, value in found.items() if value is not None}


def _page(panels: int) -> tuple[Any, Any]:
    canvas = require("matplotlib.figure", extra="plots")
    page = canvas.Figure(figsize=(1.2 + 3.4 * panels, 3.1), layout="constrained")
    return page, page.subplots(1, panels, squeeze=False).flatten()


def _finish(place: Any, title: str, axis: str) -> None:
    place.set_title(title, fontsize=9.5, loc="left")
    place.set_xlabel(axis, fontsize=9)
    place.tick_params(labelsize=8)
    place.grid(True, color="#e3e6ea", linewidth=0.6)
    place.spines[["top", "right"]].set_visible(False)


def _png(page: Any) -> bytes:
    stream = io.BytesIO()
    page.savefig(stream, format="png", dpi=130)
    return stream.getvalue()
