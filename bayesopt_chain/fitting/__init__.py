"""One call from a trained model to its posterior and predictions; features kept; training by the evidence."""

from bayesopt_chain.fitting.cache import CachedFeatures, cache_features
from bayesopt_chain.fitting.laplace import FittedLaplace, Prediction, fit_laplace

__all__ = ["CachedFeatures", "FittedLaplace", "Prediction", "cache_features", "fit_laplace"]
