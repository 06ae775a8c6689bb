"""The normals of :mod:`bayesopt_chain.optim`: a function of (key, leaf, count), whatever else the optimizer holds.

The one place where this package meets :mod:`bayesopt_chain.random`. A leaf is numbered by a hash of its parameter's
name, or of its index where the optimizer was given bare tensors, so that freezing, regrouping or leaving out one
parameter leaves the noise of the others alone. torch's generator is reseeded for each leaf with ``splitmix64`` of key,
number and count; Philox takes the three as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Literal

import torch
from torch import Tensor

from bayesopt_chain.random.philox import Runs, draw_elements, parts_of_leaves, whole_leaves
from bayesopt_chain.random.stream import STREAMS, draw_number, leaf_numbers, new_key, splitmix64

Stream = Literal["generator", "philox"]

__all__ = ["STREAMS", "Normals", "Stream", "draw_number", "fresh_key", "leaf_numbers", "splits", "step_seed"]


def fresh_key(generator: torch.Generator | None = None) -> int:
    """A random 63-bit key from ``generator`` or from torch's global generator."""
    return int(new_key(generator, torch.device("cpu")))


def step_seed(key: int, count: int) -> int:
    """A seed that is a function of a key and a count."""
    return splitmix64(splitmix64(key) + count)


def splits(stream: Stream | None, device: torch.device) -> bool:
    """Whether a leaf's draw may be made piece after piece: torch's generator, on a CPU only."""
    return device.type == "cpu" and stream != "philox"


def cut(runs: Runs) -> Generator[Runs, int, None]:
    """The runs of the next so many elements, as often as it is sent a number."""
    at, done = 0, 0  # the run, and how many of its elements are gone
    taken: list[tuple[int, int]] = []
    while True:
        wanted = yield tuple(taken)
        taken = []
        while wanted and at < len(runs):
            start, length = runs[at]
            n = min(wanted, length - done)
            taken.append((start + done, n))
            wanted, done = wanted - n, done + n
            if done == length:
                at, done = at + 1, 0


class Normals:
    """Fills tensors with the standard normals of (key, leaf, count). Keeps a generator and device keys, no state."""

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self._keys: dict[tuple[int, torch.device], Tensor] = {}

    def of(
        self, key: int, leaf: int, count: int, stream: Stream | None, device: torch.device, runs: Runs | None = None
    ) -> Callable:
        """``fill(out)``: with the generator ``out`` may be filled piece after piece, with Philox it is the whole leaf.

        ``runs`` are the elements of a leaf that is spread over ranks; they may be filled piece after piece too. A filler is
        good until the next one is asked for.
        """
        if runs is not None:
            rest = cut(runs)
            next(rest)
            return lambda out: self._philox([out], key, [leaf], count, [rest.send(out.numel())])
        if splits(stream, device):
            self._seed(key, leaf, count)
            return lambda out: out.normal_(generator=self._generator)
        return lambda out: self._philox([out], key, [leaf], count)

    def filler(
        self,
        draws: list[Tensor],
        key: int,
        leaves: list[int],
        stream: Stream | None,
        runs: list[Runs] | None = None,
    ) -> Callable[[int], None]:
        """``fill(count)``: the draws of several leaves of one device and dtype, filled for that count."""
        if runs is not None:
            return lambda count: self._philox(draws, key, leaves, count, runs)
        if not splits(stream, draws[0].device):
            return lambda count: self._philox(draws, key, leaves, count)
        generator, own = self._generator, [splitmix64(key + leaf) for leaf in leaves]

        def fill(count: int) -> None:
            for draw, seed in zip(draws, own):
                generator.manual_seed(splitmix64(seed + count))
                draw.normal_(generator=generator)

        return fill

    def _seed(self, key: int, leaf: int, count: int) -> None:
        self._generator.manual_seed(splitmix64(splitmix64(key + leaf) + count))

    def _philox(
        self, draws: list[Tensor], key: int, leaves: list[int], count: int, runs: list[Runs] | None = None
    ) -> None:
        device = draws[0].device
        if (key, device) not in self._keys:
            self._keys[key, device] = torch.tensor(key, device=device)
        step = torch.full((), count, dtype=torch.int64, device=device)
        if runs is None:
            elements = whole_leaves([x.numel() for x in draws], leaves)
        else:
            elements = parts_of_leaves(tuple(runs), tuple(leaves))
        pieces = draw_elements(self._keys[key, device], step, elements, draws[0].dtype)
        for draw, piece in zip(draws, pieces):
            draw.copy_(piece.view(draw.shape))
