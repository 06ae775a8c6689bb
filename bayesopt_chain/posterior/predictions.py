"""Predictions of a fitted model: Gaussian outputs, and new targets at them.

linearized       outputs N(f, J Lambda^-1 J^T), and every question about a target that they answer: a
                 :class:`bayesopt_chain.likelihoods.Predictive`
sobol, probit, quadrature   means of targets at these outputs, by rules that the likelihood has
linearized_mc    the same by draws of the outputs
mc               E of the likelihood's mean at draws of the parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from bayesopt_chain.batches import flatten
from bayesopt_chain.likelihoods import Likelihood, Outputs
from bayesopt_chain.posterior._linearized import linearized_by
from bayesopt_chain.posterior._monte_carlo import monte_carlo
from bayesopt_chain.posterior.batches import as_pair
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.model import Model

Method = Literal["sobol", "probit", "quadrature", "linearized", "linearized_mc", "mc"]
ANY_LIKELIHOOD = ("linearized", "linearized_mc", "mc")


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
    if method in ("sobol", "probit", "quadrature"):
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
) -> Tensor:
    """One batch's means of targets."""
    if method == "mc":
        seen = model.seen_by_head(batch)
        outputs = monte_carlo(model.forward, posterior, seen, samples=samples, generator=generator)
        return likelihood.mean(outputs.to(model.dtype)).mean(0)
    outputs = linearized(model, posterior, batch)
    if method == "linearized_mc":
        return likelihood.mean(outputs.draw(samples, generator)).mean(0)
    return likelihood.expected_mean(*outputs, method)


def linearized(model: Model, posterior: Gaussian, batch: Any, joint: bool = False) -> Outputs:
    """One batch's outputs, in the module's precision."""
    found = linearized_by(model.checks, model.forward, posterior, model.seen_by_head(batch), joint)
    return Outputs(*(x.to(model.dtype) for x in found))


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
