r"""The ELBO of any Gaussian, whichever method gave it: how far it is from the posterior, in nats.

    F(q) = E_q[loss(theta)] - T H[q] = E_q[loss(theta) + T log q(theta)],        -F / T <= log Z = log int exp(-loss / T),

with equality where q is the posterior; there ``loss + T log q`` is the same for every draw, so that its mean has no error
(Jordan, Ghahramani, Jaakkola and Saul, 1999).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks, kinds
from bayesopt_chain.posterior.gaussian import Gaussian


class Elbo(NamedTuple):
    """What :func:`negative_elbo` returns.

    Attributes:
        value: the negative ELBO per datum, in nats, 0-d.
        standard_error: of the value, from the spread over the draws, 0-d.
    """

    value: Tensor
    standard_error: Tensor


def negative_elbo(
    loss: Callable[[Any, Any], Any],
    posterior: Gaussian,
    batch: Any,
    *,
    temperature: float | Tensor,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
) -> Elbo:
    """The negative ELBO of any Gaussian, per datum, whether Laplace, a filter, SWAG or a variational family made it.

    Args:
        loss: ``loss(params, batch)``, the mean negative log posterior per datum, or ``(that, aux)``. With its likelihood and
            its prior normalised, ``-value / temperature`` is a lower bound of the log evidence, up to its standard error.
        posterior: any :class:`Gaussian` over the parameters.
        batch: the data of the loss, all of them for the bound itself.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data; positive.
        n_samples: draws, at least 2; the loss is computed once for each.
        generator: source of randomness. Default: torch's global generator.

    Returns:
        An :class:`Elbo`.

    Raises:
        ValueError: a temperature that is not positive, fewer than two draws, a precision that is not positive definite.

    Example:
        >>> import math, torch, bayesopt_chain as bc
        >>> from bayesopt_chain.posterior.gaussian import Gaussian
        >>> from bayesopt_chain.precision import Diagonal
        >>> q = Gaussian(torch.zeros(1), Diagonal(torch.tensor([4.0]), torch.tensor(1.0)))
        >>> elbo = bc.vi.negative_elbo(lambda params, batch: 2 * params.square().sum(), q, None, temperature=1.0)
        >>> elbo.value, 0.5 * math.log(4 / (2 * math.pi))  # q is the posterior: minus the log evidence
        (tensor(-0.2258), -0.2258)
    """
    kinds.require(
        "negative_elbo",
        loss=(loss, kinds.FUNCTION),
        posterior=(posterior, kinds.POSTERIOR),
        generator=(generator, kinds.GENERATOR),
    )
    checks.number("negative_elbo: temperature", temperature, "(0, inf)", tensor=True)
    checks.number("negative_elbo: n_samples", n_samples, "[2, 16777216]", integer=True)
    decomposed = posterior.factorised()
    draws = decomposed.sample((n_samples,), generator=generator)
    terms = []
    with torch.no_grad():
        for i in range(n_samples):
            theta = optree.tree_map(lambda x, i=i: x[i], draws)
            value = loss(theta, batch)
            value = value[0] if isinstance(value, tuple) else value
            terms.append(value + temperature * decomposed.log_prob(theta))
    each = torch.stack(terms)
    return Elbo(each.mean(), each.std() / n_samples**0.5)
