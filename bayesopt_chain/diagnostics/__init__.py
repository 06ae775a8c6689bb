"""What a run is doing: how much noise the minibatches bring, and how far it heats the chain."""

from bayesopt_chain.diagnostics.gradient_noise import GradientNoise, gradient_noise
from bayesopt_chain.diagnostics.heating import Heating, heating
from bayesopt_chain.diagnostics.top_curvature import hessian_product

__all__ = ["GradientNoise", "Heating", "gradient_noise", "heating", "hessian_product"]
