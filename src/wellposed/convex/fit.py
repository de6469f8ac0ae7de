"""fit_states: from recorded states to a certified implicit model.

`checked` refuses recorded states that cannot be fitted, and `checks` says what a reader of a fit should know
about them. `fit_states` fits.
"""

import math
import os
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from wellposed.conditions.rounding import double, upward
from wellposed.convex.assemble import Matrices, Units, assembled, fitting_units, own_states, unchanged
from wellposed.convex.matching import (
    FitData,
    MatchedRows,
    Objective,
    Output,
    RowMatcher,
    fitted_output,
    own_output,
    reads_input,
)
from wellposed.convex.problem import Bound, RowProblem
from wellposed.convex.report import FitReport, judged, relative_errors
from wellposed.convex.rows import Progress, RowFit, is_feedforward, support_mask
from wellposed.convex.solvers.base import RowSolver
from wellposed.convex.solvers.conic import Penalty
from wellposed.convex.states import GIBIBYTE, States
from wellposed.errors import InputError
from wellposed.models.implicit import ImplicitModel

PIECE = 4096  # samples that are looked at together


def checked(
    states: States,
    kappa: float,
    rescale: bool | Literal["undo"],
    refit_output: bool | Literal["sparse"],
    target_sparsity: float | None,
) -> float:
    """Raises on input that cannot be fitted; returns the largest Lipschitz constant of the activations."""
    if not (isinstance(kappa, int | float) and 0 < kappa < 1):
        raise InputError(
            f"kappa must lie strictly between 0 and 1 (x = phi(x + b) may have no solution); received {kappa!r}"
        )
    if rescale not in (True, False, "undo"):
        raise InputError(f"rescale is True, False or 'undo'; received {rescale!r}")
    if refit_output not in (True, False, "sparse"):
        raise InputError(f"refit_output is True, False or 'sparse'; received {refit_output!r}")
    if target_sparsity is not None and not 0 <= target_sparsity < 1:
        raise InputError(f"target_sparsity is a fraction from 0 to below 1; received {target_sparsity!r}")
    check_data(states)
    return lipschitz_constant(states)


def check_data(states: States) -> None:
    """Raises if there is nothing to fit or if some of it is not a number."""
    if states.samples == 0 or states.X.shape[1] == 0:
        raise InputError(f"there are no states to fit: X is {tuple(states.X.shape)}; record some samples first")
    for name in ("U", "Z", "X", "Y"):
        part = getattr(states, name)
        if not part.is_floating_point():
            raise InputError(f"{name} is {part.dtype}; states must be floating-point numbers")
        bad = torch.nonzero(~torch.cat([piece.isfinite().all(1) for piece in part.split(PIECE)]))[:, 0]
        if len(bad):
            raise InputError(
                f"{name} has NaN or infinity in {len(bad)} of {states.samples} samples, the first is sample "
                f"{int(bad[0])}; drop them with states.subset(...) or repair the network"
            )
    same = all(bool((part[:1] == piece).all()) for part in (states.X, states.Z) for piece in part.split(PIECE))
    if states.samples > 1 and same:
        raise InputError(
            f"all {states.samples} samples have the same states, so no weight can be told from a bias; record "
            "samples that differ"
        )


def lipschitz_constant(states: States) -> float:
    """Returns the largest Lipschitz constant of the activations, or raises if there is none."""
    largest = 0.0
    for phi in states.activations:
        constant = phi.constants.get("inf", math.inf)
        if not math.isfinite(constant):
            raise InputError(
                f"the activation {phi.name!r} has no Lipschitz constant in the inf-norm, so no cap makes the "
                "model well-posed; use another activation"
            )
        largest = max(largest, constant)
    return largest


def checks(states: States, mask: Tensor, matching: RowMatcher) -> tuple[str, ...]:
    """Says what a reader should know: dead units, few samples, how layers were fitted."""
    notes = []
    dead = int(torch.stack([(piece == 0).all(0) for piece in states.X.split(PIECE)]).all(0).sum())
    if dead:
        notes.append(f"{dead} states are zero on all samples; their columns cannot be used")
    width = int(mask.sum(1).max()) + int(matching.bias)
    if states.samples < width:
        notes.append(
            f"{states.samples} samples for rows of up to {width} entries: many rows fit exactly, and the smallest "
            "was taken"
        )
    if matching.sequential:
        notes.append(
            "gaps and residuals refer to the states that the fitted layers give, not to the recorded ones"
        )
    if matching.debias and matching.objective.sparse:
        notes.append("gaps refer to the entries that the objective has chosen, fitted without it")
    if matching.objective.name == "group":
        notes.append("the gap of the joint problem is shared out over its rows")
    return tuple(notes)


class Details(TypedDict, total=False):
    """Options of `fit_states` that are seldom needed."""

    bias: bool | None
    feedthrough: bool | None
    output_bias: bool | None
    equality: bool
    mix: float
    debias: bool | None
    sequential: bool | None
    targets: Tensor | None
    backend: str
    limit: int
    folder: str | os.PathLike[str] | None
    progress: Progress | None


SEARCH = 14  # fits of a search over strengths
CLOSE = 0.002  # sparsity that is near enough
WEAKEST = 1e-6  # lower end of a search over strengths
MANY = 4096  # rows at a time on a GPU


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The options of `fit_states`."""

    kappa: float = 0.99
    bound: Bound = "state"
    objective: str | Penalty = "none"
    strength: float = 0.0
    target_sparsity: float | None = None
    support: str | Tensor = "layered"
    rescale: bool | Literal["undo"] = True
    refit_output: bool | Literal["sparse"] = True
    bias: bool | None = None
    feedthrough: bool | None = None
    output_bias: bool | None = None
    equality: bool = False
    mix: float = 0.5
    debias: bool | None = None
    sequential: bool | None = None
    targets: Tensor | None = None
    solver: RowSolver | str | None = None
    jobs: int = 1
    backend: str = "threading"
    limit: int = GIBIBYTE
    device: torch.device | str | None = None
    folder: str | os.PathLike[str] | None = None
    progress: Progress | None = None

    def fit(self, states: States) -> tuple[ImplicitModel, FitReport]:
        """Fits a model."""
        cap = self.kappa / max(1.0, self._checked(states))
        mask = support_mask(states, self.support).to(states.X.device)
        units = fitting_units(states, cap, mask.cpu()) if self.rescale else unchanged(states)
        matching = self._matching(states, mask, cap)
        target_device = states.X.device if self.device is None else torch.device(self.device)
        work = _Work.of(self, states, mask, units, cap, target_device)
        if self.target_sparsity is None:
            return work.finished(matching, work.matched(matching))
        if matching.objective.name == "none":
            return work.finished(matching, work.pruned(matching, self.target_sparsity))
        return work.finished(*work.searched(matching, self.target_sparsity))

    def _checked(self, states: States) -> float:
        gamma = checked(states, self.kappa, self.rescale, self.refit_output, self.target_sparsity)
        goal = self._goal()
        if self.target_sparsity is not None and goal.name != "none" and not goal.sparse:
            raise InputError(
                "target_sparsity needs a sparse objective (lasso, elastic-net, group) or none; "
                f"received {self.objective!r}"
            )
        if self.targets is not None and len(self.targets) != states.samples:
            raise InputError(f"{states.samples} samples need as many targets; received {len(self.targets)}")
        return gamma

    def _goal(self) -> Objective:
        return Objective.of(self.objective, self.strength, self.mix, self.equality)

    def _matching(self, states: States, mask: Tensor, cap: float) -> RowMatcher:
        chain, own = is_feedforward(mask, states.blocks), self.target_sparsity is not None
        if self.sequential and not chain:
            raise InputError("sequential=True needs a support without loops, such as 'triangular'")
        rows = RowFit(
            kappa=cap * (1 - 8 * torch.finfo(states.X.dtype).eps),
            bound=self.bound,
            solver="automatic" if self.solver is None else self.solver,
            jobs=self.jobs,
            backend=self.backend,
            chunk=RowFit.chunk if self.device is None or torch.device(self.device).type == "cpu" else MANY,
            folder=self.folder,
            progress=self.progress,
        )
        unbiased = states.form is not None and states.form.bias is None
        return RowMatcher(
            fit=rows,
            objective=self._goal(),
            bias=not unbiased if self.bias is None else self.bias,
            debias=own if self.debias is None else self.debias,
            sequential=(own and chain) if self.sequential is None else self.sequential,
            limit=self.limit,
        )


def fit_states(
    states: States, *, kappa: float = 0.99, bound: Bound = "state", objective: str | Penalty = "none",
    strength: float = 0.0, target_sparsity: float | None = None, support: str | Tensor = "layered",
    rescale: bool | Literal["undo"] = True, refit_output: bool | Literal["sparse"] = True,
    solver: RowSolver | str | None = None, jobs: int = 1, device: torch.device | str | None = None,
    **details: Unpack[Details],
) -> tuple[ImplicitModel, FitReport]:  # fmt: skip
    """Fits an implicit model to the states of a network, every row with a certificate (003 chapter 3).

    The rows of (A, B) solve 003 eq. (3.4) with a cap on the row of A, which makes the model well-posed; C, D and
    the output's bias are then fitted on the states that the model computes itself. States are read in pieces: with
    those of the recording in mapped files, memory is that of `RowFit` and does not grow with the samples.

    Args:
        states: from `record_states`.
        kappa: the contraction factor to stay within, between 0 and 1. The rows of A stay within kappa, or within
            kappa over the Lipschitz constant of phi if that is above one.
        bound: "state" caps the row of A, "row" all of (a, b), as P(kappa) of 003 section 3.3 is printed.
        objective: "none", "lasso", "ridge", "elastic-net", "group" (a layer uses a feature in all rows or in
            none), "robust" (003 eq. 4.9), or a function of a and b that returns a convex CVXPY expression.
        strength: its weight, without units; see `Objective`.
        target_sparsity: fraction of zeros in (A, B), among the entries of the support. With objective "none" the
            entries whose loss costs least misfit go, in rounds (see `surviving_entries`); with a sparse objective
            its strength is searched.
        support: which entries may be used; see `support_mask`.
        rescale: fits in units in which the network's own rows satisfy the cap, and returns the model in these
            units; "undo" returns it in those of the recording, where a weighted norm of A is below one; False fits
            in the units of the recording.
        refit_output: True fits C, D and c on the model's own equilibria, "sparse" with a lasso of the same
            strength, False takes the network's.
        bias: whether rows have a bias; by default if the network has one, or is not known.
        feedthrough, output_bias: whether there are D and c; by default if the network has them. c takes one more
            state, whose value is constant.
        equality: asks for the states exactly (003 eq. 3.2), by CVXPY.
        mix: share of the lasso in "elastic-net".
        debias: fits the chosen entries once more without the penalty; by default with `target_sparsity`.
        sequential: fits a layer on the states that the fitted layers before it give; for supports without loops;
            by default with `target_sparsity`.
        targets: of the samples, for the score in the report: classes as whole numbers, or real values.
        solver, jobs, backend, folder, progress: as in `RowFit`. "refined" proves a relative gap of 1e-9 from the
            data.
        limit: bytes above which states that the fit computes lie in a temporary file.
        device: where rows are solved; None is where the states are. On a GPU rows are solved 4096 at a time, by
            the projected gradient.

    Example:
        >>> from torch import nn
        >>> from wellposed.convex import record_states
        >>> layers = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2)
        >>> network, u = nn.Sequential(*layers).double(), torch.randn(60, 4, dtype=torch.float64)
        >>> model, report = fit_states(record_states(network, [u]), kappa=0.5)
        >>> torch.allclose(model(u), network(u), atol=1e-6), bool(report.norm.max() <= 0.5)
        (True, True)
    """
    return _Options(
        kappa=kappa, bound=bound, objective=objective, strength=strength, target_sparsity=target_sparsity,
        support=support, rescale=rescale, refit_output=refit_output, solver=solver, jobs=jobs, device=device,
        **details,
    ).fit(states)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Work:
    """The data of one fit and what is done with it."""

    options: _Options
    states: States
    mask: Tensor
    units: Units
    cap: float
    device: torch.device
    data: FitData
    cache: dict[int, RowProblem]

    @classmethod
    def of(
        cls, options: _Options, states: States, mask: Tensor, units: Units, cap: float, device: torch.device
    ) -> "_Work":
        phis = units.activations(states.activations)
        data = FitData(states.X, states.U, states.Z, states.blocks, phis, units.factors, device)
        return cls(options, states, mask, units, cap, device, data, {})

    def matched(self, matching: RowMatcher) -> MatchedRows:
        return matching.rows(self.data, self.mask.to(self.device), self.cache)

    def pruned(self, matching: RowMatcher, target: float) -> MatchedRows:
        """Fits the entries whose loss would cost most."""
        support = matching.survivors(self.data, self.mask.to(self.device), target)
        return matching.rows(self.data, support)

    def searched(self, given: RowMatcher, target: float) -> tuple[RowMatcher, MatchedRows]:
        """Halves an interval of log(strength) until the sparsity is near the target; problems are built once."""
        low, high = math.log(WEAKEST), 0.0
        best: tuple[float, RowMatcher, MatchedRows] | None = None
        for _ in range(SEARCH):
            objective = replace(given.objective, strength=math.exp((low + high) / 2))
            matching = replace(given, objective=objective)
            rows = self.matched(matching)
            zeros = 1 - int((rows.weights != 0).sum()) / max(1, int(self.mask.sum()))
            if best is None or abs(zeros - target) < best[0]:
                best = abs(zeros - target), matching, rows
            if best[0] < CLOSE:
                break
            low, high = (low, (low + high) / 2) if zeros > target else ((low + high) / 2, high)
        assert best is not None
        return best[1:]

    def finished(self, matching: RowMatcher, rows: MatchedRows) -> tuple[ImplicitModel, FitReport]:
        """Adds the output, builds the model and writes the report."""
        states, n = self.states, self.states.X.shape[1]
        matrices = Matrices(rows.weights[:, :n], rows.weights[:, n:], rows.bias if matching.bias else None,
                      self.data.activations, states.blocks, self.cap, states.X.dtype)  # fmt: skip
        X = own_states(matrices, states.U, self.options.limit)
        undo = self.units if self.options.rescale == "undo" else None
        model = assembled(matrices, self._output(matching, X), undo, states.activations)
        return model, self._report(model, matching, rows, matrices, X)

    def _output(self, matching: RowMatcher, X: Tensor) -> Output:
        options, form = self.options, self.states.form
        if not options.refit_output:
            return own_output(self.states, self.units.factors)
        sparse = Objective("lasso", matching.objective.strength) if options.refit_output == "sparse" else None
        unbiased = form is not None and form.output_bias is None
        constant = not unbiased if options.output_bias is None else options.output_bias
        through = reads_input(self.states) if options.feedthrough is None else options.feedthrough
        return fitted_output(self.states, X, feedthrough=through, bias=constant, sparse=sparse)

    def _report(
        self, model: ImplicitModel, matching: RowMatcher, rows: MatchedRows, matrices: Matrices, X: Tensor
    ) -> FitReport:
        states, sizes = self.states, self.states.blocks
        squares = self.data.targets.squares()
        power = torch.stack([part.sum() for part in squares.split(list(sizes))]).clamp(1e-300)
        residual = torch.stack([part.sum() for part in rows.residual.split(list(sizes))])
        A, B, _ = matrices.cast()
        return FitReport(
            blocks=sizes,
            activations=tuple(phi.name for phi in states.activations),
            kappa=self.cap,
            bound=matching.fit.bound,
            objective=matching.objective.name,
            strength=matching.objective.strength,
            exponents=self.units.exponents,
            units=self.units.source,
            gap=rows.gap.cpu(),
            relative_gap=rows.relative_gap.cpu(),
            norm=upward(double(A).abs().sum(1), len(A)).cpu(),
            nonzeros=((A != 0).sum(1) + (B != 0).sum(1)).cpu(),
            allowed=int(self.mask.sum()),
            certificate=model.certificate(),
            state_residual=(residual / power).sqrt().cpu(),
            state_error=relative_errors(X, states.X, sizes, self.units.factors),
            notes=checks(states, self.mask, matching),
            names=states.form.labels or () if states.form is not None and states.form.partition == sizes else (),
            **judged(model, states, self.options.targets),
        )
