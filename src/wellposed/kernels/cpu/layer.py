"""A whole small model, compiled: projection, products and solve in one call each way.

Around a solve of a hundred samples with twenty states, torch and Python cost more than the solve. Here tensors are
given by their addresses (zero for one that is missing), and everything else lies in two buffers:

    saved    x (B, n), v (B, n), A (n, n), what the projection left (n)
    work     steps and statuses; where gradients are computed, offset, d, y (B, n) and scale (B, 1); then the
             workspace of `cpu.solve`, its lanes, the tiles of A, and columns of a product

`saved` lives until the backward pass, `work` for one call. `layer` is one function for both directions, so that
the solve in it is compiled once. Products run on vectors of columns, with `simd.block_wide`.
"""

from typing import Any

import numpy as np

from wellposed.errors import require
from wellposed.kernels.cpu.cache import njit_cached, source_key
from wellposed.kernels.cpu.engine import DIRECT, Numbers
from wellposed.kernels.cpu.projection import pull_back, shrink
from wellposed.kernels.cpu.simd import NARROW, ROWS, VECTORS, array_at, block_narrow, block_wide, move, wipe
from wellposed.kernels.cpu.solve import (
    CONVERGED,
    DIVERGED,
    MAX_STEPS,
    STAGNATED,
    eliminate,
    pack_tiles,
    prepare_adjoint,
    solve_samples,
    unpack,
    worst_status,
)

numba = require("numba", extra="fast")
compiled = numba.njit(nogil=True, error_model="numpy")
cached = njit_cached(nogil=True, error_model="numpy")

BLOCK = 24  # rows of the right factor of a product that are multiplied at a time; short sums round less
ALIGN = 64  # bytes to which parts of `work` are aligned, the largest vector
TURNS = 8  # systems that are solved for a sample at most
NOT_FINITE, OUTPUTS = -1, 16  # what `layer` returns, or adds where outputs are not finite


def aligned(end: int) -> int:
    """Returns where the part of `work` after `end` begins."""
    return (end + ALIGN - 1) // ALIGN * ALIGN


def work_bytes(n: int, size: int, width: int, itemsize: int) -> tuple[int, int]:
    """Returns the bytes of `work` without samples, and those of one sample.

    Args:
        n: states.
        size, width: of the workspace of a group, in numbers, and its samples.
        itemsize: bytes of a number.
    """
    numbers = size + n * (n + ROWS) + (BLOCK + NARROW) * width
    return numbers * itemsize + 16 * width + 6 * ALIGN, 9 + (3 * n + 1) * itemsize


next_part = compiled(aligned)


@compiled
def all_finite(array: Any) -> bool:
    """Tells whether an array holds no NaN or infinity."""
    infinite, count = array.dtype.type(np.inf), 0
    for entry in array.reshape(-1):
        count += not abs(entry) < infinite
    return count == 0


@cached
def largest_row_sum(A: int, shape: Any, like: Any) -> float:
    """Returns the largest sum of sizes in a row of the matrix at an address, NaN where there is one."""
    matrix, largest = array_at(A, shape, like), 0.0
    for row in range(shape[0]):
        total = like.dtype.type(0)
        for k in range(shape[1]):
            total += abs(matrix[row, k])
        if largest == largest and not total <= largest:
            largest = total
    return largest


@cached
def accepts(x: int, fx: int, shape: Any, own: Any) -> bool:
    """Tells whether the residual of every row meets the tolerance of a `Plan` with these parameters."""
    points, images = array_at(x, shape, own), array_at(fx, shape, own)
    atol, rtol = own[4], own[5]
    good = True
    for s in range(shape[0]):
        residual = size = own.dtype.type(0)
        nan = False
        for k in range(shape[1]):
            image = images[s, k]
            residual, size = max(residual, abs(image - points[s, k])), max(size, abs(image))
            nan |= image != image
        good &= residual <= max(atol, rtol * size) and size < np.inf and not nan
    return good


@compiled
def load_columns(work: Any, right: Any, transposed: bool, first: int, inner: int, column: int, width: int) -> int:
    """Copies up to `width` columns of a right factor to lanes; returns how many."""
    columns, half = min(width, (right.shape[0] if transposed else right.shape[1]) - column), width // VECTORS
    if not transposed and columns in (half, width):
        stride = right.shape[1]
        move(right, first * stride + column, stride, work, 0, width, inner, columns // half)
        return columns
    if columns not in (half, width):
        wipe(work, 0, inner)
    if transposed:
        for i in range(columns):
            for k in range(inner):
                work[k * width + i] = right[column + i, first + k]
    else:
        for k in range(inner):
            for i in range(columns):
                work[k * width + i] = right[first + k, column + i]
    return columns


@compiled
def product(
    room: Any, width: int, left: Any, by_columns: bool, right: Any, transposed: bool, out: Any, add: bool
) -> None:
    """Writes L R to `out`, or adds it to what is there.

    L is `left`, or its transpose with `by_columns`; R is `right`, or its transpose with `transposed`.
    """
    rows, columns = out.shape
    inner = left.shape[0] if by_columns else left.shape[1]
    step, stride = (1, left.shape[1]) if by_columns else (left.shape[1], 1)
    for column in range(0, columns, width):
        for first in range(0, inner, BLOCK):
            depth, adds = min(BLOCK, inner - first), add or first > 0
            count = load_columns(room, right, transposed, first, depth, column, width)
            half = width // VECTORS
            wide = count > half
            size = ROWS if wide else NARROW
            for row in range(0, rows, size):
                at, here, some = first * stride + row * step, row * columns + column, min(size, rows - row)
                if count == width:
                    block_wide(room, depth, left, at, step, stride, some, out, here, columns, adds)
                    continue
                if count == half:
                    block_narrow(room, depth, left, at, step, stride, some, out, here, columns, adds)
                    continue
                result = BLOCK * width
                if wide:
                    block_wide(room, depth, left, at, step, stride, some, room, result, width, False)
                else:
                    block_narrow(room, depth, left, at, step, stride, some, room, result, width, False)
                for r in range(some):
                    for i in range(count):
                        known = out[row + r, column + i] if adds else out.dtype.type(0)
                        out[row + r, column + i] = known + room[result + r * width + i]


@compiled
def begin_forward(
    room: Any, width: int, tensors: Any, u: Any, v: Any, A: Any, levels: Any, radius: float,
    eps: float,
) -> bool:  # fmt: skip
    """Projects the rows of W and writes ``v = Bu + b``; tells whether W and v are finite and there are samples."""
    n, p, like = v.shape[1], u.shape[1], v
    W, B = array_at(tensors[1], (n, n), like), array_at(tensors[2], (n, p), like)
    shrink(W, A, levels, radius, eps)
    if tensors[2] == 0:
        v[:] = u
    else:
        product(room, width, u, False, B, True, v, False)
    if tensors[5] != 0:
        bias = array_at(tensors[5], (n,), like)
        for s in range(v.shape[0]):
            for k in range(n):
                v[s, k] += bias[k]
    return v.shape[0] > 0 and all_finite(W) and all_finite(v)


@compiled
def solve_system(A: Any, transposed: bool, room: Any, x: Any) -> None:
    """Solves ``x = d (Ax) + r``, or that with A'; the slopes d and r are the last rows of `room`."""
    n = len(x)
    solution, d, right = room[n], room[n + 1], room[n + 2]
    for i in range(n):
        for j in range(n):
            room[i, j] = (1 if i == j else 0) - d[i] * (A[j, i] if transposed else A[i, j])
        solution[i] = right[i]
    eliminate(room[:n], solution)
    for i in range(n):
        x[i] = solution[i]


@compiled
def finish_sample(A: Any, backward: bool, v: Any, d: Any, x: Any, room: Any, numbers: Any) -> Any:
    """Solves one equation by elimination, forward again and again with the slopes at the last solution (Newton).

    All is computed in float64; `x` is the start, then the image of the solution. `room` has n + 3 rows.

    Returns:
        the status, the number of systems, and the residual.
    """
    n = len(x)
    slopes, right = room[n + 1], room[n + 2]
    for turn in range(1 if backward else TURNS):
        for i in range(n):
            z = np.float64(v[i])
            for j in range(0 if backward else n):
                z += A[i, j] * x[j]
            slopes[i] = d[i] if backward else 1 if z > 0 else numbers.slope
            right[i] = v[i] if backward else slopes[i] * v[i]
        solve_system(A, backward, room, x)
        residual = size = l1 = 0.0
        for i in range(n):
            total = 0.0
            for j in range(n):
                total += (A[j, i] if backward else A[i, j]) * x[j]
            z = total + v[i]
            image = d[i] * total + v[i] if backward else z if z > 0 else numbers.slope * z
            residual, size, l1 = max(residual, abs(image - x[i])), max(size, abs(image)), l1 + abs(image)
            right[i] = image
        if not l1 < np.inf:
            break
        exact = residual <= max(numbers.atol, numbers.rtol * size)
        if exact or residual <= 4 * numbers.eps * size:
            x[:] = right
            return CONVERGED if exact else STAGNATED, turn + 1, residual
    return MAX_STEPS, TURNS, np.inf


@compiled
def finish_samples(
    A: Any, backward: bool, v: Any, d: Any, value: Any, status: Any, steps: Any, residual: Any, numbers: Any
) -> int:
    """Solves equations whose samples are slow or stagnated by elimination; returns the largest status.

    A sample that is not solved so stays as it is; of the others `residual` has the last one.
    """
    batch, n = value.shape
    room, x = np.empty((n + 3, n), np.float64), np.empty(n, value.dtype)
    for s in range(batch):
        if status[s] not in (STAGNATED, MAX_STEPS, DIVERGED):
            continue
        x[:] = value[s]
        outcome, turns, last = finish_sample(A, backward, v[s], d[s] if backward else v[s], x, room, numbers)
        if outcome != MAX_STEPS:
            value[s], status[s], residual[s] = x, outcome, last
            steps[s] += 2 * turns
    return worst_status(status, 0, batch)


@cached
def finish(
    A: Any, backward: bool, v: Any, d: Any, value: Any, status: Any, steps: Any, residual: Any, own: Any
) -> int:
    """Calls `finish_samples` with the parameters of a `Plan`."""
    numbers = Numbers(own[0], own[1], own[2], own[3], own[4], own[5], own[6])
    return finish_samples(A, backward, v, d, value, status, steps, residual, numbers)


@compiled
def write_gradients(
    room: Any, width: int, tensors: Any, gradients: Any, sizes: Any, g: Any, y: Any, scale: Any, x: Any,
    levels: Any, eps: float,
) -> None:  # fmt: skip
    """Writes the gradients that are wanted from that of the outputs, g, and from ``scale y``, the adjoint."""
    (batch, n, p, q), like = sizes, x
    for s in range(batch):
        for k in range(n):
            y[s, k] *= scale[s, 0]
    u, B, D = (
        array_at(tensors[0], (batch, p), like),
        array_at(tensors[2], (n, p), like),
        array_at(tensors[4], (q, p), like),
    )
    if gradients[0] != 0:
        by_u = array_at(gradients[0], (batch, p), like)
        if tensors[2] == 0:
            by_u[:] = y
        else:
            product(room, width, y, False, B, False, by_u, False)
        if tensors[4] != 0:
            product(room, width, g, False, D, False, by_u, True)
    if gradients[1] != 0:
        by_W = array_at(gradients[1], (n, n), like)
        product(room, width, y, True, x, False, by_W, False)
        pull_back(array_at(tensors[1], (n, n), like), levels, by_W, by_W, eps)
    if gradients[2] != 0:
        product(room, width, y, True, u, False, array_at(gradients[2], (n, p), like), False)
    if gradients[3] != 0:
        product(room, width, g, True, x, False, array_at(gradients[3], (q, n), like), False)
    if gradients[4] != 0:
        product(room, width, g, True, u, False, array_at(gradients[4], (q, p), like), False)
    if gradients[5] != 0:
        by_bias = array_at(gradients[5], (n,), like)
        by_bias[:] = 0
        for s in range(batch):
            for k in range(n):
                by_bias[k] += y[s, k]


@compiled
def open_saved(saved: int, batch: int, n: int, like: Any) -> Any:
    """Returns x, v, A and what the projection left."""
    item = like.itemsize
    x, v = array_at(saved, (batch, n), like), array_at(saved + item * batch * n, (batch, n), like)
    A = array_at(saved + 2 * item * batch * n, (n, n), like)
    return x, v, A, array_at(saved + item * (2 * batch * n + n * n), (n,), like)


@compiled
def open_work(work: int, batch: int, rows: int, n: int, layout: Any, like: Any) -> Any:
    """Returns the parts of `work`; those of gradients have `rows` rows."""
    item, width = like.itemsize, layout[11]
    start = work + next_part(9 * batch)
    offset, d = array_at(start, (rows, n), like), array_at(start + item * rows * n, (rows, n), like)
    value = array_at(start + 2 * item * rows * n, (rows, n), like)
    scale = array_at(start + 3 * item * rows * n, (rows, 1), like)
    start = work + next_part(start + item * rows * (3 * n + 1) - work)
    group = array_at(start, (layout[12],), like)
    start = work + next_part(start + item * layout[12] - work)
    lanes = array_at(start, (2 * width,), np.int64)
    start = work + next_part(start + 16 * width - work)
    tiles = array_at(start, (n * (n + ROWS),), like)
    start = work + next_part(start + item * n * (n + ROWS) - work)
    room = array_at(start, ((BLOCK + NARROW) * width,), like)
    return (group, lanes, tiles, room), (offset, d, value, scale)


def _make_layer(key: int) -> Any:
    """Returns the kernel; what a function closes over is part of its key in numba's cache."""

    @cached
    def layer(
        backward: bool, tensors: Any, gradients: Any, y: int, saved: int, work: int, reports: Any, sizes: Any,
        slots: Any, layout: Any, parameters: Any, kind: int, slope: float, radius: float,
    ) -> int:  # fmt: skip
        """Computes outputs, or gradients from those of the outputs.

        Args:
            tensors: addresses of u, W, B, C, D and bias; without B inputs are v, without C outputs are states.
            gradients: addresses of their gradients, as far as they are wanted.
            y: address of the outputs, or of their gradient.
            saved, work: addresses of the buffers.
            reports: addresses of steps and statuses.
            sizes: samples, states, inputs and outputs.
            slots, layout, parameters: of `cpu.engine.Plan`.
            kind, slope: the activation.
            radius: of the l1 ball on which the rows of W are projected.

        Returns:
            the largest status of a sample, plus `OUTPUTS` if an output is not finite; from MAX_STEPS on, C x + D u
            and gradients are not computed, states are. `NOT_FINITE` if W or v is not finite or the batch is empty.
        """
        (batch, n, p, q), width, like = sizes, layout[11], parameters
        at, counts, numbers = unpack(layout, like)
        x, v, A, levels = open_saved(saved, batch, n, like)
        steps, status = array_at(reports[0], (batch,), np.int64), array_at(reports[1], (batch,), np.int8)
        (group, lanes, tiles, room), (offset, d, value, scale) = open_work(
            work, batch, batch if backward else 0, n, layout, like
        )
        none, outputs = array_at(work, (0, n), like), array_at(y, (batch, q), like)
        u, C = array_at(tensors[0], (batch, p), like), array_at(tensors[3], (q, n), like)
        if backward:
            if tensors[3] == 0:
                offset[:] = outputs
            else:
                product(room, width, outputs, False, C, False, offset, False)
            d[:] = v
            product(room, width, x, False, A, True, d, True)
            prepare_adjoint(d, offset, kind, slope, d, offset, scale)
        else:
            value, offset = x, v
            if not begin_forward(room, width, tensors, u, v, A, levels, radius, numbers.eps):
                return NOT_FINITE
        pack_tiles(tiles, 0, n, A, backward, 0, n, 0, n)
        worst = solve_samples(
            tiles, offset, d, none, value, status, steps, none, group, lanes, slots, at, counts, numbers, 0, batch
        )
        if worst >= STAGNATED and counts.goes_on and n <= DIRECT:
            worst = finish_samples(A, backward, offset, d, value, status, steps, np.empty(batch), numbers)
        if not backward and tensors[3] == 0:
            outputs[:] = x
            return worst
        if worst >= MAX_STEPS:
            return worst
        if not backward:
            product(room, width, x, False, C, True, outputs, False)
            if tensors[4] != 0:
                D = array_at(tensors[4], (q, p), like)
                product(room, width, u, False, D, True, outputs, True)
            return worst if all_finite(outputs) else worst + OUTPUTS
        write_gradients(room, width, tensors, gradients, sizes, outputs, value, scale, x, levels, numbers.eps)
        return worst if key else 0

    return layer


layer = _make_layer(source_key())
