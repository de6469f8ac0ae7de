"""Bootstrap intervals: exact small cases, coverage, and what odd numbers do."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from wellposed_lab.engine.statistics import advantage, interval, mean, rank_correlation, student_quantile

from wellposed.errors import InputError


def brute_force(values, tail):
    """All n^n resamples, each as likely as any other."""
    means = sorted(np.mean(resample) for resample in itertools.product(values, repeat=len(values)))
    first = math.ceil(tail * len(means) - 1e-9)
    return means[max(first, 1) - 1], means[-max(first, 1)]


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 6, 9, 30])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_student_quantiles(degrees, confidence):
    expected = stats.t.ppf((1 + confidence) / 2, degrees)
    assert student_quantile(confidence, degrees) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95])
def test_small_samples_are_enumerated_exactly(size, confidence):
    values = np.random.default_rng(size).normal(size=size).tolist()
    t = stats.t.ppf((1 + confidence) / 2, size - 1)
    tail = stats.norm.cdf(-t * math.sqrt(size / (size - 1)))
    assert interval(values, confidence) == pytest.approx(brute_force(values, tail), rel=1e-9)


def test_larger_samples_agree_with_the_normal_interval():
    values = np.random.default_rng(0).normal(size=60)
    low, high = interval(values.tolist())
    half = stats.t.ppf(0.975, 59) * values.std(ddof=1) / math.sqrt(60)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)


@pytest.mark.parametrize(("size", "least", "most"), [(5, 0.91, 0.9375), (7, 0.92, 0.96), (12, 0.92, 0.97)])
def test_coverage_is_nearly_nominal_on_normal_data(size, least, most):
    samples = np.random.default_rng(1).normal(size=(1000 if size < 8 else 250, size)).tolist()
    covered = np.mean([low <= 0 <= high for low, high in map(interval, samples)])
    assert least - 0.01 <= covered <= most + 0.01


def test_the_interval_is_the_same_every_time_and_knows_scale_and_shift():
    values = np.random.default_rng(2).normal(size=9).tolist()
    low, high = interval(values)
    assert interval(values) == (low, high)
    assert interval([3 * value + 7 for value in values]) == pytest.approx((3 * low + 7, 3 * high + 7))
    assert interval([-value for value in values]) == pytest.approx((-high, -low), abs=0.05)
    assert interval(values[::-1]) != interval([value + 1 for value in values])


def test_odd_numbers_show():
    assert interval([2.0] * 5) == (2.0, 2.0)
    assert interval([1.0, 2.0, math.inf])[1] == math.inf
    assert interval([1.0, 2.0, math.inf])[0] < math.inf
    assert all(map(math.isnan, interval([1.0, 2.0, math.nan])))
    assert all(map(math.isnan, interval([1.0, -math.inf, math.inf])))
    assert math.isnan(mean([1.0, math.nan])) and mean([1.0, 2.0]) == 1.5


@pytest.mark.parametrize(("values", "confidence"), [([1.0, 2.0], 0.95), ([], 0.95), ([1.0] * 5, 1.0)])
def test_too_little_to_go_on_is_refused(values, confidence):
    with pytest.raises(InputError, match="received"):
        interval(values, confidence)


def test_ratios_are_paired():
    ours, rival = [1.0, 10.0, 100.0], [2.0, 20.0, 200.0]
    found = advantage(ours, rival, "lower")
    assert found.kind == "ratio" and found.mean == pytest.approx(2) and found.interval == pytest.approx((2, 2))
    assert (
        advantage(ours, rival[::-1], "lower").interval[0] < 1 < advantage(ours, rival[::-1], "lower").interval[1]
    )
    assert advantage(ours, rival, "higher").mean == pytest.approx(0.5)


def test_the_mean_ratio_is_geometric():
    assert advantage([1.0, 1.0, 1.0], [1.0, 10.0, 100.0], "lower").mean == pytest.approx(10)


def test_values_that_are_not_positive_are_subtracted():
    found = advantage([0.0, -1.0, 2.0], [3.0, 2.0, 5.0], "lower")
    assert (found.kind, found.mean, found.interval, found.threshold) == ("difference", 3.0, (3.0, 3.0), 0.0)
    assert advantage([0.0, 4.0, 4.0], [1.0, 3.0, 3.0], "higher", 0.5).mean == pytest.approx((-0.5 + 2.5 + 2.5) / 3)
    assert advantage([0.0] * 3, [1.0] * 3, "higher").mean == -1


def test_a_rival_that_overflowed_is_beaten_and_nan_beats_nobody():
    found = advantage([1.0, 1.0, 1.0], [math.inf] * 3, "lower", 1e6)
    assert found.mean == math.inf and found.interval == (math.inf, math.inf)
    assert math.isnan(advantage([1.0, math.nan, 1.0], [2.0] * 3, "lower").mean)
    assert math.isnan(advantage([math.inf] * 3, [math.inf] * 3, "lower").mean)
    assert advantage([1e-300] * 3, [1e300] * 3, "lower").mean == pytest.approx(math.inf)


def test_few_pairs_have_no_interval_and_unequal_sides_are_refused():
    assert advantage([1.0, 1.0], [2.0, 2.0], "lower").interval is None
    for ours in ([1.0], []):
        with pytest.raises(InputError, match="same seeds"):
            advantage(ours, [1.0, 2.0][: 2 * len(ours)], "lower")


def test_rank_correlations_are_those_of_scipy_with_ties():
    a, b = np.random.default_rng(1).integers(0, 5, (2, 40))
    assert rank_correlation(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert rank_correlation(a, -a) == pytest.approx(-1)
    assert math.isnan(rank_correlation(a, np.ones(40)))
