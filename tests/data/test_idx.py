"""The IDX reader returns what was written, and nothing else but FileFormatError for anything else."""

import gzip
import struct
import tracemalloc

import pytest
import torch
from data_files import idx
from hypothesis import given
from hypothesis import strategies as st

from wellposed.data.idx import read_idx
from wellposed.errors import FileFormatError

IMAGES = torch.arange(2 * 3 * 5, dtype=torch.uint8).reshape(2, 3, 5)
VALID = idx(IMAGES)


def write(tmp_path, data, name="file"):
    (tmp_path / name).write_bytes(data)
    return tmp_path / name


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (4, 2, 3)])
def test_round_trip(tmp_path, shape):
    tensor = torch.randint(256, shape, dtype=torch.uint8)
    for path in (write(tmp_path, idx(tensor)), write(tmp_path, gzip.compress(idx(tensor)), "file.gz")):
        assert torch.equal(read_idx(path, len(shape)), tensor)


def test_more_than_one_chunk(tmp_path):
    tensor = torch.randint(256, (3, 1000, 1000), dtype=torch.uint8)
    data = struct.pack(">4B3I", 0, 0, 8, 3, *tensor.shape) + tensor.numpy().tobytes()
    assert torch.equal(read_idx(write(tmp_path, gzip.compress(data, 1), "file.gz"), 3), tensor)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "received nothing"),
        (b"\x00\x00\x08", "received 00 00 08"),
        (b"\x00\x01" + VALID[2:], "must begin with 00 00 08 03, received 00 01 08 03"),
        (b"\x00\x00\x0d\x03" + VALID[4:], "received 00 00 0d 03"),
        (b"\x00\x00\x08\x01" + VALID[4:], "received 00 00 08 01"),
        (b"\x89PNG" + VALID[4:], "received 89 50 4e 47"),
        (VALID[:11], "within its header"),
        (VALID[:16], "declares 30 bytes of data and holds 0"),
        (VALID[:-1], "declares 30 bytes of data and holds 29"),
        (VALID + b"\x00", "declares 30 bytes of data and holds more"),
        (VALID[:4] + struct.pack(">3I", 0, 3, 5), "1 to 1073741824 are accepted"),
        (VALID[:4] + b"\xff" * 12 + VALID[16:], r"declares the sizes \(4294967295, 4294967295, 4294967295\)"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_wrong_content(tmp_path, data, complaint, packed):
    path = write(tmp_path, gzip.compress(data), "file.gz") if packed else write(tmp_path, data)
    with pytest.raises(FileFormatError, match=complaint) as caught:
        read_idx(path, 3)
    assert path.name in str(caught.value)


def test_limit_is_the_caller_s(tmp_path):
    path = write(tmp_path, VALID)
    assert len(read_idx(path, 3, max_bytes=30)) == 2
    with pytest.raises(FileFormatError, match="1 to 29 are accepted"):
        read_idx(path, 3, max_bytes=29)


@pytest.mark.parametrize("declared", [(1000, 1000, 1000), (2**32 - 1,) * 3])
def test_a_declared_size_reserves_no_memory(tmp_path, declared):
    data = struct.pack(">4B3I", 0, 0, 8, 3, *declared) + b"\x01" * 100
    path = write(tmp_path, gzip.compress(data), "file.gz")
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError):
            read_idx(path, 3)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


def test_a_gzip_bomb_is_not_unpacked(tmp_path):
    path = write(tmp_path, gzip.compress(VALID + bytes(200_000_000), 1), "file.gz")
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError, match="holds more"):
            read_idx(path, 3)
        assert tracemalloc.get_traced_memory()[1] < 1e7
    finally:
        tracemalloc.stop()


def test_not_a_gzip_file(tmp_path):
    with pytest.raises(FileFormatError, match="not a gzip file"):
        read_idx(write(tmp_path, VALID, "file.gz"), 3)


@given(cut=st.integers(0, 10**6), position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_damaged_gzip_file_is_noticed(tmp_path_factory, cut, position, bit):
    packed = gzip.compress(VALID, mtime=0)
    folder = tmp_path_factory.mktemp("damaged")
    with pytest.raises(FileFormatError):
        read_idx(write(folder, packed[: cut % len(packed)], "file.gz"), 3)
    flipped = bytearray(packed)
    flipped[position % len(packed)] ^= 1 << bit
    try:
        tensor = read_idx(write(folder, bytes(flipped), "file.gz"), 3)
    except FileFormatError:
        return
    assert torch.equal(tensor, IMAGES)  # the bit was one that gzip does not use


@given(st.binary(max_size=60), st.integers(1, 3))
def test_random_bytes(tmp_path_factory, data, dimensions):
    folder = tmp_path_factory.mktemp("random")
    for content in (data, b"\x00\x00\x08" + bytes([dimensions]) + data):
        try:
            tensor = read_idx(write(folder, content), dimensions)
        except FileFormatError:
            continue
        assert tensor.numel() == len(content) - 4 - 4 * dimensions


def test_an_absent_file_is_no_format_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_idx(tmp_path / "absent.gz", 3)
