"""Sparse matrices at inference: their layout, when they pay off, and how long they are cached.

A matrix is stored as compressed rows (`SparseRows`), ``itemsize + 4`` bytes for every entry (rows are padded to
four) and 8 for every row: a fifth of the dense matrix at 90 % sparsity in float32. The share of entries up to
which the sparse product is taken (`largest_share`) was measured (`benchmarks.kernels.sparse_inference`): one
thread, float32, 128 to 2048 states. `faster` tells which matrices of a model are sparse enough for a batch; a
`Cache` holds them until a parameter changes.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import require

LEAST = 64  # states below which only the dense kernel is considered
ALONE = 0.45  # of the entries of A, for one sample
COMPACT, NEAR, SPREAD = 512, 0.4, 0.33  # for more: up to so many states their points fit in the fastest memory
# B, C and D multiply a sample once: a sparse product copies numbers to lanes and back, and costs a call.
ONCE, ONCE_ALONE, CROSSING, START = 0.28, 0.15, 50.0, 1e5


@functools.cache
def _layout() -> ModuleType:
    """Imports what needs numba, on first use."""
    return require("wellposed.kernels.cpu.sparse_rows", extra="fast")


@dataclass(frozen=True, eq=False)
class SparseRows:
    """A matrix as compressed rows.

    Attributes:
        shape: rows and columns.
        entries: how many differ from zero.
        arrays: values and columns of the padded rows, where rows begin, and the runs of rows in an order in which
            substitution may take them, two numbers a run; no runs where that is not possible or does not pay.
        levels: length of the longest chain of states, 0 if there are cycles.
    """

    shape: tuple[int, int]
    entries: int
    arrays: tuple[Any, Any, Any, Any]
    levels: int = 0

    @property
    def stored(self) -> int:
        """Entries with the padding."""
        return len(self.arrays[0])

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def plain(self) -> "SparseRows":
        """The same matrix, never substituted."""
        return SparseRows(self.shape, self.entries, (*self.arrays[:3], self.arrays[3][:0]))

    def to_dense(self) -> Tensor:
        """Returns the dense matrix."""
        values, columns, starts, _ = (torch.from_numpy(array) for array in self.arrays)
        rows = torch.arange(self.shape[0]).repeat_interleave(starts.diff())
        dense = torch.zeros(self.shape, dtype=values.dtype)
        return dense.index_put_((rows, columns.long()), values, accumulate=True)  # padding is zero

    def pays(self, batch: int) -> bool:
        """Tells whether this A, in a solve, is faster than a dense one."""
        return self.stored <= largest_share(self.shape[0], batch) * self.shape[0] ** 2

    def pays_once(self, batch: int) -> bool:
        """Tells whether one product with rows of samples is faster than a dense one."""
        rows, columns = self.shape
        if batch == 1:
            return self.stored <= ONCE_ALONE * rows * columns - START
        return self.stored <= ONCE * rows * columns - CROSSING * (rows + columns)


def largest_share(states: int, batch: int) -> float:
    """Returns up to which share of entries a solve is faster with a sparse A.

    Example:
        >>> largest_share(2048, 1), largest_share(512, 32), largest_share(2048, 32)
        (0.45, 0.4, 0.33)
    """
    return ALONE if batch == 1 else NEAR if states <= COMPACT else SPREAD


def compress(A: Tensor, *, square: bool = False) -> SparseRows:
    """Converts a matrix to sparse rows.

    Args:
        A: any matrix on the CPU.
        square: whether to look for an order of substitution, in which every state depends on earlier ones.

    Example:
        >>> rows = compress(torch.tensor([[0.0, 0.5], [0.0, 0.0]]), square=True)
        >>> rows.entries, rows.levels
        (1, 2)
    """
    layout, matrix = _layout(), A.detach().contiguous().numpy()
    starts = np.zeros(len(matrix) + 1, np.int64)
    entries = layout.count(matrix, starts)
    values, columns = np.empty(starts[-1], matrix.dtype), np.empty(starts[-1], np.int32)
    layout.fill(matrix, starts, values, columns)
    levels, runs = _runs(layout, columns, starts) if square else (0, np.empty(0, np.int64))
    return SparseRows((A.shape[0], A.shape[1]), int(entries), (values, columns, starts, runs), levels)


def _runs(layout: ModuleType, columns: Any, starts: Any) -> tuple[int, Any]:
    """Returns the number of levels and the runs of neighbouring rows of a level; no runs for less than two."""
    level = np.empty(len(starts) - 1, np.int64)
    levels = layout.find_levels(columns, starts, level)
    if levels < 2:  # a step that changes nothing more is all there is to save
        return levels, np.empty(0, np.int64)
    order = np.argsort(level, kind="stable")
    breaks = np.flatnonzero((np.diff(order) != 1) | (np.diff(level[order]) != 0)) + 1
    first = order[np.concatenate([[0], breaks])]
    last = order[np.concatenate([breaks, [len(order)]]) - 1] + 1
    return levels, np.stack([first, last], axis=1).reshape(-1)


def sparse_or_none(A: Tensor, *, square: bool = False) -> SparseRows | None:
    """Converts a matrix if that can pay off for some batch."""
    if A.numel() == 0 or int(A.count_nonzero()) > ALONE * A.numel():
        return None
    return compress(A, square=square)


class SparseModel(NamedTuple):
    """The matrices of a model ``x = phi(Ax + Bu + b)``, ``y = Cx + Du`` that are sparse; None for the others."""

    A: SparseRows | None
    B: SparseRows | None
    C: SparseRows | None
    D: SparseRows | None


def _change_key(tensor: Tensor) -> tuple[Any, ...]:
    """Returns a key that changes when the tensor does."""
    flat = tensor.detach().reshape(-1)
    whole = flat.element_size() == 8 or (flat.numel() % 2 == 0 and flat.storage_offset() % 2 == 0)
    bits = int(flat.view(torch.int64 if whole else torch.int32).sum())
    return tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), bits


class Cache:
    """Caches what was computed from tensors until one of them changes.

    Changes are recognised by the address of a tensor, by the version that torch counts and by a sum over all bits,
    since fused optimisers and writes to ``tensor.data`` do not count. The sum reads every tensor once, which shows
    for one sample of a large model. An entry keeps its tensors alive, so that no other tensor can get their
    address, and is replaced as a whole: threads may compute it twice, but never see half of it. Copies
    of a cache are empty.
    """

    def __init__(self) -> None:
        self.entry: tuple[Any, Any] | None = None  # a key and what belongs to it

    def get(self, tensors: tuple[Tensor | None, ...], settings: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Returns the cached result of `make` for these tensors and settings."""
        key = settings, *[None if t is None else _change_key(t) for t in tensors]
        entry = self.entry
        if entry is None or entry[0] != key:
            alive = [None if t is None else t.detach() for t in tensors]
            entry = self.entry = key, (make(), alive)
        return entry[1][0]

    def __reduce__(self) -> tuple[Any, ...]:
        return Cache, ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cache)

    def __hash__(self) -> int:
        return hash(Cache)


Matrices = tuple[Tensor | None, ...]
NOTHING = SparseModel(None, None, None, None)


def sparse_matrices(
    cache: Cache, parameters: Matrices, settings: tuple[Any, ...], matrices: Callable[[], Matrices]
) -> SparseModel:
    """Returns all matrices that are sparse enough for some batch, computed again when parameters have changed.

    Args:
        cache: of the model.
        parameters: all that the matrices depend on.
        settings: all else they depend on.
        matrices: computes A, B, C and D.
    """
    compressed: SparseModel = cache.get(parameters, settings, lambda: _compressed(matrices))
    return compressed


@torch.no_grad()
def _compressed(matrices: Callable[[], Matrices]) -> SparseModel:
    rows = (
        None if matrix is None else sparse_or_none(matrix, square=k == 0) for k, matrix in enumerate(matrices())
    )
    return SparseModel(*rows)


def faster(sparse: SparseModel, batch: int) -> SparseModel:
    """Leaves out the matrices that are faster dense; `NOTHING` if all are."""
    A = sparse.A if sparse.A is not None and sparse.A.pays(batch) else None
    others = (W if W is not None and W.pays_once(batch) else None for W in (sparse.B, sparse.C, sparse.D))
    chosen = A, *others
    return SparseModel(*chosen) if any(matrix is not None for matrix in chosen) else NOTHING


def describe(sparse: SparseModel, A: Tensor, batch: int, *, differentiated: bool, automatic: bool) -> str:
    """Says which products are sparse and why.

    Args:
        sparse: what is sparse enough for some batch.
        A: the dense matrix.
        batch: samples.
        differentiated: whether gradients are needed, which sparse products do not have.
        automatic: whether the solver was left to the library.
    """
    n = len(A)
    limit, stored = largest_share(n, batch), int(A.count_nonzero()) if sparse.A is None else sparse.A.stored
    chosen, density = faster(sparse, batch), f"{stored / n**2:.1%} of its entries"
    if chosen is NOTHING:
        return f"dense A ({density}; sparse up to {limit:.0%} at batch {batch})"
    if differentiated:
        return f"dense A ({density}; sparse products are for inference, under torch.no_grad())"
    names = " and ".join(name for name in "ABCD" if getattr(chosen, name) is not None)
    if chosen.A is None:
        return f"sparse {names}, dense A ({density}; sparse up to {limit:.0%} at batch {batch})"
    levels = f", substitution in {chosen.A.levels} levels" if automatic and len(chosen.A.arrays[3]) > 0 else ""
    return f"sparse {names} (A: {density}; sparse up to {limit:.0%} at batch {batch}){levels}"
