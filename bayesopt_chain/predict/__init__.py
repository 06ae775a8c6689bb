"""Predictions from posteriors: linearised and Monte Carlo, their approximations for classes, and what the
uncertainty is.
"""

from bayesopt_chain.predict._classes import laplace_bridge, probit, probit_bernoulli
from bayesopt_chain.predict._linearized import linearized
from bayesopt_chain.predict._monte_carlo import monte_carlo
from bayesopt_chain.predict._uncertainty import Uncertainty, uncertainty_of_classes, uncertainty_of_moments

__all__ = [
    "Uncertainty",
    "laplace_bridge",
    "linearized",
    "monte_carlo",
    "probit",
    "probit_bernoulli",
    "uncertainty_of_classes",
    "uncertainty_of_moments",
]
