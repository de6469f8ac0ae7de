"""Certified models as the library writes them and reads them back."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor, nn

from wellposed.activations.blockwise import parts_of
from wellposed.checker import Finding, certificate_path
from wellposed.checker.check import opened
from wellposed.checker.model import Part
from wellposed.checker.tensors import Budget, RefusedError, TensorFile, scaled
from wellposed.errors import WellposedError
from wellposed.forms import ImplicitForm
from wellposed.forms.storage import pack_form
from wellposed.models import Claim, ImplicitModel, load, save
from wellposed.models.io.storage import Model

SMALL = 1 << 20  # entries of a matrix that is formed to be compared
UNFORMED = "the checker does not form"  # how it says that it leaves an operator to a proof without numbers


def save_certified(model: Any, out: Path, claims: Iterable[Claim] = ()) -> None:
    """Saves a model with its certificate, or without one and says why."""
    try:
        save(model, out, certificate=True, claims=claims)
    except WellposedError as error:
        if not out.is_file():
            raise
        click.echo(f"no certificate beside {out}: {error}", err=True)


class Sizes(NamedTuple):
    """What a network or a model takes.

    Args:
        weights: entries of matrices and filters that are stored, without biases.
        nonzeros: those that are not zero.
        bytes: of all its tensors, or of its file.
        certificate: bytes of the certificate.
    """

    weights: int
    nonzeros: int
    bytes: int
    certificate: int = 0


def sizes_of(model: nn.Module | ImplicitForm, file: Path | None = None) -> Sizes:
    """Counts weights and bytes; those of the file, if it was written to one.

    Example:
        >>> sizes_of(nn.Linear(3, 2))
        Sizes(weights=6, nonzeros=6, bytes=32, certificate=0)
    """
    if isinstance(model, ImplicitForm):
        stored = [(name, value) for name, value in pack_form(model)[0].items() if value.is_floating_point()]
        weights = [value for name, value in stored if name not in ("bias", "output_bias")]
    else:
        named = {id(value): value.detach() for value in (*model.parameters(), *model.buffers())}
        stored = [("", value) for value in named.values()]
        weights = [value.detach() for value in model.parameters() if value.dim() > 1]
    count, nonzeros = sum(w.numel() for w in weights), sum(int(w.count_nonzero()) for w in weights)
    if file is None:
        return Sizes(count, nonzeros, sum(value.nbytes for _, value in stored))
    proof = certificate_path(file)
    return Sizes(count, nonzeros, file.stat().st_size, proof.stat().st_size if proof.is_file() else 0)


def as_stored(path: Path, *, folder: bool) -> Finding:
    """Checks that the library evaluates what the checker has read: matrices, biases, activations and blocks.

    Args:
        path: the file with the tensors.
        folder: whether it is in a folder of `save_pretrained`.

    Raises:
        RefusedError: the library evaluates something else, so the proofs speak of another model.
        WellposedError: the library does not read the file.
    """
    model = load(path.parent if folder else path)
    file, equations = opened(path.parent if folder else path)
    if isinstance(model, ImplicitForm):
        _same_form(file, equations[0], model)
        return Finding("evaluated as stored", "", "a form", "the loaded form is the one in the file")
    if not isinstance(model, Model):
        raise RefusedError(f"{path.name} holds {type(model).__name__}, of which nothing is proven")
    cells = [model] if isinstance(model, ImplicitModel) else [model.cell(k) for k in range(len(model.cells))]
    if len(cells) != len(equations):
        raise RefusedError(
            f"the library reads {len(cells)} equations in {path.name}, the checker {len(equations)}"
        )
    for equation, cell in zip(equations, cells, strict=True):
        _same_cell(file, equation, cell)
    return Finding("evaluated as stored", "", "bit for bit", "the loaded model's matrices are those in the file")


def _same_cell(file: TensorFile, part: Part, cell: ImplicitModel) -> None:
    stored = (cell.state.raw,) if hasattr(cell.state, "raw") else (cell.state.left, cell.state.right)
    if not all(map(torch.equal, stored, cell.state.factors())):
        raise RefusedError("the model would evaluate another A than the one in the file; save it again")
    prefix = f"{part.name}." if part.name else ""
    for name, value in cell.state_dict().items():
        _same_numbers(file, prefix + name, value)
    exact = [value.detach().double() for value in stored]
    others: dict[str, Tensor] = {
        name: value for name, value in (("B", cell.B), ("C", cell.C), ("D", cell.D)) if value is not None
    }
    if len(exact) == 1:
        others["A"] = exact[0]
    if part.matrices.keys() - {"A"} != others.keys() - {"A"}:
        raise RefusedError("the library and the checker do not read the same matrices")
    for name, value in others.items():
        _same_matrix(part, name, value)
    _same_biases(part, {"b": cell.bias})
    blocks = parts_of(cell.activation) or ((cell.activation, cell.state_features),)
    if _runs(zip(part.names, part.sizes, strict=True)) != _runs((phi.name, size) for phi, size in blocks):
        raise RefusedError(f"the library reads another activation than {part.names} of {part.sizes} states")


def _same_form(file: TensorFile, part: Part, form: ImplicitForm) -> None:
    for name, header in part.operators.items():
        operator = getattr(form, name)
        _same_field(file, header, operator, name)
        is_small = operator.shape[0] * operator.shape[1] <= SMALL
        if is_small and "LowRank" not in str(header):  # whose product is rounded
            _same_matrix(part, name, operator.to(torch.float64).to_dense())
    _same_biases(part, {"b": form.bias, "c": form.output_bias})
    if ([phi.name for phi in form.activations], [*form.partition]) != (part.names, part.sizes):
        raise RefusedError(f"the library reads blocks of {form.partition} states, the checker of {part.sizes}")
    if part.acyclic and form.order.loops:
        raise RefusedError("the library finds a loop in the form, where the checker found none")


def _same_field(file: TensorFile, given: Any, loaded: Any, where: str) -> None:
    """Compares what a header says of an operator, or of one of its fields, with the operator itself."""
    same = True
    if not isinstance(given, dict):
        same = bool(given == loaded)
    elif "operator" in given:
        same = type(loaded).__name__ == given["operator"]
        for name in given.keys() - {"operator", "place", "kind"} if same else ():
            _same_field(file, given[name], getattr(loaded, name), f"{where}.{name}")
    elif "tensor" in given:
        _same_numbers(file, given["tensor"], loaded.permute(given["order"]) if "order" in given else loaded)
    elif "sparse" in given:
        same = given["size"] == list(loaded.shape)
        for one, value in zip(given["sparse"], (loaded.indices(), loaded.values()), strict=True):
            _same_field(file, one, value, where)
    elif "tuple" in given:
        same = len(given["tuple"]) == len(loaded)
        for k, one in enumerate(given["tuple"] if same else ()):
            _same_field(file, one, loaded[k], f"{where}.{k}")
    else:
        blocks = {tuple(key["tuple"]): one for key, one in given["dict"] if one["operator"] != "Zero"}
        same = blocks.keys() == loaded.keys()
        for key, one in blocks.items() if same else ():
            _same_field(file, one, loaded[key], f"{where}.{key}")
    if not same:
        raise RefusedError(f"the library reads another {where} than the checker")


def _same_numbers(file: TensorFile, name: str, loaded: Tensor) -> None:
    """Compares a tensor with the numbers that the checker reads, exactly."""
    numbers = file.values(name, tuple(loaded.shape))[1]
    wide = torch.int64 if not loaded.is_floating_point() else torch.float64
    if not torch.equal(torch.as_tensor(numbers, dtype=wide), loaded.detach().to(wide).flatten()):
        raise RefusedError(f"the library reads other numbers in {name!r} than the checker")


def _same_matrix(part: Part, name: str, loaded: Tensor) -> None:
    """Compares a matrix as the checker forms it, as whole numbers times one power of two."""
    try:
        read = part.matrices[name]()
    except RefusedError as error:
        if str(error).startswith(UNFORMED):  # it is left to a proof without numbers, of blocks without loops
            return
        raise
    entries, exponent = scaled(loaded.detach().double().flatten().tolist(), Budget(8 * loaded.numel()))
    low = min(exponent, read.exponent)
    theirs = [entry << (read.exponent - low) for row in read.rows for entry in row]
    shape = tuple(loaded.shape) if loaded.numel() else read.shape  # a matrix without rows has no columns there
    if read.shape != shape or theirs != [entry << (exponent - low) for entry in entries]:
        raise RefusedError(f"the library evaluates another {name} than the checker has read")


def _same_biases(part: Part, biases: Mapping[str, Tensor | None]) -> None:
    for name, value in biases.items():
        read = part.biases[name]() if name in part.biases else None
        if read != (None if value is None else value.detach().double().tolist()):  # fractions equal floats exactly
            raise RefusedError(f"the library adds another bias {name} than the checker has read")


def _runs(named: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Merges neighbouring blocks of one activation, unless it acts on a block as a whole."""
    merged: list[tuple[str, int]] = []
    for name, size in named:
        if merged and merged[-1][0] == name and "softmax" not in name:
            merged[-1] = (name, merged[-1][1] + size)
        else:
            merged.append((name, size))
    return merged
