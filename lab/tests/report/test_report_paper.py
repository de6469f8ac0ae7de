"""The pages of the papers in the documentation, made from claims and records."""

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from wellposed_lab.engine.claims import PAPERS, load_claims
from wellposed_lab.engine.judge import JUDGEMENTS, verdicts
from wellposed_lab.engine.statistics import number
from wellposed_lab.report.paper import Album, chapters, committed_records, summary

from wellposed.errors import UnknownNameError

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def records():
    return committed_records(RESULTS)


class Table(HTMLParser):
    """Collects the texts of table cells, and sees that all elements are closed."""

    def __init__(self):
        super().__init__()
        self.rows, self.open = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("br", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open:
            self.rows[-1][-1] += data


def table_of(html):
    parser = Table()
    parser.feed(html)
    assert parser.open == []
    return [row for row in parser.rows if row]


@pytest.mark.parametrize("paper", PAPERS)
def test_every_claim_is_on_its_page_once_with_its_verdict(paper, records):
    rows = [row for chapter in chapters(paper, records) for row in table_of(chapter.html) if len(row) == 5]
    claims = [claim for claim in load_claims() if paper in claim.papers]
    expected = Counter("; ".join(place for one, place in claim.where if one == paper) for claim in claims)
    assert Counter(row[0] for row in rows) == expected
    judged = verdicts(records, claims)
    shown = Counter(min((row[4].find(name), name) for name in JUDGEMENTS if name in row[4])[1] for row in rows)
    assert shown == Counter(verdict.verdict for verdict in judged)
    for verdict in judged:
        if verdict.ours is not None and isinstance(verdict.claim.value, float):
            claim = re.sub(r"\^(\d+)", r"\1", verdict.claim.says)
            assert any(claim in row[1] and number(verdict.ours) in row[3] for row in rows), verdict.claim.says


@pytest.mark.parametrize("paper", ["000", "004"])
def test_summary_counts_what_the_tables_show(paper, records):
    counts = Counter(v.verdict for v in verdicts(records) if paper in v.claim.papers and not v.claim.own)
    text = re.sub(r"<[^>]+>", "", summary(paper, records))
    for name, count in counts.items():
        assert re.search(rf"(?<!\d){count} \S {name}", text), (name, count, text)


def test_a_page_follows_its_records(records):
    left = [record for record in records if record.suite != "bounds"]
    before, after = (
        next(chapter.html for chapter in chapters("003", found) if chapter.suite == "bounds")
        for found in (records, left)
    )
    judged = [[row for row in table_of(html) if "not judged" not in row[4]] for html in (before, after)]
    assert judged[0] and not judged[1]


def test_pictures_are_drawn_once_and_shared(records, tmp_path):
    own = [record for record in records if record.suite == "identity"]
    album = Album(tmp_path / "pictures", "../pictures")
    html = next(chapter.html for chapter in chapters("001", own, album) if chapter.suite == "identity")
    (source,) = re.findall(r'<img src="\.\./pictures/([^"]+)"', html)
    place = tmp_path / "pictures" / source
    assert place.read_bytes().startswith(b"\x89PNG")
    place.write_bytes(b"drawn before")
    chapters("000", own, album)
    assert place.read_bytes() == b"drawn before"


def test_an_unknown_paper_is_refused():
    with pytest.raises(UnknownNameError, match="unknown paper '005'"):
        chapters("005", [])
