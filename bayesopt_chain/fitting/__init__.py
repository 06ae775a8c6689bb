"""One call from a trained model to its posterior and predictions."""

from bayesopt_chain.fitting.laplace import FittedLaplace, Prediction, fit_laplace

__all__ = ["FittedLaplace", "Prediction", "fit_laplace"]
