"""Estimators for sequences of features."""

import types
from typing import Any

from wellposed.estimators.inputs import SequenceInputs
from wellposed.estimators.targets import Classifier, Regressor

DEFAULTS: dict[str, Any] = {"kappa": 0.95, "max_epochs": 200, "learning_rate": 1e-2}


def with_defaults(init: Any, **defaults: Any) -> Any:
    """Copies a constructor with other defaults: scikit-learn reads parameters from the signature.

    Example:
        >>> with_defaults(lambda *, a=1, b=2: (a, b), b=3)()
        (1, 3)
    """
    copy = types.FunctionType(init.__code__, init.__globals__, init.__name__, init.__defaults__, init.__closure__)
    copy.__kwdefaults__ = init.__kwdefaults__ | defaults
    copy.__annotations__ = init.__annotations__
    return copy


class ImplicitSequenceRegressor(Regressor):
    """Predicts numbers from the last output of an `ImplicitRNN` that reads ``(samples, time, features)``.

    The equilibrium and the hidden state have `state_features` entries each; everything else is as in
    `ImplicitRegressor`, but for its own defaults and a start at random values. Sequences to predict for may be
    longer or shorter than those of `fit`.

    Example:
        >>> import numpy as np
        >>> u = np.random.default_rng(0).normal(size=(60, 5, 1))
        >>> regressor = ImplicitSequenceRegressor(8, max_epochs=150, random_state=0).fit(u, u[:, :, 0].mean(1))
        >>> bool(regressor.score(u, u[:, :, 0].mean(1)) > 0.9), regressor.sensitivity_.shape
        (True, (1, 5, 1))
    """

    _inputs = SequenceInputs()
    __init__ = with_defaults(Regressor.__init__, **DEFAULTS)


class ImplicitSequenceClassifier(Classifier):
    """Predicts labels from the last output of an `ImplicitRNN`; see `ImplicitSequenceRegressor`.

    Example:
        >>> import numpy as np
        >>> u = np.random.default_rng(0).normal(size=(60, 4, 1))
        >>> classifier = ImplicitSequenceClassifier(8, random_state=0).fit(u, u[:, 0, 0] > 0)
        >>> classifier.predict_proba(u[:3]).shape
        (3, 2)
    """

    _inputs = SequenceInputs()
    __init__ = with_defaults(Classifier.__init__, **DEFAULTS)
