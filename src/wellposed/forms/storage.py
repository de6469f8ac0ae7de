"""Forms as tensors and a header of plain JSON, and back; nothing is ever executed from a file."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from wellposed.activations import Activation, get_activation
from wellposed.activations.catalogue import BUILT_IN
from wellposed.errors import FileFormatError, InputError, UnknownNameError, unknown_name
from wellposed.forms.form import ImplicitForm
from wellposed.forms.operators.base import Operator, Product, Sum
from wellposed.forms.operators.structured import Convolution

FORM_FORMAT = "wellposed-form-1"
# Zeros, copies and convolutions have more rows than they have numbers: so many a byte of the file, and some more.
ROWS_PER_BYTE, ROWS_FREE = 64, 1 << 22
_TYPES = ("float64", "float32", "float16", "bfloat16")
_HEADER = ("A", "B", "C", "D", "bias", "output_bias", "activation", "input_shape", "labels", "dtype")


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
        header = strict_json(metadata["form"], "its header")
        if header.keys() != {*_HEADER}:
            raise FileFormatError(f"a form has the entries {sorted(_HEADER)}; received {sorted(header)}")
        reader = _Reader(tensors, header["dtype"], len(metadata["form"]))
        arguments: dict[str, Any] = {name: reader.operator(header[name]) for name in "ABCD"}
        arguments |= {name: reader.bias(header[name]) for name in ("bias", "output_bias")}
        shape, labels = header["input_shape"], header["labels"]
        if not _list_of(shape, _is_size) or not _list_of(labels, lambda label: isinstance(label, str)):
            raise FileFormatError(f"its inputs have the shape {shape!r} and its blocks the labels {labels!r}")
        names = header["activation"]
        if not isinstance(names, str | list):
            raise FileFormatError(f"activations are stored by their names; received {names!r}")
        phi = stored_activation(names) if isinstance(names, str) else [stored_activation(name) for name in names]
        form = ImplicitForm(**arguments, activation=phi, input_shape=tuple(shape), labels=labels)
        _check(form, header, tensors, reader.used)
    except (UnknownNameError, FileFormatError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, RecursionError) as error:
        raise FileFormatError(f"header and tensors do not make up a form: {error!r}") from error
    return form


def _check(form: ImplicitForm, header: dict[str, Any], tensors: Mapping[str, Tensor], used: set[str]) -> None:
    """Refuses a form that could be read in another way, or of which a part is empty."""
    if _type_name(form.dtype) != header["dtype"]:
        raise FileFormatError(f"its weights are {form.dtype}, its header says {header['dtype']}")
    if not all(form.sizes[1:]) or (form.partition != (0,) and not all(form.partition)):
        raise FileFormatError(f"it has {form.sizes} states, inputs and outputs and blocks of {form.partition}")
    if isinstance(header["activation"], str) != (len(form.partition) == 1):
        raise FileFormatError(
            f"{len(form.partition)} blocks of states have as many activations; received {header['activation']!r}"
        )
    for phi, size in zip(form.activations, form.partition, strict=True):
        if phi.block and size % phi.block:
            raise FileFormatError(f"{phi.name} does not act on {size} states")
    if unused := sorted({*tensors} - used):
        raise FileFormatError(f"it holds the tensor {unused[0]!r}, of which its header does not speak")


def strict_json(text: bytes | str, what: str) -> dict[str, Any]:
    """Reads a table that says everything once, in UTF-8, without NaN and infinity.

    Example:
        >>> strict_json('{"order": 1, "order": 2}', "the header")
        Traceback (most recent call last):
            ...
        wellposed.errors.FileFormatError: the header says 'order' twice
    """

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for key, value in pairs:
            if key in entries:
                raise FileFormatError(f"{what} says {key!r} twice")
            entries[key] = value
        return entries

    def number(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise FileFormatError(f"{what} holds the number {digits}, which is not finite")
        return value

    try:
        plain = text.decode() if isinstance(text, bytes) else text
        content = json.loads(plain, object_pairs_hook=table, parse_constant=number, parse_float=number)
        json.dumps(content, ensure_ascii=False).encode()  # half of a character that is written as two
    except FileFormatError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise FileFormatError(f"{what} is no readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{what} is a {type(content).__name__}, not a table")
    return content


def stored_activation(name: Any) -> Activation:
    """Returns the activation of a name as `registered_name` writes it.

    Example:
        >>> stored_activation("leaky_relu(1)")
        Traceback (most recent call last):
            ...
        wellposed.errors.FileFormatError: the activation 'leaky_relu(1)' is stored as 'leaky_relu(1.0)'
    """
    if not isinstance(name, str):
        raise FileFormatError(f"an activation is stored by its name; received {name!r}")
    try:
        activation = get_activation(name)
    except InputError as error:
        raise FileFormatError(str(error)) from error
    if activation.name != name:
        raise FileFormatError(f"the activation {name!r} is stored as {activation.name!r}")
    return activation


def registered_name(activation: Activation) -> str:
    """Returns the name under which an activation is looked up.

    Example:
        >>> registered_name(get_activation("leaky_relu(0.25)"))
        'leaky_relu(0.25)'
    """
    try:
        registered = get_activation(activation.name)
    except UnknownNameError as error:
        raise InputError(f"the activation {activation.name!r} is not registered; register it to save") from error
    if not _same(registered, activation) or not _same(BUILT_IN.get(activation.name, registered), activation):
        raise InputError(f"{activation.name!r} is not the registered activation of that name; register it to save")
    return activation.name


def _same(registered: Activation, own: Activation) -> bool:
    """Compares constants and, at some points, values."""
    if (registered.slope, registered.constants, registered.block) != (own.slope, own.constants, own.block):
        return False
    z = torch.linspace(-3, 3, 12 * (registered.block or 1), dtype=torch.float64)
    return bool(torch.equal(registered(z), own(z)))


def _type_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _TYPES:
        raise InputError(f"a form is stored as {', '.join(_TYPES)}; received {name}")
    return name


def _kinds() -> dict[str, type[Operator]]:
    """Lists the library's own operators by name."""
    kinds = [kind for kind in Operator.__subclasses__() if kind.__module__.startswith("wellposed.forms.")]
    return {kind.__name__: kind for kind in kinds}


class _Store:
    """Encodes values as JSON and puts their tensors aside, each piece of memory once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple, str] = {}
        self._storages: set[int] = set()
        self._kept: list[Tensor] = []  # while they live, no other tensor has their address

    def encode(self, value: Any, path: str) -> Any:
        """Returns the JSON of an operator's field, named by its path."""
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
        entry: dict[str, Any] = {"tensor": self._names[key]}
        return entry if order == list(range(value.dim())) else {**entry, "order": order}

    def _alone(self, value: Tensor) -> Tensor:
        """Copies a piece of memory of which another piece is stored, which safetensors refuses."""
        storage = value.untyped_storage().data_ptr()
        shared = (
            storage in self._storages or value.untyped_storage().nbytes() != value.numel() * value.element_size()
        )
        self._storages.add(storage)
        if value.dim() and value.stride(-1) != 1:  # of an expanded number, which counts as contiguous
            return value.new_empty(value.shape).copy_(value)
        return value.clone() if shared else value


class _Reader:
    """Builds operators from JSON, each from its own fields and no others, and keeps which tensors they use."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: Any, size: int) -> None:
        if not isinstance(dtype, str) or dtype not in _TYPES:
            raise FileFormatError(f"a form is stored as {', '.join(_TYPES)}; received {dtype!r}")
        self.tensors, self.dtype = tensors, getattr(torch, dtype)
        self.size = size + sum(value.nbytes for value in tensors.values())
        self.used: set[str] = set()

    def operator(self, value: Any) -> Operator:
        """Builds an operator, whose fields are those of its class."""
        name = value.get("operator") if isinstance(value, dict) else value
        if not isinstance(name, str) or name not in (kinds := _kinds()):
            raise FileFormatError(str(unknown_name("kind of operator", name, _kinds())))
        wanted = {field.name: field.type for field in dataclasses.fields(kinds[name])}  # type: ignore[arg-type]
        if value.keys() != {"operator", *wanted}:
            raise FileFormatError(
                f"{name} has the fields {sorted(wanted)}; received {sorted({*value} - {'operator'})}"
            )
        operator = kinds[name](
            **{field: self._field(value[field], name, field, wanted[field]) for field in wanted}
        )
        self._check_size(operator)
        if isinstance(operator, Product):
            pairs = zip(operator.factors[:-1], operator.factors[1:], strict=True)
            if any(one.shape[1] != other.shape[0] for one, other in pairs):
                raise FileFormatError("the factors of a product do not fit")
        if isinstance(operator, Sum) and len({term.shape for term in operator.terms}) > 1:
            raise FileFormatError("the terms of a sum do not fit")
        return operator

    def _check_size(self, operator: Operator) -> None:
        """Refuses an operator on vectors that are far longer than the file."""
        largest = max(operator.shape)
        if isinstance(operator, Convolution):
            channels, *image = operator.input_shape
            padded = (size + 2 * more for size, more in zip(image, operator.padding, strict=True))
            largest = max(largest, channels * math.prod(padded))
        if largest > ROWS_PER_BYTE * self.size + ROWS_FREE:
            raise FileFormatError(
                f"{type(operator).__name__} takes or makes {largest} numbers, far more than the {self.size} bytes "
                "of the form allow"
            )

    def bias(self, value: Any) -> Tensor | None:
        return None if value is None else self._tensor(value, whole=False)

    def _field(self, value: Any, kind: str, name: str, wanted: Any) -> Any:
        """Returns a field of an operator, whose type is that of the class."""
        if wanted is Tensor:
            return self._sparse(value) if kind == "Sparse" else self._tensor(value, whole=name == "index")
        if isinstance(wanted, type) and issubclass(wanted, Operator):
            operator = self.operator(value)
            if isinstance(operator, wanted):
                return operator
        elif wanted == tuple[Operator, ...]:
            return tuple(self.operator(part) for part in _tuple(value))
        elif wanted == dict[tuple[int, int], Operator]:
            return self._parts(value)
        elif wanted in (tuple[int, ...], tuple[int, int]):
            least = 0 if name in ("padding", "size", "heights", "widths") else 1
            sizes = _tuple(value)
            if all(_is_size(size, least) for size in sizes) and (wanted != tuple[int, int] or len(sizes) == 2):
                return sizes
        elif wanted is int:
            if _is_size(value, 0 if name in ("size", "columns") else 1):
                return value
        elif wanted is bool:
            if isinstance(value, bool):
                return value
        elif wanted is torch.dtype:
            if isinstance(value, dict) and value.keys() == {"dtype"} and value["dtype"] in _TYPES:
                return getattr(torch, value["dtype"])
        elif name == "place" and value == "cpu":
            return value
        raise FileFormatError(f"{kind} cannot have {value!r} as its {name}")

    def _parts(self, value: Any) -> dict[tuple[int, ...], Operator]:
        if not isinstance(value, dict) or value.keys() != {"dict"} or not isinstance(value["dict"], list):
            raise FileFormatError(f"the blocks of a matrix are stored as pairs; received {value!r}")
        blocks: dict[tuple[int, ...], Operator] = {}
        for key, part in value["dict"]:
            position = _tuple(key)
            if len(position) != 2 or not all(_is_size(index, 0) for index in position) or position in blocks:
                raise FileFormatError(f"a block has a row and a column of its own; received {position}")
            blocks[position] = self.operator(part)
        return blocks

    def _tensor(self, value: Any, *, whole: bool, empty: bool = False) -> Tensor:
        """Returns a tensor, in the order in which its operator wants it."""
        if not isinstance(value, dict) or not {"tensor"} <= value.keys() <= {"tensor", "order"}:
            raise FileFormatError(f"a tensor is stored by its name and its order; received {value!r}")
        tensor, straight = self.tensors[value["tensor"]], list(range(self.tensors[value["tensor"]].dim()))
        if tensor.dtype != (torch.int64 if whole else self.dtype):
            raise FileFormatError(f"the tensor {value['tensor']!r} is {tensor.dtype}, and the form {self.dtype}")
        if not (empty or tensor.numel()):
            raise FileFormatError(f"the tensor {value['tensor']!r} is empty: its shape is {tuple(tensor.shape)}")
        self.used.add(value["tensor"])
        if "order" not in value:
            return tensor
        order = value["order"]
        if not _list_of(order, lambda d: _is_size(d, 0)) or sorted(order) != straight or order == straight:
            raise FileFormatError(f"{order!r} is no other order of {len(straight)} dimensions")
        return tensor.permute(sorted(straight, key=order.__getitem__))  # the inverse

    def _sparse(self, value: Any) -> Tensor:
        if not isinstance(value, dict) or value.keys() != {"sparse", "size"} or len(value["sparse"]) != 2:
            raise FileFormatError(f"a sparse matrix is stored by its indices, values and size; received {value!r}")
        size = value["size"]
        if not _list_of(size, lambda d: _is_size(d, 0)) or len(size) != 2:
            raise FileFormatError(f"a matrix has two sizes; received {size!r}")
        indices = self._tensor(value["sparse"][0], whole=True, empty=True)
        entries = self._tensor(value["sparse"][1], whole=False, empty=True)
        if indices.dim() != 2 or entries.dim() != 1:
            raise FileFormatError(f"a sparse matrix has indices {tuple(indices.shape)} and {tuple(entries.shape)}")
        flat = indices[0] * size[1] + indices[1]
        if not bool((flat[1:] > flat[:-1]).all()):  # as a coalesced matrix has them
            raise FileFormatError("the entries of a sparse matrix come row by row, and none twice; these do not")
        return torch.sparse_coo_tensor(indices, entries, size, check_invariants=True, is_coalesced=True)


def _tuple(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, dict) or value.keys() != {"tuple"} or not isinstance(value["tuple"], list):
        raise FileFormatError(f"expected a stored tuple; received {value!r}")
    if not value["tuple"]:
        raise FileFormatError("a stored tuple is empty")
    return tuple(value["tuple"])


def _is_size(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**31


def _list_of(value: Any, rule: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(rule, value))
