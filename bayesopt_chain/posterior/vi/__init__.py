"""Variational inference as gradient transformations: families of Gaussians, and natural gradients."""

from bayesopt_chain.posterior.vi._families import Draw, dense, low_rank, mean_field
from bayesopt_chain.posterior.vi._natural import ivon, von

__all__ = [
    "Draw",
    "dense",
    "ivon",
    "low_rank",
    "mean_field",
    "von",
]
