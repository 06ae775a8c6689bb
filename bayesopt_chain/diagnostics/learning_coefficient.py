r"""Local learning coefficient: how fast the volume of parameters with almost the loss of ``theta*`` shrinks.

With ``L`` the mean loss and ``V(eps)`` the volume near ``theta*`` where ``L - L(theta*) < eps``, ``V ~ eps^lambda``
(Watanabe, 2009; locally: Lau et al., 2024). Under a chain at temperature ``T`` that a spring holds near ``theta*``

    lambda = (E[L] - L(theta*)) / T,           exp(-(L + strength |theta - theta*|^2 / 2) / T).

A quadratic of curvatures ``k`` gives ``1/2 sum k / (k + strength)``: half the number of directions that are stiff against the
spring. ``|x|^p`` gives ``1/p`` for each dimension at every ``T`` without a spring. A singular model has less than half its
parameters. ``L(theta*)`` is over all data, each of them once. What white-noise SGLD, of variance
``T / ((k + strength) (1 - lr (k + strength) / 2))``, adds at the same learning rate does not arise: the noise is matched.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.diagnostics.temperatures import estimate
from bayesopt_chain.diagnostics.top_curvature import hessian_product, lanczos
from bayesopt_chain.links.localization import add_localization
from bayesopt_chain.loop.loss import value
from bayesopt_chain.loop.parallel import parallel, stack
from bayesopt_chain.loop.step import make_step
from bayesopt_chain.runs.resumable_batches import ResumableBatches
from bayesopt_chain.runs.sample import iterate
from bayesopt_chain.samplers.langevin import sghmc
from bayesopt_chain.samplers.stability import step_growth
from bayesopt_chain.trees import flatten, unflatten

MARGIN = 1.25  # on a curvature, which within a step may grow
PRODUCTS = 40  # of the Hessian, and steps in which a displacement is followed
LARGEST_ERROR = 0.2  # of the value, from which on an estimate is refused


class LearningCoefficient(NamedTuple):
    """What :func:`local_learning_coefficient` returns.

    Attributes:
        value: ``lambda``.
        standard_error: of the mean over steps and chains, by batch means.
        by_chain: ``lambda`` of every chain, ``[chains]``.
        losses: the loss at every step behind the burn-in, ``[steps, chains]``.
        reference: the loss at ``theta*``.
    """

    value: float
    standard_error: float
    by_chain: Tensor
    losses: Tensor
    reference: float

    def __str__(self) -> str:
        return f"local learning coefficient {self.value:.4g} +- {2 * self.standard_error:.2g}"


@kinds.takes(batches=kinds.BATCH_OR_BATCHES, strength=kinds.real("[0, inf)"), sampler=kinds.TX)
def local_learning_coefficient(
    loss: Callable[[Any, Any], Any],
    params: Any,
    batches: Any,
    *,
    temperature: float,
    lr: float,
    strength: float,
    momentum: float = 0.9,
    steps: int = 2000,
    burn_in: int = 500,
    chains: int = 4,
    sampler: Chain | None = None,
) -> LearningCoefficient:
    """Estimate the local learning coefficient at trained parameters.

    Args:
        loss: ``loss(params, batch)``, mean over the batch.
        params: ``theta*``, a (local) minimum.
        batches: one batch, or all data in batches, as for :func:`bayesopt_chain.sample`.
        temperature: ``1 / (N beta)``; Watanabe's choice is ``log(N) / N``.
        lr: learning rate of the chain.
        strength: of the spring to ``params``, in the units of the mean loss.
        momentum: of the chain.
        steps: of each chain, burn-in included.
        burn_in: first steps whose losses are left out.
        chains: number of independent chains, at once.
        sampler: another chain in place of ``bc.sghmc(lr, momentum, temperature=temperature)``, at the same temperature.

    Returns:
        :class:`LearningCoefficient`.

    Raises:
        ValueError: a temperature that is not positive; a chain that diverged, or that was unstable where its loss was highest:
            in singular models the curvature away from ``params`` is many times larger than there; a standard error above a
            fifth of the value (and above a tenth).

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> _ = torch.manual_seed(0)
        >>> found = bc.diagnostics.local_learning_coefficient(
        ...     lambda w, batch: (w[:50] ** 2).sum() / 2, torch.zeros(80), None, temperature=0.1, lr=0.1, strength=0.25,
        ...     steps=600, burn_in=200, chains=2
        ... )
        >>> abs(found.value - 50 / (2 * 1.25)) < 2       # thirty of the eighty parameters do not count
        True
    """
    feed = ResumableBatches(batches)
    every = [feed.batches] if feed.is_one else batches
    reference = _over_all_rows(loss, params, every)
    tx = chain(add_localization(params, strength), sampler or sghmc(lr, momentum, temperature=temperature))
    step = parallel(make_step(loss, tx), chains)
    before = stack([optree.tree_map(lambda p: p.detach().clone(), params) for _ in range(chains)])
    state, losses = step.init(tx, before), list[Tensor]()
    highest: float = -math.inf
    worst: Any = before, state
    for it in iterate(step, before, state, batches, steps=steps, burn_in=burn_in):
        if it.is_draw:
            losses.append(it.info.loss.double())
            if float(losses[-1].max()) > highest:  # the loss of a step is that of the parameters before it
                highest, i = float(losses[-1].max()), int(losses[-1].argmax())
                worst = before, it.state
                worst = optree.tree_map(lambda x, i=i: x[i].clone(), worst)
        before = it.params
    cut = len(losses) < steps - burn_in  # iterate has stopped in front of a draw that is not finite
    if cut or not all(bool(loss.isfinite().all()) for loss in losses):
        raise ValueError(
            "local_learning_coefficient: the chain diverged; lower lr or strength, or look at the scale of batches and loss"
        )
    found = torch.stack(losses)
    scaled = (found - reference) / temperature
    mean = estimate(scaled)
    result = LearningCoefficient(mean.value, mean.standard_error, scaled.mean(0), found, reference)
    growth = _growth(loss, tx, worst, every)
    if growth > 1.0 + 3.0 / PRODUCTS:
        raise ValueError(
            f"local_learning_coefficient: lr={lr:.3g} is too large: where the loss was highest ({highest:.4g}, against "
            f"{reference:.4g} at params) a step multiplies a displacement along the stiffest direction by {growth:.3g}, "
            f"at {MARGIN} times the curvature there; above 1 it grows. Lower lr to a half, or raise strength ({result})"
        )
    if result.standard_error > max(LARGEST_ERROR * abs(result.value), 0.1):
        raise ValueError(
            f"local_learning_coefficient: the standard error is too large to say anything: {result}. Take more steps or "
            "chains, or lower lr if chains differ (by_chain: "
            + ", ".join(f"{x:.3g}" for x in result.by_chain.tolist()[:8])
            + ")"
        )
    return result


def _over_all_rows(loss: Callable[[Any, Any], Any], params: Any, batches: Any) -> float:
    """The mean loss over all data, each of them once, whatever the order in which batches draw them."""
    if isinstance(batches, Epochs) and batches.leaves is not None:
        batches = map(batches.of_rows, batches.common_rows().split(batches.batch_size))
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            leaves = [x for x in optree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim]
            size = len(leaves[0]) if leaves else 1
            total, count = total + size * float(value(loss, params, batch)[0]), count + size
    if not count:
        raise ValueError("local_learning_coefficient: batches is empty")
    return total / count


def _growth(loss: Callable[[Any, Any], Any], tx: Chain, at: tuple[Any, Any], batches: Any) -> float:
    """The factor by which a step multiplies a displacement along the direction of largest curvature.

    The chain is followed on a quadratic of this one direction, so that the negative curvature of other directions, which makes
    displacements grow slowly and is no instability of the step, does not count.
    """
    params, state = at
    product = hessian_product(loss, params, batches, max_batches=10)
    values, vectors = lanczos(
        lambda v: flatten(product(unflatten(v, params)), params), flatten(params, params), 1, max_products=PRODUCTS
    )
    top, u = MARGIN * values[0].clamp(min=0), vectors[0]

    def along(p: Any, batch: Any) -> Tensor:
        return top * (u @ (flatten(p, params) - flatten(params, params))).square() / 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what it says is said with the loss above
        return step_growth(along, tx, params, state, (), steps=PRODUCTS)
