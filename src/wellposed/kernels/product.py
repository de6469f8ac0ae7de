"""The product Ax of a group of lanes, for a dense and for a sparse A.

A dense A is one array of packed tiles, a sparse one a tuple of four arrays (`sparse.SparseRows`). Which of them a
kernel takes is decided by the type of its argument, when it is compiled.
"""

from typing import Any

from wellposed.errors import require
from wellposed.kernels.elementary import Lanes
from wellposed.kernels.vectors import (
    DOUBLE,
    INDEX,
    ROWS,
    VECTORS,
    Memory,
    Sums,
    lanes_of,
    pointer_of,
    shifted,
    tile_one,
    tile_one_narrow,
    tile_two,
    tile_two_narrow,
)

numba = require("numba", extra="fast")
_cgutils = require("numba.core.cgutils", extra="fast")
_extending = require("numba.extending", extra="fast")
_types = numba.types
compiled = numba.njit(nogil=True, error_model="numpy")

QUAD = 4  # entries of a row whose products are added up apart; rows are padded to a multiple


def _row_sum(builder: Any, sums: Sums, vectors: int, vector: int) -> Any:
    parts = [sums[entry * vectors + vector] for entry in range(QUAD)]
    return builder.fadd(builder.fadd(parts[0], parts[1]), builder.fadd(parts[2], parts[3]))


def _rows(vectors: int, alone: bool) -> Any:
    """Returns the product of sparse rows with a group: every entry of A meets its state in all lanes at once.

    With `alone` the group is one sample, whose states lie one after the other at `x`; its sums are those that it
    would have in company, bit for bit.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        full = lanes_of(signature.args[0])
        lanes, width = Lanes(full.ir, full.bits, 1) if alone else full, VECTORS * full.count
        kinds, (x, y, first, last) = signature.args[:4], arguments[4:]
        work, values, columns, starts = (
            pointer_of(context, builder, kind, part) for kind, part in zip(kinds, arguments[:4], strict=True)
        )
        memory, entries = Memory(builder, lanes, work), Memory(builder, lanes, values)
        with _cgutils.for_range_slice(builder, first, last, INDEX(1), INDEX) as (row, _):
            sums = Sums(builder, lanes, QUAD * vectors)
            begin, end = (builder.load(builder.gep(starts, [shifted(builder, row, k)])) for k in (0, 1))
            with _cgutils.for_range_slice(builder, begin, end, INDEX(QUAD), INDEX) as (at, _):
                for entry in range(QUAD):
                    place = shifted(builder, at, entry)
                    state = builder.zext(builder.load(builder.gep(columns, [place])), INDEX)
                    base = builder.add(x, state if alone else builder.mul(state, INDEX(width)))
                    factor = entries.spread(place)
                    for vector in range(vectors):
                        value = memory.load(shifted(builder, base, vector * lanes.count))
                        spot = entry * vectors + vector
                        sums[spot] = lanes.call(builder, "fma", factor, value, sums[spot])
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
        room: for n numbers; used by a sparse A where the group is one sample.
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
