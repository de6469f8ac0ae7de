"""Vector instructions for the CPU kernels, written in LLVM's intermediate language.

Everything works on *lanes*: a group of samples lies side by side, ``work[row * WIDTH + lane]``, so that one
instruction serves many samples and nothing is summed across a vector. A compiler does not
by itself keep a tile of the product Ax in registers while it runs over the columns of A; here it is spelled out.

`Lanes` are vectors of floating point numbers with the elementary functions on them. `multiply` computes Ax of a
group: a dense A is one array of packed tiles, a sparse one a tuple of four arrays (`kernels.sparse.SparseRows`),
and which of them a kernel takes is decided by the type of its argument, when it is compiled. `gram`, `weigh` and
`combine` are the least squares problem and the combination of Anderson's extrapolation: the points of a cycle are
given by a tuple of offsets, whose length is part of its type, so that the loops over pairs of points are unrolled
when a kernel is compiled.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from wellposed.errors import require


@dataclass(frozen=True)
class Lanes:
    """Vectors of `count` floating point numbers with `bits` bits."""

    ir: Any
    bits: int
    count: int

    @property
    def align(self) -> int:
        """Bytes to which a vector is aligned."""
        return self.bits // 8 * self.count

    @property
    def scalar(self) -> Any:
        """The type of one number."""
        return self.ir.FloatType() if self.bits == 32 else self.ir.DoubleType()

    @property
    def vector(self) -> Any:
        """The type of a vector."""
        return self.ir.VectorType(self.scalar, self.count)

    @property
    def integers(self) -> Any:
        """The type of as many integers of the same size."""
        return self.ir.VectorType(self.ir.IntType(self.bits), self.count)

    @property
    def zero(self) -> Any:
        """A vector of zeros."""
        return self.full(0.0)

    @property
    def mantissa(self) -> int:
        """Bits after the binary point."""
        return 23 if self.bits == 32 else 52

    def full(self, value: float) -> Any:
        """Returns a constant vector."""
        return self.ir.Constant(self.vector, [value] * self.count)

    def whole(self, value: int) -> Any:
        """Returns a constant vector of integers."""
        return self.ir.Constant(self.integers, [value] * self.count)

    def splat(self, builder: Any, value: Any) -> Any:
        """Copies one number to all lanes."""
        nothing, index = self.ir.Constant(self.vector, self.ir.Undefined), self.ir.IntType(32)
        single = builder.insert_element(nothing, value, index(0))
        mask = self.ir.Constant(self.ir.VectorType(index, self.count), [0] * self.count)
        return builder.shuffle_vector(single, nothing, mask)

    def call(self, builder: Any, name: str, *arguments: Any) -> Any:
        """Calls one of LLVM's own functions on vectors."""
        module, full = builder.module, f"llvm.{name}.v{self.count}f{self.bits}"
        function = module.globals.get(full)
        if function is None:
            kind = self.ir.FunctionType(self.vector, [self.vector] * len(arguments))
            function = self.ir.Function(module, kind, full)
        return builder.call(function, arguments)

    def larger(self, builder: Any, a: Any, b: Any) -> Any:
        """Returns the larger numbers; where `b` is NaN, `a`."""
        return builder.select(builder.fcmp_ordered(">", b, a), b, a)

    def smaller(self, builder: Any, a: Any, limit: float) -> Any:
        """Cuts at a limit; NaN stays."""
        return builder.select(builder.fcmp_ordered(">", a, self.full(limit)), self.full(limit), a)


def _power_and_rest(builder: Any, lanes: Lanes, y: Any) -> tuple[Any, Any]:
    """Returns 2^k and expm1(r) for y = k log 2 + r with \\|r\\| <= log(2) / 2."""
    split = 2.0 ** (12 if lanes.bits == 32 else 32)
    high = math.floor(math.log(2) * split) / split  # k times this is exact
    low = float(_LOG2_TAIL + (_LOG2_HEAD - high))
    k = lanes.call(builder, "rint", builder.fmul(y, lanes.full(1 / math.log(2))))
    r = lanes.call(builder, "fma", k, lanes.full(-high), y)
    r = lanes.call(builder, "fma", k, lanes.full(-low), r)
    degree = 8 if lanes.bits == 32 else 14
    series = lanes.full(1 / math.factorial(degree))
    for power in range(degree - 1, 1, -1):
        series = lanes.call(builder, "fma", series, r, lanes.full(1 / math.factorial(power)))
    rest = lanes.call(builder, "fma", builder.fmul(r, r), series, r)
    known = builder.select(builder.fcmp_ordered("==", k, k), k, lanes.zero)  # NaN has no integer
    bias = lanes.whole((1 << (lanes.bits - lanes.mantissa - 2)) - 1)
    exponent = builder.add(builder.fptosi(known, lanes.integers), bias)
    return builder.bitcast(builder.shl(exponent, lanes.whole(lanes.mantissa)), lanes.vector), rest


_LOG2_HEAD, _LOG2_TAIL = math.log(2), 2.3190468138462996e-17  # their sum is log 2 to 107 bits


def tanh(builder: Any, lanes: Lanes, z: Any) -> Any:
    """Returns tanh z = t / (t + 2) with t = exp(2 \\|z\\|) - 1, accurate relative to the result."""
    size = lanes.call(builder, "fabs", z)
    y = lanes.smaller(builder, builder.fadd(size, size), 20.0 if lanes.bits == 32 else 44.0)
    power, rest = _power_and_rest(builder, lanes, y)
    t = lanes.call(builder, "fma", power, rest, builder.fsub(power, lanes.full(1.0)))
    return lanes.call(builder, "copysign", builder.fdiv(t, builder.fadd(t, lanes.full(2.0))), z)


def sigmoid(builder: Any, lanes: Lanes, z: Any) -> Any:
    """Returns 1 / (1 + exp(-z))."""
    limit = 87.0 if lanes.bits == 32 else 708.0
    y = lanes.smaller(builder, builder.fsub(lanes.full(-0.0), z), limit)
    y = builder.select(builder.fcmp_ordered("<", y, lanes.full(-limit)), lanes.full(-limit), y)
    power, rest = _power_and_rest(builder, lanes, y)
    exponential = lanes.call(builder, "fma", power, rest, power)
    return builder.fdiv(lanes.full(1.0), builder.fadd(lanes.full(1.0), exponential))


numba = require("numba", extra="fast")
_ir = require("llvmlite.ir", extra="fast")
_binding = require("llvmlite.binding", extra="fast")
_cgutils = require("numba.core.cgutils", extra="fast")
_extending = require("numba.extending", extra="fast")
_types = numba.types


def _vector_bytes() -> int:
    """Returns the size of the machine's vector registers."""
    features = _binding.get_host_cpu_features()
    return 64 if features.get("avx512f") else 32 if features.get("avx2") else 16


VECTOR_BYTES = _vector_bytes()
ROWS = 4  # of A in a packed tile
DOUBLE = VECTOR_BYTES == 64  # whether there are registers for two tiles at once
VECTORS = 2  # of a group
INDEX = _ir.IntType(64)


def lanes_of(buffer: Any) -> Lanes:
    bits = buffer.dtype.bitwidth
    return Lanes(_ir, bits, 8 * VECTOR_BYTES // bits)


def pointer_of(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, builder, array).data


class Memory:
    """Loads and stores vectors of one flat buffer by the number of an element."""

    def __init__(self, builder: Any, lanes: Lanes, pointer: Any) -> None:
        self.builder, self.lanes, self.pointer = builder, lanes, pointer

    def _at(self, index: Any, kind: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(self.pointer, [index]), kind.as_pointer())

    def load(self, index: Any) -> Any:
        return self.builder.load(self._at(index, self.lanes.vector), align=self.lanes.align)

    def store(self, value: Any, index: Any) -> None:
        self.builder.store(value, self._at(index, self.lanes.vector), align=self.lanes.align)

    def broadcast(self, index: Any) -> Any:
        return self.lanes.splat(self.builder, self.builder.load(self.builder.gep(self.pointer, [index])))


class Unaligned(Memory):
    """Memory whose vectors need not be aligned."""

    def load(self, index: Any) -> Any:
        return self.builder.load(self._at(index, self.lanes.vector), align=self.lanes.bits // 8)

    def store(self, value: Any, index: Any) -> None:
        self.builder.store(value, self._at(index, self.lanes.vector), align=self.lanes.bits // 8)


def shifted(builder: Any, base: Any, by: int) -> Any:
    """Adds a constant to an index."""
    return builder.add(base, INDEX(by)) if by else base


class Sums:
    """Vectors that a loop changes; the optimiser keeps them in registers."""

    def __init__(self, builder: Any, lanes: Lanes, count: int) -> None:
        self.builder = builder
        self.cells = [_cgutils.alloca_once(builder, lanes.vector) for _ in range(count)]
        for cell in self.cells:
            builder.store(lanes.zero, cell)

    def __getitem__(self, index: int) -> Any:
        return self.builder.load(self.cells[index])

    def __setitem__(self, index: int, value: Any) -> None:
        self.builder.store(value, self.cells[index])


class _Stats:
    """The largest residual, the largest entry and the l1 norm of the residual, gathered in registers."""

    def __init__(self, builder: Any, lanes: Lanes, memory: Memory, at: Any, vectors: int) -> None:
        self.builder, self.lanes, self.memory = builder, lanes, memory
        width = VECTORS * lanes.count
        offsets = [kind * width + vector * lanes.count for vector in range(vectors) for kind in range(3)]
        self.targets = [shifted(builder, at, offset) for offset in offsets]
        self.sums = Sums(builder, lanes, len(self.targets))

    def add(self, x: Any, image: Any, vector: int) -> None:
        """Adds one state of the lanes of a vector."""
        builder, lanes, first = self.builder, self.lanes, 3 * vector
        gap = lanes.call(builder, "fabs", builder.fsub(image, x))
        size = lanes.call(builder, "fabs", image)
        self.sums[first] = lanes.larger(builder, self.sums[first], gap)
        self.sums[first + 1] = lanes.larger(builder, self.sums[first + 1], size)
        self.sums[first + 2] = builder.fadd(self.sums[first + 2], gap)

    def write(self) -> None:
        """Writes the numbers to memory."""
        for number, target in enumerate(self.targets):
            self.memory.store(self.sums[number], target)


def _tile(tiles: int, vectors: int) -> Any:
    """Returns the product of `tiles` tiles of A with a group, whose sums stay in registers until they are done."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, matrix, at, x, y, n, left = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        packed = Memory(builder, lanes, pointer_of(context, builder, signature.args[1], matrix))
        width = VECTORS * lanes.count
        sums = Sums(builder, lanes, tiles * ROWS * vectors)
        with _cgutils.for_range(builder, n) as loop:
            base = builder.add(x, builder.mul(loop.index, INDEX(width)))
            entries = [memory.load(shifted(builder, base, vector * lanes.count)) for vector in range(vectors)]
            column = builder.add(at, builder.mul(loop.index, INDEX(ROWS)))
            for row in range(tiles * ROWS):
                tile = builder.add(column, builder.mul(n, INDEX(row // ROWS * ROWS)))
                entry = packed.broadcast(shifted(builder, tile, row % ROWS))
                for vector in range(vectors):
                    number = row * vectors + vector
                    sums[number] = lanes.call(builder, "fma", entry, entries[vector], sums[number])
        for row in range(tiles * ROWS):
            with builder.if_then(builder.icmp_signed(">", left, INDEX(row)), likely=True):
                for vector in range(vectors):
                    memory.store(
                        sums[row * vectors + vector], shifted(builder, y, row * width + vector * lanes.count)
                    )
        return context.get_dummy_value()

    @_extending.intrinsic
    def tile(typing: Any, array: Any, matrix: Any, at: Any, x: Any, y: Any, n: Any, left: Any) -> Any:
        return _types.void(array, matrix, *(_types.int64,) * 5), code

    return tile


tile_one_narrow, tile_one = _tile(1, 1), _tile(1, VECTORS)
tile_two_narrow, tile_two = _tile(2, 1), _tile(2, VECTORS)


@_extending.intrinsic
def move(
    typing: Any, source: Any, begin: Any, stride: Any, target: Any, to: Any, step: Any, rows: Any, vectors: Any
) -> Any:
    """Copies rows of vectors from one array, whose rows are `stride` apart, to another, where they are `step`."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, begin, stride, target, to, step, rows, vectors = arguments
        lanes = lanes_of(signature.args[0])
        reads = Unaligned(builder, lanes, pointer_of(context, builder, signature.args[0], source))
        writes = Unaligned(builder, lanes, pointer_of(context, builder, signature.args[3], target))
        for vector in range(VECTORS):
            wanted = builder.icmp_signed(">", vectors, INDEX(vector))
            with builder.if_then(wanted), _cgutils.for_range(builder, rows) as loop:
                shift = INDEX(vector * lanes.count)
                here = builder.add(begin, builder.add(builder.mul(loop.index, stride), shift))
                there = builder.add(to, builder.add(builder.mul(loop.index, step), shift))
                writes.store(reads.load(here), there)
        return context.get_dummy_value()

    whole = _types.int64
    return _types.void(source, whole, whole, target, whole, whole, whole, whole), code


def _transposed(builder: Any, lanes: Lanes, rows: list[Any]) -> list[Any]:
    """Transposes as many vectors as have numbers: blocks beside the diagonal change places, of all sizes."""
    size, index = lanes.count // 2, lanes.ir.IntType(32)
    kind = lanes.ir.VectorType(index, lanes.count)
    while size:
        odd = [place // size % 2 for place in range(lanes.count)]
        upper = [place + (lanes.count - size if odd[place] else 0) for place in range(lanes.count)]
        lower = [place + (lanes.count if odd[place] else size) for place in range(lanes.count)]
        for row in (row for row in range(lanes.count) if row // size % 2 == 0):
            pair = rows[row], rows[row + size]
            rows[row], rows[row + size] = (
                builder.shuffle_vector(*pair, lanes.ir.Constant(kind, mask)) for mask in (upper, lower)
            )
        size //= 2
    return rows


@_extending.intrinsic
def move_transposed(typing: Any, source: Any, begin: Any, stride: Any, target: Any, to: Any, blocks: Any) -> Any:
    """Copies a row of an array for each lane to lanes, `blocks` vectors of every row; rows are `stride` apart."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, begin, stride, target, to, blocks = arguments
        lanes = lanes_of(signature.args[0])
        reads = Unaligned(builder, lanes, pointer_of(context, builder, signature.args[0], source))
        writes = Memory(builder, lanes, pointer_of(context, builder, signature.args[3], target))
        with _cgutils.for_range(builder, blocks) as loop:
            column = builder.mul(loop.index, INDEX(lanes.count))
            for vector in range(VECTORS):
                numbers = [builder.mul(stride, INDEX(vector * lanes.count + row)) for row in range(lanes.count)]
                here = builder.add(begin, column)
                rows = [reads.load(builder.add(here, number)) for number in numbers]
                for row, value in enumerate(_transposed(builder, lanes, rows)):
                    there = row_offset(builder, lanes, shifted(builder, column, row), vector)
                    writes.store(value, builder.add(to, there))
        return context.get_dummy_value()

    whole = _types.int64
    return _types.void(source, whole, whole, target, whole, whole), code


@_extending.intrinsic
def wipe(typing: Any, array: Any, begin: Any, rows: Any) -> Any:
    """Fills whole rows of lanes with zeros."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, begin, rows = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        with _cgutils.for_range(builder, rows) as loop:
            for vector in range(VECTORS):
                memory.store(lanes.zero, builder.add(begin, row_offset(builder, lanes, loop.index, vector)))
        return context.get_dummy_value()

    return _types.void(array, _types.int64, _types.int64), code


def row_offset(builder: Any, lanes: Lanes, row: Any, vector: int) -> Any:
    return builder.add(builder.mul(row, INDEX(VECTORS * lanes.count)), INDEX(vector * lanes.count))


def _block(rows: int, vectors: int) -> Any:
    """Returns the product of `rows` rows of a matrix, which lies anywhere, with columns in lanes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, depth, left, at, step, stride, count, out, to, columns, add = arguments
        lanes, kinds = lanes_of(signature.args[0]), signature.args
        memory = Memory(builder, lanes, pointer_of(context, builder, kinds[0], array))
        factors = Memory(builder, lanes, pointer_of(context, builder, kinds[2], left))
        target = Unaligned(builder, lanes, pointer_of(context, builder, kinds[7], out))
        last = builder.sub(count, INDEX(1))
        numbers = [
            builder.select(builder.icmp_signed(">", last, INDEX(row)), INDEX(row), last) for row in range(rows)
        ]
        starts = [
            builder.add(at, builder.mul(number, step)) for number in numbers
        ]  # no row beyond the last is read
        sums = Sums(builder, lanes, rows * vectors)
        with _cgutils.for_range(builder, depth) as loop:
            base, column = row_offset(builder, lanes, loop.index, 0), builder.mul(loop.index, stride)
            entries = [memory.load(shifted(builder, base, vector * lanes.count)) for vector in range(vectors)]
            for row in range(rows):
                factor = factors.broadcast(builder.add(starts[row], column))
                for vector in range(vectors):
                    number = row * vectors + vector
                    sums[number] = lanes.call(builder, "fma", factor, entries[vector], sums[number])
        for row in range(rows):
            with builder.if_then(builder.icmp_signed(">", count, INDEX(row)), likely=True):
                for vector in range(vectors):
                    here = builder.add(
                        to, builder.add(builder.mul(columns, INDEX(row)), INDEX(vector * lanes.count))
                    )
                    with builder.if_else(add) as (adds, writes):
                        with adds:
                            target.store(builder.fadd(target.load(here), sums[row * vectors + vector]), here)
                        with writes:
                            target.store(sums[row * vectors + vector], here)
        return context.get_dummy_value()

    @_extending.intrinsic
    def block(
        typing: Any, array: Any, depth: Any, left: Any, at: Any, step: Any, stride: Any, count: Any, out: Any,
        to: Any, columns: Any, add: Any,
    ) -> Any:  # fmt: skip
        """Writes, or adds, the product of `count` rows of `left` with the `depth` rows of lanes at the beginning.

        Entries of a row of `left` are `stride` apart and rows `step`, from `at` on; rows of `out` are `columns`
        apart, from `to` on.
        """
        whole = _types.int64
        return _types.void(array, whole, left, whole, whole, whole, whole, out, whole, whole, _types.boolean), code

    return block


NARROW = 2 * ROWS  # rows of a block with one vector, so that there are enough sums to hide their latency
block_narrow, block_wide = _block(NARROW, 1), _block(ROWS, VECTORS)


def _images(builder: Any, lanes: Lanes, slope: Any) -> list[Callable[[Any, Any, Any], Any]]:
    """Returns what turns a sum, v and d into an image, by kind."""

    def bent(negative: Callable[[Any], Any]) -> Callable[[Any, Any, Any], Any]:
        def image(total: Any, v: Any, d: Any) -> Any:
            z = builder.fadd(total, v)
            return builder.select(builder.fcmp_ordered("<=", z, lanes.zero), negative(z), z)  # NaN stays

        return image

    def smooth(function: Callable[[Any, Lanes, Any], Any]) -> Callable[[Any, Any, Any], Any]:
        return lambda total, v, d: function(builder, lanes, builder.fadd(total, v))

    def linear(total: Any, v: Any, d: Any) -> Any:
        return lanes.call(builder, "fma", d, total, v)

    relu, sloped = bent(lambda z: lanes.zero), bent(lambda z: builder.fmul(slope, z))
    return [relu, sloped, linear, smooth(tanh), smooth(sigmoid)]


@_extending.intrinsic
def activate(
    typing: Any,
    array: Any,
    y: Any,
    x: Any,
    v: Any,
    d: Any,
    stats: Any,
    n: Any,
    vectors: Any,
    kind: Any,
    slope: Any,
) -> Any:
    """Turns the sums at `y` into images, in all lanes, and measures the residual."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, y, x, v, d, stats, n, vectors, kind, slope = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        images, width = _images(builder, lanes, lanes.splat(builder, slope)), VECTORS * lanes.count
        measured = _Stats(builder, lanes, memory, stats, VECTORS)
        for vector in range(VECTORS):
            with builder.if_then(builder.icmp_signed(">", vectors, INDEX(vector))):
                for number, image in enumerate(images):
                    wanted = builder.icmp_signed("==", kind, INDEX(number))
                    with builder.if_then(wanted), _cgutils.for_range(builder, n) as loop:
                        shift = builder.add(builder.mul(loop.index, INDEX(width)), INDEX(vector * lanes.count))
                        total, old, offset, factor = (
                            memory.load(builder.add(base, shift)) for base in (y, x, v, d)
                        )
                        value = image(total, offset, factor)
                        memory.store(value, builder.add(y, shift))
                        measured.add(old, value, vector)
        measured.write()
        return context.get_dummy_value()

    return _types.void(array, *(_types.int64,) * 8, array.dtype), code


@_extending.intrinsic
def borrow(typing: Any, array: Any) -> Any:
    """Returns an array, or a tuple of arrays, without its reference count.

    Counting references would cost more than a step of a small model. The caller keeps the array alive.
    """

    def bare(context: Any, builder: Any, kind: Any, value: Any) -> Any:
        view = context.make_array(kind)(context, builder, value)
        view.meminfo = _cgutils.get_null_value(view.meminfo.type)
        view.parent = _cgutils.get_null_value(view.parent.type)
        return view._getvalue()

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, value = signature.args[0], arguments[0]
        if not isinstance(kind, _types.BaseTuple):
            return bare(context, builder, kind, value)
        members = zip(kind.types, _cgutils.unpack_tuple(builder, value), strict=True)
        return context.make_tuple(builder, kind, [bare(context, builder, *member) for member in members])

    return array(array), code


@_extending.intrinsic
def pointer_to(typing: Any, address: Any, like: Any) -> Any:
    """Returns an address as a pointer to numbers, of the type `like` or of the entries of an array `like`."""
    kind = _types.CPointer(like.dtype)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(_types.int64, like), code


compiled = numba.njit(nogil=True, error_model="numpy")


@compiled
def array_at(address: int, shape: Any, like: Any) -> Any:
    """Returns the array at an address, in rows without gaps; the caller keeps its memory alive."""
    return numba.carray(pointer_to(address, like), shape)


QUAD = 4  # entries of a row with sums of their own; rows are padded to a multiple


def _row_sum(builder: Any, sums: Sums, vectors: int, vector: int) -> Any:
    terms = [sums[entry * vectors + vector] for entry in range(QUAD)]
    return builder.fadd(builder.fadd(terms[0], terms[1]), builder.fadd(terms[2], terms[3]))


def _rows(vectors: int, alone: bool) -> Any:
    """Returns the product of sparse rows with a group: every entry of A multiplies its state in all lanes at once.

    With `alone` the group is one sample, whose states are contiguous at `x`; its sums are the same as in a full
    group, bit for bit.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        full = lanes_of(signature.args[0])
        lanes, width = Lanes(full.ir, full.bits, 1) if alone else full, VECTORS * full.count
        kinds, (x, y, first, last) = signature.args[:4], arguments[4:]
        work, values, columns, starts = (
            pointer_of(context, builder, kind, array) for kind, array in zip(kinds, arguments[:4], strict=True)
        )
        memory, entries = Memory(builder, lanes, work), Memory(builder, lanes, values)
        with _cgutils.for_range_slice(builder, first, last, INDEX(1), INDEX) as (row, _):
            sums = Sums(builder, lanes, QUAD * vectors)
            begin, end = (builder.load(builder.gep(starts, [shifted(builder, row, k)])) for k in (0, 1))
            with _cgutils.for_range_slice(builder, begin, end, INDEX(QUAD), INDEX) as (at, _):
                for entry in range(QUAD):
                    position = shifted(builder, at, entry)
                    state = builder.zext(builder.load(builder.gep(columns, [position])), INDEX)
                    base = builder.add(x, state if alone else builder.mul(state, INDEX(width)))
                    factor = entries.broadcast(position)
                    for vector in range(vectors):
                        value = memory.load(shifted(builder, base, vector * lanes.count))
                        number = entry * vectors + vector
                        sums[number] = lanes.call(builder, "fma", factor, value, sums[number])
            here = builder.add(y, builder.mul(row, INDEX(width)))
            for vector in range(vectors):
                memory.store(
                    _row_sum(builder, sums, vectors, vector), shifted(builder, here, vector * lanes.count)
                )
        return context.get_dummy_value()

    @_extending.intrinsic
    def rows(
        typing: Any, array: Any, values: Any, columns: Any, starts: Any, x: Any, y: Any, first: Any, last: Any
    ) -> Any:
        return _types.void(array, values, columns, starts, *(_types.int64,) * 4), code

    return rows


rows_alone, rows_narrow, rows_wide = _rows(1, True), _rows(1, False), _rows(VECTORS, False)


@compiled
def multiply_tiles(
    work: Any, packed: Any, start: int, x: int, y: int, inner: int, rows: int, width: int, vectors: int
) -> None:
    """Writes the product of the packed matrix at `start` with the `inner` rows at `x` to the rows at `y`."""
    row = 0
    while row < rows:
        at, here, left = start + row * inner, y + row * width, rows - row
        if DOUBLE and left > ROWS:
            if vectors == 1:
                tile_two_narrow(work, packed, at, x, here, inner, left)
            else:
                tile_two(work, packed, at, x, here, inner, left)
            row += ROWS
        elif vectors == 1:
            tile_one_narrow(work, packed, at, x, here, inner, left)
        else:
            tile_one(work, packed, at, x, here, inner, left)
        row += ROWS


@compiled
def multiply_rows(work: Any, matrix: Any, x: int, y: int, first: int, last: int, vectors: int) -> None:
    """Writes some rows of Ax of a group for sparse rows of A."""
    values, columns, starts, _ = matrix
    if vectors == 1:
        rows_narrow(work, values, columns, starts, x, y, first, last)
    else:
        rows_wide(work, values, columns, starts, x, y, first, last)


def multiply(
    work: Any, matrix: Any, x: int, y: int, room: int, n: int, width: int, vectors: int, alone: bool
) -> None:
    """Writes Ax of a group, from the point at `x` to `y`.

    Args:
        work, width: memory of the group and its lanes.
        matrix: tiles or sparse rows.
        x, y: where the point and the product are.
        room: where n numbers may be overwritten; used by a sparse A if the group is one sample.
        n, vectors: states, and vectors at work.
        alone: whether only the first lane counts.
    """
    raise NotImplementedError("this is called by compiled code alone, through its overload")


@_extending.overload(multiply)
def _multiply(
    work: Any, matrix: Any, x: Any, y: Any, room: Any, n: Any, width: Any, vectors: Any, alone: Any
) -> Any:
    def dense(
        work: Any, matrix: Any, x: Any, y: Any, room: Any, n: Any, width: Any, vectors: Any, alone: Any
    ) -> None:
        multiply_tiles(work, matrix, 0, x, y, n, n, width, vectors)

    def sparse(
        work: Any, matrix: Any, x: Any, y: Any, room: Any, n: Any, width: Any, vectors: Any, alone: Any
    ) -> None:
        if not alone:
            multiply_rows(work, matrix, x, y, 0, n, vectors)
            return
        for k in range(n):
            work[room + k] = work[x + k * width]
        rows_alone(work, matrix[0], matrix[1], matrix[2], room, y, 0, n)

    return sparse if isinstance(matrix, _types.BaseTuple) else dense


TINY = sys.float_info.min


def _points(builder: Any, memory: Memory, offsets: list[Any], shift: Any) -> list[Any]:
    return [memory.load(builder.add(offset, shift)) for offset in offsets]


def _differences(builder: Any, values: list[Any]) -> list[Any]:
    return [builder.fsub(later, earlier) for earlier, later in pairwise(values)]


def _power_of_two(builder: Any, lanes: Lanes, size: Any) -> Any:
    """Returns powers of two whose products with positive numbers are near one, and exact."""
    mantissa, most = (23, 253) if lanes.bits == 32 else (52, 2045)
    whole = lanes.integers

    def constant(value: int) -> Any:
        return lanes.ir.Constant(whole, [value] * lanes.count)

    exponent = builder.lshr(builder.bitcast(size, whole), constant(mantissa))
    field = builder.sub(constant(most), exponent)
    field = builder.select(builder.icmp_signed(">", field, constant(1)), field, constant(1))
    return builder.bitcast(builder.shl(field, constant(mantissa)), lanes.vector)


def _normal_equations(builder: Any, lanes: Lanes, sums: Sums, points: list[Any], unit: Any) -> None:
    """Adds what one state contributes to the Gram matrix, the right side and the size of the last point."""
    residuals = [builder.fmul(unit, residual) for residual in _differences(builder, points)]
    columns = _differences(builder, residuals)
    pairs = [(a, b) for i, a in enumerate(columns) for b in columns[: i + 1]]
    pairs += [(column, residuals[-1]) for column in columns]
    for number, (a, b) in enumerate(pairs):
        sums[number] = lanes.call(builder, "fma", a, b, sums[number])
    sums[len(pairs)] = builder.fadd(sums[len(pairs)], lanes.call(builder, "fabs", points[-1]))


@_extending.intrinsic
def gram(typing: Any, array: Any, slots: Any, out: Any, norms: Any, n: Any, vectors: Any) -> Any:
    """Writes lower triangle, right side and size of the last point, one row of lanes each, from `out` on.

    Residuals are divided by a power of two near their `norms`, or squares would leave the range of the dtype.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, offsets, out, norms, n, vectors = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        bases, width = _cgutils.unpack_tuple(builder, offsets), VECTORS * lanes.count
        depth = len(bases) - 2
        count = depth * (depth + 1) // 2 + depth + 1
        for vector in range(VECTORS):
            with builder.if_then(builder.icmp_signed(">", vectors, INDEX(vector))):
                sums = Sums(builder, lanes, count)
                norm = memory.load(builder.add(norms, INDEX(vector * lanes.count)))
                unit = _power_of_two(builder, lanes, norm)
                with _cgutils.for_range(builder, n) as loop:
                    shift = builder.add(builder.mul(loop.index, INDEX(width)), INDEX(vector * lanes.count))
                    _normal_equations(builder, lanes, sums, _points(builder, memory, bases, shift), unit)
                for number in range(count):
                    target = INDEX(number * width + vector * lanes.count)
                    memory.store(sums[number], builder.add(out, target))
        return context.get_dummy_value()

    whole = _types.int64
    return _types.void(array, slots, whole, whole, whole, whole), code


def _factorised(builder: Any, lanes: Lanes, entries: list[Any], depth: int, shift: Any) -> list[Any]:
    """Solves a positive definite system by L D L' and returns the solution; `entries` as `gram` writes them."""
    rows = [entries[a * (a + 1) // 2 : a * (a + 1) // 2 + a + 1] for a in range(depth)]
    right = entries[depth * (depth + 1) // 2 :][:depth]
    one = lanes.full(1.0)

    def less(total: Any, a: Any, b: Any) -> Any:
        return lanes.call(builder, "fma", builder.fneg(a), b, total)

    for a in range(depth):
        rows[a][a] = builder.fadd(rows[a][a], shift)
    for a in range(depth):
        inverse = builder.fdiv(one, rows[a][a])
        factors = {b: builder.fmul(rows[b][a], inverse) for b in range(a + 1, depth)}
        for b, factor in factors.items():
            for c in range(a + 1, b + 1):
                rows[b][c] = less(rows[b][c], factor, rows[c][a])
            right[b] = less(right[b], factor, right[a])
        for b, factor in factors.items():
            rows[b][a] = factor
        right[a] = builder.fmul(right[a], inverse)
    for a in range(depth - 1, -1, -1):
        for b in range(a + 1, depth):
            right[a] = less(right[a], rows[b][a], right[b])
    return right


@_extending.intrinsic
def weigh(
    typing: Any, array: Any, slots: Any, problem: Any, gamma: Any, mask: Any, ridge: Any, vectors: Any
) -> Any:
    """Solves the least squares problems in float64; the solution is zero where the mask is."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, _, problem, gamma, mask, ridge, vectors = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        wide, width, depth = Lanes(lanes.ir, 64, lanes.count), VECTORS * lanes.count, signature.args[1].count - 2
        long = (lambda value: builder.fpext(value, wide.vector)) if lanes.bits == 32 else (lambda value: value)
        short = (lambda value: builder.fptrunc(value, lanes.vector)) if lanes.bits == 32 else (lambda value: value)
        for vector in range(VECTORS):
            with builder.if_then(builder.icmp_signed(">", vectors, INDEX(vector))):
                offsets = [INDEX(row * width + vector * lanes.count) for row in range(depth * (depth + 3) // 2)]
                entries = [long(memory.load(builder.add(problem, offset))) for offset in offsets]
                shift = wide.full(0.0)
                for a in range(depth):
                    shift = builder.fadd(shift, entries[a * (a + 1) // 2 + a])
                shift = wide.call(builder, "fma", wide.splat(builder, ridge), shift, wide.full(TINY))
                marks = memory.load(builder.add(mask, offsets[0]))
                chosen = builder.fcmp_ordered(">", marks, lanes.zero)
                for offset, weight in zip(
                    offsets, _factorised(builder, wide, entries, depth, shift), strict=False
                ):
                    value = builder.select(chosen, short(weight), lanes.zero)
                    memory.store(value, builder.add(gamma, offset))
        return context.get_dummy_value()

    whole = _types.int64
    return _types.void(array, slots, whole, whole, whole, _types.float64, whole), code


@_extending.intrinsic
def combine(typing: Any, array: Any, slots: Any, gamma: Any, n: Any, vectors: Any) -> Any:
    """Writes ``last - sum gamma_j (difference of images)_j`` over the first point, and its l1 norm after gamma."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, offsets, gamma, n, vectors = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        bases, width = _cgutils.unpack_tuple(builder, offsets), VECTORS * lanes.count
        depth = len(bases) - 2
        for vector in range(VECTORS):
            with builder.if_then(builder.icmp_signed(">", vectors, INDEX(vector))):
                rows = [builder.add(gamma, INDEX(j * width + vector * lanes.count)) for j in range(depth + 1)]
                weights = [builder.fneg(memory.load(row)) for row in rows[:-1]]
                size = Sums(builder, lanes, 1)
                with _cgutils.for_range(builder, n) as loop:
                    shift = builder.add(builder.mul(loop.index, INDEX(width)), INDEX(vector * lanes.count))
                    points = _points(builder, memory, bases, shift)
                    jump = points[-1]
                    for weight, image in zip(weights, _differences(builder, points[1:]), strict=True):
                        jump = lanes.call(builder, "fma", weight, image, jump)
                    memory.store(jump, builder.add(bases[0], shift))
                    size[0] = builder.fadd(size[0], lanes.call(builder, "fabs", jump))
                memory.store(size[0], rows[-1])
        return context.get_dummy_value()

    whole = _types.int64
    return _types.void(array, slots, whole, whole, whole), code


@_extending.intrinsic
def choose(typing: Any, array: Any, target: Any, safe: Any, image: Any, mask: Any, n: Any, vectors: Any) -> Any:
    """Writes `safe` in lanes where the mask is positive and `image` elsewhere."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, target, safe, image, mask, n, vectors = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        width = VECTORS * lanes.count
        for vector in range(VECTORS):
            with builder.if_then(builder.icmp_signed(">", vectors, INDEX(vector))):
                row = memory.load(builder.add(mask, INDEX(vector * lanes.count)))
                failed = builder.fcmp_ordered(">", row, lanes.zero)
                with _cgutils.for_range(builder, n) as loop:
                    shift = builder.add(builder.mul(loop.index, INDEX(width)), INDEX(vector * lanes.count))
                    values = [memory.load(builder.add(base, shift)) for base in (safe, image)]
                    memory.store(builder.select(failed, *values), builder.add(target, shift))
        return context.get_dummy_value()

    whole = _types.int64
    return _types.void(array, *(whole,) * 6), code
