"""The rules by which published numbers are compared with ours."""

import math

import pytest
from wellposed_lab.engine.claims import AtLeast, AtMost, Beats, Measure, NotATarget, Number

from wellposed.errors import InputError

MEASURE = Measure("test_mse", "implicit", "identity", at=30)
RIVAL = Measure("test_mse", "mlp", "identity", at=30)


def test_number_compares_by_relative_tolerance_and_direction():
    lower, count = Number(MEASURE, "lower", 0.1), Number(MEASURE, tolerance=0.0)
    outcomes = [lower.outcome(2.0, ours) for ours in (1.81, 2.19, 1.79, 2.21)]
    assert outcomes == ["reproduced", "reproduced", "better", "worse"]
    assert Number(MEASURE, "higher").outcome(2.0, 3.0) == "better"
    assert Number(MEASURE, "higher").outcome(2.0, 1.0) == "worse"
    assert [count.outcome(196, ours) for ours in (196, 195, 197)] == ["reproduced", "worse", "worse"]
    assert lower.outcome(2.0, math.nan) == "worse"


def test_beats_needs_the_factor_in_its_direction():
    lower, higher = Beats(MEASURE, RIVAL, "lower", 3.0), Beats(MEASURE, RIVAL, "higher", 1.05)
    assert lower.holds(1.0, 3.1) and not lower.holds(1.0, 2.9) and not lower.holds(1.0, 3.0)
    assert higher.holds(0.96, 0.91) and not higher.holds(0.95, 0.91)
    assert lower.holds(1.0, math.inf) and not lower.holds(math.nan, 1.0) and not lower.holds(1.0, math.nan)


def test_limits_include_their_end():
    assert AtMost(MEASURE, 5.0).holds(5.0) and not AtMost(MEASURE, 5.0).holds(5.1)
    assert AtLeast(MEASURE, 5.0).holds(5.0) and not AtLeast(MEASURE, 5.0).holds(4.9)
    assert not AtMost(MEASURE, 5.0).holds(math.nan)


def test_rules_say_what_they_need():
    assert Number(MEASURE).measures == (MEASURE,)
    assert AtMost(MEASURE, 1).measures == AtLeast(MEASURE, 1).measures == (MEASURE,)
    assert Beats(MEASURE, RIVAL, "lower").measures == (MEASURE, RIVAL)
    assert NotATarget("The data are not available.").measures == ()


@pytest.mark.parametrize(
    "build",
    [
        lambda: Measure("Test MSE", "implicit", "identity"),
        lambda: Measure("test_mse", "", "identity"),
        lambda: Measure("test_mse", "implicit", "identity", size="004"),
        lambda: Measure("test_mse", "implicit", "identity", at=math.nan),
        lambda: Measure("test_mse", "implicit", "identity", at=""),
        lambda: Number(MEASURE, "smaller"),
        lambda: Number(MEASURE, tolerance=-0.1),
        lambda: Beats(MEASURE, RIVAL, None),
        lambda: Beats(MEASURE, RIVAL, "lower", 0.0),
        lambda: Beats(MEASURE, RIVAL, "lower", math.inf),
        lambda: Beats(MEASURE, MEASURE, "lower"),
        lambda: Beats(MEASURE, Measure("accuracy", "mlp", "identity"), "lower"),
        lambda: AtMost(MEASURE, math.nan),
        lambda: AtLeast(MEASURE, True),
        lambda: NotATarget("implausible"),
    ],
)
def test_malformed_rules_are_refused(build):
    with pytest.raises(InputError, match="received"):
        build()
