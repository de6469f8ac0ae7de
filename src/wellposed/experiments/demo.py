"""The demo: who extrapolates on additions, and why."""

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.equilibrium.certificate import Certificate
from wellposed.models.ensemble import Ensemble
from wellposed.models.implicit import ImplicitModel
from wellposed.training import History, fit
from wellposed.workers import one_thread

FEATURES, STATES = 50, 20
SHIFTS = (1, 2, 10, 50, 100)


@dataclass(frozen=True)
class DemoConfig:
    """How large the demo is; every seed has its own task, samples, initial weights and data order.

    Example:
        >>> DemoConfig(seeds=3).command
        'wellposed demo --seeds 3 --epochs 40'
    """

    seeds: int = 5
    epochs: int = 40
    samples: int = 10_000
    batch_size: int = 200
    test_samples: int = 2_000
    learning_rate: float = 0.03

    @property
    def command(self) -> str:
        """What to type to run it again."""
        return f"wellposed demo --seeds {self.seeds} --epochs {self.epochs}"


@dataclass(frozen=True)
class ModelResult:
    """What one kind of model did; tensors have a column for every seed."""

    name: str
    parameters: int
    errors: Tensor  # (shifts, M) mean squared errors
    history: History | None = None
    steps: Tensor | None = None  # (shifts, M, samples) steps to equilibrium
    failed_share: float | None = None  # of all test samples
    certificates: tuple[Certificate, ...] = ()

    def median(self) -> list[float]:
        """The median over the seeds, for every shift."""
        return self.errors.quantile(0.5, dim=1).tolist()

    def worst(self) -> list[float]:
        """The worst seed, for every shift."""
        return self.errors.amax(1).tolist()


@dataclass(frozen=True)
class DemoResult:
    """Everything that the table and the page show."""

    config: DemoConfig
    models: tuple[ModelResult, ...]
    seconds: float
    versions: dict[str, str]

    @property
    def certified(self) -> bool:
        """Whether every implicit model is proven well-posed."""
        return all(certificate.holds for model in self.models for certificate in model.certificates)


def run_demo(config: DemoConfig, progress: bool = True) -> DemoResult:
    """Trains and tests the implicit model and its three controls.

    Example:
        >>> tiny = DemoConfig(seeds=2, epochs=1, samples=64, batch_size=32, test_samples=16)
        >>> [model.name for model in run_demo(tiny, progress=False).models]
        ['implicit model', 'MLP', 'bias-free MLP', 'linear fit']
    """
    began = time.perf_counter()
    train = _draw(config, config.samples, 1.0, part=0)
    tests = [_draw(config, config.test_samples, shift / 2, part=1) for shift in SHIFTS]
    kinds: dict[str, Callable[[], nn.Module]] = {
        "implicit model": _implicit,
        "MLP": lambda: _mlp(bias=True),
        "bias-free MLP": lambda: _mlp(bias=False),
    }
    with one_thread():
        models = [_train(name, kind, config, train, tests, progress) for name, kind in kinds.items()]
        models.append(_regress(train, tests))
    return DemoResult(config, tuple(models), time.perf_counter() - began, versions())


def versions() -> dict[str, str]:
    """Names what the numbers depend on."""
    own = sys.modules["wellposed"].__version__
    return {"wellposed": own, "torch": torch.__version__, "Python": platform.python_version()}


def _draw(config: DemoConfig, samples: int, scale: float, part: int) -> tuple[Tensor, Tensor]:
    """Draws every seed's data; test data of different scales are multiples of the same numbers."""
    parts = []
    for seed in range(config.seeds):
        generator = torch.Generator().manual_seed(1_000_000 * (part + 1) + seed)
        parts.append(addition(seed, samples, scale, generator))
    u, y = zip(*parts, strict=True)
    return torch.stack(u), torch.stack(y)  # (M, N, p), (M, N, 1)


def addition(seed: int, samples: int, scale: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws u from ``U(-scale, scale)`` and sums of two ranges of it, which the seed decides (001 sec. 2.1)."""
    ranges = torch.Generator().manual_seed(seed)
    index, weights = torch.arange(FEATURES), torch.zeros(FEATURES)
    for _ in range(2):
        low, high = sorted(torch.randperm(FEATURES, generator=ranges)[:2].tolist())
        weights += ((low <= index) & (index <= high)).float()
    u = scale * (2 * torch.rand(samples, FEATURES, generator=generator) - 1)
    return u, u @ weights[:, None]


def _implicit() -> nn.Module:
    """Builds an implicit model that starts near zero: B and C have a tenth of their usual size."""
    model = ImplicitModel(FEATURES, 1, STATES, kappa=0.5, solver="picard")
    with torch.no_grad():
        model.B.mul_(0.1)
        model.C.mul_(0.1)
    return model


def _mlp(bias: bool) -> nn.Module:
    first, second, last = (
        nn.Linear(before, after, bias) for before, after in pairwise((FEATURES, STATES, STATES, 1))
    )
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)


def _train(
    name: str,
    kind: Callable[[], nn.Module],
    config: DemoConfig,
    train: tuple[Tensor, Tensor],
    tests: list[tuple[Tensor, Tensor]],
    progress: bool,
) -> ModelResult:
    ensemble = Ensemble.of(kind, range(config.seeds))
    history = fit(
        ensemble,
        train,
        F.mse_loss,
        epochs=config.epochs,
        optimizer=partial(torch.optim.Adam, lr=config.learning_rate),
        schedule="cosine",
        batch_size=config.batch_size,
        per_member=True,
        progress=name if progress else False,
    )
    members = [ensemble.member(index) for index in range(config.seeds)]
    with torch.no_grad():
        errors = torch.stack([(ensemble(u) - y).square().mean((1, 2)) for u, y in tests])
    parameters = sum(parameter.numel() for parameter in members[0].parameters())
    result = ModelResult(name, parameters, errors, history)
    implicit = [member for member in members if isinstance(member, ImplicitModel)]
    return _with_equilibria(result, implicit, tests) if implicit else result


@torch.no_grad()
def _with_equilibria(
    result: ModelResult, members: list[ImplicitModel], tests: list[tuple[Tensor, Tensor]]
) -> ModelResult:
    """Adds steps, failures and certificates."""
    found = [[model.equilibrium(u[i]) for i, model in enumerate(members)] for u, _ in tests]
    steps = torch.stack([torch.stack([solution.steps for solution in row]) for row in found])
    failed = torch.stack([solution.failed for row in found for solution in row]).float().mean()
    certificates = tuple(model.certificate() for model in members)
    return ModelResult(
        result.name, result.parameters, result.errors, result.history, steps, float(failed), certificates
    )


def _regress(train: tuple[Tensor, Tensor], tests: list[tuple[Tensor, Tensor]]) -> ModelResult:
    u, y = (part.double() for part in train)
    weights = torch.linalg.lstsq(u, y).solution  # (M, p, 1)
    errors = torch.stack([(u.double() @ weights - y).square().mean((1, 2)) for u, y in tests])
    return ModelResult("linear fit", FEATURES, errors)
