"""What the faults of `faults` disturb: work that tells what it has saved, and can go on after an interruption."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from silent import be_silent
from torch import nn
from wellposed_lab.config import Choice, Training
from wellposed_lab.engine.experiment import Suite
from wellposed_lab.engine.runner import Order, run_suite
from wellposed_lab.engine.store import Record, Store, Value
from wellposed_lab.engine.training import training_runs
from wellposed_lab.report.page import write_report
from wellposed_lab.tasks.mathematics import Identity

from wellposed import ImplicitModel, load, save
from wellposed.checker import RefusedError, check
from wellposed.convex.rows import RowFit
from wellposed.errors import WellposedError
from wellposed.models import from_pretrained, save_pretrained
from wellposed.models.io.certificates import with_projected_parameters
from wellposed.training import Checkpoint, fit

Tell = Callable[[str], None]
Work = Callable[[Path, Tell], str]
TASK = Identity(samples=60, test_samples=20, points=(10.0,))
MODELS = [("ours", Choice.of("implicit", kappa=0.5)), ("baseline", Choice("mlp"))]
SEEDS, CHUNK = 2, 2
SUITE = Suite(
    "small",
    "",
    "",
    (),
    lambda scale: training_runs("small", scale, [TASK], MODELS, lambda *_: Training(epochs=3, batch_size=20)),
    {"tiny": SEEDS, "default": SEEDS, "paper": SEEDS},
)


def digest(*tensors: torch.Tensor) -> str:
    """Returns a short text that tells whether tensors are the same, bit by bit."""
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def silent(text: str) -> None:
    """Tells nobody."""


def train(folder: Path, tell: Tell) -> str:
    """Trains a small model with a checkpoint."""
    torch.manual_seed(0)
    model, u = ImplicitModel(3, 2, 6, executor="reference"), torch.randn(64, 3)
    plain = Checkpoint.save

    def save(self: Checkpoint, state: dict[Any, Any]) -> None:
        plain(self, state)
        tell(f"epoch {len(state['history']['train_loss'])}")

    with mock.patch.object(Checkpoint, "save", save):
        fit(model, (u, u[:, :2]), nn.functional.mse_loss, epochs=8, progress=False, checkpoint=folder / "run.ckpt")
    return digest(*model.parameters())


def sparsify(folder: Path, tell: Tell) -> str:
    """Fits rows of a convex program, kept in a folder."""
    torch.manual_seed(0)
    X = torch.randn(200, 24, dtype=torch.float64)
    z = X @ torch.randn(24, 30, dtype=torch.float64)
    rows = RowFit(kappa=0.9, folder=folder, chunk=CHUNK, progress=lambda done, total: tell(f"rows {done}"))
    return digest(rows.solve(X, torch.zeros(200, 1, dtype=torch.float64), z).weights)


def experiment(folder: Path, tell: Tell) -> str:
    """Runs a small suite; the numbers of its records are the result."""
    run_suite(SUITE, Order("small", "tiny"), folder, tell=tell)
    records = sorted(Store(folder).records(), key=lambda record: record.id)
    lines = [json.dumps([record.id, [str(value) for value in record.values]]) for record in records]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def page(folder: Path, tell: Tell) -> str:
    """Writes a report twice over."""
    about = ("identity", "tiny", "identity", "implicit", None, 0, "ours", "run")
    records = [Record("id", *about, {}, (Value("test_mse", 1.0, 10.0),), {}, {}, {}, "", 0.0)]
    for _ in range(2):
        assert not (folder / "report.html").exists() or whole_page(folder)
        write_report(records, folder / "report.html")
        tell("page")
    return "whole"


def whole_page(folder: Path) -> bool:
    """Says whether a report has a beginning and an end."""
    text = (folder / "report.html").read_text()
    return text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")


def models() -> list[ImplicitModel]:
    """Makes models that `shared` and `certified` save over one another."""
    torch.manual_seed(0)
    return [ImplicitModel(3, 2, size) for size in (6, 6, 9)]


def shared(folder: Path, tell: Tell) -> str:
    """Saves models to one folder, with certificates and without."""
    for number, model in enumerate(models() * 2):
        save_pretrained(model, folder, certificate=number % 2 == 0)
        tell("model")
    return "neither old nor new" if loadable(folder / "model.safetensors") is None else "whole"


def certified(folder: Path, tell: Tell) -> str:
    """Saves models with their certificates to one file."""
    folder.mkdir(parents=True, exist_ok=True)
    for model in models() * 2:
        save(model, folder / "m.safetensors", certificate=True)
        tell("model")
    return "neither old nor new" if loadable(folder / "m.safetensors") is None else "whole"


def loadable(file: Path) -> ImplicitModel | None:
    """Returns the model that is saved there, if it is one of ours and whole."""
    try:
        loaded = load(file) if file.name == "m.safetensors" else from_pretrained(file.parent)
    except (OSError, WellposedError):
        return None
    known = {
        digest(*version.parameters())
        for model in models()
        for version in (model, with_projected_parameters(model))
    }
    return loaded if digest(*loaded.parameters()) in known else None


def proves_another(file: Path, model: ImplicitModel) -> bool:
    """Says whether a certificate holds, and is of another model than the one that was loaded; nobody may write."""
    try:
        check(file)
    except (OSError, RefusedError):
        return False
    tensors = load_file(file)
    return not all(torch.equal(tensors[name], value) for name, value in model.named_parameters())


WORKS: dict[str, Work] = {
    "training": train,
    "sparsification": sparsify,
    "experiment": experiment,
    "report": page,
    "folder of a model": shared,
    "certified file": certified,
}


def warm_up() -> None:
    """Does all work once, so that the processes made by `start` have nothing to load and compile."""
    for work in WORKS.values():
        with tempfile.TemporaryDirectory() as folder:
            work(Path(folder), silent)


def lost(work: Work, folder: Path, log: Path, writers: int = 1) -> int:
    """Counts what was told to be saved and is not there.

    Two trainings with one checkpoint replace each other's epochs: then only a checkpoint that is gone counts.
    """
    lines = log.read_text().splitlines() if log.exists() else []
    if work is train:
        told = max((int(line.split()[1]) for line in lines if line.startswith("epoch")), default=0)
        state = Checkpoint(folder / "run.ckpt").load()
        epochs = 0 if state is None else len(state["history"]["train_loss"])
        return max(0, (told if writers == 1 else min(told, 1)) - epochs)
    if work is sparsify:
        told = max((int(line.split()[1]) for line in lines if line.startswith("rows")), default=0)
        return max(0, told - CHUNK * len(list(folder.glob("rows-*.npz"))))
    if work is experiment:
        ended = {line.rpartition(": ")[0] for line in lines if re.search(r": [\d.]+ s$", line)}
        return max(0, SEEDS * len(ended) - len(Store(folder).records()))
    if work in (shared, certified):
        file = folder / ("model.safetensors" if work is shared else "m.safetensors")
        model = loadable(file)
        return int("model" in lines and (model is None or proves_another(file, model)))
    return int("page" in lines and not whole_page(folder))


def start(work: Work, folder: Path, log: Path) -> int:
    """Runs work in a process; what it tells is appended to a file, so that a kill loses no message."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        be_silent()
        told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        result = work(folder, lambda text: (os.write(told, f"{text}\n".encode()), None)[1])
        os.write(told, f"done {result}\n".encode())
        code = 0
    finally:
        os._exit(code)


def finish(children: list[int]) -> list[int]:
    """Waits for processes and returns their exit codes."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def results(log: Path) -> list[str]:
    """Returns what the works that came to their end have found."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.removeprefix("done ") for line in lines if line.startswith("done ")]
