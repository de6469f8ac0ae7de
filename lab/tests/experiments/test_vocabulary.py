"""Vocabulary: deterministic order, counts and padded sequences."""

import random

import pytest
import torch
from wellposed_lab.experiments.sparsify.texts import PADDING, UNKNOWN, Vocabulary, words

from wellposed.errors import InputError

TEXTS = ["b a b c", "A d, e-f", "", "zz", "a's _x_ 10"]


def test_words():
    assert words("Don't PANIC, 42 times_over: naïve --") == ["don't", "panic", "42", "times", "over", "naïve"]
    assert words("' '' _ .") == []


def test_order_is_by_count_and_then_alphabet():
    assert Vocabulary.of(TEXTS, 4).entries == ("a", "b", "10", "a's")
    shuffled = [
        " ".join(random.Random(seed).sample(text.split(), len(text.split()))) for seed, text in enumerate(TEXTS)
    ]
    assert Vocabulary.of(shuffled[::-1], 4) == Vocabulary.of(TEXTS, 4)
    assert len(Vocabulary.of(TEXTS, 100)) == 10


def test_ids_are_cut_and_padded():
    vocabulary = Vocabulary(("a", "b"))
    ids = vocabulary.ids(["b a x b", "a", ""], 3)
    assert ids.tolist() == [[3, 2, UNKNOWN], [2, PADDING, PADDING], [PADDING] * 3]
    assert ids.dtype == torch.int64


def test_wrong_arguments():
    with pytest.raises(InputError, match="size must be at least 1"):
        Vocabulary.of(TEXTS, 0)
    with pytest.raises(InputError, match="length must be at least 1"):
        Vocabulary(("a",)).ids(TEXTS, 0)
    with pytest.raises(InputError, match="given twice"):
        Vocabulary(("a", "a"))
