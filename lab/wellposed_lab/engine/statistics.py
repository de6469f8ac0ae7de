"""Means over seeds with their bootstrap intervals; no interval claims more than a handful of seeds can show."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from wellposed.errors import InputError
from wellposed_lab.engine.claims import Better

CONFIDENCE = 0.95
MIN_SEEDS = 3  # below it a difference is not judged
ENOUGH_SEEDS = 5  # below it a verdict is marked, and its interval is the range of the seeds
ENUMERATED = 7  # up to here every resample is counted: 1,716 of them
RESAMPLES = 10_000  # how many are drawn above it, with a fixed seed

Interval = tuple[float, float]


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Returns the bootstrap interval of the mean, widened for small samples.

    The percentile interval is too short by the factor ``z sqrt((n - 1) / n) / t``, z and t the quantiles of the
    normal distribution and of Student's with n - 1 degrees of freedom, so the percentile is taken at
    ``Phi(-t sqrt(n / (n - 1)))`` instead of ``(1 - confidence) / 2``. No bootstrap interval of a mean leaves the
    range of its values: it covers with probability ``1 - 2^(1 - n)`` at most, 75 % for 3 values, 94 % for 5.

    Args:
        values: one a seed, three or more; with NaN among them both ends are NaN.
        confidence: nominal coverage.

    Example:
        >>> interval([1.0, 1.0, 1.0])
        (1.0, 1.0)
        >>> low, high = interval([0.9, 1.0, 1.1, 1.2, 1.3])
        >>> round(low, 2), round(high, 2)
        (0.92, 1.28)
    """
    if len(values) < MIN_SEEDS:
        raise InputError(f"an interval needs at least {MIN_SEEDS} values; received {len(values)}")
    if not 0 < confidence < 1:
        raise InputError(f"confidence must lie between 0 and 1; received {confidence}")
    indices, weights = _resamples(len(values))
    with np.errstate(invalid="ignore", over="ignore"):
        means = np.asarray(values, dtype=float)[indices].mean(axis=1)
    if np.isnan(means).any():
        return math.nan, math.nan
    tail = _tail(len(values), confidence)
    return _percentile(means, weights, tail), -_percentile(-means, weights, tail)


def student_quantile(confidence: float, degrees: int) -> float:
    """Returns t with ``P(|T| < t) = confidence`` for Student's T with that many degrees of freedom.

    Example:
        >>> round(student_quantile(0.95, 4), 3)
        2.776
    """
    low, high = 0.0, math.pi / 2  # of atan(t / sqrt(degrees))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_mass(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _student_mass(angle: float, degrees: int) -> float:
    """Returns ``P(|T| < sqrt(degrees) tan(angle))`` by its finite series (Abramowitz and Stegun 26.7.3-4)."""
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for index in range(1 + odd, degrees, 2):
        total += term
        term *= math.cos(angle) ** 2 * index / (index + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def _tail(size: int, confidence: float) -> float:
    widened = student_quantile(confidence, size - 1) * math.sqrt(size / (size - 1))
    return NormalDist().cdf(-widened)


@functools.cache
def _resamples(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns resamples as rows of indices, and the probability of each."""
    if size > ENUMERATED:
        indices = np.random.default_rng(0).integers(size, size=(RESAMPLES, size))
        return indices, np.full(RESAMPLES, 1 / RESAMPLES)
    rows = list(itertools.combinations_with_replacement(range(size), size))
    ways = [math.factorial(size) / math.prod(math.factorial(row.count(k)) for k in range(size)) for row in rows]
    return np.array(rows), np.array(ways) / size**size


def _percentile(means: np.ndarray, weights: np.ndarray, share: float) -> float:
    """Returns the least mean at or below which there is at least this share."""
    order = np.argsort(means, kind="stable")
    reached = np.cumsum(weights[order]) >= share - 1e-12
    return float(means[order][np.argmax(reached)])


@dataclass(frozen=True)
class Advantage:
    """By how much a model beats a rival, seed by seed.

    Args:
        kind: "ratio", compared with the factor of the claim, or "difference", compared with zero.
        mean: of the ratios (geometric) or of the differences; above the threshold is better.
        interval: None below three seeds.
        threshold: what the claim asks to be exceeded.
    """

    kind: Literal["ratio", "difference"]
    mean: float
    interval: Interval | None
    threshold: float

    @property
    def none(self) -> float:
        """What no difference at all would be."""
        return 1.0 if self.kind == "ratio" else 0.0


def advantage(ours: Sequence[float], rival: Sequence[float], better: Better, factor: float = 1.0) -> Advantage:
    """Compares values that belong together pairwise.

    Where all are positive it is the ratio, by the interval of its logarithm; else the difference
    ``rival - factor * ours``, or ``ours - factor * rival`` if higher is better.

    Example:
        >>> lead = advantage([1.0, 2.0, 1.0], [10.0, 20.0, 10.0], "lower", factor=5)
        >>> lead.kind, round(lead.mean, 6), lead.threshold
        ('ratio', 10.0, 5)
        >>> advantage([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], "lower").interval
        (1.0, 1.0)
    """
    if len(ours) != len(rival) or not len(ours):
        raise InputError(f"both sides need the same seeds; received {len(ours)} and {len(rival)} values")
    large, small = (rival, ours) if better == "lower" else (ours, rival)
    if all(value > 0 for value in (*ours, *rival)):
        logs = [_log(a) - _log(b) for a, b in zip(large, small, strict=True)]
        log_ends = interval(logs) if len(logs) >= MIN_SEEDS else None
        ends = None if log_ends is None else (_exp(log_ends[0]), _exp(log_ends[1]))
        return Advantage("ratio", _exp(mean(logs)), ends, factor)
    gaps = [a - factor * b for a, b in zip(large, small, strict=True)]
    return Advantage("difference", mean(gaps), interval(gaps) if len(gaps) >= MIN_SEEDS else None, 0.0)


def mean(values: Sequence[float]) -> float:
    """Returns the mean; NaN where there is one among the values, or infinities of both signs.

    Example:
        >>> mean([1.0, 3.0]), mean([1.0, float("inf")])
        (2.0, inf)
    """
    return sum(values) / len(values)


def _log(value: float) -> float:
    return math.log(value) if math.isfinite(value) else value


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)


def number(value: float | None) -> str:
    """Writes a number for people: three digits, counts in full, nothing for nothing.

    Example:
        >>> number(217349), number(0.000012345), number(1e5), number(None), number(float("nan"))
        ('217,349', '1.23e-5', '1e5', '-', 'NaN')
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("\N{INFINITY}" if value > 0 else "-\N{INFINITY}")
    if value == round(value) and abs(value) < 1e7 and (abs(value) < 1e4 or value % 1000):
        return f"{value:,.0f}"
    mantissa, _, power = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(power)}" if power else mantissa


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Computes Spearman's correlation, ties at their mean rank; NaN where one side is constant.

    Example:
        >>> rank_correlation([1, 2, 3], [10, 30, 20])
        0.5
    """
    columns = np.array([a, b], dtype=float)
    below = (columns[:, None, :] < columns[:, :, None]).sum(2)
    ties = (columns[:, None, :] == columns[:, :, None]).sum(2)
    ranks = below + (ties - 1) / 2
    return math.nan if (ranks.std(1) == 0).any() else float(np.corrcoef(ranks)[0, 1])
