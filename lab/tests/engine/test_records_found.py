"""Every committed record is found by its suite under the id that it has, so that moved code repeats no run."""

import os
from collections import defaultdict
from pathlib import Path

from wellposed_lab.engine.experiment import all_suites
from wellposed_lab.engine.store import Store

RESULTS = Path(__file__).parents[2] / "results"
COMMITTED = 2409


def test_every_committed_record_is_planned_under_its_id():
    records = [record for path in sorted(RESULTS.rglob("*.jsonl")) for record in Store(path).records()]
    assert len(records) >= COMMITTED
    groups = defaultdict(set)
    for record in records:
        groups[record.suite, record.scale, record.seed].add(record.id)
    missing = {}
    for (suite, scale, seed), ids in groups.items():
        planned = {run.with_seed(seed).id for run in all_suites()[suite].plan(scale)}
        if ids - planned:
            missing[suite, scale, seed] = ids - planned
    if "WELLPOSED_DATA" not in os.environ:  # which tasks of volatility there are depends on the minute bars
        missing = {key: ids for key, ids in missing.items() if key[0] != "volatility"}
    assert not missing
