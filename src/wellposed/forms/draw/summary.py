"""A form in words and numbers: its blocks, what feeds back, its totals and its certificate.

`BlockGraph` lists the non-zero blocks of a form as `BlockEdge` objects, from which all drawings and summaries are
made. `form_facts` returns a form as data; `block_table` and `summary_lines` print it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from wellposed.errors import IllPosedError
from wellposed.forms.evaluation import strong_components
from wellposed.forms.form import ImplicitForm
from wellposed.forms.operators.base import Operator, Product, Sum, tensors
from wellposed.forms.operators.block import Block, partitioned
from wellposed.forms.operators.entries import entries
from wellposed.forms.operators.plain import Diagonal, Identity, Repeated
from wellposed.forms.operators.structured import Accumulation, Convolution, Selection

if TYPE_CHECKING:
    from rich.table import Table

Role = Literal["weights", "wiring", "input", "output", "through", "feedback"]
Side = Literal["none", "all", "upper", "lower"]  # which entries of a block feed back
COLOURS: dict[Role, str] = {
    "weights": "#b7790b",  # ochre, and red for feedback, as in 003 Figure 5.14
    "wiring": "#3d4a5c",
    "input": "#1f5fd0",
    "output": "#00795a",
    "through": "#8a4fb5",
    "feedback": "#d1242f",
}
MEANING: dict[Role, str] = {
    "weights": "A: weights",
    "wiring": "A: identity or selection",
    "input": "B: from the input",
    "output": "C: to the output",
    "through": "D: input to output",
    "feedback": "A: feedback",
}


@dataclass(frozen=True)
class BlockEdge:
    """One non-zero block: what block `row` reads from block `column` of the matrix `name`."""

    name: Literal["A", "B", "C", "D"]
    row: int
    column: int
    operator: Operator
    feedback: Side = "none"

    @property
    def role(self) -> Role:
        """How it is coloured, its feedback apart."""
        if self.name != "A":
            return {"B": "input", "C": "output", "D": "through"}[self.name]  # type: ignore[return-value]
        return "feedback" if self.feedback == "all" else "wiring" if _is_wiring(self.operator) else "weights"

    @property
    def kind(self) -> str:
        """Names the operator."""
        return kind_of(self.operator)

    @cached_property
    def norm(self) -> float:
        """The inf norm of the block."""
        return float(self.operator.abs().row_sums().max()) if min(self.operator.shape) else 0.0

    @cached_property
    def extent(self) -> tuple[float, float]:
        """The smallest and the largest entry that differs from zero."""
        if isinstance(self.operator, Convolution):
            weight = self.operator.weight[self.operator.weight != 0]
            return float(weight.min()), float(weight.max())
        pairs = [(float(v.min()), float(v.max())) for _, _, v in entries(self.operator) if len(v)]
        return min(low for low, _ in pairs), max(high for _, high in pairs)


def kind_of(operator: Operator) -> str:
    """Names an operator in a few words.

    Example:
        >>> kind_of(Product((Identity(3), Identity(3))))
        'identity * identity'
    """
    if isinstance(operator, Product | Sum):
        sign = " * " if isinstance(operator, Product) else " + "
        names = [kind_of(part) for part in _parts(operator)]
        return sign.join(names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"])
    if isinstance(operator, Convolution):
        size = "x".join(map(str, operator.weight.shape[2:]))
        stride = "" if set(operator.stride) == {1} else f" /{'x'.join(map(str, sorted(set(operator.stride))))}"
        return f"{'transposed ' if operator.transposed else ''}convolution {size}{stride}"
    if isinstance(operator, Repeated):
        return f"{kind_of(operator.inner)}, {operator.count} times"
    if isinstance(operator, Block):
        kinds = list(dict.fromkeys(kind_of(part) for part in operator.parts.values()))
        return "stack of " + ", ".join(kinds if len(kinds) <= 3 else [*kinds[:2], f"{len(kinds) - 2} more"])
    return {"LowRank": "low rank"}.get(type(operator).__name__, type(operator).__name__.lower())


def _parts(operator: Product | Sum) -> tuple[Operator, ...]:
    return operator.factors if isinstance(operator, Product) else operator.terms


def _is_wiring(operator: Operator) -> bool:
    if isinstance(operator, Product | Sum):
        return all(_is_wiring(part) for part in _parts(operator))
    if isinstance(operator, Block):
        return all(_is_wiring(part) for part in operator.parts.values())
    if isinstance(operator, Repeated):
        return _is_wiring(operator.inner)
    return isinstance(operator, Identity | Selection | Accumulation | Diagonal)


@dataclass(frozen=True)
class BlockGraph:
    """A form as blocks of states with the edges between them.

    Example:
        >>> import torch
        >>> block_graph = BlockGraph(ImplicitForm(torch.ones(2, 2) / 4, torch.eye(2), torch.ones(1, 2)))
        >>> [(edge.name, edge.kind, edge.feedback) for edge in block_graph.edges]
        [('A', 'dense', 'lower'), ('B', 'dense', 'none'), ('C', 'dense', 'none')]
    """

    form: ImplicitForm

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The sizes of the blocks of states, inputs and outputs."""
        _, B, C = self.form.blocks
        return self.form.partition, B.widths, C.heights

    @property
    def labels(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The names of the same; states have those of modules, or numbers from the first layer, which is last."""
        states, inputs, outputs = self.sizes
        own = self.form.labels or tuple(_numbered("x", len(states)))[::-1]
        if self.form.labels:  # a child of a plain Sequential has a number for a name
            own = tuple(f"{phi.name} {label}" if label.isdigit() else label
                        for label, phi in zip(own, self.form.activations, strict=True))  # fmt: skip
        return own, tuple(_numbered("u", len(inputs))), tuple(_numbered("y", len(outputs)))

    @cached_property
    def edges(self) -> tuple[BlockEdge, ...]:
        """The non-zero blocks of A, B, C and D."""
        A, B, C = self.form.blocks
        D = partitioned(self.form.D, C.heights, B.widths)
        inner = _present(A)
        sides = _sides(inner, len(A.heights))
        edges = [BlockEdge("A", i, j, part, sides[i, j]) for (i, j), part in inner.items()]
        for name, block in (("B", B), ("C", C), ("D", D)):
            edges += [BlockEdge(name, i, j, part) for (i, j), part in _present(block).items()]  # type: ignore[arg-type]
        return tuple(edges)

    def about(self, edge: BlockEdge) -> list[str]:
        """Describes an edge in a few lines: what reads what, by which operator, how large."""
        states, inputs, outputs = self.labels
        reader = (states if edge.name in "AB" else outputs)[edge.row]
        source = (states if edge.name in "AC" else inputs)[edge.column]
        rows, columns = edge.operator.shape
        low, high = edge.extent
        lines = [
            f"{reader} reads {source}",
            f"{edge.name}: {edge.kind}, {rows:,} x {columns:,}",
            f"{edge.operator.nonzeros():,} non-zero entries from {low:.3g} to {high:.3g}",
            f"largest row sum {edge.norm:.4g}",
        ]
        return lines if edge.feedback == "none" else [*lines, "feeds back"]


def _numbered(letter: str, count: int) -> Iterable[str]:
    return [letter] if count == 1 else [f"{letter}{index + 1}" for index in range(count)]


def _present(block: Block) -> dict[tuple[int, int], Operator]:
    return {key: part for key, part in sorted(block.parts.items()) if min(part.shape) and part.nonzeros()}


def _sides(blocks: dict[tuple[int, int], Operator], count: int) -> dict[tuple[int, int], Side]:
    """Says which entries feed back: those of a loop on the wrong side of its diagonal (003, section 5.4).

    Last layer first, a feed-forward network has its blocks above the diagonal; a loop with most of its blocks
    below is taken to be written first layer first.
    """
    reads = {k: [j for i, j in blocks if i == k] for k in range(count)}
    loop = {k: number for number, members in enumerate(strong_components(reads)) for k in members}
    inside = [(i, j) for i, j in blocks if loop[i] == loop[j] and i != j]
    below = [loop[i] for i, j in inside if i > j]
    above = [loop[i] for i, j in inside if i < j]
    sides: dict[tuple[int, int], Side] = {}
    for (i, j), part in blocks.items():
        if i == j:
            sides[i, j] = _own_side(part)
        elif loop[i] != loop[j]:
            sides[i, j] = "none"
        else:
            wrong = i > j if above.count(loop[i]) >= below.count(loop[i]) else i < j
            sides[i, j] = "all" if wrong else "none"
    return sides


def _own_side(part: Operator) -> Side:
    """Says which side of a block on the diagonal feeds back; the diagonal belongs to that side."""
    over = under = on = 0
    for rows, columns, _ in entries(part):
        over, under = over + int((columns > rows).sum()), under + int((columns < rows).sum())
        on += int((columns == rows).sum())
    if not on and not (over and under):
        return "none"
    return "lower" if over or not under else "upper"


def form_facts(form: ImplicitForm) -> dict[str, Any]:
    """Describes a form as data: sizes, blocks with what they read, loops, memory and certificate.

    Example:
        >>> import torch
        >>> form = ImplicitForm(torch.ones(3, 3).triu(1), torch.eye(3), torch.ones(1, 3))
        >>> facts = form_facts(form)
        >>> facts["states"], facts["nonzeros"]["A"], facts["loops"]
        (3, 3, [])
    """
    block_graph, (n, p, q) = BlockGraph(form), form.sizes
    used = {name: [edge for edge in block_graph.edges if edge.name == name] for name in "ABCD"}
    nonzeros = {name: sum(edge.operator.nonzeros() for edge in edges) for name, edges in used.items()}
    stored, memory = _memory(form)
    return {
        "states": n,
        "inputs": p,
        "outputs": q,
        "input_shape": list(form.input_shape),
        "dtype": str(form.dtype).removeprefix("torch."),
        "nonzeros": nonzeros,
        "density": nonzeros["A"] / max(1, n * n),
        "stored": stored,
        "bytes": memory,
        "norm": max(_row_norms(block_graph), default=0.0),
        "loops": _loops(block_graph),
        "certificate": _certificate(form),
        "blocks": _blocks(block_graph, used),
    }


def _blocks(block_graph: BlockGraph, used: dict[str, list[BlockEdge]]) -> list[dict[str, Any]]:
    form, norms = block_graph.form, _row_norms(block_graph)
    states, inputs, outputs = block_graph.labels
    rows = []
    for k, (label, size) in enumerate(zip(states, form.partition, strict=True)):
        edges = [edge for name in "AB" for edge in used[name] if edge.row == k]
        facts = {"block": label, "activation": form.activations[k].name, "states": size, "norm": norms[k]}
        rows.append({**facts, **_reads(edges, {"A": states, "B": inputs})})
    for k, (label, size) in enumerate(zip(outputs, block_graph.sizes[2], strict=True)):
        edges = [edge for name in "CD" for edge in used[name] if edge.row == k]
        rows.append(
            {
                "block": label,
                "activation": None,
                "states": size,
                "norm": None,
                **_reads(edges, {"C": states, "D": inputs}),
            }
        )
    return rows


def _reads(edges: list[BlockEdge], labels: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    reads = [
        {"block": labels[edge.name][edge.column], "operator": edge.kind, "feedback": edge.feedback != "none"}
        for edge in edges
    ]
    return {"reads": reads, "nonzeros": sum(edge.operator.nonzeros() for edge in edges)}


def _row_norms(block_graph: BlockGraph) -> list[float]:
    """Returns ``|A_k|_inf`` of every block row."""
    sums: dict[int, Tensor] = {}
    for edge in block_graph.edges:
        if edge.name == "A":
            own = edge.operator.abs().row_sums().double()
            sums[edge.row] = sums[edge.row] + own if edge.row in sums else own
    return [float(sums[k].max()) if k in sums else 0.0 for k in range(len(block_graph.form.partition))]


def _memory(form: ImplicitForm) -> tuple[int, int]:
    """Counts the stored numbers and their bytes, shared ones once."""
    seen: dict[tuple, Tensor] = {}
    for value in (form.A, form.B, form.C, form.D, form.bias, form.output_bias):
        for part in tensors(value):
            seen[part.data_ptr(), part.numel(), part.dtype] = part
    storages = seen.values()
    return sum(part.numel() for part in storages), sum(part.numel() * part.element_size() for part in storages)


def _loops(block_graph: BlockGraph) -> list[list[str]]:
    """Names the blocks of every loop."""
    states = block_graph.labels[0]
    feeding = {edge.row for edge in block_graph.edges if edge.feedback != "none"}
    stages = block_graph.form.order.stages
    return [[states[k] for k in stage.blocks] for stage in stages if feeding & set(stage.blocks)]


def _certificate(form: ImplicitForm) -> dict[str, Any]:
    try:
        proof = form.certificate()
    except IllPosedError as error:
        return {"holds": False, "text": str(error), "value": None}
    return {"holds": proof.holds, "text": str(proof), "value": proof.value}


def block_table(facts: dict[str, Any]) -> "Table":
    """Shows every block with what it reads, last layer first as in A.

    Args:
        facts: those of `form_facts`.
    """
    from rich import box  # here, so that a model loads without it
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in ("block", "activation", "states", "reads", "non-zeros", "|A_k|inf"):
        numeric = heading in ("states", "non-zeros", "|A_k|inf")
        shown.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for block in facts["blocks"]:
        norm = "" if block["norm"] is None else f"{block['norm']:.4g}"
        reads = "\n".join(_read(read) for read in block["reads"])
        phi = "[dim]output[/dim]" if block["activation"] is None else _plain(block["activation"])
        row = (_plain(block["block"]), phi, f"{block['states']:,}", reads, f"{block['nonzeros']:,}", norm)
        shown.add_row(*row)
    return shown


def _read(read: dict[str, Any]) -> str:
    text = f"{_plain(read['block'])} [dim]by {_plain(read['operator'])}[/dim]"
    return f"[red]{text} (feedback)[/red]" if read["feedback"] else text


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def summary_lines(facts: dict[str, Any]) -> list[str]:
    """Says in a few lines how large a form is and what is proven about it."""
    shape = " x ".join(map(str, facts["input_shape"]))
    count = facts["nonzeros"]
    loops = [" <-> ".join(loop) for loop in facts["loops"]]
    proof = facts["certificate"]
    return [
        f"{facts['states']:,} states, {facts['inputs']:,} inputs ({shape}), {facts['outputs']:,} outputs, "
        f"{facts['dtype']}",
        f"non-zeros: A {count['A']:,} (density {facts['density']:.3g}), B {count['B']:,}, C {count['C']:,}, "
        f"D {count['D']:,}",
        f"stored: {facts['stored']:,} numbers, {_size(facts['bytes'])}; |A|inf = {facts['norm']:.6g}",
        f"loops: {'; '.join(loops) if loops else 'none, one pass computes the output'}",
        f"certificate: {proof['text'] if proof['holds'] else 'NONE: ' + proof['text']}",
    ]


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return ""
