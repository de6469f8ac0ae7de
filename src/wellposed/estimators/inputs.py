"""What the estimators read and train: tables of features or sequences of them, and the network that takes them.

`Network` is an implicit model with an offset, read at the end of a sequence if there is one. `Units` measure
columns from their mean in units of their spread. `Rows` and `Sequences` check the two kinds of `Inputs`.
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

MAX_STEPS = 2000  # what a cap close to one may need; a solve that is done earlier ends earlier


class Network(nn.Module):
    """Computes ``y = body(u) + offset``, of sequences at the last step of time.

    Args:
        body: in standardised units.
        outputs: columns of y.

    Example:
        >>> Network.of_rows(3, 2, 8)(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(self, body: ImplicitModel | ImplicitRNN, outputs: int) -> None:
        super().__init__()
        self.body, self.offset = body, nn.Parameter(torch.zeros(outputs))

    @classmethod
    def of_rows(
        cls, inputs: int, outputs: int, states: int, *, kappa: float = 0.95, activation: str = "relu"
    ) -> "Network":
        """Builds a network for inputs ``(B, p)``."""
        options: dict[str, Any] = {"kappa": kappa, "activation": activation, "max_steps": MAX_STEPS}
        return cls(ImplicitModel(inputs, outputs, states, bias=True, **options), outputs)

    @classmethod
    def of_sequences(
        cls, inputs: int, outputs: int, states: int, *, kappa: float = 0.95, activation: str = "relu"
    ) -> "Network":
        """Builds a network for inputs ``(B, T, p)``; the hidden state is as wide as the equilibrium."""
        options: dict[str, Any] = {"kappa": kappa, "activation": activation, "max_steps": MAX_STEPS, "bias": True}
        body = ImplicitRNN(
            inputs, states, states, out_features=outputs, readout_bias=False, batch_first=True, **options
        )
        return cls(body, outputs)

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
class Units:
    """What zero and one stand for in every column.

    Example:
        >>> units = Units.of(np.array([[1.0, 5.0], [3.0, 5.0]]), np.ones(2))
        >>> units.mean, units.scale  # a constant column keeps its unit
        (array([2., 5.]), array([1., 1.]))
        >>> units.standardised(np.array([[4.0, 5.0]]))
        array([[2., 0.]])
    """

    mean: Array  # (p,)
    scale: Array  # (p,)

    @classmethod
    def of(cls, values: Array, weights: Array) -> "Units":  # (N, ..., p), (N,)
        """Measures weighted data, in float64."""
        rows = values.astype(np.float64).reshape(len(values), -1, values.shape[-1])
        rows = rows.transpose(1, 0, 2)  # (T, N, p)
        mean = np.average(rows, axis=1, weights=weights).mean(0)
        scale = np.sqrt(np.average((rows - mean) ** 2, axis=1, weights=weights).mean(0))
        constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(mean)
        return cls(mean, np.where(constant, 1.0, scale))

    def standardised(self, values: Array) -> Array:
        """Expresses values in these units, in the dtype that they have."""
        return ((values - self.mean) / self.scale).astype(values.dtype)

    def restored(self, values: Array) -> Array:
        """Expresses standardised values in units of the data again."""
        return values * self.scale + self.mean


checks = require("sklearn.utils.validation", extra="sklearn")
TYPES = [np.float64, np.float32]  # float32 stays, everything else becomes float64


class Inputs(abc.ABC):
    """How inputs are checked, and the network that takes them."""

    @abc.abstractmethod
    def read(self, estimator: Any, X: Any) -> Array:
        """Checks inputs to predict for."""

    @abc.abstractmethod
    def read_with(self, estimator: Any, X: Any, y: Any, reset: bool, **target: Any) -> tuple[Array, np.ndarray]:
        """Checks inputs and targets; `reset`: takes note of the number of features and their names."""

    @abc.abstractmethod
    def build(self, inputs: int, outputs: int, states: int, *, kappa: float, activation: str) -> Network:
        """Makes a network."""

    @abc.abstractmethod
    def readout(self, network: Network) -> nn.Module:
        """Returns the module whose sensitivity is that of the network."""

    def tagged(self, tags: Any) -> Any:
        """Tells scikit-learn what is read."""
        return tags


class Rows(Inputs):
    """Tables ``(samples, features)``, as arrays or data frames."""

    def read(self, estimator: Any, X: Any) -> Array:
        return checks.validate_data(estimator, X, dtype=TYPES, reset=False)

    def read_with(self, estimator: Any, X: Any, y: Any, reset: bool, **target: Any) -> tuple[Array, np.ndarray]:
        return checks.validate_data(estimator, X, y, dtype=TYPES, reset=reset, **target)

    def build(self, inputs: int, outputs: int, states: int, *, kappa: float, activation: str) -> Network:
        return Network.of_rows(inputs, outputs, states, kappa=kappa, activation=activation)

    def readout(self, network: Network) -> nn.Module:
        return network.body


class Sequences(Inputs):
    """Arrays ``(samples, time, features)``; the length may differ between `fit` and `predict`."""

    def read(self, estimator: Any, X: Any) -> Array:
        X = checks.check_array(X, dtype=TYPES, ensure_2d=False, allow_nd=True)
        return self._checked(estimator, X, reset=False)

    def read_with(self, estimator: Any, X: Any, y: Any, reset: bool, **target: Any) -> tuple[Array, np.ndarray]:
        X, y = checks.check_X_y(X, y, dtype=TYPES, ensure_2d=False, allow_nd=True, **target)
        return self._checked(estimator, X, reset), y

    def build(self, inputs: int, outputs: int, states: int, *, kappa: float, activation: str) -> Network:
        return Network.of_sequences(inputs, outputs, states, kappa=kappa, activation=activation)

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
