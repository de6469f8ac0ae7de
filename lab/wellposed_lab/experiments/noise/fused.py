"""The training of the ensembles of 004 in Triton: a program trains a member, hundreds of updates in one launch.

Batches of 16 leave a GPU idle: an update of the torch program is a thousand small kernels. Here a program holds
the batch of its member, streams the weights past it and steps Adam in place, so that nothing is launched between
updates and every member stops its solves by itself. Draws are Philox's, by member, update and step. Products are
rounded to TF32, as those of `fast_products`, in solves to the as many bits of float16: streaming W is what takes
time, and a copy in float16 halves it. All else is as in `ensemble` and `solve`.

The weights of a member lie in one row: V ``(n, p)``, c ``(n)``, W ``(depth, n, n)``, b ``(depth, n)``,
C ``(q, n)`` and e ``(q)``, with n the padded width. Both kernels take

- weights, first, second: those rows, and the moments of Adam, `total` numbers a member;
- u, labels: all images, ``(N, p)``, and their classes;
- orders: of the images by seed, update and place in the batch, `row` updates a seed;
- rates: of Adam, with the correction of its second moment, for every update;
- members: those of this launch; numbers: width, seed's place and layers of every member;
- amplitudes: of the noise for a signal of norm one; scratch: memory of the programs;
- losses: to which those of the updates are added.

That of equilibria also takes copies of all W, which its solves read, and counts, to which steps and unsettled
samples of the solves are added, forward and backward; the other one the depth of the deepest network, and injects,
one where the input is added in every layer.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import require
from wellposed.kernels.gpu.solve import tanh
from wellposed_lab.experiments.noise.ensemble import DRAWS, EquilibriumStack, Stack
from wellposed_lab.experiments.noise.models import LOOSE, STEPS, TIGHT, WINDOW
from wellposed_lab.experiments.noise.solve import FLOOR, RUN_OFF

# mypy: disable-error-code="no-untyped-def, name-defined, valid-type"

triton = require("triton")
tl = require("triton.language")

BATCH = 16  # of 004, and the least that tensor cores take
CLASSES = 16  # columns of the logits
BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam
VARYING = ("row", "start", "updates", "seed")  # arguments whose values are not compiled in

_SAMPLES, _CLASSES = tl.constexpr(BATCH), tl.constexpr(CLASSES)
_STEPS, _WINDOW, _DRAWS = tl.constexpr(STEPS), tl.constexpr(WINDOW), tl.constexpr(DRAWS)
_TIGHT, _LEAST, _LOOSE = tl.constexpr(TIGHT), tl.constexpr(FLOOR * TIGHT), tl.constexpr(LOOSE)
_RUN_OFF, _TINY = tl.constexpr(RUN_OFF), tl.constexpr(1e-30)
_BETA1, _BETA2, _EPS = tl.constexpr(BETAS[0]), tl.constexpr(BETAS[1]), tl.constexpr(EPS)


@triton.jit
def _norm(x):  # (B, n) -> (B,)
    return tl.sqrt(tl.sum(x * x, 1))


@triton.jit
def _normal(seed, index, N: tl.constexpr):  # (B, N)
    """Draws normal numbers, the same for the same seed and index."""
    QUARTER: tl.constexpr = N // 4
    offsets = tl.arange(0, _SAMPLES)[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]
    zero = offsets * 0
    a, b, c, d = tl.philox(seed, offsets, zero + index, zero, zero)
    a, b = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b))
    c, d = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(c), tl.uint_to_uniform_float(d))
    return tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [_SAMPLES, N], can_reorder=True)


@triton.jit
def store_normal(target, seed, index, N: tl.constexpr):
    """Stores what is drawn, for tests."""
    at = tl.arange(0, _SAMPLES)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(target + at, _normal(seed + tl.zeros([], tl.int64), index, N))


@triton.jit
def _product(
    states, matrix, total, wide, n, N: tl.constexpr, DEEP: tl.constexpr, BACK: tl.constexpr, TF32: tl.constexpr
):
    """Adds ``states matrix'`` to `total`, or ``states matrix`` on the way back; states are rows of N numbers.

    They are rounded to the type of the matrix.
    """
    samples, columns, deep = tl.arange(0, _SAMPLES), tl.arange(0, N), tl.arange(0, DEEP)
    for first in range(0, N, DEEP):
        inner = first + deep
        left = tl.load(states + samples[:, None] * N + inner[None, :])
        within = (inner[:, None] < wide) & (columns[None, :] < wide)
        at = inner[:, None] * n + columns[None, :] if BACK else columns[None, :] * n + inner[:, None]
        tile = tl.load(matrix + at, mask=within, other=0.0)
        total = tl.dot(left.to(tile.dtype), tile, total, input_precision=TF32)
    return total


@triton.jit
def _encode(u, rows, V, c, wide, p: tl.constexpr, N: tl.constexpr, DEEP: tl.constexpr, TF32: tl.constexpr):
    """Projects the images of the batch: ``relu(u V' + c)``."""
    columns, deep = tl.arange(0, N), tl.arange(0, DEEP)
    total = tl.zeros([_SAMPLES, N], tl.float32)
    for first in range(0, p, DEEP):
        inner = first + deep
        left = tl.load(u + rows[:, None] * p + inner[None, :], mask=inner[None, :] < p, other=0.0)
        within = (inner[:, None] < p) & (columns[None, :] < wide)
        tile = tl.load(V + columns[None, :] * p + inner[:, None], mask=within, other=0.0)
        total = tl.dot(left, tile, total, input_precision=TF32)
    bias = tl.load(c + columns, mask=columns < wide, other=0.0)
    return tl.maximum(total + bias[None, :], 0.0)


@triton.jit
def _adam(weights, first, second, at, within, gradient, rate, root):
    """Takes a step of Adam with some weights."""
    m = tl.load(first + at, mask=within, other=0.0)
    m += (gradient - m) * (1 - _BETA1)
    v = tl.load(second + at, mask=within, other=0.0) * _BETA2 + (1 - _BETA2) * gradient * gradient
    value = tl.load(weights + at, mask=within, other=0.0) - rate * m / (tl.sqrt(v) / root + _EPS)
    tl.store(first + at, m, mask=within)
    tl.store(second + at, v, mask=within)
    tl.store(weights + at, value, mask=within)
    return value


@triton.jit
def _adam_outer(
    weights, first, second, start, copy, cotangents, states, rate, root, wide, n, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COPIED: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """Steps a square matrix, whose gradient is ``cotangents' states`` of K rows each, and its copy."""
    samples, rows, columns = tl.arange(0, K), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    for i in range(0, N, ROWS):
        left = tl.load(cotangents + samples[None, :] * N + (i + rows)[:, None])
        for j in range(0, N, COLUMNS):
            right = tl.load(states + samples[:, None] * N + (j + columns)[None, :])
            gradient = tl.dot(left, right, input_precision=TF32)
            within = ((i + rows)[:, None] < wide) & ((j + columns)[None, :] < wide)
            at = (i + rows)[:, None] * n + (j + columns)[None, :]
            value = _adam(weights, first, second, start + at, within, gradient, rate, root)
            if COPIED:
                tl.store(copy + at, value.to(copy.dtype.element_ty), mask=within)


@triton.jit
def _adam_input(
    weights, first, second, cotangents, u, images, rate, root, wide, p: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """Steps the projection, whose gradient is ``cotangents' u``."""
    samples, rows, columns = tl.arange(0, _SAMPLES), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    for i in range(0, N, ROWS):
        left = tl.load(cotangents + samples[None, :] * N + (i + rows)[:, None])
        for j in range(0, p, COLUMNS):
            inner = j + columns
            right = tl.load(u + images[:, None] * p + inner[None, :], mask=inner[None, :] < p, other=0.0)
            gradient = tl.dot(left, right, input_precision=TF32)
            within = ((i + rows)[:, None] < wide) & (inner[None, :] < p)
            at = (i + rows)[:, None] * p + inner[None, :]
            _adam(weights, first, second, at, within, gradient, rate, root)


@triton.jit
def _read_out(
    weights, first, second, C, e, x, labels, rate, root, wide, n, q, N: tl.constexpr, TF32: tl.constexpr
):
    """Steps the readout (at `C` and `e`); returns the mean loss and the gradient with respect to the states."""
    columns, classes = tl.arange(0, N), tl.arange(0, _CLASSES)
    within = (classes[:, None] < q) & (columns[None, :] < wide)
    at = C + classes[:, None] * n + columns[None, :]
    matrix = tl.load(weights + at, mask=within, other=0.0)  # (classes, N)
    bias = tl.load(weights + e + classes, mask=classes < q, other=float("-inf"))
    logits = tl.dot(x, tl.trans(matrix), input_precision=TF32) + bias[None, :]
    shifted = logits - tl.max(logits, 1)[:, None]
    powers = tl.exp(shifted)
    total = tl.sum(powers, 1)
    hit = labels[:, None] == classes[None, :]
    loss = tl.sum(tl.log(total) - tl.sum(tl.where(hit, shifted, 0.0), 1), 0) / _SAMPLES
    slopes = (powers / total[:, None] - tl.where(hit, 1.0, 0.0)) / _SAMPLES
    back = tl.dot(slopes, matrix, input_precision=TF32)
    gradient = tl.dot(tl.trans(slopes), x, input_precision=TF32)
    _adam(weights, first, second, at, within, gradient, rate, root)
    _adam(weights, first, second, e + classes, classes < q, tl.sum(slopes, 0), rate, root)
    return loss, back


@triton.jit
def _count(counts, steps, done):
    """Adds the steps of a solve, and how many samples it left unsettled."""
    tl.store(counts, tl.load(counts) + steps)
    tl.store(counts + 1, tl.load(counts + 1) + _SAMPLES - tl.sum(done, 0))


@triton.jit
def _solve_plain(
    states, value, given, copy, wide, n, N: tl.constexpr, DEEP: tl.constexpr, TF32: tl.constexpr
):  # fmt: skip
    """Solves without noise and leaves the iterates at `value`; returns the steps and who is done."""
    samples = tl.arange(0, _SAMPLES)
    grid = samples[:, None] * N + tl.arange(0, N)[None, :]
    # One name each: what is the same value before a loop, Triton takes for one that does not change in it.
    z, done, index = tl.zeros([_SAMPLES, N], tl.float32), tl.where(samples < 0, 1, 0), tl.zeros([], tl.int32)
    tl.store(states + grid, z)
    tl.debug_barrier()
    while (index < _STEPS) & (tl.sum(done, 0) < _SAMPLES):
        image = tanh(_product(states, copy, tl.load(given + grid), wide, n, N, DEEP, False, TF32))
        tl.store(value + grid, z, mask=(grid >= 0) & (done == 0)[:, None])
        done = done | (_norm(image - z) <= tl.maximum(_TIGHT * _norm(image), _LEAST)).to(tl.int32)
        z = image
        index += 1
        tl.debug_barrier()
        tl.store(states + grid, z)
        tl.debug_barrier()
    tl.store(states + grid, z)  # Triton 3.6 compiles no loop of which a result is not used
    return index, done


@triton.jit
def _solve_noisy(
    states, value, mean, given, past, signals, copy, noise, draws, wide, n,
    N: tl.constexpr, DEEP: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """Solves under noise by the averaged rule, over the window at `past` and `signals`; leaves the means too."""
    samples = tl.arange(0, _SAMPLES)
    grid = samples[:, None] * N + tl.arange(0, N)[None, :]
    z, done, index = tl.zeros([_SAMPLES, N], tl.float32), tl.where(samples < 0, 1, 0), tl.zeros([], tl.int32)
    tl.store(states + grid, z)
    state_sum, signal_sum = noise * tl.load(given + grid) * 0, tl.load(given + grid) * 0
    tl.debug_barrier()
    while (index < _STEPS) & (tl.sum(done, 0) < _SAMPLES):
        s = _product(states, copy, tl.load(given + grid), wide, n, N, DEEP, False, TF32)
        slot = index % _WINDOW * _SAMPLES * N + grid
        full = (index >= _WINDOW) & (grid >= 0)
        state_sum += z - tl.load(past + slot, mask=full, other=0.0)
        signal_sum += s - tl.load(signals + slot, mask=full, other=0.0)
        tl.debug_barrier()
        tl.store(past + slot, z)
        tl.store(signals + slot, s)
        if index + 1 >= _WINDOW:
            middle, image = state_sum / _WINDOW, tanh(signal_sum / _WINDOW)
            going = (grid >= 0) & (done == 0)[:, None]
            tl.store(value + grid, z, mask=going)
            tl.store(mean + grid, middle, mask=going)
            done = done | (_norm(image - middle) <= _LOOSE * _norm(image)).to(tl.int32)
        z = tanh(s + noise * _norm(s)[:, None] * _normal(draws, index, N))
        index += 1
        tl.debug_barrier()
        tl.store(states + grid, z)
        tl.debug_barrier()
    tl.store(states + grid, z)
    return index, done


@triton.jit
def _last_step_back(
    states, last, copy, out, signal, drawn, g, noise, wide, n, N: tl.constexpr, DEEP: tl.constexpr,
    TF32: tl.constexpr,
):  # fmt: skip
    """Takes a cotangent over the last step, whose noise the readout sees; leaves its signal's at `last`."""
    grid = tl.arange(0, _SAMPLES)[:, None] * N + tl.arange(0, N)[None, :]
    steep = (1 - out * out) * g
    direction = noise * signal / tl.maximum(_norm(signal)[:, None], _TINY)
    v = steep + direction * tl.sum(drawn * steep, 1)[:, None]
    tl.store(last + grid, v)
    top = tl.maximum(tl.max(tl.abs(v), 1), _TINY)[:, None]  # float16 has few exponents
    tl.store(states + grid, v / top)
    tl.debug_barrier()
    zero = tl.zeros([_SAMPLES, N], tl.float32)
    before = _product(states, copy, zero, wide, n, N, DEEP, True, TF32) * top
    tl.debug_barrier()
    return before


@triton.jit
def _slopes(s, noise, draws, N: tl.constexpr, NOISY: tl.constexpr):
    """Returns the parts of the Jacobian of the map, or of its mean over noise, as `attach` has them."""
    size = _norm(s)[:, None]
    slope, growth = tl.zeros([_SAMPLES, N], tl.float32), s * 0
    if NOISY:
        for draw in range(_DRAWS):
            drawn = _normal(draws, _STEPS + 1 + draw, N)
            moved = noise * size * drawn
            up, down = tanh(s + moved), tanh(s - moved)
            up, down = 1 - up * up, 1 - down * down
            slope += (up + down) / (2 * _DRAWS)
            growth += (up - down) * drawn / (2 * _DRAWS)
    else:
        slope = 1 - tanh(s) * tanh(s)
    return slope, growth, noise * s / tl.maximum(size, _TINY)


@triton.jit
def _solve_adjoint(
    states, past, copy, g, slope, growth, direction, wide, n, N: tl.constexpr, NOISY: tl.constexpr,
    DEEP: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """Solves ``w = W' (diag(slope) + direction growth') w + g``; returns the signals' cotangent, steps, done."""
    samples = tl.arange(0, _SAMPLES)
    grid = samples[:, None] * N + tl.arange(0, N)[None, :]
    scale = tl.max(tl.abs(g), 1)
    scale = tl.where(scale > 0, scale, 1.0)[:, None]
    g = g / scale
    w, done, index = g * 0, tl.where(samples < 0, 1, 0), tl.zeros([], tl.int32)
    while (index < _STEPS) & (tl.sum(done, 0) < _SAMPLES):
        tl.store(past + grid, w, mask=(grid >= 0) & (done == 0)[:, None])
        v = slope * w
        if NOISY:
            v += direction * tl.sum(growth * w, 1)[:, None]
        tl.store(states + grid, v)
        tl.debug_barrier()
        image = _product(states, copy, g, wide, n, N, DEEP, True, TF32)
        done = done | (_norm(image - w) <= tl.maximum(_TIGHT * _norm(image), _LEAST)).to(tl.int32)
        w = image
        index += 1
        tl.debug_barrier()
    tl.store(states + grid, w)
    w = tl.load(past + grid)
    w = tl.where((_norm(w) <= _RUN_OFF * _norm(g))[:, None], w, g) * scale  # what overflowed is not less
    v = slope * w
    if NOISY:
        v += direction * tl.sum(growth * w, 1)[:, None]
    return v, index, done


@triton.jit
def _step_equilibrium(
    weights, first, second, W, b, c, copy, states, mean, value, back, injected, v, u, images, rate, root, wide, n,
    p: tl.constexpr, N: tl.constexpr, NOISY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TF32: tl.constexpr,
):  # fmt: skip
    """Steps all weights but the readout's by the signals' cotangent v, and that of the last one at `back`."""
    SLOT: tl.constexpr = _SAMPLES * N
    columns = tl.arange(0, N)
    grid, inside = tl.arange(0, _SAMPLES)[:, None] * N + columns[None, :], columns < wide
    if NOISY:
        tl.store(back + grid, v)
        v += tl.load(back + SLOT + grid)
    else:
        tl.store(back + SLOT + grid, v)
    _adam(weights, first, second, b + columns, inside, tl.sum(v, 0), rate, root)
    v = tl.where(tl.load(injected + grid) > 0, v, 0.0)
    _adam(weights, first, second, c + columns, inside, tl.sum(v, 0), rate, root)
    tl.store(states + grid, v)
    tl.debug_barrier()
    if NOISY:  # of the mean map and of the last step
        _adam_outer(weights, first, second, W, copy, back, mean, rate, root, wide, n, N, 2 * _SAMPLES, ROWS,
                    COLUMNS, True, TF32)  # fmt: skip
    else:
        _adam_outer(weights, first, second, W, copy, back + SLOT, value, rate, root, wide, n, N, _SAMPLES,
                    ROWS, COLUMNS, True, TF32)  # fmt: skip
    _adam_input(weights, first, second, states, u, images, rate, root, wide, p, N, ROWS, COLUMNS, TF32)


@triton.jit(do_not_specialize=VARYING)
def train_equilibria(
    weights, first, second, u, labels, orders, rates, members, numbers, amplitudes, scratch, losses,
    row, start, updates, total, n, q, seed, counts, copies,
    p: tl.constexpr,
    N: tl.constexpr, NOISY: tl.constexpr, DEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TF32: tl.constexpr,
):  # fmt: skip
    """Takes updates of equilibrium models."""
    SLOT: tl.constexpr = _SAMPLES * N
    program = tl.program_id(0)
    member = tl.load(members + program)
    width, own = tl.load(numbers + 3 * member), tl.load(numbers + 3 * member + 1)
    wide, a = (width + 15) // 16 * 16, tl.load(amplitudes + member)
    place = member.to(tl.int64) * total
    weights, first, second = weights + place, first + place, second + place
    c, W = n * p, n * p + n
    copy = copies + member.to(tl.int64) * n * n
    b, C, e = W + n * n, W + n * n + n, W + n * n + n + q * n
    samples, columns = tl.arange(0, _SAMPLES), tl.arange(0, N)
    grid = samples[:, None] * N + columns[None, :]
    inside = columns < wide
    noise = tl.where(columns < width, a, 0.0)[None, :]
    # slots: states, mean, value, two cotangents, injection without and with bias, the window of states and signals
    states = scratch + program.to(tl.int64) * (7 + 2 * _WINDOW) * SLOT
    mean, value, back, injected = states + SLOT, states + 2 * SLOT, states + 3 * SLOT, states + 5 * SLOT
    given, past, signals = states + 6 * SLOT, states + 7 * SLOT, states + (7 + _WINDOW) * SLOT
    update = start + tl.zeros([], tl.int32)
    while update < start + updates:
        images = tl.load(orders + (own * row + update) * _SAMPLES + samples)
        rate, root = tl.load(rates + 2 * update), tl.load(rates + 2 * update + 1)
        draws = seed + member.to(tl.int64) * 1_000_003 * 4096 + update
        r = _encode(u, images, weights, weights + c, wide, p, N, DEEP // 2, TF32)
        tl.store(injected + grid, r)
        x = r + tl.load(weights + b + columns, mask=inside, other=0.0)[None, :]
        tl.store(given + grid, x)
        tl.debug_barrier()
        if NOISY:
            index, done = _solve_noisy(states, value, mean, given, past, signals, copy, noise, draws, wide, n, N,
                                       DEEP, TF32)  # fmt: skip
        else:
            index, done = _solve_plain(states, value, given, copy, wide, n, N, DEEP, TF32)
        _count(counts + 4 * member, index, done)
        target = tl.load(labels + images)
        s = _product(value, copy, tl.load(given + grid), wide, n, N, DEEP, False, TF32)
        drawn = _normal(draws, _STEPS, N)
        out = tanh(s + noise * _norm(s)[:, None] * drawn) if NOISY else tl.load(value + grid)
        loss, g = _read_out(weights, first, second, C, e, out, target, rate, root, wide, n, q, N, TF32)
        tl.store(losses + member, tl.load(losses + member) + loss)
        if NOISY:
            g = _last_step_back(states, back + SLOT, copy, out, s, drawn, g, noise, wide, n, N, DEEP, TF32)
            s = _product(mean, copy, tl.load(given + grid), wide, n, N, DEEP, False, TF32)
        slope, growth, direction = _slopes(s, noise, draws, N, NOISY)
        v, index, done = _solve_adjoint(states, past, copy, g, slope, growth, direction, wide, n, N, NOISY, DEEP,
                                        TF32)  # fmt: skip
        _count(counts + 4 * member + 2, index, done)
        _step_equilibrium(weights, first, second, W, b, c, copy, states, mean, value, back, injected, v, u, images,
                          rate, root, wide, n, p, N, NOISY, ROWS, COLUMNS, TF32)  # fmt: skip
        update += 1
        tl.debug_barrier()


@triton.jit
def _layers_forward(
    weights, W, b, states, signals, x, layers, inject, noise, draws, wide, n,
    N: tl.constexpr, NOISY: tl.constexpr, DEEP: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """Computes all layers, leaves their states and signals and returns the last state."""
    SLOT: tl.constexpr = _SAMPLES * N
    columns = tl.arange(0, N)
    grid, z = tl.arange(0, _SAMPLES)[:, None] * N + columns[None, :], x
    tl.store(states + grid, z)
    tl.debug_barrier()
    layer = tl.zeros([], tl.int32)
    while layer < layers:
        bias = tl.load(weights + b + layer * n + columns, mask=columns < wide, other=0.0)[None, :]
        s = _product(states + layer * SLOT, weights + W + layer * n * n, inject * x + bias, wide, n, N, DEEP,
                     False, TF32)  # fmt: skip
        tl.store(signals + layer * SLOT + grid, s)
        if NOISY:
            s += noise * _norm(s)[:, None] * _normal(draws, layer, N)
        z = tanh(s)
        tl.store(states + (layer + 1) * SLOT + grid, z)
        tl.debug_barrier()
        layer += 1
    return z


@triton.jit
def _layers_back(
    weights, first, second, W, b, states, signals, back, g, layers, inject, noise, draws, rate, root, wide, n,
    N: tl.constexpr, NOISY: tl.constexpr, DEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TF32: tl.constexpr,
):  # fmt: skip
    """Takes a cotangent back over all layers and steps their weights; returns that of the projected input."""
    SLOT: tl.constexpr = _SAMPLES * N
    columns = tl.arange(0, N)
    grid = tl.arange(0, _SAMPLES)[:, None] * N + columns[None, :]
    inside = columns < wide
    layer = layers + tl.zeros([], tl.int32)
    given = tl.zeros([_SAMPLES, N], tl.float32)
    while layer > 0:
        layer -= 1
        z = tl.load(states + (layer + 1) * SLOT + grid)
        v = (1 - z * z) * g
        if NOISY:
            s = tl.load(signals + layer * SLOT + grid)
            size = tl.maximum(_norm(s), _TINY)[:, None]
            v += noise * s / size * tl.sum(_normal(draws, layer, N) * v, 1)[:, None]
        given += inject * v
        tl.store(back + grid, v)
        tl.debug_barrier()
        zero = tl.zeros([_SAMPLES, N], tl.float32)
        g = _product(back, weights + W + layer * n * n, zero, wide, n, N, DEEP, True, TF32)
        tl.debug_barrier()
        _adam(weights, first, second, b + layer * n + columns, inside, tl.sum(v, 0), rate, root)
        _adam_outer(weights, first, second, W + layer * n * n, weights, back, states + layer * SLOT, rate,
                    root, wide, n, N, _SAMPLES, ROWS, COLUMNS, False, TF32)  # fmt: skip
        tl.debug_barrier()
    return g + given


@triton.jit(do_not_specialize=VARYING)
def train_feed_forward(
    weights, first, second, u, labels, orders, rates, members, numbers, amplitudes, scratch, losses,
    row, start, updates, total, n, q, seed, depth, injects,
    p: tl.constexpr,
    N: tl.constexpr, NOISY: tl.constexpr, DEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TF32: tl.constexpr,
):  # fmt: skip
    """Takes updates of feed-forward networks, each of its own depth."""
    SLOT: tl.constexpr = _SAMPLES * N
    program = tl.program_id(0)
    member = tl.load(members + program)
    width, own, layers = (
        tl.load(numbers + 3 * member),
        tl.load(numbers + 3 * member + 1),
        tl.load(numbers + 3 * member + 2),
    )
    wide, a, inject = (width + 15) // 16 * 16, tl.load(amplitudes + member), tl.load(injects + member)
    place = member.to(tl.int64) * total
    weights, first, second = weights + place, first + place, second + place
    c, W = n * p, n * p + n
    b = W + depth * n * n
    C = b + depth * n
    e = C + q * n
    samples, columns = tl.arange(0, _SAMPLES), tl.arange(0, N)
    grid = samples[:, None] * N + columns[None, :]
    inside = columns < wide
    noise = tl.where(columns < width, a, 0.0)[None, :]
    # slots: states before every layer and after the last, signals of the layers, the cotangent
    states = scratch + program.to(tl.int64) * (2 * depth + 2) * SLOT
    signals, back = states + (depth + 1) * SLOT, states + (2 * depth + 1) * SLOT
    update = start + tl.zeros([], tl.int32)
    while update < start + updates:
        images = tl.load(orders + (own * row + update) * _SAMPLES + samples)
        rate, root = tl.load(rates + 2 * update), tl.load(rates + 2 * update + 1)
        draws = seed + member.to(tl.int64) * 1_000_003 * 4096 + update
        x = _encode(u, images, weights, weights + c, wide, p, N, DEEP, TF32)
        z = _layers_forward(weights, W, b, states, signals, x, layers, inject, noise, draws, wide, n, N, NOISY,
                            DEEP, TF32)  # fmt: skip
        target = tl.load(labels + images)
        loss, g = _read_out(weights, first, second, C, e, z, target, rate, root, wide, n, q, N, TF32)
        tl.store(losses + member, tl.load(losses + member) + loss)
        g = _layers_back(weights, first, second, W, b, states, signals, back, g, layers, inject, noise, draws,
                         rate, root, wide, n, N, NOISY, DEEP, ROWS, COLUMNS, TF32)  # fmt: skip
        v = tl.where(x > 0, g, 0.0)
        _adam(weights, first, second, c + columns, inside, tl.sum(v, 0), rate, root)
        tl.store(back + grid, v)
        tl.debug_barrier()
        _adam_input(weights, first, second, back, u, images, rate, root, wide, p, N, ROWS, COLUMNS, TF32)
        update += 1
        tl.debug_barrier()


class FusedTrainer:
    """Trains an ensemble of classifiers without Jacobian penalty in batches of 16.

    Args:
        stack: the ensemble; `give_back` writes into it.
        u, labels: all images and classes, on the device.
        orders: rows of the images for every seed, ``(S, updates, 16)``.
        rate: of Adam.
        tf32: how products are rounded: "tf32", or "ieee" for not at all.
    """

    def __init__(
        self, stack: Stack, u: Tensor, labels: Tensor, orders: Tensor, rate: float, tf32: str = "tf32"
    ) -> None:
        self.stack, self.u, self.labels = stack, u.contiguous(), labels.to(torch.int32)
        self.device, self.tf32, self.taken = u.device, tf32, 0
        self.depth, self.classes = len(stack.W), stack.e.shape[-1]
        self.orders = orders.to(self.device, torch.int32).contiguous()
        members = stack.members
        pieces = [*self._pieces()]
        length = sum(sizes for _, sizes in pieces)
        self.weights = torch.zeros(len(members), -(-length // BATCH) * BATCH, device=self.device)
        self.first, self.second = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        for place, (piece, size) in zip(self._places(pieces), pieces, strict=True):
            self.weights[: len(piece), place : place + size] = piece.detach().flatten(1)
        seeds = sorted({member.seed for member in members})
        numbers = [[m.pair.width, seeds.index(m.seed), m.pair.layers] for m in members]
        self.numbers = torch.tensor(numbers, dtype=torch.int32, device=self.device)
        amplitudes = [0.0 if m.noise is None else 10 ** (-m.noise / 20) / math.sqrt(m.pair.width) for m in members]
        self.amplitudes = torch.tensor(amplitudes, device=self.device)
        self.injects = stack.inject.flatten().to(self.device)
        self.copies = self._copied()
        steps = torch.arange(1, self.orders.shape[1] + 1, dtype=torch.float64)
        corrected = [rate / (1 - BETAS[0] ** steps), (1 - BETAS[1] ** steps).sqrt()]
        self.rates = torch.stack(corrected, 1).to(self.device, torch.float32)
        self.losses = torch.zeros(len(members), device=self.device)
        self.counts = torch.zeros(len(members), 4, dtype=torch.int32, device=self.device)
        self.launches = [*self._launches()]
        self.streams = [torch.cuda.Stream() for _ in self.launches if self.device.type == "cuda"]

    def _pieces(self) -> Iterator[tuple[Tensor, int]]:
        """Returns the weights in the order of a row, with their length for one member."""
        stack = self.stack
        for parts in ([stack.V], [stack.c], stack.W, stack.b, [stack.C], [stack.e]):
            yield from ((part, part[0].numel()) for part in parts)

    @staticmethod
    def _places(pieces: Sequence[tuple[Tensor, int]]) -> list[int]:
        return [sum(size for _, size in pieces[:index]) for index in range(len(pieces))]

    def _copied(self) -> Tensor:  # (M, n, n)
        """Copies the first W of all members, as solves read them."""
        place, size = self._places([*self._pieces()])[2], self.stack.size**2
        kind = torch.float16 if self.tf32 == "tf32" else torch.float32
        return self.weights[:, place : place + size].to(kind).contiguous()

    def _launches(self) -> Iterator[tuple[Tensor, Tensor, int, bool]]:
        """Groups the members by padded width and noise, each group with its scratch memory."""
        classes: dict[tuple[int, bool], list[int]] = {}
        for place, member in enumerate(self.stack.members):
            padded = max(64, triton.next_power_of_2(member.pair.width))
            classes.setdefault((padded, member.noise is not None), []).append(place)
        slots = 7 + 2 * WINDOW if isinstance(self.stack, EquilibriumStack) else 2 * self.depth + 2
        for (padded, noisy), places in sorted(classes.items(), reverse=True):
            scratch = torch.zeros(len(places) * slots * BATCH * padded, device=self.device)
            yield torch.tensor(places, dtype=torch.int32, device=self.device), scratch, padded, noisy

    def advance(self, updates: int) -> None:
        """Takes updates with all members."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        for launch, stream in zip_longest(self.launches, self.streams):
            with torch.cuda.stream(stream):  # of None, nothing
                self._launch(updates, *launch)
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)
        self.taken += updates

    def _launch(self, updates: int, members: Tensor, scratch: Tensor, padded: int, noisy: bool) -> None:
        equilibria = isinstance(self.stack, EquilibriumStack)
        tensors = (self.weights, self.first, self.second, self.u, self.labels, self.orders, self.rates, members,
                   self.numbers, self.amplitudes, scratch, self.losses)  # fmt: skip
        sizes = (self.orders.shape[1], self.taken, updates, self.weights.shape[1], self.stack.size,
                 self.classes, 0)  # fmt: skip
        more = (self.counts, self.copies) if equilibria else (self.depth, self.injects)
        kernel = train_equilibria if equilibria else train_feed_forward
        block: dict[str, Any] = {
            "DEEP": 64 if equilibria else 32,
            "ROWS": min(64, padded),
            "COLUMNS": min(64, padded),
        }
        options = {"num_warps": 16 if padded > 256 else 8, "num_stages": 4 if padded > 256 else 3}
        kernel[(len(members),)](
            *tensors, *sizes, *more, p=self.u.shape[1], N=padded, NOISY=noisy, TF32=self.tf32, **block, **options
        )

    def state(self, history: Sequence[Tensor]) -> dict[str, Any]:
        """Returns everything from which training goes on, with the losses of the epochs so far."""
        tensors = {name: getattr(self, name).cpu() for name in ("weights", "first", "second")}
        return {"taken": self.taken, "losses": tuple(history), **tensors}

    def resume(self, state: dict[str, Any]) -> list[Tensor]:
        """Goes on from a state, and returns the losses of the epochs so far."""
        self.taken = state["taken"]
        for name in ("weights", "first", "second"):
            getattr(self, name).copy_(state[name])
        self.copies = self._copied()
        return [*state["losses"]]

    @torch.no_grad()
    def give_back(self) -> None:
        """Writes what was learnt into the stack."""
        pieces = [*self._pieces()]
        for place, (piece, size) in zip(self._places(pieces), pieces, strict=True):
            piece.copy_(self.weights[: len(piece), place : place + size].view_as(piece))
