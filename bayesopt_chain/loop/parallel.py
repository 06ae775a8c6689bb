r"""``parallel``: many chains at once, stacked on axis 0, each with its own noise key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torchopt.base import GradientTransformation


class Parallel:
    """``n`` chains of one step. Call it like the step; build its states with :meth:`init`."""

    def __init__(self, step: Callable, n: int, batch_dim: int | None) -> None:
        self.n = n
        self.step = step
        self._stacked = torch.vmap(step, in_dims=(0, 0, batch_dim), randomness="different")

    def init(self, tx: GradientTransformation, params: Any) -> Any:
        """States of ``n`` chains for parameters stacked on axis 0, each with a key of its own."""
        per_chain = [optree.tree_map(lambda p, i=i: p[i], params) for i in range(self.n)]
        return stack([tx.init(p) for p in per_chain])

    def __call__(self, params: Any, state: Any, batch: Any):
        """One step of every chain: ``(params, state, Info)``, stacked on axis 0."""
        for leaf in optree.tree_leaves((params, state)):
            if leaf.ndim == 0 or leaf.shape[0] != self.n:
                raise ValueError(
                    f"parallel: params and state must be stacked for {self.n} chains on axis 0, got a leaf of shape "
                    f"{tuple(leaf.shape)}; use bc.stack([...]) and chains.init(tx, params)"
                )
        return self._stacked(params, state, batch)


def parallel(step: Callable, n: int, *, batch_dim: int | None = None) -> Parallel:
    """Run ``n`` chains of a step at once.

    Args:
        step: from :func:`make_step`, not in place.
        n: number of chains, at least 1.
        batch_dim: axis of the batch that counts chains; ``None`` (default) gives every chain the same batch.

    Returns:
        A callable with the step's interface on parameters and states stacked on axis 0, with ``init(tx, params)``.
        Chains draw the noise that each would draw alone.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.sghmc(0.1, temperature=1.0)
        >>> chains = bc.parallel(bc.make_step(lambda params, batch: (params**2).sum(), tx), 3)
        >>> params = torch.zeros(3, 2)
        >>> params, state, info = chains(params, chains.init(tx, params), ())
        >>> params.shape, info.loss.shape
        (torch.Size([3, 2]), torch.Size([3]))
    """
    if n < 1:
        raise ValueError(f"parallel: n must be at least 1, got {n}")
    return Parallel(step, n, batch_dim)


def stack(trees: list[Any]) -> Any:
    """Stack trees of the same structure on a new axis 0.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> bc.stack([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])["w"].shape
        torch.Size([2, 2])
    """
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *trees)
