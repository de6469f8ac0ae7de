"""CIFAR: the three forms give the same images; damage and hostility give FileFormatError."""

import io
import os
import pickle

import numpy as np
import pytest
import torch
from data_files import python2_batch, tar, tar_with_declared_size
from PIL import Image

from wellposed.data.cifar import read_binary, read_pickled, read_sprites
from wellposed.errors import FileFormatError

PIXELS = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 9, 3, 3, 5, 1])


def records(pixels, labels, coarse=()):
    """The binary form: label bytes, then the red, green and blue plane row by row."""
    rows = zip(labels.tolist(), pixels.flatten(1).tolist(), strict=True)
    return b"".join(bytes([*coarse, label, *values]) for label, values in rows)


def write(tmp_path, data, name="archive.tar.gz"):
    (tmp_path / name).write_bytes(data)
    return tmp_path / name


@pytest.fixture
def binary(tmp_path):
    halves = {f"cifar/data_batch_{i + 1}.bin": records(PIXELS[3 * i :][:3], LABELS[3 * i :][:3]) for i in (0, 1)}
    return write(tmp_path, tar({"cifar/readme.html": b"text", **halves}))


def test_binary_batches_in_the_order_asked_for(binary):
    pixels, labels = read_binary(binary, ["data_batch_1.bin", "data_batch_2.bin"], 10)
    assert torch.equal(pixels, PIXELS) and torch.equal(labels, LABELS)
    assert pixels.dtype == torch.uint8 and labels.dtype == torch.int64
    pixels, labels = read_binary(binary, ["data_batch_2.bin", "data_batch_1.bin"], 10)
    assert torch.equal(labels, LABELS[[3, 4, 5, 0, 1, 2]])
    pixels, _ = read_binary(binary, ["data_batch_2.bin"], 10)
    assert torch.equal(pixels, PIXELS[3:])


def test_the_last_label_byte_counts(tmp_path):
    path = write(tmp_path, tar({"cifar/train.bin": records(PIXELS, LABELS + 90, coarse=[7])}))
    pixels, labels = read_binary(path, ["train.bin"], 100, label_bytes=2)
    assert torch.equal(pixels, PIXELS) and torch.equal(labels, LABELS + 90)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (records(PIXELS, LABELS)[:-1], "not a whole number of records of 3073"),
        (b"", "not a whole number"),
        (records(PIXELS, LABELS + 5), "label from 0 to 9 .* received 6 labels from 5 to 14"),
    ],
)
def test_wrong_records(tmp_path, content, complaint):
    with pytest.raises(FileFormatError, match=complaint):
        read_binary(write(tmp_path, tar({"x/test_batch.bin": content})), ["test_batch.bin"], 10)


def test_a_missing_batch_is_named(binary):
    with pytest.raises(FileFormatError, match=r"lacks data_batch_3\.bin, test_batch\.bin"):
        read_binary(binary, ["data_batch_1.bin", "data_batch_3.bin", "test_batch.bin"], 10)


def test_truncated_flipped_and_oversized_archives(tmp_path, binary):
    data = binary.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    for damaged in (data[:-100], data[:40], bytes(flipped), tar_with_declared_size("x/data_batch_1.bin", 10**15)):
        with pytest.raises(FileFormatError):
            read_binary(write(tmp_path, damaged), ["data_batch_1.bin", "data_batch_2.bin"], 10)


@pytest.mark.parametrize("writer", ["python 2", "python 3"])
def test_pickled_batches(tmp_path, writer):
    flat, numbers = PIXELS.flatten(1), LABELS.tolist()
    new = pickle.dumps({"data": flat.numpy(), "labels": numbers, "filenames": ["a.png"]}, 3)
    path = write(tmp_path, tar({"py/data_batch_1": python2_batch(flat, numbers) if writer == "python 2" else new}))
    pixels, labels = read_pickled(path, ["data_batch_1"], 10)
    assert torch.equal(pixels, PIXELS) and torch.equal(labels, LABELS)


def test_fine_labels(tmp_path):
    batch = python2_batch(PIXELS.flatten(1), (LABELS + 90).tolist(), key="fine_labels")
    _, labels = read_pickled(write(tmp_path, tar({"py/train": batch})), ["train"], 100, key="fine_labels")
    assert torch.equal(labels, LABELS + 90)


class Call:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_malicious_batch_is_refused_and_not_run(tmp_path):
    batch = pickle.dumps({"labels": [1], "data": Call(str(tmp_path / "created"))}, 2)
    with pytest.raises(FileFormatError, match=r"'py/data_batch_1' in .* is not a CIFAR batch: .* could run code"):
        read_pickled(write(tmp_path, tar({"py/data_batch_1": batch})), ["data_batch_1"], 10)
    assert not (tmp_path / "created").exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([1, 2], "expected a dictionary"),
        ({"labels": [1]}, "expected a dictionary"),
        ({"labels": [1], "data": b"x" * 3072}, "expected a numpy array"),
        ({"labels": [10**30], "data": PIXELS[:1].flatten(1).numpy()}, "whole numbers from 0 to 9"),
        ({"labels": [-1], "data": PIXELS[:1].flatten(1).numpy()}, "whole numbers from 0 to 9"),
        ({"labels": ["1"], "data": PIXELS[:1].flatten(1).numpy()}, "whole numbers"),
        ({"labels": 1, "data": PIXELS[:1].flatten(1).numpy()}, "must be a list"),
        ({"labels": [1, 2], "data": PIXELS[:1].flatten(1).numpy()}, "each of 1 images; received 2 labels"),
    ],
)
def test_other_pickles(tmp_path, content, complaint):
    path = write(tmp_path, tar({"py/test_batch": pickle.dumps(content, 3)}))
    with pytest.raises(FileFormatError, match=complaint):
        read_pickled(path, ["test_batch"], 10)


@pytest.fixture(scope="module")
def thousand():
    """Smooth images, which compress fast, each of them different."""
    number = torch.arange(1000)[:, None, None, None]
    grid = torch.arange(32)
    values = number // 8 + 40 * torch.arange(3)[:, None, None] + grid[:, None] * (number % 3) + grid
    return (values % 256).to(torch.uint8)


@pytest.fixture(scope="module")
def sprite(thousand):
    """Places the tiles one by one, row after row of forty."""
    canvas = np.zeros((25 * 32, 40 * 32, 3), np.uint8)
    for index, image in enumerate(thousand.numpy()):
        row, column = divmod(index, 40)
        canvas[32 * row : 32 * row + 32, 32 * column : 32 * column + 32] = image.transpose(1, 2, 0)
    buffer = io.BytesIO()
    Image.fromarray(canvas).save(buffer, "WEBP", lossless=True, quality=0, method=0)
    return buffer.getvalue()


def write_labels(tmp_path, train=None, test=()):
    train = np.arange(3000, dtype=np.uint8) % 10 if train is None else train
    np.savez(tmp_path / "labels.npz", train=train, test=np.array(test, dtype=np.uint8))
    return tmp_path / "labels.npz"


def test_sprites(tmp_path, sprite, thousand):
    paths = [write(tmp_path, sprite, "train_01.webp"), write(tmp_path, sprite, "train_02.webp")]
    numbers = np.random.default_rng(0).integers(0, 10, 3000).astype(np.uint8)
    pixels, labels = read_sprites(write_labels(tmp_path, numbers), "train", 1000, paths)
    assert torch.equal(pixels, torch.cat([thousand, thousand]))
    assert labels.tolist() == numbers[1000:].tolist()
    pixels, labels = read_sprites(write_labels(tmp_path, test=[4] * 1000), "test", 0, paths[:1])
    assert torch.equal(pixels, thousand) and set(labels.tolist()) == {4}


def picture(size, form):
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, form)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda data: data[: len(data) // 2], "damaged or not a WebP"),
        (lambda data: b"", "damaged or not a WebP"),
        (lambda data: picture((1280, 800), "PNG"), "damaged or not a WebP"),
        (lambda data: picture((1280, 832), "WEBP"), "1280 x 800 points; received 1280 x 832"),
    ],
)
def test_wrong_sprites(tmp_path, sprite, change, complaint):
    path = write(tmp_path, change(sprite), "train_00.webp")
    with pytest.raises(FileFormatError, match=complaint):
        read_sprites(write_labels(tmp_path), "train", 0, [path])


@pytest.mark.parametrize(
    ("labels", "complaint"),
    [
        (np.zeros(999, np.uint8), "each of 1000 images; received 999 labels"),
        (np.full(1000, 10, np.uint8), "from 10 to 10"),
        (np.zeros(1000, np.int64), "must hold bytes"),
        (np.zeros((1000, 1), np.uint8), "must hold bytes"),
        (np.array([Call("x")] * 1000, object), "damaged"),
    ],
)
def test_wrong_labels(tmp_path, sprite, labels, complaint):
    path = write(tmp_path, sprite, "train_00.webp")
    with pytest.raises(FileFormatError, match=complaint):
        read_sprites(write_labels(tmp_path, labels), "train", 0, [path])


def test_no_labels(tmp_path, sprite):
    path = write(tmp_path, sprite, "train_00.webp")
    with pytest.raises(FileFormatError, match="no labels of 'other'"):
        read_sprites(write_labels(tmp_path), "other", 0, [path])
    with pytest.raises(FileFormatError, match="damaged"):
        read_sprites(write(tmp_path, write_labels(tmp_path).read_bytes()[:200], "cut.npz"), "train", 0, [path])
