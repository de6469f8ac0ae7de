"""What the demo says: a table for the terminal, two sentences, and JSON."""

import math
from typing import Any

import torch
from rich import box
from rich.table import Table

from wellposed.experiments.demo import SHIFTS, DemoResult, ModelResult, addition
from wellposed.models.implicit import ImplicitModel
from wellposed.models.reference import load_reference

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
