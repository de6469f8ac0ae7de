"""`wellposed verify`: proves what a certificate says of a model file, by a checker that trusts no other code."""

import json
from collections.abc import Iterable
from pathlib import Path

import click
from rich import box
from rich.table import Table

from wellposed.checker import Finding, RefusedError, certificate_path, check
from wellposed.checker.check import NEW
from wellposed.cli.terminal import print_table
from wellposed.errors import WellposedError

WEIGHTS = "model.safetensors"  # as the library writes it, which is not imported here
FILE = click.Path(dir_okay=False, path_type=Path)


class UnprovenError(click.ClickException):
    """A certificate that proves nothing; the exit code is 1."""

    exit_code = 1


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--certificate", type=FILE, help="The file with the ending .cert beside the model if left out.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
def verify(model: Path, certificate: Path | None, as_json: bool) -> None:
    """Prove what a certificate says of a saved model.

    MODEL is a .safetensors file, or a folder that holds model.safetensors. All is computed again from the two
    files, in fractions. The exit code is 0 if all is proven, 1 if something is refused, 2 if a file is missing.
    """
    path = model / WEIGHTS if model.is_dir() else model
    proof = certificate or certificate_path(path)
    for wanted in (path, proof):
        if not wanted.is_file():
            raise click.UsageError(
                f"there is no file {str(wanted)!r}; wellposed.save(model, path, certificate=True) writes both"
            )
    try:
        if model.is_dir() and (model / NEW).exists():
            raise RefusedError(
                f"a newer model waits in {model / NEW}, as a save that was stopped leaves it; save it again"
            )
        findings = check(model, proof)
        # Whether the library evaluates what is in the file takes torch, imported only once all else is proven.
        from wellposed.cli.stored import as_stored

        findings.append(as_stored(path, folder=model.is_dir()))
    except (RefusedError, WellposedError, OSError) as error:
        if as_json:
            click.echo(json.dumps({"file": str(path), "proven": False, "reason": str(error)}, indent=2))
        raise UnprovenError(f"{path} is not proven: {error}") from error
    if as_json:
        claims = [finding._asdict() for finding in findings]
        click.echo(json.dumps({"file": str(path), "proven": True, "claims": claims}, indent=2))
    else:
        print_table(table(findings))


def table(findings: Iterable[Finding]) -> Table:
    """Lays out what was proven, one line a claim."""
    shown = Table(box=box.SIMPLE)
    for name in ("claim", "about", "stated", "proven by"):
        shown.add_column(name)
    for finding in findings:
        shown.add_row(finding.claim, finding.about or "the model", finding.stated, finding.proof)
    return shown
