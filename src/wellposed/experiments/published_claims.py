"""What the five papers publish: one `PublishedClaim` a number or order, read from TOML files.

A file explains its names and lists its claims::

    [metrics]
    test_mse = "mean squared error on the test set"

    [tasks]
    identity = "the identity"

    [[claim]]
    where = ["000 section 4", "002 section 3.2"]
    says = "The implicit model's test MSE stays below 5 up to a shift of 25."
    value = 5
    suite = "identity"
    rule = "at most"
    measure = { metric = "test_mse", model = "implicit", task = "identity", at = 30, size = "000" }

Metrics and tasks must be explained, models may be. ``where`` has all places of the claim, each a paper and a place
in it. ``value`` is in the unit of the measure, shares are fractions of one; ``unit`` and ``note`` may be left out.
``rule`` says how ours is compared:

- ``"number"``: ``measure`` with ``value``; ``better`` and ``tolerance`` (0.1) as in `Number`.
- ``"beats"``: ``measure`` with ``rival``, ``better`` and ``factor`` (1.0) as in `Beats`. A rival that is only a
  name is that model with the rest of the measure.
- ``"at most"`` and ``"at least"``: ``measure`` with ``value`` as the limit.
- ``"not a target"``: only the ``reason``.
"""

import functools
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from wellposed.errors import InputError, unknown_name
from wellposed.experiments.rules import AtLeast, AtMost, Beats, Measure, NotATarget, Number, Rule, is_sentence

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
NEEDED, OPTIONAL = ("where", "says", "suite", "rule"), ("unit", "note")


@dataclass(frozen=True)
class PublishedClaim:
    """A published number or order, where it stands, and how ours is compared with it.

    Args:
        where: pairs of a paper, ``"000"`` to ``"004"``, and a place in it, e.g. ``"Table 2"``.
        says: one sentence in our own words.
        value: the published number in the unit of the measure (shares as fractions of one); None for an order.
        suite: the suite that measures it.
        rule: how it is compared.
        unit: of the value.
        note: what is known to be wrong or ambiguous about it.

    Example:
        >>> rule = Number(Measure("parameters", "implicit", "identity"), tolerance=0.0)
        >>> where = (("000", "section 3"), ("002", "Table 1"))
        >>> claim = PublishedClaim(where, "The implicit model has 196 parameters.", 196, "parameters", rule)
        >>> claim.value, claim.papers, claim.places("002")
        (196, ('000', '002'), ('Table 1',))
    """

    where: tuple[tuple[str, str], ...]
    says: str
    value: float | None
    suite: str
    rule: Rule
    unit: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if not self.where or len(set(self.where)) < len(self.where):
            raise InputError(f"where must name at least one place, and each once; received {self.where}")
        for paper, place in self.where:
            if paper not in PAPERS:
                raise InputError(f"paper must be one of {', '.join(PAPERS)}; received {paper!r}")
            if not place.strip():
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

    def places(self, paper: str) -> tuple[str, ...]:
        """Returns the places in one paper; none if it does not make the claim."""
        return tuple(place for one, place in self.where if one == paper)


def claim_files() -> list[Path]:
    """Returns the files that claims are read from, in order."""
    return sorted(Path(__file__).with_name("claims").glob("*.toml"))


@functools.cache
def load_claims() -> tuple[PublishedClaim, ...]:
    """Reads all claims, in the order of their files and as they stand in each.

    Example:
        >>> claim = next(claim for claim in load_claims() if claim.suite == "identity")
        >>> claim.where
        (('000', 'section 4'), ('002', 'section 3.2'))
    """
    claims = tuple(claim for path in claim_files() for claim in read_claims(path))
    seen: dict[PublishedClaim, PublishedClaim] = {}
    for claim in claims:
        first = seen.setdefault(replace(claim, where=(("000", "anywhere"),)), claim)
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
            for measure in claims[-1].rule.measures:
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
    for name in ("says", "suite", "unit", "note", "reason"):
        if not isinstance(entry.get(name, ""), str):
            raise InputError(f"{name} must be a text; received {entry[name]!r}")
    value = entry.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise InputError(f"value must be a number; received {value!r}")
    where = entry["where"]
    if not isinstance(where, list) or not all(isinstance(place, str) for place in where):
        raise InputError(f'where must be a list such as ["000 section 4", "002 Table 1"]; received {where!r}')
    pairs = tuple((paper, place) for paper, _, place in (text.partition(" ") for text in where))
    texts = {name: entry[name] for name in OPTIONAL if name in entry}
    return PublishedClaim(pairs, entry["says"], value, entry["suite"], _rule(entry), **texts)


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
