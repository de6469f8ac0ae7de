"""Linear layers, products with constant matrices, and this library's own models.

`linear`, `product` and `einsum` are affine. `implicit_model` and `deep_equilibrium` add states that feed back into
themselves.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from wellposed.activations.catalogue import spellings
from wellposed.convert.convert import convert_module
from wellposed.convert.rules.arithmetic import expanded, matrix_multiplied, plus, times, total
from wellposed.convert.signal import RULES, Signal, UnsupportedError, signals_in
from wellposed.forms import Block, Dense, LowRank, Operator, Repeated
from wellposed.models.cells import Nonlinearity
from wellposed.models.deq import DEQ
from wellposed.models.implicit import ImplicitModel
from wellposed.models.multiscale import MultiscaleDEQ


@RULES.named("linear")
def linear(signal: Signal, weight: Tensor, bias: Tensor | None = None) -> Signal:
    """Converts ``y = W x + b`` along the last dimension.

    Example:
        >>> from wellposed.convert.signal import Network
        >>> network = Network((5, 2), torch.float32, torch.device("cpu"))
        >>> linear(network.input, torch.ones(3, 2)).shape
        (1, 5, 3)
    """
    if not isinstance(weight, Tensor) or not isinstance(signal, Signal):
        raise UnsupportedError("a linear layer needs constant weights; multiply two signals by torch.matmul")
    *lead, width = signal.shape
    if width != weight.shape[1]:
        sample = tuple(signal.shape[1:])
        raise UnsupportedError(
            f"it takes {weight.shape[1]} features; received {width}, in a sample of shape {sample}"
        )
    count = signal.size // width
    matrix: Operator = Dense(weight.clone())
    offset = None if bias is None else bias.repeat(count)
    return signal.gathered().linear(
        matrix if count == 1 else Repeated(matrix, count), (*lead, weight.shape[0]), offset
    )


@RULES.module(nn.Linear)
def _linear_layer(module: nn.Linear, signal: Signal) -> Signal:
    return linear(signal, module.weight, module.bias)


def _turned(signal: Signal) -> Signal:
    return signal.select(signal.indices().mT)


@RULES.function(*spellings("matmul"), operator.matmul, *spellings("mm"), *spellings("bmm"), *spellings("mv"))
@RULES.named("dot")
def product(a: Any, b: Any) -> Signal:
    """Converts a matrix product, with a constant on either side or of two signals."""
    if isinstance(a, Signal) and isinstance(b, Signal):
        return matrix_multiplied(a, b)
    if isinstance(a, Signal):
        if b.dim() == 1:
            result = linear(a, b[None])
            return result.reshape(result.shape[:-1])
        return linear(a, b.mT) if b.dim() == 2 else _batched(a, b)
    if a.dim() == 1:
        result = linear(_turned(b) if len(b.shape) > 1 else b, a[None])
        return result.reshape(result.shape[:-1])
    if len(b.shape) == 1:
        return linear(b, a) if a.dim() == 2 else _batched(b.reshape((1, *b.shape)), a.mT)
    return _turned(linear(_turned(b), a)) if a.dim() == 2 else _turned(_batched(_turned(b), a.mT))


def _batched(signal: Signal, matrices: Tensor) -> Signal:
    """Multiplies a signal ``(..., m, k)`` by constant matrices ``(..., k, n)``, one each."""
    lead = torch.broadcast_shapes(signal.shape[:-2], matrices.shape[:-2])
    count, (m, k), n = math.prod(lead), signal.shape[-2:], matrices.shape[-1]
    wide = matrices.broadcast_to((*lead, k, n)).reshape(count, k, n)
    blocks: dict[tuple[int, int], Operator] = {
        (i, i): Repeated(Dense(matrix.mT.contiguous()), m) for i, matrix in enumerate(wide)
    }
    block = Block((m * n,) * count, (m * k,) * count, blocks, signal.dtype, signal.device)
    return expanded(signal, (*lead, m, k)).gathered().linear(block, (*lead, m, n))


@RULES.named("addmm", "baddbmm", "addmv", "addbmm")
def _add_product(bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Signal:
    return plus(times(product(a, b), alpha), times(bias, beta))


@RULES.function(torch.einsum, torch.ops.aten.einsum)
def einsum(equation: str, *operands: Any, **kwargs: Any) -> Signal:
    """Converts an Einstein sum of signals and constants, two at most.

    Example:
        >>> from wellposed.convert.signal import Network
        >>> network = Network((5, 2), torch.float32, torch.device("cpu"))
        >>> einsum("btc,dc->bdt", network.input, torch.ones(3, 2)).shape
        (1, 3, 5)
    """
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    left, arrow, output = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    repeated = any(len(set(names)) < len(names) for names in inputs)
    if not arrow or "." in equation or repeated or len(inputs) > 2:
        raise UnsupportedError(
            f"einsum({equation!r}) has no implicit form; write it with '->', without '...', with at most two "
            "operands and no letter twice in one of them"
        )
    if len(inputs) == 1:
        return _ordered(_summed(given[0], inputs[0], output), output)
    return _pair(inputs, output, given)


def _summed(value: Any, names: str, wanted: str) -> tuple[Any, str]:
    """Sums over the indices that are not needed further."""
    gone = [k for k, name in enumerate(names) if name not in wanted]
    rest = "".join(name for name in names if name in wanted)
    if not gone:
        return value, rest
    return (total(value, gone) if isinstance(value, Signal) else value.sum(gone)), rest


def _ordered(labelled: tuple[Any, str], names: str) -> Any:
    """Permutes dimensions into the given order."""
    value, own = labelled
    order = [own.index(name) for name in names]
    return value.select(value.indices().permute(order)) if isinstance(value, Signal) else value.permute(order)


def _pair(inputs: Sequence[str], output: str, given: Sequence[Any]) -> Signal:
    """Multiplies two operands as matrices ``(both, first, contracted) (both, contracted, second)``."""
    a, first = _summed(given[0], inputs[0], output + inputs[1])
    b, second = _summed(given[1], inputs[1], output + inputs[0])
    both = "".join(name for name in first if name in second and name in output)
    inner = "".join(name for name in first if name in second and name not in output)
    rows = "".join(name for name in first if name not in second)
    columns = "".join(name for name in second if name not in first)
    sizes = dict(zip(first, a.shape, strict=True)) | dict(zip(second, b.shape, strict=True))
    left = _merged(_ordered((a, first), both + rows + inner), [both, rows, inner], sizes)
    right = _merged(_ordered((b, second), both + inner + columns), [both, inner, columns], sizes)
    result = product(left, right) if both else product(_flat(left), _flat(right))
    names = both + rows + columns
    return _ordered((result.reshape([sizes[name] for name in names]), names), output)


def _merged(value: Any, groups: Sequence[str], sizes: dict[str, int]) -> Any:
    return value.reshape([math.prod(sizes[name] for name in group) for group in groups])


def _flat(value: Any) -> Any:
    return value.reshape(value.shape[1:])


@RULES.module(ImplicitModel)
def implicit_model(module: ImplicitModel, signal: Signal) -> Signal:
    """Converts ``x = phi(Ax + Bu + b)``, ``y = Cx + Du``: one block with A on the diagonal."""
    *lead, p = signal.shape
    count = signal.size // p
    B, C = (_repeated(Dense(matrix.clone()), count) for matrix in (module.B, module.C))
    bias = None if module.bias is None else module.bias.repeat(count)
    signal = signal.gathered()
    if module.D is not None and signal.costly:
        signal = signal.as_state()
    driven = signal.linear(B, (*lead, module.state_features), bias)
    x = signal.network.loop(driven, _repeated(state_operator(module), count), module.activation)
    y = x.linear(C, (*lead, module.out_features))
    if module.D is None:
        return y
    return y.plus(signal.linear(_repeated(Dense(module.D.clone()), count), y.shape))


def state_operator(module: ImplicitModel) -> Operator:
    """Copies A of a model."""
    factors = [factor.clone() for factor in module.state.factors()]
    return Dense(factors[0]) if len(factors) == 1 else LowRank(*factors)


def _repeated(operator: Operator, count: int) -> Operator:
    return operator if count == 1 else Repeated(operator, count)


@RULES.module(DEQ)
def deep_equilibrium(module: DEQ, u: Any, x0: Any = None) -> Any:
    """Converts ``x = cell(x, u)``: the states of the cell, which read its own output in the place of x.

    The start x0 is left out: the form is evaluated only if its loops are proven to have one solution.
    """
    if module.noise is not None and not module.noise.silent():
        raise UnsupportedError("noise disturbs its solves, so it has no equilibrium; set deq.noise = None")
    first = next(iter(signals_in(u)))
    network, path = first.network, first.network.path
    start = module.start(tree_map_only(Signal, Signal.zeros, u))
    x = tree_map(lambda part: network.open(part.shape), start)
    image = convert_module(module.cell, f"{path}.cell" if path else "cell", (x, u), {})
    opened, values = list(signals_in(x)), list(signals_in(image))
    shapes = [[part.shape for part in signals] for signals in (opened, values)]
    if shapes[0] != shapes[1]:
        raise UnsupportedError(f"the cell maps states of the shapes {shapes[0]} to {shapes[1]}; give state_shape")
    network.path = path
    closed = network.close(opened, values)
    return closed[0] if isinstance(image, Signal) else tuple(closed)


@RULES.module(MultiscaleDEQ)
def _multiscale(module: MultiscaleDEQ, signal: Any) -> Any:
    path = signal.network.path
    for name in ("stem", "deq", "head", "classifier"):
        signal = convert_module(getattr(module, name), f"{path}.{name}" if path else name, (signal,), {})
    return signal


@RULES.module(Nonlinearity)
def _nonlinearity(module: Nonlinearity, signal: Signal) -> Signal:
    return signal if module.trivial else signal.activate(module.activation)
