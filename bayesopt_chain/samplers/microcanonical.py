r"""Microcanonical Langevin sampling: momentum of length one, turned towards lower loss and refreshed a little at every step.

All parameters together, ``d`` of them, have a direction ``u``, ``|u| = 1``. With the gradient ``g`` of the mean loss at
``theta``, ``e = -g / |g|`` and ``zeta = exp(-delta)``, ``delta = lr |g| / (T (d - 1))``, a kick is the exact flow of
``u`` for a time ``lr``,

    u <- e (1 - zeta) (1 + zeta + (e.u) (1 - zeta)) + 2 zeta u,     normalised;

a refresh is ``u <- u + nu z``, normalised, ``nu^2 = (exp(2 lr / L) - 1) / d``, ``z`` standard normal. A step is half
a kick, a refresh, half a kick (the same gradient) and ``theta <- theta + lr u``. In the limit of small steps ``theta`` samples
``exp(-loss / T)`` (Robnik, De Luca, Silverstein and Seljak, 2023; Robnik and Seljak, 2024); for neural networks see MILE
(Sommer, Robnik, Nozadze, Seljak and Rügamer, 2025). As T -> 0 a kick turns ``u`` into ``e``: normalised gradient descent.

``lr`` is a length, not a learning rate times a gradient, so that the noise of minibatches cannot push ``theta`` away: it only
turns ``u``, which heats all the same.

With a precision ``Lambda = R^-T R^-1`` the same runs in the coordinates ``R^-1 theta``. In terms of ``w = R u`` and
``s = Lambda^-1 g`` that is ``|g|^2 -> g.s``, ``e -> -s / sqrt(g.s)``,
``e.u -> -g.w / sqrt(g.s)``, ``|u|^2 -> w^T Lambda w``, ``z -> R z``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.links.keyed import Keyed
from bayesopt_chain.links.learning_rate import scale_by_neg_lr
from bayesopt_chain.matching.response import Nonlinear, SelfContainedSampler
from bayesopt_chain.schedules import ScalarOrSchedule, is_zero, now
from bayesopt_chain.trees import wide


class MicrocanonicalState(NamedTuple):
    """Key and count of the stream, 0-d int64; the direction ``R u``, like each parameter, zero before the first step."""

    key: Tensor
    step: Tensor
    direction: tuple[Tensor, ...]


_TRAITS = Traits(
    checks_gradients=True,
    needs_all_gradients=True,
    refusal_hint="; bc.sghmc treats every element by itself",
    response=SelfContainedSampler(),
)


@dataclass(frozen=True)
class Normalised(Link):
    """``Lambda^-1 g`` over its length: what :func:`mclmc` is at temperature 0."""

    precision: Any = field(default=None, hash=False, compare=False)
    name = "normalise"
    traits = replace(_TRAITS, response=Nonlinear())

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        e, _ = Metric(self.precision, context.tree, context.leaves).downhill(g)
        return op.put(g, [-x for x in e]), state


@dataclass(frozen=True)
class Microcanonical(Keyed):
    """The link behind :func:`mclmc`."""

    lr: float
    length: float
    temperature: ScalarOrSchedule
    precision: Any = field(default=None, hash=False, compare=False)
    name = "mclmc"
    traits = _TRAITS

    def init(self, leaves: Leaves, context: LinkContext) -> MicrocanonicalState:
        if (d := sum(x.numel() for x in leaves)) < 2:
            raise ValueError(f"mclmc: needs at least 2 parameters, whose directions it turns, got {d}; take bc.sghmc")
        return MicrocanonicalState(*self.start(leaves, context), tuple([torch.zeros_like(x) for x in leaves]))

    def update(
        self, g: Leaves, state: MicrocanonicalState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, MicrocanonicalState]:
        temperature = checks.at_this_step("temperature", now(self.temperature, state.step))
        metric, d = Metric(self.precision, context.tree, context.leaves), sum(x.numel() for x in g)
        z = [one for (one,) in self.normals(state, g, context)]
        e, steep = metric.downhill(g)
        delta = steep * strength(self.lr, d) / temperature
        w = metric.kicked(state.direction, e, delta, g)
        w = metric.kicked(metric.refreshed(w, z, freshness(self.lr, self.length, d)), e, delta, g)
        if isinstance(temperature, Tensor):
            w = [torch.where(temperature > 0, x, y) for x, y in zip(w, e)]
        after = op.put(list(state.direction), w)
        return op.put(g, [self.lr * x for x in w]), MicrocanonicalState(
            state.key, op.next_count(state.step), tuple(after)
        )


class Metric(NamedTuple):
    """The coordinates in which the direction has length one: those of a precision, or the parameters' own.

    Attributes:
        precision: or ``None``.
        tree, leaves: from leaves to what the precision takes, and back.
    """

    precision: Any
    tree: Callable[[Leaves], Any]
    leaves: Callable[[Any], Leaves]

    def downhill(self, g: Leaves) -> tuple[Leaves, Tensor]:
        """The direction ``e`` and the steepness ``|g|``; both zero where the gradient is."""
        s = g if self.precision is None else self._like(self.precision.solve(self.tree(g)), g)
        steep = _dot(g, s).clamp(min=0.0).sqrt()
        safe = torch.where(steep > 0, steep, torch.ones_like(steep))
        return [-(x / safe.to(x.dtype)) for x in s], steep

    def kicked(self, w: Sequence[Tensor], e: Leaves, delta: Tensor, g: Leaves) -> Leaves:
        """The direction after a kick of strength ``delta`` along the gradient."""
        along, zeta = _along(w, e, g), torch.exp(-delta)
        toward = (1 - zeta) * (1 + zeta + along * (1 - zeta))
        return self.unit([toward.to(x.dtype) * x + 2 * zeta.to(x.dtype) * y for x, y in zip(e, w)], e)

    def refreshed(self, w: Leaves, z: Leaves, size: float) -> Leaves:
        """The direction with a little noise."""
        z = z if self.precision is None else self._like(self.precision.sqrt_solve(self.tree(z)), w)
        return self.unit([x + size * y for x, y in zip(w, z)], w)

    def unit(self, w: Leaves, otherwise: Leaves) -> Leaves:
        """These at length one; another direction where they have none."""
        length = self.square(w).clamp(min=0.0).sqrt()
        safe = torch.where(length > 0, length, torch.ones_like(length))
        return [torch.where(length > 0, x / safe.to(x.dtype), y) for x, y in zip(w, otherwise)]

    def square(self, w: Leaves) -> Tensor:
        """The squared length, 0-d."""
        return _dot(w, w) if self.precision is None else self.precision.quad(self.tree(w))

    def _like(self, tree: Any, like: Sequence[Tensor]) -> Leaves:
        return [x.to(y.dtype) for x, y in zip(self.leaves(tree), like)]


def strength(lr: float, d: int) -> float:
    """``delta`` of half a kick, over ``|g| / T``."""
    return lr / 2 / (d - 1)


def freshness(lr: float, length: float, d: int) -> float:
    """``nu``, the size of a refresh."""
    return math.sqrt(math.expm1(2 * lr / length) / d)


def _along(w: Sequence[Tensor], e: Leaves, g: Leaves) -> Tensor:
    """``e.u``, in ``[-1, 1]``."""
    steep = _dot(g, e).abs()  # e = -s / |g|, so that its product with g is -|g|
    return (-_dot(g, list(w)) / torch.where(steep > 0, steep, torch.ones_like(steep))).clamp(-1.0, 1.0)


def _dot(x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
    """The inner product over all leaves, 0-d, held in float32 at least."""
    terms = [(a * b).sum(dtype=wide(a.dtype)) for a, b in zip(x, y)]
    return sum(terms[1:], terms[0])


@checks.factory_takes(lr=checks.POSITIVE, length=checks.number("(0, inf]"))
def mclmc(
    lr: float,
    length: float,
    *,
    temperature: ScalarOrSchedule,
    precision: Any = None,
    generator: torch.Generator | None = None,
) -> Chain:
    """Microcanonical Langevin Monte Carlo (Robnik et al., 2023; for networks Sommer et al., 2025), one gradient a step.

    At ``temperature=0`` it is gradient descent by steps of length ``lr``.

    What is true of the energy need not be true of the parameters: in logistic regression on badly scaled features a chain
    without a precision has the mean energy right to 0.1 nats on full batches, and 11 % too much variance in the stiffest
    direction; on batches of 24 data 0.6 nats, and 5.9 times the variance (``benchmarks/results/heat.md``). **The
    energy is no certificate**; compare functions of several chains (:func:`bayesopt_chain.diagnostics.r_hat`). Minibatches
    turn the direction and thereby heat: with ``precision`` the Hessian (a Laplace approximation's, summed over the data) the
    variance is 1.4 times that of the posterior there.

    Args:
        lr: the distance that a step goes, in units of the parameters; with a precision in those of its standard deviations.
            A few per cent of ``sqrt(d)`` standard deviations, ``d`` parameters; halve it until the quantities that matter stop
            changing.
        length: the distance ``L`` after which the direction is forgotten; the usual rule is the root of the summed variances of
            the parameters, ``sqrt(d)`` with a precision. Infinite: never.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data, 1 for an unnormalised loss. Along a schedule the
            direction, which has length one, remembers no temperature: the new one is sampled as fast as the chain forgets.
        precision: of :mod:`bayesopt_chain.precision`; answers ``solve``, ``sqrt_solve`` and ``quad``, and is frozen. Decompose
            it first (``precision.factorised()``).
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds one tensor for each parameter.

    Raises:
        TypeError: a precision without these methods.
        ValueError: ``lr`` or ``length`` that is not positive; at ``init``, fewer than two parameters; at ``update``, a missing
            gradient.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.samplers.mclmc(0.3, 2.0, temperature=1.0), torch.zeros(4)
        >>> updates, state = tx.update(torch.ones(4), tx.init(params), params=params, inplace=False)
        >>> round(updates.norm().item(), 4)
        0.3
    """
    for method in ("solve", "sqrt_solve", "quad"):
        if precision is not None and not callable(getattr(precision, method, None)):
            raise TypeError(
                f"mclmc: precision has no {method}(tree), got {type(precision).__name__}; pass a precision of "
                "bc.precision"
            )
    if is_zero(temperature):
        return chain(Chain((Normalised(precision),)), scale_by_neg_lr(lr))
    return Chain((Microcanonical(lr, length, temperature, precision, generator=generator),))
