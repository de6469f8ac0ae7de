"""Branch and bound against mixed-integer programs by HiGHS, on small networks with loops and without.

Run: python -m tests.campaigns.complete --minutes 4    writes a run a seed to tests/campaigns/results/complete.json

An instance is a form, a box and a property: some sets of outputs, each of one to three inequalities. The program
knows the equations of the form, a large number in place of all bounds, and nothing of the library; it finds the
largest least value of the inequalities. Offsets put that value near zero, where deciding is hardest. Every verdict
must have its sign, a gap that is no smaller, and a counter-example that numpy confirms. Every other instance is
decided with loops enclosed as far as the property holds, which else happens only where they cannot be enclosed.
"""

import argparse
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from wellposed.forms import Block, Dense, ImplicitForm
from wellposed.robust import Box, certification
from wellposed.robust.certification import Forbidden, decide

RESULT = Path(__file__).parent / "results" / "complete.json"
LARGE, NEAR = 200.0, 1e-5
Array = NDArray[np.float64]


class Case:
    """A form as matrices: ``x = relu(Ax + Bu + b)``, ``y = Cx + Du + c``."""

    def __init__(self, rng: np.random.Generator, kind: str) -> None:
        n, p, q = int(rng.integers(3, 9)), int(rng.integers(1, 4)), int(rng.integers(2, 4))
        self.kind, self.sizes = kind, (n, p, q)
        A = rng.standard_normal((n, n))
        if kind == "inf":
            A *= 0.9 / np.abs(A).sum(1, keepdims=True)
        elif kind == "spectral":
            A *= 0.9 / np.linalg.norm(A, 2)
        elif kind == "monotone":
            A = 0.7 * np.eye(n) - A @ A.T / n + (A - A.T) / np.sqrt(n)
        else:  # layers: three blocks, the last states first
            self.cuts = sorted(rng.choice(np.arange(1, n), 2, replace=False).tolist())
            block = np.searchsorted(self.cuts, np.arange(n), side="right")
            A = np.where(block[:, None] == block[None] - 1, 1.5 * A, 0.0)
        self.A, self.B, self.b = A, rng.standard_normal((n, p)), 0.4 * rng.standard_normal(n)
        if kind == "layers":
            self.B[: self.cuts[1]] = 0.0
        self.C, self.D, self.c = rng.standard_normal((q, n)), rng.standard_normal((q, p)), rng.standard_normal(q)

    def form(self) -> ImplicitForm:
        """The same for the library; layers as blocks."""
        matrices = [torch.tensor(matrix) for matrix in (self.A, self.B, self.C, self.D, self.b)]
        options: dict[str, Any] = {"output_bias": torch.tensor(self.c)}
        if self.kind == "layers":
            ends = [0, *self.cuts, len(self.A)]
            sizes = tuple(np.diff(ends).tolist())
            blocks = {(k, k + 1): Dense(matrices[0][ends[k] : ends[k + 1], ends[k + 1] : ends[k + 2]].clone())
                      for k in range(2)}  # fmt: skip
            return ImplicitForm(
                Block(sizes, sizes, blocks, torch.float64), *matrices[1:], activation="relu", **options
            )
        return ImplicitForm(*matrices, **options)

    def outputs(self, u: Array) -> Array:
        """Solves one input by trying to settle which states are on, as Newton's method does."""
        on = np.zeros(len(self.A), dtype=bool)
        for _ in range(200):
            rows = np.eye(len(self.A)) - on[:, None] * self.A
            x = np.linalg.solve(rows, on * (self.B @ u + self.b))
            if ((z := self.A @ x + self.B @ u + self.b) > 0).tolist() == on.tolist():
                return self.C @ x + self.D @ u + self.c
            flips = ((z > 0) != on).nonzero()[0]
            on[flips[-1]] ^= True  # one at a time, the last first: no cycles (Murty)
        raise AssertionError("no equilibrium was found")

    def largest_least(self, low: Array, high: Array, rows: Array, offset: Array) -> float:
        """Maximises ``min(rows y + offset)`` over a box, by a mixed-integer program."""
        n, p, _ = self.sizes
        k, eye = len(rows), np.eye(n)
        blank, one = np.zeros((n, 1)), np.ones((k, 1))  # the last variable is the least value
        above = np.hstack([eye - self.A, -self.B, 0 * eye, blank])
        below = np.hstack([eye - self.A, -self.B, LARGE * eye, blank])
        small = np.hstack([eye, np.zeros((n, p)), -LARGE * eye, blank])
        least = np.hstack([-rows @ self.C, -rows @ self.D, np.zeros((k, n)), one])
        rules = [
            LinearConstraint(above, self.b, np.inf),
            LinearConstraint(below, -np.inf, self.b + LARGE),
            LinearConstraint(small, -np.inf, 0),
            LinearConstraint(least, -np.inf, rows @ self.c + offset),
        ]
        start = np.concatenate([np.zeros(n), low, np.zeros(n), [-1e4]])
        end = np.concatenate([np.full(n, LARGE), high, np.ones(n), [1e4]])
        cost = np.append(np.zeros(2 * n + p), -1.0)
        whole = np.concatenate([np.zeros(n + p), np.ones(n), [0]])
        solution = milp(cost, constraints=rules, bounds=Bounds(start, end), integrality=whole)
        if solution.x is None:
            return math.nan  # HiGHS itself has failed
        pattern = solution.x[n + p : -1].round()
        start[n + p : -1], end[n + p : -1] = pattern, pattern
        again = milp(cost, constraints=rules, bounds=Bounds(start, end))  # without the tolerance of integers
        return float(-again.fun) if again.success else math.nan


KINDS = ("layers", "inf", "spectral", "monotone")


def instance(seed: int, number: int, seconds: float = 30.0) -> tuple[str, str, list[str]]:
    """Decides one instance; returns its kind, the verdict and what is wrong with it."""
    rng = np.random.default_rng([seed, number])
    case = Case(rng, KINDS[number % len(KINDS)])
    _, p, q = case.sizes
    u = rng.random(p)
    low, high = u - rng.uniform(0.05, 0.5), u + rng.uniform(0.05, 0.5)
    goals = []
    for _ in range(int(rng.integers(1, 3))):
        rows = rng.integers(-2, 3, (int(rng.integers(1, 4)), q)).astype(float)
        rows[:, 0] += ~rows.any(1)
        offset = rng.standard_normal(len(rows))
        offset -= case.largest_least(low, high, rows, offset) + rng.choice([-0.2, -0.01, 0.01, 0.2])
        goals.append((rows, offset))
    values = [case.largest_least(low, high, *goal) for goal in goals]
    if not np.isfinite([*values, *(entry for _, offset in goals for entry in offset)]).all():
        return case.kind, "not solved by HiGHS", []
    exact = max(values)
    box = Box(torch.tensor(low)[None], torch.tensor(high)[None])
    sets = [Forbidden(box, torch.tensor(rows), torch.tensor(offset)) for rows, offset in goals]
    far = 0.0 if number // len(KINDS) % 2 else certification.FAR
    with mock.patch.object(certification, "FAR", far):
        verdict = decide(case.form(), sets, seconds)
    wrong = []
    if abs(exact) > NEAR and verdict.status != ("proven" if exact < 0 else "counter-example"):
        wrong.append(f"instance {number}: {verdict.status} where the program finds {exact:.3g}")
    if verdict.status == "proven" and verdict.gap < exact - 1e-6:
        wrong.append(f"instance {number}: the gap {verdict.gap:.3g} is below {exact:.3g}")
    if verdict.input is not None:
        point = verdict.input[0].numpy()
        y = case.outputs(point)
        inside = ((point >= low) & (point <= high)).all()
        if not inside or max((rows @ y + offset).min() for rows, offset in goals) < -1e-9:
            wrong.append(f"instance {number}: the counter-example is none")
    return case.kind, verdict.status, wrong


def main() -> None:
    """Runs instances and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="ends the run early")
    options = parser.parse_args()
    start, tally, wrong = time.monotonic(), Counter[str](), list[str]()
    for number in range(options.instances):
        if time.monotonic() - start > 60 * options.minutes:
            break
        kind, status, complaints = instance(options.seed, number)
        tally[f"{kind}, {status}"] += 1
        wrong += complaints
    result = {"seed": options.seed, "instances": tally.total(), "by": dict(sorted(tally.items())),
              "wrong": wrong, "seconds": round(time.monotonic() - start)}  # fmt: skip
    others = json.loads(RESULT.read_text()) if RESULT.exists() else []
    runs = sorted([*(run for run in others if run["seed"] != options.seed), result], key=lambda run: run["seed"])
    RESULT.write_text(json.dumps(runs, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
