"""Gaussian posteriors: fitted to a trained model, carried by transformations, and what they predict.

fit.py            fit_laplace: from a trained model to its posterior in one call (model, last_layer, evidence, regression)
gaussian.py       the posterior, and bc.laplace, which sums curvature into one; swag.py, vi/ and ekf.py carry one too
_linearized.py    outputs under a posterior; scores.py says how good predictions are, and corrects them by held-out data
"""

from bayesopt_chain import _lazy

__getattr__, __dir__, __all__ = _lazy.attach(globals())  # the names are listed in __init__.pyi
