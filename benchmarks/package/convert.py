"""Networks as implicit forms: time of conversion, time and memory of form(u) against network(u), on one thread.

Run: python -m benchmarks.package.convert [--quick]
"""

import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from wellposed_lab.networks.mlp import MLP
from wellposed_lab.networks.resnet import ResNet

from benchmarks.harness import best_times, make_parser, one_thread, peak_bytes, print_table, save, versions
from wellposed.convert import to_implicit
from wellposed.forms import ImplicitForm
from wellposed.forms.operators.base import tensors

BATCHES = (1, 8, 32)


def lenet() -> nn.Module:
    """Builds the convolutional network of two stages with max-pooling, for images of 28 by 28."""
    features = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()]
    head = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
    return nn.Sequential(*features, *head, nn.Linear(84, 10))


def transformer() -> nn.Module:
    """Builds one encoder block of a transformer, width 64 with 4 heads."""
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-20": (lambda: ResNet(20), (3, 32, 32)),
    "LeNet": (lenet, (1, 28, 28)),
    "MLP, 13 layers of 256": (lambda: MLP([784, *[256] * 12, 10]), (784,)),
    "transformer block, 16 tokens": (transformer, (16, 64)),
}


def count_stored(form: ImplicitForm) -> tuple[int, int]:
    """Counts floating-point numbers and indices that a form keeps, shared ones once."""
    stored = [*tensors((form.A, form.B, form.C, form.D)), form.bias, form.output_bias]
    own = {value.data_ptr(): value for value in stored if value is not None and value.numel()}
    numbers = sum(value.numel() for value in own.values() if value.is_floating_point())
    return numbers, sum(value.numel() for value in own.values()) - numbers


def measure(name: str, batches: tuple[int, ...]) -> dict[str, Any]:
    """Converts one network and measures it."""
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    network = build().eval()
    start = time.perf_counter()
    form = to_implicit(network, shape)
    seconds = time.perf_counter() - start
    numbers, indices = count_stored(form)
    row: dict[str, Any] = {
        "network": name,
        "states": form.sizes[0],
        "blocks": len(form.partition),
        "conversion_s": seconds,
        "parameters": sum(p.numel() for p in network.parameters()),
        "stored_numbers": numbers,
        "stored_indices": indices,
        "evaluation": [],
    }
    for batch in batches:
        u = torch.randn(batch, *shape)
        times = best_times({"network": lambda u=u: network(u), "form": lambda u=u: form(u)})
        memory = [peak_bytes(lambda f=f, u=u: f(u)) for f in (network, form)]
        error = (form(u) - network(u).flatten(1)).abs().max() / network(u).abs().max()
        row["evaluation"].append(
            {"batch": batch, "network_s": times["network"], "form_s": times["form"], "error": float(error)}
            | {"ratio": times["form"] / times["network"]}
            | {"network_peak_bytes": memory[0], "form_peak_bytes": memory[1]}
        )
    return row


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    lines = []
    for row in rows:
        size = f"{row['stored_numbers'] / row['parameters']:.2f}"
        head = [row["network"], str(row["states"]), f"{row['conversion_s']:.2f}", size]
        for k, cell in enumerate(row["evaluation"]):
            times = [f"{1e3 * cell[key]:.2f}" for key in ("network_s", "form_s")]
            peaks = [f"{cell[key] / 2**20:.2f}" for key in ("network_peak_bytes", "form_peak_bytes")]
            shown = [str(cell["batch"]), *times, f"{cell['ratio']:.2f}", *peaks, f"{cell['error']:.0e}"]
            lines.append([*(head if k == 0 else [""] * len(head)), *shown])
    header = ["network", "states", "convert s", "numbers / parameters", "batch", "network ms", "form ms", "ratio"]
    header += ["MiB network", "MiB form", "error"]
    print_table("a network and its implicit form, one thread", header, lines, width=140, left=("network",))


def main() -> None:
    """Measures all networks and writes the result."""
    options = make_parser(__doc__, __file__, quick="LeNet and the transformer block, batch 1").parse_args()
    one_thread()
    names, batches = (list(NETWORKS)[1::2], BATCHES[:1]) if options.quick else (list(NETWORKS), BATCHES)
    with torch.no_grad():
        rows = [measure(name, batches) for name in names]
    show(rows)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    save(options, versions=versions("wellposed", "torch"), peak_rss_bytes=peak, rows=rows)


if __name__ == "__main__":
    main()
