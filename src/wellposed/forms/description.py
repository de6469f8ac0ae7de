"""A form in words and numbers: its blocks, its totals, its certificate."""

from typing import Any

from rich import box
from rich.table import Table
from torch import Tensor

from wellposed.errors import IllPosedError
from wellposed.forms.form import ImplicitForm
from wellposed.forms.links import Link, Wiring
from wellposed.forms.operator import tensors


def form_facts(form: ImplicitForm) -> dict[str, Any]:
    """Describes a form as data: sizes, blocks with what they read, loops, memory and certificate.

    Example:
        >>> import torch
        >>> form = ImplicitForm(torch.ones(3, 3).triu(1), torch.eye(3), torch.ones(1, 3))
        >>> facts = form_facts(form)
        >>> facts["states"], facts["nonzeros"]["A"], facts["loops"]
        (3, 3, [])
    """
    wiring, (n, p, q) = Wiring(form), form.sizes
    used = {name: [link for link in wiring.links if link.name == name] for name in "ABCD"}
    nonzeros = {name: sum(link.operator.nonzeros() for link in links) for name, links in used.items()}
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
        "norm": max(_row_norms(wiring), default=0.0),
        "loops": _loops(wiring),
        "certificate": _certificate(form),
        "blocks": _blocks(wiring, used),
    }


def _blocks(wiring: Wiring, used: dict[str, list[Link]]) -> list[dict[str, Any]]:
    form, norms = wiring.form, _row_norms(wiring)
    states, inputs, outputs = wiring.labels
    found = []
    for k, (label, size) in enumerate(zip(states, form.partition, strict=True)):
        links = [link for name in "AB" for link in used[name] if link.row == k]
        facts = {"block": label, "activation": form.activations[k].name, "states": size, "norm": norms[k]}
        found.append({**facts, **_reads(links, {"A": states, "B": inputs})})
    for k, (label, size) in enumerate(zip(outputs, wiring.sizes[2], strict=True)):
        links = [link for name in "CD" for link in used[name] if link.row == k]
        found.append(
            {
                "block": label,
                "activation": None,
                "states": size,
                "norm": None,
                **_reads(links, {"C": states, "D": inputs}),
            }
        )
    return found


def _reads(links: list[Link], labels: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    reads = [
        {"block": labels[link.name][link.column], "operator": link.kind, "feedback": link.feedback != "none"}
        for link in links
    ]
    return {"reads": reads, "nonzeros": sum(link.operator.nonzeros() for link in links)}


def _row_norms(wiring: Wiring) -> list[float]:
    """Returns ``|A_k|_inf`` of every block row."""
    sums: dict[int, Tensor] = {}
    for link in wiring.links:
        if link.name == "A":
            own = link.operator.abs().row_sums().double()
            sums[link.row] = sums[link.row] + own if link.row in sums else own
    return [float(sums[k].max()) if k in sums else 0.0 for k in range(len(wiring.form.partition))]


def _memory(form: ImplicitForm) -> tuple[int, int]:
    """Counts the numbers that are kept and their bytes, shared ones once."""
    seen: dict[tuple, Tensor] = {}
    for value in (form.A, form.B, form.C, form.D, form.bias, form.output_bias):
        for part in tensors(value):
            seen[part.data_ptr(), part.numel(), part.dtype] = part
    parts = seen.values()
    return sum(part.numel() for part in parts), sum(part.numel() * part.element_size() for part in parts)


def _loops(wiring: Wiring) -> list[list[str]]:
    """Names the blocks of every loop."""
    states = wiring.labels[0]
    feeding = {link.row for link in wiring.links if link.feedback != "none"}
    stages = wiring.form.plan.stages
    return [[states[k] for k in stage.blocks] for stage in stages if feeding & set(stage.blocks)]


def _certificate(form: ImplicitForm) -> dict[str, Any]:
    try:
        proof = form.certificate()
    except IllPosedError as error:
        return {"holds": False, "text": str(error), "value": None}
    return {"holds": proof.holds, "text": str(proof), "value": proof.value}


def block_table(facts: dict[str, Any]) -> Table:
    """Shows every block with what it reads, last layer first as in A.

    Args:
        facts: those of `form_facts`.
    """
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
