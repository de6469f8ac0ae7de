"""Errors under noise, a panel for every pair of networks (004 Figures 7-9), drawn from records."""

import io
import statistics
from collections.abc import Sequence
from typing import Any

from wellposed.errors import MissingExtraError, require
from wellposed.experiments.noise_models import WIDTHS
from wellposed.experiments.plots import PALETTE, best_scale
from wellposed.experiments.record import Record

PROJECTIONS = ("identity", "silu", "relu")
LOOKS = {"DEQ": (PALETTE[0], "-"), "FFW": (PALETTE[1], "-"), "FFW, Xavier's start": (PALETTE[1], ":")}


def draw_errors(records: Sequence[Record]) -> bytes | None:
    """Draws the median error over the noise, a row a depth and a column an input activation, as PNG.

    None where there is nothing to draw or matplotlib is not installed.
    """
    scale = best_scale(records)
    usable = [record for record in records if record.scale == scale and record.error is None]
    known = {record.model for record in usable}
    depths = [n for n, width in WIDTHS.items() if any(f"deq-{width}-{name}" in known for name in PROJECTIONS)]
    try:
        canvas = require("matplotlib.figure", extra="plots")
    except MissingExtraError:
        return None
    if not depths:
        return None
    page = canvas.Figure(figsize=(8.6, 2.1 * len(depths) + 0.5), layout="constrained")
    axes = page.subplots(len(depths), len(PROJECTIONS), sharex=True, sharey=True, squeeze=False)
    for line, layers in zip(axes, depths, strict=True):
        for place, projection in zip(line, PROJECTIONS, strict=True):
            _panel(place, usable, layers, projection)
        line[0].set_ylabel("mean squared error", fontsize=8.5)
    for place in axes[-1]:
        place.set_xlabel("signal-to-noise ratio in decibels", fontsize=8.5)
    page.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8,
                frameon=False)  # fmt: skip
    stream = io.BytesIO()
    page.savefig(stream, format="png", dpi=130)
    return stream.getvalue()


def _panel(place: Any, records: Sequence[Record], layers: int, projection: str) -> None:
    models = (f"deq-{WIDTHS[layers]}", f"ffw-{layers}", f"ffw-{layers}-xavier")
    for model, (name, (colour, dash)) in zip(models, LOOKS.items(), strict=True):
        places = errors_by_noise([record for record in records if record.model == f"{model}-{projection}"])
        place.plot(list(places), list(places.values()), dash, color=colour, marker="o", markersize=3, label=name)
    place.set_yscale("log")
    place.set_title(f"{projection} input, {layers} layer{'s' if layers > 1 else ''}", fontsize=9, loc="left")
    place.tick_params(which="both", labelsize=8)
    place.grid(True, color="#e3e6ea", linewidth=0.6)
    place.spines[["top", "right"]].set_visible(False)


def errors_by_noise(records: Sequence[Record]) -> dict[float, float]:
    """Returns the median error over the seeds at every strength of noise, the strongest first.

    Example:
        >>> errors_by_noise([])
        {}
    """
    found: dict[float, list[float]] = {}
    for record in records:
        for value in record.values:
            if value.metric == "test_mse" and isinstance(value.at, int | float):
                found.setdefault(float(value.at), []).append(value.value)
    return {at: statistics.median(found[at]) for at in sorted(found)}
