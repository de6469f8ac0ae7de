"""One time step of a recurrent network as blocks of states."""

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.convert.multiply import COARSE, UNIT, limit, multiplied, picked, rounded_up
from wellposed.convert.signal import Signal
from wellposed.forms import Dense, Operator, Repeated


@dataclass(frozen=True)
class State:
    """What a network remembers of the steps before.

    Args:
        h: the hidden state, ``(N, h)``.
        c: the cell state of an LSTM.
        reach: a bound on what multiplies a gate, ``|c|`` of an LSTM and ``|h|`` of a GRU; None if there is none.
    """

    h: Signal
    c: Signal | None = None
    reach: float | None = None


class Cell(abc.ABC):
    """The step ``state -> state`` of N sequences at once."""

    @property
    @abc.abstractmethod
    def widths(self) -> tuple[int, ...]:
        """The sizes of the hidden state and, if there is one, of the cell state."""

    @abc.abstractmethod
    def begin(self, *parts: Signal) -> State:
        """Starts from a hidden state and, if there is one, a cell state."""

    @abc.abstractmethod
    def step(self, u: Signal, state: State, name: str) -> State:  # u: (N, p)
        """Reads one more input."""


def operator(matrix: Tensor | Operator, count: int) -> Operator:
    """Returns the operator of a matrix that is applied to each of N rows."""
    single = Dense(matrix.detach().clone()) if isinstance(matrix, Tensor) else matrix
    return single if count == 1 else Repeated(single, count)


def is_zero(signal: Signal) -> bool:
    """Tells whether a signal vanishes whatever the input."""
    return not signal.terms and (signal.offset is None or not bool(signal.offset.any()))


class Affine:
    """``W u + b + V h + d`` for some of the rows of a cell's weights."""

    def __init__(self, weights: Sequence[Tensor], rows: Tensor, biased: bool, count: int) -> None:
        self.width, self.count = len(rows), count
        self.input, self.hidden = (operator(matrix[rows], count) for matrix in weights[:2])
        self.biases = [bias.detach()[rows].repeat(count) for bias in weights[2:4]] if biased else [None, None]

    def of_input(self, u: Signal) -> Signal:
        """Returns ``W u + b``."""
        return u.linear(self.input, (self.count, self.width), self.biases[0])

    def of_hidden(self, h: Signal) -> Signal:
        """Returns ``V h + d``."""
        return h.linear(self.hidden, (self.count, self.width), self.biases[1])

    def __call__(self, u: Signal, h: Signal) -> Signal:
        return self.of_input(u).plus(self.of_hidden(h))


@dataclass(frozen=True)
class Weights:
    """The weights of a cell as torch keeps them: input, hidden, their biases, projection.

    Args:
        count: N, how many sequences are read at once.
        tensors: ``(G n, p)``, ``(G n, h)``, two biases ``(G n,)`` if `biased`, and perhaps ``(h, n)``.
    """

    count: int
    tensors: Sequence[Tensor]
    biased: bool

    def rows(self, gates: int, *chosen: int) -> Affine:
        """Returns the affine map of some of the gates."""
        size = self.tensors[0].shape[0] // gates
        rows = torch.cat([torch.arange(gate * size, (gate + 1) * size) for gate in chosen])
        return Affine(self.tensors, rows.to(self.tensors[0].device), self.biased, self.count)

    @property
    def projection(self) -> Tensor | None:
        """The matrix that makes the hidden state of an LSTM smaller."""
        return self.tensors[-1] if len(self.tensors) % 2 else None


class PlainCell(Cell):
    """``h <- phi(W u + b + V h + d)``."""

    def __init__(self, weights: Weights, activation: str) -> None:
        self.activation, self.affine = activation, weights.rows(1, 0)

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.affine.width,)

    def begin(self, *parts: Signal) -> State:
        return State(parts[0])

    def step(self, u: Signal, state: State, name: str) -> State:
        return State(self.affine(u, state.h).activate(self.activation, name))


class LSTMCell(Cell):
    """``c <- f c + i g``, ``h <- o tanh(c)`` with the gates i, f, o in [0, 1] and g in [-1, 1].

    So ``|c|`` grows by at most one a step, and every product is one of bounded factors (003, section 2.4).
    """

    def __init__(self, weights: Weights) -> None:
        self.gates, self.candidate = weights.rows(4, 0, 1, 3), weights.rows(4, 2)
        matrix = weights.projection
        self.projection = None if matrix is None else operator(matrix, weights.count)
        self._hidden = self.candidate.width if matrix is None else matrix.shape[0]

    @property
    def widths(self) -> tuple[int, ...]:
        return self._hidden, self.candidate.width

    def begin(self, *parts: Signal) -> State:
        h, c = parts
        reach = limit(c)
        # whole numbers stay exact when one is added at every step
        return State(h, c, None if reach is None else float(math.ceil(reach)))

    def step(self, u: Signal, state: State, name: str) -> State:
        assert state.c is not None
        width = self.candidate.width
        gates = self.gates(u, state.h).activate("sigmoid", f"{name} gates")
        candidate = self.candidate(u, state.h).activate("tanh", f"{name} candidate")
        i, f, o = (gates.select(part) for part in gates.places().split(width, dim=1))
        c = self._cell(i, f, candidate, state, f"{name} cell")
        seen = c.activate("tanh", f"{name} tanh(cell)")
        h = multiplied(o, seen, f"{name} output", (1.0, 1.0))
        if self.projection is not None:
            h = h.linear(self.projection, (h.shape[0], self._hidden))
        return State(h, c, None if state.reach is None else state.reach + 1.0)

    def _cell(self, i: Signal, f: Signal, g: Signal, state: State, name: str) -> Signal:
        """Returns ``f c + i g``, both products in one block."""
        assert state.c is not None
        if not state.c.terms:
            product = multiplied(i, g, name, (1.0, 1.0))
            return product if is_zero(state.c) else product.plus(multiplied(f, state.c))
        reach = None if state.reach is None else max(state.reach, 1.0)
        both = multiplied(_stacked_pair(i, f), _stacked_pair(g, state.c), name, (1.0, reach))
        first, second = both.places()
        return both.select(first).plus(both.select(second))


class GRUCell(Cell):
    """``n = tanh(W u + b + r (V h + d))``, ``h <- n + z (h - n)`` with the gates r and z in [0, 1].

    h lies between n and its last value, so ``|h| <= max(1, |h_0|)`` up to rounding.
    """

    def __init__(self, weights: Weights) -> None:
        self.gates, self.candidate = weights.rows(3, 0, 1), weights.rows(3, 2)
        matrix, bias = self.candidate.hidden, self.candidate.biases[1]
        self._gain = float(matrix.abs().row_sums().max())
        self._offset = 0.0 if bias is None else float(bias.abs().max())

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.candidate.width,)

    def begin(self, *parts: Signal) -> State:
        return State(parts[0], reach=limit(parts[0]))

    def step(self, u: Signal, state: State, name: str) -> State:
        width, reach = self.candidate.width, state.reach
        gates = self.gates(u, state.h).activate("sigmoid", f"{name} gates")
        r, z = (gates.select(part) for part in gates.places().split(width, dim=1))
        old = self.candidate.of_hidden(state.h)
        reset = multiplied(r, old, f"{name} reset", (1.0, self._reached(reach)))
        n = self.candidate.of_input(u).plus(reset).activate("tanh", f"{name} candidate")
        change = state.h.plus(n.scaled(-1.0))
        span = None if reach is None else rounded_up((reach + 1.0) * (1 + 2 * UNIT))
        h = n.plus(multiplied(z, change, f"{name} update", (1.0, span)))
        return State(h, reach=None if reach is None else max(reach, 1.0) * (1 + 8 * UNIT))

    def _reached(self, reach: float | None) -> float | None:
        """Bounds ``V h + d``."""
        if reach is None:
            return None
        terms = self.candidate.hidden.shape[1] + 4
        return rounded_up((self._gain * reach + self._offset) * (1 + COARSE + terms * UNIT))


def _stacked_pair(a: Signal, b: Signal) -> Signal:  # (N, n), (N, n) -> (2, N, n)
    return picked([a, b], torch.arange(2 * a.size, device=a.device)).reshape((2, *a.shape))


def new_cell(kind: str, weights: Weights) -> Cell:
    """Builds the cell of a kind, by the names of torch's kernels: rnn_tanh, rnn_relu, lstm or gru."""
    if kind.startswith("rnn_"):
        return PlainCell(weights, kind.removeprefix("rnn_"))
    return LSTMCell(weights) if kind == "lstm" else GRUCell(weights)
