"""`wellposed attack`: inputs that change what a model says, and a gallery of them."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from wellposed.atomic import atomic_write
from wellposed.cli.inputs import (
    Adapted,
    Epsilon,
    Labelled,
    PagePath,
    RefusedError,
    read_labelled,
    read_surrogate,
    refused,
    widest_layer,
    write_file,
    wrong,
)
from wellposed.cli.robust_pages import Heading, attack_page
from wellposed.cli.terminal import print_table
from wellposed.errors import IllPosedError, MissingExtraError
from wellposed.robust.attacks import (
    Attack,
    autoattack,
    fgsm,
    jsma,
    lp_attack,
    noise_attack,
    pgd,
    ranked_attack,
    transfer_attack,
)
from wellposed.robust.draw import gallery
from wellposed.workers import threads_for


@dataclass(frozen=True, eq=False)
class Request:
    """What an attack is asked to do.

    Args:
        count: a share of the entries that may change; None for all.
        ends: the valid range.
        surrogate: the model that is attacked in place of the given one; None for none.
    """

    given: Labelled
    epsilon: float
    count: float | None
    steps: int
    ends: tuple[float, float]
    seed: int
    surrogate: Adapted | None = None

    @property
    def what(self) -> tuple[Any, Tensor, Tensor]:
        """Model, inputs and classes."""
        return self.given.model, self.given.u, self.given.target

    @property
    def range(self) -> dict[str, Any]:
        """The valid range, as attacks take it."""
        return {"lower": self.ends[0], "upper": self.ends[1]}

    @property
    def number(self) -> int | None:
        """How many entries may change; at least one where a share is given."""
        size = self.given.u[0].numel()
        return None if self.count is None else max(1, round(self.count * size))


def _fgsm(request: Request) -> Attack:
    return fgsm(*request.what, request.epsilon, count=request.number, **request.range)


def _pgd(request: Request) -> Attack:
    return pgd(*request.what, request.epsilon, steps=request.steps, count=request.number, seed=request.seed,
               **request.range)  # fmt: skip


def _ranked(request: Request, ranking: str = "sensitivity") -> Attack:
    return ranked_attack(*request.what, request.epsilon, request.number, ranking=ranking, seed=request.seed,
                         **request.range)  # fmt: skip


def _jsma(request: Request) -> Attack:
    return jsma(*request.what, request.number or 1, request.epsilon, **request.range)


def _lp(request: Request) -> Attack:
    return lp_attack(*request.what, request.epsilon, request.number, **request.range)


def _auto(request: Request) -> Attack:
    if request.ends != (0.0, 1.0):
        raise wrong("AutoAttack takes inputs in [0, 1]; put the scaling inside the model", "--range")
    return autoattack(*request.what, request.epsilon, seed=request.seed)


def _noise(request: Request) -> Attack:
    if request.epsilon > 1:
        raise wrong(f"the share of noisy entries lies in [0, 1]; received {request.epsilon:g}", "--epsilon")
    return noise_attack(*request.what, "salt_and_pepper", request.epsilon, seed=request.seed, **request.range)


def _speckle(request: Request) -> Attack:
    return noise_attack(*request.what, "speckle", request.epsilon, seed=request.seed, **request.range)


def _transfer(request: Request) -> Attack:
    assert request.surrogate is not None
    steps = partial(pgd, steps=request.steps, seed=request.seed)
    return transfer_attack(*request.what, request.epsilon, request.surrogate, attack=steps, **request.range)


ATTACKS: dict[str, Callable[[Request], Attack]] = {
    "pgd": _pgd,
    "fgsm": _fgsm,
    "sensitivity": _ranked,
    "gradient": lambda request: _ranked(request, "gradient"),
    "random": lambda request: _ranked(request, "random"),
    "jsma": _jsma,
    "lp": _lp,
    "autoattack": _auto,
    "transfer": _transfer,
    "noise": _noise,
    "speckle": _speckle,
}
WITHOUT_COUNT = ("autoattack", "transfer", "noise", "speckle")


@click.command()
@click.option("--model", required=True, metavar="SOURCE", help="A file, module:factory or reference:NAME.")
@click.option("--data", required=True, metavar="DATA", help="A set (digits, mnist, fashion, cifar10) or a file.")
@click.option("--attack", "kind", type=click.Choice(list(ATTACKS)), default="pgd", help="Which one.")
@click.option("--epsilon", type=Epsilon(), required=True, help="How far an input may move; how much noise.")
@click.option("--count", type=click.FloatRange(0, 1, min_open=True), help="Share of the inputs that may change.")
@click.option("--samples", type=click.IntRange(min=1), default=200, help="How many are drawn from the data.")
@click.option("--range", "valid", type=float, nargs=2, default=(0.0, 1.0), help="Of valid inputs.")
@click.option("--surrogate", metavar="SOURCE", help="Attack this model, and ask the other about what was found.")
@click.option("--steps", type=click.IntRange(min=1), default=40, help="Of pgd and transfer.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of random values.")
@click.option("--out", type=PagePath(".html", ".png"), default="attack.html", help="Page or picture to write.")
@click.option("--save", "saved", type=PagePath(".pt"), help="Keep the attacked inputs u and classes y.")
@click.option("--quiet", is_flag=True, help="Say nothing but the numbers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
def attack(
    model: str,
    data: str,
    kind: str,
    epsilon: float,
    count: float | None,
    samples: int,
    valid: tuple[float, float],
    surrogate: str | None,
    steps: int,
    seed: int,
    out: Path,
    saved: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Look for inputs that change what a model says, and draw them.

    Every input stays within epsilon of the clean one and in the valid range. "sensitivity" moves the inputs that
    rank highest in the sensitivity matrix, "gradient" those with the largest gradient, "random" any, to compare
    with; "jsma" changes one input unless --count is given; "transfer" runs pgd on the model of --surrogate and
    tries on the other what it found; "noise" sets a share epsilon of the inputs to an end of the range, "speckle"
    multiplies each by 1 + epsilon N(0, 1). DATA as in certify.
    """
    _check_options(kind, count, surrogate)
    given = read_labelled(model, data, samples, valid)
    with _errors_in_one_line():
        other = None if surrogate is None else read_surrogate(surrogate, given)
    request = Request(given, epsilon, count, steps, valid, seed, other)
    start = time.monotonic()
    with _errors_in_one_line(), _spinner(kind, quiet), threads_for(widest_layer(given.model, given.u)):
        attack = ATTACKS[kind](request)
        with torch.no_grad():
            before = given.model(given.u).argmax(1)
    seconds = time.monotonic() - start
    facts = _facts(request, attack, before, seconds)
    write_file(out, _shown(request, attack, before, facts, out))
    if saved is not None:
        with atomic_write(saved) as temporary:
            torch.save({"u": attack.inputs.cpu(), "y": given.target.cpu()}, temporary)
    if as_json:
        click.echo(json.dumps({**facts, "page": str(out)}, indent=2))
    else:
        print_table(_table(facts))
        for note in attack.notes:
            click.echo(f"note: {note}")
    if not quiet:
        click.echo(f"{seconds:.0f} s; now open {out}", err=True)


def _check_options(kind: str, count: float | None, surrogate: str | None) -> None:
    if count is not None and math.isnan(count):
        raise wrong("it is a share of the inputs; received nan", "--count")
    if count is not None and kind in WITHOUT_COUNT:
        raise wrong(f"{kind} changes any number of inputs", "--count")
    if (surrogate is None) == (kind == "transfer"):
        told = "transfer needs the model to attack" if surrogate is None else f"it is for transfer, not for {kind}"
        raise wrong(told, "--surrogate")


def _facts(request: Request, attack: Attack, before: Tensor, seconds: float) -> dict[str, Any]:
    change = (attack.inputs - request.given.u).flatten(1)
    right = before == request.given.target
    return {
        "model": request.given.name,
        "data": request.given.source,
        "samples": len(change),
        "attack": attack.name,
        "epsilon": request.epsilon,
        "clean_accuracy": float(right.double().mean()),
        "attacked_accuracy": attack.accuracy,
        "right_before": int(right.sum()),
        "changed": int((right & attack.success).sum()),
        "largest_change": float(change.abs().max()),
        "changed_inputs": float((change != 0).double().sum(1).mean()),
        "queries": float(attack.queries.double().mean()),
        "notes": list(attack.notes),
        "seconds": seconds,
    }


def _table(facts: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("attack", "epsilon", "clean", "attacked", "classes changed", "inputs moved", "queries a sample"):
        table.add_column(name, justify="left" if name == "attack" else "right")
    shares = (f"{100 * facts[f'{name}_accuracy']:.1f} %" for name in ("clean", "attacked"))
    changed, queries = f"{facts['changed_inputs']:.1f}", f"{facts['queries']:.0f}"
    broken = f"{facts['changed']} of {facts['right_before']}"
    table.add_row(facts["attack"], f"{facts['epsilon']:g}", *shares, broken, changed, queries)
    return table


def _shown(request: Request, attack: Attack, before: Tensor, facts: dict[str, Any], out: Path) -> str | bytes:
    """Draws the gallery alone, or writes the page."""
    given = request.given
    if out.suffix.lower() == ".png":
        drawn = BytesIO()
        try:
            gallery(given.model, given.u, attack, given.target).savefig(drawn, format="png", bbox_inches="tight")
        except MissingExtraError as error:
            raise click.ClickException(str(error)) from error
        return drawn.getvalue()
    about = [
        f"{facts['changed_inputs']:.1f} of {given.u[0].numel():,} inputs changed on average, by at most "
        f"{facts['largest_change']:.3g}",
        f"{facts['queries']:.0f} queries a sample, {facts['seconds']:.0f} seconds, torch {torch.__version__}",
    ]
    context = click.get_current_context()
    share = f" --count {request.count:g}" if request.count is not None else ""
    share += f" --surrogate {context.params['surrogate']}" if request.surrogate is not None else ""
    command = (
        f"wellposed attack --model {given.name} --data {given.data} --attack {context.params['kind']} "
        f"--epsilon {request.epsilon:g}{share} --samples {len(given.u)} --out {out}"
    )
    return attack_page(Heading(given, about, command, request.ends), attack, before, request.epsilon)


@contextlib.contextmanager
def _spinner(kind: str, quiet: bool) -> Iterator[None]:
    """Shows a spinner on stderr while an attack runs, if that is a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_interactive:
        yield
        return
    with console.status(f"{kind} ..."):
        yield


@contextlib.contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Turns a model or an attack that cannot be used into one line and the exit code 2."""
    try:
        with refused():
            yield
    except IllPosedError as error:
        raise RefusedError(str(error)) from error
