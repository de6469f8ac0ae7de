"""Small matrices of fractions: what is compared with floating point is computed here without rounding."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product

from torch import Tensor

Row = list[Fraction]
Matrix = list[Row]
ZERO, ONE = Fraction(0), Fraction(1)


def exact(matrix: Tensor) -> Matrix:
    """Reads a finite matrix."""
    return [[Fraction(entry) for entry in row] for row in matrix.double().tolist()]


def identity(n: int, factor: Fraction = ONE) -> Matrix:
    """A multiple of the identity."""
    return [[factor if i == j else ZERO for j in range(n)] for i in range(n)]


def transposed(A: Matrix) -> Matrix:
    """A with rows and columns exchanged."""
    return [list(column) for column in zip(*A, strict=True)]


def times(A: Matrix, B: Matrix) -> Matrix:
    """The product."""
    columns = transposed(B)
    return [[sum((a * b for a, b in zip(row, column, strict=True)), ZERO) for column in columns] for row in A]


def minus(A: Matrix, B: Matrix) -> Matrix:
    """The difference."""
    return [[a - b for a, b in zip(one, other, strict=True)] for one, other in zip(A, B, strict=True)]


def row_norm(A: Matrix) -> Fraction:
    """The largest sum of absolute values in a row."""
    return max(sum(map(abs, row), ZERO) for row in A)


def inverse(A: Matrix) -> Matrix | None:
    """The inverse by elimination; None if there is none."""
    n = len(A)
    rows = [[*row, *unit] for row, unit in zip(A, identity(n), strict=True)]
    for k in range(n):
        pivot = next((i for i in range(k, n) if rows[i][k]), None)
        if pivot is None:
            return None
        rows[k], rows[pivot] = rows[pivot], rows[k]
        rows[k] = [entry / rows[k][k] for entry in rows[k]]
        for i in range(n):
            if i != k and rows[i][k]:
                factor = rows[i][k]
                rows[i] = [entry - factor * other for entry, other in zip(rows[i], rows[k], strict=True)]
    return [row[n:] for row in rows]


def positive(M: Matrix) -> bool:
    """Whether a symmetric matrix has no negative eigenvalue, by symmetric elimination."""
    rest = [list(row) for row in M]
    while rest:
        k = max(range(len(rest)), key=lambda i: rest[i][i])
        pivot = rest[k][k]
        if pivot < 0 or (pivot == 0 and any(any(row) for row in rest)):
            return False
        if pivot == 0:
            return True
        others = [i for i in range(len(rest)) if i != k]
        rest = [[rest[i][j] - rest[i][k] * rest[k][j] / pivot for j in others] for i in others]
    return True


def spectral_below(A: Matrix, value: Fraction) -> bool:
    """Whether ``|A|_2 <= value``: whether ``value^2 I - A'A`` has no negative eigenvalue."""
    gram = times(transposed(A), A)
    return value >= 0 and positive(minus(identity(len(gram), value * value), gram))


def spectral_from_below(A: Matrix, steps: int = 70) -> Fraction:
    """A number below ``|A|_2`` and nearly as large, by halving."""
    high = sum((abs(entry) for row in A for entry in row), ZERO)
    low = ZERO
    for _ in range(steps if high else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if spectral_below(A, middle) else (middle, high)
    return low


def symmetric_below(A: Matrix, value: Fraction) -> bool:
    """Whether no eigenvalue of the symmetric part is larger than a value."""
    n, turned = len(A), transposed(A)
    part = [[(A[i][j] + turned[i][j]) / 2 for j in range(n)] for i in range(n)]
    return positive(minus(identity(n, value), part))


def cyclic(A: Matrix) -> bool:
    """Whether the graph of the entries that are not zero has a cycle, by taking states without successors away."""
    left = set(range(len(A)))
    while left:
        ends = {i for i in left if not any(A[i][j] for j in left)}
        if not ends:
            return True
        left -= ends
    return False


def slopes(n: int, low: Fraction, high: Fraction) -> list[Sequence[Fraction]]:
    """All diagonals of extreme slopes, and the one of zeros."""
    return [*product((low, high), repeat=n), (ZERO,) * n]


def spread(A: Matrix, D: Sequence[Fraction]) -> Matrix | None:
    """``(I - DA)^-1``: how residuals become errors where phi has these slopes."""
    scaled = [[d * entry for entry in row] for d, row in zip(D, A, strict=True)]
    return inverse(minus(identity(len(A)), scaled))


def relu_equilibrium(A: Matrix, v: Row) -> Row | None:
    """A solution of ``x = max(Ax + v, 0)``."""
    return next(relu_equilibria(A, v), None)


def relu_equilibria(A: Matrix, v: Row) -> Iterator[Row]:
    """All solutions of ``x = max(Ax + v, 0)`` that stand alone, found among all sets of active states."""
    n = len(A)
    for active in product((ZERO, ONE), repeat=n):
        around = spread(A, active)
        if around is None:
            continue
        driven = [[a * entry] for a, entry in zip(active, v, strict=True)]
        x = [row[0] for row in times(around, driven)]
        z = [sum((a * b for a, b in zip(row, x, strict=True)), c) for row, c in zip(A, v, strict=True)]
        if all(x[i] == max(z[i], ZERO) for i in range(n)):
            yield x
