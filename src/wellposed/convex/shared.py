"""fit_shared: state matching for layers whose rows are shared by positions or words (003 chapter 3).

`FilterNetwork` is a network whose rows are shared by all positions of an image: convolutions, sums of them and
ReLU. `read_by_rows`, `given_by_rows` and `row_weights` say what a row reads and gives at a position, and its
weights. `PositionSampler` collects that while a network runs, at some positions of some samples.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, unfold

from wellposed.conditions.rescaling import rescaling
from wellposed.conditions.rounding import double, upward
from wellposed.convert import to_implicit
from wellposed.convert.rules.convolution import convolved
from wellposed.convert.signal import Signal
from wellposed.convex.matching import Candidates, restricted, surviving_entries
from wellposed.convex.problem import WIDE, Bound, Design, RowProblem, row_problem
from wellposed.convex.report import LayerFit, SharedReport
from wellposed.convex.rows import RowFit
from wellposed.convex.solvers.automatic import Automatic
from wellposed.convex.solvers.base import RowSolution, RowSolver
from wellposed.errors import IllPosedError, InputError, unknown_name


class Filters(nn.Module):
    """One layer: a sum of convolutions, one of each input, and a bias.

    In the implicit form of a residual network a state ``z = W * x + shortcut(x')`` reads two layers, and so does
    this one. A row of A is the filter of its channel at its position.

    Args:
        convolutions: one an input, with equal numbers of output channels and without biases.
        bias: of the channels.

    Example:
        >>> first, second = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Conv2d(2, 4, 1, bias=False)
        >>> layer = Filters([first, second], torch.zeros(4))
        >>> layer(torch.zeros(5, 3, 8, 8), torch.zeros(5, 2, 8, 8)).shape
        torch.Size([5, 4, 8, 8])
    """

    def __init__(self, convolutions: Sequence[nn.Conv2d], bias: Tensor) -> None:  # (C,)
        super().__init__()
        if not convolutions or any(part.bias is not None for part in convolutions):
            raise InputError("a layer of filters needs convolutions without biases; it has one of its own")
        if {part.out_channels for part in convolutions} != {len(bias)}:
            shapes = ", ".join(str(part.out_channels) for part in convolutions)
            raise InputError(f"all convolutions need {len(bias)} output channels, as the bias; received {shapes}")
        self.convolutions = nn.ModuleList(convolutions)
        self.bias = nn.Parameter(bias.detach().clone())

    def forward(self, *inputs: Tensor) -> Tensor:  # (B, C_i, H, W) each -> (B, C, H', W')
        """Computes the pre-activations."""
        terms = [convolution(x) for convolution, x in zip(self.convolutions, inputs, strict=True)]
        z: Tensor = sum(terms[1:], terms[0]) + self.bias[:, None, None]
        return z


@to_implicit.register(Filters)
def _converted(module: Filters, *signals: Signal) -> Signal:
    total: Signal | None = None
    for part, signal in zip(module.convolutions, signals, strict=True):
        assert isinstance(part, nn.Conv2d)
        convolution = convolved(signal, part.weight, None, part.stride, part.padding, part.dilation, part.groups)
        total = convolution if total is None else total.plus(convolution)
    assert total is not None
    return total.shifted(module.bias.detach()[:, None, None].expand(total.shape[1:]))


class FilterNetwork(nn.Module):
    """Layers of filters with ReLU, each reading states before it, and a readout of the last one.

    Args:
        layers: in the order of evaluation.
        sources: of each layer, one an input: 0 is the network's input, k the state of the k-th layer.
        readout: of the last state.

    Example:
        >>> first = Filters([nn.Conv2d(1, 2, 3, padding=1, bias=False)], torch.zeros(2))
        >>> second = Filters([nn.Conv2d(2, 2, 1, bias=False), nn.Conv2d(1, 2, 1, bias=False)], torch.zeros(2))
        >>> network = FilterNetwork([first, second], [(0,), (1, 0)], nn.Flatten())
        >>> network(torch.zeros(3, 1, 4, 4)).shape
        torch.Size([3, 32])
    """

    def __init__(self, layers: Sequence[Filters], sources: Sequence[Sequence[int]], readout: nn.Module) -> None:
        super().__init__()
        for k, (layer, read) in enumerate(zip(layers, sources, strict=True), start=1):
            if len(read) != len(layer.convolutions) or not all(0 <= source < k for source in read):
                raise InputError(
                    f"layer {k} needs a source from 0 to {k - 1} for every input of {len(layer.convolutions)}; "
                    f"received {tuple(read)}"
                )
        self.layers = nn.ModuleList(layers)
        self.sources = tuple(tuple(read) for read in sources)
        self.readout = readout

    def forward(self, u: Tensor) -> Tensor:  # (B, C, H, W)
        """Evaluates layer after layer."""
        states = [u]
        for layer, read in zip(self.layers, self.sources, strict=True):
            states.append(torch.relu(layer(*(states[source] for source in read))))
        y: Tensor = self.readout(states[-1])
        return y

    def norms(self) -> Tensor:  # (L, L) float64
        """Bounds ``|A_kj|_inf`` of every pair of layers: the largest l1-norm of a filter."""
        norms = torch.zeros(len(self.layers), len(self.layers), dtype=torch.float64)
        for k, (layer, read) in enumerate(zip(self.layers, self.sources, strict=True)):
            for part, source in zip(_parts(layer), read, strict=True):
                if source:
                    norms[k, source - 1] += part.weight.detach().double().abs().sum((1, 2, 3)).amax()
        return norms

    def exponents(self, kappa: float) -> tuple[float, ...]:
        """Returns units 2^e of the layers in which every row of A has an l1-norm below kappa.

        They exist for every kappa > 0, since the network has no loop, and are whole numbers, so that the states in
        these units have the same bits (003 section 2.5).
        """
        return tuple(float(e) for e in rescaling(self.norms(), kappa).log2)


def _parts(layer: nn.Module) -> list[nn.Conv2d]:
    assert isinstance(layer, Filters)
    return [part for part in layer.convolutions if isinstance(part, nn.Conv2d)]


SharedLayer = nn.Linear | nn.Conv2d | Filters


def shared_layers(network: nn.Module) -> dict[str, SharedLayer]:
    """Lists the layers of a network with shared rows: linear ones, convolutions and filters.

    Example:
        >>> list(shared_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))))
        ['0', '2']
    """
    inside = {id(part) for layer in network.modules() if isinstance(layer, Filters) for part in layer.convolutions}
    return {
        name: part
        for name, part in network.named_modules()
        if isinstance(part, nn.Linear | nn.Conv2d | Filters) and id(part) not in inside
    }


def positions(layer: SharedLayer, outputs: Tensor) -> tuple[int, int]:
    """Returns the number of samples, and of positions a sample at which the rows of a layer apply.

    Example:
        >>> positions(nn.Conv2d(2, 5, 3), torch.zeros(4, 5, 6, 6))
        (4, 36)
    """
    rows = layer.out_features if isinstance(layer, nn.Linear) else outputs.shape[1]
    return len(outputs), outputs[0].numel() // rows


def read_by_rows(layer: SharedLayer, inputs: tuple[Tensor, ...], chosen: Tensor) -> tuple[Tensor, ...]:
    """Gathers what the rows of a layer read at given positions, ``(m, d_i)`` for each input.

    Args:
        layer: which one.
        inputs: of the layer.
        chosen: k P + i is position i of sample k, where there are P positions.

    Example:
        >>> x = torch.arange(16.0).reshape(1, 1, 4, 4)
        >>> read_by_rows(nn.Conv2d(1, 5, 2), (x,), torch.tensor([1]))[0]
        tensor([[1., 2., 5., 6.]])
    """
    if isinstance(layer, nn.Linear):
        return (inputs[0].reshape(-1, layer.in_features)[chosen],)
    read = []
    for part, x in zip(convolutions(layer), inputs, strict=True):
        if isinstance(part.padding, str):
            raise InputError(f"a convolution to be fitted has its padding in numbers; received {part.padding!r}")
        patches = unfold(x, part.kernel_size, part.dilation, part.padding, part.stride)
        count = patches.shape[2]
        read.append(patches[chosen // count, :, chosen % count])
    return tuple(read)


def given_by_rows(layer: SharedLayer, outputs: Tensor, chosen: Tensor) -> Tensor:  # (m, r)
    """Gathers what the rows of a layer return at the same positions."""
    if isinstance(layer, nn.Linear):
        return outputs.reshape(-1, layer.out_features)[chosen]
    flat = outputs.flatten(2)
    return flat[chosen // flat.shape[2], :, chosen % flat.shape[2]]


def row_weights(layer: SharedLayer) -> Tensor:  # (r, d)
    """Returns the weights of every row, in the order of the columns of `read_by_rows`."""
    if isinstance(layer, nn.Linear):
        return layer.weight.detach().clone()
    return torch.cat([part.weight.detach().flatten(1) for part in convolutions(layer)], dim=1)


def widths(layer: SharedLayer) -> tuple[int, ...]:
    """Says how many columns each input has.

    Example:
        >>> widths(nn.Conv2d(2, 5, 3))
        (18,)
    """
    if isinstance(layer, nn.Linear):
        return (layer.in_features,)
    return tuple(part.weight[0].numel() for part in convolutions(layer))


@torch.no_grad()
def set_rows(layer: SharedLayer, weights: Tensor, bias: Tensor) -> None:  # (r, d), (r,)
    """Gives a layer other weights; one without a bias gets one."""
    if isinstance(layer, nn.Linear):
        layer.weight.copy_(weights)
    else:
        pieces = weights.split(list(widths(layer)), dim=1)
        for part, own in zip(convolutions(layer), pieces, strict=True):
            part.weight.copy_(own.reshape(part.weight.shape))
    if layer.bias is None:
        layer.bias = nn.Parameter(bias.to(weights))
    else:
        layer.bias.copy_(bias)


def convolutions(layer: nn.Conv2d | Filters) -> list[nn.Conv2d]:
    """Returns the convolutions of a layer, one an input."""
    candidates = [layer] if isinstance(layer, nn.Conv2d) else list(layer.convolutions)
    plain = [part for part in candidates if isinstance(part, nn.Conv2d)]
    for part in plain:
        if part.groups != 1 or part.padding_mode != "zeros":
            raise InputError(
                f"a convolution to be fitted has one group and pads with zeros; received groups={part.groups}, "
                f"padding_mode={part.padding_mode!r}"
            )
    return plain


Valid = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class RowData:
    """Samples of the rows of one layer.

    Args:
        parts: what they read, one part an input, ``(m, d_i)``.
        targets: what they give, ``(m, r)``.
    """

    parts: tuple[Tensor, ...]
    targets: Tensor


class _EnoughError(Exception):
    """Ends a forward pass once the last wanted layer has run."""


@dataclass(frozen=True, kw_only=True)
class PositionSampler:
    """Chooses positions at random, the same ones in every network that is run over the same batches.

    Args:
        samples: positions of a layer, over all batches together.
        seed: of the choice.
        valid: marks the positions ``(B, P)`` of a batch that count, e.g. those that are not padding.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
        >>> data = PositionSampler(samples=10).run(network, {"0": network[0]}, [torch.zeros(4, 1, 5, 5)])
        >>> data["0"].parts[0].shape, data["0"].targets.shape
        (torch.Size([10, 9]), torch.Size([10, 2]))
    """

    samples: int = 16384
    seed: int = 0
    valid: Valid | None = None

    def run(
        self, network: nn.Module, layers: Mapping[str, SharedLayer], batches: Sequence[Tensor]
    ) -> dict[str, RowData]:
        """Runs a network until the last of some layers has been called; they come in the order of their calls."""
        pieces: dict[str, list[RowData]] = {}
        quota = -(-self.samples // max(1, len(batches)))
        with ExitStack() as stack, torch.no_grad():
            log = _Log(pieces, len(layers))
            for number, (name, layer) in enumerate(layers.items()):
                # Seeded by its name, a layer gets the same positions alone and among others.
                seed = sum(ord(letter) * 31**k for k, letter in enumerate(name)) % 1_000_003 if name else number
                hook = self._hook(log, name, seed, quota)
                stack.callback(layer.register_forward_hook(hook).remove)
            for index, u in enumerate(batches):
                log.begin(index, None if self.valid is None else self.valid(u))
                try:
                    network(u)
                except _EnoughError:
                    continue
        missing = [name for name in layers if name not in pieces]
        if missing:
            raise InputError(f"the network never calls {', '.join(missing)}; leave it out of the layers to fit")
        return {name: _joined(data) for name, data in pieces.items()}

    def _hook(self, log: "_Log", name: str, layer_seed: int, quota: int) -> Callable[..., None]:
        def hook(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + layer_seed) * 1009 + log.batch)
            chosen = _sampled_positions(positions(layer, output), log.valid, generator, quota)
            log.add(name, RowData(read_by_rows(layer, inputs, chosen), given_by_rows(layer, output, chosen)))

        return hook


class _Log:
    """Keeps what hooks see, and ends a run when every layer has been seen."""

    def __init__(self, pieces: dict[str, list[RowData]], layers: int) -> None:
        self.pieces, self.layers, self.batch = pieces, layers, 0
        self.valid: Tensor | None = None
        self.seen: set[str] = set()

    def begin(self, batch: int, valid: Tensor | None) -> None:
        self.batch, self.valid, self.seen = batch, valid, set()

    def add(self, name: str, data: RowData) -> None:
        if name in self.seen:
            raise InputError(f"{name} is called twice in one pass; give every call a layer of its own")
        self.pieces.setdefault(name, []).append(data)
        self.seen.add(name)
        if len(self.seen) == self.layers:
            raise _EnoughError


def _sampled_positions(
    size: tuple[int, int], valid: Tensor | None, generator: torch.Generator, quota: int
) -> Tensor:
    count = size[0] * size[1]
    if valid is None:
        return torch.randperm(count, generator=generator)[:quota]
    if valid.numel() != count:
        raise InputError(f"valid must mark {size[0]} x {size[1]} positions; received {tuple(valid.shape)}")
    marked = torch.nonzero(valid.flatten())[:, 0]
    return marked[torch.randperm(len(marked), generator=generator)[:quota]]


def _joined(pieces: list[RowData]) -> RowData:
    inputs = zip(*(piece.parts for piece in pieces), strict=True)
    return RowData(tuple(torch.cat(part) for part in inputs), torch.cat([piece.targets for piece in pieces]))


@dataclass(frozen=True)
class RowUnits:
    """Units of a layer and of what it reads.

    Args:
        shifts: e - e_i of every input, where the layer is in units 2^e and its input in units 2^e_i; a weight w is
            ``2^(e - e_i) w`` in these units.
        states: whether an input is a state, which counts in the row of A; else it counts in that of B. States
            come first.
    """

    shifts: tuple[float, ...]
    states: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.shifts) != len(self.states) or list(self.states) != sorted(self.states, reverse=True):
            raise InputError(f"every input needs a shift, and states come first; received {self}")


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The options of `fit_shared`."""

    kappa: float = math.inf
    bound: Bound = "state"
    support: str = "layered"
    sequential: bool = True
    sampler: PositionSampler = field(default_factory=PositionSampler)
    solver: RowSolver | str = "automatic"
    layerwise: bool = False
    progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        if self.support not in ("layered", "network"):
            raise unknown_name("support", self.support, ("layered", "network"))

    def path(
        self,
        network: nn.Module,
        batches: Sequence[Tensor],
        targets: Sequence[float | None],
        layers: Sequence[str] | None,
        units: Mapping[str, RowUnits] | None,
    ) -> Iterator[tuple[nn.Module, SharedReport]]:
        given = copy.deepcopy(network).eval()
        chosen = _named_layers(given, layers)
        recorded = self.sampler.run(given, chosen, batches)
        rows = [_Rows(name, chosen[name], _units_of(chosen[name], units, name), self) for name in recorded]
        masks = [row.support() for row in rows]
        candidates = [] if targets[0] is None else [row.candidates(recorded[row.name]) for row in rows]
        if self.sequential:  # what layers read is gathered again, from the fitted ones
            recorded = {name: replace(data, parts=()) for name, data in recorded.items()}
        for target in targets:
            if target is not None:
                masks = self._pruned(rows, candidates, masks, target)
            twin = copy.deepcopy(given)
            own = shared_layers(twin)
            fits = []
            for row, mask in zip(rows, masks, strict=True):
                data, fresh = recorded[row.name], replace(row, layer=own[row.name])
                if self.sequential:
                    inputs = self.sampler.run(twin, {row.name: fresh.layer}, batches)[row.name].parts
                    data = replace(data, parts=inputs)
                fits.append(fresh.fitted(data, mask))
                if self.progress is not None:
                    self.progress(len(fits), len(rows))
            yield twin, SharedReport(tuple(fits), self.kappa, self.bound)

    def _pruned(
        self, rows: "Sequence[_Rows]", candidates: Sequence[Candidates], masks: Sequence[Tensor], target: float
    ) -> list[Tensor]:
        """Chooses among the entries of all layers, on the recorded values."""
        goals = [(1 - target) * row.own for row in rows]
        if self.layerwise:
            groups = zip(candidates, masks, goals, strict=True)
            return [part for one, mask, goal in groups for part in _survivors([one], [mask], goal)]
        return _survivors(candidates, masks, sum(goals))


def fit_shared(
    network: nn.Module,
    batches: Sequence[Tensor],
    *,
    layers: Sequence[str] | None = None,
    units: Mapping[str, RowUnits] | None = None,
    target_sparsity: float | None = None,
    **options: Any,
) -> tuple[nn.Module, SharedReport]:
    """Fits layers whose rows are shared by all positions (convolutions) or words (linear layers), row by row.

    A network of images has too many states for rows of their own: ResNet-20 has 188 thousand. The rows of a
    channel are the same filter everywhere, so one convex problem a channel is left,

        minimise  1/2 |Mw + b - z|^2  subject to  |w|_1 <= kappa  and w = 0 outside its support,

    with one row of M for each sample and position: 003 eq. (3.4) with equal rows. M is what the layers fitted so
    far give, z is what the network gives; whatever lies between the layers (attention, normalisation) stays.

    Args:
        network: it is copied, and run in evaluation mode.
        batches: inputs of the network, without their targets.
        layers: names of the layers to fit; all linear layers, convolutions and `Filters` by default.
        units: of the layers, where a cap is wanted.
        kappa: cap on the l1-norm of a row, in the given units; infinite for none.
        bound: "state" caps the part of a row that reads states, "row" all of it.
        target_sparsity: fraction of the network's own non-zero weights that go; None keeps all columns.
        support: "layered" lets a row read everything that its layer reads, "network" only what its own weights
            read.
        sequential: fits a layer on what the fitted layers before it give, not on the recorded values.
        sampler: which samples and positions are used.
        solver: of rows with all columns.
        layerwise: whether every layer loses the same fraction, or the entries that cost least in all of them.
        progress: called with the number of layers done and their total.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
        >>> fitted, report = fit_shared(network, [torch.randn(8, 1, 9, 9)], target_sparsity=0.5)
        >>> round(report.sparsity, 2), bool(report.relative_gap.max() < 1e-9)
        (0.5, True)
    """
    return next(fit_shared_path(network, batches, (target_sparsity,), layers=layers, units=units, **options))


def fit_shared_path(
    network: nn.Module,
    batches: Sequence[Tensor],
    targets: Sequence[float | None],
    *,
    layers: Sequence[str] | None = None,
    units: Mapping[str, RowUnits] | None = None,
    **options: Any,
) -> Iterator[tuple[nn.Module, SharedReport]]:
    """Fits copies of growing sparsity; the entries of each are among those of the one before.

    Args:
        targets: of the sparsity, growing.
        layers, units, options: as in `fit_shared`.
    """
    for target in targets:
        if target is not None and not 0 <= target < 1:
            raise InputError(f"target_sparsity must be from 0 to below 1; received {target!r}")
    return _Options(**options).path(network, batches, targets, layers, units)


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of one layer."""

    name: str
    layer: SharedLayer
    units: RowUnits
    options: _Options

    @property
    def scales(self) -> Tensor:  # (d,)
        """What a weight is multiplied by in the units of the fit."""
        powers = torch.tensor([2.0**shift for shift in self.units.shifts], dtype=WIDE)
        return powers.repeat_interleave(torch.tensor(widths(self.layer)))

    @property
    def capped(self) -> int:
        pairs = zip(widths(self.layer), self.units.states, strict=True)
        return sum(width for width, state in pairs if state or self.options.bound == "row")

    @property
    def own(self) -> int:
        """How many weights of the layer are not zero."""
        return int((row_weights(self.layer) != 0).sum())

    def support(self) -> Tensor:  # (r, d)
        weights = row_weights(self.layer)
        return weights != 0 if self.options.support == "network" else torch.ones_like(weights, dtype=torch.bool)

    def candidates(self, data: RowData) -> Candidates:
        problem = replace(self.problem(data)[0], design=None, targets=None)
        power, (count, width) = float(problem.power.sum()), problem.cross.shape
        return Candidates(torch.arange(count), torch.arange(width), problem, 1 / power if power else 0.0)

    def problem(self, data: RowData) -> tuple[RowProblem, Tensor, Tensor]:
        """Builds the problem, and returns the means of columns and targets that it leaves out."""
        M, z = torch.cat(data.parts, dim=1).to(WIDE) / self.scales, data.targets.to(WIDE)
        means = M.mean(0), z.mean(0)
        kappa = self.options.kappa * (1 - 8 * torch.finfo(data.targets.dtype).eps)
        return row_problem(Design.of(M - means[0]), z - means[1], kappa=kappa, capped=self.capped), *means

    def fitted(self, data: RowData, support: Tensor) -> LayerFit:
        """Solves all rows and gives them to the layer."""
        own = self.own
        problem, columns, targets = self.problem(data)
        solution = self._solved(problem, None if bool(support.all()) else support)
        bias = targets - solution.weights @ columns
        weights = (solution.weights / self.scales).to(data.targets)
        set_rows(self.layer, weights, bias.to(data.targets))
        assert problem.design is not None and problem.targets is not None
        residual = problem.design.residual(solution.weights, problem.targets)
        return LayerFit(
            name=self.name,
            own=own,
            shifts=self.units.shifts,
            gap=solution.gap,
            relative_gap=solution.relative_gap,
            norm=self._norm(),
            nonzeros=(row_weights(self.layer) != 0).sum(1),
            misfit=float((residual.sum() / problem.power.sum().clamp(min=1e-300)).sqrt()),
        )

    def _norm(self) -> Tensor:  # (r,)
        """Bounds what the cap counts, as returned, from above."""
        counted = (double(row_weights(self.layer)) * self.scales)[:, : self.capped]
        norm = upward(counted.abs().sum(1), max(1, self.capped))
        if not bool((norm <= self.options.kappa).all()):
            raise IllPosedError(
                f"a fitted row has the norm {float(norm.max())!r}, above {self.options.kappa!r}; fit in float64"
            )
        return norm

    def _solved(self, problem: RowProblem, support: Tensor | None) -> RowSolution:
        if support is None:
            return RowFit(kappa=problem.kappa, solver=self.options.solver).solve_problem(problem)
        problem = replace(problem, design=None, targets=None)  # the data are not read for every row
        weights, gap = torch.zeros_like(problem.cross), problem.power / 2
        steps = torch.zeros_like(gap, dtype=torch.int64)
        for i, row in enumerate(support):
            columns = torch.nonzero(row)[:, 0]
            if len(columns):
                solution = Automatic().solve(restricted(problem, i, columns))
                weights[i, columns], gap[i], steps[i] = solution.weights[0], solution.gap[0], solution.steps[0]
            else:
                gap[i] = 0.0
        return RowSolution(weights, gap, problem.scale, steps)


def _named_layers(network: nn.Module, names: Sequence[str] | None) -> dict[str, SharedLayer]:
    layers = shared_layers(network)
    unknown = [name for name in names or () if name not in layers]
    if unknown or not layers:
        raise InputError(
            f"no layer with shared rows is called {', '.join(unknown) or 'anything'}; there are "
            f"{', '.join(layers) or 'none'}"
        )
    return layers if names is None else {name: layers[name] for name in names}


def _units_of(layer: SharedLayer, units: Mapping[str, RowUnits] | None, name: str) -> RowUnits:
    count = len(widths(layer))
    given = (units or {}).get(name, RowUnits((0.0,) * count, (True,) * count))
    if len(given.shifts) != count:
        raise InputError(f"{name} has {count} inputs and needs as many shifts; received {given}")
    return given


def _survivors(candidates: Sequence[Candidates], masks: Sequence[Tensor], goal: float) -> list[Tensor]:
    """Chooses the entries of some layers that stay, `goal` in number; the layers lie below each other."""
    width, sizes = max(mask.shape[1] for mask in masks), [len(mask) for mask in masks]
    starts = [0, *accumulate(sizes)]
    groups = [replace(one, rows=one.rows + start) for one, start in zip(candidates, starts, strict=False)]
    whole = torch.cat([pad(mask, (0, width - mask.shape[1])) for mask in masks])
    support = surviving_entries(groups, whole, max(0.0, 1 - goal / max(1, int(whole.sum()))))
    return [part[:, : mask.shape[1]] for part, mask in zip(support.split(sizes), masks, strict=True)]
