"""Tables of pixels: which column is the label, and what is no table."""

import gzip

import pytest
import torch

from wellposed.data.images import read_table
from wellposed.errors import FileFormatError

ROWS = [[3, 0, 1, 2, 255], [9, 4, 5, 6, 7]]
TEXT = "\n".join(",".join(map(str, row)) for row in ROWS) + "\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_label_first_or_last_and_header(tmp_path, newline):
    path = tmp_path / "table.csv"
    path.write_bytes(("label,a,b,c,d\n" + TEXT).replace("\n", newline).encode())
    pixels, labels = read_table(path, side=2, label=0, header=True)
    assert labels.tolist() == [3, 9]
    assert pixels.tolist() == [[[[0, 1], [2, 255]]], [[[4, 5], [6, 7]]]]
    packed = tmp_path / "table.csv.gz"
    packed.write_bytes(gzip.compress(TEXT.encode()))
    pixels, labels = read_table(packed, side=2, label=-1)
    assert labels.tolist() == [255, 7]
    assert pixels.tolist() == [[[[3, 0], [1, 2]]], [[[9, 4], [5, 6]]]]
    assert pixels.dtype == torch.uint8 and labels.dtype == torch.int64


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (TEXT.replace("255", "256").encode(), "256"),
        (TEXT.replace("255", "-1").encode(), "-1"),
        (TEXT.replace("255", "x").encode(), "x"),
        (TEXT.replace(",255", "").encode(), "number of columns changed"),
        (b"1,2,3\n", r"5 columns; received a table of \(1, 3\)"),
        (b"\xff\xfe\x00", "not a table"),
    ],
)
def test_wrong_content(tmp_path, data, complaint):
    (tmp_path / "table.csv").write_bytes(data)
    with pytest.raises(FileFormatError, match=complaint):
        read_table(tmp_path / "table.csv", side=2, label=0)


@pytest.mark.filterwarnings("ignore:loadtxt")
def test_empty_and_cut_off(tmp_path):
    (tmp_path / "table.csv").write_bytes(b"")
    (tmp_path / "table.csv.gz").write_bytes(gzip.compress(TEXT.encode() * 100)[:-20])
    for name in ("table.csv", "table.csv.gz"):
        with pytest.raises(FileFormatError, match=name):
            read_table(tmp_path / name, side=2, label=0)
