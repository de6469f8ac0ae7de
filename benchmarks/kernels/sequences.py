"""ImplicitRNN over whole sequences against torchidl's, and the training time of the rolling argmax.

Both libraries evaluate the same matrices in float32 on one thread, from the same inputs to the last hidden state.
The comparison is one at equal true error: torchidl stops at residuals of 3e-6, forward and backward, and each of
our two tolerances is the largest with which our error (of the last hidden states, of the gradients) is not above
torchidl's; errors below 1e-6 are rounding, for which no tolerance is tightened. Where no tolerance gets there
(positive 0.99), ours is the one with our least error and the comparison is not one at equal error: the table says
"no". Errors are measured against our plain loop in float64. In training, float32 rounding grows from step to step
until losses differ; in float64 both of our paths agree.
Training is that of 001 (Tables 3 and 4): 10 000 sequences of ten numbers, A 21 x 21, B 21 x 23, C 22 x 21,
D 22 x 23 and a linear layer to ten classes.

Run: python -m benchmarks.kernels.sequences [--quick | --easy]
"""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import (
    best_times,
    cpu_seconds,
    make_parser,
    one_thread,
    print_table,
    relative_error,
    save,
    versions,
)
from benchmarks.problems import state_matrix
from benchmarks.rivals.libraries import MAX_STEPS, TOLERANCE, NotRunError, rival
from wellposed import Absolute, Implicit, ImplicitRNN

SIZES = ((20, 20, 128), (37, 40, 128))  # states, hidden states, batch
FLOOR = 1e-6  # relative errors below this are the rounding of float32
LADDER = tuple(TOLERANCE * 2.0**power for power in range(5, -9, -1))  # tolerances that are tried
# Family, norm and lengths; at 0.99 a long sequence takes the plain iterations seconds.
KINDS = (("positive", 0.9, (10, 60)), ("random", 0.9, (10, 60)), ("positive", 0.99, (10,)))
EASY = "random", 0.9, 21, 22, 100, 10  # the network of the rolling argmax: fixed costs count


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

    def to(self, *where: Any) -> "Case":
        """Moves everything to a device or a dtype."""
        matrices = tuple(matrix.to(*where) for matrix in self.matrices)
        return Case(self.name, matrices, self.inputs.to(*where), self.weights.to(*where))


@dataclass(frozen=True)
class Rival:
    """One library on one case: `last` computes the last hidden states."""

    last: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]  # A, B, C, D, or those of an LSTM

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


def network(case: Case, executor: str, forward: float, backward: float) -> ImplicitRNN:
    """Returns our model with a tolerance for each pass, where the case lies."""
    stop, gradient = Absolute(forward), Implicit(stop=Absolute(backward))
    return ImplicitRNN.from_matrices(
        *case.matrices, executor=executor, stop=stop, gradient=gradient, max_steps=MAX_STEPS, batch_first=True
    )


def last_hidden(rnn: ImplicitRNN) -> Rival:
    """Returns our model as what is compared."""
    cell = rnn.cell(0)
    assert cell.D is not None
    return Rival(lambda s: rnn(s)[1][0], (cell.state.raw, cell.B, cell.C, cell.D))


def ours(case: Case, executor: str, forward: float, backward: float) -> Rival:
    """Returns our model with a tolerance for each pass."""
    return last_hidden(network(case, executor, forward, backward))


def torchidl(case: Case) -> Rival:
    """Returns torchidl's model."""
    A, B, C, _ = case.matrices
    package = rival("torchidl.implicit_rnn_model")
    limits = {"mitr": MAX_STEPS, "grad_mitr": MAX_STEPS, "tol": TOLERANCE, "grad_tol": TOLERANCE, "kappa": 0.9999}
    cell = package.ImplicitRNNCell(B.shape[1] - C.shape[0], A.shape[0], C.shape[0], **limits).to(A.device)
    parameters = cell.layer.A, cell.layer.B, cell.layer.C, cell.layer.D
    with torch.no_grad():
        for parameter, value in zip(parameters, case.matrices, strict=True):
            parameter.copy_(value)
    return Rival(lambda s: cell(s)[1], parameters)


def exact(case: Case) -> tuple[Tensor, list[Tensor]]:
    """Returns the last hidden states and the gradients from the plain loop in float64."""
    double = case.to(torch.float64)
    model = ours(double, "reference", 1e-13, 1e-13)
    return model.forward(double), model.step(double)


@dataclass(frozen=True)
class Errors:
    """Relative errors of the last hidden states and, the worst, of the gradients of the matrices."""

    value: float
    gradient: float

    @classmethod
    def of(cls, model: Rival, case: Case, exactly: tuple[Tensor, list[Tensor]]) -> "Errors":
        """Measures a model."""
        last, gradients = exactly
        worst = max(map(relative_error, model.step(case), gradients))
        return cls(relative_error(model.forward(case), last), worst)


def _largest(error: Callable[[float], float], goal: float) -> tuple[float, bool]:
    """Returns the largest tolerance with an error up to the goal; where there is none, with our least error."""
    known = []
    for tolerance in LADDER:
        known.append(error(tolerance))
        rounding = FLOOR if tolerance <= TOLERANCE else 0.0  # only what is exact to the goal may be looser
        if known[-1] <= max(goal, rounding):
            return tolerance, True
    least = next(k for k, value in enumerate(known) if value <= 1.1 * min(known))
    return LADDER[least], False


def tune(case: Case, exactly: tuple[Tensor, list[Tensor]], goal: Errors) -> tuple[float, float, bool]:
    """Returns our tolerances, forward and backward, for torchidl's errors, and whether we have reached these."""

    def value(tolerance: float) -> float:
        return relative_error(ours(case, "auto", tolerance, tolerance).forward(case), exactly[0])

    def gradient(forward: float, backward: float) -> float:
        return Errors.of(ours(case, "auto", forward, backward), case, exactly).gradient

    largest, reached = _largest(value, goal.value)
    # A state that is zero to the forward tolerance may have the wrong slope, which no backward pass mends.
    for forward in (tolerance for tolerance in LADDER if tolerance <= largest):
        backward, also = _largest(partial(gradient, forward), goal.gradient)
        if also:
            return forward, backward, reached
    return largest, _largest(partial(gradient, largest), goal.gradient)[0], False


def measure(case: Case, rounds: int, budget: float) -> list[dict[str, Any]]:
    """Returns a row per library."""
    exactly = exact(case)
    try:
        theirs = {"torchidl": torchidl(case)}
    except NotRunError as reason:
        theirs = {}
        print(reason)
    goal = Errors.of(theirs["torchidl"], case, exactly) if theirs else Errors(FLOOR, FLOOR)
    *tolerances, reached = tune(case, exactly, goal)
    executors = {"wellposed": "auto", "wellposed, plain loop": "reference"}
    models = {name: ours(case, executor, *tolerances) for name, executor in executors.items()} | theirs
    forward = best_times({name: partial(model.forward, case) for name, model in models.items()}, rounds, budget)
    both = best_times({name: partial(model.step, case) for name, model in models.items()}, rounds, budget)
    rows = []
    for name, model in models.items():
        errors = Errors.of(model, case, exactly)
        used = (TOLERANCE, TOLERANCE) if name == "torchidl" else tolerances
        rows.append({
            "problem": case.name, "states": case.matrices[0].shape[0], "hidden": case.weights.shape[1],
            "batch": len(case.inputs), "length": case.inputs.shape[1], "library": name,
            "forward_tolerance": used[0], "backward_tolerance": used[1],
            "forward_ms": 1e3 * forward[name], "both_ms": 1e3 * both[name],
            "value_error": errors.value, "gradient_error": errors.gradient, "equal_error": reached,
            "forward_ratio": forward[name] / forward["wellposed"], "ratio": both[name] / both["wellposed"],
        })  # fmt: skip
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a line per case: our times beside torchidl's, and what the errors are."""
    lines, names = [], ("problem", "states", "length")
    cases = list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))
    for case in cases:
        by_library = {row["library"]: row for row in rows if tuple(row[name] for name in names) == case}
        mine, other = by_library["wellposed"], by_library.get("torchidl")
        if other is None:
            continue
        line = dict(zip(names, case, strict=True))
        for name in ("forward_ms", "both_ms", "value_error", "gradient_error"):
            line[name] = f"{mine[name]:.3g} / {other[name]:.3g}"
        line |= {"times faster": other["ratio"], "equal error": "yes" if mine["equal_error"] else "no"}
        lines.append(line)
    return lines


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
        self.network = ImplicitRNN(
            1, 22, 21, stop=Absolute(TOLERANCE), max_steps=MAX_STEPS, executor=executor, batch_first=True
        )
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

    def run() -> None:
        for _ in range(epochs):
            for chosen in torch.randperm(samples, generator=generator).split(128):
                optimiser.zero_grad()
                F.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
                optimiser.step()

    spent, _ = cpu_seconds(run)
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
    trained = []
    for library, make in makers.items():
        try:
            trained.append(asdict(train(library, make, epochs, samples)))
        except NotRunError as reason:
            print(reason)
    return trained


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Prints a table."""
    header = [name.replace("_", " ") for name in rows[0]]
    lines = [[f"{cell:.3g}" if isinstance(cell, float) else cell for cell in row.values()] for row in rows]
    print_table(title, header, lines, width=200)


def main() -> None:
    """Measures all cases; a full run also writes the result."""
    parser = make_parser(__doc__, __file__, quick="one size and a short training")
    parser.add_argument("--easy", action="store_true", help="only the easiest problem; writes nothing")
    options = parser.parse_args()
    one_thread()
    warnings.simplefilter("ignore")
    if options.easy:
        show(summary(measure(Case.draw(*EASY), rounds=15, budget=0.05)), "wellposed / torchidl")
        return
    sizes = SIZES[:1] if options.quick else SIZES
    kinds = [(family, norm, *size, T) for size in sizes for family, norm, lengths in KINDS for T in lengths]
    rows = [row for kind in (*kinds, EASY) for row in measure(Case.draw(*kind), rounds=3, budget=0.05)]
    show(rows, "forward and backward over sequences")
    if lines := summary(rows):
        show(lines, "wellposed / torchidl, each at the tolerances above")
    trained = trainings(options.quick)
    show(trained, "an epoch of the rolling argmax")
    known = versions("wellposed", "torch", "torchidl", "numba")
    save(options, tolerance=TOLERANCE, versions=known, rows=rows, training=trained)


if __name__ == "__main__":
    main()
