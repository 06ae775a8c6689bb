r"""Means over Gaussian outputs: nodes and weights, so that an expectation is a weighted sum.

    one output      trapezoidal rule on n points of m + sd z, |z| <= 8.5      spectrally accurate for smooth functions
    K outputs       m +- A z_s, z_s a scrambled Sobol sequence turned normal, A A^T = S

The trapezoidal rule with spacing h errs by about ``exp(-2 pi a / h)`` for a function analytic within a of the real line, so
that n grows with the deviation over the width of the function. Pairs ``+- z`` make odd moments exact. (An A along the
eigenvectors, where the best coordinates of the sequence go along the largest eigenvalues, is closer by a fifth at most, three
times as dear at 100 classes, and has no derivative where eigenvalues meet.)

The regularised incomplete beta function, which torch lacks.

The distribution functions of the beta, Student's t and negative binomial distributions need it.

    I_x(a, b) = x^a (1 - x)^b / (a B(a, b)) / (1 + d_1 / (1 + d_2 / (1 + ...)))

    d_{2m+1} = -(a + m) (a + b + m) x / ((a + 2m) (a + 2m + 1)),   d_{2m} = m (b - m) x / ((a + 2m - 1) (a + 2m))

by Lentz's method, for ``x < (a + 1) / (a + b + 2)``, where the fraction converges in O(sqrt(max(a, b))) terms; beyond,
``I_x(a, b) = 1 - I_{1-x}(b, a)``. (Press et al., Numerical Recipes, 6.4; DLMF 8.17.22.)

Draws that torch makes with a generator, but does not export.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from bayesopt_chain.tracing import is_hidden

FEW, MANY = 129, 4097  # points of the trapezoidal rule: the default and the most
PAIRS = 128  # antithetic pairs of Sobol points
REACH = 8.5  # standard deviations; a normal variable lies outside with probability 2e-17


Table = TypeVar("Table", bound=Callable[..., Any])


def constant(make: Table) -> Table:
    """Make a table once for its arguments, as if nothing else were going on.

    The first to ask may be inside a transformation of ``torch.func``, in inference mode or under a default device, and what was
    made there would be of no use outside. All of these hold for one thread: the table is made in another.
    """

    @lru_cache(maxsize=16)
    @wraps(make)
    def made(*given: Any) -> Any:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(make, *given).result()

    found: Any = made
    return found


@constant
def fine_grid(points: int = FEW) -> tuple[Tensor, Tensor]:
    """Nodes and weights ``[points]``, float64, for means over a standard normal."""
    z = torch.linspace(-REACH, REACH, points, dtype=torch.float64, device="cpu")
    w = torch.exp(-z.square() / 2)
    return z, w / w.sum()


def points_for(deviation_over_width: float) -> int:
    """How many points of the trapezoidal rule a function needs, by its argument's deviation over the width it varies on."""
    needed = 4 * REACH * deviation_over_width
    doublings = math.ceil(math.log2(max(1.0, needed / (FEW - 1)))) if math.isfinite(needed) else 32
    return min(MANY, (FEW - 1) * 2**doublings + 1)


@constant
def gauss_legendre(nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights, ``[nodes]`` each, for integrals over [0, 1]."""
    k = torch.arange(1, nodes, dtype=torch.float64, device="cpu")
    off = k / (4 * k.square() - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return (values + 1) / 2, vectors[0].square()


@constant
def sobol_normals(dimensions: int, pairs: int = PAIRS) -> Tensor:
    """The first half of ``2 pairs`` antithetic points of a standard normal, ``[pairs, dimensions]``; always the same."""
    uniform = SobolEngine(min(dimensions, SobolEngine.MAXDIM), scramble=True, seed=1).draw(pairs, dtype=torch.float64)
    normal = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
    rest = dimensions - normal.shape[1]
    if rest > 0:  # torch has no Sobol sequence of so many dimensions
        generator = torch.Generator().manual_seed(1)
        normal = torch.cat(
            [normal, torch.randn(pairs, rest, dtype=torch.float64, generator=generator, device="cpu")], 1
        )
    return normal


def square_root(covariance: Tensor) -> Tensor:
    """A with ``A A^T = S``, ``[*, K, K]``: the Cholesky factor, which has derivatives also where eigenvalues meet.

    A diagonal of 1e-9 of the mean variance (in float32 and lower 1e-6) is added; where S is singular all the same, A comes from
    its eigenvectors and has no derivative.
    """
    variance = covariance.diagonal(dim1=-2, dim2=-1).detach()
    relative = max(1e-9, 10 * torch.finfo(covariance.dtype).eps)
    least = torch.finfo(covariance.dtype).tiny ** 0.5
    added = (relative * variance.mean(-1)).clamp_min(least)[..., None].expand_as(variance)
    if torch.compiler.is_exporting():
        return _cholesky(covariance + torch.diag_embed(added), added[..., :1])
    lower, info = torch.linalg.cholesky_ex(covariance + torch.diag_embed(added))
    if is_hidden(info) or not bool(info.any()):
        return lower
    return torch.where((info > 0)[..., None, None], root_by_eigenvectors(covariance.detach()), lower)


def _cholesky(matrix: Tensor, least: Tensor) -> Tensor:
    """The Cholesky factor column by column in plain operations, for ONNX, which has no decompositions."""
    columns = []
    for i in range(matrix.shape[-1]):
        column = matrix[..., i] * matrix[..., i, i, None].maximum(least).rsqrt()
        columns.append(torch.cat([torch.zeros_like(column[..., :i]), column[..., i:]], -1))
        matrix = matrix - columns[-1][..., :, None] * columns[-1][..., None, :]
    return torch.stack(columns, -1)


def root_by_eigenvectors(covariance: Tensor) -> Tensor:
    """A with ``A A^T = S``, ``[*, K, K]``, S singular or not; NaN where S is not finite, as of inputs that are not."""
    is_finite = covariance.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    values, vectors = torch.linalg.eigh(torch.where(is_finite, covariance, 0))
    return torch.where(is_finite, vectors * values.clamp_min(0).sqrt()[..., None, :], math.nan)


def normal_nodes(mean: Tensor, covariance: Tensor, points: int = FEW) -> tuple[Tensor, Tensor]:
    """Nodes of a Gaussian and the logarithms of their weights.

    Args:
        mean: ``[*, K]``.
        covariance: ``[*, K, K]``, or variances ``[*, K]``.
        points: of the trapezoidal rule, for K = 1.

    Returns:
        ``([S, *, K], [S])``.
    """
    if mean.shape[-1] == 1:
        z, w = (x.to(mean) for x in fine_grid(points))
        variance = covariance if covariance.ndim == mean.ndim else covariance[..., 0]
        deviation = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
        return mean + deviation * z.reshape(-1, *[1] * mean.ndim), w.log()
    z = sobol_normals(mean.shape[-1]).to(mean)
    if covariance.ndim == mean.ndim:
        moves = covariance.sqrt() * z.reshape(-1, *[1] * (mean.ndim - 1), z.shape[1])
    else:
        moves = torch.einsum("...ij,sj->s...i", square_root(covariance), z)
    count = 2 * len(z)
    return torch.cat([mean + moves, mean - moves]), mean.new_full((count,), -math.log(count))


TERMS, TINY = 400, 1e-300


@torch.no_grad()
def incomplete_beta(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """``I_x(a, b)`` for ``0 <= x <= 1`` and positive a, b, elementwise, in float64; it is not differentiated.

    Example:
        >>> import torch
        >>> from bayesopt_chain.likelihoods._quadrature import incomplete_beta
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


def standard_gamma(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """Gamma variables of these shapes, elementwise, and scale 1."""
    draw: Any = torch._standard_gamma  # pyright: ignore[reportPrivateImportUsage]
    return draw(shape, generator=generator)
