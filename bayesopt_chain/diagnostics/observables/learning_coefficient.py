r"""Local learning coefficient: how fast the volume of parameters with almost the loss of ``theta*`` shrinks.

With ``V(eps)`` the volume near ``theta*`` where ``L - L(theta*) < eps``, ``V ~ eps^lambda`` (Watanabe, 2009; locally: Lau
et al., 2024), and

    lambda = (E[L] - L(theta*)) / T    under    exp(-(L + strength |theta - theta*|^2 / 2) / T).

A quadratic of curvatures ``k`` gives ``1/2 sum k / (k + strength)``: half the number of directions that are stiff against
the spring. ``|x|^p`` gives ``1/p`` for each dimension without a spring. A singular model has less than half its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from bayesopt_chain.diagnostics.observables.observe import Observed, observe
from bayesopt_chain.diagnostics.observables.target import data_of


class LearningCoefficient(NamedTuple):
    """What :func:`local_learning_coefficient` returns.

    Attributes:
        value: the local learning coefficient, at this temperature and strength.
        standard_error: its Monte Carlo error.
        verdict: what is doubtful, in words, or ``"no objection"``.
        temperature, strength: of the target, in units of the mean loss.
        run: all that was measured.
    """

    value: float
    standard_error: float
    verdict: str
    temperature: float
    strength: float
    run: Observed

    def __str__(self) -> str:
        return (
            f"local learning coefficient {self.value:.4g} +- {2 * self.standard_error:.2g} at "
            f"temperature {self.temperature:.3g}, strength {self.strength:.3g}: {self.verdict}"
        )


def local_learning_coefficient(
    loss: Callable[..., Any],
    params: Any,
    batches: Any,
    *,
    temperature: float | None = None,
    strength: float | None = None,
    **options: Any,
) -> LearningCoefficient:
    """Estimate the local learning coefficient at trained parameters, or of a part of them.

    Args:
        loss: ``loss(params, batch)``, mean over the batch. A prior in it counts as loss.
        params: ``theta*``, a (local) minimum.
        batches: all data as one batch, ``bc.epochs(data, batch_size)``, or a list of batches.
        temperature: ``1 / (n beta)`` for ``n`` data, per datum as the loss is. Default: Watanabe's ``log(n) / n``.
        strength: of the spring to ``params``, in units of the mean loss. Default: ``temperature``. The value depends on it.
        options: those of :func:`bayesopt_chain.observe`: ``where=`` for the refined coefficient of some entries,
            ``chains=``, ``steps=``, ``path=``, ``lr=``, and the others.

    Returns:
        :class:`LearningCoefficient`.

    Raises:
        ValueError: the number of data is not known, and no temperature given; the chains diverged, were beyond the
            stability limit where they went or too hot, or still drift; ``params`` are no minimum.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def loss(w, batch):
        ...     return (w[:50] ** 2).sum() / 2
        >>> found = bc.local_learning_coefficient(
        ...     loss, torch.zeros(80), None, temperature=0.1, strength=0.25, steps=600, burn_in=200, chains=4
        ... )
        >>> abs(found.value - 50 / (2 * 1.25)) < 2       # thirty of the eighty parameters do not count
        True
    """
    if temperature is None:
        n = data_of(batches)[1]
        if n is None or n < 2:
            raise ValueError(
                "local_learning_coefficient: the number of data is not known from the batches; give temperature="
            )
        temperature = math.log(n) / n
    run = observe(loss, params, batches, temperature=temperature, strength=strength, **options)
    found = run.llc()
    return LearningCoefficient(float(found.value), float(found.error), run.verdict, temperature, run.strength, run)
