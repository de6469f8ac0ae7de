"""Steps and time that warm starts save in training, on one thread.

Run: python -m benchmarks.solve.warm_start [--quick | --table]
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from benchmarks.harness import cpu_seconds, load, make_parser, markdown, one_thread, save
from wellposed import ImplicitModel, fit
from wellposed.equilibrium import watch
from wellposed.models.warm_start import WarmStart

EPOCHS, KAPPA, MAX_STEPS, REPEATS = 12, 0.99, 2000, 2
STARTS: dict[str, dict[str, Any] | None] = {
    "cold": None,
    "forward": {},
    "forward, bfloat16": {"dtype": torch.bfloat16},
    "forward and adjoint": {"adjoint": True},
}
Problem = tuple[Tensor, Tensor, int, int, Callable[..., Tensor], int]


def digits() -> Problem:
    """Ten classes from 8 x 8 pixels; n = 64, batch 64."""
    data = load_digits()
    u, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    return u, y, 64, 10, F.cross_entropy, 64


def travel() -> Problem:
    """Where and how deep a source is, from what five stations see of it; n = 190, batch 500.

    A station contributes its position (3), the arrival relative to the first one and two angles.
    """
    generator = torch.Generator().manual_seed(0)
    source = 2 * torch.rand(5_000, 3, generator=generator) - 1
    station = 2 * torch.rand(5_000, 5, 3, generator=generator) - 1
    station[..., 2] = 1.0
    way = station - source[:, None]
    length = way.norm(dim=-1, keepdim=True)
    arrival = length - length.amin(1, keepdim=True)
    u = torch.cat([station, arrival, way[..., :2] / length], dim=-1).flatten(1)
    return u, source, 190, 3, F.mse_loss, 500


def train(
    problem: Problem, executor: str, solver: str | None, schedule: str | None, warm: Any, epochs: int
) -> dict[str, Any]:
    """Trains one model and returns what it took."""
    u, y, n, q, loss, batch = problem
    torch.manual_seed(0)
    options = {"kappa": KAPPA, "max_steps": MAX_STEPS, "executor": executor, "solver": solver}
    model = ImplicitModel(u.shape[1], q, n, **options)  # type: ignore[arg-type]
    starts = None if warm is None else WarmStart(**warm)
    optimizer = partial(torch.optim.Adam, lr=2e-3)
    with watch() as log:
        seconds, history = cpu_seconds(
            lambda: fit(
                model,
                (u, y),
                loss,
                epochs=epochs,
                batch_size=batch,
                optimizer=optimizer,
                schedule=schedule,  # type: ignore[arg-type]
                progress=False,
                warm_start=starts or False,
            )
        )
    adjoint = torch.cat([steps for _, steps in log.adjoint]).double().reshape(epochs, -1).mean(1)
    return {
        "forward_steps": [round(float(step), 2) for step in history.steps],
        "adjoint_steps": [round(float(step), 2) for step in adjoint],
        "seconds": seconds,
        "final_loss": float(history.train_loss[-1]),
        "failed_share": float(history.failed_share.max()),
        "megabytes": 0.0 if starts is None else starts.nbytes / 1e6,
    }


def measure(
    name: str, problem: Problem, executor: str, solver: str | None, schedule: str | None, epochs: int
) -> list[dict[str, Any]]:
    """Trains with every kind of warm start, in turns, and takes the best time of each."""
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(REPEATS):
        for way, warm in STARTS.items():
            trained = train(problem, executor, solver, schedule, warm, epochs)
            trained["seconds"] = min(trained["seconds"], rows.get(way, trained)["seconds"])
            rows[way] = trained
    case = {
        "problem": name,
        "executor": executor,
        "solver": solver or "default",
        "schedule": schedule or "constant",
    }
    return [case | {"kept": way} | row for way, row in rows.items()]


def table(rows: list[dict[str, Any]]) -> str:
    """Writes the results as Markdown: means over all epochs, and of the last one."""
    lines = []
    for row in rows:
        forward, adjoint = (torch.tensor(row[f"{kind}_steps"]) for kind in ("forward", "adjoint"))
        lines.append(
            [
                *(row[key] for key in ("problem", "executor", "solver", "schedule", "kept")),
                f"{row['megabytes']:.2f}",
                f"{forward.mean():.1f} ({forward[-1]:.1f})",
                f"{adjoint.mean():.1f} ({adjoint[-1]:.1f})",
                f"{row['seconds']:.2f}",
                f"{row['final_loss']:.5f}",
            ]
        )
    header = ("problem", "executor", "solver", "rate", "kept", "MB", "forward (last)", "adjoint (last)")
    return markdown((*header, "seconds", "loss"), lines)


def main() -> None:
    """Measures, or prints what was measured."""
    options = make_parser(__doc__, __file__, quick="digits, two epochs", table="print the table").parse_args()
    if options.table:
        print(table(load(options)["rows"]))
        return
    one_thread()
    problems = {"digits": digits()} if options.quick else {"digits": digits(), "travel": travel()}
    epochs, rows = 2 if options.quick else EPOCHS, []
    for name, problem in problems.items():
        for executor in ("reference", "numba"):
            for schedule in (None, "cosine"):
                rows += measure(name, problem, executor, None, schedule, epochs)
                print(table(rows[-len(STARTS) :]), flush=True)
    save(options, epochs=epochs, kappa=KAPPA, rows=rows)


if __name__ == "__main__":
    main()
