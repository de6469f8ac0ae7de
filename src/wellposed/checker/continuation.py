"""Boxes that hold the equilibria of all inputs of a box, proven by continuation.

Let every u have exactly one equilibrium, with pre-activations z(u) that depend on u continuously, and let a closed
box S hold z(u0) for one u0 of a box U. If z(u) in S implies that z(u) lies in the interior of S, for every u of U,
then S holds z(u) for all of them: the inputs with z(u) in S are closed and open in U, which is connected.

That z(u) in S implies more is a linear bound: for any nu and lam, ``nu_j phi(z_j) <= lam_j z_j + g_j`` on S_j with
the largest gap g_j (`intercept`), so with x = phi(z) and z = Ax + Bu + b

    ``c'x + d'u <= lam'b + (d + B'lam)'u + sum g + (c + A'lam - nu)'x``,

where u is in U and x in phi(S). That z(u0) is in S is Krawczyk's test (`center`): with F(z) = z - A phi(z) - Bu
- b, any matrix Y and slopes D0 -+ Delta of phi on the box z -+ r, it asks for
``|Y F(z)| + (|I - Y (I - A D0)| + |Y A| Delta) r <= r``.

Where u may have several equilibria, the same test for all u of U at once, with ``|Y B|`` times the radii of U
added on the left, proves a branch: every u has exactly one equilibrium in z -+ r, continuous in u.
There is one by Brouwer's theorem. For two of them ``(I - A D)(z - z') = 0`` with D between the slopes; the part of
the left-hand side that belongs to r is below r, so ``I - Y (I - A D)`` has a spectral radius below one (Perron and
Frobenius), ``I - A D`` is not singular, and z = z'. The only solution in a compact box depends on u continuously.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor
from typing import NamedTuple

from wellposed.checker.phi import Phi
from wellposed.checker.proofs import dot, reach
from wellposed.checker.tensors import Matrix, RefusedError, Vector

GRID = 120  # bits behind the point, to which values of phi are rounded outward
Range = tuple[Fraction, Fraction]


class Scaled(NamedTuple):
    """The numbers ``entry * 2^exponent``."""

    entries: Vector
    exponent: int

    @property
    def unit(self) -> Fraction:
        """What an entry of one stands for."""
        return Fraction(2) ** self.exponent


def total(*terms: Scaled) -> Scaled:
    """Adds vectors without rounding.

    Example:
        >>> total(Scaled([1, 2], 0), Scaled([1, 1], -1))
        Scaled(entries=[3, 5], exponent=-1)
    """
    low = min(term.exponent for term in terms)
    rows = [[entry << (term.exponent - low) for entry in term.entries] for term in terms]
    return Scaled([sum(column) for column in zip(*rows, strict=True)], low)


def on_grid(ends: Sequence[Range]) -> list[tuple[int, int]]:
    """Rounds intervals outward to whole numbers of the grid."""
    return [(floor(low * (1 << GRID)), ceil(high * (1 << GRID))) for low, high in ends]


class Network(NamedTuple):
    """``x = phi(Ax + Bu + b)`` for u in a box, all numbers exact."""

    A: Matrix
    B: Matrix
    b: Scaled
    phis: Sequence[Phi]
    inputs: Scaled  # lower and upper ends
    columns: tuple[list[Vector], list[Vector]]  # of A and B

    @property
    def ends(self) -> list[tuple[int, int]]:
        """The ends of every input."""
        half = len(self.inputs.entries) // 2
        return list(zip(self.inputs.entries[:half], self.inputs.entries[half:], strict=True))


class Lines(NamedTuple):
    """A box of pre-activations, and slopes of lines below and above phi on it."""

    box: Sequence[Range]
    lower: Scaled
    upper: Scaled
    states: Sequence[tuple[int, int]]  # phi of the box, on the grid

    def multipliers(self, nu: Scaled) -> Scaled:
        """Returns lam, the slope above phi times nu where nu is positive."""
        pairs = zip(nu.entries, self.lower.entries, self.upper.entries, strict=True)
        return Scaled([m * (high if m > 0 else low) for m, low, high in pairs], nu.exponent + self.lower.exponent)


def upper_bound(network: Network, lines: Lines, c: Scaled, d: Scaled, nu: Scaled) -> Fraction:
    """Bounds ``c'x + d'u`` from above for all inputs whose pre-activations lie in the box."""
    lam = lines.multipliers(nu)
    value = dot(network.b.entries, lam.entries) * network.b.unit * lam.unit
    A, B = (
        Scaled([dot(column, lam.entries) for column in columns], matrix.exponent + lam.exponent)
        for matrix, columns in zip((network.A, network.B), network.columns, strict=True)
    )
    inputs, left = total(d, B), total(c, A, Scaled([-m for m in nu.entries], nu.exponent))
    value += reach(inputs.entries, network.ends)[1] * inputs.unit * network.inputs.unit
    value += reach(left.entries, lines.states)[1] * left.unit / (1 << GRID)
    for phi, m, slope, z in zip(network.phis, nu.entries, lam.entries, lines.box, strict=True):
        value += intercept(phi, m * nu.unit, slope * lam.unit, z)
    return value


def intercept(phi: Phi, nu: Fraction, lam: Fraction, z: Range) -> Fraction:
    """Bounds ``nu phi(z) - lam z`` on an interval from above.

    It is affine between kinks. A map that is convex below zero and concave above is largest at an end of its
    convex part, and lies below its tangents on the other.

    Example:
        >>> from wellposed.checker.phi import activation
        >>> intercept(activation("relu"), Fraction(1), Fraction(1, 2), (Fraction(-1), Fraction(1)))
        Fraction(1, 2)
    """
    if not nu and not lam:
        return Fraction(0)
    low, high = z
    points = [low, high, *(point for point in (phi.kinks or (Fraction(0),)) if low < point < high)]
    largest = max(nu * value(phi, point)[nu > 0] - lam * point for point in points)
    if phi.derivative is None or not nu:
        return largest
    part = (max(low, Fraction(0)), high) if nu > 0 else (low, min(high, Fraction(0)))
    if part[0] >= part[1]:
        return largest
    point = min(max(touching(phi, lam / nu, nu > 0), part[0]), part[1])
    slopes = [nu * slope - lam for slope in phi.derivative(point)]
    height = nu * value(phi, point)[nu > 0] - lam * point
    return max(largest, *(height + slope * (end - point) for slope in slopes for end in part))


def value(phi: Phi, z: Fraction) -> Range:
    """Encloses phi(z)."""
    if phi.image is None or (phi.kinks is None and phi.derivative is None):
        raise RefusedError("continuation is checked for piecewise linear activations, tanh and sigmoid")
    return phi.image(z)


def touching(phi: Phi, slope: Fraction, above: bool) -> Fraction:
    """Guesses where phi has a slope, right of zero if `above`; any guess will do."""
    assert phi.derivative is not None
    stretch = 1 / float(phi.derivative(Fraction(0))[1])  # 1 of tanh, 4 of sigmoid
    ratio = min(max(float(slope) * stretch, 1e-12), 1.0)
    point = math.acosh(1 / math.sqrt(ratio)) * (1 if stretch < 2 else 2)
    return Fraction(point if above else -point)


def slopes(phi: Phi, z: Range) -> Range:
    """Encloses all difference quotients of phi on an interval."""
    low, high = z
    if phi.derivative is not None:
        near = Fraction(0) if low <= 0 <= high else min(abs(low), abs(high))
        return phi.derivative(max(abs(low), abs(high)))[0], phi.derivative(near)[1]
    points = sorted({low, high, *(point for point in phi.kinks or () if low < point < high)})
    values = [value(phi, point)[0] for point in points]
    steps = zip(points, points[1:], values, values[1:], strict=False)
    quotients = [(v1 - v0) / (p1 - p0) for p0, p1, v0, v1 in steps]
    return min(quotients), max(quotients)


def center(network: Network, z: Sequence[Fraction], r: Sequence[Fraction], Y: Matrix, everywhere: bool) -> None:
    """Proves that an equilibrium at the center of the inputs has its pre-activations in the box z -+ r.

    With `everywhere`, that every input has exactly one equilibrium there.
    """
    A, n = network.A, len(z)
    if not all(radius > 0 for radius in r):
        raise RefusedError("the box around the equilibrium at the center has no interior")
    images = [value(phi, point) for phi, point in zip(network.phis, z, strict=True)]
    middle = [(low + high) / 2 for low, high in images]
    error = [(high - low) / 2 for low, high in images]
    u = [(low + high) * network.inputs.unit / 2 for low, high in network.ends]
    residual = []
    for i in range(n):
        states, inputs = zip(A.rows[i], middle, strict=True), zip(network.B.rows[i], u, strict=True)
        reached = A.unit * sum(entry * x for entry, x in states if entry)
        reached += network.B.unit * sum(entry * one for entry, one in inputs if entry)
        residual.append(z[i] - reached - network.b.entries[i] * network.b.unit)
    ranges = [slopes(phi, (p - q, p + q)) for phi, p, q in zip(network.phis, z, r, strict=True)]
    half, where = network.inputs.unit / 2, "all inputs" if everywhere else "the center of the inputs"
    for i, row in enumerate(Y.rows):
        P = [dot(row, column) * Y.unit * A.unit for column in network.columns[0]]
        moved = abs(Y.unit * sum(entry * part for entry, part in zip(row, residual, strict=True)))
        moved += sum(abs(entry) * part for entry, part in zip(P, error, strict=True))
        if everywhere:
            pairs = zip(network.columns[1], network.ends, strict=True)
            drive = sum(abs(dot(row, column)) * (high - low) for column, (low, high) in pairs)
            moved += drive * Y.unit * network.B.unit * half
        shrunk = Fraction(0)
        for j, (low, high) in enumerate(ranges):
            off = abs((i == j) - row[j] * Y.unit + P[j] * (low + high) / 2)
            shrunk += (off + abs(P[j]) * (high - low) / 2) * r[j]
        if not shrunk < r[i] or moved + shrunk > r[i]:
            raise RefusedError(f"state {i} is not proven to lie in its box at {where}")
