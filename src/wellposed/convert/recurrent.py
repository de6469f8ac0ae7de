"""Recurrent layers, unrolled over the length of their input: one group of states a time step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.convert.cells import Cell, State, Weights, is_zero, new_cell, operator
from wellposed.convert.dispatch import RULES, UnsupportedError
from wellposed.convert.linear import linear
from wellposed.convert.sequence import Layout
from wellposed.convert.signal import Network, Signal, stacked
from wellposed.errors import InputError
from wellposed.forms import Operator
from wellposed.models.implicit import ImplicitModel
from wellposed.models.recurrent import ImplicitRNN


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
            found, state = _walk(cells[number], steps, start, direction == 1, label)
            outputs.append(found)
            last.append(state)
        steps = outputs[0] if directions == 1 else [_beside(pair) for pair in zip(*outputs, strict=True)]
    return layout.joined(outputs), last


def _walk(
    cell: Cell, steps: Sequence[Signal], state: State, backwards: bool, name: str
) -> tuple[list[Signal], State]:
    found: dict[int, Signal] = {}
    times = range(len(steps))
    for t in reversed(times) if backwards else times:
        state = cell.step(steps[t], state, f"{name} step {t}")
        found[t] = state.h
    return [found[t] for t in times], state


def _beside(signals: Sequence[Signal]) -> Signal:  # (N, h) each -> (N, D h)
    """Puts the features of two directions side by side."""
    flat = stacked(signals)
    order = flat.places().reshape(len(signals), *signals[0].shape).transpose(0, 1)
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
        return value.select(value.places()[number])
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
    layout = Layout.of(signal, module.batch_first, name, alone=not network.place)
    kind, place = module.mode.lower(), network.place or module.mode.partition("_")[0].lower()
    cells = [new_cell(kind, Weights(layout.sizes[0], weights, module.bias)) for weights in module.all_weights]
    output, last = run(layout, cells, 1 + module.bidirectional, _several(hx), place)
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
    output, last = run(layout, cells, directions, _several(hx), network.place or kind)
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
    state = own.step(signal, _begin(own, layout, given, 0), network.place or kind)
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
        form, count = self.model.form(), self.count
        hidden = self.model.out_features
        D = None if self.model.D is None else self.model.D.detach()
        pieces = {"B": self.model.B.detach(), "D": D}
        found: dict[str, Operator | None] = {"A": operator(form.A, count), "C": operator(form.C, count)}
        for name, matrix in pieces.items():
            for part, cut in (("s", slice(None, -hidden)), ("h", slice(-hidden, None))):
                used = matrix is not None and bool(matrix[:, cut].any())
                found[name + part] = operator(matrix[:, cut], count) if matrix is not None and used else None
        return found

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.model.out_features,)

    def begin(self, *parts: Signal) -> State:
        return State(parts[0])

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
    layout = Layout.of(signal, module.batch_first, "ImplicitRNN", alone=not network.place)
    count = layout.sizes[0]
    cells = [ImplicitCell(count, module.cell(number)) for number in range(len(module.cells))]
    output, last = run(layout, cells, module.directions, (h0,), network.place or "rnn")
    if module.readout is not None:
        output = linear(output, module.readout.weight, module.readout.bias)
    return output, _last(last)[0]
