"""The published claims are those of the rows, each once with all its places."""

from wellposed.experiments.papers import ROWS
from wellposed.experiments.published_claims import load_claims


def test_claims_with_their_places_are_the_rows():
    rows = [(r.paper, r.place, r.claim, r.value, r.suite, r.rule, r.unit, r.note) for r in ROWS]
    claims = [(*at, c.says, c.value, c.suite, c.rule, c.unit, c.note) for c in load_claims() for at in c.where]
    assert len(rows) == 736 and len(load_claims()) == 507
    assert sorted(map(repr, claims)) == sorted(map(repr, rows))
