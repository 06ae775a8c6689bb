"""Keys of chains that depend on a seed and on the number of a chain among those of all ranks, not on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import optree
import torch

from bayesopt_chain import checks
from bayesopt_chain.distributed.ranks import broadcast
from bayesopt_chain.loop.module_state import is_keyed
from bayesopt_chain.random.stream import chain_seed


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
    if seed is None:
        drawn = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
        for mesh in (data, chains.mesh):
            drawn = drawn if mesh is None else broadcast(drawn, mesh)
        seed = int(drawn)
    return lambda tx, number: _seeded(tx, chain_seed(seed, number))


@contextmanager
def _seeded(tx: Any, seed: int) -> Iterator[None]:
    """Seed torch's global generator of the CPU, from which keys are drawn, and restore its state at the end.

    Raises:
        ValueError: a link of ``tx`` has a generator of its own.
    """
    if any(getattr(link, "generator", None) is not None for link in getattr(tx, "links", ())):
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
    checks.require("sample", seed=(seed, checks.INDEX))
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
