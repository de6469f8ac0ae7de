"""Sets of inputs, one for every sample of a batch: what may happen to an input.

An `Interval` holds all tensors between two, and knows what a linear operator makes of them. `Uncertainty` is any
set with a support function: a `Box`, few changed entries (`SparseBox`), a Euclidean `Ball`, or a `ConvexSet` given
by that function alone.
"""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellposed.conditions.rounding import convert_outward, euclidean_norm, unit_roundoff
from wellposed.errors import InputError


def proven(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the ends of intervals, and ``-inf`` and ``inf`` where they cannot have been proven.

    An end that is no number, a lower end of ``inf``, an upper one of ``-inf`` and ends that cross are what
    overflow leaves: there, neither end says anything. Bounds pass through here before anything is decided by them.

    Example:
        >>> proven(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, -torch.inf, 1.0]))
        (tensor([0., -inf, -inf]), tensor([1., inf, inf]))
    """
    holds = (lower <= upper) & (lower < torch.inf) & (upper > -torch.inf)
    return torch.where(holds, lower, -torch.inf), torch.where(holds, upper, torch.inf)


def proven_upper(value: Tensor) -> Tensor:
    """Returns upper bounds, and ``inf`` where overflow has left ``-inf`` or no number.

    Example:
        >>> proven_upper(torch.tensor([1.0, -torch.inf, torch.nan]))
        tensor([1., inf, inf])
    """
    return torch.where(value > -torch.inf, value, torch.inf)


def outward_ends(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """Rounds the ends of a range outward to numbers of a type.

    Example:
        >>> low, high = outward_ends(-0.7, 0.7, torch.float32)
        >>> low < -0.7 and high > 0.7
        True
    """
    ends = torch.tensor([low, high], dtype=torch.float64)
    rounded = ends.to(dtype)
    beyond = torch.nextafter(rounded, torch.tensor([-torch.inf, torch.inf], dtype=dtype))
    inward = torch.stack([rounded[0].double() > ends[0], rounded[1].double() < ends[1]])
    below, above = torch.where(inward, beyond, rounded).tolist()
    return below, above


class Interval(NamedTuple):
    """All tensors between two.

    Example:
        >>> Interval(torch.tensor([-1.0]), torch.tensor([3.0])).magnitude
        tensor([3.])
    """

    lower: Tensor
    upper: Tensor

    @classmethod
    def around(cls, center: Tensor, radius: Tensor, dtype: torch.dtype) -> "Interval":
        """Encloses ``center +- radius`` given in float64 by an interval of another type."""
        lower, below = convert_outward(center - radius, dtype)
        upper, above = convert_outward(center + radius, dtype)
        return cls(lower - below, upper + above)

    @property
    def center(self) -> Tensor:
        """The middle."""
        return (self.lower + self.upper) / 2

    @property
    def radius(self) -> Tensor:
        """How far the ends are from the computed center, rounded up."""
        middle = self.center
        widest = torch.maximum(self.upper - middle, middle - self.lower)
        return widest * (1 + 4 * unit_roundoff(widest.dtype))

    @property
    def magnitude(self) -> Tensor:
        """The largest absolute value."""
        return torch.maximum(self.lower.abs(), self.upper.abs())

    @property
    def width(self) -> Tensor:
        """The distance of the ends."""
        return self.upper - self.lower

    def widened(self, slack: Tensor) -> "Interval":
        """Moves both ends outward."""
        return Interval(self.lower - slack, self.upper + slack)

    def cut(self, low: float, high: float) -> "Interval":
        """Cuts off what lies outside of a range that is known to hold the exact values.

        Example:
            >>> Interval(torch.tensor([-1.0]), torch.tensor([2.0])).cut(0.0, float("inf"))
            Interval(lower=tensor([0.]), upper=tensor([2.]))
        """
        low, high = outward_ends(low, high, self.lower.dtype)
        return Interval(self.lower.clamp(low, high), self.upper.clamp(low, high))

    def within(self, other: "Interval | None") -> "Interval":
        """Returns the intersection."""
        if other is None:
            return self
        return Interval(torch.maximum(self.lower, other.lower), torch.minimum(self.upper, other.upper))

    def proven(self) -> "Interval":
        """Replaces what no arithmetic can have proven by all numbers; see `proven`."""
        return Interval(*proven(self.lower, self.upper))

    def at(self, sample: Tensor | int) -> "Interval":
        """Takes the rows of some samples, or the only row of one."""
        return Interval(self.lower[sample], self.upper[sample])

    def largest(self, coefficients: Tensor) -> Tensor:  # (R, n) -> (R,)
        """Returns the largest value of ``coefficients' x`` for x in the row's interval."""
        ends = coefficients.clamp(min=0) * self.upper + coefficients.clamp(max=0) * self.lower
        return ends.sum(1)

    def where(self, mask: Tensor, other: "Interval") -> "Interval":
        """Keeps the interval where the mask holds and takes the other elsewhere."""
        return Interval(torch.where(mask, self.lower, other.lower), torch.where(mask, self.upper, other.upper))


class Uncertainty(abc.ABC):
    """A bounded set of inputs for every sample, known by its support function.

    Everything is batch-first and flat, ``(B, p)``; `sample_shape` is the shape of one input.
    """

    sample_shape: tuple[int, ...]

    @property
    @abc.abstractmethod
    def center(self) -> Tensor:  # (B, p)
        """A point of the set."""

    @abc.abstractmethod
    def box(self) -> "Box":
        """The smallest known box around the set."""

    @abc.abstractmethod
    def support_rows(self, functionals: Tensor, sample: Tensor) -> Tensor:  # (R, p), (R,) -> (R,)
        """Returns the maximum of ``functional' u`` over the set of the sample each row belongs to."""

    @abc.abstractmethod
    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:  # (count, B, p)
        """Draws points of the set, about half of them extreme."""

    @abc.abstractmethod
    def to(self, *args: Any, **kwargs: Any) -> "Uncertainty":
        """Converts the set, as `torch.Tensor.to` does."""

    def __len__(self) -> int:
        return len(self.center)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the inputs."""
        return self.center.dtype

    @property
    def device(self) -> torch.device:
        """Where the set is."""
        return self.center.device

    def deviation(self) -> Tensor:  # (B, p)
        """Bounds the distance of every entry from the center."""
        return self.box().deviation_from(self.center)

    def deviation_norm(self) -> Tensor:  # (B,)
        """Bounds the 2-norm of the deviation from the center."""
        return euclidean_norm(self.deviation())

    def weighted_rows(self, weights: Tensor, sample: Tensor) -> Tensor:  # (R, p) >= 0, (R,) -> (R,)
        """Bounds ``weights' |u - center|`` over the set of the sample each row belongs to."""
        return (weights * self.deviation()[sample]).sum(1)

    def support(self, functionals: Tensor) -> Tensor:  # (k, p) or (B, k, p) -> (B, k)
        """Returns the maximum of every functional over every sample's set, ``max lam' u`` (003 eq. 4.11)."""
        count, p = self.center.shape
        if functionals.dim() not in (2, 3) or functionals.shape[-1] != p:
            raise InputError(
                f"functionals have the shape (k, {p}) or ({count}, k, {p}); received {tuple(functionals.shape)}"
            )
        rows = functionals.expand(count, -1, p)
        sample = torch.arange(count, device=self.device).repeat_interleave(rows.shape[1])
        return self.support_rows(rows.reshape(len(sample), p), sample).view(count, rows.shape[1])

    def image(self, rows: Tensor) -> Interval:  # (m, p) -> (B, m)
        """Returns the range of every row of a matrix over the set."""
        return Interval(-self.support(-rows), self.support(rows))


class Box(Uncertainty):
    """All inputs between two, entry by entry (003 eq. 4.1).

    Args:
        lower, upper: ``(B, *sample_shape)``.

    Example:
        >>> box = Box.around(torch.tensor([[0.02, 0.5]]), 0.1)
        >>> box.lower, box.support(torch.tensor([[1.0, -1.0]]))
        (tensor([[0.0000, 0.4000]]), tensor([[-0.2800]]))
    """

    def __init__(self, lower: Tensor, upper: Tensor) -> None:
        lower, upper = finite_batch("lower", lower), finite_batch("upper", upper)
        if lower.shape != upper.shape or lower.dtype != upper.dtype:
            raise InputError(
                f"lower and upper need one shape and type; received {tuple(lower.shape)} {lower.dtype} and "
                f"{tuple(upper.shape)} {upper.dtype}"
            )
        if bool((inverted := lower > upper).any()):
            raise InputError(
                f"a box needs lower <= upper; {int(inverted.sum())} of {lower.numel()} entries are the other way "
                "round: swap the ends, or check that the inputs lie in the range they are clipped to"
            )
        self.sample_shape = tuple(lower.shape[1:])
        self.lower, self.upper = lower.flatten(1), upper.flatten(1)

    @classmethod
    def around(
        cls,
        u: Tensor,
        radius: float | Tensor,
        lower: float | Tensor | None = 0.0,
        upper: float | Tensor | None = 1.0,
    ) -> "Box":
        """Builds ``u +- radius``, rounded outward and clipped to the range of valid inputs.

        Args:
            radius: one number, one a feature or one an entry.
            lower, upper: the valid range; None does not clip.
        """
        spread = radii(u, radius)
        low, high = _end(u, -spread), _end(u, spread)
        if lower is not None:
            low = torch.maximum(low, torch.as_tensor(lower, dtype=u.dtype, device=u.device))
        if upper is not None:
            high = torch.minimum(high, torch.as_tensor(upper, dtype=u.dtype, device=u.device))
        return cls(low, high)

    @property
    def center(self) -> Tensor:
        return (self.lower + self.upper) / 2

    def box(self) -> "Box":
        return self

    @property
    def interval(self) -> Interval:
        """The two ends."""
        return Interval(self.lower, self.upper)

    def deviation_from(self, center: Tensor) -> Tensor:
        """Bounds the distance of every entry from a point of the box, rounded up."""
        widest = torch.maximum(self.upper - center, center - self.lower)
        return widest * (1 + 2 * torch.finfo(widest.dtype).eps)

    def support_rows(self, functionals: Tensor, sample: Tensor) -> Tensor:
        return self.interval.at(sample).largest(functionals)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        share = torch.rand(count, *self.lower.shape, generator=generator, dtype=self.dtype, device=self.device)
        corners = torch.arange(count, device=self.device)[:, None, None] % 2 == 0
        share = torch.where(corners, share.round(), share)
        return torch.lerp(self.lower, self.upper, share).clamp(self.lower, self.upper)

    def to(self, *args: Any, **kwargs: Any) -> "Box":
        shape = (len(self), *self.sample_shape)
        return Box(self.lower.to(*args, **kwargs).view(shape), self.upper.to(*args, **kwargs).view(shape))


def finite_batch(name: str, value: Tensor) -> Tensor:
    """Checks a batch of inputs.

    Example:
        >>> finite_batch("u", torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """
    if not isinstance(value, Tensor) or value.dim() < 2 or not value.is_floating_point():
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{name} must be a floating-point tensor (batch, *input); received {got}")
    if not bool(value.isfinite().all()):
        raise InputError(f"{name} holds NaN or infinite entries; every input needs finite bounds")
    return value


def _end(u: Tensor, move: Tensor) -> Tensor:
    """Adds so that rounding, which two-sum finds (Knuth), never makes a move shorter."""
    end = u + move
    with torch.no_grad():
        back = end - u
        lost = (u - (end - back)) + (move - back)
        further = torch.nextafter(end, torch.copysign(torch.full_like(end, torch.inf), move))
        more = torch.where(lost * move.sign() > 0, further - end, 0.0)
    return end + more


def radii(u: Tensor, radius: float | Tensor) -> Tensor:
    """Spreads a radius over a batch of inputs.

    Example:
        >>> radii(torch.zeros(2, 3), 0.1).shape
        torch.Size([2, 3])
    """
    finite_batch("u", u)
    exact = outward_ends(0.0, float(radius), u.dtype)[1] if isinstance(radius, float | int) else radius
    given = torch.as_tensor(exact, dtype=u.dtype, device=u.device)
    if not bool((given >= 0).all() and given.isfinite().all()):
        raise InputError(f"a radius must be finite and not negative; received {radius}")
    try:
        return given.expand(u.shape)
    except RuntimeError as error:
        raise InputError(
            f"a radius is one number, one a feature {tuple(u.shape[1:])} or one an entry {tuple(u.shape)}; "
            f"received the shape {tuple(given.shape)}"
        ) from error


class SparseBox(Uncertainty):
    """All inputs that differ from the center in at most k entries, by at most a radius (003 eq. 4.2).

    Clipped to a range the set is not symmetric; its support function is the center's value and the k largest of
    ``max(lam_j up_j, -lam_j down_j)``, which is tight.

    Args:
        center: ``(B, *sample_shape)``.
        radius: one number, one a feature or one an entry.
        k: how many entries may change.
        lower, upper: the valid range; None does not clip.

    Example:
        >>> few = SparseBox(torch.tensor([[0.5, 0.9, 0.1]]), 0.2, k=1, lower=0.0, upper=1.0)
        >>> few.support(torch.tensor([[1.0, 3.0, 0.0]])).round(decimals=4)  # 3.2 + 3 * 0.1, and not 3 * 0.2
        tensor([[3.5000]])
    """

    def __init__(
        self,
        center: Tensor,
        radius: float | Tensor,
        k: int,
        lower: float | Tensor | None = None,
        upper: float | Tensor | None = None,
    ) -> None:
        around = Box.around(center, radius, lower, upper)
        self._center, self._box = center.flatten(1), around
        if not bool(((self._center >= around.lower) & (self._center <= around.upper)).all()):
            raise InputError("the center of a SparseBox must lie in the range it is clipped to; clip it first")
        if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= self._center.shape[1]:
            raise InputError(f"k counts entries, 0 to {self._center.shape[1]}; received {k!r}")
        self.k, self.sample_shape = k, around.sample_shape

    @property
    def center(self) -> Tensor:
        return self._center

    def box(self) -> Box:
        return self._box if self.k else Box(self._center, self._center)

    def support_rows(self, functionals: Tensor, sample: Tensor) -> Tensor:
        center = self._center[sample]
        up, down = self._box.upper[sample] - center, center - self._box.lower[sample]
        gains = functionals.clamp(min=0) * up - functionals.clamp(max=0) * down
        return (functionals * center).sum(1) + gains.topk(self.k, dim=1).values.sum(1)

    def deviation_norm(self) -> Tensor:
        return euclidean_norm(self.deviation().topk(self.k, dim=1).values)

    def weighted_rows(self, weights: Tensor, sample: Tensor) -> Tensor:
        return (weights * self.deviation()[sample]).topk(self.k, dim=1).values.sum(1)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        points = self._box.sample(count, generator)
        noise = torch.rand(points.shape, generator=generator, dtype=self.dtype, device=self.device)
        chosen = noise.argsort(dim=-1).argsort(dim=-1) < self.k
        return torch.where(chosen, points, self._center)

    def to(self, *args: Any, **kwargs: Any) -> "SparseBox":
        box = self._box.to(*args, **kwargs)
        center = self._center.to(*args, **kwargs)
        shape = (len(center), *self.sample_shape)
        spread = box.deviation_from(center).view(shape)
        return SparseBox(center.view(shape), spread, self.k, box.lower.view(shape), box.upper.view(shape))


class Ball(Uncertainty):
    """All inputs within a Euclidean distance of the center.

    Args:
        center: ``(B, *sample_shape)``.
        radius: one number or one a sample.

    Example:
        >>> Ball(torch.zeros(1, 2), 2.0).support(torch.tensor([[3.0, 4.0]])).round(decimals=4)
        tensor([[10.]])
    """

    def __init__(self, center: Tensor, radius: float | Tensor) -> None:
        self._center = finite_batch("center", center).flatten(1)
        exact = outward_ends(0.0, float(radius), center.dtype)[1] if isinstance(radius, float | int) else radius
        given = torch.as_tensor(exact, dtype=center.dtype, device=center.device)
        if given.dim() > 1 or (given.dim() == 1 and len(given) != len(center)):
            raise InputError(f"the radius of a ball is one number or one a sample; received {tuple(given.shape)}")
        self.radius = radii(center.new_zeros(len(center), 1), given.reshape(-1, 1))[:, 0]
        self.sample_shape = tuple(center.shape[1:])

    @property
    def center(self) -> Tensor:
        return self._center

    def box(self) -> Box:
        margin = 2 * torch.finfo(self.dtype).eps  # the ends must not be rounded inward
        spread = self.radius[:, None] * (1 + margin) + margin * self._center.abs()
        return Box(self._center - spread, self._center + spread)

    def support_rows(self, functionals: Tensor, sample: Tensor) -> Tensor:
        return (functionals * self._center[sample]).sum(1) + self.weighted_rows(functionals, sample)

    def deviation_norm(self) -> Tensor:
        return self.radius

    def weighted_rows(self, weights: Tensor, sample: Tensor) -> Tensor:
        return self.radius[sample] * euclidean_norm(weights)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        shape = (count, *self._center.shape)
        direction = torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)
        share = torch.rand(count, len(self), 1, generator=generator, dtype=self.dtype, device=self.device)
        share[::2] = 1 - 4 * torch.finfo(self.dtype).eps
        length = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
        return self._center + share * self.radius[:, None] * direction / length

    def to(self, *args: Any, **kwargs: Any) -> "Ball":
        center = self._center.to(*args, **kwargs).view(len(self), *self.sample_shape)
        return Ball(center, self.radius.to(center))


class ConvexSet(Uncertainty):
    """A convex set given by its support function (003 eq. 4.11).

    Args:
        support: takes functionals ``(B, k, p)`` to their maxima over the samples' sets ``(B, k)``.
        box: a box around the set.
        center: a point of the set; the middle of the box if None.

    Example:
        >>> around = Box(-torch.ones(1, 2), torch.ones(1, 2))
        >>> diamond = ConvexSet(lambda lam: lam.abs().amax(-1), around)
        >>> diamond.support(torch.tensor([[3.0, -4.0]]))
        tensor([[4.]])
    """

    def __init__(self, support: Callable[[Tensor], Tensor], box: Box, center: Tensor | None = None) -> None:
        self._function, self._box, self.sample_shape = support, box, box.sample_shape
        self._center = box.center if center is None else finite_batch("center", center).flatten(1)
        if not callable(support) or self._center.shape != box.lower.shape:
            raise InputError("a ConvexSet takes a support function, a box and a center of the box's shape")

    @property
    def center(self) -> Tensor:
        return self._center

    def box(self) -> Box:
        return self._box

    def support(self, functionals: Tensor) -> Tensor:
        rows = functionals.expand(len(self), -1, -1)
        maxima = self._function(rows)
        if tuple(maxima.shape) != tuple(rows.shape[:2]) or not bool(maxima.isfinite().all()):
            raise InputError(
                f"the support function must return finite values of the shape {tuple(rows.shape[:2])}; "
                f"it returned the shape {tuple(maxima.shape)}"
            )
        return maxima

    def support_rows(self, functionals: Tensor, sample: Tensor) -> Tensor:
        counts = torch.bincount(sample, minlength=len(self))
        order = sample.argsort(stable=True)
        first = counts.cumsum(0) - counts
        slot = torch.arange(len(sample), device=sample.device) - first[sample[order]]
        filled = functionals.new_zeros(len(self), int(counts.max()), functionals.shape[1])
        filled = filled.index_put((sample[order], slot), functionals[order])
        maxima = self.support(filled)[sample[order], slot]
        return torch.zeros_like(maxima).index_put((order,), maxima)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws extreme points, where random functionals are largest: the gradients of the support function."""
        shape = (len(self), count, self._center.shape[1])
        normals = torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)
        with torch.enable_grad():
            normals.requires_grad_()
            (extreme,) = torch.autograd.grad(self.support(normals).sum(), normals)
        share = torch.rand(count, len(self), 1, generator=generator, dtype=self.dtype, device=self.device)
        share[::2] = 1.0
        return torch.lerp(self._center.expand(count, -1, -1), extreme.transpose(0, 1), share)

    def to(self, *args: Any, **kwargs: Any) -> "ConvexSet":
        return ConvexSet(self._function, self._box.to(*args, **kwargs), self._center.to(*args, **kwargs))
