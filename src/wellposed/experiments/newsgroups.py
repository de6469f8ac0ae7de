"""A transformer on 20 Newsgroups, or DistilBERT where its weights are here, as networks of shared rows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from wellposed.baselines.distilbert import load_distilbert
from wellposed.baselines.text_classifier import TextClassifier, TextShape, encoder_layers
from wellposed.convex.gather import Valid
from wellposed.errors import InputError, require, unknown_name
from wellposed.experiments.cache import cached
from wellposed.experiments.kept import train_or_load
from wellposed.experiments.trained_network import Pair, TrainedNetwork
from wellposed.tasks.cache import MissingDataError, data_folder
from wellposed.tasks.text import Texts, load_newsgroups
from wellposed.tasks.vocabulary import Vocabulary
from wellposed.tasks.wordpiece import WordPieces

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
    part: ClassVar[int] = 250
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
        """Scores what needs no network: logistic regression on TF-IDF of words (scikit-learn)."""
        return _linear_accuracy(self)


def distilbert_folder() -> Path:
    """Finds the weights of DistilBERT.

    Raises:
        MissingDataError: they are not here; the message says what to do.
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
