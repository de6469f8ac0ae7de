"""fit_shared: state matching for layers whose rows are shared by positions or words (003 chapter 3)."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from wellposed.conditions.rounding import double, upward
from wellposed.convex.automatic import Automatic
from wellposed.convex.design import WIDE, Design
from wellposed.convex.gather import Gathering, RowData, Valid
from wellposed.convex.matching import restricted
from wellposed.convex.problem import Bound, RowProblem, row_problem
from wellposed.convex.prune import Candidates, surviving_entries
from wellposed.convex.rows import RowFit
from wellposed.convex.shared_layer import SharedLayer, row_weights, set_rows, shared_layers, widths
from wellposed.convex.shared_report import LayerFit, SharedReport
from wellposed.convex.solver import RowSolution, RowSolver
from wellposed.errors import IllPosedError, InputError


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
class SharedFit:
    """How shared rows are fitted; `fit_shared` takes the same options.

    Args:
        kappa: cap on the l1-norm of a row, in the given units; infinite for none.
        bound: "state" caps the part of a row that reads states, "row" all of it.
        target_sparsity: fraction of the network's own non-zero weights that go; None keeps all columns.
        support: "layered" lets a row read everything that its layer reads, "network" only what its own weights
            read.
        sequential: fits a layer on what the fitted layers before it give, not on the recorded values.
        gathering: which samples and positions are used.
        solver: of rows with all columns.
        layerwise: whether every layer loses the same fraction, or the entries that cost least in all of them.
    """

    kappa: float = math.inf
    bound: Bound = "state"
    target_sparsity: float | None = None
    support: str = "layered"
    sequential: bool = True
    gathering: Gathering = field(default_factory=Gathering)
    solver: RowSolver | str = "automatic"
    layerwise: bool = False

    def __post_init__(self) -> None:
        if self.support not in ("layered", "network"):
            raise InputError(f"support must be 'layered' or 'network'; received {self.support!r}")
        if self.target_sparsity is not None and not 0 <= self.target_sparsity < 1:
            raise InputError(f"target_sparsity must be from 0 to below 1; received {self.target_sparsity!r}")

    def fit(
        self,
        network: nn.Module,
        batches: Sequence[Tensor],
        layers: Sequence[str] | None = None,
        units: Mapping[str, RowUnits] | None = None,
    ) -> tuple[nn.Module, SharedReport]:
        """Fits the layers of a copy."""
        return next(self.path(network, batches, (self.target_sparsity,), layers, units))

    def path(
        self,
        network: nn.Module,
        batches: Sequence[Tensor],
        targets: Sequence[float | None],
        layers: Sequence[str] | None = None,
        units: Mapping[str, RowUnits] | None = None,
    ) -> Iterator[tuple[nn.Module, SharedReport]]:
        """Fits copies of growing sparsity; the entries of each are among those of the one before."""
        given = copy.deepcopy(network).eval()
        chosen = _named_layers(given, layers)
        recorded = self.gathering.run(given, chosen, batches)
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
            found = []
            for row, mask in zip(rows, masks, strict=True):
                data, fresh = recorded[row.name], replace(row, layer=own[row.name])
                if self.sequential:
                    parts = self.gathering.run(twin, {row.name: fresh.layer}, batches)[row.name].parts
                    data = replace(data, parts=parts)
                found.append(fresh.fitted(data, mask))
            yield twin, SharedReport(tuple(found), self.kappa, self.bound)

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
    kappa: float = math.inf,
    bound: Bound = "state",
    target_sparsity: float | None = None,
    support: str = "layered",
    samples: int = 16384,
    seed: int = 0,
    valid: Valid | None = None,
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
        kappa, bound, target_sparsity, support: see `SharedFit`.
        samples, seed, valid: see `Gathering`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
        >>> fitted, report = fit_shared(network, [torch.randn(8, 1, 9, 9)], target_sparsity=0.5)
        >>> round(report.sparsity, 2), bool(report.relative_gap.max() < 1e-9)
        (0.5, True)
    """
    gathering = Gathering(samples=samples, seed=seed, valid=valid)
    fit = SharedFit(
        kappa=kappa, bound=bound, target_sparsity=target_sparsity, support=support, gathering=gathering
    )
    return fit.fit(network, batches, layers, units)


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of one layer."""

    name: str
    layer: SharedLayer
    units: RowUnits
    options: SharedFit

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
            kept = torch.nonzero(row)[:, 0]
            if len(kept):
                found = Automatic().solve(restricted(problem, i, kept))
                weights[i, kept], gap[i], steps[i] = found.weights[0], found.gap[0], found.steps[0]
            else:
                gap[i] = 0.0
        return RowSolution(weights, gap, problem.scale, steps)


def _named_layers(network: nn.Module, names: Sequence[str] | None) -> dict[str, SharedLayer]:
    known = shared_layers(network)
    unknown = [name for name in names or () if name not in known]
    if unknown or not known:
        raise InputError(
            f"no layer with shared rows is called {', '.join(unknown) or 'anything'}; there are "
            f"{', '.join(known) or 'none'}"
        )
    return known if names is None else {name: known[name] for name in names}


def _units_of(layer: SharedLayer, units: Mapping[str, RowUnits] | None, name: str) -> RowUnits:
    count = len(widths(layer))
    found = (units or {}).get(name, RowUnits((0.0,) * count, (True,) * count))
    if len(found.shifts) != count:
        raise InputError(f"{name} has {count} inputs and needs as many shifts; received {found}")
    return found


def _survivors(candidates: Sequence[Candidates], masks: Sequence[Tensor], goal: float) -> list[Tensor]:
    """Chooses the entries of some layers that stay, `goal` in number; the layers lie below each other."""
    width, sizes = max(mask.shape[1] for mask in masks), [len(mask) for mask in masks]
    starts = [0, *accumulate(sizes)]
    groups = [replace(one, rows=one.rows + start) for one, start in zip(candidates, starts, strict=False)]
    whole = torch.cat([pad(mask, (0, width - mask.shape[1])) for mask in masks])
    kept = surviving_entries(groups, whole, max(0.0, 1 - goal / max(1, int(whole.sum()))))
    return [part[:, : mask.shape[1]] for part, mask in zip(kept.split(sizes), masks, strict=True)]
