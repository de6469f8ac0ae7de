"""The report as one HTML file that needs no server and no network."""

import importlib.resources
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from wellposed.atomic import atomic_write
from wellposed.pages.markup import (
    INFLATE,
    Html,
    Step,
    brand,
    compressed,
    document,
    element,
    join,
    next_steps,
    plural,
)
from wellposed_lab.config import JUDGED_SCALES
from wellposed_lab.engine.claims import PAPERS, load_claims, require_known_suites
from wellposed_lab.engine.experiment import Suite, all_suites
from wellposed_lab.engine.judge import DECIDED, JUDGEMENTS, Verdict, tally, verdicts
from wellposed_lab.engine.store import Record
from wellposed_lab.networks.published import ParameterRow, parameter_table
from wellposed_lab.report.drawing import library
from wellposed_lab.report.section import SuiteResults, duration, environments, section
from wellposed_lab.report.tables import badge, bar, count_cells, verdict_table

TITLE = "What the papers claim and what we measured"
RULES = (
    "A number is reproduced if its mean over the seeds lies within the tolerance around the published value, "
    "better or worse if the whole interval lies beyond, refuted if it has the other sign. A count that is not the "
    "same at scale paper is refuted.",
    "An order is judged seed by seed: reproduced if the whole interval of the ratio is beyond half of the "
    "printed effect (1 % where none is printed), worse if the order is right and the effect smaller, refuted if "
    "the opposite was found or there is no difference.",
    "A limit is reproduced if every seed keeps to it, refuted if none does.",
    "What the records do not decide is undecided. No order is judged in seeds in which a side did not learn its "
    "task, nor where both sides are at chance or saturated.",
    "Where a text leaves a choice open every reading is judged and shown; if they differ the claim is undecided. "
    "A reading under which a side does not learn is not the text's, and is left out.",
    "Intervals are 95 % bootstrap intervals over the seeds, widened for small samples. Below 5 seeds it is the "
    "range of the seeds, and the verdict is marked, as is one of which all seeds share one network; fewer than 3 "
    "seeds decide nothing but counts.",
    "A run that diverged counts against the model that a claim praises and is left out on the rival's side.",
    "A smaller scale never overrules a larger one; where they disagree the claim is undecided. Tiny runs are "
    "never judged. A printed number that cannot be a target is listed as not judged, with the reason.",
    "A claim counts once, however many papers make it. Questions of our own, which a paper does not ask or not on "
    "these data, are marked and counted apart.",
)
NEXT = (
    Step("See which suites there are and what they reproduce.", "wellposed list"),
    Step("Run one of them yourself; what is finished is skipped.", "wellposed run identity"),
    Step("Ask a small digit reader six questions.", "wellposed demo"),
)


def write_report(
    records: Iterable[Record], path: str | os.PathLike[str], *, suites: Mapping[str, Suite] | None = None
) -> Path:
    """Writes the report of records as one HTML file and returns its path.

    Args:
        records: of any suites and scales, e.g. ``Store(folder).records()``.
        path: of the file; its folder is made if need be.
        suites: by name; None for all.

    Example:
        >>> import tempfile
        >>> target = write_report([], f"{tempfile.mkdtemp()}/report.html")
        >>> "nothing has been run" in target.read_text(encoding="utf-8")
        True
    """
    text = packed(page(list(records), all_suites() if suites is None else suites))
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return target


def page(records: Sequence[Record], suites: Mapping[str, Suite]) -> str:
    """Writes the whole page."""
    sections = _by_suite(records, suites)
    run = [results for results in sections if results.was_run]
    left = [results for results in sections if not results.was_run]
    judged = [verdict for results in sections for verdict in results.verdicts]
    body = [
        element("a", "Skip to the results", href="#results", class_="skip"),
        brand(),
        _header(records, judged, sections),
        _contents(run, left),
        element(
            "main",
            _summary(sections, judged),
            _filter(),
            [section(results) for results in run],
            _not_run(left),
            id="results",
            tabindex=-1,
        ),
        element("footer", _footer(records)),
        library(),
        element("script", Html(INFLATE + _file("script.js"))),
    ]
    return document(TITLE, body, style=_file("style.css"), script=True, wide=True)


def _by_suite(records: Sequence[Record], suites: Mapping[str, Suite]) -> list[SuiteResults]:
    """Sorts everything by suite, in the order of the registry, with suites that are not in it at the end."""
    require_known_suites(load_claims(), all_suites())
    judged = verdicts(records)
    networks = parameter_table()
    sections = []
    for name in dict.fromkeys([*all_suites(), *suites, *(record.suite for record in records)]):
        own = [record for record in records if record.suite == name]
        claims = [verdict for verdict in judged if verdict.claim.suite == name]
        sections.append(SuiteResults(name, suites.get(name), own, claims, _networks(name, own, networks)))
    return sections


def _networks(name: str, records: Sequence[Record], networks: Sequence[ParameterRow]) -> list[ParameterRow]:
    tasks = {record.task for record in records}
    return [row for row in networks if row.task in tasks or name == "parameters"]


def _header(records: Sequence[Record], judged: Sequence[Verdict], sections: Sequence[SuiteResults]) -> Html:
    published = [verdict for verdict in judged if not verdict.claim.own]
    counts = tally(published)
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    marked = sum(verdict.marked for verdict in published)
    finding = (
        f"Of {plural(len(published), 'distinct published claim')} by {plural(len(records), 'run')}: {listed}. "
        f"{marked} of the decided ones rest on fewer than 5 seeds or on one network and are marked; "
        f"{len(judged) - len(published)} questions of our own are counted apart."
    )
    if not any(record.scale in JUDGED_SCALES for record in records):
        finding = f"None of {plural(len(published), 'published claim')} is judged yet: " + (
            "all runs are tiny ones, which are for tests." if records else "nothing has been run."
        )
    return element(
        "header",
        element("h1", TITLE),
        element("p", _when(records), class_="quiet"),
        element("div", element("p", finding), bar(judged), element("p", _learnt(sections)), class_="finding"),
    )


def _learnt(sections: Sequence[SuiteResults]) -> str:
    """Says in a paragraph what was learnt: how much holds, where all of it does, and where most of it does not."""
    shares: dict[str, tuple[int, int]] = {}
    for results in sections:
        published = [verdict.verdict for verdict in results.verdicts if not verdict.claim.own]
        known = [name for name in published if name in DECIDED]
        if known:
            shares[results.title] = sum(name in ("reproduced", "better") for name in known), len(known)
    if not shares:
        return ""
    held, count = (sum(numbers) for numbers in zip(*shares.values(), strict=True))
    whole = [name for name, (good, decided) in shares.items() if good == decided and decided >= 3]
    worst = sorted(shares, key=lambda name: shares[name][0] - shares[name][1])[:3]
    failing = [f"{name} ({shares[name][1] - shares[name][0]} of {shares[name][1]})" for name in worst
               if shares[name][0] < shares[name][1]]  # fmt: skip
    sentences = [f"What was learnt: {held} of {count} decided claims hold ({100 * held / count:.0f} %)."]
    if whole:
        sentences.append(f"All of them hold in {_listed(whole)}.")
    if failing:
        sentences.append(f"Most of those that do not are in {_listed(failing)}; each section says why.")
    return " ".join(sentences)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{'; '.join(names[:-1])}; and {names[-1]}"


def _when(records: Sequence[Record]) -> str:
    if not records:
        return "Start with: wellposed run identity"
    dates = sorted(record.started[:10] for record in records)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    spent = duration(sum(record.seconds for record in records))
    versions = sorted({str(record.environment.get("wellposed", "?")) for record in records})
    named = f"wellposed {' and '.join(versions)}"
    return f"{named}; runs of {when}, {spent} of computing. Everything here is made from their records."


def _contents(run: Sequence[SuiteResults], left: Sequence[SuiteResults]) -> Html:
    links = [("summary", "Summary"), *((results.anchor, results.title) for results in run)]
    links += [("not-run", "Not run yet")] if any(results.verdicts for results in left) else []
    items = [element("li", element("a", title, href=f"#{anchor}")) for anchor, title in links]
    summary = element("summary", f"Contents: {plural(len(run), 'suite')}")
    return element("nav", element("details", summary, element("ol", items)), aria_label="Contents")


def _summary(sections: Sequence[SuiteResults], judged: Sequence[Verdict]) -> Html:
    heads = [
        element("th", "suite", scope="col"),
        *(element("th", badge(name), scope="col") for name in JUDGEMENTS),
    ]
    rows = []
    for results in sections:
        if results.verdicts or results.records:
            target = results.anchor if results.was_run else None
            name = element("a", results.title, href=f"#{target}") if target else results.title
            title = element("th", name, bar(results.verdicts) if target else None, scope="row")
            cells = count_cells(results.verdicts, target)
            rows.append(element("tr", title, cells, class_=None if target else "left"))
    totals = [
        element("tr", element("th", name, scope="row"), count_cells(counted), class_="total")
        for name, counted in (
            ("published", [one for one in judged if not one.claim.own]),
            ("our own questions", [one for one in judged if one.claim.own]),
        )
    ]
    inner = element(
        "table", element("thead", element("tr", heads)), element("tbody", rows, totals), class_="summary"
    )
    rules = element("ul", [element("li", rule) for rule in RULES])
    return element(
        "section",
        element("h2", "Summary", id="summary-title"),
        element("p", [join(badge(name), " ") for name in JUDGEMENTS], class_="key"),
        element("div", inner, class_="scroll", tabindex=0, role="region", aria_label="Verdicts by suite"),
        element("details", element("summary", "How a verdict is reached"), rules),
        id="summary",
        aria_labelledby="summary-title",
    )


def _filter() -> Html:
    """Writes the form that filters all tables of claims; the script shows it."""

    def options(names: Iterable[str]) -> list[Html]:
        return [element("option", "all", value=""), *(element("option", name, value=name) for name in names)]

    fields = [
        element("label", "verdict ", element("select", options(JUDGEMENTS), name="verdict")),
        element("label", "paper ", element("select", options(PAPERS), name="paper")),
        element("label", "text ", element("input", type="search", name="text", autocomplete="off")),
        element("button", "show all", type="reset"),
        element("output", aria_live="polite"),
    ]
    return element("form", fields, id="filter", role="search", aria_label="Filter the claims", hidden=True)


def _not_run(sections: Sequence[SuiteResults]) -> Html:
    if not any(results.verdicts for results in sections):
        return Html("")
    blocks = []
    for results in sections:
        if claims := results.verdicts:
            count = element("span", f" ({plural(len(claims), 'claim')})", class_="count", data_all=len(claims))
            summary = element("summary", results.title, count)
            table = verdict_table(claims, f"Not run: {results.name}")
            blocks.append(element("details", summary, table, class_="suite-claims"))
    names = ", ".join(results.name for results in sections if results.verdicts)
    intro = f"These claims belong to suites that have not been run: {names}."
    heading = element("h2", "Not run yet", id="not-run-title")
    return element("section", heading, element("p", intro), blocks, id="not-run", aria_labelledby="not-run-title")


def _footer(records: Sequence[Record]) -> list[Html]:
    papers = [element("li", element("b", paper), f" {title}") for paper, title in PAPERS.items()]
    where = [element("li", line) for line in environments(records)]
    return [
        element("h2", "Where to go next"),
        next_steps(NEXT),
        element("h2", "Papers"),
        element("ul", papers),
        element("h2", "Versions") if where else Html(""),
        element("ul", where) if where else Html(""),
    ]


FOLDED = re.compile(
    r'(?P<open><script id="library"|<script type="application/json"|<details class="folded")>'
    r"(?P<summary><summary>.*?</summary>)?(?P<content>.*?)(?P<close></script>|</details>)",
    re.DOTALL,
)


def packed(text: str) -> str:
    """Moves what only the script needs into one compressed block: library, figures and folded tables.

    Example:
        >>> folded = packed('<details class="folded"><summary>a</summary>' + 99 * "b" + "</details></body>")
        >>> folded.partition("</details>")[0]
        '<details class="folded" data-packed="0"><summary>a</summary>'
    """
    contents: list[str] = []

    def moved(match: re.Match[str]) -> str:
        contents.append(match["content"])
        return f'{match["open"]} data-packed="{len(contents) - 1}">{match["summary"] or ""}{match["close"]}'

    shorter = FOLDED.sub(moved, text)
    holder = compressed(json.dumps(contents), "packed")
    before, mark, after = shorter.rpartition('<script id="library"')
    return f"{before}{holder}{mark}{after}" if mark else shorter.replace("</body>", f"{holder}</body>")


def _file(name: str) -> str:
    return importlib.resources.files("wellposed_lab.report").joinpath(name).read_text(encoding="utf-8")
