"""``posterior_ensemble`` as estimators of scikit-learn: ``PosteriorRegressor`` and ``PosteriorClassifier``.

They make a network of hidden layers of ReLU units (or take yours), and compute in double precision. Networks that predict
held-out data worse than a constant give a warning here, not an error. Data have no weights here, since folds that are left out
would count otherwise than scikit-learn asks for: with weights call ``posterior_ensemble`` with data ``(X, (y, weights))`` and
``bc.likelihoods.weighted``. Needs scikit-learn: the extra ``sklearn``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bayesopt_chain import checks, likelihoods

checks.installed("bayesopt_chain.sklearn", "sklearn", "sklearn")

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from bayesopt_chain.ensemble.call import EnsembleError, posterior_ensemble
from bayesopt_chain.ensemble.data import LEAST
from bayesopt_chain.likelihoods import Predictive

__all__ = ["PosteriorClassifier", "PosteriorRegressor"]


class _Posterior(BaseEstimator):
    """What both have in common: the arguments, the network and the call."""

    def __init__(
        self,
        hidden: int | Sequence[int] = (50, 50),
        *,
        make_model: Callable[[int, int], nn.Module] | None = None,
        members: int = 4,
        steps: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        prior_precision: float | None = None,
        held_out: float = 0.15,
        minutes: float | None = None,
        random_state: Any = None,
    ) -> None:
        self.hidden = hidden
        self.make_model = make_model
        self.members = members
        self.steps = steps
        self.batch_size = batch_size
        self.lr = lr
        self.prior_precision = prior_precision
        self.held_out = held_out
        self.minutes = minutes
        self.random_state = random_state

    def _fit(self, X: np.ndarray, targets: Tensor, outputs: int, likelihood: likelihoods.Likelihood) -> None:
        width, make = X.shape[1], self.make_model
        if isinstance(make, nn.Module):
            raise TypeError(
                "make_model is a module: pass a function of the numbers of inputs and outputs that returns a new one"
            )

        def network() -> nn.Module:
            return (_network(width, self.hidden, outputs) if make is None else make(width, outputs)).double()

        try:
            self.ensemble_ = posterior_ensemble(
                network,
                (torch.tensor(X, device="cpu"), targets),
                likelihood,
                members=self.members,
                steps=self.steps,
                minutes=self.minutes,
                batch_size=self.batch_size,
                lr=self.lr,
                prior_precision=self.prior_precision,
                held_out=self.held_out,
                # targets that are all equal are targets here, and no residuals
                standardize=None if bool((targets != targets[0]).any()) else True,
                seed=int(check_random_state(self.random_state).randint(2**20)),
                progress=False,
            )
        except EnsembleError as err:
            checks.warn(str(err))
            self.ensemble_ = err.ensemble
        self.report_ = self.ensemble_.report

    def _prediction(self, X: Any) -> Predictive:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, order="C", reset=False)  # torch takes no negative strides
        return self.ensemble_.predict(torch.tensor(X, device="cpu"))


class PosteriorRegressor(RegressorMixin, _Posterior):
    """:func:`bayesopt_chain.posterior_ensemble` with Gaussian noise, as a regressor of scikit-learn.

    Args:
        hidden: units of each hidden layer; a number is one layer. Default ``(50, 50)``.
        make_model: from the numbers of inputs and outputs to a module, in the place of ``hidden``. Default: none.
        members, steps, batch_size, lr, prior_precision, held_out, minutes: of
            :func:`bayesopt_chain.posterior_ensemble`, with the same defaults.
        random_state: a whole number, a ``RandomState``, or ``None`` (default) for numpy's global one.

    Attributes:
        ensemble_: the :class:`bayesopt_chain.ensemble.Ensemble`.
        report_: what was done and what would help; ``print`` it.

    Example:
        >>> import numpy as np
        >>> from bayesopt_chain.sklearn import PosteriorRegressor
        >>> x = np.linspace(-1, 1, 40)[:, None]
        >>> model = PosteriorRegressor((8,), members=2, steps=100, lr=0.05, random_state=0)
        >>> mean, deviation = model.fit(x, 100 * x[:, 0]).predict(x, return_std=True)
        >>> mean.shape, bool((deviation > 0).all())
        ((40,), True)
    """

    def fit(self, X: Any, y: Any) -> PosteriorRegressor:
        """Train, and find the noise.

        Args:
            X: inputs ``[n, d]``.
            y: targets ``[n]`` or ``[n, outputs]``.

        Returns:
            Itself.

        Raises:
            ValueError: fewer than 9 data; what :func:`bayesopt_chain.posterior_ensemble` refuses.
        """
        X, y = validate_data(
            self, X, y, dtype=np.float64, order="C", multi_output=True, y_numeric=True, ensure_min_samples=LEAST
        )
        columns = np.ascontiguousarray(y, dtype=np.float64).reshape(len(X), -1)
        self.single_ = np.ndim(y) == 1
        self._fit(X, torch.tensor(columns, device="cpu"), columns.shape[1], likelihoods.gaussian())
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Means of new targets.

        Args:
            X: inputs ``[n, d]``.
            return_std: whether to return their standard deviations too, noise included. Default False.

        Returns:
            ``[n]`` or ``[n, outputs]``, or a pair of these.

        Raises:
            NotFittedError: before :meth:`fit`.
        """
        found = self._prediction(X)
        mean = self._shaped(found.mean.numpy())
        return (mean, self._shaped(found.variance.sqrt().numpy())) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Any, Any]:
        """The central interval that holds a new target with a probability.

        Args:
            X: inputs ``[n, d]``.
            level: the probability, between 0 and 1. Default 0.9.

        Returns:
            ``(low, high)``, each ``[n]`` or ``[n, outputs]``.

        Raises:
            ValueError: a level out of range.
        """
        low, high = self._prediction(X).interval(level)
        return self._shaped(low.numpy()), self._shaped(high.numpy())

    def _shaped(self, columns: np.ndarray) -> np.ndarray:
        return columns[:, 0] if self.single_ else columns

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn may ask of it: several outputs."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class PosteriorClassifier(ClassifierMixin, _Posterior):
    """:func:`bayesopt_chain.posterior_ensemble` of classes, as a classifier of scikit-learn.

    Args:
        hidden: units of each hidden layer; a number is one layer. Default ``(50, 50)``.
        make_model: from the numbers of inputs and classes to a module that returns logits, in the place of ``hidden``.
        members, steps, batch_size, lr, prior_precision, held_out, minutes: of
            :func:`bayesopt_chain.posterior_ensemble`, with the same defaults.
        random_state: a whole number, a ``RandomState``, or ``None`` (default) for numpy's global one.

    Attributes:
        classes_: the labels.
        ensemble_: the :class:`bayesopt_chain.ensemble.Ensemble`.
        report_: what was done and what would help; ``print`` it.

    Example:
        >>> import numpy as np
        >>> from bayesopt_chain.sklearn import PosteriorClassifier
        >>> x = np.linspace(-1, 1, 40)[:, None]
        >>> y = np.where(x[:, 0] > 0, "yes", "no")
        >>> model = PosteriorClassifier((8,), members=2, steps=100, lr=0.05, random_state=0)
        >>> model.fit(x, y).predict_proba(x).shape
        (40, 2)
    """

    def fit(self, X: Any, y: Any) -> PosteriorClassifier:
        """Train.

        Args:
            X: inputs ``[n, d]``.
            y: labels ``[n]``.

        Returns:
            Itself.

        Raises:
            ValueError: one class alone, or fewer than 9 data; what :func:`bayesopt_chain.posterior_ensemble` refuses.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, order="C", ensure_min_samples=LEAST)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                "PosteriorClassifier: y has one class alone, so that there is nothing to classify: pass two"
            )
        self._fit(X, torch.from_numpy(numbers.astype(np.int64)), len(self.classes_), likelihoods.categorical())
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes.

        Args:
            X: inputs ``[n, d]``.

        Returns:
            ``[n, C]``, in the order of ``classes_``.

        Raises:
            NotFittedError: before :meth:`fit`.
        """
        p = self._prediction(X).probabilities.numpy()
        return p / p.sum(1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each datum, ``[n]``.

        Args:
            X: inputs ``[n, d]``.

        Returns:
            Labels ``[n]``.

        Raises:
            NotFittedError: before :meth:`fit`.
        """
        p = self.predict_proba(X)  # refuses what is not fitted
        return self.classes_[p.argmax(1)]


def _network(inputs: int, hidden: int | Sequence[int], outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for width in np.atleast_1d(np.asarray(hidden)).tolist():
        checks.WHOLE("hidden, the units of each layer,", width)
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))
