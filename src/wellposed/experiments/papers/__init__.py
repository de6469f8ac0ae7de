"""What the five papers publish, as data: one `Row` a number or claim, with the rule it is judged by."""

from wellposed.experiments.papers import p000, p001, p002, p003, p004
from wellposed.experiments.papers.row import SUITES, Row

ROWS: tuple[Row, ...] = (*p000.ROWS, *p001.ROWS, *p002.ROWS, *p003.ROWS, *p004.ROWS)

__all__ = ["ROWS", "SUITES", "Row"]
