"""Equilibria in extended precision, from the matrices of a form alone, and how far off they may be.

Numbers have 64 bits (numpy's longdouble on x86), so the rounding that a bound in float64 allows for is visible.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wellposed.forms import Block, ImplicitForm, Operator
from wellposed.forms.operators.base import Product

Array = np.ndarray
WIDE = np.longdouble
UNIT = float(np.finfo(WIDE).eps)
LARGEST_LOCAL = 64  # states up to which every sample has an inverse of its own


def _sigmoid(z: Array) -> Array:
    return WIDE(0.5) + WIDE(0.5) * np.tanh(z / 2)


def _pool(z: Array, size: int) -> Array:
    blocks = z.reshape(len(z), -1, size)
    pooled = np.zeros_like(blocks)
    pooled[:, :, 0] = blocks.max(2)
    return pooled.reshape(z.shape)


PHI: dict[str, Callable[[Array], Array]] = {
    "relu": lambda z: np.maximum(z, 0),
    "leaky_relu(0.1)": lambda z: np.where(z > 0, z, WIDE(0.1) * z),
    "hardtanh": lambda z: z.clip(-1, 1),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "group_sort(2)": lambda z: np.sort(z.reshape(len(z), -1, 2), axis=2).reshape(z.shape),
    "max_pool(4)": lambda z: _pool(z, 4),
}
SLOPE: dict[str, Callable[[Array], Array]] = {
    "relu": lambda z: (z > 0) * 1.0,
    "leaky_relu(0.1)": lambda z: np.where(z > 0, 1.0, 0.1),
    "hardtanh": lambda z: (np.abs(z) < 1) * 1.0,
    "tanh": lambda z: 1 - np.tanh(z) ** 2,
    "sigmoid": lambda z: _sigmoid(z) * (1 - _sigmoid(z)),
}


class Exact(NamedTuple):
    """States and outputs, each with what they may be off by."""

    x: Array  # (N, n)
    y: Array  # (N, q)
    x_slack: Array  # (N, n)
    y_slack: Array  # (N, q)


def known(form: ImplicitForm) -> bool:
    """Whether all activations are known here."""
    return all(phi.name in PHI for phi in form.activations)


def dense(operator: Operator) -> Array:
    """Forms a matrix; products are multiplied here, so that float64 rounds nothing."""
    if isinstance(operator, Product):
        product = dense(operator.factors[0])
        for factor in operator.factors[1:]:
            product = product @ dense(factor)
        return product
    if isinstance(operator, Block):
        whole = np.zeros(operator.shape, dtype=WIDE)
        rows, columns = np.cumsum([0, *operator.heights]), np.cumsum([0, *operator.widths])
        for (i, j), part in operator.parts.items():
            whole[rows[i] : rows[i + 1], columns[j] : columns[j + 1]] = dense(part)
        return whole
    return operator.to(torch.float64).to_dense().detach().numpy().astype(WIDE)


def solve(form: ImplicitForm, u: Tensor, start: Tensor) -> Exact:
    """Solves ``x = phi(Ax + Bu + b)`` for every row of u, from states that float64 found.

    Newton's method in a loop, whose matrices are those of float64 and whose residuals are not; substitution where
    there is none, and plain steps for maps on blocks.
    """
    A, B, C, D = (dense(part) for part in (form.A, form.B, form.C, form.D))
    b, c = (
        np.zeros((), WIDE) if part is None else part.double().numpy().astype(WIDE)
        for part in (form.bias, form.output_bias)
    )
    inputs, x = (part.double().detach().numpy().astype(WIDE) for part in (u, start))
    v = inputs @ B.T + b
    names, cuts = [phi.name for phi in form.activations], np.cumsum(form.partition)[:-1]
    smooth = all(name in SLOPE for name in names) and len(A) <= LARGEST_LOCAL

    def mapped(table: dict[str, Callable[[Array], Array]], z: Array) -> Array:
        pieces = zip(names, np.split(z, cuts, axis=1), strict=True)
        return np.concatenate([table[name](piece) for name, piece in pieces], axis=1)

    looped = bool(form.order.loops)
    for _ in range(6 if smooth else 400 if looped else len(names) + 1):
        z = x @ A.T + v
        image = mapped(PHI, z)
        if smooth:
            system = np.eye(len(A)) - mapped(SLOPE, z).astype(float)[:, :, None] * A.astype(float)
            x = x + np.linalg.solve(system, (image - x).astype(float)[:, :, None])[:, :, 0]
        else:
            x = image
    return _with_errors((A, B, C, D, c), inputs, x, np.abs(mapped(PHI, x @ A.T + v) - x), form)


def _with_errors(
    matrices: tuple[Array, Array, Array, Array, Array], u: Array, x: Array, residual: Array, form: ImplicitForm
) -> Exact:
    """Adds outputs and errors: ``(I - gamma |A|)^-1`` times the residual and the rounding of computing it."""
    A, B, C, D, c = matrices
    length = (len(A) + B.shape[1] + 16) * UNIT / 2
    spread = np.abs(u) @ np.abs(B).T + np.abs(x) @ np.abs(A).T + 1
    gamma = max(phi.lipschitz() for phi in form.activations)
    around = np.linalg.inv(np.eye(len(A)) - gamma * np.abs(A).astype(float))
    if (around < 0).any():  # a loop that is proven in another way
        around = np.full(A.shape, 1e3)
    x_slack = (residual + length * spread) @ around.T * 1.01
    terms = np.abs(x) @ np.abs(C).T + np.abs(u) @ np.abs(D).T + np.abs(c)
    return Exact(x, x @ C.T + u @ D.T + c, x_slack, x_slack @ np.abs(C).T + length * terms)
