"""Inputs of the estimators, tables or sequences, and the network that takes them.

`Network` is an implicit model with an offset, read at the end of a sequence if there is one. `Scaling`
standardises columns. `TableInputs` and `SequenceInputs` check the two kinds of `Inputs`.
"""

import abc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wellposed.errors import InputError, require
from wellposed.models.implicit import ImplicitModel
from wellposed.models.recurrent import ImplicitRNN

STATE_SHARE = 0.3  # of the usual size of C, where training starts at a linear model
MAX_STEPS = 2000  # what a cap close to one may need; a solve that is done earlier ends earlier


class Network(nn.Module):
    """Computes ``y = body(u) + offset``, of sequences at the last step of time.

    Args:
        body: in standardised units.
        outputs: columns of y.

    Example:
        >>> Network(ImplicitModel(3, 2, 8), 2)(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(self, body: ImplicitModel | ImplicitRNN, outputs: int) -> None:
        super().__init__()
        self.body, self.offset = body, nn.Parameter(torch.zeros(outputs))

    @property
    def linear(self) -> nn.Parameter | None:
        """The matrix D of a model of tables; None for sequences."""
        return self.body.D if isinstance(self.body, ImplicitModel) else None

    @torch.no_grad()
    def start_linear(self, D: Tensor, offset: Tensor) -> None:
        """Sets a model of tables to ``y = Du + offset``, with the states small beside it."""
        if isinstance(self.body, ImplicitModel) and self.body.D is not None:
            self.body.D.copy_(D)
            self.offset.copy_(offset)
            self.body.C.mul_(STATE_SHARE)

    @property
    def cell(self) -> ImplicitModel:
        """The implicit model that is solved, at every step of time of a sequence."""
        return self.body if isinstance(self.body, ImplicitModel) else self.body.cell(0)

    def forward(self, u: Tensor) -> Tensor:  # (B, p) or (B, T, p) -> (B, q)
        if isinstance(self.body, ImplicitModel):
            return self.body(u) + self.offset
        output, _ = self.body(u)
        return output[:, -1] + self.offset


Array = NDArray[np.floating]


@dataclass(frozen=True)
class Scaling:
    """Mean and standard deviation of every column.

    Example:
        >>> scaling = Scaling.of(np.array([[1.0, 5.0], [3.0, 5.0]]), np.ones(2))
        >>> scaling.mean, scaling.scale  # a constant column keeps its unit
        (array([2., 5.]), array([1., 1.]))
        >>> scaling.standardise(np.array([[4.0, 5.0]]))
        array([[2., 0.]])
    """

    mean: Array  # (p,)
    scale: Array  # (p,)

    @classmethod
    def of(cls, values: Array, weights: Array) -> "Scaling":  # (N, ..., p), (N,)
        """Measures weighted data, in float64."""
        rows = values.astype(np.float64).reshape(len(values), -1, values.shape[-1])
        rows = rows.transpose(1, 0, 2)  # (T, N, p)
        mean = np.average(rows, axis=1, weights=weights).mean(0)
        scale = np.sqrt(np.average((rows - mean) ** 2, axis=1, weights=weights).mean(0))
        constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(mean)
        return cls(mean, np.where(constant, 1.0, scale))

    def standardise(self, values: Array) -> Array:
        """Subtracts the mean and divides by the standard deviation, in the dtype of the values."""
        return ((values - self.mean) / self.scale).astype(values.dtype)

    def restore(self, values: Array) -> Array:
        """Undoes `standardise`."""
        return values * self.scale + self.mean


checks = require("sklearn.utils.validation", extra="sklearn")
TYPES = [np.float64, np.float32]  # float32 stays, everything else becomes float64


class Inputs(abc.ABC):
    """How inputs are checked, and the network that takes them."""

    @abc.abstractmethod
    def read(self, estimator: Any, X: Any) -> Array:
        """Checks the inputs of a prediction."""

    @abc.abstractmethod
    def read_with(self, estimator: Any, X: Any, y: Any, reset: bool, **target: Any) -> tuple[Array, np.ndarray]:
        """Checks inputs and targets; `reset`: stores the number of features and their names."""

    @abc.abstractmethod
    def build(self, inputs: int, outputs: int, states: int, *, kappa: float, activation: str) -> Network:
        """Makes a network."""

    @abc.abstractmethod
    def readout(self, network: Network) -> nn.Module:
        """Returns the module whose sensitivity is that of the network."""

    def tagged(self, tags: Any) -> Any:
        """Tells scikit-learn which inputs are taken."""
        return tags


class TableInputs(Inputs):
    """Tables ``(samples, features)``, as arrays, data frames or sparse matrices, which are made dense."""

    def read(self, estimator: Any, X: Any) -> Array:
        return _dense(checks.validate_data(estimator, X, dtype=TYPES, reset=False, accept_sparse="csr"))

    def read_with(self, estimator: Any, X: Any, y: Any, reset: bool, **target: Any) -> tuple[Array, np.ndarray]:
        X, y = checks.validate_data(estimator, X, y, dtype=TYPES, reset=reset, accept_sparse="csr", **target)
        return _dense(X), y

    def build(self, inputs: int, outputs: int, states: int, *, kappa: float, activation: str) -> Network:
        options: dict[str, Any] = {"kappa": kappa, "activation": activation, "max_steps": MAX_STEPS}
        body = ImplicitModel(inputs, outputs, states, bias=True, **options)
        if body.bias is not None:
            nn.init.uniform_(body.bias, -0.5, 0.5)
        return Network(body, outputs)

    def readout(self, network: Network) -> nn.Module:
        return network.body

    def tagged(self, tags: Any) -> Any:
        tags.input_tags.sparse = True
        return tags


def _dense(X: Any) -> Array:
    return X.toarray() if hasattr(X, "toarray") else X


class SequenceInputs(Inputs):
    """Arrays ``(samples, time, features)``; the length may differ between `fit` and `predict`."""

    def read(self, estimator: Any, X: Any) -> Array:
        X = checks.check_array(X, dtype=TYPES, ensure_2d=False, allow_nd=True)
        return self._checked(estimator, X, reset=False)

    def read_with(self, estimator: Any, X: Any, y: Any, reset: bool, **target: Any) -> tuple[Array, np.ndarray]:
        X, y = checks.check_X_y(X, y, dtype=TYPES, ensure_2d=False, allow_nd=True, **target)
        return self._checked(estimator, X, reset), y

    def build(self, inputs: int, outputs: int, states: int, *, kappa: float, activation: str) -> Network:
        options: dict[str, Any] = {"kappa": kappa, "activation": activation, "max_steps": MAX_STEPS, "bias": True}
        body = ImplicitRNN(  # the hidden state is as wide as the equilibrium
            inputs, states, states, out_features=outputs, readout_bias=False, batch_first=True, **options
        )
        return Network(body, outputs)

    def readout(self, network: Network) -> nn.Module:
        return network

    def tagged(self, tags: Any) -> Any:
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = False, True
        return tags

    def _checked(self, estimator: Any, X: Array, reset: bool) -> Array:
        if X.ndim != 3 or 0 in X.shape:
            raise InputError(
                f"X must have the shape (samples, time, features); received {X.shape}. "
                "One series of numbers is X[None, :, None]"
            )
        if reset:
            estimator.n_features_in_ = X.shape[2]
        elif X.shape[2] != estimator.n_features_in_:
            raise InputError(
                f"X has {X.shape[2]} features, but {type(estimator).__name__} is expecting "
                f"{estimator.n_features_in_} features as input"
            )
        return X
