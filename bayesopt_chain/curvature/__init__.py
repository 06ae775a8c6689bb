"""Curvature of any likelihood in any structure: estimators (``_estimators.py``), products and solvers.

To be read in this order: ``_estimators`` says what is estimated; ``_plan`` and ``_taps`` how a forward pass is watched;
``_chunks`` how a batch becomes gradients, a chunk at a time; ``_kinds`` and ``_structures`` how gradients become a precision.
"""

from bayesopt_chain.curvature._backward import diagonal_by_backward
from bayesopt_chain.curvature._cg import CGInfo, cg
from bayesopt_chain.curvature._estimators import STRUCTURES, empirical_fisher, fisher, ggn, hessian
from bayesopt_chain.curvature._log_density import LogDensity, of_log_density
from bayesopt_chain.curvature._operator import linear_operator
from bayesopt_chain.curvature._products import (
    fisher_diagonal,
    fisher_matrix,
    fvp,
    ggn_diagonal,
    ggn_matrix,
    ggnvp,
    hessian_diagonal,
    hessian_matrix,
    hvp,
    jvp,
    per_sample,
)
from bayesopt_chain.curvature._subset import entries, subset

__all__ = [
    "STRUCTURES",
    "CGInfo",
    "LogDensity",
    "cg",
    "diagonal_by_backward",
    "empirical_fisher",
    "entries",
    "fisher",
    "fisher_diagonal",
    "fisher_matrix",
    "fvp",
    "ggn",
    "ggn_diagonal",
    "ggn_matrix",
    "ggnvp",
    "hessian",
    "hessian_diagonal",
    "hessian_matrix",
    "hvp",
    "jvp",
    "linear_operator",
    "of_log_density",
    "per_sample",
    "subset",
]
