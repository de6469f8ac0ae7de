"""What the estimators read: tables of features, or sequences of them."""

import abc
from typing import Any

import numpy as np
from torch import nn

from wellposed.errors import InputError, require
from wellposed.estimators.network import Network
from wellposed.estimators.units import Array

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
