"""The estimators keep scikit-learn's contract and predict in the targets' own units."""

import pickle
from unittest.mock import Mock

import numpy as np
import pytest
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

from bayesopt_chain.ensemble import training
from bayesopt_chain.sklearn import PosteriorClassifier, PosteriorRegressor

TINY = {"members": 1, "steps": 20, "lr": 0.1, "batch_size": 256, "random_state": 0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PosteriorRegressor, PosteriorClassifier])
def test_an_estimator_passes_every_check_of_scikit_learn(kind, monkeypatch):
    """A hundred fits of 20 steps, for which tracing the step would take three times as long as making them."""
    monkeypatch.setattr(training, "make_fx", Mock(side_effect=NotImplementedError))
    check_estimator(kind((10,), **TINY))


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 2))
    return x, 50 + 100 * x[:, 0] + rng.normal(size=80)


@pytest.mark.slow
def test_a_regressor_predicts_in_the_units_of_its_targets():
    x, y = data()
    model = PosteriorRegressor((10,), **{**TINY, "steps": 200}).fit(x, y)
    mean, deviation = model.predict(x, return_std=True)
    assert model.score(x, y) > 0.9 and mean.shape == deviation.shape == (80,)
    low, high = model.predict_interval(x, 0.9)
    np.testing.assert_allclose(model.predict_quantile(x, 0.95), high)
    assert 0.75 <= np.mean((low <= y) & (y <= high)) <= 1
    np.testing.assert_allclose(high - low, 2 * 1.645 * deviation, rtol=0.02)  # Gaussian noise is nearly all of it


def test_several_outputs_are_predicted_together():
    x, y = data()
    both = PosteriorRegressor((10,), **TINY).fit(x, np.stack([y, -y], 1))
    assert both.predict(x).shape == (80, 2)


def test_a_constant_is_predicted_where_all_targets_are_one_number_and_one_layer_is_a_number():
    x, _ = data()
    model = PosteriorRegressor(10, **{**TINY, "steps": 200}).fit(x, np.full(80, 300.0))
    np.testing.assert_allclose(model.predict(x), 300, atol=0.5)


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"hidden": (0,)}, ValueError, "hidden, the units of each layer, must be a whole number, at least 1, got 0"),
        ({"hidden": "wide"}, TypeError, "hidden, the units of each layer, must be a whole number"),
        ({"make_model": nn.Linear(2, 1)}, TypeError, "make_model is a module: pass a function"),
    ],
)
def test_networks_that_cannot_be_made_are_refused(changes, error, words):
    with pytest.raises(error, match=words):
        PosteriorRegressor(**{**TINY, **changes}).fit(*data())


def test_a_classifier_has_probabilities_of_its_labels_and_goes_through_pickle():
    x, y = data()
    model = PosteriorClassifier((10,), **TINY).fit(x, np.where(y > 50, "high", "low"))
    p = model.predict_proba(x)
    np.testing.assert_allclose(p.sum(1), 1)
    assert list(model.classes_) == ["high", "low"]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(x), p)


@pytest.mark.slow
def test_a_network_of_ones_own_is_searched_over():
    x, y = data()
    search = GridSearchCV(
        PosteriorRegressor(make_model=lambda d, out: nn.Linear(d, out), **TINY), {"prior_precision": [1.0, 1e4]}, cv=2
    )
    assert search.fit(x, y).best_params_ == {"prior_precision": 1.0}
