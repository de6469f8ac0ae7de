"""One paper: every claim with ours beside it, and the pictures that restate its own; for the documentation."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from wellposed.atomic import atomic_write
from wellposed.errors import unknown_name
from wellposed.pages.markup import Child, Html, element, join, plural, prose
from wellposed_lab.engine.claims import PAPERS, load_claims, require_known_suites
from wellposed_lab.engine.experiment import Figure, Picture, Suite, all_suites
from wellposed_lab.engine.judge import Verdict, tally, verdicts
from wellposed_lab.engine.store import Record, Store, merged
from wellposed_lab.report.figures import best_scale, curves, draw
from wellposed_lab.report.gallery import LEGEND, gallery_html
from wellposed_lab.report.tables import badge, bar, marks, ours_of, published_of, why_of

HEADS = ("where", "claim", "published", "ours", "verdict")


@dataclass(frozen=True)
class Album:
    """Where pictures are drawn, once for all papers that share them, and how a page refers to them.

    Args:
        folder: of the PNG files.
        link: from a page to that folder.
    """

    folder: Path
    link: str

    def show(self, name: str, draw: Callable[[Path], None], title: str, text: str) -> Html | None:
        """Writes a figure with its caption; None where there is nothing to draw."""
        path = self.folder / f"{name}.png"
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            draw(path)
        if not path.is_file():
            return None
        source = f"{self.link}/{path.name}"
        image = element("a", element("img", src=source, alt=title, loading="lazy"), href=source)
        return element("figure", image, element("figcaption", prose(text)))


@dataclass(frozen=True)
class Chapter:
    """What one suite says of a paper.

    Args:
        suite: its name.
        title: of the section.
        html: its body.
    """

    suite: str
    title: str
    html: Html


def committed_records(folder: Path) -> list[Record]:
    """Reads all record files of a folder."""
    return merged(Store(path) for path in sorted(folder.glob("*.jsonl")))


def summary(paper: str, records: Iterable[Record]) -> Html:
    """Counts the verdicts on a paper's claims, in words and as a bar.

    Example:
        >>> "distinct claims of this paper" in summary("000", [])
        True
    """
    verdicts = _verdicts(paper, list(records))
    judged, own = ([one for one in verdicts if one.claim.own is mine] for mine in (False, True))
    named = [element("li", f"{count} ", badge(name)) for name, count in tally(judged).items() if count]
    text = f"{plural(len(judged), 'distinct claim')} of this paper, by the rules that judge them"
    text += f" (and {plural(len(own), 'question')} of our own, not counted):" if own else ":"
    return element("div", element("p", text), bar(judged), element("ul", named), class_="claims-summary")


def chapters(paper: str, records: Sequence[Record], album: Album | None = None) -> list[Chapter]:
    """Writes the claims of a paper suite by suite, in the order of the registry.

    Args:
        paper: ``"000"`` to ``"004"``.
        records: of all suites.
        album: where figures are drawn; None for none.

    Example:
        >>> [chapter.suite for chapter in chapters("004", [])][:2]
        ['parameters', 'prefix-sums']
    """
    judged = _verdicts(paper, records)
    written = []
    for name, suite in all_suites().items():
        claims = [verdict for verdict in judged if verdict.claim.suite == name]
        if claims:
            own = [record for record in records if record.suite == name and record.kind == "run"]
            own = [record for record in own if record.scale == best_scale(own)]
            written.append(Chapter(name, suite.title, _body(paper, suite, own, claims, album)))
    return written


def _verdicts(paper: str, records: Sequence[Record]) -> list[Verdict]:
    if paper not in PAPERS:
        raise unknown_name("paper", paper, PAPERS)
    claims = [claim for claim in load_claims() if paper in claim.papers]
    require_known_suites(claims, all_suites())
    return verdicts(records, claims)


def _body(
    paper: str, suite: Suite, records: Sequence[Record], claims: Sequence[Verdict], album: Album | None
) -> Html:
    said = element("p", prose(suite.claim))
    sentences = suite.findings(records) if records else []
    findings = [
        element("h4", "What the controls show"),
        element("ul", [element("li", prose(s)) for s in sentences]),
    ]
    again = element("p", "Run it: ", element("code", f"wellposed run {suite.name}"), class_="again")
    shown = _pictures(paper, suite, records, album) if records and album else Html("")
    table = _table(paper, claims, f"Claims of {paper} on {suite.name}")
    return join(said, shown, table, *(findings if sentences else ()), again)


def _table(paper: str, claims: Sequence[Verdict], label: str) -> Html:
    head = element("thead", element("tr", [element("th", title, scope="col") for title in HEADS]))
    rows = element("tbody", [_row(paper, verdict) for verdict in claims])
    inner = element("table", head, rows, class_="claims docutils")
    return element("div", inner, class_="claims-box", tabindex=0, role="region", aria_label=label)


def _row(paper: str, verdict: Verdict) -> Html:
    claim = verdict.claim
    why, *readings = why_of(verdict)
    small = [prose(claim.note), why] if claim.note else [why]
    cells: tuple[Child, ...] = (
        "; ".join(claim.sections(paper)),
        [prose(claim.says), *(element("small", text) for text in small), *readings],
        published_of(verdict) or "-",
        ours_of(verdict),
        [badge(verdict.verdict), *marks(verdict)],
    )
    filled = [element("td", cell, data_label=head) for head, cell in zip(HEADS, cells, strict=True)]
    return element("tr", filled, class_=verdict.verdict.replace(" ", "-"))


def _pictures(paper: str, suite: Suite, records: Sequence[Record], album: Album) -> Html:
    """Draws the figures that restate some of this paper, or else the first, and shows what records carry."""
    own = [figure for figure in suite.figures if paper in figure.paper] or [*suite.figures[:1]]
    figures = [drawn_figure(suite, figure, records, album) for figure in own]
    for index, one in enumerate(suite.pictures):
        if paper in one.paper:
            name = f"{suite.name}-picture-{index}"
            figures.append(album.show(name, partial(_write, one, records), one.title, f"{one.title}. {one.note}"))
    galleries = [gallery_html(one, records) for one in suite.galleries if paper in one.paper]
    shown = [one for one in (*figures, *galleries) if one is not None]
    legend = element("p", LEGEND, class_="quiet") if any(galleries) else None
    return join(element("div", shown, class_="claims-pictures"), legend) if shown else Html("")


def drawn_figure(suite: Suite, figure: Figure, records: Sequence[Record], album: Album) -> Html | None:
    """Draws a figure of a suite from its records at their best scale; None where there is nothing to draw."""
    own = [record for record in records if record.suite == suite.name and record.kind == "run"]
    records = [record for record in own if record.scale == best_scale(own)]
    if not curves(figure, records):
        return None
    text = f"{figure.title}: {figure.label}, the median of the seeds with its range."
    return album.show(
        f"{suite.name}-{suite.figures.index(figure)}", partial(draw, figure, records), figure.title, text
    )


def _write(picture: Picture, records: Sequence[Record], path: Path) -> None:
    png = picture.draw(records)
    if png is not None:
        with atomic_write(path) as temporary:
            temporary.write_bytes(png)
