"""Likelihoods of outputs: losses, roots of output Hessians, checks of targets, draws, predictions (``_likelihood.py``)."""

from bayesopt_chain.likelihoods._classes import bernoulli, categorical, ordinal
from bayesopt_chain.likelihoods._custom import custom, weighted
from bayesopt_chain.likelihoods._likelihood import Grouping, Likelihood, OutputRoot, Support
from bayesopt_chain.likelihoods._numbers import gaussian, negative_binomial, poisson, student_t
from bayesopt_chain.likelihoods._predictive import Outputs, Predictive

__all__ = [
    "Grouping",
    "Likelihood",
    "OutputRoot",
    "Outputs",
    "Predictive",
    "Support",
    "bernoulli",
    "categorical",
    "custom",
    "gaussian",
    "negative_binomial",
    "ordinal",
    "poisson",
    "student_t",
    "weighted",
]
