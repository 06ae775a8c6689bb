"""Predictions from posteriors: linearised and Monte Carlo, their approximations for classes, and how good they are."""

from bayesopt_chain.likelihoods._softmax import laplace_bridge, probit, probit_bernoulli, softmax_mean
from bayesopt_chain.predict._calibrate import conformal_level, temperature_scaling
from bayesopt_chain.predict._joint import functional_samples
from bayesopt_chain.predict._linearized import linearized
from bayesopt_chain.predict._metrics import classification_metrics, detection_auroc, regression_metrics
from bayesopt_chain.predict._monte_carlo import monte_carlo
from bayesopt_chain.predict._running import RunningMoments

__all__ = [
    "RunningMoments",
    "classification_metrics",
    "conformal_level",
    "detection_auroc",
    "functional_samples",
    "laplace_bridge",
    "linearized",
    "monte_carlo",
    "probit",
    "probit_bernoulli",
    "regression_metrics",
    "softmax_mean",
    "temperature_scaling",
]
