"""How a published number is compared with ours.

A `Measure` names one number of ours; a `Rule` says what must hold of it for a published claim to count as
reproduced. Rules are data with one pure function each; seeds, means and intervals are dealt with elsewhere.
"""

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, final

from wellposed.errors import InputError

Better = Literal["lower", "higher"]
Outcome = Literal["reproduced", "better", "worse"]

SIZES = ("000", "001", "002")
_NAME = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*")


@dataclass(frozen=True)
class Measure:
    """One metric of one model on one task.

    Args:
        metric: e.g. ``"test_mse"``; shares such as ``"accuracy"`` are fractions of one.
        model: e.g. ``"implicit"``, ``"lstm"``.
        task: e.g. ``"rolling-average"``.
        at: the point on the task's axis (shift, noise in dB, share of pixels, ...); None is the only point or
            the one in distribution.
        size: the paper whose architecture is meant where papers differ; None is any.

    Example:
        >>> Measure("test_mse", "implicit", "identity", at=205, size="001").model
        'implicit'
    """

    metric: str
    model: str
    task: str
    at: float | str | None = None
    size: str | None = None

    def __post_init__(self) -> None:
        for field in ("metric", "model", "task"):
            name = getattr(self, field)
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise InputError(f"{field} must be lower-case words joined by - or _; received {name!r}")
        if self.size not in (None, *SIZES):
            raise InputError(f"size must be None or one of {', '.join(SIZES)}; received {self.size!r}")
        if isinstance(self.at, str) and not self.at:
            raise InputError("at must be a number, a name or None; received ''")
        if not isinstance(self.at, str | None):
            _require_finite("at", self.at)


class Rule(ABC):
    """What a published claim asks of our numbers."""

    @property
    @abstractmethod
    def measures(self) -> tuple[Measure, ...]:
        """The numbers that must be measured to judge the claim."""


@final
@dataclass(frozen=True)
class Number(Rule):
    """Our mean is compared with the published value.

    Args:
        measure: our number.
        better: the direction that improves on the value; None for a count that should be matched.
        tolerance: the relative deviation up to which the value counts as reproduced.

    Example:
        >>> rule = Number(Measure("test_mse", "lstm", "spiky"), better="lower")
        >>> rule.outcome(published=0.011, ours=0.0105), rule.outcome(published=0.011, ours=0.002)
        ('reproduced', 'better')
    """

    measure: Measure
    better: Better | None = None
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        _require_better(self.better, optional=True)
        _require_finite("tolerance", self.tolerance)
        if self.tolerance < 0:
            raise InputError(f"tolerance must not be negative; received {self.tolerance}")

    @property
    def measures(self) -> tuple[Measure, ...]:
        return (self.measure,)

    def outcome(self, published: float, ours: float) -> Outcome:
        """Says where our mean lies; NaN is worse."""
        if abs(ours - published) <= self.tolerance * abs(published):
            return "reproduced"
        if self.better == "lower":
            return "better" if ours < published else "worse"
        return "better" if self.better == "higher" and ours > published else "worse"


@final
@dataclass(frozen=True)
class Beats(Rule):
    """The measure is better than its rival's by at least a factor, seed by seed.

    A factor below one asks only that the measure does not lose by more than that.

    Example:
        >>> rule = Beats(Measure("test_mse", "implicit", "identity"), Measure("test_mse", "mlp", "identity"),
        ...              better="lower", factor=1000)
        >>> rule.holds(ours=0.03, rival=6700.0), rule.holds(ours=0.03, rival=3.0)
        (True, False)
    """

    measure: Measure
    rival: Measure
    better: Better
    factor: float = 1.0

    def __post_init__(self) -> None:
        _require_better(self.better, optional=False)
        _require_finite("factor", self.factor)
        if self.factor <= 0:
            raise InputError(f"factor must be positive; received {self.factor}")
        if self.measure.metric != self.rival.metric:
            raise InputError(
                f"measure and rival must share one metric; received {self.measure.metric!r} and "
                f"{self.rival.metric!r}"
            )
        if self.measure == self.rival:
            raise InputError(f"a measure cannot be its own rival; received {self.measure} twice")

    @property
    def measures(self) -> tuple[Measure, ...]:
        return (self.measure, self.rival)

    def holds(self, ours: float, rival: float) -> bool:
        """Whether the claim holds for one pair; a tie at the factor does not count, nor does NaN."""
        return self.factor * ours < rival if self.better == "lower" else ours > self.factor * rival


@dataclass(frozen=True)
class Limit(Rule):
    """The measure keeps to one side of a limit."""

    measure: Measure
    limit: float

    def __post_init__(self) -> None:
        _require_finite("limit", self.limit)

    @property
    def measures(self) -> tuple[Measure, ...]:
        return (self.measure,)

    @abstractmethod
    def holds(self, ours: float) -> bool:
        """Whether the claim holds for one value of ours."""


@final
@dataclass(frozen=True)
class AtMost(Limit):
    """The measure does not exceed a limit.

    Example:
        >>> AtMost(Measure("test_mse", "implicit", "identity", at=30), limit=5.0).holds(0.001)
        True
    """

    def holds(self, ours: float) -> bool:
        return ours <= self.limit


@final
@dataclass(frozen=True)
class AtLeast(Limit):
    """The measure reaches a limit.

    Example:
        >>> AtLeast(Measure("test_mse", "nalu", "addition", at=10), limit=1e10).holds(3.0)
        False
    """

    def holds(self, ours: float) -> bool:
        return ours >= self.limit


@final
@dataclass(frozen=True)
class NotATarget(Rule):
    """A printed number that cannot be a target: implausible, at odds with its own paper, or without its data.

    Args:
        reason: one plain sentence with the fact.

    Example:
        >>> NotATarget("The base of the growth is not stated.").measures
        ()
    """

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not is_sentence(self.reason):
            raise InputError(
                f"reason must be one sentence with a capital and a full stop; received {self.reason!r}"
            )

    @property
    def measures(self) -> tuple[Measure, ...]:
        return ()


def is_sentence(text: str) -> bool:
    """Whether a text begins like a sentence, ends like one and has at least three words.

    Example:
        >>> is_sentence("The count is 196."), is_sentence("the count is 196")
        (True, False)
    """
    return len(text.split()) >= 3 and text.endswith(".") and (text[0].isupper() or text[0].isdigit())


def _require_better(better: object, *, optional: bool) -> None:
    if better not in (("lower", "higher", None) if optional else ("lower", "higher")):
        choices = '"lower", "higher" or None' if optional else '"lower" or "higher"'
        raise InputError(f"better must be {choices}; received {better!r}")


def _require_finite(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name} must be a finite number; received {value!r}")
