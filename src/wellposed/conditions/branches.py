"""When one equilibrium continues over a whole set, though nothing is known of others: a local proof.

`BranchEquation` is ``z = A phi(z) + v`` with pre-activations z and drives v of a set, and `BranchBox` a box of z
with what was proven of it.

Theorem. Let S be the box ``z0 +- r``, J all slopes between points of S (`slope_range`), Q those between z0 and
points of S, Y any matrix, and V a set of drives. If

    ``|Y (z0 - A phi(z0) - v)| + |I - Y (I - A q)| r < r``  for all q in Q and v in V, and
    ``I - A j`` is non-singular for all j in J,

then every drive of V has exactly one solution in S, and it depends on the drive continuously.

Proof. ``K(z) = z - Y (z - A phi(z) - v)`` differs from z0 by ``-Y (z0 - A phi(z0) - v) + (I - Y (I - A q)) (z -
z0)`` with q in Q, so K maps S into its interior and has a fixed point there (Brouwer). ``I - Y (I - A q)`` makes
r smaller, so its spectral radius is below one and Y is not singular: a fixed point is a solution. For two
solutions in S, ``0 = (I - A j) (z - z')`` with j in J, so they are one. S is compact and the solutions in it are a
closed set, so the only one depends on v continuously.

That all ``I - A j`` are non-singular is proven by a Perron-Frobenius eigenvalue: with D the middle and Delta the
radius of J and ``Y = (I - A D)^-1``, ``Y (I - A j) = I - Y A (j - D)`` and ``|Y A (j - D)| <= |Y A| Delta``; if
that matrix has an eigenvalue below one, no ``I - A j`` is singular. The question itself is NP-hard, so the answer
may be "not proven" where the branch does continue.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.activations.slopes import PARAMETER, SlopeRange, is_product, joined, slope_range
from wellposed.conditions.norms import perron_weights
from wellposed.conditions.rounding import EPS, TINY, upward

NEWTON_STEPS = 30
ROUNDS, GROWTH = 15, 0.05  # of a box that does not hold its image, and by how much more than that it grows
SHRINKS = 4  # of a box that does
WIDEST = 1e4  # times its first width, beyond which a box is given up


@dataclass(frozen=True)
class BranchBox:
    """A box of pre-activations, ``center +- radius``, that holds one solution for every drive of a set.

    Args:
        center, radius: (n,); the radius is infinite where nothing is proven.
        value: bounds the Perron-Frobenius eigenvalue of ``|(I - A D)^-1 A| Delta``; below one where proven.
        why_not: what failed; empty where nothing did.
    """

    center: Tensor
    radius: Tensor
    value: float
    why_not: str = ""


@dataclass(frozen=True)
class BranchEquation:
    """The equation ``z = A phi(z) + v``, in float64.

    Args:
        A: (n, n).
        doubt: (n, n), how far the entries of A may be off.
        activations: phi with the number of states that each of its parts has.

    Example:
        >>> from wellposed.activations import get_activation
        >>> A = torch.tensor([[3.0]], dtype=torch.float64)  # tanh(3 x) has three fixed points
        >>> equation = BranchEquation(A, torch.zeros_like(A), ((get_activation("tanh"), 1),))
        >>> start, none, one = (torch.tensor([entry], dtype=torch.float64) for entry in (3.0, 0.0, 1.0))
        >>> boxes = [equation.prove(start, none, none, [(one[None], radius * one)]) for radius in (0.5, 2.0)]
        >>> [box.why_not for box in boxes]
        ['', 'no box around the equilibrium holds its own image']
    """

    A: Tensor
    doubt: Tensor
    activations: tuple[tuple[Activation, int], ...]

    def function(self, z: Tensor) -> Tensor:
        """Returns phi(z)."""
        pieces = z.split([size for _, size in self.activations])
        return torch.cat(
            [phi.function(part[None])[0] for (phi, _), part in zip(self.activations, pieces, strict=True)]
        )

    def slopes(self, z: Tensor, radius: Tensor, secants: bool = False) -> SlopeRange:
        """Encloses the slopes of phi on a box; with `secants` those between its center and other points."""
        sizes = [size for _, size in self.activations]
        pairs = zip(self.activations, z.split(sizes), radius.split(sizes), strict=True)
        ranges = [slope_range(phi, part[None], own[None], secants) for (phi, _), part, own in pairs]
        middle, spread = joined(ranges)
        return SlopeRange(middle[0], spread[0])

    def solve(self, z: Tensor, v: Tensor) -> Tensor:
        """Improves a solution by Newton's method; returns the point with the least residual."""
        best, least = z, math.inf
        for _ in range(NEWTON_STEPS):
            residual = z - self.A @ self.function(z) - v
            size = float(residual.abs().max()) if len(z) else 0.0
            if not size < least:
                break
            best, least = z, size
            slope = self.slopes(z, torch.zeros_like(z)).middle
            z = z - torch.linalg.solve_ex(self._eye - _times(self.A, slope), residual)[0]
        return best

    def prove(self, z: Tensor, v: Tensor, slack: Tensor, drive: Sequence[tuple[Tensor, Tensor]]) -> BranchBox:
        """Proves a box around the solution near z, for drives ``v +- slack + sum W d`` with ``|d| <= radius``.

        Args:
            z, v, slack: (n,).
            drive: W (n, m) and a radius (m,), for everything that the drive depends on.
        """
        z = self.solve(z, v)
        if not bool(z.isfinite().all()):
            return _failed(z, "no equilibrium was found at the center")
        residual, error = self._residual(z, v)
        load = residual, upward(error + slack, 2), drive
        none = torch.zeros_like(z)
        first = self._image(self.slopes(z, none, True), none, load)[0]
        radius = (1 + GROWTH) * first + 1e-30 * (1 + z.abs())
        for _ in range(ROUNDS):
            image, change = self._image(self.slopes(z, radius, True), radius, load)
            if bool((image < radius).all()):
                return self._proven(z, image, load)
            if not bool((image <= WIDEST * first.max()).all()):
                break
            ahead = torch.linalg.solve_ex(self._eye - change, image - change @ radius)[0]
            sound = bool((ahead >= image).all()) and bool((ahead <= WIDEST * first.max()).all())
            radius = torch.maximum(radius, (1 + GROWTH) * (ahead if sound else image))
        return _failed(z, "no box around the equilibrium holds its own image")

    def states(self, box: BranchBox) -> tuple[Tensor, Tensor]:  # (n,), (n,)
        """Encloses ``x = phi(z)`` on a box, by a center and a radius."""
        if not bool(box.radius.isfinite().all()):
            return torch.zeros_like(box.center), box.radius
        middle, spread = self.slopes(box.center, box.radius, secants=True)
        largest, x = middle.abs() + spread, self.function(box.center)
        change = largest * box.radius if largest.dim() == 1 else largest @ box.radius
        return x, upward(change + self._rounding(box.center) + EPS * x.abs(), len(x) + 4) + 4 * TINY

    def _proven(self, z: Tensor, radius: Tensor, load: tuple[Tensor, Tensor, Sequence]) -> BranchBox:
        """Shrinks a box that holds its image, and proves that its solutions are unique."""
        for _ in range(SHRINKS):
            radius = torch.minimum(radius, self._image(self.slopes(z, radius, True), radius, load)[0])
        slopes = self.slopes(z, radius)
        inverse, change = self._contraction(slopes)
        value = perron_weights(change)[1] if bool(change.isfinite().all() & inverse.isfinite().all()) else math.inf
        if value < 1:
            return BranchBox(z, radius, value)
        moving = int((slopes.radius.reshape(len(z), -1).amax(-1) > 1e-6).sum())
        return _failed(
            z,
            f"I - A D may be singular for slopes D of the {moving} states that are not affine on the box: the "
            f"Perron-Frobenius eigenvalue of |(I - A D0)^-1 A| Delta is bounded by {value:.3g}, where a proof "
            "needs less than 1",
            value,
        )

    @property
    def _eye(self) -> Tensor:
        return torch.eye(len(self.A), dtype=self.A.dtype, device=self.A.device)

    def _residual(self, z: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``z - A phi(z) - v`` and a bound of its error."""
        x, count = self.function(z), len(z) + 8
        error = self.A.abs() @ self._rounding(z) + self.doubt @ x.abs()
        size = z.abs() + self.A.abs() @ x.abs() + v.abs()
        return z - self.A @ x - v, upward(error + count * EPS * size, 2 * count) + count * TINY

    def _rounding(self, z: Tensor) -> Tensor:
        """Bounds the error of a computed phi(z)."""
        pieces = z.split([size for _, size in self.activations])
        return torch.cat([_rounding(phi, part) for (phi, _), part in zip(self.activations, pieces, strict=True)])

    def _contraction(self, slopes: SlopeRange) -> tuple[Tensor, Tensor]:
        """Returns ``Y = (I - A D)^-1``, rounded, and a bound of ``|I - Y (I - A q)|`` for all slopes q."""
        Y = torch.linalg.inv_ex(self._eye - _times(self.A, slopes.middle))[0]
        count, size = len(self.A) + 8, Y.abs() @ self.A.abs()
        product = Y @ self.A
        left = self._eye - Y + _times(product, slopes.middle)
        wrong = _times(size, slopes.middle.abs()) + Y.abs() + self._eye
        largest = SlopeRange(slopes.middle.abs() + slopes.radius, slopes.radius)
        change = (
            left.abs() + 4 * count * EPS * wrong
            + _times(product.abs() + 2 * count * EPS * size, slopes.radius)
            + _times(Y.abs() @ self.doubt, largest.middle)
        )  # fmt: skip
        return Y, upward(change, 4 * count) + TINY * count * (change > 0)

    def _image(
        self, slopes: SlopeRange, radius: Tensor, load: tuple[Tensor, Tensor, Sequence]
    ) -> tuple[Tensor, Tensor]:
        """Bounds how far ``K(z)`` is from the center for z in the box, and returns the matrix behind it."""
        Y, change = self._contraction(slopes)
        residual, error, drive = load
        count = 2 * len(self.A) + 8
        total = (Y @ residual).abs() + Y.abs() @ (error + count * EPS * residual.abs()) + change @ radius
        for W, reach in drive:
            total = total + (Y @ W).abs() @ reach + count * EPS * (Y.abs() @ (W.abs() @ reach))
        count += max((W.shape[1] for W, _ in drive), default=0)
        image = upward(total, 2 * count) + 4 * count * TINY
        return torch.where(image.isnan(), math.inf, image), change


def _times(matrix: Tensor, slopes: Tensor) -> Tensor:
    """Multiplies by slopes from the right."""
    return matrix * slopes if slopes.dim() == 1 else matrix @ slopes


def _rounding(phi: Activation, z: Tensor) -> Tensor:
    size = z.shape[-1] if phi.block == 0 else (phi.block or 0)
    if is_product(phi):
        return 2 * (size + 4) * EPS * phi.function(z.abs()[None])[0] + 4 * TINY
    if not phi.rounding:
        return torch.zeros_like(z)
    largest = z.abs() if phi.componentwise else z.abs().reshape(-1, size).amax(1).repeat_interleave(size)
    origin = phi.function(torch.zeros_like(z)[None])[0].abs()
    unit = (phi.rounding + size + 2) * EPS + (PARAMETER if phi.traits.kinks else 0.0)
    return unit * (origin + phi.lipschitz() * largest) + 4 * TINY


def _failed(z: Tensor, why_not: str, value: float = math.inf) -> BranchBox:
    return BranchBox(z, torch.full_like(z, math.inf), value, why_not)
