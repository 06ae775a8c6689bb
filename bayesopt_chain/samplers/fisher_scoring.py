r"""Stochastic gradient Fisher scoring (Ahn, Korattikara and Welling, 2012): the minibatch's own noise counts as Langevin noise.

With ``V`` the covariance of the gradients of single data, a batch of ``n`` gives the mean gradient noise ``V / n``. Injecting
``(2 T / lr) I`` besides, the total ``M = V / n + (2 T / lr) I`` asks for the step ``D = 2 T M^-1``,

    theta <- theta - D (g + sqrt(2 T / lr) xi),      D = (I / lr + V / (2 T n))^-1,

whose noise ``D M D = 2 T D`` is Langevin's. Small lr: SGLD. Large lr: no injected noise, all step from the Fisher information;
near a posterior mode of ``N = 1 / T`` data, where ``V`` is the Hessian of the mean loss, a step then contracts by ``2 n / N``.

``V`` is a bias-corrected running average of what ``update`` receives as ``gradient_variance=``: the variance of each
parameter's gradient across single data (per datum, not divided by the batch size), a tree like the parameters; with
``dense`` the covariance matrix ``[d, d]``, the leaves flattened in optree order. On a quadratic loss, with that
gradient noise, the bias is that of SGLD with step ``D``.

At T = 0 with gradient noise the step vanishes, and without it this is SGD; there is no optimizer to go to, and
temperature 0 is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain, Rule
from bayesopt_chain.core.leaves import zeros_like
from bayesopt_chain.links import own_noise
from bayesopt_chain.links.langevin_noise import Temperature


class FisherState(NamedTuple):
    """Stream; running average of the gradients' variance, for each leaf or as one matrix."""

    key: Tensor
    count: Tensor
    variance: tuple[Tensor, ...]


@dataclass(frozen=True)
class FisherScoring(Rule):
    """The rule behind :func:`sgfs`."""

    lr: float
    temperature: Temperature
    batch_size: int
    decay: float
    generator: torch.Generator | None = field(default=None, hash=False, compare=False)
    response = own_noise.ITS_OWN_NOISE
    accepts = frozenset({"gradient_variance"})
    name = "sgfs"
    words = ""

    def init(self, params):
        return FisherState(*own_noise.start(params, self.generator), zeros_like(params))

    def update(self, g, state, params, ctx):
        came = self.variance_of(ctx)
        xi = own_noise.draw(state, list(state.variance), 1)
        temperature, inject, corrected = self.now(state)
        variance: list = [None] * len(g)
        out: list = [None] * len(g)
        for i, x in enumerate(g):
            if x is None:
                continue
            variance[i] = self.decay * state.variance[i] + (1.0 - self.decay) * came[i]
            step = 1.0 / (1.0 / self.lr + variance[i] * (corrected / (2.0 * temperature * self.batch_size)))
            out[i] = -step * (x + inject * xi[i][0])
        return own_noise.emit(g, out, ctx.inplace), self.next_state(state, variance, ctx.inplace)

    def now(self, state):
        """Temperature, standard deviation of the injected noise, and the average's correction for its start at 0."""
        temperature = own_noise.now(self.temperature, state.count)
        corrected = 1.0 / (1.0 - self.decay ** (state.count + 1).to(torch.float64))
        return temperature, own_noise.root(2.0 * temperature / self.lr), corrected

    def variance_of(self, ctx) -> list:
        came = ctx.extra.get("gradient_variance")
        if came is None:
            raise ValueError(
                f"{self.name}: update needs gradient_variance=, the variance of single-datum gradients; "
                "pass make_step(..., gradient_variance=fn)"
            )
        return optree.tree_leaves(came, none_is_leaf=True)

    def next_state(self, state, variance: list, inplace: bool) -> FisherState:
        return FisherState(
            state.key,
            own_noise.tick(state.count, inplace),
            own_noise.write(state.variance, variance, inplace),
        )

    def __str__(self) -> str:
        return f"sgfs({self.lr}, batch_size={self.batch_size}, temperature={checks.show(self.temperature)}{self.words})"


@dataclass(frozen=True)
class DenseFisherScoring(FisherScoring):
    """The rule behind :func:`sgfs` with ``dense``."""

    words = ", dense=True"

    def init(self, params):
        leaves = [p for p in params if p is not None]
        d = sum(p.numel() for p in leaves)
        key, count = own_noise.start(params, self.generator)
        return FisherState(key, count, (torch.zeros(d, d, dtype=leaves[0].dtype, device=leaves[0].device),))

    def update(self, g, state, params, ctx):
        (came,) = self.variance_of(ctx)
        (old,) = state.variance
        live = [x for x in g if x is not None]
        if sum(x.numel() for x in live) != old.shape[-1]:
            raise ValueError(
                "sgfs: with dense=True every parameter needs a gradient, since the matrix couples them all; use dense=False"
            )
        flat = torch.cat([x.reshape(-1) for x in live])
        ((xi,),) = own_noise.draw(state, [flat], 1)
        temperature, inject, corrected = self.now(state)
        new = self.decay * old + (1.0 - self.decay) * came
        inverse = torch.eye(len(flat), dtype=old.dtype, device=old.device) / self.lr
        inverse = inverse + new * (corrected / (2.0 * temperature * self.batch_size)).to(old.dtype)
        move = -torch.linalg.solve(inverse, flat + (inject * xi).to(flat.dtype))
        parts = iter(move.split([x.numel() for x in live]))
        out = [None if x is None else next(parts).reshape(x.shape) for x in g]
        return own_noise.emit(g, out, ctx.inplace), self.next_state(state, [new], ctx.inplace)


def sgfs(
    lr: float,
    *,
    temperature: Temperature,
    batch_size: int,
    dense: bool = False,
    decay: float = 0.95,
    generator: torch.Generator | None = None,
) -> Chain:
    """Stochastic gradient Fisher scoring (Ahn, Korattikara and Welling, 2012), diagonal or with the whole matrix.

    ``update`` takes ``gradient_variance=``: the variance of each parameter's gradient across single data as a tree like the
    parameters, or with ``dense`` their covariance, ``[d, d]``. :func:`bayesopt_chain.make_step` passes what its
    argument of that name returns.

    Args:
        lr: learning rate where the gradients have no noise; the step is never longer.
        temperature: positive number, 0-d tensor or schedule; ``1 / N`` for a loss that is a mean over ``N`` data.
        batch_size: ``n``, data in a batch.
        dense: the whole matrix over all ``d`` parameters, ``O(d^3)`` a step, instead of its diagonal.
        decay: weight of the past in the average of ``gradient_variance=``, in [0, 1).
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds one tensor for each parameter, or with ``dense`` one matrix ``[d, d]``.

    Raises:
        ValueError: temperature 0, or another argument out of range; at ``update``, a missing ``gradient_variance=``, or with
            ``dense`` a missing gradient.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.samplers.sgfs(0.1, temperature=1 / 500, batch_size=50), torch.zeros(2)
        >>> updates, state = tx.update(torch.ones(2), tx.init(params), params=params, gradient_variance=torch.ones(2))
    """
    checks.positive("sgfs: lr", lr)
    checks.positive("sgfs: batch_size", batch_size)
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"sgfs: decay must lie in [0, 1), got {decay!r}")
    own_noise.positive_temperature(
        "sgfs", temperature, "its step is 2 T / (noise) and vanishes there; use bc.sgd to optimise"
    )
    rule = DenseFisherScoring if dense else FisherScoring
    return Chain((rule(lr, temperature, batch_size, decay, generator),))
