"""Saving and loading models and forms: safetensors with the configuration inside."""

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from wellposed.activations import Activation, get_activation
from wellposed.activations.blockwise import piecewise
from wellposed.conditions.conditions import Triangular
from wellposed.equilibrium import gradients, solvers, stopping
from wellposed.errors import FileFormatError, InputError, unknown_name
from wellposed.forms import ImplicitForm
from wellposed.forms.storage import FORM_FORMAT, pack_form, registered_name, unpack_form
from wellposed.models.atomic import written_whole
from wellposed.models.implicit import ImplicitModel
from wellposed.models.matrix import StateMatrix
from wellposed.models.proof import Claim, evaluated, write_certificate
from wellposed.models.reading import MALFORMED, check_counts, filled, making_sense
from wellposed.models.recurrent import ImplicitRNN
from wellposed.models.tensor_file import checksum, write_tensors

FORMAT = "wellposed-1"
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


def save(
    model: Model | ImplicitForm,
    path: str | os.PathLike[str],
    *,
    certificate: bool = False,
    claims: Iterable[Claim] = (),
) -> None:
    """Writes a model or a form to one safetensors file, atomically.

    Args:
        model: an `ImplicitModel`, `ImplicitRNN` or `ImplicitForm`; a custom activation must be registered where
            the file is loaded. An activation that differs from block to block is stored part by part.
        path: the file to write.
        certificate: writes the proof of well-posedness too, beside the file and with the ending .cert, for
            ``wellposed verify``. The file then holds the matrices that are evaluated, not the free parameters
            behind them.
        claims: what else the certificate is to say; see `write_certificate`.
    """
    if certificate and isinstance(model, Model):
        model = evaluated(model)
    if isinstance(model, ImplicitForm):
        tensors, metadata = pack_form(model)
    elif isinstance(model, Model):
        tensors = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
        metadata = {"format": FORMAT, "config": json.dumps(configuration(model))}
    else:
        raise InputError(
            f"save takes an ImplicitModel, ImplicitRNN or ImplicitForm; received {type(model).__name__}. Of other "
            "modules save the state_dict(): their code is not part of it"
        )
    metadata["sha256"] = checksum(json.dumps(metadata, sort_keys=True), tensors)
    with written_whole(path) as place:
        write_tensors(place, tensors, metadata)
    if certificate:
        write_certificate(model, path, claims)


def load(path: str | os.PathLike[str]) -> Model | ImplicitForm:
    """Reads a model or a form that `save` has written, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        FileFormatError: it is not such a file, or it is damaged.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no model file at {os.fspath(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, *MALFORMED) as error:
        raise FileFormatError(f"{os.fspath(path)!r} is not a safetensors file or is damaged: {error}") from error
    if metadata.get("format") not in (FORMAT, FORM_FORMAT):
        raise FileFormatError(
            f"{os.fspath(path)!r} was not written by wellposed.save: its format is {metadata.get('format')!r}, "
            f"expected {FORMAT!r} or {FORM_FORMAT!r}"
        )
    sealed = metadata.pop("sha256", None)  # older files have none
    if sealed is not None and sealed != checksum(json.dumps(metadata, sort_keys=True), tensors):
        raise FileFormatError(f"{os.fspath(path)!r} is damaged: its checksum does not match; get it once more")
    try:
        with making_sense("its configuration does not fit its tensors"):
            if metadata["format"] == FORM_FORMAT:
                return unpack_form(metadata, tensors)
            return build(json.loads(metadata["config"]), tensors)
    except FileFormatError as error:
        raise FileFormatError(f"{os.fspath(path)!r} is damaged: {error}") from error


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
    bound = getattr(activation.derivative, "keywords", {})
    parts, sizes = bound.get("parts"), bound.get("sizes")
    if parts is None or sizes is None or piecewise(parts, sizes).name != activation.name:
        return registered_name(activation)
    return {"parts": [registered_name(part) for part in parts], "sizes": list(sizes)}


def _activation(named: str | dict[str, list[Any]], states: int) -> Activation:
    if isinstance(named, str):
        return get_activation(named)
    names, sizes = named["parts"], named["sizes"]
    if len(names) != len(sizes) or sum(sizes) != states:
        raise FileFormatError(f"the activations {names} of the sizes {sizes} do not make up {states} states")
    return piecewise([get_activation(name) for name in names], sizes)


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
    kind = config.pop("kind", "ImplicitModel")
    if kind not in ("ImplicitModel", "ImplicitRNN"):
        raise unknown_name("kind of model", kind, ["ImplicitModel", "ImplicitRNN"])
    check_counts(config, tensors)
    empty: Callable[[dict[str, Any]], Model] = _empty if kind == "ImplicitModel" else _empty_recurrent
    return filled(lambda: empty(copy.deepcopy(config)), tensors)


def _empty(config: dict[str, Any]) -> ImplicitModel:
    """Builds a model of the right kind, with other values."""
    triangle = config.pop("triangle")
    activation = _activation(config.pop("activation"), config["state_features"])
    options = {"activation": activation, **{name: decode(value) for name, value in config.items()}}
    condition = options.pop("condition")
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
    cells = [_empty(cell) for cell in config.pop("cells")]
    options = {**config, "state_features": cells[0].state_features, "bias": cells[0].bias is not None}
    model = ImplicitRNN(**options)
    if len(cells) != len(model.cells):
        raise KeyError(f"{len(model.cells)} cells expected, {len(cells)} found")
    for index, cell in enumerate(cells):
        model.cells[index] = cell
    return model
