"""What a rule is: one idea of a chain, as a function of lists of leaves; and how noise reaches it.

A rule says how its state starts, how it turns gradient leaves into update leaves, and (its ``response``) what that does
to the gradient, which is all that the noise needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchopt.base import EmptyState

from bayesopt_chain.core.response import Response

Leaves = list  # of Tensor | None, in optree order


class Context(NamedTuple):
    """What a rule may look at besides its own state while it updates."""

    inplace: bool
    extra: Mapping[str, Any]
    injection: Any = None  # the noise, for a rule with an adaptive response
    velocity_scale: Any = None  # for each leaf, the factor the velocity is scaled by before this step
    to_tree: Callable[[Leaves], Any] | None = None  # the rule's leaves as the user's tree
    from_tree: Callable[[Any], Leaves] | None = None
    factors: list | None = None  # for a rule that takes them: what the next rule would multiply each leaf by
    done: bool = False  # the rule before has multiplied by this rule's factors already
    echo: list | None = None  # for each leaf, what the velocity keeps of this step's noise: (noise, factor) or None

    def scaled(self, velocity: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A velocity as this step begins with it (see ``core.law.scheduled_momentum_noise``)."""
        if self.velocity_scale is None:
            return velocity
        multiply = Tensor.mul_ if self.inplace else Tensor.mul
        return tuple(v if s is None else multiply(v, s.to(v.dtype)) for v, s in zip(velocity, self.velocity_scale))

    def echoed(self, velocity: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A velocity as this step leaves it: with what it keeps of the noise (see ``core.matching``)."""
        if self.echo is None:
            return velocity
        add = Tensor.add_ if self.inplace else Tensor.add
        return tuple([v if e is None else add(v, e[0], alpha=e[1]) for v, e in zip(velocity, self.echo)])


class Rule:
    """One idea of a chain. Subclasses are frozen dataclasses, so that chains compare, hash, print and pickle.

    A rule that accepts ``draw`` also has ``n_samples`` and ``sample(state, params) -> Draw`` (see ``posterior/draw.py``): it
    wants the gradient there instead of at the parameters.
    """

    response: Response | None = None
    accepts: frozenset[str] = frozenset()
    on_trees = False  # whether init_tree and update want the user's tree, as a foreign link does
    needs_params = False
    needs: frozenset[str] = frozenset()  # those of accepts without which update refuses
    masks: tuple[Any, ...] = ()
    keeps_echo = False  # whether update, of response b / (1 - mu/z), keeps part of the noise in its velocity
    takes_factors = False  # whether update multiplies by ``ctx.factors`` while its leaves are in cache

    def factors(self, state: Any, n: int) -> list | None:
        """What this rule multiplies each of ``n`` leaves by, if that is all it does."""
        return None

    def init(self, params: Leaves) -> Any:
        """State for parameters given as leaves; ``None`` stands for an absent parameter."""
        return EmptyState()

    def update(self, g: Leaves, state: Any, params: Leaves | None, ctx: Context) -> tuple[Leaves, Any]:
        """New leaves and state. A ``None`` gradient stays ``None`` and leaves its part of the state alone."""
        return g, state

    def __str__(self) -> str:
        return repr(self)


@dataclass
class Injection:
    """This step's noise: what is added to each leaf, and before which rule.

    ``hot`` is a boolean 0-d tensor where the temperature can change: where it is false the gradient stays as it is,
    to the last bit. ``echo`` has the leaves of whose noise the velocity keeps that factor. ``at`` and ``echo`` may name more
    leaves than have noise this time.
    """

    noise: dict[int, Tensor]
    at: dict[int, int]
    hot: Tensor | None
    velocity_scale: dict[int, Tensor] | None
    echo: dict[int, float]

    def add(self, j: int, g: Tensor, inplace: bool, gain: Tensor | None = None) -> Tensor:
        e = self.noise[j] if gain is None else self.noise[j] * gain
        if inplace and self.hot is None:
            return g.add_(e)
        out = g + e if self.hot is None else torch.where(self.hot, g + e, g)
        if inplace:
            return g.copy_(out)
        return out if gain is None else out.to(g.dtype)  # a 0-d gain may be of another precision


class AdaptiveNoise:
    """The noise as a rule with an adaptive response adds it itself, indexed by that rule's own leaves."""

    def __init__(self, injections: list[Injection], at: int, idx: list[int] | None) -> None:
        self.injections, self.at, self.idx = injections, at, idx

    def add(self, i: int, g: Tensor, gain: Tensor, inplace: bool) -> Tensor:
        """``g`` plus ``gain`` times the noise of leaf ``i``."""
        j = i if self.idx is None else self.idx[i]
        for injection in self.injections:
            if j in injection.noise and injection.at[j] == self.at:
                g = injection.add(j, g, inplace, gain)
        return g
