"""Accuracy by depth, sensitivity and eigenvalues of the pairs of 004 (Figures 1, 2 and 13), drawn from records."""

import io
from collections.abc import Sequence
from typing import Any

from wellposed.errors import require
from wellposed.experiments.differences import with_differences
from wellposed.experiments.findings import median_of
from wellposed.experiments.noise_findings import DATA, TRAINED, of_one_scale
from wellposed.experiments.noise_models import WIDTHS
from wellposed.experiments.plots import PALETTE
from wellposed.experiments.record import Record

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
    known = with_differences(of_one_scale(records))
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
