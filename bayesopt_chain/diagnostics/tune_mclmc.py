r"""Step and length of :func:`bayesopt_chain.samplers.mclmc`, from the error that a step makes in the energy.

The exact flow conserves an energy, ``loss / T`` and a kinetic part; a step of length ``lr`` changes it by

    Delta = (loss' - loss) / T + (d - 1) (gain of the half kick before the move + gain of the one after it),

whose variance grows as ``lr^6``. The step is set so that the variance is ``energy_variance`` a parameter: with
``x = Delta^2 / (d energy_variance)``, averaged with weights ``exp(-(log x / 9)^2 / 2)`` and forgetting over about 150 steps,
``lr = mean(x / lr^6)^(-1/6)`` (Robnik, De Luca, Silverstein and Seljak, 2023; used for networks by Sommer et al., 2025). The
length is the root of the summed variances of the parameters in the second half of the run, in the coordinates of the
precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch

from bayesopt_chain import kinds
from bayesopt_chain.loop.loss import gradient
from bayesopt_chain.samplers.microcanonical import Metric, freshness, kinetic_gain, strength

KEEP = 149 / 151  # of the averages from one step to the next


class MclmcTuning(NamedTuple):
    """What :func:`tune_mclmc` found.

    Attributes:
        lr: the length of a step.
        length: the distance after which the direction is forgotten.
        energy_variance: the mean of ``Delta^2 / d`` over the second half of the run.
        params: where the run ended, near which a chain may start.
    """

    lr: float
    length: float
    energy_variance: float
    params: Any


@kinds.takes(batch=kinds.ANY, precision=kinds.PRECISION, energy_variance=kinds.POSITIVE, steps=kinds.whole(10))
def tune_mclmc(
    loss: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    *,
    temperature: float,
    precision: Any = None,
    energy_variance: float = 5e-4,
    steps: int = 1000,
    generator: torch.Generator | None = None,
) -> MclmcTuning:
    """Find step and length of :func:`bayesopt_chain.samplers.mclmc`, on full gradients (Robnik et al., 2023).

    Args:
        loss: ``loss(params, batch)``, as for :func:`bayesopt_chain.make_step`.
        params: where to start, near a mode.
        batch: all data: the noise of minibatches would count as an error of the energy.
        temperature: of the chain; ``1 / N`` for a mean over ``N`` data.
        precision: of the chain.
        energy_variance: what is allowed of ``Var(Delta) / d`` a step. Smaller means smaller steps, as its sixth root.
        steps: so many gradients are taken.
        generator: of the noise (default: torch's global generator).

    Returns:
        :class:`MclmcTuning`.

    Raises:
        ValueError: numbers that are not positive, fewer than 10 steps or fewer than two parameters.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> found = bc.diagnostics.tune_mclmc(
        ...     lambda w, batch: w.square().sum() / 2, torch.ones(50), None, temperature=1.0, steps=600,
        ...     generator=torch.Generator().manual_seed(0))
        >>> 0.5 < found.lr < 5.0, 4.0 < found.length < 10.0           # the rule is sqrt(50) = 7.1
        (True, True)
    """
    spec = optree.tree_structure(params)
    metric = Metric(precision, spec.unflatten, optree.tree_leaves)
    theta = [p.detach().clone() for p in optree.tree_leaves(params)]
    d = sum(p.numel() for p in theta)
    if d < 2:
        raise ValueError(f"tune_mclmc: needs at least 2 parameters, got {d}")

    def at(theta: list[Any]) -> Any:
        grads, info = gradient(loss, spec.unflatten(theta), batch)
        g = optree.tree_leaves(grads)
        return g, float(info.loss) / temperature, *metric.downhill(g)

    def normals() -> list[Any]:
        drawn = [torch.randn(p.shape, generator=generator, dtype=p.dtype, device="cpu") for p in theta]
        return [x.to(p.device) for x, p in zip(drawn, theta)]

    lr, length = 0.1 * math.sqrt(float(metric.square(metric.unit(normals(), theta)))), math.sqrt(d)
    w = metric.unit(normals(), theta)
    g, energy, e, steep = at(theta)
    total, weight, error, seen = 0.0, 0.0, 0.0, 0
    mean, square = [torch.zeros_like(p) for p in theta], 0.0
    for t in range(steps):
        w = metric.refreshed(w, normals(), freshness(lr, length, d))
        delta = steep * strength(lr, d) / temperature
        gain = kinetic_gain(w, e, delta, g)
        moved = metric.kicked(w, e, delta, g)
        there = [p + lr * x for p, x in zip(theta, moved)]
        g_, energy_, e_, steep_ = at(there)
        delta = steep_ * strength(lr, d) / temperature
        gain = gain + kinetic_gain(moved, e_, delta, g_)
        change = (d - 1) * float(gain) + energy_ - energy
        if not math.isfinite(change):
            lr /= 2.0
            continue
        w, theta, g, energy, e, steep = metric.kicked(moved, e_, delta, g_), there, g_, energy_, e_, steep_
        if 2 * t >= steps:
            error, seen = error + change**2 / d, seen + 1
            before = [p - m for p, m in zip(theta, mean)]
            mean = [m + x / seen for m, x in zip(mean, before)]
            square += float(metric.square(before)) * (seen - 1) / seen
        x = change**2 / (d * energy_variance) + 1e-8
        trust = math.exp(-0.5 * (math.log(x) / 9.0) ** 2)
        total, weight = KEEP * total + trust * x / lr**6, KEEP * weight + trust
        lr = (total / weight) ** (-1 / 6)
        if 2 * t >= steps and seen > 1:
            length = max(math.sqrt(square / seen), lr)
    return MclmcTuning(lr, length, error / max(seen, 1), spec.unflatten(theta))
