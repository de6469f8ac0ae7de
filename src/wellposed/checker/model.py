"""What a model file says to the checker: its matrices and activations, read by code of the checker's own."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from graphlib import CycleError, TopologicalSorter
from math import prod
from typing import Any

from wellposed.checker.grammar import (
    CELL,
    FORM,
    RECURRENT,
    FormReader,
    Rule,
    anything,
    expect_tensors,
    is_size,
    is_text,
    list_of,
    one_of,
    table,
)
from wellposed.checker.phi import Phi, activation
from wellposed.checker.proofs import dot
from wellposed.checker.tensors import Matrix, RefusedError, TensorFile, read_json, scaled

LARGEST_STATES = 1 << 14
BODY = {"wellposed-form-1": "form", "wellposed-1": "config"}  # where a file of that format describes itself


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
        names: of the activations, one a block of states.
        sizes: of these blocks.
        operators: how a form describes A, B, C and D; empty for other models.
        edges: which of the blocks of states read which; empty for other models than forms.
    """

    name: str
    acyclic: bool
    phis: list[Phi]
    size: int | None
    matrices: Mapping[str, Callable[[], Matrix]]
    biases: Mapping[str, Callable[[], list[Fraction]]]
    names: list[str]
    sizes: list[int]
    operators: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    edges: list[tuple[int, int]] = field(default_factory=list)


def parts_of(file: TensorFile, config: dict[str, Any] | None) -> list[Part]:
    """Returns the equations of a model; `config` is the file beside it, where the model is a folder."""
    given = file.metadata if config is None else config
    kind = given.get("format")
    if not isinstance(kind, str) or kind not in BODY:
        raise RefusedError(f"{file.path.name} has the format {kind!r}, of which the checker knows nothing")
    rules: dict[str, Rule] = {"format": is_text, BODY[kind]: anything, "sha256": is_text, "packed": anything}
    if config is not None:
        rules |= {"library_name": one_of("wellposed"), "architectures": list_of(is_text, 1, 1)}
    table(given, rules, f"what describes {file.path.name}", ("sha256", "packed", "library_name", "architectures"))
    if "packed" in given:
        packed = given["packed"]
        file.unpack(packed if config is not None else read_json(packed, "the table of packed tensors"))
    body = given[BODY[kind]] if config is not None else read_json(given[BODY[kind]], "the configuration")
    try:
        made, equations = _parts(file, kind, body)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise RefusedError(f"{file.path.name} describes no model: {error!r}") from error
    if given.get("architectures", [made]) != [made]:
        raise RefusedError(f"the configuration calls itself {given['architectures']} and describes an {made}")
    return equations


def _parts(file: TensorFile, kind: str, body: Any) -> tuple[str, list[Part]]:
    if kind == "wellposed-form-1":
        return "ImplicitForm", [_form(file, table(body, FORM, "the form"))]
    if not isinstance(body, dict) or "kind" not in body:
        part, shapes = _cell(file, body, "")
        expect_tensors(file, shapes)
        return "ImplicitModel", [part]
    return "ImplicitRNN", _recurrent(file, table(body, RECURRENT, "the configuration"))


def _recurrent(file: TensorFile, config: dict[str, Any]) -> list[Part]:
    hidden, directions, outputs = config["hidden_size"], 1 + config["bidirectional"], config["out_features"]
    cells, width = config["cells"], config["hidden_size"] * directions
    if len(cells) != config["num_layers"] * directions:
        raise RefusedError(f"{config['num_layers'] * directions} cells are announced and {len(cells)} described")
    if outputs is None and config["readout_bias"]:
        raise RefusedError("the readout has a bias, and there is no readout")
    shapes: dict[str, tuple[int, ...]] = {} if outputs is None else {"readout.weight": (outputs, width)}
    shapes |= {"readout.bias": (outputs,)} if config["readout_bias"] else {}
    equations = []
    for k, cell in enumerate(cells):
        equation, own = _cell(file, cell, f"cells.{k}.")
        inputs = config["input_size"] if k < directions else width
        if (cell["in_features"], cell["out_features"]) != (inputs + hidden, hidden):
            raise RefusedError(f"cell {k} has other inputs or outputs than its layer")
        equations.append(equation)
        shapes |= own
    expect_tensors(file, shapes)
    return equations


def _cell(file: TensorFile, config: Any, name: str) -> tuple[Part, dict[str, tuple[int, ...]]]:
    """Returns the equation of a model, and which tensors it needs."""
    table(config, CELL, f"the configuration of {name.rstrip('.') or 'the model'}")
    n, named, rank = _size(config["state_features"]), config["activation"], config["rank"]
    p, q, condition = config["in_features"], config["out_features"], config["condition"]
    if (condition == "triangular") != (config["triangle"] is not None):
        raise RefusedError(f"the condition is {condition!r} and the triangle {config['triangle']!r}")
    if rank is not None and (condition != "inf" or rank > n):
        raise RefusedError(f"A has the rank {rank}, under the condition {condition!r} and with {n} states")
    shapes: dict[str, tuple[int, ...]] = {"B": (n, p), "C": (q, n)}
    shapes |= {"D": (q, p)} if config["feedthrough"] else {}
    shapes |= {"bias": (n,)} if config["bias"] else {}
    shapes |= {"state.log_weights": (n,)} if condition == "weighted" else {}
    shapes |= {"state.raw": (n, n)} if rank is None else {"state.left": (n, rank), "state.right": (n, rank)}
    if isinstance(named, str):
        names, sizes = [named], [n]
    else:
        rules = {"parts": list_of(is_text, 1), "sizes": list_of(is_size, 1)}
        names, sizes = (table(named, rules, "the activation")[key] for key in rules)
    A = partial(_product, file, f"{name}state.left", f"{name}state.right")
    if rank is None:
        A = partial(file.matrix, f"{name}state.raw", n, n)
    matrices = {part: partial(file.matrix, name + part, *shapes[part]) for part in "BCD" if part in shapes}
    biases = {"b": partial(file.vector, f"{name}bias", n)} if config["bias"] else {}
    part = Part(name.rstrip("."), False, *_phis(names, sizes, n), {"A": A, **matrices}, biases, names, sizes)
    return part, {name + key: shape for key, shape in shapes.items()}


def _product(file: TensorFile, left: Any, right: Any) -> Matrix:
    """Multiplies the factors of ``A = L R'``."""
    L, R = (file.matrix(factor) if isinstance(factor, str) else _stored(file, factor) for factor in (left, right))
    if L.shape[1] != R.shape[1]:
        raise RefusedError("the two factors of A do not fit")
    count, longest = len(L.rows) * len(R.rows), (L.bits, R.bits)
    file.budget.spend(count, sum(longest))
    file.budget.multiply(count * L.shape[1], *longest)
    return Matrix([[dot(one, other) for other in R.rows] for one in L.rows], L.exponent + R.exponent)


def _stored(file: TensorFile, given: dict[str, Any]) -> Matrix:
    """Reads a matrix of a form, which may lie in its file column by column."""
    matrix = file.matrix(given["tensor"])
    if given.get("order") != [1, 0]:
        return matrix
    return Matrix([list(column) for column in zip(*matrix.rows, strict=True)], matrix.exponent)


def _phis(names: list[str], sizes: list[int], states: int) -> tuple[list[Phi], int | None]:
    if len(names) != len(sizes) or sum(sizes) != states:
        raise RefusedError("the activations do not make up the states")
    phis = [activation(name) for name in names]
    if states == 0 and len(sizes) == 1:
        return [], None
    for name, phi, count in zip(names, phis, sizes, strict=True):
        if count < 1 or (phi.block and count % phi.block):
            raise RefusedError(f"{name} does not act on {count} states")
    size = phis[0].block if len({(phi.block, phi.constant) for phi in phis}) == 1 else -1
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
    reader, named = FormReader(file, header["dtype"]), header["activation"]
    seen = {name: reader.operator(header[name]) for name in "ABCD"}
    n, p, q = seen["A"].shape[0], seen["B"].shape[1], seen["C"].shape[0]
    for name, shape in {"A": (n, n), "B": (n, p), "C": (q, n), "D": (q, p)}.items():
        if seen[name].shape != shape or not p or not q:  # a form without states is a linear map
            raise RefusedError(f"{name} has the shape {list(seen[name].shape)}, expected {list(shape)}")
        if (name == "A" or seen[name].stored) and seen[name].dtype != header["dtype"]:
            raise RefusedError(f"{name} is {seen[name].dtype} and the form {header['dtype']}")
    for name, size in (("bias", n), ("output_bias", q)):
        if header[name] is not None:
            reader.vector(header[name], size)
    if unused := sorted(file.entries.keys() - reader.used):
        raise RefusedError(f"{file.path.name} holds the tensor {unused[0]!r}, of which the form does not speak")
    if prod(header["input_shape"]) != p:
        raise RefusedError(f"inputs of the shape {header['input_shape']} are not the {p} that B takes")
    sizes, edges = _blocks(header["A"], n)
    for size in sizes:  # the budget bounds their sum
        _size(size)
    if isinstance(named, str):
        if len(sizes) > 1 and _fits(activation(named), sizes):
            raise RefusedError(f"A has {len(sizes)} blocks and one activation; a form names one for each")
        # One map on all states lets every block that it reads act on all of them.
        sizes, edges = [n], [(0, 0)] if edges else []
    names = [named] if isinstance(named, str) else named
    if len(header["labels"]) not in (0, len(sizes)):
        raise RefusedError(f"there are {len(header['labels'])} labels for {len(sizes)} blocks")
    matrices = {name: partial(read_operator, file, header[name]) for name in "ABCD"}
    places = {"b": header["bias"], "c": header["output_bias"]}
    biases = {name: partial(file.vector, given["tensor"]) for name, given in places.items() if given is not None}
    file.budget.spend(n)
    one_way, operators = acyclic(len(sizes), edges), {name: header[name] for name in "ABCD"}
    return Part("", one_way, *_phis(names, sizes, n), matrices, biases, names, sizes, operators, edges)


def _blocks(A: dict[str, Any], states: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the sizes of the blocks of states, and which of them read which."""
    if A["operator"] != "Block" or A["heights"] != A["widths"]:
        return [states], [(0, 0)]
    blocks = A["parts"]["dict"]
    return A["heights"]["tuple"], [tuple(key["tuple"]) for key, block in blocks if block["operator"] != "Zero"]


def _fits(phi: Phi, sizes: list[int]) -> bool:
    """Returns whether a map acts on every block on its own."""
    return phi.block is None or (phi.block > 0 and not any(size % phi.block for size in sizes))


def acyclic(count: int, edges: Iterable[tuple[int, int]]) -> bool:
    """Returns whether the blocks have an order in which each one reads those before it."""
    reads: dict[int, set[int]] = {i: set() for i in range(count)}
    for i, j in edges:
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
        return _stored(file, header["matrix"])
    if kind == "LowRank":
        return _product(file, header["left"], header["right"])
    if kind in ("Zero", "Identity"):
        rows, columns = header["size"]["tuple"] if kind == "Zero" else [header["size"]] * 2
        diagonal = int(kind == "Identity")
        file.budget.spend(_size(rows) * _size(columns))
        return Matrix([[diagonal * (i == j) for j in range(_size(columns))] for i in range(_size(rows))], 0)
    if kind == "Sparse":
        return _sparse(file, header["matrix"])
    if kind == "Block":
        return _block(file, header)
    raise RefusedError(f"the checker does not form operators of the kind {kind!r} in loops")


def _sparse(file: TensorFile, given: dict[str, Any]) -> Matrix:
    """Forms a matrix from its entries, which come row by row and none twice."""
    rows, columns = map(_size, given["size"])
    if any("order" in part for part in given["sparse"]):
        raise RefusedError("the checker reads sparse matrices whose indices and entries lie in their own order")
    (_, count), indices = file.values(given["sparse"][0]["tensor"], (2, None))
    entries, exponent = scaled(file.values(given["sparse"][1]["tensor"], (count,))[1], file.budget)
    file.budget.spend(rows * columns)
    dense, before = [[0] * columns for _ in range(rows)], (-1, -1)
    for i, j, entry in zip(indices[:count], indices[count:], entries, strict=True):
        if not (before < (i, j) and 0 <= i < rows and 0 <= j < columns):
            raise RefusedError(
                f"the entry {i, j} of a sparse matrix is outside of it, out of order or given twice"
            )
        dense[i][j], before = entry, (i, j)
    return Matrix(dense, exponent)


def _block(file: TensorFile, header: dict[str, Any]) -> Matrix:
    heights, widths = ([_size(size) for size in header[name]["tuple"]] for name in ("heights", "widths"))
    file.budget.spend(8 * sum(heights) * len(widths))
    blocks = {tuple(key["tuple"]): read_operator(file, block) for key, block in header["parts"]["dict"]}
    lowest = min((block.exponent for block in blocks.values()), default=0)
    longest = max((block.bits + block.exponent - lowest for block in blocks.values()), default=0)
    file.budget.spend(sum(heights) * sum(widths), longest)
    rows = []
    for i, height in enumerate(heights):
        for k in range(height):
            row: list[int] = []
            for j, width in enumerate(widths):
                block = blocks.get((i, j))
                row += [0] * width if block is None else [e << (block.exponent - lowest) for e in block.rows[k]]
            rows.append(row)
    return Matrix(rows, lowest)
