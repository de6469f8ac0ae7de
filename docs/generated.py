"""Directives whose content is made when the pages are built: from records, commands and trained models.

`{paper} 001` writes what the records say of a paper, `{papers}` compares the five, `{result-figure} identity 0`
draws a figure of a suite, `{commands}` writes the help of the command line, and `{reference-models}` the cards of
the models that come with the package.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from wellposed_lab.engine.claims import PAPERS, claim_files
from wellposed_lab.engine.experiment import get_suite
from wellposed_lab.engine.judge import JUDGEMENTS, verdicts
from wellposed_lab.engine.store import Record
from wellposed_lab.report.paper import Album, chapters, committed_records, drawn_figure, summary
from wellposed_lab.report.tables import badge, bar, count_cells

from wellposed.cli import cli
from wellposed.models import reference_models
from wellposed.models.io.storage import TRAINED
from wellposed.pages.markup import element

RESULTS = Path(__file__).parents[1] / "lab" / "results"
PICTURES = "_images/papers"


@lru_cache(maxsize=1)
def records() -> tuple[Record, ...]:
    """Reads the committed records once a build."""
    return tuple(committed_records(RESULTS))


class Generated(SphinxDirective):
    """A directive that is run again when the files it rests on change."""

    def rest_on(self, paths: list[Path]) -> None:
        """Names these files, and this one."""
        for path in (*paths, Path(__file__)):
            self.env.note_dependency(str(path))

    def raw(self, html: str) -> nodes.raw:
        """Puts HTML on the page."""
        return nodes.raw("", html, format="html")

    def section(self, title: str, name: str, *children: nodes.Node) -> nodes.section:
        """Makes a section that the table of contents lists."""
        return nodes.section("", nodes.title("", title), *children, ids=[name], names=[name])


class Paper(Generated):
    """What the records say of one paper."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Writes the counts, then suite by suite the pictures, the claims and what the controls show."""
        self.rest_on([*sorted(RESULTS.glob("*.jsonl")), *claim_files()])
        paper = self.arguments[0]
        up = "../" * self.env.docname.count("/")
        album = Album(Path(self.env.app.outdir) / PICTURES, f"{up}{PICTURES}")
        written = chapters(paper, records(), album)
        return [
            self.raw(summary(paper, records())),
            *(self.section(part.title, part.suite, self.raw(part.html)) for part in written),
        ]


class Papers(Generated):
    """The verdicts on all papers."""

    def run(self) -> list[nodes.Node]:
        """Writes one line a paper."""
        self.rest_on([*sorted(RESULTS.glob("*.jsonl")), *claim_files()])
        found = verdicts(records())
        heads = [element("th", "paper"), *(element("th", badge(name)) for name in JUDGEMENTS)]
        rows = []
        for paper, title in PAPERS.items():
            own = [one for one in found if paper in one.claim.papers and not one.claim.own]
            name = element("td", element("a", f"{paper} {title}", href=f"papers/{paper}.html"), bar(own))
            rows.append(element("tr", name, count_cells(own)))
        table = element("table", element("thead", element("tr", heads)), element("tbody", rows), class_="docutils")
        return [self.raw(element("div", table, class_="table-wrapper claims-counts"))]


class ResultFigure(Generated):
    """A figure of a suite, by its place among them."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        """Draws the figure from the committed records."""
        self.rest_on([*sorted(RESULTS.glob("*.jsonl"))])
        suite, index = get_suite(self.arguments[0]), int(self.arguments[1])
        up = "../" * self.env.docname.count("/")
        album = Album(Path(self.env.app.outdir) / PICTURES, f"{up}{PICTURES}")
        drawn = drawn_figure(suite, suite.figures[index], records(), album)
        if drawn is None:
            raise self.error(f"the records of {suite.name} have nothing to draw in figure {index}")
        return [self.raw(element("div", drawn, class_="claims-pictures"))]


class Commands(Generated):
    """The help of every command."""

    def run(self) -> list[nodes.Node]:
        """Writes one section a command."""
        top = click.Context(cli, info_name="wellposed", terminal_width=88, max_content_width=88)
        written = [self.section("wellposed", "wellposed", _literal(cli.get_help(top)))]
        for name in cli.list_commands(top):
            command = cli.get_command(top, name)
            assert command is not None
            context = click.Context(command, info_name=name, parent=top)
            written.append(
                self.section(f"wellposed {name}", f"wellposed-{name}", _literal(command.get_help(context)))
            )
        return written


class References(Generated):
    """The cards of the models that come with the package."""

    def run(self) -> list[nodes.Node]:
        """Writes one line a model."""
        self.rest_on(sorted(TRAINED.glob("*/card.json")))
        names = ("name", "what", "on unseen data", "certificate", "numbers")
        rows = []
        for card in reference_models().values():
            measured = [element("li", f"{what}: {value:.4g}") for what, value in card.measured.items()]
            about = [card.title, element("small", f"Data: {card.data}. {card.limits}")]
            cells = (element("code", card.name), about, element("ul", measured), card.certificate)
            filled = zip(names, (*cells, f"{card.parameters:,}"), strict=True)
            rows.append(element("tr", [element("td", cell, data_label=name) for name, cell in filled]))
        head = element("thead", element("tr", [element("th", name) for name in names]))
        table = element("table", head, element("tbody", rows), class_="claims docutils")
        return [self.raw(element("div", table, class_="claims-box cards"))]


def forget_old_pictures(app: Sphinx) -> None:
    """Removes pictures that are older than some record, so that they are drawn again."""
    newest = max((path.stat().st_mtime for path in RESULTS.glob("*.jsonl")), default=0.0)
    for picture in (Path(app.outdir) / PICTURES).glob("*.png"):
        if picture.stat().st_mtime < newest:
            picture.unlink()


def _literal(text: str) -> nodes.literal_block:
    return nodes.literal_block(text, text, language="text")


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directives."""
    for name, directive in (("paper", Paper), ("papers", Papers), ("commands", Commands)):
        app.add_directive(name, directive)
    app.add_directive("reference-models", References)
    app.add_directive("result-figure", ResultFigure)
    app.connect("builder-inited", forget_old_pictures)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
