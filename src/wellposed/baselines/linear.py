"""Linear regression: the control that every task with a linear target needs."""

import torch
from torch import Tensor, nn

from wellposed.errors import InputError


class LinearRegression(nn.Module):
    """Predicts ``Wu + c``, in closed form by `fit` or trained by gradients like any other module.

    It starts at zero, so that gradient descent on the squared error converges to the answer of `fit`, the
    least-squares solution of minimum norm. 001 (Table 4) lists "SGD Linear Regression" among the volatility
    models and prints no settings for it; this module under `torch.optim.SGD` is that control.

    Args:
        intercept: whether there is a c.

    Example:
        >>> u = torch.tensor([[0.0], [1.0], [2.0]])
        >>> model = LinearRegression(1, 1).fit(u, 3 * u + 1)
        >>> model(torch.tensor([[10.0]])).round(decimals=4).tolist()
        [[31.0]]
    """

    def __init__(self, in_features: int, out_features: int, intercept: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, intercept)
        self.intercept = intercept
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

    def forward(self, u: Tensor) -> Tensor:  # (..., p) -> (..., q)
        """Computes the outputs."""
        y: Tensor = self.linear(u)
        return y

    @torch.no_grad()
    def fit(self, u: Tensor, y: Tensor) -> "LinearRegression":  # (m, p), (m, q)
        """Solves ``min |Wu + c - y|^2``, among the solutions that of least ``|W|``, in float64."""
        self._require_data(u, y)
        inputs, targets = u.detach().cpu().double(), y.detach().cpu().double()
        if not self.intercept:
            self.linear.weight.copy_(_least_squares(inputs, targets).mT)
            return self
        mean, target = inputs.mean(0), targets.mean(0)
        weight = _least_squares(inputs - mean, targets - target).mT
        self.linear.weight.copy_(weight)
        self.linear.bias.copy_(target - weight @ mean)
        return self

    def _require_data(self, u: Tensor, y: Tensor) -> None:
        inputs, outputs = self.linear.in_features, self.linear.out_features
        good = u.dim() == y.dim() == 2 and len(u) == len(y) > 0
        if not good or u.shape[1] != inputs or y.shape[1] != outputs:
            raise InputError(
                f"u and y must be (m, {inputs}) and (m, {outputs}) with one m > 0; "
                f"received {tuple(u.shape)} and {tuple(y.shape)}"
            )
        if not (u.isfinite().all() and y.isfinite().all()):
            raise InputError("u or y has entries that are NaN or infinite; leave those samples out")


def _least_squares(inputs: Tensor, targets: Tensor) -> Tensor:
    # Only this driver copes with dependent columns.
    return torch.linalg.lstsq(inputs, targets, driver="gelsd").solution
