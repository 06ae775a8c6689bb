"""Likelihoods of a user's own, from a distribution of ``torch.distributions`` or from a loss.

    distribution   p(y | f) = distribution(f).log_prob(y): loss, draws, moments, distribution function and checks are its own
    loss           p(y | f) = exp(-nll(f, y)), of a whole datum; curvature by differentiating it twice

The curvature of either is the Hessian of its loss at the observed targets, unless ``output_hessian`` gives another.

Data that count more or less than once, or not at all: any likelihood with a weight for every datum or target.

    loss = sum_t w_t loss_t(f, y_t),     sum_k s_k s_k^T likewise

With ``w = 0`` a target's value is not read, so that NaN may stand for one that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import Distribution, TransformedDistribution

from bayesopt_chain import checks
from bayesopt_chain.likelihoods._likelihood import (
    REAL,
    Elementwise,
    Explicit,
    Grouping,
    Likelihood,
    OutputRoot,
    Support,
)
from bayesopt_chain.likelihoods._predictive import Predictive
from bayesopt_chain.tracing import is_hidden, is_readable, unwrapped
from bayesopt_chain.trees import spectral

Loss = Callable[[Tensor, Any], Tensor]


@contextmanager
def _unvalidated() -> Iterator[None]:
    """Distributions look at no arguments and values, which may be inside a transformation."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@dataclass(frozen=True, eq=False)
class Custom(Likelihood):
    """See :func:`custom`: the Hessian in the outputs is that of the loss at the observed targets, unless one is given."""

    output_hessian: Loss | None
    name = "custom"
    support = None

    def exact_root(self, outputs: Tensor, labels: Any) -> OutputRoot:
        entries = outputs.shape[1:].numel()
        if self.output_hessian is not None:
            hessian = self.output_hessian(outputs, labels)
            if hessian.shape != (len(outputs), entries, entries):
                raise ValueError(
                    f"output_hessian has shape {tuple(hessian.shape)}, not (B, E, E) = {(len(outputs), entries, entries)}: "
                    "return one matrix over the entries of an event for each datum"
                )
        elif labels is None:
            raise ValueError(
                "the curvature of a custom likelihood is its Hessian at the targets, and here are none: pass "
                "output_hessian=, of outputs alone, to likelihoods.custom, or use a likelihood whose expected Hessian is known"
            )
        else:
            slope = torch.func.grad(lambda f: -self.log_prob(f, labels).sum())

            def along(direction: Tensor) -> Tensor:
                """The Hessian times a direction in one datum's outputs, for all data, which do not depend on each other."""
                return torch.func.grad(lambda f: (slope(f) * direction).sum())(outputs)

            if self.grouping(outputs.shape[1:]).width == 1:  # targets do not depend on each other either
                curvature = along(torch.ones_like(outputs[0]))[..., None, None]
                return Elementwise(semidefinite_root(curvature, self.name).reshape(outputs.shape).to(outputs))
            units = torch.eye(entries, dtype=outputs.dtype, device=outputs.device)
            hessian = torch.vmap(along)(units.reshape(entries, *outputs.shape[1:])).flatten(2).transpose(0, 1)
        roots = semidefinite_root(hessian, "custom").to(outputs.dtype)
        return Explicit(roots.permute(2, 0, 1).reshape((entries, *outputs.shape)))


@dataclass(frozen=True, eq=False)
class FromLoss(Custom):
    """See :func:`custom`; a datum is one target, and all its outputs are that target's."""

    loss: Loss

    def grouping(self, event: torch.Size) -> Grouping:
        return Grouping((), event.numel())

    def require(self, outputs: Tensor, targets: Any, *, wait: bool = False, draws: Tensor | None = None) -> None:
        """Targets are whatever the loss takes; a loss that mixes data is refused, on every device."""
        if outputs.ndim == 0 or outputs.shape[0] == 0:
            raise ValueError(f"the custom likelihood got outputs {tuple(outputs.shape)}: the batch is empty")
        losses = self.loss(outputs, targets)
        if losses.shape != outputs.shape[:1]:
            raise ValueError(
                f"the custom nll returned {tuple(losses.shape)} for {outputs.shape[0]} data: return one loss a datum, [B], "
                "without averaging over the batch"
            )
        values, labels = unwrapped(outputs), unwrapped(targets)
        if (values.shape, labels.shape) != (outputs.shape, targets.shape):
            return  # inside vmap, where one datum cannot be told from another
        alone, together = self.loss(values[-1:], labels[-1:])[0], self.loss(values, labels)[-1]
        if bool((alone - together).abs() > torch.finfo(values.dtype).eps ** 0.5 * (1 + together.abs())):
            raise ValueError(
                "the custom nll of one datum depends on the rest of the batch: curvature is a sum over data; "
                "write a loss of one datum's outputs and target"
            )

    def log_prob(self, outputs: Tensor, targets: Any) -> Tensor:
        return -self.loss(outputs, targets)

    def log_prob_at_nodes(self, outputs: Tensor, targets: Any) -> Tensor:
        """One batch of outputs at a time, which is what the loss takes."""
        return torch.stack([self.log_prob(f, targets) for f in outputs])


@dataclass(frozen=True, eq=False)
class FromDistribution(Custom):
    """See :func:`custom`; where targets lie is known at outputs alone, see :meth:`support_at`."""

    distribution: Callable[[Tensor], Distribution]

    @_unvalidated()
    def at(self, outputs: Tensor) -> Distribution:
        """The distribution of targets given outputs; targets are checked by :meth:`require`.

        Raises:
            ValueError: a bare ``TransformedDistribution``, whose support torch takes for all that its last transform reaches.
        """
        found = self.distribution(outputs)
        if type(found) is TransformedDistribution:
            raise ValueError(
                "likelihoods.custom: torch does not know the support of a TransformedDistribution: return a subclass that has "
                "a property support, or a distribution with a name, such as LogNormal"
            )
        return found

    def grouping(self, event: torch.Size) -> Grouping:
        seen = self.at(torch.zeros(1, *event, device="cpu"))
        shape = tuple(seen.batch_shape[1:])
        if seen.event_shape or shape not in (tuple(event), tuple(event[:-1])):
            raise ValueError(
                f"likelihoods.custom: for outputs [B, {', '.join(map(str, event))}] the distribution has batch shape "
                f"{tuple(seen.batch_shape)} and event shape {tuple(seen.event_shape)}: return independent scalar targets, one "
                "for each output or one for each last axis of outputs"
            )
        return Grouping(shape, 1 if shape == tuple(event) else event[-1])

    def require_values(self, outputs: Tensor, targets: Tensor) -> None:
        if not is_hidden(outputs):
            known: Any = self.at(outputs.detach())
            of_each = (known.support.check(targets) & targets.isfinite()).reshape(-1, *targets.shape)
            self._refuse(~of_each.any(0), targets, f"in the support, {known.support}")

    @_unvalidated()
    def log_prob(self, outputs: Tensor, targets: Any) -> Tensor:
        known: Any = self.at(outputs)  # of which some say nothing of values outside their support
        return torch.where(known.support.check(targets), known.log_prob(targets), -torch.inf)

    def mean(self, outputs: Tensor) -> Tensor:
        return self._asked(outputs, "mean", attrgetter("mean"))

    def variance(self, outputs: Tensor) -> Tensor:
        return self._asked(outputs, "variance", attrgetter("variance"))

    def draw(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draws; torch's distributions know no generators, so that one is borrowed for the seed of the global one."""
        with torch.random.fork_rng([outputs.device] if outputs.is_cuda else [], enabled=generator is not None):
            if generator is not None:
                torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
            return self.at(outputs).sample()

    @_unvalidated()  # of a transformed distribution the base's support is narrower, by rounding
    def cdf(self, outputs: Tensor, values: Tensor) -> Tensor:
        return self._asked(outputs, "cdf", partial(_share_below, values=values.to(outputs)))

    def _asked(self, outputs: Tensor, what: str, question: Callable[[Any], Tensor]) -> Tensor:
        """The answer of the distribution at these outputs; what torch leaves out is refused."""
        known = self.at(outputs)
        try:
            return question(known)
        except NotImplementedError:
            raise ValueError(
                f"torch's {type(known).__name__} has no {what}: take that of predictive.sample(n), or pass a distribution that "
                f"has one, such as a subclass with {what}"
            ) from None

    def support_at(self, outputs: Tensor) -> Support:
        """The ends of the support of all targets together."""
        known: Any = self.at(outputs)
        low, high = _ends(known, outputs)
        return Support(float(low.min()), float(high.max()), bool(known.support.is_discrete))


def _ends(known: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """The ends of a distribution's support, where it says so, 0-d or one for each target."""
    ends = getattr(known.support, "lower_bound", REAL.low), getattr(known.support, "upper_bound", REAL.high)
    low, high = (torch.as_tensor(x, dtype=like.dtype, device=like.device) for x in ends)
    return low, high


def _share_below(known: Any, values: Tensor) -> Tensor:
    """The distribution function, of which torch gives no numbers, or wrong ones, outside of the support."""
    low, high = _ends(known, values)
    within = torch.maximum(torch.minimum(values, high), low)
    return torch.where(values < low, 0.0, torch.where(values >= high, 1.0, known.cdf(within)))


def custom(
    nll: Loss | None = None,
    *,
    distribution: Callable[[Tensor], Distribution] | None = None,
    output_hessian: Loss | None = None,
) -> Likelihood:
    """Make a likelihood from a distribution or from a loss.

    With a distribution everything works that works for the built-in ones: curvature, evidence, checks of targets, predictions
    with their density and moments, and quantiles where the distribution has a ``cdf``. A loss gives curvature, evidence and
    the density of predictions.

    Args:
        nll: ``nll(outputs [B, *event], targets) -> [B]``, the negative log-likelihood per datum, in nats, normalised.
        distribution: ``distribution(outputs) -> torch.distributions.Distribution`` of independent scalar targets: one for each
            output, or one for each last axis of outputs (such as a mean and a log scale). Outputs may have leading axes.
        output_hessian: ``output_hessian(outputs, targets) -> [B, E, E]``, E the number of entries of an event: the
            positive semidefinite expected Hessian in one datum's outputs. Default: the Hessian itself, by
            differentiation at the observed targets, which gives the generalised Gauss-Newton matrix of that loss. That of a
            mean and a log scale is positive semidefinite at no target, and has to be passed.

    Returns:
        A :class:`Likelihood`. It can be pickled if its functions can.

    Raises:
        ValueError: both or neither of ``nll`` and ``distribution``; when a Hessian is asked for that is not positive
            semidefinite or has another shape; a loss that is averaged over the batch or mixes data; draws or moments of
            a loss; where it is used a bare ``TransformedDistribution``, of which torch does not know the support (a subclass
            with a property ``support`` will do).

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> waiting = likelihoods.custom(distribution=lambda f: torch.distributions.Exponential((-f).exp()))
        >>> waiting.nll(torch.zeros(2, 1), torch.tensor([[1.0], [2.0]]))
        tensor([1., 2.])
        >>> waiting.predictive(torch.zeros(1, 1), torch.zeros(1, 1, 1)).quantile(0.5)  # log 2
        tensor([[0.6931]])
        >>> cauchy = likelihoods.custom(
        ...     lambda f, y: torch.log1p((f - y) ** 2).sum(-1) + 1.1447,
        ...     output_hessian=lambda f, y: torch.full((len(f), 1, 1), 0.5),
        ... )
        >>> cauchy.factors(torch.zeros(3, 1), torch.ones(3, 1)).shape
        torch.Size([1, 3, 1])
    """
    if nll is not None and distribution is None:
        return FromLoss(output_hessian, nll)
    if distribution is not None and nll is None:
        return FromDistribution(output_hessian, distribution)
    raise ValueError("likelihoods.custom: pass one of nll (a loss) and distribution")


def semidefinite_root(hessian: Tensor, name: str) -> Tensor:
    """R with ``R R^T = hessian``, ``[*, K, K]``.

    Raises:
        ValueError: a matrix that is not positive semidefinite.
    """
    wide = hessian.to(torch.promote_types(hessian.dtype, torch.float32))  # eigh knows no lower precision
    values, vectors = spectral(torch.linalg.eigh, wide)
    tolerance = 1e3 * torch.finfo(hessian.dtype).eps * values.abs().amax(-1, keepdim=True)
    if not is_hidden(values) and bool((values < -tolerance).any()):
        raise ValueError(
            f"the output Hessian of the {name} likelihood is not positive semidefinite "
            f"(eigenvalue {values.min().item():.3g}): pass output_hessian= with its positive part or "
            "expectation, or use curvature.hessian or empirical_fisher"
        )
    return vectors * values.clamp_min(0).sqrt()[..., None, :]


@dataclass(frozen=True, eq=False)
class Weighted(Likelihood):
    """See :func:`weighted`."""

    inner: Likelihood
    (  # what does not look at weights is the inner likelihood's own
        noise_variance, has_width,  # pyright: ignore[reportIncompatibleMethodOverride]
        support, methods, has_classes, default_method, log_prob, information, exact_root, mean, variance, draw, cdf, grouping,
        mixed, mixture_crps, log_prob_at_nodes, support_at, expected_mean,
    ) = (
        cast(Any, property(attrgetter(f"inner.{name}")))
        for name in (
            "noise_variance", "has_width",
            "support", "methods", "has_classes", "default_method", "log_prob", "information", "exact_root", "mean", "variance",
            "draw", "cdf", "grouping", "mixed", "mixture_crps", "log_prob_at_nodes", "support_at",
            "expected_mean",
        )
    )  # fmt: skip

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"weighted {self.inner.name}"

    def weights(self, targets: Any) -> Tensor | None:
        labels, weights = self._parts(targets)
        own = self.inner.weights(labels)
        return weights if own is None else weights * own

    def labels(self, targets: Any) -> Any:
        return self.inner.labels(self._parts(targets)[0])

    def require(self, outputs: Tensor, targets: Any, *, wait: bool = False, draws: Tensor | None = None) -> None:
        labels, weights = self._parts(targets)
        if is_readable(weights) and not bool((weights.isfinite() & (weights >= 0)).all()):
            raise ValueError("weighted: weights must be finite and not negative; leave a target out by the weight 0")
        self.inner.require(outputs, labels, wait=wait, draws=draws)

    def _parts(self, targets: Any) -> tuple[Tensor, Tensor]:
        """The targets and the weight of each; those of weight 0 are replaced by another one, which no support excludes."""
        if not (isinstance(targets, (tuple, list)) and len(targets) == 2 and isinstance(targets[0], Tensor)):
            raise ValueError(
                f"weighted: the targets are {checks.short(targets)}, not a pair: pass batches (inputs, (targets, weights))"
            )
        labels, weights = targets[0], torch.as_tensor(targets[1], device=targets[0].device)
        if weights.shape not in (labels.shape, labels.shape[:1]):
            raise ValueError(
                f"weighted: weights {tuple(weights.shape)} for targets {tuple(labels.shape)}: pass one for each datum, "
                f"{tuple(labels.shape[:1])}, or one for each target"
            )
        weights = weights.reshape(*weights.shape, *[1] * (labels.ndim - weights.ndim)).expand(labels.shape)
        if not labels.numel():
            return labels, weights
        left_out = weights == 0
        first = left_out.flatten().to(torch.int32).argmin(0, keepdim=True)  # no number to index with, for vmap
        return torch.where(left_out, torch.where(left_out.all(), 0, labels.flatten()[first]), labels), weights

    def scaled(self, scale: Tensor | float) -> Likelihood:
        return Weighted(self.inner.scaled(scale))

    def widened(self, outputs: Tensor, factor: float) -> tuple[Likelihood, Tensor]:
        wider, outputs = self.inner.widened(outputs, factor)
        return Weighted(wider), outputs

    def pooled(self, draws: Iterable[Tensor]) -> Predictive:
        return replace(self.inner.pooled(draws), likelihood=self)


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
