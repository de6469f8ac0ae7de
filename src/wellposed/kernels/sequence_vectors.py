"""Vector instructions for a group of sequences between two solves: rows to and from memory, slopes and scales."""

from typing import Any

from wellposed.errors import require
from wellposed.kernels.elementary import Lanes
from wellposed.kernels.lanes import EVENT, L1, LEAST, RESIDUAL, SIZE
from wellposed.kernels.recipe import SIGMOID, TANH
from wellposed.kernels.vectors import INDEX, VECTORS, Memory, Sums, lanes_of, pointer_of

numba = require("numba", extra="fast")
_cgutils = require("numba.core.cgutils", extra="fast")
_extending = require("numba.extending", extra="fast")
_types = numba.types


class _Anywhere(Memory):
    """Memory whose vectors need not be aligned."""

    def load(self, index: Any) -> Any:
        return self.builder.load(self._at(index, self.lanes.vector), align=self.lanes.bits // 8)

    def store(self, value: Any, index: Any) -> None:
        self.builder.store(value, self._at(index, self.lanes.vector), align=self.lanes.bits // 8)


@_extending.intrinsic
def move(
    typing: Any, source: Any, begin: Any, stride: Any, target: Any, to: Any, step: Any, rows: Any, vectors: Any
) -> Any:
    """Copies rows of vectors from one array, whose rows are `stride` apart, to another, where they are `step`."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, begin, stride, target, to, step, rows, vectors = arguments
        lanes = lanes_of(signature.args[0])
        reads = _Anywhere(builder, lanes, pointer_of(context, builder, signature.args[0], source))
        writes = _Anywhere(builder, lanes, pointer_of(context, builder, signature.args[3], target))
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


@_extending.intrinsic
def wipe(typing: Any, array: Any, begin: Any, rows: Any) -> Any:
    """Fills whole rows of lanes with zeros."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, begin, rows = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        with _cgutils.for_range(builder, rows) as loop:
            for vector in range(VECTORS):
                memory.store(lanes.zero, builder.add(begin, _place(builder, lanes, loop.index, vector)))
        return context.get_dummy_value()

    return _types.void(array, _types.int64, _types.int64), code


@_extending.intrinsic
def add(typing: Any, array: Any, target: Any, source: Any, rows: Any, vectors: Any) -> Any:
    """Adds the rows at `source` to those at `target`."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, target, source, rows, vectors = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        for vector in range(VECTORS):
            wanted = builder.icmp_signed(">", vectors, INDEX(vector))
            with builder.if_then(wanted), _cgutils.for_range(builder, rows) as loop:
                place = _place(builder, lanes, loop.index, vector)
                at = builder.add(target, place)
                memory.store(builder.fadd(memory.load(at), memory.load(builder.add(source, place))), at)
        return context.get_dummy_value()

    whole = _types.int64
    return _types.void(array, whole, whole, whole, whole), code


def _place(builder: Any, lanes: Lanes, row: Any, vector: int) -> Any:
    return builder.add(builder.mul(row, INDEX(VECTORS * lanes.count)), INDEX(vector * lanes.count))


def _slope(builder: Any, lanes: Lanes, kind: Any, below: Any, image: Any) -> Any:
    """Returns phi'(z) where `image` is phi(z)."""
    one = lanes.full(1.0)
    bent = builder.select(builder.fcmp_ordered(">", image, lanes.zero), one, below)
    curved = builder.fsub(one, builder.fmul(image, image))
    risen = builder.fmul(image, builder.fsub(one, image))
    found = builder.select(builder.icmp_signed("==", kind, INDEX(TANH)), curved, bent)
    return builder.select(builder.icmp_signed("==", kind, INDEX(SIGMOID)), risen, found)


@_extending.intrinsic
def prepare(
    typing: Any, array: Any, g: Any, d: Any, scale: Any, n: Any, vectors: Any, kind: Any, slope: Any
) -> Any:
    """Replaces images at `d` by slopes, and g by ``d g`` divided by its largest entry (one for zeros)."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, g, d, scale, n, vectors, kind, slope = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        below = lanes.splat(builder, slope)
        for vector in range(VECTORS):
            with builder.if_then(builder.icmp_signed(">", vectors, INDEX(vector))):
                largest = Sums(builder, lanes, 1)
                with _cgutils.for_range(builder, n) as loop:
                    at = builder.add(g, _place(builder, lanes, loop.index, vector))
                    size, known = lanes.call(builder, "fabs", memory.load(at)), largest[0]
                    largest[0] = builder.select(builder.fcmp_ordered(">", known, size), known, size)  # NaN stays
                nothing = builder.fcmp_ordered("==", largest[0], lanes.zero)
                whole = builder.select(nothing, lanes.full(1.0), largest[0])
                memory.store(whole, builder.add(scale, INDEX(vector * lanes.count)))
                with _cgutils.for_range(builder, n) as loop:
                    place = _place(builder, lanes, loop.index, vector)
                    right, diagonal = builder.add(g, place), builder.add(d, place)
                    factor = _slope(builder, lanes, kind, below, memory.load(diagonal))
                    memory.store(factor, diagonal)
                    memory.store(builder.fdiv(builder.fmul(factor, memory.load(right)), whole), right)
        return context.get_dummy_value()

    whole = _types.int64
    return _types.void(array, whole, whole, whole, whole, whole, whole, array.dtype), code


@_extending.intrinsic
def stretch(typing: Any, array: Any, y: Any, scale: Any, n: Any, vectors: Any) -> Any:
    """Multiplies the rows at `y` by the row at `scale`."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, y, scale, n, vectors = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        for vector in range(VECTORS):
            with builder.if_then(builder.icmp_signed(">", vectors, INDEX(vector))):
                factor = memory.load(builder.add(scale, INDEX(vector * lanes.count)))
                with _cgutils.for_range(builder, n) as loop:
                    at = builder.add(y, _place(builder, lanes, loop.index, vector))
                    memory.store(builder.fmul(memory.load(at), factor), at)
        return context.get_dummy_value()

    whole = _types.int64
    return _types.void(array, whole, whole, whole, whole), code


def _events(builder: Any, memory: Memory, rows: Any, alive: Any, atol: Any, rtol: Any, due: Any) -> Any:
    """Returns which lanes of a vector need a look, and notes their least residuals."""
    lanes, width = memory.lanes, VECTORS * memory.lanes.count
    places = {row: builder.add(rows, INDEX(row * width)) for row in (RESIDUAL, SIZE, L1, LEAST, EVENT)}
    residual, size, l1, least = (memory.load(places[row]) for row in (RESIDUAL, SIZE, L1, LEAST))
    memory.store(builder.select(builder.fcmp_ordered("<", residual, least), residual, least), places[LEAST])
    limit = lanes.larger(builder, atol, builder.fmul(rtol, size))
    calm = builder.fcmp_ordered("<", l1, lanes.full(float("inf")))
    event = builder.or_(builder.fcmp_ordered("<=", residual, limit), builder.not_(calm))
    living = builder.fcmp_ordered(">", memory.load(alive), lanes.zero)
    event = builder.select(due, living, builder.and_(event, living))
    memory.store(builder.select(event, lanes.full(1.0), lanes.zero), places[EVENT])
    return event


@_extending.intrinsic
def mark(typing: Any, array: Any, rows: Any, alive: Any, vectors: Any, atol: Any, rtol: Any, due: Any) -> Any:
    """Marks lanes that need a look: accepted or not finite, or all that are alive if they are `due`.

    Returns whether there are any; `rows` are the single rows of the group.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, rows, alive, vectors, atol, rtol, due = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        atol, rtol = lanes.splat(builder, atol), lanes.splat(builder, rtol)
        bits = lanes.ir.IntType(lanes.count)
        found = _cgutils.alloca_once_value(builder, lanes.ir.Constant(lanes.ir.IntType(1), 0))
        for vector in range(VECTORS):
            with builder.if_then(builder.icmp_signed(">", vectors, INDEX(vector))):
                at, living = (builder.add(place, INDEX(vector * lanes.count)) for place in (rows, alive))
                event = _events(builder, memory, at, living, atol, rtol, due)
                some = builder.icmp_unsigned("!=", builder.bitcast(event, bits), bits(0))
                builder.store(builder.or_(builder.load(found), some), found)
        return builder.load(found)

    whole, number = _types.int64, array.dtype
    return _types.boolean(array, whole, whole, whole, number, number, _types.boolean), code
