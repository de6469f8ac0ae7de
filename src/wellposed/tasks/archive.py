"""Reads chosen members of a tar archive into memory; nothing is ever extracted to the disk."""

import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator

from wellposed.errors import FileFormatError


def read_members(
    path: str | os.PathLike[str], wanted: Callable[[str], bool], max_bytes: int
) -> Iterator[tuple[str, bytes]]:
    """Yields the name and the bytes of every wanted member, in the order of the archive.

    Links, devices and folders have no bytes of their own and are refused or passed over, so that no name inside
    an archive can reach a file outside it.

    Args:
        path: a tar archive, plain or compressed by gzip, bzip2 or xz.
        wanted: tells by its name whether a member is to be read.
        max_bytes: of all members read; an archive that declares more is refused before it is read.

    Raises:
        FileFormatError: not a tar archive, cut off, too large, or a wanted member is no ordinary file.
    """
    total = 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isdir() or not wanted(member.name):
                    continue
                stream = archive.extractfile(member) if member.isreg() else None
                total += member.size
                if stream is None or total > max_bytes:
                    what = "is no ordinary file" if stream is None else f"exceeds the limit of {max_bytes} bytes"
                    raise FileFormatError(f"{member.name!r} in {os.fspath(path)!r} {what}; it is refused")
                yield member.name, stream.read()
            _drain(archive)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError, MemoryError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise FileFormatError(f"{os.fspath(path)!r} is damaged or not a tar archive: {error}") from error


def _drain(archive: tarfile.TarFile) -> None:
    """Reads on to the end, where gzip and xz keep the checksum that tarfile would not look at."""
    while archive.fileobj is not None and archive.fileobj.read(1 << 20):
        pass
