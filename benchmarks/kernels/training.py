"""Time of training before and after: executor="reference" against the default, CPU seconds of one thread.

Run: python -m benchmarks.kernels.training          writes results/kernels/training.json
"""

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import one_thread
from wellposed import ImplicitModel, ImplicitRNN

RESULT = Path(__file__).parents[1] / "results" / "kernels" / "training.json"
STEPS = 50


def earthquake(executor: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns a model of the size of the earthquake task: 190 states, 30 inputs, 3 outputs, batches of 500."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"executor": executor}
    model = ImplicitModel(30, 3, 190, **options)
    u = torch.randn(500, 30)
    return model, u, torch.stack([u[:, :10].prod(1), u[:, :5].sum(1).relu(), u[:, 5:9].amax(1)], 1)


def argmax(executor: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns a recurrent model that finds the place of the largest number of a sequence of ten."""
    torch.manual_seed(0)
    model = _Last(ImplicitRNN(1, 10, 20, executor=executor))
    u = torch.rand(128, 10, 1)
    return model, u, nn.functional.one_hot(u[:, :, 0].argmax(1), 10).float()


class _Last(nn.Module):
    """The output of a sequence's last element."""

    def __init__(self, model: ImplicitRNN) -> None:
        super().__init__()
        self.model = model

    def forward(self, u: Tensor) -> Tensor:
        found: Any = self.model(u)
        outputs: Tensor = found[0] if isinstance(found, tuple) else found
        return outputs[:, -1]


def train(make: Callable[[str], tuple[nn.Module, Tensor, Tensor]], executor: str, steps: int) -> dict[str, float]:
    """Trains for some steps and returns seconds and the last loss."""
    model, u, target = make(executor)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    model(u).sum().backward()  # compiles
    start = time.process_time()
    for _ in range(steps):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(model(u), target)
        loss.backward()
        optimiser.step()
    return {"seconds": time.process_time() - start, "loss": float(loss)}


def measure(name: str, make: Callable[[str], tuple[nn.Module, Tensor, Tensor]], rounds: int) -> dict[str, Any]:
    """Trains both ways in turns; the best time of each counts."""
    found = [{kind: train(make, kind, STEPS) for kind in ("reference", "auto")} for _ in range(rounds)]
    best = {kind: min(one[kind]["seconds"] for one in found) for kind in ("reference", "auto")}
    losses = {kind: found[0][kind]["loss"] for kind in best}
    return {"model": name, "seconds": best, "ratio": best["reference"] / best["auto"], "loss": losses}


def main() -> None:
    """Measures both models, prints the table and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULT, help="where to write the numbers")
    output = parser.parse_args().output
    one_thread()
    warnings.simplefilter("ignore")
    rows = [measure("ImplicitModel, n=190, batch 500", earthquake, 3), measure("ImplicitRNN argmax", argmax, 3)]
    print(f"| {STEPS} training steps | before, s | after, s | ratio | last loss |\n|---|---|---|---|---|")
    for row in rows:
        before, after = row["seconds"]["reference"], row["seconds"]["auto"]
        losses = " / ".join(f"{loss:.5f}" for loss in row["loss"].values())
        print(f"| {row['model']} | {before:.2f} | {after:.2f} | {row['ratio']:.1f}x | {losses} |")
    machine = {"cpu": platform.machine(), "torch": torch.__version__}
    output.write_text(json.dumps({"machine": machine, "steps": STEPS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
