"""Forms with and without loops, and a slow evaluation of their dense matrices."""

import torch
from torch import Tensor

from wellposed.activations import get_activation
from wellposed.forms import (
    Block,
    Convolution,
    Dense,
    Diagonal,
    Identity,
    ImplicitForm,
    LowRank,
    Operator,
    Selection,
)

F64 = torch.float64


def rows(height: int, width: int, norm: float) -> Dense:
    """A dense operator with row sums of that absolute value."""
    matrix = torch.randn(height, width, dtype=F64)
    return Dense(norm * matrix / matrix.abs().sum(1, keepdim=True))


def build(
    sizes: tuple[int, ...], blocks: dict[tuple[int, int], Operator], activations: list[str], inputs: int = 3
) -> ImplicitForm:
    """A form with these blocks of A, whose input reaches every block and whose output reads every block."""
    n = sum(sizes)
    return ImplicitForm(
        Block(sizes, sizes, blocks, F64),
        Block(sizes, (inputs,), {(k, 0): rows(size, inputs, 2.0) for k, size in enumerate(sizes)}),
        Block((2,), sizes, {(0, k): rows(2, size, 1.0) for k, size in enumerate(sizes)}),
        rows(2, inputs, 1.0),
        0.5 * torch.randn(n, dtype=F64),
        activations,
        output_bias=torch.randn(2, dtype=F64),
    )


def feed_forward() -> ImplicitForm:
    """Four layers of different kinds, last one first, with gains far above one and a shortcut."""
    blocks = {
        (0, 1): rows(3, 6, 9.0),
        (0, 3): LowRank(torch.randn(3, 1, dtype=F64), torch.randn(4, 1, dtype=F64)),
        (1, 2): Diagonal(3 * torch.randn(6, dtype=F64)),
        (1, 3): Selection(torch.tensor([3, -1, 0, 0, 1, 2]), 4, F64),
        (2, 3): rows(6, 4, 5.0),
    }
    return build((3, 6, 6, 4), blocks, ["relu", "max_pool(3)", "tanh", "softmax"])


def self_loop() -> ImplicitForm:
    return build((5,), {(0, 0): rows(5, 5, 0.9)}, ["relu"])


def low_rank_loop() -> ImplicitForm:
    left, right = torch.randn(6, 2, dtype=F64), torch.randn(6, 2, dtype=F64)
    norm = (left @ right.mT).abs().sum(1).max()
    return build((6,), {(0, 0): LowRank(0.8 * left / norm, right)}, ["tanh"])


def convolution_loop() -> ImplicitForm:
    weight = torch.randn(2, 2, 3, 3, dtype=F64)
    weight = 0.9 * weight / weight.abs().sum((1, 2, 3)).max()
    inner = Convolution(weight, (2, 3, 4), (1, 1), (1, 1), (1, 1))
    return build((24,), {(0, 0): inner}, ["relu"])


def two_blocks() -> ImplicitForm:
    """A loop whose gain is 4 one way and 0.2 the other."""
    blocks = {(0, 1): rows(4, 3, 4.0), (1, 0): rows(3, 4, 0.2)}
    return build((4, 3), blocks, ["relu", "tanh"])


def pooled_loop() -> ImplicitForm:
    blocks = {(0, 1): rows(4, 6, 3.0), (1, 0): rows(6, 4, 0.3), (1, 1): rows(6, 6, 0.05)}
    return build((4, 6), blocks, ["max_pool(2)", "sigmoid"])


def softmax_loop() -> ImplicitForm:
    blocks = {(0, 1): rows(4, 3, 1.6), (1, 0): rows(3, 4, 0.9)}
    return build((4, 3), blocks, ["softmax", "relu"])


def loop_inside() -> ImplicitForm:
    """Two layers before the loop, two behind, a shortcut around it; the loop is not in consecutive blocks."""
    blocks = {
        (0, 1): rows(2, 4, 3.0),
        (0, 5): rows(2, 3, 2.0),
        (1, 2): rows(4, 3, 2.0),
        (2, 4): rows(3, 4, 3.0),
        (4, 2): rows(4, 3, 0.25),
        (2, 3): rows(3, 5, 2.0),
        (3, 5): rows(5, 3, 4.0),
        (4, 5): rows(4, 3, 4.0),
    }
    return build((2, 4, 3, 5, 4, 3), blocks, ["identity", "relu", "tanh", "relu", "relu", "leaky_relu(0.3)"])


def two_loops() -> ImplicitForm:
    blocks = {
        (0, 0): rows(3, 3, 0.5),
        (0, 1): rows(3, 2, 5.0),
        (1, 2): rows(2, 4, 5.0),
        (2, 2): rows(4, 4, 0.9),
    }
    return build((3, 2, 4), blocks, ["tanh", "relu", "relu"])


def negative_loop() -> ImplicitForm:
    """A loop that plain iteration would not solve, behind a layer."""
    strong = torch.tensor([[-4.0, 2.0], [0.3, 0.0]], dtype=F64)
    return build((2, 3), {(0, 0): Dense(strong), (0, 1): rows(2, 3, 2.0)}, ["relu", "tanh"])


def nested_loop() -> ImplicitForm:
    """A block of A that is a block matrix itself."""
    inner = Block(
        (2, 2), (2, 2), {(0, 1): rows(2, 2, 0.9), (1, 0): Diagonal(torch.tensor([0.5, -0.5], dtype=F64))}
    )
    return build((4, 2), {(0, 0): inner, (0, 1): rows(4, 2, 1.0)}, ["relu", "relu"])


def reversed_layers() -> ImplicitForm:
    """Feed-forward, first layer first, and the identity in between."""
    blocks: dict[tuple[int, int], Operator] = {(1, 0): Identity(3, F64), (2, 1): rows(2, 3, 4.0)}
    return build((3, 3, 2), blocks, ["relu", "tanh", "relu"])


FEED_FORWARD = [feed_forward, reversed_layers]
LOOPS = [
    self_loop,
    low_rank_loop,
    convolution_loop,
    two_blocks,
    pooled_loop,
    softmax_loop,
    loop_inside,
    two_loops,
    negative_loop,
    nested_loop,
]
FORMS = FEED_FORWARD + LOOPS


def dense_states(form: ImplicitForm, u: Tensor, steps: int = 5000) -> Tensor:
    """Iterates x <- x + (phi(Ax + Bu + b) - x) / 5 on the dense matrices, phi piece by piece."""
    A, B = form.A.to_dense(), form.B.to_dense()
    v = u.flatten(1) @ B.mT + (0 if form.bias is None else form.bias)
    maps = [get_activation(part.name) for part in form.activations]
    x = torch.zeros_like(v)
    for _ in range(steps):
        pieces = (x @ A.mT + v).split(form.partition, dim=1)
        image = torch.cat([phi(piece) for phi, piece in zip(maps, pieces, strict=True)], dim=1)
        if torch.allclose(x, image, rtol=1e-15, atol=1e-14):
            break
        x = x + 0.2 * (image - x)
    return x


def dense_outputs(form: ImplicitForm, x: Tensor, u: Tensor) -> Tensor:
    y = x @ form.C.to_dense().mT + u.flatten(1) @ form.D.to_dense().mT
    return y if form.output_bias is None else y + form.output_bias
