"""The tables of the report."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from wellposed.pages.markup import Child, Html, element, plural, prose
from wellposed_lab.engine.claims import AtLeast, AtMost, Beats, NotATarget, PublishedClaim
from wellposed_lab.engine.judge import DEPENDS, JUDGEMENTS, LEARNT, Verdict
from wellposed_lab.engine.statistics import number
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Check
from wellposed_lab.networks.published import ParameterRow

SIGNS = {"reproduced": "✓", "better": "▲", "worse": "▼", "refuted": "✗", "undecided": "?",
         "not judged": "○"}  # fmt: skip
STATES = {"met": "reproduced", "not met": "refuted", "not run": "not-judged"}  # classes of their badges
HIDDEN_SETTINGS = ("suite", "seed", "scale", "role", "kind", "type", "name", "size", "fold", "folds")


def table(
    heads: Sequence[str], rows: Sequence[Html], label: str, class_: str | None = None, sortable: bool = False
) -> Html:
    """Writes a table that scrolls in its own box.

    Args:
        heads: titles of the columns.
        rows: made by `element("tr", ...)`.
        label: what it is, for screen readers.
        class_: for the style sheet.
        sortable: whether its heads are buttons.
    """
    titles = [element("button", head, type="button") if sortable else head for head in heads]
    head = element("thead", element("tr", [element("th", title, scope="col") for title in titles]))
    inner = element("table", head, element("tbody", rows), class_=class_, data_sortable=sortable)
    return element("div", inner, class_="scroll", tabindex=0, role="region", aria_label=label)


def badge(verdict: str) -> Html:
    """Writes a verdict with sign and colour."""
    sign = element("span", SIGNS[verdict], aria_hidden="true")
    return element(
        "span", sign, element("span", f" {verdict}", class_="word"), class_=f"badge {verdict.replace(' ', '-')}"
    )


def verdict_table(verdicts: Sequence[Verdict], label: str) -> Html:
    """Writes the claims with ours, published, verdict and why."""
    heads = ("where", "claim", "ours", "published", "verdict", "why")
    rows = [_verdict_row(verdict) for verdict in verdicts]
    shown = table(heads, rows, label, "verdicts", sortable=True)
    return Html(shown + element("p", "No claim here matches the filter.", class_="nothing quiet", hidden=True))


def _verdict_row(verdict: Verdict) -> Html:
    claim = verdict.claim
    note = element("small", prose(claim.note)) if claim.note else None
    cells: list[tuple[Child, Any]] = [
        (_where(claim), None),
        ([prose(claim.says), note or ""], None),
        (ours_of(verdict), "" if verdict.ours is None else verdict.ours),
        (published_of(verdict), "" if claim.value is None else claim.value),
        ([badge(verdict.verdict), *marks(verdict)], JUDGEMENTS.index(verdict.verdict)),
        (why_of(verdict), None),
    ]
    filled = [element("td", content, data_sort=_sort_key(key)) for content, key in cells]
    return element("tr", filled, data_verdict=verdict.verdict, data_papers=" ".join(claim.papers))


def marks(verdict: Verdict) -> list[Html]:
    """Writes the marks of a verdict: few seeds or one network, no target, our own question."""
    known = [
        (verdict.marked, "one network" if verdict.one_network else f"{verdict.seeds} seeds only"),
        (isinstance(verdict.claim.rule, NotATarget), "no target"),
        (verdict.claim.own, "our own question"),
    ]
    return [element("small", text) for holds, text in known if holds]


def why_of(verdict: Verdict) -> list[Html]:
    """Writes why a verdict is what it is, and below it every reading with its own verdict, number and reason."""
    listed = verdict.why.startswith((DEPENDS, LEARNT))
    why = verdict.why.partition(":")[0] + "." if listed else verdict.why
    readings = [
        element(
            "small",
            badge(one.verdict),
            f": {name}" + ("" if one.ours is None else f", {number(one.ours)}"),
            class_="reading",
            title=one.why,
        )
        for name, one in verdict.readings
    ]
    return [prose(why), *readings]


def _where(claim: PublishedClaim) -> list[Html]:
    """Writes the sections of a claim, one line a paper."""
    return [element("div", element("b", paper), " ", "; ".join(claim.sections(paper))) for paper in claim.papers]


def _sort_key(key: float | str | None) -> str | None:
    """Returns what a cell is sorted by; None for its text."""
    if key is None:
        return None
    return repr(float(key)).replace("inf", "Infinity") if isinstance(key, int | float) else str(key)


def ours_of(verdict: Verdict) -> list[str]:
    """Writes our number with its interval, its seeds and their scale."""
    if verdict.ours is None:
        return ["-"]
    kind = "" if verdict.kind == "mean" else f"{verdict.kind} "
    ends = verdict.interval
    between = f"{number(ends[0])} to {number(ends[1])}" if ends and ends[0] != ends[1] else ""
    details = [between, f"{plural(verdict.seeds, 'seed')}, {verdict.scale}"]
    return [f"{kind}{number(verdict.ours)}", *(element("small", detail) for detail in details if detail)]


def published_of(verdict: Verdict) -> str:
    """Writes what the paper prints, or what an order asks of the ratio."""
    claim = verdict.claim
    if isinstance(claim.rule, Beats):
        return "difference > 0" if verdict.kind == "difference" else f"ratio > {number(claim.rule.factor)}"
    sign = "≤ " if isinstance(claim.rule, AtMost) else "≥ " if isinstance(claim.rule, AtLeast) else ""
    return f"{sign}{number(claim.value)} {claim.unit}".strip()


def threshold_table(checks: Sequence[Check], label: str) -> Html:
    """Writes the thresholds with the value that decides and the records of the seeds beyond them."""
    rows = []
    for one in checks:
        badge = element("span", one.state, class_=f"badge {STATES[one.state]}")
        shown = number(one.judged) if one.values else "-"
        seeds = f"{len(one.values) - len(one.failing)} of {plural(len(one.values), 'seed')}" if one.values else "-"
        small = element("small", one.threshold.text)
        cells = ([prose(one.threshold.claim), small], shown, seeds, badge, ", ".join(one.failing_ids) or "-")
        rows.append(element("tr", [element("td", cell) for cell in cells]))
    heads = ("threshold", "worst or median", "met by", "state", "records beyond it")
    return table(heads, rows, label, "thresholds")


def count_cells(verdicts: Sequence[Verdict], target: str | None = None) -> list[Html]:
    """Writes how many verdicts there are of each kind; as links to `target`, which set the filter."""
    counts = Counter(verdict.verdict for verdict in verdicts)
    cells = []
    for verdict in JUDGEMENTS:
        count = counts[verdict]
        shown: Child = f"{count}" if count else "·"
        if count and target:
            text = f"{count} {verdict}"
            shown = element("a", f"{count}", href=f"#{target}", data_filter=verdict, aria_label=text)
        cells.append(element("td", shown, class_=None if count else "none"))
    return cells


def bar(verdicts: Sequence[Verdict]) -> Html:
    """Draws the shares of the verdicts as a bar."""
    counts = Counter(verdict.verdict for verdict in verdicts)
    segments = [
        element("span", class_=verdict.replace(" ", "-"), style=f"flex:{counts[verdict]}")
        for verdict in JUDGEMENTS
        if counts[verdict]
    ]
    return element("div", segments, class_="bar", aria_hidden="true")


def parameter_table(rows: Sequence[ParameterRow], label: str) -> Html:
    """Writes the numbers of parameters beside the published ones."""
    heads = ("task", "model", "size", "ours", "published", "agree", "note")
    words = {True: "yes", False: "no", None: "-"}
    lines = []
    for row in rows:
        published = "-" if row.published is None else f"{row.published:,}"
        cells = (row.task, row.model, row.size, f"{row.ours:,}", published, words[row.matches], row.note)
        lines.append(element("tr", [element("td", cell) for cell in cells], class_=f"agree-{words[row.matches]}"))
    return table(heads, lines, label, "parameters", sortable=True)


def run_table(records: Sequence[Record], label: str) -> Html:
    """Writes the runs, one line for those that differ in their seed only."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.task, record.model, record.size or "", record.role, _settings(record.config)].append(record)
    heads = ("task", "model", "size", "role", "seeds", "failed", "parameters", "seconds a seed", "settings")
    lines = []
    for (task, model, size, role, settings), group in groups.items():
        seconds = sum(record.seconds for record in group) / len(group)
        counts = {record.value("parameters") for record in group} - {None}
        failed = sum(record.error is not None for record in group)
        proofs = sorted({str(r.facts["certificate"]) for r in group if "certificate" in r.facts})
        detail = settings + "".join(f"; certificate {proof}" for proof in proofs)
        cells = (task, model, size, role, str(len(group)), str(failed), ", ".join(map(number, counts)) or "-")
        lines.append(element("tr", [element("td", cell) for cell in (*cells, number(round(seconds, 2)), detail)]))
    return table(heads, lines, label, "runs", sortable=True)


def _settings(config: Any) -> str:
    """Writes a configuration in a line, without what the other columns say."""
    words = []
    for name, value in config.items():
        if name in HIDDEN_SETTINGS or value is None or value == []:
            continue
        if isinstance(value, dict):
            words.append(_settings(value))
        elif name == "options":
            words += [f"{option} {setting}" for option, setting in value]
        else:
            words.append(f"{name} {value if isinstance(value, str) else json.dumps(value)}")
    return ", ".join(part for part in words if part)
