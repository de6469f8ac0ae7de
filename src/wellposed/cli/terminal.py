"""What all commands share: tables on a terminal, and the folder for what they write."""

import os
import shlex
from pathlib import Path

import click
from click.core import ParameterSource
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


def typed_command() -> str:
    """Returns the command that is running, with the options that were given."""
    context = click.get_current_context()
    words = ["wellposed", str(context.info_name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            words += (parameter.opts if value else parameter.secondary_opts)[:1]
        else:
            for one in value if parameter.multiple else [value]:
                words += [max(parameter.opts, key=len), *map(str, one if isinstance(one, tuple) else [one])]
    return shlex.join(words)
