"""The volatility of AMC as 001 reports it and 003 repeats it, and the order of models on other data."""

from collections.abc import Iterator

from wellposed.experiments.papers.names import MODELS, TASKS
from wellposed.experiments.papers.row import Row, Sheet
from wellposed.experiments.rules import Measure

VOLATILITY = (  # model, train MAPE, test MAPE
    ("transformer-volatility", 12.2, 6.51),
    ("implicit-rnn", 2.61, 1.71),
    ("lstm", 10.5, 5.46),
    ("mlp", 5.51, 2.87),
    ("linear-sgd", 7.19, 3.94),
)
RMSE = (("train_rmse", "training", 0.001784), ("test_rmse", "validation", 0.266366))
STAND_INS = ("volatility-csi500", "volatility-squeeze")
SUPPLY = "The minute prices of the stock are not free and have to be supplied."
CONSTANT = " As described this network is a constant."


def volatility_rows(sheet: Sheet, forecasts: str, forecasting: str, figure: str) -> Iterator[Row]:
    """Yields the numbers of the table, of the text and its footnote, and the order of models on stand-ins.

    Args:
        sheet: of the paper.
        forecasts: the place of its table.
        forecasting: that of its text.
        figure: that of the rolling volatility.
    """
    percent = SUPPLY + " Whether the error is in per cent or in ones is not said."
    for model, train, test in VOLATILITY:
        claim = f"The {MODELS[model]}'s {{}} MAPE on the volatility of AMC."
        metric = Measure("train_mape", model, "volatility")
        yield sheet.number(forecasts, claim.format("training"), train, metric, "lower", note=percent)
        metric = Measure("mape", model, "volatility")
        yield sheet.number(forecasts, claim.format("test"), test, metric, "lower", note=percent)
        if model != "implicit-rnn":
            yield from _orders(sheet, forecasting, model)
    note = SUPPLY + " Whether the regular model or the implicitRNN is meant is not said."
    for metric_name, stage, rmse in RMSE:
        claim = f"The implicit model's {stage} RMSE on the volatility of AMC."
        measure = Measure(metric_name, "implicit-rnn", "volatility")
        yield sheet.number(f"{forecasting}, footnote", claim, rmse, measure, "lower", note=note)
    yield sheet.order(
        figure,
        "The volatility of AMC is drastically higher in 2021 than from 2015 to 2020.",
        Measure("volatility", "data", "amc-daily", "test"),
        Measure("volatility", "data", "amc-daily", "training"),
        "higher",
        factor=10,
        note="Estimated from daily highs and lows until October 2021; drastically is read as tenfold.",
    )


def _orders(sheet: Sheet, place: str, rival: str) -> Iterator[Row]:
    """Yields the factor between the implicitRNN and a rival, on the stock and on stand-ins."""
    ours = Measure("mape", "implicit-rnn", "volatility")
    claim = f"The implicitRNN's MAPE is 1.67 times below the {MODELS[rival]}'s"
    note = "The factor is the one to the best rival, the MLP. " + SUPPLY
    yield sheet.order(place, f"{claim}.", ours, rival, "lower", factor=1.67, value=1.67, note=note)
    constant = CONSTANT if rival == "transformer-volatility" else ""
    for task in STAND_INS:
        yield sheet.order(
            place,
            f"{claim}, on {TASKS[task]}.",
            Measure("mape", "implicit-rnn", task),
            rival,
            "lower",
            factor=1.67,
            value=1.67,
            note="Judged on other data, in place of the published ones, which are not free." + constant,
        )
