"""A fitted estimator as one safetensors file: tensors and text, no pickle."""

import json
import os
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from wellposed.errors import FileFormatError, InputError
from wellposed.models.io.files import checksum, making_sense, write_tensors, written_whole

FORMAT = "wellposed-estimator-1"


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Writes tensors and what describes them, atomically."""
    try:
        text = json.dumps(state)
    except TypeError as error:
        raise InputError(f"{error}; set random_state to an integer or None before saving") from error
    values = {name: value.detach().contiguous() for name, value in tensors.items()}
    with written_whole(path) as place:
        write_tensors(place, values, {"format": FORMAT, "state": text, "sha256": checksum(text, values)})


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads what `write` has written for an estimator of that kind."""
    name = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no estimator file at {name!r}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise FileFormatError(f"{name!r} is not a safetensors file or is damaged: {error}") from error
    if metadata.get("format") != FORMAT:
        raise FileFormatError(f"{name!r} is not an estimator: format {metadata.get('format')!r}, not {FORMAT!r}")
    sealed = metadata.get("sha256")  # older files have none
    if sealed is not None and sealed != checksum(metadata.get("state", ""), tensors):
        raise FileFormatError(f"{name!r} is damaged: its checksum does not match; fit the estimator again")
    with making_sense(f"{name!r} is damaged"):
        state: dict[str, Any] = json.loads(metadata["state"])
        found = state["kind"]
    if found != kind:
        raise FileFormatError(f"{name!r} holds {state['kind']}; use {state['kind']}.load")
    return tensors, state
