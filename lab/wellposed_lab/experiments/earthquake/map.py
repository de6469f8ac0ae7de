"""A map of epicentres, coloured by how far off each model locates them."""

import io
import statistics
from collections.abc import Sequence
from typing import Any

from wellposed.errors import MissingExtraError, require
from wellposed_lab.engine.store import Record
from wellposed_lab.experiments.earthquake.task import LATITUDES, PACIFIC
from wellposed_lab.report.figures import best_scale

SHOWN = {"implicit": "implicit model", "eikonet": "EikoNet"}
LOWEST, HIGHEST = 1.0, 30.0  # degrees, of the colours
TICKS = {0: "0°", 60: "60° E", 120: "120° E", 180: "180°", 240: "120° W", 300: "60° W", 360: "0°"}


def draw_map(records: Sequence[Record]) -> bytes | None:
    """Draws training and test regions with the errors of the first seed as PNG.

    None where there is nothing to draw or matplotlib is not installed.

    Args:
        records: of the earthquake suite.
    """
    scale = best_scale(records)
    usable = [r for r in records if r.task == "earthquake" and r.scale == scale and r.seed == 0 and r.series]
    panels = {name: record for name in SHOWN for record in usable if record.model == name}
    panels = {name: record for name, record in panels.items() if "map_error" in record.series}
    try:
        canvas, colours = (require(f"matplotlib.{module}", extra="plots") for module in ("figure", "colors"))
    except MissingExtraError:
        return None
    if not panels:
        return None
    page = canvas.Figure(figsize=(8.4, 3.1 * len(panels) + 0.5), layout="constrained")
    axes = page.subplots(len(panels), 1, sharex=True, squeeze=False).flatten()
    norm = colours.LogNorm(LOWEST, HIGHEST)
    data = next((record for record in usable if record.model == "data"), None)
    for axis, (name, record) in zip(axes, panels.items(), strict=True):
        _regions(axis)
        _stations(axis, data)
        points = _errors(axis, record, norm)
        axis.set_title(f"{SHOWN[name]}: {_summary(record)}", fontsize=9, loc="left")
    axes[-1].set_xlabel("longitude", fontsize=8.5)
    bar = page.colorbar(points, ax=list(axes), extend="both", shrink=0.85, pad=0.015, aspect=32)
    bar.set_ticks([1, 2, 5, 10, 20, 30], labels=["1°", "2°", "5°", "10°", "20°", "30°"])
    bar.set_label("distance between true and predicted epicentre", fontsize=8.5)
    bar.ax.tick_params(labelsize=8)
    _legend(page, axes[0])
    stream = io.BytesIO()
    page.savefig(stream, format="png", dpi=130)
    return stream.getvalue()


def _regions(axis: Any) -> None:
    axis.axvspan(*PACIFIC, color="#1f5fd0", alpha=0.10, linewidth=0)
    for k in range(10):
        for edge in (PACIFIC[0] - 10 * k, PACIFIC[1] + 10 * k):
            axis.axvline(edge, color="#9aa4b2", linewidth=1.1 if k == 0 else 0.5, zorder=1)
    for k in (1, 3, 5, 7, 9):
        for middle in (PACIFIC[0] - 10 * k + 5, PACIFIC[1] + 10 * k - 5):
            axis.text(middle, 79, f"{k}", ha="center", va="bottom", fontsize=7, color="#4b5563")
    axis.text(180, 79, "training region; outside it the test bands k = 1 to 9", ha="center", va="bottom",
               fontsize=7, color="#1f5fd0")  # fmt: skip
    axis.set_xlim(0, 360)
    axis.set_ylim(LATITUDES[0] - 6, LATITUDES[1] + 13)
    axis.set_xticks(list(TICKS), list(TICKS.values()))
    axis.set_yticks([-60, -30, 0, 30, 60], ["60° S", "30° S", "0°", "30° N", "60° N"])
    axis.tick_params(labelsize=8)
    axis.set_ylabel("latitude", fontsize=8.5)


def _stations(axis: Any, data: Record | None) -> None:
    if data is None:
        return
    look: dict[str, Any] = {"marker": "^", "s": 7, "color": "#9aa4b2", "linewidths": 0, "zorder": 1.5}
    axis.scatter(*_columns(data, "station"), label="stations of 60 training samples", **look)
    if "event_longitude" in data.series:
        look = {"marker": "*", "s": 60, "facecolors": "none", "edgecolors": "#111", "linewidths": 0.7, "zorder": 4}
        axis.scatter(*_columns(data, "event"), label="events with real picks", **look)


def _errors(axis: Any, record: Record, norm: Any) -> Any:
    longitude, latitude = _columns(record, "map")
    return axis.scatter(longitude, latitude, c=record.series["map_error"], cmap="viridis_r", norm=norm, s=9,
                         linewidths=0, zorder=3)  # fmt: skip


def _columns(record: Record, name: str) -> tuple[list[float], list[float]]:
    return record.series[f"{name}_longitude"], record.series[f"{name}_latitude"]


def _summary(record: Record) -> str:
    pairs = list(zip(record.series["map_longitude"], record.series["map_error"], strict=True))
    inside = [error for longitude, error in pairs if PACIFIC[0] <= longitude <= PACIFIC[1]]
    far = [error for longitude, error in pairs if longitude < 10 or longitude > 350]
    if not inside or not far:
        return "distance between true and predicted epicentre"
    return (
        f"median {statistics.median(inside):.1f}° in the training region, {statistics.median(far):.1f}° at k = 9"
    )


def _legend(page: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        page.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
