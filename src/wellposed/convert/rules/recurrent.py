"""Recurrent layers, unrolled over the length of their input: one group of states a time step.

`PlainCell`, `LSTMCell` and `GRUCell` are one time step as blocks of states. `Layout` says how a layer reads its
input: which dimension is the batch, which is time. `run` unrolls stacked layers; `ImplicitCell` is the step of an
`ImplicitRNN`.
"""

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.convert.rules.arithmetic import COARSE, UNIT, limit, multiplied, picked, rounded_up
from wellposed.convert.rules.linear import linear, state_operator
from wellposed.convert.signal import RULES, Network, Signal, UnsupportedError, stacked
from wellposed.errors import InputError
from wellposed.forms import Dense, Operator, Repeated
from wellposed.models.implicit import ImplicitModel
from wellposed.models.recurrent import ImplicitRNN


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
    def begin(self, *initial: Signal) -> State:
        """Starts from a hidden state and, if there is one, a cell state."""

    @abc.abstractmethod
    def step(self, u: Signal, state: State, name: str) -> State:  # u: (N, p)
        """Reads one more input."""


def operator(matrix: Tensor | Operator, count: int) -> Operator:
    """Returns the operator of a matrix that is applied to each of N rows."""
    single = Dense(matrix.clone()) if isinstance(matrix, Tensor) else matrix
    return single if count == 1 else Repeated(single, count)


def is_zero(signal: Signal) -> bool:
    """Returns whether a signal vanishes whatever the input."""
    return not signal.terms and (signal.offset is None or not bool(signal.offset.any()))


class Affine:
    """``W u + b + V h + d`` for some of the rows of a cell's weights."""

    def __init__(self, weights: Sequence[Tensor], rows: Tensor, biased: bool, count: int) -> None:
        self.width, self.count = len(rows), count
        self.input, self.hidden = (operator(matrix[rows], count) for matrix in weights[:2])
        self.biases = [bias[rows].repeat(count) for bias in weights[2:4]] if biased else [None, None]

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

    def begin(self, *initial: Signal) -> State:
        return State(initial[0])

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

    def begin(self, *initial: Signal) -> State:
        h, c = initial
        reach = limit(c)
        # whole numbers stay exact when one is added at every step
        return State(h, c, None if reach is None else float(math.ceil(reach)))

    def step(self, u: Signal, state: State, name: str) -> State:
        assert state.c is not None
        width = self.candidate.width
        gates = self.gates(u, state.h).activate("sigmoid", f"{name} gates")
        candidate = self.candidate(u, state.h).activate("tanh", f"{name} candidate")
        i, f, o = (gates.select(part) for part in gates.indices().split(width, dim=1))
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
        first, second = both.indices()
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

    def begin(self, *initial: Signal) -> State:
        return State(initial[0], reach=limit(initial[0]))

    def step(self, u: Signal, state: State, name: str) -> State:
        width, reach = self.candidate.width, state.reach
        gates = self.gates(u, state.h).activate("sigmoid", f"{name} gates")
        r, z = (gates.select(part) for part in gates.indices().split(width, dim=1))
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


@dataclass(frozen=True)
class Layout:
    """How a layer reads its input: N sequences of T steps, batch or time first.

    A sample is a batch of one, so ``(1, T, p)`` with `batch_first` and ``(T, 1, p)`` without are one sequence.
    """

    signal: Signal
    batch_first: bool

    @classmethod
    def of(cls, signal: Signal, batch_first: bool, name: str, alone: bool = False) -> "Layout":
        """Checks the shape; a layer that is the whole network may read ``(T, p)`` with time first."""
        shape = signal.shape
        if len(shape) != 3:
            raise InputError(
                f"{name} reads sequences: as a whole network it takes input_shape (T, features), inside one a "
                f"tensor of three dimensions; received the shape {shape} (a batch of one sample included)"
            )
        if batch_first or shape[1] == 1 or shape[0] > 1:
            return cls(signal, batch_first)
        if alone:
            return cls(signal.reshape((shape[1], 1, shape[2])), False)
        raise InputError(
            f"{name} has batch_first=False and would read the batch of {shape} as time; give it "
            "x.transpose(0, 1), or build it with batch_first=True"
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """N and T."""
        first, second, _ = self.signal.shape
        return (first, second) if self.batch_first else (second, first)

    def steps(self) -> list[Signal]:  # T of (N, p)
        """Cuts the input in time steps."""
        count, times = self.sizes[0], self.signal.indices().unbind(1 if self.batch_first else 0)
        return [picked([self.signal], time.reshape(-1)).reshape((count, time.shape[1])) for time in times]

    def joined(self, outputs: Sequence[Sequence[Signal]]) -> Signal:  # D of T of (N, h)
        """Lays the outputs of all directions out as the input was."""
        count, length = self.sizes
        flat = stacked([direction[t] for t in range(length) for direction in outputs])
        order = flat.indices().reshape(length, len(outputs), count, -1)
        order = order.permute(2, 0, 1, 3) if self.batch_first else order.permute(0, 2, 1, 3)
        return flat.select(order.flatten(2))

    def rows(self) -> Signal:  # (N, T, p)
        """Returns the input with the batch first."""
        places = self.signal.indices()
        return self.signal.select(places if self.batch_first else places.transpose(0, 1))

    def restored(self, signal: Signal) -> Signal:  # (N, T, p)
        """Gives outputs with the batch first the layout of the input."""
        return signal if self.batch_first else signal.select(signal.indices().transpose(0, 1))


def run(
    layout: Layout, cells: Sequence[Cell], directions: int, given: Sequence[Any], name: str
) -> tuple[Signal, list[State]]:
    """Runs stacked layers, the two directions of a layer one after the other in `cells`.

    Args:
        given: the initial states of all cells, ``(K, N, h)`` each: tensors, signals or None.

    Returns:
        the outputs of the last layer and the last state of every cell.
    """
    steps, last = layout.steps(), list[State]()
    outputs: list[list[Signal]] = []
    for layer in range(len(cells) // directions):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            label = _label(name, layer if len(cells) > directions else None, direction)
            start = _begin(cells[number], layout, given, number)
            one_way, state = _walk(cells[number], steps, start, direction == 1, label)
            outputs.append(one_way)
            last.append(state)
        steps = outputs[0] if directions == 1 else [_beside(pair) for pair in zip(*outputs, strict=True)]
    return layout.joined(outputs), last


def _walk(
    cell: Cell, steps: Sequence[Signal], state: State, backwards: bool, name: str
) -> tuple[list[Signal], State]:
    outputs: dict[int, Signal] = {}
    times = range(len(steps))
    for t in reversed(times) if backwards else times:
        state = cell.step(steps[t], state, f"{name} step {t}")
        outputs[t] = state.h
    return [outputs[t] for t in times], state


def _beside(signals: Sequence[Signal]) -> Signal:  # (N, h) each -> (N, D h)
    """Puts the features of two directions side by side."""
    flat = stacked(signals)
    order = flat.indices().reshape(len(signals), *signals[0].shape).transpose(0, 1)
    return flat.select(order.flatten(1))


def _label(name: str, layer: int | None, direction: int) -> str:
    return name + ("" if layer is None else f" layer {layer}") + (" backwards" if direction else "")


def _stacked_layers(signals: Sequence[Signal]) -> Signal:  # K of (N, h) -> (K, N, h)
    return stacked(signals).reshape((len(signals), *signals[0].shape))


def _begin(cell: Cell, layout: Layout, given: Sequence[Any], number: int) -> State:
    network, count = layout.signal.network, layout.sizes[0]
    values = [*given, *(None,) * (len(cell.widths) - len(given))]
    pairs = zip(values, cell.widths, strict=True)
    return cell.begin(*(_initial(network, count, width, value, number) for value, width in pairs))


def _initial(network: Network, count: int, width: int, value: Any, number: int) -> Signal:  # (N, h)
    """Reads one cell's part of a state that a layer was given."""
    if isinstance(value, Signal):
        return value.select(value.indices()[number])
    if value is None or not bool(value.any()):
        return Signal(network, (count, width), {})
    rows = value[number]
    if rows.shape[0] != count:
        if not torch.equal(rows, rows[:1].expand_as(rows)):
            raise InputError("initial states differ from sample to sample; a form has the same ones for all")
        rows = rows[:1].expand(count, -1)
    return network.constant(rows)


def _several(hx: Any) -> Sequence[Any]:
    return hx if isinstance(hx, tuple | list) else (hx,)


@RULES.module(nn.RNN, nn.LSTM, nn.GRU)
def _layer(module: nn.RNNBase, signal: Signal, hx: Any = None) -> tuple[Signal, Any]:
    name, network = type(module).__name__, signal.network
    layout = Layout.of(signal, module.batch_first, name, alone=not network.path)
    kind, path = module.mode.lower(), network.path or module.mode.partition("_")[0].lower()
    cells = [new_cell(kind, Weights(layout.sizes[0], weights, module.bias)) for weights in module.all_weights]
    output, last = run(layout, cells, 1 + module.bidirectional, _several(hx), path)
    h, *c = _last(last)
    return output, (h, c[0]) if c else h


def _last(states: Sequence[State]) -> list[Signal]:
    """Returns the last hidden states and, of an LSTM, the last cell states."""
    cells = [state.c for state in states if state.c is not None]
    return [_stacked_layers([state.h for state in states]), *([_stacked_layers(cells)] if cells else [])]


def _fused(
    signal: Signal,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    kind: str,
) -> tuple[Signal, ...]:
    """Converts the kernels behind the layers, such as ``torch.lstm``."""
    if not isinstance(signal, Signal) or not isinstance(has_biases, bool):
        raise UnsupportedError(f"torch.{kind} of a packed sequence has no implicit form; give it a padded tensor")
    network, directions = signal.network, 1 + bidirectional
    layout, each = Layout.of(signal, batch_first, kind), len(params) // (num_layers * directions)
    weights = [params[start : start + each] for start in range(0, len(params), each)]
    cells = [new_cell(kind, Weights(layout.sizes[0], part, has_biases)) for part in weights]
    output, last = run(layout, cells, directions, _several(hx), network.path or kind)
    return output, *_last(last)


def _cell(
    signal: Signal, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None, *, kind: str
) -> Any:
    """Converts one step, such as ``torch.lstm_cell``."""
    if len(signal.shape) != 2:
        raise InputError(f"{kind} takes (batch, features); received the shape {signal.shape}, of one sample")
    network, count = signal.network, signal.shape[0]
    weights = [w_ih, w_hh] if b_ih is None else [w_ih, w_hh, b_ih, b_hh]
    own = new_cell(kind, Weights(count, weights, b_ih is not None))
    given = [None if value is None else _first(value) for value in _several(hx)]
    layout = Layout(signal.reshape((count, 1, signal.shape[1])), True)
    state = own.step(signal, _begin(own, layout, given, 0), network.path or kind)
    return state.h if state.c is None else (state.h, state.c)


def _first(value: Any) -> Any:  # (N, h) -> (1, N, h)
    return value.reshape((1, *value.shape)) if isinstance(value, Signal) else value[None]


@RULES.module(nn.RNNCell, nn.LSTMCell, nn.GRUCell)
def _cell_layer(module: nn.RNNCellBase, signal: Signal, hx: Any = None) -> Any:
    kind = type(module).__name__.removesuffix("Cell").lower()
    if isinstance(module, nn.RNNCell):
        kind = f"rnn_{module.nonlinearity}"
    weights = (module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh)
    return _cell(signal, hx, *weights, kind=kind)


_ATEN = torch.ops.aten
for _kind, _layers, _cells in (
    ("lstm", (torch.lstm, _ATEN.lstm.input), (torch.lstm_cell, _ATEN.lstm_cell)),
    ("gru", (torch.gru, _ATEN.gru.input), (torch.gru_cell, _ATEN.gru_cell)),
    ("rnn_tanh", (torch.rnn_tanh, _ATEN.rnn_tanh.input), (torch.rnn_tanh_cell, _ATEN.rnn_tanh_cell)),
    ("rnn_relu", (torch.rnn_relu, _ATEN.rnn_relu.input), (torch.rnn_relu_cell, _ATEN.rnn_relu_cell)),
):
    RULES.function(*_layers)(partial(_fused, kind=_kind))
    RULES.function(*_cells)(partial(_cell, kind=_kind))


@dataclass(frozen=True)
class ImplicitCell(Cell):
    """One step ``x = phi(Ax + Bu + b)``, ``h = Cx + Du`` with ``u = (s, h)``: a block of states with a loop."""

    count: int
    model: ImplicitModel

    @cached_property
    def operators(self) -> dict[str, Operator | None]:
        """A and C, and B and D cut in what reads the input and what reads the hidden state."""
        hidden, count = self.model.out_features, self.count
        A = state_operator(self.model)
        operators: dict[str, Operator | None] = {"A": operator(A, count), "C": operator(self.model.C, count)}
        for name, matrix in {"B": self.model.B, "D": self.model.D}.items():
            for part, cut in (("s", slice(None, -hidden)), ("h", slice(-hidden, None))):
                used = matrix is not None and (torch.is_grad_enabled() or bool(matrix[:, cut].any()))
                operators[name + part] = operator(matrix[:, cut], count) if matrix is not None and used else None
        return operators

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.model.out_features,)

    def begin(self, *initial: Signal) -> State:
        return State(initial[0])

    def step(self, u: Signal, state: State, name: str) -> State:
        sizes = self.model.state_features, self.model.out_features
        v = self._driven("B", u, state.h, sizes[0])
        if self.model.bias is not None:
            v = v.shifted(self.model.bias)
        A, C = self.operators["A"], self.operators["C"]
        assert A is not None and C is not None
        x = u.network.loop(v, A, self.model.activation, name)
        h = x.linear(C, (self.count, sizes[1]))
        through = self._driven("D", u, state.h, sizes[1])
        h = h if is_zero(through) else h.plus(through)
        if self.operators["Dh"] is not None:
            # as a state of its own, or else every hidden state would depend on all equilibria before it
            h = h.activate("identity", f"{name} hidden")
        return State(h)

    def _driven(self, name: str, s: Signal, h: Signal, width: int) -> Signal:
        total = Signal(s.network, (self.count, width), {})
        for value, part in ((s, self.operators[name + "s"]), (h, self.operators[name + "h"])):
            if part is not None:
                total = total.plus(value.linear(part, total.shape))
        return total


@RULES.module(ImplicitRNN)
def _implicit(module: ImplicitRNN, signal: Signal, h0: Any = None, lengths: Any = None) -> tuple[Signal, Signal]:
    if lengths is not None:
        raise UnsupportedError("ImplicitRNN with lengths has no implicit form: they differ from sample to sample")
    network = signal.network
    layout = Layout.of(signal, module.batch_first, "ImplicitRNN", alone=not network.path)
    count = layout.sizes[0]
    cells = [ImplicitCell(count, module.cell(number)) for number in range(len(module.cells))]
    output, last = run(layout, cells, module.directions, (h0,), network.path or "rnn")
    if module.readout is not None:
        output = linear(output, module.readout.weight, module.readout.bias)
    return output, _last(last)[0]
