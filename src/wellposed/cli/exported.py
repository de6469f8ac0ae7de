"""Looks into an exported program (.pt2) before torch loads it, and refuses all that could run code of the file.

`torch.export.load` unpickles weights, constants and sample inputs that say so, loads compiled libraries, evaluates
the text of symbolic sizes and calls whatever function of torch a node names. What `torch.export.save` writes of an
ordinary network needs none of it, and nothing else is let through.
"""

import io
import json
import math
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from wellposed.errors import FileFormatError

LARGEST, LARGEST_TEXT, MOST_FILES = 1 << 33, 1 << 28, 100_000
_MEMBERS = re.compile(
    r"data/weights/(weight_\d+|\w+_weights_config\.json)|data/constants/(tensor_\d+|\w+_constants_config\.json)"
    r"|models/\w+\.json|data/sample_inputs/\w+\.pt|archive_format|archive_version|byteorder|\.data/\w+|extra/\w+"
)
_TARGETS = re.compile(
    r"torch\.ops\.(aten|prims|higher_order|wellposed)\.(?!from_file)\w+(\.\w+)?|_operator\.\w+|math\.\w+|torch\.sym_\w+"
)
_NAMES = re.compile(
    r"[suz]\w?f?\d+|FloorDiv|ModularIndexing|Where|PythonMod|Mod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|Min|Max|Pow"
    r"|PowByNatural|IntTrueDiv|FloatTrueDiv|TruncToInt|RoundToInt|ToFloat|Identity|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not"
    r"|Integer|Rational|Add|Mul|Abs|True|False|oo|int_oo"
)
_SYMBOL = re.compile(r"Symbol\('\w{1,40}'(, \w{1,20}=(True|False)){0,8}\)")
_SIZE = re.compile(r"[\w\s+\-*/()<>=!,.&|~%]*")


def check_exported(path: Path) -> None:
    """Raises `FileFormatError` if an exported program holds more than tensors, text and known operators."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = dict(_members(archive))
            for name, info in members.items():
                if name.endswith(".json"):
                    _check_text(json.loads(_read(archive, info)), name)
                elif name.endswith(".pt"):
                    torch.load(io.BytesIO(_read(archive, info)), weights_only=True)
    except FileFormatError:
        raise
    except Exception as error:  # whatever a damaged archive leads to; nothing of it was loaded
        raise FileFormatError(
            f"{str(path)!r} is damaged or no exported program: {type(error).__name__}: {error}"
        ) from error


def _members(archive: zipfile.ZipFile) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    """Yields the files without the folder in which all of them lie."""
    infos = archive.infolist()
    total, names = sum(info.file_size for info in infos), [info.filename for info in infos]
    if len(names) > MOST_FILES or len({*names}) < len(names) or total > LARGEST:
        raise FileFormatError(
            f"the archive holds {len(names)} files of {total} bytes, some perhaps twice; refused"
        )
    for info in infos:
        parts = PurePosixPath(info.filename).parts
        inner = "/".join(parts[1:])
        if info.compress_type != zipfile.ZIP_STORED or ".." in parts or not _MEMBERS.fullmatch(inner):
            raise FileFormatError(
                f"the archive holds {info.filename!r}, which an exported network does not need; refused"
            )
        yield inner, info


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.file_size > LARGEST_TEXT:
        raise FileFormatError(f"{info.filename!r} has {info.file_size} bytes; at most {LARGEST_TEXT} are read")
    return archive.read(info)


def _check_text(value: Any, name: str) -> None:
    """Walks over a table: nothing pickled, only known operators, and sizes that are arithmetic."""
    if isinstance(value, list):
        for part in value:
            _check_text(part, name)
    if not isinstance(value, dict):
        return
    for key, part in value.items():
        if key == "use_pickle" and part is not False:
            raise FileFormatError(f"{name} asks for a pickle to be loaded, which could run code; refused")
        if key == "path_name" and not re.fullmatch(r"(weight|tensor)_\d+", str(part)):
            raise FileFormatError(f"{name} refers to {part!r}, which is no tensor; refused")
        if key == "target" and isinstance(part, str) and "inputs" in value and not _TARGETS.fullmatch(part):
            raise FileFormatError(f"{name} calls {part!r}, which is no operator of torch; refused")
        if key == "expr_str" and not _is_arithmetic(str(part)):
            raise FileFormatError(f"{name} has the size {str(part)[:80]!r}, which is no arithmetic; refused")
        if key == "sizes" and isinstance(part, list):
            _check_size(part, name)
        _check_text(part, name)


def _is_arithmetic(text: str) -> bool:
    text = _SYMBOL.sub("1", text)
    known = all(_NAMES.fullmatch(word) for word in re.findall(r"[^\W\d]\w*", text))
    return (
        known
        and len(text) < 10_000
        and _SIZE.fullmatch(text) is not None
        and not re.search(r"[\w)]\.[^\W\d]", text)
    )


def _check_size(sizes: list[Any], name: str) -> None:
    """Refuses a tensor of a declared size that no file could hold; an empty record is filled with zeros."""
    known = [part.get("as_int", 1) if isinstance(part, dict) else 1 for part in sizes]
    if all(isinstance(size, int) for size in known) and not 0 <= math.prod(known) <= LARGEST:
        raise FileFormatError(f"{name} declares a tensor of the sizes {known}; refused")
