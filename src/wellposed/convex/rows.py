"""All rows of a fit: grouped by what they may use, solved in parallel, kept on disk as they finish.

`row_groups` puts rows with the same columns together and `RowFit` solves them. `support_mask` marks which entries
of (A, B) a fit may use.
"""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed.atomic import atomic_write
from wellposed.convex.problem import WIDE, Bound, Design, RowProblem, Targets, row_problem, some_columns
from wellposed.convex.solvers.base import ROW_SOLVERS, RowSolution, RowSolver
from wellposed.convex.states import States
from wellposed.errors import FileFormatError, InputError, unknown_name
from wellposed.models.io.arrays import read_arrays
from wellposed.workers import Workers

Progress = Callable[[int, int], object]
_COMMON = ("gram", "ridge", "kappa", "capped", "lasso")  # of all rows of a problem
_OWN = ("cross", "power", "support", "reference")
STORED = ("weights", "gap", "steps")  # of a solution, in the file of finished rows


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows that share their columns.

    Args:
        rows: their numbers, ``(r,)``.
        columns: the columns of (X, U) that they use, in ascending order.
        support: which of these each row may use, ``(r, len(columns))``; None is all.
    """

    rows: Tensor
    columns: Tensor
    support: Tensor | None = None


def row_groups(support: Tensor, capped: int) -> list[RowGroup]:
    """Groups rows by their support: by all of it where many rows agree, else by that in the columns not capped.

    Example:
        >>> mask = torch.tensor([[True, False, True]] * 4 + [[False, True, True]] * 4)
        >>> [(group.rows.tolist(), group.columns.tolist()) for group in row_groups(mask, capped=2)]
        [([4, 5, 6, 7], [1, 2]), ([0, 1, 2, 3], [0, 2])]
    """
    kinds = torch.unique(support, dim=0)
    key = support if 4 * len(kinds) <= len(support) else support[:, capped:]
    _, member = torch.unique(key, dim=0, return_inverse=True)
    groups = []
    for k in range(int(member.max()) + 1):
        rows = torch.nonzero(member == k)[:, 0]
        columns = torch.nonzero(support[rows].any(0))[:, 0]
        mask = support[rows][:, columns]
        groups.append(RowGroup(rows, columns, None if bool(mask.all()) else mask))
    return groups


@dataclass(frozen=True, kw_only=True)
class RowFit:
    """How rows are fitted: the problem, the solver and where the work is done.

    Memory, in bytes, for r rows with d columns, whose data are read c = 4096 samples at a time, with `jobs`
    threads on `chunk` rows each and s entries of a row that are not zero:

        8 (6 d^2 + 3 r d + c d) + jobs 8 d (8 chunk + s)

    (Gram matrix, what is left of it without b, two factors and one at work; correlations and weights, those of a
    group and those of all; a piece of the data; work space). All threads share the matrices. Processes in place of
    threads share the Gram matrix through a mapped file, and have factors of their own.

    Args:
        kappa: the cap; infinite for none.
        bound: "state" caps the row of A (P2, 003 eq. 3.4), "row" all of (a, b) (P1, P(kappa) of 003 section 3.3).
        ridge, lasso: weights of |w|_2^2 / 2 and |w|_1.
        solver: by name or object.
        jobs, backend: workers, and joblib's name for their kind; "dask" and "ray" take those of a cluster.
        chunk: rows that are solved, and kept on disk, together.
        folder: where finished rows are kept; a later call with the same data and settings goes on from there.
            Workers of a cluster write to it themselves where they can see it.
        progress: called with the number of rows done and their total.

    Example:
        >>> X, U = torch.eye(3), torch.zeros(3, 1)
        >>> fit = RowFit(kappa=2.0)
        >>> fit.solve(X, U, torch.tensor([[3.0], [2.0], [0.5]])).weights
        tensor([[1.5000, 0.5000, 0.0000, 0.0000]], dtype=torch.float64)
    """

    kappa: float = 0.99
    bound: Bound = "state"
    ridge: float = 0.0
    lasso: float = 0.0
    solver: RowSolver | str = "automatic"
    jobs: int = 1
    backend: str = "threading"
    chunk: int = 64
    folder: str | os.PathLike[str] | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.bound not in ("state", "row"):
            raise InputError(f"bound must be 'state' (the row of A) or 'row' (all of it); received {self.bound!r}")
        for name in ("kappa", "ridge", "lasso"):  # whole numbers of any size, which tensors do not take
            object.__setattr__(self, name, float(getattr(self, name)))
        Workers(self.jobs, self.backend)
        if not isinstance(self.chunk, int) or self.chunk < 1:
            raise InputError(f"chunk must be a positive whole number; received {self.chunk!r}")

    def solve(
        self,
        X: Tensor,  # (m, n)
        U: Tensor,  # (m, p)
        Z: Tensor,  # (m, r)
        groups: Sequence[RowGroup] | None = None,
    ) -> RowSolution:
        """Solves for all columns of Z; rows that no group names stay zero."""
        if not X.dim() == U.dim() == Z.dim() == 2 or not len(X) == len(U) == len(Z):
            shapes = ", ".join(str(tuple(part.shape)) for part in (X, U, Z))
            raise InputError(f"X, U and Z must be matrices with one row a sample; received {shapes}")
        width, count = X.shape[1] + U.shape[1], Z.shape[1]
        weights = torch.zeros(count, width, dtype=WIDE, device=X.device)
        gap, scale = torch.zeros(count).to(weights), torch.zeros(count).to(weights)
        steps = torch.zeros_like(gap, dtype=torch.int64)
        for group, solution in self.groups(X, U, Z, groups):
            weights[group.rows[:, None], group.columns] = solution.weights
            gap[group.rows], scale[group.rows], steps[group.rows] = (
                solution.gap,
                solution.scale,
                solution.steps.to(steps),
            )
        return RowSolution(weights, gap, scale, steps)

    def groups(
        self, X: Tensor, U: Tensor, Z: Tensor, groups: Sequence[RowGroup] | None = None
    ) -> Iterator[tuple[RowGroup, RowSolution]]:
        """Yields the solution of one group after the other, on its own columns."""
        design = Design.of(X, U)
        if groups is None:
            everything = torch.arange(Z.shape[1]), torch.arange(design.shape[1])
            groups = [RowGroup(*(part.to(X.device) for part in everything))]
        done, total = 0, sum(len(group.rows) for group in groups)
        for group in groups:
            problem = self.problem(design, Z, group, X.shape[1])
            yield group, self.solve_problem(problem, done, total)
            done += len(group.rows)

    def problem(self, design: Design, Z: Targets, group: RowGroup, states: int) -> RowProblem:
        """Builds the problem of one group."""
        part = design.restricted(group.columns)
        capped = int((group.columns < states).sum()) if self.bound == "state" else part.shape[1]
        return row_problem(
            part,
            some_columns(Z, group.rows),
            kappa=self.kappa,
            capped=capped,
            ridge=self.ridge,
            lasso=self.lasso,
            support=group.support,
        )

    def solve_problem(self, problem: RowProblem, done: int = 0, total: int = 0) -> RowSolution:
        """Solves the rows of one problem; `done` and `total` are for the progress."""
        solver = ROW_SOLVERS.get(self.solver)
        places = [slice(start, start + self.chunk) for start in range(0, problem.rows, self.chunk)]
        result = _empty(problem)
        for k, solution in self._run(solver, [problem.chosen(rows) for rows in places]):
            for name in STORED:
                part = getattr(result, name)
                part[places[k]] = getattr(solution, name).to(part)
            done += len(solution.gap)
            if self.progress is not None:
                self.progress(done, max(done, total))
        return result

    def _run(self, solver: RowSolver, problems: Sequence[RowProblem]) -> Iterator[tuple[int, RowSolution]]:
        files = [_RowFile.of(self.folder, solver, part) for part in problems]
        waiting = []
        for k, file in enumerate(files):
            if (solution := file.load(problems[k])) is not None:
                yield k, solution
            else:
                waiting.append(k)
        workers = Workers(self.jobs if len(waiting) > 1 else 1, self.backend)
        common = _packed(problems[0], _COMMON) if workers.apart else None
        tasks = [
            (solver, k, _packed(problems[k], _OWN) if workers.apart else problems[k], files[k]) for k in waiting
        ]
        for k, solution in workers.run(_work, tasks, common):
            files[k].save(solution)
            yield k, solution


def _packed(problem: RowProblem, names: Sequence[str]) -> dict[str, Any]:
    """Packs a problem as NumPy arrays, which joblib can memory-map; the data matrix is left out."""
    fields = {name: getattr(problem, name) for name in names}
    return {name: part.cpu().numpy() if isinstance(part, Tensor) else part for name, part in fields.items()}


def _work(
    common: dict[str, Any] | None, solver: RowSolver, k: int, part: RowProblem | dict[str, Any], file: "_RowFile"
) -> tuple[int, RowSolution]:
    """Solves some rows and stores them, so that they are not lost if others are."""
    if isinstance(part, dict):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a mapped array is read-only; nothing writes to it
            arrays: dict[str, Any] = part | (common or {})
            arrays = {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in arrays.items()}
        part = RowProblem(**arrays)
    solution = solver.solve(part)
    file.save(solution)
    return k, solution


def _empty(problem: RowProblem) -> RowSolution:
    """Allocates a solution for all rows, to be filled group by group."""
    steps = torch.zeros(problem.rows, dtype=torch.int64, device=problem.cross.device)
    return RowSolution(torch.zeros_like(problem.cross), torch.zeros_like(problem.power), problem.scale, steps)


def _digest(settings: bytes, *tensors: Tensor | None) -> "hashlib.blake2b":
    """Hashes the bytes of some tensors."""
    digest = hashlib.blake2b(settings, digest_size=16)
    for tensor in tensors:
        digest.update(b"none" if tensor is None else np.ascontiguousarray(tensor.cpu().numpy()).data)
    return digest


@dataclass(frozen=True)
class _RowFile:
    """Finished rows in a file that is named after data and settings."""

    path: Path | None

    @classmethod
    def of(cls, folder: str | os.PathLike[str] | None, solver: RowSolver, problem: RowProblem) -> "_RowFile":
        if folder is None:
            return cls(None)
        matrix = problem.once("digest", lambda: _digest(b"", problem.gram, problem.ridge))
        settings = repr((solver, problem.kappa, problem.capped, problem.lasso)).encode()
        digest = _digest(
            matrix.digest() + settings, problem.cross, problem.power, problem.support, problem.reference
        )
        return cls(Path(folder).absolute() / f"rows-{digest.hexdigest()}.npz")

    def load(self, problem: RowProblem) -> RowSolution | None:
        if self.path is None or not self.path.exists():
            return None
        expected = {name: getattr(_empty(problem), name) for name in STORED}
        try:
            stored = read_arrays(self.path, 2 * sum(part.nbytes for part in expected.values()) + (1 << 16))
            arrays = {name: torch.from_numpy(stored[name]) for name in STORED}
            for name, part in expected.items():
                if arrays[name].shape != part.shape:
                    shapes = f"{tuple(arrays[name].shape)}, expected {tuple(part.shape)}"
                    raise FileFormatError(f"{name} has the shape {shapes}")
        except (OSError, KeyError, TypeError, FileFormatError) as error:
            raise FileFormatError(
                f"finished rows in {str(self.path)!r} cannot be read: {error}. Delete it; they are solved anew"
            ) from error
        return RowSolution(scale=problem.scale, **{k: part.to(problem.cross.device) for k, part in arrays.items()})

    def save(self, solution: RowSolution) -> None:
        if self.path is None or self.path.exists():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: getattr(solution, name).cpu().numpy() for name in STORED}
        with atomic_write(self.path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **arrays)


SUPPORTS = ("layered", "network", "triangular", "hollow", "full")


def block_starts(sizes: Sequence[int]) -> list[int]:
    """Returns where blocks begin and where the last one ends.

    Example:
        >>> block_starts((2, 3))
        [0, 2, 5]
    """
    return [0, *accumulate(sizes)]


def support_mask(states: States, support: str | Tensor = "layered") -> Tensor:  # (n, n + p) bool
    """Marks the entries of (A, B) that may differ from zero.

    Args:
        states: of n states and p inputs.
        support: "layered" lets the rows of a layer use what that layer reads (all earlier layers and the inputs
            where the network has no form); "network" the entries that are not zero in the network; "triangular"
            all earlier layers and the inputs; "hollow" everything but diag(A); "full" everything; or a bool mask
            ``(n, n + p)``, or ``(n, n)`` for A alone.

    Example:
        >>> from wellposed.activations import get_activation
        >>> one, relu = torch.ones(4, 1), get_activation("relu")
        >>> support_mask(States(one, torch.ones(4, 2), torch.ones(4, 2), one, (1, 1), (relu, relu)), "triangular")
        tensor([[False,  True,  True],
                [False, False,  True]])
    """
    n, p = states.X.shape[1], states.U.shape[1]
    if isinstance(support, Tensor):
        return _given(support, n, p)
    if support not in SUPPORTS:
        raise unknown_name("support", support, SUPPORTS)
    if support in ("full", "hollow"):
        mask = torch.ones(n, n + p, dtype=torch.bool)
        if support == "hollow":
            mask[:, :n].fill_diagonal_(False)
        return mask
    if support == "triangular" or states.form is None:
        return _triangular(states.blocks, p)
    form = states.form
    if support == "network":
        return torch.cat([form.A.to_dense() != 0, form.B.to_dense() != 0], dim=1)
    return _layered(states)


def _given(mask: Tensor, n: int, p: int) -> Tensor:
    if mask.dtype != torch.bool or tuple(mask.shape) not in ((n, n), (n, n + p)):
        raise InputError(
            f"a support is a bool mask of the shape {(n, n + p)} for (A, B), or {(n, n)} for A; "
            f"received {mask.dtype} {tuple(mask.shape)}"
        )
    if mask.shape[1] == n:
        return torch.cat([mask, torch.ones(n, p, dtype=torch.bool, device=mask.device)], dim=1)
    return mask


def _triangular(sizes: Sequence[int], p: int) -> Tensor:
    n, starts = sum(sizes), block_starts(sizes)
    mask = torch.zeros(n, n + p, dtype=torch.bool)
    for low, high in pairwise(starts):
        mask[low:high, high:] = True
    return mask


def _layered(states: States) -> Tensor:
    form = states.form
    assert form is not None
    A, B, _ = form.blocks
    mask = torch.zeros(A.shape[0], A.shape[1] + B.shape[1], dtype=torch.bool)
    for operator, offset in ((A, 0), (B, A.shape[1])):
        down, right = block_starts(operator.heights), block_starts(operator.widths)
        for i, j in operator.parts:
            mask[down[i] : down[i + 1], offset + right[j] : offset + right[j + 1]] = True
    return mask


def is_feedforward(mask: Tensor, sizes: Sequence[int]) -> bool:
    """Returns whether every layer reads only later blocks, that is, earlier layers.

    Example:
        >>> is_feedforward(torch.tensor([[False, True], [False, False]]), (1, 1))
        True
    """
    starts = block_starts(sizes)
    return not any(bool(mask[low:high, :high].any()) for low, high in pairwise(starts))
