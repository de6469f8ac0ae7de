"""`wellposed demo`: trains an implicit model beside its controls, and writes a page about it."""

import json
from pathlib import Path

import click
from rich.console import Console

from wellposed.atomic import written_whole
from wellposed.cli.terminal import make_folder
from wellposed.pages.demo import (
    FINDING,
    DemoConfig,
    DemoResult,
    certificates,
    page,
    record,
    run_demo,
    shipped,
    table,
)


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="wellposed-results",
    help="Where demo.html goes.",
)
@click.option("--seeds", type=click.IntRange(min=1), default=DemoConfig.seeds, help="Models of each kind.")
@click.option("--epochs", type=click.IntRange(min=1), default=DemoConfig.epochs, help="Passes over the data.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON, not as a table.")
def demo(out: Path, seeds: int, epochs: int, quiet: bool, as_json: bool) -> None:
    """Train an implicit model and its controls, and see who extrapolates."""
    place = out / "demo.html"
    make_folder(out)
    result = run_demo(DemoConfig(seeds=seeds, epochs=epochs), progress=not quiet)
    with written_whole(place) as temporary:
        temporary.write_text(page(result), encoding="utf-8")
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
    console.print("\nA model that comes with the package:")
    console.print(f"  {shipped()}", markup=False)
