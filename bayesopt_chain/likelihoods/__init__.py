"""Likelihoods of outputs: their losses, output factors and label draws (see `_likelihood.py`)."""

from bayesopt_chain.likelihoods._builtin import bernoulli, categorical, gaussian, poisson
from bayesopt_chain.likelihoods._likelihood import Likelihood, custom

__all__ = ["Likelihood", "bernoulli", "categorical", "custom", "gaussian", "poisson"]
