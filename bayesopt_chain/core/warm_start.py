"""Starting a sampler where an optimizer stopped."""

from __future__ import annotations

from typing import Any

import optree
import torch

from bayesopt_chain.core.state import State


def warm_start(fresh: State, like: Any) -> State:
    """``fresh`` with every entry that an optimizer's state has too taken over from there."""
    donors = [s for s in (like if isinstance(like, (tuple, list)) and not hasattr(like, "_fields") else [like])]
    donors = [s for s in donors if optree.tree_leaves(s)]  # pyright: ignore[reportArgumentType]
    out = list(fresh)
    for donor in donors:
        for i, mine in enumerate(fresh):
            if out[i] is mine and _alike(mine, donor):
                leaves = [t.detach().clone() for t in optree.tree_leaves(donor)]  # pyright: ignore[reportArgumentType]
                out[i] = optree.tree_unflatten(optree.tree_structure(mine), leaves)
                break
        else:
            if getattr(donor, "_fields", ())[:1] == ("key",):
                continue  # another sampler's noise: this one starts its own
            raise ValueError(
                f"init: like= holds {type(donor).__name__}, which no link of this chain remembers in that shape; "
                "build the chain from the same links as the optimizer"
            )
    return State(out, fresh.layout)


def _alike(mine: Any, donor: Any) -> bool:
    """Whether two states are of one kind, by name and fields; fields without tensors do not count."""
    if type(mine).__name__ != type(donor).__name__:
        return False
    names = [[f for f in getattr(s, "_fields", ()) if optree.tree_leaves(getattr(s, f))] for s in (mine, donor)]
    if names[0] != names[1] or "key" in names[0]:
        return False
    a, b = optree.tree_leaves(mine), optree.tree_leaves(donor)
    return len(a) == len(b) and all(
        torch.is_tensor(y) and x.shape == y.shape and x.dtype == y.dtype for x, y in zip(a, b)
    )
