"""The commands of the lab: `wellposed list`, `run`, `resume`, `status` and `report`.

The command line finds them through the entry points of the group `wellposed.commands`.
"""

import json
import shlex
from pathlib import Path

import click
import torch
from click.shell_completion import CompletionItem

from wellposed.cli.terminal import make_folder, print_table
from wellposed.errors import unknown_name
from wellposed.workers import CLUSTERS, cluster
from wellposed_lab.config import SCALES, Scale
from wellposed_lab.engine.derived import with_derived
from wellposed_lab.engine.experiment import all_suites, get_suite
from wellposed_lab.engine.judge import verdicts
from wellposed_lab.engine.runner import Order, orders, progress_of, require_device, run_suite
from wellposed_lab.engine.store import Record, Store, merged
from wellposed_lab.engine.thresholds import checks_of
from wellposed_lab.report import write_report
from wellposed_lab.report.console import (
    state_of,
    status_facts,
    status_table,
    suite_facts,
    suite_table,
    threshold_facts,
    threshold_table,
    verdict_facts,
    verdict_table,
)
from wellposed_lab.report.figures import draw

FOLDER = click.Path(file_okay=False, path_type=Path)


class SuiteName(click.ParamType):
    """The name of a suite, completed by the shell and corrected when mistyped."""

    name = "suite"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Checks the name."""
        if value not in all_suites():
            self.fail(str(unknown_name("suite", value, all_suites())), param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offers the names that begin like this."""
        return [
            CompletionItem(name, help=suite.title)
            for name, suite in all_suites().items()
            if name.startswith(incomplete)
        ]


RESULTS = "wellposed-results"
OUT = click.option("--out", type=FOLDER, default=RESULTS, help="Folder of the results.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
QUIET = click.option("--quiet", is_flag=True, help="Show no progress.")
JOBS = click.option("--jobs", type=click.IntRange(min=1), default=1, help="Processes.")
BACKEND = click.option(
    "--backend",
    type=click.Choice(("loky", *CLUSTERS)),
    default="loky",
    help="loky: here; dask, ray: on a cluster.",
)
CLUSTER = click.option("--cluster", "address", help="Its address; without one it is started here.")


@click.command("list")
@JSON
def list_suites(as_json: bool) -> None:
    """List the suites of experiments and what they reproduce."""
    suites = list(all_suites().values())
    if as_json:
        click.echo(json.dumps(suite_facts(suites), indent=2))
    else:
        print_table(suite_table(suites))
        click.echo("\nrun one with: wellposed run SUITE", err=True)


@click.command()
@click.argument("suites", nargs=-1, required=True, type=SuiteName(), metavar="SUITE...")
@click.option(
    "--scale",
    type=click.Choice(SCALES),
    default="default",
    help="tiny: seconds; paper: as published, or it says what differs.",
)
@click.option("--seeds", type=click.IntRange(min=1), help="How many; the suite's own number if left out.")
@click.option("--only", multiple=True, help="A task or model, or task/model; may hold * and be repeated.")
@click.option("--search", is_flag=True, help="Search settings by 5-fold cross-validation first.")
@click.option("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
@JOBS
@BACKEND
@CLUSTER
@OUT
@QUIET
@JSON
def run(
    suites: tuple[str, ...],
    scale: Scale,
    seeds: int | None,
    only: tuple[str, ...],
    search: bool,
    device: str,
    jobs: int,
    backend: str,
    address: str | None,
    out: Path,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run suites; what is finished is skipped, what was interrupted goes on."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise click.BadParameter("no CUDA device is available here", param_hint="--device")
    wanted = [Order(name, scale, seeds, search, device, only) for name in suites]
    with cluster(backend, address):
        _run(wanted, out, jobs, backend, quiet, as_json)


@click.command()
@JOBS
@BACKEND
@CLUSTER
@OUT
@QUIET
@JSON
def resume(jobs: int, backend: str, address: str | None, out: Path, quiet: bool, as_json: bool) -> None:
    """Go on with everything in a results folder that is not finished."""
    begun = _orders(out)
    if not begun:
        raise click.ClickException(f"nothing was begun in {out}; start with: wellposed run SUITE{_at(out)}")
    with cluster(backend, address):
        _run(begun, out, jobs, backend, quiet, as_json)


@click.command()
@OUT
@JSON
def status(out: Path, as_json: bool) -> None:
    """Show how far the runs of a results folder are."""
    states = [progress_of(get_suite(order.suite), order, out) for order in _orders(out)]
    if as_json:
        click.echo(json.dumps(status_facts(states), indent=2))
    elif states:
        print_table(status_table(states))
        if any(state_of(state) == "unfinished" for state in states):
            click.echo(f"\ngo on with: wellposed resume{_at(out)}", err=True)
    else:
        click.echo(f"nothing was begun in {out}; start with: wellposed run SUITE{_at(out)}", err=True)
    for line in _damage(out):
        click.echo(f"warning: {line}", err=True)


def _at(out: Path) -> str:
    """Returns the option by which a further command finds the same results; nothing if it does by itself."""
    return "" if out == Path(RESULTS) else f" --out {shlex.quote(str(out))}"


def _orders(out: Path) -> list[Order]:
    begun = orders(out)
    for order in begun:
        get_suite(order.suite)
    return begun


def _damage(out: Path) -> list[str]:
    store = Store(out)
    store.records()
    return store.damaged


def _run(wanted: list[Order], out: Path, jobs: int, backend: str, quiet: bool, as_json: bool) -> None:
    for order in wanted:
        require_device(get_suite(order.suite), order)
    make_folder(out)
    tell = (lambda text: None) if quiet else (lambda text: click.echo(text, err=True))
    states = []
    try:
        for order in wanted:
            suite = get_suite(order.suite)
            states.append(run_suite(suite, order, out, jobs=jobs, backend=backend, tell=tell, progress=not quiet))
    except KeyboardInterrupt:
        click.echo(f"{progress_of(suite, order, out).after_interruption}: wellposed resume{_at(out)}", err=True)
        raise
    if as_json:
        click.echo(json.dumps(status_facts(states), indent=2))
    else:
        print_table(status_table(states))
    if not quiet:
        click.echo(f"\nnow: wellposed report{_at(out)}", err=True)
    if any(state.failed for state in states):
        reasons = _reasons(wanted, out)
        raise click.ClickException(f"some runs failed; the records and the report say why\n{reasons}")


def _reasons(wanted: list[Order], out: Path) -> str:
    """Returns why runs have failed, each reason once and three at most."""
    asked = {(order.suite, order.scale) for order in wanted}
    records = [record for record in Store(out).records() if (record.suite, record.scale) in asked]
    return "\n".join(list(dict.fromkeys(record.error for record in records if record.error))[:3])


@click.command()
@OUT
@click.option(
    "--also",
    "others",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Further record files or folders, e.g. lab/results.",
)
@click.option("--figures", is_flag=True, help="Draw the figures as PNG and PDF files too.")
@QUIET
@JSON
def report(out: Path, others: tuple[Path, ...], figures: bool, quiet: bool, as_json: bool) -> None:
    """Write one page with plots, our numbers beside the published ones, and verdicts."""
    stores = [Store(path) for other in (out, *others) for path in _files(other)]
    records = merged(stores)
    for line in (line for store in stores for line in store.damaged):
        click.echo(f"warning: {line}", err=True)
    if not records:
        raise click.ClickException(f"no records in {out}; start with: wellposed run SUITE{_at(out)}")
    make_folder(out)
    page_path = write_report(records, out / "report.html")
    drawn = _draw_figures(records, out / "figures") if figures else []
    judged = [verdict for verdict in verdicts(records) if verdict.verdict != "not judged"]
    reached = checks_of(all_suites().values(), with_derived(records))
    if as_json:
        pages = {"page": str(page_path), "figures": [str(path) for path in drawn]}
        facts = {"verdicts": verdict_facts(judged), "thresholds": threshold_facts(reached)}
        click.echo(json.dumps({**pages, **facts}, indent=2))
    elif judged or reached:
        if judged:
            print_table(verdict_table(judged))
        if reached:
            print_table(threshold_table(reached))
    else:
        click.echo("no verdicts: only runs at scale default or paper are judged", err=True)
    if not quiet:
        click.echo(f"\nnow open {page_path}", err=True)


def _files(path: Path) -> list[Path]:
    """Returns the record files of a folder, or the file itself."""
    return sorted(path.glob("*.jsonl")) if path.is_dir() else [path]


def _draw_figures(records: list[Record], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for suite in all_suites().values():
        own = [record for record in records if record.suite == suite.name]
        for index, figure in enumerate(suite.figures if own else (), start=1):
            for ending in ("png", "pdf"):
                drawn.append(folder / f"{suite.name}-{index}.{ending}")
                draw(figure, own, drawn[-1])
    return drawn
