"""Quality and CPU time of the estimators beside scikit-learn's multilayer perceptrons and linear models.

Twenty tables that scikit-learn holds or generates. Nested cross-validation: in each of three outer folds every
candidate for the defaults is scored on two inner folds of the training rows, the one with the best mean rank over
all tables is chosen, and the rows set aside score it ("nested"). "implicit" has the defaults of the library. The
others have theirs, a StandardScaler in front, and standardised targets. Seconds are CPU time of a fit, one thread.

Run: python -m benchmarks.package.estimators [--quick | --table]
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import rankdata
from sklearn import datasets
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.harness import cpu_seconds, load, make_parser, markdown, one_thread, save, versions
from wellposed import ImplicitClassifier, ImplicitRegressor

OUTER, INNER = 3, 2
CANDIDATES = [{"kappa": kappa, "learning_rate": rate} for kappa in (0.3, 0.5, 0.95) for rate in (0.02, 0.05)]
Data = tuple[np.ndarray, np.ndarray]


def houses() -> Data:
    """Prices like those of the California housing table: income, age, rooms, people and two coordinates."""
    generator = np.random.default_rng(0)
    size = 1500
    income, age = generator.gamma(3.0, 1.3, size), generator.uniform(1, 52, size)
    rooms, people = generator.lognormal(1.6, 0.3, size), generator.lognormal(1.0, 0.3, size)
    position = generator.uniform([-124, 32], [-114, 42], size=(size, 2))
    coast = np.abs(position[:, 0] + 0.9 * position[:, 1] + 86.0)
    noise = generator.normal(0, 0.3, size)
    price = 0.4 * income + 0.01 * age + 2 * np.exp(-coast) - 0.2 * np.log(people) * income / rooms + noise
    return np.column_stack([income, age, rooms, people, position]), np.minimum(price, 5.0)


def column_from_others(read: Callable[..., Data], column: int) -> Data:
    """Takes one column of a table as the target."""
    X, _ = read(return_X_y=True)
    return np.delete(X, column, axis=1), X[:, column]


REGRESSION: dict[str, Callable[[], Data]] = {
    "diabetes, 442 x 10": partial(datasets.load_diabetes, return_X_y=True),
    "iris petal width, 150 x 3": partial(column_from_others, datasets.load_iris, 3),
    "wine proline, 178 x 12": partial(column_from_others, datasets.load_wine, 12),
    "linear, 300 x 10": partial(datasets.make_regression, 300, 10, noise=30.0, random_state=0),
    "linear wide, 150 x 60": partial(datasets.make_regression, 150, 60, noise=30.0, random_state=0),
    "Friedman 1, 1000 x 10": partial(datasets.make_friedman1, 1000, noise=1.0, random_state=0),
    "Friedman 2, 1000 x 4": partial(datasets.make_friedman2, 1000, noise=100.0, random_state=0),
    "Friedman 3, 1000 x 4": partial(datasets.make_friedman3, 1000, noise=0.1, random_state=0),
    "swiss roll, 1000 x 3": partial(datasets.make_swiss_roll, 1000, noise=0.5, random_state=0),
    "houses, 1500 x 6": houses,
}
CLASSIFICATION: dict[str, Callable[[], Data]] = {
    "iris, 150 x 4": partial(datasets.load_iris, return_X_y=True),
    "wine, 178 x 13": partial(datasets.load_wine, return_X_y=True),
    "breast cancer, 569 x 30": partial(datasets.load_breast_cancer, return_X_y=True),
    "digits, 1797 x 64": partial(datasets.load_digits, return_X_y=True),
    "moons, 500 x 2": partial(datasets.make_moons, 500, noise=0.3, random_state=0),
    "circles, 500 x 2": partial(datasets.make_circles, 500, noise=0.15, factor=0.5, random_state=0),
    "blobs, 500 x 10": partial(datasets.make_blobs, 500, 10, centers=5, cluster_std=5.0, random_state=0),
    "quantiles, 1000 x 5": partial(
        datasets.make_gaussian_quantiles, n_samples=1000, n_features=5, n_classes=3, random_state=0
    ),
    "sphere, 1000 x 10": partial(datasets.make_hastie_10_2, 1000, random_state=0),
    "clusters, 1000 x 20": partial(
        datasets.make_classification, 1000, 20, n_informative=6, n_classes=3, flip_y=0.05, random_state=0
    ),
}


def implicit(numeric: bool, **options: Any) -> Any:
    """Returns the library's estimator."""
    return (ImplicitRegressor if numeric else ImplicitClassifier)(random_state=0, **options)


def rivals(numeric: bool) -> dict[str, Any]:
    """Returns scikit-learn's estimators."""
    perceptron = MLPClassifier(random_state=0)
    if numeric:
        perceptron = TransformedTargetRegressor(MLPRegressor(random_state=0), transformer=StandardScaler())
    linear = LinearRegression() if numeric else LogisticRegression()
    return {
        "perceptron": make_pipeline(StandardScaler(), perceptron),
        "linear": make_pipeline(StandardScaler(), linear),
    }


def folds(numeric: bool, count: int, seed: int, X: np.ndarray, y: np.ndarray) -> Iterator[tuple[Any, Any]]:
    """Splits rows, classes in proportion."""
    return (KFold if numeric else StratifiedKFold)(count, shuffle=True, random_state=seed).split(X, y)


def measure(estimator: Any, data: Data, train: np.ndarray, test: np.ndarray) -> tuple[float, float]:
    """Returns the score on the test rows and the CPU seconds of the fit."""
    X, y = data
    fresh = clone(estimator)
    seconds, _ = cpu_seconds(partial(fresh.fit, X[train], y[train]))
    return float(fresh.score(X[test], y[test])), seconds


def inner_scores(data: Data, numeric: bool, train: np.ndarray) -> list[float]:
    """Scores every candidate on inner folds of the training rows."""
    X, y = data[0][train], data[1][train]
    splits = list(folds(numeric, INNER, 1, X, y))
    return [
        float(np.mean([measure(implicit(numeric, **options), (X, y), *split)[0] for split in splits]))
        for options in CANDIDATES
    ]


def choose(scores: list[list[float]]) -> tuple[int, list[float]]:
    """Returns the candidate of the best mean rank over tables, and all ranks."""
    ranks = rankdata(-np.round(scores, 6), axis=1).mean(0)
    return int(ranks.argmin()), ranks.tolist()


def measure_all(quick: bool) -> dict[str, Any]:
    """Chooses in every outer fold, then measures all estimators on the rows set aside."""
    tables = [(name, make(), True) for name, make in list(REGRESSION.items())[: 1 if quick else None]]
    tables += [(name, make(), False) for name, make in list(CLASSIFICATION.items())[: 1 if quick else None]]
    for numeric in (True, False):  # compiles the kernels
        implicit(numeric, max_epochs=2).fit(np.random.default_rng(0).normal(size=(300, 3)), np.arange(300) % 3)
    choices: list[dict[str, Any]] = []
    results: dict[str, dict[str, Any]] = {name: {} for name, _, _ in tables}
    splits = {name: list(folds(numeric, OUTER, 0, *data)) for name, data, numeric in tables}
    for fold in range(OUTER):
        chosen, ranks = choose([inner_scores(d, numeric, splits[name][fold][0]) for name, d, numeric in tables])
        choices.append({"chosen": CANDIDATES[chosen], "ranks": ranks})
        print(choices[-1], flush=True)
        for name, data, numeric in tables:
            nested = {"nested": implicit(numeric, **CANDIDATES[chosen])}
            for model, estimator in ({"implicit": implicit(numeric)} | nested | rivals(numeric)).items():
                score, seconds = measure(estimator, data, *splits[name][fold])
                row = results[name].setdefault(model, {"scores": [], "seconds": []})
                row["scores"].append(score), row["seconds"].append(seconds)
    return {"candidates": CANDIDATES, "folds": choices, "tables": results}


def table(tables: dict[str, dict[str, Any]]) -> str:
    """Writes mean scores and seconds, then mean ranks and times relative to the perceptron."""
    names = ["implicit", "nested", "perceptron", "linear"]
    scores = {data: [np.mean(rows[name]["scores"]) for name in names] for data, rows in tables.items()}
    seconds = {data: [np.median(rows[name]["seconds"]) for name in names] for data, rows in tables.items()}
    lines: list[list[str]] = [
        [data, *(f"{a:.3f} ({b:.2f} s)" for a, b in zip(scores[data], seconds[data], strict=True))]
        for data in tables
    ]
    for own in ("implicit", "nested"):  # they are the same estimator, so each is ranked without the other
        held = [k for k, name in enumerate(names) if name == own or name in ("perceptron", "linear")]
        ranks = rankdata([[-round(scores[data][k], 6) for k in held] for data in tables], axis=1).mean(0)
        shown = {k: f"{rank:.2f}" for k, rank in zip(held, ranks, strict=True)}
        lines.append([f"mean rank of three, {own}", *(shown.get(k, "") for k in range(len(names)))])
    times = np.array(list(seconds.values()))
    ratios = times / times[:, [names.index("perceptron")]]
    lines.append(["time, all tables / perceptron", *(f"{x:.2f}" for x in times.sum(0) / times[:, 2].sum())])
    lines.append(["time, median table / perceptron", *(f"{x:.2f}" for x in np.median(ratios, axis=0))])
    return markdown(["data", *names], lines)


def main() -> None:
    """Measures, or prints what was measured."""
    parser = make_parser(__doc__, __file__, quick="one table of each kind", table="print the table")
    options = parser.parse_args()
    if options.table:
        print(table(load(options)["tables"]))
        return
    warnings.simplefilter("ignore", ConvergenceWarning)
    one_thread()
    measured = measure_all(options.quick)
    save(options, versions=versions("wellposed", "scikit-learn"), **measured)
    print(table(measured["tables"]))


if __name__ == "__main__":
    main()
