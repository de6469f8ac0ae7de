"""The volatility task: splits by date, scales from training alone, the score, made-up markets, files of users."""

import json

import numpy as np
import pytest
import torch
from wellposed_lab.experiments.volatility.market import FUTURES, amc_daily, futures, is_here, own_file, squeeze
from wellposed_lab.experiments.volatility.task import (
    AMC,
    CSI300,
    CSI500,
    Generated,
    Regimes,
    Squeeze,
    own_amc_digest,
)

from wellposed.data.cache import ChecksumError, MissingDataError
from wellposed.errors import FileFormatError, InputError

TASK = Generated(market=Regimes(days=14, shift=11))
real = pytest.mark.skipif(not is_here(FUTURES), reason="the minute bars are not in $WELLPOSED_DATA")


def days(task, seed, split):
    return set(task.windows(seed, split).begins.astype("datetime64[D]").astype(str).tolist())


def test_splits_share_no_day_and_the_test_comes_last():
    train, validation, test = (days(TASK, 0, split) for split in ("train", "validation", None))
    assert not train & validation and not (train | validation) & test
    assert len(train) == 10 and len(validation) == 1 and len(test) == 3
    assert max(train | validation) < min(test)
    with pytest.raises(InputError, match=r"is tested at \(None,\); received '2022'"):
        TASK.test(0, "2022")


def test_targets_are_population_variances_of_raw_prices_and_scales_come_from_training():
    scaling, found = TASK.scaling(), TASK.windows(0, "train")
    u, y = TASK.train(0)
    assert float(u.double().mean()) == pytest.approx(0, abs=1e-4) and float(u.std(correction=0)) == pytest.approx(
        1, 1e-4
    )
    assert float(y.mean()) == pytest.approx(1, rel=1e-4)
    assert torch.allclose(scaling.prices(u), torch.from_numpy(found.past), rtol=1e-6)
    bars = TASK.bars(0)
    first = np.flatnonzero(bars.minutes == found.begins[3])[0]
    assert found.variance[3] == pytest.approx(bars.prices[first + 60 : first + 70].var())
    assert float(TASK.test(0)[1].mean()) > 5  # turbulence does not enter the scales


def test_a_seed_decides_the_market_and_nothing_else():
    again = Generated(market=Regimes(days=14, shift=11))
    assert torch.equal(TASK.train(1)[0], again.train(1)[0]) and not torch.equal(TASK.train(0)[0], TASK.train(1)[0])
    assert again.scaling() == TASK.scaling()


def test_the_score_has_a_floor_and_real_units():
    scaling = TASK.scaling()
    y = torch.tensor([[2.0], [0.0], [1.0], [4.0]], dtype=torch.float64)
    found = TASK.score(y + torch.tensor([[1.0], [0.5], [0.0], [-2.0]]), y)
    assert found["mape"] == pytest.approx((0.5 + 0.5 / scaling.floor + 0 + 0.5) / 4)
    assert found["median_ape"] == pytest.approx(0.5)
    assert found["test_rmse"] == pytest.approx(scaling.unit * ((1 + 0.25 + 4) / 4) ** 0.5)
    assert TASK.score(0 * y, y)["mape"] == pytest.approx(0.75)  # nothing predicted: one, but where nothing came
    median = float(np.median(TASK.windows(0, "train").variance))
    assert scaling.floor * scaling.unit == pytest.approx(0.01 * median)


def test_the_description_names_data_counts_and_floor():
    text = TASK.about(0)
    assert "two regimes, made up" in text and "130 training windows" in text
    assert "(stride 25 min)" in text and "39 from 2015-02-18 to 2015-02-20" in text
    assert f"{TASK.scaling().floor * TASK.scaling().unit:.3g}" in text


# --- the made-up market ------------------------------------------------------------------------------------------


def test_regimes_follow_a_markov_chain_with_two_variances():
    market = Regimes(days=400, shift=200, level=1.0, long=300.0, short=60.0)
    states = market.turbulence(torch.Generator().manual_seed(0))
    calm, wild = states[: 200 * 390], states[200 * 390 :]
    assert calm.mean() == pytest.approx(60 / 360, abs=0.05) and wild.mean() == pytest.approx(300 / 360, abs=0.05)
    leaving = (np.diff(calm.astype(int)) == 1).sum() / (~calm[:-1]).sum()
    assert leaving == pytest.approx(1 / 300, rel=0.2)
    bars = market.bars(torch.Generator().manual_seed(0))
    steps = np.diff(np.log(bars.prices))
    assert steps[~states[1:]].std() == pytest.approx(market.calm, rel=0.02)
    assert steps[states[1:]].std() == pytest.approx(market.turbulent, rel=0.02)


def test_a_market_is_drawn_alike_twice_and_trades_on_open_days():
    market = Regimes(days=5, shift=3)
    one, two = (market.bars(torch.Generator().manual_seed(9)) for _ in range(2))
    assert np.array_equal(one.prices, two.prices) and len(one.prices) == 5 * 390
    assert [day.isoformat() for day in Regimes(days=12, shift=3).calendar[9:]] == [
        "2015-02-13",
        "2015-02-17",
        "2015-02-18",
    ]
    with pytest.raises(InputError, match=r"shift must lie in 1\.\.days - 1"):
        Regimes(days=5, shift=5)


# --- files of users ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(bare):
    place = bare / "minute_bars"
    place.mkdir()
    return place


def lines(first, count, price):
    moments = np.datetime64(first) + np.arange(count)
    return [f"{moment},{price + 0.01 * (n % 7)}" for n, moment in enumerate(moments)]


def write_amc(folder, name="AMC_1min_2015_2021.csv", hour="09:30"):
    rows = [row for day in range(4, 9) for row in lines(f"2016-01-0{day}T{hour}", 100, 5.0)]
    rows += [row for day in range(11, 16) for row in lines(f"2016-01-{day}T{hour}", 100, 5.0)]
    rows += lines(f"2021-01-04T{hour}", 100, 5.0)
    (folder / name).write_text("\n".join(["time,vwap", *rows]))


def test_own_bars_are_found_with_their_settings(folder):
    assert own_file() is None and own_amc_digest() is None
    write_amc(folder, hour="14:30")
    (folder / "AMC_1min_2015_2021.json").write_text(json.dumps({"gap": "fill"}))
    with pytest.raises(FileFormatError, match="unknown gap; valid: splits, zone"):
        own_file().bars()
    settings = {"zone": "UTC", "splits": [["2020-06-01", 10.0]]}
    (folder / "AMC_1min_2015_2021.json").write_text(json.dumps(settings))
    before = own_amc_digest()
    task = AMC(digest=before)
    assert len(task.windows(0, "train")) == 9 and len(task.windows(0, None)) == 1
    assert task.windows(0, "train").past.max() < 1 < task.windows(0, None).past.min()
    (folder / "AMC_1min_2015_2021.json").write_text(json.dumps({"zone": "UTC"}))
    assert own_amc_digest() != before
    (folder / "AMC_1min_2015_2021.json").write_text("zone: UTC")
    with pytest.raises(FileFormatError, match="must hold arguments of read_bars as JSON"):
        own_file().bars()


def test_what_is_missing_is_said_with_a_remedy(folder):
    for ask in (
        lambda: futures.__wrapped__("IF"),
        squeeze.__wrapped__,
        amc_daily.__wrapped__,
        lambda: AMC().bars(0),
    ):
        with pytest.raises(
            MissingDataError, match=r"put your own bars of AMC there as minute_bars/AMC_1min_2015_2021"
        ):
            ask()
    assert not is_here(FUTURES)
    (folder / "cffex_IF_IC_1min_2016_2022.npz").write_bytes(b"PK")
    with pytest.raises(ChecksumError, match="is damaged or another version"):
        is_here(FUTURES)


def test_bars_that_leave_no_window_are_refused(folder):
    (folder / "AMC_1min_2015_2021.csv").write_text("\n".join(["time,vwap", *lines("2016-01-04T09:30", 69, 5.0)]))
    with pytest.raises(InputError, match="has no 70 minutes in a row from 2015-02-01 to 2020-12-31"):
        AMC().train(0)
    still = [f"{np.datetime64('2016-01-04T09:30') + n},5.0" for n in range(100)]
    (folder / "AMC_1min_2015_2021.csv").write_text("\n".join(["time,vwap", *still]))
    with pytest.raises(InputError, match="do not move"):
        AMC().train(0)


# --- real bars ---------------------------------------------------------------------------------------------------


@real
def test_the_futures_are_split_by_year():
    for task in (CSI300(), CSI500()):
        train, test, later = (days(task, 0, split) for split in ("train", None, "2022"))
        assert min(train) == "2016-01-04" and max(train) < "2021" <= min(test) and max(test) < "2022" <= min(later)
        assert (
            task.bars(0).counts.days == 1487 and task.bars(0).counts.missing == task.bars(0).counts.untraded > 300
        )
        clock = task.windows(0, "train").begins
        first = set((clock - clock.astype("datetime64[D]")).astype(int).tolist())
        assert {9 * 60 + 30, 13 * 60} <= first and max(first) <= 13 * 60 + 50  # nothing over the break


@real
def test_the_squeeze_is_far_from_its_training():
    task = Squeeze()
    assert days(task, 0, "validation") == {"2021-01-21"} and len(days(task, 0, "train")) == 5
    assert float(task.test(0)[1].mean()) > 20 and float(task.train(0)[1].mean()) == pytest.approx(1, rel=1e-4)
