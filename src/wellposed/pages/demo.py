"""The demo: who extrapolates on additions, and why.

`run_demo` trains and tests the models. `table`, `FINDING` and `record` are what the demo says: a table for the
terminal, two sentences, and JSON. `page` writes one self-contained HTML page: no script, no network.
"""

import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.table import Table
from torch import Tensor, nn

from wellposed.conditions.certificate import Certificate
from wellposed.models.ensemble import Ensemble
from wellposed.models.implicit import ImplicitModel
from wellposed.models.io.storage import load_reference
from wellposed.pages.style import STYLE
from wellposed.pages.svg import Series, histogram, line_chart
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


REFERENCE = "addition"  # the model of the package that is shown beside those of the demo

FINDING = (
    "A ReLU model without bias is positively homogeneous, f(au) = a f(u) for a > 0, so inputs that are a "
    "times larger multiply its squared error by exactly a^2: that holds for the implicit model and for the "
    "bias-free MLP alike, and the biases of the ordinary MLP destroy it.",
    "The target is linear, so a linear fit is exact at any distance; what is measured here is the price of a "
    "bias, not a merit that only implicit models have.",
)


def number(value: float) -> str:
    """Formats an error.

    Example:
        >>> number(0.000912), number(float("nan"))
        ('9.1e-04', 'NaN')
    """
    return f"{value:.1e}" if math.isfinite(value) else str(value).replace("nan", "NaN")


def steps_at(model: ModelResult, shift: int) -> str:
    """Formats the mean steps to equilibrium at a shift."""
    return "-" if model.steps is None else f"{model.steps[SHIFTS.index(shift)].double().mean():.1f}"


def share_failed(model: ModelResult) -> str:
    """Formats the share of test samples without an equilibrium."""
    return "-" if model.failed_share is None else f"{100 * model.failed_share:.1f} %"


def table(result: DemoResult) -> Table:
    """Shows the median error over the seeds and, below it, the worst."""
    seeds = f"median of {result.config.seeds} seeds, and below it the worst"
    title = f"Mean squared error on U(-k/2, k/2), trained on U(-1, 1);\n{seeds}"
    shown = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, title_justify="left", padding=0)
    shown.add_column("\nmodel", no_wrap=True)
    headings = ["\nsize", *(f"\nk={shift}" for shift in SHIFTS)]
    for heading in [*headings, "steps\nk=1", "steps\nk=100", "\nfailed"]:
        shown.add_column(heading, justify="right", no_wrap=True)
    for model in result.models:
        pairs = zip(model.median(), model.worst(), strict=True)
        cells = [f"{number(median)}\n[dim]{number(worst)}[/dim]" for median, worst in pairs]
        steps = [steps_at(model, 1), steps_at(model, 100), share_failed(model)]
        shown.add_row(model.name, f"{model.parameters:,}", *cells, *steps)
    return shown


def certificates(result: DemoResult) -> list[str]:
    """Says for every implicit model whether it is proven well-posed.

    Each line names the seed.
    """
    proofs = [certificate for model in result.models for certificate in model.certificates]
    return [f"seed {seed}: {proof}" for seed, proof in enumerate(proofs)]


@torch.no_grad()
def shipped() -> str:
    """Says how a model does that comes with the package, on the first seed's task."""
    model, found = load_reference(REFERENCE), []
    assert isinstance(model, ImplicitModel)
    for shift in (SHIFTS[0], SHIFTS[-1]):
        generator = torch.Generator().manual_seed(0)
        u, y = addition(0, 2000, shift / 2, generator)
        found.append(f"{number(float((model(u) - y).square().mean()))} at k={shift}")
    return f"load_reference({REFERENCE!r}), trained beforehand: {', '.join(found)}; {model.certificate()}"


def record(result: DemoResult) -> dict[str, Any]:
    """Collects the numbers as JSON can hold them."""
    return {
        "command": result.config.command,
        "config": dict(vars(result.config)),
        "versions": result.versions,
        "seconds": round(result.seconds, 1),
        "certified": result.certified,
        "models": [_model_record(model) for model in result.models],
    }


def _model_record(model: ModelResult) -> dict[str, Any]:
    errors = {str(shift): row.tolist() for shift, row in zip(SHIFTS, model.errors, strict=True)}
    found: dict[str, Any] = {"name": model.name, "parameters": model.parameters, "mse": _plain(errors)}
    if model.steps is not None:
        means = model.steps.double().mean((1, 2)).tolist()
        found["steps"] = {str(shift): mean for shift, mean in zip(SHIFTS, means, strict=True)}
        found["failed_share"] = model.failed_share
        found["certificates"] = [str(certificate) for certificate in model.certificates]
    if model.history is not None:
        found["train_loss"] = _plain(model.history.train_loss.tolist())
    return found


def _plain(value: Any) -> Any:
    """Replaces numbers that JSON does not know by None."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value if math.isfinite(value) else None


LEGEND = (
    "Median over the seeds, the worst seed below it; k = 2 is the training range. Steps to equilibrium are "
    "means at k = 1 and k = 100; failed is the share of test samples, over all k, that reached none."
)


def page(result: DemoResult) -> str:
    """Writes the whole page."""
    settings, title = result.config, "Who extrapolates, and why?"
    intro = (
        "Four models learn sums of two ranges of 50 numbers from U(&minus;1,&nbsp;1) and are tested on "
        "U(&minus;k/2,&nbsp;k/2): "
        f"{settings.seeds} seeds, {settings.samples:,} samples, {settings.epochs} epochs, "
        f"{result.seconds:.0f} seconds of training and testing."
    )
    body = [
        f"<h1>{title}</h1>",
        f'<p class="quiet">{intro}</p>',
        '<div class="finding">' + "".join(f"<p>{_prose(text)}</p>" for text in FINDING) + "</div>",
        '<div class="figures">' + _error_figure(result) + _training_figure(result) + "</div>",
        "<h2>Mean squared error by shift k</h2>",
        f'<p class="quiet">{_prose(LEGEND)}</p>',
        _table(result),
        "<h2>Equilibria</h2>",
        '<div class="figures">' + _steps_figure(result) + _certificates(result) + "</div>",
        "<h2>Run it again</h2>",
        f"<pre>{escape(settings.command)}</pre>",
        f'<p class="quiet">{_recipe(result)}</p>',
        f'<p class="quiet">{_versions(result)}</p>',
    ]
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>wellposed demo: {title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(body) + "\n</body>\n</html>\n"


def _series(name: str, style: int, x: list[float], values: Tensor) -> Series:  # values (len(x), M)
    low, middle, high = values.amin(1), values.quantile(0.5, dim=1), values.amax(1)
    return Series(name, style, x, middle.tolist(), low.tolist(), high.tolist())


def _error_figure(result: DemoResult) -> str:
    shifts = [float(shift) for shift in SHIFTS]
    trained = [model for model in result.models if model.history is not None]
    series = [_series(model.name, i, shifts, model.errors) for i, model in enumerate(trained)]
    ends = "; ".join(f"{model.name} {number(model.median()[-1])}" for model in result.models)
    drawing = line_chart(
        series,
        f"Mean squared error against shift k, both logarithmic. Median at k = 100: {ends}.",
        "shift k: inputs from U(-k/2, k/2)",
        "mean squared error",
        x_ticks=shifts,
        log_x=True,
    )
    exact = ", ".join(model.name for model in result.models if model.history is None)
    caption = f"Error against shift. Line: median of the seeds; band: best to worst. Far below: {exact}."
    return _figure(drawing, caption)


def _training_figure(result: DemoResult) -> str:
    series, ends = [], []
    for index, model in enumerate(result.models):
        if model.history is not None:
            losses = model.history.train_loss
            epochs = [float(epoch) for epoch in range(1, len(losses) + 1)]
            series.append(_series(model.name, index, epochs, losses))
            ends.append(f"{model.name} {number(float(losses[-1].quantile(0.5)))}")
    text = f"Training loss against epoch, logarithmic. Median after the last epoch: {'; '.join(ends)}."
    caption = "Training loss, median and band alike. The linear fit is solved at once and has no curve."
    return _figure(line_chart(series, text, "epoch", "training loss"), caption)


def _steps_figure(result: DemoResult) -> str:
    model = _implicit_result(result)
    if model.steps is None:
        return ""
    samples = {f"k = {k}": model.steps[SHIFTS.index(k)].flatten().tolist() for k in (1, 100)}
    means = ", ".join(f"{steps_at(model, k)} at k = {k}" for k in (1, 100))
    drawing = histogram(
        samples,
        f"Histogram of steps to equilibrium; mean {means}.",
        "steps to equilibrium",
        "share of samples",
    )
    caption = (
        f"Steps to equilibrium of the test samples: {means} on average; {share_failed(model)} did not "
        "converge. The stopping rule is relative, so larger inputs need no more steps."
    )
    return _figure(drawing, caption)


def _certificates(result: DemoResult) -> str:
    verdict = "All implicit models are" if result.certified else "NOT all implicit models are"
    lines = "".join(f"<li>{escape(line)}</li>" for line in certificates(result))
    why = (
        "The largest absolute row sum of A, rounding included, is below one: the map is a contraction, and "
        "every input has exactly one equilibrium."
    )
    return f"<div><p>{verdict} certified well-posed.</p><ul>{lines}</ul><p class='quiet'>{why}</p></div>"


def _table(result: DemoResult) -> str:
    heads = ["parameters", *(f"k = {k}" for k in SHIFTS), "steps at 1", "steps at 100", "failed"]
    head = "".join(f'<th scope="col">{name}</th>' for name in ["model", *heads])
    rows = "".join(_row(model, heads) for model in result.models)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(model: ModelResult, heads: list[str]) -> str:
    pairs = zip(model.median(), model.worst(), strict=True)
    cells = [f"{model.parameters:,}"]
    cells += [f"{number(median)}<small>{number(worst)}</small>" for median, worst in pairs]
    cells += [steps_at(model, 1), steps_at(model, 100), share_failed(model)]
    filled = "".join(f'<td data-label="{h}">{cell}</td>' for h, cell in zip(heads, cells, strict=True))
    return f'<tr><th scope="row">{escape(model.name)}</th>{filled}</tr>'


def _implicit_result(result: DemoResult) -> ModelResult:
    return next(model for model in result.models if model.certificates)


def _figure(drawing: str, caption: str) -> str:
    return f"<figure>{drawing}<figcaption>{_prose(caption)}</figcaption></figure>"


def _prose(text: str) -> str:
    return escape(text).replace("a^2", "a<sup>2</sup>").replace("k = ", "k&nbsp;=&nbsp;")


def _recipe(result: DemoResult) -> str:
    config = result.config
    return (
        f"Adam, learning rate {config.learning_rate:g} with cosine decay, batches of {config.batch_size}. The "
        "implicit model has 20 states, kappa 0.5 and no bias; its B and C start at a tenth of the usual size."
    )


def _versions(result: DemoResult) -> str:
    return escape(", ".join(f"{name} {version}" for name, version in result.versions.items()))
