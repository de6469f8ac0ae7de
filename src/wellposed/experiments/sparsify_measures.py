"""What the sparsifying suites measure: fits under caps, frontiers, partial data and the steps of Algorithm 1."""

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.baselines.pruning import (
    ProximalDescent,
    ScaledUnits,
    keep_zeros,
    perspective_penalty,
    prune_by_magnitude,
    prune_units,
    unit_weights,
    weight_sparsity,
)
from wellposed.convex import (
    Bisection,
    Design,
    FitReport,
    RowProblem,
    Schur,
    States,
    fit_states,
    row_problem,
    support_mask,
)
from wellposed.convex.rescale import fitting_units
from wellposed.experiments.cache import cached
from wellposed.experiments.layers import Layers
from wellposed.experiments.record import Value
from wellposed.experiments.trained_network import Dense
from wellposed.models.implicit import ImplicitModel

FEW = 500  # samples of 002 section 5.2
EPS = 0.01  # of Algorithm 1 in 003 section 3.4
INNER, SWEEPS = 1e-10, 100  # of its inner problems, which take very long on pixels otherwise
CAPS: dict[str, dict[str, Any]] = {
    "state-driven": {"bound": "state", "rescale": True, "support": "layered"},
    "state-driven-row": {"bound": "row", "rescale": True, "support": "layered"},
    "state-driven-literal": {"bound": "row", "rescale": False, "support": "full"},
}
GAMMA, ALPHA, LARGEST, STRENGTH = 1e-3, 0.1, 5.0, 1.0  # of SSS and SPR
Found = tuple[nn.Module, float]  # a model and its sparsity


def scores(dense: Dense, seed: int, model: nn.Module, sparsity: float, at: float | None) -> list[Value]:
    """Scores a model on the test images."""
    found = dense.score(model)
    before = dense.score(dense.trained(seed))
    return [
        Value("accuracy", found, at),
        Value("accuracy_drop", before - found, at),
        Value("sparsity", sparsity, at),
    ]


def kappas(dense: Dense, seed: int, model: str, points: Sequence[float], samples: int) -> list[Value]:
    """Fits under caps; without a point: with the cap and the number of samples of 002."""
    values = []
    for at, kappa, count in [(None, 0.3, FEW), *((point, point, samples) for point in points)]:
        fitted, report = fit_states(dense.states(seed, count), kappa=kappa, **CAPS[model])
        values += scores(dense, seed, fitted, report.sparsity, at)
    return values


def frontier(
    dense: Dense, seed: int, model: str, points: Sequence[float], samples: int, epochs: int
) -> list[Value]:
    """Makes models of given sparsity."""
    make = RIVALS[model](dense, seed, samples, epochs)
    values = []
    for sparsity in points:
        found, reached = make(sparsity)
        values += scores(dense, seed, found, reached, sparsity)
    return values


def _fitted(objective: str, tuned: bool) -> Callable[[Dense, int, int, int], Callable[[float], Found]]:
    def prepared(dense: Dense, seed: int, samples: int, epochs: int) -> Callable[[float], Found]:
        def make(sparsity: float) -> Found:
            model, report = _sparse_fit(dense, seed, samples, objective, sparsity)
            if not tuned:
                return model, report.sparsity
            layers = Layers(model, report.blocks, report.exponents)
            dense.train(layers, seed, epochs)
            return layers, report.sparsity

        return make

    return prepared


@cached
def _sparse_fit(
    dense: Dense, seed: int, samples: int, objective: str, sparsity: float
) -> tuple[ImplicitModel, FitReport]:
    states = dense.states(seed, samples)
    return fit_states(states, kappa=0.99, objective=objective, target_sparsity=sparsity)


def _magnitude(layerwise: bool, tuned: bool) -> Callable[[Dense, int, int, int], Callable[[float], Found]]:
    def prepared(dense: Dense, seed: int, samples: int, epochs: int) -> Callable[[float], Found]:
        network = _layers_of(dense, seed)

        def make(sparsity: float) -> Found:
            return _tuned(dense, seed, prune_by_magnitude(network, sparsity, layerwise=layerwise), epochs * tuned)

        return make

    return prepared


def _sss(dense: Dense, seed: int, samples: int, epochs: int) -> Callable[[float], Found]:
    """Trains factors with their l1-norm from the trained network on; the smallest ones go."""
    scaled = ScaledUnits(copy.deepcopy(_layers_of(dense, seed)))
    dense.train(scaled, seed, epochs, optimizer=ProximalDescent(scaled, lr=0.01, gamma=GAMMA))
    sizes, network = [factor.abs() for factor in scaled.factors], scaled.merged()
    return lambda sparsity: _tuned(dense, seed, prune_units(network, sizes, sparsity), epochs)


def _spr(dense: Dense, seed: int, samples: int, epochs: int) -> Callable[[float], Found]:
    """Trains with the penalty from the trained network on; the units with the smallest weights go."""
    network = copy.deepcopy(_layers_of(dense, seed))

    def loss(y: Tensor, labels: Tensor) -> Tensor:
        penalty = perspective_penalty(unit_weights(network), ALPHA, LARGEST)
        return cross_entropy(y, labels) + STRENGTH * penalty

    dense.train(network, seed, epochs, loss=loss)
    sizes = [weights.norm(dim=1) for weights in unit_weights(network)]
    return lambda sparsity: _tuned(dense, seed, prune_units(network, sizes, sparsity), epochs)


def _layers_of(dense: Dense, seed: int) -> nn.Sequential:
    network = dense.trained(seed)
    assert isinstance(network, nn.Sequential)
    return network


def _tuned(dense: Dense, seed: int, network: nn.Sequential, epochs: int) -> Found:
    """Trains what is left."""
    sparsity = weight_sparsity(network)
    if epochs:
        keep_zeros(network)
        dense.train(network, seed, epochs)
    return network, sparsity


RIVALS: dict[str, Callable[[Dense, int, int, int], Callable[[float], Found]]] = {
    "state-driven": _fitted("none", tuned=False),
    "state-driven-tuned": _fitted("none", tuned=True),
    "state-driven-lasso": _fitted("lasso", tuned=False),
    "magnitude": _magnitude(layerwise=False, tuned=False),
    "magnitude-layerwise": _magnitude(layerwise=True, tuned=False),
    "magnitude-tuned": _magnitude(layerwise=False, tuned=True),
    "sss": _sss,
    "spr": _spr,
}


def partial_data(
    dense: Dense, seed: int, model: str, points: Sequence[float], target: float | None
) -> list[Value]:
    """Fits on shares of the training images (003 Figures 3.6 and 3.7)."""
    total, values, found = len(dense.pair("train")[0]), [], []
    for share in points:
        states = dense.states(seed, max(2, round(share * total)))
        fitted, report = fit_states(states, kappa=0.99, target_sparsity=target)
        values += scores(dense, seed, fitted, report.sparsity, share)
        found.append((share, values[-3].value))
    return [*values, Value("sufficient_data", sufficient(found))]


def sufficient(found: Sequence[tuple[float, float]]) -> float:
    """Returns the share from which on accuracy stays within a point of its best.

    Example:
        >>> sufficient([(0.1, 0.7), (0.2, 0.8), (0.5, 0.81), (1.0, 0.815)])
        0.5
    """
    best = max(score for _, score in found)
    enough = found[-1][0]
    for share, score in reversed(found):
        if score < best - 0.01:
            break
        enough = share
    return enough


def iterations(dense: Dense, seed: int, kappa: float, points: Sequence[float], samples: int) -> list[Value]:
    """Scores what Algorithm 1 has after some halvings in every row (003 Figures 3.2 and 3.3)."""
    states, values = dense.states(seed, samples), []
    for count in points:
        solver = Schur(Bisection(eps=2.0**-count, inner_tol=INNER, max_sweeps=SWEEPS))
        fitted, report = fit_states(states, kappa=kappa, solver=solver, **CAPS["state-driven-row"])
        values += scores(dense, seed, fitted, report.sparsity, count)
    return values


def warm_starts(dense: Dense, seed: int, points: Sequence[float], samples: int, warm: bool) -> list[Value]:
    """Counts the sweeps of Algorithm 1 and, for warm starts, the gain in time (003 Table 3.3)."""
    states, values, gains = dense.states(seed, samples), [], []
    bisected(_problems(states, 0.5)[-1:], warm)  # compiles
    for kappa in points:
        problems = _problems(states, kappa)
        steps, seconds = bisected(problems, warm)
        values.append(Value("steps", steps, kappa))
        if warm:
            gains.append(bisected(problems, False)[1] / seconds)
            values.append(Value("speedup", gains[-1], kappa))
    return [*values, Value("speedup", sum(gains) / len(gains))] if warm else values


def _problems(states: States, kappa: float) -> list[RowProblem]:
    """Builds P(kappa) of every layer, the cap on all of (a, b), in units in which the network's rows fit."""
    mask, found, n = support_mask(states, "layered"), [], states.X.shape[1]
    factors = fitting_units(states, 0.99, mask).factors
    X, U, Z = (part.double() for part in (states.X * factors, states.U, states.Z * factors))
    X, U, Z = X - X.mean(0), U - U.mean(0), Z - Z.mean(0)
    start = 0
    for size in states.blocks:
        columns = torch.nonzero(mask[start])[:, 0]
        design = Design.of(X, U).restricted(columns)
        found.append(row_problem(design, Z[:, start : start + size], kappa=kappa, capped=len(columns)))
        start += size
    assert start == n
    return found


def bisected(problems: Sequence[RowProblem], warm: bool) -> tuple[float, float]:
    """Runs Algorithm 1 as printed; returns its sweeps, on average over the rows, and the processor time."""
    solver = Bisection(eps=EPS, inner_tol=INNER, warm_start=warm, literal=True, max_sweeps=SWEEPS)
    began = time.process_time()
    steps = torch.cat([solver.solve(problem).steps for problem in problems])
    return float(steps.double().mean()), time.process_time() - began


def partial_speed(dense: Dense, seed: int, points: Sequence[float], share: float) -> list[Value]:
    """Measures how much faster a fit on a share of the images is (003 Table 3.3)."""
    total = len(dense.pair("train")[0])
    parts = [dense.states(seed, round(part * total)) for part in (share, 1.0)]
    values = []
    for kappa in points:
        seconds = []
        for states in parts:
            began = time.process_time()
            fit_states(states, kappa=kappa)
            seconds.append(time.process_time() - began)
        values.append(Value("speedup", seconds[1] / seconds[0], kappa))
    return values
