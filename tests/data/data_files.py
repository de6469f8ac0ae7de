"""Writes small files in the formats of the data sets, and their checksums."""

import gzip
import hashlib
import io
import struct
import tarfile
from pathlib import Path

import torch

from wellposed.data.cache import DataFile


def put(folder: Path, path: str, data: bytes, **options) -> DataFile:
    """Writes a file and describes it."""
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return DataFile(path, hashlib.sha256(data).hexdigest(), len(data), **options)


def idx(tensor: torch.Tensor) -> bytes:
    header = struct.pack(f">4B{tensor.dim()}I", 0, 0, 8, tensor.dim(), *tensor.shape)
    return header + bytes(tensor.flatten().tolist())


def tar(members: dict[str, bytes | tarfile.TarInfo], mode: str = "w:gz") -> bytes:
    """An archive of the given files; a TarInfo goes in as it is."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def tar_with_declared_size(name: str, size: int) -> bytes:
    """An archive whose only member declares far more than the archive holds."""
    info = tarfile.TarInfo(name)
    info.size = size
    return gzip.compress(info.tobuf() + b"\0" * 2048)


def python2_batch(pixels: torch.Tensor, labels: list[int], key: str = "labels") -> bytes:
    """A CIFAR batch as Python 2 pickled it: protocol 2, byte strings, numpy's old module names."""
    raw = bytes(pixels.flatten().tolist())
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01(cnumpy\nndarray\nq\x02K\x00\x85U\x01btRq\x03(K\x01"
        + b"".join(b"J" + struct.pack("<i", size) for size in pixels.shape)
        + b"\x86cnumpy\ndtype\nq\x04U\x02u1K\x00K\x01\x87Rq\x05(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        + b"K\x00tb\x89T"
        + struct.pack("<i", len(raw))
        + raw
        + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    text = b"U" + bytes([len(key)]) + key.encode()
    return b"\x80\x02}q\x00(" + b"U\x0bbatch_labelU\x04tiny" + text + numbers + b"U\x04data" + array + b"u."
