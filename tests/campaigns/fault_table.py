"""Writes the rows of `faults` as the table of the documentation: python tests/campaigns/fault_table.py."""

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "faults.json"
HEAD = "| fault | times | outcome | data lost |\n|---|---|---|---|"
READINGS = ("refused", "read as written", "damaged part skipped", "weaker and proven")


def outcome(row: dict[str, Any]) -> str:
    """Says how a fault ended."""
    if "refused" in row:
        return ", ".join(f"{row[name]:,} {name}" for name in READINGS if row.get(name))
    if "records" in row:
        return f"all of {row['records']:,} reported records are there"
    if "steps" in row:
        return f"the old version or the new one; a version takes {row['steps']} step{'s' * (row['steps'] > 1)}"
    if row["fault"].startswith("kill"):
        return f"same numbers, {row['finished']:,} times to the end"
    if "stopped" in row:
        times = "once" if row["stopped"] == 1 else f"{row['stopped']:,} times"
        ended = f"stopped {times} with an error that names the file"
        return (
            ended if row["fault"].startswith("read-only") else f"{ended}; same numbers when there was room again"
        )
    return "same numbers"


def lost(row: dict[str, Any]) -> str:
    """Says what is gone."""
    if row["lost"]:
        return f"{row['lost']:,}"
    return "what was damaged, not unnoticed" if "refused" in row else "none"


def merged(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Puts the damages of one kind of file together."""
    for name, group in groupby(
        rows, lambda row: row["fault"].rpartition(", ")[0] if "refused" in row else row["fault"]
    ):
        faults = list(group)
        kinds = ", ".join(fault["fault"].rpartition(", ")[2] for fault in faults)
        counts = {key: sum(fault[key] for fault in faults) for key in faults[0] if isinstance(faults[0][key], int)}
        yield {**faults[0], **counts, "fault": f"{name}: {kinds}" if "refused" in faults[0] else name}


def lines(rows: list[dict[str, Any]]) -> Iterable[str]:
    """Writes one line a fault; one that ended badly says so first."""
    for row in merged(rows):
        wrong = f"**{row['other result']:,} with another result**; " if row["other result"] else ""
        yield f"| {row['fault']} | {row['times']:,} | {wrong}{outcome(row)} | {lost(row)} |"


def markdown(facts: dict[str, Any]) -> str:
    """Writes the table.

    Example:
        >>> row = {"fault": "clock backwards, report", "times": 2, "other result": 0, "lost": 0}
        >>> print(markdown({"rows": [row]}).splitlines()[-1])
        | clock backwards, report | 2 | same numbers | none |
    """
    return "\n".join([HEAD, *lines(facts["rows"])]) + "\n"


if __name__ == "__main__":
    print(markdown(json.loads(RESULT.read_text())), end="")
