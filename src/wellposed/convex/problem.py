"""The row problem of state matching, its dual and its duality gap.

For one row (a, b) of (A, B) and the pre-activations z of its state over all samples, with M = (X, U) and w = (a,
b), 003 eq. (3.4) asks for

    minimise  1/2 |Mw - z|^2 + 1/2 sum_j r_j w_j^2 + lasso |w|_1   subject to  |capped part of w|_1 <= kappa,

where entries outside a support are zero. The capped part is a (the well-posedness condition of (3.4)), or the
whole row ("a := (a, b)" in P(kappa)). All rows share M, hence one Gram matrix G = M'M + diag(r).

Duality. Let nu = Mw - z (with the ridge as further samples) and g = M'nu = Gw - c, c = M'z. The dual of the form
with everything capped is max_nu -1/2 |nu|^2 - z'nu - kappa (|M'nu|_inf - lasso)_+ (002 eq. 5 for lasso = 0), and
at the residual of any feasible w the gap is

    gap = g'w + lasso |w|_1 + kappa (|g|_inf - lasso)_+ >= F(w) - F(w*).

Columns that are not capped ask of a dual point that M_b'nu = 0, or |M_b'nu|_inf <= lasso.

`Design` is M: recorded states and inputs, read in pieces and never stacked in full. `Factor` is a Cholesky factor
of a Gram matrix whose columns differ widely in scale, or depend on each other. `RowProblem` holds many rows on one
Gram matrix, and `duality_gap` is their gap.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from wellposed.conditions.projections import project_rows
from wellposed.errors import InputError

WIDE = torch.float64


class Moments(NamedTuple):
    """What least squares needs to know of the data."""

    gram: Tensor  # (d, d), M'M
    cross: Tensor  # (r, d), a row z'M for every target z
    power: Tensor  # (r,), |z|^2


@dataclass(frozen=True, eq=False)
class Design:
    """The matrix ``M = (X, U)`` of 003 section 3.3 with one row a sample, in double precision piece by piece.

    Reading takes ``8 samples d`` bytes at a time, wherever the parts lie (memory, a mapped file, a GPU). Units and
    means are applied while reading, so that nothing is ever copied in full.

    Args:
        parts: matrices with the same samples, side by side.
        picks: which columns of each part are used; None is all of them.
        samples: how many samples are read at once.
        factors: by which used columns are multiplied, ``(d,)``; None is one.
        means: which are then subtracted, ``(d,)``; None is zero.
        target_device: where pieces are read to; None is where the parts are.

    Example:
        >>> M = Design.of(torch.eye(2), torch.ones(2, 1))
        >>> M.moments(torch.tensor([[1.0], [2.0]])).cross
        tensor([[1., 2., 3.]], dtype=torch.float64)
    """

    parts: tuple[Tensor, ...]
    picks: tuple[Tensor | None, ...]
    samples: int = 4096
    factors: Tensor | None = None
    means: Tensor | None = None
    target_device: torch.device | None = None

    @classmethod
    def of(
        cls,
        *matrices: Tensor,
        samples: int = 4096,
        factors: Tensor | None = None,
        target_device: torch.device | None = None,
    ) -> "Design":
        """Puts matrices side by side."""
        heights = {matrix.shape[0] for matrix in matrices}
        if not matrices or len(heights) > 1 or any(matrix.dim() != 2 for matrix in matrices):
            shapes = ", ".join(str(tuple(matrix.shape)) for matrix in matrices)
            raise InputError(f"a design needs matrices with one row a sample; received {shapes or 'nothing'}")
        if any(matrix.is_complex() for matrix in matrices):
            raise InputError("rows are fitted to real numbers; received complex ones; give both parts as columns")
        return cls(matrices, (None,) * len(matrices), samples, factors, None, target_device)

    @property
    def widths(self) -> tuple[int, ...]:
        """How many columns of each part are used."""
        pairs = zip(self.parts, self.picks, strict=True)
        return tuple(matrix.shape[1] if pick is None else len(pick) for matrix, pick in pairs)

    @property
    def shape(self) -> tuple[int, int]:
        """Samples and columns."""
        return self.parts[0].shape[0], sum(self.widths)

    @property
    def device(self) -> torch.device:
        """Where pieces are."""
        return self.parts[0].device if self.target_device is None else self.target_device

    def restricted(self, columns: Tensor) -> "Design":
        """Keeps some columns, which must be in ascending order.

        Example:
            >>> Design.of(torch.eye(3), torch.ones(3, 2)).restricted(torch.tensor([1, 2, 4])).widths
            (2, 1)
        """
        picks: list[Tensor | None] = []
        start = 0
        for part, pick, width in zip(self.parts, self.picks, self.widths, strict=True):
            inside = columns[(columns >= start) & (columns < start + width)].to(part.device) - start
            picks.append(inside if pick is None else pick[inside])
            start += width
        factors, means = (
            None if part is None else part[columns.to(part.device)] for part in (self.factors, self.means)
        )
        return replace(self, picks=tuple(picks), factors=factors, means=means)

    def centred(self) -> "Design":
        """Subtracts the mean of every column.

        Example:
            >>> Design.of(torch.tensor([[1.0], [3.0]])).centred().read(slice(0, 2))
            tensor([[-1.],
                    [ 1.]], dtype=torch.float64)
        """
        total = torch.zeros(self.shape[1], dtype=WIDE, device=self.device)
        for _, M in self.pieces():
            total += M.sum(0)
        mean = total / self.shape[0]
        return replace(self, means=mean if self.means is None else self.means + mean)

    def squares(self) -> Tensor:  # (d,)
        """Adds up the squares of every column."""
        total = torch.zeros(self.shape[1], dtype=WIDE, device=self.device)
        for _, M in self.pieces():
            total += M.square().sum(0)
        return total

    def read(self, rows: slice) -> Tensor:
        """Returns some samples as a double precision matrix."""
        pairs = zip(self.parts, self.picks, strict=True)
        chosen = [matrix[rows] if pick is None else matrix[rows].index_select(1, pick) for matrix, pick in pairs]
        M = torch.cat([matrix.to(self.device, WIDE) for matrix in chosen], dim=1)
        M = M if self.factors is None else M * self.factors.to(M)
        return M if self.means is None else M - self.means.to(M)

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields consecutive samples as double precision matrices."""
        count = self.shape[0]
        for start in range(0, count, self.samples):
            rows = slice(start, min(start + self.samples, count))
            yield rows, self.read(rows)

    def moments(self, targets: "Targets") -> Moments:  # (m, r)
        """Computes M'M, z'M and |z|^2 in one pass."""
        width, count = self.shape[1], targets.shape[1]
        gram = torch.zeros(width, width, dtype=WIDE, device=self.device)
        cross, power = torch.zeros(count, width).to(gram), torch.zeros(count).to(gram)
        for rows, M in self.pieces():
            z = _read(targets, rows, M)
            gram.addmm_(M.mT, M)
            cross.addmm_(z.mT, M)
            power += z.square().sum(0)
        return Moments((gram + gram.mT) / 2, cross, power)

    def gradient(self, weights: Tensor, targets: "Targets") -> Tensor:  # (r, d)
        """Computes M'(Mw - z) of every row by way of the residuals, which loses no digits to cancellation."""
        total = torch.zeros_like(weights)
        for rows, M in self.pieces():
            total.addmm_((M @ weights.mT - _read(targets, rows, M)).mT, M)
        return total

    def residual(self, weights: Tensor, targets: "Targets") -> Tensor:  # (r,)
        """Computes |Mw - z|^2 of every row."""
        total = weights.new_zeros(len(weights))
        for rows, M in self.pieces():
            total += (M @ weights.mT - _read(targets, rows, M)).square().sum(0)
        return total


Targets = Tensor | Design  # (m, r)


def _read(targets: Targets, rows: slice, like: Tensor) -> Tensor:
    return targets.read(rows).to(like) if isinstance(targets, Design) else targets[rows].to(like)


def some_columns(targets: Targets, columns: Tensor | slice) -> Targets:
    """Keeps some columns of targets (numbers, a mask or a slice), in any order where they are one matrix.

    Example:
        >>> some_columns(torch.tensor([[1.0, 2.0]]), slice(1, 2))
        tensor([[2.]])
    """
    if isinstance(targets, Tensor):
        return targets[:, columns]
    which = columns.cpu() if isinstance(columns, Tensor) else columns
    return targets.restricted(torch.arange(targets.shape[1])[which])


GROWTH = 10.0  # of the level, from one attempt to factorise to the next


@dataclass(frozen=True, eq=False)
class Factor:
    """``D^-1 K D^-1 + level I = L L'`` with D the roots of the diagonal of K.

    Scaling to a unit diagonal makes the rank decision independent of the units of a column. The level is zero
    where rounding allows.

    Example:
        >>> Factor.of(torch.tensor([[4.0, 0.0], [0.0, 1e-12]], dtype=torch.float64)).solve(torch.ones(1, 2))
        tensor([[2.5000e-01, 1.0000e+12]], dtype=torch.float64)
    """

    lower: Tensor  # (p, p)
    scale: Tensor  # (p,), one over D; zero for zero columns
    level: float

    @classmethod
    def of(cls, gram: Tensor, level: float = 0.0) -> "Factor":
        """Factorises a positive semi-definite matrix, adding to `level` where it has to."""
        diagonal = gram.diagonal().clamp(min=0)
        scale = torch.where(diagonal > 0, diagonal.rsqrt(), 0.0)
        unit = (scale[:, None] * gram).mul_(scale)
        while True:
            unit.diagonal().fill_(1.0 + level)
            lower, info = torch.linalg.cholesky_ex(unit)
            if int(info) == 0:
                return cls(lower, scale, level)
            level = max(GROWTH * level, len(unit) * torch.finfo(unit.dtype).eps)
            if level > 1:
                raise InputError("the Gram matrix is not positive semi-definite; check the states for NaN")

    def solve(self, rows: Tensor) -> Tensor:  # (r, p)
        """Solves K x = y for every row y."""
        if rows.shape[1] == 0:
            return rows
        scaled = (rows.to(self.lower) * self.scale).mT
        return torch.cholesky_solve(scaled, self.lower).mT * self.scale

    def half(self, rows: Tensor) -> Tensor:  # (r, p)
        """Returns L^-1 D^-1 y of every row y, so that products of halves are products by K^-1."""
        scaled = (rows.to(self.lower) * self.scale).mT
        return torch.linalg.solve_triangular(self.lower, scaled, upper=False).mT


T = TypeVar("T")
Bound = Literal["state", "row"]
SMALLEST_RIDGE = 1e-12  # of columns that are not capped, relative to the diagonal of G


@dataclass(frozen=True, eq=False)
class RowProblem:
    """Many rows that share their columns.

    Args:
        gram: ``G = M'M + diag(ridge)``, ``(d, d)``.
        cross: c = M'z of every row, ``(r, d)``.
        power: |z|^2 of every row, ``(r,)``.
        kappa: the cap; infinite for none.
        capped: how many columns, from the first, the cap counts.
        lasso: weight of |w|_1.
        ridge: r_j, already part of `gram`, ``(d,)``.
        support: which entries may differ from zero, ``(r, d)``; None is all.
        reference: what relative gaps refer to, ``(r,)``; |z|^2 / 2 if None.
        design, targets: M and the z of every row ``(m, r)``, where more digits are wanted than G keeps.

    Example:
        >>> X, U, z = torch.eye(2), torch.zeros(2, 1), torch.tensor([[3.0], [1.0]])
        >>> problem = row_problem(Design.of(X, U), z, kappa=1.0, capped=2)
        >>> float(duality_gap(problem, torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)))
        0.0
    """

    gram: Tensor
    cross: Tensor
    power: Tensor
    kappa: float
    capped: int
    lasso: float = 0.0
    ridge: Tensor | None = None
    support: Tensor | None = None
    reference: Tensor | None = None
    design: Design | None = None
    targets: Targets | None = None
    shared: dict[Any, Any] = field(
        default_factory=dict, repr=False
    )  # what only G decides, for all parts of a problem

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.cross.shape[0]

    @property
    def columns(self) -> int:
        """How many columns M has."""
        return self.cross.shape[1]

    @property
    def free(self) -> int:
        """How many columns the cap does not count."""
        return self.columns - self.capped

    @property
    def scale(self) -> Tensor:  # (r,)
        """What relative gaps refer to."""
        return self.power / 2 if self.reference is None else self.reference

    @property
    def factor(self) -> Factor:
        """The factorised Gram matrix of the columns that are not capped."""
        return self.once("free", lambda: Factor.of(self.gram[self.capped :, self.capped :]))

    def once(self, name: Any, compute: Callable[[], T]) -> T:
        """Computes what depends on the Gram matrix alone, once for all rows and chosen parts, in any thread."""
        with self.shared.setdefault(RLock, RLock()):
            if name not in self.shared:
                self.shared[name] = compute()
            value: T = self.shared[name]
        return value

    def column(self, row: int) -> Tensor:  # (m,)
        """Returns the target of one row."""
        assert self.targets is not None
        one = some_columns(self.targets, slice(row, row + 1))
        return one[:, 0].double() if isinstance(one, Tensor) else torch.cat([z[:, 0] for _, z in one.pieces()])

    def chosen(self, rows: Tensor | slice) -> "RowProblem":
        """Keeps some of the rows."""
        return replace(
            self,
            cross=self.cross[rows],
            power=self.power[rows],
            support=None if self.support is None else self.support[rows],
            reference=None if self.reference is None else self.reference[rows],
            targets=None if self.targets is None else some_columns(self.targets, rows),
        )


def row_problem(
    design: Design,
    targets: Targets,  # (m, r)
    *,
    kappa: float,
    capped: int,
    ridge: float = 0.0,
    lasso: float = 0.0,
    support: Tensor | None = None,
) -> RowProblem:
    """Builds the problem of some rows from data.

    Columns that are not capped get a ridge of at least 1e-12 of their own square norm where there is no lasso, so
    that dependent ones (dead pixels, fewer samples than columns) have one answer; the gap includes it.
    """
    _check(design, targets, kappa, capped, ridge, lasso, support)
    gram, cross, power = design.moments(targets)
    for name, part in (("the states or inputs", gram), ("the targets", power)):
        if not bool(part.isfinite().all()):
            raise InputError(f"{name} contain NaN, infinity or too large numbers; fix the recording first")
    if math.isinf(kappa):
        capped = 0
    added = torch.full_like(gram.diagonal(), ridge)
    if lasso == 0:
        added[capped:] = added[capped:].maximum(SMALLEST_RIDGE * gram.diagonal()[capped:])
    gram.diagonal().add_(added)
    if support is not None:
        support = support.to(gram.device).expand_as(cross)
    return RowProblem(gram, cross, power, kappa, capped, lasso, added, support, None, design, targets)


def _check(
    design: Design, targets: Targets, kappa: float, capped: int, ridge: float, lasso: float, support: Tensor | None
) -> None:
    samples, columns = design.shape
    if len(targets.shape) != 2 or targets.shape[0] != samples:
        raise InputError(f"targets need {samples} samples, one a row; received {tuple(targets.shape)}")
    if samples == 0:
        raise InputError("there are no samples; record some states first")
    if not kappa > 0:
        raise InputError(f"kappa must be positive; received {kappa!r}")
    if not 0 <= capped <= columns:
        raise InputError(f"capped must be from 0 to {columns}, the number of columns; received {capped!r}")
    for name, value in (("ridge", ridge), ("lasso", lasso)):
        if not (value >= 0 and math.isfinite(value)):
            raise InputError(f"{name} must be a finite number that is not negative; received {value!r}")
    if support is not None and (support.dtype != torch.bool or support.shape[-1] != columns):
        raise InputError(
            f"support must be bool with {columns} columns; received {support.dtype} {tuple(support.shape)}"
        )


def gradient(problem: RowProblem, weights: Tensor, *, exact: bool = False) -> Tensor:  # (r, d)
    """Computes g = Gw - c of every row, by way of the residuals if `exact`."""
    if exact and problem.design is not None and problem.targets is not None:
        smooth = problem.design.gradient(weights, problem.targets)
        return smooth if problem.ridge is None else smooth + problem.ridge * weights
    return weights @ problem.gram - problem.cross


def objective(problem: RowProblem, weights: Tensor) -> Tensor:  # (r,)
    """Computes F(w) = 1/2 (w'Gw - 2c'w + |z|^2) + lasso |w|_1 of every row."""
    slope = gradient(problem, weights) - problem.cross
    return ((weights * slope).sum(1) + problem.power) / 2 + problem.lasso * weights.abs().sum(1)


def capped_norm(problem: RowProblem, weights: Tensor) -> Tensor:  # (r,)
    """Computes what the cap counts: |a|_1, or |(a, b)|_1."""
    return weights[:, : problem.capped].abs().sum(1)


def feasible(problem: RowProblem, weights: Tensor) -> Tensor:  # (r, d)
    """Moves rows to the nearest point that satisfies support and cap; rows that do stay bit for bit."""
    if problem.support is not None:
        weights = weights * problem.support
    if problem.capped == 0:
        return weights
    head = project_rows(weights[:, : problem.capped].contiguous(), problem.kappa)
    return torch.cat([head, weights[:, problem.capped :]], dim=1)


def duality_gap(problem: RowProblem, weights: Tensor, *, exact: bool = False) -> Tensor:  # (r,)
    """Bounds F(w) - F(w*) of every row; infinite where w violates the cap by more than rounding."""
    slope = gradient(problem, weights, exact=exact)
    if problem.support is not None:
        slope = slope * problem.support
    if problem.free == 0:
        gap = capped_gap(slope, weights, problem.kappa, problem.lasso)
    elif problem.lasso == 0:
        gap = _gap_with_free_columns(problem, slope, weights)
    else:
        gap = _gap_with_sparse_free_columns(problem, slope, weights)
    excess = capped_norm(problem, weights) > problem.kappa * (1 + 1e-12)
    return torch.where(excess, torch.inf, gap.clamp(min=0))


def capped_gap(slope: Tensor, weights: Tensor, kappa: float, lasso: float = 0.0) -> Tensor:  # (r,)
    """Computes g'w + lasso |w|_1 + kappa (|g|_inf - lasso)_+, the gap where everything is capped.

    Example:
        >>> capped_gap(torch.tensor([[-2.0, 1.0]]), torch.tensor([[1.0, 0.0]]), kappa=1.0)
        tensor([0.])
    """
    if slope.shape[1] == 0:
        return slope.new_zeros(len(slope))
    excess = (slope.abs().amax(1) - lasso).clamp(min=0)
    bound = kappa * excess if math.isfinite(kappa) else torch.where(excess > 0, torch.inf, 0.0)
    return (slope * weights).sum(1) + lasso * weights.abs().sum(1) + bound


def _gap_with_free_columns(problem: RowProblem, slope: Tensor, weights: Tensor) -> Tensor:
    """Moves b to its best value for this a, which costs e/2 = g_b'K^-1 g_b / 2, and takes the gap there.

    With d = K^-1 g_b the point (a, b - d) has M_b'nu = 0, so its residual is dual feasible.
    """
    cut = problem.capped
    head, tail = slope[:, :cut], slope[:, cut:]
    if problem.support is None:
        moved = problem.factor.solve(tail)
    else:
        moved = torch.zeros_like(tail)
        for rows, columns in common_support(problem.support[:, cut:]):
            factor = Factor.of(problem.gram[cut + columns][:, cut + columns])
            moved[rows[:, None], columns] = factor.solve(tail[rows][:, columns])
    excess = (tail * moved).sum(1).clamp(min=0) / 2
    reduced = head - moved @ problem.gram[cut:, :cut]
    if problem.support is not None:
        reduced = reduced * problem.support[:, :cut]
    return excess + capped_gap(reduced, weights[:, :cut], problem.kappa)


def _gap_with_sparse_free_columns(problem: RowProblem, slope: Tensor, weights: Tensor) -> Tensor:
    """Shrinks the residual by s = min(1, lasso / |g_b|_inf), which makes it dual feasible.

    The gap at s nu is that at nu plus (s - 1) ((1 + s) / 2 |nu|^2 + z'nu).
    """
    cut, lasso = problem.capped, problem.lasso
    head, tail = slope[:, :cut], slope[:, cut:].abs().amax(1)
    s = torch.where(tail > lasso, lasso / tail, 1.0)
    across = (problem.cross * weights).sum(1) - problem.power  # z'nu
    square = (slope * weights).sum(1) - across  # |nu|^2
    top = head.abs().amax(1) if cut else torch.zeros_like(s)
    bound = problem.kappa * (s * top - lasso).clamp(min=0) if cut else 0.0
    gap = (slope * weights).sum(1) + lasso * weights.abs().sum(1) + bound
    return gap + (s - 1) * ((1 + s) / 2 * square + across)


def rounding(problem: RowProblem, weights: Tensor) -> Tensor:  # (r, d)
    """Bounds the rounding error of Gw - c by way of |G_jk| <= |M_j| |M_k|."""
    norms = problem.gram.diagonal().clamp(min=0).sqrt()
    terms = problem.columns if problem.design is None else problem.columns + problem.design.shape[0]
    relative = 4 * terms * torch.finfo(weights.dtype).eps
    size = weights.abs() @ norms + (2 * problem.scale).maximum(problem.power).sqrt()
    return relative * size[:, None] * norms


def rounding_of_gap(problem: RowProblem, weights: Tensor) -> Tensor:  # (r,)
    """Bounds the rounding error of the gap: below it a smaller gap cannot be told from a larger one."""
    error = rounding(problem, weights)
    slack = (error * weights.abs()).sum(1)
    if problem.lasso:
        relative = 4 * problem.columns * torch.finfo(weights.dtype).eps
        slack = slack + relative * problem.lasso * weights.abs().sum(1)
    return slack + problem.kappa * error[:, : problem.capped].amax(1) if problem.capped else slack


def common_support(support: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Groups rows of a bool matrix that are equal: their numbers, and the columns that are set.

    Example:
        >>> common_support(torch.tensor([[True, False], [True, True], [True, False]]))
        [(tensor([0, 2]), tensor([0])), (tensor([1]), tensor([0, 1]))]
    """
    kinds, member = torch.unique(support, dim=0, return_inverse=True)
    return [(torch.nonzero(member == k)[:, 0], torch.nonzero(kind)[:, 0]) for k, kind in enumerate(kinds)]
