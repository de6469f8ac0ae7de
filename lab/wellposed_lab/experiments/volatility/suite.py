"""The variance of the next ten minutes from an hour of prices (001 Table 1 and Figure 1, 003 Table 5.3)."""

from dataclasses import replace
from typing import Any

from wellposed_lab.config import Choice, Scale, Training
from wellposed_lab.engine.claims import Measure
from wellposed_lab.engine.experiment import Figure, Picture, Suite
from wellposed_lab.engine.run import Role, Run
from wellposed_lab.engine.thresholds import Floor, Threshold
from wellposed_lab.engine.training import training_runs
from wellposed_lab.experiments.volatility.findings import draw_history, findings
from wellposed_lab.experiments.volatility.market import DAILY, FUTURES, JANUARY, MARCH, is_here
from wellposed_lab.experiments.volatility.run import DailyRun, HistoryRun, VolatilityRun
from wellposed_lab.experiments.volatility.task import (
    AMC,
    CSI300,
    CSI500,
    Generated,
    Regimes,
    Squeeze,
    Volatility,
    own_amc_digest,
)
from wellposed_lab.tasks.task import Task

SUITE_NAME = "volatility"
OPTIONS: dict[str, Any] = {"kappa": 0.5, "solver": "picard"}
RECURRENT: dict[str, Any] = {"readout_bias": True}
MODELS: list[tuple[Role, Choice]] = [
    ("ours", Choice.of("implicit-rnn", **RECURRENT)),
    ("ours", Choice.of("implicit", **OPTIONS)),
    ("baseline", Choice("lstm")),
    ("baseline", Choice("mlp")),
    ("baseline", Choice("linear-sgd")),
    ("baseline", Choice("transformer-volatility")),
    ("control", Choice("transformer-encoder")),
    ("control", Choice.of("implicit-rnn-centred", **RECURRENT)),
    ("control", Choice.of("implicit-centred", bias=True, **OPTIONS)),
    ("control", Choice("mlp-centred")),
    ("control", Choice("linear")),
    ("control", Choice("mean")),
    ("control", Choice("zero")),
    ("control", Choice("recent-variance")),
    ("control", Choice("rolling-variance")),
    ("control", Choice("log-har")),
    ("control", Choice("garch")),
]
SETTINGS = {  # epochs and learning rate of those that want their own
    "implicit-rnn": (15, 1e-3),
    "implicit-rnn-centred": (15, 1e-3),
    "lstm": (15, 3e-3),
    "transformer-encoder": (10, 3e-3),
    "transformer-volatility": (1, 1e-2),  # a constant, and the slowest of all
    "linear-sgd": (20, 1e-2),
}
TASKS = (AMC.name, Squeeze.name, CSI500.name, CSI300.name, Generated.name)


def plan(scale: Scale) -> list[Run]:
    """Returns every model on all data that are available: your own bars of AMC, the futures, the squeeze.

    Without any of them, and at scale tiny, the market is made up.
    """
    tasks = [_sized(task, scale) for task in available_tasks(scale)]
    runs: list[Run] = [*training_runs(SUITE_NAME, scale, tasks, MODELS, training, VolatilityRun)]
    also = [CSI300()] if scale == "default" and is_here(FUTURES) else []
    shown = [*tasks, *also]
    runs += [HistoryRun(suite=SUITE_NAME, seed=0, scale=scale, role="control", task=task) for task in shown]
    daily = scale != "tiny" and is_here(DAILY)
    return runs + ([DailyRun(suite=SUITE_NAME, seed=0, scale=scale, role="control")] if daily else [])


def available_tasks(scale: Scale) -> list[Volatility]:
    """Returns the tasks whose data are available; the second future, much like the first, at scale paper only."""
    if scale == "tiny":
        return [Generated(market=Regimes(days=14, shift=11))]
    digest = own_amc_digest()
    tasks: list[Volatility] = [] if digest is None else [AMC(digest=digest)]
    tasks += [Squeeze()] if is_here(JANUARY, MARCH) else []
    tasks += [CSI500()] if is_here(FUTURES) else []
    tasks += [CSI300()] if scale == "paper" and is_here(FUTURES) else []
    return tasks or [Generated()]


def _sized(task: Volatility, scale: Scale) -> Volatility:
    """Takes every window at scale paper; below that the task's own stride thins them out."""
    return replace(task, stride=1, test_stride=1) if scale == "paper" else task


def training(scale: Scale, task: Task, model: Choice) -> Training:
    """Returns settings chosen by hand by the validation error; the papers print none for this task."""
    if scale == "tiny":
        return Training(epochs=1, batch_size=100, learning_rate=3e-3, clip=1.0)
    epochs, rate = SETTINGS.get(model.name, (20, 3e-3 if isinstance(task, Squeeze) else 1e-2))
    return Training(
        epochs=epochs,
        batch_size=100,
        learning_rate=rate,
        optimizer="sgd" if model.name == "linear-sgd" else "adam",
        clip=1.0,
    )


def _rmse(model: str, task: str) -> Measure:
    return Measure("test_rmse", model, task)


SUITE = Suite(
    name=SUITE_NAME,
    title="Volatility of prices",
    claim="From an hour of prices an implicitRNN predicts the variance of the next ten minutes with 1.67 times "
    "less relative error than MLP, linear regression, LSTM and transformer, although volatility has risen since.",
    papers=("001 Table 1", "001 Figure 1", "001 section 3.2", "003 Table 5.3", "003 Figure 5.2"),
    plan=plan,
    seeds={"tiny": 2, "default": 3, "paper": 5},
    figures=(
        Figure(
            "Relative error in the test period",
            TASKS,
            "mape",
            "MAPE",
            log="",
            paper="001 Table 1",
            quantity="MAPE (predicting zero has 1)",
            only=(None,),
        ),
        Figure(
            "Squared error in the test period",
            TASKS,
            "test_rmse",
            "RMSE",
            log="",
            quantity="RMSE (squared units of the price)",
            only=(None,),
        ),
        Figure(
            "Relative error in training",
            TASKS,
            "train_mape",
            "MAPE",
            log="y",
            paper="001 Table 1",
            quantity="MAPE in training",
        ),
        Figure(
            "Relative error in 2022",
            TASKS,
            "mape",
            "MAPE",
            log="y",
            quantity="MAPE in 2022",
            only=("2022",),
        ),
        Figure(
            "Predictions beside the data",
            TASKS,
            "prediction",
            "windows of the test period, in order",
            over="time",
            log="y",
            quantity="variance over its mean in training",
        ),
    ),
    pictures=(
        Picture(
            "21-day rolling mean of the volatility",
            draw_history,
            "Mean variance of the prices of ten minutes, day by day, averaged over 21 days. Minute bars of AMC "
            "are not free: its curve is estimated from the high and low of every day.",
            "001 Figure 1",
        ),
    ),
    findings=findings,
    grid=(("learning_rate", (1e-3, 3e-3, 1e-2)), ("batch_size", (100, 500))),
    thresholds=(
        Threshold(
            "The implicitRNN's RMSE on the CSI 500 future is 0.9 of that of the last ten minutes at most.",
            _rmse("implicit-rnn", CSI500.name),
            "at most",
            0.9,
            rival=_rmse("recent-variance", CSI500.name),
        ),
        Threshold(
            "The implicit model's RMSE on the CSI 500 future is 0.9 of that of the last ten minutes at most.",
            _rmse("implicit", CSI500.name),
            "at most",
            0.9,
            rival=_rmse("recent-variance", CSI500.name),
        ),
        Threshold(
            "The implicitRNN's RMSE in the squeeze of AMC is 0.92 of the LSTM's at most.",
            _rmse("implicit-rnn", Squeeze.name),
            "at most",
            0.92,
            rival=_rmse("lstm", Squeeze.name),
        ),
    ),
    floors=(
        Floor("mape", "at most", 0.55, CSI500.name, judging=("mape",)),  # the mean has 0.556
        Floor("mape", "at most", 0.92, Squeeze.name, judging=("mape",)),  # 0.927
    ),
    differs="Prices of AMC by the minute are not free: the CSI 500 future and the squeeze of January 2021 stand "
    "in.",
    unavailable={"volatility": "Prices of AMC by the minute are not free; they can be supplied."},
)
