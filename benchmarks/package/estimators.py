"""Quality and CPU time of the estimators beside scikit-learn's multilayer perceptrons and linear models.

Three-fold cross-validation, defaults everywhere; the others get a StandardScaler, and targets standardised.

Run: python -m benchmarks.package.estimators [--quick | --table]
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import sklearn
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.harness import cpu_seconds, load, make_parser, markdown, one_thread, save, versions
from wellposed import ImplicitClassifier, ImplicitRegressor

FOLDS = 3
Data = tuple[np.ndarray, np.ndarray]


def houses() -> Data:
    """Prices like those of the California housing table: income, age, rooms, people and two coordinates."""
    generator = np.random.default_rng(0)
    size = 3000
    income, age = generator.gamma(3.0, 1.3, size), generator.uniform(1, 52, size)
    rooms, people = generator.lognormal(1.6, 0.3, size), generator.lognormal(1.0, 0.3, size)
    place = generator.uniform([-124, 32], [-114, 42], size=(size, 2))
    coast = np.abs(place[:, 0] + 0.9 * place[:, 1] + 86.0)
    noise = generator.normal(0, 0.3, size)
    price = 0.4 * income + 0.01 * age + 2 * np.exp(-coast) - 0.2 * np.log(people) * income / rooms + noise
    return np.column_stack([income, age, rooms, people, place]), np.minimum(price, 5.0)


REGRESSION: dict[str, Callable[[], Data]] = {
    "diabetes, 442 x 10": lambda: datasets.load_diabetes(return_X_y=True),
    "houses, 3000 x 6": houses,
    "Friedman, 2000 x 10": lambda: datasets.make_friedman1(2000, noise=1.0, random_state=0),
}
CLASSIFICATION: dict[str, Callable[[], Data]] = {
    "breast cancer, 569 x 30": lambda: datasets.load_breast_cancer(return_X_y=True),
    "digits, 1797 x 64": lambda: datasets.load_digits(return_X_y=True),
}


def regressors() -> dict[str, Any]:
    """What is compared on numbers."""
    perceptron = TransformedTargetRegressor(MLPRegressor(random_state=0), transformer=StandardScaler())
    return {
        "implicit": ImplicitRegressor(random_state=0),
        "implicit, kappa 0.5": ImplicitRegressor(kappa=0.5, random_state=0),
        "perceptron": make_pipeline(StandardScaler(), perceptron),
        "linear": make_pipeline(StandardScaler(), RidgeCV()),
    }


def classifiers() -> dict[str, Any]:
    """What is compared on labels."""
    return {
        "implicit": ImplicitClassifier(random_state=0),
        "implicit, kappa 0.5": ImplicitClassifier(kappa=0.5, random_state=0),
        "perceptron": make_pipeline(StandardScaler(), MLPClassifier(random_state=0)),
        "linear": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
    }


def measure(estimator: Any, data: Data, folds: Any) -> dict[str, Any]:
    """Cross-validates one estimator; seconds are CPU time of a fit."""
    X, y = data
    scores, seconds = [], []
    for train, test in folds.split(X, y):
        fresh = sklearn.base.clone(estimator)
        spent, fitted = cpu_seconds(partial(fresh.fit, X[train], y[train]))
        seconds.append(spent)
        scores.append(float(fitted.score(X[test], y[test])))
    return {"scores": scores, "seconds": float(np.median(seconds))}


def measure_all(quick: bool) -> list[dict[str, Any]]:
    """Measures all estimators on all data."""
    rows = []
    warm, targets = np.random.default_rng(0).normal(size=(300, 3)), np.arange(300) % 3
    ImplicitRegressor(max_epochs=2).fit(warm, targets), ImplicitClassifier(max_epochs=2).fit(warm, targets)
    for tables, models, kind in (
        (REGRESSION, regressors, KFold),
        (CLASSIFICATION, classifiers, StratifiedKFold),
    ):
        for name, make in list(tables.items())[: 1 if quick else None]:
            for model, estimator in models().items():
                measured = measure(estimator, make(), kind(FOLDS, shuffle=True, random_state=0))
                rows.append({"data": name, "model": model, **measured})
                print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Writes the mean score over the folds, and seconds."""
    names, lines = list(dict.fromkeys(row["model"] for row in rows)), []
    for data in dict.fromkeys(row["data"] for row in rows):
        cells = {row["model"]: row for row in rows if row["data"] == data}
        lines.append([data, *(f"{np.mean(cells[m]['scores']):.3f} ({cells[m]['seconds']:.1f} s)" for m in names)])
    return markdown(["data", *names], lines)


def main() -> None:
    """Measures, or prints what was measured."""
    parser = make_parser(__doc__, __file__, quick="one data set of each kind", table="print the table")
    options = parser.parse_args()
    if options.table:
        print(table(load(options)["rows"]))
        return
    warnings.simplefilter("ignore", ConvergenceWarning)
    one_thread()
    rows = measure_all(options.quick)
    save(options, versions=versions("wellposed", "scikit-learn"), rows=rows)
    print(table(rows))


if __name__ == "__main__":
    main()
