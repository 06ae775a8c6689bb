"""Starting a sampler where an optimizer stopped, or one of another temperature. Random keys are new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bayesopt_chain.core.state import State, flattened

NOISE = ("LangevinNoiseState", "FilteredNoiseState")  # matched to its own chain: it begins anew


def warm_start(fresh: State, like: Any) -> State:
    """``fresh`` with every entry that the other state has too taken over from there."""
    several = issubclass(type(like), (tuple, list)) and not hasattr(like, "_fields")
    donors: Sequence[Any] = like if several else [like]
    out = list(fresh)
    for donor in donors:
        tensors, _ = flattened(donor)
        if not tensors or type(donor).__name__ in NOISE:
            continue
        fits = [i for i, mine in enumerate(fresh) if out[i] is mine and _alike(mine, donor)]
        if fits:
            taken = flattened(fresh[fits[0]])[1].unflatten([t.detach().clone() for t in tensors])
            out[fits[0]] = taken._replace(key=out[fits[0]].key) if hasattr(taken, "key") else taken
        else:
            raise ValueError(
                f"init: like= holds {type(donor).__name__}, which no link of this chain remembers in that shape; "
                "build the chain from the same links as the optimizer, or leave that entry out: like=[the others]"
            )
    return State(out, fresh.layout)


def _alike(mine: Any, donor: Any) -> bool:
    """Whether two states are of one kind, by name and fields; fields without tensors do not count."""
    names, others = ([f for f in getattr(s, "_fields", ()) if flattened(getattr(s, f))[0]] for s in (mine, donor))
    if type(mine).__name__ != type(donor).__name__ or names != others:
        return False
    a, b = flattened(mine)[0], flattened(donor)[0]
    same = [isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype for x, y in zip(a, b)]
    return len(a) == len(b) and all(same)
