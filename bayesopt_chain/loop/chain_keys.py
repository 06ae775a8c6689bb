"""Keys of chains that depend on a seed and on the number of a chain among those of all ranks, not on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from bayesopt_chain.distributed.ranks import agreed_seed, chain_seed
from bayesopt_chain.links.wrapper import unwrapped


def chain_draws(chains: Any, seed: int | None) -> Callable[[Any, int], AbstractContextManager[None]]:
    """Make the context in which ``init`` makes the state of a chain.

    Args:
        chains: the :class:`bayesopt_chain.loop.parallel.Parallel`.
        seed: the seed; ``None`` draws one on the first rank of a mesh, and leaves the global generator alone without a mesh.

    Returns:
        A function of the chain's transformation and of its number among the chains of all ranks, which returns the context.
    """
    if seed is None and chains.mesh is None:
        return lambda tx, number: nullcontext()
    # a chain may itself be shared by ranks with different data, which have to agree on its key too
    data = getattr(getattr(chains.step, "ranks", None), "mesh", None)
    agreed = agreed_seed(seed, *[mesh for mesh in (data, chains.mesh) if mesh is not None])
    return lambda tx, number: _seeded(tx, chain_seed(agreed, number))


@contextmanager
def _seeded(tx: Any, seed: int) -> Iterator[None]:
    """Seed torch's global generator of the CPU, from which keys are drawn, and restore its state at the end.

    Raises:
        ValueError: a link of ``tx`` has a generator of its own.
    """
    if any(getattr(link, "generator", None) is not None for link in getattr(unwrapped(tx), "links", ())):
        raise ValueError(
            "parallel: tx has a generator of its own, from which chains on different ranks would draw the same keys; "
            "build it without generator=, and give the seed to chains.init(tx, params, seed=...)"
        )
    # ``init`` draws keys from this generator, which it takes as no argument
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
