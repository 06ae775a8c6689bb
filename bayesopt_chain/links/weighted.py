"""Links whose draws have importance weights, so that averages over the draws have to be weighted averages."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain.links.wrapper import state_inside, unwrapped


class Weighted:
    """A link whose draws have weights.

    After each update the field ``weight`` of its state, 0-d, is the weight of the parameters from which that update started.
    """


def weight_of(tx: GradientTransformation, state: Any) -> Tensor:
    """The weight, 0-d, of the parameters from which the last update of a chain started.

    Args:
        tx: a chain with one link that is :class:`Weighted`, or a wrapper of such a chain.
        state: the state of ``tx`` after that update.

    Returns:
        A copy, which later updates in place do not change.
    """
    entries: Any = zip(getattr(unwrapped(tx), "links", ()), state_inside(tx, state))
    return next(entry.weight for link, entry in entries if isinstance(link, Weighted)).clone()
