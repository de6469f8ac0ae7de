import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import get_tags

import wellposed as wp
from wellposed.errors import InputError
from wellposed.estimators import ImplicitSequenceClassifier, ImplicitSequenceRegressor

QUICK = {"max_epochs": 60, "random_state": 0, "batch_size": 20, "learning_rate": 0.03, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def walks():
    generator = np.random.default_rng(0)
    X = 5.0 + 2.0 * generator.normal(size=(80, 6, 2))
    return X, np.stack([X[:, :, 0].mean(1), X[:, 0, 1] - X[:, -1, 1]], axis=1)


@pytest.fixture(scope="module")
def regressor(walks):
    return ImplicitSequenceRegressor(8, **QUICK).fit(*walks)


@pytest.fixture(scope="module")
def classifier(walks):
    X, y = walks
    return ImplicitSequenceClassifier(8, **QUICK).fit(X, np.where(y[:, 0] > 5, "up", "down"))


def test_learns_from_all_of_the_sequence(walks, regressor):
    X, y = walks
    residual = ((y - regressor.predict(X)) ** 2).mean(0) / y.var(0)
    assert (residual < 0.1).all()
    changed = X.copy()
    changed[:, 0, 1] += 1.0
    assert np.abs(regressor.predict(changed) - regressor.predict(X))[:, 1].mean() > 0.5


def test_lengths_may_differ(walks, regressor):
    X, _ = walks
    assert regressor.predict(X[:, :3]).shape == (80, 2)
    assert regressor.predict(np.concatenate([X, X], axis=1)).shape == (80, 2)


def test_sensitivity_bounds_every_change(walks, regressor):
    X, _ = walks
    S = regressor.sensitivity_
    assert S.shape == (2, 6, 2)
    steps = np.random.default_rng(1).normal(size=X.shape)
    at_the_end = np.zeros_like(X)
    at_the_end[:, -1] = steps[:, -1]
    for change in (steps, at_the_end):
        moved = np.abs(regressor.predict(X + change) - regressor.predict(X))
        limit = np.einsum("btp,qtp->bq", np.abs(change), S)
        assert (moved <= limit).all()
    assert (moved > 0.05 * limit).any(), "at the last step of time the bound is of the size of the changes"


def test_attributes(regressor, classifier):
    assert regressor.certificate_.holds
    assert regressor.n_features_in_ == 2 and regressor.n_steps_ > 1
    assert len(regressor.loss_curve_) == 60
    assert isinstance(regressor.model_, wp.ImplicitRNN)
    assert list(classifier.classes_) == ["down", "up"]
    assert get_tags(regressor).input_tags.three_d_array and not get_tags(regressor).input_tags.two_d_array


def test_classifier(walks, classifier):
    X, y = walks
    labels = np.where(y[:, 0] > 5, "up", "down")
    assert classifier.score(X, labels) > 0.9
    assert classifier.decision_function(X).shape == (80,)
    np.testing.assert_allclose(classifier.predict_proba(X).sum(1), 1.0)
    np.testing.assert_array_equal(classifier.predict(X) == "up", classifier.predict_proba(X)[:, 1] > 0.5)


def test_pipeline_grid_search_and_clone(walks):
    X, y = walks
    pipeline = make_pipeline(FunctionTransformer(np.sqrt), ImplicitSequenceRegressor(4, max_epochs=5))
    search = GridSearchCV(pipeline, {"implicitsequenceregressor__kappa": [0.5, 0.9]}, cv=2)
    assert np.isfinite(search.fit(np.abs(X), y).cv_results_["mean_test_score"]).all()
    assert clone(search.best_estimator_[-1]).get_params()["state_features"] == 4


def test_partial_fit_weights_pickle_and_save(walks, regressor, tmp_path):
    X, y = walks
    fitted = ImplicitSequenceRegressor(6, random_state=0, batch_size=20)
    for _ in range(12):
        fitted.partial_fit(X, y)
    assert fitted.loss_curve_[-1] < fitted.loss_curve_[0] / 2 and fitted.n_iter_ == 12
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).predict(X), fitted.predict(X))
    fitted.save(tmp_path / "file")
    np.testing.assert_array_equal(ImplicitSequenceRegressor.load(tmp_path / "file").predict(X), fitted.predict(X))
    counted = np.random.default_rng(0).integers(0, 3, size=20)
    options = {"max_epochs": 10, "random_state": 0}
    weighted = ImplicitSequenceRegressor(4, **options).fit(X[:20], y[:20], sample_weight=counted)
    repeated = ImplicitSequenceRegressor(4, **options).fit(X[:20].repeat(counted, 0), y[:20].repeat(counted, 0))
    np.testing.assert_allclose(weighted.predict(X), repeated.predict(X), rtol=1e-6)


def test_wrong_inputs(walks, regressor):
    X, y = walks
    with pytest.raises(InputError, match=r"\(samples, time, features\)"):
        ImplicitSequenceRegressor().fit(X[:, :, 0], y)
    with pytest.raises(InputError, match="expecting 2 features"):
        regressor.predict(X[:, :, :1])
    with pytest.raises(ValueError, match="NaN"):
        regressor.predict(np.full_like(X, np.nan))
    with pytest.raises(ValueError, match="inconsistent"):
        ImplicitSequenceRegressor().fit(X, y[:-1])
    with pytest.raises(NotFittedError):
        ImplicitSequenceRegressor().predict(X)


@pytest.mark.parametrize("kind", [ImplicitSequenceRegressor, ImplicitSequenceClassifier])
def test_sequences_have_defaults_of_their_own(kind):
    estimator = kind(4, kappa=0.7)
    assert (estimator.state_features, estimator.kappa, estimator.max_epochs) == (4, 0.7, 200)
    assert clone(estimator).get_params() == estimator.get_params()
    with pytest.raises(TypeError, match="epochs"):
        kind(epochs=3)
