"""Printing tables on a terminal."""

import os

from rich.console import Console
from rich.table import Table


def print_table(shown: Table) -> None:
    """Prints a table as wide as the terminal, or 120 columns wide where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120
    console.print(shown)
