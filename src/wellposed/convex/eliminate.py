"""eliminate_features: columns of (X, U) that no row needs, certified or by rank, and what is lost by them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from typing import Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from wellposed.convex.backward import removal_order
from wellposed.convex.columns import Columns
from wellposed.convex.feature_groups import FeatureGroups
from wellposed.convex.findings import check_data, lipschitz_constant
from wellposed.convex.fit import fit_states
from wellposed.convex.problem import Bound
from wellposed.convex.refit import reads_input
from wellposed.convex.report import FitReport
from wellposed.convex.rescale import fitting_units, unchanged
from wellposed.convex.states import States
from wellposed.convex.support import block_starts, is_feedforward, support_mask
from wellposed.errors import InputError, unknown_name
from wellposed.models.implicit import ImplicitModel

METHODS = ("certified", "ranked", "dual-literal")
ORDERS = ("misfit", "share", "random")
FRACTIONS = (0.5, 0.25, 0.1, 0.05)
Keep = int | float | Sequence[int | float]


@dataclass(frozen=True, eq=False)
class EliminationStep:
    """A model on some of the features.

    Args:
        kept: which columns of (X, U) rows may still use, ``(n + p,)``.
        removed: how many features are gone.
        fraction: the same, of all features that can go.
        score: of the model fitted on what is left; NaN if nothing scores it.
        model, report: that model; None with ``retrain=False``.
    """

    kept: Tensor
    removed: int
    fraction: float
    score: float = math.nan
    model: ImplicitModel | None = None
    report: FitReport | None = None


@dataclass(frozen=True, eq=False)
class EliminationPath:
    """What was removed, in order, with the score after every step (002 Figure 9).

    Args:
        method: how features were chosen.
        features: which columns of (X, U) any row may use, ``(n + p,)``.
        certified: those that are zero in every row that matters, proven; whatever the method.
        slack: margin of that proof, the larger the safer; negative without proof, ``(n + p,)``.
        steps: the first with all features.
    """

    method: str
    features: Tensor
    certified: Tensor
    slack: Tensor
    steps: tuple[EliminationStep, ...]

    def curve(self) -> list[tuple[float, float]]:
        """Returns the fraction that is removed and the score, step by step."""
        return [(step.fraction, step.score) for step in self.steps]

    def __str__(self) -> str:
        count = int(self.features.sum())
        title = f"{self.method}: {count} features, {int(self.certified.sum())} of them certified to be zero"
        table = Table(title=title, box=box.SIMPLE)
        for name in ("removed", "fraction", "score"):
            table.add_column(name, justify="right")
        for step in self.steps:
            table.add_row(str(step.removed), f"{100 * step.fraction:.1f} %", f"{step.score:.4f}")
        page = StringIO()
        Console(file=page, width=90).print(table)
        return page.getvalue().rstrip()


def eliminate_features(
    states: States,
    *,
    kappa: float,
    gamma: float = 0.0,
    method: Literal["certified", "ranked", "dual-literal"] = "certified",
    keep: Keep | None = None,
    order: Literal["misfit", "share", "random"] = "misfit",
    groups: Tensor | None = None,
    bound: Bound = "row",
    support: str | Tensor = "layered",
    rescale: bool = True,
    retrain: bool = True,
    ridge: float = 0.0,
    targets: Tensor | None = None,
    evaluate: Callable[[ImplicitModel], float] | None = None,
) -> EliminationPath:
    """Removes columns of (X, U) that rows do not need and fits a model on what is left (002 section 5).

    A column can go if its entry is zero in every row; a state goes with its row if the output does not read it.
    "certified" removes what Gap-Safe screening proves, which changes no row's solution. "ranked" goes on by a
    heuristic: those features go first whose loss raises the misfit of the rows least (`removal_order`).
    "dual-literal" is the rule of 002 section 5.1 on the multipliers of an interior-point method, down to two
    columns: it removes features that are needed, and is here for comparison.

    Args:
        states: from `record_states`.
        kappa, gamma: of the row problem, 002 eq. (2); gamma > 0 is its elastic form.
        keep: how many features (whole numbers) or which fraction of them to keep, step by step; groups are never
            cut, so a few more may stay.
        order: of "ranked", for comparison: "share" ranks by the largest share of a feature in any row of the
            problem with a cap, ties by the margin of the proof; "random" draws with seed 0.
        groups: a whole number for every column of (X, U): columns of the same number go together, those of -1
            stay, and counts and fractions are of the others; None: each alone.
        bound: "row" caps (a, b), so that inputs can go too; "state" caps a, and then only states can.
        support, rescale: as in `fit_states`.
        retrain: whether a model is fitted on what is left, by `fit_states` with its bound on the row of A.
        ridge: strength of a ridge on these fits; worthwhile where columns are about as many as samples.
        targets: of the samples, for a score; `evaluate` scores a model otherwise, on other samples for instance.

    Example:
        >>> from wellposed.activations import get_activation
        >>> u = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> z = 5 * u[:, :1]
        >>> relu = States(u, z, z.relu(), z.relu(), (1,), (get_activation("relu"),))
        >>> eliminate_features(relu, kappa=0.5, retrain=False, support="triangular").certified
        tensor([False, False,  True,  True])
    """
    _check(states, kappa, gamma, method, order)
    mask = support_mask(states, support)
    units = fitting_units(states, kappa, mask) if rescale else unchanged(states)
    work = Columns.of(states, kappa, gamma, bound, mask, units.factors)
    together = FeatureGroups.of(groups, work.features)
    retraining = _Retraining(kappa, rescale, retrain, ridge, targets, evaluate, together.removable)
    counts = _counts(keep, together.removable, method)
    ranked = _ranked(states, work, counts, order, together)
    return _path(states, work, method, ranked, retraining, together)


def _path(
    states: States,
    work: Columns,
    method: str,
    ranked: list[Tensor],
    retraining: "_Retraining",
    groups: FeatureGroups,
) -> EliminationPath:
    first = work.screened(work.features)
    steps = [work.features]
    if method == "certified":
        steps.append(work.features & ~groups.whole(first.certified))
    elif method == "dual-literal":
        steps.append(work.features & ~groups.whole(work.features & ~work.literal()))
    found = tuple(retraining.step(states, work, kept) for kept in [*steps, *ranked])
    return EliminationPath(method, work.features, first.certified, first.slack, found)


def _ranked(states: States, work: Columns, counts: list[int], order: str, groups: FeatureGroups) -> list[Tensor]:
    """Returns the features that are kept at each step."""
    kept, found = work.features, []
    if order == "share":
        for count in counts:
            kept = groups.without(kept, groups.ranked(work.rank(kept), kept), count)
            found.append(kept)
        return found
    if counts and order == "misfit":
        gone = removal_order(work, states.blocks, min(counts), groups)
    else:
        gone = groups.shuffled(torch.Generator().manual_seed(0))
    return [groups.without(kept, gone, count) for count in counts]


def _check(states: States, kappa: float, gamma: float, method: str, order: str) -> None:
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    if order not in ORDERS:
        raise unknown_name("order", order, ORDERS)
    if not 0 < kappa < 1:
        raise InputError(f"kappa must lie strictly between 0 and 1; received {kappa!r}")
    if not 0 <= gamma < math.inf:
        raise InputError(f"gamma must be a finite number that is not negative; received {gamma!r}")
    check_data(states)
    lipschitz_constant(states)


def _counts(keep: Keep | None, total: int, method: str) -> list[int]:
    """Turns numbers and fractions into numbers of features."""
    if keep is None:
        given: Sequence[int | float] = FRACTIONS if method == "ranked" else ()
    else:
        given = [keep] if isinstance(keep, int | float) else list(keep)
    if given and method != "ranked":
        raise InputError(f"keep chooses by rank; use method='ranked' with it, not {method!r}")
    for part in given:
        if isinstance(part, bool) or not (1 <= part <= total if isinstance(part, int) else 0 < part <= 1):
            raise InputError(f"keep takes whole numbers up to {total} or fractions up to 1.0; received {part!r}")
    counts = [part if isinstance(part, int) else max(1, round(part * total)) for part in given]
    if sorted(counts, reverse=True) != counts:
        raise InputError(f"keep must not grow from step to step; received {keep!r}")
    return counts


@dataclass(frozen=True)
class _Retraining:
    """How models on fewer features are fitted and scored."""

    kappa: float
    rescale: bool
    retrain: bool
    ridge: float
    targets: Tensor | None
    evaluate: Callable[[ImplicitModel], float] | None
    removable: int

    def step(self, states: States, work: Columns, kept: Tensor) -> EliminationStep:
        removed = int(work.features.sum()) - int(kept.sum())
        facts = kept, removed, removed / max(1, self.removable)
        if not self.retrain:
            return EliminationStep(*facts)
        smaller, mask = reduced(states, work.mask & kept, work.rows(kept))
        given = states.form is None or states.form.bias is not None
        model, report = fit_states(
            smaller,
            kappa=self.kappa,
            support=mask,
            rescale=self.rescale,
            bias=given,
            feedthrough=reads_input(states),
            output_bias=states.form is None or states.form.output_bias is not None,
            objective="ridge" if self.ridge else "none",
            strength=self.ridge,
            sequential=is_feedforward(mask, smaller.blocks),
            targets=self.targets,
        )
        score = self.evaluate(model) if self.evaluate is not None else report.after
        return EliminationStep(*facts, math.nan if score is None else score, model, report)


def reduced(states: States, mask: Tensor, rows: Tensor) -> tuple[States, Tensor]:
    """Drops states whose row does not matter; inputs stay, without a column in the mask where they went.

    Args:
        states: all of them.
        mask: the support that is left, ``(n, n + p)``.
        rows: the states to keep, ``(n,)``.
    """
    if bool(rows.all()):
        return states, mask
    n, starts = len(rows), block_starts(states.blocks)
    sizes = [int(rows[low:high].sum()) for low, high in pairwise(starts)]
    kept = [k for k, size in enumerate(sizes) if size]
    columns = torch.cat([rows, torch.ones(mask.shape[1] - n, dtype=torch.bool)])
    smaller = States(
        states.U,
        states.Z[:, rows],
        states.X[:, rows],
        states.Y,
        tuple(sizes[k] for k in kept),
        tuple(states.activations[k] for k in kept),
        None,
        states.input_shape,
    )
    return smaller, mask[rows][:, columns]
