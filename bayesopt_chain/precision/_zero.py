"""The precision of knowing nothing yet, so that a state has a first value before the first increment names a structure.

0 + Lambda = Lambda
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from bayesopt_chain.precision._algebra import Precision


class Zero(NamedTuple("_Zero", [("count", Tensor)]), Precision):
    """No data, no structure: the neutral element of ``add``.

    Attributes:
        count: 0-d, the number of data.

    Example:
        >>> import torch
        >>> from bayesopt_chain.precision import Diagonal, Zero
        >>> Zero(torch.tensor(0.0)).add(Diagonal(torch.ones(2), torch.tensor(3.0))).count
        tensor(3.)
    """

    __slots__ = ()

    def add(self, other: Any) -> Any:
        return other

    def scale(self, factor: float | Tensor) -> Zero:
        return Zero(self.count * factor)

    def add_diagonal(self, value: Any) -> Any:
        raise ValueError("no curvature has been accumulated: call update(..., curvature=increment) at least once")

    factorised = diag = to_dense = lambda self: self.add_diagonal(None)

    def quad(self, tree: Any) -> Any:
        return self.add_diagonal(None)
