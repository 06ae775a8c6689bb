"""Random streams that are functions of a seed: the same chains whenever they are started anew."""

from __future__ import annotations

from typing import Any

import optree
import torch

from bayesopt_chain.distributed.ranks import chain_seed
from bayesopt_chain.loop.module_state import is_keyed


def seeded(state: Any, seed: int, numbers: range | None) -> Any:
    """A state whose random streams have keys that depend on a seed, on the chain, and on the place of the stream.

    Args:
        state: of one chain, or of chains stacked on axis 0.
        seed: a whole number.
        numbers: the global numbers of stacked chains.

    Returns:
        A state with new keys; a key of 0, where nothing is drawn, stays.

    Raises:
        TypeError: a seed that is no whole number.
        ValueError: a state without a random stream.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> state = bc.sghmc(0.1, temperature=0.1).init(torch.zeros(2))
        >>> bool(seeded(state, 1, None)[1].key == seeded(state, 1, None)[1].key)
        True
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"sample: seed must be a whole number, got {seed!r}")
    place = 0

    def renewed(entry: Any) -> Any:
        nonlocal place
        if not is_keyed(entry):
            return entry
        place += 1
        stream = chain_seed(seed, place)
        rows = list(numbers) if numbers is not None and entry.key.ndim else list(range(entry.key.numel()))
        keys = torch.tensor([chain_seed(stream, i) for i in rows], dtype=entry.key.dtype, device=entry.key.device)
        return entry._replace(key=torch.where(entry.key == 0, entry.key, keys.reshape(entry.key.shape)))

    out = optree.tree_map(renewed, state, is_leaf=is_keyed)
    if not place:
        raise ValueError(
            "sample: seed= sets the keys of the state's random streams, and this state has none: give the optimizer "
            "generator=torch.Generator().manual_seed(seed) instead"
        )
    return out
