"""Draws docs/guides/estimators-diabetes.png: proven and observed influence of every feature.

Run: python -m benchmarks.figures.estimators [--out FOLDER]
"""

import numpy as np
from sklearn.datasets import load_diabetes

from benchmarks.harness import docs_folder
from wellposed import ImplicitRegressor
from wellposed.errors import require

NAMES = {
    "age": "age",
    "sex": "sex",
    "bmi": "body mass",
    "bp": "blood pressure",
    "s1": "cholesterol",
    "s2": "LDL",
    "s3": "HDL",
    "s4": "cholesterol / HDL",
    "s5": "log triglycerides",
    "s6": "glucose",
}


def main() -> None:
    """Fits and draws."""
    folder, plt = docs_folder(__doc__, __file__), require("matplotlib.pyplot", extra="plots")
    picture = folder / "guides" / "estimators-diabetes.png"
    X, y = load_diabetes(return_X_y=True, as_frame=True)
    regressor = ImplicitRegressor(kappa=0.3, random_state=0).fit(X, y)
    spread = X.std().to_numpy()
    proven = regressor.sensitivity_[0] * spread
    base = regressor.predict(X)
    observed = np.stack(
        [regressor.predict(X.assign(**{c: X[c] + s})) - base for c, s in zip(X, spread, strict=True)]
    )
    order, generator = np.argsort(proven), np.random.default_rng(0)
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    axes.barh(range(len(order)), proven[order], color="#d9e2ec", label="proven: at most, for every patient")
    axes.barh(range(len(order)), -proven[order], color="#d9e2ec")
    for row, feature in enumerate(order):
        height = row + generator.uniform(-0.28, 0.28, size=len(X))
        axes.scatter(observed[feature], height, s=3, color="#c2410c", alpha=0.35, linewidths=0)
    axes.scatter([], [], s=12, color="#c2410c", label="observed, one dot a patient")
    axes.set_yticks(range(len(order)), [NAMES[X.columns[k]] for k in order])
    axes.axvline(0, color="black", linewidth=0.6)
    axes.set_xlabel("change of the prediction when a feature grows by one standard deviation")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=9)
    figure.savefig(picture, dpi=150)
    print(picture, f"R2 on the training data {regressor.score(X, y):.2f}; proven {proven.round(1).tolist()}")


if __name__ == "__main__":
    main()
