"""Forms as tensors and a header of plain JSON, and back; nothing is ever executed from a file."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wellposed.activations import Activation, get_activation
from wellposed.activations.catalogue import BUILT_IN
from wellposed.errors import FileFormatError, InputError, UnknownNameError, unknown_name
from wellposed.forms.form import ImplicitForm
from wellposed.forms.operators.base import Operator

FORM_FORMAT = "wellposed-form-1"
_TYPES = ("float64", "float32", "float16", "bfloat16")


def pack_form(form: ImplicitForm) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Writes a form as named tensors and the metadata of a safetensors file.

    Every operator becomes its kind and its fields; a tensor that several operators share is stored once, and
    sparse matrices keep their indices and values. Custom activations must be registered under their names.

    Example:
        >>> tensors, metadata = pack_form(ImplicitForm(torch.zeros(2, 2), torch.eye(2), torch.ones(1, 2)))
        >>> sorted(tensors), metadata["format"]
        (['A.matrix', 'B.matrix', 'C.matrix'], 'wellposed-form-1')
    """
    store = _Store()
    whole = len(form.partition) == 1
    names = [registered_name(phi) for phi in form.activations]
    header = {
        **{name: store.encode(getattr(form, name), name) for name in ("A", "B", "C", "D", "bias", "output_bias")},
        "activation": names[0] if whole else names,
        "input_shape": list(form.input_shape),
        "labels": list(form.labels),
        "dtype": _type_name(form.dtype),
    }
    return store.tensors, {"format": FORM_FORMAT, "form": json.dumps(header)}


def unpack_form(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> ImplicitForm:
    """Builds a form from what `pack_form` has written.

    Raises:
        FileFormatError: header and tensors do not make up a form.
        UnknownNameError: an activation is not registered here.
    """
    try:
        header = json.loads(metadata["form"])
        parts = {name: _decode(header[name], tensors) for name in ("A", "B", "C", "D", "bias", "output_bias")}
        shape, labels = tuple(header["input_shape"]), header["labels"]
        form = ImplicitForm(**parts, activation=_found(header), input_shape=shape, labels=labels)
        if _type_name(form.dtype) != header["dtype"]:
            raise FileFormatError(f"its weights are {form.dtype}, its header says {header['dtype']}")
    except (UnknownNameError, FileFormatError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise FileFormatError(f"header and tensors do not make up a form: {error!r}") from error
    return form


def registered_name(activation: Activation) -> str:
    """Returns the name under which an activation can be found again.

    Example:
        >>> registered_name(get_activation("leaky_relu(0.25)"))
        'leaky_relu(0.25)'
    """
    try:
        known = get_activation(activation.name)
    except UnknownNameError as error:
        raise InputError(f"the activation {activation.name!r} is not registered; register it to save") from error
    if not _same(known, activation) or not _same(BUILT_IN.get(activation.name, known), activation):
        raise InputError(f"{activation.name!r} is not the registered activation of that name; register it to save")
    return activation.name


def _same(known: Activation, own: Activation) -> bool:
    """Compares constants and, at some points, values."""
    if (known.slope, known.constants, known.block) != (own.slope, own.constants, own.block):
        return False
    z = torch.linspace(-3, 3, 12 * (known.block or 1), dtype=torch.float64)
    return bool(torch.equal(known(z), own(z)))


def _found(header: dict[str, Any]) -> Activation | list[Activation]:
    named = header["activation"]
    return get_activation(named) if isinstance(named, str) else [get_activation(name) for name in named]


def _type_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _TYPES:
        raise InputError(f"a form is stored as {', '.join(_TYPES)}; received {name}")
    return name


def _kinds() -> dict[str, type[Operator]]:
    """Lists the library's own operators by name."""
    found = [kind for kind in Operator.__subclasses__() if kind.__module__.startswith("wellposed.forms.")]
    return {kind.__name__: kind for kind in found}


class _Store:
    """Encodes values as JSON and puts their tensors aside, each piece of memory once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple, str] = {}
        self._storages: set[int] = set()
        self._kept: list[Tensor] = []  # while they live, no other tensor has their address

    def encode(self, value: Any, path: str) -> Any:
        """Returns the JSON of an operator's field, named by its place."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return self._sparse(value, path) if value.is_sparse else self._dense(value, path)
        if isinstance(value, torch.dtype):
            return {"dtype": _type_name(value)}
        if isinstance(value, tuple | list):
            return {"tuple": [self.encode(part, f"{path}.{index}") for index, part in enumerate(value)]}
        if isinstance(value, dict):
            names = [(key, ".".join(map(str, key)) if isinstance(key, tuple) else str(key)) for key in value]
            return {"dict": [[self.encode(k, path), self.encode(value[k], f"{path}.{name}")] for k, name in names]}
        return self._operator(value, path)

    def _operator(self, value: Any, path: str) -> dict[str, Any]:
        if _kinds().get(type(value).__name__) is not type(value):
            raise InputError(
                f"cannot save {path}: {type(value).__name__} is not one of the library's operators; pass its "
                "to_sparse() or to_dense() instead"
            )
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}  # type: ignore[arg-type]
        fields = {name: "cpu" if name == "place" else field for name, field in fields.items()}
        return {
            "operator": type(value).__name__,
            **{
                name: self.encode(field, path if name == "parts" else f"{path}.{name}")
                for name, field in fields.items()
            },
        }

    def _sparse(self, value: Tensor, path: str) -> dict[str, Any]:
        indices = self._dense(value.indices(), f"{path}.indices")
        values = self._dense(value.values(), f"{path}.values")
        return {"sparse": [indices, values], "size": list(value.shape)}

    def _dense(self, value: Tensor, path: str) -> dict[str, Any]:
        """Stores memory as it lies, so that a transposed matrix is the same tensor and stays transposed."""
        order = sorted(range(value.dim()), key=lambda dim: -value.stride()[dim])
        straight = value.detach().permute(order)
        if not straight.is_contiguous():
            order, straight = list(range(value.dim())), value.detach().contiguous()
        self._kept.append(straight)
        key = (straight.data_ptr(), tuple(straight.shape), straight.dtype, straight.device)
        if key not in self._names or not straight.numel():
            self._names[key] = path
            self.tensors[path] = self._alone(straight).cpu()
        found: dict[str, Any] = {"tensor": self._names[key]}
        return found if order == list(range(value.dim())) else {**found, "order": order}

    def _alone(self, value: Tensor) -> Tensor:
        """Copies a piece of memory of which another piece is stored, which safetensors refuses."""
        storage = value.untyped_storage().data_ptr()
        shared = (
            storage in self._storages or value.untyped_storage().nbytes() != value.numel() * value.element_size()
        )
        self._storages.add(storage)
        return value.clone() if shared else value


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "operator" in value:
        fields = {name: _decode(field, tensors) for name, field in value.items() if name != "operator"}
        if value["operator"] not in (kinds := _kinds()):
            raise FileFormatError(str(unknown_name("kind of operator", value["operator"], kinds)))
        return kinds[value["operator"]](**fields)
    if "tensor" in value:
        found = tensors[value["tensor"]]
        order = value.get("order")
        return found if order is None else found.permute(_inverse(order))
    if "sparse" in value:
        indices, entries = (_decode(part, tensors) for part in value["sparse"])
        ordered = _ordered(indices, value["size"])
        return torch.sparse_coo_tensor(
            indices, entries, value["size"], check_invariants=True, is_coalesced=ordered
        )
    if "tuple" in value:
        return tuple(_decode(part, tensors) for part in value["tuple"])
    if "dict" in value:
        return {_decode(key, tensors): _decode(part, tensors) for key, part in value["dict"]}
    if value.get("dtype") in _TYPES:
        return getattr(torch, value["dtype"])
    raise FileFormatError(f"an entry of the header has the keys {sorted(value)}, which mean nothing")


def _ordered(indices: Tensor, size: list[int]) -> bool:
    """Tells whether entries come row by row and none twice, as a coalesced matrix has them."""
    flat = indices[0] * size[1] + indices[1]
    return bool((flat[1:] > flat[:-1]).all())


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
