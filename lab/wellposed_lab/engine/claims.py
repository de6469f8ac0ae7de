"""What the five papers publish, and how it is compared with our numbers.

A `Measure` names one number of ours; a `Rule` says what must hold of it for a published claim to count as
reproduced. Rules are data with one pure function each; seeds, means and intervals are dealt with elsewhere.

A `PublishedClaim` is one published number or order, read from TOML files. A file explains its names and lists its
claims::

    [metrics]
    test_mse = "mean squared error on the test set"

    [tasks]
    identity = "the identity"

    [[claim]]
    where = ["000 section 4", "001 section 3.1", "002 section 3.2", "003 section 5.3 (mathematics)"]
    says = "The implicit model's test MSE stays below 5 up to a shift of 25."
    value = 5
    suite = "identity"
    rule = "at most"
    measure = { metric = "test_mse", model = "implicit", task = "identity", at = 30 }

Metrics and tasks must be explained, models may be. ``where`` lists every occurrence of the claim, each a paper and
a section. ``value`` is in the unit of the measure, shares are fractions of one; ``unit`` and ``note`` may be left
out. ``rule`` says how ours is compared:

- ``"number"``: ``measure`` with ``value``; ``better`` and ``tolerance`` (0.1) as in `Number`.
- ``"beats"``: ``measure`` with ``rival``, ``better`` and ``factor`` (1.0) as in `Beats`. A rival that is only a
  name is that model with the rest of the measure.
- ``"at most"`` and ``"at least"``: ``measure`` with ``value`` as the limit.
- ``"not a target"``: only the ``reason``.

Where a text leaves open what was done, ``reading`` names the choice that the claim makes, and ``readings`` has a
table for every other one: its name as ``reading``, and those of ``measure`` and ``rival`` that change. ``own =
true`` marks a question of ours that no paper asks, for instance on data that stand in for those of a paper.
"""

import functools
import math
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, final

from wellposed.errors import InputError, unknown_name

Better = Literal["lower", "higher"]
Outcome = Literal["reproduced", "better", "worse", "refuted"]

SIZES = ("000", "001", "002")
_NAME = re.compile(r"[a-z0-9]+(([_-]|(?<=\d)\.(?=\d))[a-z0-9]+)*")  # a number may have a point: kappa-0.5


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
        """Says where our mean lies; NaN is worse, and a number of the other sign is refuted."""
        if abs(ours - published) <= self.tolerance * abs(published):
            return "reproduced"
        if ours * published < 0:
            return "refuted"
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


PAPERS = {
    "000": "On the Abilities of Mathematical Extrapolation with Implicit Models",
    "001": "The Extrapolation Power of Implicit Models",
    "002": "Towards Efficient and Robust Out-of-Distribution Deep Learning with Implicit Models",
    "003": "Implicit Learning in Deep Models",
    "004": "Regularizing the Infinite",
}
MEASURE = tuple(field.name for field in fields(Measure))
RULES = {  # what a rule needs, and what it may have
    "number": (("value", "measure"), ("better", "tolerance")),
    "beats": (("measure", "rival", "better"), ("value", "factor")),
    "at most": (("value", "measure"), ()),
    "at least": (("value", "measure"), ()),
    "not a target": (("reason",), ("value",)),
}
GLOSSARIES = ("metrics", "models", "tasks")
NEEDED, OPTIONAL = ("where", "says", "suite", "rule"), ("unit", "note", "own", "reading", "readings")


@dataclass(frozen=True)
class PublishedClaim:
    """A published number or order, where it stands, and how ours is compared with it.

    Args:
        where: pairs of a paper, ``"000"`` to ``"004"``, and a section, e.g. ``"Table 2"``.
        says: one sentence in our own words.
        value: the published number in the unit of the measure (shares as fractions of one); None for an order.
        suite: the suite that measures it.
        rule: how it is compared.
        unit: of the value.
        note: what is known to be wrong or ambiguous about it.
        own: whether it is a question of ours, which no paper asks.
        reading: which choice the rule makes where the text leaves one open.
        readings: the other choices, each with its rule.

    Example:
        >>> rule = Number(Measure("parameters", "implicit", "identity"), tolerance=0.0)
        >>> where = (("000", "section 3"), ("002", "Table 1"))
        >>> claim = PublishedClaim(where, "The implicit model has 196 parameters.", 196, "parameters", rule)
        >>> claim.value, claim.papers, claim.sections("002")
        (196, ('000', '002'), ('Table 1',))
    """

    where: tuple[tuple[str, str], ...]
    says: str
    value: float | None
    suite: str
    rule: Rule
    unit: str = ""
    note: str = ""
    own: bool = False
    reading: str = ""
    readings: tuple[tuple[str, Rule], ...] = ()

    def __post_init__(self) -> None:
        if bool(self.reading) != bool(self.readings):
            raise InputError(f"a reading is named beside others; received {self.reading!r} and {self.readings}")
        if not self.where or len(set(self.where)) < len(self.where):
            raise InputError(f"where must name at least one place, and each once; received {self.where}")
        for paper, section in self.where:
            if paper not in PAPERS:
                raise InputError(f"paper must be one of {', '.join(PAPERS)}; received {paper!r}")
            if not section.strip():
                raise InputError(f"where must say at which place of paper {paper} the claim stands; received ''")
        if not self.suite:
            raise InputError("suite must be the name of the suite that measures the claim; received ''")
        for name, text in (("says", self.says), ("note", self.note)):
            if not is_sentence(text) and (text or name == "says"):
                raise InputError(f"{name} must be a sentence; received {text!r}")
        if self.value is not None and not math.isfinite(self.value):
            raise InputError(f"value must be finite or None; received {self.value}")
        if isinstance(self.rule, Number) and self.value is None:
            raise InputError(f"a Number is compared with a value; received None for {self.says!r}")
        if isinstance(self.rule, AtMost | AtLeast) and self.value != self.rule.limit:
            raise InputError(f"value and limit must agree; received {self.value} and {self.rule.limit}")

    @property
    def papers(self) -> tuple[str, ...]:
        """The papers that make the claim."""
        return tuple(dict.fromkeys(paper for paper, _ in self.where))

    def sections(self, paper: str) -> tuple[str, ...]:
        """Returns the sections of one paper; none if it does not make the claim."""
        return tuple(section for one, section in self.where if one == paper)


def claim_files() -> list[Path]:
    """Returns the files that claims are read from, in order."""
    return sorted((Path(__file__).parents[1] / "experiments").glob("*/claims.toml"))


@functools.cache
def load_claims() -> tuple[PublishedClaim, ...]:
    """Reads all claims, in the order of their files and as they stand in each.

    Example:
        >>> claim = next(claim for claim in load_claims() if claim.suite == "identity")
        >>> claim.where[:2]
        (('000', 'section 4'), ('001', 'section 3.1'))
    """
    claims = tuple(claim for path in claim_files() for claim in read_claims(path))
    seen: dict[PublishedClaim, PublishedClaim] = {}
    for claim in claims:
        same = isinstance(claim.rule, NotATarget)  # what has no measure is told apart by its words
        words = claim.says if same else "The same is claimed."
        plain = replace(claim, where=(("000", "anywhere"),), says=words, note="", unit="")
        first = seen.setdefault(plain, claim)
        if first is not claim:
            raise InputError(
                f"a claim has one entry with all its places; received two for {claim.says!r}, at {first.where} "
                f"and at {claim.where}: join them"
            )
    return claims


def require_known_suites(claims: Iterable[PublishedClaim], suites: Iterable[str]) -> None:
    """Refuses a claim that no suite measures.

    Example:
        >>> require_known_suites(load_claims()[:1], ["identity"])
        Traceback (most recent call last):
        wellposed.errors.InputError: 'Against PGD ... none.' ...: unknown suite 'adversarial'; valid: identity
    """
    known = tuple(suites)
    for claim in claims:
        if claim.suite not in known:
            error = unknown_name("suite", claim.suite, known)
            raise InputError(f"{claim.says!r} is measured by no suite: {error}")


def read_claims(path: Path) -> tuple[PublishedClaim, ...]:
    """Reads the claims of one file."""
    name = f"{path.parent.name}/{path.name}"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{name} must be a TOML file; received text that is not: {error}") from error
    claims = []
    try:
        _require_keys(content, ("claim",), GLOSSARIES)
        entries, glossaries = content["claim"], {table: _glossary(table, content) for table in GLOSSARIES}
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise InputError(f"claims must be tables [[claim]]; received {type(entries).__name__}")
        for index, entry in enumerate(entries, 1):
            name = f"{path.parent.name}/{path.name}, claim {index} ({entry.get('says', 'without says')!r})"
            claims.append(_claim(entry))
            rules = (claims[-1].rule, *(rule for _, rule in claims[-1].readings))
            for measure in (measure for rule in rules for measure in rule.measures):
                _require_explained("metrics", measure.metric, glossaries)
                _require_explained("tasks", measure.task, glossaries)
    except ValueError as error:
        raise InputError(f"{name}: {error}") from error
    return tuple(claims)


def _glossary(table: str, content: Mapping[str, Any]) -> dict[str, str]:
    names = content.get(table, {})
    if not isinstance(names, dict) or not all(isinstance(text, str) and text for text in names.values()):
        raise InputError(f"[{table}] must say of every name in words what it means; received {names!r}")
    return names


def _require_explained(table: str, name: str, glossaries: Mapping[str, Mapping[str, str]]) -> None:
    if name not in glossaries[table]:
        known = ", ".join(glossaries[table]) or "none"
        raise InputError(f"[{table}] must say what {name!r} means; received {known}")


def _claim(entry: Mapping[str, Any]) -> PublishedClaim:
    rule = entry.get("rule")
    if not isinstance(rule, str) or rule not in RULES:
        raise InputError(f"rule must be one of {', '.join(map(repr, RULES))}; received {rule!r}")
    needed, optional = RULES[rule]
    _require_keys(entry, (*NEEDED, *needed), (*OPTIONAL, *optional))
    for name in ("says", "suite", "unit", "note", "reason", "reading"):
        if not isinstance(entry.get(name, ""), str):
            raise InputError(f"{name} must be a text; received {entry[name]!r}")
    value = entry.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise InputError(f"value must be a number; received {value!r}")
    where = entry["where"]
    if not isinstance(where, list) or not all(isinstance(section, str) for section in where):
        raise InputError(f'where must be a list such as ["000 section 4", "002 Table 1"]; received {where!r}')
    pairs = tuple((paper, section) for paper, _, section in (text.partition(" ") for text in where))
    if not isinstance(entry.get("own", False), bool):
        raise InputError(f"own must be true or false; received {entry['own']!r}")
    texts = {name: entry[name] for name in OPTIONAL if name in entry and name != "readings"}
    readings = tuple(_reading(entry, table) for table in entry.get("readings", ()))
    return PublishedClaim(pairs, entry["says"], value, entry["suite"], _rule(entry), **texts, readings=readings)


def _reading(entry: Mapping[str, Any], table: Mapping[str, Any]) -> tuple[str, Rule]:
    """Reads another choice; a measure or rival that it leaves out is that of the claim."""
    _require_keys(table, ("reading",), ("measure", "rival"))
    changed = {key: {**entry[key], **table[key]} for key in ("measure",) if key in table}
    rival = {"rival": table["rival"]} if "rival" in table else {}
    return table["reading"], _rule({**entry, **changed, **rival})


def _rule(entry: Mapping[str, Any]) -> Rule:
    if entry["rule"] == "not a target":
        return NotATarget(entry["reason"])
    measure = _measure("measure", entry["measure"])
    if entry["rule"] == "at most":
        return AtMost(measure, entry["value"])
    if entry["rule"] == "at least":
        return AtLeast(measure, entry["value"])
    options = {name: entry[name] for name in ("better", "tolerance", "factor") if name in entry}
    if entry["rule"] == "number":
        return Number(measure, **options)
    rival = entry["rival"]
    other = replace(measure, model=rival) if isinstance(rival, str) else _measure("rival", rival)
    return Beats(measure, other, **options)


def _measure(key: str, table: object) -> Measure:
    if not isinstance(table, dict):
        example = '{ metric = "test_mse", model = "lstm", task = "spiky" }'
        raise InputError(f"{key} must be a table such as {example}; received {table!r}")
    _require_keys(table, MEASURE[:3], MEASURE[3:])
    return Measure(**table)


def _require_keys(table: Mapping[str, object], needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
    for key in table:
        if key not in (*needed, *optional):
            raise unknown_name("key", key, (*needed, *optional))
    if missing := [key for key in needed if key not in table]:
        raise InputError(f"{', '.join(missing)} must be given; received {', '.join(table) or 'nothing'}")
