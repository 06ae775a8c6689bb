"""A draw from a posterior that a transform carries: where the gradient is taken, and the noise that led there.

    theta_s = mean + displacement(noise_s),    s = 1 ... S

Of parameters of which every rank holds a part (DTensors) the normals are those of this rank's elements: element ``i`` of sample
``s`` has the number ``s P + i`` in a leaf of ``P`` elements, so that a draw is the same however the leaf is laid out. The drawn
parameters are DTensors again, and nothing is sent.

The draw carries its noise along: to compute it back as ``theta_s - mean`` would lose digits in low precision.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import is_dtensor, local
from bayesopt_chain.core.link import Link, LinkContext, OnShards, Traits
from bayesopt_chain.core.op import Leaves
from bayesopt_chain.distributed import shards
from bayesopt_chain.links.keyed import Keyed
from bayesopt_chain.matching.response import Refused, Response
from bayesopt_chain.posterior.gaussian import (
    Alone,
    Gaussian,
    device_of,
    require_these,
    spread_like,
    standard_normals,
)
from bayesopt_chain.schedules import ScalarOrSchedule, is_zero
from bayesopt_chain.tracing import is_readable
from bayesopt_chain.trees import are_spread, copied, require_like


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

    def __post_init__(self) -> None:
        who, decay = self.name, self.weight_decay
        checks.TEMPERATURE("temperature", self.temperature)
        if self.antithetic and self.n_samples % 2:
            raise ValueError(
                f"{who}: antithetic draws come in pairs; n_samples={self.n_samples} is odd, pass an even number"
            )
        if not (math.isfinite(decay) and decay >= 0):
            raise ValueError(f"{who}: weight_decay must be finite and not negative, got {decay!r}")
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
    def response(self) -> Response:
        return Refused("variational inference optimizes a distribution; give the noise to it as temperature=")

    @property
    def on_shards(self) -> OnShards:
        """What the link can do with parameters of which every rank holds a part."""
        return "refused"

    @property
    def traits(self) -> Traits:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Traits(
            on_shards=self.on_shards,
            refusal_hint=" (bc.vi.mean_field, bc.vi.ivon and bc.optim.IVON take them)",
            needs_params=True,
            checks_gradients=True,
            all_leaves=True,
            samples=self.n_samples,
        )

    @property
    def extra_kwargs(self) -> frozenset[str]:
        return frozenset({"draw"})

    @property
    def required_kwargs(self) -> frozenset[str]:
        return self.extra_kwargs - {"draw"} if self.is_deterministic else self.extra_kwargs

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
            params = context.tree(leaves)
            if are_spread(params):
                raise ValueError(
                    f"{self.name}: prior= is over whole leaves, and the parameters are DTensors, of which each rank has a "
                    "part: give weight_decay=, or put the prior into the loss"
                )
            require_like(self.prior.mean, params, f"{self.name}: prior.mean")
        if self.is_deterministic:
            device = device_of(leaves)
            return torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)
        return self.start(leaves, context)

    def sample(self, state: Any, params: Leaves, context: LinkContext) -> Draw:
        return self.draw(state, params, context.paths)

    def draw(self, state: Any, leaves: Leaves, names: Sequence[str]) -> Draw:
        """A draw for parameters given as leaves, which the random stream knows by their names."""
        if self.is_deterministic:
            same = [p if self.n_samples == 1 else p.expand(self.n_samples, *p.shape) for p in leaves]
            return Draw(same, (), state.key, state.step)
        checks.own_key(state.key, leaves)
        in_parts = any(map(is_dtensor, leaves))
        if not in_parts:
            require_these(self.shapes(state), list(leaves), str(self))
        here, mine = ([local(x) for x in leaves], shards.local_tree(state)) if in_parts else (leaves, state)
        like, of = self.noise_like(here, names)
        whole = leaves if in_parts else None
        noise = standard_normals(mine.key, mine.step, like, of, self.n_samples, self.antithetic, whole)
        moves = self.displace(mine, noise, here)
        drawn = [(p + (x[0] if self.n_samples == 1 else x)).to(p.dtype) for p, x in zip(here, moves)]
        warn_of_rounding(f"a draw of {self}", names, here, moves)
        axes = int(self.n_samples > 1)
        return Draw(spread_like(leaves, drawn, axes), noise, state.key, state.step)

    def noise_like(self, leaves: Leaves, names: Sequence[str]) -> tuple[Leaves, Sequence[str]]:
        """Templates of one sample's standard normals, and their names in the random stream."""
        return leaves, names

    @abstractmethod
    def displace(self, state: Any, noise: tuple[Tensor, ...], leaves: Leaves) -> Leaves:
        """How far standard normals lead from the mean."""

    @abstractmethod
    def shapes(self, state: Any) -> list | int:
        """The parameters' shapes that the state remembers, or their number."""


def warn_of_rounding(what: str, names: Sequence[str], means: Leaves, moves: Leaves) -> None:
    """Warn of a 16-bit leaf most of whose entries stay at their mean, although ``what`` is to move them by ``moves``."""
    for name, mean, move in zip(names, means, moves):
        if mean.dtype not in (torch.bfloat16, torch.float16) or not is_readable(mean):
            continue
        if 2 * int((((mean + move).to(mean.dtype) == mean) & (move != 0)).sum()) > move.numel():
            checks.warn(
                f"{what}: most entries of {name} in {mean.dtype} round to their mean and stay there, so that the posterior is "
                "not that of the data; keep float32 parameters and use autocast"
            )


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


def drawn(tx: Any, i: int, state: Any, params: Any) -> tuple[Draw, list]:
    """The draw that link ``i`` of a chain asks for, and the trees of parameters to take gradients at.

    Leaves that a mask keeps from the link stay at the parameters in each of these trees.
    """
    link = tx.links[i]
    at, mine = tx.at(state, i, params)
    leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
    draw = link.sample(state[i], mine, at)
    points = []
    for s in range(link.traits.samples):
        point = list(leaves)
        for j, leaf in zip(at.scope.index, draw.params):
            point[j] = leaf if link.traits.samples == 1 else leaf[s]
        points.append(optree.tree_unflatten(spec, point))
    return draw, points


def gathered(trees: list, where: Sequence[int]) -> Any:
    """Gradients at the trees of :func:`drawn`: stacked at the leaves ``where`` they were drawn, averaged elsewhere."""
    if len(trees) == 1:
        return trees[0]
    leaves = [optree.tree_leaves(tree, none_is_leaf=True) for tree in trees]
    out = [
        None if xs[0] is None else torch.stack(xs) if j in where else torch.stack(xs).mean(0)
        for j, xs in enumerate(zip(*leaves))
    ]
    return optree.tree_unflatten(optree.tree_structure(trees[0], none_is_leaf=True), out)
