"""Words in pieces, as BERT without capitals reads them (Devlin et al. 2019)."""

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from wellposed.errors import FileFormatError, InputError

PADDING, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
LONGEST = 100  # letters of a word that is looked up
_IDEOGRAPHS = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2FA1F), (0xF900, 0xFAFF))


@dataclass(frozen=True)
class WordPieces:
    """A vocabulary of word pieces; one that goes on inside a word starts with ##.

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
        missing = [name for name in (PADDING, UNKNOWN, START, END) if name not in numbers]
        if missing or self.entries[0] != PADDING:
            raise InputError(f"a vocabulary starts with {PADDING} and holds {', '.join(missing) or 'all marks'}")
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
            pieces = [START, *self.split(text)[: length - 2], END]
            row[: len(pieces)] = torch.tensor([self._numbers[piece] for piece in pieces])
        return result

    def _pieces(self, word: str) -> list[str]:
        found, start = [], 0
        while start < len(word) <= LONGEST:
            for end in range(len(word), start, -1):
                piece = ("##" if start else "") + word[start:end]
                if piece in self._numbers:
                    found.append(piece)
                    start = end
                    break
            else:
                return [UNKNOWN]
        return found or [UNKNOWN]


def _words(text: str) -> list[str]:
    """Lowers letters, drops accents and control characters, and sets punctuation and ideographs apart."""
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
