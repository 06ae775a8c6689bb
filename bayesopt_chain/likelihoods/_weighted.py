"""Data that count more or less than once, or not at all: any likelihood with a weight for every datum or target.

    loss = sum_t w_t loss_t(f, y_t),     sum_k s_k s_k^T likewise

With ``w = 0`` a target's value is not read, so that NaN may stand for one that is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.likelihoods._likelihood import Likelihood
from bayesopt_chain.likelihoods._predictive import Predictive
from bayesopt_chain.tracing import is_readable


def _inner(name: str) -> Any:
    return property(lambda self: getattr(self.inner, name))


@dataclass(frozen=True, eq=False)
class Weighted(Likelihood):
    """See :func:`weighted`."""

    inner: Likelihood
    support, methods, has_classes, default_method, noise_variance, has_width = map(  # type: ignore
        _inner,
        ("support", "methods", "has_classes", "default_method", "noise_variance", "has_width"),
    )
    log_prob, smoothed, information, exact_root, mean, variance, draw, cdf, grouping, mixed = map(
        _inner,
        ("log_prob", "smoothed", "information", "exact_root", "mean", "variance", "draw", "cdf", "grouping", "mixed"),
    )
    expected_mean = _inner("expected_mean")

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"weighted {self.inner.name}"

    def weights(self, targets: Any) -> Tensor | None:
        labels, weights = _pair(targets)
        if weights.ndim < labels.ndim:  # one for each datum
            weights = weights.reshape(*weights.shape, *[1] * (labels.ndim - weights.ndim)).expand(labels.shape)
        own = self.inner.weights(self._filled(labels, weights))
        return weights if own is None else weights * own

    def labels(self, targets: Any) -> Any:
        labels, weights = _pair(targets)
        return self.inner.labels(self._filled(labels, weights))

    def require(self, outputs: Tensor, targets: Any, *, wait: bool = False) -> None:
        labels, weights = _pair(targets)
        if tuple(weights.shape) not in (tuple(labels.shape), tuple(labels.shape[:1])):
            raise ValueError(
                f"weighted: weights {tuple(weights.shape)} for targets {tuple(labels.shape)}: pass one for each datum, "
                f"{tuple(labels.shape[:1])}, or one for each target"
            )
        if is_readable(weights) and not bool((weights.isfinite() & (weights >= 0)).all()):
            raise ValueError("weighted: weights must be finite and not negative; leave a target out by the weight 0")
        self.inner.require(outputs, self._filled(labels, weights), wait=wait)

    def _filled(self, labels: Tensor, weights: Tensor) -> Tensor:
        left_out = weights.reshape(*weights.shape, *[1] * (labels.ndim - weights.ndim)) == 0
        return torch.where(
            left_out, torch.as_tensor(self.inner.filler, dtype=labels.dtype, device=labels.device), labels
        )

    def scaled(self, scale: Tensor | float) -> Likelihood:
        return Weighted(self.inner.scaled(scale))

    def whitened(self, outputs: Tensor, targets: Any) -> Tensor:
        self.require(outputs, targets)
        weights = self.weights(targets)
        assert weights is not None
        return self.inner.whitened(outputs, self.labels(targets)) * weights.to(outputs.dtype).sqrt()

    def widened(self, outputs: Tensor, factor: float) -> tuple[Likelihood, Tensor]:
        wider, outputs = self.inner.widened(outputs, factor)
        return Weighted(wider), outputs

    def _pooled(self, draws: Iterable[Tensor]) -> Predictive:
        return replace(self.inner._pooled(draws), likelihood=self)


def weighted(likelihood: Likelihood) -> Likelihood:
    """The likelihood with a weight for every datum or target: batches are ``(inputs, (targets, weights))``.

    Args:
        likelihood: any of :mod:`bayesopt_chain.likelihoods`.

    Returns:
        A :class:`Likelihood` of pairs ``(targets, weights)``, weights ``[B]`` or shaped like the targets, numbers that are not
        negative or booleans (False leaves a target out). A datum of weight 2 counts as two data, in loss, curvature and
        evidence; a target of weight 0 may be NaN.

    Raises:
        ValueError: where it is used for targets without weights, weights of another shape, or negative ones.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> y = torch.tensor([[1.0], [float("nan")]])
        >>> likelihoods.weighted(likelihoods.gaussian()).nll(torch.zeros(2, 1), (y, y.isfinite()))
        tensor([1.4189, 0.0000])
    """
    return likelihood if isinstance(likelihood, Weighted) else Weighted(likelihood)


def _pair(targets: Any) -> tuple[Tensor, Tensor]:
    if not (isinstance(targets, (tuple, list)) and len(targets) == 2):
        raise ValueError(
            f"weighted: the targets are a {type(targets).__name__}, not a pair: pass batches (inputs, (targets, weights))"
        )
    return targets[0], targets[1]
