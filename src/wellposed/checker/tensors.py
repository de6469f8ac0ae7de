"""A safetensors reader of its own, and numbers without rounding: whole numbers times a power of two."""

import hashlib
import json
import math
import stat
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

LARGEST_HEADER, LARGEST_TENSOR = 1 << 26, 1 << 28
# What files of a size may ask for in all. A step is an entry of a matrix, of 128 bits at most, or 16 products
# of numbers of 180 bits; it takes about a microsecond.
STEPS_PER_BYTE, STEPS_FREE = 64, 1 << 22
UNPACKED_PER_BYTE, UNPACKED_FREE = 64, 1 << 26  # bytes of packed tensors, as in the library
KINDS = {"F64": ("d", 8), "F32": ("f", 4), "F16": ("e", 2), "BF16": ("bf", 2), "I64": ("q", 8)}
Vector = list[int]  # times a power of two that is kept apart


class RefusedError(Exception):
    """Why a certificate proves nothing."""


class Matrix(NamedTuple):
    """The numbers ``entry * 2^exponent``."""

    rows: list[Vector]
    exponent: int

    @property
    def unit(self) -> Fraction:
        """What an entry of one stands for."""
        return Fraction(2) ** self.exponent

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.rows), len(self.rows[0]) if self.rows else 0

    @property
    def bits(self) -> int:
        """The length of the longest entry, which is up to 2,098 for float64."""
        return max((entry.bit_length() for row in self.rows for entry in row), default=0)


class Budget:
    """What the files in one check may ask for in all, given their bytes: no small file keeps a machine busy."""

    def __init__(self, size: int) -> None:
        self.size, self.left = size, STEPS_PER_BYTE * size + STEPS_FREE

    def spend(self, count: int, bits: int = 0) -> None:
        """Pays for so many entries of that length before they are formed."""
        self.left -= count * (1 + bits // 128)
        if self.left < 0:
            raise RefusedError(
                f"files of {self.size} bytes ask for more than {STEPS_PER_BYTE * self.size + STEPS_FREE} entries "
                "and steps; store matrices with their entries, or claim less"
            )

    def multiply(self, count: int, bits: int, others: int) -> None:
        """Pays for so many products of numbers of these lengths."""
        self.spend((count * (1 + (bits * others >> 15)) + 15) // 16)


class TensorFile:
    """A safetensors file that is read piece by piece, and never further than its size allows."""

    def __init__(self, path: Path, largest: float = math.inf) -> None:
        status = path.stat()
        self.path, self.size = path, status.st_size
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device read without end
            raise RefusedError(f"{path.name} is no ordinary file")
        self.budget = Budget(self.size)
        self.packed: set[str] = set()
        if self.size > largest:
            raise RefusedError(f"{path.name} has {self.size} bytes; at most {largest:.0f} are read")
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(LARGEST_HEADER, self.size - 8):
                raise RefusedError(f"{path.name} is no safetensors file: its header claims {length} bytes")
            header = read_json(file.read(length), f"the header of {path.name}")
        self.start, metadata = 8 + length, header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise RefusedError(f"the metadata of {path.name} are no table of texts")
        self.metadata: dict[str, str] = metadata
        self.entries = {name: self._entry(name, given) for name, given in header.items()}
        end = 0
        for begin, stop in sorted(span for *_, span in self.entries.values()):
            if begin != end:
                raise RefusedError(f"the tensors of {path.name} leave gaps or overlap")
            end = stop
        if end != self.size - self.start:
            raise RefusedError(f"{path.name} declares {end} bytes of tensors and holds {self.size - self.start}")

    def _entry(self, name: str, given: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
        try:
            kind, shape, (begin, end) = str(given["dtype"]), tuple(given["shape"]), given["data_offsets"]
            whole = all(type(size) is int and size >= 0 for size in (*shape, begin, end)) and len(given) == 3
        except (TypeError, KeyError, ValueError) as error:
            raise RefusedError(f"the header of {self.path.name} makes no sense at {name!r}") from error
        if not whole or end < begin or (kind in KINDS and end - begin != math.prod(shape) * KINDS[kind][1]):
            raise RefusedError(f"{self.path.name}: {name!r} has another size than its shape needs")
        return kind, shape, (begin, end)

    def unpack(self, table: Any) -> None:
        """Takes tensors for what a table says is packed in them: zlib streams of numbers, byte plane by plane."""
        if not isinstance(table, dict) or not table:
            raise RefusedError(f"{self.path.name} has no table of packed tensors")
        for name, said in table.items():
            dtype, size, span = self.entries.get(name, ("", (), (0, 0)))
            if dtype != "U8" or len(size) != 1 or size[0] != span[1] - span[0] or name in self.packed:
                raise RefusedError(f"{self.path.name} has no packed tensor {name!r}")
            if not isinstance(said, dict) or said.keys() != {"dtype", "shape"}:
                raise RefusedError(f"the packed tensor {name!r} is described by other entries than a tensor has")
            kind, shape = said["dtype"], said["shape"]
            whole = isinstance(shape, list) and all(type(size) is int and 0 < size < 1 << 31 for size in shape)
            if not isinstance(kind, str) or kind not in KINDS or not whole:
                raise RefusedError(f"the packed tensor {name!r} has the type {kind!r} and the shape {shape!r}")
            self.packed.add(name)
            self.entries[name] = (kind, tuple(shape), span)
        stored, total = self.size - self.start, sum(map(self._length, self.entries))
        if total > UNPACKED_PER_BYTE * stored + UNPACKED_FREE:
            raise RefusedError(f"the {stored} bytes of tensors in {self.path.name} would unpack to {total}")

    def _length(self, name: str) -> int:
        """Returns the bytes of a tensor, once it is unpacked."""
        kind, shape, (begin, end) = self.entries[name]
        return math.prod(shape) * KINDS[kind][1] if name in self.packed else end - begin

    def digest(self) -> str:
        """Computes the SHA-256 of the whole file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def values(self, name: Any, shape: tuple[int | None, ...]) -> tuple[tuple[int, ...], Any]:
        """Reads a tensor of that shape, None being any size, of finite numbers."""
        if not isinstance(name, str) or name not in self.entries:
            raise RefusedError(f"{self.path.name} has no tensor {name!r}")
        kind, actual, (begin, end) = self.entries[name]
        if len(actual) != len(shape) or any(w not in (None, f) for w, f in zip(shape, actual, strict=True)):
            raise RefusedError(
                f"{name!r} in {self.path.name} has the shape {list(actual)}, expected {list(shape)}"
            )
        length = self._length(name)
        if kind not in KINDS or length > LARGEST_TENSOR:
            raise RefusedError(f"{name!r} in {self.path.name} is {kind} of {length} bytes, which is not read")
        self.budget.spend(math.prod(max(1, size) for size in actual))  # rows without entries are rows too
        with self.path.open("rb") as file:
            file.seek(self.start + begin)
            data = file.read(end - begin)
        numbers = _numbers(data, kind) if name not in self.packed else _unpacked(data, kind, length)
        if not all(map(math.isfinite, numbers)):
            raise RefusedError(f"{name!r} in {self.path.name} holds NaN or infinity")
        return actual, numbers

    def matrix(self, name: Any, rows: int | None = None, columns: int | None = None) -> Matrix:
        """Reads a matrix exactly."""
        (height, width), numbers = self.values(name, (rows, columns))
        entries, exponent = scaled(numbers, self.budget)
        return Matrix([entries[width * i : width * (i + 1)] for i in range(height)], exponent)

    def vector(self, name: Any, size: int | None = None) -> list[Fraction]:
        """Reads a vector exactly."""
        return [Fraction(number) for number in self.values(name, (size,))[1]]


def _unpacked(data: bytes, kind: str, length: int) -> Any:
    """Reads numbers of which all first bytes come before all second ones; whole ones are differences."""
    reader = zlib.decompressobj()
    try:
        planes = reader.decompress(data, length + 1)
    except zlib.error as error:
        raise RefusedError(f"a packed tensor is damaged: {error}") from error
    if len(planes) != length or not reader.eof or reader.unused_data:
        raise RefusedError("a packed tensor holds other numbers than its shape needs")
    width = KINDS[kind][1]
    laid = bytearray(length)
    for k in range(width):
        laid[k::width] = planes[k * length // width : (k + 1) * length // width]
    numbers = _numbers(bytes(laid), kind)
    if kind != "I64":
        return numbers
    total, decoded = 0, array("q")
    for code in numbers:
        total += (code % (1 << 64) >> 1) ^ -(code & 1)  # the sign of a difference is its lowest bit
        total = (total + (1 << 63)) % (1 << 64) - (1 << 63)
        decoded.append(total)
    return decoded


def _numbers(data: bytes, kind: str) -> Any:
    code = KINDS[kind][0]
    if code == "e":
        return struct.unpack(f"<{len(data) // 2}e", data)
    if code == "bf":  # the upper half of a float32
        wide = b"".join(b"\0\0" + data[k : k + 2] for k in range(0, len(data), 2))
        return struct.unpack(f"<{len(data) // 2}f", wide)
    numbers = array(code, data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def scaled(numbers: Iterable[float], budget: Budget) -> tuple[Vector, int]:
    """Writes numbers as whole numbers times one power of two.

    Example:
        >>> scaled([0.5, -3.0], Budget(0))
        ([1, -6], -1)
    """
    ratios = [number.as_integer_ratio() for number in numbers]
    bits = max((below.bit_length() - 1 for _, below in ratios), default=0)
    budget.spend(len(ratios), bits + max((above.bit_length() for above, _ in ratios), default=0))
    return [above << (bits + 1 - below.bit_length()) for above, below in ratios], -bits


def fraction(value: Any, name: str) -> Fraction:
    """Reads a finite number that JSON holds.

    Example:
        >>> fraction(0.75, "kappa")
        Fraction(3, 4)
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise RefusedError(f"{name} is {value!r}, not a number")
    if abs(value) > sys.float_info.max:
        raise RefusedError(f"{name} is a whole number of {int(value).bit_length()} bits, too large for this")
    return Fraction(value)


def rounded(value: Fraction) -> float:
    """Returns a number for messages, infinite if it is too large for a float.

    Example:
        >>> rounded(Fraction(10) ** 400), rounded(Fraction(1, 4))
        (inf, 0.25)
    """
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def read_json(text: bytes | str, name: str) -> dict[str, Any]:
    """Reads a table in UTF-8; one that says something twice, or holds NaN or infinity, is refused."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise RefusedError(f"{name} says something twice")
        return dict(pairs)

    def never(text: str) -> NoReturn:
        raise RefusedError(f"{name} holds the number {text}")

    def finite(text: str) -> float:
        return value if math.isfinite(value := float(text)) else never(text)

    try:
        plain = text if isinstance(text, str) else text.decode()
        table = json.loads(plain, object_pairs_hook=once, parse_constant=never, parse_float=finite)
        json.dumps(table, ensure_ascii=False).encode()  # half of a character that is written as two
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{name} is no readable JSON") from error
    if not isinstance(table, dict):
        raise RefusedError(f"{name} is no table")
    return table
