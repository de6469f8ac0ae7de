"""Forms of every kind to compose: dense, sparse, convolutions with pooling, loops, no states at all."""

import torch
from torch import Tensor

from wellposed import ImplicitModel, Relative
from wellposed.forms import Block, Convolution, Dense, ImplicitForm, Selection, Sparse, linear

DOUBLE = torch.float64


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def dense(p: int, q: int, seed: int) -> ImplicitForm:
    """Two layers with different activations, biases, labels and a feedthrough."""
    W1, W0, C = _random(3, 4, seed=seed), _random(4, p, seed=seed + 1), _random(q, 7, seed=seed + 2)
    A = Block((3, 4), (3, 4), {(0, 1): Dense(W1)})
    B = Block((3, 4), (p,), {(1, 0): Dense(W0)})
    bias, shift = _random(7, seed=seed + 3), _random(q, seed=seed + 4)
    D = _random(q, p, seed=seed + 5)
    return ImplicitForm(A, B, C, D, bias, ["tanh", "relu"], output_bias=shift, labels=["top", "bottom"])


def sparse(p: int, q: int, seed: int) -> ImplicitForm:
    """A sparse strictly triangular A in one block."""
    A = _random(6, 6, seed=seed).relu().triu(1).to_sparse()
    B, C = _random(6, p, seed=seed + 1).relu().to_sparse(), _random(q, 6, seed=seed + 2)
    return ImplicitForm(Sparse(A), B, C, bias=_random(6, seed=seed + 3), activation="leaky_relu(0.1)")


def pooled(p: int, q: int, seed: int) -> ImplicitForm:
    """A convolution with ReLU, then max-pooling over its two channels."""
    kernel = Convolution(_random(2, 1, 3, seed=seed), (1, p), (1,), (1,), (1,))
    pairs = Selection(torch.arange(2 * p).view(2, p).mT.flatten(), 2 * p, DOUBLE)
    A = Block((2 * p, 2 * p), (2 * p, 2 * p), {(0, 1): pairs})
    B = Block((2 * p, 2 * p), (p,), {(1, 0): kernel})
    C = Block((q,), (2 * p, 2 * p), {(0, 0): Dense(_random(q, 2 * p, seed=seed + 1))})
    return ImplicitForm(A, B, C, activation=["max_pool(2)", "relu"], input_shape=(1, p), labels=["pool", "conv"])


def loop(p: int, q: int, seed: int) -> ImplicitForm:
    """An implicit model."""
    torch.manual_seed(seed)
    return ImplicitModel(p, q, 5, bias=True).double().form()


def low_rank(p: int, q: int, seed: int) -> ImplicitForm:
    """An implicit model whose A is a product, without feedthrough."""
    torch.manual_seed(seed)
    return ImplicitModel(p, q, 5, rank=2, activation="tanh", feedthrough=False).double().form()


def affine(p: int, q: int, seed: int) -> ImplicitForm:
    """No states."""
    return linear(_random(q, p, seed=seed), _random(q, seed=seed + 1))


def cut(p: int, q: int, seed: int) -> ImplicitForm:
    """Inputs and outputs in blocks of their own."""
    heights, widths = (q - 1, 1), (1, p - 1)
    first, rest = Dense(_random(4, 1, seed=seed)), Dense(_random(4, p - 1, seed=seed + 1))
    B = Block((4,), widths, {(0, 0): first, (0, 1): rest})
    C = Block(heights, (4,), {(0, 0): Dense(_random(q - 1, 4, seed=seed + 2))})
    D = Block(heights, widths, {(1, 0): Dense(_random(1, 1, seed=seed + 3))})
    return ImplicitForm(Block((4,), (4,), {}, DOUBLE), B, C, D, activation=["sigmoid"])


KINDS = {"dense": dense, "sparse": sparse, "pooled": pooled, "loop": loop, "low_rank": low_rank}
KINDS |= {"affine": affine, "cut": cut}


def evaluate(form: ImplicitForm, u: Tensor) -> Tensor:
    """Evaluates to the last digits, also where there are loops."""
    x = form.equilibrium(u, stop=Relative(1e-14), max_steps=2000).value
    y = (form.C @ x) + (form.D @ u.flatten(1))
    return y if form.output_bias is None else y + form.output_bias


def inputs(form: ImplicitForm, count: int = 4) -> Tensor:
    return torch.randn(count, form.sizes[1], dtype=form.dtype)


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def same_forms(first: ImplicitForm, second: ImplicitForm, atol: float = 1e-12) -> None:
    """Compares blocks, matrices, biases, activations and labels."""
    assert first.partition == second.partition and first.labels == second.labels
    assert first.activations == second.activations and first.input_shape == second.input_shape
    for name in ("A", "B", "C", "D"):
        one, other = getattr(first, name).to_dense(), getattr(second, name).to_dense()
        torch.testing.assert_close(one, other, rtol=1e-12, atol=atol)
    for one, other in ((first.bias, second.bias), (first.output_bias, second.output_bias)):
        zero = torch.zeros((), dtype=first.dtype)
        torch.testing.assert_close(*torch.broadcast_tensors(*(zero if b is None else b for b in (one, other))))
