"""The classifier that a command is given, with labelled inputs in the shape and precision it takes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from wellposed.cli.samples import RefusedError, Samples, read_samples, refused, wrong
from wellposed.cli.source import read_source
from wellposed.convert import to_implicit
from wellposed.errors import FileFormatError, InputError, UnknownNameError
from wellposed.forms import ImplicitForm
from wellposed.models import ImplicitModel, load, load_reference

REFERENCE = "reference:"  # a model that comes with the package
Classifier = ImplicitForm | nn.Module


@dataclass(frozen=True, eq=False)
class Labelled:
    """A classifier and the samples on which it is judged.

    Args:
        model: gives one output a class.
        u: inputs as the model takes them, in the valid range.
        target: (B,), their classes.
        source: where the samples come from.
        name, data: of model and data, as they were given.
    """

    model: Classifier
    u: Tensor
    target: Tensor
    source: str
    name: str
    data: str

    def form(self) -> ImplicitForm:
        """Returns the classifier as an implicit form."""
        if isinstance(self.model, ImplicitForm):
            return self.model
        with refused(), torch.no_grad():
            if isinstance(self.model, ImplicitModel):
                return self.model.form()
            return to_implicit(self.model, tuple(self.u.shape[1:]))


class Epsilon(click.ParamType):
    """A radius: finite and not negative."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Checks the number."""
        try:
            found = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number", param, ctx)
        if not (math.isfinite(found) and found >= 0):
            self.fail(f"a radius is finite and not negative; received {value}", param, ctx)
        return found


class PagePath(click.ParamType):
    """A file to write, of one of some kinds, in a folder that exists."""

    name = "file"

    def __init__(self, *endings: str) -> None:
        self.endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Checks ending and folder."""
        path = Path(value)
        if path.suffix.lower() not in self.endings:
            self.fail(f"{str(value)!r} must end with {' or '.join(self.endings)}", param, ctx)
        if not path.absolute().parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r}", param, ctx)
        return path


def read_labelled(source: str, data: str, count: int, valid: tuple[float, float]) -> Labelled:
    """Reads a classifier and draws labelled samples for it.

    Args:
        source: a file that `wellposed.save` wrote, an exported program, module:factory, or reference:name.
        data: a set, a part of one (its test part if none is named), or a file of arrays.
        count: how many samples are drawn.
        valid: the range in which every input lies.
    """
    if not valid[0] < valid[1]:
        raise wrong(f"the range needs its lower end first; received {valid[0]:g} {valid[1]:g}", "--range")
    found = read_samples(data, "--data", "test").drawn(count)
    if found.targets is None:
        raise wrong(f"{data!r} has no targets; store the classes beside the inputs under the name y", "--data")
    _check_range(found.u, valid)
    model = read_classifier(source)
    u, outputs = _fitted(model, found)
    return Labelled(model, u, _classes(found, outputs), found.source, source, data)


def read_classifier(source: str, option: str = "--model") -> Classifier:
    """Reads a model in evaluation mode; an exported program becomes its form."""
    if source.startswith(REFERENCE):
        return _reference(source.removeprefix(REFERENCE), option)
    if source.endswith(".safetensors"):
        return _loaded(Path(source), option)
    try:
        found = read_source(source)
    except click.BadParameter as error:
        error.param_hint = option
        raise
    if isinstance(found, nn.Module):
        return found.eval()
    with refused():
        return to_implicit(found, _example(found, source, option))


def _loaded(path: Path, option: str) -> Classifier:
    if not path.is_file():
        raise wrong(f"there is no file {str(path)!r}", option)
    try:
        found = load(path)
    except FileFormatError as error:
        raise wrong(str(error), option) from error
    return _usable(found, str(path), option)


def _reference(name: str, option: str) -> Classifier:
    try:
        found = load_reference(name)
    except UnknownNameError as error:
        raise wrong(str(error), option) from error
    return _usable(found, f"{REFERENCE}{name}", option)


def _usable(found: object, source: str, option: str) -> Classifier:
    if isinstance(found, ImplicitForm):
        return found
    if not isinstance(found, ImplicitModel):
        raise wrong(f"{source!r} holds {type(found).__name__}, not a form or an ImplicitModel", option)
    return found.eval()


def _example(program: ExportedProgram, source: str, option: str) -> tuple[int, ...]:
    given = program.example_inputs[0] if program.example_inputs else ()
    if not given or not isinstance(given[0], Tensor):
        raise wrong(f"{source!r} has no example input, so the shape of a sample is not known", option)
    return tuple(given[0].shape[1:])


class Adapted(nn.Module):
    """A second classifier that is asked in the shape and precision of another one's inputs."""

    def __init__(self, model: Classifier, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.shape, self.dtype = model, shape, dtype

    def forward(self, u: Tensor) -> Tensor:  # (B, *input) -> (B, classes)
        """Asks the classifier."""
        found: Tensor = self.model(u.reshape(-1, *self.shape).to(self.dtype))
        return found.to(u.dtype)


def read_surrogate(source: str, given: Labelled) -> Adapted:
    """Reads a classifier that stands for another one, for the same samples and classes."""
    model = read_classifier(source, "--surrogate")
    u, outputs = _fitted(model, Samples(given.u, None, given.source))
    classes = given.model(given.u[:1]).shape[1]
    if outputs.shape[1] != classes:
        raise wrong(f"the surrogate has {outputs.shape[1]} classes and the model {classes}", "--surrogate")
    return Adapted(model, tuple(u.shape[1:]), u.dtype)


def widest_layer(model: Classifier, u: Tensor) -> int:
    """Counts the numbers that the widest layer holds for one sample, inputs and states included."""
    if isinstance(model, ImplicitForm):
        return max(model.sizes)
    sample = u[:2]
    sizes = [u[0].numel(), *(part.state_features for part in model.modules() if isinstance(part, ImplicitModel))]

    def count(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if isinstance(outputs, Tensor):
            sizes.append(outputs.numel() // len(sample))

    hooks = [part.register_forward_hook(count) for part in model.modules()]
    try:
        with torch.no_grad():
            model(sample)
    finally:
        for hook in hooks:
            hook.remove()
    return max(sizes)


def _check_range(u: Tensor, valid: tuple[float, float]) -> None:
    low, high = float(u.min()), float(u.max())
    if low < valid[0] or high > valid[1]:
        raise wrong(
            f"inputs lie in the range [{valid[0]:g}, {valid[1]:g}]; these reach from {low:.4g} to {high:.4g}: "
            "put the scaling inside the model, or give --range LOW HIGH", "--data",
        )  # fmt: skip


def _fitted(model: Classifier, found: Samples) -> tuple[Tensor, Tensor]:
    """Returns inputs as the model takes them, as they are or one row a sample, and its outputs for the first."""
    if isinstance(model, ImplicitForm):
        kind, shapes = model.dtype, [model.input_shape]
        if math.prod(model.input_shape) != found.u[0].numel():
            raise RefusedError(
                f"the model takes samples of the shape {model.input_shape}; received {tuple(found.u.shape[1:])}"
            )
    else:
        values = (*model.parameters(), *model.buffers())
        kind = next((value.dtype for value in values if value.is_floating_point()), found.u.dtype)
        shapes = [tuple(found.u.shape[1:]), (found.u[0].numel(),)]
    complaints = []
    for shape in dict.fromkeys(shapes):
        u = found.u.reshape(-1, *shape).to(kind)
        try:
            with torch.no_grad():
                return u, _outputs(model(u[:2]))
        except Exception as error:  # whatever a network raises on a shape it does not take
            complaints.append((str(error).strip().splitlines() or [type(error).__name__])[0])
    raise RefusedError(f"the model takes no samples of the shape {tuple(found.u.shape[1:])}: {complaints[-1]}")


def _outputs(found: Any) -> Tensor:
    if not isinstance(found, Tensor) or found.dim() != 2 or found.shape[1] < 2:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"a classifier returns one output a class, (batch, classes); this one returned {got}")
    if not bool(found.isfinite().all()):
        raise InputError("the model returned NaN or infinite outputs")
    return found


def _classes(found: Samples, outputs: Tensor) -> Tensor:
    target = found.targets
    assert target is not None
    if target.is_floating_point() or target.dim() != 1:
        raise wrong(f"targets are classes, one whole number a sample; received {target.dtype} "
                    f"{tuple(target.shape)}", "--data")  # fmt: skip
    low, high, classes = int(target.min()), int(target.max()), outputs.shape[1]
    if low < 0 or high >= classes:
        raise wrong(f"the model has classes 0 to {classes - 1}; the targets reach from {low} to {high}", "--data")
    return target.long()


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a page or a picture."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise wrong(f"cannot write {path} ({error.strerror})", "--out") from error
