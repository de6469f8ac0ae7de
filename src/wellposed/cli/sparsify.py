"""`wellposed sparsify`: from a trained network to a sparse, certified implicit model."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.export import ExportedProgram

from wellposed.atomic import written_whole
from wellposed.cli.inputs import (
    ALIASES,
    SETS,
    Network,
    PagePath,
    Samples,
    read_samples,
    read_source,
    refused,
    wrong,
)
from wellposed.cli.stored import save_certified
from wellposed.cli.terminal import print_table, typed_command
from wellposed.convert import to_implicit
from wellposed.convex import ROW_SOLVERS, FitReport, StateFit, States, record_states
from wellposed.convex.claims import gap_claim
from wellposed.convex.matching import OBJECTIVES
from wellposed.convex.report import LAYERS, scored
from wellposed.convex.rows import SUPPORTS, is_feedforward, support_mask
from wellposed.convex.states import first_tensor
from wellposed.errors import InputError
from wellposed.forms import ImplicitForm
from wellposed.models import Claim, ImplicitModel
from wellposed.pages.charts import bar_chart, matrix_chart
from wellposed.pages.markup import Html, Step, element, figure, percent
from wellposed.pages.markup import page as markup_page
from wellposed.pages.markup import table as markup_table
from wellposed.workers import threads_for

BATCH = 1000
LARGEST_PROOF = 10**8  # products that a check of gaps takes


class ReportPath(click.ParamType):
    """A file for the report, .html or .json."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Checks ending and folder."""
        path = Path(value)
        if path.suffix.lower() not in (".html", ".json"):
            self.fail(f"{value!r} must end with .html or .json", param, ctx)
        if not path.absolute().parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r}", param, ctx)
        return path


@dataclass(frozen=True, eq=False)
class Result:
    """A fitted model, its report, and its score on data that the fit has not seen."""

    model: ImplicitModel
    report: FitReport
    source: str
    test: str | None = None
    score: str | None = None
    before: float | None = None
    after: float | None = None

    def facts(self, out: Path) -> dict[str, Any]:
        """Returns everything as plain numbers and texts."""
        test = {"source": self.test, "score": self.score, "before": self.before, "after": self.after}
        return {"file": str(out), "data": self.source, "test": test if self.test else None, **self.report.facts()}


@click.command()
@click.option("--network", required=True, metavar="SOURCE", help="model.pt2, module:factory or file.py:factory.")
@click.option("--data", required=True, metavar="DATA", help="A set (digits, fashion, mnist, cifar10) or a file.")
@click.option("--test", metavar="DATA", help="To score on; the test part of a set if left out.")
@click.option("--samples", type=click.IntRange(min=2), default=5000, help="How many are drawn from the data.")
@click.option("--kappa", type=float, default=0.99, help="Cap on the rows of A, between 0 and 1.")
@click.option("--target-sparsity", type=float, help="Fraction of zeros in (A, B), e.g. 0.9.")
@click.option("--objective", type=click.Choice(OBJECTIVES), default="none", help="Beside the misfit.")
@click.option("--strength", type=float, default=0.0, help="Weight of the objective, without units.")
@click.option("--bound", type=click.Choice(["state", "row"]), default="state", help="Cap a, or all of (a, b).")
@click.option("--support", type=click.Choice(SUPPORTS), default="layered", help="Entries that may be used.")
@click.option("--solver", type=click.Choice(sorted(ROW_SOLVERS.factories)), default="automatic", help="Of a row.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Threads.")
@click.option("--rescale/--no-rescale", default=True, help="Fit in units in which the network's rows fit the cap.")
@click.option("--rows", type=click.Path(file_okay=False, path_type=Path), help="Folder that keeps finished rows.")
@click.option("--report", "page", type=ReportPath(), help="Write the report as a page (.html) or as .json.")
@click.option("-o", "--out", type=PagePath(".safetensors"), required=True, help="File to write.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
def sparsify(
    network: str,
    data: str,
    test: str | None,
    samples: int,
    rows: Path | None,
    page: Path | None,
    out: Path,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Fit a sparse implicit model with a certificate to a trained network.

    The network's states are recorded on the data, and the rows of (A, B) are fitted to them. DATA is a set, a part
    of one (digits:holdout), or a .npz, .npy, .safetensors or .pt file with inputs u and, for the score, targets y.
    Finished rows are kept on disk until the model is written: the same command goes on from there.
    """
    kept = Path(f"{out}.rows") if rows is None else rows
    found = read_samples(data).drawn(samples)
    unseen = _unseen(data, test)
    built = _network(network)
    try:
        with refused(), progress(quiet) as bar:
            states = _recorded(built, found)
            work = StateFit(targets=found.targets, folder=kept, progress=bar, **options)
            with threads_for(max(states.X.shape[1], states.U.shape[1])):
                result = _scored(built, work.fit(states), found.source, unseen)
    except KeyboardInterrupt:
        click.echo(f"finished rows are kept in {kept}; the same command goes on from there", err=True)
        raise
    save_certified(result.model, out, _gaps(result, states, options))
    if rows is None:
        shutil.rmtree(kept, ignore_errors=True)
    _tell(result, states, out, page, as_json)


def _gaps(result: Result, states: States, options: dict[str, Any]) -> list[Claim]:
    """Claims the gaps of the rows where they minimise the misfit alone, unless checking them would take long."""
    n, p = states.X.shape[1], states.U.shape[1]
    target, mask = options.get("target_sparsity"), support_mask(states, options["support"])
    debiased = target is not None
    if (options["objective"] != "none" and not debiased) or n * (n + p) * min(
        len(states.U), 2 * n + p
    ) > LARGEST_PROOF:
        return []
    own = debiased and is_feedforward(mask, states.blocks)
    return [gap_claim(result.model, result.report, states, None if debiased else mask, own=own)]


def _unseen(data: str, test: str | None) -> Samples | None:
    if test is not None:
        return read_samples(test, "--test", "test")
    name = _set_of(data)
    return read_samples(f"{name}:test", "--test") if name and not data.endswith(":test") else None


def _set_of(data: str) -> str | None:
    """Returns the name of the set that DATA is or is a part of; None for a file."""
    name = data.partition(":")[0]
    return name if ALIASES.get(name.lower(), name.lower()) in SETS else None


def _network(source: str) -> nn.Module | ImplicitForm:
    """Reads the network; an exported program becomes its form."""
    try:
        found: Network = read_source(source)
    except click.BadParameter as error:
        error.param_hint = "--network"
        raise
    if isinstance(found, nn.Module):
        return found.eval()
    with refused():
        return to_implicit(found, _example(found, source))


def _example(program: ExportedProgram, source: str) -> tuple[int, ...]:
    given = program.example_inputs[0] if program.example_inputs else ()
    if not given or not isinstance(given[0], Tensor):
        raise wrong(f"{source!r} has no example input, so the shape of a sample is not known", "--network")
    return tuple(given[0].shape[1:])


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows how many rows are done, on stderr if that is a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=quiet or not console.is_interactive) as bar:
        task = bar.add_task("rows", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _recorded(network: nn.Module | ImplicitForm, found: Samples) -> States:
    return record_states(network, _shaped(network, found).split(BATCH))


def _shaped(network: nn.Module | ImplicitForm, found: Samples) -> Tensor:
    """Returns the inputs in the shape and precision that the network takes: as they are, or one row a sample."""
    if isinstance(network, ImplicitForm):
        size, shape = found.u[0].numel(), network.input_shape
        if size != network.sizes[1]:
            raise InputError(
                f"the network takes samples of the shape {shape}; received {tuple(found.u.shape[1:])}"
            )
        return found.u.reshape(-1, *shape).to(network.dtype)
    values = (*network.parameters(), *network.buffers())
    kind = next((value.dtype for value in values if value.is_floating_point()), found.u.dtype)
    u, complaints = found.u.to(kind), []
    for candidate in (u, u.flatten(1)):
        try:
            with torch.no_grad():
                first_tensor(network(candidate[:2]))
            return candidate
        except InputError:
            raise
        except Exception as error:  # whatever a network raises on a shape it does not take
            complaints.append((str(error).strip().splitlines() or [type(error).__name__])[0])
    raise InputError(
        f"the network takes neither samples of the shape {tuple(u.shape[1:])} nor of {u[0].numel()} numbers: "
        f"{complaints[-1]}"
    )


def _scored(
    network: nn.Module | ImplicitForm,
    fitted: tuple[ImplicitModel, FitReport],
    source: str,
    unseen: Samples | None,
) -> Result:
    model, report = fitted
    if unseen is None or unseen.targets is None:
        return Result(model, report, source)
    u = _shaped(network, unseen)
    with torch.no_grad():
        pieces = u.split(BATCH)
        before = torch.cat([first_tensor(network(piece)).flatten(1) for piece in pieces])
        after = torch.cat([model(piece.flatten(1).to(model.B)) for piece in pieces])
    name, old = scored(before, unseen.targets)
    return Result(model, report, source, unseen.source, name, old, scored(after, unseen.targets)[1])


def summary(result: Result) -> Table:
    """Lays out what changed from network to model, always at the model's own equilibrium."""
    table = Table(box=box.SIMPLE)
    for name in ("", "network", "model"):
        table.add_column(name, justify="left" if not name else "right")
    for line in _compared(result):
        table.add_row(*line)
    return table


def _compared(result: Result) -> list[list[str]]:
    report, lines = result.report, []
    scores = [(report.score, "the samples fitted", report.before, report.after)]
    scores.append((result.score, "unseen samples", result.before, result.after))
    for score, where, before, after in scores:
        if score is not None and before is not None and after is not None:
            lines.append([f"{score}, {where}", *(_shown(score, value) for value in (before, after))])
    lines.append(["output off by", "", f"{report.output_error:.2e}"])
    lines.append(["zeros in (A, B)", "", f"{100 * report.sparsity:.1f} %"])
    lines.append(["largest relative gap of a row", "", f"{float(report.relative_gap.max()):.1e}"])
    lines.append(["well-posed", "", "proven" if report.certificate.holds else "not proven"])
    return lines


def _shown(score: str, value: float) -> str:
    return f"{100 * value:.2f} %" if score == "accuracy" else f"{value:.4g}"


def _tell(result: Result, states: States, out: Path, page: Path | None, as_json: bool) -> None:
    if states.form is None:
        click.echo("the network has no implicit form: what lies between its activations was taken to be linear",
                   err=True)  # fmt: skip
    if page is not None:
        _write(page, result, out)
    if as_json:
        click.echo(json.dumps(result.facts(out), indent=2))
    else:
        print_table(result.report.table())
        print_table(summary(result))
    written = f"wrote {out}" if page is None else f"wrote {out} and {page}"
    click.echo(f"{written}; next: model = wellposed.load({str(out)!r}); y = model(u.flatten(1))", err=True)


def _write(page: Path, result: Result, out: Path) -> None:
    text = json.dumps(result.facts(out), indent=1) + "\n" if page.suffix.lower() == ".json" else _page(result, out)
    try:
        with written_whole(page) as place:
            place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {page} ({os.strerror(error.errno or 0)})") from error


def _page(result: Result, out: Path) -> str:
    """Writes the report as a page."""
    report = result.report
    about = (
        "A gap is how far a row can at most be from the best one, relative; the residual refers to the states "
        "that were fitted, the own error to the equilibrium of the model itself."
    )
    body = [
        element("div", _pictures(result), class_="figures"),
        element("h2", "From the network to the model"),
        markup_table(["", "network", "model"], _compared(result)),
        element("h2", "Layer by layer"),
        element("p", about, class_="quiet"),
        markup_table(list(LAYERS), report.rows()),
    ]
    if report.notes:
        body += [element("h2", "Notes"), element("ul", [element("li", note) for note in report.notes])]
    steps = [
        Step("Have it proven by the independent checker.", f"wellposed verify {out}"),
        Step("Look at its blocks.", f"wellposed show {out}"),
    ]
    if set_name := _set_of(click.get_current_context().params["data"]):
        steps.append(
            Step("Prove how far its inputs can move.", f"wellposed certify --model {out} --data {set_name}")
        )
    return markup_page(
        "How much of the network is needed?",
        body,
        lead=[element("p", text) for text in _findings(result)],
        facts=[f"fitted to {result.source}", f"written to {out}", f"well-posed: {report.certificate}"],
        command=typed_command(),
        steps=steps,
    )


def _pictures(result: Result) -> list[Html]:
    report, n = result.report, sum(result.report.blocks)
    with torch.no_grad():
        A, B = result.model.A[:n, :n].cpu().numpy(), result.model.B[:n].cpu().numpy()
    names = [f"layer {line[0]}, {line[1]}" for line in report.rows()]
    parts = report.nonzeros.split(list(report.blocks))
    left = {name: float(part.sum()) for name, part in zip(names, parts, strict=True)}
    shown = {name: f"{int(value):,} weights" for name, value in left.items()}
    caption = "Blue above zero, orange below, empty at zero; lines between layers, the last layer first."
    return [
        figure(matrix_chart(A, B, report.blocks, "A and B of the fitted model"), caption),
        figure(bar_chart(left, "Weights that are left", shown), "Weights of A and B that are left, by layer."),
    ]


def _findings(result: Result) -> list[str]:
    report = result.report
    found = [
        f"{percent(report.sparsity)} of the weights in A and B are zero: {int(report.nonzeros.sum()):,} of "
        f"{report.allowed:,} are left, and no row is farther than {float(report.relative_gap.max()):.1e} from the "
        "best one, relative."
    ]
    if result.score is not None and result.before is not None and result.after is not None:
        before, after = (_shown(result.score, value) for value in (result.before, result.after))
        found.append(f"{result.score.capitalize()} on unseen samples: {before} before, {after} after.")
    proven = "proven" if report.certificate.holds else "not proven"
    return [*found, f"That every input has exactly one equilibrium is {proven}."]
