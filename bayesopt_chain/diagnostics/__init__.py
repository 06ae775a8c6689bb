"""Can this run be trusted: mixing, discrepancy, temperatures, and what the minibatches do."""

from bayesopt_chain.diagnostics.convergence import ess, r_hat
from bayesopt_chain.diagnostics.ksd import ksd

__all__ = ["ess", "ksd", "r_hat"]
