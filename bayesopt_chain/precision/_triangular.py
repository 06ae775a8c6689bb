"""Triangular roots by orthogonal rotation, so that a precision is never formed to be factorised.

Lambda = M^T M = R^T R,    M = Q R,    F = R^T,    Lambda = F F^T
"""

from __future__ import annotations

import torch
from torch import Tensor


def lower_root(rows: Tensor) -> Tensor:
    """Return the lower triangular F, positive diagonal, with ``F F^T = rows^T rows``; rows is ``[M, P]``, M >= P."""
    return signed(torch.linalg.qr(rows, mode="r").R).mT


def signed(upper: Tensor) -> Tensor:
    """Return an upper triangular factor (columns beyond the square go along) with its rows' signs such that the
    diagonal is not negative.
    """
    diagonal = upper.diagonal(dim1=-2, dim2=-1)
    return torch.where(diagonal < 0, -1.0, 1.0).to(upper.dtype)[..., None] * upper
