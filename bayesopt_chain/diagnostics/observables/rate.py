r"""Which rate and momentum: what stability, the noise of batches (:mod:`bayesopt_chain.diagnostics.suggest_lr`) and the
spring allow where a pilot goes.

stability    k is the largest curvature of loss and spring at a point where a chain is. A chain of less friction climbs farther
             up walls that it has not seen yet, so that its share of the limit is  MARGIN sqrt((1 - mu) / .1)
heat         lr tr(C) / (4 T (1 - mu))  is at most the share HEAT of the learning coefficient. Noise that grows with the
             distance can make a chain unstable at a tenth of the limit; its pilot has a virial far above d.
spread       a direction that only the spring holds forgets where it was at the rate of the slower root of
             x^2 - (1 - mu) x + lr s = 0,  lr s / (1 - mu)  where it is small, and its variance at twice that. The momentum is
             such that its variance takes an eighth of the draws, unless that is more than critical damping, 1 - mu = 2 sqrt(lr
             s), or than the heat allows, or the energy of a stiff direction, which takes 1 / (1 - mu), would not fit thirty
             times among the draws.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.diagnostics.observables.target import Measured, Target, steepest
from bayesopt_chain.diagnostics.suggest_lr import MARGIN, heat_of_noise, rate
from bayesopt_chain.loop.step import make_step
from bayesopt_chain.runs.run import ResumableBatches

HEAT = 0.05  # of the learning coefficient that the batches may add
MOMENTUM = 0.9  # where nothing asks for more
HOT = 1.5  # a virial above this times the number of free entries lowers the rate
PILOTS = 8
THIN = 4  # steps of a pilot from one draw to the next


class Rate(NamedTuple):
    """Rate and momentum, what they were chosen by, and what that cost.

    Attributes:
        lr: the learning rate.
        momentum: of the chains.
        curvature: the largest that was seen, with the spring's.
        gradients: that were spent, of one chain each.
    """

    lr: float
    momentum: float
    curvature: float
    gradients: int


def relaxation(lr: float, momentum: float, strength: float) -> float:
    """Steps in which a direction that only the spring holds forgets where it was; infinite without a spring."""
    friction, pull = 1 - momentum, lr * strength
    slow = 2 * pull / (friction + math.sqrt(max(friction**2 - 4 * pull, 0.0))) if pull else 0.0
    return 1 / min(slow, friction / 2) if slow else math.inf


def spreading(lr: float, strength: float, draws: int, coolest: float) -> float:
    """The momentum by which flat directions spread in an eighth of the draws, if that is possible.

    Args:
        lr: learning rate.
        strength: of the spring.
        draws: steps that are measured.
        coolest: the largest ``lr / (1 - mu)`` that the noise of batches allows.
    """
    if not strength:
        return MOMENTUM
    least = max(2 * math.sqrt(lr * strength), 30 / draws, lr / coolest)
    return 1 - min(1 - MOMENTUM, max(lr * strength * draws / 4, least))


def chosen(target: Target, chains: int, steps: int, draws: int, lr: float | None, momentum: float | None) -> Rate:
    """Choose rate and momentum by pilots, or look at those that are given.

    Args:
        target: what is sampled.
        chains: how many a pilot has.
        steps: of a pilot.
        draws: steps that will be measured.
        lr: a rate to take.
        momentum: a momentum to take.

    Raises:
        ValueError: the given rate is beyond the limit at the centre; no rate is stable.
    """
    batch = target.one_batch(chains)
    centre = target.start(chains)
    top, spent = _curvature(target, chains, centre, batch), 40 * chains
    mu, temperature = MOMENTUM if momentum is None else momentum, target.temperature
    if lr is not None:
        mu = spreading(lr, target.strength, draws, math.inf) if momentum is None and not target.in_batches else mu
        limit = 2 * (1 + mu)
        if lr * top > limit:
            raise ValueError(
                f"observe: lr={lr:.3g} is {lr * top / limit:.2g} times the stability limit at the start already "
                f"(curvature {top:.3g}, with the spring's); take lr={0.1 * limit / top:.2g}, or leave it out"
            )
        return Rate(lr, mu, top, spent)
    top = max(top, _curvature(target, chains, _thermal(target, chains, centre, batch), batch))
    spent, noise, highest, most = spent + 80 * chains, 0.0, 0.5, math.inf

    def allowed() -> float:
        """The rate at this momentum, after what was seen."""
        margin = MARGIN * math.sqrt(min(1.0, (1 - mu) / (1 - MOMENTUM)))
        found = rate(2 * (1 + mu) / top, lambda lr: heat_of_noise(lr, mu, temperature) * noise / highest, HEAT, margin)
        return min(found, most)

    coolest = math.inf  # the largest lr / (1 - mu) that the noise allows
    for k in range(PILOTS):
        lr = allowed()
        if momentum is None and (noise or (k and not target.in_batches)):  # after the noise of batches is known
            mu = spreading(lr, target.strength, draws, coolest)
        pilot = _pilot(replace(target, momentum=mu), chains, steps, lr, k)
        now = _curvature(target, chains, pilot.params, batch)
        spent += (steps + steps // (2 * THIN) * target.in_batches + 40) * chains
        hot = not pilot.virial < HOT * target.free
        if target.in_batches and not hot:
            noise, highest = pilot.noise, max(highest, pilot.rise)
            coolest = HEAT * highest / (heat_of_noise(1, 0, temperature) * noise) if noise else math.inf
        wanted = mu if momentum is not None else spreading(lr, target.strength, draws, coolest)
        settled = abs(math.log((1 - wanted) / (1 - mu))) < 0.2
        if now <= 1.2 * top and not hot and lr <= 1.2 * coolest * (1 - mu) and settled:
            top = max(top, now)
            break
        most = lr / 4 if hot else most
        top = max(min(now, 16 * top), top)
    return Rate(allowed(), mu, top, spent)


@torch.no_grad()
def _thermal(target: Target, chains: int, centre: Any, batch: Any) -> Any:
    """Points around the centre, so far that loss and spring have risen by ``T d / 2`` in the mean; at most 1,000 an entry.

    At the minimum of a quartic there is no curvature, and a first pilot would have no scale.
    """
    stacked, noise = target.stacked(chains), torch.Generator().manual_seed(target.seed)
    draws = optree.tree_map(
        lambda x: torch.randn(x.shape, generator=noise, dtype=torch.float64, device="cpu").to(x), centre
    )
    least, out = stacked.each(centre, batch).mean(), centre
    for k in range(-30, 11):
        moved = optree.tree_map(lambda x, z, r=2.0**k: x + r * z, centre, draws)
        rise = float(stacked.each(moved, batch).mean() - least) + 4.0**k * target.strength * target.free / 2
        if not rise < target.temperature * target.free / 2:
            break
        out = moved
    return out


class Pilot(NamedTuple):
    """Where the chains of a pilot are at its end; means over its second half of virial, loss over ``T`` and ``tr(C)``."""

    params: Any
    virial: float
    rise: float
    noise: float


def _pilot(target: Target, chains: int, steps: int, lr: float, number: int) -> Pilot:
    measured, half, seen = Measured(target, chains, {}, None, 0.0, number), steps // 2, list[Tensor]()
    tx, params = target.chain(lr), target.start(chains)
    state, feed = tx.init(params), ResumableBatches(target.course(chains, -2 - number))
    plain = make_step(target.stacked(chains), tx, inplace=True)
    watched = replace(plain, observe=lambda params, grads, batch: measured(params, grads, batch, len(seen)))
    for i in range(steps):
        watch = i >= half and i % THIN == 0
        params, state, info = (watched if watch else plain)(params, state, feed.next())
        if watch:
            now = measured.with_loss(info.observed, info.aux)
            noise = now.get("noise", torch.zeros_like(now["loss"])).double()
            seen.append(torch.cat([now["virial"].double(), now["loss"] / target.temperature, noise], 1).mean(0))
    return Pilot(params, *torch.stack(seen).mean(0).tolist())


def _curvature(target: Target, chains: int, params: Any, batch: Any) -> float:
    """The largest curvature where any chain is, with the spring's."""
    found = steepest(target.stacked(chains), params, batch)
    return max(float(found.nan_to_num(math.inf, math.inf).max()) + target.strength, 1e-12)
