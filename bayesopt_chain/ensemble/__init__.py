"""One call from a module to an ensemble that knows what it does not know: :func:`posterior_ensemble`, and what it returns."""

from bayesopt_chain.ensemble.call import EnsembleError, posterior_ensemble
from bayesopt_chain.ensemble.ensemble import Ensemble, Scaled
from bayesopt_chain.ensemble.report import Report

__all__ = ["Ensemble", "EnsembleError", "Report", "Scaled", "posterior_ensemble"]
