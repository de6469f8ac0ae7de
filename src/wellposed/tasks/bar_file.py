"""Reads tables of minute bars, CSV or Parquet, cell by cell, and says where a cell is wrong."""

import csv
import gzip
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from wellposed.errors import FileFormatError, InputError, require

ALIASES = {
    "time": ("time", "timestamp", "datetime", "date", "t", "window_start", "__index_level_0__", "index"),
    "symbol": ("symbol", "ticker", "sym"),
    "vwap": ("vwap", "vw", "weighted_average", "volume_weighted_average_price"),
    "open": ("open", "o"),
    "high": ("high", "h"),
    "low": ("low", "l"),
    "close": ("close", "c"),
    "volume": ("volume", "v", "vol"),
    "amount": ("amount", "turnover", "money", "value"),
}
LARGEST, LONGEST_LINE, MOST_ROWS = 1 << 31, 1 << 20, 50_000_000
TICKS = (
    (11, 1),
    (14, 10**3),
    (17, 10**6),
    (20, 10**9),
)  # digits of an epoch below which it has so many ticks a second


@dataclass(frozen=True)
class BarTable:
    """The cells of a file of bars, by what they mean.

    Args:
        path: of the file, for messages.
        unit: what `numbers` count: "line" in a CSV file, "row" in a Parquet file.
        numbers: where each bar stands.
        columns: the cells by meaning: time, symbol, vwap, open, high, low, close, volume, amount.
        names: how the file calls these columns.
    """

    path: str
    unit: str
    numbers: Sequence[int]
    columns: dict[str, list[Any]]
    names: dict[str, str]

    def error(self, row: int, meaning: str, problem: str, remedy: str) -> FileFormatError:
        """Returns an error that names the file, the place and what to do."""
        column = f", column {self.names[meaning]!r}" if meaning in self.names else ""
        return FileFormatError(f"{self.path}, {self.unit} {self.numbers[row]}{column}: {problem}; {remedy}")

    def only(self, symbol: str | None) -> "BarTable":
        """Returns the bars of one symbol; None is enough where the file has one."""
        if "symbol" not in self.columns:
            return self
        known = sorted({str(cell) for cell in self.columns["symbol"]})
        if symbol is None and len(known) == 1:
            return self
        if symbol not in known:
            raise InputError(
                f"{self.path} has the symbols {', '.join(known)}; pass one as symbol=; got {symbol!r}"
            )
        kept = [row for row, cell in enumerate(self.columns["symbol"]) if str(cell) == symbol]
        columns = {name: [cells[row] for row in kept] for name, cells in self.columns.items()}
        return BarTable(self.path, self.unit, [self.numbers[row] for row in kept], columns, self.names)

    def floats(self, meaning: str) -> NDArray[np.float64]:  # (N,)
        """Returns a column as numbers; empty cells are NaN."""
        values = np.empty(len(self.numbers))
        for row, cell in enumerate(self.columns[meaning]):
            try:
                values[row] = math.nan if cell is None or cell == "" else float(cell)
            except (TypeError, ValueError):
                raise self.error(row, meaning, f"{cell!r} is not a number", "correct or delete the line") from None
        return values

    def moments(self, time_format: str | None = None) -> list[datetime]:
        """Returns the times, with or without a zone as the file has them; whole numbers count from 1970 in UTC."""
        found = []
        for row, cell in enumerate(self.columns["time"]):
            try:
                found.append(_moment(cell, time_format))
            except (TypeError, ValueError, OverflowError, OSError, StopIteration):
                wanted = time_format or "2021-01-27 09:30:00 or 2021-01-27T14:30:00Z"
                remedy = f"write times like {wanted}, or pass time_format="
                raise self.error(row, "time", f"{cell!r} is not a time", remedy) from None
        return found


def read_table(path: str | os.PathLike[str]) -> BarTable:
    """Reads a file of bars: .csv, .csv.gz or .parquet.

    Args:
        path: the file; columns may have any order and any of the usual names.

    Raises:
        FileFormatError: it is empty, damaged or lacks columns; the message says which and where.

    Example:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp()) / "bars.csv"
        >>> _ = place.write_text("Timestamp,VW\\n2021-01-27 09:30,19.5\\n")
        >>> read_table(place).columns
        {'time': ['2021-01-27 09:30'], 'vwap': ['19.5']}
    """
    place = Path(path)
    if not place.is_file():
        raise InputError(
            f"there is no file {os.fspath(path)!r}; pass the path of a .csv, .csv.gz or .parquet file"
        )
    name = place.name.lower()
    if name.endswith((".parquet", ".pq")):
        return _read_parquet(place)
    if name.endswith((".csv", ".csv.gz", ".txt")):
        return _read_csv(place)
    raise InputError(f"bars are read from .csv, .csv.gz or .parquet files; received {os.fspath(path)!r}")


def _read_csv(path: Path) -> BarTable:
    opened = gzip.open if path.name.endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(_lines(stream, path))
            header = next(reader, None)
            lines = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise FileFormatError(f"{path} is cut off or no CSV file ({error}); fetch it again") from error
    if header is None or not lines:
        raise FileFormatError(f"{path} is empty; it must have a line of column names and a line for every bar")
    for number, row in lines:
        if len(row) != len(header):
            raise FileFormatError(
                f"{path}, line {number}: {len(row)} cells instead of {len(header)}; the line is cut off or has a "
                "comma too many: correct or delete it"
            )
    cells = {name: [row[place].strip() for _, row in lines] for place, name in enumerate(header)}
    return _table(str(path), "line", [number for number, _ in lines], cells)


def _lines(stream: TextIO, path: Path) -> Iterator[str]:
    """Yields lines of a file whose unpacked size nobody knows beforehand."""
    left = LARGEST
    while line := stream.readline(LONGEST_LINE):
        left -= len(line)
        if left < 0 or len(line) >= LONGEST_LINE:
            raise FileFormatError(
                f"{path} has a line of more than {LONGEST_LINE} letters, or more than {LARGEST} letters in all; "
                "split the file by symbol or year"
            )
        yield line


def _read_parquet(path: Path) -> BarTable:
    parquet = require("pyarrow.parquet", extra="lab")
    try:
        with parquet.ParquetFile(path) as file:
            about = file.metadata
            size = sum(about.row_group(k).total_byte_size for k in range(about.num_row_groups))
            if not 0 <= about.num_rows <= MOST_ROWS or not 0 <= size <= LARGEST:
                raise ValueError(f"it declares {about.num_rows} rows and {size} bytes, too many for bars")
            table = file.read()
        cells = {name: table.column(name).to_pylist() for name in table.column_names}
    except (OSError, ValueError) as error:  # what pyarrow raises derives from these
        reason = str(error).partition("\n")[0]
        raise FileFormatError(f"{path} is cut off or no Parquet file ({reason}); fetch it again") from error
    if table.num_rows == 0:
        raise FileFormatError(f"{path} is empty; it must have a row for every bar")
    return _table(str(path), "row", range(1, table.num_rows + 1), cells)


def _table(path: str, unit: str, numbers: Sequence[int], cells: dict[str, list[Any]]) -> BarTable:
    """Finds out which column is which."""
    lower = {name.strip().lower(): name for name in cells}
    found = {meaning: [lower[name] for name in names if name in lower] for meaning, names in ALIASES.items()}
    names = {meaning: known[0] for meaning, known in found.items() if known}
    priced = "vwap" in names or {"amount", "volume"} <= names.keys() or {"high", "low", "close"} <= names.keys()
    if "time" not in names or not priced:
        missing = (
            "'time'" if "time" not in names else "'vwap', or 'amount' and 'volume', or 'high', 'low' and 'close'"
        )
        raise FileFormatError(
            f"{path} has the columns {', '.join(map(repr, cells))} and lacks {missing}; name the columns in its "
            "first line"
        )
    return BarTable(path, unit, numbers, {meaning: cells[name] for meaning, name in names.items()}, names)


def _moment(cell: Any, time_format: str | None) -> datetime:
    if isinstance(cell, datetime):
        return cell
    if time_format is not None:
        return datetime.strptime(str(cell), time_format)
    if isinstance(cell, int) or (str(cell).isdigit() and len(str(cell)) > 8):  # 20210127 is a day
        ticks = next(ticks for digits, ticks in TICKS if abs(int(cell)) < 10**digits)
        return datetime.fromtimestamp(int(cell) // ticks, UTC)
    return datetime.fromisoformat(str(cell))
