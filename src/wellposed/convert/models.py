"""This library's own modules: implicit models, whose states feed back into themselves."""

from typing import Any

from torch import nn

from wellposed.convert.dispatch import RULES, UnsupportedError
from wellposed.convert.signal import Signal
from wellposed.forms import Dense, LowRank, Operator, Repeated
from wellposed.models.cells import DenseCell, Nonlinearity, PlainConvCell
from wellposed.models.deq import DEQ
from wellposed.models.implicit import ImplicitModel


@RULES.module(ImplicitModel)
def implicit_model(module: ImplicitModel, signal: Signal) -> Signal:
    """Converts ``x = phi(Ax + Bu + b)``, ``y = Cx + Du``: one block with A on the diagonal."""
    *lead, p = signal.shape
    count = signal.size // p
    pieces = [factor.detach().clone() for factor in module.state.factors()]
    A: Operator = Dense(pieces[0]) if len(pieces) == 1 else LowRank(*pieces)
    B, C = (_repeated(Dense(matrix.detach().clone()), count) for matrix in (module.B, module.C))
    bias = None if module.bias is None else module.bias.detach().repeat(count)
    signal = signal.gathered()
    if module.D is not None and signal.costly:
        signal = signal.kept()
    driven = signal.linear(B, (*lead, module.state_features), bias)
    x = signal.network.loop(driven, _repeated(A, count), module.activation)
    y = x.linear(C, (*lead, module.out_features))
    if module.D is None:
        return y
    return y.plus(signal.linear(_repeated(Dense(module.D.detach().clone()), count), y.shape))


def _repeated(operator: Operator, count: int) -> Operator:
    return operator if count == 1 else Repeated(operator, count)


@RULES.module(DEQ)
def deep_equilibrium(module: DEQ, signal: Signal, x0: Any = None) -> Signal:
    """Converts ``x = phi(layer(x) + r(u))``, the cells of one layer, dense or convolutional.

    The form is evaluated only if its loop is proven well-posed, which training alone does not see to.
    """
    cell = module.cell
    if isinstance(cell, DenseCell) and len(cell.layers) == 1:
        layer: nn.Module = cell.layers[0]
    elif isinstance(cell, PlainConvCell):
        layer = cell.state
    else:
        raise UnsupportedError(
            f"a DEQ converts if its cell is a DenseCell of depth 1 or a PlainConvCell; received "
            f"{type(cell).__name__}; register a rule for the cell's DEQ with @to_implicit.register"
        )
    network = signal.network
    injection = _converted(cell.projection, _converted(cell.input, signal))
    x = network.state(injection, cell.activation.activation)
    network.sources[-1] = _converted(layer, x).plus(injection)
    return x


def _converted(module: nn.Module, signal: Signal) -> Signal:
    rule = RULES.of_module(module)
    assert rule is not None
    converted: Signal = rule(module, signal)
    return converted


@RULES.module(Nonlinearity)
def _nonlinearity(module: Nonlinearity, signal: Signal) -> Signal:
    return signal if module.trivial else signal.activate(module.activation)
