"""The normals of :mod:`bayesopt_chain.optim`: a function of (key, leaf, count), whatever else the optimizer holds.

This is the one place where the room meets :mod:`bayesopt_chain.random`. A leaf is numbered by a hash of its parameter's
name, or of its index where the optimizer was given bare tensors, so that freezing, regrouping or leaving out one
parameter leaves the noise of the others alone. torch's generator is reseeded for each leaf with ``splitmix64`` of key,
number and count; Philox takes the three as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.distributed.shards import agreed_key
from bayesopt_chain.optim._plan import Work
from bayesopt_chain.random.philox import Runs, draw_elements, parts_of_leaves, whole_leaves
from bayesopt_chain.random.stream import STREAMS, draw_number, leaf_numbers, new_key, splitmix64

Stream = Literal["generator", "philox"]

__all__ = ["STREAMS", "Normals", "Stream", "fresh_key", "leaf_numbers", "shared_key", "step_seed"]


def fresh_key(generator: torch.Generator | None = None) -> int:
    """A random 63-bit key from ``generator`` or from torch's global generator."""
    return int(new_key(generator, torch.device("cpu")))


def shared_key(generator: torch.Generator | None, groups: list[dict[str, Any]]) -> int:
    """A random key; of parameters that are DTensors the first rank's, on all ranks that hold parts of them."""
    params = [p for group in groups for p in group["params"]]
    device = next((p.device for p in params if is_dtensor(p)), torch.device("cpu"))
    return int(agreed_key(torch.tensor(fresh_key(generator), device=device), params))


def step_seed(key: int, count: int) -> int:
    """A seed that is a function of a key and a count."""
    return splitmix64(splitmix64(key) + count)


def fill_by_generator(draws: list[Tensor], generator: torch.Generator, seeds: list[int], group: dict[str, Any]) -> None:
    """Overwrite draws with those of this step of a group, each by a generator that is reseeded for it."""
    for draw, seed in zip(draws, seeds):
        generator.manual_seed(splitmix64(seed + group["noise_count"]))
        draw.normal_(generator=generator)


def cut(runs: Runs) -> Generator[Runs, int, None]:
    """Cut ranges of elements to pieces: sent a number of elements, it yields the ranges of that many next ones."""
    at, done = 0, 0  # the range, and how many of its elements are gone
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
    """Fills tensors with the standard normals of (key, leaf, count). Keeps a generator and keys on devices, no state.

    Attributes:
        runs: by tensor, the elements of a parameter that this rank holds, as ranges; ``None`` where every tensor is whole.
    """

    def __init__(self) -> None:
        self.runs: Mapping[Tensor, Runs] | None = None
        self._generator = torch.Generator()
        self._keys: dict[tuple[int, torch.device], Tensor] = {}

    def splits(self, w: Work) -> bool:
        """Whether a leaf's draw may be made piece after piece: by elements, or by torch's generator on a CPU."""
        return self.runs is not None or w.redraws or self.by_generator(w)

    def of(self, w: Work, branch: int = 0, last: bool = False, in_pieces: bool = False) -> Callable[[Tensor], object]:
        """Make ``fill(out)`` for one leaf.

        Args:
            w: the leaf; where it :meth:`splits`, ``fill`` may be called for one piece after the other, else for all of it.
            branch: 0 for the noise of the velocity, 1 for that of the direct way.
            last: make the leaf's last draw again, instead of the one of this step.
            in_pieces: ``fill`` has to take one piece after the other, whatever draws; on a CPU.

        Returns:
            A function that is good until the next one is asked for, with Philox longer.
        """
        key, count, leaf = w.group["noise_key"], w.group["noise_count"], draw_number(w.number, branch)
        if last:
            of, at = (("noise_of", "noise_at"), ("noise_direct_of", "noise_direct_at"))[branch]
            key, count = w.state[of], w.state[at]
        if self.runs is not None or w.redraws or (in_pieces and not self.by_generator(w)):
            rest = cut(((0, w.param.numel()),) if self.runs is None else self.runs[w.param])
            next(rest)
            return lambda out: self._philox([out], key, [leaf], count, [rest.send(out.numel())])
        if self.by_generator(w):
            self._generator.manual_seed(splitmix64(splitmix64(key + leaf) + count))
            return lambda out: out.normal_(generator=self._generator)
        return lambda out: self._philox([out], key, [leaf], count)

    def filler(self, draws: list[Tensor], leaves: list[Work], branch: int) -> Callable[[], None]:
        """Make ``fill()``, which overwrites the draws of several leaves of one group, device and dtype by those of its step."""
        group, numbers = leaves[0].group, [draw_number(w.number, branch) for w in leaves]
        key = group["noise_key"]
        if self.runs is None and self.by_generator(leaves[0]):
            seeds = [splitmix64(key + leaf) for leaf in numbers]
            return partial(fill_by_generator, draws, self._generator, seeds, group)
        runs = None if self.runs is None else [self.runs[w.param] for w in leaves]
        return lambda: self._philox(draws, key, numbers, group["noise_count"], runs)

    def again(self, draws: list[Tensor], leaves: list[Work], branch: int, key: int, count: int) -> None:
        """Overwrite draws of several leaves with those of a key and a count."""
        runs = None if self.runs is None else [self.runs[w.param] for w in leaves]
        self._philox(draws, key, [draw_number(w.number, branch) for w in leaves], count, runs)

    def row(self, out: Tensor, leaves: list[Work], branch: int, key: int, count: int) -> None:
        """Overwrite a vector by Philox's draws of several leaves on one CPU, leaf behind leaf."""
        elements = whole_leaves([w.param.numel() for w in leaves], [draw_number(w.number, branch) for w in leaves])
        torch.cat(draw_elements(self._key(key, out.device), torch.tensor(count), elements, out.dtype), out=out)

    def by_generator(self, w: Work) -> bool:
        """Whether torch's generator draws for a whole leaf: on a CPU, unless Philox is asked for."""
        return w.param.device.type == "cpu" and w.group["noise_stream"] != "philox"

    def _philox(
        self, draws: list[Tensor], key: int, leaves: list[int], count: int, runs: list[Runs] | None = None
    ) -> None:
        device = draws[0].device
        step = torch.full((), count, dtype=torch.int64, device=device)
        if runs is None:
            elements = whole_leaves([x.numel() for x in draws], leaves)
        else:
            elements = parts_of_leaves(tuple(runs), tuple(leaves))
        pieces = draw_elements(self._key(key, device), step, elements, draws[0].dtype)
        for draw, piece in zip(draws, pieces):
            draw.copy_(piece.view(draw.shape))

    def _key(self, key: int, device: torch.device) -> Tensor:
        if (key, device) not in self._keys:
            self._keys[key, device] = torch.tensor(key, device=device)
        return self._keys[key, device]
