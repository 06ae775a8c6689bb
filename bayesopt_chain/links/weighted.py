"""Links whose draws have importance weights, so that averages over the draws have to be weighted averages."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain.links.skip_nonfinite import SkipNonfinite


class Weighted:
    """A link whose draws have weights.

    After each update the field ``weight`` of its state, 0-d, is the weight of the parameters from which that update started.
    """


def weight_of(tx: GradientTransformation, state: Any) -> Tensor:
    """The weight, 0-d, of the parameters from which the last update of a chain started.

    Args:
        tx: a chain with one link that is :class:`Weighted`, or such a chain in ``skip_nonfinite``.
        state: the state after that update; of ``skip_nonfinite``, the state inside.

    Returns:
        A copy, which later updates in place do not change.
    """
    links: Any = getattr(tx.transformation if isinstance(tx, SkipNonfinite) else tx, "links", ())
    return next(entry.weight for link, entry in zip(links, state) if isinstance(link, Weighted)).clone()
