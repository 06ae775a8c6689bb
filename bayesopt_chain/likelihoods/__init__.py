"""Likelihoods of outputs: their losses, the roots of their output Hessians, and label draws (see ``_likelihood.py``)."""

from bayesopt_chain.likelihoods._builtin import bernoulli, categorical, gaussian, poisson
from bayesopt_chain.likelihoods._likelihood import Likelihood, custom
from bayesopt_chain.likelihoods._roots import OutputRoot

__all__ = ["Likelihood", "OutputRoot", "bernoulli", "categorical", "custom", "gaussian", "poisson"]
