"""Vector instructions for the CPU kernels, written in LLVM's intermediate language.

Everything works on *lanes*: a group of samples lies side by side, ``work[row * WIDTH + lane]``, so that one
instruction serves many samples and nothing is summed across a vector. What a compiler does not do by itself is
keep a tile of the product Ax in registers while it runs over the columns of A; here it is spelled out.
"""

from collections.abc import Callable
from typing import Any

from wellposed.errors import require
from wellposed.kernels.elementary import Lanes, sigmoid, tanh

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

    def spread(self, index: Any) -> Any:
        return self.lanes.splat(self.builder, self.builder.load(self.builder.gep(self.pointer, [index])))


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

    def __getitem__(self, place: int) -> Any:
        return self.builder.load(self.cells[place])

    def __setitem__(self, place: int, value: Any) -> None:
        self.builder.store(value, self.cells[place])


class _Stats:
    """The largest residual, the largest entry and the l1 norm of the residual, gathered in registers."""

    def __init__(self, builder: Any, lanes: Lanes, memory: Memory, at: Any, vectors: int) -> None:
        self.builder, self.lanes, self.memory = builder, lanes, memory
        width = VECTORS * lanes.count
        offsets = [kind * width + vector * lanes.count for vector in range(vectors) for kind in range(3)]
        self.places = [shifted(builder, at, offset) for offset in offsets]
        self.sums = Sums(builder, lanes, len(self.places))

    def add(self, x: Any, image: Any, vector: int) -> None:
        """Looks at one state of the lanes of a vector."""
        builder, lanes, first = self.builder, self.lanes, 3 * vector
        gap = lanes.call(builder, "fabs", builder.fsub(image, x))
        size = lanes.call(builder, "fabs", image)
        self.sums[first] = lanes.larger(builder, self.sums[first], gap)
        self.sums[first + 1] = lanes.larger(builder, self.sums[first + 1], size)
        self.sums[first + 2] = builder.fadd(self.sums[first + 2], gap)

    def write(self) -> None:
        """Puts the numbers back to memory."""
        for number, place in enumerate(self.places):
            self.memory.store(self.sums[number], place)


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
                entry = packed.spread(shifted(builder, tile, row % ROWS))
                for vector in range(vectors):
                    place = row * vectors + vector
                    sums[place] = lanes.call(builder, "fma", entry, entries[vector], sums[place])
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
                        place = builder.add(builder.mul(loop.index, INDEX(width)), INDEX(vector * lanes.count))
                        total, old, offset, factor = (
                            memory.load(builder.add(base, place)) for base in (y, x, v, d)
                        )
                        value = image(total, offset, factor)
                        memory.store(value, builder.add(y, place))
                        measured.add(old, value, vector)
        measured.write()
        return context.get_dummy_value()

    return _types.void(array, *(_types.int64,) * 8, array.dtype), code


@_extending.intrinsic
def borrow(typing: Any, array: Any) -> Any:
    """Returns an array, or a tuple of arrays, without its reference count.

    The upkeep of counts would cost more than a step of a small model. The caller keeps the array alive.
    """

    def bare(context: Any, builder: Any, kind: Any, value: Any) -> Any:
        found = context.make_array(kind)(context, builder, value)
        found.meminfo = _cgutils.get_null_value(found.meminfo.type)
        found.parent = _cgutils.get_null_value(found.parent.type)
        return found._getvalue()

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, value = signature.args[0], arguments[0]
        if not isinstance(kind, _types.BaseTuple):
            return bare(context, builder, kind, value)
        parts = zip(kind.types, _cgutils.unpack_tuple(builder, value), strict=True)
        return context.make_tuple(builder, kind, [bare(context, builder, *part) for part in parts])

    return array(array), code
