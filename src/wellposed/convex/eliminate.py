"""eliminate_features: columns of (X, U) that no row needs, certified or by rank, and what is lost by them.

`FeatureProblem` looks at features across all rows: which columns of (X, U) are zero in every row that matters.
`FeatureGroups` are features that can only go together: all readings of one station, for example. `removal_order`
is backward elimination: features go one after the other, each time those whose loss raises the misfit least.
`eliminate_features` returns the `EliminationPath`.
"""

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

from wellposed.convex.assemble import fitting_units, unchanged
from wellposed.convex.fit import check_data, fit_states, lipschitz_constant
from wellposed.convex.matching import reads_input
from wellposed.convex.problem import WIDE, Bound, Design, RowProblem, common_support, row_problem
from wellposed.convex.report import FitReport
from wellposed.convex.rows import block_starts, is_feedforward, row_groups, support_mask
from wellposed.convex.solvers.automatic import Automatic
from wellposed.convex.solvers.conic import interior_multipliers
from wellposed.convex.solvers.homotopy import Reduction, certified_zeros, correlation_bounds
from wellposed.convex.states import States
from wellposed.errors import InputError, unknown_name
from wellposed.models.implicit import ImplicitModel

FEWEST = 2  # columns at which 002 halts


@dataclass(frozen=True, eq=False)
class Screened:
    """What screening says of every feature.

    Args:
        certified: zero in every row that matters, ``(n + p,)``.
        slack: the smallest margin over these rows, relative to |g|_inf; negative without proof, ``(n + p,)``.
        share: the largest |w_ij| |M_j| / |z_i| over these rows, ``(n + p,)``.
        zeros: entries that are proven to be zero, or that the support excludes, ``(n, n + p)``.
        weights: a solution, ``(n, n + p)``.
    """

    certified: Tensor
    slack: Tensor
    share: Tensor
    zeros: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class FeatureProblem:
    """The row problems of 002 eq. (2) for all states, and what the output reads.

    Args:
        X, U, Z: in the units of the fit, without their means where there is a bias.
        mask: the support, ``(n, n + p)``.
        read: columns that the output reads, ``(n + p,)``.
        whole: states that cannot go alone, since their phi acts on blocks, ``(n,)``.
        kappa, gamma, bound: of the row problem.
    """

    X: Tensor
    U: Tensor
    Z: Tensor
    mask: Tensor
    read: Tensor
    whole: Tensor
    kappa: float
    gamma: float
    bound: Bound

    @classmethod
    def of(
        cls, states: States, kappa: float, gamma: float, bound: Bound, mask: Tensor, factors: Tensor
    ) -> "FeatureProblem":
        """Prepares recorded states."""
        X, U, Z = (part.to(WIDE) for part in (states.X * factors, states.U, states.Z * factors))
        if states.form is None or states.form.bias is not None:
            X, U, Z = X - X.mean(0), U - U.mean(0), Z - Z.mean(0)
        read = torch.ones(mask.shape[1], dtype=torch.bool)
        read[X.shape[1] :] = False
        if states.form is not None:
            read = torch.cat([(part.to_dense() != 0).any(0) for part in (states.form.C, states.form.D)])
        pairs = zip(states.activations, states.blocks, strict=True)
        whole = torch.cat([torch.full((size,), not phi.componentwise) for phi, size in pairs])
        return cls(X, U, Z, mask, read, whole, kappa, gamma, bound)

    @property
    def features(self) -> Tensor:  # (n + p,) bool
        """Columns that some row may use."""
        return self.mask.any(0)

    def rows(self, features: Tensor, used: Tensor | None = None) -> Tensor:  # (n,) bool
        """Marks rows that matter: those of states that are read by the output or by a row that matters.

        Args:
            features: columns that are left, ``(n + p,)``.
            used: entries that may differ from zero, ``(n, n + p)``; the support if None.
        """
        n, used = self.X.shape[1], self.mask if used is None else used
        alive = self.read[:n] | self.whole
        while True:
            reached = alive | (used[alive].any(0) & features)[:n]
            if torch.equal(reached, alive):
                return alive
            alive = reached

    def solved(self, features: Tensor) -> list[tuple[Tensor, Tensor, RowProblem, Tensor]]:
        """Solves the rows that matter on some columns: row numbers, columns, problem and weights of each group."""
        rows, n = torch.nonzero(self.rows(features))[:, 0], self.X.shape[1]
        solutions = []
        for group in row_groups(self.mask[rows] & features, n) if len(rows) else []:
            if len(group.columns) == 0:
                continue
            states = int((group.columns < n).sum())
            design = Design.of(self.X, self.U).restricted(group.columns)
            problem = row_problem(
                design,
                self.Z[:, rows[group.rows]],
                kappa=self.kappa,
                capped=states if self.bound == "state" else len(group.columns),
                ridge=self.gamma,
                support=group.support,
            )
            solutions.append((rows[group.rows], group.columns, problem, Automatic().solve(problem).weights))
        return solutions

    def screened(self, features: Tensor) -> Screened:
        """Screens the columns that are left."""
        slack = torch.full(self.mask.shape, torch.inf, dtype=WIDE)
        share, weights = torch.zeros_like(slack), torch.zeros_like(slack)
        zeros = torch.ones_like(self.mask)
        for rows, columns, problem, fitted in self.solved(features):
            size = fitted.abs() * problem.gram.diagonal().clamp(min=0).sqrt()
            power = problem.power.sqrt()[:, None]
            entries = rows[:, None], columns
            share[entries] = torch.where(power > 0, size / power, 0.0)
            weights[entries] = fitted
            allowed = torch.ones_like(fitted, dtype=torch.bool) if problem.support is None else problem.support
            zeros[entries] = certified_zeros(problem, fitted) | ~allowed
            slack[entries] = _slack(problem, fitted).masked_fill(~allowed, torch.inf)
        matter = self.rows(features, ~zeros)  # rows of states that nobody needs do not count
        certified = features & zeros[matter].all(0)
        return Screened(certified, slack[matter].amin(0), share[matter].amax(0), zeros, weights)

    def rank(self, features: Tensor) -> Tensor:  # (n + p,)
        """Ranks the columns that are left by their largest share in any row, ties by the margin of the proof."""
        screened = self.screened(features)
        return torch.where(features, screened.share - 1e-9 * screened.slack.clamp(-1.0, 1.0), -torch.inf)

    def literal(self) -> Tensor:  # (n + p,) bool
        """Keeps what the rule "mu_1 > 0 and mu_2 > 0" does not remove in every row, but two columns at least."""
        least = torch.full(self.mask.shape, torch.inf, dtype=WIDE)
        for rows, columns, problem, _ in self.solved(self.features):
            upper, lower = interior_multipliers(problem)
            least[rows[:, None], columns] = upper.minimum(lower).nan_to_num(torch.inf)
        size = torch.where(self.features, least.amin(0), torch.inf)
        features = self.features & ~(size > 0)
        if int(features.sum()) < FEWEST:
            features[size.topk(FEWEST, largest=False).indices] = True
        return features


def _slack(problem: RowProblem, weights: Tensor) -> Tensor:  # (r, d)
    """Computes how far each bound on |g*_j| lies below the level at which an entry may differ from zero."""
    if problem.free and problem.lasso == 0:
        free = torch.full_like(weights[:, problem.capped :], -torch.inf)
        if problem.capped == 0:
            return free
        reduced = Reduction.of(problem).reduced
        return torch.cat([_slack(reduced, weights[:, : problem.capped]), free], dim=1)
    lower, upper = correlation_bounds(problem, weights)
    if problem.support is not None:
        lower = lower.masked_fill(~problem.support, -torch.inf)
    level = lower.amax(1, keepdim=True)
    return (level - upper) / upper.amax(1, keepdim=True).clamp(min=1e-300)


@dataclass(frozen=True, eq=False)
class FeatureGroups:
    """Which columns of (X, U) go together, and which stay whatever happens.

    Args:
        members: the columns of every group.
        fixed: columns that stay, ``(n + p,)``.

    Example:
        >>> groups = FeatureGroups.of(torch.tensor([-1, 0, 0, 1]), torch.ones(4, dtype=torch.bool))
        >>> groups.removable, [own.tolist() for own in groups.members]
        (3, [[1, 2], [3]])
    """

    members: tuple[Tensor, ...]
    fixed: Tensor

    @classmethod
    def of(cls, labels: Tensor | None, features: Tensor) -> "FeatureGroups":
        """Sorts features by their label; -1 stays, and without labels each feature is a group of its own.

        Args:
            labels: whole numbers, ``(n + p,)``.
            features: columns that some row may use, ``(n + p,)``; others are in no group.
        """
        if labels is None:
            return cls(tuple(torch.nonzero(features)), torch.zeros_like(features))
        if labels.shape != features.shape or labels.is_floating_point() or labels.is_complex():
            raise InputError(
                f"groups must be {len(features)} whole numbers, one for every column of (X, U); received "
                f"{tuple(labels.shape)} of {labels.dtype}"
            )
        if labels.numel() and int(labels.min()) < -1:
            raise InputError(f"groups must be numbers from -1, which stays, upwards; received {int(labels.min())}")
        names = labels[features & (labels >= 0)].unique()
        return cls(
            tuple(torch.nonzero(features & (labels == name))[:, 0] for name in names), features & (labels < 0)
        )

    @property
    def removable(self) -> int:
        """How many features can go."""
        return sum(len(own) for own in self.members)

    @property
    def single(self) -> bool:
        """Whether every group is one feature."""
        return all(len(own) == 1 for own in self.members)

    def whole(self, gone: Tensor) -> Tensor:  # (n + p,) bool
        """Keeps of marked features those whose whole group is marked."""
        features = torch.zeros_like(gone)
        for own in self.members:
            features[own] = gone[own].all()
        return features

    def shuffled(self, generator: torch.Generator) -> list[int]:
        """Returns all features that can go, group after group in random order."""
        order = torch.randperm(len(self.members), generator=generator).tolist()
        return [feature for group in order for feature in self.members[group].tolist()]

    def ranked(self, rank: Tensor, features: Tensor) -> list[int]:
        """Returns the features that are left and can go, group after group, those of the lowest rank first."""
        left = [own for own in self.members if bool(features[own].all())]
        return [
            feature for own in sorted(left, key=lambda own: float(rank[own].amax())) for feature in own.tolist()
        ]

    def without(self, features: Tensor, order: Sequence[int], count: int) -> Tensor:  # (n + p,) bool
        """Takes whole groups away in an order, as long as `count` of the features that can go are left.

        Args:
            features: what is left so far, ``(n + p,)``.
            order: features, members of a group in a row.
            count: how many are left at least.
        """
        chosen, left, position = features.clone(), int((features & ~self.fixed).sum()), 0
        sizes = {int(own[0]): own for own in self.members}
        while position < len(order):
            own = sizes[order[position]]
            position += len(own)
            if not bool(chosen[own[0]]):
                continue
            if left - len(own) < count:
                break
            chosen[own] = False
            left -= len(own)
        return chosen


RIDGE = 1e-3  # relative to the mean square norm of a column
AT_ONCE = 0.01  # of the features that are left, in one round


@dataclass(eq=False)
class Readers:
    """Rows that read the same columns, fitted by least squares without a cap.

    Args:
        rows, columns: their places in (A, B).
        inverse: P = (G + ridge)^-1, ``(d, d)``.
        weights: W, a row each, ``(r, d)``.
        price: what a unit of misfit in each row costs, ``(r,)``.
        left: which columns are left, ``(d,)``.

    Example:
        >>> eye, rows = torch.eye(2, dtype=WIDE), torch.tensor([0])
        >>> readers = Readers.of(eye, torch.tensor([[3.0], [1.0]], dtype=WIDE), rows, torch.arange(2), eye[0, :1])
        >>> readers.rises().round(decimals=1)
        tensor([9., 1.], dtype=torch.float64)
    """

    rows: Tensor
    columns: Tensor
    inverse: Tensor
    weights: Tensor
    price: Tensor
    left: Tensor

    @classmethod
    def of(cls, M: Tensor, Z: Tensor, rows: Tensor, columns: Tensor, price: Tensor) -> "Readers":
        """Fits rows of Z on columns of M, one row a sample in both."""
        gram, cross, _ = Design.of(M).restricted(columns).moments(Z[:, rows])
        scale = RIDGE * float(gram.diagonal().mean()) or 1.0
        damped = gram + scale * torch.eye(len(columns), dtype=WIDE)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        left = torch.ones(len(columns), dtype=torch.bool)
        return cls(rows, columns, inverse, cross @ inverse, price, left)

    def rises(self) -> Tensor:  # (d,)
        """Computes what it costs if a column goes and the others adapt: sum_i price_i W_ij^2 / P_jj."""
        return self.price @ self.weights.square() / self.inverse.diagonal()

    def rise(self, features: Tensor) -> float:
        """Computes what it costs if several columns go at once: sum_i price_i w_iF P_FF^-1 w_iF'."""
        gone = torch.nonzero(torch.isin(self.columns, features) & self.left)[:, 0]
        weights = self.weights[:, gone]
        solved = torch.linalg.solve(self.inverse[gone][:, gone], weights.mT)  # (f, r)
        return float(self.price @ (weights * solved.mT).sum(1))

    def without(self, features: Tensor) -> None:
        """Takes columns out: P <- P - P_F P_FF^-1 P_F', and W likewise."""
        gone = torch.nonzero(torch.isin(self.columns, features) & self.left)[:, 0]
        if len(gone) == 0:
            return
        across = self.inverse[:, gone]
        solved = torch.linalg.solve(across[gone], across.mT)  # (f, d)
        self.weights = self.weights - self.weights[:, gone] @ solved
        self.inverse = self.inverse - across @ solved
        self.left[gone] = False
        self.inverse[gone, gone] = 1.0  # so that nothing is divided by zero


def removal_order(
    work: FeatureProblem, sizes: Sequence[int], least: int, groups: FeatureGroups | None = None
) -> list[int]:
    """Orders features by backward elimination until `least` of them are left; the first goes first.

    A feature costs what the misfit of all rows that read it rises by when it goes and the rows adapt, relative to
    |Z|^2 of their layers; the cap is left aside. A state that goes takes its row along unless something else reads
    it, and what only that row has read then costs nothing. In a round one feature goes, or one in a hundred; of
    groups those go first that cost least for each of their features.

    Args:
        work: the rows.
        sizes: of the blocks of states.
        least: how many of the features that can go are left at the end, at most.
        groups: features that go together; None: each alone.
    """
    features, price = work.features.clone(), _prices(work, sizes)
    groups = FeatureGroups.of(None, features) if groups is None else groups
    M = torch.cat([work.X, work.U], dim=1)
    supports = [(rows, columns) for rows, columns in common_support(work.mask) if len(columns)]
    readers = [Readers.of(M, work.Z, rows, columns, price[rows]) for rows, columns in supports]
    order: list[int] = []
    while (left := int((features & ~groups.fixed).sum())) > least:
        gone = _cheapest(readers, features, groups, min(left - least, max(1, int(AT_ONCE * left))))
        order += gone.tolist()
        features[gone] = False
        alive = work.rows(features)
        for reader in readers:
            reader.without(gone)
            reader.price = reader.price * alive[reader.rows]
    return order


def _cheapest(readers: Sequence[Readers], features: Tensor, groups: FeatureGroups, count: int) -> Tensor:
    """Returns the features that go next: `count` of them, or of larger groups as many as reach that number."""
    if groups.single:
        return _summed(readers, features & ~groups.fixed).topk(count, largest=False).indices
    left = [own for own in groups.members if bool(features[own[0]])]
    alone = _summed(readers, features)
    costs = [
        float(alone[own[0]]) if len(own) == 1 else sum(reader.rise(own) for reader in readers) / len(own)
        for own in left
    ]
    gone: list[int] = []
    for cost in sorted(range(len(left)), key=costs.__getitem__):
        gone += left[cost].tolist()
        if len(gone) >= count:
            break
    return torch.tensor(gone, dtype=torch.long)


def _prices(work: FeatureProblem, sizes: Sequence[int]) -> Tensor:  # (n,)
    """Returns 1 / |Z|^2 of the layer of every row."""
    power = torch.zeros(work.Z.shape[1], dtype=WIDE)
    for low, high in pairwise(block_starts(tuple(sizes))):
        power[low:high] = work.Z[:, low:high].square().sum()
    return torch.where(power > 0, 1 / power.clamp(min=1e-300), 0.0) * work.rows(work.features)


def _summed(readers: Sequence[Readers], features: Tensor) -> Tensor:  # (n + p,)
    """Adds the rises of all rows up; features that are gone cost infinitely much."""
    total = torch.where(features, 0.0, torch.inf).to(WIDE)
    for group in readers:
        total[group.columns[group.left]] += group.rises()[group.left]
    return total


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
    work = FeatureProblem.of(states, kappa, gamma, bound, mask, units.factors)
    together = FeatureGroups.of(groups, work.features)
    retraining = _Retraining(kappa, rescale, retrain, ridge, targets, evaluate, together.removable)
    counts = _counts(keep, together.removable, method)
    ranked = _ranked(states, work, counts, order, together)
    return _path(states, work, method, ranked, retraining, together)


def _path(
    states: States,
    work: FeatureProblem,
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
    path = tuple(retraining.step(states, work, features) for features in [*steps, *ranked])
    return EliminationPath(method, work.features, first.certified, first.slack, path)


def _ranked(
    states: States, work: FeatureProblem, counts: list[int], order: str, groups: FeatureGroups
) -> list[Tensor]:
    """Returns the features that are kept at each step."""
    features, steps = work.features, []
    if order == "share":
        for count in counts:
            features = groups.without(features, groups.ranked(work.rank(features), features), count)
            steps.append(features)
        return steps
    if counts and order == "misfit":
        gone = removal_order(work, states.blocks, min(counts), groups)
    else:
        gone = groups.shuffled(torch.Generator().manual_seed(0))
    return [groups.without(features, gone, count) for count in counts]


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

    def step(self, states: States, work: FeatureProblem, features: Tensor) -> EliminationStep:
        removed = int(work.features.sum()) - int(features.sum())
        facts = features, removed, removed / max(1, self.removable)
        if not self.retrain:
            return EliminationStep(*facts)
        smaller, mask = reduced(states, work.mask & features, work.rows(features))
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
    blocks = [k for k, size in enumerate(sizes) if size]
    columns = torch.cat([rows, torch.ones(mask.shape[1] - n, dtype=torch.bool)])
    smaller = States(
        states.U,
        states.Z[:, rows],
        states.X[:, rows],
        states.Y,
        tuple(sizes[k] for k in blocks),
        tuple(states.activations[k] for k in blocks),
        None,
        states.input_shape,
    )
    return smaller, mask[rows][:, columns]
