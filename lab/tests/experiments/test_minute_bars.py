"""The loader of minute bars: zones, labels, splits, gaps, repetitions, and what can be wrong in a file."""

import gzip
import sys
from datetime import UTC, date, datetime, time, timedelta

import numpy as np
import pytest
from wellposed_lab.experiments.volatility.bars import CFFEX, NYSE, Bars, Exchange, clean, read_bars, split_factors

from wellposed.errors import FileFormatError, InputError, MissingExtraError

OPEN = datetime(2021, 1, 27, 9, 30)


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes lines to a CSV file."""

    def function(*lines, name="bars.csv"):
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return function


def listed(bars):
    return [f"{moment:%Y-%m-%d %H:%M}" for moment in bars.minutes.tolist()]


# --- times -------------------------------------------------------------------------------------------------------


def test_naive_times_are_those_of_the_exchange_unless_a_zone_is_given(write):
    path = write("time,vwap", "2021-01-27 09:29,1.0", "2021-01-27 09:30,2.0", "2021-01-27 16:00,3.0")
    bars = read_bars(path)
    assert listed(bars) == ["2021-01-27 09:30"] and bars.prices.tolist() == [2.0] and bars.counts.outside == 2
    path = write("time,vwap", "2021-01-27 14:30,2.0", "2021-07-27 13:30,3.0", name="utc.csv")
    assert listed(read_bars(path, zone="UTC")) == ["2021-01-27 09:30", "2021-07-27 09:30"]


def test_offsets_are_followed_over_the_change_of_the_clock(write):
    days = [f"2022-03-11T09:30:00-05:00,{1.0}", f"2022-03-14T09:30:00-04:00,{2.0}", "2022-11-07T14:30:00Z,3.0"]
    assert listed(read_bars(write("time,vwap", *days))) == [
        "2022-03-11 09:30",
        "2022-03-14 09:30",
        "2022-11-07 09:30",
    ]


def test_naive_times_in_another_zone_follow_both_clocks(write):
    # Between 14 and 28 March 2021 London was 4 hours ahead of New York, else 5.
    lines = ["2021-03-12 14:30,1.0", "2021-03-15 13:30,2.0", "2021-03-29 14:30,3.0"]
    found = listed(read_bars(write("time,vwap", *lines), zone="Europe/London"))
    assert found == ["2021-03-12 09:30", "2021-03-15 09:30", "2021-03-29 09:30"]


def test_a_time_that_the_clock_has_twice_or_never_is_refused_only_in_a_session(write):
    path = write("time,vwap", "2021-11-07 01:30,1.0", "2021-11-08 09:30,2.0")
    assert listed(read_bars(path)) == ["2021-11-08 09:30"]  # a Sunday night: no session, no harm
    always = Exchange("always", "America/New_York", ((time(0), time(9)),), lambda day: True)
    with pytest.raises(FileFormatError, match=r"line 2, column 'time': 2021-11-07 01:30:00 does not exist or is"):
        read_bars(path, always)
    with pytest.raises(FileFormatError, match="write times with their offset from UTC"):
        read_bars(write("time,vwap", "2021-03-14 02:30,1.0", name="spring.csv"), always)
    aware = write("time,vwap", "2021-11-07 01:30-04:00,1.0", name="aware.csv")
    assert listed(read_bars(aware, always)) == ["2021-11-07 01:30"]


def test_labels_at_the_end_belong_to_the_minute_before(write):
    path = write("time,vwap", "2021-01-27 09:30,1.0", "2021-01-27 09:31,2.0", "2021-01-27 16:00,3.0")
    assert listed(read_bars(path, label="end")) == ["2021-01-27 09:30", "2021-01-27 15:59"]
    with pytest.raises(InputError, match="label must be 'start' or 'end'"):
        read_bars(path, label="middle")


@pytest.mark.parametrize("ticks", [1, 10**3, 10**6, 10**9])
def test_whole_numbers_count_from_1970(write, ticks):
    seconds = int(datetime(2021, 1, 27, 14, 30, tzinfo=UTC).timestamp())
    assert listed(read_bars(write("t,vw", f"{seconds * ticks},2.0"))) == ["2021-01-27 09:30"]


def test_another_way_of_writing_times(write):
    path = write("time,vwap", "01/27/2021 09:30,2.0")
    assert listed(read_bars(path, time_format="%m/%d/%Y %H:%M")) == ["2021-01-27 09:30"]
    with pytest.raises(FileFormatError, match=r"line 2, column 'time': '01/27/2021 09:30' is not a time"):
        read_bars(path)


def test_the_lunch_break_of_the_futures_is_outside(write):
    clock = ["09:30", "11:29", "11:30", "12:00", "13:00", "14:59", "15:00"]
    path = write("time,vwap", *(f"2021-01-27 {moment},1.0" for moment in clock))
    assert [moment[11:] for moment in listed(read_bars(path, CFFEX))] == ["09:30", "11:29", "13:00", "14:59"]


# --- prices ------------------------------------------------------------------------------------------------------


def test_the_price_is_vwap_then_amount_over_volume_then_the_typical_one(write):
    row = "2021-01-27 09:30"
    full = read_bars(write("time,high,low,close,volume,amount,vwap", f"{row},4,1,1,10,30,2.5"))
    assert (full.prices.tolist(), full.price) == ([2.5], "vwap")
    ratio = read_bars(write("time,high,low,close,volume,amount", f"{row},4,1,1,10,30"))
    assert (ratio.prices.tolist(), ratio.price) == ([3.0], "amount / volume")
    assert read_bars(write("time,volume,amount", f"{row},10,3000"), multiplier=100.0).prices.tolist() == [3.0]
    typical = read_bars(write("Datetime,Open,High,Low,Close,Volume", f"{row},3,4,1,1,10"))
    assert (typical.prices.tolist(), typical.price) == ([2.0], "(high + low + close) / 3")


def test_a_minute_without_a_trade_is_a_gap_and_a_price_that_is_missing_an_error(write):
    rows = ["2021-01-27 09:30,2.0,5", "2021-01-27 09:31,,0", "2021-01-27 09:32,0,0", "2021-01-27 09:33,2.0,5"]
    bars = read_bars(write("time,vwap,volume", *rows))
    assert len(bars.prices) == 2 and bars.counts.untraded == 2 and bars.counts.missing == 388
    with pytest.raises(FileFormatError, match=r"line 3, column 'vwap': no price; delete the line"):
        read_bars(write("time,vwap,volume", rows[0], "2021-01-27 09:31,,7"))
    with pytest.raises(FileFormatError, match=r"line 2, column 'vwap': no price"):
        read_bars(write("time,vwap", "2021-01-27 09:30,nan"))


def test_splits_divide_what_came_before(write):
    rows = ["2020-08-27 09:30,8.0", "2020-08-28 15:59,8.0", "2020-08-31 09:30,2.0", "2021-01-04 09:30,20.0"]
    path = write("time,vwap", *rows)
    splits = [(date(2020, 8, 31), 4.0), (date(2021, 1, 4), 0.1)]  # four for one, then one for ten
    assert np.allclose(read_bars(path, splits=splits).prices, [20.0, 20.0, 20.0, 20.0])
    assert np.allclose(read_bars(path, splits=splits[:1]).prices, [2.0, 2.0, 2.0, 20.0])
    with pytest.raises(InputError, match=r"ratio of a split is a positive number; received 0\.0"):
        split_factors(np.array(["2020-08-28"], "M8[m]"), [(date(2020, 8, 31), 0.0)])


# --- gaps and repetitions ----------------------------------------------------------------------------------------


def test_gaps_are_counted_and_filled_within_the_session_only(write):
    rows = ["2021-01-27 09:31,1.0", "2021-01-27 09:33,2.0", "2021-01-27 13:01,5.0", "2021-01-28 14:59,7.0"]
    path = write("time,vwap", *rows)
    kept = read_bars(path, CFFEX)
    assert kept.counts.missing == 2 * 240 - 4 and kept.counts.filled == 0 and len(kept.prices) == 4
    filled = read_bars(path, CFFEX, gaps="fill")
    prices = dict(zip(listed(filled), filled.prices.tolist(), strict=True))
    assert "2021-01-27 09:30" not in prices and "2021-01-27 13:00" not in prices  # nothing came before them
    assert [prices[f"2021-01-27 09:3{minute}"] for minute in range(1, 5)] == [1.0, 1.0, 2.0, 2.0]
    assert prices["2021-01-27 11:29"] == 2.0 and prices["2021-01-27 14:59"] == 5.0
    assert listed(filled)[-1] == "2021-01-28 14:59" and len(prices) == 119 + 119 + 1
    assert filled.counts.filled == 239 - 4 and filled.counts.missing == kept.counts.missing
    with pytest.raises(InputError, match="gaps must be 'keep' or 'fill'; received 'drop'"):
        read_bars(path, CFFEX, gaps="drop")


def test_a_half_day_has_fewer_minutes_to_miss():
    start = np.datetime64("2021-11-26T09:30")
    bars = Bars("x", start + np.arange(210), np.ones(210))
    assert clean(bars, NYSE).counts.missing == 0


def test_repeated_bars_are_dropped_and_contradictions_raise(write):
    row = "2021-01-27 09:30,2.0"
    bars = read_bars(write("time,vwap", row, row, "2021-01-27 09:31,3.0", "2021-01-27 09:31,3.0"))
    assert bars.prices.tolist() == [2.0, 3.0] and bars.counts.repeated == 2
    with pytest.raises(FileFormatError, match=r"line 3, .*09:30 has the price 5 and, in line 2, 2; keep the one"):
        read_bars(write("time,vwap", row, "2021-01-27 09:30,5.0"))


# --- malformed files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([""], "is empty; it must have a line of column names"),
        (["time,vwap"], "is empty"),
        (["time,price", "2021-01-27 09:30,1"], r"has the columns 'time', 'price' and lacks 'vwap', or 'amount'"),
        (["when,vwap", "2021-01-27 09:30,1"], "lacks 'time'; name the columns in its first line"),
        (["time,vwap", "2021-13-27 09:30,1"], "line 2, column 'time': '2021-13-27 09:30' is not a time"),
        (
            ["time,vwap", "2021-01-27 09:30,1", "2021-01-27 09:31,abc"],
            "line 3, column 'vwap': 'abc' is not a number",
        ),
        (["time,vwap", "2021-01-27 09:30,-1"], "line 2, column 'vwap': the price -1 is not positive"),
        (["time,vwap", "2021-01-27 09:30,inf"], "line 2, column 'vwap': the price is infinite"),
        (["time,vwap", "2021-01-27 09:31,1", "2021-01-27 09:30,1"], "line 3, .*comes after.*; sort the file"),
        (["time,vwap", "2021-01-27 09:30,1", "2021-01-27 09:31"], "line 3: 1 cells instead of 2; the line is cut"),
        (["time,vwap", "2021-01-27 09:30:20,1"], "line 2, .*is not a whole minute"),
        (["time,high,low,close", "2021-01-27 09:30,1,2,1"], "line 2, column 'low': low 2 is above high 1"),
        (
            ["time,vwap", "2021-01-30 09:30,1"],
            "none of 1 bars lies in a session of NYSE.*pass the right exchange=",
        ),
        (["time,vwap", "9" * 30 + ",1"], "is not a time"),
    ],
)
def test_malformed_files_are_named_with_place_and_remedy(write, lines, message):
    path = write(*lines)
    with pytest.raises(FileFormatError, match=message) as caught:
        read_bars(path)
    assert str(path) in str(caught.value)


def test_a_price_outside_the_sessions_does_no_harm(write):
    assert read_bars(write("time,vwap", "2021-01-27 08:00,-1", "2021-01-27 09:30,1")).prices.tolist() == [1.0]


def test_one_of_several_symbols_is_chosen(write):
    path = write("symbol,time,vwap", "AMC,2021-01-27 09:30,1", "BB,2021-01-27 09:30,2", "AMC,2021-01-27 09:31,3")
    assert read_bars(path, symbol="AMC").prices.tolist() == [1.0, 3.0]
    with pytest.raises(InputError, match="has the symbols AMC, BB; pass one as symbol=; got None"):
        read_bars(path)
    with pytest.raises(FileFormatError, match=r"line 4, .*'x' is not a number"):
        read_bars(
            write("symbol,time,vwap", "A,2021-01-27 09:30,1", "B,2021-01-27 09:30,2", "A,2021-01-27 09:31,x"),
            symbol="A",
        )


def test_a_cut_off_archive_is_named(tmp_path):
    path = tmp_path / "bars.csv.gz"
    lines = "time,vwap\n" + "".join(f"{OPEN + timedelta(minutes=m)},{1 + m % 7}.123\n" for m in range(300))
    path.write_bytes(gzip.compress(lines.encode()))
    assert len(read_bars(path).prices) == 300
    path.write_bytes(gzip.compress(lines.encode())[:-200])
    with pytest.raises(FileFormatError, match=r"bars\.csv\.gz is cut off or no CSV file"):
        read_bars(path)


def test_a_file_that_is_not_there_or_of_another_kind(tmp_path):
    with pytest.raises(InputError, match="there is no file"):
        read_bars(tmp_path / "bars.csv")
    (tmp_path / "bars.xlsx").write_text("x")
    with pytest.raises(InputError, match=r"read from \.csv, \.csv\.gz or \.parquet files"):
        read_bars(tmp_path / "bars.xlsx")


# --- Parquet -----------------------------------------------------------------------------------------------------


def test_parquet_with_aware_times_equals_csv(tmp_path, write):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    times = pandas.date_range("2021-01-27 14:25", periods=20, freq="min", tz="UTC")
    frame = pandas.DataFrame({"timestamp": times, "VWAP": np.linspace(1, 2, 20)})
    frame.to_parquet(tmp_path / "bars.parquet")
    frame.set_index("timestamp").to_parquet(tmp_path / "indexed.parquet")
    frame.to_csv(tmp_path / "bars.csv", index=False)
    expected = read_bars(tmp_path / "bars.csv")
    assert len(expected.prices) == 15
    for name in ("bars.parquet", "indexed.parquet"):
        found = read_bars(tmp_path / name)
        assert np.array_equal(found.minutes, expected.minutes) and np.allclose(found.prices, expected.prices)


def test_a_truncated_parquet_file_is_named(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "bars.parquet"
    table = pyarrow.table({"time": [OPEN], "vwap": [-1.0]})
    parquet.write_table(table, path)
    with pytest.raises(FileFormatError, match="row 1, column 'vwap': the price -1 is not positive"):
        read_bars(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FileFormatError, match=r"bars\.parquet is cut off or no Parquet file"):
        read_bars(path)
    parquet.write_table(table.slice(0, 0), path)
    with pytest.raises(FileFormatError, match="is empty; it must have a row"):
        read_bars(path)


def test_parquet_without_pyarrow_says_which_extra(tmp_path, monkeypatch):
    (tmp_path / "bars.parquet").write_bytes(b"PAR1")
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match="make lab"):
        read_bars(tmp_path / "bars.parquet")
