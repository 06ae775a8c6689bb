r"""The regularised incomplete beta function, which torch lacks.

The distribution functions of the beta, Student's t and negative binomial distributions need it.

    I_x(a, b) = x^a (1 - x)^b / (a B(a, b)) / (1 + d_1 / (1 + d_2 / (1 + ...)))

    d_{2m+1} = -(a + m) (a + b + m) x / ((a + 2m) (a + 2m + 1)),   d_{2m} = m (b - m) x / ((a + 2m - 1) (a + 2m))

by Lentz's method, for ``x < (a + 1) / (a + b + 2)``, where the fraction converges in O(sqrt(max(a, b))) terms; beyond,
``I_x(a, b) = 1 - I_{1-x}(b, a)``. (Press et al., Numerical Recipes, 6.4; DLMF 8.17.22.)
"""

from __future__ import annotations

import torch
from torch import Tensor

TERMS, TINY = 400, 1e-300


@torch.no_grad()
def incomplete_beta(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """``I_x(a, b)`` for ``0 <= x <= 1`` and positive a, b, elementwise, in float64; it is not differentiated.

    Example:
        >>> import torch
        >>> from bayesopt_chain.likelihoods._incomplete_beta import incomplete_beta
        >>> incomplete_beta(torch.tensor(2.0), torch.tensor(3.0), torch.tensor(0.5))
        tensor(0.6875, dtype=torch.float64)
    """
    a, b, x = torch.broadcast_tensors(*(v.to(x.device, torch.float64) for v in (a, b, x)))
    is_far = x > (a + 1) / (a + b + 2)
    a, b = torch.where(is_far, b, a), torch.where(is_far, a, b)
    near = torch.where(is_far, 1 - x, x)
    inside = near.clamp_min(TINY)
    front = a * inside.log() + b * (-near).log1p() - a.log() - _log_beta(a, b)
    value = torch.where(near > 0, front.exp() / _fraction(a, b, near), 0.0)
    return torch.where(is_far, 1 - value, value)


def _fraction(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    numerator, denominator = torch.ones_like(x), torch.zeros_like(x)
    total = torch.ones_like(x)
    for n in range(1, TERMS):
        m, is_odd = n // 2, n % 2
        if is_odd:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        denominator = 1 / _away_from_zero(1 + d * denominator)
        numerator = _away_from_zero(1 + d / numerator)
        change = numerator * denominator
        total = total * change
        if n % 16 == 0 and bool(((change - 1).abs() < 1e-15).all()):
            break
    return total


def _away_from_zero(x: Tensor) -> Tensor:
    return torch.where(x.abs() < TINY, TINY, x)


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
