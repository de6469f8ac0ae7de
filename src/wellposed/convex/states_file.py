"""Recorded states in a folder, from which they are mapped and not read."""

import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wellposed.activations import get_activation
from wellposed.convex.states import States
from wellposed.errors import FileFormatError
from wellposed.forms import ImplicitForm
from wellposed.forms.storage import pack_form, registered_name, unpack_form
from wellposed.models.io.files import file_digest, write_tensors, written_whole

FORMAT, INDEX, FORM = "wellposed-states-1", "states.json", "form.safetensors"
PIECE = 4096  # samples that are written at a time
_MATRICES = ("U", "Z", "X", "Y")


def save_states(states: States, folder: str | os.PathLike[str]) -> None:
    """Writes states to a folder, in pieces: one NumPy file for each of U, Z, X and Y, the form and an index.

    The index comes last, with the checksums of the others, and an old one goes first: a folder that is half
    written is never opened.

    Example:
        >>> import tempfile
        >>> one, folder = torch.ones(3, 1), tempfile.mkdtemp()
        >>> save_states(States(one, one, one, one, (1,), (get_activation("relu"),)), folder)
        >>> open_states(folder).X.shape
        torch.Size([3, 1])
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {
        "format": FORMAT,
        "blocks": list(states.blocks),
        "activations": [registered_name(phi) for phi in states.activations],
        "input_shape": None if states.input_shape is None else list(states.input_shape),
        "form": states.form is not None,
    }
    (place / INDEX).unlink(missing_ok=True)
    for name in _MATRICES:
        _write(place / f"{name}.npy", getattr(states, name))
    if states.form is not None:
        tensors, metadata = pack_form(states.form)
        with written_whole(place / FORM) as temporary:
            write_tensors(temporary, {name: part.contiguous().cpu() for name, part in tensors.items()}, metadata)
    index["files"] = {name: file_digest(place / name) for name in _files(index["form"])}
    index["sha256"] = _sealed(index)
    with written_whole(place / INDEX) as temporary:
        temporary.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def open_states(folder: str | os.PathLike[str], *, verify: bool = True) -> States:
    """Maps the states of a folder, so that only what is looked at takes memory; they can be read and not changed.

    Args:
        folder: that of `save_states`.
        verify: whether to compare the files with their checksums, which reads them once.

    Raises:
        FileFormatError: the folder is not one of `save_states`, or it is damaged.
    """
    place = Path(folder)
    try:
        index = json.loads((place / INDEX).read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise FileFormatError(f"its format is {index['format']!r}, expected {FORMAT!r}")
        if "sha256" in index:  # older folders have no checksums
            _check(place, index, verify)
        return States(
            **{name: _mapped(place / f"{name}.npy") for name in _MATRICES},
            blocks=tuple(index["blocks"]),
            activations=tuple(get_activation(name) for name in index["activations"]),
            form=_form(place / FORM) if index["form"] else None,
            input_shape=None if index["input_shape"] is None else tuple(index["input_shape"]),
        )
    except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise FileFormatError(f"{str(place)!r} has no states that can be opened: {error}") from error


def _files(form: bool) -> list[str]:
    return [f"{name}.npy" for name in _MATRICES] + [FORM] * form


def _sealed(index: dict[str, Any]) -> str:
    """Returns the checksum of an index, but for that itself."""
    said = {name: value for name, value in index.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _check(place: Path, index: dict[str, Any], verify: bool) -> None:
    damaged = [INDEX] if index["sha256"] != _sealed(index) else []
    if verify and not damaged:
        damaged = [name for name in _files(index["form"]) if file_digest(place / name) != index["files"][name]]
    if damaged:
        raise FileFormatError(f"{damaged[0]} is damaged: its checksum does not match; record the states again")


def _write(place: Path, part: Tensor) -> None:
    kind = torch.empty(0, dtype=part.dtype).numpy().dtype
    with written_whole(place) as temporary, open(temporary, "wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": tuple(part.shape)}
        np.lib.format.write_array_header_1_0(file, header)
        for piece in part.split(PIECE):
            file.write(np.ascontiguousarray(piece.detach().cpu().numpy()).data)


def _mapped(place: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no tensors that cannot be written to
        return torch.from_numpy(np.load(place, mmap_mode="r", allow_pickle=False))


def _form(place: Path) -> ImplicitForm:
    with safe_open(place, framework="pt") as file:
        return unpack_form(file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
