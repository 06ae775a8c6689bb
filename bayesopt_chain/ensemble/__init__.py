"""One call from a module to a posterior: :func:`posterior_ensemble`, its stages a file each, and what it returns."""

from bayesopt_chain.ensemble.call import posterior_ensemble
from bayesopt_chain.ensemble.ensemble import Ensemble
from bayesopt_chain.ensemble.report import Report

__all__ = ["Ensemble", "Report", "posterior_ensemble"]
