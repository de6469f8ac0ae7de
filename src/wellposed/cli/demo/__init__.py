"""`wellposed demo`: one digit reader, six questions, a page about the answers."""

import json
import os
from functools import partial
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from wellposed.atomic import atomic_write
from wellposed.cli.demo.page import NUMBERS, answers, files, page, speed, steps
from wellposed.cli.demo.questions import DemoConfig, DemoResult, record, run_demo
from wellposed.cli.terminal import make_folder


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="wellposed-results",
    help="Where demo.html, demo.json and the models go.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=DemoConfig.seed, help="Of initial weights and batches."
)
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON, not as a table.")
def demo(out: Path, seed: int, quiet: bool, as_json: bool) -> None:
    """Train a reader of digits and ask it six questions, in under a minute."""
    os.environ.setdefault("WELLPOSED_COMPILE", "wait")  # its speed is that of compiled kernels
    page_file = out / "demo.html"
    make_folder(out)
    result = run_demo(DemoConfig(seed=seed), out, (lambda text: None) if quiet else partial(click.echo, err=True))
    numbers = {**record(result), "page": str(page_file)}
    for path, text in ((page_file, page(result)), (out / "demo.json", json.dumps(numbers, indent=1) + "\n")):
        with atomic_write(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    if as_json:
        click.echo(json.dumps(numbers, indent=2))
    else:
        _show(result, page_file)
    if not result.certified:
        raise click.ClickException("a certificate of well-posedness does not hold; see above")


def table(result: DemoResult) -> Table:
    """Lays out question and answer with the numbers below."""
    shown = Table(box=box.SIMPLE, show_edge=False, padding=(0, 1), show_lines=True)
    shown.add_column("")
    shown.add_column("question", max_width=16)
    shown.add_column("answer", ratio=3)
    shown.add_column("numbers", ratio=2)
    for number, one in zip(NUMBERS, answers(result), strict=True):
        text = f"{one.answer}\n[dim]{one.honest}[/dim]" if one.honest else one.answer
        shown.add_row(
            f"({number})", one.question, text, "\n".join(f"{value} {what}" for value, what in one.numbers)
        )
    return shown


def _show(result: DemoResult, page_file: Path) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    console.print(table(result))
    console.print(f"\n{speed(result)}\n", markup=False)
    console.print("Now with your own network in place of the demo's:", markup=False)
    for step in steps(result):
        console.print(f"  {step.command}", markup=False, soft_wrap=True)
    console.print(f"\n{result.seconds:.0f} s; models in {', '.join(files(result))}", markup=False, soft_wrap=True)
    console.print(f"now open {page_file}", markup=False, soft_wrap=True)
