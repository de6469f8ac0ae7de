"""Small matrices that were made to deceive certificates: near-critical, defective, huge, tiny, in odd units."""

import math
from collections.abc import Callable

import numpy as np

Draw = np.random.Generator


def _ulps(value: float, count: int) -> float:
    for _ in range(abs(count)):
        value = math.nextafter(value, math.inf if count > 0 else -math.inf)
    return value


def jordan(draw: Draw, n: int) -> np.ndarray:
    """One eigenvalue and one eigenvector."""
    level = float(draw.choice([0.5, 0.99, _ulps(1.0, -1), 1.0, _ulps(1.0, 1), -0.9]))
    return level * np.eye(n) + float(draw.choice([1.0, 1e-3, 1e3, 1e150])) * np.eye(n, k=1)


def critical_rows(draw: Draw, n: int) -> np.ndarray:
    """Rows whose sums are one, but for a few last digits."""
    A = draw.normal(size=(n, n))
    A /= np.abs(A).sum(1, keepdims=True)
    for i in range(n):
        rest = float(np.abs(A[i, : n - 1]).sum())
        A[i, -1] = math.copysign(_ulps(max(1.0 - rest, 0.0), int(draw.integers(-6, 2))), A[i, -1])
    return A if draw.random() < 0.7 else A / float(draw.choice([0.25, 1.1289041452, 1.7580993408473773]))


def critical_rotation(draw: Draw, n: int) -> np.ndarray:
    """An isometry, but for a few last digits."""
    Q = np.linalg.qr(draw.normal(size=(n, n)))[0]
    if draw.random() < 0.3:
        Q = np.eye(n)[draw.permutation(n)]
    return Q * _ulps(1.0, int(draw.integers(-3, 4)))


def critical_symmetric(draw: Draw, n: int) -> np.ndarray:
    """A symmetric part whose largest eigenvalue is one, but for a few last digits; the skew part has any size."""
    Q = np.linalg.qr(draw.normal(size=(n, n)))[0]
    S = Q @ np.diag([_ulps(1.0, int(draw.integers(-9, 10))), *-draw.uniform(0, 3, n - 1)]) @ Q.T
    K = draw.normal(size=(n, n)) * 10.0 ** draw.choice([-8, 0, 8, 150])
    return (S + S.T) / 2 + (K - K.T)


def critical_ring(draw: Draw, n: int) -> np.ndarray:
    """A cycle whose gains multiply to one, but for a few last digits, in any units."""
    gains = 10.0 ** draw.uniform(-3, 3, n)
    gains[-1] = _ulps(1.0 / float(np.prod(gains[:-1])), int(draw.integers(-3, 4)))
    return np.roll(np.diag(gains), 1, axis=1)


def huge(draw: Draw, n: int) -> np.ndarray:
    """Entries of 1e150 to 1e300 among others, often on one side or with strong negative feedback."""
    A = draw.normal(size=(n, n)) * 10.0 ** draw.uniform(-1, 0)
    A[draw.random((n, n)) < 0.4] *= 10.0 ** draw.uniform(150, 300)
    shape = draw.integers(4)
    A = np.triu(A, 1) if shape == 0 else np.tril(A) if shape == 1 else A
    return A - np.diag(np.abs(A).sum(1) * 2) if shape == 2 else A


def denormal(draw: Draw, n: int) -> np.ndarray:
    """Entries down to the smallest number there is, among others."""
    A = draw.choice([-1.0, 1.0], (n, n)) * 10.0 ** draw.uniform(-323, -290, (n, n))
    A[draw.random((n, n)) < 0.3] = 0.0
    return A + np.eye(n)[draw.permutation(n)] * float(draw.choice([0.0, 0.5, _ulps(1.0, -1), 1.0]))


def smallest(draw: Draw, n: int) -> np.ndarray:
    """Small multiples of the smallest number there is, in float64 or in float32."""
    unit = float(draw.choice([5e-324, 2.0**-149]))
    A = draw.integers(-4, 5, (n, n)) * unit
    return A if draw.random() < 0.7 else A + np.diag(draw.choice([0.0, 0.5, 1e-300, -1e-310], n))


def mixed_scales(draw: Draw, n: int) -> np.ndarray:
    """A matrix that is nearly critical in other units, spread over many orders of magnitude."""
    units = 10.0 ** draw.uniform(-float(draw.choice([3, 40, 120])), 0, n)
    A = np.abs(critical_rows(draw, n)) * float(draw.choice([0.5, 0.999, 1.0 - 1e-12, 1.0]))
    return draw.choice([-1.0, 1.0], (n, n)) * A * units[:, None] / units[None, :]


def hidden_order(draw: Draw, n: int) -> np.ndarray:
    """No cycle, or nearly none: states in an order of their own, with one small entry that may close it."""
    A = np.triu(draw.normal(size=(n, n)) * 10.0 ** draw.uniform(-5, 100), 1)
    if n > 1 and draw.random() < 0.5:
        A[-1, 0] = 10.0 ** draw.uniform(-320, 0)
    order = draw.permutation(n)
    return A[order][:, order]


def plain(draw: Draw, n: int) -> np.ndarray:
    """Nothing special, some entries zero."""
    A = draw.normal(size=(n, n)) * 10.0 ** draw.uniform(-2, 0.5) / n
    return np.where(draw.random((n, n)) < 0.3, 0.0, A)


def broken(draw: Draw, n: int) -> np.ndarray:
    """One entry that is no number."""
    A = plain(draw, n)
    A[draw.integers(n), draw.integers(n)] = draw.choice([np.nan, np.inf, -np.inf])
    return A


FAMILIES: dict[str, Callable[[Draw, int], np.ndarray]] = {
    "defective": jordan, "rows near one": critical_rows, "isometries": critical_rotation,
    "symmetric parts near one": critical_symmetric, "rings near one": critical_ring, "huge": huge,
    "denormal": denormal, "mixed scales": mixed_scales, "hidden order": hidden_order, "smallest numbers": smallest,
    "plain": plain, "not finite": broken,
}  # fmt: skip
