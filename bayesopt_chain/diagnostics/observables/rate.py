r"""Which rate: the smaller of what stability and what the noise of batches allow, where a pilot goes and not at the centre
alone.

stability    lr k / (2 (1 + mu)) < 1,  k the largest curvature of loss and spring at a point where a chain is. A singular
             model has several times the curvature of its minimum there.
heat         independent batches whose gradient has the covariance C add  lr tr(C) / (2 T (1 - mu))  to the virial ``d``,
             whatever the curvatures: the sum over directions of the share ``lr C_i / (2 T (1 - mu))`` by which each is
             hotter (Mandt, Hoffman and Blei, 2017). Noise that grows with the distance can make a chain unstable at a
             tenth of the limit; its pilot has a virial far above d.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import optree
import torch

from bayesopt_chain.diagnostics.observables.target import Measured, Target, steepest
from bayesopt_chain.loop.loss import gradient
from bayesopt_chain.loop.step import make_step
from bayesopt_chain.runs.run import ResumableBatches

SHARE = 0.1  # of the stability limit
HEAT = 0.02  # of the virial that the batches may add
HOT = 1.5  # a virial above this times the number of free entries lowers the rate
PILOTS = 8


class Rate(NamedTuple):
    """A rate, what it was chosen by, and what that cost.

    Attributes:
        lr: the learning rate.
        curvature: the largest that was seen, with the spring's.
        gradients: that were spent, of one chain each.
    """

    lr: float
    curvature: float
    gradients: int


def chosen(target: Target, chains: int, steps: int, lr: float | None) -> Rate:
    """Choose a rate by pilots, or look at the one that is given.

    Args:
        target: what is sampled.
        chains: how many a pilot has.
        steps: of a pilot.
        lr: a rate to take.

    Raises:
        ValueError: the given rate is beyond the limit at the centre; no rate is stable.
    """
    batch = target.one_batch(chains)
    centre = target.start(chains)
    top, spent = _curvature(target, centre, batch), 40 * chains
    if lr is not None:
        if lr * top > target.limit:
            raise ValueError(
                f"observe: lr={lr:.3g} is {lr * top / target.limit:.2g} times the stability limit at the start already "
                f"(curvature {top:.3g}, with the spring's); take lr={0.1 * target.limit / top:.2g}, or leave it out"
            )
        return Rate(lr, top, spent)
    top, spent, hottest = (
        max(top, _curvature(target, _thermal(target, centre, batch), batch)),
        spent + 80 * chains,
        math.inf,
    )
    for k in range(PILOTS):
        lr = min(SHARE * target.limit / top, hottest)
        params, virial = _pilot(target, chains, steps, lr, k)
        now = _curvature(target, params, batch)
        spent += (steps + 40) * chains
        if target.in_batches:
            hottest = min(hottest, _coolest(target, chains, params))
            spent += 8 * chains
        hot = not virial < HOT * target.free
        if now <= 1.2 * top and not hot and lr <= 1.2 * hottest:
            top = max(top, now)
            break
        hottest = lr / 4 if hot else hottest
        top = max(min(now, 16 * top), top)
    return Rate(min(SHARE * target.limit / top, hottest), top, spent)


@torch.no_grad()
def _thermal(target: Target, centre: Any, batch: Any) -> Any:
    """Points around the centre, so far that loss and spring have risen by ``T d / 2`` in the mean; at most 1,000 an entry.

    At the minimum of a quartic there is no curvature, and a first pilot would have no scale.
    """
    stacked, noise = target.stacked(len(optree.tree_leaves(centre)[0])), torch.Generator().manual_seed(target.seed)
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


def _pilot(target: Target, chains: int, steps: int, lr: float, number: int) -> tuple[Any, float]:
    """Where the chains of a pilot are at its end, and the mean virial of its second half."""
    measured, half, virials = Measured(target, chains, {}, (), 0.0, 0), steps // 2, list[float]()
    tx, params = target.chain(lr), target.start(chains)
    state, feed = tx.init(params), ResumableBatches(target.course(chains, -2 - number))
    plain = make_step(target.stacked(chains), tx, inplace=True)
    watched = replace(plain, observe=lambda params, grads, batch: measured(params, grads, batch, len(virials)))
    for i in range(steps):
        params, state, info = (plain if i < half else watched)(params, state, feed.next())
        if i >= half:
            virials.append(float(info.observed["virial"].double().mean()))
    return params, sum(virials) / len(virials)


def _curvature(target: Target, params: Any, batch: Any) -> float:
    """The largest curvature where any chain is, with the spring's."""
    found = steepest(target.stacked(len(optree.tree_leaves(params)[0])), params, batch)
    return max(float(found.nan_to_num(math.inf, math.inf).max()) + target.strength, 1e-12)


def _coolest(target: Target, chains: int, params: Any) -> float:
    """The rate at which independent batches add the share ``HEAT`` to the virial, from differences of gradients of two."""
    apart, stacked, total, pairs = target.course(chains, -1, apart=True), target.stacked(chains), 0.0, 4
    for k in range(pairs):
        a, b = (
            optree.tree_leaves(gradient(stacked, params, apart.batch(*divmod(2 * k + j, len(apart))))[0])
            for j in (0, 1)
        )
        total += float(torch.stack([(x - y).double().square().sum() / 2 for x, y in zip(a, b)]).sum()) / (
            pairs * chains
        )
    bound = HEAT * target.free * 2 * target.temperature * (1 - target.momentum)
    return bound / total if 0 < total < math.inf else math.inf
