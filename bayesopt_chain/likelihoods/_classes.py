"""Targets that are classes: one of two, one of C, one of C in order.

bernoulli     loss = softplus(f) - y f,  p = sigmoid(f)           sum_k s_k s_k^T = p (1 - p)
categorical   loss = -log softmax(f)_y,  p = softmax(f)           sum_k s_k s_k^T = diag(p) - p p^T
  weights     loss = -w_y log p_y                                 w_y times that
ordinal       P(y <= k) = sigmoid(c_k - f)                        sum_k p_k (d log p_k / df)^2

Class weights count a datum of class k as w_k data. The Hessian of that loss is taken at the observed class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from bayesopt_chain import checks
from bayesopt_chain.likelihoods._likelihood import Grouping, Likelihood, OutputRoot, Softmax, Support, alike
from bayesopt_chain.likelihoods._predictive import Predictive
from bayesopt_chain.likelihoods._quadrature import probit, softmax_mean
from bayesopt_chain.tracing import is_hidden, is_readable
from bayesopt_chain.trees import wide


@dataclass(frozen=True, eq=False)
class Bernoulli(Likelihood):
    """See :func:`bernoulli`."""

    name = "bernoulli"
    support = Support(0.0, 1.0, True)
    default_method = "quadrature"
    has_classes = True

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        wrong = torch.where(targets > 0, -outputs, outputs)  # y f - softplus(f) would cancel where the model is right
        return -softplus(wrong, threshold=40)  # up to where 1 + e^f is e^f

    def gradient(self, outputs: Tensor, targets: Any) -> Tensor:
        self.require(outputs, targets)
        sign = 1 - 2 * targets.to(outputs.dtype)  # yes or no, maybe as booleans
        return sign * (sign * outputs).sigmoid()

    def variance(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid() * (-outputs).sigmoid()

    information = variance

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def draw(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(outputs.sigmoid(), generator=generator)

    def cdf(self, outputs: Tensor, values: Tensor) -> Tensor:
        return torch.where(values < 0, 0.0, torch.where(values < 1, (-outputs).sigmoid(), 1.0))


class OneOfSeveral(Likelihood):
    """Classes, of which ``mean`` has the probabilities on the last axis."""

    def variance(self, outputs: Tensor) -> Tensor:
        p = self.mean(outputs)
        return p * (1 - p)

    def draw(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        p = self.mean(outputs)
        return torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=generator).reshape(p.shape[:-1])


@dataclass(frozen=True, eq=False)
class Categorical(OneOfSeveral):
    """See :func:`categorical`."""

    weight: Tensor | None
    ignore_index: int
    axis: int = -1
    name = "categorical"
    support = None
    methods = {"sobol": softmax_mean, "probit": probit}  # noqa: RUF012
    default_method = "sobol"
    has_classes = True

    def grouping(self, event: torch.Size) -> Grouping:
        if len(event) < -self.axis or event[self.axis] < 2:
            raise ValueError(
                f"the categorical likelihood got outputs [B, {', '.join(map(str, event))}]: return the logits of at least two "
                f"classes on axis {self.axis}; for one yes-or-no output use likelihoods.bernoulli()"
            )
        if self.axis == -1:
            return Grouping(tuple(event[:-1]), event[-1])
        order = torch.arange(event.numel(), device="cpu").reshape(event).movedim(self.axis, -1)
        return Grouping(tuple(order.shape[:-1]), order.shape[-1], order.flatten())

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        log_p = self._last(outputs).log_softmax(-1)
        index = targets.to(torch.int64).expand(*log_p.shape[:-1])[..., None]
        return log_p.gather(-1, index)[..., 0]

    def exact_root(self, outputs: Tensor, labels: Any) -> OutputRoot:
        return Softmax(self.mean(outputs), self.axis)

    def mean(self, outputs: Tensor) -> Tensor:
        return self._last(outputs).softmax(-1)

    def _last(self, outputs: Tensor) -> Tensor:
        """The outputs with their classes on the last axis."""
        return outputs.movedim(self.axis, -1)

    @checks.takes(draws=checks.BATCHES)
    def pooled(self, draws: Iterable[Tensor]) -> Predictive:
        log_p, entropy, count = torch.tensor(-math.inf, device="cpu"), 0.0, 0
        for outputs in alike(draws):
            own = self._last(outputs).to(wide(outputs.dtype)).log_softmax(-1)
            log_p, entropy = torch.logaddexp(log_p, own), entropy + torch.special.entr(own.exp()).sum(-1)
            count += 1
        together = (log_p - math.log(count)).movedim(-1, self.axis)[None]
        return replace(self.mixture(together), mean_entropy=entropy / count)

    def require(self, outputs: Tensor, targets: Any, *, wait: bool = False, draws: Tensor | None = None) -> None:
        if (
            self.axis == -1
            and isinstance(targets, Tensor)
            and outputs.ndim > 2
            and targets.shape == (*outputs.shape[:1], *outputs.shape[2:]) != outputs.shape[:-1]
        ):
            raise ValueError(
                f"the categorical likelihood got targets {tuple(targets.shape)} for outputs {tuple(outputs.shape)}, whose "
                f"classes stand on the axis behind the data: pass likelihoods.categorical(axis={1 - outputs.ndim})"
            )
        super().require(outputs, targets, wait=wait, draws=draws)
        if (
            wait
            and not is_hidden(outputs)
            and bool((outputs >= 0).all())
            and bool(((outputs.sum(self.axis) - 1).abs() < 1e-3).all())
        ):
            checks.warn(
                "categorical: the outputs are probabilities, which sum to 1, where logits are meant: leave the softmax out of "
                "the model, or return logarithms (torch.nn.LogSoftmax)"
            )
        classes = outputs.shape[self.axis]
        if self.weight is not None and len(self.weight) != classes:
            raise ValueError(f"categorical: weight has {len(self.weight)} entries, but the outputs {classes} classes")

    def require_values(self, outputs: Tensor, targets: Tensor) -> None:
        classes = outputs.shape[self.axis]
        low, high = map(int, targets.aminmax()) if targets.numel() else (0, 0)
        if low < 0 or high >= classes:  # asked in a quarter of the time of a look at every one
            self._refuse(
                (targets < 0) | (targets >= classes),
                targets,
                f"class numbers from 0 to {classes - 1} (or ignore_index={self.ignore_index})",
            )

    def weights(self, targets: Any) -> Tensor | None:
        """That of a target's class; 0 where it is ignored."""
        kept = targets.to(torch.int64) != self.ignore_index
        if self.weight is not None:
            return self.weight.to(targets.device)[self.labels(targets)] * kept
        return None if is_readable(kept) and bool(kept.all()) else kept

    def labels(self, targets: Any) -> Any:
        if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dtype == torch.bool:
            what = targets.dtype if isinstance(targets, Tensor) else f"the type {type(targets).__name__}"
            raise ValueError(
                f"the categorical likelihood got targets of {what}: pass class numbers, a tensor of int64 "
                "(of one-hot rows argmax(-1))"
            )
        numbers = targets.to(torch.int64)  # torch compares unsigned ones with -100 modulo 256, as 156
        return numbers.masked_fill(numbers == self.ignore_index, 0)


@dataclass(frozen=True, eq=False)
class Ordinal(OneOfSeveral):
    """See :func:`ordinal`."""

    thresholds: tuple[float, ...]
    name = "ordinal"
    default_method = "quadrature"

    @property
    def support(self) -> Support:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Support(0.0, float(len(self.thresholds)), True)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        cuts, y = self._cuts(outputs), targets.to(torch.int64)
        return _log_between(cuts[y], cuts[y + 1], outputs)

    def information(self, outputs: Tensor) -> Tensor:
        cuts, f = self._cuts(outputs), outputs[..., None]
        slopes = (cuts[:-1] - f).sigmoid() - (f - cuts[1:]).sigmoid()  # of log p
        return (self.mean(outputs) * slopes.square()).sum(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        cuts = self._cuts(outputs)
        return _log_between(cuts[:-1], cuts[1:], outputs[..., None]).exp()

    def cdf(self, outputs: Tensor, values: Tensor) -> Tensor:
        index = (values.floor() + 1).clamp(0, len(self.thresholds) + 1).to(torch.int64)
        return (self._cuts(outputs)[index] - outputs).sigmoid()

    def _cuts(self, outputs: Tensor) -> Tensor:
        return torch.tensor((-math.inf, *self.thresholds, math.inf), dtype=outputs.dtype, device=outputs.device)


def _log_between(low: Tensor, high: Tensor, f: Tensor) -> Tensor:
    """``log(sigmoid(high - f) - sigmoid(low - f))``, of which both terms round to 1 far from the thresholds."""
    return logsigmoid(high - f) + logsigmoid(f - low) + torch.log1p(-torch.exp(low - high))


def bernoulli() -> Likelihood:
    """Independent yes-or-no targets from logits.

    Outputs ``[B, *event]`` are logits; targets are 0 or 1 and have the same shape.

    Returns:
        A :class:`Likelihood`; it raises a ``ValueError`` for targets of another shape or value, such as -1.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> likelihoods.bernoulli().factors(torch.zeros(1, 1), torch.zeros(1, 1)).item()
        0.5
    """
    return Bernoulli()


@checks.takes(
    weight=checks.Kind(
        lambda x: checks.VECTOR.fits(x) and bool((torch.as_tensor(x, device="cpu") >= 0).all()),
        "a list of numbers that are not negative, one a class",
        (list, tuple, Tensor),
    ).or_none(),
    ignore_index=checks.INDEX,
    axis=checks.Kind(lambda x: checks.INDEX.fits(x) and x < 0, "an axis counted from the end, such as -3", (int,)),
)
def categorical(
    *,
    weight: Sequence[float] | Tensor | None = None,
    ignore_index: int = -100,
    axis: int = -1,
) -> Likelihood:
    """One of C classes from logits, at every position of a datum (one position, or the tokens of a sequence).

    Outputs ``[B, *, C]`` are logits; targets are integer classes ``[B, *]``. The arguments mean what they mean in
    ``torch.nn.functional.cross_entropy(reduction="none")``, and curvature, evidence and predictions follow them.

    Args:
        weight: of each class, ``[C]``: a datum of class k counts as ``weight[k]`` data. Default: 1.
        ignore_index: the label of positions that are left out. Default -100, as in torch and transformers.
        axis: that of the classes in the outputs, counted from the end: -3 for images ``[B, C, H, W]``, -2 for ``[B, C, T]``.
            Default -1. Probabilities always have their classes last, ``[B, H, W, C]``.

    Returns:
        A :class:`Likelihood`; it raises a ``ValueError`` for targets of another shape, dtype or value, and for outputs of a
        single class.

    Raises:
        ValueError: weights that are negative.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> likelihoods.categorical().nll(torch.zeros(1, 4), torch.tensor([2])).exp()
        tensor([4.])
        >>> tokens = torch.tensor([[2, 0, -100]])  # the last one is padding
        >>> likelihoods.categorical().nll(torch.zeros(1, 3, 4), tokens).exp()
        tensor([16.])
    """
    of_class = None if weight is None else torch.as_tensor(weight, device=getattr(weight, "device", "cpu")) * 1.0
    return Categorical(of_class, ignore_index, axis)


@checks.takes(
    thresholds=checks.Kind(
        lambda x: (
            checks.VECTOR.fits(x)
            and len(x) > 0
            and all(a < b for a, b in pairwise([-math.inf, *map(float, x), math.inf]))
        ),
        "a list of numbers, at least one, finite and rising",
        (list, tuple, Tensor),
    )
)
def ordinal(thresholds: Sequence[float] | Tensor) -> Likelihood:
    """One of C classes in order, from one output: the cumulative logit model, ``P(y <= k) = sigmoid(c_k - f)``.

    Outputs ``[B, *event]`` are positions on a line that the thresholds cut into classes; targets are class numbers
    0 ... C - 1 of the same shape.

    Args:
        thresholds: c_0 < ... < c_{C-2}, C - 1 rising numbers, such as ``[-1.0, 1.0]`` for three classes. They fix the unit of
            the outputs; a network scales its last layer to them.

    Returns:
        A :class:`Likelihood`. Its ``mean`` is the probabilities of the classes, ``[B, *event, C]``; quantiles and scores are of
        class numbers.

    Raises:
        ValueError: thresholds that do not rise; where it is used for targets of another shape or value.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> likelihoods.ordinal([-1.0, 1.0]).mean(torch.zeros(1))
        tensor([[0.2689, 0.4621, 0.2689]])
    """
    return Ordinal(tuple(float(c) for c in thresholds))
