"""Quality and CPU time of the estimators beside scikit-learn's multilayer perceptrons and linear models.

Three-fold cross-validation, defaults everywhere; the others get a StandardScaler, and targets standardised.
Run: python -m benchmarks.package.estimators          measures, writes results/package/estimators.json and prints the table
     python -m benchmarks.package.estimators --table  prints the table from the JSON
"""

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
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

from benchmarks.timing import one_thread
from wellposed import ImplicitClassifier, ImplicitRegressor

RESULT = Path(__file__).parents[1] / "results" / "package" / "estimators.json"
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
        began = time.process_time()
        fitted = sklearn.base.clone(estimator).fit(X[train], y[train])
        seconds.append(time.process_time() - began)
        scores.append(float(fitted.score(X[test], y[test])))
    return {"scores": scores, "seconds": float(np.median(seconds))}


def run() -> dict[str, Any]:
    """Measures everything."""
    rows = []
    warm, targets = np.random.default_rng(0).normal(size=(300, 3)), np.arange(300) % 3
    ImplicitRegressor(max_epochs=2).fit(warm, targets), ImplicitClassifier(max_epochs=2).fit(warm, targets)
    for table, models, kind in (
        (REGRESSION, regressors, KFold),
        (CLASSIFICATION, classifiers, StratifiedKFold),
    ):
        for name, load in table.items():
            for model, estimator in models().items():
                found = measure(estimator, load(), kind(FOLDS, shuffle=True, random_state=0))
                rows.append({"data": name, "model": model, **found})
                print(rows[-1], flush=True)
    return {"python": platform.python_version(), "sklearn": sklearn.__version__, "rows": rows}


def show(result: dict[str, Any]) -> str:
    """Writes the table: mean score and its range over the folds, and seconds."""
    names = list(dict.fromkeys(row["model"] for row in result["rows"]))
    lines = ["| data | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for data in dict.fromkeys(row["data"] for row in result["rows"]):
        cells = {row["model"]: row for row in result["rows"] if row["data"] == data}
        texts = [f"{np.mean(cells[m]['scores']):.3f} ({cells[m]['seconds']:.1f} s)" for m in names]
        lines.append(f"| {data} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="print the table from the JSON")
    if not parser.parse_args().table:
        warnings.simplefilter("ignore", ConvergenceWarning)
        one_thread()
        RESULT.write_text(json.dumps(run(), indent=1) + "\n")
    print(show(json.loads(RESULT.read_text())))


if __name__ == "__main__":
    main()
