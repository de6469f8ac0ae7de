"""Saving and loading models and forms: safetensors and JSON, no pickle.

`save` writes one file with the configuration inside, or a folder in the conventions of the Hugging Face hub:
weights, configuration and a card. `load` reads both, and downloads from the hub; `save_pretrained` and
`from_pretrained` are the same for folders, under the hub's names. `reference_models` and `load_reference` are
small trained models that come with the package, each with a card of what it is and what was measured.
"""

import copy
import dataclasses
import importlib.resources
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wellposed.activations import Activation
from wellposed.activations.blockwise import parts_of, piecewise
from wellposed.atomic import NEW, atomic_write, atomic_write_folder, atomic_write_with_proof, read_folder
from wellposed.checker import certificate_path
from wellposed.conditions.certificate import Certificate
from wellposed.conditions.conditions import StateMatrix, Triangular
from wellposed.equilibrium import gradients, solvers, stopping
from wellposed.errors import FileFormatError, InputError, WellposedError, require, unknown_name
from wellposed.forms import ImplicitForm
from wellposed.forms.storage import (
    FORM_FORMAT,
    pack_form,
    registered_name,
    stored_activation,
    strict_json,
    unpack_form,
)
from wellposed.models.cells import (
    ConvCell,
    DenseCell,
    MultiscaleCell,
    PlainConvCell,
    RecallCell,
    TransformerCell,
)
from wellposed.models.deq import DEQ
from wellposed.models.implicit import ImplicitModel
from wellposed.models.io.certificates import Claim, prove_file, with_projected_parameters
from wellposed.models.io.files import (
    as_format_error,
    check_counts,
    checksum,
    load_checked,
    pack_tensors,
    read_tensors,
    unpack_tensors,
    write_tensors,
)
from wellposed.models.multiscale import MultiscaleDEQ
from wellposed.models.recurrent import ImplicitRNN

FORMAT, DEQ_FORMAT = "wellposed-1", "wellposed-deq-1"
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"  # in a folder
_OWN = (
    "input_size",
    "hidden_size",
    "out_features",
    "batch_first",
    "num_layers",
    "bidirectional",
    "dropout",
    "warm_start",
)
_PARTS: dict[str, type] = {
    part.__name__: part
    for part in (
        *(solvers.Picard, solvers.Anderson, solvers.Broyden, solvers.Newton),
        *(stopping.Absolute, stopping.Relative, stopping.ErrorBound, stopping.MeanRelative),
        *(stopping.Steps, stopping.RandomSteps, stopping.RandomThreshold),
        *(gradients.Implicit, gradients.Phantom, gradients.Polished, gradients.Unrolled),
    )
}


Model = ImplicitModel | ImplicitRNN
Storable = ImplicitModel | ImplicitRNN | ImplicitForm | DEQ | MultiscaleDEQ


def save(
    model: Storable,
    path: str | os.PathLike[str],
    *,
    certificate: bool = False,
    claims: Iterable[Claim] = (),
    card: str = "",
) -> None:
    """Writes a model or a form to one safetensors file, or to a folder; atomically.

    A process that is killed leaves the old file or the new one, never beside the certificate of the other.

    Args:
        model: an `ImplicitModel`, `ImplicitRNN`, `ImplicitForm`, `DEQ` or `MultiscaleDEQ`. An activation of your
            own must be registered where the file is loaded, and a cell of your own given to `load`.
        path: the file to write; an existing folder, or a text that ends with ``/``, for a folder as
            `save_pretrained` writes it.
        certificate: writes the proof of well-posedness too, beside the file and with the ending .cert, for
            ``wellposed verify``. The file then holds the matrices that are evaluated, not the free parameters
            behind them. Nothing is proven of a `DEQ`, so it has none.
        claims: what else the certificate of a file is to say; see `write_certificate`.
        card: of a folder, Markdown about data, training and limits.

    Raises:
        IllPosedError: the certificate is refused; the model is saved without one.
    """
    if os.path.isdir(path) or os.fspath(path).endswith(("/", os.sep)):
        if tuple(claims):
            raise InputError("a folder has the certificate of well-posedness alone; save claims with a file")
        return save_pretrained(model, path, card=card, certificate=certificate)
    if card:
        raise InputError(f"a card goes into a folder; {os.fspath(path)!r} is a file: end it with '/' for a folder")
    certified = _certifiable(model) if certificate else None
    tensors, kind, body = _describe(model if certified is None else certified)
    metadata = {"format": kind, _body_name(kind): body}
    tensors, table = pack_tensors(tensors)
    if table:
        metadata["packed"] = json.dumps(table)
    metadata["sha256"] = checksum(json.dumps(metadata, sort_keys=True), tensors)
    if certified is None:
        with atomic_write(path) as temporary:
            write_tensors(temporary, tensors, metadata)
        return None
    failure: WellposedError | None = None
    with atomic_write_with_proof(path, certificate_path(Path(path))) as (temporary, proof):
        write_tensors(temporary, tensors, metadata)
        try:
            prove_file(certified, temporary, proof, claims)
        except WellposedError as error:
            failure = error
    if failure is not None:
        raise failure
    return None


def _certifiable(model: Storable) -> Model | ImplicitForm:
    """Returns the model as its certificate speaks of it."""
    if isinstance(model, DEQ | MultiscaleDEQ):
        raise InputError(f"nothing is proven of a {type(model).__name__}; leave certificate out")
    return with_projected_parameters(model)


def load(path: str | os.PathLike[str], *, revision: str | None = None, cell: nn.Module | None = None) -> Storable:
    """Reads a model or a form that `save` or `save_pretrained` has written, on the CPU.

    Args:
        path: a file, a folder, or the name ``owner/model`` of a repository of the hub, which is then downloaded
            once by `huggingface_hub`.
        revision: branch, tag or commit of the repository.
        cell: a module of the same class, for a `DEQ` whose cell is not of this library; it gets the weights.

    Raises:
        FileNotFoundError: there is no such file or folder.
        FileFormatError: it is not a model, or it is damaged.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> save(DEQ(DenseCell(3, 8)), path)
        >>> load(path).cell.state_features
        8
    """
    given = Path(path)
    if given.is_file():
        if revision is not None:
            raise InputError(f"revision={revision!r} is of a repository; {os.fspath(path)!r} is a file here")
        return _load_file(given, cell)
    named = isinstance(path, str) and _REPOSITORY.fullmatch(path) and given.suffix != ".safetensors"
    if not given.is_dir() and (not named or given.parent.is_dir()):
        raise FileNotFoundError(f"no model at {os.fspath(path)!r}: no file, no folder, no name 'owner/model'")
    folder = _folder(path, revision)
    return read_folder(folder, (WEIGHTS, CONFIG), lambda paths: _load_folder(folder, paths, cell))


def _load_file(path: Path, cell: nn.Module | None) -> Storable:
    try:
        tensors, metadata = read_tensors(path)
    except FileFormatError as error:
        raise FileFormatError(f"{os.fspath(path)!r} cannot be read: {error}") from error
    if metadata.get("format") not in (FORMAT, FORM_FORMAT, DEQ_FORMAT):
        raise FileFormatError(
            f"{os.fspath(path)!r} was not written by wellposed.save: its format is {metadata.get('format')!r}, "
            f"expected {FORMAT!r}, {FORM_FORMAT!r} or {DEQ_FORMAT!r}"
        )
    sealed = metadata.pop("sha256", None)  # older files have none
    body = _body_name(metadata["format"])
    if metadata.keys() - {"packed"} != {"format", body}:
        raise FileFormatError(
            f"{os.fspath(path)!r} describes itself by {sorted(metadata)}, expected 'format' and {body!r}"
        )
    if sealed is not None and sealed != checksum(json.dumps(metadata, sort_keys=True), tensors):
        raise FileFormatError(f"{os.fspath(path)!r} is damaged: its checksum does not match; get it once more")
    try:
        with as_format_error("its configuration does not fit its tensors"):
            if "packed" in metadata:
                tensors = unpack_tensors(tensors, strict_json(metadata["packed"], "its table of packed tensors"))
            if metadata["format"] == FORM_FORMAT:
                return unpack_form(metadata, tensors)
            return _build(metadata["format"], strict_json(metadata["config"], "its configuration"), tensors, cell)
    except FileFormatError as error:
        raise FileFormatError(f"{os.fspath(path)!r} is damaged: {error}") from error


def _body_name(kind: str) -> str:
    """Returns the entry that describes a model of that format."""
    return "form" if kind == FORM_FORMAT else "config"


def _describe(model: Storable) -> tuple[dict[str, Tensor], str, str]:
    """Returns the tensors of a model, its format and its description in JSON."""
    if isinstance(model, ImplicitForm):
        tensors, metadata = pack_form(model)
        return tensors, FORM_FORMAT, metadata["form"]
    if isinstance(model, DEQ | MultiscaleDEQ):
        kind, config = DEQ_FORMAT, _deq_configuration(model)
    elif isinstance(model, Model):
        kind, config = FORMAT, configuration(model)
    else:
        raise InputError(
            "an ImplicitModel, ImplicitRNN, ImplicitForm, DEQ or MultiscaleDEQ can be saved; received "
            f"{type(model).__name__}. Of other modules save the state_dict(): their code is not part of it"
        )
    tensors = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    return tensors, kind, json.dumps(config)


def _build(kind: str, config: dict[str, Any], tensors: dict[str, Tensor], cell: nn.Module | None) -> Storable:
    check_counts(config, tensors)
    return build(config, tensors) if kind == FORMAT else _build_deq(config, tensors, cell)


def configuration(model: Model) -> dict[str, Any]:
    if isinstance(model, ImplicitModel):
        return _options(model)
    own = {name: getattr(model, name) for name in _OWN}
    own["readout_bias"] = model.readout is not None and model.readout.bias is not None
    return {"kind": "ImplicitRNN", **own, "cells": [_options(model.cell(k)) for k in range(len(model.cells))]}


def _options(model: ImplicitModel) -> dict[str, Any]:
    condition = model.condition
    return {
        "in_features": model.in_features,
        "out_features": model.out_features,
        "state_features": model.state_features,
        "activation": _named(model.activation),
        "kappa": model.kappa,
        "condition": condition.name,
        "triangle": [condition.lower, condition.diagonal] if isinstance(condition, Triangular) else None,
        "rank": None if hasattr(model.state, "raw") else model.state.left.shape[1],
        "feedthrough": model.D is not None,
        "bias": model.bias is not None,
        "solver": encode(model.solver),
        "stop": encode(model.stop),
        "max_steps": model.max_steps,
        "gradient": encode(model.gradient),
        "on_failure": model.on_failure,
        "executor": model.executor,
    }


def _named(activation: Activation) -> str | dict[str, list[Any]]:
    """Writes an activation as its name, or as the names and sizes of its parts."""
    pieces = parts_of(activation)
    if pieces is None:
        return registered_name(activation)
    return {"parts": [registered_name(piece) for piece, _ in pieces], "sizes": [size for _, size in pieces]}


def _activation(named: Any, states: int) -> Activation:
    names, sizes = [named], [states]
    if not isinstance(named, str):
        if not isinstance(named, dict) or named.keys() != {"parts", "sizes"}:
            raise FileFormatError(f"an activation is stored by name or by 'parts' and 'sizes'; received {named!r}")
        names, sizes = named["parts"], named["sizes"]
    whole = isinstance(names, list) and isinstance(sizes, list) and bool(sizes) and all(map(_positive, sizes))
    if not whole or len(names) != len(sizes) or sum(sizes) != states:
        raise FileFormatError(f"the activations {names!r} of the sizes {sizes!r} do not make up {states!r} states")
    pieces = [stored_activation(name) for name in names]
    for piece, size in zip(pieces, sizes, strict=True):
        if piece.block and size % piece.block:
            raise FileFormatError(f"{piece.name} does not act on {size} states")
    return piecewise(pieces, sizes)


def _positive(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _flag(value: Any) -> bool:
    return type(value) is bool


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _any(value: Any) -> bool:
    return True


def _or_none(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or rule(value)


def _triangle(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_flag, value))


_ENTRIES: dict[str, Callable[[Any], bool]] = {  # of `_options`; the constructors look at those of `_any`
    **dict.fromkeys(("in_features", "out_features", "state_features"), _positive),
    **{"activation": _any, "kappa": _or_none(_number), "condition": _text, "triangle": _or_none(_triangle)},
    **{"rank": _or_none(_positive), "feedthrough": _flag, "bias": _flag, "on_failure": _text, "executor": _text},
    **dict.fromkeys(("solver", "stop", "max_steps", "gradient"), _any),
}
_OWN_ENTRIES: dict[str, Callable[[Any], bool]] = {  # of `configuration`, for a recurrent network
    **dict.fromkeys(("input_size", "hidden_size", "num_layers"), _positive),
    **dict.fromkeys(("batch_first", "bidirectional", "warm_start", "readout_bias"), _flag),
    **{"out_features": _or_none(_positive), "dropout": _number, "cells": lambda value: isinstance(value, list)},
}


def _checked(config: Any, entries: Mapping[str, Callable[[Any], bool]]) -> dict[str, Any]:
    """Refuses a configuration with missing, unknown or invalid entries."""
    if not isinstance(config, dict) or config.keys() != entries.keys():
        given = sorted(config) if isinstance(config, dict) else repr(config)
        raise FileFormatError(f"a configuration has the entries {sorted(entries)}; received {given}")
    for name, rule in entries.items():
        if not rule(config[name]):
            raise FileFormatError(f"{name} cannot be {config[name]!r} in a configuration")
    return config


def encode(part: Any) -> Any:
    """Writes a solver, rule or gradient as its class name and fields."""
    if part is None or isinstance(part, str | int | float | bool):
        return part
    if type(part).__name__ not in _PARTS:
        raise InputError(f"cannot save {part!r}: only the library's own solvers, rules and gradients can be saved")
    fields = {f.name: encode(getattr(part, f.name)) for f in dataclasses.fields(part)}
    return {"type": type(part).__name__, **fields}


def decode(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    fields = {name: decode(value) for name, value in part.items()}
    name = fields.pop("type")
    if name not in _PARTS:
        raise unknown_name("part", name, _PARTS)
    return _PARTS[name](**fields)


def build(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Model:
    if not isinstance(config, dict):
        raise FileFormatError(f"a configuration is a table; received {config!r}")
    recurrent = "kind" in config
    if recurrent and config.pop("kind") != "ImplicitRNN":
        raise FileFormatError("the kind of a model is 'ImplicitRNN', or is not written for an ImplicitModel")
    empty: Callable[[dict[str, Any]], Model] = _empty_recurrent if recurrent else _empty
    return load_checked(lambda: empty(copy.deepcopy(config)), tensors)


def _empty(config: dict[str, Any]) -> ImplicitModel:
    """Builds a model of the right shape, with arbitrary values."""
    triangle = _checked(config, _ENTRIES).pop("triangle")
    if (config["condition"] == "triangular") != (triangle is not None):
        raise FileFormatError(f"the condition is {config['condition']!r}, and the triangle {triangle!r}")
    activation = _activation(config.pop("activation"), config["state_features"])
    options = {"activation": activation, **{name: decode(value) for name, value in config.items()}}
    condition = options.pop("condition")
    if triangle is not None and (reason := Triangular().why_not(activation)):
        raise FileFormatError(f"condition 'triangular' cannot apply to {activation.name!r}: {reason}")
    if triangle is not None:
        options["triangular"] = True
    else:
        options["condition"] = condition
    model = ImplicitModel(**options)
    if triangle is not None and any(triangle):
        rule = Triangular(*triangle)
        model.state = StateMatrix(model.state_features, model.activation, rule, model.kappa, None)
    return model


def _empty_recurrent(config: dict[str, Any]) -> ImplicitRNN:
    cells = [_empty(cell) for cell in _checked(config, _OWN_ENTRIES).pop("cells")]
    if not cells or (config["readout_bias"] and config["out_features"] is None):
        raise FileFormatError("a recurrent network has cells, and a bias of its readout only with a readout")
    options = {**config, "state_features": cells[0].state_features, "bias": cells[0].bias is not None}
    model = ImplicitRNN(**options)
    if len(cells) != len(model.cells):
        raise KeyError(f"{len(model.cells)} cells expected, {len(cells)} found")
    for index, cell in enumerate(cells):
        wanted = model.cell(index)
        if (cell.in_features, cell.out_features) != (wanted.in_features, wanted.out_features):
            raise FileFormatError(
                f"cell {index} takes {wanted.in_features} inputs to {wanted.out_features} outputs; received "
                f"{cell.in_features} and {cell.out_features}"
            )
        model.cells[index] = cell
    return model


_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_CELLS: dict[str, Any] = {
    cell.__name__: cell
    for cell in (ConvCell, DenseCell, MultiscaleCell, PlainConvCell, RecallCell, TransformerCell)
}
_SOLVE_OPTIONS = ("solver", "stop", "max_steps", "gradient", "on_failure", "executor")


def save_pretrained(
    model: Storable, folder: str | os.PathLike[str], *, card: str = "", certificate: bool = False
) -> None:
    """Writes ``model.safetensors``, ``config.json`` and the model card ``README.md``.

    The folder is what a repository of the hub holds. All of it is tensors and text: loading runs no code of it. A
    process that is killed leaves a folder of which `from_pretrained` reads the old model or the new one.

    Args:
        model: as in `save`.
        folder: made if it is not there; files of these names in it are replaced, and ``model.cert`` is deleted.
        card: Markdown about data, training and limits, put into the card.
        certificate: writes ``model.cert`` too, as `save` does.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> save_pretrained(ImplicitModel(3, 2, 8), folder)
        >>> sorted(os.listdir(folder))
        ['README.md', 'config.json', 'model.safetensors']
        >>> from_pretrained(folder).state_features
        8
    """
    _write_folder(model, Path(folder), card, certificate, {})


def _write_folder(model: Storable, folder: Path, card: str, certificate: bool, texts: dict[str, str]) -> None:
    """Writes a folder with further texts by their names, all at once."""
    certified = _certifiable(model) if certificate else None
    tensors, kind, body = _describe(model if certified is None else certified)
    config: dict[str, Any] = {"library_name": "wellposed", "architectures": [type(model).__name__]}
    config |= {"format": kind, _body_name(kind): json.loads(body)}
    tensors, table = pack_tensors(tensors)
    if table:
        config["packed"] = table
    config["sha256"] = _seal(config, tensors)
    written = {CONFIG: json.dumps(config, indent=2) + "\n", CARD: _card(model, config, card), **texts}
    failure: WellposedError | None = None
    proof = certificate_path(Path(WEIGHTS))
    with atomic_write_folder(folder, stale=[proof.name]) as temporary:
        write_tensors(temporary / WEIGHTS, tensors, {"format": "pt"})
        for name, text in written.items():
            (temporary / name).write_text(text, encoding="utf-8")
        if certified is not None:
            try:
                prove_file(certified, temporary / WEIGHTS, temporary / proof, config=True)
            except WellposedError as error:
                failure = error
    if failure is not None:
        raise failure


def from_pretrained(
    source: str | os.PathLike[str], *, revision: str | None = None, cell: nn.Module | None = None
) -> Storable:
    """Reads a folder or a repository of the hub, as `load` does."""
    if Path(source).is_file():
        raise FileNotFoundError(f"no folder at {os.fspath(source)!r}; wellposed.load reads files")
    return load(source, revision=revision, cell=cell)


def _load_folder(folder: Path, paths: dict[str, Path], cell: nn.Module | None) -> Storable:
    for name, path in paths.items():
        if not path.is_file():
            raise FileNotFoundError(f"no {name} in {os.fspath(folder)!r}; save_pretrained writes such folders")
    where = f"{CONFIG} and {WEIGHTS} in {os.fspath(folder)!r} make no model"
    try:
        with as_format_error("the configuration makes no sense"):
            tensors, metadata = read_tensors(paths[WEIGHTS])
            if metadata not in ({}, {"format": "pt"}):
                raise FileFormatError(
                    f"{WEIGHTS} describes itself too, by {sorted(metadata)}; wellposed.load reads that file alone"
                )
            config = strict_json(paths[CONFIG].read_bytes(), CONFIG)
            if "sha256" in config and config["sha256"] != _seal(config, tensors):  # older folders have none
                raise FileFormatError(
                    "their checksum does not match: one is damaged, or of another model. Get both once more; if "
                    "you have changed them yourself, delete the entry sha256"
                )
            if "packed" in config:
                tensors = unpack_tensors(tensors, config.pop("packed"))
            return _build_described(config, tensors, cell)
    except FileFormatError as error:
        raise FileFormatError(f"{where}: {error}") from error


def _folder(path: str | os.PathLike[str], revision: str | None) -> Path:
    """Returns the folder, if need be after a download."""
    if Path(path).is_dir():
        if revision is not None:
            raise InputError(f"revision={revision!r} is of a repository; {os.fspath(path)!r} is a folder here")
        return Path(path)
    hub = require("huggingface_hub", extra="share")
    wanted = [name for file in (WEIGHTS, CONFIG, CARD) for name in (file, f"{NEW}/{file}")]
    return Path(hub.snapshot_download(path, revision=revision, allow_patterns=wanted))


def _seal(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Returns a checksum over weights and configuration, which are two files."""
    sealed = {name: config.get(name) for name in ("format", "config", "form")}
    sealed |= {"packed": config["packed"]} if "packed" in config else {}
    return checksum(json.dumps(sealed, sort_keys=True), tensors)


def _build_described(config: dict[str, Any], tensors: dict[str, Tensor], cell: nn.Module | None) -> Storable:
    kind = config["format"]
    if kind not in (FORM_FORMAT, FORMAT, DEQ_FORMAT):
        raise FileFormatError(
            f"the format {kind!r} is not known; known are {FORMAT}, {FORM_FORMAT} and {DEQ_FORMAT}"
        )
    body = _body_name(kind)
    if unknown := sorted(config.keys() - {"library_name", "architectures", "format", body, "sha256"}):
        raise FileFormatError(f"the entry {unknown[0]!r} of the configuration means nothing")
    model: Storable
    if kind == FORM_FORMAT:
        model = unpack_form({"form": json.dumps(config["form"])}, tensors)
    else:
        model = _build(kind, config["config"], tensors, cell)
    named = {"library_name": "wellposed", "architectures": [type(model).__name__]}
    for name, expected in named.items():
        if config.get(name, expected) != expected:
            raise FileFormatError(f"{name} is {config[name]!r}, expected {expected!r}")
    return model


def _deq_configuration(model: DEQ | MultiscaleDEQ) -> dict[str, Any]:
    deq = model.deq if isinstance(model, MultiscaleDEQ) else model
    if deq.noise is not None:
        raise InputError("noise is not part of a file; set the attribute noise to None and save again")
    options = {name: encode(getattr(deq, name)) for name in _SOLVE_OPTIONS}
    if isinstance(model, MultiscaleDEQ):
        return {"kind": "MultiscaleDEQ", **_multiscale_options(model), **options}
    name = type(deq.cell).__name__
    if type(deq.cell) is not _CELLS.get(name):
        return {"cell": {"type": name, "own": True}, "state_shape": deq.state_shape, **options}
    if any(parametrize.is_parametrized(layer) for layer in deq.modules()):
        raise InputError("weights under a norm cannot be saved as such; call wellposed.models.remove_norms first")
    return {
        "cell": {"type": name, **_cell_options(deq.cell)},
        "state_shape": deq.state_shape,
        **options,
    }


def _multiscale_options(model: MultiscaleDEQ) -> dict[str, Any]:
    """Returns the arguments that make a model of the same kind."""
    cell: Any = model.deq.cell
    convolutions: list[Any] = [stage[0] for stage in model.stem]  # type: ignore[index]
    return {
        "in_channels": model.in_channels,
        "classes": model.classes,
        "channels": list(cell.channels),
        "head_channels": [stage[0].out_channels for stage in model.head.increase],  # type: ignore[index]
        "final_channels": model.classifier.in_features,
        "kernel_size": convolutions[0].kernel_size[0],
        "groups": cell.groups,
        "weight_norm": any(parametrize.is_parametrized(layer) for layer in cell.modules()),
        "dropout": cell.blocks[0].dropout.p,
        "stem_downsample": len(convolutions) if convolutions[0].stride[0] > 1 else 0,
    }


def _cell_options(cell: nn.Module) -> dict[str, Any]:
    """Returns the arguments that make a cell of the same kind."""
    names = (
        "in_features",
        "state_features",
        "in_channels",
        "channels",
        "dims",
        "groups",
        "width",
        "heads",
        "causal",
    )
    options = {name: getattr(cell, name) for name in names if hasattr(cell, name)}
    for name in ("activation", "projection"):
        if hasattr(cell, name):
            options[name] = registered_name(getattr(cell, name).activation)
    if isinstance(cell, DenseCell | RecallCell):
        options["depth"] = len(cell.layers)
    if isinstance(cell, PlainConvCell | RecallCell):
        options["kernel_size"] = cell.state.kernel_size[0]
    if isinstance(cell, MultiscaleCell):
        block: Any = cell.blocks[0]
        options |= {"kernel_size": block.first.kernel_size[0], "dropout": block.dropout.p}
    if isinstance(cell, ConvCell):
        options |= {"kernel_size": cell.input.kernel_size[0], "dropout": cell.block.dropout.p}
    if isinstance(cell, TransformerCell):
        options |= {"hidden": cell.hidden.out_features, "dropout": cell.dropouts[0].p}
    return options


def _build_deq(config: dict[str, Any], tensors: dict[str, Tensor], cell: nn.Module | None) -> DEQ | MultiscaleDEQ:
    options = {name: decode(value) for name, value in config.items() if name not in ("kind", "cell")}
    if "kind" in config:
        if config["kind"] != "MultiscaleDEQ":
            raise unknown_name("kind of model", str(config["kind"]), ["MultiscaleDEQ"])
        return load_checked(lambda: MultiscaleDEQ(**options), tensors)
    described = dict(config["cell"])
    name = described.pop("type")
    if described.pop("own", False):
        return _fill_own_cell(name, cell, options, tensors)
    if name not in _CELLS:
        raise unknown_name("cell", name, _CELLS)
    return load_checked(lambda: DEQ(_CELLS[name](**described), **options), tensors)


def _fill_own_cell(name: str, cell: nn.Module | None, options: dict[str, Any], tensors: dict[str, Tensor]) -> DEQ:
    """Loads the weights of a cell whose code the caller has."""
    if cell is None or type(cell).__name__ != name:
        received = "" if cell is None else f"; received a {type(cell).__name__}"
        raise FileFormatError(
            f"it is a DEQ with a cell of the class {name}, whose code is not part of the file: make one and call "
            f"load(..., cell={name}(...)){received}"
        )
    if not tensors:
        return DEQ(cell, **options)
    return load_checked(lambda: DEQ(cell, **options), tensors)


def _card(model: Storable, config: dict[str, Any], text: str) -> str:
    """Writes the model card; its head is what the hub reads."""
    kind = config["architectures"][0]
    facts = [f"- kind: `{kind}`", *_facts(model)]
    lines = ["---", "library_name: wellposed", "tags:", "- implicit-deep-learning", "- pytorch", "---", ""]
    lines += [f"# {kind}", "", *([text.strip(), ""] if text.strip() else []), *facts, "", "```python"]
    lines += ["import wellposed as wp", "", 'model = wp.load("FOLDER OR owner/model")', "```", ""]
    return "\n".join(lines)


def _facts(model: Storable) -> list[str]:
    if isinstance(model, ImplicitForm):
        states, inputs, outputs = model.sizes
        return [f"- {inputs} inputs, {states} states, {outputs} outputs"]
    size = f"- {sum(value.numel() for value in model.parameters()):,} parameters"
    if isinstance(model, MultiscaleDEQ):
        return [size]
    if isinstance(model, DEQ):
        return [size, f"- cell: `{type(model.cell).__name__}`"]
    cells = [model] if isinstance(model, ImplicitModel) else [model.cell(k) for k in range(len(model.cells))]
    certificates: list[Certificate] = [cell.certificate() for cell in cells]
    return [size, *(f"- well-posedness: {certificate}" for certificate in certificates)]


FACTS = "card.json"  # beside the files of save_pretrained
TRAINED = Path(str(importlib.resources.files("wellposed.models") / "trained"))


@dataclass(frozen=True)
class ReferenceModel:
    """The card of a trained model.

    Args:
        name: for `load_reference`.
        title: what it is, in one sentence.
        data: what it was trained and measured on.
        measured: numbers on data that it has not seen, by what they are.
        certificate: what proves that every input has one equilibrium.
        parameters: numbers that were trained.
        command: that trains it anew.
        limits: what it should not be used for.
    """

    name: str
    title: str
    data: str
    measured: dict[str, float]
    certificate: str
    parameters: int
    command: str
    limits: str = ""

    @property
    def folder(self) -> Path:
        """Where its weights, its configuration and its card are."""
        return TRAINED / self.name

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.title}", f"data: {self.data}"]
        lines += [f"{what}: {value:.4g}" for what, value in self.measured.items()]
        return "\n".join([*lines, f"certificate: {self.certificate}", f"trained by: {self.command}"])

    def text(self) -> str:
        """Returns the card as Markdown, for `save_pretrained`."""
        rows = [f"| {what} | {value:.4g} |" for what, value in self.measured.items()]
        lines = [f"{self.title} Data: {self.data}.", "", "| measured on unseen data | |", "|---|---|", *rows, ""]
        lines += [f"Trained by `{self.command}`.", *(["", self.limits] if self.limits else [])]
        return "\n".join(lines)


def reference_models() -> dict[str, ReferenceModel]:
    """Returns the cards of all models that come with the package, by name.

    Example:
        >>> sorted(reference_models())
        ['addition', 'digits', 'digits-convolutional', 'digits-robust', 'digits-sparse', 'rolling-argmax']
    """
    cards = sorted(TRAINED.glob(f"*/{FACTS}"))
    return {card.parent.name: ReferenceModel(**json.loads(card.read_text())) for card in cards}


def load_reference(name: str) -> Storable:
    """Loads a trained model that comes with the package, on the CPU; `reference_models` lists them.

    Example:
        >>> model = load_reference("addition")
        >>> model.certificate().holds
        True
    """
    if not (TRAINED / name / FACTS).is_file():
        raise unknown_name("reference model", name, reference_models())
    return from_pretrained(TRAINED / name)


def store_reference(model: Storable, card: ReferenceModel, root: Path = TRAINED) -> Path:
    """Writes a model and its card as `load_reference` reads them; returns their folder."""
    folder = root / card.name
    _write_folder(model, folder, card.text(), False, {FACTS: json.dumps(asdict(card), indent=2) + "\n"})
    return folder
