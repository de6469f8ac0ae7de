"""Reads CIFAR-10 and CIFAR-100: the original archives, binary or pickled, and lossless WebP sprites."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import FileFormatError, require
from wellposed.tasks.archive import read_members
from wellposed.tasks.arrays import read_arrays
from wellposed.tasks.safe_pickle import byte_matrix, load_plain

_PIXELS = 3 * 32 * 32
_ROWS, _COLUMNS = 25, 40  # of tiles in a sprite
_MAX_BYTES = 1 << 28  # all batches of either set take 185 MB

Pair = tuple[Tensor, Tensor]  # pixels (N, 3, 32, 32) uint8 and labels (N,) int64


def read_binary(path: str | os.PathLike[str], batches: Sequence[str], classes: int, label_bytes: int = 1) -> Pair:
    """Reads batches of the binary version, whose records are label bytes followed by 3072 pixels.

    Args:
        path: the tar archive.
        batches: file names of the batches, without folder, in the order wanted.
        classes: every label must be below it.
        label_bytes: in front of each record; the last one is the label. CIFAR-100 has 2, coarse and fine.

    Raises:
        FileFormatError: a batch is missing or not made of whole records, or a label is out of range.
    """
    record = label_bytes + _PIXELS

    def decode(data: bytes) -> Pair:
        if not data or len(data) % record:
            raise FileFormatError(f"{len(data)} bytes are not a whole number of records of {record}")
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(-1, record)
        return rows[:, label_bytes:], rows[:, label_bytes - 1].long()

    return _read_batches(path, batches, classes, decode)


def read_pickled(path: str | os.PathLike[str], batches: Sequence[str], classes: int, key: str = "labels") -> Pair:
    """Reads batches of the Python version, without obeying its pickles (see `safe_pickle`).

    Args:
        path: the tar archive.
        batches: file names of the batches, without folder, in the order wanted.
        classes: every label must be below it.
        key: of the labels: "labels" for CIFAR-10, "fine_labels" for CIFAR-100.

    Raises:
        FileFormatError: a batch is missing or is anything but such data.
    """

    def decode(data: bytes) -> Pair:
        content = load_plain(data)
        if not isinstance(content, dict) or not {"data", key} <= content.keys():
            raise FileFormatError(f"expected a dictionary with 'data' and {key!r}")
        labels = content[key]
        if not isinstance(labels, list) or not all(type(n) is int and 0 <= n < classes for n in labels):
            raise FileFormatError(f"{key!r} must be a list of whole numbers from 0 to {classes - 1}")
        return byte_matrix(content["data"], _PIXELS), torch.tensor(labels, dtype=torch.int64)

    return _read_batches(path, batches, classes, decode)


def read_sprites(labels: Path, part: str, start: int, sprites: Sequence[Path]) -> Pair:
    """Reads sprites: WebP pictures of 25 rows of 40 images, losslessly compressed.

    Args:
        labels: an .npz file with one array of labels a part.
        part: "train" or "test".
        start: the label of the first image.
        sprites: the pictures, in order.

    Raises:
        FileFormatError: a picture of another kind or size, or labels that do not fit.
    """
    pixels = torch.cat([_read_sprite(path) for path in sprites])
    values = _read_labels(labels, part)[start : start + len(pixels)]
    return _checked(pixels, values, 10, labels)


def _read_batches(
    path: str | os.PathLike[str], batches: Sequence[str], classes: int, decode: Callable[[bytes], Pair]
) -> Pair:
    found = {}
    for member, data in read_members(path, lambda name: PurePosixPath(name).name in batches, _MAX_BYTES):
        try:
            found[PurePosixPath(member).name] = decode(data)
        except FileFormatError as error:
            raise FileFormatError(f"{member!r} in {os.fspath(path)!r} is not a CIFAR batch: {error}") from error
    missing = [name for name in batches if name not in found]
    if missing:
        raise FileFormatError(f"{os.fspath(path)!r} lacks {', '.join(missing)}")
    pixels, labels = (torch.cat(parts) for parts in zip(*(found[name] for name in batches), strict=True))
    return _checked(pixels.reshape(-1, 3, 32, 32), labels, classes, path)


def _checked(pixels: Tensor, labels: Tensor, classes: int, path: str | os.PathLike[str]) -> Pair:
    if len(labels) != len(pixels) or not bool(((labels >= 0) & (labels < classes)).all()):
        raise FileFormatError(
            f"{os.fspath(path)!r} must have a label from 0 to {classes - 1} for each of {len(pixels)} images; "
            f"received {len(labels)} labels" + (f" from {labels.min()} to {labels.max()}" if len(labels) else "")
        )
    return pixels, labels


def _read_sprite(path: Path) -> Tensor:  # (1000, 3, 32, 32)
    image = require("PIL.Image", extra="data")
    try:
        with image.open(path, formats=["WEBP"]) as picture:
            if picture.size != (32 * _COLUMNS, 32 * _ROWS):
                raise FileFormatError(
                    f"{str(path)!r} must be a picture of {32 * _COLUMNS} x {32 * _ROWS} points; received "
                    f"{picture.size[0]} x {picture.size[1]}"
                )
            points = np.array(picture.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        if isinstance(error, FileFormatError | FileNotFoundError | PermissionError):
            raise
        raise FileFormatError(f"{str(path)!r} is damaged or not a WebP picture: {error}") from error
    tiles = torch.from_numpy(points).reshape(_ROWS, 32, _COLUMNS, 32, 3)
    return tiles.permute(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)


def _read_labels(path: Path, part: str) -> Tensor:
    try:
        values = read_arrays(path, _MAX_BYTES)[part]
    except (FileFormatError, KeyError) as error:
        raise FileFormatError(f"{str(path)!r} has no labels of {part!r} or is damaged: {error}") from error
    if values.dtype != np.uint8 or values.ndim != 1:
        raise FileFormatError(f"{str(path)!r} must hold bytes (N,); received {values.dtype} {values.shape}")
    return torch.from_numpy(values).long()
