"""Equilibria against the enclosures that continuation proves: loops by certificate, set and precision.

Run: python -m tests.campaigns.continuation --points 1000000    writes tests/campaigns/results/continuation.json

One trial is one form, two sets and some hundred points of each: random ones, vertices, extreme points in the
directions in which states rise most, which least squares read off the other points, all points that projected
gradient ascent of states, outputs and their differences goes through, and in every third trial all points about
which AutoAttack asks (few steps of it, within [0, 1]; not for few changed entries). Points are solved by Newton's
method and by operator splitting in numpy, which share nothing with the library; what does not reach a residual of
1e-11 is counted and not compared. Where phi is ReLU and the set a box, so are the intervals that triangle programs
prove, before and after a condition on an output, to which only points that meet it are compared. A number and the
seed decide a trial; the file holds one run a seed and count of random points. `--minutes` ends a run early.
"""

import argparse
import itertools
import json
import platform
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from wellposed.errors import ConvergenceWarning, IllPosedError
from wellposed.forms import Block, Dense, ImplicitForm
from wellposed.robust import Ball, Box, MethodError, SparseBox, Uncertainty, crown, output_bounds, state_bounds
from wellposed.robust.attacks import autoattack
from wellposed.robust.linear_programs import (
    Objectives,
    Regions,
    ReluConstraints,
    in_float64,
    side_by_side,
    tightest_intervals,
)
from wellposed.robust.query import Query

RESULT = Path(__file__).parent / "results" / "continuation.json"
BATCH, DRAWN, SOLVED = 2, 900, 1e-11
ASCENT = 8  # steps of projected gradient ascent
ASKED, STEPS, QUERIES = 3, 10, 20  # every which trial AutoAttack is run, its steps and queries of Square Attack
Array = NDArray[np.float64]
PHI: dict[str, Any] = {
    "relu": (lambda z: np.maximum(z, 0), lambda z: (z > 0).astype(float)),
    "leaky_relu(0.1)": (lambda z: np.where(z > 0, z, 0.1 * z), lambda z: np.where(z > 0, 1.0, 0.1)),
    "hardtanh": (lambda z: np.clip(z, -1, 1), lambda z: (np.abs(z) < 1).astype(float)),
    "tanh": (np.tanh, lambda z: 1 - np.tanh(z) ** 2),
    "sigmoid": (lambda z: 0.5 + 0.5 * np.tanh(z / 2), lambda z: 0.25 * (1 - np.tanh(z / 2) ** 2)),
}


def _inf(rng: np.random.Generator, n: int, kappa: float) -> Array:
    A = rng.standard_normal((n, n))
    return kappa * A / np.abs(A).sum(1, keepdims=True)


def _weighted(rng: np.random.Generator, n: int, kappa: float) -> Array:
    scale = 10 ** rng.uniform(-1, 1, n)
    return _inf(rng, n, kappa) * scale[:, None] / scale


def _mu(rng: np.random.Generator, n: int, kappa: float) -> Array:
    A = _inf(rng, n, 1.0) * rng.uniform(0.5, 4)
    np.fill_diagonal(A, 0)
    return A + np.diag(kappa - np.abs(A).sum(1))


def _spectral(rng: np.random.Generator, n: int, kappa: float) -> Array:
    A = rng.standard_normal((n, n))
    return kappa * A / np.linalg.norm(A, 2)


def _monotone(rng: np.random.Generator, n: int, kappa: float) -> Array:
    G, S = rng.standard_normal((2, n, n))
    return kappa * np.eye(n) - G @ G.T / n + rng.uniform(0, 3) * (S - S.T) / np.sqrt(n)


def _rotating(rng: np.random.Generator, n: int, kappa: float) -> Array:
    """Deceives norms: a small margin beside a rotation of 10, which no norm of A knows to be harmless."""
    S = rng.standard_normal((n, n))
    return (1 - (1 - kappa) / 4) * np.eye(n) + 10 * (S - S.T) / np.linalg.norm(S - S.T, 2)


KINDS = {"inf": _inf, "weighted": _weighted, "mu": _mu, "spectral": _spectral, "monotone": _monotone,
         "rotating": _rotating, "small gain": _inf}  # fmt: skip


@dataclass
class Case:
    """A form, and the same as plain matrices."""

    kind: str
    form: ImplicitForm
    A: Array
    B: Array
    bias: Array
    phi: str
    layered: bool  # whether a layer of ReLU comes before the loop and another one after it


def case_of(seed: int, number: int, dtype: torch.dtype) -> Case:
    """Builds the form of a trial."""
    rng = np.random.default_rng([seed, number])
    kind = list(KINDS)[number % len(KINDS)]
    n, p, q = int(rng.integers(2, 13)), int(rng.integers(1, 6)), 3
    kappa = float(rng.choice([0.5, 0.9, 0.99, 0.9999]))
    projections = kind in ("monotone", "rotating")
    phi = str(rng.choice(["relu", "hardtanh"] if projections else list(PHI)))
    A = KINDS[kind](rng, n, kappa * (4 if phi == "sigmoid" else 1))
    B, bias, C = rng.standard_normal((n, p)), 0.3 * rng.standard_normal(n), rng.standard_normal((q, n))
    if number % 5 == 4:  # the center of the set at a kink of many states
        bias = -B @ np.full(p, 0.5)
    if kind == "small gain":
        A[: n // 2, n // 2 :] *= 8
        A[n // 2 :, : n // 2] /= 8
        A[: n // 2, : n // 2], A[n // 2 :, n // 2 :] = 0, 0
    layered = number % 3 == 2 and kind != "small gain"
    if layered:
        return _layered(kind, A, rng, p, phi, dtype)
    A, B, bias = (_rounded(part, dtype) for part in (A, B, bias))
    given = [torch.tensor(part, dtype=dtype) for part in (A, B, _rounded(C, dtype))]
    operator = _two_blocks(given[0], n // 2) if kind == "small gain" and n > 2 else given[0]
    activation = [phi, phi] if isinstance(operator, Block) else phi
    B_ = _stacked(given[1], n // 2) if isinstance(operator, Block) else given[1]
    form = ImplicitForm(operator, B_, given[2], bias=torch.tensor(bias, dtype=dtype), activation=activation)
    return Case(kind, form, A, B, bias, phi, False)


def _rounded(values: Array, dtype: torch.dtype) -> Array:
    return torch.tensor(values, dtype=dtype).double().numpy()


def _two_blocks(A: torch.Tensor, n: int) -> Block:
    sizes = (n, len(A) - n)
    return Block(sizes, sizes, {(0, 1): Dense(A[:n, n:]), (1, 0): Dense(A[n:, :n])}, A.dtype)


def _stacked(B: torch.Tensor, n: int) -> Block:
    return Block((n, len(B) - n), (B.shape[1],), {(0, 0): Dense(B[:n]), (1, 0): Dense(B[n:])}, B.dtype)


def _layered(kind: str, A: Array, rng: np.random.Generator, p: int, phi: str, dtype: torch.dtype) -> Case:
    """Puts a loop between two layers; as plain matrices all states are one loop, whose blocks are triangular."""
    n, m, k = len(A), 4, 3
    sizes, total = (k, n, m), k + n + m
    whole, B = np.zeros((total, total)), np.zeros((total, p))
    whole[k : k + n, k : k + n], whole[:k, k : k + n] = A, rng.standard_normal((k, n))
    whole[k : k + n, k + n :], B[k + n :] = rng.standard_normal((n, m)), rng.standard_normal((m, p))
    bias, C = 0.3 * rng.standard_normal(total), rng.standard_normal((3, total))
    whole, B, bias, C = (_rounded(part, dtype) for part in (whole, B, bias, C))
    ends = np.cumsum((0, *sizes))
    cut = [slice(a, b) for a, b in itertools.pairwise(ends)]
    places = ((0, 1), (1, 1), (1, 2))
    blocks: dict[tuple[int, int], Any] = {
        (i, j): Dense(torch.tensor(whole[cut[i], cut[j]], dtype=dtype)) for i, j in places
    }
    inputs: dict[tuple[int, int], Any] = {(2, 0): Dense(torch.tensor(B[cut[2]], dtype=dtype))}
    form = ImplicitForm(
        Block(sizes, sizes, blocks, dtype), Block(sizes, (p,), inputs, dtype), torch.tensor(C, dtype=dtype),
        bias=torch.tensor(bias, dtype=dtype), activation=["relu", phi, "relu"],
    )  # fmt: skip
    return Case(kind, form, whole, B, bias, phi, True)


def solve(case: Case, u: Array) -> tuple[Array, NDArray[np.bool_]]:  # (N, p) -> (N, n), (N,)
    """Solves ``x = phi(Ax + Bu + b)``, and tells where that has succeeded."""
    v = u @ case.B.T + case.bias
    if not case.layered:
        return solve_loop(case.A, v, case.phi)
    after, loop, before = slice(0, 3), slice(3, len(case.A) - 4), slice(len(case.A) - 4, None)
    x = np.zeros_like(v)
    x[:, before] = np.maximum(v[:, before], 0)
    x[:, loop], solved = solve_loop(case.A[loop, loop], (v + x @ case.A.T)[:, loop], case.phi)
    x[:, after] = np.maximum((v + x @ case.A.T)[:, after], 0)
    return x, solved


def solve_loop(A: Array, v: Array, phi: str) -> tuple[Array, NDArray[np.bool_]]:
    """Solves by Newton's method, from zero and from where operator splitting leads if phi is a projection."""
    (function, slope), eye = PHI[phi], np.eye(len(A))
    starts = [np.zeros_like(v)]
    if phi in ("relu", "hardtanh"):
        resolvent, y = np.linalg.inv(2 * eye - A).T, np.zeros_like(v)  # Douglas-Rachford, step one
        for _ in range(400):
            inner = (y + v) @ resolvent
            y = y + function(2 * inner - y) - inner
        starts.append((y + v) @ resolvent)
    best, least = starts[0], np.full(len(v), np.inf)
    for x in starts:
        for _ in range(40):
            z = x @ A.T + v
            left = x - function(z)
            size = np.abs(left).max(1) / (1 + np.abs(x).max(1))
            best, least = np.where((size < least)[:, None], x, best), np.minimum(size, least)
            x = x - np.linalg.solve(eye - slope(z)[:, :, None] * A, left[:, :, None])[:, :, 0]
        if (least <= SOLVED).all():
            break
    return best, least <= SOLVED


def set_of(number: int, u: torch.Tensor, eps: float) -> Uncertainty:
    """A box, few changed entries or a ball."""
    kind = number // len(KINDS) % 3
    if kind == 0:
        return Box.around(u, eps, None, None)
    return SparseBox(u, eps, min(2, u.shape[1])) if kind == 1 else Ball(u, eps)


def points_of(case: Case, inputs: Uncertainty, count: int, attacked: bool) -> dict[str, Array]:  # (N, B, p)
    """Points of a set, by kind."""
    kinds = {"random": inputs.sample(count).double().numpy()}
    if isinstance(inputs, Box):
        corners = np.array(list(itertools.product((0.0, 1.0), repeat=inputs.lower.shape[1])))[:, None]
        low, high = inputs.lower.double().numpy(), inputs.upper.double().numpy()
        kinds["vertices"] = low + corners * (high - low)
    drawn, rises = np.concatenate(list(kinds.values())), []
    for b in range(BATCH):
        x, solved = solve(case, drawn[:, b])
        change, moved = drawn[solved, b] - drawn[0, b], x[solved] - x[0]
        rises.append(np.linalg.lstsq(change, moved, rcond=None)[0].T)  # (n, p)
    ways = torch.tensor(np.stack(rises), dtype=inputs.dtype)
    ways = torch.cat([ways, -ways], dim=1)
    ways = ways.masked_fill(ways == 0, 1e-30).requires_grad_()  # at zero the support has several slopes
    (extreme,) = torch.autograd.grad(inputs.support(ways).sum(), ways)
    extreme = inputs.center[:, None] + (1 - 1e-6) * (extreme - inputs.center[:, None])
    kinds["extreme"] = extreme.transpose(0, 1).double().numpy()
    kinds["pgd"] = ascended(case, inputs)
    if attacked and not isinstance(inputs, SparseBox):
        kinds["autoattack"] = asked_about(case, inputs)
    return kinds


def ascended(case: Case, inputs: Uncertainty) -> Array:  # (N, B, p)
    """The points on the way of projected gradient ascent, of every state, output and difference, up and down."""
    C, n, p = case.form.C.to_dense().double().numpy(), len(case.A), case.B.shape[1]
    pairs = list(itertools.permutations(range(len(C)), 2))
    rows = np.concatenate([np.eye(n), -np.eye(n), C, -C, np.stack([C[i] - C[j] for i, j in pairs])])
    center = inputs.center.double().numpy()
    u, points = np.repeat(center[None], len(rows), axis=0), []  # (R, B, p)
    slope = PHI[case.phi][1]
    for step in range(ASCENT):
        flat = u.reshape(-1, p)
        x, _ = solve(case, flat)
        z = x @ case.A.T + flat @ case.B.T + case.bias
        D = slope(z) if not case.layered else (z > 0).astype(float)
        if case.layered:
            D[:, 3:-4] = slope(z[:, 3:-4])
        system = np.eye(n) - D[:, :, None] * case.A
        wanted = np.repeat(rows, BATCH, axis=0)  # the objective of every point
        nu = np.linalg.solve(system.transpose(0, 2, 1), wanted[:, :, None])[:, :, 0]
        rise = ((nu * D) @ case.B).reshape(u.shape)
        u = moved(inputs, u, rise, max(0.1, 1 - step / ASCENT))
        points.append(u)
    return np.concatenate(points)


def moved(inputs: Uncertainty, u: Array, rise: Array, share: float) -> Array:
    """Takes a step upward, a share of the radius long, and returns to the set."""
    center, box = inputs.center.double().numpy(), inputs.box()
    low, high = box.lower.double().numpy(), box.upper.double().numpy()
    if isinstance(inputs, Ball):
        length = np.linalg.norm(rise, axis=2, keepdims=True)
        return within(inputs, u + share * (high - low).max() / 2 * rise / np.maximum(length, 1e-300))
    u = np.clip(u + share * (high - low) / 2 * np.sign(rise), low, high)
    if isinstance(inputs, SparseBox):
        worth = np.abs(rise * (u - center))
        few = worth.argsort(axis=2).argsort(axis=2) < worth.shape[2] - inputs.k
        u = np.where(few, center, u)
    return u


def within(inputs: Uncertainty, u: Array) -> Array:
    """Projects points on a box or a ball."""
    if isinstance(inputs, Ball):
        center, radius = inputs.center.double().numpy(), inputs.radius.double().numpy()[:, None] * (1 - 1e-9)
        length = np.linalg.norm(u - center, axis=2, keepdims=True)
        return center + (u - center) * np.minimum(1.0, radius / np.maximum(length, 1e-300))
    return np.clip(u, *(end.double().numpy() for end in (inputs.box().lower, inputs.box().upper)))


def asked_about(case: Case, inputs: Uncertainty) -> Array:  # (N, B, p)
    """All points about which AutoAttack asks, projected on the set; it starts from the centers."""
    asked: list[Array] = []

    class Watched(torch.nn.Module):
        def forward(self, u: torch.Tensor) -> torch.Tensor:
            asked.append(u.detach().double().numpy())
            outputs: torch.Tensor = case.form(u)
            return outputs

    u = inputs.center.clamp(0, 1)
    radius = float((inputs.box().upper - inputs.box().lower).amax()) / 2
    norm = "2" if isinstance(inputs, Ball) else "inf"
    attacks = ["apgd-ce", "fab", "square"][: 2 if norm == "2" else 3]  # Square Attack knows no balls in few pixels
    with warnings.catch_warnings():  # a solve that ends early leads to points as good as others
        warnings.simplefilter("ignore", ConvergenceWarning)
        target = case.form(u).argmax(1)
        autoattack(
            Watched(), u, target, radius, norm=norm, attacks=attacks, steps=STEPS, square_queries=QUERIES, seed=0
        )
    whole = [one for one in asked if len(one) == BATCH]  # later questions may be about one sample alone
    return within(inputs, np.stack(whole))


@dataclass
class Tally:
    """What was compared."""

    points: Counter = field(default_factory=Counter)
    trials: Counter = field(default_factory=Counter)
    kinds: Counter = field(default_factory=Counter)
    violations: list[dict[str, Any]] = field(default_factory=list)
    nearest: float = 0.0  # how much of a bound's radius a point reached


def trial(seed: int, number: int, dtype: torch.dtype, tally: Tally, count: int = DRAWN) -> None:
    """Runs one trial; every seventh one is about sets of the size of the rounding."""
    torch.manual_seed(1_000_003 * seed + number)
    case = case_of(seed, number, dtype)
    eps = 10.0 ** -float(1 + 2.5 * torch.rand(())) if number % 7 else float(torch.finfo(dtype).eps * 8)
    u = torch.rand(BATCH, case.B.shape[1], dtype=dtype)
    inputs = set_of(number, torch.full_like(u, 0.5) if number % 5 == 4 else u, eps)
    tally.trials[f"{case.kind}, {str(dtype)[6:]}"] += 1
    answers: list[torch.Tensor] = []
    call = crown.Continuation.__call__

    def spied(self: crown.Continuation, stage: Any) -> torch.Tensor:
        answers.append(call(self, stage))
        return answers[-1]

    try:
        with mock.patch.object(crown.Continuation, "__call__", spied):
            states, outputs = state_bounds(case.form, inputs), output_bounds(case.form, inputs)
    except (IllPosedError, MethodError) as error:
        tally.trials[f"refused: {type(error).__name__}"] += 1
        return
    tally.trials[f"certificate: {case.form.certificate().condition}"] += 1
    tally.trials[
        "proven by continuation" if any(bool((one > 1).any()) for one in answers) else "not by continuation"
    ] += 1
    kinds = points_of(case, inputs, count, number % ASKED == 0)
    points = np.concatenate(list(kinds.values()))
    solutions = [solve(case, points[:, b]) for b in range(BATCH)]
    C = case.form.C.to_dense().double().numpy()
    for b, (x, solved) in enumerate(solutions):
        tally.points["unsolved"] += int((~solved).sum())
        tally.points[f"{case.kind}, {type(inputs).__name__}, {str(dtype)[6:]}"] += int(solved.sum())
        ends = np.cumsum([len(own) for own in kinds.values()])
        for name, own in zip(kinds, np.split(solved, ends[:-1]), strict=True):
            tally.kinds[name] += int(own.sum())
        about = {"number": number, "kind": case.kind, "dtype": str(dtype)[6:], "eps": eps}
        for what, bounds, value in (("states", states, x[solved]), ("outputs", outputs, x[solved] @ C.T)):
            low, high = (end[b].double().numpy() for end in (bounds.lower, bounds.upper))
            outside = np.maximum(value - high, low - value)
            slack = 1e-9 * (1 + np.abs(value).max(initial=0.0))
            if (outside > slack).any():
                tally.violations.append({**about, "what": what, "by": float(outside.max()), "slack": slack})
            if len(value) and np.isfinite(high - low).all() and (high - low).min() > 1e3 * slack:
                reach = np.abs(2 * value - high - low) / np.maximum(high - low, 1e-300)
                tally.nearest = max(tally.nearest, float(reach.max()))
    if case.phi == "relu" and isinstance(inputs, Box):
        compare_programs(case, inputs, points, solutions, tally, about)


def program_bounds(form: ImplicitForm, inputs: Box, output: float | None, b: int) -> tuple[Array, Array]:
    """Bounds the pre-activations of one sample by triangle programs, where the first output is large enough."""
    unit = torch.eye(form.sizes[2], dtype=form.dtype).expand(BATCH, -1, -1)
    wide = in_float64(Query(form, inputs, unit))
    enclosure = tightest_intervals(wide, 3)
    z = side_by_side(enclosure.preactivations)
    if output is None:
        return z.lower[b].numpy(), z.upper[b].numpy()
    row = Objectives.of(wide, enclosure.states).part([b * form.sizes[2]])
    row = Objectives(row.states, row.inputs, row.constant - output, row.slack + 1e-12 * (1 + abs(output)), 1)
    constraints, box = ReluConstraints.of(wide.form, "campaign"), wide.set.box().interval
    regions = Regions(constraints, box.at(b), type(z)(z.lower[b : b + 1], z.upper[b : b + 1]), row)
    region = torch.zeros(form.sizes[0], dtype=torch.int64)
    rows = regions.units(region, torch.arange(form.sizes[0]))
    upper, lower = regions.maximum(rows, region.repeat(2), 60).bound.chunk(2)
    return -lower.numpy(), upper.numpy()


def compare_programs(
    case: Case, inputs: Box, points: Array, solutions: list[tuple[Array, NDArray[np.bool_]]], tally: Tally,
    about: dict[str, Any],
) -> None:  # fmt: skip
    """Compares the pre-activations of points with what triangle programs prove."""
    C = case.form.C.to_dense().double().numpy()
    for b, (x, solved) in enumerate(solutions):
        x, u = x[solved], points[solved, b]
        z, output = x @ case.A.T + u @ case.B.T + case.bias, x @ C[0]
        for least in (None, float(np.quantile(output, 0.7)) if len(output) else 0.0):
            low, high = program_bounds(case.form, inputs, least, b)
            some = z if least is None else z[output >= least + 1e-9 * (1 + abs(least))]
            tally.points[f"triangle programs, {about['dtype']}"] += len(some)
            tally.kinds["once more, against triangle programs"] += len(some)
            outside = np.maximum(some - high, low - some)
            slack = 1e-9 * (1 + np.abs(some).max(initial=0.0))
            if (outside > slack).any():
                what = "triangle programs" + ("" if least is None else ", with a condition")
                tally.violations.append({**about, "what": what, "by": float(outside.max()), "slack": slack})


def main() -> None:
    """Runs trials until there are enough points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tally, start = Tally(), time.monotonic()
    for number in itertools.count(options.first):
        done = sum(tally.points.values()) - tally.points["unsolved"]
        if done >= options.points or time.monotonic() - start > 60 * options.minutes:
            break
        trial(options.seed, number // 2, (torch.float32, torch.float64)[number % 2], tally)
    compared = {name: count for name, count in sorted(tally.points.items()) if name != "unsolved"}
    report = {
        "seed": options.seed, "drawn": DRAWN, "trials": number - options.first, "points": sum(compared.values()),
        "kinds": dict(sorted(tally.kinds.items())), "unsolved": tally.points["unsolved"],
        "violations": tally.violations, "nearest": tally.nearest,
        "by": dict(sorted(tally.trials.items())), "compared": compared, "torch": torch.__version__,
        "python": platform.python_version(), "seconds": round(time.monotonic() - start),
    }  # fmt: skip
    runs = json.loads(RESULT.read_text()) if RESULT.exists() else []
    runs = [run for run in runs if (run["seed"], run["drawn"]) != (options.seed, DRAWN)] + [report]
    RESULT.write_text(json.dumps(runs, indent=1) + "\n")
    print(f"{report['points']} points, {len(tally.violations)} violations, {tally.points['unsolved']} unsolved")


if __name__ == "__main__":
    main()
