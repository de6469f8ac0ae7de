"""Reads the files of the easy-to-hard data sets (Schwarzschild et al. 2021) where they are on this machine."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import FileFormatError, InputError
from wellposed.tasks.cache import MissingDataError, data_folder
from wellposed.tasks.task import Pair

PREFIX_SUMS = "prefix_sums_data"
SPLITS = ("train", "test")


def load_prefix_sums(length: int, folder: str | os.PathLike[str] | None = None) -> Pair:
    """Reads bit strings and their prefix sums modulo two, ``(N, length)`` each, of zeros and ones.

    Args:
        length: of the strings; published are 16 to 64, 72, 128, 256 and 512.
        folder: which holds ``prefix_sums_data/len_32/32_data.pth`` and so on; $WELLPOSED_DATA if None.

    Raises:
        MissingDataError: a file is not there.
        FileFormatError: a file holds something else.
    """
    place = _folder(folder) / PREFIX_SUMS / f"len_{length}"
    bits, targets = (_tensor(place / f"{length}_{part}.pth") for part in ("data", "targets"))
    for name, part in (("data", bits), ("targets", targets)):
        if part.dim() != 2 or part.shape != bits.shape or part.shape[1] != length:
            raise FileFormatError(
                f"{name} of '{place}' must have the shape (N, {length}); received {tuple(part.shape)}"
            )
        _require_bits(part, place)
    return bits.float(), targets.float()


def load_mazes(size: int, split: str = "test", folder: str | os.PathLike[str] | None = None) -> Pair:
    """Reads mazes as images ``(N, 3, side, side)`` and the masks of their paths ``(N, side, side)``.

    Args:
        size: as in the name of the folder, odd; the images then have the side ``2 size + 6``.
        split: "train" (of size 9) or "test".
        folder: which holds ``maze_data_train_9/inputs.npy`` and ``solutions.npy``; $WELLPOSED_DATA if None.

    Raises:
        MissingDataError: a file is not there.
        FileFormatError: a file holds something else.
    """
    if split not in SPLITS:
        raise InputError(f"split must be one of {', '.join(SPLITS)}; received {split!r}")
    place = _folder(folder) / f"maze_data_{split}_{size}"
    images, paths = (_array(place / f"{part}.npy") for part in ("inputs", "solutions"))
    side = 2 * size + 6
    if images.shape[1:] != (3, side, side) or paths.shape != (len(images), side, side):
        raise FileFormatError(
            f"'{place}' must hold inputs (N, 3, {side}, {side}) and solutions (N, {side}, {side}); received "
            f"{tuple(images.shape)} and {tuple(paths.shape)}"
        )
    _require_bits(images, place)
    _require_bits(paths, place)
    return images.float(), paths.float()


def _folder(folder: str | os.PathLike[str] | None) -> Path:
    found = data_folder() if folder is None else Path(folder)
    if found is None:
        raise MissingDataError(
            "no folder was given for the easy-to-hard data; set WELLPOSED_DATA to the one that holds "
            f"{PREFIX_SUMS!r} or 'maze_data_train_9', or use the generated samples, source='generated'"
        )
    return found


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise MissingDataError(
            f"'{path}' is not there; unpack the archive of the easy-to-hard data set next to it, or use the "
            "generated samples, source='generated'"
        )
    return path


def _tensor(path: Path) -> Tensor:
    """Reads a file of torch that holds one tensor; the restricted reader builds no other objects."""
    try:
        found = torch.load(_existing(path), map_location="cpu", weights_only=True)
    except MissingDataError:
        raise
    except Exception as error:  # a damaged or hostile file can raise whatever it likes
        raise FileFormatError(f"'{path}' is no tensor that torch can read safely: {error}") from error
    if not isinstance(found, Tensor):
        raise FileFormatError(f"'{path}' must hold one tensor; received {type(found).__name__}")
    return found


def _array(path: Path) -> Tensor:
    """Reads a .npy file of numbers; objects, which would need a pickle, are refused."""
    try:
        found = np.load(_existing(path), allow_pickle=False)
    except MissingDataError:
        raise
    except (ValueError, OSError, EOFError) as error:
        raise FileFormatError(f"'{path}' is no .npy file of numbers: {error}") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiub" or found.ndim < 1:
        raise FileFormatError(f"'{path}' must hold an array of numbers; received {getattr(found, 'dtype', found)}")
    return torch.from_numpy(found.astype(np.float32))


def _require_bits(part: Tensor, place: Path) -> None:
    if part.numel() == 0 or not bool(((part == 0) | (part == 1)).all()):
        raise FileFormatError(f"'{place}' must hold zeros and ones; received something else, or nothing")
