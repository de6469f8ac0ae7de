"""CIFAR-10 as far as it is here: whole, or those thousands of images whose sprites are present."""

from dataclasses import replace
from pathlib import Path

import torch

from wellposed.experiments.cache import cached
from wellposed.tasks import cifar, files
from wellposed.tasks.cache import DataFile, MissingDataError, fetch
from wellposed.tasks.classes import CLASSES
from wellposed.tasks.images import Images, load_images

NAME = "cifar10"
FIRST = {"fit": 0, "holdout": 40}  # sprite of a split


@cached
def photographs(split: str) -> Images:
    """Returns the images of "fit" or "holdout" that are here; `source` says which.

    Without a single one of "holdout" the test images stand in for it.

    Raises:
        MissingDataError: none is here; the message says how to get them.
    """
    *whole, sprites = files.CIFAR10[split]
    if any(_here(list(variant.files)) is not None for variant in whole):
        return load_images(NAME, split)
    labels, *tiles = sprites.files
    found = {number: paths for number, tile in enumerate(tiles) if (paths := _here([labels, tile])) is not None}
    if len(found) == len(tiles):
        return load_images(NAME, split)
    if not found:
        return load_images(NAME, "test" if split == "holdout" else split)
    parts = [
        cifar.read_sprites(paths[0], "train", 1000 * (FIRST[split] + number), paths[1:])
        for number, paths in found.items()
    ]
    pixels, numbers = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    source = f"{NAME} {split}: {len(found)} of {len(tiles)} sprites"
    return Images(pixels, numbers, CLASSES[NAME], source)


def _here(wanted: list[DataFile]) -> list[Path] | None:
    """Returns where some files lie; None if one is missing."""
    try:
        return fetch(NAME, [wanted], "", download=False)[1]
    except MissingDataError:
        return None


def shrunk(images: Images, side: int) -> Images:
    """Averages images down to a side that divides theirs.

    Example:
        >>> images = Images(torch.full((1, 3, 4, 4), 7, dtype=torch.uint8), torch.tensor([0]), ("a",), "mine")
        >>> shrunk(images, 2).pixels.shape
        torch.Size([1, 3, 2, 2])
    """
    factor = images.pixels.shape[-1] // side
    if factor <= 1:
        return images
    pixels = torch.nn.functional.avg_pool2d(images.pixels.float(), factor).round().to(torch.uint8)
    return replace(images, pixels=pixels, source=f"{images.source}, averaged to {side} x {side}")
