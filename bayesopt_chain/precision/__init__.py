"""Gaussian precisions over parameter trees: one algebra, several structures (see ``_algebra.py``)."""

from bayesopt_chain.precision._algebra import Diagonal, LayerBases, Precision, Zero
from bayesopt_chain.precision._dense import Cholesky, Dense
from bayesopt_chain.precision._kronecker import Eigenbasis, Kronecker
from bayesopt_chain.precision._low_rank import LowRank, LowRankCovariance, Root, Woodbury, low_rank_covariance
from bayesopt_chain.trees import flatten, shape_only, unflatten

__all__ = [
    "Cholesky",
    "Dense",
    "Diagonal",
    "Eigenbasis",
    "Kronecker",
    "LayerBases",
    "LowRank",
    "LowRankCovariance",
    "Precision",
    "Root",
    "Woodbury",
    "Zero",
    "flatten",
    "low_rank_covariance",
    "shape_only",
    "unflatten",
]
