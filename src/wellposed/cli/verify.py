"""`wellposed verify`: proves what a certificate says of a model file, by a checker that trusts no other code."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.table import Table

from wellposed.checker import Finding, RefusedError, certificate_path, check
from wellposed.cli.terminal import print_table
from wellposed.errors import WellposedError
from wellposed.forms import ImplicitForm
from wellposed.models import Claim, ImplicitModel, ImplicitRNN, from_pretrained, load, save
from wellposed.models.pretrained import WEIGHTS
from wellposed.models.storage import Model

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
        found = [*check(path, proof), as_stored(path, folder=model.is_dir())]
    except (RefusedError, WellposedError, OSError) as error:
        if as_json:
            click.echo(json.dumps({"file": str(path), "proven": False, "reason": str(error)}, indent=2))
        raise UnprovenError(f"{path} is not proven: {error}") from error
    if as_json:
        claims = [finding._asdict() for finding in found]
        click.echo(json.dumps({"file": str(path), "proven": True, "claims": claims}, indent=2))
    else:
        print_table(table(found))


def as_stored(path: Path, *, folder: bool) -> Finding:
    """Sees that the library evaluates the matrices as they lie in the file, of which the proofs speak."""
    model = from_pretrained(path.parent) if folder else load(path)
    if isinstance(model, ImplicitForm):
        return Finding("evaluated as stored", "", "a form", "it has no other parameters")
    if not isinstance(model, Model):
        raise RefusedError(f"{path.name} holds {type(model).__name__}, of which nothing is proven")
    for cell in cells_of(model):
        stored = (cell.state.raw,) if hasattr(cell.state, "raw") else (cell.state.left, cell.state.right)
        if not all(map(torch.equal, stored, cell.state.factors())):
            raise RefusedError("the model would evaluate another A than the one in the file; save it again")
    return Finding("evaluated as stored", "", "bit for bit", "the loaded model's A is the one in the file")


def cells_of(model: ImplicitModel | ImplicitRNN) -> list[ImplicitModel]:
    """Lists the equations of a model."""
    return [model] if isinstance(model, ImplicitModel) else [model.cell(k) for k in range(len(model.cells))]


def table(findings: Iterable[Finding]) -> Table:
    """Lays out what was proven, one line a claim."""
    shown = Table(box=box.SIMPLE)
    for name in ("claim", "about", "stated", "proven by"):
        shown.add_column(name)
    for finding in findings:
        shown.add_row(finding.claim, finding.about or "the model", finding.stated, finding.proof)
    return shown


def save_certified(model: Any, out: Path, claims: Iterable[Claim] = ()) -> None:
    """Saves a model with its certificate, or without one and says why."""
    try:
        save(model, out, certificate=True, claims=claims)
    except WellposedError as error:
        if not out.is_file():
            raise
        click.echo(f"no certificate beside {out}: {error}", err=True)
