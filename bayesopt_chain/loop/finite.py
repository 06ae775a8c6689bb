"""What went wrong first: the check of a step's loss and gradient, and the words for what it finds."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks, tracing
from bayesopt_chain.distributed.shards import everywhere, local
from bayesopt_chain.trees import all_finite, found_finite


class FiniteCheck:
    """Refuse a step whose loss or gradient is not finite, before anything is written. Calls are counted for the message."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, params: Any, state: Any, batch: Any, grads: Any, loss: Tensor) -> Tensor:
        """Whether loss and gradient are finite, 0-d; raises where that can be looked at.

        Raises:
            FloatingPointError: naming the step, the leaf, and what was not finite before.
        """
        self.calls += 1
        leaves: list[Any] = optree.tree_leaves(grads)
        flag = everywhere(all_finite([loss, *map(local, leaves)]), leaves)
        if tracing.is_hidden(flag) or bool(flag):
            return flag
        bad = ([f"the loss is {loss.item()}"] if not bool(torch.isfinite(loss).all()) else []) + _bad(
            "the gradient", grads
        )
        before = [*_bad("batch", batch), *_bad("params", params), *_bad("state", state)]
        cause = (
            f"; not finite before the step: {', '.join(before)}" if before else "; params, state and batch are finite"
        )
        raise FloatingPointError(
            f"call {self.calls} of this step: {', '.join(bad)}{cause}. Nothing was written: leave this batch out "
            "(bc.skip_nonfinite(tx) does), lower lr, or clip the gradient (torchopt.clip_grad_norm)"
        )


def _bad(what: str, tree: Any) -> list[str]:
    """The leaves of a tree that hold NaN or infinities, and in how many entries."""
    found = []
    for path, x in zip(optree.tree_paths(tree), optree.tree_leaves(tree)):
        x = local(x)
        if isinstance(x, Tensor) and x.layout is torch.strided and not found_finite([x]):
            wrong = x.numel() - int(torch.isfinite(x).sum())
            kind = "nan" if bool(torch.isnan(x).any()) else "inf"
            found.append(f"{what}{checks.name(path) if path else ''} has {kind} in {wrong} of {x.numel()} entries")
    return found
