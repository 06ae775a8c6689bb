"""Links whose draws do not all count the same in means."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain.links.skip_nonfinite import SkipNonfinite


class Weighted:
    """A link whose state has a field ``weight``, 0-d: behind an update how much the parameters count which it started from."""


def weight_of(tx: GradientTransformation, state: Any) -> Tensor:
    """The weight that the last update of a chain with such a link left in its state."""
    links: Any = getattr(tx.transformation if isinstance(tx, SkipNonfinite) else tx, "links", ())
    return next(entry.weight for link, entry in zip(links, state) if isinstance(link, Weighted)).clone()
