"""What the sparsifying suites measure: fits under caps, frontiers, partial data and the steps of Algorithm 1."""

import time
from collections.abc import Sequence

import torch
from torch import nn

from wellposed.convert import to_implicit
from wellposed.convex import RowProblem, Schur
from wellposed.errors import unknown_name
from wellposed_lab.cache import cached
from wellposed_lab.engine.store import Result, Value
from wellposed_lab.experiments.sparsify.row_solvers import Bisection
from wellposed_lab.experiments.sparsify.rows import Fitted, rows_of
from wellposed_lab.networks.trained import TrainedNetwork

EPS = 0.01  # of Algorithm 1 in 003 section 3.4
INNER, SWEEPS = 1e-10, 100  # of its inner problems, which take very long on pixels otherwise


def scored(network: TrainedNetwork, seed: int, fitted: Fitted, at: float | None) -> list[Value]:
    """Scores a sparse network on all test data, with what is certified of its rows."""
    scores, before = network.scores(fitted.model, seed), dense_scores(network, seed)
    values = [
        *(Value(metric, value, at) for metric, value in scores.items()),
        Value("accuracy_drop", before["accuracy"] - scores["accuracy"], at),
        Value("sparsity", fitted.sparsity, at),
    ]
    if fitted.report is not None:
        values.append(Value("largest_norm", float(fitted.report.norm.max()), at))
        values.append(Value("largest_gap", float(fitted.report.relative_gap.max()), at))
    return values


@cached
def dense_scores(network: TrainedNetwork, seed: int) -> dict[str, float]:
    """Scores the network itself."""
    return network.scores(network.trained(seed), seed)


def level_line(network: TrainedNetwork, seed: int, points: Sequence[float]) -> Result:
    """Scores the network itself, as a level line along an axis."""
    scores = dense_scores(network, seed)
    values = [Value(metric, value, at) for at in (None, *points) for metric, value in scores.items()]
    return Result((Value("sparsity", 0.0), *values))


def kappas(network: TrainedNetwork, seed: int, model: str, points: Sequence[float], samples: int) -> Result:
    """Fits under caps; without a point: with the cap and the number of samples of 002."""
    rows, values = rows_of(network, seed, samples), []
    asked = [(None, *printed) for printed in rows.printed] + [(point, point, samples) for point in points]
    for at, kappa, count in asked:
        values += scored(network, seed, rows.capped(model, kappa, count), at)
    return Result(tuple(values))


def frontier(
    network: TrainedNetwork,
    seed: int,
    model: str,
    points: Sequence[float],
    samples: int,
    training: int,
    path: Sequence[float] = (),
) -> Result:
    """Makes networks of given sparsity; `training` and `path` are those of `Rows.maker`."""
    rows = rows_of(network, seed, samples)
    if model not in rows.methods:
        raise unknown_name("method", model, rows.methods)
    make, values, facts = rows.maker(model, training, tuple(path)), [], {}
    for sparsity in points:
        fitted = make(sparsity)
        values += scored(network, seed, fitted, sparsity)
        if fitted.report is not None:
            facts[f"{sparsity:g}"] = fitted.report.facts()
    if facts and network.convertible:
        values.append(Value("form_difference", form_difference(network, seed, fitted.model), points[-1]))
    return Result(tuple(values), facts={"fits": facts} if facts else {})


def form_difference(network: TrainedNetwork, seed: int, model: nn.Module) -> float:
    """Compares a model with its implicit form on two inputs: the largest relative difference of outputs."""
    u = network.draw(seed, 2)
    with torch.no_grad():
        y = model(u)
        implicit = to_implicit(model, tuple(u.shape[1:]))(u)
    return float((implicit - y).abs().max() / y.abs().max())


def partial_data(network: TrainedNetwork, seed: int, points: Sequence[float], target: float | None) -> Result:
    """Fits on shares of the training data (003 Figures 3.6 and 3.7)."""
    rows, values, accuracies = rows_of(network, seed), [], []
    for share in points:
        values += scored(network, seed, rows.on_share(share, target), share)
        accuracies.append((share, next(v.value for v in reversed(values) if v.metric == "accuracy")))
    return Result((*values, Value("sufficient_data", sufficient(accuracies))))


def sufficient(accuracies: Sequence[tuple[float, float]]) -> float:
    """Returns the share from which on accuracy stays within a point of its best.

    Example:
        >>> sufficient([(0.1, 0.7), (0.2, 0.8), (0.5, 0.81), (1.0, 0.815)])
        0.5
    """
    best = max(score for _, score in accuracies)
    enough = accuracies[-1][0]
    for share, score in reversed(accuracies):
        if score < best - 0.01:
            break
        enough = share
    return enough


def iterations(network: TrainedNetwork, seed: int, kappa: float, points: Sequence[float], samples: int) -> Result:
    """Scores what Algorithm 1 has after some halvings in every row (003 Figures 3.2 and 3.3)."""
    rows, values = rows_of(network, seed, samples), []
    for count in points:
        solver = Schur(Bisection(eps=2.0**-count, inner_tol=INNER, max_sweeps=SWEEPS))
        fitted = rows.capped("state-driven-row", kappa, samples, solver)
        values += scored(network, seed, Fitted(fitted.model, fitted.sparsity), count)
    return Result(tuple(values))


def warm_starts(network: TrainedNetwork, seed: int, points: Sequence[float], samples: int, warm: bool) -> Result:
    """Counts the sweeps of Algorithm 1 and, for warm starts, the gain in processor time (003 Table 3.3)."""
    problems, values, gains = rows_of(network, seed, samples).problems(), [], []
    bisected(problems(0.5)[-1:], warm)  # compiles
    for kappa in points:
        capped = problems(kappa)
        steps, seconds = bisected(capped, warm)
        values.append(Value("steps", steps, kappa))
        if warm:
            gains.append(bisected(capped, False)[1] / seconds)
            values.append(Value("speedup", gains[-1], kappa))
    return Result((*values, Value("speedup", sum(gains) / len(gains))) if warm else tuple(values))


def bisected(problems: Sequence[RowProblem], warm: bool) -> tuple[float, float]:
    """Runs Algorithm 1 as printed; returns its sweeps, on average over the rows, and the processor time."""
    solver = Bisection(eps=EPS, inner_tol=INNER, warm_start=warm, literal=True, max_sweeps=SWEEPS)
    began = time.process_time()
    steps = torch.cat([solver.solve(problem).steps for problem in problems])
    return float(steps.double().mean()), time.process_time() - began


def partial_speed(
    network: TrainedNetwork, seed: int, points: Sequence[float], samples: int, share: float
) -> Result:
    """Measures how much faster a fit on a share of the data is (003 Table 3.3)."""
    rows, values = rows_of(network, seed, samples), []
    fits = [rows.timed(portion) for portion in (share, 1.0)]
    for kappa in points:
        seconds = []
        for fit in fits:
            began = time.process_time()
            fit(kappa)
            seconds.append(time.process_time() - began)
        values.append(Value("speedup", seconds[1] / seconds[0], kappa))
    return Result(tuple(values))
