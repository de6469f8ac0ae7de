"""Regression and classification of tables and of sequences.

`Regressor` and `Classifier` have the loss and say how outputs become predictions; the estimators add what they
read: `ImplicitRegressor` and `ImplicitClassifier` tables, `ImplicitSequenceRegressor` and
`ImplicitSequenceClassifier` sequences.
"""

import abc
import types
import warnings
from typing import Any, Self

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from wellposed.errors import InputError, require
from wellposed.estimators.estimator import Estimator, base
from wellposed.estimators.inputs import Array, Scaling, SequenceInputs, TableInputs

exceptions = require("sklearn.exceptions", extra="sklearn")
linear_model = require("sklearn.linear_model", extra="sklearn")
multiclass = require("sklearn.utils.multiclass", extra="sklearn")
class_weights = require("sklearn.utils.class_weight", extra="sklearn")

LINEAR_PENALTY = 1 / 300  # on |D|^2, beside the mean loss of the linear model at which training starts


class Regressor(base.RegressorMixin, Estimator, abc.ABC):  # type: ignore[name-defined]
    """Predicts numbers, by least squares in standardised units."""

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Takes one epoch over these samples; those of the first call fix the scaling and should be typical."""
        return self._train_one_epoch(X, y, sample_weight)

    def predict(self, X: Any) -> Array:  # (N,), or (N, q) if y had columns
        """Computes the outputs."""
        outputs = self._outputs(X)
        values = self._target_scaling.restore(outputs)
        return values[:, 0] if self._single else values

    def _read(self, X: Any, y: Any, reset: bool) -> tuple[Array, np.ndarray]:
        X, y = self._inputs.read_with(self, X, y, reset, multi_output=True, y_numeric=True)
        columns = 1 if y.ndim == 1 else y.shape[1]
        if not reset and columns != len(self._output_scale):
            raise InputError(f"y must have {len(self._output_scale)} columns as before; received {columns}")
        return X, y.astype(np.float64)

    def _define_targets(self, y: np.ndarray, weights: Array) -> int:
        self._single = y.ndim == 1
        columns = y.reshape(len(y), -1)
        self._target_scaling = Scaling.of(columns, weights)
        return columns.shape[1]

    def _encode(self, y: np.ndarray) -> Array:
        return self._target_scaling.standardise(y.reshape(len(y), -1))

    def _loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        errors = (prediction - target[:, :-1]).square().mean(1)
        return (errors * target[:, -1]).mean()

    def _linear_model(self, X: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
        model = linear_model.Ridge(LINEAR_PENALTY * weights.sum()).fit(X, targets, sample_weight=weights)
        return np.reshape(model.coef_, (targets.shape[1], -1)), model.intercept_

    def _strata(self, y: np.ndarray) -> None:
        return None

    @property
    def _output_scale(self) -> Array:
        return self._target_scaling.scale

    def _target_state(self) -> dict[str, Any]:
        scaling = self._target_scaling
        return {"single": self._single, "mean": scaling.mean.tolist(), "scale": scaling.scale.tolist()}

    def _restore_targets(self, state: dict[str, Any]) -> int:
        self._single = state["single"]
        self._target_scaling = Scaling(np.array(state["mean"]), np.array(state["scale"]))
        return len(state["mean"])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return self._inputs.tagged(tags)


class Classifier(base.ClassifierMixin, Estimator, abc.ABC):  # type: ignore[name-defined]
    """Predicts labels, by cross-entropy: one output for two classes, else one for each."""

    def __init__(
        self,
        state_features: int = 32,
        *,
        kappa: float = 0.5,
        activation: str = "relu",
        weight_decay: float | str = "auto",
        max_epochs: int = 40,
        batch_size: int | str = "auto",
        learning_rate: float = 5e-2,
        class_weight: dict[Any, float] | str | None = None,
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 20,
        random_state: Any = None,
        device: str = "auto",
        verbose: bool = False,
    ) -> None:
        super().__init__(
            state_features,
            kappa=kappa,
            activation=activation,
            weight_decay=weight_decay,
            max_epochs=max_epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            n_iter_no_change=n_iter_no_change,
            random_state=random_state,
            device=device,
            verbose=verbose,
        )
        self.class_weight = class_weight

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Takes one epoch over these samples.

        Args:
            classes: all labels that will ever occur; needed at the first call only. It also fixes the scaling of
                the features, so its samples should be typical.
        """
        if self.class_weight == "balanced":
            raise InputError("partial_fit sees only some samples, so class_weight must be a dict or None there")
        if not hasattr(self, "network_"):
            if classes is None:
                raise InputError("the first call of partial_fit needs classes=, all labels that will ever occur")
            self._expected = np.unique(classes)
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise InputError(f"classes must stay {self.classes_.tolist()}; received {np.unique(classes).tolist()}")
        try:
            return self._train_one_epoch(X, y, sample_weight)
        finally:
            self.__dict__.pop("_expected", None)

    def decision_function(self, X: Any) -> Array:  # (N,) for two classes, else (N, K)
        """Computes the outputs before the logistic function or the softmax."""
        values = self._outputs(X)
        return values[:, 0] if values.shape[1] == 1 else values

    def predict_proba(self, X: Any) -> Array:  # (N, K)
        """Computes the probability of every class."""
        values = self._outputs(X)
        if values.shape[1] == 1:
            values = np.concatenate([np.zeros_like(values), values], axis=1)
        exponentials = np.exp(values - values.max(1, keepdims=True))
        return exponentials / exponentials.sum(1, keepdims=True)

    def predict_log_proba(self, X: Any) -> Array:  # (N, K)
        """Computes the logarithms of the probabilities."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:  # (N,)
        """Computes the likeliest labels."""
        values = self._outputs(X)
        winners = (values[:, 0] > 0).astype(int) if values.shape[1] == 1 else values.argmax(1)
        return self.classes_[winners]

    def _read(self, X: Any, y: Any, reset: bool) -> tuple[Array, np.ndarray]:
        X, y = self._inputs.read_with(self, X, y, reset)
        multiclass.check_classification_targets(y)
        return X, y

    def _class_weights(self, y: np.ndarray) -> Array | float:
        if (
            self.class_weight is not None
            and self.class_weight != "balanced"
            and not isinstance(self.class_weight, dict)
        ):
            raise InputError(f"class_weight must be a dict, 'balanced' or None; received {self.class_weight!r}")
        return class_weights.compute_sample_weight(self.class_weight, y)

    def _define_targets(self, y: np.ndarray, weights: Array) -> int:
        self.classes_ = getattr(self, "_expected", np.unique(y))
        if len(self.classes_) < 2:
            raise InputError(
                f"a classifier needs at least two classes; y has the one class {self.classes_.tolist()[0]!r}"
            )
        return 1 if len(self.classes_) == 2 else len(self.classes_)

    def _encode(self, y: np.ndarray) -> Array:
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise InputError(f"y has the labels {unknown.tolist()}, known are {self.classes_.tolist()}")
        return np.searchsorted(self.classes_, y)[:, None].astype(np.float64)

    def _loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        label, weight = target[:, 0], target[:, 1]
        if prediction.shape[1] == 1:
            losses = F.binary_cross_entropy_with_logits(prediction[:, 0], label, reduction="none")
        else:
            losses = F.cross_entropy(prediction, label.long(), reduction="none")
        return (losses * weight).mean()

    def _linear_model(self, X: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
        if len(np.unique(targets[:, 0])) < len(self.classes_):  # all samples of a class were set aside
            count = len(self.network_.offset)
            return np.zeros((count, X.shape[1])), np.zeros(count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", exceptions.ConvergenceWarning)  # a start need not be exact
            model = linear_model.LogisticRegression(C=1 / (LINEAR_PENALTY * weights.sum()), max_iter=30)
            model.fit(X, targets[:, 0], sample_weight=weights)
        return model.coef_, model.intercept_

    def _strata(self, y: np.ndarray) -> np.ndarray:
        return y

    @property
    def _output_scale(self) -> Array:
        return np.ones(len(self.network_.offset))

    def _target_state(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "dtype": self.classes_.dtype.str}

    def _restore_targets(self, state: dict[str, Any]) -> int:
        self.classes_ = np.array(state["classes"], dtype=np.dtype(state["dtype"]))
        return 1 if len(self.classes_) == 2 else len(self.classes_)

    def __sklearn_tags__(self) -> Any:
        return self._inputs.tagged(super().__sklearn_tags__())


class ImplicitRegressor(Regressor):
    """Predicts ``y = Cx + Du + c`` where ``x = phi(Ax + Bu + b)``, an `ImplicitModel`, in scikit-learn's way.

    Features and targets are standardised inside, with the sample weights. Training starts at a linear model (D and
    c by ridge or logistic regression) and is by `wellposed.fit` with Adam, decoupled weight decay of A, B and C
    and a cosine schedule, in float32 if X is, else in float64. The answer to every input exists and is unique, as
    `certificate_` proves, and none changes faster than `sensitivity_` says. The defaults were chosen on twenty
    tables by ``benchmarks.package.estimators``.

    Args:
        state_features: number of states x.
        kappa: the cap on the row sums of ``|A|``, below one.
        activation: phi, by name.
        weight_decay: share of the matrices that an update takes off, times the learning rate; ``"auto"``:
            300 / samples, at most 3.
        max_epochs: passes over the data; exactly so many without early stopping.
        batch_size: rows of an update; ``"auto"``: 200, or a hundredth of the data if that is more.
        learning_rate: at the start.
        early_stopping: whether to set samples aside, stop when their loss no longer improves and keep the best
            network; ``"auto"``: with more than 10 000 samples.
        validation_fraction: share of samples set aside, with classes in proportion.
        n_iter_no_change: epochs to wait for an improvement.
        random_state: seed of initial values, data order and split.
        device: ``"auto"`` (CUDA if there is one), ``"cpu"``, ``"cuda"``, ...
        verbose: whether to show a progress bar, or where there is no terminal to print about ten lines.

    Attributes:
        n_steps_: mean steps to equilibrium of a training sample, in the epoch of the returned network.
        n_iter_: epochs.
        loss_curve_, validation_curve_: losses of the epochs; of regression, in standardised units.
        n_features_in_, feature_names_in_: as in scikit-learn.
        network_, optimizer_: what was trained, and by what.

    Example:
        >>> import numpy as np
        >>> u = np.linspace(-2, 2, 40)[:, None]
        >>> regressor = ImplicitRegressor(max_epochs=100, random_state=0).fit(u, np.abs(u[:, 0]))
        >>> bool(regressor.score(u, np.abs(u[:, 0])) > 0.95), regressor.certificate_.holds
        (True, True)
    """

    _inputs = TableInputs()


class ImplicitClassifier(Classifier):
    """Predicts labels from the outputs of an `ImplicitModel`, in scikit-learn's way; see `ImplicitRegressor`.

    Two classes have one output and the logistic loss, more have one output each and the softmax.

    Args:
        class_weight: weights of samples by label, or ``"balanced"``: so that every class weighs the same.

    Attributes:
        classes_: the labels.
        sensitivity_: of `decision_function`.

    Example:
        >>> import numpy as np
        >>> u = np.linspace(-2, 2, 40)[:, None]
        >>> label = np.where(np.abs(u[:, 0]) < 1, "inside", "outside")
        >>> classifier = ImplicitClassifier(8, random_state=0).fit(u, label)
        >>> classifier.predict([[0.0], [1.9]])
        array(['inside', 'outside'], dtype='<U7')
    """

    _inputs = TableInputs()


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
