"""The loops over time of a recurrent implicit model, compiled: a whole sequence in one call, there and back.

Elements lie time after time, the longest sequences first (the layout of a packed sequence): the element of
sequence i at time t is row ``offsets[t] + i``. Sequences do not look at each other, so any range of them can be
computed by itself.
"""

import math
import zlib
from pathlib import Path
from typing import Any

from wellposed.equilibrium.solution import Status
from wellposed.errors import require
from wellposed.kernels.cpu import solve
from wellposed.kernels.recipe import RELU, SLOPED, TANH
from wellposed.kernels.vectors import borrow

numba = require("numba", extra="fast")
compiled = numba.njit(nogil=True, error_model="numpy", fastmath={"contract"})
kept = numba.njit(cache=True, nogil=True, error_model="numpy")

CONVERGED, MAX_STEPS, NONFINITE = int(Status.CONVERGED), int(Status.MAX_STEPS), int(Status.NONFINITE)


@compiled
def clear(out: Any, begin: int, end: int) -> None:
    """Sets rows to zero."""
    for i in range(begin, end):
        for j in range(out.shape[1]):
            out[i, j] = 0


@compiled
def add_product(out: Any, shift: int, x: Any, skip: int, M: Any, begin: int, end: int) -> None:
    """Adds ``x M`` to the rows from `begin - shift` to `end - shift` of `out`, without `skip` columns of x."""
    inner, columns = M.shape
    for i in range(begin, end):
        o, k = i - shift, 0
        while k + 4 <= inner:
            at = skip + k
            a, b, c, d = x[i, at], x[i, at + 1], x[i, at + 2], x[i, at + 3]
            for j in range(columns):
                out[o, j] += a * M[k, j] + b * M[k + 1, j] + c * M[k + 2, j] + d * M[k + 3, j]
            k += 4
        while k < inner:
            a = x[i, skip + k]
            for j in range(columns):
                out[o, j] += a * M[k, j]
            k += 1


@compiled
def rows_of(offsets: Any, turn: int, backwards: bool, high: int) -> Any:
    """Returns the first row and the number of sequences of the time whose turn it is, and of the time before it.

    Only sequences below `high` count; at the first turn there are none before.
    """
    last = len(offsets) - 2
    t = last - turn if backwards else turn
    first, count = offsets[t], min(high, offsets[t + 1] - offsets[t])
    if turn == 0:
        return first, count, 0, 0
    before = t + 1 if backwards else t - 1
    return first, count, offsets[before], min(count, offsets[before + 1] - offsets[before])


@compiled
def take_over(u: Any, H: Any, X: Any, h0: Any, rows: Any, low: int, warm: bool) -> None:
    """Hands hidden states and equilibria on; a sequence that begins has its own hidden state and zeros."""
    first, count, before, known = rows
    p = u.shape[1] - H.shape[1]
    for i in range(low, count):
        for j in range(H.shape[1]):
            u[first + i, p + j] = H[before + i, j] if i < known else h0[i, j]
        for k in range(X.shape[1]):
            X[first + i, k] = X[before + i, k] if warm and i < known else 0


@compiled
def hand_back(G: Any, carry: Any, rows: Any, low: int) -> None:
    """Adds gradients of the hidden states before to where these come from; what stays are those of the first."""
    _, count, before, known = rows
    for i in range(low, min(count, known)):
        for j in range(G.shape[1]):
            G[before + i, j] += carry[i, j]


@compiled
def differentiate(z: Any, kind: int, slope: float, begin: int, end: int) -> None:
    """Replaces z by the slopes phi'(z)."""
    one, zero, below = z.dtype.type(1), z.dtype.type(0), z.dtype.type(slope)
    for s in range(begin, end):
        if kind in (RELU, SLOPED):
            for k in range(z.shape[1]):
                z[s, k] = one if z[s, k] > zero else below
            continue
        for k in range(z.shape[1]):
            gate = math.tanh(z[s, k]) if kind == TANH else one / (one + math.exp(-z[s, k]))
            z[s, k] = one - gate * gate if kind == TANH else gate * (one - gate)


@compiled
def scale_down(g: Any, d: Any, scale: Any, begin: int, end: int) -> None:
    """Replaces g by ``d g`` divided by the largest entry of its row (one for zeros)."""
    one = g.dtype.type(1)
    for s in range(begin, end):
        size = g.dtype.type(0)
        for k in range(g.shape[1]):
            size = size if size > abs(g[s, k]) else abs(g[s, k])  # NaN stays
        scale[s] = size = size if size != 0 else one
        for k in range(g.shape[1]):
            g[s, k] = d[s, k] * g[s, k] / size


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
def finish_directly(A: Any, d: Any, offset: Any, y: Any, status: Any, system: Any, begin: int, end: int) -> None:
    """Factorises ``I - d A'`` for samples that were too slow."""
    n = A.shape[0]
    for s in range(begin, end):
        if status[s] < MAX_STEPS:
            continue
        finite = True
        for i in range(n):
            for j in range(n):
                system[i, j] = (1 if i == j else 0) - d[s, i] * A[j, i]
            y[s, i] = offset[s, i]
        eliminate(system, y[s])
        for i in range(n):
            finite &= abs(y[s, i]) < numba.float64(1e308)
        status[s] = CONVERGED if finite else NONFINITE


@compiled
def scale_up(y: Any, scale: Any, begin: int, end: int) -> None:
    """Gives rows their size back."""
    for s in range(begin, end):
        for k in range(y.shape[1]):
            y[s, k] *= scale[s]


def _stamp() -> int:
    """Returns a number that changes with the files of the kernels; see `kernels.cpu`."""
    names = "combination", "cpu", "elementary", "extrapolation", "lanes", "recipe", "sequence_loops", "vectors"
    files = [Path(__file__).with_name(f"{name}.py") for name in names]
    texts = (f"{file.name} {file.stat().st_mtime_ns} {file.stat().st_size}" for file in files)
    return zlib.crc32("\n".join(texts).encode()) + 1


def _make_walk(stamp: int) -> Any:
    """Returns the forward loop; what a function closes over is part of its place in numba's cache."""

    @kept
    def walk(
        packed: Any, v: Any, X: Any, H: Any, u: Any, h0: Any, recurrent: Any, readout: Any, feedthrough: Any,
        warm: bool, none: Any, status: Any, steps: Any, work: Any, lanes: Any, slots: Any, at: Any, counts: Any,
        numbers: Any, offsets: Any, backwards: bool, low: int, high: int,
    ) -> None:  # fmt: skip
        """Computes the sequences from `low` to `high`.

        On entry `v` is what the inputs add to the states, H what they add to the hidden states, and the first
        columns of `u` are the inputs; the others become the hidden states before. Matrices are transposed.
        """
        v, X, H, u, h0 = borrow(v), borrow(X), borrow(H), borrow(u), borrow(h0)
        p = u.shape[1] - H.shape[1]
        for turn in range(len(offsets) - 1 if stamp else 0):
            rows = rows_of(offsets, turn, backwards, high)
            begin, end = rows[0] + low, rows[0] + rows[1]
            if begin >= end:
                continue
            take_over(u, H, X, h0, rows, low, warm)
            add_product(v, 0, u, p, recurrent, begin, end)
            # A sample's start is read before its equilibrium is written to the same place.
            solve(packed, v, none, X, X, status, steps, none, work, lanes, slots, at, counts, numbers, begin, end)
            add_product(H, 0, X, 0, readout, begin, end)
            if feedthrough.shape[0] > 0:
                add_product(H, 0, u, p, feedthrough, begin, end)

    return walk


def _make_unwind(stamp: int) -> Any:
    """Returns the backward loop."""

    @kept
    def unwind(
        packed: Any, A: Any, z: Any, g: Any, Y: Any, G: Any, carry: Any, scale: Any, recurrent: Any, readout: Any,
        feedthrough: Any, system: Any, blank: bool, kind: int, slope: float, none: Any, status: Any, steps: Any,
        work: Any, lanes: Any, slots: Any, at: Any, counts: Any, numbers: Any, offsets: Any, backwards: bool,
        low: int, high: int,
    ) -> None:  # fmt: skip
        """Solves ``y = d (A'y + g)`` from the last time to the first, for the sequences from `low` to `high`.

        On entry `z` is ``Ax + v``, and `g` (unless it is `blank`) and G are the gradients of the states and hidden
        states as outputs; on return `z` is d, G the total gradient of the hidden states and `carry` that of the
        first ones.
        """
        z, g, Y, G, carry, scale = borrow(z), borrow(g), borrow(Y), borrow(G), borrow(carry), borrow(scale)
        for turn in range(len(offsets) - 2 if stamp else 0, -1, -1):
            rows = rows_of(offsets, turn, backwards, high)
            begin, end = rows[0] + low, rows[0] + rows[1]
            if begin >= end:
                continue
            if blank:
                clear(g, begin, end)
            add_product(g, 0, G, 0, readout, begin, end)
            differentiate(z, kind, slope, begin, end)
            scale_down(g, z, scale, begin, end)
            solve(packed, g, z, none, Y, status, steps, none, work, lanes, slots, at, counts, numbers, begin, end)
            if system.shape[0] > 0:
                finish_directly(A, z, g, Y, status, system, begin, end)
            scale_up(Y, scale, begin, end)
            clear(carry, low, rows[1])
            add_product(carry, rows[0], Y, 0, recurrent, begin, end)
            if feedthrough.shape[0] > 0:
                add_product(carry, rows[0], G, 0, feedthrough, begin, end)
            hand_back(G, carry, rows, low)

    return unwind


walk, unwind = _make_walk(_stamp()), _make_unwind(_stamp())
