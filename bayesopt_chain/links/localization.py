r"""Localisation: ``u <- u + strength * (theta - center)``, with the parameters ``theta`` and the updates ``u``.

This is the gradient of the penalty ``strength |theta - center|^2 / 2``. In front of momentum and preconditioners the chain
samples ``exp(-(loss + strength |theta - center|^2 / 2) / T)``, which is concentrated near ``center``; the local learning
coefficient is measured in this way (Lau et al. 2024). For the noise it is the same as weight decay towards another point than
the origin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from bayesopt_chain.arguments import NOT_NEGATIVE, checked_within
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.engine.parts import Decays, Part
from bayesopt_chain.links.leaves import HoldsTree
from bayesopt_chain.matching.response import Decay, Response


class LocalizationState(NamedTuple):
    """The state of a localisation.

    Attributes:
        center: the centre, of the shape of each parameter.
    """

    center: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class AddLocalization(HoldsTree):
    """The link that :func:`add_localization` returns, with the same arguments."""

    center: Any = field(hash=False)
    strength: float
    traits = Traits(on_shards="elementwise", needs_params=True)

    @property
    def response(self) -> Response:
        return Decay(self.strength)

    @property
    def part(self) -> Part | None:
        return Decays(self.strength, centre="center")

    def init(self, leaves: Leaves, context: LinkContext) -> LocalizationState:
        centre = context.broadcast(self.center, "add_localization: center")
        return LocalizationState(tuple([x.expand(p.shape).clone() for x, p in zip(centre, leaves)]))

    def update(
        self, g: Leaves, state: LocalizationState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, LocalizationState]:
        # Writing parameters that require gradients into a gradient in place would make autograd record the gradient.
        params = [p.detach() if op.inplace and p.requires_grad else p for p in context.params]
        return op.add(g, [p - c for p, c in zip(params, state.center)], alpha=self.strength), state

    def __str__(self) -> str:
        return f"add_localization(..., {self.strength})"


@checked_within(strength=NOT_NEGATIVE)
def add_localization(center: Any, strength: float) -> Chain:
    """Add ``strength * (params - center)`` to the updates, which pulls the parameters towards a point.

    Written first in a chain, it makes the chain sample ``exp(-(loss + strength / 2 |params - center|^2) / temperature)``.
    Behind the momentum the strength that is sampled is ``1 - momentum`` times the given one. The local learning coefficient
    (:func:`bayesopt_chain.local_learning_coefficient`) is estimated from draws of such a chain.

    Args:
        center: a tree like the parameters, a prefix of one, or one number for all parameters. The state keeps a copy.
        strength: the curvature of the penalty, in units of the loss, not negative; 0 makes this link the identity.

    Returns:
        A link whose state has one tensor of the shape of each parameter.

    Raises:
        ValueError: a negative or infinite strength; at ``init``, a centre that does not fit the parameters; at ``update``,
            missing parameters.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, p = bc.links.add_localization([torch.ones(1)], 0.5), [torch.tensor([3.0])]
        >>> tx.update([torch.zeros(1)], tx.init(p), params=p, inplace=False)[0]
        [tensor([1.])]
    """
    if strength == 0.0:
        return Chain(())
    return Chain((AddLocalization(center, strength),))
