"""Vector instructions for Anderson's extrapolation: the least squares problem and the combination.

The points of a cycle are given by a tuple of offsets, whose length is part of its type, so that the loops over
pairs of points are unrolled when a kernel is compiled.
"""

import sys
from itertools import pairwise
from typing import Any

from wellposed.errors import require
from wellposed.kernels.elementary import Lanes
from wellposed.kernels.vectors import INDEX, VECTORS, Memory, Sums, lanes_of, pointer_of

numba = require("numba", extra="fast")
_cgutils = require("numba.core.cgutils", extra="fast")
_extending = require("numba.extending", extra="fast")
_types = numba.types
TINY = sys.float_info.min


def _points(builder: Any, memory: Memory, offsets: list[Any], place: Any) -> list[Any]:
    return [memory.load(builder.add(offset, place)) for offset in offsets]


def _differences(builder: Any, values: list[Any]) -> list[Any]:
    return [builder.fsub(later, earlier) for earlier, later in pairwise(values)]


def _normal_equations(builder: Any, lanes: Lanes, sums: Sums, points: list[Any]) -> None:
    """Adds what one state contributes to the Gram matrix, the right side and the size of the last point."""
    residuals = _differences(builder, points)
    columns = _differences(builder, residuals)
    pairs = [(a, b) for i, a in enumerate(columns) for b in columns[: i + 1]]
    pairs += [(column, residuals[-1]) for column in columns]
    for place, (a, b) in enumerate(pairs):
        sums[place] = lanes.call(builder, "fma", a, b, sums[place])
    sums[len(pairs)] = builder.fadd(sums[len(pairs)], lanes.call(builder, "fabs", points[-1]))


@_extending.intrinsic
def gram(typing: Any, array: Any, slots: Any, out: Any, n: Any, vectors: Any) -> Any:
    """Writes lower triangle, right side and size of the last point, one row of lanes each, from `out` on."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, offsets, out, n, vectors = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        places, width = _cgutils.unpack_tuple(builder, offsets), VECTORS * lanes.count
        depth = len(places) - 2
        count = depth * (depth + 1) // 2 + depth + 1
        for vector in range(VECTORS):
            with builder.if_then(builder.icmp_signed(">", vectors, INDEX(vector))):
                sums = Sums(builder, lanes, count)
                with _cgutils.for_range(builder, n) as loop:
                    place = builder.add(builder.mul(loop.index, INDEX(width)), INDEX(vector * lanes.count))
                    _normal_equations(builder, lanes, sums, _points(builder, memory, places, place))
                for number in range(count):
                    target = INDEX(number * width + vector * lanes.count)
                    memory.store(sums[number], builder.add(out, target))
        return context.get_dummy_value()

    whole = _types.int64
    return _types.void(array, slots, whole, whole, whole), code


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
                places = [INDEX(row * width + vector * lanes.count) for row in range(depth * (depth + 3) // 2)]
                entries = [long(memory.load(builder.add(problem, place))) for place in places]
                shift = wide.full(0.0)
                for a in range(depth):
                    shift = builder.fadd(shift, entries[a * (a + 1) // 2 + a])
                shift = wide.call(builder, "fma", wide.splat(builder, ridge), shift, wide.full(TINY))
                marks = memory.load(builder.add(mask, places[0]))
                chosen = builder.fcmp_ordered(">", marks, lanes.zero)
                for place, weight in zip(places, _factorised(builder, wide, entries, depth, shift), strict=False):
                    value = builder.select(chosen, short(weight), lanes.zero)
                    memory.store(value, builder.add(gamma, place))
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
        places, width = _cgutils.unpack_tuple(builder, offsets), VECTORS * lanes.count
        depth = len(places) - 2
        for vector in range(VECTORS):
            with builder.if_then(builder.icmp_signed(">", vectors, INDEX(vector))):
                rows = [builder.add(gamma, INDEX(j * width + vector * lanes.count)) for j in range(depth + 1)]
                weights = [builder.fneg(memory.load(row)) for row in rows[:-1]]
                size = Sums(builder, lanes, 1)
                with _cgutils.for_range(builder, n) as loop:
                    place = builder.add(builder.mul(loop.index, INDEX(width)), INDEX(vector * lanes.count))
                    points = _points(builder, memory, places, place)
                    jump = points[-1]
                    for weight, image in zip(weights, _differences(builder, points[1:]), strict=True):
                        jump = lanes.call(builder, "fma", weight, image, jump)
                    memory.store(jump, builder.add(places[0], place))
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
                    place = builder.add(builder.mul(loop.index, INDEX(width)), INDEX(vector * lanes.count))
                    values = [memory.load(builder.add(base, place)) for base in (safe, image)]
                    memory.store(builder.select(failed, *values), builder.add(target, place))
        return context.get_dummy_value()

    whole = _types.int64
    return _types.void(array, *(whole,) * 6), code
