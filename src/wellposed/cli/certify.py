"""`wellposed certify`: which samples provably keep their class, which an attack changes, which properties hold.

What is proven is appended to a journal beside the page, so that a run which was interrupted goes on with --resume.
"""

import contextlib
import hashlib
import json
import math
import time
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
from torch import Tensor

from wellposed.atomic import Journal
from wellposed.cli.inputs import (
    Classifier,
    Epsilon,
    Labelled,
    PagePath,
    RefusedError,
    read_classifier,
    read_labelled,
    refused,
    write_file,
    wrong,
)
from wellposed.cli.robust_pages import Heading, certificate_page
from wellposed.cli.terminal import print_table
from wellposed.data.vnnlib import Property, read_property
from wellposed.errors import FileFormatError, IllPosedError, InputError, unknown_name
from wellposed.forms import ImplicitForm
from wellposed.forms.operators.base import tensors
from wellposed.models import ImplicitModel
from wellposed.models.io.onnx_network import OnnxNetwork
from wellposed.robust import METHODS
from wellposed.robust.certification import (
    WIDTHS,
    Examination,
    Forbidden,
    Radius,
    decide,
    examine_radii,
    output_widths,
)
from wellposed.robust.query import BRANCH
from wellposed.workers import threads_for

WIDTH_SAMPLES = 8
RADII = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)  # of an input range of one, where none is given
COMPLETE = 60.0  # seconds of branch and bound for a sample, unless told
SLOW = ("optimised", "lp", "triangle")  # take long on large forms
LARGE = 2000  # states above which the slow methods are left out of the comparison
NO_CERTIFICATE = f"no certificate proves that equilibria are unique: what is proven is {BRANCH} of each box"


class MethodName(click.ParamType):
    """The name of a method, corrected when mistyped."""

    name = "method"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Checks the name."""
        if value not in METHODS:
            self.fail(str(unknown_name("method", value, METHODS)), param, ctx)
        return value


@dataclass(frozen=True, eq=False)
class Certificate:
    """All results."""

    given: Labelled
    method: str
    radii: list[Radius]
    width_samples: int
    seconds: float
    branch: bool

    def facts(self) -> dict[str, Any]:
        """Returns everything as plain numbers and texts."""
        about: dict[str, Any] = {"model": self.given.name, "data": self.given.source, "samples": len(self.given.u)}
        radii = [one.facts() for one in self.radii]
        about |= {"method": self.method, "seconds": self.seconds, "radii": radii}
        return {**about, "branch": BRANCH} if self.branch else about

    def table(self) -> Table:
        """Lays out the accuracies, one line a radius."""
        table = Table(box=box.SIMPLE)
        for name in ("epsilon", "clean", "certified", "attacked (PGD)", "open"):
            table.add_column(name, justify="right")
        for one in self.radii:
            shares = [one.share(name) for name in ("clean", "certified", "attacked")]
            cells = (f"{100 * value:.1f} %" for value in (*shares, shares[2] - shares[1]))
            table.add_row(f"{one.epsilon:g}", *cells)
        return table


def _not_nan(_: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Refuses what is in every range, as no comparison with it holds."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("a number of seconds is needed, which nan is not", param=param)
    return value


@click.command()
@click.argument("network", required=False, metavar="[SOURCE]")
@click.option("--model", metavar="SOURCE", help="A file, module:factory or reference:NAME; or as the argument.")
@click.option("--data", metavar="DATA", help="A set (digits, mnist, fashion, cifar10) or a file.")
@click.option(
    "--property", "properties", type=click.Path(path_type=Path), multiple=True, metavar="FILE",
    help="A property to prove, in VNN-LIB, instead of data; repeat for more.",
)  # fmt: skip
@click.option(
    "--epsilon", "epsilons", type=Epsilon(), multiple=True, show_default="several", help="Radius; repeat for more."
)
@click.option("--method", type=MethodName(), default="best", help=f"Of the bounds: {', '.join(METHODS)}.")
@click.option("--samples", type=click.IntRange(min=1), default=200, help="How many are drawn from the data.")
@click.option("--range", "valid", type=float, nargs=2, default=(0.0, 1.0), help="Of valid inputs.")
@click.option("--steps", type=click.IntRange(min=1), default=40, help="Of the attack.")
@click.option("--complete", is_flag=True, help="Decide what is left open by branch and bound (ReLU).")
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    callback=_not_nan,
    help="Seconds for the bounds of 50 samples; with --complete, of every sample left open; of every property.",
)
@click.option("--resume", is_flag=True, help="Go on where an interrupted run with --complete ended.")
@click.option("--widths/--no-widths", default=True, help="Compare the widths of all methods.")
@click.option("--out", type=PagePath(".html"), default="certify.html", help="Page to write.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
def certify(
    network: str | None, model: str | None, data: str | None, properties: tuple[Path, ...],
    epsilons: tuple[float, ...], method: str, samples: int, valid: tuple[float, float], steps: int, complete: bool,
    budget: float | None, resume: bool, widths: bool, out: Path, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Prove which samples keep their class on a box, and attack the rest.

    SOURCE is a file (.safetensors, .pt2, .onnx), module:factory or reference:NAME. Every input may move by
    epsilon, within the valid range; without --epsilon several radii are tried. DATA is a set or a part of one
    (digits:holdout; its test part if none is named), or a .npz, .npy, .safetensors or .pt file with inputs u and
    classes y. A sample is certified if the bounds prove its class; attacked accuracy is what projected gradients
    leave. --property asks about a property of the network instead, and writes no page.
    """
    source = _one_source(network, model)
    if properties:
        if data is not None or epsilons:
            raise click.UsageError("a property says which inputs are meant: leave --data and --epsilon out")
        return _certify_properties(source, properties, complete, budget, resume, out, quiet, as_json)
    if data is None:
        raise click.UsageError("Missing option '--data' (or '--property').")
    given = read_labelled(source, data, samples, valid)
    wanted = sorted(set(epsilons or [radius * (valid[1] - valid[0]) for radius in RADII]))
    start = time.monotonic()
    with _bounded(), progress(len(wanted) * len(given.u), quiet) as tell:
        form = given.form()
        options: dict[str, Any] = {"valid": valid, "budget": None if complete else budget}
        seconds = (COMPLETE if budget is None else budget) if complete else None
        about = {"method": method, "range": list(valid), "steps": steps, "samples": _digest(given.u, given.target)}
        journal = (
            _journal(out, {"model": _digest_of(given.model), **about}, resume) if complete or resume else None
        )
        with _resumable(journal), threads_for(max(form.sizes)):
            examination = examine_radii(
                given.model, form, given.u, given.target, wanted, method=method, steps=steps, complete=seconds,
                known=journal, tell=tell, **options,
            )  # fmt: skip
            radii = _measured(form, given, examination, options) if widths else examination.radii
    spent, few = time.monotonic() - start, min(WIDTH_SAMPLES, len(given.u))
    result = Certificate(given, method, radii, few, spent, examination.branch)
    heading = _heading(result, form.sizes, valid, out, seconds)
    write_file(out, certificate_page(heading, examination, radii, method, result.width_samples))
    if as_json:
        click.echo(json.dumps({**result.facts(), "page": str(out)}, indent=2))
    else:
        print_table(result.table())
        if result.branch:
            click.echo(f"{NO_CERTIFICATE}.")
    if not quiet:
        click.echo(f"{result.seconds:.0f} s; now open {out}", err=True)


def _one_source(network: str | None, model: str | None) -> str:
    if network is not None and model is not None:
        raise click.UsageError(f"two networks were given, {network!r} and {model!r}; give one")
    source = model if network is None else network
    if source is None:
        raise click.UsageError("Missing option '--model'.")
    return source


def _journal(out: Path, about: dict[str, Any], resume: bool) -> Journal:
    try:
        return Journal(out.with_suffix(".proofs.jsonl"), about, resume)
    except (InputError, FileFormatError) as error:
        raise RefusedError(f"{error} (leave --resume out, or give another --out)") from error


@contextlib.contextmanager
def _resumable(journal: Journal | None) -> Iterator[None]:
    """Says after Ctrl-C where the finished proofs are."""
    try:
        yield
    except KeyboardInterrupt:
        if journal:
            click.echo(f"finished proofs are in {journal.path}; the same command with --resume goes on", err=True)
        raise


def _digest(*values: Tensor) -> str:
    """Returns a checksum of tensors and their shapes."""
    total = hashlib.sha256()
    for value in values:
        total.update(f"{value.dtype} {tuple(value.shape)}".encode())
        total.update(value.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def _digest_of(model: Classifier) -> str:
    if isinstance(model, ImplicitForm):
        pieces = [*(value for part in (model.A, model.B, model.C, model.D) for value in tensors(part))]
        pieces += [value for value in (model.bias, model.output_bias) if value is not None]
        return _digest(*pieces)
    return _digest(*model.state_dict().values())


def _certify_properties(
    source: str, paths: tuple[Path, ...], complete: bool, budget: float | None, resume: bool, out: Path,
    quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Decides every property, and prints what is known of them."""
    properties = [_read_property(path) for path in paths]
    model = read_classifier(source)
    seconds = COMPLETE if budget is None else budget
    about = {"model": _digest_of(model), "complete": complete}
    journal, rows = _journal(out, about, resume), []
    with _bounded(), _resumable(journal), progress(len(paths), quiet) as tell:
        for path, one in zip(paths, properties, strict=True):
            key = hashlib.sha256(path.read_bytes()).hexdigest()
            if key not in journal or (journal[key]["status"] == "undecided" and journal[key]["budget"] < seconds):
                start = time.monotonic()
                facts = _decided_property(model, one, seconds, complete)
                journal[key] = {**facts, "seconds": round(time.monotonic() - start, 3), "budget": seconds}
            rows.append({"property": str(path), **journal[key]})
            tell(1)
    if as_json:
        click.echo(json.dumps({"model": source, "complete": complete, "properties": rows}, indent=2))
        return
    table = Table(box=box.SIMPLE)
    for name in ("property", "status", "gap", "parts", "seconds"):
        table.add_column(name, justify="left" if name in ("property", "status") else "right")
    for row in rows:
        gap = "" if row["gap"] is None else f"{row['gap']:.4g}"
        table.add_row(row["property"], row["status"], gap, str(row["nodes"]), f"{row['seconds']:.2f}")
    print_table(table)
    if any("branch" in row for row in rows):
        click.echo(f"{NO_CERTIFICATE}.")


def _read_property(path: Path) -> Property:
    if not path.is_file():
        raise wrong(f"there is no file {str(path)!r}", "--property")
    try:
        return read_property(path)
    except FileFormatError as error:
        raise wrong(str(error), "--property") from error


def _decided_property(model: Classifier, asked: Property, seconds: float, complete: bool) -> dict[str, Any]:
    """Decides one property; a counter-example counts only if the model itself gives such outputs."""
    if isinstance(model, ImplicitForm | OnnxNetwork):
        shape = model.input_shape
    else:
        shape = (model.in_features if isinstance(model, ImplicitModel) else asked.inputs,)
    if math.prod(shape) != asked.inputs:
        raise RefusedError(f"{asked.name} declares {asked.inputs} inputs; the network takes {math.prod(shape)}")
    values = () if isinstance(model, ImplicitForm) else (*model.parameters(), *model.buffers())
    kinds = [value.dtype for value in values if value.is_floating_point()]
    dtype = model.dtype if isinstance(model, ImplicitForm) else (*kinds, torch.float32)[0]
    try:
        sets = asked.forbidden(shape, dtype)
    except FileFormatError as error:
        raise wrong(str(error), "--property") from error
    try:
        verdict = decide(model, sets, seconds, complete)
    except InputError as error:
        raise RefusedError(f"{asked.name}: {error}") from error
    facts = verdict.facts()
    if verdict.input is not None and not any(_leads_into(model, one, verdict.input) for one in sets):
        facts |= {"status": "undecided", "input": None}
    return facts


@torch.no_grad()
def _leads_into(model: Classifier, forbidden: Forbidden, point: Tensor) -> bool:
    """Asks the model itself about a counter-example of its form."""
    inputs = forbidden.inputs
    u = point.to(inputs.lower).clamp(inputs.lower, inputs.upper)
    y = model(u.reshape(1, *inputs.sample_shape)).double()
    near = torch.allclose(u.double(), point.double(), rtol=1e-6, atol=1e-6)
    return near and bool((y @ forbidden.rows.mT + forbidden.offset >= 0).all())


def _measured(
    form: ImplicitForm, given: Labelled, examination: Examination, options: dict[str, Any]
) -> list[Radius]:
    """Adds the widths of the bounds by every method that does not take too long."""
    methods = [name for name in WIDTHS if name not in SLOW or form.sizes[0] <= LARGE]
    measured = []
    for one in examination.radii:
        widths = output_widths(given.model, given.u[:WIDTH_SAMPLES], one.epsilon, methods=methods, **options)
        measured.append(Radius(one.epsilon, one.clean, one.attacked, one.certified, *widths))
    return measured


def _heading(
    result: Certificate, sizes: tuple[int, int, int], valid: tuple[float, float], out: Path, complete: float | None
) -> Heading:
    n, p, q = sizes
    given = result.given
    kind = str(given.u.dtype).removeprefix("torch.")
    about = [
        f"{n:,} states, {p:,} inputs in [{valid[0]:g}, {valid[1]:g}] and {q:,} outputs, in {kind}",
        f"{result.seconds:.0f} seconds with torch {torch.__version__}",
    ]
    about += [NO_CERTIFICATE] if result.branch else []
    radii = " ".join(f"--epsilon {one.epsilon:g}" for one in result.radii)
    command = f"wellposed certify --model {given.name} --data {given.data} {radii} --method {result.method}"
    if complete is not None:
        about.append(f"branch and bound had up to {complete:g} seconds for every sample that bounds left open")
        command += f" --complete --budget {complete:g}"
    return Heading(given, about, f"{command} --samples {len(given.u)} --out {out}", valid)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Turns a form or a method that cannot be used into one line and the exit code 2."""
    try:
        with refused():
            yield
    except IllPosedError as error:
        raise RefusedError(str(error)) from error


@contextlib.contextmanager
def progress(total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Shows how many samples are done, on stderr if that is a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=quiet or not console.is_interactive) as bar:
        task = bar.add_task("samples", total=total)
        yield lambda count: bar.advance(task, count)
