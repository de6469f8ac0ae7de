import pickle

import joblib
import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_iris, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks

import wellposed as wp
from wellposed.errors import FileFormatError, InputError
from wellposed.estimators.estimator import TrainingData

QUICK = {"max_epochs": 40, "random_state": 0, "batch_size": 30, "weight_decay": 0.1}


@parametrize_with_checks([wp.ImplicitRegressor(4, max_epochs=60), wp.ImplicitClassifier(4, max_epochs=60)])
def test_conventions_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([wp.ImplicitRegressor(), wp.ImplicitClassifier()])
def test_conventions_of_scikit_learn_with_defaults(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def table():
    generator = np.random.default_rng(0)
    X = generator.normal(3.0, [1.0, 10.0, 0.1, 5.0], size=(120, 4))
    y = np.stack([X[:, 0] - X[:, 1] / 10, np.abs(X[:, 2] - 3) * 1000], axis=1)
    return X, y


@pytest.fixture(scope="module")
def regressor(table):
    return wp.ImplicitRegressor(12, **QUICK).fit(*table)


@pytest.fixture(scope="module")
def iris():
    X, y = load_iris(return_X_y=True, as_frame=True)
    return X, np.array(["setosa", "versicolor", "virginica"], dtype=object)[y]


def test_several_outputs_of_different_sizes(table, regressor):
    X, y = table
    assert regressor.predict(X).shape == (120, 2)
    residual = ((y - regressor.predict(X)) ** 2).mean(0) / y.var(0)
    assert (residual < 0.1).all(), "every output is fitted, whatever its unit"


def test_sensitivity_bounds_every_change(table, regressor):
    X, _ = table
    S, generator = regressor.sensitivity_, np.random.default_rng(1)
    assert S.shape == (2, 4)
    steps = X.std(0) * generator.normal(size=X.shape)
    moved = np.abs(regressor.predict(X + steps) - regressor.predict(X))
    assert (moved <= np.abs(steps) @ S.T).all()
    assert (moved > 0.05 * np.abs(steps) @ S.T).any(), "the bound is of the size of the changes"


def test_sensitivity_is_in_units_of_the_data(table):
    X, y = table
    bounds = [wp.ImplicitRegressor(8, **QUICK).fit(X * unit, y[:, 0] * 3).sensitivity_ for unit in (1.0, 4.0)]
    np.testing.assert_allclose(bounds[0], 4.0 * bounds[1], rtol=1e-6)


def test_attributes(table, regressor):
    assert regressor.certificate_.holds and regressor.certificate_.value <= 0.95 + 1e-6
    assert regressor.n_steps_ > 1
    assert len(regressor.loss_curve_) == regressor.n_iter_ == 40
    assert regressor.loss_curve_[-1] < regressor.loss_curve_[0] / 5
    assert regressor.n_features_in_ == 4
    assert isinstance(regressor.model_, wp.ImplicitModel)
    with pytest.raises(NotFittedError):
        wp.ImplicitRegressor().certificate_  # noqa: B018


def test_frame_with_names(iris):
    X, y = iris
    classifier = wp.ImplicitClassifier(8, **QUICK).fit(X, y)
    assert list(classifier.feature_names_in_) == list(X.columns)
    assert list(classifier.classes_) == ["setosa", "versicolor", "virginica"]
    assert classifier.score(X, y) > 0.95
    with pytest.raises(ValueError, match="feature names"):
        classifier.predict(X[X.columns[::-1]])


def test_probabilities_are_the_softmax_of_the_decision(iris):
    X, y = iris
    classifier = wp.ImplicitClassifier(8, **QUICK).fit(X, y)
    expected = torch.softmax(torch.tensor(classifier.decision_function(X)), 1).numpy()
    np.testing.assert_allclose(classifier.predict_proba(X), expected, rtol=1e-10)
    np.testing.assert_allclose(classifier.predict_log_proba(X), np.log(expected), rtol=1e-8)


def test_pipeline_grid_search_and_clone():
    X, y = make_regression(60, 3, noise=1.0, random_state=0)
    pipeline = make_pipeline(PolynomialFeatures(2, include_bias=False), wp.ImplicitRegressor(**QUICK))
    search = GridSearchCV(pipeline, {"implicitregressor__state_features": [2, 8]}, cv=2).fit(X, y)
    assert search.best_params_["implicitregressor__state_features"] in (2, 8)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    twin = clone(search.best_estimator_)
    np.testing.assert_allclose(twin.fit(X, y).predict(X), search.best_estimator_.predict(X), rtol=1e-8)


def test_as_good_as_a_linear_model_where_that_is_right():
    X, y = make_regression(200, 5, noise=20.0, random_state=0)
    ours = cross_val_score(wp.ImplicitRegressor(random_state=0, max_epochs=80), X, y, cv=3).mean()
    assert ours > cross_val_score(Ridge(), X, y, cv=3).mean() - 0.05


def test_partial_fit_learns_and_goes_on(iris):
    X, y = iris
    values = X.to_numpy()
    order = np.random.default_rng(0).permutation(len(y))
    classifier = wp.ImplicitClassifier(8, random_state=0, batch_size=10)
    with pytest.raises(InputError, match="classes"):
        classifier.partial_fit(values, y)
    for _ in range(15):
        for part in np.array_split(order, 3):
            classifier.partial_fit(values[part], y[part], classes=np.unique(y))
    assert classifier.n_iter_ == 45
    assert classifier.score(values, y) > 0.9
    with pytest.raises(InputError, match="labels"):
        classifier.partial_fit(values[:2], np.array(["setosa", "rosa"]))
    with pytest.raises(InputError, match="classes must stay"):
        classifier.partial_fit(values, y, classes=["setosa", "virginica"])


def test_weights_count_samples():
    generator = np.random.default_rng(0)
    X = generator.normal(size=(30, 2))
    y, weights = np.sin(X[:, 0]), generator.integers(0, 4, size=30)
    options = {"max_epochs": 40, "random_state": 0}
    weighted = wp.ImplicitRegressor(6, **options).fit(X, y, sample_weight=weights)
    repeated = wp.ImplicitRegressor(6, **options).fit(X.repeat(weights, 0), y.repeat(weights))
    np.testing.assert_allclose(weighted.predict(X), repeated.predict(X), rtol=1e-6)
    with pytest.raises(ValueError, match="at least one non-zero"):
        wp.ImplicitRegressor(**QUICK).fit(X, y, sample_weight=np.zeros(30))


def test_early_stopping_keeps_the_best_network():
    generator = np.random.default_rng(0)
    X = generator.normal(size=(120, 5))
    y = X[:, 0] + 3.0 * generator.normal(size=120)
    options = {"early_stopping": True, "n_iter_no_change": 5, "weight_decay": 0.0, "validation_fraction": 0.3}
    stopped = wp.ImplicitRegressor(32, max_epochs=200, random_state=0, **options).fit(X, y)
    curve = stopped.validation_curve_
    assert stopped.n_iter_ < 200
    assert len(curve) - 1 - int(np.argmin(curve)) == 5
    whole = wp.ImplicitRegressor(32, max_epochs=20, random_state=0, early_stopping=False).fit(X, y)
    assert np.isnan(whole.validation_curve_).all() and whole.n_iter_ == 20


def test_the_split_represents_every_class():
    X = np.random.default_rng(0).normal(size=(60, 2))
    y = np.array([0] * 54 + [1] * 6)
    classifier = wp.ImplicitClassifier(validation_fraction=0.5, **QUICK)
    classifier._check_parameters()
    classifier._weighted(X, y, None, reset=True)
    classifier._begin(X, y, np.ones(60))
    samples = TrainingData.of(X, classifier._encode(y), np.ones(60))
    kept, others = classifier._split(samples, y)
    assert int(kept.targets[:, 0].sum()) == int(others.targets[:, 0].sum()) == 3


def test_seeds_decide_and_the_global_generator_is_left_alone(table):
    X, y = table
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second, other = (
        wp.ImplicitRegressor(6, max_epochs=3, random_state=seed).fit(X, y).predict(X) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.rand(1), expected)
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - other).max() > 1e-3


def test_float32_stays_float32(table):
    X, y = table
    fitted = wp.ImplicitRegressor(6, max_epochs=3).fit(X.astype(np.float32), y)
    assert fitted.network_.offset.dtype == torch.float32
    assert wp.ImplicitRegressor(6, max_epochs=3).fit(X.astype(int), y).network_.offset.dtype == torch.float64


@pytest.mark.parametrize("way", [pickle, joblib])
def test_pickle_and_joblib(way, table, regressor, tmp_path):
    X, y = table
    with open(tmp_path / "file", "wb") as file:
        way.dump(regressor, file)
    with open(tmp_path / "file", "rb") as file:
        restored = way.load(file)
    np.testing.assert_array_equal(restored.predict(X), regressor.predict(X))
    restored.partial_fit(X, y)
    assert restored.n_iter_ == regressor.n_iter_ + 1


def test_save_and_load_without_pickle(table, regressor, iris, tmp_path):
    X, y = table
    regressor.save(tmp_path / "regressor.safetensors")
    loaded = wp.ImplicitRegressor.load(tmp_path / "regressor.safetensors")
    np.testing.assert_array_equal(loaded.predict(X), regressor.predict(X))
    np.testing.assert_array_equal(loaded.sensitivity_, regressor.sensitivity_)
    assert loaded.get_params() == regressor.get_params()
    assert loaded.partial_fit(X, y).n_iter_ == regressor.n_iter_ + 1

    frame, labels = iris
    classifier = wp.ImplicitClassifier(6, max_epochs=5, random_state=0).fit(frame, labels)
    classifier.save(tmp_path / "classifier.safetensors")
    again = wp.ImplicitClassifier.load(tmp_path / "classifier.safetensors")
    assert list(again.predict(frame)) == list(classifier.predict(frame))
    assert list(again.feature_names_in_) == list(frame.columns)
    with pytest.raises(FileFormatError, match=r"ImplicitClassifier\.load"):
        wp.ImplicitRegressor.load(tmp_path / "classifier.safetensors")
    wp.save(wp.ImplicitModel(2, 1, 3), tmp_path / "model.safetensors")
    with pytest.raises(FileFormatError, match="not an estimator"):
        wp.ImplicitRegressor.load(tmp_path / "model.safetensors")


def test_save_says_what_cannot_be_written(table, tmp_path):
    fitted = wp.ImplicitRegressor(4, max_epochs=1, random_state=np.random.RandomState(0)).fit(*table)
    with pytest.raises(InputError, match="random_state"):
        fitted.save(tmp_path / "file")
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"state_features": 0}, "state_features"),
        ({"state_features": 2.5}, "state_features"),
        ({"max_epochs": -1}, "max_epochs"),
        ({"kappa": 1.5}, "kappa"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"batch_size": "some"}, "batch_size"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"early_stopping": "yes"}, "early_stopping"),
    ],
)
def test_wrong_parameters(table, options, complaint):
    with pytest.raises(InputError, match=complaint):
        wp.ImplicitRegressor(**options).fit(*table)


def test_wrong_number_of_outputs(table, regressor):
    X, y = table
    with pytest.raises(InputError, match="2 columns"):
        clone(regressor).partial_fit(X, y).partial_fit(X, y[:, 0])


def test_one_class_is_refused(table):
    with pytest.raises(InputError, match="at least two classes"):
        wp.ImplicitClassifier().fit(table[0], np.zeros(120))


def test_class_weights_are_sample_weights(iris, tmp_path):
    X, y = iris[0].to_numpy()[:130], iris[1][:130]  # 50, 50 and 30 of the classes
    factors = {"setosa": 1.0, "versicolor": 2.0, "virginica": 0.5}
    options = {"max_epochs": 5, "random_state": 0}
    weighted = wp.ImplicitClassifier(4, class_weight=factors, **options).fit(X, y)
    by_sample = wp.ImplicitClassifier(4, **options).fit(X, y, sample_weight=[factors[label] for label in y])
    np.testing.assert_allclose(weighted.predict_proba(X), by_sample.predict_proba(X), rtol=1e-10)
    balanced = wp.ImplicitClassifier(4, class_weight="balanced", **options).fit(X, y)
    even = [1 / 30 if label == "virginica" else 1 / 50 for label in y]
    by_sample = wp.ImplicitClassifier(4, **options).fit(X, y, sample_weight=even)
    np.testing.assert_allclose(balanced.predict_proba(X), by_sample.predict_proba(X), rtol=1e-8)
    weighted.save(tmp_path / "file")
    assert wp.ImplicitClassifier.load(tmp_path / "file").class_weight == factors
    with pytest.raises(InputError, match="class_weight must be a dict or None"):
        wp.ImplicitClassifier(class_weight="balanced").partial_fit(X, y, classes=np.unique(y))
    with pytest.raises(InputError, match="class_weight"):
        wp.ImplicitClassifier(class_weight="even").fit(X, y)


@pytest.mark.parametrize("kind", [sparse.csr_array, sparse.csc_matrix, sparse.coo_array])
def test_sparse_matrices_count_as_dense(table, kind):
    X, y = table
    X = np.where(X > 3.0, X, 0.0)
    dense, other = (wp.ImplicitRegressor(4, max_epochs=3, random_state=0).fit(data, y) for data in (X, kind(X)))
    np.testing.assert_array_equal(dense.predict(X), other.predict(kind(X)))


def test_verbose_prints_lines_where_there_is_no_terminal(table, capsys):
    wp.ImplicitRegressor(4, max_epochs=20, verbose=True, random_state=0).fit(*table)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and lines[-1].startswith("epoch 20/20: loss ")
    wp.ImplicitRegressor(4, max_epochs=2, random_state=0).fit(*table)
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_named(table, regressor):
    with pytest.raises(InputError, match="torch finds no CUDA device; use 'cpu'"):
        wp.ImplicitRegressor(device="cuda").fit(*table)
    with pytest.raises(InputError, match="received 'gpu'"):
        wp.ImplicitRegressor(device="gpu").fit(*table)


def test_training_starts_at_a_linear_model():
    X, y = make_regression(100, 5, noise=1.0, random_state=0)
    start = wp.ImplicitRegressor(8, max_epochs=1, learning_rate=1e-9, random_state=0).fit(X, y)
    assert start.score(X, y) > 0.9, "a network with random values alone has a score near zero"
    labels = y > 0
    start = wp.ImplicitClassifier(8, max_epochs=1, learning_rate=1e-9, random_state=0).fit(X, labels)
    assert start.score(X, labels) > 0.9


def test_a_class_may_be_in_the_validation_part_alone():
    X = np.random.default_rng(0).normal(size=(40, 2))
    y = np.array([0] * 39 + [1])
    for seed in range(6):  # with some of them class 1 is set aside
        options = {"max_epochs": 1, "early_stopping": True, "validation_fraction": 0.5, "random_state": seed}
        assert wp.ImplicitClassifier(4, **options).fit(X, y).predict_proba(X).shape == (40, 2)


@pytest.mark.gpu
def test_gpu_agrees_with_the_cpu(table):
    X, y = table
    fitted = [wp.ImplicitRegressor(8, device=device, **QUICK).fit(X, y) for device in ("cpu", "cuda")]
    np.testing.assert_allclose(fitted[0].predict(X), fitted[1].predict(X), rtol=1e-5)
    assert fitted[1].network_.offset.device.type == "cpu", "everything can be stored"
