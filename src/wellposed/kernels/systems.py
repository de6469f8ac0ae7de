"""The linear systems of Newton's method for many samples, each reduced to where it differs from a reference.

The Jacobian of ``x - phi(Ax + v)`` is ``J = I - D A`` with the slopes D = diag(d) of a sample. Near a reference
``J0 = I - D0 A`` with a known inverse K it is ``J0 - E C A``, where C = d - d0 lives on the k places P in which
the slopes differ (E: the columns of I at P). With ``W = A K``,

    J y = r:    (I - C W_PP) q = C (W r)_P,    y = K (r + E q)
    J' w = g:   (I - C W_PP)' w_P = (K' g)_P,  w = K' g + W' E C w_P

so one factorisation of size k serves both passes. The reference D0 = 0 is free (K = I, W = A, P the active states
of a ReLU); others cost an inverse and pay where many samples are near them: all states active, the pattern of the
majority, a pattern that several samples share.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from wellposed.kernels.lane_factors import aligned, collect, factorise, substitute
from wellposed.kernels.vectors import VECTOR_BYTES

CHUNK = 1 << 25  # numbers of factorisations that are alive at once
KEPT = 1 << 26  # numbers of factorisations that are kept for the backward pass
CANDIDATES = 4  # shared patterns that are considered as references


@dataclass(frozen=True)
class Reference:
    """Slopes with the inverse of their Jacobian."""

    slope: Tensor  # (n,)
    inverse: Tensor | None  # (n, n) K; None for the identity
    product: Tensor  # (n, n) A K

    @staticmethod
    def at(A: Tensor, slope: Tensor | None) -> "Reference":
        """Inverts ``I - D0 A``; None means D0 = 0."""
        if slope is None:
            return Reference(A.new_zeros(len(A)), None, A.contiguous())
        wide = A.double()
        inverse = torch.linalg.inv_ex(torch.eye(len(A), dtype=wide.dtype) - slope.double()[:, None] * wide)[0]
        return Reference(slope, _flushed(inverse, A.dtype), _flushed(wide @ inverse, A.dtype))

    def forward(self, right: Tensor) -> Tensor:
        """Multiplies every row by K."""
        return right if self.inverse is None else right @ self.inverse.mT

    def backward(self, right: Tensor) -> Tensor:
        """Multiplies every row by K'."""
        return right if self.inverse is None else right @ self.inverse


def _flushed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to a shorter dtype; what is nothing beside the rest becomes zero, for denormal numbers are slow."""
    least = torch.finfo(dtype).eps ** 2 * matrix.abs().amax()
    return matrix.masked_fill(matrix.abs() < least, 0).to(dtype)


@dataclass(frozen=True)
class _Chunk:
    """Consecutive samples (in the order of size) that are factorised together."""

    begin: int
    end: int
    sizes: np.ndarray  # of the systems of every group of lanes
    offsets: np.ndarray  # of their matrices
    numbers: int

    @staticmethod
    def split(counts: np.ndarray, lanes: int) -> "list[_Chunk]":
        """Splits samples with ascending counts so that no chunk is longer than it must be."""
        sizes = np.maximum.reduceat(counts, np.arange(0, len(counts), lanes)).astype(np.int64)
        room = sizes * (sizes + 1) * lanes
        number = np.cumsum(room) // CHUNK
        chunks = []
        for part in np.unique(number):
            groups = np.flatnonzero(number == part)
            offsets = np.cumsum(room[groups]) - room[groups]
            end = min((groups[-1] + 1) * lanes, len(counts))
            chunks.append(_Chunk(groups[0] * lanes, end, sizes[groups], offsets, int(room[groups].sum())))
        return chunks


@dataclass
class Systems:
    """The reduced systems of samples that share a reference."""

    reference: Reference
    delta: Tensor  # (B, n) d - d0
    least: float = 0.0  # smaller differences are ignored
    factors: dict[int, np.ndarray] = field(default_factory=dict)

    @cached_property
    def _lists(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[_Chunk]]:
        counts = (self.delta.abs() > self.least).sum(1).numpy()
        order = np.argsort(counts, kind="stable")
        width = int(counts.max(initial=0))
        index = np.empty((len(order), width), np.int64)
        weight = np.empty((len(order), width), self._dtype)
        collect(self.delta.numpy(), self.least, order, counts, index, weight)
        return order, index, weight, _Chunk.split(counts, self._lanes)

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(np.float32 if self.delta.dtype == torch.float32 else np.float64)

    @property
    def _lanes(self) -> int:
        return VECTOR_BYTES // self._dtype.itemsize

    @property
    def numbers(self) -> int:
        """How many numbers the kept factorisations have."""
        return sum(len(work) for work in self.factors.values())

    def _factorised(self, chunk: _Chunk, keep: bool) -> np.ndarray:
        if chunk.begin in self.factors:
            return self.factors[chunk.begin]
        _, index, weight, _ = self._lists
        work = aligned(chunk.numbers, self._dtype)
        part = slice(chunk.begin, chunk.end)
        matrix = self.reference.product.numpy()
        factorise(matrix, index[part], weight[part], chunk.sizes, chunk.offsets, work, self._lanes)
        if keep and self.numbers + chunk.numbers <= KEPT:
            self.factors[chunk.begin] = work
        return work

    def _reduced(self, right: Tensor, transpose: bool, keep: bool) -> Tensor:  # (B, n), zero outside P
        """Solves the reduced systems for the entries of `right` at P."""
        order, index, weight, chunks = self._lists
        places, solution = torch.from_numpy(index), torch.zeros_like(right)
        if places.shape[1] == 0:
            return solution
        empty = torch.from_numpy(weight) == 0  # places that only fill up a row
        known = right[torch.from_numpy(order)].gather(1, places).masked_fill_(empty, 0)
        for chunk in chunks:
            work = self._factorised(chunk, keep)
            part = known[chunk.begin : chunk.end].numpy()
            substitute(work, part, chunk.sizes, chunk.offsets, self._lanes, transpose)
        found = torch.zeros_like(right).scatter_add_(1, places, known.masked_fill_(empty, 0))
        return solution.index_copy_(0, torch.from_numpy(order), found)

    def solve(self, right: Tensor, keep: bool = True) -> Tensor:  # (B, n)
        """Solves ``J y = right`` row by row."""
        q = self._reduced(self.delta * (right @ self.reference.product.mT), transpose=False, keep=keep)
        return self.reference.forward(right + q)

    def solve_transposed(self, right: Tensor) -> Tensor:  # (B, n)
        """Solves ``J' w = right`` row by row."""
        w = self.reference.backward(right)
        reduced = self._reduced(w, transpose=True, keep=True)
        return w + (self.delta * reduced) @ self.reference.product


def choose_references(A: Tensor, slope: Tensor) -> tuple[list[Reference], Tensor]:
    """Returns references that are worth their inverse and the number of the nearest for every sample.

    Costs are nanoseconds on one core: 1.2 k^2 to fill a system, k^3 / 100 to factorise it and n^3 / 8 to prepare a
    reference, about twice that in float64. Which reference is taken changes a result by rounding only.

    Args:
        A: ``(n, n)``.
        slope: ``(B, n)`` of a piecewise linear activation at the current states.
    """
    references, nearest = [Reference.at(A, None)], torch.zeros(len(slope), dtype=torch.int64)
    cost = _cost((slope != 0).sum(1))
    candidates = _candidates(slope)
    costs = torch.stack([_cost((slope != candidate).sum(1)) for candidate in candidates])
    for _ in candidates:
        gain = (cost - costs).clamp_min(0).sum(1)
        best = int(gain.argmax())
        if gain[best] < A.shape[0] ** 3 / 8 + 1e5:
            break
        nearest = nearest.masked_fill(costs[best] < cost, len(references))
        cost = torch.minimum(cost, costs[best])
        references.append(Reference.at(A, candidates[best]))
    return references, nearest


def _cost(size: Tensor) -> Tensor:
    k = size.double()
    return 1.2 * k**2 + k**3 / 100


def _candidates(slope: Tensor) -> list[Tensor]:
    """Lists the extreme patterns, that of the majority and the most frequent ones."""
    low, high = slope.amin(), slope.amax()
    majority = torch.where((slope > (low + high) / 2).double().mean(0) > 0.5, high, low)
    names = torch.randint(1 << 40, (slope.shape[1],), generator=torch.Generator().manual_seed(0)).double()
    keys = (slope > (low + high) / 2).double() @ names  # exact: the sum of 512 such integers fits in 53 bits
    unique, place, count = keys.unique(return_inverse=True, return_counts=True)
    shared = count.topk(min(CANDIDATES, len(count)))
    first = torch.zeros_like(unique, dtype=torch.int64).scatter_(0, place, torch.arange(len(place)))
    frequent = [slope[first[key]] for key, times in zip(shared.indices, shared.values, strict=True) if times > 1]
    return [torch.full_like(slope[0], float(low)), torch.full_like(slope[0], float(high)), majority, *frequent]
