"""The measurements as a table for the terminal, a JSON file and a page."""

import json
import math
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rivals.measure import LIBRARIES, Row

OURS = tuple(name for name in LIBRARIES if name.startswith("wellposed"))
RIVALS = tuple(name for name in LIBRARIES if name not in OURS)
COLUMNS = (
    "library",
    "value error",
    "gradient error",
    "steps mean / most",
    "forward ms",
    "forward+backward ms",
    "times ours",
    "memory KiB",
    "note",
)
PAGE = Path(__file__).parent / "README.md"
TEMPLATE = Path(__file__).parent / "page.md"
RESULT = Path(__file__).parents[1] / "results" / "rivals" / "compare.json"


def by_problem(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Groups rows of one problem, which stand together."""
    groups = groupby(rows, key=lambda row: (row.problem, row.states, row.batch))
    return [(f"{name}, n = {n}, batch {batch}", list(group)) for (name, n, batch), group in groups]


def our_time(group: list[Row]) -> float:
    """Returns the time of our model, or of `fixed_point` where the model does not apply."""
    return next(row.both_ms for row in group if row.library in OURS and row.both_ms is not None)


def cells(row: Row, group: list[Row]) -> list[str]:
    """Formats one row; a library that was not run has its reason only."""
    if row.both_ms is None or row.forward_ms is None or row.memory_bytes is None:
        return [row.library, *["-"] * (len(COLUMNS) - 2), row.note]
    return [
        row.library,
        f"{row.value_error:.0e}",
        f"{row.gradient_error:.0e}",
        f"{row.steps_mean:.0f} / {row.steps_max}",
        f"{row.forward_ms:.2f}",
        f"{row.both_ms:.2f}",
        f"{row.both_ms / our_time(group):.2f}",
        f"{row.memory_bytes / 1024:.0f}",
        row.note,
    ]


def show(rows: list[Row]) -> None:
    """Prints one table a problem."""
    for title, group in by_problem(rows):
        table = Table(title=title, title_justify="left")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in ("library", "note") else "right")
        for row in group:
            table.add_row(*cells(row, group))
        Console(width=170).print(table)


def write_json(rows: list[Row], about: dict[str, Any], path: Path = RESULT) -> None:
    """Writes the rows and what they were measured with."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**about, "rows": [row.as_dict() for row in rows]}, indent=1) + "\n")


def read_json(path: Path = RESULT) -> tuple[list[Row], dict[str, Any]]:
    """Reads what `write_json` wrote."""
    about = json.loads(path.read_text())
    return [Row(**row) for row in about.pop("rows")], about


def _ratios(rows: list[Row], library: str) -> list[float]:
    """Returns the times of a library relative to ours, on the problems that it runs."""
    return [
        row.both_ms / our_time(group)
        for _, group in by_problem(rows)
        for row in group
        if row.library == library and row.both_ms is not None
    ]


def summary(rows: list[Row]) -> list[list[str]]:
    """Compares the libraries over all problems: times, the worst errors and wrong gradients."""
    lines = []
    for library in LIBRARIES:
        ran = [row for row in rows if row.library == library and row.both_ms is not None]
        ratios = _ratios(rows, library)
        if not ran:
            continue
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        faster = sum(ratio < 1 for ratio in ratios)
        lines.append(
            [
                library,
                f"{mean:.2f}",
                f"{min(ratios):.2f} to {max(ratios):.1f}",
                "-" if library in OURS else f"{faster} of {len(ratios)}",
                f"{max(row.value_error or 0 for row in ran):.0e}",
                f"{max(row.gradient_error or 0 for row in ran):.0e}",
                str(sum("gradient of" in row.note for row in ran)),
            ]
        )
    return lines


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """Formats a Markdown table."""
    safe = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *safe])


def losses(rows: list[Row]) -> list[str]:
    """Says on which problems who is faster than us, and by how much."""
    lines = []
    for title, group in by_problem(rows):
        ahead = {
            row.library: our_time(group) / row.both_ms
            for row in group
            if row.library in RIVALS and row.both_ms is not None and row.both_ms < our_time(group)
        }
        if ahead:
            names = ", ".join(f"{name} {ratio:.1f}x" for name, ratio in sorted(ahead.items(), key=lambda i: -i[1]))
            lines.append(f"- {title}: {names}")
    return lines


def inaccuracies(rows: list[Row]) -> list[str]:
    """Says where the best rival is several times more accurate than we are."""
    lines = []
    for title, group in by_problem(rows):
        mine = next(row for row in group if row.library in OURS and row.value_error is not None)
        others = {row.library: row.value_error for row in group if row.library in RIVALS and row.value_error}
        best = min(others, key=lambda name: others[name])
        if mine.value_error is not None and mine.value_error > 5 * others[best]:
            lines.append(f"- {title}: ours {mine.value_error:.0e}, {best} {others[best]:.0e}")
    return lines


def page(rows: list[Row], about: dict[str, Any]) -> str:
    """Writes the page."""
    compiling = [row.compile_s for row in rows if row.compile_s]
    sentence = "Measured with " + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    tables = "\n\n".join(
        f"### {title}\n\n" + markdown(list(COLUMNS), [cells(row, group) for row in group])
        for title, group in by_problem(rows)
    )
    header = ["library", "times ours, geometric mean", "range", "faster than ours"]
    header += ["worst value error", "worst gradient error", "wrong gradients"]
    return TEMPLATE.read_text().format(
        about=f"{sentence}; Python {about['python']}, {about['machine']}.",
        compile=sum(compiling) / max(len(compiling), 1),
        summary=markdown(header, summary(rows)),
        losses="\n".join(losses(rows)) or "Nowhere.",
        inaccuracies="\n".join(inaccuracies(rows)) or "Nowhere.",
        tables=tables,
    )
