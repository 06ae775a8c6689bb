r"""Natural-gradient variational inference: Newton's method on the expected loss, whose Hessian is the precision.

For the mean loss per datum at temperature T, weight decay delta (a prior of precision ``delta / T`` about zero) and
theta ~ N(m, T (H + delta)^-1), with g and H-hat the loss's gradient and curvature per datum at the draws,

    v <- beta1 v + (1 - beta1) g                          v-bar = v / (1 - beta1^t)
    H <- beta2 H + (1 - beta2) H-hat
    m <- m - lr (H + delta)^-1 (v-bar + delta m).

VON takes H-hat from an estimator of curvature, in any structure (Khan et al., 2018; Khan and Rue, 2023); with the
diagonal of ``bc.curvature.empirical_fisher``, squared gradients of single data, it is VOGN (Osawa et al., 2019). IVON (Shen
et al., 2024, algorithm 1) takes it from the gradient and the noise, by Stein's identity, and corrects the average so that it
stays positive:

    h-hat = g (theta - m) / sigma^2,    sigma^2 = T / (h + delta)
    h <- beta2 h + (1 - beta2) h-hat + (1 - beta2)^2 (h - h-hat)^2 / (2 (h + delta)).

In the paper's letters ``lambda = 1 / T``. A prior N(mu_0, Lambda_0^-1) with a diagonal precision takes the place of weight
decay with ``delta = T Lambda_0`` for each parameter, and of ``delta m`` with ``delta (m - mu_0)``.

How long beta2 remembers. After t steps the average is

    h_t = beta2^t h_0 + (1 - beta2) sum_s beta2^(t - s) h-hat_s,

so that the first Hessian weighs ``beta2^t``: with 0.99999 still 96 % after 4,000 steps, 37 % after 100,000. It has left,
to ``exp(-5) = 0.7 %``, after t steps where ``1 - beta2 = 5 / t``. Against noise: one h-hat has about the variance
``E[g^2] / sigma^2``, their average ``(1 - beta2) / 2`` of it, which relative to h at ``delta = 0``, ``sigma^2 = T / h`` is

    Var(h) / h^2 = (1 - beta2) / 2 * E[g^2] / (T h),

so that a relative error epsilon takes ``1 - beta2 <= 2 epsilon^2 T h / E[g^2]``. Where that is below ``5 / t``, t steps are too
few for either: start near (``init_hessian``), take larger batches or more samples.

A Hessian that remembers so long lags behind the loss, and a step of ``lr / H`` for an H that is far too small diverges. So a
step is bounded by a trust radius r in units of the posterior itself: IVON's ``|Delta m| <= r sigma`` parameter by parameter,
VON's ``Delta m^T (H + delta) Delta m <= r^2 T P`` for P parameters. It binds while the Hessian is wrong, and not at
the posterior.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.link import LinkContext
from bayesopt_chain.core.op import TensorOps
from bayesopt_chain.distributed import shards
from bayesopt_chain.posterior.gaussian import Gaussian, device_of, times
from bayesopt_chain.posterior.vi._families import (
    TAKEN,
    Drawing,
    DrawingTransformation,
    along_samples,
    over_samples,
    require_drawn_from,
)
from bayesopt_chain.precision import Diagonal, Precision
from bayesopt_chain.schedules import ScalarOrSchedule, now, scalar
from bayesopt_chain.tracing import is_readable
from bayesopt_chain.trees import upcast, wide

RADIUS = checks.number("(0, inf]")


class NaturalState(NamedTuple):
    """What the natural-gradient methods remember.

    Attributes:
        momentum: v, one tensor for each parameter, in float32 at least.
        hessian: H per datum; for IVON a tensor for each parameter, in float32 at least, else a precision.
        key: of the random stream, 0-d int64.
        step: of the updates, 0-d int64.
    """

    momentum: tuple[Tensor, ...]
    hessian: Any
    key: Tensor
    step: Tensor


@dataclass(frozen=True)
class Natural(Drawing):
    """What the natural-gradient links share: the random stream, the momentum and the mean gradient over several draws."""

    lr: ScalarOrSchedule
    betas: tuple[float, float]
    init_hessian: float = 1.0
    trust_radius: float | None = None
    state = NaturalState
    name = "vi"
    instead = "give it lr=, betas=, and a prior as weight_decay= or prior="
    default_radius = 10.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # a list would not hash
        super().__post_init__()
        if self.prior is not None and not isinstance(self.prior.precision, Diagonal):
            raise ValueError(
                f"{self.name}: the prior's precision is {type(self.prior.precision).__name__}, and this method takes a "
                "diagonal one: pass Gaussian(mean, Diagonal(...)), or use bc.vi.dense with prior="
            )

    @property
    def radius(self) -> float:
        """How many deviations a step may move; without a word it depends on how far the Hessian lags behind.

        At temperature 0 there are no deviations, and no step is bounded.
        """
        if self.trust_radius is not None:
            return self.trust_radius
        return math.inf if self.is_deterministic or self.betas[1] in (0, 1) else self.default_radius

    def init(self, leaves: list, context: LinkContext) -> NaturalState:
        checks.samplable(leaves, context.paths)
        key, count = self.first_key(leaves, context)
        momentum = tuple(torch.zeros_like(leaf, dtype=wide(leaf.dtype)).detach() for leaf in leaves)
        return NaturalState(momentum, self.first_hessian(shards.local_tree(context.tree(leaves))), key, count)

    @abstractmethod
    def first_hessian(self, params: Any) -> Any:
        """The Hessian before the first step, from the tree of params."""

    def shapes(self, state: NaturalState) -> list:
        """The parameters' shapes that the state remembers."""
        return [v.shape for v in state.momentum]

    @abstractmethod
    def precision(self, state: NaturalState, params: Any) -> Precision:
        """Of the posterior, over the tree of params."""

    def update(self, g: list, state: NaturalState, op: TensorOps, context: LinkContext) -> tuple[list, NaturalState]:
        leaves = context.params
        samples: Any = upcast(self._samples(g, context.extra.get("draw"), state, leaves))
        hessian = self.next_hessian(samples, state, context)
        means = [None if x is None else over_samples(x) for x in samples]
        force, momentum = self._force(means, state, leaves)
        new = NaturalState(momentum, hessian, state.key, state.step + 1)
        moves = self.moves(force, hessian, state, leaves)
        return [None if x is None else x.to(p.dtype) for x, p in zip(moves, leaves)], op.keep(state, new)

    def heat(self, state: NaturalState) -> Tensor:
        """The temperature of a step, 0-d."""
        return scalar(now(self.temperature, state.step), state.key.device)

    @abstractmethod
    def next_hessian(self, samples: list, state: NaturalState, context: LinkContext) -> Any:
        """The average of the Hessian with what this step says of it.

        Args:
            samples: gradients, ``[n_samples, *leaf.shape]`` or ``None``.
            state: before the update.
            context: with the draw and other keywords.
        """

    @abstractmethod
    def moves(self, force: list, hessian: Any, state: NaturalState, leaves: list) -> list:
        """Of the mean, within the trust radius; ``None`` without a force."""

    def _samples(self, g: list, draw: Any, state: NaturalState, leaves: list) -> list:
        """The leaves' gradients, samples on axis 0."""
        if not self.is_deterministic:
            require_drawn_from(draw, state, self.name)
        elif self.n_samples > 1:
            g = [x if x is None or x.ndim > p.ndim else x.expand(self.n_samples, *p.shape) for x, p in zip(g, leaves)]
        return along_samples(g, leaves, self.n_samples, self.name)

    def decay(self, state: NaturalState) -> list:
        """delta for each parameter: a number, or the prior's precision times the temperature."""
        if self.prior is None:
            return [self.weight_decay] * len(state.momentum)
        temperature = now(self.temperature, state.step)
        return [times(v, temperature) for v in optree.tree_leaves(self.prior.precision.diag())]

    def _force(self, means: list, state: NaturalState, leaves: list) -> tuple[list, tuple]:
        """``v-bar + delta (m - mu_0)``, ``None`` without a gradient, and the next momentum."""
        beta = self.betas[0]
        momentum = tuple(v if g is None else v * beta + g * (1 - beta) for g, v in zip(means, state.momentum))
        correction = 1 - beta ** (state.step + 1).to(torch.float64)
        centred = leaves if self.prior is None else [p - m for p, m in zip(leaves, optree.tree_leaves(self.prior.mean))]
        force = [
            None if g is None else times(v, 1 / correction) + p * d
            for g, v, p, d in zip(means, momentum, centred, self.decay(state))
        ]
        return force, momentum


def averaged(h: Tensor, estimate: Tensor, delta: Any, beta: float) -> Tensor:
    """IVON's next average of the Hessian, which stays positive; ``bc.optim.IVON`` has it from here too."""
    rho, gap = 1 - beta, h - estimate
    return h if rho == 0 else h + (0.5 * rho**2 * gap.square() / (h + delta) - rho * gap)


def newton(force: Tensor, h: Tensor, delta: Any, lr: float | Tensor, scale: Any, radius: float) -> Tensor:
    """IVON's move of the mean, ``-lr scale (force / (h + delta))``, the quotient within ``radius``."""
    return times((force / (h + delta)).clamp(-radius, radius) * scale, -lr)


@dataclass(frozen=True)
class IVON(Natural):
    rescale_lr: bool = True
    clip_radius: float = math.inf
    name = "vi.ivon"
    default_radius = 1.0
    on_shards = "elementwise"

    def first_hessian(self, params):
        return tuple(torch.full_like(leaf, self.init_hessian).detach() for leaf in optree.tree_leaves(upcast(params)))

    def displace(self, state, noise, leaves):
        return [s * z for s, z in zip(self._sigma(state), noise)]

    def _sigma(self, state: NaturalState) -> list[Tensor]:
        root = self.heat(state).sqrt()
        return [times((h + d).rsqrt(), root) for h, d in zip(state.hessian, self.decay(state))]

    def next_hessian(self, samples, state, context):
        if self.is_deterministic:
            return state.hessian
        draw: Any = context.extra.get("draw")
        estimates = [
            None if x is None else over_samples(x * z) / s for x, z, s in zip(samples, draw.noise, self._sigma(state))
        ]
        is_drawn = self.heat(state) > 0
        return tuple(
            h if x is None else torch.where(is_drawn, averaged(h, x, d, self.betas[1]), h)
            for x, h, d in zip(estimates, state.hessian, self.decay(state))
        )

    def moves(self, force, hessian, state, leaves):
        lr = now(self.lr, state.step)
        steps = [
            None
            if f is None
            else newton(f, h, d, lr, self.init_hessian + d if self.rescale_lr else 1, self.clip_radius)
            for f, h, d in zip(force, hessian, self.decay(state))
        ]
        if self.radius == math.inf:
            return steps
        bounds = [self.radius * s for s in self._sigma(state._replace(hessian=hessian))]
        is_drawn = self.heat(state) > 0
        return [
            x if x is None else torch.where(is_drawn, torch.minimum(torch.maximum(x, -b), b), x)
            for x, b in zip(steps, bounds)
        ]

    def precision(self, state, params):
        temperature = now(self.temperature, state.step)
        values = [times(h + d, 1 / temperature) for h, d in zip(state.hessian, self.decay(state))]
        data = 1 / scalar(temperature, state.key.device)
        return Diagonal(optree.tree_unflatten(optree.tree_structure(params), values), data)


@dataclass(frozen=True)
class VON(Natural):
    name = "vi.von"
    keywords = frozenset({"draw", "curvature"})

    def first_hessian(self, params):
        leaves = optree.tree_leaves(upcast(params))  # alone, so that a mask's holes are not among them
        one = torch.ones((), dtype=torch.float64, device=device_of(leaves))
        return Diagonal(tuple(torch.full_like(p, self.init_hessian).detach() for p in leaves), one)

    def decayed(self, hessian: Precision, state: NaturalState) -> Precision:
        """``H + delta``."""
        if self.prior is None:
            return hessian.add_diagonal(self.weight_decay)
        return hessian.add_diagonal(optree.tree_unflatten(optree.tree_structure(hessian.diag()), self.decay(state)))

    def displace(self, state, noise, leaves):
        precision = self.decayed(state.hessian, state)
        tree = optree.tree_unflatten(optree.tree_structure(precision.diag()), list(noise))
        root = self.heat(state).sqrt()
        return [times(x, root) for x in optree.tree_leaves(precision.sqrt_solve(tree))]

    def moves(self, force, hessian, state, leaves):
        tree = optree.tree_unflatten(
            optree.tree_structure(hessian.diag()),
            [torch.zeros_like(v) if f is None else f for f, v in zip(force, state.momentum)],
        )
        precision = self.decayed(hessian, state)
        solved = optree.tree_leaves(precision.solve(tree))
        lr = now(self.lr, state.step)
        if self.radius != math.inf:
            moved = optree.tree_unflatten(optree.tree_structure(tree), [times(x, lr) for x in solved])
            temperature = self.heat(state)
            squares = precision.quad(moved).to(torch.float64) / sum(x.numel() for x in solved)
            bound = self.radius * temperature.to(torch.float64).sqrt() * squares.clamp_min(1e-300).rsqrt()
            factor = torch.where(temperature > 0, bound.clamp_max(1.0), 1.0)
            solved = [times(x, factor) for x in solved]
        return [None if f is None else -times(x, lr) for f, x in zip(force, solved)]

    def next_hessian(self, samples, state, context):
        increment = context.extra.get("curvature")
        if not isinstance(increment, Precision):
            raise ValueError(
                f"{self.name}: update got curvature={type(increment).__name__}: pass an increment of an estimator of "
                "bc.curvature at draw.params (make_step does, given curvature=)"
            )
        beta = self.betas[1]
        new = increment.scale((1 - beta) / increment.count)
        if isinstance(new, Diagonal):
            new = new._replace(values=tuple(optree.tree_leaves(new.values)))
        elif type(state.hessian) is Diagonal:
            if is_readable(state.step) and state.step > 0:
                raise TypeError(
                    f"{self.name}: the state is diagonal, the increment {type(increment).__name__}: the first increment "
                    "decides the structure; build every estimator with the same structure="
                )
            return new.add_diagonal(self.init_hessian * beta)
        return state.hessian.scale(beta).add(new)

    def precision(self, state, params):
        found = self.decayed(state.hessian, state).scale(1 / now(self.temperature, state.step))
        if not isinstance(found, Diagonal):
            return found
        return found._replace(values=optree.tree_unflatten(optree.tree_structure(params), found.values))


# at any temperature
NEWTON: dict[str, checks.Kind] = {
    **TAKEN,
    "lr": checks.ARGUMENTS["lr"],
    "betas": checks.Kind(
        lambda x: isinstance(x, (tuple, list)) and len(x) == 2 and 0 <= x[0] < 1 and 0 <= x[1] <= 1,
        "two numbers, the first in [0, 1), the second in [0, 1]",
        (tuple, list),
    ),
    "init_hessian": checks.POSITIVE,
    "trust_radius": RADIUS.or_none(),
}


@checks.link_takes(clip_radius=RADIUS, **NEWTON)
def ivon(
    lr: ScalarOrSchedule,
    *,
    temperature: ScalarOrSchedule,
    betas: tuple[float, float] = (0.9, 0.99999),
    rescale_lr: bool = True,
    clip_radius: float = math.inf,
    weight_decay: float = 0.0,
    prior: Gaussian | None = None,
    init_hessian: float = 1.0,
    trust_radius: float | None = None,
    n_samples: int = 1,
    antithetic: bool = False,
    generator: torch.Generator | None = None,
) -> DrawingTransformation:
    """Improved variational online Newton: a diagonal Gaussian at the cost of Adam (Shen et al., 2024).

    Args:
        lr: learning rate; a number, a 0-d tensor or a schedule of the update count.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data (the paper's ``1 / lambda``). At the number 0
            nothing is drawn and the Hessian stays as it began: momentum SGD.
        betas: weights of the past in the averages of gradients (bias-corrected) and Hessians; the second may be 1. The
            default 0.99999 is the paper's for training of 100,000 steps and more: the first Hessian keeps the weight
            ``beta2^t``, 96 % after 4,000 steps. For t steps ``1 - 5 / t`` lets it go: 0.995 for 1,000, 0.9988 for 4,000,
            0.9995 for 10,000, 0.99995 for 100,000 (see :mod:`bayesopt_chain.posterior.vi._natural` for the noise).
        weight_decay: delta per datum, the prior of precision ``delta / temperature`` about zero, which the loss then
            leaves out; 0 where the loss contains the prior.
        prior: a :class:`Gaussian` with a diagonal precision that the loss leaves out; instead of ``weight_decay``.
        init_hessian: first Hessian per datum, positive.
        rescale_lr: multiply lr by ``init_hessian + weight_decay``, so that at first it is SGD's.
        clip_radius: bound on each entry of the preconditioned gradient.
        trust_radius: the most that a step moves a parameter, in its own posterior deviations. Default 1 (none with
            ``betas[1]`` 0 or 1, where no Hessian lags; ``math.inf`` for none). Without a bound, a loss of a curvature far above
            ``init_hessian``, such as one over a small noise variance, throws the mean away before the Hessian has seen it.
        n_samples, antithetic, generator: as in :func:`mean_field`.

    Returns:
        A transformation with ``sample`` and ``posterior``. ``update`` needs ``params=`` and ``draw=``. Its state holds two
        tensors for each parameter.

    Raises:
        ValueError: numbers out of range; at ``update``, no draw, or one from another state.
        TypeError: at ``init``, parameters that are not floating point.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.vi.ivon(0.1, temperature=1 / 100, weight_decay=1e-3)
        >>> step = bc.make_step(lambda params, batch: (params - batch).square().mean(), tx)
        >>> params = torch.zeros(2)
        >>> params, state, info = step(params, tx.init(params), torch.ones(2))
        >>> tx.posterior(state, params).marginal_variance.shape
        torch.Size([2])
    """
    link = IVON(
        lr,
        betas,
        temperature=temperature,
        rescale_lr=rescale_lr,
        clip_radius=clip_radius,
        weight_decay=weight_decay,
        prior=prior,
        init_hessian=init_hessian,
        trust_radius=trust_radius,
        n_samples=n_samples,
        antithetic=antithetic,
        generator=generator,
    )
    return DrawingTransformation((link,))


@checks.link_takes(**NEWTON)
def von(
    lr: ScalarOrSchedule,
    *,
    temperature: ScalarOrSchedule,
    betas: tuple[float, float] = (0.0, 0.999),
    weight_decay: float = 0.0,
    prior: Gaussian | None = None,
    init_hessian: float = 1.0,
    trust_radius: float | None = None,
    n_samples: int = 1,
    antithetic: bool = False,
    generator: torch.Generator | None = None,
) -> DrawingTransformation:
    """Variational online Newton with a precision of any structure (Khan et al., 2018; Khan and Rue, 2023).

    The precision has the structure of the increments that ``update`` is given as ``curvature=`` (an estimator of
    ``bc.curvature`` at the draw); until the first, it is diagonal. ``lr=1`` with ``betas=(0, 0)`` is Newton's method on
    the expected loss. Without momentum and for a convex loss the fixed point is the best Gaussian of the structure.

    Args:
        lr: learning rate in units of Newton steps, at most 1.
        betas: weights of the past in the averages of gradients (bias-corrected) and curvature.
        init_hessian: the curvature per datum before the first increment, positive.
        trust_radius: the most that a step moves, in posterior deviations, root mean square over the parameters. Default 10, and
            none with ``betas[1] = 0``, where the curvature is that of the step itself; ``math.inf`` for none.
        temperature, weight_decay, prior, n_samples, antithetic, generator: as in :func:`ivon`.

    Returns:
        A transformation with ``sample`` and ``posterior``. ``update`` needs ``params=``, ``draw=`` and ``curvature=``.

    Raises:
        ValueError: numbers out of range; at ``update``, no draw, one from another state, or no curvature.
        TypeError: at ``update``, an increment of another structure than the state's.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> forward, likelihood = lambda params, batch: batch[0] @ params, bc.likelihoods.bernoulli()
        >>> tx = bc.vi.von(0.5, temperature=1 / 8, weight_decay=1 / 8)
        >>> step = bc.make_step(
        ...     lambda params, batch: likelihood.nll(forward(params, batch), batch[1]).mean(),
        ...     tx,
        ...     curvature=bc.curvature.ggn(forward, likelihood, "dense"),
        ... )
        >>> params = torch.zeros(2, 1)
        >>> params, state, info = step(params, tx.init(params), (torch.randn(8, 2), torch.ones(8, 1)))
        >>> tx.posterior(state, params).precision.to_dense().shape
        torch.Size([2, 2])
    """
    link = VON(
        lr,
        betas,
        temperature=temperature,
        weight_decay=weight_decay,
        prior=prior,
        init_hessian=init_hessian,
        trust_radius=trust_radius,
        n_samples=n_samples,
        antithetic=antithetic,
        generator=generator,
    )
    return DrawingTransformation((link,))
