"""`wellposed convert` and `wellposed show`: networks as implicit forms, and forms in words and pictures."""

import json
import re
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from wellposed.cli.inputs import Network, PagePath, read_source
from wellposed.cli.stored import save_certified
from wellposed.cli.terminal import print_table
from wellposed.convert import to_implicit
from wellposed.errors import FileFormatError, InputError
from wellposed.forms import ImplicitForm
from wellposed.forms.draw.diagram import graph
from wellposed.forms.draw.page import STILL
from wellposed.forms.draw.spy import spy
from wellposed.forms.draw.summary import block_table, form_facts, summary_lines
from wellposed.models import ImplicitModel, load

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
TYPES = {"float32": torch.float32, "float64": torch.float64}
SAMPLES = 8
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}


class Shape(click.ParamType):
    """The shape of one sample, e.g. 3,32,32."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Reads sizes separated by commas."""
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"[1-9]\d*([,x][1-9]\d*)*", value):
            self.fail(f"{value!r} is not a shape; give the sizes of one sample without the batch, as 3,32,32")
        return tuple(int(part) for part in re.split("[,x]", value))


class PicturePath(click.ParamType):
    """A file whose ending says how a picture is drawn."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Checks the ending and the folder."""
        path = Path(value)
        if path.suffix.lower() not in (".html", *STILL):
            self.fail(f"{value!r} must end with .html, {', '.join(STILL)}", param, ctx)
        if not path.absolute().parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r}", param, ctx)
        return path


@click.command()
@click.argument("source")
@click.option("--input-shape", "shape", type=Shape(), required=True, help="Of one sample, e.g. 3,32,32.")
@click.option("-o", "--out", type=PagePath(".safetensors"), required=True, help="File to write.")
@click.option("--dtype", type=click.Choice(sorted(TYPES)), help="That of the network if left out.")
@click.option(
    "--rescale",
    "kappa",
    type=click.FloatRange(min=0, min_open=True),
    metavar="KAPPA",
    help="Rescale to |A|inf < KAPPA.",
)
@click.option("--check/--no-check", default=True, help="Compare outputs with the network's on random inputs.")
@JSON
def convert(
    source: str,
    shape: tuple[int, ...],
    out: Path,
    dtype: str | None,
    kappa: float | None,
    check: bool,
    as_json: bool,
) -> None:
    """Write a network as an implicit form.

    SOURCE is an exported program (model.pt2), package.module:factory or path/to/file.py:factory, where factory
    is a module or makes one without arguments.
    """
    network = read_source(source)
    form = _converted(network, shape, None if dtype is None else TYPES[dtype])
    form = form if kappa is None else form.rescale(kappa)
    difference = _difference(network, form) if check else None
    if difference is not None and not difference["relative"] <= difference["tolerance"]:
        raise click.ClickException(
            f"the form differs from the network by {difference['largest']:.3g} ({difference['relative']:.3g} of "
            "its outputs), so nothing was written; --no-check writes it all the same"
        )
    save_certified(form, out)
    _tell(form, {"file": str(out), "difference": difference}, as_json)
    if not as_json and difference is not None:
        click.echo(f"largest difference from the network on {SAMPLES} random inputs: {difference['largest']:.3g}")
    click.echo(f"\nwrote {out}; look at it with: wellposed show {out}", err=True)


def _converted(network: Network, shape: tuple[int, ...], dtype: torch.dtype | None) -> ImplicitForm:
    """Converts in the asked precision; what tracing adds to an error is left out."""
    if isinstance(network, nn.Module):
        network.eval().to(dtype)
    try:
        form = to_implicit(network, shape)
    except InputError as error:
        raise click.ClickException(str(error).partition("\n\nWhile executing")[0]) from error
    return form if dtype is None else form.to(dtype)


def _difference(network: Network, form: ImplicitForm) -> dict[str, float]:
    """Compares outputs on random inputs, also relative to the size of the outputs."""
    draw = torch.Generator().manual_seed(0)
    u = torch.randn(SAMPLES, *form.input_shape, generator=draw, dtype=torch.float64)
    expected = _outputs(network, u)
    tolerance = max(TOLERANCE.get(kind, 0.0) for kind in (expected.dtype, form.dtype))
    expected, actual = expected.double(), form(u.to(form.dtype)).double()
    if expected.shape != actual.shape:
        raise click.ClickException(f"the network returns {tuple(expected.shape)}, its form {tuple(actual.shape)}")
    largest = float((expected - actual).abs().max()) if actual.numel() else 0.0
    size = float(expected.abs().max()) if actual.numel() else 0.0
    return {"largest": largest, "relative": largest / max(1.0, size), "tolerance": tolerance}


def _outputs(network: Network, u: Tensor) -> Tensor:
    """Evaluates a network in evaluation mode, an exported one sample by sample in the batch it was made for."""
    with torch.no_grad():
        if isinstance(network, nn.Module):
            kind = _dtype([*network.parameters(), *network.buffers()])
            return _first(network.eval()(u.to(kind))).flatten(1)
        module, kind = network.module(), _dtype(list(network.state_dict.values()))
        example = network.example_inputs[0][0] if network.example_inputs else u[:1]
        repeated = [one.to(kind).expand(len(example), *one.shape) for one in u]
        return torch.cat([_first(module(batch))[:1] for batch in repeated]).flatten(1)


def _dtype(values: list[Tensor]) -> torch.dtype:
    return next((value.dtype for value in values if value.is_floating_point()), torch.get_default_dtype())


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple | list) else output
    return first


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--picture", type=PicturePath(), help="Draw the block matrix: .png, .svg, .pdf or .html.")
@click.option("--graph", "diagram", type=PicturePath(), help="Draw the node diagram: .png, .svg, .pdf or .html.")
@JSON
def show(file: Path, picture: Path | None, diagram: Path | None, as_json: bool) -> None:
    """Describe a form: blocks, sizes, loops and certificate, and draw it."""
    form = load(file)
    if isinstance(form, ImplicitModel):
        form = form.form()
    if not isinstance(form, ImplicitForm):
        raise FileFormatError(f"{str(file)!r} holds {type(form).__name__}, not a form or an ImplicitModel")
    drawn = [(draw, path) for draw, path in ((spy, picture), (graph, diagram)) if path is not None]
    for draw, path in drawn:
        try:
            draw(form, path, model_file=str(file))
        except OSError as error:
            raise click.ClickException(f"cannot write {path} ({error.strerror})") from error
    pictures = {"picture": picture and str(picture), "graph": diagram and str(diagram)}
    _tell(form, {"file": str(file), **pictures}, as_json)
    for _, path in drawn:
        click.echo(f"drew {path}", err=True)


def _tell(form: ImplicitForm, about: dict[str, Any], as_json: bool) -> None:
    facts = form_facts(form)
    if as_json:
        click.echo(json.dumps({**about, **facts}, indent=2))
        return
    print_table(block_table(facts))
    click.echo()
    for line in summary_lines(facts):
        click.echo(line)
