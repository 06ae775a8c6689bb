"""The check of ``make_step(..., check_finite=True)``, whose error names the first values that were NaN or infinite."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks, tracing
from bayesopt_chain.distributed.shards import everywhere, local
from bayesopt_chain.trees import all_finite, found_finite


class FiniteCheck:
    """Raises before anything is written if a step's loss or gradient is not finite.

    Attributes:
        calls: the number of calls so far, which the message gives.
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, params: Any, state: Any, batch: Any, grads: Any, loss: Tensor) -> Tensor:
        """Check the loss and the gradient of a step.

        Args:
            params, state, batch: the arguments of the step, which are searched for the cause.
            grads: the gradient, a tree like the parameters.
            loss: the loss, 0-d.

        Returns:
            Whether loss and gradient are finite, a 0-d tensor of bools.

        Raises:
            FloatingPointError: they are not, and the value can be read (it cannot under capture or vmap). The message names the
                call, the leaf, and what was not finite before the step.
        """
        self.calls += 1
        leaves: list[Any] = optree.tree_leaves(grads)
        # all ranks that hold parts of the gradient must agree: if only some of them raised, the others would wait for them
        flag = everywhere(all_finite([loss, *map(local, leaves)]), leaves)
        if tracing.is_hidden(flag) or bool(flag):
            return flag
        bad = ([f"the loss is {loss.item()}"] if not bool(torch.isfinite(loss).all()) else []) + _not_finite(
            "the gradient", grads
        )
        before = [*_not_finite("batch", batch), *_not_finite("params", params), *_not_finite("state", state)]
        cause = (
            f"; not finite before the step: {', '.join(before)}" if before else "; params, state and batch are finite"
        )
        raise FloatingPointError(
            f"call {self.calls} of this step: {', '.join(bad)}{cause}. Nothing was written: leave this batch out "
            "(bc.skip_nonfinite(tx) does), lower lr, or clip the gradient (torchopt.clip_grad_norm)"
        )


def _not_finite(what: str, tree: Any) -> list[str]:
    """Describe each leaf of a tree that holds NaN or infinities, and count these entries."""
    found = []
    for path, x in zip(optree.tree_paths(tree), optree.tree_leaves(tree)):
        x = local(x)
        if isinstance(x, Tensor) and x.layout is torch.strided and not found_finite([x]):
            wrong = x.numel() - int(torch.isfinite(x).sum())
            kind = "nan" if bool(torch.isnan(x).any()) else "inf"
            found.append(f"{what}{checks.name(path) if path else ''} has {kind} in {wrong} of {x.numel()} entries")
    return found
