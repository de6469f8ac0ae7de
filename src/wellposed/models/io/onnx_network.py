"""Networks from ONNX files, as torch modules of plain operators that `to_implicit` converts.

`read_onnx` runs the graph once on zeros. What depends on no input becomes a constant, and every other node a step:
a function of torch with its sizes and settings fixed. The file is data; nothing of it is ever executed, and files
of weights beside it are not opened.
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import FileFormatError, InputError, require

Function = Callable[..., Tensor]
LARGEST = 2**26  # numbers in one value of the graph


class Step(NamedTuple):
    """One node: a function, the values and then the constants that it takes, and the value it makes."""

    function: Function
    values: list[str]
    constants: list[str]
    output: str


class OnnxNetwork(nn.Module):
    """A network that was read from an ONNX file; constants are its buffers, outputs one row a sample.

    Args:
        steps: in order.
        constants: by the names that the steps use.
        input_shape: of one sample.
        input_name, output_name: of the values that go in and come out.
    """

    def __init__(
        self, steps: list[Step], constants: dict[str, Tensor], input_shape: tuple[int, ...], input_name: str,
        output_name: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.steps, self.input_shape, self.input_name, self.output_name = (
            steps,
            input_shape,
            input_name,
            output_name,
        )
        for name, value in constants.items():
            self.register_buffer(name, value)

    def forward(self, u: Tensor) -> Tensor:  # (B, *input_shape) -> (B, q)
        """Evaluates the graph."""
        values = {self.input_name: u}
        for step in self.steps:
            given = [values[name] for name in step.values] + [getattr(self, name) for name in step.constants]
            values[step.output] = step.function(*given)
        return values[self.output_name].flatten(1)


class _Call(NamedTuple):
    """What the maker of a step sees: the settings of the node, and its inputs as they are for zeros."""

    attributes: dict[str, Any]
    inputs: list[Tensor | None]
    variable: list[bool]
    version: int

    def setting(self, name: str, default: Any) -> Any:
        """Returns an attribute."""
        return self.attributes.get(name, default)

    def x(self) -> Tensor:
        """Returns the first input."""
        return self.given(0)

    def given(self, index: int) -> Tensor:
        """Returns an input that must be there."""
        value = self.inputs[index] if index < len(self.inputs) else None
        if value is None:
            raise InputError(f"input {index} is missing")
        return value

    def numbers(self, index: int, name: str, default: Sequence[int] | None = None) -> list[int]:
        """Returns whole numbers that are an attribute, or in later versions a constant input."""
        if name in self.attributes:
            return [int(value) for value in self.attributes[name]]
        if index < len(self.inputs) and self.inputs[index] is not None:
            if self.variable[index]:
                raise InputError(f"{name!r} depends on the input of the network")
            return [int(value) for value in self.given(index).flatten().tolist()]
        if default is None:
            raise InputError(f"{name!r} is missing")
        return list(default)


class Operation(NamedTuple):
    """A function, and which inputs it takes, in their order; the rest are settings."""

    function: Function
    takes: tuple[int, ...] = (0,)


def _feature_axes(dims: Sequence[int], rank: int) -> list[int]:
    """Counts axes from the front, and refuses that of the samples."""
    axes = [dim % rank for dim in dims]
    if 0 in axes:
        raise InputError("it mixes or removes samples of a batch")
    return axes


def _gemm(call: _Call) -> Operation:
    alpha, beta = (call.setting(name, 1.0) for name in ("alpha", "beta"))
    if call.setting("transA", 0) or call.variable[1]:
        raise InputError("the second factor must be a constant, and the first one is not transposed")
    transposed, biased = bool(call.setting("transB", 0)), len(call.inputs) > 2 and call.inputs[2] is not None

    def function(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = F.linear(x, weight if transposed else weight.mT)
        y = y if alpha == 1 else alpha * y
        return y if bias is None else y + (bias if beta == 1 else beta * bias)

    return Operation(function, (0, 1, 2) if biased else (0, 1))


def _matmul(call: _Call) -> Operation:
    if call.variable[1] and call.given(1).dim() < 3:
        raise InputError("a constant times the input would mix samples of a batch")
    if not call.variable[1] and call.given(1).dim() == 2:
        return Operation(lambda x, weight: F.linear(x, weight.mT), (0, 1))
    return Operation(torch.matmul, (0, 1))


def _binary(function: Function) -> Callable[[_Call], Operation]:
    return lambda call: Operation(function, (0, 1))


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _dropout(call: _Call) -> Operation:
    if len(call.inputs) > 2 and call.inputs[2] is not None and (call.variable[2] or bool(call.inputs[2].any())):
        raise InputError("it is in training mode")
    return Operation(lambda x: x)


def _unary(function: Function) -> Callable[[_Call], Operation]:
    return lambda call: Operation(function)


def _sliding(call: _Call, kernel: Sequence[int]) -> dict[str, Any]:
    """Reads stride, dilation and padding; padding that differs by side is returned as "before"."""
    size = call.x().shape[2:]
    stride, dilation = (list(call.setting(name, [1] * len(size))) for name in ("strides", "dilations"))
    pads, how = list(call.setting("pads", [0] * 2 * len(size))), call.setting("auto_pad", b"NOTSET").decode()
    if math.prod(n + max(pads) for n in call.x().shape) > LARGEST or min(pads) < 0:
        raise InputError(f"a padding of {pads} is negative or makes more than {LARGEST:,} numbers")
    if how.startswith("SAME"):
        if set(dilation) != {1}:
            raise InputError("padding by auto_pad with gaps is read in several ways; write pads instead")
        reach = zip(size, kernel, stride, dilation, strict=True)
        whole = [max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0) for n, k, s, d in reach]
        less, more = [n // 2 for n in whole], [n - n // 2 for n in whole]
        pads = less + more if how == "SAME_UPPER" else more + less
    low, high = pads[: len(size)], pads[len(size) :]
    before = None if low == high else [n for pair in zip(low[::-1], high[::-1], strict=True) for n in pair]
    return {"stride": stride, "dilation": dilation, "padding": low if before is None else 0, "before": before}


def _convolution(call: _Call) -> Operation:
    weight = call.given(1)
    if call.variable[1]:
        raise InputError("its weights depend on the input")
    sliding = _sliding(call, weight.shape[2:])
    before, groups = sliding.pop("before"), int(call.setting("group", 1))
    convolve = getattr(F, f"conv{weight.dim() - 2}d")

    def function(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return convolve(x if before is None else F.pad(x, before), weight, bias, groups=groups, **sliding)

    return Operation(function, tuple(k for k, value in enumerate(call.inputs) if value is not None))


def _pool(kind: str, call: _Call) -> Operation:
    kernel = [int(size) for size in call.setting("kernel_shape", [])]
    if call.x().dim() != len(kernel) + 2:
        raise InputError(f"its input {tuple(call.x().shape)} is not samples, channels and {len(kernel)} axes")
    options = _sliding(call, kernel)
    if options.pop("before") is not None:
        raise InputError("padding that differs by side is not supported")
    options["ceil_mode"] = bool(call.setting("ceil_mode", 0))
    if kind == "avg":
        if set(options.pop("dilation")) != {1}:
            raise InputError("an average with gaps is not supported")
        options["count_include_pad"] = bool(call.setting("count_include_pad", 0))
    return Operation(partial(getattr(F, f"{kind}_pool{len(kernel)}d"), kernel_size=kernel, **options))


def _global_average(call: _Call) -> Operation:
    dims = list(range(2, call.x().dim()))
    return Operation(lambda x: x.mean(dims, keepdim=True))


def _batch_norm(call: _Call) -> Operation:
    if call.setting("training_mode", 0):
        raise InputError("it is in training mode")
    epsilon = float(call.setting("epsilon", 1e-5))

    def function(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, epsilon)

    return Operation(function, (0, 1, 2, 3, 4))


def _reshaped(call: _Call) -> Operation:
    x = call.x()
    shape = call.numbers(1, "shape")
    if not call.setting("allowzero", 0):
        shape = [x.shape[k] if size == 0 else size for k, size in enumerate(shape)]
    return _to_shape(x, x.reshape(shape)) if call.variable[0] else Operation(lambda x: x.reshape(shape))


def _to_shape(x: Tensor, y: Tensor) -> Operation:
    """Reshapes samples of any number; the first size is theirs."""
    if y.dim() == 0 or y.shape[0] != x.shape[0]:
        raise InputError(f"it makes {tuple(y.shape)} of {tuple(x.shape)}, which mixes samples of a batch")
    rest = y.shape[1:]
    return Operation(lambda x: x.reshape(-1, *rest))


def _flattened(call: _Call) -> Operation:
    x, axis = call.x(), int(call.setting("axis", 1))
    return _to_shape(x, x.reshape(math.prod(x.shape[:axis]) if axis else 1, -1))


def _squeezed(call: _Call) -> Operation:
    x = call.x()
    ones = [k for k in range(1, x.dim()) if x.shape[k] == 1]
    axes = _feature_axes(call.numbers(1, "axes", ones), x.dim())
    return _to_shape(x, x.squeeze(axes)) if call.variable[0] else Operation(lambda x: x.squeeze(axes))


def _unsqueezed(call: _Call) -> Operation:
    x, axes = call.x(), call.numbers(1, "axes")
    if not call.variable[0]:
        return Operation(lambda x: _with_axes(x, axes))
    _feature_axes(axes, x.dim() + len(axes))
    return _to_shape(x, _with_axes(x, axes))


def _with_axes(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in sorted(axis % (x.dim() + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _transposed(call: _Call) -> Operation:
    order = [int(k) for k in call.setting("perm", range(call.x().dim())[::-1])]
    if call.variable[0] and order[0] != 0:
        raise InputError("it moves the axis of the samples")
    return Operation(lambda x: x.permute(order))


def _joined(call: _Call) -> Operation:
    axis = int(call.setting("axis", 0))
    if any(call.variable):
        _feature_axes([axis], call.given(call.variable.index(True)).dim())
    return Operation(lambda *tensors: torch.cat(tensors, axis), tuple(range(len(call.inputs))))


def _reduced(name: str, call: _Call) -> Operation:
    x, keep = call.x(), bool(call.setting("keepdims", 1))
    axes = _feature_axes(call.numbers(1, "axes"), x.dim())
    return Operation(lambda x: getattr(x, name)(axes, keepdim=keep))


def _clipped(call: _Call) -> Operation:
    ends = [call.setting(name, None) for name in ("min", "max")]
    for index, value in enumerate(call.inputs[1:3]):
        if value is not None:
            if call.variable[index + 1]:
                raise InputError("its ends depend on the input")
            ends[index] = float(value)
    return Operation(lambda x: x.clamp(*ends))


def _softmax(call: _Call) -> Operation:
    axis, rank = int(call.setting("axis", -1 if call.version >= 13 else 1)), call.x().dim()
    if call.version < 13 and axis % rank != rank - 1:
        raise InputError("over several axes it is not supported")
    _feature_axes([axis], rank)
    return Operation(lambda x: x.softmax(axis))


def _gathered(call: _Call) -> Operation:
    axis, index = int(call.setting("axis", 0)), call.given(1)
    if call.variable[1]:
        raise InputError("its indices depend on the input")
    if call.variable[0]:
        _feature_axes([axis], call.x().dim())
    flat, size = index.flatten().tolist(), call.x().shape[axis]
    if flat and not -size <= min(flat) <= max(flat) < size:
        raise InputError(f"an index is outside of -{size} to {size - 1}")

    def function(x: Tensor) -> Tensor:
        picked = torch.cat([x.narrow(axis, k % size, 1) for k in flat], axis)
        return picked if index.dim() == 1 else picked.squeeze(axis)

    if index.dim() > 1:
        raise InputError("its indices must be a number or a list")
    return Operation(function)


OPERATORS: dict[str, Callable[[_Call], Operation]] = {
    "Add": _binary(torch.add),
    "AveragePool": partial(_pool, "avg"),
    "BatchNormalization": _batch_norm,
    "Clip": _clipped,
    "Concat": _joined,
    "Conv": _convolution,
    "Div": _binary(_quotient),
    "Dropout": _dropout,
    "Elu": lambda call: Operation(partial(F.elu, alpha=float(call.setting("alpha", 1.0)))),
    "Flatten": _flattened,
    "Gather": _gathered,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average,
    "Identity": _unary(lambda x: x),
    "LeakyRelu": lambda call: Operation(partial(F.leaky_relu, negative_slope=float(call.setting("alpha", 0.01)))),
    "MatMul": _matmul,
    "MaxPool": partial(_pool, "max"),
    "Mul": _binary(torch.mul),
    "Neg": _unary(torch.neg),
    "ReduceMean": partial(_reduced, "mean"),
    "ReduceSum": partial(_reduced, "sum"),
    "Relu": _unary(torch.relu),
    "Reshape": _reshaped,
    "Sigmoid": _unary(torch.sigmoid),
    "Softmax": _softmax,
    "Softplus": _unary(F.softplus),
    "Squeeze": _squeezed,
    "Sub": _binary(torch.sub),
    "Tanh": _unary(torch.tanh),
    "Transpose": _transposed,
    "Unsqueeze": _unsqueezed,
}


def _constant(call: _Call) -> Tensor:
    ((_, value),) = call.attributes.items()
    return value if isinstance(value, Tensor) else torch.tensor(value)


FIXED: dict[str, Callable[[_Call], Tensor]] = {
    "Constant": _constant,
    "Shape": lambda call: torch.tensor(call.x().shape[call.setting("start", 0) : call.setting("end", None)]),
}


def read_onnx(path: str | os.PathLike[str]) -> OnnxNetwork:
    """Reads a feed-forward network with one input and one output, batch first.

    Raises:
        FileFormatError: the file is damaged, or holds an operator that is not supported, which is named.

    Example:
        >>> read_onnx("network.onnx")  # doctest: +SKIP
    """
    onnx, name = require("onnx", extra="share"), os.path.basename(path)
    try:
        model = onnx.load(os.fspath(path), load_external_data=False)
        for tensor in model.graph.initializer:
            _check_inside(onnx, tensor, name)  # before the checker, which would look for the other file
        onnx.checker.check_model(model)
    except (OSError, FileFormatError):
        raise
    except Exception as error:  # whatever a damaged file leads to
        reason = (str(error).strip().splitlines() or ["it is damaged"])[0]
        raise FileFormatError(f"{name} is not an ONNX file that can be read: {reason}") from error
    network = _Reader(onnx, model, name).network()
    _check_samples_apart(network, name)
    return network


def _check_inside(onnx: Any, tensor: Any, name: str) -> None:
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise FileFormatError(
            f"{name}: the weights {tensor.name!r} are in another file; save the network with its weights inside"
        )


def _check_samples_apart(network: OnnxNetwork, name: str) -> None:
    """Refuses a network whose answer for a sample depends on the others."""
    kinds = [value.dtype for value in network.buffers() if value.is_floating_point()]
    dtype = kinds[0] if kinds else torch.float32
    u = torch.rand(3, *network.input_shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        with torch.no_grad():
            together, alone = network(u), torch.cat([network(row[None]) for row in u])
        apart = together.shape == alone.shape and torch.allclose(together, alone, 1e-3, 1e-4, equal_nan=True)
    except (RuntimeError, ValueError, IndexError):
        apart = False
    if not apart:
        raise FileFormatError(f"{name} computes with several samples of a batch at once, which is not supported")


class _Reader:
    """Turns the nodes of a graph into steps."""

    def __init__(self, onnx: Any, model: Any, name: str) -> None:
        self.onnx, self.graph, self.name = onnx, model.graph, name
        self.version = max(
            (part.version for part in model.opset_import if part.domain in ("", "ai.onnx")), default=1
        )
        self.steps: list[Step] = []
        self.constants: dict[str, Tensor] = {}
        self.names: dict[str, str] = {}  # of the buffers, by the names of the graph
        self.known: dict[str, Tensor] = {}  # every value, as it is for zeros
        self.variable: set[str] = set()  # values that depend on the input

    def network(self) -> OnnxNetwork:
        """Reads everything."""
        for tensor in self.graph.initializer:
            self.known[tensor.name] = self._tensor(tensor)
        given = [value for value in self.graph.input if value.name not in self.known]
        if len(given) != 1 or len(self.graph.output) != 1:
            self._fail(
                f"it has {len(given)} inputs and {len(self.graph.output)} outputs; one of each is supported"
            )
        start, end = given[0].name, self.graph.output[0].name
        zeros = self._zeros(given[0])
        self.known[start] = zeros
        self.variable.add(start)
        for node in self.graph.node:
            self._add(node)
        if end not in self.variable:
            self._fail("its output does not depend on its input")
        if self.known[end].shape[:1] != zeros.shape[:1]:
            self._fail(f"its output {tuple(self.known[end].shape)} has no axis for samples")
        return OnnxNetwork(self.steps, self.constants, tuple(zeros.shape[1:]), start, end).eval()

    def _tensor(self, tensor: Any) -> Tensor:
        _check_inside(self.onnx, tensor, self.name)
        try:
            return torch.from_numpy(self.onnx.numpy_helper.to_array(tensor).copy())
        except (ValueError, TypeError, KeyError) as error:  # more or fewer numbers than sizes, an unusual type
            raise FileFormatError(f"{self.name}: the weights {tensor.name!r} cannot be read: {error}") from error

    def _zeros(self, value: Any) -> Tensor:
        kinds = {self.onnx.TensorProto.FLOAT: torch.float32, self.onnx.TensorProto.DOUBLE: torch.float64}
        kind, dims = value.type.tensor_type.elem_type, value.type.tensor_type.shape.dim
        sizes = [int(dim.dim_value) if dim.HasField("dim_value") else 0 for dim in dims]
        if kind not in kinds:
            self._fail(f"the input {value.name!r} is not of float32 or float64")
        if len(sizes) < 2 or 0 in sizes[1:] or min(sizes) < 0:
            self._fail(
                f"the input {value.name!r} has the sizes {sizes}; needed are samples, and fixed sizes of one"
            )
        if math.prod([sizes[0] or 1, *sizes[1:]]) > LARGEST:
            self._fail(f"the input {value.name!r} has the sizes {sizes}, more than {LARGEST:,} numbers")
        return torch.zeros(sizes[0] or 1, *sizes[1:], dtype=kinds[kind])

    def _add(self, node: Any) -> None:
        """Evaluates a node, and makes a step of it if it depends on the input."""
        kind = node.op_type
        where = f"the operator {kind!r}" + (f" (node {node.name!r})" if node.name else "")
        if node.domain not in ("", "ai.onnx") or kind not in {*OPERATORS, *FIXED}:
            self._fail(f"{where} is not supported; those that are: {', '.join(sorted({*OPERATORS, *FIXED}))}")
        if any(name and name not in self.known for name in node.input):
            self._fail(f"{where} reads a value that no earlier node makes")
        if len([name for name in node.output if name]) > 1 and kind != "Dropout":
            self._fail(f"{where} has several outputs, which is not supported")
        inputs = [self.known[name] if name else None for name in node.input]
        variable = [name in self.variable for name in node.input]
        attributes = {part.name: self._attribute(part) for part in node.attribute}
        call, output = _Call(attributes, inputs, variable, self.version), node.output[0]
        try:
            if kind in FIXED:
                self.known[output] = FIXED[kind](call)
                return
            made = OPERATORS[kind](call)
            value = made.function(*(call.given(k) for k in made.takes))
            if value.numel() > LARGEST:
                raise InputError(f"it makes {value.numel():,} numbers; at most {LARGEST:,} are allowed")
            self.known[output] = value
        except Exception as error:  # settings and sizes that do not fit
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise FileFormatError(f"{self.name}: {where} cannot be read: {reason}") from error
        if any(variable[k] for k in made.takes):
            self._step(made, node, variable, output)

    def _step(self, made: Operation, node: Any, variable: list[bool], output: str) -> None:
        values = [node.input[k] for k in made.takes if variable[k]]
        constants = [self._buffer(node.input[k]) for k in made.takes if not variable[k]]
        order = [k for k in made.takes if variable[k]] + [k for k in made.takes if not variable[k]]
        function = made.function
        if order != list(made.takes):  # a constant comes before a value
            function = partial(_in_order, function, [order.index(k) for k in made.takes])
        self.steps.append(Step(function, values, constants, output))
        self.variable.add(output)

    def _buffer(self, name: str) -> str:
        """Makes a constant of the graph a buffer of the network."""
        if name not in self.names:
            self.names[name] = f"constant_{len(self.names)}"
            self.constants[self.names[name]] = self.known[name]
        return self.names[name]

    def _attribute(self, attribute: Any) -> Any:
        value = self.onnx.helper.get_attribute_value(attribute)
        return self._tensor(value) if isinstance(value, self.onnx.TensorProto) else value

    def _fail(self, message: str) -> NoReturn:
        raise FileFormatError(f"{self.name}: {message}")


def _in_order(function: Function, order: list[int], *given: Tensor) -> Tensor:
    """Calls a function with arguments that stand in another order."""
    return function(*(given[k] for k in order))
