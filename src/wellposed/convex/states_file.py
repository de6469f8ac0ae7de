"""Recorded states in a folder, from which they are mapped and not read."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from wellposed.activations import get_activation
from wellposed.convex.states import States
from wellposed.errors import FileFormatError
from wellposed.forms import ImplicitForm
from wellposed.forms.storage import pack_form, registered_name, unpack_form
from wellposed.models.atomic import written_whole

FORMAT, INDEX, FORM = "wellposed-states-1", "states.json", "form.safetensors"
PIECE = 4096  # samples that are written at a time
_MATRICES = ("U", "Z", "X", "Y")


def save_states(states: States, folder: str | os.PathLike[str]) -> None:
    """Writes states to a folder, in pieces: one NumPy file for each of U, Z, X and Y, the form and an index.

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
    for name in _MATRICES:
        _write(place / f"{name}.npy", getattr(states, name))
    if states.form is not None:
        tensors, metadata = pack_form(states.form)
        with written_whole(place / FORM) as temporary:
            save_file({name: part.contiguous().cpu() for name, part in tensors.items()}, temporary, metadata)
    with written_whole(place / INDEX) as temporary:
        temporary.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def open_states(folder: str | os.PathLike[str]) -> States:
    """Maps the states of a folder, so that only what is looked at takes memory; they can be read and not changed.

    Raises:
        FileFormatError: the folder is not one of `save_states`.
    """
    place = Path(folder)
    try:
        index = json.loads((place / INDEX).read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise FileFormatError(f"its format is {index['format']!r}, expected {FORMAT!r}")
        return States(
            **{name: _mapped(place / f"{name}.npy") for name in _MATRICES},
            blocks=tuple(index["blocks"]),
            activations=tuple(get_activation(name) for name in index["activations"]),
            form=_form(place / FORM) if index["form"] else None,
            input_shape=None if index["input_shape"] is None else tuple(index["input_shape"]),
        )
    except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise FileFormatError(f"{str(place)!r} has no states that can be opened: {error}") from error


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
