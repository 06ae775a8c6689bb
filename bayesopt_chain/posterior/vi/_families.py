r"""The Gaussian families of variational inference: how noise displaces the mean, and the derivatives of that.

    mean field     theta - mu = sigma * z,          phi = log sigma,         Lambda = diag(sigma^-2)
    dense          theta - mu = D (1 + N) z,        phi = (log D, N),        Lambda = (L L^T)^-1 with L = D (1 + N)
    low rank       theta - mu = B z + d * eps,      phi = (B, log d),        Lambda = (B B^T + diag d^2)^-1

D is diagonal and N strictly lower triangular: correlations without units, of which an optimizer's step is as large whatever
the deviations are. Of L's own entries a step of Adam may be many times a deviation, and L^-1 then grows exponentially.
The last family holds for each leaf, seen as a matrix ``[d0, d1]`` (a vector as ``[n, 1]``), as in
:mod:`bayesopt_chain.precision`.

A family is asked for the displacement of a noise, for ``score = Lambda (theta - mu)``, for ``pullback``, the transposed
derivative of the displacement by phi applied to gradients at the draws and averaged over them, and for the entropy
``H = P/2 log(2 pi e) + log |Sigma| / 2`` with its gradient. No matrix is ever factorised: the dense family carries L
itself, whose diagonal is positive because it is the exponential of what is optimized.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain.curvature._structures import require_dense_fits
from bayesopt_chain.posterior.draw import over_samples
from bayesopt_chain.precision import (
    Cholesky,
    Diagonal,
    LowRankCovariance,
    Precision,
    flatten,
    low_rank_covariance,
    shape_only,
    unflatten,
)
from bayesopt_chain.precision._dense import lower_root
from bayesopt_chain.trees import combine, common_dtype, size, wide

Scale = tuple[Tensor, ...]
Noise = tuple[Tensor, ...]


class Family(ABC):
    """A family of Gaussians. Leaves are the parameters that are present; samples stand on axis 0 of noise and gradients."""

    name: str
    init_scale: Any
    elementwise = False  # whether phi has a tensor like each leaf, and every element is treated by itself

    @abstractmethod
    def start(self, leaves: list[Tensor], scales: list[Tensor], normals: Callable[[int], Noise]) -> Scale:
        """The first phi for standard deviations that broadcast to the leaves; ``normals(n)`` are ``n`` standard normals like
        every leaf, ``[n, *leaf.shape]``."""

    def noise_like(self, leaves: list[Tensor], paths: Sequence[str]) -> tuple[list[Tensor], Sequence[str]]:
        """Templates of one sample's standard normals, by default those of the leaves, and the names by which the random stream
        tells them apart."""
        return leaves, paths

    @abstractmethod
    def displace(self, scale: Scale, noise: Noise, leaves: list[Tensor]) -> list[Tensor]:
        """``theta - mu``: ``[S, *leaf.shape]`` for each leaf."""

    @abstractmethod
    def score(self, scale: Scale, noise: Noise, leaves: list[Tensor]) -> list[Tensor]:
        """``Lambda (theta - mu)``, shaped like the displacement."""

    @abstractmethod
    def pullback(self, scale: Scale, noise: Noise, gradients: list[Tensor]) -> Scale:
        """Gradient by phi of ``mean_s gradients_s . displacement_s``."""

    @abstractmethod
    def entropy(self, scale: Scale) -> Tensor:
        """In nats, 0-d."""

    @abstractmethod
    def entropy_gradient(self, scale: Scale) -> Scale:
        """Gradient of the entropy by phi."""

    def only(self, gradient: Scale, leaves: list[Tensor], moves: list[bool]) -> list:
        """The gradient by phi without the part of the leaves that do not move; phi has as many tensors for each leaf."""
        return [x if m else None for x, m in zip(gradient, moves * (len(gradient) // len(moves)))]

    def shapes(self, scale: Scale) -> list | int:
        """The parameters' shapes that phi remembers, or their number."""
        return [s.shape for s in scale]

    @abstractmethod
    def precision(self, scale: Scale, params: Any, count: Tensor) -> Precision:
        """``Lambda`` over the tree of params."""


@dataclass(frozen=True)
class MeanField(Family):
    init_scale: Any = field(hash=False, compare=False)
    name = "vi.mean_field"
    elementwise = True

    def start(self, leaves, scales, normals):
        return tuple(_logs(leaf, scale) for leaf, scale in zip(leaves, scales))

    def displace(self, scale, noise, leaves):
        return [s.exp() * z for s, z in zip(scale, noise)]

    def score(self, scale, noise, leaves):
        return [z * (-s).exp() for s, z in zip(scale, noise)]

    def pullback(self, scale, noise, gradients):
        return tuple(over_samples(g * z) * s.exp() for s, z, g in zip(scale, noise, gradients))

    def entropy(self, scale):
        return torch.stack([s.sum() for s in scale]).sum() + _constant(sum(s.numel() for s in scale))

    def entropy_gradient(self, scale):
        return tuple(torch.ones_like(s) for s in scale)

    def precision(self, scale, params, count):
        values = [(-2 * s).exp() for s in scale]
        return Diagonal(optree.tree_unflatten(optree.tree_structure(params), values), count)


@dataclass(frozen=True)
class Dense(Family):
    init_scale: Any = field(hash=False, compare=False)
    name = "vi.dense"

    def start(self, leaves, scales, normals):
        dtype = common_dtype(leaves)
        require_dense_fits(size(leaves), dtype, leaves[0].device)
        logs = [_logs(leaf, scale) for leaf, scale in zip(leaves, scales)]
        return (torch.diag(flatten(logs, leaves).to(dtype)),)

    def noise_like(self, leaves, paths):
        return [leaves[0].new_empty((), dtype=common_dtype(leaves)).expand(size(leaves))], [self.name]

    def displace(self, scale, noise, leaves):
        return unflatten(noise[0] @ cholesky(scale[0]).mT, leaves)

    def score(self, scale, noise, leaves):
        lower = cholesky(scale[0])
        return unflatten(torch.linalg.solve_triangular(lower.mT, noise[0].mT, upper=True).mT, leaves)

    def pullback(self, scale, noise, gradients):
        like = [g[0] for g in gradients]
        return (_by_raw(flatten(gradients, like).mT @ noise[0] / noise[0].shape[0], scale[0]),)

    def entropy(self, scale):
        return scale[0].diagonal().sum() + _constant(scale[0].shape[-1])

    def entropy_gradient(self, scale):
        return (torch.eye(scale[0].shape[-1], dtype=scale[0].dtype, device=scale[0].device),)

    def only(self, gradient, leaves, moves):
        if all(moves):
            return list(gradient)
        rows = torch.cat([torch.full((leaf.numel(),), m, device=leaf.device) for leaf, m in zip(leaves, moves)])
        return [torch.where(rows[:, None], gradient[0], 0)]

    def shapes(self, scale):
        return scale[0].shape[-1]

    def precision(self, scale, params, count):
        lower = cholesky(scale[0])
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
        return Cholesky(lower_root(inverse), shape_only(params), count)


@dataclass(frozen=True)
class LowRank(Family):
    init_scale: Any = field(hash=False, compare=False)
    rank: int
    name = "vi.low_rank"

    def start(self, leaves, scales, normals):
        if self.rank > size(leaves):
            raise ValueError(f"vi.low_rank: rank={self.rank} is above the number of parameters, {size(leaves)}")
        halves = [(scale / math.sqrt(2)).to(wide(leaf.dtype)) for scale, leaf in zip(scales, leaves)]
        rows = tuple(row * (half / math.sqrt(self.rank)) for row, half in zip(normals(self.rank), halves))
        return (*rows, *(_logs(leaf, half) for leaf, half in zip(leaves, halves)))

    def noise_like(self, leaves, paths):
        of_rows = leaves[0].new_empty((), dtype=common_dtype(leaves)).expand(self.rank)
        return [*leaves, of_rows], [*paths, self.name]

    def displace(self, scale, noise, leaves):
        (rows, log_d), (*eps, z) = _halves(scale), noise
        return [d.exp() * e + along for d, e, along in zip(log_d, eps, combine(z, rows))]

    def score(self, scale, noise, leaves):
        return self._covariance(scale).times(self.displace(scale, noise, leaves))

    def pullback(self, scale, noise, gradients):
        (_, log_d), (*eps, z) = _halves(scale), noise
        samples = z.shape[0]
        by_rows = tuple(torch.tensordot(z.to(g.dtype).mT, g, dims=1) / samples for g in gradients)
        by_log_d = tuple(over_samples(g * e) * d.exp() for g, e, d in zip(gradients, eps, log_d))
        return (*by_rows, *by_log_d)

    def entropy(self, scale):
        log_d = _halves(scale)[1]
        return -0.5 * self._covariance(scale).logdet() + _constant(sum(d.numel() for d in log_d))

    def entropy_gradient(self, scale):
        rows, log_d = _halves(scale)
        covariance = self._covariance(scale)
        by_rows = covariance.times(list(rows))
        by_log_d = [v * (2 * d).exp() for v, d in zip(covariance.diag(), log_d)]
        return (*by_rows, *by_log_d)

    def shapes(self, scale):
        return [s.shape for s in _halves(scale)[1]]

    def precision(self, scale, params, count):
        rows, log_d = (optree.tree_unflatten(optree.tree_structure(params), half) for half in _halves(scale))
        return low_rank_covariance(optree.tree_map(lambda d: (2 * d).exp(), log_d), rows, count)

    def _covariance(self, scale: Scale) -> LowRankCovariance:
        rows, log_d = _halves(scale)
        return low_rank_covariance(
            [(2 * d).exp() for d in log_d], list(rows), torch.ones((), dtype=torch.float64, device="cpu")
        )


def _by_raw(by_factor: Tensor, raw: Tensor) -> Tensor:
    """The gradient by N and log D from that by ``L = D (1 + N)``."""
    by_log = (by_factor * cholesky(raw)).sum(-1)
    return (by_factor * raw.diagonal().exp()[:, None]).tril(-1) + torch.diag_embed(by_log)


def _logs(leaf: Tensor, scale: Tensor) -> Tensor:
    """log scale, like a leaf, in float32 at least: 16 bits would round the steps of an optimizer away."""
    return scale.log().to(leaf.device, wide(leaf.dtype)).expand(leaf.shape).clone().detach()


def cholesky(raw: Tensor) -> Tensor:
    """L from N below the diagonal and log D on it."""
    deviations = raw.diagonal(dim1=-2, dim2=-1).exp()
    return deviations[..., None] * raw.tril(-1) + torch.diag_embed(deviations)


def _halves(scale: Scale) -> tuple[Scale, Scale]:
    """The rows of B^T and log d; the factors U and V."""
    return scale[: len(scale) // 2], scale[len(scale) // 2 :]


def _constant(parameters: int) -> float:
    return parameters * (1 + math.log(2 * math.pi)) / 2
