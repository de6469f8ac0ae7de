"""Models evaluated in arithmetic of 60 digits and more, from their stored numbers alone, many points at a time.

Numbers are mpmath's, in arrays of objects: their exponents have no ends. Sums of terms of any size, which may
cancel, need as many digits as there are powers of ten between them, so that 60 are left of the result; see
`set_digits`.
"""

import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import torch
import torch.nn.functional as F
from mpmath import mp, mpf
from torch import Tensor, nn

from tests.campaigns import rationals

Array = np.ndarray
DIGITS = {torch.float32: 300, torch.float64: 1500}
_NUMBER = np.frompyfunc(mpf, 1, 1)
SELU = mpf("1.0507009873554804934193349852946"), mpf("1.6732632423543772848170429916717")


def set_digits(dtype: torch.dtype) -> None:
    """Computes with enough digits for the range of a type from now on."""
    mp.dps = DIGITS[dtype]


def numbers(value: Any) -> Array:
    """Reads a tensor or array as it is stored."""
    values = value.detach().double().numpy() if isinstance(value, Tensor) else np.asarray(value)
    return np.asarray(_NUMBER(values), dtype=object)


def _entrywise(function: Callable[[Any], Any]) -> Callable[[Array], Array]:
    apply = np.frompyfunc(function, 1, 1)
    return lambda z: np.asarray(apply(z), dtype=object).reshape(z.shape)


def _sigmoid(z: Any) -> Any:
    return 1 / (1 + mpmath.exp(-z))


PHI: dict[str, Callable[[Array], Array]] = {
    "identity": lambda z: z,
    "relu": _entrywise(lambda z: max(z, mpf(0))),
    "leaky_relu(0.1)": _entrywise(lambda z: z if z > 0 else mpf(0.1) * z),
    "hardtanh": _entrywise(lambda z: min(max(z, mpf(-1)), mpf(1))),
    "tanh": _entrywise(mpmath.tanh),
    "sigmoid": _entrywise(_sigmoid),
    "elu(0.7)": _entrywise(lambda z: z if z > 0 else mpf(0.7) * mpmath.expm1(z)),
    "selu": _entrywise(lambda z: SELU[0] * (z if z > 0 else SELU[1] * mpmath.expm1(z))),
}


class Layers:
    """``x1 = phi1(B1 u + b1)``, ``x2 = phi2(A x1 + B2 u + b2)``, ``y = C x + D u + c``, matrices as tensors."""

    def __init__(self, A: Tensor, B: Tensor, C: Tensor, D: Tensor, b: Tensor, c: Tensor, phi: list[str]) -> None:
        self.A, self.B, self.C, self.D, self.b, self.c = (numbers(part) for part in (A, B, C, D, b, c))
        self.phi, self.first = phi, A.shape[1]

    def states(self, u: Array) -> Array:  # (N, p) -> (N, n)
        """Evaluates the layers one after the other."""
        z = u @ self.B.T + self.b
        one = PHI[self.phi[0]](z[:, : self.first])
        two = PHI[self.phi[1]](z[:, self.first :] + one @ self.A.T)
        return np.concatenate([one, two], axis=1)

    def outputs(self, u: Array, x: Array) -> Array:  # (N, p), (N, n) -> (N, q)
        """Reads the states."""
        return x @ self.C.T + u @ self.D.T + self.c


class Loop(Layers):
    """``x = max(A x + B u + b, 0)``, found in fractions among all sets of active states."""

    def __init__(self, A: Tensor, B: Tensor, C: Tensor, D: Tensor, b: Tensor, c: Tensor) -> None:
        super().__init__(A, B, C, D, b, c, ["relu"])
        self.exact = rationals.exact(A)

    def states(self, u: Array) -> Array:
        """Solves for every point."""
        rows = [[_fraction(entry) for entry in row] for row in u @ self.B.T + self.b]
        solutions = [rationals.relu_equilibrium(self.exact, row) for row in rows]
        assert all(x is not None for x in solutions)
        return np.array([[mpf(e.numerator) / e.denominator for e in x or ()] for x in solutions], dtype=object)


def _fraction(value: Any) -> rationals.Fraction:
    sign, mantissa, exponent, _ = value._mpf_
    size = rationals.Fraction(int(mantissa)) * rationals.Fraction(2) ** int(exponent)
    return -size if sign else size


class FunctionalNorm(nn.Module):
    """Batch normalisation that is no module."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises by the stored statistics."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps)


class Residual(nn.Module):
    """``x + inner(x)``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Adds."""
        return x + self.inner(x)


class Scaled(nn.Module):
    """``(0.1 x - 0.3) / 7``."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies, subtracts and divides."""
        return (x * 0.1 - 0.3) / 7


class Pooled(nn.Module):
    """Averages over windows of the features."""

    def __init__(self, size: int, padding: int, counted: bool) -> None:
        super().__init__()
        self.pool = nn.AvgPool1d(size, 2, padding, count_include_pad=counted)

    def forward(self, x: Tensor) -> Tensor:
        """Takes features as one channel."""
        return self.pool(x.unsqueeze(1)).squeeze(1)


NAMES = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.Identity: "identity"}


def network(module: nn.Module, x: Array) -> Array:  # (N, p) -> (N, q)
    """Evaluates a network of the layers above, layer by layer."""
    if isinstance(module, nn.Sequential):
        for part in module:
            x = network(part, x)
        return x
    if isinstance(module, nn.Linear):
        return x @ numbers(module.weight).T + (0 if module.bias is None else numbers(module.bias))
    if isinstance(module, nn.BatchNorm1d | FunctionalNorm):
        root = _entrywise(mpmath.sqrt)(numbers(module.running_var) + mpf(module.eps))
        return (x - numbers(module.running_mean)) / root * numbers(module.weight) + numbers(module.bias)
    if isinstance(module, Residual):
        return x + network(module.inner, x)
    if isinstance(module, Scaled):
        return (x * mpf(0.1) - mpf(0.3)) / 7
    if isinstance(module, Pooled):
        return _averages(module.pool, x)
    return PHI[NAMES[type(module)]](x)


def _averages(pool: nn.AvgPool1d, x: Array) -> Array:
    size, step, padding = (int(part[0]) for part in (pool.kernel_size, pool.stride, pool.padding))
    count = math.floor((x.shape[1] + 2 * padding - size) / step) + 1
    columns = []
    for k in range(count):
        places = [j for j in range(k * step - padding, k * step - padding + size) if 0 <= j < x.shape[1]]
        whole = min(k * step - padding + size, x.shape[1] + padding) - (k * step - padding)
        columns.append(x[:, places].sum(1) / (whole if pool.count_include_pad else len(places)))
    return np.stack(columns, axis=1)
