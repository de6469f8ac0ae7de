"""Words as numbers: a vocabulary that only the texts decide, counts of words and padded sequences."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from wellposed.errors import InputError

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
        >>> vocabulary.counts(["to be or not to be"])
        tensor([[2., 2., 0.]])
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
        """Takes the `size` words that occur most often; ties go by the alphabet, so that nothing is random.

        Use training texts only: words of the test texts must stay unknown.
        """
        if size < 1:
            raise InputError(f"size must be at least 1; received {size}")
        counts = Counter(word for text in texts for word in words(text))
        ranked = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
        return Vocabulary(tuple(word for word, _ in ranked[:size]))

    def __len__(self) -> int:
        return len(self.entries)

    def counts(self, texts: Sequence[str]) -> Tensor:  # (N, V) float32
        """Counts how often each word of the vocabulary occurs; column k belongs to ``entries[k]``."""
        result = torch.zeros(len(texts), len(self))
        for row, text in zip(result, texts, strict=True):
            found = Counter(number for word in words(text) if (number := self._numbers.get(word)) is not None)
            columns = torch.tensor(list(found), dtype=torch.int64) - (UNKNOWN + 1)
            row[columns] = torch.tensor(list(found.values()), dtype=result.dtype)
        return result

    def ids(self, texts: Sequence[str], length: int) -> Tensor:  # (N, T) int64
        """Numbers the first `length` words of each text and fills up with padding."""
        if length < 1:
            raise InputError(f"length must be at least 1; received {length}")
        result = torch.full((len(texts), length), PADDING)
        for row, text in zip(result, texts, strict=True):
            first = islice(_WORD.finditer(text.lower()), length)
            numbers = [self._numbers.get(word[0], UNKNOWN) for word in first]
            row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        return result
