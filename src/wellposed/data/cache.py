"""Finds the files of data sets: in $WELLPOSED_DATA, in the cache, or by download; every file by its checksum."""

import functools
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import urlsplit

from wellposed.errors import FileFormatError, InputError, MissingExtraError, WellposedError, require

SCHEMES = ("https",)  # a download is checked by its checksum; https also hides what is asked for
_TIMEOUT = (10, 60)  # seconds to connect, and between two packets
_CHUNK = 1 << 16


class MissingDataError(WellposedError, FileNotFoundError):
    """A data set is not on this machine; the message says how to get it."""


class ChecksumError(FileFormatError):
    """A file is not the one that is expected: damaged, cut off or another version."""


@dataclass(frozen=True)
class DataFile:
    """One file of a data set, known by its checksum.

    Args:
        path: where it lies below the data folder, with forward slashes.
        sha256: the checksum of its bytes, 64 lower-case hexadecimal digits.
        size: its bytes, where known; a download that exceeds them is cut off.
        urls: mirrors, tried in this order.

    Example:
        >>> DataFile("set/part.gz", "0" * 64).path
        'set/part.gz'
    """

    path: str
    sha256: str
    size: int | None = None
    urls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        relative = PurePosixPath(self.path)
        if relative.is_absolute() or ".." in relative.parts or not relative.name:
            raise InputError(f"path must be relative and stay below the data folder; received {self.path!r}")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise InputError(f"sha256 must be 64 lower-case hexadecimal digits; received {self.sha256!r}")


def data_folder() -> Path | None:
    """Returns the folder that $WELLPOSED_DATA names, or None."""
    value = os.environ.get("WELLPOSED_DATA")
    return Path(value).expanduser() if value else None


def cache_folder() -> Path:
    """Returns where downloads are kept: $WELLPOSED_CACHE, else the platform's folder for caches.

    Raises:
        MissingExtraError: the platform's folder is wanted and pooch, which knows it, is not installed.
    """
    value = os.environ.get("WELLPOSED_CACHE")
    return Path(value).expanduser() if value else Path(require("pooch", extra="data").os_cache("wellposed"))


def offline() -> bool:
    """Returns whether $WELLPOSED_OFFLINE forbids downloads."""
    return os.environ.get("WELLPOSED_OFFLINE", "").strip().lower() not in ("", "0", "false", "no")


def fetch(
    name: str,
    variants: Sequence[Sequence[DataFile]],
    package: str,
    also: Sequence[Path] = (),
    download: bool = True,
) -> tuple[int, list[Path]]:
    """Finds the files of a data set and checks them; downloads the first variant if none is complete.

    Args:
        name: of the data set, for messages.
        variants: the same data in several forms, each a list of files; the first complete one is taken.
        package: how someone without a connection can get it, for messages.
        also: more folders to look in, after the data folder and the cache.
        download: False only looks at what is here.

    Returns:
        The number of the variant, and where its files lie.

    Raises:
        MissingDataError: no variant is complete and a download is forbidden, impossible or failed.
        ChecksumError: a file is there and is not the right one; it is never used, nor passed over.
    """
    folders = [*_folders(), *also]
    for index, files in enumerate(variants):
        local = [_find(file, folders) for file in files]
        paths = [path for path in local if path is not None]
        if len(paths) == len(files):
            return index, [verify(path, file) for path, file in zip(paths, files, strict=True)]
    if not download:
        raise MissingDataError(f"no variant of {name!r} is complete here")
    return 0, [_find_or_download(name, file, folders, package) for file in variants[0]]


def verify(path: Path, file: DataFile) -> Path:
    """Compares the checksum of a file with the one it should have; returns its path.

    Raises:
        ChecksumError: they differ.
    """
    status = path.stat()
    state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    received = _digest(os.fspath(path), state)
    if received != file.sha256:
        size = "" if file.size in (None, status.st_size) else f" ({status.st_size} bytes instead of {file.size})"
        raise ChecksumError(
            f"{os.fspath(path)!r} is damaged or another version{size}: expected sha256 {file.sha256}, received "
            f"{received}; delete it and put the right file there"
            + (f", or let it be downloaded again from {file.urls[0]}" if file.urls else "")
        )
    return path


@functools.lru_cache(maxsize=512)
def _digest(path: str, state: tuple[int, ...]) -> str:
    """Computes a checksum once for every state of a file: a copy with the old date is another one."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _folders() -> list[Path]:
    folder = data_folder()
    folders = [] if folder is None else [folder]
    try:
        return [*folders, cache_folder()]
    except MissingExtraError:  # without pooch nothing was ever downloaded there
        return folders


def _find(file: DataFile, folders: Sequence[Path]) -> Path | None:
    return next((folder / file.path for folder in folders if (folder / file.path).is_file()), None)


def _find_or_download(name: str, file: DataFile, folders: Sequence[Path], package: str) -> Path:
    path = _find(file, folders)
    if path is None:
        try:
            path = _download(file)
        except _NoDownloadError as error:
            raise MissingDataError(_three_ways(name, file, package, str(error))) from error
    return verify(path, file)


class _NoDownloadError(Exception):
    """Why a file could not be downloaded, for the message of a MissingDataError."""


def _download(file: DataFile) -> Path:
    """Downloads one file, mirror after mirror; pooch checks it before it moves it into place."""
    if offline():
        raise _NoDownloadError("forbidden here by WELLPOSED_OFFLINE; unset it")
    if not file.urls:
        raise _NoDownloadError("there is no address to download it from")
    try:
        pooch, target = require("pooch", extra="data"), cache_folder() / file.path
    except MissingExtraError as error:
        raise _NoDownloadError(str(error)) from error
    failures = []
    for url in file.urls:
        try:
            if urlsplit(url).scheme not in SCHEMES:
                raise InputError(f"only {', '.join(SCHEMES)} addresses are used")
            downloader = functools.partial(_stream, size=file.size)
            pooch.retrieve(url, f"sha256:{file.sha256}", target.name, target.parent, downloader=downloader)
            return target
        except (OSError, ValueError) as error:
            failures.append(f"{url} failed: {error}")
    raise _NoDownloadError("; ".join(failures))


def _stream(url: str, output_file: str, pooch: object, size: int | None) -> None:
    """Downloads for pooch; stops a server that sends more than the file can hold."""
    # Without the header a server may send a .gz file as an encoded, that is, another file.
    options = {"headers": {"Accept-Encoding": "identity"}, "chunk_size": _CHUNK, "timeout": _TIMEOUT}
    with open(output_file, "wb") as stream:
        require("pooch", extra="data").HTTPDownloader(**options)(url, _Limited(stream, size), pooch)


class _Limited:
    """A file that refuses to grow beyond a size."""

    def __init__(self, stream: BinaryIO, size: int | None) -> None:
        self.stream, self.size, self.flush = stream, size, stream.flush

    def write(self, data: bytes) -> int:
        if self.size is not None and self.stream.tell() + len(data) > self.size:
            raise ValueError(f"the server sends more than the {self.size} bytes of this file")
        return self.stream.write(data)


def _three_ways(name: str, file: DataFile, package: str, download: str) -> str:
    folder = data_folder()
    wanted = f"$WELLPOSED_DATA/{file.path}" if folder is None else os.fspath(folder / file.path)
    setting = "set WELLPOSED_DATA to a folder of yours and" if folder is None else "WELLPOSED_DATA is set:"
    address = f" from {file.urls[0]}" if file.urls else ""
    return (
        f"the data set {name!r} is not here: {file.path} was not found. Three ways to get it:\n"
        f"  1. by hand: {setting} put the file at {wanted}{address}\n"
        f"  2. by download{address}: {download}\n"
        f"  3. without a connection: {package}"
    )
