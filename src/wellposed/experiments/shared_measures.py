"""What the suites of shared rows measure: fits of given sparsity, caps, parts of the data and Algorithm 1."""

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.baselines.pruning import keep_zeros
from wellposed.convert import to_implicit
from wellposed.convex import (
    Design,
    Gathering,
    RowFit,
    RowProblem,
    RowUnits,
    SharedFit,
    SharedReport,
    row_problem,
    shared_layers,
)
from wellposed.convex.design import WIDE
from wellposed.convex.gather import RowData
from wellposed.convex.shared_layer import row_weights, set_rows, widths
from wellposed.errors import unknown_name
from wellposed.experiments.cache import cached
from wellposed.experiments.record import Result, Value
from wellposed.experiments.sparsify_measures import bisected, sufficient
from wellposed.experiments.trained_network import TrainedNetwork

KAPPA = 0.99
POSITIONS = 64  # of a sample
FEW_ROWS = 16  # of a layer, on which Algorithm 1 is timed
METHODS = ("state-driven", "state-driven-tuned", "state-driven-recorded", "magnitude", "magnitude-layerwise",
           "magnitude-tuned", "dense-tuned")  # fmt: skip


def scored(
    subject: TrainedNetwork, seed: int, network: nn.Module, sparsity: float, at: float | None
) -> list[Value]:
    """Scores a network on all test data."""
    found, before = subject.scores(network, seed), dense_scores(subject, seed)
    return [
        *(Value(metric, value, at) for metric, value in found.items()),
        Value("accuracy_drop", before["accuracy"] - found["accuracy"], at),
        Value("sparsity", sparsity, at),
    ]


@cached
def dense_scores(subject: TrainedNetwork, seed: int) -> dict[str, float]:
    """Scores the network itself."""
    return subject.scores(subject.trained(seed), seed)


def frontier(
    subject: TrainedNetwork,
    seed: int,
    model: str,
    points: Sequence[float],
    path: Sequence[float],
    samples: int,
    steps: int,
) -> Result:
    """Makes networks of given sparsity; `path` are those that the fits go through."""
    if model not in METHODS:
        raise unknown_name("method", model, METHODS)
    values: list[Value] = []
    facts: dict[str, Any] = {}
    for at in points:
        network, sparsity = _made(subject, seed, model, at, tuple(path), samples)
        if model.endswith("tuned"):
            network = copy.deepcopy(network)
            keep_zeros(network)
            subject.tune(network, seed, steps)
        values += scored(subject, seed, network, sparsity, at)
        if model == "state-driven":
            report = fits(subject, seed, tuple(path), samples)[list(path).index(at)][1]
            values += certificates(report, at)
            facts[f"{at:g}"] = report.facts()
    if model == "state-driven" and subject.convertible:
        values.append(Value("form_difference", form_difference(subject, seed, network), points[-1]))
    return Result(tuple(values), facts={"fits": facts} if facts else {})


def certificates(report: SharedReport, at: float) -> list[Value]:
    """Returns the worst row of a fit."""
    return [
        Value("largest_norm", float(report.norm.max()), at),
        Value("largest_gap", float(report.relative_gap.max()), at),
    ]


def _made(
    subject: TrainedNetwork, seed: int, model: str, at: float, path: tuple[float, ...], samples: int
) -> tuple[nn.Module, float]:
    if model.startswith("magnitude"):
        network = subject.trained(seed)
        sizes, layerwise = subject.sizes(seed), model.endswith("layerwise")
        return prune_shared(network, subject.layers(network), at, layerwise=layerwise, sizes=sizes)
    if model.startswith("dense"):
        return subject.trained(seed), 0.0
    sequential = model != "state-driven-recorded"
    network, report = fits(subject, seed, path, samples, sequential)[path.index(at)]
    return network, report.sparsity


@cached
def fits(
    subject: TrainedNetwork, seed: int, path: tuple[float, ...], samples: int, sequential: bool = True
) -> list[tuple[nn.Module, SharedReport]]:
    """Fits the network at growing sparsity, under the cap where there are units for one."""
    network = subject.trained(seed)
    units = subject.units(network, KAPPA)
    gathering = Gathering(samples=POSITIONS * samples, seed=seed, valid=subject.valid)
    how = SharedFit(kappa=KAPPA if units else float("inf"), gathering=gathering, sequential=sequential)
    return list(how.path(network, _batches(subject, seed, samples), path, subject.layers(network), units))


def prune_shared(
    network: nn.Module,
    names: Sequence[str],
    sparsity: float,
    *,
    layerwise: bool = False,
    sizes: Mapping[str, Tensor] | None = None,
) -> tuple[nn.Module, float]:
    """Sets the smallest weights of some layers to zero, in a copy; returns it with the share that went.

    Args:
        network: with shared rows.
        names: of the layers.
        sparsity: the share of weights that go.
        layerwise: whether every layer loses this share, or all of them together.
        sizes: what is compared in place of the weights, by layer.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
        >>> prune_shared(network, ["0", "2"], 0.5)[1]
        0.5
    """
    twin = copy.deepcopy(network)
    known = shared_layers(twin)
    before = {name: row_weights(known[name]) for name in names}
    own = {name: (sizes or {}).get(name, weights.abs()) for name, weights in before.items()}
    for group in [[name] for name in names] if layerwise else [list(names)]:
        compared = torch.cat([own[name].flatten() for name in group])
        count = round((1 - sparsity) * int((compared != 0).sum()))
        kept = torch.zeros(len(compared), dtype=torch.bool)
        kept[compared.topk(count).indices] = True
        for name, mask in zip(group, kept.split([own[name].numel() for name in group]), strict=True):
            layer = known[name]
            assert layer.bias is not None
            set_rows(layer, before[name] * mask.view_as(before[name]), layer.bias.detach().clone())
    left = sum(int((row_weights(known[name]) != 0).sum()) for name in names)
    return twin, 1 - left / sum(int((weights != 0).sum()) for weights in before.values())


def own_units(network: nn.Module, names: Sequence[str], kappa: float) -> dict[str, RowUnits]:
    """Returns units, powers of two for each layer, in which its own rows have an l1-norm below kappa."""
    known, found = shared_layers(network), {}
    for name in names:
        largest = row_weights(known[name]).double().abs().sum(1).max()
        shift = float(torch.floor(torch.log2(kappa / largest * (1 - 1e-9))))
        count = len(widths(known[name]))
        found[name] = RowUnits((shift,) * count, (True,) * count)
    return found


def kappas(subject: TrainedNetwork, seed: int, points: Sequence[float], samples: int) -> Result:
    """Caps whole rows, as P(kappa) of 003 is printed, in units in which the network's own rows fit at .99."""
    network = subject.trained(seed)
    names = subject.layers(network)
    units, batches = own_units(network, names, KAPPA), _batches(subject, seed, samples)
    gathering = Gathering(samples=POSITIONS * samples, seed=seed, valid=subject.valid)
    values: list[Value] = []
    for kappa in points:
        how = SharedFit(kappa=kappa, bound="row", gathering=gathering)
        fitted, report = how.fit(network, batches, names, units)
        values += [*scored(subject, seed, fitted, report.sparsity, kappa), *certificates(report, kappa)]
    return Result(tuple(values))


def partial_data(subject: TrainedNetwork, seed: int, points: Sequence[float], sparsity: float) -> Result:
    """Fits on shares of the training data (003 Figures 3.6 and 3.7), on what the network itself computes."""
    network, total = subject.trained(seed), len(subject.training()[0])
    names, values, found = subject.layers(network), [], []
    for share in points:
        count = max(8, round(share * total))
        gathering = Gathering(samples=8 * count, seed=seed, valid=subject.valid)
        how = SharedFit(target_sparsity=sparsity, gathering=gathering, sequential=False)
        fitted, report = how.fit(network, _batches(subject, seed, count), names)
        values += scored(subject, seed, fitted, report.sparsity, share)
        found.append((share, subject_accuracy(values)))
    return Result((*values, Value("sufficient_data", sufficient(found))))


def subject_accuracy(values: Sequence[Value]) -> float:
    """Returns the accuracy that was measured last."""
    return next(value.value for value in reversed(values) if value.metric == "accuracy")


def warm_starts(subject: TrainedNetwork, seed: int, points: Sequence[float], samples: int, warm: bool) -> Result:
    """Counts the sweeps of Algorithm 1 and, for warm starts, the gain in processor time (003 Table 3.3)."""
    data, values, gains = _recorded(subject, seed, samples), [], []
    for kappa in points:
        problems = _problems(subject, seed, data, kappa)
        steps, seconds = bisected(problems, warm)
        values.append(Value("steps", steps, kappa))
        if warm:
            gains.append(bisected(problems, False)[1] / seconds)
            values.append(Value("speedup", gains[-1], kappa))
    return Result((*values, Value("speedup", sum(gains) / len(gains))) if warm else tuple(values))


def partial_speed(
    subject: TrainedNetwork, seed: int, points: Sequence[float], samples: int, share: float
) -> Result:
    """Measures how much faster the rows of all layers are fitted on a share of the data (003 Table 3.3)."""
    data, values = _recorded(subject, seed, samples), []
    for kappa in points:
        seconds = []
        for part in (share, 1.0):
            began = time.process_time()
            for problem in _problems(subject, seed, data, kappa, part):
                RowFit(kappa=kappa, bound="row").solve_problem(problem)
            seconds.append(time.process_time() - began)
        values.append(Value("speedup", seconds[1] / seconds[0], kappa))
    return Result(tuple(values))


@cached
def _recorded(subject: TrainedNetwork, seed: int, samples: int) -> dict[str, RowData]:
    network = subject.trained(seed)
    known = shared_layers(network)
    layers = {name: known[name] for name in subject.layers(network)}
    gathering = Gathering(samples=8 * samples, seed=seed, valid=subject.valid)
    return gathering.run(network, layers, _batches(subject, seed, samples))


def _problems(
    subject: TrainedNetwork, seed: int, data: dict[str, RowData], kappa: float, share: float = 1.0
) -> list[RowProblem]:
    """Builds P(kappa) of some rows of every layer, in units in which its own rows fit at .99."""
    network = subject.trained(seed)
    units, found = own_units(network, list(data), KAPPA), []
    for name, part in data.items():
        count = max(2, round(share * len(part.targets)))
        M = torch.cat(part.parts, dim=1)[:count].to(WIDE) / 2.0 ** units[name].shifts[0]
        z = part.targets[:count, :FEW_ROWS].to(WIDE)
        found.append(row_problem(Design.of(M - M.mean(0)), z - z.mean(0), kappa=kappa, capped=M.shape[1]))
    return found


def form_difference(subject: TrainedNetwork, seed: int, network: nn.Module) -> float:
    """Compares a network with its implicit form on two inputs: the largest relative difference of outputs."""
    u = subject.draw(seed, 2)
    with torch.no_grad():
        y = network(u)
        found = to_implicit(network, tuple(u.shape[1:]))(u)
    return float((found - y).abs().max() / y.abs().max())


def _batches(subject: TrainedNetwork, seed: int, count: int) -> list[Tensor]:
    return list(subject.draw(seed, count).split(64))
