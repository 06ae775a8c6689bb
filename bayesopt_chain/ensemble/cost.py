"""What a stage costs, in passes over all data for each member.

One pass is one gradient of every datum for every member. A forward alone counts as a third of a gradient, and a product with
the Hessian as two, as in the arithmetic of reverse and forward-over-reverse differentiation.
"""

from __future__ import annotations

FORWARD, GRADIENT, PRODUCT = 1 / 3, 1.0, 2.0


def passes(evaluations: float, data: int, size: int, unit: float = GRADIENT, share: float = 1.0) -> float:
    """Passes of so many evaluations of ``data`` data out of ``size``, by a share of the members.

    Example:
        >>> from bayesopt_chain.ensemble.cost import passes
        >>> passes(10, 32, 320)  # ten batches of a tenth
        1.0
    """
    return evaluations * data / size * unit * share
