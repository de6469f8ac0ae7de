"""Text classification on 20 Newsgroups, divided by date, and the transformers that do it.

`load_newsgroups` loads the texts. `Vocabulary` numbers words, as padded sequences, and depends on the texts alone.
`WordPieces` are words in pieces, as BERT without capitals reads them (Devlin et al. 2019). `Newsgroups` is a
transformer on these texts, or DistilBERT where its weights are available, as a network of shared rows.
"""

import logging
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from wellposed.convex.shared import Valid
from wellposed.data import files
from wellposed.data.cache import MissingDataError, data_folder, fetch
from wellposed.data.files import read_members
from wellposed.errors import FileFormatError, InputError, MissingExtraError, require, unknown_name
from wellposed_lab.cache import cached
from wellposed_lab.networks.pruning import Units, transformer_units
from wellposed_lab.networks.trained import Pair, TrainedNetwork, train_or_load
from wellposed_lab.networks.transformers import TextClassifier, TextShape, encoder_layers, load_distilbert

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
        MissingDataError: the set is not available and cannot be downloaded; the message says what to do.
        ChecksumError: the archive is damaged.
    """
    if split not in ("train", "test"):
        raise unknown_name("split", split, ("train", "test"))
    texts = _load(split)
    return texts if headers else replace(texts, texts=[text.partition("\n\n")[2] for text in texts.texts])


def _load(split: str) -> Texts:
    """Tries the archives on disk, then scikit-learn's cache, then a download."""
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


PADDING, UNKNOWN = 0, 1
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")


def words(text: str) -> list[str]:
    """Splits a text into lower-case words and numbers.

    Example:
        >>> words("It's 5 o'clock: GO_home!")
        ["it's", '5', "o'clock", 'go', 'home']
    """
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class Vocabulary:
    """Numbers words from 2 onwards; 0 is padding and 1 every other word.

    Args:
        entries: the words, the most frequent first.

    Example:
        >>> vocabulary = Vocabulary.of(["to be or not to be", "to do"], size=3)
        >>> vocabulary.entries
        ('to', 'be', 'do')
        >>> vocabulary.ids(["do not be late", "to"], length=5)
        tensor([[4, 1, 3, 1, 0],
                [2, 0, 0, 0, 0]])
    """

    entries: tuple[str, ...]
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {word: number for number, word in enumerate(self.entries, UNKNOWN + 1)}
        if len(numbers) != len(self.entries):
            raise InputError("a vocabulary needs different words; some are given twice")
        object.__setattr__(self, "_numbers", numbers)

    @staticmethod
    def of(texts: Sequence[str], size: int) -> "Vocabulary":
        """Takes the `size` words that occur most often; ties are broken alphabetically.

        Use training texts only: words of the test texts must stay unknown.
        """
        if size < 1:
            raise InputError(f"size must be at least 1; received {size}")
        counts = Counter(word for text in texts for word in words(text))
        ranked = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
        return Vocabulary(tuple(word for word, _ in ranked[:size]))

    def __len__(self) -> int:
        return len(self.entries)

    def ids(self, texts: Sequence[str], length: int) -> Tensor:  # (N, T) int64
        """Numbers the first `length` words of each text and pads the rest."""
        if length < 1:
            raise InputError(f"length must be at least 1; received {length}")
        result = torch.full((len(texts), length), PADDING)
        for row, text in zip(result, texts, strict=True):
            first = islice(_WORD.finditer(text.lower()), length)
            numbers = [self._numbers.get(word[0], UNKNOWN) for word in first]
            row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        return result


PADDING_TOKEN, UNKNOWN_TOKEN, START_TOKEN, END_TOKEN = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
LONGEST = 100  # letters of a word that is looked up
_IDEOGRAPHS = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2FA1F), (0xF900, 0xFAFF))


@dataclass(frozen=True)
class WordPieces:
    """A vocabulary of word pieces; one that continues a word starts with ##.

    Args:
        entries: the pieces in the order of their numbers; the first is the padding.

    Example:
        >>> pieces = WordPieces(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##able", "able", "!"))
        >>> pieces.split("Unable, able!")
        ['un', '##able', '[UNK]', 'able', '!']
        >>> pieces.ids(["able!"], length=6)
        tensor([[2, 6, 7, 3, 0, 0]])
    """

    entries: tuple[str, ...]
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {piece: number for number, piece in enumerate(self.entries)}
        missing = [name for name in (PADDING_TOKEN, UNKNOWN_TOKEN, START_TOKEN, END_TOKEN) if name not in numbers]
        if missing or self.entries[0] != PADDING_TOKEN:
            raise InputError(
                f"a vocabulary starts with {PADDING_TOKEN} and holds {', '.join(missing) or 'all marks'}"
            )
        object.__setattr__(self, "_numbers", numbers)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> "WordPieces":
        """Reads ``vocab.txt``, one piece a line."""
        try:
            lines = Path(path).read_text(encoding="utf-8").split("\n")
            return WordPieces(tuple(line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines)))
        except (OSError, UnicodeDecodeError, InputError) as error:
            raise FileFormatError(
                f"{os.fspath(path)!r} is not a vocabulary of word pieces: {error}; give the vocab.txt that "
                "belongs to the weights"
            ) from error

    def split(self, text: str) -> list[str]:
        """Splits a text into pieces, the longest first within every word."""
        return [piece for word in _words(text) for piece in self._pieces(word)]

    def ids(self, texts: Sequence[str], length: int) -> Tensor:  # (N, T) int64
        """Numbers the pieces of texts between a start and an end, cut and padded to a length."""
        if length < 3:
            raise InputError(f"length must be at least 3, for start and end; received {length}")
        result = torch.zeros(len(texts), length, dtype=torch.int64)
        for row, text in zip(result, texts, strict=True):
            pieces = [START_TOKEN, *self.split(text)[: length - 2], END_TOKEN]
            row[: len(pieces)] = torch.tensor([self._numbers[piece] for piece in pieces])
        return result

    def _pieces(self, word: str) -> list[str]:
        pieces, start = [], 0
        while start < len(word) <= LONGEST:
            for end in range(len(word), start, -1):
                piece = ("##" if start else "") + word[start:end]
                if piece in self._numbers:
                    pieces.append(piece)
                    start = end
                    break
            else:
                return [UNKNOWN_TOKEN]
        return pieces or [UNKNOWN_TOKEN]


def _words(text: str) -> list[str]:
    """Lowercases, drops accents and control characters, and separates punctuation and ideographs."""
    plain = unicodedata.normalize("NFD", text.lower())
    letters = []
    for letter in plain:
        kind = unicodedata.category(letter)
        if letter in "\t\n\r" or kind == "Zs":
            letters.append(" ")
        elif kind != "Mn" and not kind.startswith("C") and letter != "\ufffd":
            letters.append(f" {letter} " if _stands_alone(letter, kind) else letter)
    return "".join(letters).split()


def _stands_alone(letter: str, kind: str) -> bool:
    symbol = letter.isascii() and not letter.isalnum()
    return symbol or kind.startswith("P") or any(low <= ord(letter) <= high for low, high in _IDEOGRAPHS)


SOURCES = ("newsgroups", "topics")
NETWORKS = ("small", "distilbert")
FOLDER, FILES = "distilbert", ("model.safetensors", "vocab.txt")  # below the data folder


@dataclass(frozen=True)
class Newsgroups(TrainedNetwork):
    """Posts without their headers and the transformer that tells their groups apart.

    Args:
        source: "newsgroups", or "topics", texts drawn at random for tests.
        network: "small" is trained here; "distilbert" is read from $WELLPOSED_DATA/distilbert, which must hold
            model.safetensors, trained on the 20 groups in the order of their names, and vocab.txt.
        words: of the vocabulary of the small network.
        length: words, or word pieces, of a text that are read.
        width, depth: of the small network.
        epochs: of its training.
        tested: how many test texts it is scored on; all of them if zero.

    Example:
        >>> Newsgroups("topics").data
        'topics'
    """

    source: str = "newsgroups"
    network: str = "small"
    words: int = 20_000
    length: int = 128
    width: int = 64
    depth: int = 1
    epochs: int = 4
    tested: int = 3000
    batch_size: ClassVar[int] = 64
    test_batch_size: ClassVar[int] = 250
    shared_rows: ClassVar[bool] = True
    convertible: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for kind, name, valid in (("text source", self.source, SOURCES), ("network", self.network, NETWORKS)):
            if name not in valid:
                raise unknown_name(kind, name, valid)

    @property
    def data(self) -> str:
        return self.source if self.network == "small" else f"{self.source}-{self.network}"

    @property
    def learning_rate(self) -> float:
        return 2e-3 if self.network == "small" else 2e-5

    @property
    def valid(self) -> Valid:
        return _words_of

    @property
    def weights_config(self) -> Self:
        return replace(self, tested=0)

    def own(self, seed: int) -> int:
        """Returns the seed of the weights; one network of newsgroups serves all seeds, which draw other texts."""
        return seed if self.source == "topics" else 0

    def make(self, seed: int) -> TextClassifier:
        classes = len(self.texts()[0].classes)
        if self.network == "distilbert":
            model = load_distilbert(distilbert_folder())
            if model.shape.classes != classes:
                raise InputError(f"the weights are for {model.shape.classes} classes; the texts have {classes}")
            return model

        shape = TextShape(self.words + 2, self.length, self.width, self.depth, max(1, self.width // 32),
                          4 * self.width, classes, "mean", 0.3)  # fmt: skip
        with torch.random.fork_rng(()):
            torch.manual_seed(seed)
            model = TextClassifier(shape)
            train = partial(self.tune, model, seed, -(-self.epochs * len(self.training()[0]) // self.batch_size))
            if self.source == "topics":
                train()
            else:
                train_or_load(self.source, self, model, train)
        return model

    def layers(self, network: nn.Module) -> list[str]:
        return encoder_layers(network)

    def removable(self, network: nn.Module) -> list[Units]:
        return transformer_units(len(encoder_layers(network)) // 6)

    def training(self, seed: int = 0) -> Pair:
        return _numbered(self.weights_config)[0]

    def tests(self, seed: int = 0) -> Mapping[str, Pair]:
        u, labels = _numbered(self.weights_config)[1]
        count = self.tested or len(u)
        rows = torch.randperm(len(u), generator=torch.Generator().manual_seed(0))[:count]
        return {"accuracy": (u[rows], labels[rows])}

    def texts(self) -> tuple[Texts, Texts]:
        """Returns the texts for training and for the test."""
        return _texts(self.source)

    def linear_accuracy(self) -> float:
        """Scores logistic regression on TF-IDF of words (scikit-learn), which needs no network."""
        return _linear_accuracy(self)


def distilbert_folder() -> Path:
    """Finds the weights of DistilBERT.

    Raises:
        MissingDataError: there are none; the message says what to do.
    """
    data = data_folder()
    folder = None if data is None else data / FOLDER
    missing = [name for name in FILES if folder is None or not (folder / name).exists()]
    if folder is None or missing:
        where = f"$WELLPOSED_DATA/{FOLDER}" if folder is None else f"'{folder}'"
        raise MissingDataError(
            f"DistilBERT is not here: {where} lacks {' and '.join(missing)}; train "
            "DistilBertForSequenceClassification (distilbert-base-uncased, 20 labels in alphabetical order) on "
            f"20 Newsgroups, save it with save_pretrained together with its tokenizer, copy model.safetensors, "
            f"config.json and vocab.txt there and set WELLPOSED_DATA to the folder above"
        )
    return folder


def topic_texts(split: str, groups: int = 4, count: int = 400) -> Texts:
    """Draws texts of some topics: a third of the words belong to the topic, the others to all.

    Example:
        >>> texts = topic_texts("test")
        >>> len(texts), texts.classes
        (100, ('topic0', 'topic1', 'topic2', 'topic3'))
    """
    generator = torch.Generator().manual_seed(0 if split == "train" else 1)
    total = count if split == "train" else count // 4
    labels = torch.randint(groups, (total,), generator=generator)
    own = torch.randint(30, (total, 24), generator=generator)
    from_topic = torch.rand(total, 24, generator=generator) < 1 / 3
    texts = [
        " ".join(f"t{label}w{word}" if special else f"w{word}" for word, special in zip(row, kinds, strict=True))
        for label, row, kinds in zip(labels.tolist(), own.tolist(), from_topic.tolist(), strict=True)
    ]
    return Texts(texts, labels, tuple(f"topic{k}" for k in range(groups)), f"generated topics {split}")


def _words_of(u: Tensor) -> Tensor:  # (B, T)
    return u != 0


@cached
def _texts(source: str) -> tuple[Texts, Texts]:
    if source == "topics":
        return topic_texts("train"), topic_texts("test")
    return load_newsgroups("train", headers=False), load_newsgroups("test", headers=False)


@cached
def _numbered(network: Newsgroups) -> tuple[Pair, Pair]:
    pieces = WordPieces.read(distilbert_folder() / "vocab.txt") if network.network == "distilbert" else None
    train, test = network.texts()
    table = Vocabulary.of(train.texts, network.words) if pieces is None else pieces
    pairs = [(table.ids(texts.texts, network.length), texts.labels) for texts in (train, test)]
    return pairs[0], pairs[1]


@cached
def _linear_accuracy(network: Newsgroups) -> float:
    features = require("sklearn.feature_extraction.text", extra="sklearn")
    models = require("sklearn.linear_model", extra="sklearn")
    train, test = network.texts()
    test = test.subset(min(network.tested or len(test), len(test)))
    table = features.TfidfVectorizer(max_features=network.words, sublinear_tf=True)
    u = table.fit_transform(train.texts)
    model = models.LogisticRegression(C=10.0, max_iter=200).fit(u, train.labels.numpy())
    return float(model.score(table.transform(test.texts), test.labels.numpy()))
