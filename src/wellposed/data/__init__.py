"""Data that commands and examples load: images and arrays, from files, the cache or the network."""

from wellposed.data.cache import ChecksumError, MissingDataError
from wellposed.data.images import Images, load_images

__all__ = ["ChecksumError", "Images", "MissingDataError", "load_images"]
