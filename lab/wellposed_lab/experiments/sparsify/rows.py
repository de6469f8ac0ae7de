"""How the rows of a network are fitted to what it computes.

Those of an MLP are fitted all at once to its recorded states (`DenseRows`). Rows that many positions share, as in
convolutions and transformers, are fitted layer by layer (`SharedRows`). The network says which, see `rows_of`.
`Layers` is a fitted model without loops as a network of layers, to be trained further with zeros that stay zero.
"""

import abc
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.convex import (
    Design,
    FitReport,
    PositionSampler,
    RowFit,
    RowProblem,
    RowUnits,
    SharedReport,
    States,
    fit_shared,
    fit_shared_path,
    fit_states,
    row_problem,
    shared_layers,
    support_mask,
)
from wellposed.convex.assemble import fitting_units
from wellposed.convex.problem import WIDE
from wellposed.convex.shared import RowData, row_weights, set_rows, widths
from wellposed.convex.solvers.base import RowSolver
from wellposed.errors import InputError
from wellposed.models.implicit import ImplicitModel
from wellposed_lab.cache import cached
from wellposed_lab.networks.pruning import (
    ProximalDescent,
    ScaledRows,
    ScaledUnits,
    Units,
    keep_zeros,
    mask_units,
    perspective_penalty,
    prune_by_magnitude,
    prune_units,
    rows_with_bias,
    select_units,
    unit_weights,
    weight_sparsity,
)
from wellposed_lab.networks.trained import TrainedNetwork


class Layers(nn.Module):
    """ReLU layers that may read all layers before them and the input.

    It computes what the model computes, by substitution: block after block, the last one first.

    Args:
        model: without loops between blocks; all activations are ReLU.
        blocks: sizes of its blocks of states, the last layer first.
        exponents: its states are in units of 2^-e; the layers are in those of the recording.

    Example:
        >>> A, B, C = torch.tensor([[0.0, 0.5], [0.0, 0.0]]), torch.ones(2, 1), torch.ones(1, 2)
        >>> model = ImplicitModel.from_matrices(A, B, C)
        >>> [Layers(model, (1, 1), units)(torch.tensor([[2.0]])).tolist() for units in ((0.0, 0.0), (3.0, -1.0))]
        [[[5.0]], [[5.0]]]
    """

    def __init__(self, model: ImplicitModel, blocks: tuple[int, ...], exponents: tuple[float, ...]) -> None:
        super().__init__()
        sizes = (*blocks, len(model.A) - sum(blocks))  # a constant state for the output's bias, if there is one
        factors = torch.tensor([2.0**e for e in (*exponents, 0.0)]).repeat_interleave(torch.tensor(sizes))
        A, B, C = (
            model.A.detach() * factors / factors[:, None],
            model.B.detach() / factors[:, None],
            model.C.detach(),
        )
        bias = torch.zeros(len(A)) if model.bias is None else model.bias.detach() / factors
        C = C * factors
        layers, high = [], len(A)
        for size in [size for size in reversed(sizes) if size]:
            low = high - size
            weight = torch.cat([A[low:high, high:], B[low:high]], dim=1)
            layers.append(_linear(weight, bias[low:high]))
            high = low
        self.hidden = nn.ModuleList(layers)
        self.output = _linear(C, torch.zeros(len(C)))
        keep_zeros(self)

    def forward(self, u: Tensor) -> Tensor:
        """Evaluates layer after layer."""
        x = u[:, :0]
        for layer in self.hidden:
            x = torch.cat([layer(torch.cat([x, u], dim=1)).relu(), x], dim=1)
        return self.output(x)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight = nn.Parameter(weight.contiguous())
    layer.bias = nn.Parameter(bias)
    return layer


KAPPA = 0.99
FEW = 500  # samples of 002 section 5.2
CAPS: dict[str, dict[str, Any]] = {
    "state-driven": {"bound": "state", "rescale": True, "support": "layered"},
    "state-driven-row": {"bound": "row", "rescale": True, "support": "layered"},
    "state-driven-literal": {"bound": "row", "rescale": False, "support": "full"},
}
GAMMA, ALPHA, LARGEST, STRENGTH = 1e-3, 0.1, 5.0, 1.0  # of SSS and SPR
POSITIONS, FEWER = 64, 8  # of a sample, where rows are shared: for fits, and for what is only timed or partial
FEW_ROWS = 16  # of a layer with shared rows, on which Algorithm 1 is timed


@dataclass(frozen=True)
class Fitted:
    """A network that was made sparse.

    Args:
        model: the sparse network.
        sparsity: the share of its weights that are zero.
        report: what is certified of its rows, where that is to be recorded.
    """

    model: nn.Module
    sparsity: float
    report: SharedReport | None = None


Maker = Callable[[float], Fitted]  # from the sparsity to reach


@dataclass(frozen=True)
class Rows(abc.ABC):
    """Fits the rows of a network to what it computes.

    Args:
        network: with its data.
        seed: of the network and of the samples that are drawn.
        samples: training samples that a fit sees.
    """

    network: TrainedNetwork
    seed: int
    samples: int
    methods: ClassVar[tuple[str, ...]]  # that make a network of given sparsity
    printed: ClassVar[tuple[tuple[float, int], ...]] = ()  # caps of 002, with the number of samples

    @abc.abstractmethod
    def capped(self, model: str, kappa: float, samples: int, solver: RowSolver | str = "automatic") -> Fitted:
        """Fits under a cap."""

    @abc.abstractmethod
    def on_share(self, share: float, sparsity: float | None) -> Fitted:
        """Fits on a share of the training data."""

    @abc.abstractmethod
    def maker(self, method: str, training: int, path: tuple[float, ...]) -> Maker:
        """Returns a function that makes networks of given sparsity.

        Args:
            method: one of `methods`.
            training: epochs of training afterwards, or steps where rows are shared.
            path: all sparsities that fits of shared rows go through, from the lowest on.
        """

    @abc.abstractmethod
    def problems(self, share: float = 1.0) -> Callable[[float], list[RowProblem]]:
        """Returns a builder of P(kappa), which caps whole rows, of every layer on a share of the samples."""

    @abc.abstractmethod
    def timed(self, share: float) -> Callable[[float], Any]:
        """Returns a function that fits under a cap on a share of the data, with everything else prepared."""


def rows_of(network: TrainedNetwork, seed: int, samples: int = 0) -> Rows:
    """Returns how the rows of a network are fitted."""
    return (SharedRows if network.shared_rows else DenseRows)(network, seed, samples)


@dataclass(frozen=True)
class DenseRows(Rows):
    """Fits all rows of an MLP to its recorded states."""

    methods: ClassVar[tuple[str, ...]] = (
        "state-driven",
        "state-driven-tuned",
        "state-driven-lasso",
        "magnitude",
        "magnitude-layerwise",
        "magnitude-tuned",
        "sss",
        "spr",
    )
    printed: ClassVar[tuple[tuple[float, int], ...]] = ((0.3, FEW),)

    def capped(self, model: str, kappa: float, samples: int, solver: RowSolver | str = "automatic") -> Fitted:
        states = self.network.states(self.seed, samples)
        fitted, report = fit_states(states, kappa=kappa, solver=solver, **CAPS[model])
        return Fitted(fitted, report.sparsity)

    def on_share(self, share: float, sparsity: float | None) -> Fitted:
        states = self._states(share, 2)
        fitted, report = fit_states(states, kappa=KAPPA, target_sparsity=sparsity)
        return Fitted(fitted, report.sparsity)

    def maker(self, method: str, training: int, path: tuple[float, ...]) -> Maker:
        if method.startswith("state-driven"):
            return partial(self._sparse, method, training)
        if method.startswith("magnitude"):
            return partial(self._pruned, method, training)
        return self._sss(training) if method == "sss" else self._spr(training)

    def problems(self, share: float = 1.0) -> Callable[[float], list[RowProblem]]:
        """Returns a function that builds P(kappa) of every layer, in units in which the network's rows fit."""
        return partial(_layer_problems, self.network.states(self.seed, round(share * self.samples)))

    def timed(self, share: float) -> Callable[[float], Any]:
        states = self._states(share, 1)
        return lambda kappa: fit_states(states, kappa=kappa)

    def _states(self, share: float, least: int) -> States:
        total = len(self.network.training(self.seed)[0])
        return self.network.states(self.seed, max(least, round(share * total)))

    def _sparse(self, method: str, epochs: int, sparsity: float) -> Fitted:
        model, report = self._fit("lasso" if method.endswith("lasso") else "none", sparsity)
        if not method.endswith("tuned"):
            return Fitted(model, report.sparsity)
        layers = Layers(model, report.blocks, report.exponents)
        self.network.train(layers, self.seed, epochs)
        return Fitted(layers, report.sparsity)

    @cached
    def _fit(self, objective: str, sparsity: float) -> tuple[ImplicitModel, FitReport]:
        states = self.network.states(self.seed, self.samples)
        return fit_states(states, kappa=KAPPA, objective=objective, target_sparsity=sparsity)

    def _pruned(self, method: str, epochs: int, sparsity: float) -> Fitted:
        pruned = prune_by_magnitude(self._layers(), sparsity, layerwise=method.endswith("layerwise"))
        return self._tuned(pruned, epochs if method.endswith("tuned") else 0)

    def _sss(self, epochs: int) -> Maker:
        """Trains factors with a penalty on their l1-norm, from the trained network; the smallest are removed."""
        scaled = ScaledUnits(copy.deepcopy(self._layers()))
        self.network.train(scaled, self.seed, epochs, optimizer=ProximalDescent(scaled, lr=0.01, gamma=GAMMA))
        sizes, network = [factor.abs() for factor in scaled.factors], scaled.merged()
        return lambda sparsity: self._tuned(prune_units(network, sizes, sparsity), epochs)

    def _spr(self, epochs: int) -> Maker:
        """Trains with the penalty, from the trained network; the units with the smallest weights are removed."""
        network = copy.deepcopy(self._layers())

        def loss(y: Tensor, labels: Tensor) -> Tensor:
            penalty = perspective_penalty(unit_weights(network), ALPHA, LARGEST)
            return cross_entropy(y, labels) + STRENGTH * penalty

        self.network.train(network, self.seed, epochs, loss=loss)
        sizes = [weights.norm(dim=1) for weights in unit_weights(network)]
        return lambda sparsity: self._tuned(prune_units(network, sizes, sparsity), epochs)

    def _tuned(self, network: nn.Sequential, epochs: int) -> Fitted:
        """Trains what is left."""
        sparsity = weight_sparsity(network)
        if epochs:
            keep_zeros(network)
            self.network.train(network, self.seed, epochs)
        return Fitted(network, sparsity)

    def _layers(self) -> nn.Sequential:
        network = self.network.trained(self.seed)
        if not isinstance(network, nn.Sequential):
            raise InputError(f"an MLP is needed, as a Sequential; received {type(network).__name__}")
        return network


def _layer_problems(states: States, kappa: float) -> list[RowProblem]:
    mask, problems = support_mask(states, "layered"), []
    factors = fitting_units(states, KAPPA, mask).factors
    X, U, Z = (matrix.double() for matrix in (states.X * factors, states.U, states.Z * factors))
    X, U, Z = X - X.mean(0), U - U.mean(0), Z - Z.mean(0)
    start = 0
    for size in states.blocks:
        columns = torch.nonzero(mask[start])[:, 0]
        design = Design.of(X, U).restricted(columns)
        problems.append(row_problem(design, Z[:, start : start + size], kappa=kappa, capped=len(columns)))
        start += size
    return problems


@dataclass(frozen=True)
class SharedRows(Rows):
    """Fits rows that positions share, layer by layer, each to the outputs of the sparse layers before it."""

    methods: ClassVar[tuple[str, ...]] = (
        "state-driven",
        "state-driven-tuned",
        "state-driven-recorded",
        "magnitude",
        "magnitude-layerwise",
        "magnitude-tuned",
        "dense-tuned",
        "sss",
        "spr",
        "mla",
    )

    def capped(self, model: str, kappa: float, samples: int, solver: RowSolver | str = "automatic") -> Fitted:
        """Caps whole rows, as P(kappa) of 003 is printed, in units in which the network's own rows fit at .99."""
        network = self.network.trained(self.seed)
        names = self.network.layers(network)
        fitted, report = fit_shared(
            network, self._batches(samples), layers=names, units=own_units(network, names, KAPPA), kappa=kappa,
            bound="row", sampler=self._sampler(POSITIONS * samples), solver=solver,
        )  # fmt: skip
        return Fitted(fitted, report.sparsity, report)

    def on_share(self, share: float, sparsity: float | None) -> Fitted:
        """Fits on what the network itself computes."""
        network, total = self.network.trained(self.seed), len(self.network.training(self.seed)[0])
        count = max(8, round(share * total))
        fitted, report = fit_shared(
            network, self._batches(count), layers=self.network.layers(network), target_sparsity=sparsity,
            sampler=self._sampler(FEWER * count), sequential=False,
        )  # fmt: skip
        return Fitted(fitted, report.sparsity)

    def maker(self, method: str, training: int, path: tuple[float, ...]) -> Maker:
        if method in ("sss", "spr", "mla"):
            return self._units_maker(method, training)

        def make(sparsity: float) -> Fitted:
            fitted = self._made(method, sparsity, path)
            return self._tuned(fitted, training) if method.endswith("tuned") else fitted

        return make

    def _tuned(self, fitted: Fitted, steps: int) -> Fitted:
        """Trains what is left, in a copy."""
        model = copy.deepcopy(fitted.model)
        keep_zeros(model)
        self.network.tune(model, self.seed, steps)
        return Fitted(model, fitted.sparsity)

    def _units_maker(self, method: str, steps: int) -> Maker:
        """Removes whole units, by factors, by a penalty on their weights or by three losses; trains the rest."""
        network = copy.deepcopy(self.network.trained(self.seed))
        units, names = self.network.removable(network), self.network.layers(network)
        if method == "mla":
            u, target = self.network.training(self.seed)
            rows = torch.randperm(len(u), generator=torch.Generator().manual_seed(self.seed))[: self.samples]
            remove = partial(select_units, network, units, u[rows], target[rows])
        else:
            scores = (self._sss if method == "sss" else self._spr)(network, units, steps)
            remove = partial(mask_units, network, units, scores)

        def make(sparsity: float) -> Fitted:
            model = remove(sparsity)
            left, whole = (_entries(one, names) for one in (model, self.network.trained(self.seed)))
            return self._tuned(Fitted(model, 1 - left / whole), steps)

        return make

    def _sss(self, network: nn.Module, units: Sequence[Units], steps: int) -> list[Tensor]:
        """Trains factors of the units with their l1-norm, from the trained network on; returns their sizes."""
        scaled = ScaledRows(network, units)
        self.network.tune(scaled, self.seed, steps, optimizer=ProximalDescent(scaled, lr=0.01, gamma=GAMMA))
        sizes = [factor.detach().abs() for factor in scaled.factors]
        scaled.merged()
        return sizes

    def _spr(self, network: nn.Module, units: Sequence[Units], steps: int) -> list[Tensor]:
        """Trains with the penalty, from the trained network on; returns the sizes of the units' weights."""

        def loss(y: Tensor, labels: Tensor) -> Tensor:
            penalty = perspective_penalty(rows_with_bias(network, units), ALPHA, LARGEST)
            return cross_entropy(y, labels) + STRENGTH * penalty

        self.network.tune(network, self.seed, steps, loss=loss)
        return [weights.norm(dim=1) for weights in rows_with_bias(network, units)]

    def problems(self, share: float = 1.0) -> Callable[[float], list[RowProblem]]:
        """Returns a function that builds P(kappa) of some rows a layer, in units in which its rows fit at .99."""
        units = own_units(self.network.trained(self.seed), list(self._recorded()), KAPPA)
        return partial(self._problems, units, share)

    def timed(self, share: float) -> Callable[[float], Any]:
        problems = self.problems(share)

        def fit(kappa: float) -> None:
            for problem in problems(kappa):
                RowFit(kappa=kappa, bound="row").solve_problem(problem)

        return fit

    def _made(self, method: str, sparsity: float, path: tuple[float, ...]) -> Fitted:
        network = self.network.trained(self.seed)
        if method.startswith("dense"):
            return Fitted(network, 0.0)
        if method.startswith("magnitude"):
            layerwise, sizes = method.endswith("layerwise"), self.network.sizes(self.seed)
            names = self.network.layers(network)
            return Fitted(*prune_shared(network, names, sparsity, layerwise=layerwise, sizes=sizes))
        model, report = self._fits(path, method != "state-driven-recorded")[path.index(sparsity)]
        return Fitted(model, report.sparsity, report if method == "state-driven" else None)

    @cached
    def _fits(self, path: tuple[float, ...], sequential: bool) -> list[tuple[nn.Module, SharedReport]]:
        """Fits the network at growing sparsity, under the cap where there are units for one."""
        network = self.network.trained(self.seed)
        units = self.network.units(network, KAPPA)
        fits = fit_shared_path(
            network, self._batches(self.samples), path, layers=self.network.layers(network), units=units,
            kappa=KAPPA if units else float("inf"), sampler=self._sampler(POSITIONS * self.samples),
            sequential=sequential,
        )  # fmt: skip
        return list(fits)

    @cached
    def _recorded(self) -> dict[str, RowData]:
        network = self.network.trained(self.seed)
        known = shared_layers(network)
        layers = {name: known[name] for name in self.network.layers(network)}
        return self._sampler(FEWER * self.samples).run(network, layers, self._batches(self.samples))

    def _problems(self, units: Mapping[str, RowUnits], share: float, kappa: float) -> list[RowProblem]:
        problems = []
        for name, data in self._recorded().items():
            count = max(2, round(share * len(data.targets)))
            M = torch.cat(data.parts, dim=1)[:count].to(WIDE) / 2.0 ** units[name].shifts[0]
            z = data.targets[:count, :FEW_ROWS].to(WIDE)
            problems.append(row_problem(Design.of(M - M.mean(0)), z - z.mean(0), kappa=kappa, capped=M.shape[1]))
        return problems

    def _sampler(self, samples: int) -> PositionSampler:
        return PositionSampler(samples=samples, seed=self.seed, valid=self.network.valid)

    def _batches(self, count: int) -> list[Tensor]:
        return list(self.network.draw(self.seed, count).split(64))


def prune_shared(
    network: nn.Module,
    names: Sequence[str],
    sparsity: float,
    *,
    layerwise: bool = False,
    sizes: Mapping[str, Tensor] | None = None,
) -> tuple[nn.Module, float]:
    """Sets the smallest weights of some layers to zero, in a copy; returns it with the share of zeros.

    Args:
        network: with shared rows.
        names: of the layers.
        sparsity: the share of weights to remove.
        layerwise: whether this share is taken from every layer, or from all of them together.
        sizes: what is compared instead of the weights, by layer.

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
        remaining = torch.zeros(len(compared), dtype=torch.bool)
        remaining[compared.topk(count).indices] = True
        for name, mask in zip(group, remaining.split([own[name].numel() for name in group]), strict=True):
            layer = known[name]
            assert layer.bias is not None
            set_rows(layer, before[name] * mask.view_as(before[name]), layer.bias.detach().clone())
    left = sum(int((row_weights(known[name]) != 0).sum()) for name in names)
    return twin, 1 - left / sum(int((weights != 0).sum()) for weights in before.values())


def _entries(network: nn.Module, names: Sequence[str]) -> int:
    """Counts the weights of some layers that are not zero."""
    known = shared_layers(network)
    return sum(int((row_weights(known[name]) != 0).sum()) for name in names)


def own_units(network: nn.Module, names: Sequence[str], kappa: float) -> dict[str, RowUnits]:
    """Returns units, powers of two for each layer, in which its own rows have an l1-norm below kappa."""
    known, units = shared_layers(network), {}
    for name in names:
        largest = row_weights(known[name]).double().abs().sum(1).max()
        shift = float(torch.floor(torch.log2(kappa / largest * (1 - 1e-9))))
        count = len(widths(known[name]))
        units[name] = RowUnits((shift,) * count, (True,) * count)
    return units
