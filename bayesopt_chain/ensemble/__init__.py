"""One call from a module to an ensemble that knows what it does not know: :func:`posterior_ensemble`, and what it returns."""

from bayesopt_chain.ensemble.call import EnsembleError, posterior_ensemble
from bayesopt_chain.ensemble.ensemble import Ensemble, Report, Scaled

__all__ = ["Ensemble", "EnsembleError", "Report", "Scaled", "posterior_ensemble"]
