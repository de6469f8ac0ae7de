"""Networks from ONNX files: equal to onnxruntime, converted as they are, and refused where they cannot be read."""

import random

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph, RuntimeException

from wellposed.convert import to_implicit
from wellposed.errors import FileFormatError
from wellposed.models.io.onnx_network import FIXED, OPERATORS, read_onnx

RNG = np.random.default_rng(0)


def array(*shape):
    return (RNG.standard_normal(shape) / 2).astype(np.float32)


def node(kind, inputs, output, **attributes):
    return helper.make_node(kind, inputs.split(), [output], **attributes)


def written(path, nodes, constants=None, shape=("N", 6), end="y", version=17, kind=TensorProto.FLOAT):
    """Writes a graph with the input u."""
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    inputs = [helper.make_tensor_value_info("u", kind, shape)]
    outputs = [helper.make_tensor_value_info(end, kind, (None, None))]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=8)
    onnx.save(model, path)
    return path


def ints(*values):
    return np.array(values, dtype=np.int64)


W, B = array(6, 4), array(4)
IMAGE = ("N", 2, 6, 6)
GRAPHS = {
    "gemm": ([node("Gemm", "u W b", "y", transB=0)], {"W": W, "b": B}),
    "gemm scaled": ([node("Gemm", "u W b", "y", transB=1, alpha=0.5, beta=2.0)], {"W": W.T.copy(), "b": B}),
    "matmul": ([node("MatMul", "u W", "a"), node("Add", "b a", "y")], {"W": W, "b": B}),
    "arithmetic": (
        [node("Sub", "c u", "a"), node("Mul", "a c", "b"), node("Div", "b d", "e"), node("Neg", "e", "f"),
         node("Add", "f u", "y")],
        {"c": array(6), "d": np.float32(4.0)},
    ),
    "activations": (
        [node("MatMul", "u W", "a"), node("Relu", "a", "b"), node("LeakyRelu", "a", "c", alpha=0.2),
         node("Tanh", "a", "d"), node("Sigmoid", "a", "e"), node("Elu", "a", "f"), node("Softplus", "a", "g"),
         node("Clip", "a low high", "h"), node("Concat", "b c d e f g h", "y", axis=1)],
        {"W": W, "low": np.float32(-0.1), "high": np.float32(0.2)},
    ),
    "softmax": ([node("Softmax", "u", "y", axis=-1)], {}),
    "convolution": (
        [node("Conv", "u W b", "a", strides=[2, 1], pads=[1, 0, 1, 0]), node("Relu", "a", "c"),
         node("Flatten", "c", "y")],
        {"W": array(3, 2, 3, 2), "b": array(3)}, IMAGE,
    ),
    "grouped, padded by side": (
        [node("Conv", "u W", "a", group=2, pads=[0, 1, 1, 0], dilations=[1, 2]), node("Flatten", "a", "y")],
        {"W": array(4, 1, 2, 2)}, IMAGE,
    ),
    "same padding": (
        [node("Conv", "u W", "a", auto_pad="SAME_UPPER", strides=[2, 2]), node("Flatten", "a", "y")],
        {"W": array(4, 2, 3, 3)}, IMAGE,
    ),
    "normalised": (
        [node("BatchNormalization", "u s b m v", "a", epsilon=1e-3), node("GlobalAveragePool", "a", "c"),
         node("Reshape", "c shape", "y")],
        {"s": array(2), "b": array(2), "m": array(2), "v": np.float32([0.5, 2.0]), "shape": ints(0, 2)}, IMAGE,
    ),
    "pools": (
        [node("AveragePool", "u", "a", kernel_shape=[2, 2], strides=[2, 2], pads=[1, 1, 1, 1]),
         node("MaxPool", "a", "b", kernel_shape=[2, 2]), node("Flatten", "b", "y")],
        {}, IMAGE,
    ),
    "shapes": (
        [node("Transpose", "u", "a", perm=[0, 2, 3, 1]), node("Unsqueeze", "a two", "b"),
         node("Squeeze", "b two", "c"), node("ReduceMean", "c", "d", axes=[2], keepdims=0),
         node("ReduceSum", "d one", "e", keepdims=1), node("Gather", "e last", "f", axis=2),
         node("Identity", "f", "g"), node("Reshape", "g shape", "y")],
        {"two": ints(2), "one": ints(1), "last": ints(1, 0), "shape": ints(-1, 2)}, IMAGE,
    ),
    "computed shape": (
        [node("Shape", "u", "s"), node("Gather", "s zero", "n", axis=0), node("Concat", "n all", "t", axis=0),
         node("Reshape", "u t", "y")],
        {"zero": ints(0), "all": ints(-1)}, IMAGE,
    ),
    "dropout and constants": (
        [node("Dropout", "u", "a"),
         node("Constant", "", "c", value=numpy_helper.from_array(array(6))), node("Add", "a c", "y")], {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("batch", ["N", 1])
def test_outputs_are_those_of_onnxruntime(tmp_path, name, batch):
    nodes, constants, *rest = GRAPHS[name]
    shape = (batch, *(rest[0] if rest else ("N", 6))[1:])
    path = written(tmp_path / "a.onnx", nodes, constants, shape)
    network, session = read_onnx(path), onnxruntime.InferenceSession(path)
    u = array(1 if batch == 1 else 3, *shape[1:])
    expected = torch.from_numpy(session.run(None, {"u": u})[0]).flatten(1)
    torch.testing.assert_close(network(torch.from_numpy(u)), expected, rtol=1e-5, atol=1e-6)
    if name != "softmax":
        form = to_implicit(network, network.input_shape)
        torch.testing.assert_close(form(torch.from_numpy(u)), expected, rtol=1e-4, atol=1e-5)


def random_graph(draw):
    """Draws one to three operators on images whose settings are most easily misread."""
    size = draw.choice((2, 4)), draw.randrange(3, 8), draw.randrange(3, 8)
    nodes, constants, value = [], {}, "u"

    def some(low, high, count):
        return [draw.randrange(low, high) for _ in range(count)]

    for k in range(draw.randrange(1, 4)):
        kind, out, window = (
            draw.choice(("Conv", "AveragePool", "MaxPool", "Gather", "ReduceMean", "Shape")),
            f"v{k}",
            {},
        )
        if kind in ("Conv", "AveragePool", "MaxPool"):
            pads = (
                {"pads": some(0, 2, 2) * 2},
                {"auto_pad": draw.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))},
                {},
            )
            window = {"strides": some(1, 4, 2), **draw.choice(pads)}
        if kind == "Conv":
            constants[out + "W"] = array(3, size[0], *some(1, 4, 2))
            nodes.append(node("Conv", f"{value} {out}W", out, **window))
        elif window:
            window |= {"kernel_shape": some(1, 4, 2), "ceil_mode": draw.randrange(2)}
            nodes.append(node(kind, value, out, **window))
        elif kind == "Gather":
            constants[out + "i"] = ints(*some(-3, 3, 2))
            nodes.append(node(kind, f"{value} {out}i", out, axis=draw.choice((1, 2, -1))))
        elif kind == "ReduceMean":
            nodes.append(node(kind, value, out, axes=draw.sample((1, 2, 3), 2), keepdims=draw.randrange(2)))
        else:  # whole numbers are divided as such
            constants |= {out + "two": ints(2), out + "rest": ints(-1, 1)}
            nodes.append(node("Shape", value, out + "s", start=0, end=draw.choice((-3, 1))))
            nodes.append(node("Mul", f"{out}s {out}two", out + "m"))
            nodes.append(node("Div", f"{out}m {out}two", out + "d"))
            nodes.append(node("Concat", f"{out}d {out}rest", out + "c", axis=0))
            nodes.append(node("Reshape", f"{value} {out}c", out))
        value = out
    return [*nodes, node("Flatten", value, "y")], constants, ("N", *size)


def test_random_graphs_are_read_as_by_onnxruntime_or_refused(tmp_path):
    onnxruntime.set_default_logger_severity(4)
    equal = 0
    for seed in range(150):
        draw = random.Random(seed)
        nodes, constants, shape = random_graph(draw)
        path, u = written(tmp_path / "a.onnx", nodes, constants, shape), array(1, *shape[1:])
        try:
            network = read_onnx(path)
            expected = torch.from_numpy(onnxruntime.InferenceSession(path).run(None, {"u": u})[0])
        except (FileFormatError, InvalidGraph, RuntimeException, Fail):
            continue
        torch.testing.assert_close(
            network(torch.from_numpy(u)), expected, rtol=1e-5, atol=1e-5, msg=f"seed {seed}"
        )
        equal += 1
    assert equal > 40


def test_every_operator_is_compared():
    kinds = {one.op_type for nodes, *_ in GRAPHS.values() for one in nodes}
    assert kinds == {*OPERATORS, *FIXED}


def test_types_are_kept(tmp_path):
    constants = {"W": W.astype(np.float64)}
    path = written(tmp_path / "a.onnx", [node("MatMul", "u W", "y")], constants, kind=TensorProto.DOUBLE)
    assert read_onnx(path)(torch.rand(2, 6, dtype=torch.float64)).dtype == torch.float64


REFUSED = {
    "unknown": ([node("Erf", "u", "y")], {}, "the operator 'Erf' is not supported; those that are: Add, "),
    "named": ([helper.make_node("Sin", ["u"], ["y"], name="wave")], {}, "the operator 'Sin' (node 'wave')"),
    "mixed samples": ([node("Transpose", "u", "y", perm=[1, 0])], {}, "'Transpose' cannot be read: it moves"),
    "joined samples": ([node("Concat", "u u", "y", axis=0)], {}, "it mixes or removes samples"),
    "reshaped samples": ([node("Reshape", "u s", "y")], {"s": ints(2, 3)}, "mixes samples of a batch"),
    "sizes": ([node("MatMul", "u W", "y")], {"W": array(5, 4)}, "the operator 'MatMul' cannot be read"),
    "no input": ([node("Identity", "W", "y")], {"W": W}, "does not depend on its input"),
    "weights": ([node("Gemm", "u u", "y")], {}, "the second factor must be a constant"),
    "index": ([node("Gather", "u i", "y", axis=1)], {"i": ints(6)}, "an index is outside of -6 to 5"),
    "training": ([node("Dropout", "u r t", "y")], {"r": np.float32(0.5), "t": np.bool_(True)}, "in training mode"),
    "rank": ([node("MaxPool", "u", "y", kernel_shape=[1])], {}, "its input (1, 6) is not samples, channels and 1"),
    "doubled": (
        [node("Concat", " ".join(["u" if k == 0 else f"v{k}"] * 64), f"v{k + 1}", axis=1) for k in range(4)]
        + [node("Relu", "v4", "y")], {}, "it makes 100,663,296 numbers; at most 67,108,864",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named_in_one_line(tmp_path, name):
    nodes, constants, complaint = REFUSED[name]
    with pytest.raises(FileFormatError) as caught:
        read_onnx(written(tmp_path / "a.onnx", nodes, constants))
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_inputs_that_do_not_fit_are_refused(tmp_path):
    identity = [node("Identity", "u", "y")]
    for shape, complaint in [((6,), "the sizes [6]"), (("N", "M"), "the sizes [0, 0]")]:
        with pytest.raises(FileFormatError) as caught:
            read_onnx(written(tmp_path / "a.onnx", identity, shape=shape))
        assert complaint in str(caught.value)
    with pytest.raises(FileFormatError, match="not of float32 or float64"):
        read_onnx(written(tmp_path / "a.onnx", identity, kind=TensorProto.INT64))


def test_weights_in_other_files_are_not_opened(tmp_path):
    path = written(tmp_path / "a.onnx", [node("MatMul", "u W", "y")], {"W": W})
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    with pytest.raises(FileFormatError, match="'W' are in another file"):
        read_onnx(path)


def test_damaged_files_are_refused(tmp_path):
    path = written(tmp_path / "a.onnx", [node("Relu", "u", "y")])
    for data in (b"", b"junk", path.read_bytes()[:-9]):
        path.write_bytes(data)
        with pytest.raises(FileFormatError) as caught:
            read_onnx(path)
        assert "\n" not in str(caught.value)
