"""One call from a module to an ensemble that knows what it does not know: :func:`posterior_ensemble`, and what it returns."""

from bayesopt_chain.ensemble.call import Ensemble, EnsembleError, Report, Scaled, posterior_ensemble

__all__ = ["Ensemble", "EnsembleError", "Report", "Scaled", "posterior_ensemble"]
