r"""Expectations under full gradients, from runs with batches of several sizes.

The covariance of a batch's gradient is in proportion to ``w_b = (N - b) / (b (N - 1))``, for ``b`` different ones of ``N``
data, and to first order so is what it does to any expectation: ``E_b f = E f + c w_b + O(w_b^2)``. Runs at ``m`` sizes
determine the polynomial of degree ``m - 1`` in ``w``, whose value at ``w = 0`` is

    E f = sum_i c_i E_{b_i} f,      c_i = prod_{j != i} w_j / (w_j - w_i),

for two sizes ``[w(b/2) E_b f - w(b) E_{b/2} f] / (w(b/2) - w(b))`` (Richardson, 1911). It is of expectations alone: no
draws come of it. The variance is ``sum_i c_i^2 Var_i``, about 5 times that of one run of that length for ``b`` and ``b / 2``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import kinds


class Extrapolation(NamedTuple):
    """What :func:`extrapolate_batch_size` found.

    Attributes:
        mean: the expectations on full gradients, float64, like one value of the function.
        standard_error: of them, from the scatter between chains; NaN where a size has one chain alone.
        coefficients: ``c_i`` by batch size.
        variance_factor: ``sum_i c_i^2``: the variance over that of one run as long as each, if these are alike.
    """

    mean: Tensor
    standard_error: Tensor
    coefficients: dict[int, float]
    variance_factor: float


@kinds.takes(values=kinds.MAPPING, size=kinds.WHOLE)
def extrapolate_batch_size(values: Mapping[int, Tensor], size: int) -> Extrapolation:
    """Extrapolate expectations to full batches from chains that ran on batches of several sizes (Richardson, 1911).

    For independent batches, whose heat is linear in the variance of a batch's gradient as long as it is small; that of
    reshuffled ones is not.

    Args:
        values: by batch size, a function of the draws ``[draws, chains, ...]``, such as ``draws.params["w"] ** 2``; the
            sizes are different, and all chains at one learning rate, momentum and temperature.
        size: number of data ``N``.

    Returns:
        :class:`Extrapolation`; ``mean`` has the shape of one value. Its variance is larger than that of the runs, by
        ``variance_factor``.

    Raises:
        ValueError: fewer than two sizes, one outside 1 to ``N``, or values without draws and chains.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> values = {32: torch.full((100, 4), 1.10), 16: torch.full((100, 4), 1.20)}
        >>> found = bc.diagnostics.extrapolate_batch_size(values, 10_000)
        >>> round(found.mean.item(), 3), round(found.variance_factor, 2)
        (1.0, 4.98)
    """
    if len(values) < 2:
        raise ValueError(f"extrapolate_batch_size: values must be of at least two batch sizes, got {sorted(values)}")
    for b, f in values.items():
        if isinstance(b, bool) or not isinstance(b, int) or not 1 <= b <= size:
            raise ValueError(f"extrapolate_batch_size: a batch size lies between 1 and the {size} data, got {b!r}")
        if not isinstance(f, Tensor) or f.ndim < 2 or not f.numel():
            came = list(f.shape) if isinstance(f, Tensor) else type(f).__name__
            raise ValueError(f"extrapolate_batch_size: values must be tensors [draws, chains, ...], got {came}")
    w = {b: (size - b) / (b * max(size - 1, 1)) for b in values}
    c = {b: math.prod(w[j] / (w[j] - w[b]) for j in w if j != b) for b in w}
    by_chain = {b: f.detach().to(torch.float64).mean(0) for b, f in values.items()}
    mean = sum((c[b] * f.mean(0) for b, f in by_chain.items()), torch.zeros((), dtype=torch.float64, device="cpu"))
    variance = sum(
        (c[b] ** 2 * (f.var(0) if len(f) > 1 else f[0] * math.nan) / len(f) for b, f in by_chain.items()),
        torch.zeros((), dtype=torch.float64, device="cpu"),
    )
    return Extrapolation(mean, variance.sqrt(), c, sum(x**2 for x in c.values()))
