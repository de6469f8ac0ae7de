"""Data that a command is given: a set by name, or a file of arrays. Nothing in a file is ever executed."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from wellposed.data.arrays import read_arrays
from wellposed.data.images import SPLITS, load_images
from wellposed.errors import InputError, WellposedError

ALIASES = {"fashion": "fashion-mnist"}
SETS = ("digits", "fashion-mnist", "mnist", "mnist-5k", "cifar10", "cifar100")
ENDINGS = (".npz", ".npy", ".safetensors", ".pt", ".pth")
INPUTS = ("u", "inputs", "input", "x", "images", "data")
TARGETS = ("y", "targets", "target", "labels", "label")


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs of a network and, where known, targets.

    Args:
        u: one sample a row, in the shape in which it was stored.
        targets: classes as whole numbers or real values; None if there are none.
        source: where they come from.
    """

    u: Tensor
    targets: Tensor | None
    source: str

    def drawn(self, count: int) -> "Samples":
        """Draws samples without replacement, with seed 0; all of them if there are no more."""
        if count >= len(self.u):
            return self
        rows = torch.randperm(len(self.u), generator=torch.Generator().manual_seed(0))[:count]
        targets = None if self.targets is None else self.targets[rows]
        return Samples(self.u[rows], targets, f"{self.source}, {count} of {len(self.u)} drawn with seed 0")


def read_samples(source: str, option: str = "--data", split: str = "train") -> Samples:
    """Returns the samples that ``name``, ``name:split`` or a file names.

    A file holds the inputs alone, or inputs and targets under the names u and y (or inputs, targets and the like);
    a .pt file also the pair (u, y).
    """
    name, _, part = source.partition(":")
    name = ALIASES.get(name.lower(), name.lower())
    if name in SETS:
        return _images(name, part or split, option)
    path = Path(source)
    if path.suffix.lower() not in ENDINGS:
        raise wrong(
            f"{source!r} is neither a data set ({', '.join(SETS)}) nor a file that ends with "
            f"{', '.join(ENDINGS)}", option,
        )  # fmt: skip
    if not path.is_file():
        raise wrong(f"there is no file {source!r}", option)
    return _checked(_pair(_content(path, option), source, option), option)


def _images(name: str, split: str, option: str) -> Samples:
    if split not in SPLITS:
        raise wrong(f"{name} has the parts {', '.join(SPLITS)}; received {split!r}", option)
    try:
        images = load_images(name, split)
    except WellposedError as error:
        raise wrong(str(error), option) from error
    return Samples(images.to_float(), images.labels, images.source)


def _content(path: Path, option: str) -> Any:
    """Reads a file by a reader that runs no code from it."""
    try:
        if path.suffix.lower() in (".npz", ".npy"):
            found = read_arrays(path)
            return found.get("", found)
        if path.suffix.lower() == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has many ways to stumble over a damaged file
        reason = (str(error).strip().splitlines() or ["it is damaged"])[0]
        raise wrong(f"{str(path)!r} cannot be read as plain arrays: {reason}", option) from error


def _pair(content: Any, source: str, option: str) -> Samples:
    if isinstance(content, Mapping):
        lower = {str(key).lower(): value for key, value in content.items()}
        u = next((lower[name] for name in INPUTS if name in lower), None)
        if u is None and len(lower) == 1:
            u = next(iter(lower.values()))
        if u is None:
            raise wrong(f"{source!r} holds {', '.join(sorted(lower)) or 'nothing'}; call the inputs u", option)
        return Samples(u, next((lower[name] for name in TARGETS if name in lower), None), source)
    if isinstance(content, tuple | list) and 1 <= len(content) <= 2:
        return Samples(content[0], content[1] if len(content) == 2 else None, source)
    return Samples(content, None, source)


def _checked(found: Samples, option: str) -> Samples:
    u, targets = (None if part is None else _tensor(part, option) for part in (found.u, found.targets))
    assert u is not None
    if not u.is_floating_point():
        raise wrong(
            f"inputs must be floating-point numbers, as the network takes them; received {u.dtype}", option
        )
    if u.dim() < 2 or len(u) == 0:
        raise wrong(f"inputs need one sample a row; received the shape {tuple(u.shape)}", option)
    if not bool(u.isfinite().all()):
        bad = torch.nonzero(~u.flatten(1).isfinite().all(1))[:, 0]
        raise wrong(f"{len(bad)} of {len(u)} samples hold NaN or infinity, the first is {int(bad[0])}", option)
    if targets is not None and (targets.dim() == 0 or len(targets) != len(u)):
        raise wrong(f"{len(u)} samples need as many targets; received the shape {tuple(targets.shape)}", option)
    if targets is not None and targets.is_floating_point() and not bool(targets.isfinite().all()):
        raise wrong("the targets hold NaN or infinity", option)
    return replace(found, u=u, targets=targets)


def _tensor(value: Any, option: str) -> Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        value = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=True))
    if not isinstance(value, Tensor):
        raise wrong(f"data must be arrays of numbers; received {type(value).__name__}", option)
    return value.to_dense() if value.layout != torch.strided else value


def wrong(message: str, option: str) -> click.BadParameter:
    """Makes the error of an option, which ends the command with the exit code 2."""
    return click.BadParameter(message, param_hint=option)


class RefusedError(click.ClickException):
    """Input that cannot be used; the message says why."""

    exit_code = 2


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Turns an error about the user's input into one line and the exit code 2."""
    try:
        yield
    except InputError as error:
        raise RefusedError(str(error).partition("\n\nWhile executing")[0]) from error
