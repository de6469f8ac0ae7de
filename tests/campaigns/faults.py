"""Fault injection: processes are killed at random moments, files damaged, disks filled, clocks turned back.

Every fault ends in one of two ways, or is counted as a violation: the work goes on to the same numbers as without
it, or it stops with an error of our own kind (or of the file system) that says what to do. What was reported as
saved must be there. The same seed gives the same damages and the same delays before a kill.

Run: python tests/campaigns/faults.py --kills 1000 --damages 300 --seed 0    writes results/faults.json beside it
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from damage import append, damages
from places import places
from wellposed_lab.engine.store import Store
from works import WORKS, Work, finish, lost, results, start, warm_up
from writers import WRITERS, kill_writer

from wellposed.atomic import atomic_write

RESULT = Path(__file__).parent / "results" / "faults.json"
KILLED = [(name, writers) for name in WORKS for writers in (1, 2)]
Trial = Callable[[random.Random], dict[str, Any]]
SHARES = sum(0.25 if writer.slow else 1 for writer in WRITERS.values())
IN_A_ROW = 3  # kills before work may come to its end


def lasting(work: Work, writers: int, root: Path) -> tuple[float, str]:
    """Runs work undisturbed; returns its time and result."""
    began = time.monotonic()
    codes = finish([start(work, root / "whole", root / "whole.log") for _ in range(writers)])
    outcomes = results(root / "whole.log")
    assert not any(codes) and len(set(outcomes)) == 1, (codes, outcomes)
    return time.monotonic() - began, outcomes[0]


def strike(work: Work, folder: Path, log: Path, writers: int, delay: float, victims: int) -> int:
    """Starts writers, kills some of them after a while; returns how many had not come to their end."""
    children = [start(work, folder, log) for _ in range(writers)]
    time.sleep(delay)
    for child in children[:victims]:
        os.kill(child, signal.SIGKILL)
    return sum(code == -signal.SIGKILL for code in finish(children))


def kill(name: str, writers: int, count: int, generator: random.Random) -> dict[str, Any]:
    """Kills work at random moments, then lets it finish; counts results that differ and saved states gone."""
    work, wrong, gone, kills, trials = WORKS[name], 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        seconds, expected = lasting(work, writers, root)
        while kills < count:
            folder, log = root / f"trial{trials}", root / f"trial{trials}.log"
            trials += 1
            for _ in range(IN_A_ROW):
                delay, victims = generator.uniform(0, seconds), generator.randint(1, writers)
                killed = strike(work, folder, log, writers, delay, victims) > 0
                kills, gone = kills + killed, gone + lost(work, folder, log, writers)
                if not killed:  # it had come to its end
                    break
            codes = finish([start(work, folder, log) for _ in range(writers)])
            wrong += any(codes) or not results(log) or set(results(log)) != {expected}
            shutil.rmtree(folder, ignore_errors=True)
    fault = f"kill -9, {name}, {writers} writer{'s' * (writers > 1)}"
    return {"fault": fault, "times": kills, "other result": wrong, "lost": gone, "finished": trials}


def kill_writers(count: int, generator: random.Random) -> dict[str, Any]:
    """Kills one or both of two writers of a store; every record that was reported must be readable."""
    kills = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder, log = Path(scratch) / "store", Path(scratch) / "log"
        while kills < count:
            works = [partial(append, first=1000 * (2 * kills + k), count=40) for k in range(2)]
            children = [start(work, folder, log) for work in works]
            time.sleep(generator.uniform(0, 0.05))
            for child in children[: generator.randint(1, 2)]:
                os.kill(child, signal.SIGKILL)
            kills += -signal.SIGKILL in finish(children)
        store = Store(folder)
        known = {record.id for record in store.records()}
        reported = [f"id{line}" for line in log.read_text().splitlines() if line.isdigit()]
    return {"fault": "kill -9, two writers of a store", "times": kills, "other result": 0,
            "lost": sum(name not in known for name in reported), "records": len(reported),
            "torn lines skipped": len(store.damaged)}  # fmt: skip


def trials(options: argparse.Namespace, root: Path) -> dict[str, Trial]:
    """Lists what is to be tried; each has a generator of its own, so that a part can be run alone."""
    share = -(-options.kills // (len(KILLED) + 1))  # of work that goes on; writers have as many kills again
    killed = {f"kill -9, {name}, {writers}": partial(kill, name, writers, share) for name, writers in KILLED}
    return {
        "kill -9, store": partial(kill_writers, share),
        **killed,
        **{
            f"kill -9, writer, {name}": partial(kill_writer, name, -(-options.kills // SHARES)) for name in WRITERS
        },
        **places(options.disks),
        **damages(options.damages, root),
    }


def main() -> None:
    """Runs everything and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="in all; only those that met living work count")
    parser.add_argument("--damages", type=int, default=300, help="of every kind of file and damage")
    parser.add_argument(
        "--disks", type=int, default=20, help="full disks, and meetings in a folder, of every work"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose names contain this")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    numbers = f"--kills {options.kills} --damages {options.damages} --disks {options.disks} --seed {options.seed}"
    facts: dict[str, Any] = {"command": f"python tests/campaigns/faults.py {numbers}", "rows": []}
    table = facts["rows"]
    with tempfile.TemporaryDirectory() as root:
        chosen = {name: trial for name, trial in trials(options, Path(root)).items() if options.only in name}
        for name, trial in chosen.items():
            table.append(trial(random.Random(f"{options.seed} {name}")))
            print(table[-1], flush=True)
            with atomic_write(options.out) as temporary:
                temporary.write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(any(row["other result"] or row["lost"] for row in table))


if __name__ == "__main__":
    main()
