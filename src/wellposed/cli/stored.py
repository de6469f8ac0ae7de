"""Certified models as the library writes them and reads them back."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import torch

from wellposed.checker import Finding, RefusedError
from wellposed.errors import WellposedError
from wellposed.forms import ImplicitForm
from wellposed.models import Claim, ImplicitModel, ImplicitRNN, from_pretrained, load, save
from wellposed.models.io.storage import Model


def save_certified(model: Any, out: Path, claims: Iterable[Claim] = ()) -> None:
    """Saves a model with its certificate, or without one and says why."""
    try:
        save(model, out, certificate=True, claims=claims)
    except WellposedError as error:
        if not out.is_file():
            raise
        click.echo(f"no certificate beside {out}: {error}", err=True)


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
