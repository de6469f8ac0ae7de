"""Sets of inputs, one for every sample of a batch: what may happen to an input."""

import abc
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InputError
from wellposed.robust.interval import Interval


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
        return torch.linalg.vector_norm(self.deviation(), dim=1)

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
        return self.support_rows(rows.reshape(-1, p), sample).view(count, -1)

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
        """Builds ``u +- radius``, clipped to the range of valid inputs.

        Args:
            radius: one number, one a feature or one an entry.
            lower, upper: the valid range; None does not clip.
        """
        spread = radii(u, radius)
        low, high = u - spread, u + spread
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


def radii(u: Tensor, radius: float | Tensor) -> Tensor:
    """Spreads a radius over a batch of inputs.

    Example:
        >>> radii(torch.zeros(2, 3), 0.1).shape
        torch.Size([2, 3])
    """
    finite_batch("u", u)
    given = torch.as_tensor(radius, dtype=u.dtype, device=u.device)
    if not bool((given >= 0).all() and given.isfinite().all()):
        raise InputError(f"a radius must be finite and not negative; received {radius}")
    try:
        return given.expand(u.shape)
    except RuntimeError as error:
        raise InputError(
            f"a radius is one number, one a feature {tuple(u.shape[1:])} or one an entry {tuple(u.shape)}; "
            f"received the shape {tuple(given.shape)}"
        ) from error
