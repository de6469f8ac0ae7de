"""One suite in the report."""

import base64
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

from wellposed.errors import require
from wellposed.pages.markup import Html, element, join, plural, prose
from wellposed_lab.engine.derived import with_derived
from wellposed_lab.engine.experiment import Suite
from wellposed_lab.engine.judge import JUDGEMENTS, Verdict
from wellposed_lab.engine.runner import Order
from wellposed_lab.engine.store import Record
from wellposed_lab.engine.thresholds import Check, check
from wellposed_lab.networks.published import ParameterRow
from wellposed_lab.report.drawing import figure_html
from wellposed_lab.report.figures import best_scale, label
from wellposed_lab.report.gallery import LEGEND, gallery_html
from wellposed_lab.report.tables import parameter_table, run_table, threshold_table, verdict_table

COLOURS = 32  # of a drawing
TINY = "These are tiny runs, which only test that everything works; no claim is judged by them."


@dataclass(frozen=True)
class SuiteResults:
    """What the report knows of one suite.

    Args:
        name: of the suite.
        suite: None where its records are left and the suite is gone, or its numbers come from other suites.
        records: all of it.
        verdicts: on the claims that belong to it.
        parameters: of the networks on its tasks.
    """

    name: str
    suite: Suite | None
    records: Sequence[Record]
    verdicts: Sequence[Verdict]
    parameters: Sequence[ParameterRow] = ()

    @property
    def title(self) -> str:
        """As the section is called."""
        return self.suite.title if self.suite else self.name.replace("-", " ").capitalize()

    @property
    def anchor(self) -> str:
        """Where it stands on the page."""
        return "suite-" + re.sub(r"[^a-z0-9]+", "-", self.name.lower())

    @property
    def was_run(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.records) or any(verdict.verdict != "not judged" for verdict in self.verdicts)


def section(results: SuiteResults) -> Html:
    """Writes the section of a suite."""
    scale = best_scale(results.records)
    shown = [record for record in results.records if record.scale == scale]
    runs = [record for record in shown if record.kind == "run"]
    return element(
        "section",
        element("h2", results.title, id=f"{results.anchor}-title"),
        _claim(results),
        element("p", _extent(results.records), class_="quiet") if results.records else None,
        element("p", TINY, class_="notice") if scale == "tiny" else None,
        _figures(results, [record for record in results.records if record.kind == "run"]),
        _galleries(results, runs),
        _pictures(results, runs),
        element("h3", "Claims and verdicts"),
        element("p", _counts(results.verdicts), class_="quiet"),
        verdict_table(results.verdicts, f"Claims: {results.title}") if results.verdicts else None,
        _thresholds(results),
        _again(results),
        _findings(results, runs),
        _details(results, runs),
        _environment(shown),
        _failures(results.records),
        id=results.anchor,
        aria_labelledby=f"{results.anchor}-title",
    )


def _claim(results: SuiteResults) -> Html:
    if results.suite is None:
        text = "The claims below are judged by the records of other suites." if not results.records else ""
        return element("p", text, class_="claim") if text else Html("")
    papers = ", ".join(results.suite.papers)
    where = element("span", f" ({papers})", class_="quiet") if papers else ""
    return element("p", prose(results.suite.claim), where, class_="claim")


def _extent(records: Sequence[Record]) -> str:
    """Says how much was run."""
    extents = []
    for scale, count in Counter(record.scale for record in records).most_common():
        seeds = len({record.seed for record in records if record.scale == scale and record.kind == "run"})
        extents.append(f"{plural(count, 'run')} at scale {scale} with {plural(seeds, 'seed')}")
    return f"{'; '.join(extents)}; {duration(sum(record.seconds for record in records))} of computing."


def duration(seconds: float) -> str:
    """Writes a time for people.

    Example:
        >>> duration(42), duration(600), duration(9000)
        ('42 seconds', '10 minutes', '2.5 hours')
    """
    if seconds < 100:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


def _figures(results: SuiteResults, records: Sequence[Record]) -> Html:
    figures = results.suite.figures if results.suite else ()
    drawn = [figure_html(figure, records, f"{results.anchor}-{index}") for index, figure in enumerate(figures)]
    shown = [one for one in drawn if one is not None]
    return join(element("h3", "Figures"), element("div", shown, class_="figures")) if shown else Html("")


def _galleries(results: SuiteResults, records: Sequence[Record]) -> Html:
    drawn = [gallery_html(gallery, records) for gallery in (results.suite.galleries if results.suite else ())]
    shown = [one for one in drawn if one is not None]
    if not shown:
        return Html("")
    legend = element("p", LEGEND, class_="quiet")
    return join(element("h3", "Pictures"), legend, element("div", shown, class_="figures"))


def _pictures(results: SuiteResults, records: Sequence[Record]) -> Html:
    figures = []
    for picture in results.suite.pictures if results.suite else ():
        drawn = picture.draw(records) if records else None
        if drawn is not None:
            source = "data:image/png;base64," + base64.b64encode(_small(drawn)).decode()
            where = element("span", f" (as {picture.paper})", class_="quiet") if picture.paper else ""
            image = element("img", src=source, alt=picture.note or picture.title, loading="lazy", class_="picture")
            note = element("figcaption", prose(picture.note), class_="quiet")
            title, frame = element("h4", picture.title, where), element("div", image, class_="scroll")
            figures.append(element("figure", title, frame, note, class_="wide"))
    return element("div", figures, class_="figures") if figures else Html("")


def _small(picture: bytes) -> bytes:
    """Writes a drawing with a palette, which takes a fraction of the space."""
    image = require("PIL.Image", extra="plots").open(BytesIO(picture)).convert("RGB")
    smaller = BytesIO()
    image.quantize(COLOURS).save(smaller, "PNG", optimize=True)
    return min(picture, smaller.getvalue(), key=len)


def _counts(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(verdict.verdict for verdict in verdicts)
    listed = ", ".join(f"{counts[name]} {name}" for name in JUDGEMENTS if counts[name])
    return (
        f"{plural(len(verdicts), 'claim')}: {listed}."
        if verdicts
        else "No claim of a paper belongs to this suite."
    )


def _thresholds(results: SuiteResults) -> Html:
    """Shows what every seed has to reach; not for tiny runs, which are not judged."""
    if results.suite is None or not results.records:
        return Html("")
    checks = check(results.suite.thresholds, with_derived(results.records), results.suite.alike)
    if not checks:
        return Html("")
    return join(
        element("h3", "Thresholds"),
        element("p", _met(checks), class_="quiet"),
        threshold_table(checks, f"Thresholds: {results.title}"),
    )


def _met(checks: Sequence[Check]) -> str:
    counts = Counter(one.state for one in checks)
    listed = ", ".join(f"{counts[state]} {state}" for state in ("met", "not met", "not run") if counts[state])
    return f"What the numbers of every seed have to reach here, whatever the papers say: {listed}."


def _again(results: SuiteResults) -> Html:
    if not results.records:
        return Html("")
    lines = [*(order.command for order in orders(results)), "wellposed report"]
    differs = results.suite.differs if results.suite else ""
    note = (
        element("p", f"The scale paper is not quite as published: {differs}", class_="quiet") if differs else None
    )
    return join(element("h3", "Run it again"), element("pre", element("code", "\n".join(lines))), note)


def orders(results: SuiteResults) -> list[Order]:
    """Returns what to ask for to get the same records, a scale at a time."""
    wanted = []
    for scale in ("tiny", "default", "paper"):
        records = [record for record in results.records if record.scale == scale]
        if records:
            count = len({record.seed for record in records if record.kind == "run"})
            usual = results.suite.seeds.get(scale) if results.suite else None
            search = any(record.kind == "search" for record in records)
            processors = all("CPU" in str(record.environment.get("device", "CPU")) for record in records)
            seeds = None if count in (0, usual) else count
            wanted.append(Order(results.name, scale, seeds, search, "cpu" if processors else "cuda"))
    return wanted


def _findings(results: SuiteResults, records: Sequence[Record]) -> Html:
    sentences = results.suite.findings(records) if results.suite and records else []
    if not sentences:
        return Html("")
    return join(
        element("h3", "What the controls show"), element("ul", [element("li", prose(s)) for s in sentences])
    )


def _details(results: SuiteResults, runs: Sequence[Record]) -> Html:
    tables = []
    if results.parameters:
        differ = sum(row.matches is False for row in results.parameters)
        title = f"Parameters, ours and published ({plural(len(results.parameters), 'network')}, {differ} differ)"
        inner = parameter_table(results.parameters, f"Parameters: {results.title}")
        tables.append(element("details", element("summary", title), inner, class_="folded"))
    if runs:
        title = f"Runs and settings ({plural(len(runs), 'run')})"
        inner = run_table(runs, f"Runs: {results.title}")
        tables.append(element("details", element("summary", title), inner, class_="folded"))
    return join(tables)


def environments(records: Sequence[Record]) -> list[str]:
    """Says where records were made, the most frequent place first."""
    counts = Counter(
        ", ".join(f"{name} {value}" for name, value in record.environment.items() if value is not None)
        for record in records
        if record.environment
    )
    alone = len(counts) == 1
    return [where if alone else f"{where} ({plural(count, 'run')})" for where, count in counts.most_common()]


def _environment(records: Sequence[Record]) -> Html:
    lines = environments(records)
    if not lines:
        return Html("")
    dates = sorted(record.started[:10] for record in records)
    when = f"Run on {dates[0]}" if dates[0] == dates[-1] else f"Run from {dates[0]} to {dates[-1]}"
    return join(
        element("h3", "Environment"),
        element(
            "ul", [element("li", f"{when}: {line}" if index == 0 else line) for index, line in enumerate(lines)]
        ),
    )


def _failures(records: Sequence[Record]) -> Html:
    """Lists failed runs, those of one reason together."""
    if not records:
        return Html("")
    groups: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for record in records:
        if record.error is not None:
            groups[record.scale, record.task, label(record.model, record.size), record.error].append(record.seed)
    if not groups:
        return join(element("h3", "Failures"), element("p", "No run failed.", class_="quiet"))
    lines = []
    for (scale, task, model, error), seeds in groups.items():
        numbers = ", ".join(map(str, sorted(seeds)))
        lines.append(element("li", element("b", f"{model} on {task}"), f", {scale}, seed {numbers}: {error}"))
    return join(element("h3", "Failures"), element("ul", lines, class_="failures"))
