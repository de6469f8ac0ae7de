"""What a command is given: a network, data, and the classifier made of both.

`read_samples` reads data: a set by name, or a file of arrays, of which nothing is ever executed. `read_source`
reads a network: an exported program, or what a factory returns. `read_labelled` puts both together: a classifier
with labelled inputs in the shape and precision it takes.

`check_exported` looks into an exported program (.pt2) before torch loads it, and refuses all that could run code
of the file. `torch.export.load` unpickles weights, constants and sample inputs that say so, loads compiled
libraries, imports modules, evaluates the text of symbolic sizes and calls whatever function of torch a node names.
What `torch.export.save` writes of an ordinary network needs none of it, and nothing else is let through. Torch
never sees the file: it gets a new archive of what was looked at. `check_work` then runs the program on tensors
without memory, so that no small file asks for large ones.
"""

import ast
import contextlib
import difflib
import importlib.util
import io
import json
import math
import operator
import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wellposed.atomic import atomic_write
from wellposed.convert import to_implicit
from wellposed.data.images import SPLITS, image_packages, load_images
from wellposed.errors import FileFormatError, InputError, UnknownNameError, WellposedError
from wellposed.forms import ImplicitForm
from wellposed.models import ImplicitModel, load, load_reference
from wellposed.models.io.archives import (
    ENTRIES_FREE,
    ENTRIES_PER_BYTE,
    check_entries,
    read_torch,
    read_zip,
    write_zip,
)
from wellposed.models.io.arrays import read_arrays
from wellposed.models.io.onnx_network import OnnxNetwork, read_onnx

ALIASES = {"fashion": "fashion-mnist"}
SETS = ("digits", "fashion-mnist", "mnist", "mnist-5k", "cifar10", "cifar100")
ENDINGS = (".npz", ".npy", ".safetensors", ".pt", ".pth")
INPUTS = ("u", "inputs", "input", "x", "images", "data")
TARGETS = ("y", "targets", "target", "labels", "label")


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs of a network and, where known, targets.

    Args:
        u: one sample a row, in the shape in which it was stored.
        targets: classes as whole numbers or real values; None if there are none.
        source: where they come from.
    """

    u: Tensor
    targets: Tensor | None
    source: str

    def drawn(self, count: int) -> "Samples":
        """Draws samples without replacement, with seed 0; all of them if there are no more."""
        if count >= len(self.u):
            return self
        rows = torch.randperm(len(self.u), generator=torch.Generator().manual_seed(0))[:count]
        targets = None if self.targets is None else self.targets[rows]
        return Samples(self.u[rows], targets, f"{self.source}, {count} of {len(self.u)} drawn with seed 0")


def read_samples(source: str, option: str = "--data", split: str = "train") -> Samples:
    """Returns the samples that ``name``, ``name:split`` or a file names.

    A file holds the inputs alone, or inputs and targets under the names u and y (or inputs, targets and the like);
    a .pt file also the pair (u, y).
    """
    name, _, part = source.partition(":")
    name = ALIASES.get(name.lower(), name.lower())
    if name in SETS:
        return _images(name, part or split, option)
    path = Path(source)
    if path.suffix.lower() not in ENDINGS:
        close = difflib.get_close_matches(name, (*SETS, *ALIASES), n=1)
        hint = f"; did you mean {close[0] + (':' + part if part else '')!r}?" if close else ""
        raise wrong(
            f"{source!r} is neither a data set ({', '.join(SETS)}) nor a file that ends with "
            f"{', '.join(ENDINGS)}{hint}", option,
        )  # fmt: skip
    if not path.is_file():
        raise wrong(f"there is no file {source!r}", option)
    return _checked(_pair(_content(path, option), source, option), option)


def data_packages(source: str, splits: Sequence[str]) -> list[str]:
    """Lists the optional packages that reading DATA takes: none for a file, or for a set that is here.

    Args:
        source: as `read_samples` takes it.
        splits: the parts that are read where none is named.
    """
    name, _, part = source.partition(":")
    name = ALIASES.get(name.lower(), name.lower())
    if name not in SETS:
        return []
    wanted = {part or splits[0], *splits[1:]} & set(SPLITS)
    return sorted({package for split in wanted for package in image_packages(name, split)})


def _images(name: str, split: str, option: str) -> Samples:
    if split not in SPLITS:
        close = difflib.get_close_matches(split.lower(), SPLITS, n=1)
        hint = f"; did you mean '{name}:{close[0]}'?" if close else ""
        raise wrong(f"{name} has the parts {', '.join(SPLITS)}; received {split!r}{hint}", option)
    try:
        images = load_images(name, split)
    except WellposedError as error:
        raise wrong(str(error).replace(" (or pass fallback=True)", ""), option) from error
    return Samples(images.to_float(), images.labels, images.source)


def _content(path: Path, option: str) -> Any:
    """Reads a file by a reader that runs no code from it."""
    try:
        if path.suffix.lower() in (".npz", ".npy"):
            arrays = read_arrays(path)
            return arrays.get("", arrays)
        if path.suffix.lower() == ".safetensors":
            return load_file(path)
        with path.open("rb") as file:
            return read_torch(file)
    except Exception as error:  # whatever a damaged file leads to
        reason = (str(error).strip().splitlines() or ["it is damaged"])[0]
        raise wrong(f"{str(path)!r} cannot be read as plain arrays: {reason}", option) from error


def _pair(content: Any, source: str, option: str) -> Samples:
    if isinstance(content, Mapping):
        lower = {str(key).lower(): value for key, value in content.items()}
        u = next((lower[name] for name in INPUTS if name in lower), None)
        if u is None and len(lower) == 1:
            u = next(iter(lower.values()))
        if u is None:
            raise wrong(f"{source!r} holds {', '.join(sorted(lower)) or 'nothing'}; call the inputs u", option)
        return Samples(u, next((lower[name] for name in TARGETS if name in lower), None), source)
    if isinstance(content, tuple | list) and 1 <= len(content) <= 2:
        return Samples(content[0], content[1] if len(content) == 2 else None, source)
    return Samples(content, None, source)


def _checked(samples: Samples, option: str) -> Samples:
    u, targets = (None if part is None else _tensor(part, option) for part in (samples.u, samples.targets))
    assert u is not None
    if not u.is_floating_point():
        raise wrong(
            f"inputs must be floating-point numbers, as the network takes them; received {u.dtype}", option
        )
    if u.dim() < 2 or len(u) == 0:
        raise wrong(f"inputs need one sample a row; received the shape {tuple(u.shape)}", option)
    if not bool(u.isfinite().all()):
        bad = torch.nonzero(~u.flatten(1).isfinite().all(1))[:, 0]
        raise wrong(f"{len(bad)} of {len(u)} samples hold NaN or infinity, the first is {int(bad[0])}", option)
    if targets is not None and (targets.dim() == 0 or len(targets) != len(u)):
        raise wrong(f"{len(u)} samples need as many targets; received the shape {tuple(targets.shape)}", option)
    if targets is not None and targets.is_floating_point() and not bool(targets.isfinite().all()):
        raise wrong("the targets hold NaN or infinity", option)
    return replace(samples, u=u, targets=targets)


def _tensor(value: Any, option: str) -> Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        value = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=True))
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.is_quantized or value.is_nested:
        raise wrong(f"data must be arrays of numbers; received {type(value).__name__}", option)
    return value.to_dense() if value.layout != torch.strided else value


def wrong(message: str, option: str) -> click.BadParameter:
    """Makes the error of an option, which ends the command with the exit code 2."""
    return click.BadParameter(message, param_hint=option)


class RefusedError(click.ClickException):
    """Input that cannot be used; the message says why."""

    exit_code = 2


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Turns an error about the user's input into one line and the exit code 2."""
    try:
        yield
    except InputError as error:
        raise RefusedError(str(error).partition("\n\nWhile executing")[0]) from error


LARGEST, LARGEST_TEXT, LARGEST_POWER = 1 << 33, 1 << 28, 64
ENTRIES_PER_INPUT = 1024  # that all layers together may make of an entry of the input
_MEMBERS = re.compile(
    r"data/weights/(weight_\d+|\w+_weights_config\.json)|data/constants/(tensor_\d+|\w+_constants_config\.json)"
    r"|models/\w+\.json|data/sample_inputs/\w+\.pt|archive_format|archive_version|byteorder|\.data/\w+|extra/\w+",
    re.ASCII,
)
_TARGETS = re.compile(
    r"torch\.ops\.(aten|prims|wellposed)\.(?!from_file)\w+(\.\w+)?"
    r"|torch\.ops\.higher_order\.wrap_with_(set_grad_enabled|autocast)"
    r"|_operator\.(eq|ne|le|ge|lt|gt|neg|pos|and_|or_|add|sub|mul|floordiv|truediv|mod|pow|lshift|rshift|getitem)"
    r"|math\.(trunc|ceil|floor)|torch\.(sym_(float|int|max|min|not|ite|sum)|_sym_sqrt)"
)
_NAMES = re.compile(
    r"[suz]\w?f?\d+|FloorDiv|ModularIndexing|Where|PythonMod|Mod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|Min|Max|Pow"
    r"|PowByNatural|IntTrueDiv|FloatTrueDiv|TruncToInt|RoundToInt|ToFloat|Identity|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not"
    r"|Integer|Rational|Add|Mul|Abs|True|False|oo|int_oo"
)
_SYMBOL = re.compile(r"Symbol\('\w{1,40}'(, \w{1,20}=(True|False)){0,8}\)")
_SIZE = re.compile(r"[\w\s+\-*/()<>=!,.&|~%]*")


def check_exported(path: Path) -> io.BytesIO:
    """Looks through an exported program and returns a new archive of what was looked at, for `torch.export.load`.

    Raises:
        FileFormatError: it is damaged, or holds more than tensors, text and known operators.
    """
    try:
        with path.open("rb") as file:
            members = _inner(read_zip(file, LARGEST))
        for name, data in members.items():
            if name.endswith((".json", ".pt")):
                members[name] = _rewritten(name, data, members)
        return write_zip({f"program/{name}": members.pop(name) for name in list(members)})
    except FileFormatError:
        raise
    except Exception as error:  # whatever a damaged archive leads to; nothing of it was loaded
        raise FileFormatError(
            f"{str(path)!r} is damaged or no exported program: {type(error).__name__}: {error}"
        ) from error


def _inner(members: dict[str, bytes]) -> dict[str, bytes]:
    """Takes the names out of the folder in which all of them lie."""
    for name in members:
        if not _MEMBERS.fullmatch(name.partition("/")[2]):
            raise FileFormatError(f"the archive holds {name!r}, which an exported network does not need; refused")
    if len({name.partition("/")[0] for name in members}) != 1:
        raise FileFormatError("the archive must hold one folder, as an exported network does; refused")
    return {name.partition("/")[2]: data for name, data in members.items()}


def _rewritten(name: str, data: bytes, members: Mapping[str, bytes]) -> bytes:
    """Checks a table or the sample inputs, and writes what was checked anew, so that it reads in one way only."""
    if len(data) > LARGEST_TEXT:
        raise FileFormatError(f"{name!r} has {len(data)} bytes; at most {LARGEST_TEXT} are read")
    if name.endswith(".pt"):
        out = io.BytesIO()
        torch.save(read_torch(io.BytesIO(data)) if data else {}, out)
        return out.getvalue()
    table = json.loads(data)
    _check_text(table, name)
    if name.endswith("_config.json"):
        _check_stored(table["config"], name, members)
    return json.dumps(table).encode()


def _check_stored(config: Mapping[str, Any], name: str, members: Mapping[str, bytes]) -> None:
    """Refuses tensors with more entries than their records can mean; an empty record is filled with zeros."""
    for key, entry in config.items():
        sizes = [size["as_int"] for size in entry["tensor_meta"]["sizes"]]
        record = members.get(f"{name.rpartition('/')[0]}/{entry['path_name']}", b"")
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise FileFormatError(f"{name} gives {key!r} the sizes {sizes}, which are no sizes; refused")
        check_entries(math.prod(sizes), len(record), f"{key!r} in {name}")


def _check_text(value: Any, name: str) -> None:
    """Checks a table: nothing pickled, only known operators, and sizes that are arithmetic."""
    if isinstance(value, list):
        for part in value:
            _check_text(part, name)
    if not isinstance(value, dict):
        return
    for key, part in value.items():
        if key == "use_pickle" and part is not False:
            raise FileFormatError(f"{name} asks for a pickle to be loaded, which could run code; refused")
        if key == "path_name" and not re.fullmatch(r"(weight|tensor)_\d+", str(part)):
            raise FileFormatError(f"{name} refers to {part!r}, which is no tensor; refused")
        if key == "target" and isinstance(part, str) and "inputs" in value and not _TARGETS.fullmatch(part):
            raise FileFormatError(f"{name} calls {part!r}, which is no operator of torch; refused")
        if key == "expr_str" and not _is_arithmetic(str(part)):
            raise FileFormatError(f"{name} has the size {str(part)[:80]!r}, which is no arithmetic; refused")
        if key in ("in_spec", "out_spec") and isinstance(part, str):
            _check_tree(json.loads(part), name)
        if key == "sizes" and isinstance(part, list):
            _check_size(part, name)
        _check_text(part, name)


def _check_tree(value: Any, name: str) -> None:
    """Refuses a structure of inputs or outputs whose context is a table: torch would import what that names."""
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_tree(part, name)
    if isinstance(value, dict) and not _is_flat(value.get("context")):
        raise FileFormatError(f"{name} has inputs or outputs of a kind that imports modules; refused")


def _is_flat(context: Any) -> bool:
    """Whether a context, which may be JSON in a text, holds names and numbers alone."""
    if isinstance(context, str) and context[:1] in '{["':
        context = json.loads(context)
    entries = context if isinstance(context, list) else [context]
    return all(entry is None or isinstance(entry, str | int | float) for entry in entries)


def _is_arithmetic(text: str) -> bool:
    text = _SYMBOL.sub("1", text)
    allowed = all(_NAMES.fullmatch(word) for word in re.findall(r"[^\W\d]\w*", text))
    if not allowed or len(text) >= 10_000 or _SIZE.fullmatch(text) is None or re.search(r"[\w)]\.[^\W\d]", text):
        return False
    try:
        return _power(ast.parse(text.strip(), mode="eval")) <= LARGEST_POWER
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # also the n! that sympy would compute
        return False


_ARITHMETIC = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.Name, ast.Constant),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.BitAnd, ast.BitOr, ast.USub),
    *(ast.UAdd, ast.Invert, ast.And, ast.Or, ast.Not, ast.cmpop, ast.expr_context),
)


def _power(node: ast.AST) -> float:
    """Bounds how much longer numbers become in an expression by its powers; infinite if it is no arithmetic."""
    if not isinstance(node, _ARITHMETIC):
        return math.inf
    inner = max(map(_power, ast.iter_child_nodes(node)), default=1.0)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return inner * _exponent(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith("Pow"):
        return inner * (_exponent(node.args[1]) if len(node.args) == 2 else math.inf)
    return inner


def _exponent(node: ast.AST) -> float:
    if isinstance(node, ast.UnaryOp):
        return _exponent(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Integer" and node.args:
        return _exponent(node.args[0])
    return max(1, node.value) if isinstance(node, ast.Constant) and isinstance(node.value, int) else math.inf


def _check_size(sizes: list[Any], name: str) -> None:
    """Refuses a tensor of a declared size that no file could hold; an empty record is filled with zeros."""
    declared = [part.get("as_int", 1) if isinstance(part, dict) else 1 for part in sizes]
    if all(isinstance(size, int) for size in declared) and not 0 <= math.prod(declared) <= LARGEST:
        raise FileFormatError(f"{name} declares a tensor of the sizes {declared}; refused")


class _Counting(TorchDispatchMode):
    """Counts the entries of all that operators make, and stops above a number."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.left = self.limit = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.left -= sum(part.numel() for part in tree_leaves(result) if isinstance(part, Tensor))
        if self.left < 0:
            raise FileFormatError(f"its operators make more than {self.limit} entries, too many for its size")
        return result


class _DryRun(fx.Interpreter):
    """Runs a graph on tensors without memory; whole numbers stay within 64 bits."""

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if target in (operator.pow, operator.lshift) and not -64 <= args[1] <= 64:
            raise FileFormatError(f"it computes the size {args[0]} to the power of {args[1]}; refused")
        result = super().call_function(target, args, kwargs)
        if isinstance(result, int) and abs(result) >= 1 << 63:
            raise FileFormatError(f"it computes a size of {result.bit_length()} bits; refused")
        return result


def check_work(program: ExportedProgram, size: int) -> None:
    """Refuses a program that makes far more of its input than its file and that input have room for.

    Args:
        program: loaded, not run; its operators are run here on tensors without memory.
        size: bytes of the file.

    Raises:
        FileFormatError: too many entries, or operators that do not fit together.
    """
    stored = {**program.state_dict, **program.constants}
    given = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    names = [spec.target if spec.target in stored else None for spec in program.graph_signature.input_specs]
    values = [shape if name is None else stored[name] for name, shape in zip(names, given.values(), strict=True)]
    shapes = [tuple(map(_some_size, value.shape)) if isinstance(value, Tensor) else None for value in values]
    inputs = sum(math.prod(shape) for name, shape in zip(names, shapes, strict=True) if name is None and shape)
    limit = ENTRIES_PER_BYTE * size + ENTRIES_FREE + ENTRIES_PER_INPUT * inputs
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            pairs = zip(values, shapes, strict=True)
            tensors = [v if shape is None else torch.empty(shape, dtype=v.dtype) for v, shape in pairs]
            with _Counting(limit):
                _DryRun(program.graph_module).run(*tensors)
    except FileFormatError:
        raise
    except Exception as error:  # whatever operators say of arguments that do not fit
        raise FileFormatError(f"its operators do not fit together: {_line(error)}") from error


def _some_size(size: Any) -> int:
    """Returns a size; a small one where it may vary."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, 4)))


Network = nn.Module | ExportedProgram


def read_source(source: str) -> Network:
    """Returns the network that ``model.pt2``, ``package.module:factory`` or ``path/to/file.py:factory`` names.

    A factory is a module, an exported program, or a function or class that makes one without arguments. The
    current folder can be imported from.
    """
    if source.endswith((".pt2", ".pt", ".pth")) or Path(source).is_file():
        return _exported(Path(source))
    module, colon, name = source.rpartition(":")
    if not colon or not module or not name:
        raise _wrong(f"{source!r} is neither an exported program (.pt2) nor module:factory")
    namespace = _file(Path(module)) if module.endswith(".py") else _module(module)
    network = _attribute(namespace, module, name)
    if callable(network) and not isinstance(network, nn.Module):
        try:
            network = network()
        except Exception as error:
            raise click.ClickException(f"{source!r} called without arguments fails: {_line(error)}") from error
    if not isinstance(network, nn.Module | ExportedProgram):
        raise _wrong(f"{source!r} gives {type(network).__name__}; it must give a torch.nn.Module")
    return network


def _exported(path: Path) -> ExportedProgram:
    if not path.is_file():
        raise _wrong(f"there is no file {str(path)!r}")
    if path.suffix != ".pt2":
        raise _wrong(
            f"{str(path)!r} is not an exported program; write one with torch.export.save(torch.export.export("
            f"model, (u,)), 'model.pt2'), or give module:factory"
        )
    try:
        archive = check_exported(path)
    except FileFormatError as error:
        raise click.ClickException(f"{str(path)!r} is not loaded: {error}") from error
    size = archive.getbuffer().nbytes
    try:
        program: ExportedProgram = torch.export.load(archive)
    except Exception as error:
        raise click.ClickException(f"{str(path)!r} cannot be read by torch.export.load: {_line(error)}") from error
    try:
        check_work(program, size)
    except FileFormatError as error:
        raise click.ClickException(f"{str(path)!r} is not used: {error}") from error
    return program


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise _wrong(f"there is no file {str(path)!r}")
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if specification is None or specification.loader is None:
        raise _wrong(f"{str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        raise click.ClickException(f"{str(path)!r} fails on import: {_line(error)}") from error
    return module


def _module(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(f"{name}:")
    except ValueError as error:
        raise _wrong(f"{name!r} is not the name of a module: {error}") from error
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name or name.startswith(f"{missing}."):
            raise _wrong(f"there is no module {missing!r}; the current folder was searched too") from error
        raise click.ClickException(f"{name!r} needs the module {missing!r}, which is not installed") from error
    except Exception as error:
        raise click.ClickException(f"{name!r} fails on import: {_line(error)}") from error


def _attribute(namespace: Any, module: str, name: str) -> Any:
    value = namespace
    for part in name.split("."):
        if not hasattr(value, part):
            offered = [
                key for key in vars(namespace) if not key.startswith("_") and callable(getattr(namespace, key))
            ]
            raise _wrong(f"{module!r} has no {name!r}; it offers {', '.join(sorted(offered)[:12]) or 'nothing'}")
        value = getattr(value, part)
    return value


def _line(error: Exception) -> str:
    """Returns the first line of an error with its type."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _wrong(message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint="SOURCE")


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
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number", param, ctx)
        if not (math.isfinite(number) and number >= 0):
            self.fail(f"a radius is finite and not negative; received {value}", param, ctx)
        return number


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
        source: a file that `wellposed.save` wrote, an exported program, an ONNX file, module:factory, or
            reference:name.
        data: a set, a part of one (its test part if none is named), or a file of arrays.
        count: how many samples are drawn.
        valid: the range in which every input lies.
    """
    if not valid[0] < valid[1]:
        raise wrong(f"the range needs its lower end first; received {valid[0]:g} {valid[1]:g}", "--range")
    samples = read_samples(data, "--data", "test").drawn(count)
    if samples.targets is None:
        raise wrong(f"{data!r} has no targets; store the classes beside the inputs under the name y", "--data")
    _check_range(samples.u, valid)
    model = read_classifier(source)
    u, outputs = _fitted(model, samples)
    return Labelled(model, u, _classes(samples, outputs), samples.source, source, data)


def read_classifier(source: str, option: str = "--model") -> Classifier:
    """Reads a model in evaluation mode; an exported program becomes its form."""
    if source.startswith(REFERENCE) or source.endswith((".safetensors", ".onnx")):
        return _stored(source, option)
    try:
        network = read_source(source)
    except click.BadParameter as error:
        error.param_hint = option
        raise
    if isinstance(network, nn.Module):
        return network.eval()
    example = network.example_inputs[0] if network.example_inputs else ()
    if not example or not isinstance(example[0], Tensor):
        raise wrong(f"{source!r} has no example input, so the shape of a sample is not known", option)
    with refused():
        return to_implicit(network, tuple(example[0].shape[1:]))


def _stored(source: str, option: str) -> Classifier:
    """Reads a reference model, or a file that `save` or an exporter of ONNX has written."""
    path, reference = Path(source), source.startswith(REFERENCE)
    if not reference and not path.is_file():
        raise wrong(f"there is no file {str(path)!r}", option)
    try:
        if not reference and path.suffix == ".onnx":
            return read_onnx(path)
        model = load_reference(source.removeprefix(REFERENCE)) if reference else load(path)
    except (FileFormatError, UnknownNameError) as error:
        raise wrong(str(error), option) from error
    if not isinstance(model, ImplicitForm | ImplicitModel):
        raise wrong(f"{source!r} holds {type(model).__name__}, not a form or an ImplicitModel", option)
    return model.eval()


class Adapted(nn.Module):
    """A second classifier that is asked in the shape and precision of another one's inputs."""

    def __init__(self, model: Classifier, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.shape, self.dtype = model, shape, dtype

    def forward(self, u: Tensor) -> Tensor:  # (B, *input) -> (B, classes)
        """Asks the classifier."""
        outputs: Tensor = self.model(u.reshape(-1, *self.shape).to(self.dtype))
        return outputs.to(u.dtype)


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


def _fitted(model: Classifier, samples: Samples) -> tuple[Tensor, Tensor]:
    """Returns inputs as the model takes them, as they are or one row a sample, and its outputs for the first."""
    if isinstance(model, ImplicitForm):
        kind, shapes = model.dtype, [model.input_shape]
        if math.prod(model.input_shape) != samples.u[0].numel():
            raise RefusedError(
                f"the model takes samples of the shape {model.input_shape}; received {tuple(samples.u.shape[1:])}"
            )
    else:
        values = (*model.parameters(), *model.buffers())
        kind = next((value.dtype for value in values if value.is_floating_point()), samples.u.dtype)
        shapes = [tuple(samples.u.shape[1:]), (samples.u[0].numel(),)]
        if isinstance(model, OnnxNetwork) and math.prod(model.input_shape) == samples.u[0].numel():
            shapes = [model.input_shape]
    complaints = []
    for shape in dict.fromkeys(shapes):
        u = samples.u.reshape(-1, *shape).to(kind)
        try:
            with torch.no_grad():
                return u, _outputs(model(u[:2]))
        except Exception as error:  # whatever a network raises on a shape it does not take
            complaints.append((str(error).strip().splitlines() or [type(error).__name__])[0])
    raise RefusedError(f"the model takes no samples of the shape {tuple(samples.u.shape[1:])}: {complaints[-1]}")


def _outputs(outputs: Any) -> Tensor:
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or outputs.shape[1] < 2:
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise InputError(f"a classifier returns one output a class, (batch, classes); this one returned {got}")
    if not bool(outputs.isfinite().all()):
        raise InputError("the model returned NaN or infinite outputs")
    return outputs


def _classes(samples: Samples, outputs: Tensor) -> Tensor:
    target = samples.targets
    assert target is not None
    if target.is_floating_point() or target.dim() != 1:
        raise wrong(f"targets are classes, one whole number a sample; received {target.dtype} "
                    f"{tuple(target.shape)}", "--data")  # fmt: skip
    low, high, classes = int(target.min()), int(target.max()), outputs.shape[1]
    if low < 0 or high >= classes:
        raise wrong(f"the model has classes 0 to {classes - 1}; the targets reach from {low} to {high}", "--data")
    return target.long()


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a page or a picture, whole or not at all."""
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():  # a terminal or a pipe
            path.write_bytes(data)
            return
        with atomic_write(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise wrong(f"cannot write {path} ({os.strerror(error.errno or 0)})", "--out") from error
