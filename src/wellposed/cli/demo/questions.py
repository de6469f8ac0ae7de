"""What the demo computes: one reader of handwritten digits, six questions, every number seeded."""

import copy
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.atomic import atomic_write
from wellposed.checker import certificate_path
from wellposed.conditions.certificate import Certificate
from wellposed.convert import to_implicit
from wellposed.convex import FitReport, States, fit_states, record_states
from wellposed.convex.claims import gap_claim
from wellposed.data.images import Images, load_images
from wellposed.equilibrium.solution import Solution
from wellposed.forms import ImplicitForm
from wellposed.models import ImplicitModel, save
from wellposed.models.io.storage import load_reference
from wellposed.robust.certification import Examination, Radius, examine_radii
from wellposed.training import fit
from wellposed.workers import one_thread

ROBUST = "digits-robust"  # a model of the package, trained by bounds
NETWORK, SPARSE, FEEDBACK = "network.pt2", "sparse.safetensors", "feedback.safetensors"  # files of the demo
REPEATS = 5  # of a timing, of which the shortest counts


@dataclass(frozen=True)
class DemoConfig:
    """How large the demo is.

    Example:
        >>> DemoConfig(seed=3).command
        'wellposed demo --seed 3'
    """

    seed: int = 0
    epochs: int = 30
    feedback_epochs: int = 20
    states: int = 64
    kappa: float = 0.9
    zeros: float = 0.9
    train_images: int | None = None  # None for all
    examined: int = 200
    radii: tuple[float, ...] = (0.02, 0.04, 0.06, 0.08, 0.1, 0.13, 0.16, 0.2)
    attack_steps: int = 20

    @property
    def command(self) -> str:
        """What to type to run it again."""
        return f"wellposed demo --seed {self.seed}"


@dataclass(frozen=True, eq=False)
class Network:
    """(a) The trained network, and what it says about the test images."""

    module: nn.Module
    weights: int
    predicted: Tensor  # (N,)


@dataclass(frozen=True, eq=False)
class Equation:
    """(b) The network as one equation."""

    form: ImplicitForm
    difference: float
    largest_output: float


@dataclass(frozen=True, eq=False)
class SparseModel:
    """(c) A model with few weights, fitted to the network's states."""

    model: ImplicitModel
    report: FitReport
    states: States
    predicted: Tensor  # (N,)


@dataclass(frozen=True, eq=False)
class Reaching:
    """How one image's equilibrium is reached.

    Args:
        image: which of the test images.
        iterates: (K, n), from zero.
        predicted: (K,), the class that each iterate would give.
        distances: from the equilibrium, step by step, for several starts.
    """

    image: int
    iterates: Tensor
    predicted: Tensor
    distances: dict[str, list[float]]


@dataclass(frozen=True, eq=False)
class Feedback:
    """(d) A model whose states depend on each other."""

    model: ImplicitModel
    predicted: Tensor  # (N,)
    solution: Solution
    bounds: Tensor  # (N,), of the distance to the true equilibrium
    settled: Tensor  # (N,), whether that distance is too small to change the class
    certificate: Certificate
    reaching: Reaching
    seconds: dict[str, float]  # of a solve of all test images, by kind of loop
    reason: str  # why that loop is chosen


@dataclass(frozen=True)
class Checked:
    """(e) What the checker says, of both models and of a damaged copy.

    Args:
        proven: its lines, by file.
        why_not: what it says once one bit of a weight is changed.
        row_sums: of the absolute entries of A, the largest first.
        seconds: for both files together.
    """

    proven: dict[str, list[str]]
    why_not: str
    row_sums: list[float]
    seconds: float


@dataclass(frozen=True, eq=False)
class Robustness:
    """(f) Proven and attacked accuracy against the radius.

    Args:
        plain, robust: the feedback model and the reference model.
        epsilon: the radius at which most images are of the kind of `images`.
        images: those that an attack on the plain model changes and that the robust one provably keeps.
    """

    plain: Examination
    robust: Examination
    epsilon: float
    images: list[int]


@dataclass(frozen=True, eq=False)
class DemoResult:
    """Everything that the table and the page show."""

    config: DemoConfig
    folder: Path
    train: int
    test: Images
    network: Network
    equation: Equation
    sparse: SparseModel
    feedback: Feedback
    checked: Checked
    robustness: Robustness
    seconds: float
    versions: dict[str, str]

    def accuracy(self, predicted: Tensor) -> float:
        """Returns the share of test images that are read correctly."""
        return float((predicted == self.test.labels).double().mean())

    def right(self, predicted: Tensor) -> int:
        """Counts the test images that are read correctly."""
        return int((predicted == self.test.labels).sum())

    @property
    def certified(self) -> bool:
        """Whether both models are proven well-posed, by the library and by the checker."""
        return self.sparse.report.certificate.holds and self.feedback.certificate.holds and all(
            self.checked.proven.values()
        )  # fmt: skip


def run_demo(config: DemoConfig, folder: Path, tell: Callable[[str], None] = lambda text: None) -> DemoResult:
    """Trains, converts, sparsifies, solves, checks and attacks; models go to the folder.

    Args:
        tell: is told what is being done.
    """
    began = time.perf_counter()
    train, test = load_images("digits", "train"), load_images("digits", "test")
    if config.train_images is not None:
        train = train.subset(config.train_images)
    u = test.flat()
    with one_thread():
        tell("(a) trains a small network on digits")
        network = train_network(config, train, test)
        torch.export.save(torch.export.export(network.module, (u[:2],)), folder / NETWORK)
        tell("(b) writes it as one equation")
        equation = write_equation(network, u)
        tell(f"(c) fits a model with {100 * config.zeros:.0f} % zeros (the first time kernels are compiled)")
        sparse = fit_sparse(config, network, train, u)
        tell("(d) trains a model with feedback and solves for its equilibria")
        feedback = train_feedback(config, train, test)
        tell("(e) has the models checked in exact arithmetic")
        checked = check_models(sparse, feedback, folder)
        tell("(f) proves and attacks at several radii")
        robustness = examine_both(config, feedback.model, test)
    seconds = time.perf_counter() - began
    own = sys.modules["wellposed"].__version__
    versions = {"wellposed": own, "torch": torch.__version__, "Python": platform.python_version()}
    return DemoResult(config, folder, len(train), test, network, equation, sparse, feedback, checked, robustness,
                      seconds, versions)  # fmt: skip


def _classify(model: nn.Module, train: Images, epochs: int, seed: int) -> None:
    adam = partial(torch.optim.Adam, lr=5e-3)
    fit(model, (train.flat(), train.labels), cross_entropy, epochs=epochs, batch_size=64, optimizer=adam,
        schedule="cosine", seed=seed, progress=False)  # fmt: skip


def train_network(config: DemoConfig, train: Images, test: Images) -> Network:
    """Trains a network with two hidden layers."""
    torch.manual_seed(config.seed)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    _classify(module, train, config.epochs, config.seed)
    module.eval().requires_grad_(False)
    weights = sum(value.numel() for value in module.parameters())
    return Network(module, weights, module(test.flat()).argmax(1))


@torch.no_grad()
def write_equation(network: Network, u: Tensor) -> Equation:
    """Converts the network and compares all outputs on the test images."""
    form, expected = to_implicit(network.module, (64,)), network.module(u)
    return Equation(form, float((form(u) - expected).abs().max()), float(expected.abs().max()))


def fit_sparse(config: DemoConfig, network: Network, train: Images, u: Tensor) -> SparseModel:
    """Fits a model with few weights to the states of the network."""
    states = record_states(network.module, train.flat().split(256))
    model, report = fit_states(states, kappa=config.kappa, target_sparsity=config.zeros, targets=train.labels)
    with torch.no_grad():
        return SparseModel(model, report, states, model(u).argmax(1))


def train_feedback(config: DemoConfig, train: Images, test: Images) -> Feedback:
    """Trains an implicit model and solves for the equilibria of the test images."""
    torch.manual_seed(config.seed)
    model = ImplicitModel(64, 10, config.states, kappa=config.kappa, bias=True)
    _classify(model, train, config.feedback_epochs, config.seed)
    model.requires_grad_(False)
    u = test.flat()
    outputs, solution = model(u), model.equilibrium(u)
    bounds = solution.error_bound
    assert bounds is not None  # kappa is below one, so the map contracts
    plain = copy.deepcopy(model)
    plain.executor = "reference"
    seconds = {"compiled kernel": _shortest(model, u), "plain torch loop": _shortest(plain, u)}
    return Feedback(
        model,
        outputs.argmax(1),
        solution,
        bounds,
        _settled(model, outputs, bounds),
        model.certificate(),
        reach(model, test),
        seconds,
        model.explain(u).partition("\n")[0],
    )


def _shortest(model: ImplicitModel, u: Tensor) -> float:
    def once() -> float:
        began = time.perf_counter()
        model.equilibrium(u)
        return time.perf_counter() - began

    once()
    return min(once() for _ in range(REPEATS))


def _settled(model: ImplicitModel, outputs: Tensor, bounds: Tensor) -> Tensor:  # (N,)
    """Says for which samples no state within the bound gives another class.

    A lead of class i over class j moves by at most ``|C_i - C_j|_1`` times the distance in the inf-norm.
    """
    best = outputs.argmax(1)
    lead = outputs.gather(1, best[:, None]) - outputs  # (N, q)
    slope = torch.cdist(model.C, model.C, p=1)[best]  # (N, q)
    rival = torch.ones_like(lead, dtype=torch.bool).scatter(1, best[:, None], False)
    return ((lead > slope * bounds[:, None]) | ~rival).all(1)


def reach(model: ImplicitModel, test: Images) -> Reaching:
    """Follows the iteration of one image in float64: one that is misread on the way, not at the end."""
    exact = copy.deepcopy(model).double()
    A, u = exact.A, test.flat(torch.float64)
    assert exact.bias is not None and exact.D is not None
    v, through = u @ exact.B.T + exact.bias, u @ exact.D.T

    def follow(x: Tensor, v: Tensor, steps: int) -> Tensor:  # (steps + 1, ...)
        iterates = [x]
        for _ in range(steps):
            iterates.append(torch.relu(iterates[-1] @ A.T + v))
        return torch.stack(iterates)

    iterates = follow(torch.zeros_like(v), v, 40)  # (K, N, n)
    predicted = (iterates @ exact.C.T + through).argmax(2)  # (K, N)
    changes = (predicted[1] != predicted[-1]) & (predicted[-1] == test.labels)
    image = int(changes.int().argmax())
    own = v[image]
    end = follow(iterates[-1, image], own, 400)[-1]
    draw = torch.Generator().manual_seed(0)
    starts = {
        "from zero": torch.zeros_like(own),
        "from ones": torch.ones_like(own),
        "from noise": 3 * torch.rand(own.shape, generator=draw, dtype=own.dtype),
    }
    distances = {name: (follow(x, own, 40) - end).abs().amax(1).tolist() for name, x in starts.items()}
    return Reaching(image, iterates[:, image], predicted[:, image], distances)


def check_models(sparse: SparseModel, feedback: Feedback, folder: Path) -> Checked:
    """Saves both models with certificates, and has them checked by a program of its own."""
    gaps = gap_claim(sparse.model, sparse.report, sparse.states, own=True)
    save(sparse.model, folder / SPARSE, certificate=True, claims=[gaps])
    save(feedback.model, folder / FEEDBACK, certificate=True)
    began = time.perf_counter()
    proven = {name: _ask(folder / name)[1] for name in (SPARSE, FEEDBACK)}
    seconds = time.perf_counter() - began
    content = bytearray((folder / FEEDBACK).read_bytes())
    content[-1] ^= 1
    with tempfile.TemporaryDirectory() as scratch:
        damaged = Path(scratch) / FEEDBACK
        with atomic_write(damaged) as temporary:
            temporary.write_bytes(content)
        why_not = " ".join(_ask(damaged, certificate_path(folder / FEEDBACK))[0])
    sums = feedback.model.A.abs().double().sum(1).sort(descending=True).values
    return Checked(proven, why_not, sums.tolist(), seconds)


def _ask(*paths: Path) -> tuple[list[str], list[str]]:
    """Runs the checker in a process of its own; returns what it says, and of that what is proven."""
    done = subprocess.run(
        [sys.executable, "-m", "wellposed.checker", *map(str, paths)], capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines, [line.removeprefix("proven:\t") for line in lines if line.startswith("proven:")]


def examine_both(config: DemoConfig, plain: ImplicitModel, test: Images) -> Robustness:
    """Proves and attacks both models on the first images."""
    robust = load_reference(ROBUST)
    assert isinstance(robust, ImplicitModel)
    u, target = test.flat()[: config.examined], test.labels[: config.examined]
    one, other = (
        examine_radii(model, model.form(), u, target, config.radii, method="crown", steps=config.attack_steps)
        for model in (plain, robust)
    )
    telling = {epsilon: (one.broken <= epsilon) & (other.proven >= epsilon) for epsilon in config.radii}
    epsilon = max(telling, key=lambda radius: int(telling[radius].sum()))
    return Robustness(one, other, epsilon, telling[epsilon].nonzero()[:5, 0].tolist())


def record(result: DemoResult) -> dict[str, Any]:
    """Collects the numbers as JSON can hold them."""
    network, equation, sparse, feedback = result.network, result.equation, result.sparse, result.feedback
    steps = feedback.solution.steps
    compiled, plain = feedback.seconds.values()
    return {
        "command": result.config.command,
        "versions": result.versions,
        "seconds": round(result.seconds, 1),
        "certified": result.certified,
        "data": {"source": result.test.source, "train_images": result.train, "test_images": len(result.test)},
        "network": {**_score(result, network.predicted), "weights": network.weights},
        "equation": {
            "states": equation.form.sizes[0],
            "largest_difference": equation.difference,
            "largest_output": equation.largest_output,
        },
        "sparse": {
            **_score(result, sparse.predicted),
            "zeros": sparse.report.sparsity,
            "weights_left": int(sparse.report.nonzeros.sum()),
            "weights_allowed": sparse.report.allowed,
            "largest_relative_gap": float(sparse.report.relative_gap.max()),
            "certificate": str(sparse.report.certificate),
            "images_lost": result.right(network.predicted) - result.right(sparse.predicted),
        },
        "feedback": {
            **_score(result, feedback.predicted),
            "states": result.config.states,
            "steps_fewest": int(steps.min()),
            "steps_mean": float(steps.double().mean()),
            "steps_most": int(steps.max()),
            "failed": int(feedback.solution.failed.sum()),
            "largest_error_bound": float(feedback.bounds.max()),
            "images_settled": int(feedback.settled.sum()),
            "certificate": str(feedback.certificate),
        },
        "checker": {
            "proven": result.checked.proven,
            "why_not": result.checked.why_not,
            "seconds": round(result.checked.seconds, 2),
        },
        "robustness": {
            "images": len(result.robustness.plain.predicted),
            "radii": list(result.config.radii),
            "plain": _curves(result.robustness.plain.radii),
            "robust": _curves(result.robustness.robust.radii),
        },
        "speed": {
            "compiled_milliseconds": 1e3 * compiled,
            "plain_milliseconds": 1e3 * plain,
            "times_faster": plain / compiled,
        },
    }


def _score(result: DemoResult, predicted: Tensor) -> dict[str, Any]:
    return {"accuracy": result.accuracy(predicted), "images_right": result.right(predicted)}


def _curves(radii: list[Radius]) -> dict[str, Any]:
    shares: dict[str, Any] = {"clean": radii[0].share("clean")}
    shares |= {name: [one.share(name) for one in radii] for name in ("certified", "attacked")}
    shares["nothing_proven_at"] = nothing_proven(radii)
    return shares


def nothing_proven(radii: Sequence[Radius]) -> float | None:
    """Returns the smallest radius of the list at which no image is proven; None where some always is."""
    return next((one.epsilon for one in radii if not bool(one.certified.any())), None)
