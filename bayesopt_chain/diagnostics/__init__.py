"""Can this run be trusted: mixing, discrepancy, temperatures, and what the minibatches do."""

from bayesopt_chain.diagnostics.convergence import ess, r_hat
from bayesopt_chain.diagnostics.gradient_noise import GradientNoise, gradient_noise
from bayesopt_chain.diagnostics.heating import Heating, heating
from bayesopt_chain.diagnostics.ksd import ksd
from bayesopt_chain.diagnostics.temperatures import Estimate, Temperatures, Thermometer, temperatures
from bayesopt_chain.diagnostics.top_curvature import hessian_product

__all__ = [
    "Estimate",
    "GradientNoise",
    "Heating",
    "Temperatures",
    "Thermometer",
    "ess",
    "gradient_noise",
    "heating",
    "hessian_product",
    "ksd",
    "r_hat",
    "temperatures",
]
