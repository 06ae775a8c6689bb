r"""Variational inference as a gradient transformation: the loss's gradient at a draw moves a Gaussian.

For q = N(mu, Sigma) in a family with parameters phi, and the mean loss per datum at temperature T, it descends

    F(mu, phi) = E_q[loss(theta)] - T H[q],      theta = mu + displacement(phi, noise),

the negative ELBO divided by the number of data when ``T = 1 / N`` and the loss is the mean negative log posterior. With
``g`` the loss's gradient at the draw and ``Lambda = Sigma^-1``, its gradient is, in closed form,

    stick the landing     g' = g - T Lambda (theta - mu),   dF/dmu = g',   dF/dphi = pullback(g')
    otherwise             dF/dmu = g,                       dF/dphi = pullback(g) - T dH/dphi,

where ``pullback`` is the transposed derivative of the displacement by phi. Both are unbiased. The first is exactly zero,
for every draw, where q is the posterior (Roeder, Wu and Duvenaud, 2017). The optimizer then sees a gradient of mu and one
of phi. A prior N(mu_0, Lambda_0^-1) that the loss leaves out adds ``T Lambda_0 (theta - mu_0)`` to g; weight decay delta is
the prior with ``mu_0 = 0``, ``T Lambda_0 = delta``. Gradients of the reparameterised ELBO: Kucukelbir, Tran, Ranganath,
Gelman and Blei, 2017 (mean field and dense); Ong, Nott and Smith, 2018 (low rank plus diagonal).

``mean_field``, ``dense`` and ``low_rank``: the optimizer you have, moving a Gaussian instead of a point.

F says how far any Gaussian is from the posterior, in nats, whichever method gave it:

    F(q) = E_q[loss(theta)] - T H[q] = E_q[loss(theta) + T log q(theta)],        -F / T <= log Z = log int exp(-loss / T),

with equality where q is the posterior; there ``loss + T log q`` is the same for every draw, so that its mean has no error
(Jordan, Ghahramani, Jaakkola and Saul, 1999).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import checks
from bayesopt_chain._torch import local, whole
from bayesopt_chain.compose import chain
from bayesopt_chain.core.link import LinkContext, OnShards
from bayesopt_chain.core.op import TensorOps
from bayesopt_chain.distributed import shards
from bayesopt_chain.posterior.draw import (
    Draw,
    Drawing,
    along_samples,
    over_samples,
    require_drawn_from,
)
from bayesopt_chain.posterior.gaussian import (
    Gaussian,
    PosteriorTransformation,
    names_in,
    require_finite,
    require_numbers,
    require_these,
    standard_normals,
    times,
)
from bayesopt_chain.posterior.vi._families import Dense, Family, LowRank, MeanField
from bayesopt_chain.precision import Precision
from bayesopt_chain.schedules import ScalarOrSchedule, now, scalar
from bayesopt_chain.trees import copied, paths_of, spread, upcast, wide


class VariationalState(NamedTuple):
    """What the families remember.

    Attributes:
        scale: the family's parameters phi.
        mean_optimizer: the optimizer's state for the mean.
        scale_optimizer: the optimizer's state for phi.
        key: of the random stream, 0-d int64.
        step: of the updates, 0-d int64.
    """

    scale: tuple[Tensor, ...]
    mean_optimizer: Any
    scale_optimizer: Any
    key: Tensor
    step: Tensor


class VariationalInfo(NamedTuple):
    """What a step reports.

    Attributes:
        loss: the mean over the draws, 0-d.
        aux: the loss's auxiliary output; with several samples each of its tensors has them on axis 0.
        negative_elbo: per datum, in nats, 0-d.
        finite, gradient_norm, temperature, observed: as in :class:`bayesopt_chain.Info`.
    """

    loss: Tensor
    aux: Any
    negative_elbo: Tensor
    finite: Any = ()
    gradient_norm: Any = ()
    temperature: Any = ()
    observed: Any = ()


@dataclass(frozen=True)
class Variational(Drawing):
    """The link behind the variational families: the family, and two optimizers, one for mu and one for phi."""

    family: Family
    optimizer: GradientTransformation
    stick_the_landing: bool = True
    scale_optimizer: Any = None
    state = VariationalState
    instead = "give such links to its optimizer (bc.chain(link, bc.adam(...))), and a prior as weight_decay= or prior="

    def __post_init__(self) -> None:
        who = self.family.name
        for name, tx in (("optimizer", self.optimizer), ("scale_optimizer", self.scale_optimizer or self.optimizer)):
            if not isinstance(tx, GradientTransformation):
                raise TypeError(f"{who}: {name} is {tx!r}, not a gradient transformation")
            object.__setattr__(self, name, chain(tx))  # so that both take params= and unknown keywords as chains do
        if isinstance(self.family.init_scale, (int, float)):
            checks.POSITIVE(f"{who}: init_scale", self.family.init_scale)
        super().__post_init__()

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.family.name

    @property
    def on_shards(self) -> OnShards:  # the optimizers are given DTensors, so that they keep their own rules about them
        return "tree" if self.family.elementwise else "refused"

    def init(self, leaves: list, context: LinkContext) -> VariationalState:
        params, (key, zero) = context.tree(leaves), self.first_key(leaves, context)

        # These are the normals of count 0, so that the first draw, at count 1, is independent of phi's start.
        def normals(n: int) -> tuple[Tensor, ...]:
            return standard_normals(key, zero, leaves, context.paths, n)

        if not self.is_deterministic:
            require_gradients_alone(self.optimizer, shards.local_tree(params), self.name)
        scale = self.family.start(leaves, self._first_scales(params, context), normals)
        scale = tuple(context.spread(scale)) if self.family.elementwise else scale
        return VariationalState(scale, self.optimizer.init(params), self.scale_optimizer.init(scale), key, zero + 1)

    def _first_scales(self, params: Any, context: LinkContext) -> list[Tensor]:
        """The standard deviations to start from, by leaf."""
        what = f"{self.name}: init_scale"
        scales = context.parts(spread(self.family.init_scale, params, what), what)
        require_numbers(scales, params, what)
        return scales

    def noise_like(self, leaves: list, names: Sequence[str]) -> tuple[list, Sequence[str]]:
        return self.family.noise_like(leaves, names)

    def displace(self, state: VariationalState, noise: tuple, leaves: list) -> list:
        return self.family.displace(state.scale, noise, leaves)

    def update(
        self, g: list, state: VariationalState, op: TensorOps, context: LinkContext
    ) -> tuple[list, VariationalState]:
        params = context.params
        if self.is_deterministic:
            if self.n_samples > 1:
                g = [None if x is None else x.mean(0) if x.ndim > p.ndim else x for x, p in zip(g, params)]
            if self.weight_decay:
                g = [None if x is None else x + self.weight_decay * p for x, p in zip(g, params)]
            moves, optimizer = self._move_mean(g, state, params, op, context)
            return moves, state._replace(mean_optimizer=optimizer)
        draw: Any = context.extra.get("draw")
        require_drawn_from(draw, state, self.name)
        mine = state._replace(scale=tuple(map(local, state.scale)))
        by_mean, by_scale = self._gradients(g, draw.noise, mine, params)
        moves, mean_optimizer = self._move_mean(by_mean, state, params, op, context)
        if self.family.elementwise:
            by_scale = tuple(context.spread(by_scale))
        steps, scale_optimizer = self.scale_optimizer.update(
            by_scale, state.scale_optimizer, params=state.scale, inplace=op.inplace
        )
        scale = tuple(s if step is None else s + step for s, step in zip(state.scale, steps))
        new = VariationalState(scale, mean_optimizer, scale_optimizer, state.key, state.step + 1)
        return moves, op.keep(state, new)

    def _gradients(self, g: list, noise: Any, state: VariationalState, leaves: list) -> tuple[list, tuple]:
        """Of F by the mean, ``None`` where there is none, and by phi."""
        family = self.family
        samples = along_samples(g, leaves, self.n_samples, family.name)
        moves = [x is not None for x in samples]
        filled = [
            p.new_zeros((self.n_samples, *p.shape), dtype=wide(p.dtype)) if x is None else upcast(x)
            for x, p in zip(samples, leaves)
        ]
        temperature = now(self.temperature, state.step - 1)
        if self.weight_decay or self.prior is not None:
            theta = [p + x for p, x in zip(leaves, family.displace(state.scale, noise, leaves))]
            factor = self.weight_decay if self.prior is None else temperature
            pull = theta if self.prior is None else prior_force(self.prior, theta)
            filled = [x + times(y, factor) if m else x for x, y, m in zip(filled, pull, moves)]
        if self.stick_the_landing:
            score = family.score(state.scale, noise, leaves)
            filled = [x - times(y, temperature) if m else x for x, y, m in zip(filled, score, moves)]
        by_scale = family.pullback(state.scale, noise, filled)
        if not self.stick_the_landing:
            entropy = family.entropy_gradient(state.scale)
            by_scale = tuple(x - times(y, temperature) for x, y in zip(by_scale, entropy))
        by_mean = [over_samples(x).to(p.dtype) if m else None for x, p, m in zip(filled, leaves, moves)]
        return by_mean, tuple(family.only(by_scale, leaves, moves))

    def _move_mean(
        self, g: list, state: VariationalState, params: list, op: TensorOps, context: LinkContext
    ) -> tuple[list, Any]:
        moves, optimizer = self.optimizer.update(
            context.tree(g), state.mean_optimizer, params=context.tree(params), inplace=op.inplace
        )
        return context.leaves(moves), op.keep(state.mean_optimizer, optimizer)

    def report(self, state: VariationalState, draw: Draw, loss: Tensor, aux: Any) -> VariationalInfo:
        """What a step from this state says about itself."""
        return VariationalInfo(loss, aux, self.negative_elbo(state, loss, draw))

    def negative_elbo(self, state: VariationalState, loss: Tensor, draw: Draw | None) -> Tensor:
        """``loss - T H[q]``, and the prior at the draw."""
        if (self.weight_decay or self.prior is not None) and draw is None:
            raise ValueError(
                f"{self.name}: with a prior or weight_decay the negative ELBO needs draw=, the draw of the loss"
            )
        loss = whole(loss)
        drawn = [] if draw is None else optree.tree_leaves(draw.params)
        if self.prior is not None:
            density = self.prior.log_prob(like_prior(self.prior, drawn)).mean()
            loss = loss - times(density.to(loss), now(self.temperature, state.step - 1))
        if self.weight_decay:
            squares = torch.stack([whole(x.square().sum()).to(loss) for x in drawn]).sum()
            loss = loss + times(squares, 0.5 * self.weight_decay / self.n_samples)
        if self.is_deterministic:
            return loss
        entropy = whole(self.family.entropy(state.scale))  # of DTensors a message
        return loss - times(entropy, now(self.temperature, state.step - 1))

    def shapes(self, state: VariationalState) -> list | int:
        """The parameters' shapes that the state remembers, or their number."""
        return self.family.shapes(state.scale)

    def precision(self, state: VariationalState, params: Any) -> Precision:
        """Of the posterior, over the tree of params."""
        require_finite(state.scale, f"{self.name}: the scale")
        data = 1 / scalar(now(self.temperature, state.step - 1), state.step.device)
        return self.family.precision(state.scale, params, data)

    def __str__(self) -> str:
        words = [str(self.optimizer).replace("\n", " "), f"temperature={checks.show(self.temperature)}"]
        words += [f"n_samples={self.n_samples}"] if self.n_samples > 1 else []
        return f"{self.name}({', '.join(words)})"


def require_gradients_alone(tx: Any, params: Any, who: str) -> None:
    """Refuse an optimizer that moves where all gradients are zero: one that decays weights, or a sampler.

    A weight decay would act on the mean and not on the covariance, and noise of its own would be a second posterior's. The
    optimizer is asked by an update of parameters of one entry each, at zero and at one; one that cannot be asked so passes.
    """

    def moved(value: float) -> float:
        point = optree.tree_map(lambda p: p.new_full((1,) * p.ndim, value), params)
        nothing = optree.tree_map(torch.zeros_like, point)
        updates, _ = tx.update(nothing, tx.init(point), params=point, inplace=False)
        return sum(float(x.abs().sum()) for x in optree.tree_leaves(updates))

    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            draws, decays = moved(0.0), moved(1.0)
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError):
        return
    if math.isnan(draws):
        raise ValueError(
            f"{who}: the optimizer's step is NaN where gradients are zero: in float16 an eps such as 1e-8 rounds to 0; keep "
            "float32 parameters and use autocast, or pass the optimizer with an eps of at least 1e-4"
        )
    if draws:
        raise ValueError(
            f"{who}: the optimizer adds noise (it is a sampler, or has a temperature): pass it at temperature 0; the "
            "temperature of the posterior is this transformation's own"
        )
    if decays:
        raise ValueError(
            f"{who}: the optimizer has weight decay, which would pull the mean and leave the covariance as it is: pass the "
            "optimizer without it, and the prior here, as weight_decay= or prior="
        )


def like_prior(prior: Gaussian, leaves: list) -> Any:
    """Leaves as the tree that a prior is over."""
    return optree.tree_unflatten(optree.tree_structure(prior.mean), leaves)


def prior_force(prior: Gaussian, theta: list) -> list:
    """``Lambda_0 (theta - mu_0)``, shaped like theta: the gradient of half the precision's quadratic form."""
    centred = [x - m for x, m in zip(theta, optree.tree_leaves(prior.mean))]
    half = lambda *xs: prior.precision.quad(like_prior(prior, list(xs))).sum() / 2  # noqa: E731
    return list(torch.func.grad(half, argnums=tuple(range(len(centred))))(*centred))


class DrawingTransformation(PosteriorTransformation):
    """What the functions of :mod:`bayesopt_chain.posterior.vi` return.

    Its methods take the state of this transformation, or of a chain that has it as a link.
    """

    @checks.takes(params=checks.PARAMS)
    def sample(self, state: Any, params: Any) -> Draw:
        """Draw parameters from the posterior, to take the loss's gradient at.

        Args:
            state: from ``init`` or ``update``. One state gives one draw: it does not change by drawing.
            params: the mean.

        Returns:
            A :class:`Draw`; the leaves of ``draw.params`` are like the parameters for ``n_samples=1``, else they have
            the samples on axis 0.

        Raises:
            ValueError: a state of another transformation.
        """
        leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
        entry, here = self._state(state), [i for i, leaf in enumerate(leaves) if leaf is not None]
        names = names_in(state, entry) or [paths_of(params)[i] for i in here]
        draw = self._link.draw(entry, [leaves[i] for i in here], names)
        drawn = dict(zip(here, draw.params))
        return draw._replace(params=optree.tree_unflatten(spec, [drawn.get(i) for i in range(len(leaves))]))

    @checks.takes(params=checks.PARAMS)
    def posterior(self, state: Any, params: Any) -> Gaussian:
        """The Gaussian posterior around ``params``, of the type that ``bc.laplace`` gives.

        Args:
            state: from ``init`` or ``update``.
            params: the mean.

        Returns:
            A :class:`Gaussian` with a decomposed precision.

        Raises:
            ValueError: at ``temperature=0``, where there is none; parameters of other shapes than the state's; NaN in the
                state or the parameters (named).
        """
        mine, link = self._state(state), self._link
        require_these(link.shapes(mine), params, str(link))
        if link.is_deterministic:
            raise ValueError(f"{link.name}: at temperature=0 there is no posterior; pass temperature=1 / N")
        require_finite(params, "the posterior's mean")  # which is named, as numbers of phi are not
        return Gaussian(copied(params), link.precision(mine, params)).factorised()


class VariationalTransform(DrawingTransformation):
    """What ``mean_field``, ``dense`` and ``low_rank`` return."""

    @checks.takes(
        loss=checks.SCALAR, draw=checks.Kind(lambda x: isinstance(x, Draw), "what tx.sample(state, params) returned")
    )
    def negative_elbo(self, state: Any, loss: Tensor, draw: Draw | None = None) -> Tensor:
        """The negative ELBO per datum, in nats: ``loss - T H[q]``.

        Args:
            state: from ``init`` or ``update``.
            loss: the mean loss over the draws from that state, 0-d.
            draw: those draws, needed with ``prior`` and ``weight_decay``, for the prior's density there (with ``weight_decay``
                without its normaliser, a constant).

        Returns:
            0-d, differentiable in ``loss``.

        Raises:
            ValueError: with ``prior`` or ``weight_decay`` and no draw.
        """
        return self._link.negative_elbo(self._state(state), loss, draw)


TAKEN: dict[str, checks.Kind] = {"n_samples": checks.WHOLE, "prior": checks.POSTERIOR.or_none()}  # at any temperature


@checks.link_takes(**TAKEN)
def mean_field(
    optimizer: GradientTransformation,
    *,
    temperature: ScalarOrSchedule,
    init_scale: Any = 1e-2,
    n_samples: int = 1,
    antithetic: bool = False,
    stick_the_landing: bool = True,
    weight_decay: float = 0.0,
    prior: Gaussian | None = None,
    scale_optimizer: GradientTransformation | None = None,
    generator: torch.Generator | None = None,
) -> VariationalTransform:
    """Independent Gaussians on every parameter: ``theta = mu + sigma * z``. Bayes by backprop (Blundell, Cornebise, Kavukcuoglu
    and Wierstra, 2015).

    Args:
        optimizer: any of TorchOpt or this library; it moves the mean, which is the parameters, and log sigma.
        temperature: ``1 / N`` for a loss that is the mean negative log posterior over ``N`` data; a number, a 0-d tensor
            read at every update, or a schedule of the update count. At the number 0 the optimizer runs alone.
        init_scale: first standard deviations, in the parameters' units: a number, or a tree that broadcasts to the
            parameters, so that every leaf has its own. Far below the posterior's, the
            estimate of ``stick_the_landing`` has a variance of about ``(temperature / init_scale)^2``: raise ``init_scale``,
            or set ``stick_the_landing=False``.
        n_samples: draws for each update. More than one put the samples on axis 0 of draws and gradients.
        antithetic: draw in pairs ``mu +- displacement``; ``n_samples`` must be even.
        stick_the_landing: estimate the gradient along the path only: no variance at the optimum, when the posterior is in
            the family (see :mod:`bayesopt_chain.posterior.vi`).
        weight_decay: delta per datum, the prior of precision ``delta / temperature`` about zero, for a loss that leaves it
            out; the optimizer's own weight decay would miss its effect on sigma.
        prior: a :class:`Gaussian` over the parameters, such as the posterior of earlier data, for a loss that leaves it out
            (the mean negative log-likelihood); instead of ``weight_decay``.
        scale_optimizer: for log sigma, instead of ``optimizer``; for instance one without weight decay. It sees the
            tuple of phi's tensors, not the tree of parameters.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A transformation with ``sample``, ``posterior`` and ``negative_elbo``. ``update`` needs ``params=`` and, unless the
        temperature is the number 0, ``draw=``, the draw from the very state it is passed. Its state holds phi and twice
        what the optimizer remembers.

    Raises:
        ValueError: a temperature or scale that makes no sense; at ``update``, no draw, or one from another state.
        TypeError: an optimizer that is no gradient transformation; at ``init``, parameters that are not floating point.

    Example:
        >>> import torch, torchopt, bayesopt_chain as bc
        >>> tx = bc.vi.mean_field(torchopt.adam(1e-2), temperature=1 / 100)
        >>> params = {"w": torch.zeros(2)}
        >>> state = tx.init(params)
        >>> draw = tx.sample(state, params)
        >>> grads = {"w": draw.params["w"] - 1.0}  # of the loss |w - 1|^2 / 2 at the draw
        >>> updates, state = tx.update(grads, state, params=params, draw=draw, inplace=False)
        >>> tx.posterior(state, params).marginal_variance["w"].shape
        torch.Size([2])
    """
    link = Variational(
        MeanField(init_scale),
        optimizer,
        temperature=temperature,
        n_samples=n_samples,
        antithetic=antithetic,
        stick_the_landing=stick_the_landing,
        weight_decay=weight_decay,
        prior=prior,
        scale_optimizer=scale_optimizer,
        generator=generator,
    )
    return VariationalTransform((link,))


@checks.link_takes(**TAKEN)
def dense(
    optimizer: GradientTransformation,
    *,
    temperature: ScalarOrSchedule,
    init_scale: Any = 1e-2,
    n_samples: int = 1,
    antithetic: bool = False,
    stick_the_landing: bool = True,
    weight_decay: float = 0.0,
    prior: Gaussian | None = None,
    scale_optimizer: GradientTransformation | None = None,
    generator: torch.Generator | None = None,
) -> VariationalTransform:
    """One Gaussian over all parameters, every correlation kept: ``theta = mu + L z`` (Kucukelbir, Tran, Ranganath, Gelman and
    Blei, 2017).

    ``L = D (1 + N)`` is lower triangular; phi is N, strictly lower triangular, and the logarithm of the diagonal D, so that it
    stays a Cholesky factor without ever being refactorised, and a step of the optimizer is as large in any units. Its state
    holds ``P^2`` numbers and twice what the optimizer remembers of them.

    Args:
        optimizer, temperature, n_samples, antithetic, stick_the_landing, weight_decay, prior, scale_optimizer, generator: as
            in :func:`mean_field`.
        init_scale: first standard deviations, as in :func:`mean_field`.

    Returns:
        A transformation like that of :func:`mean_field`.

    Raises:
        ValueError, TypeError: as :func:`mean_field`.
        MemoryError: at ``init``, where ``P^2`` does not fit.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.vi.dense(bc.adam(1e-2), temperature=0.01, init_scale=0.1)
        >>> params = torch.zeros(3)
        >>> tx.posterior(tx.init(params), params).marginal_variance
        tensor([0.0100, 0.0100, 0.0100])
    """
    link = Variational(
        Dense(init_scale),
        optimizer,
        temperature=temperature,
        n_samples=n_samples,
        antithetic=antithetic,
        stick_the_landing=stick_the_landing,
        weight_decay=weight_decay,
        prior=prior,
        scale_optimizer=scale_optimizer,
        generator=generator,
    )
    return VariationalTransform((link,))


@checks.link_takes(rank=checks.number(f"[1, {checks.LARGEST}]", integer=True, hint="rank 0 is vi.mean_field"), **TAKEN)
def low_rank(
    optimizer: GradientTransformation,
    *,
    temperature: ScalarOrSchedule,
    rank: int = 10,
    init_scale: Any = 1e-2,
    n_samples: int = 1,
    antithetic: bool = False,
    stick_the_landing: bool = True,
    weight_decay: float = 0.0,
    prior: Gaussian | None = None,
    scale_optimizer: GradientTransformation | None = None,
    generator: torch.Generator | None = None,
) -> VariationalTransform:
    """A low-rank plus diagonal covariance: ``theta = mu + B z + d * eps`` (Ong, Nott and Smith, 2018).

    ``B`` starts random, sharing the first variance ``init_scale ** 2`` with ``d`` in halves, for at ``B = 0`` its gradient
    vanishes. Adam moves every entry of ``B`` by its lr at once, however small ``B`` is: give ``scale_optimizer`` a smaller
    lr than the mean's. Without ``stick_the_landing`` the entropy's gradient is exact. Its state holds ``rank + 1`` tensors
    for each parameter and twice what the optimizer remembers of them.

    Args:
        optimizer, temperature, n_samples, antithetic, stick_the_landing, weight_decay, prior, scale_optimizer, generator: as
            in :func:`mean_field`.
        init_scale: first standard deviations, as in :func:`mean_field`.
        rank: columns of ``B``, at least 1 and at most the number of parameters.

    Returns:
        A transformation like that of :func:`mean_field`.

    Raises:
        ValueError, TypeError: as :func:`mean_field`; a rank out of range.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.vi.low_rank(bc.adam(1e-2), temperature=0.01, rank=2, n_samples=4, antithetic=True)
        >>> params = {"w": torch.zeros(3, 2)}
        >>> tx.sample(tx.init(params), params).params["w"].shape
        torch.Size([4, 3, 2])
    """
    link = Variational(
        LowRank(init_scale, rank),
        optimizer,
        temperature=temperature,
        n_samples=n_samples,
        antithetic=antithetic,
        stick_the_landing=stick_the_landing,
        weight_decay=weight_decay,
        prior=prior,
        scale_optimizer=scale_optimizer,
        generator=generator,
    )
    return VariationalTransform((link,))
