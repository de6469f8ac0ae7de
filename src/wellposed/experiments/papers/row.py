"""One published claim as data, and the sheet that writes such rows briefly."""

import math
from dataclasses import dataclass, replace

from wellposed.errors import InputError
from wellposed.experiments.rules import (
    AtLeast,
    AtMost,
    Beats,
    Better,
    Measure,
    NotATarget,
    Number,
    Rule,
    is_sentence,
)

PAPERS = ("000", "001", "002", "003", "004")
SUITES = (
    "identity",
    "arithmetic",
    "activations",
    "rolling-average",
    "rolling-argmax",
    "spiky",
    "volatility",
    "earthquake",
    "feedback",
    "depth",
    "eliminate-fashion",
    "eliminate-earthquake",
    "sparsify-fashion",
    "sparsify-cifar",
    "sparsify-newsgroups",
    "bounds",
    "attack-mnist",
    "attack-cifar",
    "noise-solvers",
    "noise-mnist",
    "noise-cifar",
    "noise-regression",
    "adversarial",
    "prefix-sums",
    "mazes",
    "matrix-addition",
    "parameters",
)


@dataclass(frozen=True)
class Row:
    """A published number or order, where it stands, and how ours is compared with it.

    Args:
        paper: ``"000"`` to ``"004"``.
        place: where in the paper, e.g. ``"Table 2"``.
        claim: one sentence in our own words.
        value: the published number in the unit of the measure (shares as fractions of one); None for an order.
        suite: the suite that measures it.
        rule: how it is compared.
        unit: of the value.
        note: what is known to be wrong or ambiguous about it.

    Example:
        >>> rule = Number(Measure("parameters", "implicit", "identity"), tolerance=0.0)
        >>> Row("000", "section 3", "The implicit model has 196 parameters.", 196, "parameters", rule).value
        196
    """

    paper: str
    place: str
    claim: str
    value: float | None
    suite: str
    rule: Rule
    unit: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.paper not in PAPERS:
            raise InputError(f"paper must be one of {', '.join(PAPERS)}; received {self.paper!r}")
        if self.suite not in SUITES:
            raise InputError(f"suite must be one of {', '.join(SUITES)}; received {self.suite!r}")
        if not self.place:
            raise InputError(f"place must say where in paper {self.paper} the claim stands; received ''")
        for name, text in (("claim", self.claim), ("note", self.note)):
            if not is_sentence(text) and (text or name == "claim"):
                raise InputError(f"{name} must be a sentence; received {text!r}")
        if self.value is not None and not math.isfinite(self.value):
            raise InputError(f"value must be finite or None; received {self.value}")
        if isinstance(self.rule, Number) and self.value is None:
            raise InputError(f"a Number is compared with a value; received None for {self.claim!r}")
        if isinstance(self.rule, AtMost | AtLeast) and self.value != self.rule.limit:
            raise InputError(f"value and limit must agree; received {self.value} and {self.rule.limit}")


def share(percent: float) -> float:
    """Turns a printed percentage into a fraction.

    Example:
        >>> share(13.41)
        0.1341
    """
    return round(percent / 100, 8)


@dataclass(frozen=True)
class Sheet:
    """Writes the rows of one paper for one suite.

    Example:
        >>> sheet = Sheet("001", "spiky")
        >>> row = sheet.below("Table 1", "The error stays small.", 0.004, Measure("test_mse", "lstm", "spiky"))
        >>> row.rule
        AtMost(measure=Measure(metric='test_mse', model='lstm', task='spiky', at=None, size=None), limit=0.004)
    """

    paper: str
    suite: str

    def number(
        self,
        place: str,
        claim: str,
        value: float,
        measure: Measure,
        better: Better | None = None,
        tolerance: float = 0.1,
        unit: str = "",
        note: str = "",
    ) -> Row:
        """Writes a number to be compared with ours."""
        return Row(self.paper, place, claim, value, self.suite, Number(measure, better, tolerance), unit, note)

    def count(self, place: str, claim: str, value: int, measure: Measure, note: str = "") -> Row:
        """Writes a count to be matched exactly."""
        rule = Number(measure, tolerance=0.0)
        unit = measure.metric.rpartition("_")[2]
        return Row(self.paper, place, claim, value, self.suite, rule, unit, note)

    def below(self, place: str, claim: str, limit: float, measure: Measure, unit: str = "", note: str = "") -> Row:
        """Writes an upper limit."""
        return Row(self.paper, place, claim, limit, self.suite, AtMost(measure, limit), unit, note)

    def above(self, place: str, claim: str, limit: float, measure: Measure, unit: str = "", note: str = "") -> Row:
        """Writes a lower limit."""
        return Row(self.paper, place, claim, limit, self.suite, AtLeast(measure, limit), unit, note)

    def order(
        self,
        place: str,
        claim: str,
        measure: Measure,
        rival: Measure | str,
        better: Better,
        factor: float = 1.0,
        value: float | None = None,
        note: str = "",
    ) -> Row:
        """Writes that one number is better than another; a name is that model in the same place."""
        other = replace(measure, model=rival) if isinstance(rival, str) else rival
        return Row(self.paper, place, claim, value, self.suite, Beats(measure, other, better, factor), note=note)

    def excluded(self, place: str, claim: str, value: float | None, reason: str, unit: str = "") -> Row:
        """Writes what is printed and cannot be a target."""
        return Row(self.paper, place, claim, value, self.suite, NotATarget(reason), unit)
