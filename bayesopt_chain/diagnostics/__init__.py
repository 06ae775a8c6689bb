"""Can this run be trusted: mixing, discrepancy, temperatures, and what the minibatches do."""

from bayesopt_chain.diagnostics._response import ThermalLeaf
from bayesopt_chain.diagnostics.convergence import ess, ksd, r_hat
from bayesopt_chain.diagnostics.doctor import Diagnosis, doctor
from bayesopt_chain.diagnostics.findings import Finding
from bayesopt_chain.diagnostics.gradient_noise import GradientNoise, gradient_noise, hessian_product
from bayesopt_chain.diagnostics.heat_guard import Heat, HeatGuard
from bayesopt_chain.diagnostics.heating import Heating, heating
from bayesopt_chain.diagnostics.observables.observe import Observed, susceptibility
from bayesopt_chain.diagnostics.observables.target import Restricted
from bayesopt_chain.diagnostics.suggest_lr import Suggestion

__all__ = [
    "Diagnosis",
    "Finding",
    "GradientNoise",
    "Heat",
    "HeatGuard",
    "Heating",
    "Observed",
    "Restricted",
    "Suggestion",
    "ThermalLeaf",
    "doctor",
    "ess",
    "gradient_noise",
    "heating",
    "hessian_product",
    "ksd",
    "r_hat",
    "susceptibility",
]
