"""Data, and what counts as success on it. Nothing here knows a model."""

from wellposed.tasks.cache import ChecksumError, MissingDataError
from wellposed.tasks.images import Images, load_images
from wellposed.tasks.math import Arithmetic, addition, subtraction
from wellposed.tasks.text import Texts, load_newsgroups
from wellposed.tasks.vocabulary import Vocabulary

__all__ = [
    "Arithmetic",
    "ChecksumError",
    "Images",
    "MissingDataError",
    "Texts",
    "Vocabulary",
    "addition",
    "load_images",
    "load_newsgroups",
    "subtraction",
]
