"""Attacked images in the report, from what records carry."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from wellposed.pages.markup import Html, element, join, prose
from wellposed_lab.engine.experiment import Gallery
from wellposed_lab.engine.store import Record

KEY = "gallery"  # among the facts of a record
ROWS = ("clean", "attacked", "difference")
LEGEND = (
    "Below each image stands the class that the network gives it, in red where it is wrong. In the difference red "
    "raises and blue lowers a pixel, of its colours the one that moves most; an image for which nothing worse was "
    "found is left as it was."
)
LETTERS = re.compile(r"[A-Za-z0-9+/]+={0,2}")  # of base64


def gallery_html(gallery: Gallery, records: Sequence[Record]) -> Html | None:
    """Writes clean and attacked images with their difference; None where no record has pictures."""
    facts = next(filter(None, (_facts(gallery, task, records) for task in gallery.tasks)), None)
    if facts is None:
        return None
    samples = facts["samples"]
    lines = [element("tr", element("th", _head(row, facts), scope="row"), _cells(row, samples)) for row in ROWS]
    where = element("span", f" ({gallery.paper})", class_="quiet") if gallery.paper else ""
    attack = str(facts["attack"]).replace("_", " ")
    text = f"{gallery.note} Attack: {attack}, at {float(facts['at']):.3g}.".strip()
    return element(
        "figure",
        element("h4", gallery.title, where),
        element("div", element("table", element("tbody", lines)), class_="scroll", tabindex=0, role="region",
                aria_label=gallery.title),
        element("figcaption", prose(text), class_="quiet"),
        class_="attacked",
    )  # fmt: skip


def _facts(gallery: Gallery, task: str, records: Sequence[Record]) -> Mapping[str, Any] | None:
    for record in records:
        if (record.task, record.model) == (task, gallery.model) and record.facts.get(KEY):
            facts: Mapping[str, Any] = record.facts[KEY]
            return facts
    return None


def _head(row: str, facts: Mapping[str, Any]) -> Html:
    if row != "difference":
        return join(row)
    return join(row, element("br"), element("small", f"±{float(facts['scale']):.3g}"))


def _cells(row: str, samples: Sequence[Mapping[str, str]]) -> list[Html]:
    return [element("td", _image(row, sample), _said(row, sample)) for sample in samples]


def _image(row: str, sample: Mapping[str, str]) -> Html:
    content = str(sample[row])
    source = f"data:image/png;base64,{content}" if LETTERS.fullmatch(content) else ""
    given = {"clean": sample["before"], "attacked": sample["after"]}.get(row, sample["target"])
    return element("img", src=source, alt=f"{row}: {given}", width=64, height=64)


def _said(row: str, sample: Mapping[str, str]) -> Html | None:
    if row == "difference":
        return None
    given = sample["before" if row == "clean" else "after"]
    return element("span", given, class_=None if given == sample["target"] else "wrong")
