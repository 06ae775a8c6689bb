"""Keys of chains that are functions of a seed and of a chain's global number, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from bayesopt_chain.distributed.ranks import agreed_seed, chain_seed


def chain_draws(chains: Any, seed: int | None) -> Callable[[Any, int], AbstractContextManager[None]]:
    """A function of a transformation and a chain's global number: the context in which ``init`` makes that chain's state."""
    if seed is None and chains.mesh is None:
        return lambda tx, number: nullcontext()
    data = getattr(getattr(chains.step, "ranks", None), "mesh", None)
    agreed = agreed_seed(seed, *[mesh for mesh in (data, chains.mesh) if mesh is not None])
    return lambda tx, number: _seeded(tx, chain_seed(agreed, number))


@contextmanager
def _seeded(tx: Any, seed: int) -> Iterator[None]:
    """Seed torch's global generator of the CPU, from which keys are drawn, and restore it at the end.

    Raises:
        ValueError: a link with a generator of its own.
    """
    tx = getattr(tx, "transformation", tx)
    if any(getattr(link, "generator", None) is not None for link in getattr(tx, "links", ())):
        raise ValueError(
            "parallel: tx has a generator of its own, from which chains on different ranks would draw the same keys; "
            "build it without generator=, and give the seed to chains.init(tx, params, seed=...)"
        )
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
