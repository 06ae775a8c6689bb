"""Curvature of any likelihood in any structure: estimators (``_estimators.py``), products and solvers.

To be read in this order: ``_estimators`` says what is estimated; ``_plan`` and ``_taps`` how a forward pass is watched;
``_chunks`` how a batch becomes gradients, a chunk at a time; ``_kinds`` and ``_structures`` how gradients become a precision.
"""

from bayesopt_chain.curvature._backward import diagonal_by_backward
from bayesopt_chain.curvature._estimators import STRUCTURES, empirical_fisher, fisher, ggn, hessian, subset
from bayesopt_chain.curvature._products import (
    CGInfo,
    cg,
    fvp,
    ggnvp,
    hvp,
    jvp,
    linear_operator,
    per_sample,
)

__all__ = [
    "STRUCTURES",
    "CGInfo",
    "cg",
    "diagonal_by_backward",
    "empirical_fisher",
    "fisher",
    "fvp",
    "ggn",
    "ggnvp",
    "hessian",
    "hvp",
    "jvp",
    "linear_operator",
    "per_sample",
    "subset",
]
