"""Batches of small LU factorisations, one matrix a lane.

LAPACK factorises one small matrix after the other, with short loops and a call each. Here the matrices of a group
lie side by side, ``entry[(row * size + column) * lanes + lane]``, and every instruction serves all of them. There
is no pivoting: the systems of a contraction are diagonally dominant up to scaling (or principal pivots of such),
where it is not needed; callers check the result.
"""

from typing import Any

import numpy as np

from wellposed.errors import require
from wellposed.kernels.cpu.cache import njit_cached
from wellposed.kernels.cpu.simd import INDEX, VECTOR_BYTES, Memory, Sums, lanes_of, pointer_of

numba = require("numba", extra="fast")
_cgutils = require("numba.core.cgutils", extra="fast")
_extending = require("numba.extending", extra="fast")
_types = numba.types
compiled = njit_cached(nogil=True, error_model="numpy")

PIVOTS = 4  # rows that are subtracted from another at once


def aligned(size: int, dtype: Any) -> Any:
    """Allocates a flat buffer that starts at a vector's boundary.

    Example:
        >>> aligned(3, np.float32).ctypes.data % VECTOR_BYTES
        0
    """
    item = np.dtype(dtype).itemsize
    raw = np.empty(size + VECTOR_BYTES // item, dtype)
    return raw[-raw.ctypes.data % VECTOR_BYTES // item :][:size]


def _less(builder: Any, lanes: Any, total: Any, a: Any, b: Any) -> Any:
    return lanes.call(builder, "fma", builder.fneg(a), b, total)


def _multipliers(builder: Any, lanes: Any, memory: Memory, row: Any, pivots: list[Any]) -> list[Any]:
    """Computes and stores the factors that eliminate a row's entries below the pivots; diagonals are inverted."""
    offsets = [INDEX(offset * lanes.count) for offset in range(len(pivots))]
    entries = [memory.load(builder.add(row, offset)) for offset in offsets]
    for i, pivot in enumerate(pivots):
        entries[i] = builder.fmul(entries[i], memory.load(builder.add(pivot, offsets[i])))
        memory.store(entries[i], builder.add(row, offsets[i]))
        for j in range(i + 1, len(pivots)):
            entries[j] = _less(builder, lanes, entries[j], entries[i], memory.load(builder.add(pivot, offsets[j])))
    return entries


def _elimination(count: int, rows: int) -> Any:
    """Builds the instruction that subtracts `count` pivot rows from `rows` consecutive rows."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, row, pivot, size, columns = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        width = builder.mul(size, INDEX(lanes.count))
        pivots = [builder.add(pivot, builder.mul(width, INDEX(i))) for i in range(count)]
        targets = [builder.add(row, builder.mul(width, INDEX(i))) for i in range(rows)]
        factors = [_multipliers(builder, lanes, memory, target, pivots) for target in targets]
        with _cgutils.for_range(builder, columns) as loop:
            offset = builder.add(builder.mul(loop.index, INDEX(lanes.count)), INDEX(count * lanes.count))
            values = [memory.load(builder.add(pivot, offset)) for pivot in pivots]
            for target, multipliers in zip(targets, factors, strict=True):
                total = memory.load(builder.add(target, offset))
                for factor, value in zip(multipliers, values, strict=True):
                    total = _less(builder, lanes, total, factor, value)
                memory.store(total, builder.add(target, offset))
        return context.get_dummy_value()

    @_extending.intrinsic
    def eliminate(typing: Any, array: Any, row: Any, pivot: Any, size: Any, columns: Any) -> Any:
        return _types.void(array, *(_types.int64,) * 4), code

    return eliminate


_eliminate_1, _eliminate_2, _eliminate_3 = (_elimination(count, 1) for count in (1, 2, 3))
_eliminate_4, _eliminate_twins = _elimination(PIVOTS, 1), _elimination(PIVOTS, 2)


@_extending.intrinsic
def _subtract_dot(typing: Any, array: Any, target: Any, row: Any, vector: Any, count: Any) -> Any:
    """``target -= sum_j row[j] vector[j]``, lane by lane."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, target, row, vector, count = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        sums = Sums(builder, lanes, 1)
        sums[0] = memory.load(target)
        with _cgutils.for_range(builder, count) as loop:
            offset = builder.mul(loop.index, INDEX(lanes.count))
            pair = [memory.load(builder.add(base, offset)) for base in (row, vector)]
            sums[0] = _less(builder, lanes, sums[0], *pair)
        memory.store(sums[0], target)
        return context.get_dummy_value()

    return _types.void(array, *(_types.int64,) * 4), code


@_extending.intrinsic
def _subtract_multiple(typing: Any, array: Any, vector: Any, row: Any, factor: Any, count: Any) -> Any:
    """``vector[j] -= factor row[j]``, lane by lane."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, vector, row, factor, count = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        known = memory.load(factor)
        with _cgutils.for_range(builder, count) as loop:
            offset = builder.mul(loop.index, INDEX(lanes.count))
            target = builder.add(vector, offset)
            value = memory.load(builder.add(row, offset))
            memory.store(_less(builder, lanes, memory.load(target), known, value), target)
        return context.get_dummy_value()

    return _types.void(array, *(_types.int64,) * 4), code


@compiled
def _fill(work: Any, at: int, W: Any, index: Any, delta: Any, first: int, size: int, lanes: int) -> None:
    """Writes ``I - delta W[P, P]`` of the samples from `first` on; lanes and rows without a sample get I."""
    n = W.shape[0]
    flat = W.reshape(-1)
    chosen = np.zeros((size, lanes), np.int64)
    weight = np.zeros((size, lanes), W.dtype)
    for lane in range(min(lanes, index.shape[0] - first)):
        for row in range(size):
            chosen[row, lane] = index[first + lane, row]
            weight[row, lane] = -delta[first + lane, row]
    for row in range(size):
        for column in range(size):
            for lane in range(lanes):
                work[at + lane] = weight[row, lane] * flat[chosen[row, lane] * n + chosen[column, lane]]
            at += lanes
        start = at - (size - row) * lanes
        for lane in range(lanes):
            work[start + lane] += 1


@compiled
def _invert(work: Any, at: int, lanes: int) -> None:
    for lane in range(lanes):
        work[at + lane] = 1 / work[at + lane]


@compiled
def _reduce(work: Any, at: int, size: int, lanes: int) -> None:
    """Factorises one group in place: L below the diagonal, the inverted diagonal and U above."""
    width = size * lanes
    for start in range(0, size, PIVOTS):  # rows and columns before `start` are factorised
        pivot = at + start * (width + lanes)
        for row in range(start, min(start + PIVOTS, size)):
            target = at + row * width + start * lanes
            if row == start + 1:
                _eliminate_1(work, target, pivot, size, size - start - 1)
            elif row == start + 2:
                _eliminate_2(work, target, pivot, size, size - start - 2)
            elif row == start + 3:
                _eliminate_3(work, target, pivot, size, size - start - 3)
            _invert(work, at + row * (width + lanes), lanes)
        row = start + PIVOTS
        while row < size:
            target = at + row * width + start * lanes
            if row + 1 < size:
                _eliminate_twins(work, target, pivot, size, size - start - PIVOTS)
                row += 2
            else:
                _eliminate_4(work, target, pivot, size, size - start - PIVOTS)
                row += 1


@compiled
def _substitute(work: Any, at: int, vector: int, size: int, lanes: int) -> None:
    """Solves for one right side a lane, in place."""
    width = size * lanes
    for row in range(size):
        _subtract_dot(work, vector + row * lanes, at + row * width, vector, row)
    for row in range(size - 1, -1, -1):
        target = vector + row * lanes
        diagonal = at + row * (width + lanes)
        _subtract_dot(work, target, diagonal + lanes, target + lanes, size - 1 - row)
        for lane in range(lanes):
            work[target + lane] *= work[diagonal + lane]


@compiled
def _substitute_transposed(work: Any, at: int, vector: int, size: int, lanes: int) -> None:
    """Solves the transposed systems, in place."""
    width = size * lanes
    for row in range(size):
        target = vector + row * lanes
        diagonal = at + row * (width + lanes)
        for lane in range(lanes):
            work[target + lane] *= work[diagonal + lane]
        _subtract_multiple(work, target + lanes, diagonal + lanes, target, size - 1 - row)
    for row in range(size - 1, -1, -1):
        _subtract_multiple(work, vector, at + row * width, vector + row * lanes, row)


@compiled
def factorise(W: Any, index: Any, delta: Any, sizes: Any, offsets: Any, work: Any, lanes: int) -> None:
    """Factorises ``I - delta W[P, P]`` for all samples, ordered by size.

    Args:
        W: ``(n, n)``.
        index: ``(B, k)`` the states P; `delta` their weights, zero where a sample has fewer.
        sizes: of the systems, one a group of `lanes` samples; `offsets` where each lies in `work`.
    """
    for group in range(sizes.shape[0]):
        _fill(work, offsets[group], W, index, delta, group * lanes, sizes[group], lanes)
        _reduce(work, offsets[group], sizes[group], lanes)


@compiled
def substitute(work: Any, right: Any, sizes: Any, offsets: Any, lanes: int, transpose: bool) -> None:
    """Solves all systems, or the transposed ones, for `right` ``(B, k)``, in place.

    Each group has room for its right side after its matrix.
    """
    for group in range(sizes.shape[0]):
        size, at = sizes[group], offsets[group]
        vector, first = at + size * size * lanes, group * lanes
        count = min(lanes, right.shape[0] - first)
        for row in range(size):
            for lane in range(lanes):
                work[vector + row * lanes + lane] = right[first + lane, row] if lane < count else 0
        if transpose:
            _substitute_transposed(work, at, vector, size, lanes)
        else:
            _substitute(work, at, vector, size, lanes)
        for row in range(size):
            for lane in range(count):
                right[first + lane, row] = work[vector + row * lanes + lane]


@compiled
def collect(delta: Any, least: float, order: Any, counts: Any, index: Any, weight: Any) -> None:
    """Lists per sample of `order` the states where ``|delta| > least``, and the weights there."""
    for row in range(order.shape[0]):
        sample, count = order[row], 0
        for column in range(delta.shape[1]):
            if abs(delta[sample, column]) > least:
                index[row, count], weight[row, count] = column, delta[sample, column]
                count += 1
        counts[row] = count
        index[row, count:], weight[row, count:] = 0, 0
