"""The reference path against torchidl and torchdeq on the same matrices, one thread each.

Run: make bench
"""

import json
import platform
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.problems import state_matrix
from benchmarks.rivals.libraries import TOLERANCE, ours, torchdeq_model, torchidl_model
from benchmarks.timing import best_times
from wellposed import Absolute

SIZES = [(20, 128), (30, 2048), (64, 512), (300, 256)]
FAMILIES = [("positive", 0.9), ("positive", 0.99), ("random", 0.9), ("ring", 0.9), ("shift", 0.9)]
RESULT = Path(__file__).parents[1] / "results" / "solve" / "reference.json"


def exact_state(A: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Iterates in float64 until nothing changes."""
    A, v = A.double(), v.double()
    x = torch.zeros_like(v)
    for _ in range(100_000):
        new = torch.relu(x @ A.mT + v)
        if torch.equal(new, x):
            break
        x = new
    return x


def measure(family: str, norm: float, n: int, batch: int) -> list[dict[str, object]]:
    """Times all libraries on one problem."""
    generator = torch.Generator().manual_seed(0)
    A = state_matrix(family, n, norm, generator)
    B, C = torch.eye(n), torch.randn(1, n, generator=generator) / n
    u = torch.randn(batch, n, generator=generator)
    models = {
        "wellposed": ours(A, B, C, stop=Absolute(TOLERANCE)),
        "torchidl": torchidl_model(A, B, C),
        "torchdeq": torchdeq_model(A, B, C),
    }
    exact = exact_state(A, u) @ C.double().mT
    errors = {name: float((model(u).detach().double() - exact).abs().max()) for name, model in models.items()}

    def forward_backward(model: torch.nn.Module) -> None:
        model(u).sum().backward()

    with torch.no_grad():
        forward = best_times({name: lambda m=model: m(u) for name, model in models.items()})
    both = best_times({name: lambda m=model: forward_backward(m) for name, model in models.items()})
    problem = {"family": family, "norm": norm, "n": n, "batch": batch}
    return [
        {
            **problem,
            "library": name,
            "forward_ms": 1e3 * forward[name],
            "both_ms": 1e3 * both[name],
            "error": errors[name],
        }
        for name in models
    ]


def show(rows: list[dict[str, object]]) -> None:
    """Prints times and ratios."""
    table = Table(title="forward / forward+backward, ms; one thread, float32, |step| <= 3e-6")
    for column in (
        "problem",
        "n, batch",
        "wellposed",
        "torchidl",
        "torchdeq",
        "vs torchidl",
        "vs torchdeq",
        "output error",
    ):
        table.add_column(column, justify="right")
    for start in range(0, len(rows), 3):
        mine, idl, deq = rows[start : start + 3]
        cells = [f"{r['forward_ms']:.2f} / {r['both_ms']:.2f}" for r in (mine, idl, deq)]
        ratios = [
            f"{r['forward_ms'] / mine['forward_ms']:.1f}x / {r['both_ms'] / mine['both_ms']:.1f}x"
            for r in (idl, deq)
        ]
        errors = " ".join(f"{r['error']:.0e}" for r in (mine, idl, deq))
        table.add_row(f"{mine['family']} {mine['norm']}", f"{mine['n']}, {mine['batch']}", *cells, *ratios, errors)
    Console(width=150).print(table)


def main() -> None:
    """Runs all problems, prints the table and writes the JSON file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [row for family, norm in FAMILIES for n, batch in SIZES for row in measure(family, norm, n, batch)]
    show(rows)
    RESULT.parent.mkdir(exist_ok=True)
    machine = {"torch": torch.__version__, "python": platform.python_version(), "cpu": platform.machine()}
    RESULT.write_text(json.dumps({"command": "make bench", "machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
