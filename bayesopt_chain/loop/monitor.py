"""The values that ``make_step(..., monitor=True)`` adds to the report of a step: gradient norm and temperature."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain._torch import whole
from bayesopt_chain.links.wrapper import state_inside
from bayesopt_chain.schedules import now, scalar


def monitored(info: Any, grads: Any, tx: Any, state: Any) -> Any:
    """Fill in the norm of the gradient and the temperature of a report.

    Args:
        info: the report.
        grads: the gradient before the transformation, a tree.
        tx: the transformation.
        state: the state of the transformation before the step.

    Returns:
        The report with both.
    """
    with torch.no_grad():
        # the norms of leaves first, and then their norm: no copy of all gradients is made
        norms = [whole(torch.linalg.vector_norm(g)) for g in optree.tree_leaves(grads)]
        norm = torch.linalg.vector_norm(torch.stack([x.to(info.loss.dtype) for x in norms]))
        return info._replace(gradient_norm=norm, temperature=temperature(tx, state, info.loss))


def temperature(tx: Any, state: Any, like: Tensor) -> Tensor:
    """Evaluate the temperature of a chain at the count of steps in its state.

    Args:
        tx: the transformation.
        state: its state.
        like: a tensor with the dtype and device of the result.

    Returns:
        A 0-d tensor, which is 0 if no link samples; one entry per link if several links sample.
    """
    links = getattr(tx, "links", ())
    found = [
        scalar(now(link.temperature, entry.step), like.device).to(like.dtype)
        for link, entry in zip(links, state_inside(tx, state))
        if hasattr(link, "temperature") and isinstance(getattr(entry, "step", None), Tensor)
    ]
    return found[0] if len(found) == 1 else torch.stack(found) if found else like.new_zeros(())
