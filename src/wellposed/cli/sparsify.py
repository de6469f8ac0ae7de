"""`wellposed sparsify`: from a trained network to a sparse, certified implicit model."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from wellposed.atomic import atomic_write
from wellposed.cli.inputs import (
    ALIASES,
    SETS,
    PagePath,
    Samples,
    read_classifier,
    read_samples,
    refused,
    widest_layer,
)
from wellposed.cli.stored import Sizes, save_certified, sizes_of
from wellposed.cli.terminal import print_table, typed_command
from wellposed.convert import to_implicit
from wellposed.convex import (
    ROW_SOLVERS,
    FitReport,
    PositionSampler,
    SharedReport,
    States,
    fit_shared,
    fit_states,
    record_states,
    shared_layers,
)
from wellposed.convex.assemble import DENSE, sparse_form
from wellposed.convex.claims import gap_claim, with_claimed_gaps
from wellposed.convex.matching import OBJECTIVES
from wellposed.convex.report import scored
from wellposed.convex.rows import SUPPORTS, is_feedforward, support_mask
from wellposed.convex.states import first_tensor
from wellposed.errors import InputError
from wellposed.forms import ImplicitForm
from wellposed.forms.operators.entries import LARGEST_DENSE
from wellposed.forms.storage import registered_name
from wellposed.models import ImplicitModel
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

    model: ImplicitModel | ImplicitForm
    report: FitReport | SharedReport
    source: str
    network: Sizes
    stored: Sizes
    test: str | None = None
    score: str | None = None
    before: float | None = None
    after: float | None = None

    def facts(self, out: Path) -> dict[str, Any]:
        """Returns everything as plain numbers and texts."""
        test = {"source": self.test, "score": self.score, "before": self.before, "after": self.after}
        sizes = {"network": self.network._asdict(), "model": self.stored._asdict()}
        about = {"file": str(out), "data": self.source, "test": test if self.test else None, "sizes": sizes}
        return {**about, **self.report.facts()}


@click.command()
@click.option("--network", required=True, metavar="SOURCE", help="A file, module:factory or reference:NAME.")
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
@click.option("--shared/--no-shared", default=None, help="Fit a filter once for all positions, as is the default.")
@click.option("--gaps", is_flag=True, help="Prove the gaps of rows, by data in the certificate.")
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
    shared: bool | None,
    gaps: bool,
    rows: Path | None,
    page: Path | None,
    out: Path,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Fit a sparse implicit model with a certificate to a trained network.

    The network's states are recorded on the data, and the rows of (A, B) are fitted to them; of a network with
    convolutions, the filters. SOURCE is model.pt2, a model or form that `wellposed.save` wrote, module:factory,
    file.py:factory or reference:NAME. DATA is a set, a part of one (digits:holdout), or a .npz, .npy, .safetensors
    or .pt file with inputs u and, for the score, targets y. Finished rows are kept on disk until the model is
    written: the same command goes on from there.
    """
    row_folder = Path(f"{out}.rows") if rows is None else rows
    given = read_samples(data).drawn(samples)
    name = _set_of(data)
    unseen = None if test is None else read_samples(test, "--test", "test")
    if test is None and name and not data.endswith(":test"):
        unseen = read_samples(f"{name}:test", "--test")
    classifier = read_classifier(network, "--network")
    built = classifier.form() if isinstance(classifier, ImplicitModel) else classifier
    before = sizes_of(built)
    with refused():
        _check_score(built, given, unseen)
        filters = _filters(built, given, shared, {**options, "rows": rows, "gaps": gaps})
    model: ImplicitModel | ImplicitForm
    report: FitReport | SharedReport
    if filters and isinstance(built, nn.Module):
        with refused(), threads_for(widest_layer(built, _shaped(built, given))):
            model, report = _fitted_filters(built, given, filters, options, quiet=quiet)
        save_certified(model, out)
    else:
        model, report = _fitted_rows(built, given, row_folder, out, options, quiet=quiet, gaps=gaps)
        if rows is None:
            shutil.rmtree(row_folder, ignore_errors=True)
    result = Result(model, report, given.source, before, sizes_of(model, out))
    _tell(_scored(built, result, unseen), out, page, as_json)


def _fitted_rows(
    network: nn.Module | ImplicitForm,
    given: Samples,
    row_folder: Path,
    out: Path,
    options: dict[str, Any],
    *,
    quiet: bool,
    gaps: bool,
) -> tuple[ImplicitModel | ImplicitForm, FitReport]:
    """Fits every row by itself and saves the model."""
    try:
        with refused(), progress(quiet) as bar:
            states = _recorded(network, given, options, gaps=gaps)
            with threads_for(max(states.X.shape[1], states.U.shape[1])):
                model, report = fit_states(
                    states, targets=given.targets, folder=row_folder, progress=bar, **options
                )
    except KeyboardInterrupt:
        click.echo(f"finished rows are in {row_folder}; the same command goes on from there", err=True)
        raise
    claims = []
    if gaps:
        debiased, mask = options["target_sparsity"] is not None, support_mask(states, options["support"])
        own = debiased and is_feedforward(mask, states.blocks)
        claims.append(gap_claim(model, report, states, None if debiased else mask, own=own))
    stored = _as_stored(model, report)
    save_certified(stored, out, claims)
    return stored, with_claimed_gaps(report, claims[0]) if claims else report


def _as_stored(model: ImplicitModel, report: FitReport) -> ImplicitModel | ImplicitForm:
    """Returns a form of the non-zero entries, which is evaluated without forming A.

    With loops, up to `LARGEST_DENSE` states, it stays a model: the compiled kernels, which read A by its non-zero
    entries too, need a sixteenth of the form's time (400 to 4000 states, 5 to 10 % of the entries). Only a model
    has a certificate for loops through an activation that acts on blocks of states.
    """
    form = sparse_form(model, report.blocks)
    if not form.order.loops:
        return form
    with torch.no_grad():
        is_sparse = int(model.A.count_nonzero()) <= DENSE * model.A.numel()
    is_large = model.state_features > LARGEST_DENSE
    return form if is_large and is_sparse and all(phi.componentwise for phi in form.activations) else model


ROWS_ONLY = ("objective", "strength", "bound", "support", "solver", "rows", "gaps")  # what filters have not


def _filters(
    network: nn.Module | ImplicitForm, data: Samples, asked: bool | None, options: dict[str, Any]
) -> list[str]:
    """Names the layers that are fitted once for all positions; none where rows are fitted one by one.

    That takes convolutions, an implicit form without loops, and no option that is about rows.
    """
    given = [name for name in ROWS_ONLY if _from_command_line(name) and options[name] is not None]
    if asked is False or (asked is None and given):
        return []
    try:
        if given:
            raise InputError(f"--{given[0]} is about rows that are fitted one by one")
        if not isinstance(network, nn.Module) or not any(
            isinstance(part, nn.Conv2d) for part in network.modules()
        ):
            raise InputError("the network is no module with convolutions")
        u = _shaped(network, data)[:2]
        layers = {name: layer for name, layer in shared_layers(network).items() if _can_be_fitted(layer)}
        if to_implicit(network, tuple(u.shape[1:])).order.loops:
            raise InputError("the network has loops, which need the cap on rows")
        PositionSampler(samples=2).run(network, layers, [u])
    except InputError as error:
        if asked:
            raise InputError(
                f"filters cannot be fitted once for all positions: {error}; leave --shared out"
            ) from error
        return []
    return list(layers)


def _from_command_line(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source not in (None, click.core.ParameterSource.DEFAULT)


def _can_be_fitted(layer: nn.Module) -> bool:
    return not isinstance(layer, nn.Conv2d) or (
        layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    )


def _fitted_filters(
    network: nn.Module, given: Samples, layers: list[str], options: dict[str, Any], *, quiet: bool
) -> tuple[ImplicitForm, SharedReport]:
    """Fits filters, and returns the network with them as a form, in units that keep a cap that is asked for."""
    kappa, target = options["kappa"], options["target_sparsity"]
    if not 0 < kappa < 1:
        raise InputError(f"kappa must lie strictly between 0 and 1; received {kappa}")
    u = _shaped(network, given)
    try:
        with progress(quiet, "layers") as bar:
            twin, report = fit_shared(network, u.split(BATCH), layers=layers, target_sparsity=target, progress=bar)
    except KeyboardInterrupt:
        click.echo("interrupted: filters fitted so far are not stored; the same command starts again", err=True)
        raise
    form = to_implicit(twin, tuple(u.shape[1:]))
    if options["rescale"] and _from_command_line("kappa"):  # without loops it is well-posed in any units
        form = form.rescale(kappa)
    with torch.no_grad():
        wanted, y = _outputs(network, u), _outputs(form, u)
    error = float((y.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-300))
    facts: dict[str, Any] = {"output_error": error, "certificate": form.certificate()}
    if given.targets is not None:
        name, before = scored(wanted, given.targets)
        facts |= {"score": name, "before": before, "after": scored(y, given.targets)[1]}
    return form, replace(report, **facts)


def _outputs(network: nn.Module | ImplicitForm, u: Tensor) -> Tensor:
    return torch.cat([first_tensor(network(piece)).flatten(1) for piece in u.split(BATCH)])


def _check_score(network: nn.Module | ImplicitForm, fitted: Samples, unseen: Samples | None) -> None:
    """Checks before the work that outputs can be compared with the targets."""
    for given in (fitted, unseen):
        if given is not None and given.targets is not None:
            with torch.no_grad():
                y = _outputs(network, _shaped(network, Samples(given.u[:2], None, given.source)))
            try:
                scored(y, given.targets[:2])
            except RuntimeError as error:
                raise InputError(
                    f"targets of the shape {tuple(given.targets.shape)} cannot be compared with outputs of the "
                    f"shape {(len(given.u), *y.shape[1:])}"
                ) from error


def _check_gaps(states: States, options: dict[str, Any]) -> None:
    """Refuses gaps that no certificate would prove, before the work."""
    n, p = states.X.shape[1], states.U.shape[1]
    if options["objective"] != "none" and options["target_sparsity"] is None:
        raise InputError("--gaps are proven of rows that minimise the misfit alone: leave --objective out")
    products = n * (n + p) * min(len(states.U), 2 * n + p)
    if products > LARGEST_PROOF:
        raise InputError(
            f"--gaps would take {products:.1e} products to check; at most {LARGEST_PROOF:.0e} are made"
        )


def _set_of(data: str) -> str | None:
    """Returns the name of the set that DATA is or is a part of; None for a file."""
    name = data.partition(":")[0]
    return name if ALIASES.get(name.lower(), name.lower()) in SETS else None


@contextlib.contextmanager
def progress(quiet: bool, units: str = "rows") -> Iterator[Callable[[int, int], None]]:
    """Shows how many rows or layers are done, on stderr if that is a terminal."""
    console = Console(stderr=True)
    columns = TextColumn(units), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=quiet or not console.is_interactive) as bar:
        task = bar.add_task(units, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _recorded(network: nn.Module | ImplicitForm, given: Samples, options: dict[str, Any], *, gaps: bool) -> States:
    """Records states, and checks before the work that what is fitted to them can be stored."""
    states = record_states(network, _shaped(network, given).split(BATCH))
    for phi in states.activations:
        registered_name(phi)
    if gaps:
        _check_gaps(states, options)
    return states


def _shaped(network: nn.Module | ImplicitForm, given: Samples) -> Tensor:
    """Returns the inputs in the shape and precision that the network takes: as they are, or one row a sample."""
    if isinstance(network, ImplicitForm):
        size, shape = given.u[0].numel(), network.input_shape
        if size != network.sizes[1]:
            raise InputError(
                f"the network takes samples of the shape {shape}; received {tuple(given.u.shape[1:])}"
            )
        return given.u.reshape(-1, *shape).to(network.dtype)
    values = (*network.parameters(), *network.buffers())
    kind = next((value.dtype for value in values if value.is_floating_point()), given.u.dtype)
    u, complaints = given.u.to(kind), []
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


def _scored(network: nn.Module | ImplicitForm, result: Result, unseen: Samples | None) -> Result:
    """Adds the score on unseen samples."""
    if unseen is None or unseen.targets is None:
        return result
    u, model = _shaped(network, unseen), result.model
    kind = model.dtype if isinstance(model, ImplicitForm) else model.B.dtype
    with torch.no_grad():
        before, after = _outputs(network, u), _outputs(model, u.flatten(1).to(kind))
    name, old = scored(before, unseen.targets)
    new = scored(after, unseen.targets)[1]
    return replace(result, test=unseen.source, score=name, before=old, after=new)


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
    gone = "zeros in (A, B)" if isinstance(report, FitReport) else "zeros in layers and filters"
    lines.append(["output off by", "", f"{report.output_error:.2e}"])
    lines.append([gone, "", f"{100 * report.sparsity:.1f} %"])
    lines.append(["largest gap of a row, relative to |z|^2/2", "", f"{float(report.relative_gap.max()):.2e}"])
    lines.append(["well-posed", "", "proven" if _is_proven(report) else "not proven"])
    for name, label in (("weights", "weights"), ("nonzeros", "weights that are not zero"), ("bytes", "bytes")):
        lines.append([label, *(f"{getattr(part, name):,}" for part in (result.network, result.stored))])
    proof = result.stored.certificate
    lines.append(["bytes of the certificate", "", f"{proof:,}" if proof else "none"])
    return lines


def _is_proven(report: FitReport | SharedReport) -> bool:
    return report.certificate is not None and report.certificate.holds


def _shown(score: str, value: float) -> str:
    return f"{100 * value:.2f} %" if score == "accuracy" else f"{value:.4g}"


def _tell(result: Result, out: Path, page: Path | None, as_json: bool) -> None:
    report, old, new = result.report, result.network.bytes, result.stored.bytes + result.stored.certificate
    if isinstance(report, FitReport) and report.units == "data":
        click.echo("the network has no implicit form: what lies between its activations was taken to be linear",
                   err=True)  # fmt: skip
    if page is not None:
        _write(page, result, out)
    if as_json:
        click.echo(json.dumps(result.facts(out), indent=2))
    else:
        print_table(report.table())
        print_table(summary(result))
    if new > old:
        click.echo(f"larger than the network: {new:,} bytes with the certificate for {old:,}", err=True)
    written = f"wrote {out}" if page is None else f"wrote {out} and {page}"
    click.echo(f"{written}; next: model = wellposed.load({str(out)!r}); y = model(u.flatten(1))", err=True)


def _write(page: Path, result: Result, out: Path) -> None:
    text = json.dumps(result.facts(out), indent=1) + "\n" if page.suffix.lower() == ".json" else _page(result, out)
    try:
        with atomic_write(page) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {page} ({os.strerror(error.errno or 0)})") from error


def _page(result: Result, out: Path) -> str:
    """Writes the report as a page."""
    report = result.report
    about = (
        "A gap is how far a row can at most be from the best one, relative to |z|^2/2; residual and misfit refer "
        "to the states that were fitted, the own error to the equilibrium of the model itself."
    )
    body = [
        element("div", _pictures(result), class_="figures"),
        element("h2", "From the network to the model"),
        markup_table(["", "network", "model"], _compared(result)),
        element("h2", "Layer by layer"),
        element("p", about, class_="quiet"),
        markup_table(list(report.columns), report.rows()),
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
    report, model = result.report, result.model
    if isinstance(report, SharedReport):
        left = {f"layer {part.name}": float(part.nonzeros.sum()) for part in report.layers}
        shown = {name: f"{int(value):,} weights" for name, value in left.items()}
        return [figure(bar_chart(left, "Weights that are left", shown), "Weights that are left, by layer.")]
    n = sum(report.blocks)
    with torch.no_grad():
        form = model if isinstance(model, ImplicitForm) else model.form()
        A, B = form.A.to_dense()[:n, :n].cpu().numpy(), form.B.to_dense()[:n].cpu().numpy()
    names = [f"layer {line[0]}, {line[1]}" for line in report.rows()]
    layers = report.nonzeros.split(list(report.blocks))
    left = {name: float(layer.sum()) for name, layer in zip(names, layers, strict=True)}
    shown = {name: f"{int(value):,} weights" for name, value in left.items()}
    caption = "Blue above zero, orange below, empty at zero; lines between layers, the last layer first."
    return [
        figure(matrix_chart(A, B, report.blocks, "A and B of the fitted model"), caption),
        figure(bar_chart(left, "Weights that are left", shown), "Weights of A and B that are left, by layer."),
    ]


def _findings(result: Result) -> list[str]:
    report = result.report
    where = "in A and B" if isinstance(report, FitReport) else "in layers and filters"
    sentences = [
        f"{percent(report.sparsity)} of the weights {where} are zero: {int(report.nonzeros.sum()):,} of "
        f"{report.allowed:,} are left, and no row is farther than {float(report.relative_gap.max()):.2e} from the "
        "best one, relative to |z|^2/2."
    ]
    if result.score is not None and result.before is not None and result.after is not None:
        before, after = (_shown(result.score, value) for value in (result.before, result.after))
        sentences.append(f"{result.score.capitalize()} on unseen samples: {before} before, {after} after.")
    proven = "proven" if _is_proven(report) else "not proven"
    return [*sentences, f"That every input has exactly one equilibrium is {proven}."]
