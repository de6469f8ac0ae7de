"""What all commands share: tables on a terminal, and the folder for what they write."""

import os
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table


def print_table(shown: Table) -> None:
    """Prints a table as wide as the terminal, or 120 columns wide where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120
    console.print(shown)


def make_folder(out: Path) -> None:
    """Makes the folder of --out, or ends the command with one line."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"cannot make {out} ({error.strerror}); choose another --out") from error
