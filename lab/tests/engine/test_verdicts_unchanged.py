"""Every published claim at every place of every paper, and the verdict of the committed records on it.

`published_verdicts.jsonl` has one line a paper and place. Texts that need not be read are digests. After a change
that is meant, ``python lab/tests/engine/test_verdicts_unchanged.py`` writes the file again, and its difference is
to be read line by line.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from wellposed_lab.engine.judge import verdicts
from wellposed_lab.report.paper import committed_records

RESULTS = Path(__file__).parents[2] / "results"
WRITTEN = Path(__file__).with_name("published_verdicts.jsonl")
NUMBERS = ("ours", "interval")


def digest(*parts):
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def rule_of(rule):
    return {"rule": type(rule).__name__, **dataclasses.asdict(rule)}


def lines():
    """One line a claim and place: what is published, and what the records say of it."""
    found = []
    for verdict in verdicts(committed_records(RESULTS)):
        claim = verdict.claim
        for paper, place in claim.where:
            line = {
                "paper": paper,
                "place": place,
                "says": claim.says,
                "value": claim.value,
                "suite": claim.suite,
                "rest": digest(rule_of(claim.rule), claim.unit, claim.note, claim.own),
                "verdict": verdict.verdict,
                "ours": verdict.ours,
                "interval": verdict.interval,
                "why": digest(verdict.why),
                "readings": digest([(name, one.verdict) for name, one in verdict.readings])
                if verdict.readings
                else "",
                "record": verdict.record_id,
                "records": digest(verdict.record_ids),
                "seeds": verdict.seeds,
                "scale": verdict.scale,
                "kind": verdict.kind,
            }
            found.append({name: value for name, value in line.items() if value not in (None, "")})
    return sorted(found, key=key)


def key(line):
    return line["paper"], line["place"], line["says"]


def test_no_verdict_changes_unseen():
    """Numbers may differ in the last digits between machines; everything else is equal."""
    written = [json.loads(line) for line in WRITTEN.read_text().splitlines()]
    ours = json.loads(json.dumps(lines()))
    assert len(written) == 774
    assert [key(line) for line in ours] == [key(line) for line in written]
    for line, expected in zip(ours, written, strict=True):
        assert line.keys() == expected.keys(), line
        for name, value in line.items():
            wanted = expected[name]
            if name in NUMBERS:
                assert value == pytest.approx(wanted, rel=1e-9, abs=1e-12), (name, line)
            else:
                assert (type(value), value) == (type(wanted), wanted), (name, line)


if __name__ == "__main__":
    WRITTEN.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines()))
