r"""Weight decay, ``u + wd * theta``: in front of momentum an exact Gaussian prior of precision ``wd`` (coupled); behind it
(decoupled) the prior ``(1 - momentum) wd``, since the noise is matched to it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bayesopt_chain.arguments import checked_types
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import ELEMENTWISE, Link, LinkContext, Traits
from bayesopt_chain.core.op import IN_PLACE, Leaves, TensorOps
from bayesopt_chain.matching.response import Decay, Linear, Response


@dataclass(frozen=True)
class AddDecayedWeights(Link):
    """The link behind :func:`add_decayed_weights`. With ``flip`` the gradient is negated first (``maximize``)."""

    weight_decay: float
    flip: bool = False
    traits = Traits(on_shards="elementwise", needs_params=True)

    @property
    def response(self) -> Response:
        return Decay(self.weight_decay)

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        g = op.mul(g, -1) if self.flip else g
        theta = [
            p.detach() if op.inplace and p.requires_grad and not x.requires_grad else p
            for p, x in zip(context.params, g)
        ]
        into = IN_PLACE if self.flip else op  # the negated gradients are nobody else's
        return into.add(g, theta, alpha=self.weight_decay), state

    def __str__(self) -> str:
        return f"add_decayed_weights({self.weight_decay})" + (" of the negated gradient" if self.flip else "")


@dataclass(frozen=True)
class FlipSign(Link):
    """Negate the gradient: what follows maximises. The target becomes ``exp(+loss / temperature)``."""

    traits = ELEMENTWISE

    @property
    def response(self) -> Response:
        return Linear()  # of the loss that is descended, which is the negative of the given one

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        return op.mul(g, -1), state

    def __str__(self) -> str:
        return "flip_sign"


@checked_types
def add_decayed_weights(weight_decay: float = 0.0, mask: Any = None) -> Chain:
    """Add ``weight_decay * params`` to the updates.

    Written before momentum this is a Gaussian prior of precision ``weight_decay`` in the units of the loss (the mean
    over data: a prior precision ``lambda`` on ``N`` data is ``weight_decay = lambda / N``). Written behind momentum, as in
    AdamW, the prior that is sampled is ``(1 - momentum) * weight_decay``, divided by the preconditioner where one stands
    before it. :func:`add_gaussian_prior` takes priors of any mean and precision, such as the posterior of the last task.

    Args:
        weight_decay: not negative; 0 is the identity.
        mask: tree of booleans, prefix of the parameters, or a function to one: which leaves decay.

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
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}; it must not be negative")
    if weight_decay == 0.0:
        return Chain(())
    return Chain((AddDecayedWeights(weight_decay, masks=() if mask is None else (mask,)),))


@checked_types
def flip_sign_and_add_weight_decay(weight_decay: float = 0.0, maximize: bool = False) -> Chain:
    """What TorchOpt's optimizers begin with: negate the gradient if ``maximize``, then add the decayed weights.

    Args:
        weight_decay: not negative; 0 adds nothing.
        maximize: climb the loss instead.

    Returns:
        A link without state; the empty chain if there is nothing to do.

    Raises:
        ValueError: negative weight decay; at ``update``, missing parameters.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.links.flip_sign_and_add_weight_decay(0.1, maximize=True)
        add_decayed_weights(0.1) of the negated gradient
    """
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}; it must not be negative")
    if weight_decay == 0.0:
        return Chain((FlipSign(),) if maximize else ())
    return Chain((AddDecayedWeights(weight_decay, flip=maximize),))
