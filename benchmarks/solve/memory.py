"""Memory of one training step against the number of solver steps, for every gradient.

Without torchdeq its rows say so. A full run on a CPU also replaces the page results/solve/memory.md.

Run: make memory, or python -m benchmarks.solve.memory [--quick] [--device cuda]
"""

import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import (
    make_parser,
    markdown,
    need_cuda,
    one_thread,
    peak_bytes,
    print_table,
    save,
    versions,
)
from benchmarks.rivals.libraries import NotRunError, rival
from wellposed import Anderson, Implicit, Phantom, Picard, Solver, Status, Steps, Unrolled, fixed_point
from wellposed.equilibrium import Gradient

STEPS = (5, 10, 20, 40, 80)


class ConvolutionalCell(nn.Module):
    """The map ``x -> tanh(K * x + u)`` on images, with a kernel that averages and so converges slowly."""

    def __init__(self, channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        kernel = torch.rand(channels, channels, 3, 3, generator=generator)
        with torch.no_grad():
            self.convolution.weight.copy_(0.98 * kernel / kernel.sum((1, 2, 3), keepdim=True))

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.tanh(self.convolution(x) + u)


Step = Callable[[int], object]  # one training step with so many solver steps


class Ours:
    """One training step with our `fixed_point`."""

    def __init__(self, cell: ConvolutionalCell, u: Tensor, gradient: Gradient, solver: Solver) -> None:
        self.cell, self.u, self.gradient, self.solver = cell, u, gradient, solver

    def __call__(self, steps: int) -> None:
        solution = fixed_point(
            self.cell,
            torch.zeros_like(self.u),
            self.u,
            solver=self.solver,
            stop=Steps(steps),
            gradient=self.gradient,
        )
        if not bool((solution.status == Status.STEPS_DONE).all()):
            raise RuntimeError(f"asked for {steps} steps and received {solution}")
        value: Any = solution.value
        (value**2).sum().backward()


class Torchdeq:
    """One training step with torchdeq's plain iteration; it offers no unrolled gradient."""

    def __init__(self, cell: ConvolutionalCell, u: Tensor, **options: Any) -> None:
        self.cell, self.u, self.options, self.library = cell, u, options, rival("torchdeq")

    def __call__(self, steps: int) -> None:
        deq = self.library.get_deq(
            f_solver="fixed_point_iter", f_max_iter=steps, f_tol=0.0,
            b_solver="fixed_point_iter", b_max_iter=steps, b_tol=0.0, **self.options,
        )  # fmt: skip
        z, _ = deq(lambda x: self.cell(x, self.u), torch.zeros_like(self.u))
        (z[-1] ** 2).sum().backward()


def variants(cell: ConvolutionalCell, u: Tensor) -> dict[str, Callable[[], Step]]:
    """Returns what is compared; each entry is made when its turn comes."""
    return {
        "wellposed Implicit()": lambda: Ours(cell, u, Implicit(), Picard()),
        "wellposed Implicit(), Anderson": lambda: Ours(cell, u, Implicit(), Anderson()),
        "wellposed Phantom(1)": lambda: Ours(cell, u, Phantom(1), Picard()),
        "wellposed Phantom(5)": lambda: Ours(cell, u, Phantom(5), Picard()),
        "wellposed Unrolled()": lambda: Ours(cell, u, Unrolled(), Picard()),
        "torchdeq ift=True": lambda: Torchdeq(cell, u, ift=True),
        "torchdeq ift=True, hook": lambda: Torchdeq(cell, u, ift=True, hook_ift=True),
        "torchdeq ift=False, grad=1": lambda: Torchdeq(cell, u, ift=False, grad=1),
        "torchdeq ift=False, grad=5": lambda: Torchdeq(cell, u, ift=False, grad=5),
    }


def measure(device: str, size: int, channels: int = 16, batch: int = 8) -> list[dict[str, Any]]:
    """Returns the peak bytes of each variant at each number of steps."""
    generator = torch.Generator().manual_seed(0)
    cell = ConvolutionalCell(channels, generator).to(device)
    u = (0.1 * torch.randn(batch, channels, size, size, generator=generator)).to(device)
    rows: list[dict[str, Any]] = []
    for name, make in variants(cell, u).items():
        try:
            step = make()
        except NotRunError as reason:
            rows.append({"variant": name, "peak_bytes": None, "note": f"not run: {reason}"})
            continue
        step(STEPS[0])  # whatever is allocated once
        cell.zero_grad()
        rows.append({"variant": name, "peak_bytes": [_peak(cell, step, n, device) for n in STEPS], "note": ""})
    return rows


def _peak(cell: nn.Module, step: Step, steps: int, device: str) -> int:
    cell.zero_grad()
    return peak_bytes(lambda: step(steps), device)


def _cells(row: dict[str, Any]) -> list[str]:
    peaks = row["peak_bytes"]
    if peaks is None:
        return [row["variant"], *["-"] * len(STEPS), row["note"]]
    return [row["variant"], *(f"{peak / 2**20:.2f}" for peak in peaks), f"{peaks[-1] / peaks[0]:.2f}"]


HEADER = ["MiB at the peak", *(f"{n} steps" for n in STEPS), "last / first"]


def page(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Writes the table with what it means."""
    return f"""# Memory of one training step

Written by `make memory`. One forward and one backward pass of `x = tanh(K * x + u)`,
{about["problem"]}. The solver does exactly as many steps as the column says,
forward and, where the backward pass is a solve, backward. {about["meter"]};
parameters, their gradients of earlier steps and the input are not counted. The solver is plain iteration where
nothing else is said.

{markdown(HEADER, map(_cells, rows))}

The state itself takes {about["state_bytes"] / 2**20:.2f} MiB. An implicit gradient keeps the last state and the
graph of one evaluation, whatever the number of steps; a phantom gradient keeps the graph of its own steps, an
unrolled one that of all. Anderson, our default solver, collects seven states, then combines them and starts again:
its peak is that of the first combination, after seven steps.
"""


def main() -> None:
    """Measures, prints and, on a CPU, replaces the page and the JSON file."""
    parser = make_parser(__doc__, __file__, quick="8 by 8 pixels")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; only cpu replaces the result")
    options = parser.parse_args()
    device, size = options.device, 8 if options.quick else 32
    if torch.device(device).type == "cuda":
        need_cuda()
    one_thread()
    rows = measure(device, size)
    meters = {
        "cpu": "Counted are the bytes of tensor storages alive at once (a dispatch mode sees every operation)"
    }
    meter = meters.get(device, "Measured by torch.cuda.max_memory_allocated")
    about = {
        "device": device,
        "problem": f"16 channels of {size} by {size} pixels, 8 samples, float32",
        "meter": meter,
        "state_bytes": 8 * 16 * size * size * 4,
        "steps": STEPS,
        "python": platform.python_version(),
        "versions": versions("wellposed", "torch", "torchdeq"),
    }
    print_table(f"one training step on {device}; {meter}", HEADER, map(_cells, rows), width=140, left=HEADER[:1])
    if device == "cpu" or options.out:
        save(options, **about, rows=rows)
    if device == "cpu" and not (options.quick or options.out):
        options.result.with_suffix(".md").write_text(page(rows, about))


if __name__ == "__main__":
    main()
