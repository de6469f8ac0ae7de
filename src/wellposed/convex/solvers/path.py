"""The LASSO path of one row after another on a shared Gram matrix, compiled on first use.

Along the path of min 1/2 a'Ga - c'a + lambda |a|_1 the active entries keep |c - Ga|_j = lambda; between two events
(an entry joins, an entry leaves) a and c - Ga are linear in lambda, with da = G_AA^-1 s for every unit that lambda
falls. g(lambda) = |a|_1 is continuous and falls with lambda (003, Lemma 1, first two bullets), so the cap is met
exactly within one piece.
"""

from typing import Any

import numpy as np

from wellposed.errors import require
from wellposed.kernels.cpu.cache import njit_cached

numba = require("numba", extra="convex")

NEAR = 1e-12  # what counts as equal, relative to the first lambda or to a column's own square norm
CAPPED, FLOOR, CLOSED, LONG = range(4)  # why a path ended: at kappa, at lasso, gap closed, too many steps
FREE, RETURNED, DEPENDENT, BARRED = range(4)  # whether a column may join

compiled = njit_cached(nogil=True, error_model="numpy")
part = numba.njit(error_model="numpy")
summing = numba.njit(error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


@summing
def dot(x: Any, y: Any, count: int) -> float:
    """Returns the product of the first entries."""
    total = 0.0
    for q in range(count):
        total += x[q] * y[q]
    return total


@part
def forward(L: Any, right: Any, y: Any, start: int, count: int) -> None:
    """Solves L y = right from row `start` on; rows before it are solved."""
    for i in range(start, count):
        y[i] = (right[i] - dot(L[i], y, i)) / L[i, i]


@part
def backward(L: Any, y: Any, w: Any, count: int) -> None:
    """Solves L' w = y."""
    for i in range(count):
        w[i] = y[i]
    for i in range(count - 1, -1, -1):
        w[i] /= L[i, i]
        t, row = w[i], L[i]
        for q in range(i):
            w[q] -= t * row[q]


@summing
def images(G: Any, active: Any, w: Any, count: int, v: Any) -> None:
    """Computes v = G w for w on the active columns, four columns at a time."""
    for q in range(v.shape[0]):
        v[q] = 0.0
    i = 0
    while i + 4 <= count:
        a, b, c, d = w[i], w[i + 1], w[i + 2], w[i + 3]
        ga, gb, gc, gd = G[active[i]], G[active[i + 1]], G[active[i + 2]], G[active[i + 3]]
        for q in range(v.shape[0]):
            v[q] += a * ga[q] + b * gb[q] + c * gc[q] + d * gd[q]
        i += 4
    while i < count:
        a, ga = w[i], G[active[i]]
        for q in range(v.shape[0]):
            v[q] += a * ga[q]
        i += 1


@part
def append(L: Any, G: Any, active: Any, count: int, j: int) -> bool:
    """Adds column j to the factor of G_AA; returns False if it depends on the active ones."""
    row = L[count]
    for i in range(count):
        row[i] = (G[j, active[i]] - dot(L[i], row, i)) / L[i, i]
    rest = G[j, j] - dot(row, row, count)
    if rest <= NEAR * G[j, j]:
        return False
    row[count] = np.sqrt(rest)
    active[count] = j
    return True


@part
def remove(L: Any, active: Any, signs: Any, count: int, index: int) -> None:
    """Takes one active column out of the factor, by plane rotations."""
    for i in range(index, count - 1):
        active[i], signs[i] = active[i + 1], signs[i + 1]
        for q in range(i + 2):
            L[i, q] = L[i + 1, q]
    for i in range(index, count - 1):
        x, y = L[i, i], L[i, i + 1]
        r = np.sqrt(x * x + y * y)
        cosine, sine = x / r, y / r
        L[i, i] = r
        for q in range(i + 1, count - 1):
            x, y = L[q, i], L[q, i + 1]
            L[q, i], L[q, i + 1] = cosine * x + sine * y, cosine * y - sine * x


@part
def next_to_join(c: Any, v: Any, level: float, status: Any, inside: Any) -> Any:
    """Finds the column whose correlation meets lambda first, and after which fall of lambda."""
    best, index = np.inf, -1
    for q in range(c.shape[0]):
        if inside[q] or status[q] > RETURNED:
            continue
        back = status[q] == RETURNED  # it has just left, so it can come back at once with the other sign only
        rate = 1.0 - v[q]
        if rate > NEAR and not (back and c[q] > 0):
            t = max(level - c[q], 0.0) / rate
            if t < best:
                best, index = t, q
        rate = 1.0 + v[q]
        if rate > NEAR and not (back and c[q] <= 0):
            t = max(level + c[q], 0.0) / rate
            if t < best:
                best, index = t, q
    return best, index


@part
def next_to_leave(a: Any, w: Any, signs: Any, active: Any, count: int) -> Any:
    """Finds the active entry that reaches zero first."""
    best, index = np.inf, -1
    for i in range(count):
        if w[i] * signs[i] < 0:
            t = abs(a[active[i]] / w[i])
            if t < best:
                best, index = t, i
    return best, index


@part
def start(c: Any, status: Any) -> Any:
    """Finds the first lambda and its column (003, Lemma 1, last bullet)."""
    level, first = 0.0, -1
    for q in range(c.shape[0]):
        if status[q] == FREE and abs(c[q]) > level:
            level, first = abs(c[q]), q
    return level, first


@part
def settle(
    G: Any, c: Any, L: Any, active: Any, signs: Any, count: int, kappa: float, level: float, ended: int, a: Any
) -> float:  # fmt: skip
    """Solves G_AA a = c_A - lambda s anew, free of the drift of the path, with |a|_1 = kappa if that ended it."""
    p, q, y, r = np.zeros(count), np.empty(count), np.empty(count), np.empty(count)
    forward(L, signs, y, 0, count)
    backward(L, y, q, count)
    for _ in range(2):
        for i in range(count):
            r[i] = c[active[i]]
            row = G[active[i]]
            for k in range(count):
                r[i] -= row[active[k]] * p[k]
        forward(L, r, y, 0, count)
        backward(L, y, r, count)
        for i in range(count):
            p[i] += r[i]
    if ended == CAPPED:
        level = max((dot(signs, p, count) - kappa) / dot(signs, q, count), 0.0)
    for i in range(count):
        p[i] -= level * q[i]
        if not p[i] * signs[i] >= 0:
            return level  # dependent to rounding: what the path has found is better
    for i in range(count):
        a[active[i]] = p[i]
    return level


@part
def enter(
    G: Any, c: Any, L: Any, j: int, active: Any, signs: Any, count: int, status: Any, inside: Any
) -> int:  # fmt: skip
    """Lets a column join, or marks it as dependent; returns the number of active columns."""
    if not append(L, G, active, count, j):
        status[j] = DEPENDENT
        return count
    signs[count], inside[j] = (1.0 if c[j] > 0 else -1.0), True
    return count + 1


@part
def leave(
    L: Any, index: int, active: Any, signs: Any, count: int, status: Any, inside: Any, a: Any
) -> int:  # fmt: skip
    """Lets an active column go; those that depended on it may join again."""
    gone = active[index]
    remove(L, active, signs, count, index)
    for q in range(status.shape[0]):
        if status[q] == DEPENDENT:
            status[q] = FREE
    a[gone], inside[gone], status[gone] = 0.0, False, RETURNED
    return count - 1


@part
def follow(
    G: Any, c0: Any, kappa: float, floor: float, target: float, allowed: Any, limit: int, L: Any, a: Any
) -> Any:  # fmt: skip
    """Follows the path of one row until the cap, the floor or a small gap; returns lambda, steps and why."""
    d = c0.shape[0]
    active, signs, w, y = np.empty(d, np.int64), np.empty(d), np.empty(d), np.empty(d)
    v, c, inside, status = np.empty(d), c0.copy(), np.zeros(d, np.bool_), np.zeros(d, np.int8)
    for q in range(d):
        if not allowed[q] or not G[q, q] > 0:
            status[q] = BARRED
    level, j = start(c, status)
    if level <= floor or (level - floor) * kappa <= target:
        return level, 0, CLOSED
    least, norm, count, known, i, step, ended, joining = NEAR * level / 10, 0.0, 0, 0, 0, 0, LONG, True
    while step < limit and ended == LONG:
        step += 1
        if joining:
            known, count = count, enter(G, c, L, j, active, signs, count, status, inside)
        else:
            known, count = i, leave(L, i, active, signs, count, status, inside, a)
        forward(L, signs, y, known, count)
        backward(L, y, w, count)
        images(G, active, w, count, v)
        rate = dot(signs, w, count)
        joins, j = next_to_join(c, v, level, status, inside)
        leaves, i = next_to_leave(a, w, signs, active, count)
        to_cap, to_floor = (kappa - norm) / rate, level - floor
        t = min(min(joins, leaves), min(to_cap, to_floor))
        for k in range(count):
            a[active[k]] += t * w[k]
        for q in range(d):
            c[q] -= t * v[q]
            if t > least and status[q] == RETURNED:
                status[q] = FREE
        level, norm, joining = level - t, norm + t * rate, joins < leaves
        if t == to_cap:
            ended = CAPPED
        elif t == to_floor:
            ended = FLOOR
        elif level <= least or (level - floor) * (kappa - norm) <= target:
            ended = CLOSED
    return settle(G, c0, L, active, signs, count, kappa, level, ended, a), step, ended


@compiled
def follow_all(
    G: Any, C: Any, kappa: float, floor: float, targets: Any, allowed: Any, limit: int
) -> Any:  # fmt: skip
    """Follows the path of every row; returns weights, lambdas, steps and why each ended."""
    rows, d = C.shape
    weights, levels = np.zeros((rows, d)), np.zeros(rows)
    steps, ended = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    L = np.empty((d, d))
    for i in range(rows):
        mask = allowed[i] if allowed.shape[0] > 1 else allowed[0]
        levels[i], steps[i], ended[i] = follow(G, C[i], kappa, floor, targets[i], mask, limit, L, weights[i])
    return weights, levels, steps, ended


def use_kernels() -> None:
    """Follows a short path, for which everything is compiled."""
    follow_all(np.eye(2), np.ones((1, 2)), 1.0, 0.0, np.zeros(1), np.ones((1, 2), np.bool_), 4)
