"""Fault injection: processes are killed at random moments, files damaged, disks filled, clocks turned back.

Every fault ends in one of two ways, or is counted as a violation: the work goes on to the same numbers as without
it, or it stops with an error of our own kind that says what to do. What was reported as saved must be there.

Run: python tests/campaigns/faults.py --kills 1000 --damages 300 --seed 0     writes results/campaigns/faults.json
"""

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from wellposed import ImplicitModel
from wellposed.convex.rows import RowFit
from wellposed.errors import WellposedError
from wellposed.experiments.config import Choice, Training
from wellposed.experiments.record import Record, Value
from wellposed.experiments.report.page import write_report
from wellposed.experiments.runner import Order, carry_out
from wellposed.experiments.store import Store
from wellposed.experiments.suite import Suite
from wellposed.experiments.training_run import training_runs
from wellposed.models import load, save
from wellposed.tasks.extrapolation import Identity
from wellposed.training import Checkpoint, fit

RESULT = Path(__file__).parents[2] / "results" / "campaigns" / "faults.json"
Tell = Callable[[str], None]
Work = Callable[[Path, Tell], str]
TASK = Identity(samples=60, test_samples=20, points=(10.0,))
MODELS = [("ours", Choice.of("implicit", kappa=0.5)), ("baseline", Choice("mlp"))]
SUITE = Suite(
    "small",
    "",
    "",
    (),
    lambda scale: training_runs("small", scale, [TASK], MODELS, lambda *_: Training(epochs=3, batch_size=20)),
    {"tiny": 2, "default": 2, "paper": 2},
)


def digest(*tensors: torch.Tensor) -> str:
    """Returns a short text that tells whether tensors are the same, bit by bit."""
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def train(folder: Path, tell: Tell) -> str:
    """Trains a small model with a checkpoint."""
    torch.manual_seed(0)
    model, u = ImplicitModel(3, 2, 6, executor="reference"), torch.randn(64, 3)
    plain = Checkpoint.save

    def save(self: Checkpoint, state: dict[Any, Any]) -> None:
        plain(self, state)
        tell("epoch")

    with mock.patch.object(Checkpoint, "save", save):
        fit(model, (u, u[:, :2]), nn.functional.mse_loss, epochs=8, progress=False, checkpoint=folder / "run.ckpt")
    return digest(*model.parameters())


def sparsify(folder: Path, tell: Tell) -> str:
    """Fits rows of a convex program, kept in a folder."""
    torch.manual_seed(0)
    X = torch.randn(200, 24, dtype=torch.float64)
    z = X @ torch.randn(24, 30, dtype=torch.float64)
    rows = RowFit(kappa=0.9, folder=folder, chunk=2, progress=lambda done, total: tell(f"row {done}"))
    return digest(rows.solve(X, torch.zeros(200, 1, dtype=torch.float64), z).weights)


def experiment(folder: Path, tell: Tell) -> str:
    """Runs a small suite; the numbers of its records are the result."""
    carry_out(SUITE, Order("small", "tiny"), folder, tell=tell)
    records = sorted(Store(folder).records(), key=lambda record: record.id)
    parts = [json.dumps([record.id, [str(value) for value in record.values]]) for record in records]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def page(folder: Path, tell: Tell) -> str:
    """Writes a report twice over."""
    about = ("identity", "tiny", "identity", "implicit", None, 0, "ours", "run")
    records = [Record("id", *about, {}, (Value("test_mse", 1.0, 10.0),), {}, {}, {}, "", 0.0)]
    target = folder / "report.html"
    for _ in range(2):
        assert not target.exists() or target.read_text().rstrip().endswith("</html>")
        write_report(records, target)
        tell("page")
    return "whole"


KILLED: dict[str, tuple[Work, int]] = {
    "training": (train, 1),
    "sparsification": (sparsify, 1),
    "experiment": (experiment, 1),
    "experiment, two writers": (experiment, 2),
    "report": (page, 1),
}


def start(work: Work, folder: Path, saved: Path) -> int:
    """Runs work in a process; what it tells is appended to a file, so that a kill loses no message."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        log = os.open(saved, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        result = work(folder, lambda text: (os.write(log, f"{text}\n".encode()), None)[1])
        os.write(log, f"done {result}\n".encode())
        code = 0
    finally:
        os._exit(code)


def finish(children: list[int]) -> list[int]:
    """Waits for processes and returns their exit codes."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def lasting(work: Work, writers: int, root: Path) -> tuple[float, str]:
    """Runs work undisturbed; returns its time and result."""
    began = time.monotonic()
    codes = finish([start(work, root / "whole", root / "whole.log") for _ in range(writers)])
    ends = [line.split()[1] for line in (root / "whole.log").read_text().splitlines() if line.startswith("done")]
    assert not any(codes) and len(set(ends)) == 1, (codes, ends)
    return time.monotonic() - began, ends[0]


def kill(name: str, count: int, generator: random.Random) -> dict[str, Any]:
    """Kills work at random moments, then lets it finish; counts results that differ and saved states gone."""
    work, writers = KILLED[name]
    wrong, lost, kills = 0, 0, 0
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        seconds, expected = lasting(work, writers, root)
        while kills < count:
            folder, log = root / f"trial{kills}", root / f"trial{kills}.log"
            for _ in range(min(3, count - kills)):
                children = [start(work, folder, log) for _ in range(writers)]
                time.sleep(generator.uniform(0, seconds))
                for child in children:
                    os.kill(child, signal.SIGKILL)
                finish(children)
                kills += 1
                lost += missing_epochs(folder, log) if work is train else 0
            codes = finish([start(work, folder, log) for _ in range(writers)])
            ends = [line for line in log.read_text().splitlines() if line.startswith("done")]
            wrong += any(codes) or not ends or any(line != f"done {expected}" for line in ends)
            shutil.rmtree(folder, ignore_errors=True)
    return {"fault": f"kill -9, {name}", "times": kills, "other result": wrong, "lost": lost}


def missing_epochs(folder: Path, log: Path) -> int:
    """Returns how many epochs were reported as saved and are not in the checkpoint."""
    lines = log.read_text().splitlines() if log.exists() else []
    if not lines or any(line.startswith("done") for line in lines):
        return 0
    state = Checkpoint(folder / "run.ckpt").load()
    return max(0, len(lines) - (0 if state is None else len(state["history"]["train_loss"])))


def append(folder: Path, tell: Tell, first: int, count: int) -> str:
    """Appends records and tells each one when the store says that it is on the disk."""
    store = Store(folder)
    for number in range(first, first + count):
        about = ("small", "tiny", "task", "model", None, number, "ours", "run")
        store.append(Record(f"id{number}", *about, {}, (), {}, {}, {}, "", 0.0))
        tell(str(number))
    return "written"


def kill_writers(count: int, generator: random.Random) -> dict[str, Any]:
    """Kills one of two writers of a store at random moments; every record that was reported must be readable."""
    lost, damaged = 0, 0
    with tempfile.TemporaryDirectory() as place:
        folder, log = Path(place) / "store", Path(place) / "log"
        for number in range(count):
            works = [partial(append, first=1000 * (2 * number + k), count=40) for k in range(2)]
            children = [start(work, folder, log) for work in works]
            time.sleep(generator.uniform(0, 0.05))
            for child in children[: generator.randint(1, 2)]:
                os.kill(child, signal.SIGKILL)
            finish(children)
        store = Store(folder)
        known = {record.id for record in store.records()}
        reported = [f"id{line}" for line in log.read_text().splitlines() if line.isdigit()]
        lost, damaged = sum(name not in known for name in reported), len(store.damaged)
    return {"fault": "kill -9, two writers of a store", "times": count, "other result": 0, "lost": lost,
            "records": len(reported), "torn lines skipped": damaged}  # fmt: skip


def readers(folder: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """Writes a file of every kind and returns how it is read."""
    torch.manual_seed(0)
    checkpoint = Checkpoint(folder / "run.ckpt")
    checkpoint.save({"a": torch.arange(50), "b": [1, "x"]})
    model = folder / "model.safetensors"
    save(ImplicitModel(3, 2, 6), model)
    append(folder / "store", lambda text: None, 0, 20)
    rows = folder / "rows"
    sparsify(rows, lambda text: None)
    file = next(rows.iterdir())
    return {
        "checkpoint": (checkpoint.path, checkpoint.load),
        "model file": (model, lambda: digest(*load(model).parameters())),
        "store": (folder / "store" / "records.jsonl", lambda: len(Store(folder / "store").records())),
        "kept rows": (file, lambda: sparsify(rows, lambda text: None)),
    }


def damage(count: int, generator: random.Random) -> list[dict[str, Any]]:
    """Cuts files off and flips bits; a reader must refuse, skip what is damaged, or see what was written."""
    table = []
    with tempfile.TemporaryDirectory() as place:
        for name, (path, read) in readers(Path(place)).items():
            whole, expected, wrong = path.read_bytes(), repr(read()), 0
            for kind in ("truncated", "bit flipped"):
                outcomes = {"refused": 0, "read as written": 0, "damaged part skipped": 0}
                for _ in range(count):
                    path.write_bytes(cut(whole, generator) if kind == "truncated" else flip(whole, generator))
                    try:
                        same = repr(read()) == expected
                        skips = name == "store" and not same
                        outcomes["damaged part skipped" if skips else "read as written"] += 1
                        wrong += not same and not skips
                    except WellposedError:
                        outcomes["refused"] += 1
                    except Exception as error:
                        wrong += 1
                        print(f"{name}, {kind}: {type(error).__name__}: {str(error)[:100]}", flush=True)
                    if not path.exists():
                        path.parent.mkdir(exist_ok=True)
                path.write_bytes(whole)
                table.append(
                    {"fault": f"{name}, {kind}", "times": count, "other result": wrong, "lost": 0, **outcomes}
                )
                wrong = 0
    return table


def cut(data: bytes, generator: random.Random) -> bytes:
    """Returns the beginning of a file."""
    return data[: generator.randrange(len(data))]


def flip(data: bytes, generator: random.Random) -> bytes:
    """Returns a file with one bit changed."""
    place, changed = generator.randrange(len(data)), bytearray(data)
    changed[place] ^= 1 << generator.randrange(8)
    return bytes(changed)


def stopped(work: Work, prepare: Callable[[Path], None]) -> str:
    """Runs work in a process after `prepare` has spoiled something there; tells how it ended."""
    with tempfile.TemporaryDirectory() as place:
        folder, said = Path(place) / "folder", Path(place) / "said"
        folder.mkdir()
        said.touch(0o666)
        os.chmod(said, 0o666)
        os.chmod(place, 0o755)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                log = os.open(said, os.O_WRONLY)
                prepare(folder)
                work(folder, lambda text: None)
                code = 0
            except Exception as error:
                os.write(log, f"{type(error).__name__}: {error}".encode()[:300])
                code = 2 if isinstance(error, WellposedError | OSError) else 3
            finally:
                os._exit(code)
        (code,) = finish([child])
        return {0: "went on", 2: said.read_text(), 3: f"Unexpected {said.read_text()}"}.get(code, f"code {code}")


def fill_disk(folder: Path) -> None:
    """Lets no file of this process grow, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))


def lock_folder(folder: Path) -> None:
    """Takes the right to write away, from the superuser too."""
    os.chmod(folder, 0o555)
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)


def turn_back(folder: Path) -> None:
    """Lets the clock run backwards."""
    now = [2e9]

    def earlier() -> float:
        now[0] -= 3600
        return now[0]

    time.time = earlier


def places() -> list[dict[str, Any]]:
    """Full disks, folders without the right to write, clocks that go back."""
    table = []
    faults = (("full disk", fill_disk, False), ("read-only folder", lock_folder, False))
    for name, prepare, ends in (*faults, ("clock backwards", turn_back, True)):
        for title, work in (("training", train), ("sparsification", sparsify), ("experiment", experiment)):
            outcome = stopped(work, prepare)
            good = (outcome == "went on") if ends else ("Error" in outcome and "Unexpected" not in outcome)
            print(f"{name}, {title}: {outcome}", flush=True)
            table.append({"fault": f"{name}, {title}", "times": 1, "other result": int(not good), "lost": 0,
                          "outcome": outcome.split("\n")[0][:120]})  # fmt: skip
    return table


def main() -> None:
    """Runs everything and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="in all")
    parser.add_argument("--damages", type=int, default=300, help="of every kind of file and damage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator, table = random.Random(options.seed), places()
    table += damage(options.damages, generator)
    share = max(1, options.kills // (len(KILLED) + 1))
    table.append(kill_writers(share, generator))
    for name in KILLED:
        table.append(kill(name, share, generator))
        print(table[-1], flush=True)
    numbers = f"--kills {options.kills} --damages {options.damages} --seed {options.seed}"
    command = f"python tests/campaigns/faults.py {numbers}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"command": command, "rows": table}, indent=1) + "\n")
    for row in table:
        print(row)
    sys.exit(any(row["other result"] or row["lost"] for row in table))


if __name__ == "__main__":
    main()
