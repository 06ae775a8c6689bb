"""The likelihoods most models use, each with the exact root of its output Hessian (``_roots.py``) written down.

gaussian      loss = (y - f)^2 / (2 v) + log(2 pi v) / 2      sum_k s_k s_k^T = 1 / v
  learned     f = (m, r), v = e^r                             sum_k s_k s_k^T = diag(1 / v, 1 / 2)
bernoulli     loss = softplus(f) - y f,  p = sigmoid(f)       sum_k s_k s_k^T = p (1 - p)
poisson       loss = e^f - y f + log y!                       sum_k s_k s_k^T = e^f
categorical   loss = -log softmax(f)_y,  p = softmax(f)       sum_k s_k s_k^T = diag(p) - p p^T
                                                              s_k = sqrt(p_k) (e_k - p)
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from bayesopt_chain.likelihoods._likelihood import Likelihood
from bayesopt_chain.likelihoods._roots import Elementwise, Softmax
from bayesopt_chain.trees import as_tensor


def gaussian(variance: float | Tensor | Literal["learned"] = 1.0) -> Likelihood:
    """Independent Gaussian noise on every output.

    Targets have the shape of the outputs, ``[B, *event]``; with ``"learned"`` that of the means, ``[B, *, C]``.

    Args:
        variance: of the noise, in the targets' units squared: a number or 0-d tensor, a tensor ``[*event]`` with one
            variance an output, or ``"learned"``: then the outputs are ``[B, *, 2 C]``, C means followed by C log
            variances. Default 1.

    Returns:
        A :class:`Likelihood`.

    Raises:
        ValueError: for a variance that is not positive, and where it is used for targets or outputs of another shape.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> likelihoods.gaussian(0.25).factors(torch.zeros(2, 1), torch.zeros(2, 1)).flatten()
        tensor([2., 2.])
    """
    if isinstance(variance, str):
        if variance != "learned":
            raise ValueError(f"variance={variance!r}: pass a number, a tensor or 'learned'")
        return Likelihood("gaussian with learned variance", _learned_nll, _learned_root, _learned_draw)
    if not bool(torch.as_tensor(variance > 0).all()):
        raise ValueError(f"variance={variance}: pass positive variances")

    def nll(outputs: Tensor, targets: Tensor) -> Tensor:
        _require_shape("gaussian", targets, outputs.shape)
        v = as_tensor(variance, outputs.dtype, outputs.device)
        return _per_datum((targets - outputs).square() / (2 * v) + (2 * math.pi * v).log() / 2)

    def root(outputs: Tensor, targets: Tensor) -> Elementwise:
        v = as_tensor(variance, outputs.dtype, outputs.device)
        return Elementwise(v.rsqrt().expand_as(outputs))

    def draw(outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        v = as_tensor(variance, outputs.dtype, outputs.device)
        return outputs + v.sqrt() * _normal_like(outputs, generator)

    return Likelihood("gaussian", nll, root, draw)


def bernoulli() -> Likelihood:
    """Independent yes-or-no targets from logits.

    Outputs ``[B, *event]`` are logits; targets are 0 or 1 and have the same shape.

    Returns:
        A :class:`Likelihood`; it raises a ``ValueError`` for targets of another shape.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> likelihoods.bernoulli().factors(torch.zeros(1, 1), torch.zeros(1, 1)).item()
        0.5
    """

    def nll(outputs: Tensor, targets: Tensor) -> Tensor:
        _require_shape("bernoulli", targets, outputs.shape)
        return _per_datum(softplus(outputs) - targets * outputs)

    def root(outputs: Tensor, targets: Tensor) -> Elementwise:
        return Elementwise((outputs.sigmoid() * (-outputs).sigmoid()).sqrt())

    def draw(outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.bernoulli(outputs.sigmoid(), generator=generator)

    return Likelihood("bernoulli", nll, root, draw)


def poisson() -> Likelihood:
    """Independent counts from log rates.

    Outputs ``[B, *event]`` are log rates; targets are counts and have the same shape.

    Returns:
        A :class:`Likelihood`; it raises a ``ValueError`` for targets of another shape.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> likelihoods.poisson().nll(torch.zeros(1, 1), torch.zeros(1, 1))
        tensor([1.])
    """

    def nll(outputs: Tensor, targets: Tensor) -> Tensor:
        _require_shape("poisson", targets, outputs.shape)
        return _per_datum(outputs.exp() - targets * outputs + torch.lgamma(targets.to(outputs.dtype) + 1))

    def root(outputs: Tensor, targets: Tensor) -> Elementwise:
        return Elementwise((outputs / 2).exp())

    def draw(outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.poisson(outputs.exp(), generator=generator)

    return Likelihood("poisson", nll, root, draw)


def categorical() -> Likelihood:
    """One of C classes from logits, at every position of a datum (one position, or the tokens of a sequence).

    Outputs ``[B, *, C]`` are logits; targets are integer classes ``[B, *]``.

    Returns:
        A :class:`Likelihood`; it raises a ``ValueError`` for targets of another shape.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> likelihoods.categorical().nll(torch.zeros(1, 4), torch.tensor([2])).exp()
        tensor([4.])
    """

    def nll(outputs: Tensor, targets: Tensor) -> Tensor:
        _require_shape("categorical", targets, outputs.shape[:-1])
        losses = cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1), reduction="none")
        return _per_datum(losses.reshape(targets.shape))

    def root(outputs: Tensor, targets: Tensor) -> Softmax:
        return Softmax(outputs.softmax(-1))

    def draw(outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        p = outputs.softmax(-1)
        drawn = torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=generator)
        return drawn.reshape(outputs.shape[:-1])

    return Likelihood("categorical", nll, root, draw)


def _learned_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    mean, log_variance = _halves(outputs)
    _require_shape("gaussian with learned variance", targets, mean.shape)
    squares = (targets - mean).square() * (-log_variance).exp()
    return _per_datum((squares + log_variance + math.log(2 * math.pi)) / 2)


def _learned_root(outputs: Tensor, targets: Tensor) -> Elementwise:
    _, log_variance = _halves(outputs)
    return Elementwise(torch.cat([(-log_variance / 2).exp(), torch.full_like(log_variance, 0.5**0.5)], dim=-1))


def _learned_draw(outputs: Tensor, generator: torch.Generator | None) -> Tensor:
    mean, log_variance = _halves(outputs)
    return mean + (log_variance / 2).exp() * _normal_like(mean, generator)


def _halves(outputs: Tensor) -> tuple[Tensor, Tensor]:
    if outputs.ndim < 2 or outputs.shape[-1] % 2:
        raise ValueError(
            f"gaussian(variance='learned') got outputs {tuple(outputs.shape)}: return means and log variances, [B, 2 C]"
        )
    mean, log_variance = outputs.chunk(2, dim=-1)
    return mean, log_variance


def _per_datum(losses: Tensor) -> Tensor:
    """Sum independent losses over the event axes: ``[B, *event]`` to ``[B]``."""
    return losses.reshape(losses.shape[0], -1).sum(1)


def _normal_like(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)


def _require_shape(name: str, targets: Tensor, shape: torch.Size) -> None:
    if targets.shape != shape:
        raise ValueError(
            f"the {name} likelihood got targets {tuple(targets.shape)}, but the outputs ask for {tuple(shape)}: "
            "reshape the targets (broadcasting would mix data)"
        )
