"""The real sets, where $WELLPOSED_DATA holds them: published sizes, checksums and statistics."""

import hashlib

import pytest
import torch
from wellposed_lab.experiments.sparsify.texts import load_newsgroups

from wellposed.data import cache
from wellposed.data.images import load_images


@pytest.fixture(autouse=True)
def _only_local(monkeypatch):
    if cache.data_folder() is None:
        pytest.skip("WELLPOSED_DATA is not set")
    monkeypatch.setenv("WELLPOSED_OFFLINE", "1")


def load(name, split="train"):
    try:
        return load_images(name, split)
    except cache.MissingDataError:
        pytest.skip(f"WELLPOSED_DATA does not hold {name}")


@pytest.mark.parametrize(
    ("name", "mean", "first"),
    [("mnist", 0.1307, [5, 0, 4, 1, 9, 2]), ("fashion-mnist", 0.2860, [9, 0, 0, 3, 0, 2])],
)
def test_grey_sets(name, mean, first):
    train, test = load(name), load(name, "test")
    assert train.pixels.shape == (60_000, 1, 28, 28) and test.pixels.shape == (10_000, 1, 28, 28)
    assert train.labels[:6].tolist() == first
    assert abs(train.to_float().mean() - mean) < 1e-4
    seen = {image.numpy().tobytes() for image in train.pixels}
    assert sum(image.numpy().tobytes() in seen for image in test.pixels) == 0


def batch_sha1(images) -> str:
    """The checksum of the images in the records of CIFAR's binary version."""
    records = torch.cat([images.labels[:, None].to(torch.uint8), images.pixels.flatten(1)], 1)
    return hashlib.sha1(records.numpy().tobytes()).hexdigest()


def test_cifar10_holdout_is_the_fifth_batch_bit_by_bit():
    assert batch_sha1(load("cifar10", "holdout")) == "26e2849e66a845b7f1e4614ae70f4889ae604628"


def test_cifar10_test_images():
    test = load("cifar10", "test")
    assert len(test) == (1000 if "the first 1000" in test.source else 10_000)
    assert test.labels[:1000].bincount().tolist() == [103, 89, 100, 103, 90, 86, 112, 102, 106, 109]
    content = hashlib.sha256(test.pixels[:1000].numpy().tobytes()).hexdigest()
    assert content.startswith("f167149948fc8fe0")


@pytest.mark.slow
def test_cifar10_train():
    train = load("cifar10")
    assert train.labels.bincount().tolist() == [5000] * 10
    mean = torch.stack([train.pixels[:, channel].float().mean() for channel in range(3)]) / 255
    assert (mean - torch.tensor([0.4914, 0.4822, 0.4465])).abs().max() < 1e-4
    for split, rows in (("fit", slice(40_000)), ("holdout", slice(40_000, None))):
        part = load("cifar10", split)
        assert torch.equal(part.pixels, train.pixels[rows]) and torch.equal(part.labels, train.labels[rows])


def test_mnist_5k():
    train, test = load("mnist-5k"), load("mnist-5k", "test")
    assert train.labels.bincount().tolist() == [400] * 10 and test.labels.bincount().tolist() == [100] * 10
    whole = {image.numpy().tobytes() for image in load("mnist").pixels}
    assert all(image.numpy().tobytes() in whole for image in test.pixels)


@pytest.mark.slow
def test_newsgroups():
    try:
        train, test = load_newsgroups(), load_newsgroups("test")
    except cache.MissingDataError:
        pytest.skip("WELLPOSED_DATA does not hold 20 Newsgroups")
    assert (len(train), len(test)) == (11_314, 7_532)
    assert len(train.classes) == 20 and train.classes == test.classes
    assert train.labels.bincount()[[0, 19]].tolist() == [480, 377]
    assert sum(len(text.encode()) for text in train.texts) == 22_054_617
    assert not set(train.texts) & set(test.texts)
