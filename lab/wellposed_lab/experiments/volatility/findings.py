"""What the volatility suite shows, in sentences and in a picture made from its records.

`findings` are the sentences; `draw_history` is volatility over the years (001 Figure 1).
"""

import io
from collections.abc import Sequence
from typing import Any

from wellposed.errors import require
from wellposed_lab.engine.statistics import number
from wellposed_lab.engine.store import Record
from wellposed_lab.report.figures import PALETTE
from wellposed_lab.report.findings import median_of

NAMES = {
    "volatility": "AMC",
    "volatility-csi500": "the CSI 500 future",
    "volatility-csi300": "the CSI 300 future",
    "volatility-squeeze": "the squeeze of AMC",
    "volatility-generated": "the made-up market",
}
OURS = {"implicit-rnn": "the implicitRNN", "implicit": "the implicit model"}
RIVALS = {"recent-variance": "the variance of the last ten minutes", "garch": "GARCH(1,1)"}
NOT_RUN = (
    "The published data, minute bars of AMC from 2015 to 2021, are sold and may not be passed on: they were not "
    "run, and the claims about them have no verdict. Whoever has them can put them into the data folder."
)
SCORE = (
    "MAPE divides by the variance that came, so errors in calm windows count most and answers that are too low "
    "are cheap: predicting zero, which is no forecast, has a MAPE of 1, less than every number that 001 prints."
)


def findings(records: Sequence[Record]) -> list[str]:
    """Says which data were used, and whether the implicit models beat rules that learn nothing."""
    tasks = [task for task in NAMES if any(record.task == task for record in records)]
    if not tasks:
        return []
    sentences = [f"Data: {_data(records, task)}." for task in (*tasks, "amc-daily") if _data(records, task)]
    sentences += [] if "volatility" in tasks else [NOT_RUN]
    for task in tasks:
        sentences += _against(records, task) + _inside(records, task)
    sentences.append(SCORE)
    for task in tasks:
        sentences += _mean(records, task) + _centred(records, task)
    return sentences


def _data(records: Sequence[Record], task: str) -> str | None:
    texts = (str(record.facts["data"]) for record in records if record.task == task and "data" in record.facts)
    return next(texts, None)


def _against(records: Sequence[Record], task: str) -> list[str]:
    """Compares ours with persistence and GARCH, by both scores."""
    sentences = []
    for ours, name in OURS.items():
        comparisons = []
        for metric, score in (("mape", "MAPE"), ("test_rmse", "RMSE")):
            own = median_of(records, task, ours, metric)
            others = {title: median_of(records, task, rival, metric) for rival, title in RIVALS.items()}
            known = {title: value for title, value in others.items() if value is not None}
            if own is not None and known:
                compared = " and ".join(
                    f"{_verb(own, value)} {title} ({number(value)})" for title, value in known.items()
                )
                comparisons.append(f"by {score} ({number(own)}) {name} {compared}")
        if comparisons:
            sentences.append(f"On {NAMES[task]}, {'; '.join(comparisons)} (medians of the seeds).")
    return sentences


def _inside(records: Sequence[Record], task: str) -> list[str]:
    """Compares ours with GARCH on the days of the training period that were held out."""
    names = {"implicit-rnn": "the implicitRNN", "implicit": "the implicit model", "garch": "GARCH(1,1)"}
    errors = {title: median_of(records, task, model, "validation_rmse") for model, title in names.items()}
    listed = [f"{title} {number(value)}" for title, value in errors.items() if value is not None]
    if len(listed) < len(names):
        return []
    return [f"On {NAMES[task]}, RMSE on held-out days of the training period: {', '.join(listed)}."]


def _verb(own: float, other: float) -> str:
    return "beats" if own < other else "does not beat"


def _mean(records: Sequence[Record], task: str) -> list[str]:
    train, test = (median_of(records, task, "mean", metric) for metric in ("train_mape", "mape"))
    if train is None or test is None:
        return []
    return [
        f"On {NAMES[task]}, always predicting the mean of training has a MAPE of {number(train)} in training and "
        f"{number(test)} in the test"
        + (": as in 001, the test looks easier because volatility has risen." if test < train else ".")
    ]


def _centred(records: Sequence[Record], task: str) -> list[str]:
    """Says what it does to see prices less the last one."""
    changes = []
    for model in ("implicit-rnn", "implicit", "mlp"):
        plain, centred = (median_of(records, task, name, "mape") for name in (model, f"{model}-centred"))
        if plain is not None and centred is not None:
            changes.append(f"{model} from {number(plain)} to {number(centred)}")
    if not changes:
        return []
    return [
        f"On {NAMES[task]}, subtracting the last price from every window takes the MAPE of {', '.join(changes)}."
    ]


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
    series = {record.task: record.series for record in records if all(name in record.series for name in COLUMNS)}
    shown = [task for task in TITLES if task in series]
    if not shown:
        return None
    canvas = require("matplotlib.figure", extra="plots")
    page = canvas.Figure(figsize=(8.4, 0.6 + 1.9 * len(shown)), layout="constrained")
    axes = page.subplots(len(shown), 1, squeeze=False).flatten()
    for axis, task in zip(axes, shown, strict=True):
        _panel(axis, task, series[task])
    axes[-1].set_xlabel("year", fontsize=9)
    stream = io.BytesIO()
    page.savefig(stream, format="png", dpi=130)
    return stream.getvalue()


def _panel(axis: Any, task: str, series: dict[str, list[float]]) -> None:
    years, values = (series[name] for name in COLUMNS)
    axis.plot(years, values, color=PALETTE[0], linewidth=1.4)
    axis.set_yscale("log")
    axis.set_title(TITLES[task], fontsize=9.5, loc="left")
    axis.set_ylabel("variance of\n10 minutes", fontsize=8.5)
    axis.tick_params(which="both", labelsize=8)
    axis.grid(True, color="#e3e6ea", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    if CUTS.get(task, 2021.0) is not None and years[0] < 2021.0 < years[-1]:
        axis.axvspan(2021.0, years[-1], color=PALETTE[1], alpha=0.09, linewidth=0)
        axis.axvline(2021.0, color=PALETTE[1], linewidth=1, linestyle=(0, (4, 2)))
        axis.annotate(
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
