"""What the loop adds to a step of a general map: microseconds a step around a cheap one, one thread.

The map is ``relu(Wx + u)`` with 20 states, batch 128 and row sums of 0.97, given as a function: the loop knows
nothing of it. "bare" are evaluations alone; torchdeq's plain iteration stops all samples together.

Run: python -m benchmarks.solve.step_overhead [--quick]
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import best_times, make_parser, one_thread, print_table, save
from wellposed import Absolute, Anderson, Broyden, Picard, fixed_point

STATES, BATCH, ROW_SUM, TOLERANCE, STEPS = 20, 128, 0.97, 3e-6, 200


def problem() -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]:
    """Returns the map, its inputs and a start."""
    generator = torch.Generator().manual_seed(0)
    W = torch.rand(STATES, STATES, generator=generator)
    W = ROW_SUM * W / W.sum(1, keepdim=True)
    u = torch.randn(BATCH, STATES, generator=generator)
    return lambda x, u: torch.relu(x @ W.mT + u), u, torch.zeros(BATCH, STATES)


def measure() -> list[dict[str, Any]]:
    """Times every solver on the problem, interleaved."""
    f, u, x0 = problem()

    def bare() -> None:
        x = x0
        for _ in range(STEPS):
            x = f(x, u)

    calls: dict[str, Callable[[], Any]] = {"bare": bare}
    counts = {"bare": STEPS}
    for solver in (Picard(), Anderson(), Broyden()):
        name = type(solver).__name__
        options: dict[str, Any] = {"solver": solver, "stop": Absolute(TOLERANCE), "max_steps": 1000}
        calls[name] = lambda options=options: fixed_point(f, x0, u, **options)
        counts[name] = int(fixed_point(f, x0, u, **options).steps.max())
    if importlib.util.find_spec("torchdeq"):
        from torchdeq.solver import get_solver

        plain = get_solver("fixed_point_iter")
        options = {"max_iter": STEPS, "tol": 0.0, "stop_mode": "abs"}
        calls["torchdeq"] = lambda: plain(lambda x: f(x, u), x0, **options)
        counts["torchdeq"] = STEPS
    with torch.no_grad():
        seconds = best_times(calls)
    return [
        {"solver": name, "steps": counts[name], "us_a_step": 1e6 * seconds[name] / counts[name]} for name in calls
    ]


def main() -> None:
    """Prints the table and writes the result."""
    options = make_parser(__doc__, __file__, quick="the same").parse_args()
    one_thread()
    rows = measure()
    lines = [(row["solver"], row["steps"], f"{row['us_a_step']:.0f}") for row in rows]
    print_table("microseconds a step", ("solver", "steps", "us a step"), lines, left=("solver",))
    save(options, states=STATES, batch=BATCH, rows=rows)


if __name__ == "__main__":
    main()
