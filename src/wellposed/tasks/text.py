"""Text classification: 20 Newsgroups, divided by date."""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from wellposed.errors import FileFormatError, InputError, MissingExtraError, require, unknown_name
from wellposed.tasks import files
from wellposed.tasks.archive import read_members
from wellposed.tasks.cache import MissingDataError, fetch

_MEMBER = re.compile(r"(?:\./)?20news-bydate-(?P<split>train|test)/(?P<group>[\w.-]+)/(?P<number>\d+)")
_MAX_BYTES = 1 << 27  # one split takes 22 MB
_PACKAGE = (
    "none is known; copy the file from a machine that has a connection, or the folder of scikit-learn's "
    "fetch_20newsgroups, which is read too"
)


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts with their classes.

    Args:
        texts: the documents.
        labels: the number of the class of each.
        classes: their names, sorted.
        source: which set and split this is and what it was read from.

    Example:
        >>> texts = Texts(["good", "bad", "fine"], torch.tensor([1, 0, 1]), ("no", "yes"), "mine")
        >>> len(texts), texts.subset(2).source
        (3, 'mine, 2 of 3 drawn with seed 0')
    """

    texts: list[str]
    labels: Tensor  # (N,) int64
    classes: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        if self.labels.dtype != torch.int64 or self.labels.shape != (len(self.texts),):
            raise InputError(
                f"labels must be int64 ({len(self.texts)},); received {self.labels.dtype} "
                f"{tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.texts)

    def subset(self, count: int, seed: int = 0) -> "Texts":
        """Draws texts without replacement; a larger subset of the same seed contains a smaller one."""
        if not 1 <= count <= len(self):
            raise InputError(f"count must be from 1 to {len(self)}, the number of texts; received {count}")
        rows = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count]
        source = f"{self.source}, {count} of {len(self)} drawn with seed {seed}"
        return Texts([self.texts[row] for row in rows], self.labels[rows], self.classes, source)


def load_newsgroups(split: str = "train", *, headers: bool = True) -> Texts:
    """Loads 20 Newsgroups: 11 314 posts to train with and 7 532 later ones to test on, in 20 groups.

    The posts come from an archive in $WELLPOSED_DATA or in the cache, from the cache of scikit-learn's
    `fetch_20newsgroups`, or by download. They are sorted by group and number, whatever they come from.

    scikit-learn keeps its cache as a pickle in the user's own folder; it is read by scikit-learn itself, and only
    if no archive is there.

    Args:
        split: "train" or "test".
        headers: False leaves out everything before the first empty line of a post: sender, subject and
            organisation often give the group away.

    Raises:
        MissingDataError: the set is not here and cannot be downloaded; the message says what to do.
        ChecksumError: the archive is damaged.
    """
    if split not in ("train", "test"):
        raise unknown_name("split", split, ("train", "test"))
    texts = _load(split)
    return texts if headers else replace(texts, texts=[text.partition("\n\n")[2] for text in texts.texts])


def _load(split: str) -> Texts:
    """Tries the archives that are here, then scikit-learn's cache, then a download."""
    variants = [[file] for file in files.NEWSGROUPS]
    try:
        index, (path,) = fetch("20 newsgroups", variants, _PACKAGE, download=False)
    except MissingDataError:
        cached = _load_cached(split)
        if cached is not None:
            return cached
        index, (path,) = fetch("20 newsgroups", variants, _PACKAGE)
    return read_newsgroups(path, split, f"20newsgroups {split}: {files.NEWSGROUPS[index].path}")


def read_newsgroups(path: Path, split: str, source: str) -> Texts:
    """Reads one split from an archive of files ``20news-bydate-<split>/<group>/<number>``, Latin-1.

    Raises:
        FileFormatError: not such an archive.
    """
    posts = []
    for member, data in read_members(path, lambda name: _split_of(name) == split, _MAX_BYTES):
        group, number = PurePosixPath(member).parts[-2:]
        posts.append((group, number, data.decode("latin-1")))
    if not posts:
        raise FileFormatError(f"{str(path)!r} holds no posts 20news-bydate-{split}/<group>/<number>")
    return _sorted_texts(posts, source)


def _split_of(member: str) -> str | None:
    match = _MEMBER.fullmatch(member)
    return match["split"] if match else None


def _load_cached(split: str) -> Texts | None:
    try:
        datasets = require("sklearn.datasets", extra="sklearn")
        bunch = datasets.fetch_20newsgroups(subset=split, shuffle=False, download_if_missing=False)
    except (MissingExtraError, OSError) as error:
        logging.getLogger(__name__).debug("no 20 newsgroups in scikit-learn's cache: %s", error)
        return None
    names = [re.split(r"[/\\]", str(name))[-2:] for name in bunch.filenames]
    posts = [(group, number, text) for (group, number), text in zip(names, bunch.data, strict=True)]
    return _sorted_texts(posts, f"20newsgroups {split}: the cache of scikit-learn")


def _sorted_texts(posts: Iterable[tuple[str, str, str]], source: str) -> Texts:
    ordered = sorted(posts, key=lambda post: (post[0], int(post[1])))
    classes = sorted({group for group, _, _ in ordered})
    labels = torch.tensor([classes.index(group) for group, _, _ in ordered], dtype=torch.int64)
    return Texts([text for _, _, text in ordered], labels, tuple(classes), source)
