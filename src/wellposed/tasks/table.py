"""Reads images from tables: one image a line, pixels and label as numbers between commas."""

import gzip
import os
import zlib

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import FileFormatError


def read_table(
    path: str | os.PathLike[str], side: int, label: int, header: bool = False
) -> tuple[Tensor, Tensor]:  # (N, 1, side, side) uint8, (N,) int64
    """Reads square grey images from comma-separated numbers, gzipped if the name ends with .gz.

    Args:
        path: the file.
        side: rows and columns of an image.
        label: which column holds the label: 0 for the first, -1 for the last.
        header: whether the first line names the columns.

    Raises:
        FileFormatError: a number that is no byte, a line of another length, or a damaged gzip stream.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "images.csv"
        >>> _ = path.write_text("7,0,50,100,150")
        >>> read_table(path, side=2, label=0)
        (tensor([[[[  0,  50],
                  [100, 150]]]], dtype=torch.uint8), tensor([7]))
    """
    try:
        rows = np.loadtxt(path, dtype=np.uint8, delimiter=",", skiprows=int(header), ndmin=2)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FileFormatError(f"{os.fspath(path)!r} is damaged or not a table of bytes: {error}") from error
    if rows.shape[0] == 0 or rows.shape[1] != side * side + 1:
        raise FileFormatError(
            f"{os.fspath(path)!r} must have {side * side + 1} columns; received a table of {rows.shape}"
        )
    values = torch.from_numpy(rows)
    pixels = values[:, 1:] if label == 0 else values[:, :-1]
    return pixels.reshape(-1, 1, side, side).contiguous(), values[:, label].long()
