r"""Weight decay: ``u <- u + wd * theta``, with the parameters ``theta`` and the updates ``u``.

In front of the momentum (coupled) weight decay is exactly a Gaussian prior of precision ``wd``, in units of the loss. Behind
the momentum (decoupled; Loshchilov and Hutter 2019) it is a Gaussian prior of precision ``(1 - momentum) wd``. Both are
sampled exactly, because the noise is matched to the weight decay, too.

Localisation is the same towards another point, ``u <- u + strength * (theta - center)``, the gradient of the penalty
``strength |theta - center|^2 / 2``. In front of momentum and preconditioners the chain samples
``exp(-(loss + strength |theta - center|^2 / 2) / T)``, which is concentrated near ``center``; the local learning coefficient is
measured in this way (Lau et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from bayesopt_chain.checks import FROM_ZERO, NOT_NEGATIVE, link_takes
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import HoldsTree, Link, LinkContext, Traits
from bayesopt_chain.core.op import IN_PLACE, Leaves, TensorOps
from bayesopt_chain.engine.parts import Decays, Part
from bayesopt_chain.matching.response import (
    Decay,
    Linear,
    Preconditioner,
    Rate,
    Refused,
    Response,
    SelfContainedSampler,
)


def require_first(before: Sequence[Link]) -> None:
    """Refuse a prior behind a link that scales or accumulates gradients, since it would change the prior.

    Raises:
        ValueError: such a link stands in front; the message names it.
    """
    for link in before:
        response = link.response
        changes = response is None or isinstance(response, (Preconditioner, Rate, SelfContainedSampler, Refused))
        if changes or (isinstance(response, Linear) and response != Linear()):
            raise ValueError(
                f"add_gaussian_prior: {link.shown} stands before it, so that another prior than this would act; write "
                "add_gaussian_prior first"
            )


def params_of(context: LinkContext, op: TensorOps) -> list[Tensor]:
    """The parameters; in place detached, since otherwise autograd would record the gradient that they are written into."""
    return [p.detach() if op.inplace and p.requires_grad else p for p in context.params]


@dataclass(frozen=True)
class AddDecayedWeights(Link):
    """The link that :func:`add_decayed_weights` returns.

    Attributes:
        weight_decay: the factor of the parameters.
        flip: whether the gradient is negated first, which TorchOpt's optimizers call ``maximize``.
        is_prior: whether it was asked for as a Gaussian prior, which stands in front of every link that would change it.
    """

    weight_decay: float
    flip: bool = False
    is_prior: bool = field(default=False, compare=False)
    traits = Traits(on_shards="elementwise", needs_params=True)

    @property
    def response(self) -> Response:
        return Decay(self.weight_decay)

    @property
    def part(self) -> Part | None:
        return Decays(self.weight_decay, self.flip)

    def require_around(self, before: Sequence[Link], behind: Sequence[Link]) -> None:
        if self.is_prior:
            require_first(before)

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        g = op.mul(g, -1) if self.flip else g
        # as in params_of, but where autograd records the gradient already, as in meta-learning
        theta = [
            p.detach() if op.inplace and p.requires_grad and not x.requires_grad else p
            for p, x in zip(context.params, g)
        ]
        # The negated gradients are new tensors that nobody else holds, so that they can be written in place in any case.
        into = IN_PLACE if self.flip else op
        return into.add(g, theta, alpha=self.weight_decay), state

    def __str__(self) -> str:
        return f"add_decayed_weights({self.weight_decay})" + (" of the negated gradient" if self.flip else "")


@dataclass(frozen=True)
class FlipSign(Link):
    """The link that negates the gradient, so that the chain maximises; it then samples ``exp(+loss / temperature)``."""

    name = "flip_sign"
    # The noise is matched to the descent of the negated loss, with respect to which this link changes nothing.
    traits = Traits(on_shards="elementwise", response=Linear())

    @property
    def part(self) -> Part | None:
        return Decays(0.0, flips=True)

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        return op.mul(g, -1), state


@link_takes(weight_decay=FROM_ZERO)
def add_decayed_weights(weight_decay: float = 0.0, mask: Any = None) -> Chain:
    """Add ``weight_decay * params`` to the updates.

    In front of the momentum this is a Gaussian prior of precision ``weight_decay``, in units of the loss. If the loss is a mean
    over ``N`` data, a prior of precision ``lambda`` is ``weight_decay = lambda / N``. Behind the momentum, as in AdamW
    (Loshchilov and Hutter 2019), the precision of the prior that is sampled is ``(1 - momentum) * weight_decay``, divided by
    the preconditioner if one stands in front of the decay. :func:`add_gaussian_prior` takes priors of any mean and precision,
    such as the posterior of an earlier task.

    Args:
        weight_decay: the factor, not negative; 0 makes this link the identity.
        mask: which leaves decay (default: all). A tree of booleans like the parameters or a prefix of it, or a function that
            takes the parameters and returns such a tree.

    Returns:
        A link without state.

    Raises:
        ValueError: negative weight decay; at ``update``, missing parameters.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, p = bc.links.add_decayed_weights(0.1), [torch.ones(1)]
        >>> tx.update([torch.zeros(1)], tx.init(p), params=p, inplace=False)[0]
        [tensor([0.1000])]
    """
    if weight_decay == 0.0:
        return Chain(())
    return Chain((AddDecayedWeights(weight_decay, masks=() if mask is None else (mask,)),))


@link_takes(weight_decay=FROM_ZERO)
def flip_sign_and_add_weight_decay(weight_decay: float = 0.0, maximize: bool = False) -> Chain:
    """Negate the gradient if ``maximize``, then add ``weight_decay * params``, as TorchOpt's optimizers do first.

    Args:
        weight_decay: the factor, not negative; 0 adds nothing.
        maximize: whether the loss is maximised instead of minimised.

    Returns:
        A link without state; the empty chain if there is nothing to do.

    Raises:
        ValueError: negative weight decay; at ``update``, missing parameters.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.links.flip_sign_and_add_weight_decay(0.1, maximize=True)
        add_decayed_weights(0.1) of the negated gradient
    """
    if weight_decay == 0.0:
        return Chain((FlipSign(),) if maximize else ())
    return Chain((AddDecayedWeights(weight_decay, flip=maximize),))


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
    name = "add_localization"
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
        return op.add(g, [p - c for p, c in zip(params_of(context, op), state.center)], alpha=self.strength), state


@link_takes(strength=NOT_NEGATIVE)
def add_localization(center: Any, strength: float) -> Chain:
    """Add ``strength * (params - center)`` to the updates, which pulls the parameters towards a point.

    Written first in a chain, it makes the chain sample ``exp(-(loss + strength / 2 |params - center|^2) / temperature)``.
    Behind the momentum the strength that is sampled is ``1 - momentum`` times the given one. The local learning coefficient
    (``bc.observe(...).llc()``) is estimated from draws of such a chain.

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
