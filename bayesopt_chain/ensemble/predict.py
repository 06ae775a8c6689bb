r"""Predictions of an ensemble: a mixture over its draws, with what data could remove and what they could not.

numbers    Var y = E Var[y | theta]  (aleatoric)  +  Var E[y | theta]   (epistemic)
classes    H[E p] = E H[p]           (aleatoric)  +  the mutual information of label and parameters (epistemic)
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.likelihoods import Likelihood, Predictive


class EnsemblePrediction(Predictive):
    """New targets under all draws of an ensemble, made by :meth:`Ensemble.predict`.

    Besides what is here it has ``mean``, ``variance``, ``log_prob``, ``cdf``, ``quantile``, ``interval`` and ``crps`` of
    :class:`bayesopt_chain.likelihoods.Predictive`. It says which part of the uncertainty more data could remove (Depeweg,
    Hernandez-Lobato, Doshi-Velez and Udluft, 2018).

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> from bayesopt_chain.ensemble import EnsemblePrediction
        >>> outputs = torch.tensor([0.0, 2.0])[:, None, None]
        >>> p = EnsemblePrediction.of(bc.likelihoods.gaussian(0.5), outputs, torch.full((2,), 0.5).log())
        >>> p.mean, p.aleatoric, p.epistemic
        (tensor([[1.]]), tensor([[0.5000]]), tensor([[1.]]))
    """

    raw: Tensor
    asked: Likelihood

    @classmethod
    @kinds.takes(likelihood=kinds.LIKELIHOOD, outputs=kinds.TENSOR, log_weights=kinds.TENSOR)
    def of(cls, likelihood: Likelihood, outputs: Tensor, log_weights: Tensor) -> EnsemblePrediction:
        """The mixture of a likelihood over outputs.

        Args:
            likelihood: of targets given outputs.
            outputs: ``[S, N, *event]``.
            log_weights: ``[S]``.

        Returns:
            An :class:`EnsemblePrediction`.
        """
        mixed = likelihood.mixture(outputs, log_weights)
        made = cls(mixed.likelihood, mixed.outputs, mixed.log_weights, of=mixed.of, noise=mixed._noise)
        made.raw, made.asked = outputs, likelihood
        return made

    @property
    def has_classes(self) -> bool:
        """Whether targets are classes without an order, or yes and no."""
        return self.asked.support is None or self.asked.support == (0.0, 1.0, True)

    @property
    def probabilities(self) -> Tensor:
        """Of the classes, ``[N, *positions, C]``; of yes-or-no targets that of yes, ``[N, *positions]``.

        Raises:
            ValueError: targets that are no classes.
        """
        if not self.has_classes:
            raise ValueError(
                f"probabilities: targets of a {self.asked.name} likelihood are no classes: use mean, quantile or cdf"
            )
        return self.mean

    @property
    def entropy(self) -> Tensor:
        """Of the label, of classes ``[N, *positions]``, in nats."""
        return self._entropy(self.probabilities)

    @property
    def aleatoric(self) -> Tensor:
        """What no data remove, ``[N, *positions]``: of classes the mean entropy in nats, otherwise the noise's variance."""
        if not self.has_classes:
            return self.noise
        return self.average(self._entropy(self.likelihood.mean(self.outputs)))

    @property
    def epistemic(self) -> Tensor:
        """What more data could remove, ``[N, *positions]``: of classes the mutual information of label and parameters in nats,
        otherwise the variance of the mean."""
        whole = self.entropy if self.has_classes else self.variance
        return (whole - self.aleatoric).clamp_min(0)

    def _entropy(self, p: Tensor) -> Tensor:
        if self.asked.support is None:
            return torch.special.entr(p).sum(-1)
        return torch.special.entr(p) + torch.special.entr(1 - p)

    def log_prob(self, targets: object) -> Tensor:
        """The log density of new targets, ``[N, *positions]``, in nats, times their weights.

        Args:
            targets: as the likelihood takes them, ``[N, *positions]``.

        Returns:
            Like the targets. Minus its mean is the negative log predictive density.

        Raises:
            ValueError: targets of another shape, or values that they cannot have.
        """
        self.asked.require(self.raw[0], targets, wait=True)
        return super().log_prob(targets)

    @kinds.takes()
    def sample(self, samples: int = 100, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws of new targets; those of one sample are of one network at all inputs.

        Args:
            samples: how many. Default 100.
            generator: source of randomness, on the device of the predictions. Default: torch's global generator.

        Returns:
            ``[samples, N, *positions]``.

        Raises:
            ValueError: fewer than one sample; a custom likelihood that cannot draw.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> from bayesopt_chain.ensemble import EnsemblePrediction
            >>> p = EnsemblePrediction.of(bc.likelihoods.gaussian(0.5), torch.zeros(2, 3, 1), torch.full((2,), 0.5).log())
            >>> p.sample(4).shape
            torch.Size([4, 3, 1])
        """
        index = torch.multinomial(self.log_weights.exp().to(self.raw.device), samples, True, generator=generator)
        labels = self.asked.draw(self.raw[index].flatten(0, 1), generator)
        return labels.reshape(samples, self.raw.shape[1], *labels.shape[1:])
