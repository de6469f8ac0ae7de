"""Pages that repeat a verdict agree with the report.

A page names the verdicts behind a sentence in comments, ``<!-- verdict: SUITE | what is claimed | verdict -->``,
with the paper behind the suite where papers differ.
"""

import re
from pathlib import Path

import pytest
from wellposed_lab.engine.judge import JUDGEMENTS, verdicts
from wellposed_lab.experiments.noise.findings import noise_findings
from wellposed_lab.report.paper import committed_records

ROOT = Path(__file__).parents[3]
MARK = re.compile(r"<!-- verdict: (?P<suite>[\w-]+(?: \d{3})?) \| (?P<says>.+?) \| (?P<verdict>[\w ]+?) -->")
LEARNT = (ROOT / "docs" / "learnt.md").read_text(encoding="utf-8")
BULLET = re.compile(r"(?ms)^- \*\*(?P<head>[^*]+)\*\*(?P<text>.*?)(?=^- |^## |\Z)")
MEANT = {
    "Holds, for another reason": {"reproduced"},
    "Holds in order": {"worse"},
    "Holds": {"reproduced", "better"},
    "Does not hold": {"refuted", "worse"},
    "Depends on the reading": {"undecided"},
    "Undecided": {"undecided"},
    "Could not be tried": {"not judged"},
}


@pytest.fixture(scope="module")
def records():
    return committed_records(ROOT / "lab" / "results")


@pytest.fixture(scope="module")
def judged(records):
    found = {}
    for one in verdicts(records):
        suite = one.claim.suite
        for name in (suite, *(f"{suite} {paper}" for paper in one.claim.papers)):
            found.setdefault((name, one.claim.says), set()).add(one.verdict)
    return found


def marks():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        (page.name, *mark.groups()) for page in pages for mark in MARK.finditer(page.read_text(encoding="utf-8"))
    ]


def test_pages_agree_with_the_report(judged):
    named = marks()
    assert len(named) > 35
    for page, suite, says, verdict in named:
        assert verdict in JUDGEMENTS, (page, verdict)
        assert (suite, says) in judged, f"{page}: no claim of {suite} says {says!r}"
        assert judged[suite, says] == {verdict}, f"{page}: {says!r} is {judged[suite, says]}, not {verdict}"


def test_every_comment_on_a_verdict_is_understood():
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert text.count("<!-- verdict") == len(MARK.findall(text)), page


def test_what_is_said_is_what_the_verdicts_mean():
    bullets = list(BULLET.finditer(LEARNT))
    assert len(bullets) > 25 and LEARNT.count("```{result-figure}") == 5
    for bullet in bullets:
        head = next((known for known in MEANT if bullet["head"].startswith(known)), None)
        named = {mark["verdict"] for mark in MARK.finditer(bullet["text"])}
        if head is None:
            assert bullet["head"] == "Does not order the models."
        else:
            assert named <= MEANT[head], (bullet["head"], named)
        assert named or head is None or "](" in bullet["text"] or "CIFAR-100" in bullet["text"], bullet["text"]


def test_radii_are_said_as_they_are_found(records):
    own = [record for record in records if record.suite == "noise-mnist"]
    told = " ".join(noise_findings(own))
    for count, kind in re.findall(r"over (\d+) equilibrium models and (\d+) networks", " ".join(LEARNT.split())):
        assert f"Over the {count} recorded DEQs" in told and f"Over the {kind} recorded FFWs" in told
    signs = re.findall(r"([+-]0\.\d+) with the (?:jacobian|weight) radius", told)
    assert len(signs) == 4 and all(0.4 <= float(sign) <= 0.605 for sign in signs)
