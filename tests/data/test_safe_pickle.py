"""Pickles: plain data comes through, and nothing that a pickle names is ever run."""

import contextlib
import os
import pickle
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from data_files import python2_batch
from hypothesis import given
from hypothesis import strategies as st

from wellposed.data.cifar import NumpyRecord, byte_matrix, load_plain
from wellposed.errors import FileFormatError

PIXELS = torch.arange(24, dtype=torch.uint8).reshape(4, 6) * 10
PLAIN = {"labels": [1, 2, 300, -70000], "name": "ä", "pair": (1.5, None, True), "empty": [{}, ()]}


class Reduce:
    """Pickles as a call of whatever it is given."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_of_every_protocol(protocol):
    assert load_plain(pickle.dumps(PLAIN, protocol)) == PLAIN


@pytest.mark.parametrize("protocol", [3, 4])
def test_numpy_arrays_of_python_3(protocol):
    record = load_plain(pickle.dumps(PIXELS.numpy(), protocol))
    assert isinstance(record, NumpyRecord)
    assert torch.equal(byte_matrix(record, 6), PIXELS)


def test_a_batch_of_python_2():
    data = python2_batch(PIXELS, [1, 2, 3, 4])
    assert pickle.loads(data, encoding="latin1")["data"].tolist() == PIXELS.tolist()  # the writer is right
    content = load_plain(data)
    assert content["labels"] == [1, 2, 3, 4]
    assert torch.equal(byte_matrix(content["data"], 6), PIXELS)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"data": x, "labels": []}])
def test_a_call_is_refused_before_it_happens(tmp_path, protocol, wrap):
    target = tmp_path / "created"
    data = pickle.dumps(wrap(Reduce(os.mkdir, str(target))), protocol)
    with pytest.raises(FileFormatError, match=r"names (posix|nt)\.mkdir"):
        load_plain(data)
    assert not target.exists()
    pickle.loads(data)
    assert target.exists()  # the test would have seen it


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("numpy", "load"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy", "ndarray.__reduce__"),
        ("copyreg", "_reconstructor"),
        ("wellposed.data.cifar", "NumpyRecord"),
    ],
)
def test_every_other_name_is_refused(module, name):
    old = b"\x80\x02c" + module.encode() + b"\n" + name.encode() + b"\n."
    text = [b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)]
    for data in (old, b"\x80\x04" + text[0] + text[1] + b"\x93."):
        with pytest.raises(FileFormatError, match="could run code"):
            load_plain(data)


@pytest.mark.parametrize(
    ("data", "operation"),
    [
        (b"(i__main__\nX\n.", "INST"),
        (b"(cnumpy\nndarray\no.", "OBJ"),
        (b"cnumpy\nndarray\n)\x81.", "NEWOBJ"),
        (b"\x80\x04cnumpy\nndarray\n)}\x92.", "NEWOBJ_EX"),
        (b"\x82\x01.", "EXT1"),
        (b"Pname\n.", "PERSID"),
        (b"K\x01Q.", "BINPERSID"),
        (b"\x96" + struct.pack("<Q", 3) + b"abc.", "BYTEARRAY8"),
    ],
)
def test_every_other_operation_is_refused(data, operation):
    with pytest.raises(FileFormatError, match=operation):
        load_plain(data)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\x80\x02]r" + struct.pack("<I", 2**26) + b".", "counts to 67108864 objects"),
        (b"T" + struct.pack("<i", 2**30) + b"abc.", "expected 1073741824 bytes"),
        (b"X" + struct.pack("<I", 2**30) + b"abc.", "expected 1073741824 bytes"),
        (b"B" + struct.pack("<I", 2**30) + b"abc.", "expected 1073741824 bytes"),
        (b"\x96" + struct.pack("<Q", 2**30) + b"abc.", "expected 1073741824 bytes"),
        (b"\x80\x04\x95" + struct.pack("<Q", 2**30) + b"K\x01.", "refused"),
    ],
    ids=["memo", "string", "text", "bytes", "byte array", "frame"],
)
def test_a_declared_size_reserves_no_memory(data, complaint):
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError, match=complaint):
            load_plain(data)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_a_pickle_cannot_change_the_stand_ins():
    build = b"\x80\x02cnumpy\nndarray\n}U\x08__call__U\x04evils\x86" + b"b."
    with contextlib.suppress(FileFormatError):
        load_plain(build)
    assert isinstance(NumpyRecord("numpy.ndarray")(1), NumpyRecord)
    assert torch.equal(byte_matrix(load_plain(pickle.dumps(PIXELS.numpy(), 3)), 6), PIXELS)


@pytest.mark.parametrize(
    "array", [np.zeros((2, 6)), np.zeros((2, 6), "i1"), np.zeros((2, 6), "S1"), np.zeros(6, "u1")]
)
def test_other_arrays_are_no_byte_matrix(array):
    with pytest.raises(FileFormatError, match="expected unsigned bytes"):
        byte_matrix(load_plain(pickle.dumps(array, 3)), 6)


def test_fortran_order_and_other_widths_are_refused():
    for array in (np.asfortranarray(PIXELS.numpy()), PIXELS.numpy()[:, :5].copy()):
        with pytest.raises(FileFormatError, match="expected unsigned bytes"):
            byte_matrix(load_plain(pickle.dumps(array, 3)), 6)


@pytest.mark.parametrize("value", [None, 3, "text", [1], NumpyRecord("numpy.ndarray"), NumpyRecord("numpy.dtype")])
def test_no_array_is_no_byte_matrix(value):
    with pytest.raises(FileFormatError, match="expected a numpy array"):
        byte_matrix(value, 6)


@pytest.mark.parametrize("state", [(1, (4, 6), "u1", False), (1, (10**9, 6)), 5, "12345", None])
def test_a_wrong_state_is_refused(state):
    record = NumpyRecord("numpy.core.multiarray._reconstruct")
    record.__setstate__(state)
    with pytest.raises(FileFormatError, match="expected a numpy array"):
        byte_matrix(record, 6)


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ((10**9, 6), b"x" * 24),
        ((4, 6), b"x" * 23),
        ((0, 6), b""),
        ((-4, 6), b"x" * 24),
        (("4", 6), b"x" * 24),
        ((4, 6), [1] * 24),
    ],
)
def test_shape_and_content_must_agree(shape, data):
    record = NumpyRecord("numpy.core.multiarray._reconstruct")
    record.__setstate__((1, shape, NumpyRecord("numpy.dtype", "u1", 0, 1), False, data))
    with pytest.raises(FileFormatError, match="not what it holds"):
        byte_matrix(record, 6)


@given(st.binary(max_size=40), st.integers(0, 500), st.integers(0, 500))
def test_damage_gives_data_or_the_one_error(data, cut, position):
    valid = python2_batch(PIXELS, [1, 2, 3, 4])
    flipped = bytearray(valid)
    flipped[position % len(valid)] ^= 0x15
    for damaged in (data, valid[: cut % len(valid)], bytes(flipped)):
        try:
            content = load_plain(damaged)
            data = byte_matrix(content["data"] if isinstance(content, dict) and "data" in content else None, 6)
        except FileFormatError:
            continue
        assert data.dtype == torch.uint8 and data.shape[1] == 6
