"""Word pieces: what is split where, and what is said of files that hold none."""

import pytest
from wellposed_lab.experiments.sparsify.texts import WordPieces

from wellposed.errors import FileFormatError, InputError

MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PIECES = WordPieces((*MARKS, "em", "##bed", "##d", "##ding", "##s", "cafe", "$", "5", ",", "中", "a"))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Embeddings", ["em", "##bed", "##ding", "##s"]),  # the longest piece first
        ("embedx", ["[UNK]"]),  # a word is known as a whole or not at all
        ("Café\t$5,", ["cafe", "$", "5", ","]),
        ("a中a", ["a", "中", "a"]),
        ("a\x00\u200da", ["[UNK]"]),  # control characters vanish, and "aa" is no word
        ("x" * 200, ["[UNK]"]),
        ("", []),
    ],
)
def test_texts_are_split_as_bert_splits_them(text, pieces):
    assert PIECES.split(text) == pieces


def test_ids_keep_start_and_end_when_cut():
    ids = PIECES.ids(["a a a a a", "", "a"], length=4)
    assert ids.tolist() == [[2, 14, 14, 3], [2, 3, 0, 0], [2, 14, 3, 0]]
    with pytest.raises(InputError, match="at least 3"):
        PIECES.ids(["a"], length=2)


def test_files_are_read_line_by_line(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(PIECES.entries) + "\n", encoding="utf-8")
    assert WordPieces.read(path) == PIECES
    path.write_text("a\nb\n")
    with pytest.raises(FileFormatError, match=r"vocab.txt"):
        WordPieces.read(path)
    with pytest.raises(FileFormatError, match="give the vocab"):
        WordPieces.read(tmp_path / "none.txt")
