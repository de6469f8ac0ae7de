"""The loops over time of a recurrent implicit model, compiled: a whole sequence in one call, there and back.

Elements lie time after time, the longest sequences first (the layout of a packed sequence): the element of
sequence i at time t is column ``offsets[t] + i``. Sequences do not look at each other, so any range of them can be
computed by itself: group by group, each from its first time to its last. Between two times a group does not leave
its lanes; hidden states, equilibria and what goes back in time stay where they are.
"""

from typing import Any

from wellposed.equilibrium.solution import Status
from wellposed.errors import require
from wellposed.kernels.keeping import keeping
from wellposed.kernels.lanes import D, V
from wellposed.kernels.product import multiply_tiles
from wellposed.kernels.sequence_lanes import IMAGE, OUT, POINT, SCALE, load, pack_block, solve_group, store
from wellposed.kernels.sequence_vectors import add, move, prepare, stretch, wipe
from wellposed.kernels.stamp import stamp
from wellposed.kernels.vectors import ROWS, VECTORS, borrow

numba = require("numba", extra="fast")
compiled = numba.njit(nogil=True, error_model="numpy")
kept = keeping(nogil=True, error_model="numpy")

# The files whose functions are compiled into these loops.
PARTS = (
    *("combination", "elementary", "extrapolation", "lanes", "product", "recipe", "vectors"),
    *("sequence_lanes", "sequence_loops", "sequence_vectors"),
)
CONVERGED, MAX_STEPS, NONFINITE = int(Status.CONVERGED), int(Status.MAX_STEPS), int(Status.NONFINITE)


@compiled
def lanes_at(offsets: Any, turn: int, backwards: bool, low: int, high: int) -> Any:
    """Returns the first element of a group at a turn and its number of sequences."""
    t = len(offsets) - 2 - turn if backwards else turn
    if turn < 0:
        return 0, 0
    return offsets[t] + low, max(0, min(high, offsets[t + 1] - offsets[t]) - low)


@compiled
def padded(rows: int) -> int:
    """Returns the number of rows of a packed matrix."""
    return (rows + ROWS - 1) // ROWS * ROWS


@compiled
def enter(work: Any, x: int, n: int, hidden: int, width: int, h0: Any, low: int, begin: int, end: int) -> None:
    """Begins sequences: zeros as states, and their own hidden states."""
    for i in range(begin, end):
        for k in range(n):
            work[x + k * width + i] = 0
        for j in range(h0.shape[1]):
            work[hidden + j * width + i] = h0[low + i, j]


@compiled
def leave(work: Any, carry: int, width: int, first: Any, low: int, begin: int, end: int) -> None:
    """Writes the gradients of first hidden states where sequences begin; nothing goes back farther."""
    for i in range(begin, end):
        for j in range(first.shape[1]):
            first[low + i, j] = work[carry + j * width + i]
            work[carry + j * width + i] = 0


@compiled
def add_bias(work: Any, v: int, width: int, bias: Any) -> None:
    """Adds a bias to the rows at `v`."""
    for k in range(len(bias)):
        for i in range(width):
            work[v + k * width + i] += bias[k]


@compiled
def add_rows(work: Any, at: int, width: int, matrix: Any, column: int, count: int) -> None:
    """Adds `count` elements of every row from `column` on."""
    for row in range(matrix.shape[0]):
        for i in range(count):
            work[at + row * width + i] += matrix[row, column + i]


@compiled
def eliminate(system: Any, y: Any) -> None:
    """Solves a system in place by elimination with row exchanges; `y` is the right side, then the solution."""
    n = len(y)
    for k in range(n):
        pivot = k
        for i in range(k + 1, n):
            if abs(system[i, k]) > abs(system[pivot, k]):
                pivot = i
        for j in range(n):
            system[k, j], system[pivot, j] = system[pivot, j], system[k, j]
        y[k], y[pivot] = y[pivot], y[k]
        for i in range(k + 1, n):
            factor = system[i, k] / system[k, k]
            for j in range(k + 1, n):
                system[i, j] -= factor * system[k, j]
            y[i] -= factor * y[k]
    for k in range(n - 1, -1, -1):
        for j in range(k + 1, n):
            y[k] -= system[k, j] * y[j]
        y[k] /= system[k, k]


@compiled
def finish_directly(
    work: Any, A: Any, d: int, offset: int, y: int, width: int, system: Any, status: Any, column: int, count: int
) -> None:
    """Factorises ``I - d A'`` for samples that were too slow; the last row of `system` is room for a solution."""
    n = A.shape[0]
    for s in range(count):
        if status[column + s] < MAX_STEPS:
            continue
        right = system[n]
        for i in range(n):
            for j in range(n):
                system[i, j] = (1 if i == j else 0) - work[d + i * width + s] * A[j, i]
            right[i] = work[offset + i * width + s]
        eliminate(system[:n], right)
        finite = True
        for i in range(n):
            work[y + i * width + s] = right[i]
            finite &= abs(right[i]) < numba.float64(1e308)
        status[column + s] = CONVERGED if finite else NONFINITE


@compiled
def walk_group(
    work: Any, packed: Any, parts: Any, bias: Any, h0: Any, known: Any, images: Any, H: Any, warm: bool,
    status: Any, steps: Any, lanes: Any, slots: Any, at: Any, room: Any, counts: Any, numbers: Any, offsets: Any,
    backwards: bool, width: int, low: int, high: int,
) -> None:  # fmt: skip
    """Computes the sequences from `low` to `high`, no more than there are lanes."""
    of_B, of_C, inner = parts
    h, n = H.shape[0], slots[1] // width
    both = known.shape[0] - n  # inputs and hidden states
    x, u, hidden = room[POINT], room[POINT] + n * width, room[POINT] + (n + both - h) * width
    wipe(work, 0, len(work) // width)
    before = 0
    for turn in range(len(offsets) - 1):
        column, count = lanes_at(offsets, turn, backwards, low, high)
        if count == 0:
            continue
        vectors = 1 if count * VECTORS <= width else VECTORS
        enter(work, x, n, hidden, width, h0, low, before, count)
        before = count
        load(work, u, width, known, n, both - h, column, count)
        store(work, hidden, width, known, n + both - h, h, column, count)
        multiply_tiles(work, packed, of_B, u, at[V], both, n, width, vectors)
        add_bias(work, at[V], width, bias)
        if warm:
            move(work, x, width, work, slots[0], width, n, VECTORS)
        else:
            wipe(work, slots[0], n)
        solve_group(work, packed, slots, at, room, lanes, width, n, count, counts, numbers, status, steps, column)
        multiply_tiles(work, packed, of_C, x, room[OUT], inner, h, width, vectors)
        store(work, x, width, known, 0, n, column, count)
        store(work, room[IMAGE], width, images, 0, images.shape[0], column, count)
        store(work, room[OUT], width, H, 0, h, column, count)
        move(work, room[OUT], width, work, hidden, width, h, VECTORS)


@compiled
def unwind_group(
    work: Any, packed: Any, parts: Any, A: Any, images: Any, outer: Any, found: Any, first: Any, kind: int,
    slope: float, system: Any, status: Any, steps: Any, lanes: Any, slots: Any, at: Any, room: Any, counts: Any,
    numbers: Any, offsets: Any, backwards: bool, width: int, low: int, high: int,
) -> None:  # fmt: skip
    """Goes back through the sequences from `low` to `high`, no more than there are lanes."""
    of_B, of_C, inner = parts
    n, h = A.shape[0], first.shape[1]
    y, gradient, carry, scale = room[POINT], room[POINT] + n * width, room[OUT], room[SCALE]
    wipe(work, 0, len(work) // width)
    for turn in range(len(offsets) - 2, -1, -1):
        column, count = lanes_at(offsets, turn, backwards, low, high)
        if count == 0:
            continue
        vectors = 1 if count * VECTORS <= width else VECTORS
        load(work, gradient, width, found, n, h, column, count)
        add(work, gradient, carry, h, vectors)
        store(work, gradient, width, found, n, h, column, count)
        multiply_tiles(work, packed, of_C, gradient, at[V], h, n, width, vectors)
        add_rows(work, at[V], width, outer, column, count)
        load(work, at[D], width, images, 0, n, column, count)
        prepare(work, at[V], at[D], scale, n, vectors, kind, slope)
        wipe(work, slots[0], n)
        solve_group(work, packed, slots, at, room, lanes, width, n, count, counts, numbers, status, steps, column)
        if system.shape[0] > 0:
            finish_directly(work, A, at[D], at[V], y, width, system, status, column, count)
        stretch(work, y, scale, n, vectors)
        store(work, y, width, found, 0, n, column, count)
        multiply_tiles(work, packed, of_B, y, carry, inner, h, width, vectors)
        before = min(count, lanes_at(offsets, turn - 1, backwards, low, high)[1])
        leave(work, carry, width, first, low, before, count)


def _make_walk(stamp: int) -> Any:
    """Returns the forward loop; what a function closes over is part of its place in numba's cache."""

    @kept
    def walk(
        A: Any, B: Any, C: Any, feedthrough: Any, bias: Any, h0: Any, known: Any, images: Any, H: Any,
        warm: bool, status: Any, steps: Any, work: Any, packed: Any, lanes: Any, slots: Any, at: Any,
        room: Any, counts: Any, numbers: Any, offsets: Any, backwards: bool, low: int, high: int,
    ) -> None:  # fmt: skip
        """Computes the sequences from `low` to `high`.

        The rows of `known` are states, inputs (given) and hidden states before; `images` may be empty.
        """
        work, packed, lanes, numbers = borrow(work), borrow(packed), borrow(lanes), borrow(numbers)
        known, images, H, status, steps = borrow(known), borrow(images), borrow(H), borrow(status), borrow(steps)
        n, both, width = A.shape[0], B.shape[1], lanes.shape[0] // 3 if stamp else 0
        inner = n + both if feedthrough.shape[0] > 0 else n
        of_B = padded(n) * n
        of_C = of_B + padded(n) * both
        pack_block(packed, 0, n, 0, A, False, 0)
        pack_block(packed, of_B, both, 0, B, False, 0)
        pack_block(packed, of_C, inner, 0, C, False, 0)
        if inner > n:
            pack_block(packed, of_C, inner, n, feedthrough, False, 0)
        for begin in range(low, high, width):
            walk_group(
                work, packed, (of_B, of_C, inner), bias, h0, known, images, H, warm, status, steps, lanes, slots,
                at, room, counts, numbers, offsets, backwards, width, begin, min(high, begin + width),
            )  # fmt: skip

    return walk


def _make_unwind(stamp: int) -> Any:
    """Returns the backward loop."""

    @kept
    def unwind(
        A: Any, B: Any, C: Any, feedthrough: Any, images: Any, outer: Any, found: Any, first: Any, kind: int,
        slope: float, system: Any, status: Any, steps: Any, work: Any, packed: Any, lanes: Any, slots: Any,
        at: Any, room: Any, counts: Any, numbers: Any, offsets: Any, backwards: bool, low: int, high: int,
    ) -> None:  # fmt: skip
        """Solves ``y = d (A'y + g)`` from the last time to the first, for the sequences from `low` to `high`.

        The rows of `found` are y and the gradients of the hidden states (given: those as outputs); `outer` are
        the gradients of the states as outputs, or empty; `first` become those of the first hidden states.
        """
        work, packed, lanes, numbers = borrow(work), borrow(packed), borrow(lanes), borrow(numbers)
        found, images, outer, status, steps = (
            borrow(found), borrow(images), borrow(outer), borrow(status), borrow(steps),
        )  # fmt: skip
        n, h, width = A.shape[0], C.shape[0], lanes.shape[0] // 3 if stamp else 0
        inputs, inner = B.shape[1] - h, n + h if feedthrough.shape[0] > 0 else n
        of_C = padded(n) * n
        of_B = of_C + padded(n) * h
        pack_block(packed, 0, n, 0, A, True, 0)
        pack_block(packed, of_C, h, 0, C, True, 0)
        pack_block(packed, of_B, inner, 0, B, True, inputs)
        if inner > n:
            pack_block(packed, of_B, inner, n, feedthrough, True, inputs)
        for begin in range(low, high, width):
            unwind_group(
                work, packed, (of_B, of_C, inner), A, images, outer, found, first, kind, slope, system, status,
                steps, lanes, slots, at, room, counts, numbers, offsets, backwards, width, begin,
                min(high, begin + width),
            )  # fmt: skip

    return unwind


walk, unwind = _make_walk(stamp(*PARTS)), _make_unwind(stamp(*PARTS))
