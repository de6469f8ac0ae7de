"""The grammar of model files: every key once, of its own type, and none besides; all else is refused.

The library reads the same grammar by code of its own. A file that only one of the two understands, or that says
something of which neither speaks, proves nothing.
"""

import math
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from wellposed.checker.tensors import RefusedError, TensorFile

LARGEST_SIZE = 1 << 31
FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
Rule = Callable[[Any], bool]


def table(given: Any, rules: Mapping[str, Rule], name: str, optional: Collection[str] = ()) -> dict[str, Any]:
    """Returns a table that has these keys and no others, with values that keep their rules.

    Example:
        >>> table({"size": 0}, {"size": is_size}, "the operator Identity")
        Traceback (most recent call last):
            ...
        wellposed.checker.tensors.RefusedError: the operator Identity says that 'size' is 0, which it cannot be
    """
    if not isinstance(given, dict):
        raise RefusedError(f"{name} is {_short(given)}, not a table")
    for key in sorted(given.keys() ^ rules.keys()):
        if key not in rules:
            raise RefusedError(f"{name} has the key {_short(key)}, which means nothing there")
        if key not in optional:
            raise RefusedError(f"{name} does not say what {key!r} is")
    for key, value in given.items():
        if not rules[key](value):
            raise RefusedError(f"{name} says that {key!r} is {_short(value)}, which it cannot be")
    return given


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def anything(value: Any) -> bool:
    """Leaves a value to others: what says how to solve decides nothing about the equation."""
    return True


def is_size(value: Any) -> bool:
    """Returns whether a value is a whole number above zero."""
    return type(value) is int and 1 <= value < LARGEST_SIZE


def is_count(value: Any) -> bool:
    """Returns whether a value is a whole number, zero or above."""
    return type(value) is int and 0 <= value < LARGEST_SIZE


def is_flag(value: Any) -> bool:
    return type(value) is bool


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def maybe(rule: Rule) -> Rule:
    """Allows null, where the grammar has a meaning for it."""
    return lambda value: value is None or rule(value)


def one_of(*values: Any) -> Rule:
    return lambda value: isinstance(value, str) and value in values


def list_of(rule: Rule, least: int = 0, most: float = math.inf) -> Rule:
    return lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(rule, value))


def tuple_of(rule: Rule, least: int = 1, most: float = math.inf) -> Rule:
    """Allows ``{"tuple": [...]}``, as forms write their tuples."""
    items = list_of(rule, least, most)
    return lambda value: isinstance(value, dict) and value.keys() == {"tuple"} and items(value["tuple"])


def is_dtype(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"dtype"} and one_of(*FLOATS)(value["dtype"])


CONDITIONS = ("inf", "weighted", "spectral", "block", "mu", "monotone", "triangular")
CELL: dict[str, Rule] = {
    **dict.fromkeys(("in_features", "out_features", "state_features"), is_size),
    "activation": lambda value: isinstance(value, str | dict),
    "kappa": maybe(is_number),
    "condition": one_of(*CONDITIONS),
    "triangle": maybe(list_of(is_flag, 2, 2)),
    "rank": maybe(is_size),
    **dict.fromkeys(("feedthrough", "bias"), is_flag),
    **dict.fromkeys(("solver", "stop", "max_steps", "gradient", "on_failure", "executor"), anything),
}
RECURRENT: dict[str, Rule] = {
    "kind": one_of("ImplicitRNN"),
    **dict.fromkeys(("input_size", "hidden_size", "num_layers"), is_size),
    "out_features": maybe(is_size),
    **dict.fromkeys(("batch_first", "bidirectional", "warm_start", "readout_bias"), is_flag),
    "dropout": is_number,
    "cells": list_of(lambda value: isinstance(value, dict), 1),
}
FORM: dict[str, Rule] = {
    **dict.fromkeys("ABCD", lambda value: isinstance(value, dict)),
    **dict.fromkeys(("bias", "output_bias"), maybe(lambda value: isinstance(value, dict))),
    "activation": lambda value: isinstance(value, str) or list_of(is_text, 2)(value),
    "input_shape": list_of(is_size),
    "labels": list_of(is_text),
    "dtype": one_of(*FLOATS),
}
ENTRY_TYPE: dict[str, Rule] = {"kind": is_dtype, "place": one_of("cpu")}
OPERATORS: dict[str, dict[str, Rule]] = {
    "Dense": {"matrix": anything},
    "Sparse": {"matrix": anything},
    "LowRank": {"left": anything, "right": anything},
    "Diagonal": {"values": anything},
    "Zero": {"size": tuple_of(is_count, 2, 2), **ENTRY_TYPE},
    "Identity": {"size": is_count, **ENTRY_TYPE},
    "Repeated": {"inner": anything, "count": is_size},
    "Selection": {"index": anything, "columns": is_count, "kind": is_dtype},
    "Accumulation": {"selection": lambda value: isinstance(value, dict) and value.get("operator") == "Selection"},
    "Convolution": {
        "weight": anything,
        "input_shape": tuple_of(is_size, 2, 4),
        **dict.fromkeys(("stride", "dilation"), tuple_of(is_size, 1, 3)),
        "padding": tuple_of(is_count, 1, 3),
        "groups": is_size,
        "transposed": is_flag,
    },
    "Product": {"factors": tuple_of(anything)},
    "Sum": {"terms": tuple_of(anything)},
    "Block": {"heights": tuple_of(is_count), "widths": tuple_of(is_count), "parts": anything, **ENTRY_TYPE},
}


def expect_tensors(file: TensorFile, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses a file that holds other tensors than these, or numbers of several types."""
    for name in sorted(file.entries.keys() ^ shapes.keys()):
        if name in shapes:
            raise RefusedError(f"{file.path.name} has no tensor {name!r}")
        raise RefusedError(
            f"{file.path.name} holds the tensor {name!r}, of which its configuration does not speak"
        )
    for name, shape in shapes.items():
        if (actual := file.entries[name][1]) != shape:
            raise RefusedError(
                f"{name!r} in {file.path.name} has the shape {list(actual)}, expected {list(shape)}"
            )
    kinds = {kind for kind, *_ in file.entries.values()}
    if len(kinds) != 1 or not kinds <= {*FLOATS.values()}:
        raise RefusedError(f"the tensors of {file.path.name} are {', '.join(sorted(kinds))}; a model has one type")


class Seen(NamedTuple):
    """What an operator is, without its entries.

    Args:
        shape: rows and columns.
        dtype: as the library takes it from its fields.
        stored: whether it has numbers of its own.
    """

    shape: tuple[int, int]
    dtype: str
    stored: bool


class FormReader:
    """Checks that the operators of a form fit together, and lists the tensors that they name."""

    def __init__(self, file: TensorFile, dtype: str) -> None:
        self.file, self.dtype = file, dtype
        self.used: set[str] = set()

    def tensor(self, given: Any, dimensions: int, *, whole: bool = False, empty: bool = False) -> tuple[int, ...]:
        """Returns the shape of a tensor that a header names, as the operator sees it."""
        entry = table(given, {"tensor": is_text, "order": list_of(is_count)}, "a tensor", ("order",))
        name, order = entry["tensor"], entry.get("order", list(range(dimensions)))
        if name not in self.file.entries:
            raise RefusedError(f"{self.file.path.name} has no tensor {name!r}")
        kind, shape, _ = self.file.entries[name]
        if kind != ("I64" if whole else FLOATS[self.dtype]):
            raise RefusedError(f"{name!r} in {self.file.path.name} is {kind}; the form is {self.dtype}")
        if len(shape) != dimensions or not (empty or all(shape)):
            raise RefusedError(f"{name!r} in {self.file.path.name} has the shape {list(shape)}")
        identity = list(range(dimensions))
        if sorted(order) != identity or ("order" in entry and order == identity):
            raise RefusedError(f"the order {order} of {name!r} is no other order of {dimensions} dimensions")
        self.used.add(name)
        return tuple(shape[order.index(dimension)] for dimension in identity)

    def vector(self, given: Any, size: int) -> None:
        """Checks the size of a bias."""
        if (shape := self.tensor(given, 1)) != (size,):
            raise RefusedError(f"a bias has the shape {list(shape)}, expected {[size]}")

    def operator(self, given: Any) -> Seen:
        """Returns what an operator is."""
        kind = given.get("operator") if isinstance(given, dict) else None
        if not isinstance(kind, str) or kind not in OPERATORS:
            raise RefusedError(f"there is no operator of the kind {_short(kind)}")
        table(given, {"operator": anything, **OPERATORS[kind]}, f"the operator {kind}")
        seen: Seen = getattr(self, f"_{kind.lower()}")(given)
        return seen

    def _dense(self, given: dict[str, Any]) -> Seen:
        rows, columns = self.tensor(given["matrix"], 2)
        return Seen((rows, columns), self.dtype, True)

    def _sparse(self, given: dict[str, Any]) -> Seen:
        rules = {"sparse": list_of(anything, 2, 2), "size": list_of(is_count, 2, 2)}
        matrix = table(given["matrix"], rules, "a sparse matrix")
        indices = self.tensor(matrix["sparse"][0], 2, whole=True, empty=True)
        if indices != (2, *self.tensor(matrix["sparse"][1], 1, empty=True)):
            raise RefusedError("a sparse matrix has other indices than entries")
        rows, columns = matrix["size"]
        return Seen((rows, columns), self.dtype, indices[1] > 0)

    def _lowrank(self, given: dict[str, Any]) -> Seen:
        (rows, rank), (columns, other) = (self.tensor(given[side], 2) for side in ("left", "right"))
        if rank != other:
            raise RefusedError("the two factors of a matrix do not fit")
        return Seen((rows, columns), self.dtype, True)

    def _diagonal(self, given: dict[str, Any]) -> Seen:
        (size,) = self.tensor(given["values"], 1)
        return Seen((size, size), self.dtype, True)

    def _zero(self, given: dict[str, Any]) -> Seen:
        rows, columns = given["size"]["tuple"]
        return Seen((rows, columns), given["kind"]["dtype"], False)

    def _identity(self, given: dict[str, Any]) -> Seen:
        return Seen((given["size"],) * 2, given["kind"]["dtype"], False)

    def _repeated(self, given: dict[str, Any]) -> Seen:
        inner, count = self.operator(given["inner"]), given["count"]
        return inner._replace(shape=(count * inner.shape[0], count * inner.shape[1]))

    def _selection(self, given: dict[str, Any]) -> Seen:
        (rows,) = self.tensor(given["index"], 1, whole=True)
        return Seen((rows, given["columns"]), given["kind"]["dtype"], True)

    def _accumulation(self, given: dict[str, Any]) -> Seen:
        seen = self.operator(given["selection"])
        return seen._replace(shape=(seen.shape[1], seen.shape[0]))

    def _convolution(self, given: dict[str, Any]) -> Seen:
        channels, *image = given["input_shape"]["tuple"]
        out, inner, *kernel = self.tensor(given["weight"], len(image) + 2)
        steps = [given[name]["tuple"] for name in ("stride", "padding", "dilation")]
        groups = given["groups"]
        if any(len(step) != len(image) for step in steps) or out % groups or inner * groups != channels:
            raise RefusedError("a convolution has another kernel than its input needs")
        sizes = zip(image, kernel, *steps, strict=True)
        reached = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]
        if min(reached) < 1:
            raise RefusedError("the kernel of a convolution is larger than its input")
        rows, columns = out * math.prod(reached), channels * math.prod(image)
        return Seen((columns, rows) if given["transposed"] else (rows, columns), self.dtype, True)

    def _product(self, given: dict[str, Any]) -> Seen:
        factors = [self.operator(factor) for factor in given["factors"]["tuple"]]
        if any(one.shape[1] != other.shape[0] for one, other in pairwise(factors)):
            raise RefusedError("the factors of a product do not fit")
        shape = (factors[0].shape[0], factors[-1].shape[1])
        return Seen(shape, factors[0].dtype, any(factor.stored for factor in factors))

    def _sum(self, given: dict[str, Any]) -> Seen:
        terms = [self.operator(term) for term in given["terms"]["tuple"]]
        if len({term.shape for term in terms}) > 1:
            raise RefusedError("the terms of a sum do not fit")
        return terms[0]._replace(stored=any(term.stored for term in terms))

    def _block(self, given: dict[str, Any]) -> Seen:
        heights, widths = given["heights"]["tuple"], given["widths"]["tuple"]
        pairs = table(given["parts"], {"dict": list_of(list_of(anything, 2, 2))}, "the blocks of a matrix")["dict"]
        keys, dtype, stored = set(), given["kind"]["dtype"], False
        for key, part in pairs:
            if not tuple_of(is_count, 2, 2)(key):
                raise RefusedError(f"{_short(key)} is no row and column of a block")
            i, j = key["tuple"]
            if (i, j) in keys or i >= len(heights) or j >= len(widths):
                raise RefusedError(f"there is no block {i, j}, or it is given twice")
            keys.add((i, j))
            seen = self.operator(part)
            if seen.shape != (heights[i], widths[j]):
                raise RefusedError(f"the block {i, j} has another size than its row and column")
            if part["operator"] != "Zero":
                dtype, stored = seen.dtype, stored or seen.stored
        return Seen((sum(heights), sum(widths)), dtype, stored)
