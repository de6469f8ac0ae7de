# %% [markdown]
# # In a scikit-learn pipeline
#
# `ImplicitRegressor` and `ImplicitClassifier` are ordinary estimators: they go into pipelines and searches, take
# data frames and sample weights. What they add is a proof: how much a feature can matter at most.
#
# Needs `pip install 'wellposed[sklearn]'`.

# %%
import numpy as np
from matplotlib import pyplot
from sklearn.datasets import load_diabetes
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import QuantileTransformer

import wellposed as wp

X, y = load_diabetes(return_X_y=True)
names = load_diabetes().feature_names
u_train, u_test, y_train, y_test = train_test_split(X, y, random_state=0)

# %%
pipeline = make_pipeline(
    QuantileTransformer(n_quantiles=50), wp.ImplicitRegressor(16, max_epochs=15, random_state=0)
)
search = GridSearchCV(pipeline, {"implicitregressor__kappa": [0.3, 0.95]}, cv=2).fit(u_train, y_train)
print(search.best_params_, f"R^2 in the folds {search.best_score_:.3f}")

# %%
regressor = wp.ImplicitRegressor(kappa=0.3, max_epochs=50, random_state=0).fit(u_train, y_train)
score = regressor.score(u_test, y_test)
print(f"R^2 on unseen patients {score:.3f}")
print(regressor.certificate_)

# %% [markdown]
# For *all* pairs of inputs `|y - y'| <= S |u - u'|`. Times the spread of a feature, a row of `S` says how far that
# feature can move the prediction at most; the dots are what it did.

# %%
reach = regressor.sensitivity_[0] * X.std(axis=0)
moved = np.stack(
    [np.abs(regressor.predict(u_test + step) - regressor.predict(u_test)) for step in np.diag(X.std(axis=0))]
)
assert (moved <= reach[:, None] * (1 + 1e-9)).all()
for feature in np.argsort(-reach):
    print(f"{names[feature]:>4}: at most {reach[feature]:5.1f}, on average {moved[feature].mean():5.1f}")

# %%
figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
axes.bar(names, reach, color="C0", alpha=0.3, label="proven: at most")
axes.plot(names, moved, "k.", markersize=2, alpha=0.4)
axes.set(ylabel="change of the prediction\nby one standard deviation")
axes.legend(frameon=False)
figure.savefig("use_scikit_learn.png", dpi=120)
