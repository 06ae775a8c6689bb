r"""Variational inference as a gradient transformation: the loss's gradient at a draw moves a Gaussian of a family.

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

``mean_field``, ``dense`` and ``low_rank`` are the optimizer you have, moving a Gaussian instead of a point. The families say
how noise displaces the mean:

    mean field     theta - mu = sigma * z,          phi = log sigma,         Lambda = diag(sigma^-2)
    dense          theta - mu = D (1 + N) z,        phi = (log D, N),        Lambda = (L L^T)^-1 with L = D (1 + N)
    low rank       theta - mu = B z + d * eps,      phi = (B, log d),        Lambda = (B B^T + diag d^2)^-1

D is diagonal and N strictly lower triangular: correlations without units, of which an optimizer's step is as large whatever
the deviations are. Of L's own entries a step of Adam may be many times a deviation, and L^-1 then grows exponentially.
The last family holds for each leaf, seen as a matrix ``[d0, d1]`` (a vector as ``[n, 1]``), as in
:mod:`bayesopt_chain.precision`.

A family is asked for the displacement of a noise, for ``score = Lambda (theta - mu)``, for ``pullback``, the transposed
derivative of the displacement by phi applied to gradients at the draws and averaged over them, and for the entropy
``H = P/2 log(2 pi e) + log |Sigma| / 2``, whose gradient is autograd's. No matrix is ever factorised: the dense family carries
L itself, whose diagonal is positive because it is the exponential of what is optimized.

F says how far any Gaussian is from the posterior, in nats, whichever method gave it:

    F(q) = E_q[loss(theta)] - T H[q] = E_q[loss(theta) + T log q(theta)],        -F / T <= log Z = log int exp(-loss / T),

with equality where q is the posterior; there ``loss + T log q`` is the same for every draw, so that its mean has no error
(Jordan, Ghahramani, Jaakkola and Saul, 1999).

A draw from what a transformation carries is where the gradient is taken, and brings along the noise that led there:

    theta_s = mu + displacement(noise_s),    s = 1 ... S

To compute the noise back as ``theta_s - mu`` would lose digits in low precision. Of parameters of which every rank holds a part
(DTensors) the normals are those of this rank's elements: element ``i`` of sample ``s`` has the number ``s P + i`` in a leaf of
``P`` elements, so that a draw is the same however the leaf is laid out. The drawn parameters are DTensors again, and nothing is
sent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import checks
from bayesopt_chain._torch import is_dtensor, like, local, whole
from bayesopt_chain.compose import chain
from bayesopt_chain.core.link import Link, LinkContext, OnShards, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.curvature._structures import require_dense_fits
from bayesopt_chain.distributed import shards
from bayesopt_chain.links.keyed import Keyed
from bayesopt_chain.matching.response import Refused
from bayesopt_chain.posterior.gaussian import (
    Alone,
    Gaussian,
    PosteriorTransformation,
    device_of,
    names_in,
    over_prior,
    require_finite,
    require_numbers,
    require_these,
    standard_normals,
    times,
    warn_of_rounding,
)
from bayesopt_chain.precision import (
    Cholesky,
    Diagonal,
    LowRankCovariance,
    Precision,
    flatten,
    low_rank_covariance,
    shape_only,
    unflatten,
)
from bayesopt_chain.precision._dense import lower_root
from bayesopt_chain.schedules import ScalarOrSchedule, is_zero, now, scalar
from bayesopt_chain.tracing import is_readable
from bayesopt_chain.trees import (
    are_spread,
    combine,
    common_dtype,
    copied,
    paths_of,
    require_like,
    size,
    spread,
    upcast,
    wide,
)

Scale = tuple[Tensor, ...]
Noise = tuple[Tensor, ...]


class Draw(NamedTuple):
    """Parameters drawn from a posterior, and what ``update`` needs to know of how they were drawn.

    Attributes:
        params: the drawn tree, leaves ``[*leaf.shape]``, or ``[S, *leaf.shape]`` for ``S > 1`` samples.
        noise: the standard normals behind it, ``[S, ...]`` each.
        key: the random key of the state that it was drawn from, 0-d int64.
        step: the update count of that state, 0-d int64.
    """

    params: Any
    noise: tuple[Tensor, ...]
    key: Tensor
    step: Tensor


@dataclass(frozen=True, kw_only=True)
class Drawing(Alone, Keyed, ABC):
    """A link whose draws come before its update: the gradient is taken at them, and handed back with ``draw=``.

    The prior has a mean of its own, which a step in place leaves alone.
    """

    temperature: ScalarOrSchedule
    n_samples: int = 1
    antithetic: bool = False
    weight_decay: float = 0.0
    prior: Gaussian | None = field(default=None, hash=False, compare=False)
    keywords: ClassVar[frozenset[str]] = frozenset({"draw"})
    on_shards: ClassVar[OnShards] = "refused"  # what the link can do with parameters of which every rank holds a part

    def __post_init__(self) -> None:
        who, decay = self.name, self.weight_decay
        if self.antithetic and self.n_samples % 2:
            raise ValueError(
                f"{who}: antithetic draws come in pairs; n_samples={self.n_samples} is odd, pass an even number"
            )
        if self.prior is None:
            return
        if decay:
            raise ValueError(f"{who}: prior and weight_decay={decay} are two priors: leave one out")
        if self.is_deterministic:
            raise ValueError(
                f"{who}: at temperature=0 a prior of precision Lambda weighs temperature * Lambda = 0: use weight_decay"
            )
        object.__setattr__(self, "prior", self.prior._replace(mean=copied(self.prior.mean)))

    @property
    def traits(self) -> Traits:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Traits(
            on_shards=self.on_shards,
            refusal_hint=" (bc.vi.mean_field, bc.vi.ivon and bc.optim.IVON take them)",
            needs_params=True,
            checks_gradients=True,
            all_leaves=True,
            samples=self.n_samples,
            response=Refused("variational inference optimizes a distribution; give the noise to it as temperature="),
            extra_kwargs=self.keywords,
            required_kwargs=self.keywords - {"draw"} if self.is_deterministic else self.keywords,
        )

    def require_around(self, before: Sequence[Link], behind: Sequence[Link]) -> None:
        if not self.is_deterministic:
            super().require_around(before, behind)

    @property
    def is_deterministic(self) -> bool:
        """Whether the temperature is the number 0, so that nothing is drawn."""
        return is_zero(self.temperature)

    def first_key(self, leaves: Leaves, context: LinkContext) -> tuple[Tensor, Tensor]:
        """A key and a count of zero; where nothing is drawn the key is zero.

        Raises:
            ValueError: a prior over other parameters, or over ones of which every rank holds a part.
        """
        checks.with_values(self.name, "params", leaves, context.paths)
        if self.prior is not None:
            if are_spread(context.tree(leaves)):
                raise ValueError(
                    f"{self.name}: prior= is over whole leaves, and the parameters are DTensors, of which each rank has a "
                    "part: give weight_decay=, or put the prior into the loss"
                )
            require_like(self.prior.mean, over_prior(self.prior, leaves, context), f"{self.name}: prior.mean")
        if self.is_deterministic:
            device = device_of(leaves)
            return torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)
        return self.start(leaves, context)

    def draw(self, state: Any, leaves: Leaves, names: Sequence[str]) -> Draw:
        """A draw for parameters given as leaves, which the random stream knows by their names."""
        if self.is_deterministic:
            same = [p if self.n_samples == 1 else p.expand(self.n_samples, *p.shape) for p in leaves]
            return Draw(same, (), state.key, state.step)
        checks.own_key(state.key, leaves)
        in_parts = any(map(is_dtensor, leaves))
        if not in_parts:
            require_these(self.shapes(state), list(leaves), self.name)
        here, mine = ([local(x) for x in leaves], shards.local_tree(state)) if in_parts else (leaves, state)
        templates, of = self.noise_like(here, names)
        whole = leaves if in_parts else None
        noise = standard_normals(mine.key, mine.step, templates, of, self.n_samples, self.antithetic, whole)
        moves = self.displace(mine, noise, here)
        drawn = [(p + (x[0] if self.n_samples == 1 else x)).to(p.dtype) for p, x in zip(here, moves)]
        warn_of_rounding(f"a draw of {self.name}", names, here, moves)
        axes = int(self.n_samples > 1)
        return Draw([like(x, z, axes) for x, z in zip(leaves, drawn)], noise, state.key, state.step)

    def noise_like(self, leaves: Leaves, names: Sequence[str]) -> tuple[Leaves, Sequence[str]]:
        """Templates of one sample's standard normals, and their names in the random stream."""
        return leaves, names

    @abstractmethod
    def displace(self, state: Any, noise: tuple[Tensor, ...], leaves: Leaves) -> Leaves:
        """How far standard normals lead from the mean."""

    @abstractmethod
    def shapes(self, state: Any) -> list | int:
        """The parameters' shapes that the state remembers, or their number."""


def require_drawn_from(draw: Any, state: Any, who: str) -> None:
    """Refuse what is no draw, or a draw of another state."""
    if not isinstance(draw, Draw):
        came = "no draw" if draw is None else f"draw={type(draw).__name__}"
        raise ValueError(
            f"{who}: update got {came}: call draw = tx.sample(state, params), take the gradient at draw.params and pass "
            "draw=draw (make_step does)"
        )
    if not (is_readable(draw.step) and is_readable(state.step)):
        return
    if not (torch.equal(draw.key, state.key) and torch.equal(draw.step, state.step)):
        raise ValueError(
            f"{who}: the draw comes from another state (its count {draw.step.tolist()}, the state's "
            f"{state.step.tolist()}): draw from the state that is passed to update, once for each update"
        )


def along_samples(g: list, params: list, samples: int, who: str) -> list:
    """Gradients with a leading axis of ``samples``; ``None`` stays."""
    for i, (x, p) in enumerate(zip(g, params)):
        wanted = tuple(p.shape) if samples == 1 else (samples, *p.shape)
        if x is not None and tuple(x.shape) != wanted:
            raise ValueError(
                f"{who}: the gradient of leaf {i} has shape {tuple(x.shape)}, not {wanted}: take one gradient at each "
                f"of the {samples} samples in draw.params"
            )
    return [x if x is None or samples > 1 else x[None] for x in g]


def over_samples(x: Tensor) -> Tensor:
    """The mean over axis 0; a single sample is returned as it is."""
    return x[0] if len(x) == 1 else x.mean(0)


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


@dataclass(frozen=True)
class Variational(Drawing):
    """A family of Gaussians as a link, with two optimizers, one for mu and one for phi.

    Leaves are the parameters that are present; samples stand on axis 0 of noise and gradients.
    """

    optimizer: GradientTransformation
    init_scale: Any = field(hash=False, compare=False)
    stick_the_landing: bool = True
    scale_optimizer: Any = None
    state = VariationalState
    instead = "give such links to its optimizer (bc.chain(link, bc.adam(...))), and a prior as weight_decay= or prior="

    def __post_init__(self) -> None:
        for name, tx in (("optimizer", self.optimizer), ("scale_optimizer", self.scale_optimizer or self.optimizer)):
            object.__setattr__(self, name, chain(tx))  # so that both take params= and unknown keywords as chains do
        super().__post_init__()

    @property
    def is_elementwise(self) -> bool:
        """Whether phi has a tensor like each leaf, and every element is treated by itself."""
        return self.on_shards == "tree"

    def init(self, leaves: list, context: LinkContext) -> VariationalState:
        params, (key, zero) = context.tree(leaves), self.first_key(leaves, context)

        # These are the normals of count 0, so that the first draw, at count 1, is independent of phi's start.
        normals = partial(standard_normals, key, zero, leaves, context.paths)
        if not self.is_deterministic:
            require_gradients_alone(self.optimizer, shards.local_tree(params), self.name)
        what = f"{self.name}: init_scale"
        scales = context.parts(spread(self.init_scale, params, what), what)
        require_numbers(scales, params, what)
        scale = self.first_scale(leaves, scales, normals)
        scale = tuple(context.spread(scale)) if self.is_elementwise else scale
        return VariationalState(scale, self.optimizer.init(params), self.scale_optimizer.init(scale), key, zero + 1)

    @abstractmethod
    def first_scale(self, leaves: list[Tensor], scales: list[Tensor], normals: Callable[[int], Noise]) -> Scale:
        """The first phi for standard deviations that broadcast to the leaves; ``normals(n)`` are ``n`` standard normals like
        every leaf, ``[n, *leaf.shape]``."""

    @abstractmethod
    def score(self, state: VariationalState, noise: Noise, leaves: list[Tensor]) -> list[Tensor]:
        """``Lambda (theta - mu)``, shaped like the displacement."""

    @abstractmethod
    def pullback(self, scale: Scale, noise: Noise, gradients: list[Tensor]) -> Scale:
        """Gradient by phi of ``mean_s gradients_s . displacement_s``."""

    @abstractmethod
    def entropy(self, scale: Scale) -> Tensor:
        """In nats, 0-d."""

    def only(self, gradient: Scale, leaves: list[Tensor], moves: list[bool]) -> list:
        """The gradient by phi without the part of the leaves that do not move; phi has as many tensors for each leaf."""
        return [x if m else None for x, m in zip(gradient, moves * (len(gradient) // len(moves)))]

    def shapes(self, state: VariationalState) -> list | int:
        return [s.shape for s in state.scale]

    @abstractmethod
    def of_scale(self, scale: Scale, params: Any, count: Tensor) -> Precision:
        """``Lambda`` over the tree of params."""

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
        if self.is_elementwise:
            by_scale = tuple(context.spread(by_scale))
        steps, scale_optimizer = self.scale_optimizer.update(
            by_scale, state.scale_optimizer, params=state.scale, inplace=op.inplace
        )
        scale = tuple(s if step is None else s + step for s, step in zip(state.scale, steps))
        new = VariationalState(scale, mean_optimizer, scale_optimizer, state.key, state.step + 1)
        return moves, op.keep(state, new)

    def _gradients(self, g: list, noise: Any, state: VariationalState, leaves: list) -> tuple[list, tuple]:
        """Of F by the mean, ``None`` where there is none, and by phi."""
        samples = along_samples(g, leaves, self.n_samples, self.name)
        moves = [x is not None for x in samples]
        filled = [
            p.new_zeros((self.n_samples, *p.shape), dtype=wide(p.dtype)) if x is None else upcast(x)
            for x, p in zip(samples, leaves)
        ]
        temperature = now(self.temperature, state.step - 1)
        if self.weight_decay or self.prior is not None:
            theta = [p + x for p, x in zip(leaves, self.displace(state, noise, leaves))]
            factor = self.weight_decay if self.prior is None else temperature
            pull = theta if self.prior is None else prior_force(self.prior, theta)
            filled = [x + times(y, factor) if m else x for x, y, m in zip(filled, pull, moves)]
        if self.stick_the_landing:
            score = self.score(state, noise, leaves)
            filled = [x - times(y, temperature) if m else x for x, y, m in zip(filled, score, moves)]
        by_scale = self.pullback(state.scale, noise, filled)
        if not self.stick_the_landing:
            entropy = torch.func.grad(self.entropy)(state.scale)
            by_scale = tuple(x - times(y, temperature) for x, y in zip(by_scale, entropy))
        by_mean = [over_samples(x).to(p.dtype) if m else None for x, p, m in zip(filled, leaves, moves)]
        return by_mean, tuple(self.only(by_scale, leaves, moves))

    def _move_mean(
        self, g: list, state: VariationalState, params: list, op: TensorOps, context: LinkContext
    ) -> tuple[list, Any]:
        moves, optimizer = self.optimizer.update(
            context.tree(g), state.mean_optimizer, params=context.tree(params), inplace=op.inplace
        )
        return context.leaves(moves), op.keep(state.mean_optimizer, optimizer)

    def report(self, state: VariationalState, draw: Draw, loss: Tensor) -> dict[str, Any]:
        """``loss - T H[q]``, and the prior at the draw, without the normaliser of a weight decay's."""
        loss = whole(loss)
        drawn = optree.tree_leaves(draw.params)
        if self.prior is not None:
            density = self.prior.log_prob(like_prior(self.prior, drawn)).mean()
            loss = loss - times(density.to(loss), now(self.temperature, state.step - 1))
        if self.weight_decay:
            squares = torch.stack([whole(x.square().sum()).to(loss) for x in drawn]).sum()
            loss = loss + times(squares, 0.5 * self.weight_decay / self.n_samples)
        if not self.is_deterministic:
            entropy = whole(self.entropy(state.scale))  # of DTensors a message
            loss = loss - times(entropy, now(self.temperature, state.step - 1))
        return {"negative_elbo": loss}

    def precision(self, state: VariationalState, params: Any) -> Precision:
        """Of the posterior, over the tree of params."""
        require_finite(state.scale, f"{self.name}: the scale")
        data = 1 / scalar(now(self.temperature, state.step - 1), state.step.device)
        return self.of_scale(state.scale, params, data)

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
    """``Lambda_0 (theta - mu_0)``, shaped like theta."""
    centred = [x - m for x, m in zip(theta, optree.tree_leaves(prior.mean))]
    return optree.tree_leaves(prior.precision.times(like_prior(prior, centred)))


@dataclass(frozen=True)
class MeanField(Variational):
    name = "vi.mean_field"
    on_shards = "tree"  # the optimizers are given DTensors, so that they keep their own rules about them

    def first_scale(self, leaves, scales, normals):
        return tuple(_logs(leaf, scale) for leaf, scale in zip(leaves, scales))

    def displace(self, state, noise, leaves):
        return [s.exp() * z for s, z in zip(state.scale, noise)]

    def score(self, state, noise, leaves):
        return [z * (-s).exp() for s, z in zip(state.scale, noise)]

    def pullback(self, scale, noise, gradients):
        return tuple(over_samples(g * z) * s.exp() for s, z, g in zip(scale, noise, gradients))

    def entropy(self, scale):
        return torch.stack([s.sum() for s in scale]).sum() + _constant(sum(s.numel() for s in scale))

    def of_scale(self, scale, params, count):
        values = [(-2 * s).exp() for s in scale]
        return Diagonal(optree.tree_unflatten(optree.tree_structure(params), values), count)


@dataclass(frozen=True)
class Dense(Variational):
    name = "vi.dense"

    def first_scale(self, leaves, scales, normals):
        dtype = common_dtype(leaves)
        require_dense_fits(size(leaves), dtype, leaves[0].device)
        logs = [_logs(leaf, scale) for leaf, scale in zip(leaves, scales)]
        return (torch.diag(flatten(logs, leaves).to(dtype)),)

    def noise_like(self, leaves, names):
        return [leaves[0].new_empty((), dtype=common_dtype(leaves)).expand(size(leaves))], [self.name]

    def displace(self, state, noise, leaves):
        return unflatten(noise[0] @ cholesky(state.scale[0]).mT, leaves)

    def score(self, state, noise, leaves):
        lower = cholesky(state.scale[0])
        return unflatten(torch.linalg.solve_triangular(lower.mT, noise[0].mT, upper=True).mT, leaves)

    def pullback(self, scale, noise, gradients):
        like = [g[0] for g in gradients]
        return (_by_raw(flatten(gradients, like).mT @ noise[0] / noise[0].shape[0], scale[0]),)

    def entropy(self, scale):
        return scale[0].diagonal().sum() + _constant(scale[0].shape[-1])

    def only(self, gradient, leaves, moves):
        if all(moves):
            return list(gradient)
        rows = torch.cat([torch.full((leaf.numel(),), m, device=leaf.device) for leaf, m in zip(leaves, moves)])
        return [torch.where(rows[:, None], gradient[0], 0)]

    def shapes(self, state):
        return state.scale[0].shape[-1]

    def of_scale(self, scale, params, count):
        lower = cholesky(scale[0])
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
        return Cholesky(lower_root(inverse), shape_only(params), count)


@dataclass(frozen=True)
class LowRank(Variational):
    rank: int = 10
    name = "vi.low_rank"

    def first_scale(self, leaves, scales, normals):
        if self.rank > size(leaves):
            raise ValueError(f"vi.low_rank: rank={self.rank} is above the number of parameters, {size(leaves)}")
        halves = [(scale / math.sqrt(2)).to(wide(leaf.dtype)) for scale, leaf in zip(scales, leaves)]
        rows = tuple(row * (half / math.sqrt(self.rank)) for row, half in zip(normals(self.rank), halves))
        return (*rows, *(_logs(leaf, half) for leaf, half in zip(leaves, halves)))

    def noise_like(self, leaves, names):
        of_rows = leaves[0].new_empty((), dtype=common_dtype(leaves)).expand(self.rank)
        return [*leaves, of_rows], [*names, self.name]

    def displace(self, state, noise, leaves):
        (rows, log_d), (*eps, z) = _halves(state.scale), noise
        return [d.exp() * e + along for d, e, along in zip(log_d, eps, combine(z, rows))]

    def score(self, state, noise, leaves):
        return self._covariance(state.scale).times(self.displace(state, noise, leaves))

    def pullback(self, scale, noise, gradients):
        (_, log_d), (*eps, z) = _halves(scale), noise
        samples = z.shape[0]
        by_rows = tuple(torch.tensordot(z.to(g.dtype).mT, g, dims=1) / samples for g in gradients)
        by_log_d = tuple(over_samples(g * e) * d.exp() for g, e, d in zip(gradients, eps, log_d))
        return (*by_rows, *by_log_d)

    def entropy(self, scale):
        log_d = _halves(scale)[1]
        return -0.5 * self._covariance(scale).logdet() + _constant(sum(d.numel() for d in log_d))

    def shapes(self, state):
        return [s.shape for s in _halves(state.scale)[1]]

    def of_scale(self, scale, params, count):
        rows, log_d = (optree.tree_unflatten(optree.tree_structure(params), half) for half in _halves(scale))
        return low_rank_covariance(optree.tree_map(lambda d: (2 * d).exp(), log_d), rows, count)

    def _covariance(self, scale: Scale) -> LowRankCovariance:
        rows, log_d = _halves(scale)
        return low_rank_covariance(
            [(2 * d).exp() for d in log_d], list(rows), torch.ones((), dtype=torch.float64, device="cpu")
        )


def _by_raw(by_factor: Tensor, raw: Tensor) -> Tensor:
    """The gradient by N and log D from that by ``L = D (1 + N)``."""
    by_log = (by_factor * cholesky(raw)).sum(-1)
    return (by_factor * raw.diagonal().exp()[:, None]).tril(-1) + torch.diag_embed(by_log)


def _logs(leaf: Tensor, scale: Tensor) -> Tensor:
    """log scale, like a leaf, in float32 at least: 16 bits would round the steps of an optimizer away."""
    return scale.log().to(leaf.device, wide(leaf.dtype)).expand(leaf.shape).clone().detach()


def cholesky(raw: Tensor) -> Tensor:
    """L from N below the diagonal and log D on it."""
    deviations = raw.diagonal(dim1=-2, dim2=-1).exp()
    return deviations[..., None] * raw.tril(-1) + torch.diag_embed(deviations)


def _halves(scale: Scale) -> tuple[Scale, Scale]:
    """The rows of B^T and log d; the factors U and V."""
    return scale[: len(scale) // 2], scale[len(scale) // 2 :]


def _constant(parameters: int) -> float:
    return parameters * (1 + math.log(2 * math.pi)) / 2


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
        require_finite(params, f"{link.name}: params")  # which is named, as numbers of phi are not
        return Gaussian(copied(params), link.precision(mine, params)).factorised()


# at any temperature
TAKEN: dict[str, checks.Kind] = {
    "temperature": checks.TEMPERATURE,
    "n_samples": checks.WHOLE,
    "weight_decay": checks.NOT_NEGATIVE,
    "prior": checks.POSTERIOR.or_none(),
}
OPTIMIZED: dict[str, checks.Kind] = {
    **TAKEN,
    "optimizer": checks.instance(GradientTransformation, "a gradient transformation"),
    "init_scale": checks.ARGUMENTS["init_scale"],
}


@checks.link_takes(**OPTIMIZED)
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
) -> DrawingTransformation:
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
        A transformation with ``sample`` and ``posterior``. ``update`` needs ``params=`` and, unless the
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
    link = MeanField(
        optimizer,
        init_scale,
        temperature=temperature,
        n_samples=n_samples,
        antithetic=antithetic,
        stick_the_landing=stick_the_landing,
        weight_decay=weight_decay,
        prior=prior,
        scale_optimizer=scale_optimizer,
        generator=generator,
    )
    return DrawingTransformation((link,))


@checks.link_takes(**OPTIMIZED)
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
) -> DrawingTransformation:
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
    link = Dense(
        optimizer,
        init_scale,
        temperature=temperature,
        n_samples=n_samples,
        antithetic=antithetic,
        stick_the_landing=stick_the_landing,
        weight_decay=weight_decay,
        prior=prior,
        scale_optimizer=scale_optimizer,
        generator=generator,
    )
    return DrawingTransformation((link,))


@checks.link_takes(
    rank=checks.number(f"[1, {checks.LARGEST}]", integer=True, hint="rank 0 is vi.mean_field"), **OPTIMIZED
)
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
) -> DrawingTransformation:
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
    link = LowRank(
        optimizer,
        init_scale,
        rank=rank,
        temperature=temperature,
        n_samples=n_samples,
        antithetic=antithetic,
        stick_the_landing=stick_the_landing,
        weight_decay=weight_decay,
        prior=prior,
        scale_optimizer=scale_optimizer,
        generator=generator,
    )
    return DrawingTransformation((link,))
