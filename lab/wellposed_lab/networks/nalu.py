"""Networks built for arithmetic: NAC and NALU (Trask et al. 2018), iNALU (Schloer et al. 2020).

All of them learn weights ``W = tanh(V) * sigmoid(M)``, which saturate at -1, 0 and 1, and have no bias.

Where they overflow: the multiplicative path is ``exp(W log|u|)``, a product of powers of *all* inputs. With p
inputs of size k and weights near 1 it is ``k^p``: 50 inputs of size 10 give 1e50, past the 3e38 of float32.
An infinite hidden unit makes the next layer infinite or, where two of them have weights of opposite sign, NaN.
This belongs to the model and is left visible in `NALU`; `INALU` caps the exponent.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed_lab.networks.mlp import require_sizes


class NAC(nn.Module):
    """Stacks neural accumulators, ``y = Wu`` (Trask et al. 2018, eq. 1).

    A linear map all in all, so it extrapolates as linear regression does; with saturated weights it adds and
    subtracts exactly.

    Args:
        sizes: widths from input to output.

    Example:
        >>> NAC([50, 10, 1])(torch.zeros(7, 50)).shape
        torch.Size([7, 1])
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = _stack(Accumulator, sizes)

    def forward(self, u: Tensor) -> Tensor:  # (..., p) -> (..., q)
        """Computes the outputs."""
        y: Tensor = self.layers(u)
        return y


class NALU(nn.Module):
    """Stacks neural arithmetic logic units (Trask et al. 2018, eq. 2).

    ``y = g * Wu + (1 - g) * exp(W log(|u| + eps))`` with the gate ``g = sigmoid(Gu)``; one W serves both
    paths. For inputs out of range it overflows, see the top of this module.

    Args:
        sizes: widths from input to output.
        eps: keeps the logarithm finite at 0.

    Example:
        >>> NALU([50, 10, 1])(torch.ones(7, 50)).shape
        torch.Size([7, 1])
    """

    def __init__(self, sizes: Sequence[int], eps: float = 1e-7) -> None:
        super().__init__()
        self.layers = _stack(lambda before, after: ArithmeticUnit(before, after, eps), sizes)

    def forward(self, u: Tensor) -> Tensor:  # (..., p) -> (..., q)
        """Computes the outputs."""
        y: Tensor = self.layers(u)
        return y


class INALU(nn.Module):
    """Stacks improved arithmetic units (Schloer et al. 2020, section 3).

    Its units differ from those of `NALU` in four ways: weights of their own for the two paths; a gate that
    does not look at the input; an exponent capped at `cap` and inputs kept off zero by `eps`; and the sign of
    the product, ``prod_i (sign(u_i) |W_i| + 1 - |W_i|)``. Add ``model.penalty()`` to the loss once it is
    small (the authors wait ten epochs) and clip gradients to 0.1.

    Args:
        sizes: widths from input to output.
        eps: ``|u|`` counts as at least this.
        cap: the largest exponent.

    Example:
        >>> INALU([50, 10, 1])(torch.ones(7, 50)).shape
        torch.Size([7, 1])
    """

    def __init__(self, sizes: Sequence[int], eps: float = 1e-7, cap: float = 20.0) -> None:
        super().__init__()
        self.layers = _stack(lambda before, after: ImprovedUnit(before, after, eps, cap), sizes)

    def forward(self, u: Tensor) -> Tensor:  # (..., p) -> (..., q)
        """Computes the outputs."""
        y: Tensor = self.layers(u)
        return y

    def penalty(self, threshold: float = 20.0) -> Tensor:
        """Returns the mean of ``max(threshold - |w|, 0) / threshold``, which is 0 when all is saturated."""
        terms = [F.relu(threshold - w.abs()).flatten() / threshold for w in self.parameters()]
        return torch.cat(terms).mean()


class Accumulator(nn.Module):
    """One layer ``y = Wu`` with ``W = tanh(V) * sigmoid(M)``.

    Args:
        mean, std: of the normal draws of V and M; None draws them by Glorot's rule.
    """

    def __init__(
        self, in_features: int, out_features: int, mean: tuple[float, float] | None = None, std: float = 0.2
    ) -> None:
        super().__init__()
        self.tanh_weight = nn.Parameter(torch.empty(out_features, in_features))
        self.sigmoid_weight = nn.Parameter(torch.empty(out_features, in_features))
        if mean is None:
            nn.init.xavier_uniform_(self.tanh_weight)
            nn.init.xavier_uniform_(self.sigmoid_weight)
        else:
            nn.init.normal_(self.tanh_weight, mean[0], std)
            nn.init.normal_(self.sigmoid_weight, mean[1], std)

    @property
    def weight(self) -> Tensor:  # (out, in)
        """W, with entries in (-1, 1)."""
        return torch.tanh(self.tanh_weight) * torch.sigmoid(self.sigmoid_weight)

    def forward(self, u: Tensor) -> Tensor:  # (..., in) -> (..., out)
        """Computes Wu."""
        return F.linear(u, self.weight)


class ArithmeticUnit(nn.Module):
    """One layer of a `NALU`."""

    def __init__(self, in_features: int, out_features: int, eps: float) -> None:
        super().__init__()
        self.accumulator = Accumulator(in_features, out_features)
        self.gate = nn.Linear(in_features, out_features, bias=False)
        nn.init.xavier_uniform_(self.gate.weight)
        self.eps = eps

    def forward(self, u: Tensor) -> Tensor:  # (..., in) -> (..., out)
        """Computes the gated sum of both paths."""
        gate, weight = self.gate(u), self.accumulator.weight
        exponent = F.linear(torch.log(u.abs() + self.eps), weight)
        # (1 - g) m in logarithms: a closed gate times an overflown product is 0, not NaN.
        product = torch.exp(exponent + F.logsigmoid(-gate))
        return torch.sigmoid(gate) * F.linear(u, weight) + product


class ImprovedUnit(nn.Module):
    """One layer of an `INALU`, drawn as its authors do: means 0.88, 0.5 and 0 of V, M and the gate."""

    def __init__(self, in_features: int, out_features: int, eps: float, cap: float) -> None:
        super().__init__()
        self.sum = Accumulator(in_features, out_features, mean=(0.88, 0.5))
        self.product = Accumulator(in_features, out_features, mean=(0.88, 0.5))
        self.gate = nn.Parameter(0.2 * torch.randn(out_features))
        self.eps, self.cap = eps, cap

    def forward(self, u: Tensor) -> Tensor:  # (..., in) -> (..., out)
        """Computes the gated sum of both paths."""
        weight, gate = self.product.weight, torch.sigmoid(self.gate)
        exponent = F.linear(torch.log(u.abs().clamp(min=self.eps)), weight).clamp(max=self.cap)
        share = weight.abs()  # (out, in)
        sign = (u.sign().unsqueeze(-2) * share + 1 - share).prod(-1)
        total: Tensor = self.sum(u)
        return gate * total + (1 - gate) * sign * torch.exp(exponent)


def _stack(layer: Callable[[int, int], nn.Module], sizes: Sequence[int]) -> nn.Sequential:
    return nn.Sequential(*(layer(before, after) for before, after in pairwise(require_sizes(sizes))))
