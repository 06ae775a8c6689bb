"""Starting a sampler where an optimizer stopped, or where one of another temperature did.

What both remember is taken over, random keys excepted: nobody's noise is drawn twice.
"""

from __future__ import annotations

from typing import Any

import optree
import torch

from bayesopt_chain.core.state import State

NOISE = ("LangevinNoiseState", "FilteredNoiseState")  # matched to its own chain: it begins anew


def warm_start(fresh: State, like: Any) -> State:
    """``fresh`` with every entry that the other state has too taken over from there."""
    donors = [s for s in (like if isinstance(like, (tuple, list)) and not hasattr(like, "_fields") else [like])]
    donors = [s for s in donors if optree.tree_leaves(s)]  # pyright: ignore[reportArgumentType]
    out = list(fresh)
    for donor in donors:
        if type(donor).__name__ in NOISE:
            continue
        for i, mine in enumerate(fresh):
            if out[i] is mine and _alike(mine, donor):
                leaves = [t.detach().clone() for t in optree.tree_leaves(donor)]  # pyright: ignore[reportArgumentType]
                out[i] = optree.tree_unflatten(optree.tree_structure(mine), leaves)
                if hasattr(mine, "key"):
                    out[i] = out[i]._replace(key=mine.key)
                break
        else:
            raise ValueError(
                f"init: like= holds {type(donor).__name__}, which no link of this chain remembers in that shape; "
                "build the chain from the same links as the optimizer, or leave that entry out: like=[the others]"
            )
    return State(out, fresh.layout)


def _alike(mine: Any, donor: Any) -> bool:
    """Whether two states are of one kind, by name and fields; fields without tensors do not count."""
    if type(mine).__name__ != type(donor).__name__:
        return False
    names = [[f for f in getattr(s, "_fields", ()) if optree.tree_leaves(getattr(s, f))] for s in (mine, donor)]
    if names[0] != names[1]:
        return False
    a, b = optree.tree_leaves(mine), optree.tree_leaves(donor)
    return len(a) == len(b) and all(
        torch.is_tensor(y) and x.shape == y.shape and x.dtype == y.dtype for x, y in zip(a, b)
    )
