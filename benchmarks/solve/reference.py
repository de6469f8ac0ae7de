"""The reference path against torchidl and torchdeq on the same matrices, one thread each.

Run: make bench, or python -m benchmarks.solve.reference [--quick]
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import best_times, make_parser, one_thread, print_table, save
from benchmarks.problems import state_matrix
from benchmarks.rivals.libraries import TOLERANCE, installed, ours, torchdeq_model, torchidl_model
from wellposed import Absolute

SIZES = [(20, 128), (30, 2048), (64, 512), (300, 256)]
FAMILIES = [("positive", 0.9), ("positive", 0.99), ("random", 0.9), ("ring", 0.9), ("shift", 0.9)]
LIBRARIES = ("wellposed", "torchidl", "torchdeq")


def exact_state(A: Tensor, v: Tensor) -> Tensor:
    """Iterates in float64 until nothing changes."""
    A, v = A.double(), v.double()
    x = torch.zeros_like(v)
    for _ in range(100_000):
        new = torch.relu(x @ A.mT + v)
        if torch.equal(new, x):
            break
        x = new
    return x


def measure(family: str, norm: float, n: int, batch: int, names: list[str]) -> dict[str, Any]:
    """Times all libraries on one problem."""
    generator = torch.Generator().manual_seed(0)
    A = state_matrix(family, n, norm, generator)
    B, C = torch.eye(n), torch.randn(1, n, generator=generator) / n
    u = torch.randn(batch, n, generator=generator)
    makers = {
        "wellposed": lambda: ours(A, B, C, stop=Absolute(TOLERANCE)),
        "torchidl": lambda: torchidl_model(A, B, C),
        "torchdeq": lambda: torchdeq_model(A, B, C),
    }
    models: dict[str, Any] = {name: makers[name]() for name in names}
    exact = exact_state(A, u) @ C.double().mT
    errors = {name: float((model(u).detach().double() - exact).abs().max()) for name, model in models.items()}
    with torch.no_grad():
        forward = best_times({name: lambda m=model: m(u) for name, model in models.items()})
    both = best_times({name: lambda m=model: m(u).sum().backward() for name, model in models.items()})
    return {
        name: {
            **{"family": family, "norm": norm, "n": n, "batch": batch, "library": name},
            **{"forward_ms": 1e3 * forward[name], "both_ms": 1e3 * both[name], "error": errors[name]},
        }
        for name in models
    }


def show(problems: list[dict[str, Any]], names: list[str]) -> None:
    """Prints times and ratios."""
    lines = []
    for rows in problems:
        mine, *others = rows.values()
        times = [f"{row['forward_ms']:.2f} / {row['both_ms']:.2f}" for row in (mine, *others)]
        ratios = [
            f"{row['forward_ms'] / mine['forward_ms']:.1f}x / {row['both_ms'] / mine['both_ms']:.1f}x"
            for row in others
        ]
        errors = " ".join(f"{row['error']:.0e}" for row in (mine, *others))
        problem = [f"{mine['family']} {mine['norm']}", f"{mine['n']}, {mine['batch']}"]
        lines.append([*problem, *times, *ratios, errors])
    header = ["problem", "n, batch", *names, *(f"vs {name}" for name in names[1:]), "output error"]
    print_table("forward / forward+backward, ms; one thread, float32, |step| <= 3e-6", header, lines)


def main() -> None:
    """Runs all problems, prints the table and writes the result."""
    options = make_parser(__doc__, __file__, quick="two sizes of two families").parse_args()
    one_thread()
    warnings.simplefilter("ignore")
    names = installed(LIBRARIES)
    families, sizes = (FAMILIES[:2], SIZES[:2]) if options.quick else (FAMILIES, SIZES)
    problems = [measure(*family, *size, names) for family in families for size in sizes]
    show(problems, names)
    save(options, rows=[row for rows in problems for row in rows.values()])


if __name__ == "__main__":
    main()
