"""Estimators for tables of features."""

from wellposed.estimators.inputs import TableInputs
from wellposed.estimators.targets import Classifier, Regressor


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
