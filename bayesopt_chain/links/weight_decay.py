r"""Weight decay, ``u + wd * theta``: in front of momentum an exact Gaussian prior of precision ``wd`` (coupled); behind it
(decoupled) the prior ``(1 - momentum) wd``, since the noise is matched to it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bayesopt_chain.arguments import checked_types
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.foreign import recognises
from bayesopt_chain.core.leaves import each
from bayesopt_chain.core.link import Rule
from bayesopt_chain.core.masks import masked
from bayesopt_chain.core.response import Decay, Linear, Response


@dataclass(frozen=True)
class AddDecayedWeights(Rule):
    """The rule behind :func:`add_decayed_weights`; ``flip`` negates the gradient first."""

    weight_decay: float
    flip: bool = False
    needs_params = True

    @property
    def response(self) -> Response:
        return Decay(self.weight_decay)

    def update(self, g, state, params, ctx):
        def add(x: Tensor, p: Tensor) -> Tensor:
            if ctx.inplace and not x.requires_grad:
                p = p.data
            if self.flip:
                return (x.neg_() if ctx.inplace else x.neg()).add_(p, alpha=self.weight_decay)
            return (x.add_ if ctx.inplace else x.add)(p, alpha=self.weight_decay)

        return each(add, g, params), state

    def __str__(self) -> str:
        return f"add_decayed_weights({self.weight_decay})" + (" of the negated gradient" if self.flip else "")


@dataclass(frozen=True)
class FlipSign(Rule):
    """Negate the gradient: what follows maximises. The target becomes ``exp(+loss / temperature)``."""

    response = Linear()

    def update(self, g, state, params, ctx):
        return each(Tensor.neg_ if ctx.inplace else Tensor.neg, g), state

    def __str__(self) -> str:
        return "flip_sign"


@checked_types
def add_decayed_weights(weight_decay: float = 0.0, mask: Any = None) -> Chain:
    """Add ``weight_decay * params`` to the updates.

    Written before momentum this is a Gaussian prior of precision ``weight_decay`` in the units of the loss (the mean
    over data: a prior precision ``lambda`` on ``N`` data is ``weight_decay = lambda / N``). Written behind momentum, as in
    AdamW, the prior that is sampled is ``(1 - momentum) * weight_decay``, divided by the preconditioner where one stands
    before it.

    Args:
        weight_decay: not negative; 0 is the identity.
        mask: tree of booleans, prefix of the parameters, or a function to one: which leaves decay.

    Raises:
        ValueError: negative weight decay; at ``update``, missing parameters.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, p = bc.add_decayed_weights(0.1), [torch.ones(1)]
        >>> tx.update([torch.zeros(1)], tx.init(p), params=p, inplace=False)[0]
        [tensor([0.1000])]
    """
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}; it must not be negative")
    if weight_decay == 0.0:
        return Chain(())
    link = Chain((AddDecayedWeights(weight_decay),))
    return link if mask is None else masked(link, mask)


@checked_types
def flip_sign_and_add_weight_decay(weight_decay: float = 0.0, maximize: bool = False) -> Chain:
    """What TorchOpt's optimizers begin with: negate the gradient if ``maximize``, then add the decayed weights.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.flip_sign_and_add_weight_decay(0.1, maximize=True)
        add_decayed_weights(0.1) of the negated gradient
    """
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}; it must not be negative")
    if weight_decay == 0.0:
        return Chain((FlipSign(),) if maximize else ())
    return Chain((AddDecayedWeights(weight_decay, flip=maximize),))


@recognises("_add_decayed_weights.<locals>.update_fn")
def _torchopts_decay(link, cells):
    return (AddDecayedWeights(cells["weight_decay"]),)


@recognises("_flip_sign_and_add_weight_decay.<locals>.update_fn")
def _torchopts_flip(link, cells):
    constants = link.update.__code__.co_consts
    flips = any("neg" in getattr(code, "co_names", ()) for code in constants)
    return flip_sign_and_add_weight_decay(cells.get("weight_decay", 0.0), flips).rules
