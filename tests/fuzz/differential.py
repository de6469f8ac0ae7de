"""Changed files before checker and library: ``python -m tests.fuzz.differential --cases 100000 --seed 0``.

Headers and configurations of saved models are changed at random. Either both readers refuse such a file, or both
see the same matrices, biases, activations and blocks; the numbers are compared. A reader may be stricter where the
other has nothing to say: the checker forms no convolutions and knows fewer activations, the library looks at
solvers, caps and indices too. That much is told apart by reasons that are written down here.
"""

import argparse
import collections
import json
import random
import re
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wellposed as wp
from tests.fuzz.mutations import mutated_json, mutated_safetensors
from wellposed.checker import RefusedError
from wellposed.checker.check import equations
from wellposed.checker.model import Part
from wellposed.checker.tensors import rounded
from wellposed.cli.stored import as_stored
from wellposed.errors import WellposedError
from wellposed.forms import Block, Dense, Diagonal, Identity, ImplicitForm, LowRank

SAVED = Path(__file__).parents[1] / "saved"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
CHECKER_ONLY = re.compile(
    r"not known to the checker|does not form|NaN or infinity|no number of states|is not read"
)
LIBRARY_ONLY = re.compile(
    r"cannot apply to|gives no unique equilibrium|kappa=None|kappa must|inconsistent with indices|negative index"
    r"|a selection from|checksum|tensors are not|rank goes with|far more than the"
)
FREE = ("solver", "stop", "max_steps", "gradient", "on_failure", "executor", "kappa", "dropout", "warm_start")
NAMES = (
    *("relu", "tanh", "sigmoid", "softmax", "softmax(2)", "max_pool(2)", "max_pool(3)", "group_sort(2)", "gelu"),
    *("leaky_relu(0.5)", "leaky_relu(2)", "leaky_relu(-0.5)", "leaky_relu(0.25", "hardtanh(-1.0, 2.0)", "relu ()"),
    *("rescaled('tanh', 2.0)", "rescaled('relu', 1.0)", "elu(2.0)", "elu()", "softshrink(0.25)", "normalise(2)"),
)


@dataclass(frozen=True)
class Seed:
    """A saved model: the bytes of its tensors, and of its configuration where it is a folder."""

    name: str
    tensors: bytes
    config: bytes | None = None


def seeds() -> list[Seed]:
    """Saves forms and models of many kinds, beside those that older versions have saved."""
    torch.manual_seed(0)
    saved = [Seed(path.stem, path.read_bytes()) for path in sorted(SAVED.glob("*.safetensors"))]
    saved = [seed for seed in saved if seed.name != "answers"]
    older = SAVED / "implicit-folder"
    saved.append(Seed(older.name, (older / WEIGHTS).read_bytes(), (older / CONFIG).read_bytes()))
    for name, model in fresh().items():
        with tempfile.TemporaryDirectory() as folder:
            wp.save(model, Path(folder) / "m.safetensors")
            saved.append(Seed(name, (Path(folder) / "m.safetensors").read_bytes()))
            wp.models.save_pretrained(model, folder)
            weights, config = (Path(folder) / file for file in (WEIGHTS, CONFIG))
            saved.append(Seed(f"{name}, folder", weights.read_bytes(), config.read_bytes()))
    return saved


def fresh() -> dict[str, Any]:
    wide = torch.float64
    A, B, C = (0.1 * torch.randn(*shape, dtype=wide) for shape in ((4, 4), (4, 2), (3, 4)))
    factors = LowRank(0.3 * torch.rand(4, 1, dtype=wide), torch.rand(4, 1, dtype=wide))
    blocks = {(0, 1): Dense(A[:2, 2:].contiguous()), (1, 1): Diagonal(A[2:, 0].contiguous())}
    chain = Block((2, 2), (2, 2), {(0, 1): Dense(A[:2, :2].contiguous())}, wide)
    mixed = Block((2, 2), (2, 2), {(0, 0): Identity(2, wide), (1, 0): Dense(A[2:, :2].mT.contiguous().mT)}, wide)
    return {
        "transposed": ImplicitForm(A.mT, B, C, bias=B[:, 0].contiguous()),
        "factors": ImplicitForm(factors, B, C, activation="tanh", output_bias=C[:, 0].contiguous()),
        "blocks": ImplicitForm(
            Block((2, 2), (2, 2), blocks), B, C, activation=["relu", "tanh"], labels=["a", "b"]
        ),
        "chain": ImplicitForm(chain, B, C, activation=["max_pool(2)", "softmax"]),
        "mixed": ImplicitForm(mixed, B, C, activation=["leaky_relu(0.25)", "sigmoid"]),
        "whole": ImplicitForm(Block((2, 2), (2, 2), blocks), B, C, activation="softmax"),
        "sparse": ImplicitForm(A.to_sparse(), B, C.to_sparse()),
        "packed": ImplicitForm(*(0.5 * torch.eye(*shape, dtype=wide) for shape in ((16, 16), (16, 12), (9, 16)))),
        "packed model": wp.ImplicitModel.from_matrices(0.5 * torch.eye(24), torch.eye(24), torch.ones(9, 24)),
        "packed index": ImplicitForm(
            (0.5 * torch.eye(99, dtype=wide)).to_sparse(),
            torch.eye(99, 2, dtype=wide),
            torch.ones(1, 99, dtype=wide),
        ),
        "pools": wp.ImplicitModel(2, 3, 4, activation="max_pool(2)", condition="block"),
        "triangle": wp.ImplicitModel(2, 3, 4, triangular=True, bias=True).double(),
        "recurrent": wp.ImplicitRNN(2, 3, 4, num_layers=2, bidirectional=True, out_features=1, batch_first=True),
    }


def changed(seed: Seed, draw: random.Random) -> Seed:
    """Changes the file, or the configuration beside it, in a few places."""
    if seed.config is None:
        kind = draw.randrange(4)
        if kind < 2:
            return Seed(seed.name, mutated_safetensors(seed.tensors, draw))
        return Seed(seed.name, _with_inner(seed.tensors, _renamed if kind == 2 else _doubled, draw))
    if draw.random() < 0.2:
        return Seed(seed.name, mutated_safetensors(seed.tensors, draw), _unsealed(seed.config))
    config = json.loads(_unsealed(seed.config))
    kind = draw.randrange(4)
    text = _renamed(json.dumps(config), draw) if kind == 2 else json.dumps(config)
    text = _doubled(text, draw) if kind == 3 else text
    return Seed(seed.name, seed.tensors, (json.dumps(mutated_json(config, draw)) if kind < 2 else text).encode())


def _unsealed(config: bytes) -> bytes:
    content = json.loads(config)
    content.pop("sha256", None)
    return json.dumps(content).encode()


def _with_inner(data: bytes, change: Callable[[str, random.Random], str], draw: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header["__metadata__"]
    metadata.pop("sha256", None)
    body = "form" if "form" in metadata else "config"
    metadata[body] = change(metadata[body], draw)
    text = json.dumps(header)
    text = _doubled(text, draw) if draw.random() < 0.1 else text
    return struct.pack("<Q", len(text.encode())) + text.encode() + data[8 + length :]


def _renamed(text: str, draw: random.Random) -> str:
    """Gives a model other activations, or other texts instead of some."""
    content = json.loads(text)
    body = content.get("form", content.get("config", content)) if isinstance(content, dict) else {}
    for cell in body.get("cells", [body]):
        given = cell.get("activation")
        if isinstance(given, list) and draw.random() < 0.8:
            cell["activation"] = [draw.choice((*NAMES, name)) for name in given]
        else:
            cell["activation"] = draw.choice((*NAMES, given))
    return json.dumps(content)


def _doubled(text: str, draw: random.Random) -> str:
    """Says something twice, or changes a number or a word in the text."""
    keys = list(re.finditer(r'"(\w+)": ', text))
    words = list(re.finditer(r": (null|true|false|-?\d[\d.e+-]*)", text))
    if words and draw.random() < 0.5:
        match = draw.choice(words)
        value = draw.choice(("null", "true", "NaN", "1e999", "-1", "0", "1.0", "2", "[]", "{}", '""', '"relu"'))
        return f"{text[: match.start(1)]}{value}{text[match.end(1) :]}"
    match = draw.choice(keys)
    value = draw.choice(("null", "1", "[0, 1]", '"relu"', "{}"))
    return f'{text[: match.start()]}"{match[1]}": {value}, {text[match.start() :]}'


def by_checker(path: Path) -> list[Part] | str:
    """Returns what the checker sees, or why it refuses."""
    try:
        seen = equations(path)
        for equation in seen:
            for name in equation.matrices:
                matrix_of(equation, name)
            for read in equation.biases.values():
                read()
    except RefusedError as error:
        return str(error)
    return seen


def matrix_of(part: Part, name: str) -> np.ndarray | None:
    """Returns a matrix of the checker, or None where it is of a kind that it does not form."""
    try:
        read = part.matrices[name]()
    except RefusedError as error:
        if "does not form" in str(error):
            return None
        raise
    return np.array([[rounded(Fraction(entry) * read.unit) for entry in row] for row in read.rows])


def by_library(path: Path) -> Any:
    """Returns what the library sees, or why it refuses."""
    try:
        return wp.models.from_pretrained(path) if path.is_dir() else wp.load(path)
    except (WellposedError, FileNotFoundError) as error:
        return str(error)


def written(seed: Seed, folder: Path) -> Path:
    """Writes the files; returns what is read."""
    path = folder / WEIGHTS
    path.write_bytes(seed.tensors)
    if seed.config is None:
        return path
    (folder / CONFIG).write_bytes(seed.config)
    return folder


def neutral(seed: Seed, original: Seed) -> Seed:
    """Takes back what was changed about solving, which decides nothing about the equation."""

    def restored(new: Any, old: Any) -> Any:
        if isinstance(new, dict) and isinstance(old, dict):
            return {key: old.get(key, value) if key in FREE else restored(value, old.get(key))
                    for key, value in new.items()}  # fmt: skip
        if isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
            return [restored(*pair) for pair in zip(new, old, strict=True)]
        return new

    if seed.config is not None and original.config is not None:
        body = restored(json.loads(seed.config), json.loads(original.config))
        return Seed(seed.name, seed.tensors, json.dumps(body).encode())
    (length,) = struct.unpack("<Q", original.tensors[:8])
    old = json.loads(original.tensors[8 : 8 + length])["__metadata__"]
    (size,) = struct.unpack("<Q", seed.tensors[:8])
    header = json.loads(seed.tensors[8 : 8 + size])
    metadata = header["__metadata__"]
    metadata.pop("sha256", None)
    if "config" in metadata:
        metadata["config"] = json.dumps(restored(json.loads(metadata["config"]), json.loads(old["config"])))
    text = json.dumps(header).encode()
    return Seed(seed.name, struct.pack("<Q", len(text)) + text + seed.tensors[8 + size :])


def outcome(seed: Seed, original: Seed) -> tuple[str, str]:
    """Returns what became of a file, and what is wrong with that, if anything."""
    with tempfile.TemporaryDirectory() as folder:
        path = written(seed, Path(folder))
        checked, model = by_checker(path), by_library(path)
        if isinstance(checked, str) and isinstance(model, str):
            return "both refuse", ""
        if isinstance(checked, str):
            if isinstance(model, wp.DEQ) or CHECKER_ONLY.search(checked):
                return "beyond the checker", ""
            return "one refuses", f"the library reads what the checker refuses: {checked}"
        if isinstance(model, str):
            if LIBRARY_ONLY.search(model):
                return "about solving", ""
            other = written(neutral(seed, original), Path(folder))
            again = by_library(other)
            free = not isinstance(again, str) or LIBRARY_ONLY.search(again)
            if not isinstance(by_checker(other), str) and not free:
                return "one refuses", f"the checker reads what the library refuses: {model}"
            return "about solving", ""
        return "both read", differs(path, checked, model)


def differs(path: Path, checked: list[Part], model: Any) -> str:
    """Compares numbers; returns what is not the same, where ``wellposed verify`` would not notice it either."""
    wrong = ""
    if isinstance(model, ImplicitForm):
        wrong = _form_differs(checked[0], model)
    else:
        cells = [model] if isinstance(model, wp.ImplicitModel) else list(model.cells)
        if len(cells) != len(checked):
            return "they see other numbers of equations"
        for equation, cell in zip(checked, cells, strict=True):
            wrong = wrong or _cell_differs(equation, cell)
    if wrong == "A" and not isinstance(model, ImplicitForm):
        try:
            as_stored(path / WEIGHTS if path.is_dir() else path, folder=path.is_dir())
        except RefusedError:
            return ""  # a smaller cap, by which the library projects A once more
    return wrong


def _cell_differs(part: Part, cell: Any) -> str:
    seen = {"A": cell.A, "B": cell.B, "C": cell.C, "D": cell.D}
    if part.matrices.keys() != {name for name, value in seen.items() if value is not None}:
        return "which matrices there are"
    for name in ("B", "C", "D", "A"):
        if name in part.matrices and not _close(matrix_of(part, name), seen[name], cell.B.dtype, name == "A"):
            return name
    if not _same_bias(part, "b", cell.bias):
        return "the bias"
    return _phi_differs(part, cell.activation, cell.state_features)


def _form_differs(part: Part, form: ImplicitForm) -> str:
    wide = form.to(torch.float64)
    for name in "ABCD":
        read = matrix_of(part, name)
        if read is not None and not _close(read, getattr(wide, name).to_dense(), torch.float64, True):
            return name
    if not _same_bias(part, "b", form.bias) or not _same_bias(part, "c", form.output_bias):
        return "the biases"
    if (part.sizes, part.names) != (list(form.partition), [phi.name for phi in form.activations]):
        return "the blocks"
    if part.acyclic and form.order.loops:
        return "the loops"
    return _phi_differs(part, form.activation, sum(form.partition))


def _close(read: np.ndarray | None, value: torch.Tensor, dtype: torch.dtype, rounded: bool) -> bool:
    if read is None or read.shape != tuple(value.shape):
        return read is None
    expected, digits = value.detach().double().numpy(), 8 * torch.finfo(dtype).eps if rounded else 0.0
    return bool(np.allclose(read, expected, rtol=digits, atol=digits * max(1e-300, float(np.abs(read).max()))))


def _same_bias(part: Part, name: str, value: torch.Tensor | None) -> bool:
    read = part.biases[name]() if name in part.biases else None
    return (read is None) == (value is None) and (value is None or read == value.detach().double().tolist())


def _phi_differs(part: Part, phi: Any, states: int) -> str:
    """Compares values where the checker knows them, and else the constant of Lipschitz in the norm inf."""
    if len(part.phis) != states:
        return "the number of states"
    generator = torch.Generator().manual_seed(1)
    z, other = (3 * torch.randn(states, dtype=torch.float64, generator=generator) for _ in range(2))
    value = phi(z[None])[0]
    for k, own in enumerate(part.phis):
        if own.image is not None:
            low, high = own.image(Fraction(float(z[k])))
            if not float(low) - 1e-12 <= float(value[k]) <= float(high) + 1e-12:
                return "the values of phi"
    steepest = max(float(own.gamma) for own in part.phis)
    grown = float((value - phi(other[None])[0]).abs().max())
    return "the slopes of phi" if grown > steepest * float((z - other).abs().max()) * (1 + 1e-9) else ""


def campaign(cases: int, seed: int, keep: Path | None = None) -> tuple[collections.Counter, dict[str, str]]:
    """Returns how often what came, and the first case of everything that is wrong."""
    draw, originals = random.Random(seed), seeds()
    counts: collections.Counter = collections.Counter()
    wrong: dict[str, str] = {}
    for original in originals:
        kind, what = outcome(original, original)
        if what or kind not in ("both read", "beyond the checker"):
            wrong[original.name] = f"as it was saved: {kind}, {what}"
    for number in range(cases):
        original = draw.choice(originals)
        case = changed(original, draw)
        try:
            kind, what = outcome(case, original)
        except Exception as error:
            kind, what = "not ours", f"{type(error).__name__}: {error}"
        counts[kind] += 1
        if what:
            wrong.setdefault(f"{kind}: {what[:70]}", f"case {number} of {original.name}: {what[:400]}")
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{number}.safetensors").write_bytes(case.tensors)
                (keep / f"{number}.json").write_bytes(case.config or b"")
    return counts, wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for files that are read differently")
    parser.add_argument("--out", type=Path, help="a file for the counts, to which rows are added")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    start = time.monotonic()
    counts, wrong = campaign(given.cases, given.seed, given.keep)
    print(*(f"{kind:20s} {count:8d}" for kind, count in counts.most_common()), *wrong.values(), sep="\n")
    print(f"{given.cases} files, seed {given.seed}: {len(wrong)} kinds of differences, "
          f"{time.monotonic() - start:.0f} s", file=sys.stderr)  # fmt: skip
    if given.out is not None:
        command = f"python -m tests.fuzz.differential --cases {given.cases} --seed {given.seed}"
        rows = json.loads(given.out.read_text()) if given.out.exists() else []
        row = {"command": command, "cases": given.cases, "seed": given.seed, "counts": dict(counts.most_common())}
        given.out.write_text(json.dumps([*rows, {**row, "differences": [*wrong.values()]}], indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
