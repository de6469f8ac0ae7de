"""The `wellposed` command: results go to stdout, progress to stderr."""

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from wellposed.errors import WellposedError, unknown_name
from wellposed.experiments.demo import DemoConfig, DemoResult, run_demo, versions
from wellposed.experiments.demo_page import page
from wellposed.experiments.demo_text import FINDING, certificates, record, table

FOLDER = click.Path(file_okay=False, path_type=Path)


class SuggestingGroup(click.Group):
    """Names the nearest command when one is mistyped."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command, or says which ones there are."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(str(unknown_name("command", args[0], self.list_commands(ctx))))
        return super().resolve_command(ctx, args)


@click.group(
    cls=SuggestingGroup,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(versions()["wellposed"], prog_name="wellposed", message="%(prog)s %(version)s")
def cli() -> None:
    """Implicit deep learning: x = f(x, u) is the model."""


@cli.command()
@click.option("--out", type=FOLDER, default="wellposed-results", help="Where demo.html goes.")
@click.option("--seeds", type=click.IntRange(min=1), default=DemoConfig.seeds, help="Models of each kind.")
@click.option("--epochs", type=click.IntRange(min=1), default=DemoConfig.epochs, help="Passes over the data.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON, not as a table.")
def demo(out: Path, seeds: int, epochs: int, quiet: bool, as_json: bool) -> None:
    """Train an implicit model and its controls, and see who extrapolates."""
    place = out / "demo.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"cannot make {out} ({error.strerror}); choose another --out") from error
    result = run_demo(DemoConfig(seeds=seeds, epochs=epochs), progress=not quiet)
    place.write_text(page(result), encoding="utf-8")
    if as_json:
        click.echo(json.dumps({**record(result), "page": str(place)}, indent=2))
    else:
        _show(result)
    if not quiet:
        click.echo(f"{result.seconds:.0f} s; now open {place}", err=True)
    if not result.certified:
        raise click.ClickException("a certificate of well-posedness does not hold; see above")


def _show(result: DemoResult) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    console.print(table(result))
    console.print()
    for sentence in FINDING:
        console.print(sentence)
    console.print("\nCertificates of the implicit models:")
    for line in certificates(result):
        console.print(f"  {line}", markup=False)


def main() -> None:
    """Runs the command; Ctrl-C ends it with one line and the exit code 130."""
    try:
        sys.exit(cli.main(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except WellposedError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
