"""Bounds and row problems: a GPU against one thread of the processor beside it, in one run.

Linear bounds with refined pre-activations of an MLP as used for FashionMNIST (784-64-32-16-10, 256 images),
intervals of a loop of a thousand states, and the accelerated projected gradient on 112 rows of 896 columns. Both
sides compute the same in float64; "apart" is the largest difference of their answers, relative to the largest.
"waits" counts how often the host waited for the device in one call.

Run: python -m benchmarks.gpu.bounds [--quick]
"""

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import device_times, make_parser, need_cuda, relative_error, save
from wellposed.convert import to_implicit
from wellposed.convex import Design, Projected, row_problem
from wellposed.forms import ImplicitForm
from wellposed.robust import Box, Crown, output_bounds

F64 = torch.float64


def mlp() -> ImplicitForm:
    """A network with biases."""
    sizes = (784, 64, 32, 16, 10)
    layers: list[nn.Module] = []
    for one, other in pairwise(sizes):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return to_implicit(nn.Sequential(*layers[:-1]).double(), (784,))


def loop(n: int = 1000) -> ImplicitForm:
    """A dense loop with |A|_inf = 0.9."""
    A = torch.randn(n, n, dtype=F64)
    rest = torch.randn(n, 50, dtype=F64) / 8, torch.randn(10, n, dtype=F64) / 30
    return ImplicitForm(0.9 * A / A.abs().sum(1, keepdim=True), *rest)


def problems() -> dict[str, Callable[[str], Tensor]]:
    """Returns what is computed on a named device."""
    network, looped = mlp(), loop()
    images, signals = torch.rand(256, 784, dtype=F64), torch.rand(256, 50, dtype=F64)
    X = torch.randn(3000, 896, dtype=F64).relu()
    z = X @ torch.randn(896, 112, dtype=F64) / 30 + 0.1 * torch.randn(3000, 112, dtype=F64)
    devices = ("cpu", "cuda")
    networks, loops = ({device: form.to(device) for device in devices} for form in (network, looped))
    boxes, sets = ({device: Box.around(u.to(device), 0.01) for device in devices} for u in (images, signals))
    rows = {p: row_problem(Design.of(X.to(p)), z.to(p), kappa=0.9, capped=896) for p in devices}
    return {
        "crown, refined: MLP 784-64-32-16-10, batch 256": lambda device: (
            output_bounds(networks[device], boxes[device], Crown(rounds=3)).upper
        ),
        "interval: loop of 1000 states, batch 256": lambda device: (
            output_bounds(loops[device], sets[device], "interval").upper
        ),
        "projected gradient: 112 rows x 896 columns": lambda device: Projected().solve(rows[device]).weights,
    }


def waits(run: Callable[[], object]) -> int:
    """Counts how often the host waits for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def measure(name: str, run: Callable[[str], Tensor], budget: float) -> dict[str, Any]:
    """Times one problem on both sides."""
    here, there = run("cpu"), run("cuda").cpu()
    runs = {device: lambda device=device: run(device) for device in ("cpu", "cuda")}
    slow, fast = device_times(runs, budget, least=1, most=20, warm_up=0).values()
    row = {
        "problem": name,
        "cpu_ms": 1e3 * slow,
        "gpu_ms": 1e3 * fast,
        "ratio": slow / fast,
        "apart": relative_error(there, here),
        "waits": waits(lambda: run("cuda")),
    }
    print(
        f"{name:48s} CPU {row['cpu_ms']:9.1f} ms  GPU {row['gpu_ms']:8.2f} ms  {row['ratio']:6.1f}x  "
        f"apart {row['apart']:.0e}  waits {row['waits']}"
    )
    return row


def main() -> None:
    """Runs all problems, prints a table and writes the result."""
    options = make_parser(__doc__, __file__, quick="short timings").parse_args()
    need_cuda()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    budget = 0.1 if options.quick else 1.0
    save(options, rows=[measure(name, run, budget) for name, run in problems().items()])


if __name__ == "__main__":
    main()
