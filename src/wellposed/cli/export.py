"""`wellposed export`: a model as an ONNX file."""

import json
from pathlib import Path

import click
import torch
from torch import nn

from wellposed.cli.convert import Shape
from wellposed.cli.inputs import REFERENCE, PagePath, read_source, refused, wrong
from wellposed.convert import to_implicit
from wellposed.errors import UnknownNameError
from wellposed.forms import ImplicitForm
from wellposed.models import export_onnx, load, load_reference


@click.command()
@click.argument("source")
@click.option("--onnx", "out", type=PagePath(".onnx"), required=True, help="File to write.")
@click.option("--input-shape", "shape", type=Shape(), help="Of one sample, where the model does not know it.")
@click.option("--steps", type=click.IntRange(min=1), help="Of every solve; found on random inputs if left out.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not a line.")
def export(source: str, out: Path, shape: tuple[int, ...] | None, steps: int | None, as_json: bool) -> None:
    """Write a model as an ONNX file, with so many steps for every solve.

    SOURCE is a file or a folder of wellposed.save, reference:name, an exported program
    (model.pt2), package.module:factory or path/to/file.py:factory.
    """
    model = _read(source, shape)
    example = None
    if shape is not None:
        values = [] if isinstance(model, ImplicitForm) else [*model.parameters(), *model.buffers()]
        kind = model.dtype if isinstance(model, ImplicitForm) else values[0].dtype if values else torch.float32
        example = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(kind)
    with refused():
        difference = export_onnx(model, out, example, steps=steps)
    facts = {"file": str(out), "bytes": out.stat().st_size, "difference": difference}
    text = f"{out}, {facts['bytes']} bytes; on random inputs it differs from the model by {difference:.2g}"
    click.echo(json.dumps(facts) if as_json else text)


def _read(source: str, shape: tuple[int, ...] | None) -> nn.Module | ImplicitForm:
    """Reads a model; a network without equilibria becomes its form."""
    path = Path(source)
    if source.startswith(REFERENCE):
        try:
            return load_reference(source.removeprefix(REFERENCE))
        except UnknownNameError as error:
            raise wrong(str(error), "SOURCE") from error
    if path.is_dir():
        return load(path)
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise wrong(f"there is no file {source!r}", "SOURCE")
        return load(path)
    network = read_source(source)
    if isinstance(network, nn.Module):
        return network.eval()
    if shape is None:
        raise wrong("the shape of one sample is not known; give it as in 3,32,32", "--input-shape")
    with refused():
        return to_implicit(network, shape)
