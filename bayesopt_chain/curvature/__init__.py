"""Curvature of any likelihood in any structure: estimators (`_estimators.py`), products and solvers."""

from bayesopt_chain.curvature._estimators import STRUCTURES, empirical_fisher, fisher, ggn, hessian

__all__ = ["STRUCTURES", "empirical_fisher", "fisher", "ggn", "hessian"]
