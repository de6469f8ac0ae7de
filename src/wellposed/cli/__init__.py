"""The `wellposed` command: results go to stdout, progress to stderr."""

import json
import sys
from pathlib import Path

import click
import torch
from click.shell_completion import CompletionItem, get_completion_class
from rich.console import Console

from wellposed.cli.attack import attack
from wellposed.cli.certify import certify
from wellposed.cli.forms import convert, show
from wellposed.cli.sparsify import sparsify
from wellposed.cli.terminal import print_table
from wellposed.cli.verify import verify
from wellposed.errors import WellposedError, unknown_name
from wellposed.experiments.compare import verdicts
from wellposed.experiments.config import SCALES, Scale
from wellposed.experiments.console import (
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
from wellposed.experiments.demo import DemoConfig, DemoResult, run_demo, versions
from wellposed.experiments.demo_page import page
from wellposed.experiments.demo_text import FINDING, certificates, record, shipped, table
from wellposed.experiments.plots import draw
from wellposed.experiments.record import Record
from wellposed.experiments.registry import SUITES, get_suite
from wellposed.experiments.report import write_report
from wellposed.experiments.runner import Order, carry_out, look, orders
from wellposed.experiments.store import Store, merged
from wellposed.experiments.thresholds import checks_of
from wellposed.workers import CLUSTERS, cluster

FOLDER = click.Path(file_okay=False, path_type=Path)


class SuggestingGroup(click.Group):
    """Names the nearest command when one is mistyped."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command, or says which ones there are."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(str(unknown_name("command", args[0], self.list_commands(ctx))))
        return super().resolve_command(ctx, args)


@click.group(
    cls=SuggestingGroup,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(versions()["wellposed"], prog_name="wellposed", message="%(prog)s %(version)s")
def cli() -> None:
    """Implicit deep learning: x = f(x, u) is the model."""


cli.add_command(convert)
cli.add_command(show)
cli.add_command(sparsify)
cli.add_command(certify)
cli.add_command(attack)
cli.add_command(verify)


@cli.command()
@click.option("--out", type=FOLDER, default="wellposed-results", help="Where demo.html goes.")
@click.option("--seeds", type=click.IntRange(min=1), default=DemoConfig.seeds, help="Models of each kind.")
@click.option("--epochs", type=click.IntRange(min=1), default=DemoConfig.epochs, help="Passes over the data.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON, not as a table.")
def demo(out: Path, seeds: int, epochs: int, quiet: bool, as_json: bool) -> None:
    """Train an implicit model and its controls, and see who extrapolates."""
    place = out / "demo.html"
    _make(out)
    result = run_demo(DemoConfig(seeds=seeds, epochs=epochs), progress=not quiet)
    place.write_text(page(result), encoding="utf-8")
    if as_json:
        click.echo(json.dumps({**record(result), "page": str(place)}, indent=2))
    else:
        _show(result)
    if not quiet:
        click.echo(f"{result.seconds:.0f} s; now open {place}", err=True)
    if not result.certified:
        raise click.ClickException("a certificate of well-posedness does not hold; see above")


def _show(result: DemoResult) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    console.print(table(result))
    console.print()
    for sentence in FINDING:
        console.print(sentence)
    console.print("\nCertificates of the implicit models:")
    for line in certificates(result):
        console.print(f"  {line}", markup=False)
    console.print("\nA model that comes with the package:")
    console.print(f"  {shipped()}", markup=False)


class SuiteName(click.ParamType):
    """The name of a suite, completed by the shell and corrected when mistyped."""

    name = "suite"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Checks the name."""
        if value not in SUITES:
            self.fail(str(unknown_name("suite", value, SUITES)), param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offers the names that begin like this."""
        return [
            CompletionItem(name, help=suite.title) for name, suite in SUITES.items() if name.startswith(incomplete)
        ]


OUT = click.option("--out", type=FOLDER, default="wellposed-results", help="Folder of the results.")
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


@cli.command("list")
@JSON
def list_suites(as_json: bool) -> None:
    """List the suites of experiments and what they reproduce."""
    suites = list(SUITES.values())
    if as_json:
        click.echo(json.dumps(suite_facts(suites), indent=2))
    else:
        print_table(suite_table(suites))
        click.echo("\nrun one with: wellposed run SUITE", err=True)


@cli.command()
@click.argument("suites", nargs=-1, required=True, type=SuiteName(), metavar="SUITE...")
@click.option("--scale", type=click.Choice(SCALES), default="default", help="tiny: seconds; paper: as published.")
@click.option("--seeds", type=click.IntRange(min=1), help="How many; the suite's own number if left out.")
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
    wanted = [Order(name, scale, seeds, search, device) for name in suites]
    with cluster(backend, address):
        _carry_out(wanted, out, jobs, backend, quiet, as_json)


@cli.command()
@JOBS
@BACKEND
@CLUSTER
@OUT
@QUIET
@JSON
def resume(jobs: int, backend: str, address: str | None, out: Path, quiet: bool, as_json: bool) -> None:
    """Go on with everything in a results folder that is not finished."""
    found = _orders(out)
    if not found:
        raise click.ClickException(f"nothing was begun in {out}; start with: wellposed run SUITE")
    with cluster(backend, address):
        _carry_out(found, out, jobs, backend, quiet, as_json)


@cli.command()
@OUT
@JSON
def status(out: Path, as_json: bool) -> None:
    """Show how far the runs of a results folder are."""
    states = [look(get_suite(order.suite), order, out) for order in _orders(out)]
    if as_json:
        click.echo(json.dumps(status_facts(states), indent=2))
    elif states:
        print_table(status_table(states))
        if any(state_of(state) == "unfinished" for state in states):
            click.echo("\ngo on with: wellposed resume", err=True)
    else:
        click.echo(f"nothing was begun in {out}; start with: wellposed run SUITE", err=True)
    for line in _damage(out):
        click.echo(f"warning: {line}", err=True)


def _orders(out: Path) -> list[Order]:
    found = orders(out)
    for order in found:
        get_suite(order.suite)
    return found


def _damage(out: Path) -> list[str]:
    store = Store(out)
    store.records()
    return store.damaged


def _carry_out(wanted: list[Order], out: Path, jobs: int, backend: str, quiet: bool, as_json: bool) -> None:
    _make(out)
    tell = (lambda text: None) if quiet else (lambda text: click.echo(text, err=True))
    states = []
    try:
        for order in wanted:
            suite = get_suite(order.suite)
            states.append(carry_out(suite, order, out, jobs=jobs, backend=backend, tell=tell, progress=not quiet))
    except KeyboardInterrupt:
        click.echo("finished runs are kept and the current one up to its last epoch: wellposed resume", err=True)
        raise
    if as_json:
        click.echo(json.dumps(status_facts(states), indent=2))
    else:
        print_table(status_table(states))
    if not quiet:
        click.echo("\nnow: wellposed report", err=True)
    if any(state.failed for state in states):
        reasons = _reasons(wanted, out)
        raise click.ClickException(f"some runs failed; the records and the report say why\n{reasons}")


def _reasons(wanted: list[Order], out: Path) -> str:
    """Returns why runs have failed, each reason once and three at most."""
    asked = {(order.suite, order.scale) for order in wanted}
    records = [record for record in Store(out).records() if (record.suite, record.scale) in asked]
    return "\n".join(list(dict.fromkeys(record.error for record in records if record.error))[:3])


@cli.command()
@OUT
@click.option(
    "--also",
    "others",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Further record files or folders, e.g. results/.",
)
@click.option("--figures", is_flag=True, help="Draw the figures as PNG and PDF files too.")
@QUIET
@JSON
def report(out: Path, others: tuple[Path, ...], figures: bool, quiet: bool, as_json: bool) -> None:
    """Write one page with plots, our numbers beside the published ones, and verdicts."""
    stores = [Store(place) for other in (out, *others) for place in _files(other)]
    records = merged(stores)
    for line in (line for store in stores for line in store.damaged):
        click.echo(f"warning: {line}", err=True)
    if not records:
        raise click.ClickException(f"no records in {out}; start with: wellposed run SUITE")
    _make(out)
    place = write_report(records, out / "report.html")
    drawn = _draw_figures(records, out / "figures") if figures else []
    judged = [verdict for verdict in verdicts(records) if verdict.verdict != "not run"]
    reached = checks_of(SUITES.values(), records)
    if as_json:
        pages = {"page": str(place), "figures": [str(path) for path in drawn]}
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
        click.echo(f"\nnow open {place}", err=True)


def _files(place: Path) -> list[Path]:
    """Returns the record files of a folder, or the file itself."""
    return sorted(place.glob("*.jsonl")) if place.is_dir() else [place]


def _draw_figures(records: list[Record], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for suite in SUITES.values():
        own = [record for record in records if record.suite == suite.name]
        for index, figure in enumerate(suite.figures if own else (), start=1):
            for ending in ("png", "pdf"):
                drawn.append(folder / f"{suite.name}-{index}.{ending}")
                draw(figure, own, drawn[-1])
    return drawn


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell, e.g. for eval "$(wellposed completion bash)"."""
    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"no completion for {shell}")
    click.echo(kind(cli, {}, "wellposed", "_WELLPOSED_COMPLETE").source())


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"cannot make {out} ({error.strerror}); choose another --out") from error


def main() -> None:
    """Runs the command; Ctrl-C ends it with one line and the exit code 130."""
    try:
        sys.exit(cli.main(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except WellposedError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except OSError as error:  # a name that is too long, a folder that may not be entered, a full disk
        click.echo(f"Error: {str(error)[:500]}", err=True)
        sys.exit(1)
