"""Time of training before and after: executor="reference" against the default, CPU seconds of one thread.

Run: python -m benchmarks.kernels.training [--quick]
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import cpu_seconds, make_parser, markdown, one_thread, save
from wellposed import ImplicitModel, ImplicitRNN

STEPS = 50


def earthquake(executor: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns a model of the size of the earthquake task: 190 states, 30 inputs, 3 outputs, batches of 500."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"executor": executor}
    model = ImplicitModel(30, 3, 190, **options)
    u = torch.randn(500, 30)
    return model, u, torch.stack([u[:, :10].prod(1), u[:, :5].sum(1).relu(), u[:, 5:9].amax(1)], 1)


def argmax(executor: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns a recurrent model that finds the index of the largest number of a sequence of ten."""
    torch.manual_seed(0)
    model = _Last(ImplicitRNN(1, 10, 20, executor=executor, batch_first=True))
    u = torch.rand(128, 10, 1)
    return model, u, nn.functional.one_hot(u[:, :, 0].argmax(1), 10).float()


class _Last(nn.Module):
    """The output of a sequence's last element."""

    def __init__(self, model: ImplicitRNN) -> None:
        super().__init__()
        self.model = model

    def forward(self, u: Tensor) -> Tensor:
        result: Any = self.model(u)
        outputs: Tensor = result[0] if isinstance(result, tuple) else result
        return outputs[:, -1]


def train(make: Callable[[str], tuple[nn.Module, Tensor, Tensor]], executor: str, steps: int) -> dict[str, float]:
    """Trains for some steps and returns seconds and the last loss."""
    model, u, target = make(executor)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    model(u).sum().backward()  # compiles

    def run() -> float:
        for _ in range(steps):
            optimiser.zero_grad()
            loss = nn.functional.mse_loss(model(u), target)
            loss.backward()
            optimiser.step()
        return float(loss)

    seconds, loss = cpu_seconds(run)
    return {"seconds": seconds, "loss": loss}


def measure(
    name: str, make: Callable[[str], tuple[nn.Module, Tensor, Tensor]], rounds: int, steps: int
) -> dict[str, Any]:
    """Trains both ways in turns; the best time of each counts."""
    trained = [{kind: train(make, kind, steps) for kind in ("reference", "auto")} for _ in range(rounds)]
    best = {kind: min(one[kind]["seconds"] for one in trained) for kind in ("reference", "auto")}
    losses = {kind: trained[0][kind]["loss"] for kind in best}
    return {"model": name, "seconds": best, "ratio": best["reference"] / best["auto"], "loss": losses}


def main() -> None:
    """Measures both models, prints the table and writes the result."""
    options = make_parser(__doc__, __file__, quick="five steps, once").parse_args()
    one_thread()
    warnings.simplefilter("ignore")
    rounds, steps = (1, 5) if options.quick else (3, STEPS)
    models = {"ImplicitModel, n=190, batch 500": earthquake, "ImplicitRNN argmax": argmax}
    rows = [measure(name, make, rounds, steps) for name, make in models.items()]
    lines = [
        [
            row["model"],
            *(f"{seconds:.2f}" for seconds in row["seconds"].values()),
            f"{row['ratio']:.1f}x",
            " / ".join(f"{loss:.5f}" for loss in row["loss"].values()),
        ]
        for row in rows
    ]
    print(markdown([f"{steps} training steps", "before, s", "after, s", "ratio", "last loss"], lines))
    save(options, steps=steps, rows=rows)


if __name__ == "__main__":
    main()
