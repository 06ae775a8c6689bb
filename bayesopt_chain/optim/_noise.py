"""The normals of :mod:`bayesopt_chain.optim`: a function of (key, leaf, count), whatever else the optimizer holds.

The one place where this package meets :mod:`bayesopt_chain.random`. A leaf is numbered by a hash of its parameter's
name, or by its index where the optimizer was given bare tensors, so that freezing, regrouping or leaving out one
parameter leaves the noise of the others alone. The number goes into the key: ``splitmix64(key + leaf)`` is the leaf's
own key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from bayesopt_chain.random import philox
from bayesopt_chain.random.stream import STREAMS, new_key, splitmix64

Stream = Literal["generator", "philox"]

__all__ = ["STREAMS", "Normals", "Stream", "fresh_key", "leaf_number", "step_seed"]


def fresh_key(generator: torch.Generator | None = None) -> int:
    """A random 63-bit key from ``generator`` or from torch's global generator."""
    return int(new_key(generator, torch.device("cpu")))


def leaf_number(name: str | int) -> int:
    """The number of a parameter: 64 bits of a hash of its name, or its index."""
    if isinstance(name, int):
        return name
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def step_seed(key: int, count: int) -> int:
    """A seed that is a function of a key and a count."""
    return splitmix64(splitmix64(key) + count)


class Normals:
    """Fills tensors with the standard normals of (key, leaf, count). Keeps a generator and device keys, no state."""

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self._own: dict[tuple[int, int], int] = {}  # the leaves' own keys
        self._keys: dict[tuple[int, torch.device], Tensor] = {}

    def of(self, key: int, leaf: int, count: int, stream: Stream | None, device: torch.device) -> Callable:
        """``fill(out)``: with the generator stream ``out`` may be filled piece after piece, with Philox it is the whole leaf.

        A filler is good until the next one is asked for.
        """
        own = splitmix64(key + leaf)
        if splits(stream, device):
            self._generator.manual_seed(splitmix64(own + count))
            return self._from_generator
        own = own - (1 << 64) if own >> 63 else own  # int64
        where = (own, device)
        if where not in self._keys:
            self._keys[where] = torch.tensor(own, device=device)
        keyed, at = self._keys[where], torch.full((), count, dtype=torch.int64, device=device)

        def fill(out: Tensor) -> Tensor:
            real = torch.float64 if out.dtype == torch.float64 else torch.float32
            flat = philox.philox_normals(keyed, at, [out.numel()], 0, real)[0]
            return out.copy_(flat.view(out.shape))

        return fill

    def fill(self, draws: list[Tensor], key: int, leaves: list[int], count: int, stream: Stream | None) -> None:
        """Fill the draws of several leaves of one device."""
        if not splits(stream, draws[0].device):
            for draw, leaf in zip(draws, leaves):
                self.of(key, leaf, count, stream, draw.device)(draw)
            return
        generator, known = self._generator, self._own
        for draw, leaf in zip(draws, leaves):
            own = known.get((key, leaf))
            if own is None:
                own = known[key, leaf] = splitmix64(key + leaf)
            generator.manual_seed(splitmix64(own + count))
            draw.normal_(generator=generator)

    def _from_generator(self, out: Tensor) -> Tensor:
        return out.normal_(generator=self._generator)


def splits(stream: Stream | None, device: torch.device) -> bool:
    """Whether a leaf's draw may be made piece after piece: torch's generator, on a CPU only."""
    return device.type == "cpu" and stream != "philox"
