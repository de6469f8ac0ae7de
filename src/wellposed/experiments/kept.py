"""Networks that take minutes to train: kept in the cache, so that processes and later runs share them."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from wellposed.errors import FileFormatError, MissingExtraError
from wellposed.experiments.config import identity
from wellposed.models.atomic import written_whole
from wellposed.models.tensor_file import write_tensors
from wellposed.tasks.cache import cache_folder

FOLDER, VERSION = "networks", 1  # a change of architecture or training raises the version


def train_or_load(
    name: str, config: Any, network: nn.Module, train: Callable[[], None], folder: Path | None = None
) -> None:
    """Gives a network the weights that training gave it before, or trains it and keeps them.

    The file is named after the configuration and carries a checksum of its tensors. Several processes that start
    together each train the network, and the last one's file stays; without a cache nothing is kept.

    Args:
        name: begins the name of the file.
        config: a frozen dataclass; everything that decides the weights.
        network: with its initial weights; changed in place.
        train: trains it.
        folder: the cache, if it is not the usual one.

    Raises:
        FileFormatError: a file is there, and damaged or of something else.
    """
    place = _place(name, config, folder)
    if place is not None and place.is_file():
        _load(network, place)
        return
    train()
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        tensors = {key: value.detach().cpu().contiguous() for key, value in network.state_dict().items()}
        with written_whole(place) as part:
            write_tensors(part, tensors, {"sha256": checksum(tensors)})


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Computes the sha256 of names, shapes and values.

    Example:
        >>> import torch
        >>> checksum({"a": torch.ones(1)}) == checksum({"a": torch.zeros(1)})
        False
    """
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _place(name: str, config: Any, folder: Path | None) -> Path | None:
    try:
        return (folder or cache_folder()) / FOLDER / f"{name}-{identity((VERSION, config))}.safetensors"
    except MissingExtraError:  # no cache
        return None


def _load(network: nn.Module, place: Path) -> None:
    remedy = "delete it, so that the network is trained again"
    try:
        with safe_open(os.fspath(place), "pt") as stored:
            promised = (stored.metadata() or {}).get("sha256")
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError) as error:
        raise FileFormatError(f"{os.fspath(place)!r} holds no weights ({error}); {remedy}") from error
    if checksum(tensors) != promised:
        raise FileFormatError(f"{os.fspath(place)!r} is damaged: its checksum is wrong; {remedy}")
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise FileFormatError(f"{os.fspath(place)!r} holds the weights of another network; {remedy}") from error
