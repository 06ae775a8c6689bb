"""Predictions of a fitted model, batch by batch, by five methods.

linearized       outputs N(f, J Lambda^-1 J^T)
probit, bridge   E softmax (or sigmoid) of these in closed form
linearized_mc    the same by draws of the outputs
mc               E of the inverse link at draws of the parameters
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import predict
from bayesopt_chain.curvature._checks import Checks
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.predict._linearized import linearized_by

Method = Literal["probit", "bridge", "linearized", "linearized_mc", "mc"]
METHODS: dict[str, tuple[str, ...]] = {  # the likelihoods that each has a meaning for
    "probit": ("categorical", "bernoulli"),
    "bridge": ("categorical",),
    "linearized_mc": ("categorical", "bernoulli", "poisson", "gaussian"),
    "mc": ("categorical", "bernoulli", "poisson", "gaussian"),
}
INVERSE_LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "categorical": lambda f: f.softmax(-1),
    "bernoulli": torch.sigmoid,
    "poisson": torch.exp,
    "gaussian": lambda f: f,
}


class Prediction(NamedTuple):
    """Outputs under the linearised posterior.

    Attributes:
        mean: ``[N, *event]``.
        covariance: of the outputs for the parameters' uncertainty, ``[N, E, E]`` for E outputs.
        noise: the variance of Gaussian observation noise, ``[N, *event]``; zero for other likelihoods.
    """

    mean: Tensor
    covariance: Tensor
    noise: Tensor

    @property
    def variance(self) -> Tensor:
        """Of a new target: the outputs' and the noise's, ``[N, *event]``."""
        return self.covariance.diagonal(dim1=-2, dim2=-1).reshape(self.mean.shape) + self.noise


def method_for(method: str | None, likelihood: str) -> str:
    """The method, by default the one that suits the likelihood."""
    if method is None:
        return "probit" if likelihood in METHODS["probit"] else "linearized"
    if method != "linearized" and method not in METHODS:
        raise ValueError(f"predict: method={method!r}: pass 'linearized', {', '.join(map(repr, METHODS))}")
    if method != "linearized" and likelihood not in METHODS[method]:
        raise ValueError(f"predict: method={method!r} has no meaning for a {likelihood} likelihood: use 'linearized'")
    return method


@torch.no_grad()
def predicted(
    forward: Callable[[Any, Any], Tensor],
    posterior: Gaussian,
    batch: Any,
    likelihood: Likelihood,
    scale: Tensor,
    method: str,
    samples: int,
    generator: torch.Generator | None,
    checks: Checks,
) -> Tensor | Prediction:
    """One batch's predictions."""
    if method == "mc":
        outputs = predict.monte_carlo(forward, posterior, batch, samples=samples, generator=generator)
        return INVERSE_LINKS[likelihood.name](outputs).mean(0)
    mean, covariance = linearized_by(checks, forward, posterior, batch)
    if method == "probit" and likelihood.name == "bernoulli":
        variance = covariance.diagonal(dim1=-2, dim2=-1).reshape(mean.shape)
        return predict.probit_bernoulli(mean, variance)
    if method == "probit":
        return predict.probit(mean, covariance)
    if method == "bridge":
        concentrations = predict.laplace_bridge(mean, covariance)
        return concentrations / concentrations.sum(-1, keepdim=True)
    if method == "linearized_mc":
        return INVERSE_LINKS[likelihood.name](drawn_outputs(mean, covariance, samples, generator)).mean(0)
    return Prediction(mean, covariance, noise_variance(likelihood, mean, scale))


def noise_variance(likelihood: Likelihood, outputs: Tensor, scale: Tensor) -> Tensor:
    """Of Gaussian observation noise, like the outputs; zero for other likelihoods."""
    if likelihood.name != "gaussian":
        return torch.zeros_like(outputs)
    return 1 / (likelihood.factors(outputs, outputs).square().sum(0) * scale.to(outputs))


def drawn_outputs(mean: Tensor, covariance: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """Draws of linearised outputs, ``[S, B, *event]``; a covariance may be singular."""
    if samples < 1:
        raise ValueError(f"samples={samples}: pass at least 1")
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt()[..., None, :]
    shape = (samples, *covariance.shape[:-1])
    noise = torch.randn(shape, dtype=mean.dtype, device=mean.device, generator=generator)
    return mean + torch.einsum("bij,sbj->sbi", root, noise).reshape(samples, *mean.shape)


def held_out_nll(got: Tensor | Prediction, targets: Tensor, likelihood: Likelihood) -> Tensor:
    """Minus the summed log density of targets under predictions, in nats, 0-d: of probabilities for classes and yes-or-no, of
    the Gaussian for regression, at the mean outputs for others."""
    name = likelihood.name
    if isinstance(got, Prediction):
        if name == "gaussian":
            return 0.5 * ((targets - got.mean).square() / got.variance + (2 * math.pi * got.variance).log()).sum()
        return likelihood.nll(got.mean, targets).sum()
    tiny = torch.finfo(got.dtype).tiny
    if name == "categorical":
        return -got.clamp_min(tiny).log().gather(-1, targets[..., None]).sum()
    return -(targets * got.clamp_min(tiny).log() + (1 - targets) * (1 - got).clamp_min(tiny).log()).sum()


def batches_of(data: Any) -> Iterable:
    """Batches ``(inputs, targets)`` of a tensor of inputs, or of an iterable of batches or inputs."""
    if isinstance(data, Tensor):
        return [(data, None)]
    return (batch if isinstance(batch, (tuple, list)) else (batch, None) for batch in data)
