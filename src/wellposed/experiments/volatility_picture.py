"""The picture of volatility over the years (001 Figure 1), drawn from records."""

import io
from collections.abc import Sequence
from typing import Any

from wellposed.errors import require
from wellposed.experiments.plots import PALETTE
from wellposed.experiments.record import Record

TITLES = {
    "volatility": "AMC, minute bars",
    "amc-daily": "AMC, estimated from daily ranges",
    "volatility-csi300": "CSI 300 future",
    "volatility-csi500": "CSI 500 future",
    "volatility-generated": "made-up market",
}
CUTS = {"volatility-generated": None}  # where training ends; for all others with the year 2020
COLUMNS = ("year", "rolling_volatility")


def draw_history(records: Sequence[Record]) -> bytes | None:
    """Draws the 21-day rolling mean of the volatility of every data set as a PNG; None without such records."""
    found = {record.task: record.series for record in records if all(name in record.series for name in COLUMNS)}
    shown = [task for task in TITLES if task in found]
    if not shown:
        return None
    canvas = require("matplotlib.figure", extra="plots")
    page = canvas.Figure(figsize=(8.4, 0.6 + 1.9 * len(shown)), layout="constrained")
    axes = page.subplots(len(shown), 1, squeeze=False).flatten()
    for place, task in zip(axes, shown, strict=True):
        _panel(place, task, found[task])
    axes[-1].set_xlabel("year", fontsize=9)
    stream = io.BytesIO()
    page.savefig(stream, format="png", dpi=130)
    return stream.getvalue()


def _panel(place: Any, task: str, series: dict[str, list[float]]) -> None:
    years, values = (series[name] for name in COLUMNS)
    place.plot(years, values, color=PALETTE[0], linewidth=1.4)
    place.set_yscale("log")
    place.set_title(TITLES[task], fontsize=9.5, loc="left")
    place.set_ylabel("variance of\n10 minutes", fontsize=8.5)
    place.tick_params(which="both", labelsize=8)
    place.grid(True, color="#e3e6ea", linewidth=0.6)
    place.spines[["top", "right"]].set_visible(False)
    if CUTS.get(task, 2021.0) is not None and years[0] < 2021.0 < years[-1]:
        place.axvspan(2021.0, years[-1], color=PALETTE[1], alpha=0.09, linewidth=0)
        place.axvline(2021.0, color=PALETTE[1], linewidth=1, linestyle=(0, (4, 2)))
        place.annotate(
            "training ends",
            (2021.0, 0.93),
            xycoords=("data", "axes fraction"),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=8,
            color=PALETTE[1],
        )
