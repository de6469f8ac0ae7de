"""How many steps a trained model takes, and why: stopping rules, scales and local rates compared.

Without a bias and with a positively homogeneous phi the whole iteration from ``x = 0`` scales with its input,
``x_t(cu) = c x_t(u)`` for c > 0, and so does its residual. Near the equilibrium that residual falls like
``rho^t``, rho the spectral radius of ``phi'(z) A``. An absolute tolerance is then met after

    t(c) = t(1) + log(c) / log(1 / rho)

steps, whatever the model has learnt, and a relative one after as many steps at every scale.
"""

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.equilibrium.picard import Picard
from wellposed.equilibrium.stopping import Absolute, Relative, Stopping
from wellposed.errors import InputError
from wellposed.models.implicit import ImplicitModel

ABSOLUTE = Absolute(3e-6)  # that of 001
RELATIVE = Relative(rtol=1e-6)
EXACT = Relative(rtol=1e-13)
LIMIT = 20_000


def with_rule(model: ImplicitModel, stop: Stopping) -> ImplicitModel:
    """Returns the same model, weights shared, that iterates plainly until a rule is met."""
    other = copy.copy(model)
    other.solver, other.stop, other.max_steps, other.on_failure = Picard(), stop, LIMIT, "ignore"
    return other


@torch.no_grad()
def sample_steps(model: ImplicitModel, u: Tensor, stop: Stopping) -> Tensor:  # (B, p) -> (B,)
    """Counts the steps of every sample.

    Example:
        >>> model = ImplicitModel.from_matrices(*(0.5 * torch.eye(1, dtype=torch.float64) for _ in range(3)))
        >>> u = torch.ones(1, 1, dtype=torch.float64)
        >>> [int(sample_steps(model, scale * u, ABSOLUTE)) for scale in (1.0, 2.0**10)]
        [19, 29]
    """
    return with_rule(model, stop).equilibrium(u.to(model.B.dtype)).steps.double()


@torch.no_grad()
def local_rates(model: ImplicitModel, u: Tensor) -> Tensor:  # (B, p) -> (B,)
    """Computes the spectral radius of ``phi'(z) A`` at every sample's equilibrium, the rate of its iteration."""
    return torch.linalg.eigvals(_slopes(model, u).unsqueeze(-1) * model.A).abs().amax(-1)


@torch.no_grad()
def active_states(model: ImplicitModel, u: Tensor) -> Tensor:  # (B, p) -> (B,)
    """Counts the states through which a change would pass."""
    return (_slopes(model, u) != 0).sum(-1).double()


def _slopes(model: ImplicitModel, u: Tensor) -> Tensor:  # (B, n)
    if model.activation.name != "relu":
        raise InputError(f"slopes are known here for 'relu'; received a model with {model.activation.name!r}")
    x = with_rule(model, EXACT).equilibrium(u.to(model.B.dtype)).value
    return (torch.as_tensor(x) > 0).to(model.B.dtype)


def scaled_steps(model: ImplicitModel, u: Tensor, stop: Stopping, scales: Sequence[float]) -> list[float]:
    """Returns the mean steps of the same samples at several scales."""
    return [float(sample_steps(model, scale * u, stop).mean()) for scale in scales]


def slope(scales: Sequence[float], steps: Sequence[float]) -> float:
    """Fits ``steps = a + b log(scale)`` by least squares and returns b.

    Example:
        >>> round(slope([1.0, math.e, math.e**2], [10.0, 13.0, 16.0]), 9)
        3.0
    """
    x, y = torch.tensor(scales, dtype=torch.float64).log(), torch.tensor(steps, dtype=torch.float64)
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())


def predicted_slope(rates: Tensor) -> float:
    """Returns the mean of ``1 / log(1 / rho)`` over the samples; one that ends after finitely many steps adds 0.

    Example:
        >>> round(predicted_slope(torch.tensor([0.5, 0.0])) * math.log(2), 9)
        0.5
    """
    return float(torch.where(rates > 0, -1 / rates.double().log(), 0.0).mean())


@torch.no_grad()
def homogeneity_error(model: ImplicitModel, u: Tensor, scales: Sequence[float]) -> float:
    """Returns the largest deviation of ``f(cu)`` from ``c f(u)``, relative to the largest output."""
    exact = with_rule(model, EXACT)
    u = u.to(model.B.dtype)
    y = exact(u)
    return max(float((exact(scale * u) / scale - y).abs().max() / y.abs().max()) for scale in scales)


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Computes Spearman's correlation, ties at their mean rank; NaN where one side is constant.

    Example:
        >>> round(rank_correlation(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0.1, 0.2, 0.3])), 9)
        1.0
    """
    ranks = torch.stack([_ranks(a), _ranks(b)])
    ranks = ranks - ranks.mean(1, keepdim=True)
    size = float(ranks[0].norm() * ranks[1].norm())
    return float(ranks[0] @ ranks[1]) / size if size else math.nan


def _ranks(values: Tensor) -> Tensor:
    _, place, count = values.double().unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    return (last - (count - 1) / 2)[place]


def by_decile(values: Tensor, order: Tensor) -> list[float]:
    """Returns the means of `values` in ten parts of equal size, the samples sorted by `order`."""
    return [float(part.mean()) for part in values[order.argsort()].tensor_split(10)]
