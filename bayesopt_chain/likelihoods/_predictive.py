r"""The predictive distribution of new targets, and every question that it answers: what every method of this library returns.

The outputs f of a model are known as a Gaussian (linearised models: Laplace, filters) or as draws with weights (chains,
ensembles), and a target follows them by its likelihood:

    p(y) = E_f p(y | f)
    numbers    Var y = E Var[y | f]  (aleatoric)  +  Var E[y | f]   (epistemic)
    classes    H[E p] = E H[p]       (aleatoric)  +  the mutual information of label and outputs (epistemic)

Which part more data could remove is Depeweg, Hernandez-Lobato, Doshi-Velez and Udluft (2018). Of Gaussian outputs the
likelihood says by which nodes, or in closed form, they are integrated over. So every question is answered by draws or nodes f_s
with weights w_s, target by target, and a Gaussian asks its nodes:

    p(y) = sum_s w_s p(y | f_s),      E y = sum_s w_s E[y | f_s],      F(y) = sum_s w_s P(Y <= y | f_s)
    Var y = sum_s w_s { Var[y | f_s] + (E[y | f_s] - E y)^2 }
    CRPS(F, y) = integral (F(x) - 1{x >= y})^2 dx                    (Gneiting and Raftery, 2007)

Quantiles are found by bisection of the numbers of float64 in their order. The score is in closed form for mixtures of
Gaussians, a sum for counts and classes in order, and otherwise an integral on each side of y.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.likelihoods._quadrature import (
    FEW,
    MANY,
    NUMBERS_AT_ONCE,
    UNLIKELY,
    TooFew,
    fine_grid,
    require_enough,
    root_by_eigenvectors,
)
from bayesopt_chain.tracing import is_hidden
from bayesopt_chain.trees import upcast

AT_ONCE = 2**18  # outputs at which a score takes distribution functions or densities at once
POINTS = (129, 513, 2049, 8193)  # of each of the two integrals of a score
CLOSE = 1e-6  # how close every other point has to come, which is about the square root of a rule's error
STRETCH = 14.0  # integrals reach sinh(14) = 600,000 interquartile ranges out
BISECTIONS = 64  # of all numbers in float64, to the last bit
TAIL = 1e-4  # levels nearer to 0 or 1 are so coarse in float32 that quantiles would be wrong
MOST_COUNTS = 10**6
COARSE = 1e-6  # of a class or count: what is smaller may be the rounding of a probability of nearly 1
PAIRED = 4097  # nodes of which a score adds up all pairs


class Outputs(NamedTuple):
    """Outputs of a model that are Gaussian.

    Attributes:
        mean: ``[N, *event]``.
        covariance: for the parameters' uncertainty, ``[N, E, E]`` for E outputs of a datum; joint over data ``[N E, N E]``,
            data first; of independent outputs that are many the variances alone, ``[N, E]``.
    """

    mean: Tensor
    covariance: Tensor

    @property
    def is_joint(self) -> bool:
        """Whether the covariance is that of all data together."""
        return self.covariance.shape == (self.mean.numel(), self.mean.numel())

    @property
    def variance(self) -> Tensor:
        """Of each output, ``[N, E]``."""
        blocks = self.blocks
        return blocks if blocks.ndim == 2 else blocks.diagonal(dim1=-2, dim2=-1)

    @property
    def blocks(self) -> Tensor:
        """The covariance of each datum's own outputs, ``[N, E, E]``; their variances ``[N, E]`` where no more is held."""
        if not self.is_joint:
            return self.covariance
        shape = (len(self.mean), self.mean.shape[1:].numel()) * 2
        return self.covariance.reshape(shape).diagonal(dim1=0, dim2=2).movedim(-1, 0)

    @checks.takes()
    def draw(self, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the outputs, together for all data where the covariance is joint; it may be singular.

        Args:
            samples: how many.
            generator: source of randomness. Default: torch's global generator.

        Returns:
            ``[samples, N, *event]``.

        Raises:
            ValueError: fewer than one sample.

        Example:
            >>> import torch
            >>> from bayesopt_chain.likelihoods import Outputs
            >>> same = Outputs(torch.zeros(2, 1), torch.ones(2, 2)).draw(3)  # two data that are perfectly correlated
            >>> torch.allclose(same[:, 0], same[:, 1])
            True
        """
        shape = (samples, *(self.covariance.shape[:1] if self.is_joint else self.covariance.shape[:2]))
        noise = torch.randn(shape, dtype=self.mean.dtype, device=self.mean.device, generator=generator)
        if self.covariance.ndim == 2 and not self.is_joint:
            return self.mean + (self.covariance.sqrt() * noise).reshape(samples, *self.mean.shape)
        return self.mean + (root_by_eigenvectors(self.covariance) @ noise[..., None]).reshape(samples, *self.mean.shape)


def at_nodes(question: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let draws answer a question; of Gaussian outputs nodes, for as many data at once as fit, and as many as it takes.

    What it is asked with are tensors with a row a datum, and numbers, these by name too.

    Raises:
        ValueError: a likelihood that is too narrow for the outputs.
    """

    @functools.wraps(question)
    def asked(self: Predictive, *given: Any, **named: Any) -> Tensor:
        if not isinstance(self.outputs, Outputs):
            return question(self, *given, **named).to(self.outputs.dtype)
        points = FEW
        while points <= MANY:
            try:
                answers = [question(nodes, *cut, **named) for nodes, cut in self._nodes(points, given)]
                return torch.cat(answers).to(self.outputs.mean.dtype)
            except TooFew:
                points = 2 * points - 1
        raise ValueError(
            f"the {self.likelihood.name} likelihood is too narrow for these outputs, of standard deviations of up to "
            f"{float(self.outputs.variance.amax().sqrt()):.3g}, or a target too far from them: {MANY} points do not integrate "
            "it (they do up to about 10,000 of its widths). Look at what the outputs are so uncertain of, or ask "
            "likelihood.mixture of draws of them"
        )

    return asked


@dataclass(frozen=True, eq=False)
class Predictive:
    """New targets ``p(y) = E_f p(y | f)``, made by :meth:`bayesopt_chain.posterior.FittedLaplace.predictive`, by the
    ``predict`` of an ensemble, and for outputs of your own by ``likelihood.predictive`` and ``likelihood.mixture``.

    N data have targets at positions ``[N, *positions]``: one for each output, or one for each group of outputs (the classes of
    a token, a mean with its log variance).

    Attributes:
        likelihood: of targets given outputs, with its noise.
        outputs: a Gaussian, :class:`Outputs`, or draws ``[S, N, *event]``; held in float32 at least.
        log_weights: of the draws, ``[S]``, whose exponentials sum to 1; ``None`` for a Gaussian.
        mean_entropy: where draws of classes were added up (``likelihood.pooled``), the mean of their entropies,
            ``[N, *positions]`` in nats. Outputs are then ``[1, N, *event]``, the logarithms of the mixture's probabilities, and
            draws of targets are independent.
        moments: of nodes that stand for a Gaussian, ``E y``, ``E Var[y | f]`` and ``Var E[y | f]``, shaped like the mean, where
            they are known in closed form.
        points: of the one rule that such nodes are, whose answers must be those of every other point (``_quadrature.py``);
            else 0.
        beyond: the logarithm of what nodes that go no further may have left out of a density at most, shaped like the targets;
            ``None`` where nothing matters.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> p = likelihoods.gaussian(0.25).predictive(torch.zeros(1, 1), torch.full((1, 1, 1), 0.75))
        >>> p.variance, p.aleatoric, p.epistemic
        (tensor([[1.]]), tensor([[0.2500]]), tensor([[0.7500]]))
        >>> target = torch.ones(1, 1)
        >>> p.log_prob(target), p.quantile(0.5), p.crps(target)
        (tensor([[-1.4189]]), tensor([[0.]]), tensor([[0.6024]]))
        >>> p.sample(5, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([5, 1, 1])

        A mixture over draws answers the same questions:

        >>> q = likelihoods.bernoulli().mixture(torch.tensor([-9.0, 9.0])[:, None, None])
        >>> q.probabilities, q.epistemic  # the draws are sure and disagree: log 2
        (tensor([[0.5000]]), tensor([[0.6920]]))
    """

    likelihood: Any
    outputs: Any
    log_weights: Any = None
    mean_entropy: Tensor | None = None
    moments: tuple[Tensor, Tensor, Tensor] | None = None
    points: int = 0
    beyond: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "outputs", upcast(self.outputs))

    @property
    @at_nodes
    def mean(self) -> Tensor:
        """``E y``, ``[N, *positions]``; for classes their probabilities, ``[N, *positions, C]``."""
        return self._average(self.likelihood.mean(self.outputs)) if self.moments is None else self.moments[0]

    @property
    @at_nodes
    def variance(self) -> Tensor:
        """``Var y``, noise included, in squared units of the target, shaped like :attr:`mean`."""
        return self._noise + self._spread

    @checks.takes(joint=checks.BOOL)
    def covariance(self, joint: bool = False) -> Tensor:
        """The covariance of the numbers that a target's mean has, noise included.

        It is known for draws, and for Gaussian outputs with Gaussian noise of known variance.

        Args:
            joint: that of all data together, for which Gaussian outputs must be joint themselves. Default False.

        Returns:
            ``[N, P, P]`` for P numbers of a datum, or ``[N P, N P]``, data first.

        Raises:
            ValueError: Gaussian outputs that are not joint, or with another likelihood (pass draws of them to
                ``likelihood.mixture``); draws that were added up, of which nothing is known from one target to another.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> p = likelihoods.gaussian(0.5).mixture(torch.tensor([[[0.0], [1.0]], [[2.0], [3.0]]]))
            >>> p.covariance(joint=True)
            tensor([[1.5000, 1.0000],
                    [1.0000, 1.5000]])
        """
        if self.mean_entropy is not None:
            raise ValueError(
                "covariance: the draws of these outputs were added up and not kept: predict fewer data at once"
            )
        noise = self._noise.reshape(1 if joint else len(self._first), -1)
        if not isinstance(self.outputs, Outputs):
            means = self.likelihood.mean(self.outputs).reshape(len(self.outputs), *noise.shape)
            weights = self.log_weights.exp().to(means)
            means = means - torch.tensordot(weights, means, dims=1)
            between = torch.einsum("s,sni,snj->nij", weights, means, means)
        elif self.likelihood.noise_variance is None:
            raise ValueError(
                f"covariance: of a {self.likelihood.name} likelihood at Gaussian outputs only the variance is known: draw "
                "outputs (predictive.outputs.draw(samples)) and pass them to likelihood.mixture"
            )
        elif joint and not self.outputs.is_joint:
            raise ValueError("covariance: these outputs are of each datum alone: predict with joint=True")
        else:
            between = self.outputs.covariance[None] if joint else self.outputs.blocks
        if between.ndim == 2:  # variances of independent outputs
            between = torch.diag_embed(between)
        found = between + torch.diag_embed(noise)
        return found[0] if joint else found

    @property
    def probabilities(self) -> Tensor:
        """Of the classes, ``[N, *positions, C]``; of yes-or-no targets that of yes, ``[N, *positions]``.

        Raises:
            ValueError: targets that are no classes.
        """
        if not self.likelihood.has_classes:
            raise ValueError(
                f"probabilities: targets of a {self.likelihood.name} likelihood are no classes: use mean, quantile or cdf"
            )
        return self.mean

    @property
    def entropy(self) -> Tensor:
        """Of the label, of classes ``[N, *positions]``, in nats."""
        return self._entropy(self.probabilities)

    @property
    @at_nodes
    def aleatoric(self) -> Tensor:
        """What no data remove: of classes the mean entropy in nats, ``[N, *positions]``, otherwise the noise's variance."""
        if not self.likelihood.has_classes:
            return self._noise
        if self.mean_entropy is not None:
            return self.mean_entropy
        return self._average(self._entropy(self.likelihood.mean(self.outputs)))

    @property
    def epistemic(self) -> Tensor:
        """What more data could remove, shaped like :attr:`aleatoric`: of classes the mutual information of label and outputs in
        nats, otherwise the variance of the mean."""
        return (self.entropy - self.aleatoric).clamp_min(0) if self.likelihood.has_classes else self._spread

    def log_prob(self, targets: Any) -> Tensor:
        """The log density of new targets.

        Args:
            targets: as the likelihood takes them, ``[N, *positions]``.

        Returns:
            ``[N, *positions]``, in nats, times the targets' weights; differentiable. Minus its mean is the negative log
            predictive density.

        Raises:
            ValueError: targets of another shape, or values that they cannot have.
        """
        return self._weighted(self._log_density, targets)

    def crps(self, targets: Any) -> Tensor:
        """The continuous ranked probability score: how far the predicted distribution is from what came.

        Of a Gaussian it is in closed form, of counts and classes in order a sum (their ranked probability score), of others an
        integral, to about 1e-6 of the predictive's width (1e-3 where draws are a thousand times as far apart as their noise).

        Args:
            targets: ``[N, *positions]``.

        Returns:
            Like the targets, in their units, times their weights; smaller is better. Differentiable for Gaussian noise.

        Raises:
            ValueError: targets without an order, such as classes; a likelihood without ``cdf``; counts beyond a million; as
                :meth:`log_prob`.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> p = likelihoods.gaussian(0.5).predictive(torch.zeros(1, 1), torch.full((1, 1, 1), 0.5))
            >>> p.crps(torch.zeros(1, 1))  # (sqrt(2) - 1) / sqrt(pi)
            tensor([[0.2337]])
        """
        return self._weighted(self._score, targets)

    @checks.takes(values=checks.VALUES)
    def cdf(self, values: Tensor) -> Tensor:
        """The distribution function of a new target, ``P(y <= value)``.

        Args:
            values: in the targets' units, shaped like the targets, ``[N, *positions]``.

        Returns:
            Probabilities, like the values.

        Raises:
            ValueError: a likelihood without ``cdf``.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.gaussian(0.5).predictive(torch.zeros(1, 1), torch.full((1, 1, 1), 0.5)).cdf(torch.zeros(1, 1))
            tensor([[0.5000]])
        """
        shape = (len(self._first), *self.likelihood.grouping(self._first.shape[1:]).positions)
        if values.dtype == torch.bool or not checks.is_spread(values.shape, shape):
            raise ValueError(
                f"cdf: values must be numbers of shape {shape}, got shape {tuple(values.shape)}, {values.dtype}"
            )
        return self._below(values.expand(shape))

    @checks.takes(level=checks.number("(0, 1)"))
    @at_nodes
    @torch.no_grad()
    def quantile(self, level: float) -> Tensor:
        """The smallest value y with ``P(Y <= y) >= level``, ``[N, *positions]``, in the targets' units; not differentiated.

        Args:
            level: between 0 and 1, both excluded.

        Returns:
            Values, counts for likelihoods of counts; infinite where no number of their dtype is one.

        Raises:
            ValueError: a level out of range; targets without an order, such as classes; a likelihood without ``cdf``.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.poisson().predictive(torch.zeros(1, 1), torch.full((1, 1, 1), 1e-6)).quantile(0.9)
            tensor([[2.]])
        """
        draws, support = self.outputs, self._ordered("quantile")
        if draws.dtype != torch.float64 and not TAIL < level < 1 - TAIL:
            # in single precision weights add up to one within 1e-7, which is a tail
            log_weights = self.log_weights.double().log_softmax(0)
            return replace(self, outputs=draws.double(), log_weights=log_weights).quantile(level)
        largest = torch.finfo(draws.dtype).max
        ends = max(support.low - support.is_discrete, -largest), min(support.high, largest)  # below the least count
        each = torch.zeros_like(self._below(draws.new_zeros(())), dtype=torch.float64)
        low, high = (_in_order(torch.full_like(each, end).view(torch.int64)) for end in ends)

        def value(rank: Tensor) -> Tensor:
            x = _in_order(rank).view(torch.float64)
            return (x.floor() if support.is_discrete else x).to(draws.dtype) + 0.0  # no count is -0

        for _ in range(BISECTIONS):
            if support.is_discrete and not bool((value(high) - value(low) > 1).any()):
                break
            middle = (low & high) + ((low ^ high) >> 1)  # of which the sum may be no integer
            reached = self._below(value(middle)) >= level
            low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
        found, below = (self._below(value(u)) for u in (high, low))
        outside = torch.where(found < level, math.inf, -math.inf).to(found) + 0 * found  # NaN stays
        return torch.where((found >= level) & (below < level), value(high), outside)

    @checks.takes(level=checks.number("(0, 1)"))
    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that holds a new target with probability ``level`` (counts: at least).

        Args:
            level: between 0 and 1. Default 0.9.

        Returns:
            ``(low, high)``, each ``[N, *positions]``, in the targets' units.

        Raises:
            ValueError: as :meth:`quantile`.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> p = likelihoods.gaussian(0.5).predictive(torch.zeros(1, 1), torch.full((1, 1, 1), 0.5))
            >>> p.interval(0.95)
            (tensor([[-1.9600]]), tensor([[1.9600]]))
        """
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    @checks.takes()
    def sample(self, samples: int = 100, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws of new targets.

        Those of one draw of the outputs, and of joint outputs, belong together across data; different data of Gaussian outputs
        that are not joint are independent.

        Args:
            samples: how many. Default 100.
            generator: source of randomness, on the device of the outputs. Default: torch's global generator.

        Returns:
            ``[samples, N, *positions]``.

        Raises:
            ValueError: fewer than one sample; a custom likelihood that cannot draw.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.gaussian(0.5).mixture(torch.zeros(2, 3, 1)).sample(4).shape
            torch.Size([4, 3, 1])
        """
        if isinstance(self.outputs, Outputs):
            drawn = self.outputs.draw(samples, generator)
        else:
            weights = self.log_weights.exp().to(self.outputs.device)
            drawn = self.outputs[torch.multinomial(weights, samples, True, generator=generator)]
        labels = self.likelihood.draw(drawn.flatten(0, 1), generator)
        return labels.reshape(*drawn.shape[:2], *labels.shape[1:])

    @property
    def _first(self) -> Tensor:
        """One set of outputs, ``[N, *event]``."""
        return self.outputs.mean if isinstance(self.outputs, Outputs) else self.outputs[0]

    def _nodes(self, points: int, given: tuple[Any, ...]) -> Iterator[tuple[Predictive, tuple[Any, ...]]]:
        """Nodes that stand for Gaussian outputs, some data after the other, with their rows of what was given."""
        mean, covariance = self.outputs.mean, self.outputs.blocks
        if points > FEW:  # rounding in single precision would look as if points were too few for ever
            mean, covariance = mean.double(), covariance.double()
        at_once = max(1, NUMBERS_AT_ONCE // max(1, 2 * points * mean[:1].numel()))  # 2 PAIRS points for several outputs
        cuts = [x.split(at_once) if isinstance(x, Tensor) else repeat(x) for x in given]
        for m, c, *cut in zip(mean.split(at_once), covariance.split(at_once), *cuts):
            yield self.likelihood.mixed(Outputs(m, c), points), tuple(cut)

    def _average(self, values: Tensor, unit: Any = None) -> Tensor:
        """``sum_s w_s values_s`` of values ``[S, *]``; errors count beside a ``unit`` of them, by default the sum's own."""
        weights = self.log_weights.to(values.dtype).exp()
        if self.points > FEW:  # far out a value may be infinite where no weight is left
            values = torch.where(weights.reshape(-1, *[1] * (values.ndim - 1)) > 0, values, 0)
        found = torch.tensordot(weights, values, dims=1)
        if self.points:
            if unit is None:  # what the terms add up to that do not cancel
                unit = torch.tensordot(weights[::16], values[::16].abs(), dims=1) / weights[::16].sum()
                support = self.likelihood.support_at(self.outputs)
                if support is None or support.is_discrete:
                    unit = unit + COARSE
            require_enough(found, torch.tensordot(weights[::2], values[::2], dims=1) / weights[::2].sum(), unit)
        return found

    @property
    @at_nodes
    def _noise(self) -> Tensor:
        """``E Var[y | f]``, shaped like the mean: the part of the variance that no data remove."""
        return self._average(self.likelihood.variance(self.outputs)) if self.moments is None else self.moments[1]

    @property
    @at_nodes
    def _spread(self) -> Tensor:
        """``Var E[y | f]``, shaped like the mean: the part of the variance that more data could remove."""
        if self.moments is not None:
            return self.moments[2]
        means = self.likelihood.mean(self.outputs)
        return self._average((means - self._average(means)).square())

    def _entropy(self, p: Tensor) -> Tensor:
        if self.likelihood.support is None:
            return torch.special.entr(p).sum(-1)
        return torch.special.entr(p) + torch.special.entr(1 - p)

    def _weighted(self, question: Callable[[Any], Tensor], targets: Any) -> Tensor:
        """What is asked of targets, each times its weight."""
        draws = None if isinstance(self.outputs, Outputs) else self.outputs
        self.likelihood.require(self._first, targets, wait=True, draws=draws)
        return self.likelihood.counted(question(self.likelihood.labels(targets)), targets)

    @at_nodes
    def _log_density(self, labels: Any) -> Tensor:
        each = self.likelihood.log_prob_at_nodes(self.outputs, labels)
        log_weights = self.log_weights.to(each).reshape(-1, *[1] * (each.ndim - 1))
        if self.points > FEW:
            each = torch.where(each.isnan() & (log_weights < UNLIKELY), -math.inf, each)
        if self.points:
            near = each - each.amax(0) + log_weights  # weights would be lost beside densities of -1e20
            of_half = near[::2].logsumexp(0) - log_weights[::2].logsumexp(0)
            require_enough(torch.ones_like(of_half), (of_half - near.logsumexp(0)).exp(), 0)
        found = (each + log_weights).logsumexp(0)
        least = found.detach() + math.log(torch.finfo(found.dtype).eps)
        if self.beyond is not None and not is_hidden(found) and bool((self.beyond > least).any()):
            raise TooFew
        return found

    @at_nodes
    def _below(self, values: Tensor) -> Tensor:
        """The distribution function."""
        return self._average(self.likelihood.cdf(self.outputs, values).to(self.outputs.dtype), unit=1.0)

    @at_nodes
    def _score(self, labels: Tensor) -> Tensor:
        support = self._ordered("crps")
        labels = labels.to(self.outputs.dtype) if labels.is_floating_point() else labels
        closed = getattr(self.likelihood, "mixture_crps", None)
        if closed is not None:
            if self.points > PAIRED:
                raise ValueError(
                    f"crps: {PAIRED} points do not integrate these outputs, whose log variances are so uncertain that the "
                    "score is beyond 1e15 noise scales: look at what they were computed from, or use log_prob"
                )
            found = closed(self.outputs, self.log_weights, labels)
            if self.points:
                require_enough(found, closed(self.outputs[::2], self.log_weights[::2].log_softmax(0), labels), found)
            return found
        return (self._summed_score if support.is_discrete else self._integrated_score)(labels, support)

    def _ordered(self, what: str) -> Any:
        support = self.likelihood.support_at(self.outputs)
        if support is None:
            raise ValueError(
                f"{what}: targets of a {self.likelihood.name} likelihood have no order: use log_prob, or the "
                "probabilities in mean"
            )
        return support

    def _summed_score(self, y: Tensor, support: Any) -> Tensor:
        draws = self.outputs
        ends = torch.full_like(y, min(support.high, MOST_COUNTS), dtype=torch.float64)
        if support.high == math.inf:
            rest = max(1e-9, 16 * torch.finfo(draws.dtype).eps)  # to which weights of a mixture add up to one
            ends = self.quantile(1 - rest).maximum(y).to(torch.float64)
        if not float(ends.max()) < MOST_COUNTS:
            raise ValueError(f"crps: counts up to {float(ends.max()):g} would have to be added up; use log_prob")
        total, below = torch.zeros_like(ends), torch.zeros_like(ends)
        first, last = int(support.low), int(ends.max())
        while first <= last:
            # data whose counts are added up are left out from here on
            rows = (ends.reshape(len(y), -1).amax(1) >= first).nonzero()[:, 0]
            outputs = draws[:, rows].to(torch.float64)
            some = min(max(1, AT_ONCE // outputs.numel()), last + 1 - first)  # counts at once, as if of further data
            counts = torch.arange(first, first + some, dtype=torch.float64, device=y.device)
            each = counts.reshape(-1, *[1] * y.ndim).expand(some, *y[rows].shape)
            nodes = replace(self, outputs=outputs.repeat(1, some, *[1] * (draws.ndim - 2)))
            # densities are much cheaper than distribution functions
            masses = nodes._average(
                self.likelihood.log_prob_at_nodes(nodes.outputs, each.flatten(0, 1)).exp(), unit=1.0
            )
            reached = torch.cat([below[rows][None], masses.unflatten(0, (some, -1))]).cumsum(0)
            total[rows] += (reached[1:] - (each >= y[rows]).to(total.dtype)).square().sum(0)
            below[rows] = reached[-1]
            first += some
        return total

    def _integrated_score(self, y: Tensor, support: Any) -> Tensor:
        """Over ``x = middle + width sinh(u)``, fine near the middle and wide far out, u from y to each end of the support, by a
        trapezoidal rule of so many points as every other one confirms, as components that are narrow and far apart need."""
        draws = self.outputs
        middle = self.quantile(0.5)
        width = (self.quantile(0.75) - self.quantile(0.25)).clamp_min(torch.finfo(middle.dtype).tiny)
        many = replace(self, outputs=draws[:, None])  # of values [points, N, *]
        start, found = torch.asinh((y - middle) / width), torch.zeros_like(middle)

        def below(u: Tensor) -> Tensor:
            at_once = max(1, AT_ONCE // max(1, draws.numel()))
            return torch.cat([many._below(x) for x in (middle + width * u.sinh()).split(at_once)])

        for points in POINTS:
            z, log_weights = (x.to(draws).reshape(-1, *[1] * y.ndim) for x in fine_grid(points))
            terms = torch.zeros_like(z)
            for end, sign in ((support.low, -1.0), (support.high, 1.0)):
                stop = torch.asinh((end - middle) / width) if math.isfinite(end) else sign * STRETCH
                u = start + torch.special.ndtr(z) * (stop - start)
                missed = below(u) if sign < 0 else 1 - below(u)
                terms = terms + log_weights.exp() * (stop - start).abs() * missed.square() * u.cosh()
            found = terms.sum(0)
            if not bool(((2 * terms[::2].sum(0) - found).abs() > CLOSE * found).any()):
                break
        return found * width


def _in_order(bits: Tensor) -> Tensor:
    """The bits of float64 numbers as integers that rise with them; its own inverse."""
    return torch.where(bits < 0, bits ^ (2**63 - 1), bits)
