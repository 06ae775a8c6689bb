"""The likelihoods most models use, each with its exact output factors written down.

gaussian      loss = (y - f)^2 / (2 v) + log(2 pi v) / 2      sum s s^T = 1 / v
  learned     f = (m, r), v = e^r                             sum s s^T = diag(1 / v, 1 / 2)
bernoulli     loss = softplus(f) - y f,  p = sigmoid(f)       sum s s^T = p (1 - p)
poisson       loss = e^f - y f + log y!                       sum s s^T = e^f
categorical   loss = -log softmax(f)_y,  p = softmax(f)       sum s s^T = diag(p) - p p^T,   s_c = sqrt(p_c) (e_c - p)
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from bayesopt_chain.likelihoods._likelihood import Likelihood
from bayesopt_chain.trees import as_tensor


def gaussian(variance: float | Tensor | Literal["learned"] = 1.0) -> Likelihood:
    """Independent Gaussian noise on every output.

    Args:
        variance: of the noise, in the targets' units squared: a number or 0-d tensor, a tensor `[*event]` with one
        variance an
            output, or `"learned"`: then the outputs are `[B, *, 2 C]`, C means followed by C log variances. Default 1.

    Targets have the shape of the outputs, `[B, *event]`; with `"learned"` that of the means, `[B, *, C]`.

    Raises:
        ValueError: for a variance that is not positive, or targets of another shape.

    >>> import torch
    >>> from bayesopt_chain import likelihoods
    >>> likelihoods.gaussian(0.25).factors(torch.zeros(2, 1), torch.zeros(2, 1)).flatten()
    tensor([2., 2.])
    """
    if isinstance(variance, str):
        if variance != "learned":
            raise ValueError(f"variance={variance!r}: pass a number, a tensor or 'learned'")
        return Likelihood("gaussian with learned variance", _learned_nll, _learned_factors, _learned_draw)
    if not bool(torch.as_tensor(variance > 0).all()):
        raise ValueError(f"variance={variance}: pass positive variances")

    def nll(outputs: Tensor, targets: Tensor) -> Tensor:
        _require_shape("gaussian", targets, outputs.shape)
        v = as_tensor(variance, outputs.dtype, outputs.device)
        return _per_datum((targets - outputs).square() / (2 * v) + (2 * math.pi * v).log() / 2)

    def factors(outputs: Tensor, targets: Tensor) -> Tensor:
        v = as_tensor(variance, outputs.dtype, outputs.device)
        return _one_entry_each(v.rsqrt().expand_as(outputs))

    def draw(outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        v = as_tensor(variance, outputs.dtype, outputs.device)
        return outputs + v.sqrt() * _normal_like(outputs, generator)

    return Likelihood("gaussian", nll, factors, draw)


def bernoulli() -> Likelihood:
    """Independent yes-or-no targets from logits. Outputs `[B, *event]` are logits; targets 0 or 1 of the same shape.

    >>> import torch
    >>> from bayesopt_chain import likelihoods
    >>> likelihoods.bernoulli().factors(torch.zeros(1, 1), torch.zeros(1, 1)).item()
    0.5
    """

    def nll(outputs: Tensor, targets: Tensor) -> Tensor:
        _require_shape("bernoulli", targets, outputs.shape)
        return _per_datum(softplus(outputs) - targets * outputs)

    def factors(outputs: Tensor, targets: Tensor) -> Tensor:
        return _one_entry_each((outputs.sigmoid() * (-outputs).sigmoid()).sqrt())

    def draw(outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.bernoulli(outputs.sigmoid(), generator=generator)

    return Likelihood("bernoulli", nll, factors, draw)


def poisson() -> Likelihood:
    """Independent counts from log rates. Outputs `[B, *event]` are log rates; targets counts of the same shape.

    >>> import torch
    >>> from bayesopt_chain import likelihoods
    >>> likelihoods.poisson().nll(torch.zeros(1, 1), torch.zeros(1, 1))
    tensor([1.])
    """

    def nll(outputs: Tensor, targets: Tensor) -> Tensor:
        _require_shape("poisson", targets, outputs.shape)
        return _per_datum(outputs.exp() - targets * outputs + torch.lgamma(targets.to(outputs.dtype) + 1))

    def factors(outputs: Tensor, targets: Tensor) -> Tensor:
        return _one_entry_each((outputs / 2).exp())

    def draw(outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.poisson(outputs.exp(), generator=generator)

    return Likelihood("poisson", nll, factors, draw)


def categorical() -> Likelihood:
    """One of C classes from logits. Outputs `[B, *, C]` are logits; targets integer classes `[B, *]`.

    >>> import torch
    >>> from bayesopt_chain import likelihoods
    >>> likelihoods.categorical().nll(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([4.])
    """

    def nll(outputs: Tensor, targets: Tensor) -> Tensor:
        _require_shape("categorical", targets, outputs.shape[:-1])
        losses = cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1), reduction="none")
        return _per_datum(losses.reshape(targets.shape))

    def factors(outputs: Tensor, targets: Tensor) -> Tensor:
        p = outputs.softmax(-1)
        classes = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
        rows = p.sqrt()[..., None] * (classes - p[..., None, :])  # [B, *, C (factor), C (output)]
        if outputs.ndim == 2:
            return rows.transpose(0, 1)
        positions = math.prod(outputs.shape[1:-1])
        rows = rows.reshape(outputs.shape[0], positions, *rows.shape[-2:])
        where = torch.eye(positions, dtype=p.dtype, device=p.device)
        spread = torch.einsum("btkc,ts->tkbsc", rows, where)
        return spread.reshape((-1, *outputs.shape))

    def draw(outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        p = outputs.softmax(-1)
        drawn = torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=generator)
        return drawn.reshape(outputs.shape[:-1])

    return Likelihood("categorical", nll, factors, draw)


def _learned_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    mean, log_variance = _halves(outputs)
    _require_shape("gaussian with learned variance", targets, mean.shape)
    squares = (targets - mean).square() * (-log_variance).exp()
    return _per_datum((squares + log_variance + math.log(2 * math.pi)) / 2)


def _learned_factors(outputs: Tensor, targets: Tensor) -> Tensor:
    _, log_variance = _halves(outputs)
    return _one_entry_each(torch.cat([(-log_variance / 2).exp(), torch.full_like(log_variance, 0.5**0.5)], dim=-1))


def _learned_draw(outputs: Tensor, generator: torch.Generator | None) -> Tensor:
    mean, log_variance = _halves(outputs)
    return mean + (log_variance / 2).exp() * _normal_like(mean, generator)


def _halves(outputs: Tensor) -> tuple[Tensor, Tensor]:
    if outputs.ndim < 2 or outputs.shape[-1] % 2:
        raise ValueError(
            f"gaussian(variance='learned') got outputs {tuple(outputs.shape)}: return means and log variances, [B, 2 C]"
        )
    return outputs.chunk(2, dim=-1)


def _per_datum(losses: Tensor) -> Tensor:
    """Sum independent losses over the event axes: `[B, *event]` to `[B]`."""
    return losses.reshape(losses.shape[0], -1).sum(1)


def _one_entry_each(scale: Tensor) -> Tensor:
    """Return factors `[E, B, *event]`, the e-th of which is `scale` at the event's e-th entry and 0 elsewhere."""
    flat = scale.reshape(scale.shape[0], -1)
    return torch.diag_embed(flat).transpose(0, 1).reshape((flat.shape[1], *scale.shape))


def _normal_like(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)


def _require_shape(name: str, targets: Tensor, shape: torch.Size) -> None:
    if targets.shape != shape:
        raise ValueError(
            f"the {name} likelihood got targets {tuple(targets.shape)}, but the outputs ask for {tuple(shape)}: "
            "reshape the targets (broadcasting would mix data)"
        )
