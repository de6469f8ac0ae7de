"""The loops over time of a recurrent implicit model, compiled: a whole sequence in one call, forward and backward.

Elements are stored time after time, the longest sequences first (the layout of a packed sequence): the element of
sequence i at time t is column ``offsets[t] + i``. Sequences are independent, so any range of them can be computed
by itself: group by group, each from its first time to its last. Between two times a group stays in its lanes, with
its hidden states, equilibria and the gradients that go back in time.

A group works in the workspace of `cpu.solve`, one sequence a lane, and in rows of its own behind it. What solves
leave is stored with one column an element: neighbours in a group are neighbours in memory. Tensors are given by
their addresses. `move`, `prepare` and `mark` are vector instructions between two solves: rows to and from memory,
slopes and scales; `solve_group` is the solve of one time; `forward_group` and `backward_group` are the loops over
time, forward and backward.
"""

from typing import Any

import numpy as np

from wellposed.equilibrium.loop import PERIOD
from wellposed.equilibrium.solution import Status
from wellposed.errors import require
from wellposed.kernels.cpu.cache import njit_cached, source_key
from wellposed.kernels.cpu.engine import SequenceRows
from wellposed.kernels.cpu.simd import (
    INDEX,
    ROWS,
    VECTORS,
    Lanes,
    Memory,
    Sums,
    activate,
    array_at,
    borrow,
    choose,
    lanes_of,
    move,
    multiply_tiles,
    pointer_of,
    row_offset,
    wipe,
)
from wellposed.kernels.cpu.solve import (
    ALIVE,
    EVENT,
    FAILURES,
    FIRST,
    JUMPED,
    L1,
    LEAST,
    RESIDUAL,
    REST,
    SAMPLE,
    SINCE,
    SIZE,
    advance,
    eliminate,
    judge_lane,
    mark,
    pack_tiles,
    unpack,
)
from wellposed.kernels.spec import SIGMOID, TANH, TOLERANCE

numba = require("numba", extra="fast")
_cgutils = require("numba.core.cgutils", extra="fast")
_extending = require("numba.extending", extra="fast")
_types = numba.types


def _slope(builder: Any, lanes: Lanes, kind: Any, below: Any, image: Any) -> Any:
    """Returns phi'(z) where `image` is phi(z)."""
    one = lanes.full(1.0)
    bent = builder.select(builder.fcmp_ordered(">", image, lanes.zero), one, below)
    curved = builder.fsub(one, builder.fmul(image, image))
    risen = builder.fmul(image, builder.fsub(one, image))
    slope = builder.select(builder.icmp_signed("==", kind, INDEX(TANH)), curved, bent)
    return builder.select(builder.icmp_signed("==", kind, INDEX(SIGMOID)), risen, slope)


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
                    at = builder.add(g, row_offset(builder, lanes, loop.index, vector))
                    size, known = lanes.call(builder, "fabs", memory.load(at)), largest[0]
                    largest[0] = builder.select(builder.fcmp_ordered(">", known, size), known, size)  # NaN stays
                nothing = builder.fcmp_ordered("==", largest[0], lanes.zero)
                whole = builder.select(nothing, lanes.full(1.0), largest[0])
                memory.store(whole, builder.add(scale, INDEX(vector * lanes.count)))
                with _cgutils.for_range(builder, n) as loop:
                    offset = row_offset(builder, lanes, loop.index, vector)
                    right, diagonal = builder.add(g, offset), builder.add(d, offset)
                    factor = _slope(builder, lanes, kind, below, memory.load(diagonal))
                    memory.store(factor, diagonal)
                    memory.store(builder.fdiv(builder.fmul(factor, memory.load(right)), whole), right)
        return context.get_dummy_value()

    whole = _types.int64
    return _types.void(array, whole, whole, whole, whole, whole, whole, array.dtype), code


@_extending.intrinsic
def scale_rows(typing: Any, array: Any, y: Any, scale: Any, n: Any, vectors: Any) -> Any:
    """Multiplies the rows at `y` by the row at `scale`."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, y, scale, n, vectors = arguments
        lanes = lanes_of(signature.args[0])
        memory = Memory(builder, lanes, pointer_of(context, builder, signature.args[0], array))
        for vector in range(VECTORS):
            with builder.if_then(builder.icmp_signed(">", vectors, INDEX(vector))):
                factor = memory.load(builder.add(scale, INDEX(vector * lanes.count)))
                with _cgutils.for_range(builder, n) as loop:
                    at = builder.add(y, row_offset(builder, lanes, loop.index, vector))
                    memory.store(builder.fmul(memory.load(at), factor), at)
        return context.get_dummy_value()

    whole = _types.int64
    return _types.void(array, whole, whole, whole, whole), code


compiled = numba.njit(nogil=True, error_model="numpy")

RUNNING, CONVERGED = int(Status.RUNNING), int(Status.CONVERGED)
MAX_STEPS, NONFINITE = int(Status.MAX_STEPS), int(Status.NONFINITE)
# `rows_of` names the rows of a group behind those of `cpu.solve`: results (with inputs and hidden states behind
# them), images of the last points and their residuals, a product, and a single row with the scales of
# gradients.
#
#   n + p + h rows    n + 1 rows       h rows         1 row
#   rows_of.point     rows_of.image    rows_of.out    rows_of.scale


@compiled
def load(work: Any, at: int, width: int, matrix: Any, first: int, rows: int, column: int, count: int) -> None:
    """Reads rows of `count` elements from `column` on into lanes."""
    stride, half = matrix.shape[1], width // VECTORS
    if count in (half, width):
        move(matrix, first * stride + column, stride, work, at, width, rows, count // half)
        return
    for row in range(rows):
        for i in range(count):
            work[at + row * width + i] = matrix[first + row, column + i]


@compiled
def store(work: Any, at: int, width: int, matrix: Any, first: int, rows: int, column: int, count: int) -> None:
    """Writes rows of lanes to `count` elements from `column` on."""
    stride, half = matrix.shape[1], width // VECTORS
    if count in (half, width):
        move(work, at, width, matrix, first * stride + column, stride, rows, count // half)
        return
    for row in range(rows):
        for i in range(count):
            matrix[first + row, column + i] = work[at + row * width + i]


@compiled
def load_rows(work: Any, at: int, width: int, matrix: Any, first: int, count: int, add: bool) -> None:
    """Reads `count` elements, which are rows of a matrix from `first` on, into lanes, or adds them."""
    for i in range(count):
        for k in range(matrix.shape[1]):
            known = work[at + k * width + i] if add else matrix.dtype.type(0)
            work[at + k * width + i] = known + matrix[first + i, k]


@compiled
def store_rows(work: Any, at: int, width: int, matrix: Any, first: int, count: int) -> None:
    """Writes `count` elements from lanes to rows of a matrix from `first` on."""
    for i in range(count):
        for k in range(matrix.shape[1]):
            matrix[first + i, k] = work[at + k * width + i]


@compiled
def begin(work: Any, at: Any, lanes: Any, width: int, count: int) -> None:
    """Starts a new sample in each of the first `count` lanes; the others are idle."""
    rows = at.single
    for i in range(width):
        lanes[SAMPLE * width + i] = i if i < count else -1
        work[rows + ALIVE * width + i] = 1 if i < count else 0
        work[rows + LEAST * width + i] = np.inf
    for row in (REST, FAILURES, SINCE, JUMPED):
        wipe(work, rows + row * width, 1)


@compiled
def finish(
    work: Any, x: int, y: int, at: Any, rows_of: Any, lanes: Any, width: int, now: int, n: int, counts: Any,
    numbers: Any, status: Any, steps: Any, first: int, vectors: int,
) -> int:  # fmt: skip
    """Stores images of the marked points that are accepted in a step, and other points that end; returns how many.

    The image of an accepted point is nearer to the equilibrium, since the map contracts.
    """
    rows, plain = at.single, counts.rule == TOLERANCE
    done, accepted, events = 0, 0, rows + EVENT * width
    for i in range(vectors * (width // VECTORS)):
        if work[events + i] == 0:
            continue
        limit = max(numbers.atol, numbers.rtol * work[rows + SIZE * width + i])
        outcome = CONVERGED
        if not (plain and work[rows + L1 * width + i] < np.inf and work[rows + RESIDUAL * width + i] <= limit):
            outcome = judge_lane(work, x, at, width, i, now, n, counts, numbers)
        if outcome == RUNNING:
            work[events + i] = 0
            continue
        done += 1
        accepted += outcome == CONVERGED
        l1 = work[rows + L1 * width + i]  # which keeps NaN
        work[rows_of.image + n * width + i] = work[rows + RESIDUAL * width + i] if l1 == l1 else l1
        status[first + i], steps[first + i] = outcome, now + 1
        lanes[SAMPLE * width + i], work[rows + ALIVE * width + i] = -1, 0
    if done > 0:
        choose(work, rows_of.image, y, rows_of.image, events, n, vectors)
        choose(work, rows_of.point, y, rows_of.point, events, n, vectors)
    if done > accepted:
        for i in range(vectors * (width // VECTORS)):
            if work[events + i] > 0 and status[first + i] != CONVERGED:
                for k in range(n):
                    work[rows_of.point + k * width + i] = work[x + k * width + i]
    return done


@compiled
def solve_group(
    work: Any, packed: Any, slots: Any, at: Any, rows_of: Any, lanes: Any, width: int, n: int, count: int,
    counts: Any, numbers: Any, status: Any, steps: Any, first: int, at_zero: bool,
) -> None:  # fmt: skip
    """Solves for the samples in the first `count` lanes, from the points in the first slot, perhaps all zero.

    The steps are those of `kernels.cpu.solve`, but all samples begin together, so that the last of them ends the
    solve in the middle of a cycle.
    """
    memory, plain, every = len(slots) - 2, counts.memory == 0, counts.rule != TOLERANCE
    vectors = 1 if count * VECTORS <= width else VECTORS
    begin(work, at, lanes, width, count)
    zero = count - count  # not a constant, for which numba would compile everything once more
    now, phase, origin, left = zero, zero, zero, count
    # Before every step the iterates are at slots[origin] and `left` lanes are alive; the results of the others and
    # the images of their last points are at rows_of.point and rows_of.image.
    residual, earliest, least = at.single + RESIDUAL * width, at.single + FIRST * width, at.single + LEAST * width
    while True:
        target = 1 - origin if plain else 1 if phase > memory else origin + 1
        x, y = slots[origin], slots[target]
        if now == 0 and at_zero:
            wipe(work, y, n)
        else:
            multiply_tiles(work, packed, 0, x, y, n, n, width, vectors)
        activate(work, y, x, at.v, at.d, at.single, n, vectors, counts.kind, numbers.slope)
        if now == 0:
            move(work, residual, width, work, earliest, width, 1, VECTORS)
        # After one period nothing can have stopped falling: its least residuals are stored, no lane is judged.
        first_period = now + 1 == PERIOD and not every and counts.max_steps > PERIOD
        due = every or ((now + 1) % PERIOD == 0 and not first_period) or now + 1 == counts.max_steps
        if mark(work, at.single, vectors, numbers.atol, numbers.rtol, due):
            left -= finish(
                work, x, y, at, rows_of, lanes, width, now, n, counts, numbers, status, steps, first, vectors
            )
            if left == 0:
                return
        if first_period:
            move(work, least, width, work, at.minima, width, 1, VECTORS)
            for i in range(width):
                work[least + i] = np.inf
        now += 1
        if plain:
            origin = target
        elif phase < memory - 1:
            phase, origin = phase + 1, phase + 1
        else:
            phase, origin = advance(work, slots, at, lanes, width, n, numbers, vectors, phase)


cached = njit_cached(nogil=True, error_model="numpy")


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
def begin_sequences(
    work: Any, x: int, n: int, hidden: int, width: int, h0: Any, low: int, begin: int, end: int
) -> None:
    """Starts sequences in the lanes from `begin` to `end`: states zero, hidden states of `h0`."""
    for i in range(begin, end):
        for k in range(n):
            work[x + k * width + i] = 0
        for j in range(h0.shape[1]):
            work[hidden + j * width + i] = h0[low + i, j]


@compiled
def end_sequences(work: Any, carry: int, width: int, first: Any, low: int, begin: int, end: int) -> None:
    """Writes the gradients of first hidden states where sequences begin, and clears what goes back in time."""
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
def reset_zero_inputs(work: Any, v: int, x: int, n: int, width: int) -> None:
    """Starts from zero where v is zero: states would decay towards it for ever; no residual is small beside 0."""
    for i in range(width):
        k = 0
        while k < n and work[v + k * width + i] == 0:
            k += 1
        if k == n:
            for j in range(n):
                work[x + j * width + i] = 0


@compiled
def finish_directly(
    work: Any, A: Any, d: int, offset: int, y: int, width: int, system: Any, status: Any, column: int, count: int
) -> None:
    """Factorises ``I - d A'`` for samples that were too slow; the last row of `system` is for a solution."""
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
def forward_group(
    work: Any, packed: Any, layout: Any, bias: Any, data: Any, h0: Any, known: Any, images: Any, hiddens: Any,
    warm: bool, status: Any, steps: Any, lanes: Any, slots: Any, at: Any, rows_of: Any, counts: Any, numbers: Any,
    offsets: Any, backwards: bool, width: int, low: int, high: int,
) -> int:  # fmt: skip
    """Computes the sequences from `low` to `high`, no more than there are lanes; returns their largest status.

    Before every turn the rows at rows_of.point are the latest states (`x`) and hidden states (`hidden`) of the
    first `before` lanes.
    """
    of_B, of_C, inner = layout
    h, n = hiddens.shape[1], slots[1] // width
    both = known.shape[0] - n  # inputs and hidden states
    x, u, hidden = rows_of.point, rows_of.point + n * width, rows_of.point + (n + both - h) * width
    wipe(work, 0, at.minima // width)
    wipe(work, x, (len(work) - x) // width)
    before, worst = 0, 0
    for turn in range(len(offsets) - 1):
        column, count = lanes_at(offsets, turn, backwards, low, high)
        if count == 0:
            continue
        vectors = 1 if count * VECTORS <= width else VECTORS
        begin_sequences(work, x, n, hidden, width, h0, low, before, count)
        before = count
        load_rows(work, u, width, data, column, count, False)
        store(work, u, width, known, n, both, column, count)
        multiply_tiles(work, packed, of_B, u, at.v, both, n, width, vectors)
        add_bias(work, at.v, width, bias)
        if warm:
            move(work, x, width, work, slots[0], width, n, VECTORS)
            reset_zero_inputs(work, at.v, slots[0], n, width)
        else:
            wipe(work, slots[0], n)
        solve_group(
            work, packed, slots, at, rows_of, lanes, width, n, count, counts, numbers, status, steps, column,
            not warm,
        )  # fmt: skip
        multiply_tiles(work, packed, of_C, x, rows_of.out, inner, h, width, vectors)
        store(work, x, width, known, 0, n, column, count)
        store(work, rows_of.image, width, images, 0, images.shape[0], column, count)
        store_rows(work, rows_of.out, width, hiddens, column, count)
        move(work, rows_of.out, width, work, hidden, width, h, VECTORS)
        worst = max(worst, largest_status(status, column, count))
    return worst


@compiled
def backward_group(
    work: Any, packed: Any, layout: Any, A: Any, images: Any, every: Any, last: Any, outer: Any, adjoint: Any,
    first: Any, kind: int, slope: float, system: Any, status: Any, steps: Any, lanes: Any, slots: Any, at: Any,
    rows_of: Any, counts: Any, numbers: Any, offsets: Any, backwards: bool, width: int, low: int, high: int,
) -> int:  # fmt: skip
    """Computes gradients for the sequences from `low` to `high`, no more than lanes; returns the largest status.

    Before every turn `carry` is the gradient of the hidden states by later times, zero in lanes that have none,
    and the first `after` lanes have had a later time.
    """
    of_B, of_C, inner = layout
    n, h = A.shape[0], first.shape[1]
    y, gradient, carry, scale = rows_of.point, rows_of.point + n * width, rows_of.out, rows_of.scale
    wipe(work, 0, at.minima // width)
    wipe(work, y, (len(work) - y) // width)
    after, worst = 0, 0
    for turn in range(len(offsets) - 2, -1, -1):
        column, count = lanes_at(offsets, turn, backwards, low, high)
        if count == 0:
            continue
        vectors = 1 if count * VECTORS <= width else VECTORS
        move(work, carry, width, work, gradient, width, h, VECTORS)
        if every.shape[0] > 0:
            load_rows(work, gradient, width, every, column, count, True)
        if last.shape[0] > 0:
            for i in range(after, count):
                for j in range(h):
                    work[gradient + j * width + i] += last[low + i, j]
        after = count
        store(work, gradient, width, adjoint, n, h, column, count)
        multiply_tiles(work, packed, of_C, gradient, at.v, h, n, width, vectors)
        if outer.shape[0] > 0:
            load_rows(work, at.v, width, outer, column, count, True)
        load(work, at.d, width, images, 0, n, column, count)
        prepare(work, at.v, at.d, scale, n, vectors, kind, slope)
        wipe(work, slots[0], n)
        solve_group(
            work, packed, slots, at, rows_of, lanes, width, n, count, counts, numbers, status, steps, column,
            True,
        )  # fmt: skip
        if system.shape[0] > 0:
            finish_directly(work, A, at.d, at.v, y, width, system, status, column, count)
        scale_rows(work, y, scale, n, vectors)
        store(work, y, width, adjoint, 0, n, column, count)
        multiply_tiles(work, packed, of_B, y, carry, inner, h, width, vectors)
        before = min(count, lanes_at(offsets, turn - 1, backwards, low, high)[1])
        end_sequences(work, carry, width, first, low, before, count)
        worst = max(worst, largest_status(status, column, count))
    return worst


@compiled
def largest_status(status: Any, first: int, count: int) -> int:
    """Returns the largest of some statuses."""
    worst = 0
    for i in range(first, first + count):
        worst = max(worst, status[i])
    return worst


@compiled
def buffers(work: int, rows: Any, width: int, like: Any) -> Any:
    """Returns the parts of one buffer, each aligned to vectors: group, packed matrices and lanes, and its rows."""
    own, size, matrices = SequenceRows(rows[0], rows[1], rows[2], rows[3]), rows[4], rows[5]
    packed, lanes = work + size * like.itemsize, work + (size + matrices) * like.itemsize
    group, whole = array_at(work, (size,), like), array_at(lanes, (2 * width,), np.int64)
    return group, array_at(packed, (matrices,), like), whole, own


def _make_forward(key: int) -> Any:
    """Returns the forward loop; what a function closes over is part of its key in numba's cache."""

    @cached
    def forward(
        tensors: Any, sizes: Any, warm: bool, status: int, steps: int, work: int, slots: Any, layout: Any,
        rows: Any, parameters: Any, offsets: Any, backwards: bool, low: int, high: int,
    ) -> int:  # fmt: skip
        """Computes the sequences from `low` to `high`; returns their largest status.

        Args:
            tensors: addresses of A, B, C, D, bias, inputs and first hidden states, which are given, and of
                `known` (rows: states, inputs, hidden states before), images with residuals, and hidden states,
                which are computed; zero for one that is missing.
            sizes: states, inputs, hidden states, sequences, elements, and how far rows of `known` are apart.
            warm: whether solves start from the state before.
            status, steps, work: addresses.
            slots, layout, parameters: of `cpu.engine.Plan`.
            rows: of `cpu.engine.SequenceRows`, where they end, and the size of the packed matrices.
        """
        (n, p, h, batch, elements, stride), like, width = sizes, parameters, layout[11] if key else 0
        at, counts, numbers = unpack(layout, like)
        group, packed, lanes, rows_of = buffers(work, rows, width, like)
        states, evaluations = array_at(status, (elements,), np.int8), array_at(steps, (elements,), np.int64)
        both = p + h
        A, B = array_at(tensors[0], (n, n), like), array_at(tensors[1], (n, both), like)
        C, feedthrough = array_at(tensors[2], (h, n), like), array_at(tensors[3], (h, both), like)
        bias = array_at(tensors[4], (n if tensors[4] != 0 else 0,), like)
        data, h0 = array_at(tensors[5], (elements, p), like), array_at(tensors[6], (batch, h), like)
        known = array_at(tensors[7], (n + both, stride), like)
        images = array_at(tensors[8], (n + 1 if tensors[8] != 0 else 0, stride), like)
        hiddens = array_at(tensors[9], (elements, h), like)
        inner = n + both if tensors[3] != 0 else n
        of_B = padded(n) * n
        of_C = of_B + padded(n) * both
        pack_tiles(packed, 0, n, A, False, 0, n, 0, n)
        pack_tiles(packed, of_B, both, B, False, 0, n, 0, both)
        pack_tiles(packed, of_C, inner, C, False, 0, h, 0, n)
        pack_tiles(packed, of_C + n * ROWS, inner, feedthrough, False, 0, h, 0, inner - n)
        worst = 0
        for begin in range(low, high, width):
            worst = max(worst, forward_group(
                group, packed, (of_B, of_C, inner), bias, data, h0, known, images, hiddens, warm, states,
                evaluations, lanes, slots, at, rows_of, counts, numbers, borrow(offsets), backwards, width, begin,
                min(high, begin + width),
            ))  # fmt: skip
        return worst

    return forward


def _make_backward(key: int) -> Any:
    """Returns the backward loop."""

    @cached
    def backward(
        tensors: Any, sizes: Any, kind: int, slope: float, direct: bool, status: int, steps: int, work: int,
        slots: Any, layout: Any, rows: Any, parameters: Any, offsets: Any, backwards: bool, low: int, high: int,
    ) -> int:  # fmt: skip
        """Solves ``y = d (A'y + g)`` from the last time to the first, for the sequences from `low` to `high`.

        Args:
            tensors: addresses of A, B, C, D, images and the gradients of all hidden states, the last ones and the
                states, which are given, and of `adjoint` (rows: y and the total gradients of the hidden states)
                and the gradients of the first hidden states, which are computed; zero for one that is missing.
            sizes: states, inputs, hidden states, sequences, elements, and how far rows of `adjoint` are apart.
            kind, slope: the activation.
            direct: whether systems that are slow are factorised.

        The other arguments and the result are those of `forward`.
        """
        (n, inputs, h, batch, elements, stride), like, width = sizes, parameters, layout[11] if key else 0
        at, counts, numbers = unpack(layout, like)
        group, packed, lanes, rows_of = buffers(work, rows, width, like)
        states, evaluations = array_at(status, (elements,), np.int8), array_at(steps, (elements,), np.int64)
        A, B = array_at(tensors[0], (n, n), like), array_at(tensors[1], (n, inputs + h), like)
        C, feedthrough = array_at(tensors[2], (h, n), like), array_at(tensors[3], (h, inputs + h), like)
        images = array_at(tensors[4], (n, stride), like)
        every = array_at(tensors[5], (elements if tensors[5] != 0 else 0, h), like)
        last = array_at(tensors[6], (batch if tensors[6] != 0 else 0, h), like)
        outer = array_at(tensors[7], (elements if tensors[7] != 0 else 0, n), like)
        adjoint, first = array_at(tensors[8], (n + h, stride), like), array_at(tensors[9], (batch, h), like)
        system = np.empty((n + 1 if direct else 0, n), like.dtype)
        inner = n + h if tensors[3] != 0 else n
        of_C = padded(n) * n
        of_B = of_C + padded(n) * h
        pack_tiles(packed, 0, n, A, True, 0, n, 0, n)
        pack_tiles(packed, of_C, h, C, True, 0, n, 0, h)
        pack_tiles(packed, of_B, inner, B, True, inputs, h, 0, n)
        pack_tiles(packed, of_B + n * ROWS, inner, feedthrough, True, inputs, h, 0, inner - n)
        worst = 0
        for begin in range(low, high, width):
            worst = max(worst, backward_group(
                group, packed, (of_B, of_C, inner), A, images, every, last, outer, adjoint, first, kind, slope,
                system, states, evaluations, lanes, slots, at, rows_of, counts, numbers, borrow(offsets),
                backwards, width, begin, min(high, begin + width),
            ))  # fmt: skip
        return worst

    return backward


forward, backward = _make_forward(source_key()), _make_backward(source_key())
