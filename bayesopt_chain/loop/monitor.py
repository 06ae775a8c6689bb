"""What ``make_step(..., monitor=True)`` reports: the norm of the gradient, and the temperature in force."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain.distributed.shards import whole
from bayesopt_chain.schedules import now, scalar


def monitored(info: Any, grads: Any, tx: Any, state: Any) -> Any:
    """Fill in the norm and the temperature.

    Args:
        info: the report; one without places for them (that of a variational family) is returned as it is.
        grads: the gradient before the transformation.
        tx: the transformation.
        state: of the transformation, before the step.
    """
    if "gradient_norm" not in info._fields:
        return info
    with torch.no_grad():
        norms = [whole(torch.linalg.vector_norm(g)) for g in optree.tree_leaves(grads)]
        norm = torch.linalg.vector_norm(torch.stack([x.to(info.loss.dtype) for x in norms]))
        return info._replace(gradient_norm=norm, temperature=temperature(tx, state, info.loss))


def temperature(tx: Any, state: Any, like: Tensor) -> Tensor:
    """Read the temperature of a chain at the state's count.

    Returns:
        A tensor of the dtype and device of ``like``: 0-d, or one entry for each link that samples where there are several.
    """
    links = getattr(getattr(tx, "transformation", tx), "links", ())
    found = [
        scalar(now(link.temperature, entry.step), like.device).to(like.dtype)
        for link, entry in zip(links, getattr(state, "inner", state))
        if hasattr(link, "temperature") and isinstance(getattr(entry, "step", None), Tensor)
    ]
    return found[0] if len(found) == 1 else torch.stack(found) if found else like.new_zeros(())
