"""ImplicitRNN over whole sequences against torchidl's, and the training time of the rolling argmax.

Both libraries evaluate the same matrices in float32 on one thread, from the same inputs to the last hidden state.
torchidl stops at a residual of 3e-6, ours where its true error is no larger; where no tolerance down to 1e-8 gets
there (positive 0.99), the ratio is not one at equal error, and the columns of errors say so. In training, float32
rounding grows from step to step until losses differ; in float64 both of our paths agree. Errors are measured
against our plain loop in float64.
Training is that of 001 (Tables 3 and 4): 10 000 sequences of ten numbers, A 21 x 21, B 21 x 23, C 22 x 21,
D 22 x 23 and a linear layer to ten classes.

Run: python -m benchmarks.sequences [--quick] in an environment that has torchidl.
"""

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.problems import state_matrix
from benchmarks.rivals.libraries import MAX_STEPS, TOLERANCE, NotRunError, rival, versions
from benchmarks.timing import best_times, one_thread
from wellposed import Absolute, ImplicitRNN

RESULT = Path(__file__).parent / "results" / "sequences.json"
SIZES = ((20, 20, 128), (37, 40, 128))  # states, hidden states, batch
FLOOR = 1e-6  # relative errors below this are the rounding of float32
# Family, norm and lengths; at 0.99 a long sequence takes the plain iterations seconds.
KINDS = (("positive", 0.9, (10, 60)), ("random", 0.9, (10, 60)), ("positive", 0.99, (10,)))


@dataclass(frozen=True)
class Case:
    """Matrices of a recurrent model and sequences for it."""

    name: str
    matrices: tuple[Tensor, ...]  # A, B, C, D
    inputs: Tensor  # (batch, T, 4)
    weights: Tensor  # (batch, h): the loss is sum(weights * h_T)

    @classmethod
    def draw(cls, family: str, norm: float, states: int, hidden: int, batch: int, length: int) -> "Case":
        """Draws a model whose hidden states stay of the order of its inputs."""
        generator = torch.Generator().manual_seed(0)
        A = state_matrix(family, states, norm, generator)
        B, C, D = (
            torch.randn(rows, columns, generator=generator) / (scale * columns**0.5)
            for rows, columns, scale in ((states, 4 + hidden, 1), (hidden, states, 3), (hidden, 4 + hidden, 3))
        )
        C = C * (1 - norm) * 3  # inner loops amplify by up to 1 / (1 - norm)
        inputs = torch.randn(batch, length, 4, generator=generator)
        weights = torch.randn(batch, hidden, generator=generator)
        return cls(f"{family} {norm}", (A, B, C, D), inputs, weights)


@dataclass(frozen=True)
class Rival:
    """One library on one case: `last` computes the last hidden states."""

    last: Callable[[Tensor], Tensor]
    parameters: tuple[nn.Parameter, ...]  # A, B, C, D

    def forward(self, case: Case) -> Tensor:
        """Computes the last hidden states and nothing else."""
        with torch.no_grad():
            return self.last(case.inputs)

    def step(self, case: Case) -> list[Tensor]:
        """Computes them and all gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        (self.last(case.inputs) * case.weights).sum().backward()
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def ours(case: Case, executor: str, tolerance: float) -> Rival:
    """Returns our model."""
    stop = Absolute(tolerance)
    rnn = ImplicitRNN.from_matrices(*case.matrices, executor=executor, stop=stop, max_steps=MAX_STEPS)
    cell = rnn.cell(0)
    assert cell.D is not None
    return Rival(lambda s: rnn(s)[1][0], (cell.state.raw, cell.B, cell.C, cell.D))


def torchidl(case: Case) -> Rival:
    """Returns torchidl's model."""
    A, B, C, _ = case.matrices
    package = rival("torchidl.implicit_rnn_model")
    limits = {"mitr": MAX_STEPS, "grad_mitr": MAX_STEPS, "tol": TOLERANCE, "grad_tol": TOLERANCE, "kappa": 0.9999}
    cell = package.ImplicitRNNCell(B.shape[1] - C.shape[0], A.shape[0], C.shape[0], **limits)
    parameters = cell.layer.A, cell.layer.B, cell.layer.C, cell.layer.D
    with torch.no_grad():
        for parameter, value in zip(parameters, case.matrices, strict=True):
            parameter.copy_(value)
    return Rival(lambda s: cell(s)[1], parameters)


def exact(case: Case) -> tuple[Tensor, list[Tensor]]:
    """Returns the last hidden states and the gradients from the plain loop in float64."""
    double = Case(case.name, tuple(m.double() for m in case.matrices), case.inputs.double(), case.weights.double())
    model = ours(double, "reference", 1e-13)
    return model.forward(double), model.step(double)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def as_accurate(case: Case, last: Tensor, goal: float) -> float:
    """Returns the largest tolerance with which our error does not exceed the goal; about 1e-8 if none does."""
    tolerance = TOLERANCE
    while tolerance > 1e-8 and _error(ours(case, "auto", tolerance).forward(case), last) > max(goal, FLOOR):
        tolerance /= 2
    return tolerance


def measure(case: Case, rounds: int, budget: float) -> list[dict[str, Any]]:
    """Returns a row per library."""
    last, gradients = exact(case)
    try:
        theirs = {"torchidl": torchidl(case)}
    except NotRunError as reason:
        theirs = {}
        print(reason)
    goal = _error(theirs["torchidl"].forward(case), last) if theirs else FLOOR
    tolerance = as_accurate(case, last, goal)
    executors = {"wellposed": "auto", "wellposed, plain loop": "reference"}
    models = {name: ours(case, executor, tolerance) for name, executor in executors.items()} | theirs
    forward = best_times({name: partial(model.forward, case) for name, model in models.items()}, rounds, budget)
    both = best_times({name: partial(model.step, case) for name, model in models.items()}, rounds, budget)
    rows = []
    for name, model in models.items():
        worst = max(_error(found, wanted) for found, wanted in zip(model.step(case), gradients, strict=True))
        rows.append({
            "problem": case.name, "states": case.matrices[0].shape[0], "hidden": case.weights.shape[1],
            "batch": len(case.inputs), "length": case.inputs.shape[1], "library": name,
            "tolerance": TOLERANCE if name == "torchidl" else tolerance,
            "forward_ms": 1e3 * forward[name], "both_ms": 1e3 * both[name],
            "value_error": _error(model.forward(case), last), "gradient_error": worst,
            "ratio": both[name] / both["wellposed"],
        })  # fmt: skip
    return rows


class _Theirs(nn.Module):
    """torchidl's network of the rolling argmax."""

    def __init__(self) -> None:
        super().__init__()
        package = rival("torchidl.implicit_rnn_model")
        self.network = package.ImplicitRNN(1, 10, 21, 22, mitr=MAX_STEPS, grad_mitr=MAX_STEPS, kappa=0.95)

    def forward(self, s: Tensor) -> Tensor:
        logits: Tensor = self.network(s)
        return logits


class _Ours(nn.Module):
    """Our network of the rolling argmax."""

    def __init__(self, executor: str) -> None:
        super().__init__()
        self.network = ImplicitRNN(1, 22, 21, stop=Absolute(TOLERANCE), max_steps=MAX_STEPS, executor=executor)
        self.readout = nn.Linear(22, 10)

    def forward(self, s: Tensor) -> Tensor:
        logits: Tensor = self.readout(self.network(s)[1][0])
        return logits


@dataclass(frozen=True)
class Trained:
    """One training of the rolling argmax."""

    library: str
    seconds: float
    loss: float


def train(library: str, make: Callable[[], nn.Module], epochs: int, samples: int) -> Trained:
    """Trains with Adam on batches of 128 and takes the CPU time."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(samples, 10, 1, generator=generator)
    labels = inputs[..., 0].argmax(1)
    torch.manual_seed(0)
    model = make()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    model(inputs[:128]).sum().backward()  # compiles
    optimiser.zero_grad()
    start = time.process_time()
    for _ in range(epochs):
        for chosen in torch.randperm(samples, generator=generator).split(128):
            optimiser.zero_grad()
            F.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimiser.step()
    spent = time.process_time() - start
    with torch.no_grad():
        loss = float(F.cross_entropy(model(inputs), labels))
    return Trained(library, spent / epochs, loss)


def trainings(quick: bool) -> list[dict[str, Any]]:
    """Trains with every library; seconds are those of an epoch."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "wellposed": lambda: _Ours("auto"),
        "wellposed, plain loop": lambda: _Ours("reference"),
        "torchidl": _Theirs,
    }
    epochs, samples = (1, 1000) if quick else (3, 10_000)
    found = []
    for library, make in makers.items():
        try:
            found.append(asdict(train(library, make, epochs, samples)))
        except NotRunError as reason:
            print(reason)
    return found


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Prints a table."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=150).print(table)


def main(arguments: list[str] | None = None) -> None:
    """Measures all cases; a full run also writes the JSON file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sequences", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one size, short timings, nothing written")
    quick = parser.parse_args(arguments).quick
    one_thread()
    warnings.simplefilter("ignore")
    sizes, timing = (SIZES[:1], (3, 0.05)) if quick else (SIZES, (3, 0.05))
    rows = [
        row
        for size in sizes
        for family, norm, lengths in KINDS
        for length in lengths
        for row in measure(Case.draw(family, norm, *size, length), *timing)
    ]
    show(rows, "forward and backward over sequences")
    trained = trainings(quick)
    show(trained, "an epoch of the rolling argmax")
    if quick:
        return
    about = {"machine": f"{platform.machine()}, one thread", "tolerance": TOLERANCE}
    about["versions"] = versions(("wellposed", "torch", "torchidl", "numba"))
    text = {"command": "python -m benchmarks.sequences", **about, "rows": rows, "training": trained}
    RESULT.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
