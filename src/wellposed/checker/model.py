"""What a model file says to the checker: its matrices and activations, read by code of the checker's own."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any

from wellposed.checker.phi import Phi, activation
from wellposed.checker.proofs import dot
from wellposed.checker.tensors import Matrix, RefusedError, TensorFile, read_json

LARGEST_STATES = 1 << 14


@dataclass(frozen=True)
class Part:
    """One equation ``x = phi(Ax + Bu + b)``, ``y = Cx + Du + c`` of a model.

    Args:
        name: which one, empty where there is only one.
        acyclic: whether nothing feeds itself, whatever the entries of A are.
        phis: one a state.
        size: of the blocks on which phi acts, None where it acts entry by entry.
        matrices: read A, B, C and D; those that are absent are zero.
        biases: read b and c.
    """

    name: str
    acyclic: bool
    phis: list[Phi]
    size: int | None
    matrices: Mapping[str, Callable[[], Matrix]]
    biases: Mapping[str, Callable[[], list[Fraction]]]


def parts_of(file: TensorFile, config: dict[str, Any] | None) -> list[Part]:
    """Returns the equations of a model; `config` is the file beside it, where the model is a folder."""
    kind = (config or file.metadata).get("format")
    try:
        if kind == "wellposed-form-1":
            return [_form(file, config["form"] if config else read_json(file.metadata["form"], "the form"))]
        if kind == "wellposed-1":
            found = config["config"] if config else read_json(file.metadata["config"], "the configuration")
            if found.get("kind", "ImplicitModel") == "ImplicitModel":
                return [_cell(file, found, "")]
            return [_cell(file, cell, f"cells.{k}.") for k, cell in enumerate(found["cells"])]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise RefusedError(f"{file.path.name} describes no model: {error!r}") from error
    raise RefusedError(f"{file.path.name} has the format {kind!r}, of which the checker knows nothing")


def _cell(file: TensorFile, config: dict[str, Any], name: str) -> Part:
    states, named = _size(config["state_features"]), config["activation"]
    raw, left, right = (f"{name}state.{end}" for end in ("raw", "left", "right"))
    if raw in file.entries:
        A = partial(file.matrix, raw, states, states)
    else:
        A = partial(_product, file, left, right, states)
    names, sizes = ([named], [states]) if isinstance(named, str) else (named["parts"], named["sizes"])
    matrices = {part: partial(file.matrix, name + part) for part in "BCD" if name + part in file.entries}
    biases = {"b": partial(file.vector, f"{name}bias", states)} if f"{name}bias" in file.entries else {}
    return Part(name.rstrip("."), False, *_phis(names, sizes, states), {"A": A, **matrices}, biases)


def _product(file: TensorFile, left: str, right: str, states: int) -> Matrix:
    """Multiplies the factors of ``A = L R'``."""
    L, R = file.matrix(left, states), file.matrix(right, states)
    if L.shape != R.shape:
        raise RefusedError("the two factors of A do not fit")
    file.budget.spend(len(L.rows) * len(R.rows))
    return Matrix([[dot(one, other) for other in R.rows] for one in L.rows], L.exponent + R.exponent)


def _phis(names: Any, sizes: Any, states: int) -> tuple[list[Phi], int | None]:
    if len(names) != len(sizes) or sum(map(_size, sizes)) != states:
        raise RefusedError("the activations do not make up the states")
    phis = [activation(name) for name in names]
    size = phis[0].block if len({(phi.block, phi.gamma) for phi in phis}) == 1 else -1
    if all(phi.block is None for phi in phis):
        size = None
    elif size == 0:
        size = states if len(phis) == 1 else -1  # which no certificate of blocks can have
    return [phi for phi, count in zip(phis, sizes, strict=True) for _ in range(count)], size


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_STATES:
        raise RefusedError(f"{value!r} is no number of states, or one above {LARGEST_STATES}")
    return value


def _form(file: TensorFile, header: dict[str, Any]) -> Part:
    """Reads a form; if its blocks feed one another in one direction only, nothing else of A matters."""
    A, named = header["A"], header["activation"]
    if A["operator"] == "Block":
        sizes, edges = A["heights"]["tuple"], [tuple(key["tuple"]) for key, _ in A["parts"]["dict"]]
        if sizes != A["widths"]["tuple"]:
            raise RefusedError("the blocks of A are not square")
        acyclic = _acyclic(len(sizes), edges)
    else:
        sizes, acyclic = [len(read_operator(file, A).rows)], False
    names = [named] * len(sizes) if isinstance(named, str) else named
    matrices = {name: partial(read_operator, file, header[name]) for name in "ABCD"}
    places = {name: header[field] for name, field in (("b", "bias"), ("c", "output_bias"))}
    biases = {name: partial(file.vector, given["tensor"]) for name, given in places.items() if given is not None}
    states = sum(map(_size, sizes))
    file.budget.spend(states)
    return Part("", acyclic, *_phis(names, sizes, states), matrices, biases)


def _acyclic(count: int, edges: Iterable[tuple[int, int]]) -> bool:
    """Tells whether the blocks have an order in which each one reads those before it."""
    reads: dict[int, set[int]] = {i: set() for i in range(count)}
    for i, j in edges:
        if j not in reads:
            raise RefusedError(f"A has no block {j}")
        reads[i].add(j)
    try:
        TopologicalSorter(reads).prepare()  # in time that grows with the edges
    except CycleError:
        return False
    return True


def read_operator(file: TensorFile, header: dict[str, Any]) -> Matrix:
    """Forms a matrix from the kinds of operators that hold their entries; others are refused."""
    kind = header["operator"]
    if kind == "Dense":
        found = file.matrix(header["matrix"]["tensor"])
        order = header["matrix"].get("order", [0, 1])
        return found if order == [0, 1] else Matrix([list(column) for column in zip(*found.rows, strict=True)],
                                                    found.exponent)  # fmt: skip
    if kind == "LowRank":
        left, right = header["left"], header["right"]
        if "order" in left or "order" in right:
            raise RefusedError("a factor of A is stored in an order that is not read")
        return _product(file, left["tensor"], right["tensor"], file.entries[left["tensor"]][1][0])
    if kind in ("Zero", "Identity"):
        rows, columns = header["size"]["tuple"] if kind == "Zero" else [header["size"]] * 2
        diagonal = int(kind == "Identity")
        file.budget.spend(_size(rows) * _size(columns))
        return Matrix([[diagonal * (i == j) for j in range(_size(columns))] for i in range(_size(rows))], 0)
    if kind == "Block":
        return _block(file, header)
    raise RefusedError(f"the checker does not form operators of the kind {kind!r} in loops")


def _block(file: TensorFile, header: dict[str, Any]) -> Matrix:
    heights, widths = ([_size(size) for size in header[name]["tuple"]] for name in ("heights", "widths"))
    file.budget.spend(sum(heights) * (sum(widths) + 8 * len(widths)))
    parts = {tuple(key["tuple"]): read_operator(file, part) for key, part in header["parts"]["dict"]}
    if any((heights[i], widths[j]) != part.shape and all(part.shape) for (i, j), part in parts.items()):
        raise RefusedError("a block has another size than its place")
    lowest = min((part.exponent for part in parts.values()), default=0)
    rows = []
    for i, height in enumerate(heights):
        for k in range(height):
            row: list[int] = []
            for j, width in enumerate(widths):
                part = parts.get((i, j))
                row += [0] * width if part is None else [e << (part.exponent - lowest) for e in part.rows[k]]
            rows.append(row)
    return Matrix(rows, lowest)
