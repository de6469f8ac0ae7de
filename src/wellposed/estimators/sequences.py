"""Estimators for sequences of features."""

from wellposed.estimators.inputs import Sequences
from wellposed.estimators.targets import Classifier, Regressor


class ImplicitSequenceRegressor(Regressor):
    """Predicts numbers from the last output of an `ImplicitRNN` that reads ``(samples, time, features)``.

    The equilibrium and the hidden state have `state_features` entries each; everything else is as in
    `ImplicitRegressor`. Sequences to predict for may be longer or shorter than those of `fit`.

    Example:
        >>> import numpy as np
        >>> u = np.random.default_rng(0).normal(size=(60, 5, 1))
        >>> regressor = ImplicitSequenceRegressor(8, max_epochs=150, random_state=0).fit(u, u[:, :, 0].mean(1))
        >>> bool(regressor.score(u, u[:, :, 0].mean(1)) > 0.9), regressor.sensitivity_.shape
        (True, (1, 5, 1))
    """

    _inputs = Sequences()


class ImplicitSequenceClassifier(Classifier):
    """Predicts labels from the last output of an `ImplicitRNN`; see `ImplicitSequenceRegressor`.

    Example:
        >>> import numpy as np
        >>> u = np.random.default_rng(0).normal(size=(60, 4, 1))
        >>> classifier = ImplicitSequenceClassifier(8, random_state=0).fit(u, u[:, 0, 0] > 0)
        >>> classifier.predict_proba(u[:3]).shape
        (3, 2)
    """

    _inputs = Sequences()
