"""Variational inference as gradient transformations: families of Gaussians, and natural gradients."""

from bayesopt_chain.posterior.draw import Draw
from bayesopt_chain.posterior.vi._natural import ivon, von
from bayesopt_chain.posterior.vi._transform import dense, low_rank, mean_field

__all__ = [
    "Draw",
    "dense",
    "ivon",
    "low_rank",
    "mean_field",
    "von",
]
