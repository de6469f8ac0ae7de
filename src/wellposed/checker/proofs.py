"""The conditions of well-posedness, bounds and gaps as exact inequalities; one function a theorem."""

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite, sqrt
from operator import mul

from wellposed.checker.phi import Phi
from wellposed.checker.tensors import Matrix, RefusedError, Vector, rounded

BITS = 60  # of the entries of an approximate factor
MARGINS = (1e-10, 1e-12, 1e-14)


def dot(one: Sequence[int], other: Sequence[int]) -> int:
    """Computes a scalar product of whole numbers.

    Example:
        >>> dot([1, 2], [3, -1])
        1
    """
    return sum(map(mul, one, other))


def weighted(A: Matrix, phis: Sequence[Phi], v: Sequence[Fraction], value: Fraction) -> None:
    """Proves ``gamma_i sum_j |A_ij| v_j <= value v_i`` with v > 0: a contraction in ``max_i |x_i| / v_i``.

    Collatz and Wielandt; 003, Theorem 1, and for v = 1 Remark 2. Where phi acts on blocks, its constant is one in
    the norm inf, which that of v is only if v is the same for all states.
    """
    if len(v) != len(A.rows) or not all(entry > 0 for entry in v):
        raise RefusedError("the weights v are not all positive, so they make no norm")
    whole = _whole(v)
    for i, (row, phi) in enumerate(zip(A.rows, phis, strict=True)):
        if phi.slope is None and len({*whole}) > 1:
            raise RefusedError("the activation acts on blocks, so its certificate must be one of blocks")
        if phi.gamma * A.unit * sum(map(mul, map(abs, row), whole)) > value * whole[i]:
            raise RefusedError(f"gamma |A| v <= {rounded(value):.9g} v fails at state {i}")


def _whole(v: Sequence[Fraction]) -> Vector:
    """Multiplies numbers that are floats by one power of two."""
    unit = max(entry.denominator for entry in v)
    return [entry.numerator * (unit // entry.denominator) for entry in v]


def blocks(A: Matrix, phi: Phi, size: int, norm: str, v: Sequence[Fraction], value: Fraction) -> None:
    """Proves ``sum_J gamma |A_IJ| v_J <= value v_I`` in the norm 1 or inf (003, eq. 2.6 and Theorem 1)."""
    count, rest = divmod(len(A.rows), size)
    if not A.rows or rest:
        raise RefusedError(f"{len(A.rows)} states are not made up of blocks of {size}")
    if norm not in ("1", "inf") or count != len(v) or not all(entry > 0 for entry in v):
        raise RefusedError("blocks are checked in the norms 1 and inf, with one positive weight a block")
    whole = _whole(v)
    for i in range(count):
        total, part = 0, A.rows[size * i : size * (i + 1)]
        for j, weight in enumerate(whole):
            cut = [list(map(abs, row[size * j : size * (j + 1)])) for row in part]
            total += max(map(sum, cut if norm == "inf" else zip(*cut, strict=True))) * weight
        if phi.gamma * A.unit * total > value * whole[i]:
            raise RefusedError(f"gamma N(A) v <= {rounded(value):.9g} v fails at block {i}")


def one_sided(A: Matrix, phis: Sequence[Phi], value: Fraction) -> None:
    """Proves ``gamma (A_ii + sum_{j != i} |A_ij|) <= value`` for increasing phi."""
    gamma = max(phi.gamma for phi in phis)
    if not all(phi.slope is not None and phi.slope[0] >= 0 for phi in phis):
        raise RefusedError("mu needs increasing activations that act entry by entry")
    for i, row in enumerate(A.rows):
        if gamma * A.unit * (sum(map(abs, row)) - abs(row[i]) + row[i]) > value:
            raise RefusedError(f"gamma mu(A) <= {rounded(value):.9g} fails at state {i}")


def triangular(A: Matrix, phis: Sequence[Phi], value: Fraction) -> None:
    """Proves that A is triangular with ``d A_ii <= value`` for all slopes d (003, Remark 3)."""
    size = len(A.rows)
    upper = all(not any(row[:i]) for i, row in enumerate(A.rows))
    if not upper and any(any(row[i + 1 :]) for i, row in enumerate(A.rows)):
        raise RefusedError("A is not triangular")
    for i in range(size):
        slope = phis[i].slope
        if slope is None or max(d * A.rows[i][i] for d in slope) * A.unit > value:
            raise RefusedError(
                f"the loop of state {i} with itself is above {rounded(value):.9g}, or phi acts on blocks"
            )


def spectral(A: Matrix, phis: Sequence[Phi], value: Fraction) -> None:
    """Proves ``gamma |A|_2 <= value``: that ``(value / gamma)^2 I - A'A`` has no negative eigenvalue."""
    gamma = max(phi.gamma for phi in phis)
    if any(phi.slope is None for phi in phis) or value < 0:
        raise RefusedError("the spectral norm is checked for activations that act entry by entry")
    square = (value / gamma) ** 2 / A.unit**2
    columns = [list(column) for column in zip(*A.rows, strict=True)]
    gram = [[-square.denominator * dot(one, other) for other in columns] for one in columns]
    for i, row in enumerate(gram):
        row[i] += square.numerator
    if not positive(gram):
        raise RefusedError(f"gamma |A|_2 <= {rounded(value):.9g} is not proven")


def monotone(A: Matrix, phis: Sequence[Phi], value: Fraction) -> None:
    """Proves ``lambda_max((A + A') / 2) <= value`` for projections on intervals."""
    if not all(phi.projection for phi in phis):
        raise RefusedError("monotone needs projections on intervals, as relu is")
    cap, rows = 2 * value / A.unit, A.rows
    part = [[-cap.denominator * (rows[i][j] + rows[j][i]) for j in range(len(rows))] for i in range(len(rows))]
    for i, row in enumerate(part):
        row[i] += cap.numerator
    if not positive(part):
        raise RefusedError(f"lambda_max of the symmetric part <= {rounded(value):.9g} is not proven")


def positive(M: list[Vector]) -> bool:
    """Proves that a symmetric matrix of whole numbers has no negative eigenvalue.

    ``M = s L L' + R`` for any L; if R is diagonally dominant with no negative diagonal entry (Gershgorin), M is
    positive semidefinite. L is a Cholesky factor of M minus a little, in floating point; R is exact.

    Example:
        >>> positive([[2, 1], [1, 2]]), positive([[1, 2], [2, 1]])
        (True, False)
    """
    scale = max((M[i][i] for i in range(len(M))), default=0)
    if all(_dominant(row, i) for i, row in enumerate(M)):
        return True
    return scale > 0 and any(_dominated(M, scale, margin) for margin in MARGINS)


def _dominated(M: list[Vector], scale: int, margin: float) -> bool:
    L: list[list[float]] = []
    for i, row in enumerate(M):
        if max(map(abs, row)) > scale:  # no such matrix is positive semidefinite
            return False
        new: list[float] = []
        for j in range(i):
            new.append((row[j] / scale - sum(map(mul, new, L[j]))) / L[j][j])
        square = row[i] / scale - margin - sum(map(mul, new, new))
        if not (square > 0 and isfinite(square)):
            return False
        L.append([*new, sqrt(square)])
    whole = [[round(entry * 2**BITS) for entry in row] for row in L]
    for i, row in enumerate(M):
        products = [scale * dot(whole[i], whole[j]) for j in range(len(M))]  # the shorter one ends both
        if not _dominant([(entry << 2 * BITS) - p for entry, p in zip(row, products, strict=True)], i):
            return False
    return True


def _dominant(row: Vector, i: int) -> bool:
    return 2 * row[i] >= sum(map(abs, row)) if row[i] >= 0 else False


def reach(row: Vector, box: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Encloses ``row' x`` for x in a box, with nothing to spare.

    Example:
        >>> reach([2, -1], [(0, 1)] * 2)
        (-1, 2)
    """
    low = sum(a * x[0 if a >= 0 else 1] for a, x in zip(row, box, strict=True) if a)
    high = sum(a * x[1 if a >= 0 else 0] for a, x in zip(row, box, strict=True) if a)
    return low, high


def row_gap(
    columns: list[Vector],  # (d, m) of the design, all times 2^exponent
    exponent: int,
    target: tuple[Vector, int],  # (m,)
    weights: tuple[Vector, int],  # (d,)
    dual: tuple[Vector, int],  # (m,)
    ridge: Sequence[Fraction],  # (d,)
    capped: int,
    kappa: Fraction,
) -> Fraction:
    """Computes F(w) - D(nu) >= F(w) - min F of a row problem (003, eq. 3.4), for any nu.

    ``F(w) = 1/2 |Mw - z|^2 + 1/2 sum_j r_j w_j^2`` over ``|w_capped|_1 <= kappa``, and
    ``D(nu) = -1/2 |nu|^2 - z'nu - kappa |M_capped' nu|_inf - sum_free (M_j'nu)^2 / (2 r_j)``.
    """
    (z, z_unit), (w, w_unit), (nu, nu_unit) = ((part, Fraction(2) ** e) for part, e in (target, weights, dual))
    if sum(map(abs, w[:capped])) * w_unit > kappa:
        raise RefusedError(f"a row exceeds its cap of {rounded(kappa):.9g}")
    if any(r < 0 for r in ridge):
        raise RefusedError("a ridge is negative, so the problem is not convex")
    unit = Fraction(2) ** exponent
    fit = [dot(row, w) for row in zip(*columns, strict=True)] if columns else [0] * len(z)
    squares = unit * unit * w_unit * w_unit * dot(fit, fit) + z_unit * z_unit * dot(z, z)
    primal = squares - 2 * unit * w_unit * z_unit * dot(fit, z)
    primal += sum((r * (entry * w_unit) ** 2 for r, entry in zip(ridge, w, strict=True)), Fraction(0))
    slopes = [unit * nu_unit * dot(column, nu) for column in columns]
    least = -nu_unit * nu_unit * dot(nu, nu) - 2 * z_unit * nu_unit * dot(z, nu)
    least -= 2 * kappa * max(map(abs, slopes[:capped]), default=Fraction(0))
    for slope, r in zip(slopes[capped:], ridge[capped:], strict=True):
        if slope and not r:
            raise RefusedError("a dual vector is not feasible")
        least -= slope * slope / r if slope else 0
    return (primal - least) / 2
