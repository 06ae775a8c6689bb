"""Predictions of a fitted model: Gaussian outputs, and new targets at them.

linearized       outputs N(f, J Lambda^-1 J^T), and every question about a target that they answer: a :class:`Prediction`
sobol, probit, bridge, quadrature   means of targets at these outputs, by rules that the likelihood has
linearized_mc    the same by draws of the outputs
mc               E of the likelihood's mean at draws of the parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds, predict
from bayesopt_chain.batches import flatten
from bayesopt_chain.fitting.batches import as_pair
from bayesopt_chain.fitting.model import Model
from bayesopt_chain.likelihoods import Likelihood, Predictive
from bayesopt_chain.likelihoods._quadrature import root_by_eigenvectors
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.predict._linearized import linearized_by

Method = Literal["sobol", "probit", "bridge", "quadrature", "linearized", "linearized_mc", "mc"]
ANY_LIKELIHOOD = ("linearized", "linearized_mc", "mc")
NUMBERS_AT_ONCE = 2**24  # of outputs at nodes; data beyond that are looked at in parts


class Outputs(NamedTuple):
    """Outputs of the linearised model, which are Gaussian.

    Attributes:
        mean: ``[N, *event]``.
        covariance: for the parameters' uncertainty, ``[N, E, E]`` for E outputs of a datum; joint over data
            ``[N E, N E]``, data first.
    """

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class Prediction:
    """New targets at Gaussian outputs: ``p(y) = E_f p(y | f)``.

    Attributes:
        outputs: mean and covariance of the model's outputs.
        likelihood: of targets given outputs, with the noise that was tuned.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> from bayesopt_chain.fitting import Outputs, Prediction
        >>> outputs = Outputs(torch.zeros(1, 1), torch.full((1, 1, 1), 0.75))
        >>> prediction = Prediction(outputs, likelihoods.gaussian(0.25))
        >>> prediction.variance, prediction.interval(0.95)
        (tensor([[1.]]), (tensor([[-1.9600]]), tensor([[1.9600]])))
        >>> target = torch.ones(1, 1)
        >>> prediction.log_prob(target), prediction.quantile(0.5), prediction.crps(target)
        (tensor([[-1.4189]]), tensor([[0.]]), tensor([[0.6024]]))
        >>> prediction.sample(5, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([5, 1, 1])

        A likelihood of classes has rules of its own for their probabilities:

        >>> classes = Prediction(Outputs(torch.tensor([[1.0, 0.0]]), torch.eye(2)[None]), likelihoods.categorical())
        >>> classes.expected_mean("probit").sum()
        tensor(1.)
    """

    outputs: Outputs
    likelihood: Likelihood

    @property
    def mean(self) -> Tensor:
        """Of a new target, ``[N, *positions]``; for classes their probabilities, ``[N, *, C]``."""
        return self._of(lambda p: p.mean)

    @property
    def variance(self) -> Tensor:
        """Of a new target, noise included, shaped like :attr:`mean`."""
        return self._of(lambda p: p.variance)

    @property
    def noise(self) -> Tensor:
        """The part of the variance that no data remove, ``E Var[y | f]``: for Gaussian noise its variance."""
        return self._of(lambda p: p.noise)

    def log_prob(self, targets: Any) -> Tensor:
        """The log density of new targets.

        Args:
            targets: as the likelihood takes them, ``[N, *positions]``.

        Returns:
            ``[N, *positions]``, in nats, times the targets' weights; differentiable. Minus its sum is the negative log
            predictive density.

        Raises:
            ValueError: targets of another shape, or values that they cannot have.
        """
        self.likelihood.require(self.outputs.mean, targets, wait=True)
        return self._of(lambda p, y: p.log_prob(y), targets)

    @kinds.takes(level=kinds.real("(0, 1)"))
    def quantile(self, level: float) -> Tensor:
        """The value below which a new target lies with probability ``level``.

        Args:
            level: between 0 and 1, both excluded.

        Returns:
            ``[N, *positions]``, in the targets' units; not differentiated.

        Raises:
            ValueError: a level out of range; classes without an order.
        """
        return self._of(lambda p: p.quantile(level))

    @kinds.takes(level=kinds.real("(0, 1)"))
    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that holds a new target with probability ``level`` (counts: at least).

        Args:
            level: between 0 and 1. Default 0.9.

        Returns:
            ``(low, high)``, each ``[N, *positions]``.

        Raises:
            ValueError: as :meth:`quantile`.
        """
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def crps(self, targets: Any) -> Tensor:
        """The continuous ranked probability score: how far the predicted distribution is from what came.

        Args:
            targets: ``[N, *positions]``.

        Returns:
            Like the targets, in their units, times their weights; smaller is better. For counts and classes in order it is
            the ranked probability score.

        Raises:
            ValueError: as :meth:`quantile` and :meth:`log_prob`.
        """
        self.likelihood.require(self.outputs.mean, targets, wait=True)
        return self._of(lambda p, y: p.crps(y), targets)

    @kinds.takes()
    def sample(self, samples: int = 100, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws of new targets. Those of one datum's outputs belong together; different data are drawn independently.

        Args:
            samples: how many. Default 100.
            generator: source of randomness. Default: torch's global generator.

        Returns:
            ``[samples, N, *positions]``.

        Raises:
            ValueError: fewer than one sample; a custom likelihood that cannot draw.
        """
        drawn = drawn_outputs(*self.outputs, samples, generator)
        labels = self.likelihood.draw(drawn.flatten(0, 1), generator)
        return labels.reshape(*drawn.shape[:2], *labels.shape[1:])

    @kinds.takes(method=kinds.TEXT)
    def expected_mean(self, method: str | None = None) -> Tensor:
        """The mean by one of the likelihood's own rules, such as "probit"; see :class:`bayesopt_chain.likelihoods.Likelihood`.

        Args:
            method: one of ``likelihood.methods``. Default: the first.

        Returns:
            Shaped like :attr:`mean`.

        Raises:
            ValueError: a rule that the likelihood has not.
        """
        return self.likelihood.expected_mean(*self.outputs, method)

    def _of(self, question: Callable[..., Tensor], *targets: Any) -> Tensor:
        """The answer of the predictive distribution, for as many data at once as fit."""
        mean, covariance = self.outputs
        first: Predictive = self.likelihood.predictive(mean[:1], covariance[:1])
        at_once = max(1, NUMBERS_AT_ONCE // first.outputs.numel())
        parts = []
        for start in range(0, len(mean), at_once):
            some = slice(start, start + at_once)
            cut = [optree.tree_map(lambda x, some=some: x[some], tree) for tree in targets]
            parts.append(question(self.likelihood.predictive(mean[some], covariance[some]), *cut))
        return torch.cat(parts)


def joined(parts: Sequence[Prediction]) -> Prediction:
    """The predictions of several batches as one."""
    outputs = Outputs(*(torch.cat(xs) for xs in zip(*(part.outputs for part in parts))))
    return Prediction(outputs, parts[0].likelihood)


def method_for(method: str | None, likelihood: Likelihood) -> str:
    """The method, by default the one that suits the likelihood.

    Raises:
        ValueError: one that does not exist, or that the likelihood has no meaning for.
    """
    if method is None:
        return likelihood.default_method
    known = (*likelihood.methods, *ANY_LIKELIHOOD)
    if method in known:
        return method
    if method in ("sobol", "probit", "bridge", "quadrature"):
        raise ValueError(
            f"predict: method={method!r} has no meaning for a {likelihood.name} likelihood: use one of "
            f"{', '.join(map(repr, known))}"
        )
    raise ValueError(f"predict: method={method!r}: pass one of {', '.join(map(repr, known))}")


def predicted(
    model: Model,
    posterior: Gaussian,
    batch: Any,
    likelihood: Likelihood,
    method: str,
    samples: int,
    generator: torch.Generator | None,
) -> Tensor | Prediction:
    """One batch's predictions."""
    if method == "mc":
        seen = model.seen_by_head(batch)
        outputs = predict.monte_carlo(model.forward, posterior, seen, samples=samples, generator=generator)
        return likelihood.mean(outputs.to(model.dtype)).mean(0)
    outputs = linearized(model, posterior, batch)
    if method == "linearized_mc":
        return likelihood.mean(drawn_outputs(*outputs, samples, generator)).mean(0)
    prediction = Prediction(outputs, likelihood)
    return prediction if method == "linearized" else prediction.expected_mean(method)


def linearized(model: Model, posterior: Gaussian, batch: Any, joint: bool = False) -> Outputs:
    """One batch's outputs, in the module's precision."""
    found = linearized_by(model.checks, model.forward, posterior, model.seen_by_head(batch), joint)
    return Outputs(*(x.to(model.dtype) for x in found))


def drawn_outputs(mean: Tensor, covariance: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """Draws of linearised outputs, ``[S, N, *event]``; a covariance may be singular."""
    if samples < 1:
        raise ValueError(f"samples={samples}: pass at least 1")
    root = root_by_eigenvectors(covariance)
    shape = (samples, *covariance.shape[:-1])
    noise = torch.randn(shape, dtype=mean.dtype, device=mean.device, generator=generator)
    return mean + torch.einsum("bij,sbj->sbi", root, noise).reshape(samples, *mean.shape)


def batches_of(data: Any, read: Callable[[Any], Any] = as_pair) -> Iterable:
    """Batches ``(inputs, targets)`` of a tensor of inputs, of one batch (a tuple or a mapping), or of an iterable of them;
    ``read`` makes a pair of each."""
    if isinstance(data, (Tensor, tuple, Mapping)):
        return [_with_data(read(data))]
    return (_with_data(read(batch)) for batch in data)


def _with_data(pair: Any) -> Any:
    if any(isinstance(leaf, Tensor) and leaf.ndim and not leaf.shape[0] for leaf in flatten(pair)[0]):
        raise ValueError("predict: the batch is empty: pass at least one datum")
    return pair
