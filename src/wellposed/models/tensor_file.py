"""Tensors in a file: written whole or not at all, with a checksum of all that they mean."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def write_tensors(place: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    try:
        save_file(tensors, place, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{place.parent} cannot be written to, or its disk is full: {error}") from error


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of a text and of the names, dtypes, shapes and bytes of tensors.

    Example:
        >>> zeros, ones = torch.zeros(2), torch.ones(2)
        >>> checksum("", {"a": zeros}) == checksum("", {"a": ones})
        False
    """
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name]
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of the bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
