"""`wellposed certify`: which samples provably keep their class, and which an attack changes."""

import contextlib
import json
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

from wellposed.cli.inputs import Epsilon, Labelled, PagePath, RefusedError, read_labelled, refused, write_file
from wellposed.cli.robust_pages import Heading, certificate_page
from wellposed.cli.terminal import print_table
from wellposed.errors import IllPosedError, unknown_name
from wellposed.forms import ImplicitForm
from wellposed.robust import METHODS
from wellposed.robust.certification import WIDTHS, Examination, Radius, examine_radii, output_widths
from wellposed.workers import threads_for

WIDTH_SAMPLES = 8
RADII = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)  # of an input range of one, where none is given
COMPLETE = 60.0  # seconds of branch and bound for a sample, unless told
SLOW = ("optimised", "lp", "triangle")  # take long on large forms
LARGE = 2000  # states above which the slow methods are left out of the comparison


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

    def facts(self) -> dict[str, Any]:
        """Returns everything as plain numbers and texts."""
        about = {"model": self.given.name, "data": self.given.source, "samples": len(self.given.u)}
        radii = [one.facts() for one in self.radii]
        return {**about, "method": self.method, "seconds": self.seconds, "radii": radii}

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


@click.command()
@click.option("--model", required=True, metavar="SOURCE", help="A file, module:factory or reference:NAME.")
@click.option("--data", required=True, metavar="DATA", help="A set (digits, mnist, fashion, cifar10) or a file.")
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
    help="Seconds for the bounds of 50 samples; with --complete, of every sample left open.",
)
@click.option("--widths/--no-widths", default=True, help="Compare the widths of all methods.")
@click.option("--out", type=PagePath(".html"), default="certify.html", help="Page to write.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
def certify(
    model: str,
    data: str,
    epsilons: tuple[float, ...],
    method: str,
    samples: int,
    valid: tuple[float, float],
    steps: int,
    complete: bool,
    budget: float | None,
    widths: bool,
    out: Path,
    quiet: bool,
    as_json: bool,
) -> None:
    """Prove which samples keep their class on a box, and attack the rest.

    Every input may move by epsilon, within the valid range; without --epsilon several radii are tried. DATA is a
    set or a part of one (digits:holdout; its test part if none is named), or a .npz, .npy, .safetensors or .pt
    file with inputs u and classes y. A sample is certified if the bounds prove its class; attacked accuracy is
    what projected gradients leave.
    """
    given = read_labelled(model, data, samples, valid)
    wanted = sorted(set(epsilons or [radius * (valid[1] - valid[0]) for radius in RADII]))
    start = time.monotonic()
    with _bounded(), progress(len(wanted) * len(given.u), quiet) as tell:
        form = given.form()
        options: dict[str, Any] = {"valid": valid, "budget": None if complete else budget}
        seconds = (COMPLETE if budget is None else budget) if complete else None
        with threads_for(max(form.sizes)):
            examination = examine_radii(
                given.model, form, given.u, given.target, wanted, method=method, steps=steps, complete=seconds,
                tell=tell, **options,
            )  # fmt: skip
            radii = _measured(form, given, examination, options) if widths else examination.radii
    result = Certificate(given, method, radii, min(WIDTH_SAMPLES, len(given.u)), time.monotonic() - start)
    heading = _heading(result, form.sizes, valid, out, seconds)
    write_file(out, certificate_page(heading, examination, radii, method, result.width_samples))
    if as_json:
        click.echo(json.dumps({**result.facts(), "page": str(out)}, indent=2))
    else:
        print_table(result.table())
    if not quiet:
        click.echo(f"{result.seconds:.0f} s; now open {out}", err=True)


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
