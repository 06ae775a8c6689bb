"""The standard normal draws of :mod:`bayesopt_chain.optim`, as a function of (key, leaf number, count of steps).

A leaf's number is a hash of its parameter's name, or of its index if the optimizer was given tensors without names. With
names, freezing, regrouping or leaving out one parameter does not change the draws of the others. Philox takes key, number and
count as its arguments, so that any part of a draw can be made by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain._torch import dispatch_modes, foreach_copy_, is_dtensor
from bayesopt_chain.core.op import WIDE
from bayesopt_chain.distributed.shards import agreed_key
from bayesopt_chain.optim._plan import BLOCK, Work
from bayesopt_chain.random.philox import Runs, draw_elements, parts_of_leaves, whole_leaves
from bayesopt_chain.random.philox_cpu import normals_kernel
from bayesopt_chain.random.stream import draw_number, leaf_numbers, new_key, splitmix64

__all__ = ["Normals", "fresh_key", "leaf_numbers", "shared_key", "step_seed"]


def fresh_key(generator: torch.Generator | None = None) -> int:
    """Draw a random 63-bit key from ``generator``, or from torch's global generator if that is ``None``."""
    return int(new_key(generator, torch.device("cpu")))


def shared_key(generator: torch.Generator | None, groups: list[dict[str, Any]]) -> int:
    """Draw a random key. Ranks that hold parts of the same DTensors all get the key of the first of them."""
    params = [p for group in groups for p in group["params"]]
    device = next((p.device for p in params if is_dtensor(p)), torch.device("cpu"))
    return int(agreed_key(torch.tensor(fresh_key(generator), device=device), params))


def step_seed(key: int, count: int) -> int:
    """Hash a key and a count to a seed."""
    return splitmix64(splitmix64(key) + count)


def cut(runs: Runs) -> Generator[Runs, int, None]:
    """Cut ranges of elements into pieces.

    After the first ``next``, each ``send(n)`` yields the ranges of the next ``n`` elements.

    Args:
        runs: ranges as tuples (start, length).
    """
    at, done = 0, 0  # index of the current range, and the number of its elements that were yielded
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
    """Fills tensors with the standard normals of (key, leaf number, count).

    It caches the keys on each device, and has no state that changes the draws.

    Attributes:
        runs: by tensor, the elements of the whole parameter that this rank holds, as ranges; ``None`` if every tensor is a
            whole parameter.
    """

    def __init__(self) -> None:
        self.runs: Mapping[Tensor, Runs] | None = None
        self._keys: dict[tuple[int, torch.device], Tensor] = {}

    def splits(self, w: Work) -> bool:
        """Whether a leaf's draw is made piece by piece, one after the other, with the result of a draw of the whole leaf."""
        return self.runs is not None or w.redraws or w.param.device.type == "cpu"

    def of(self, w: Work, branch: int = 0, last: bool = False) -> Callable[[Tensor], object]:
        """Make ``fill(out)`` for one leaf.

        Args:
            w: the leaf. If it :meth:`splits`, ``fill`` may be called for one piece after the other, else for the whole leaf.
            branch: 0 for the noise of the momentum branch, 1 for that of the direct branch.
            last: make the leaf's last draw again, instead of the one of this step.
        """
        key, count, leaf = w.group["noise_key"], w.group["noise_count"], draw_number(w.number, branch)
        if last:  # the state remembers the key and the count of the last draw
            of, at = (("noise_of", "noise_at"), ("noise_direct_of", "noise_direct_at"))[branch]
            key, count = w.state[of], w.state[at]
        # Philox by elements gives the same numbers however a leaf is cut, on all ranks and in all blocks
        if self.splits(w):
            rest = cut(((0, w.param.numel()),) if self.runs is None else self.runs[w.param])
            next(rest)
            return lambda out: filling([out], [leaf], [rest.send(out.numel())])(self._key(key, out.device), count)
        return lambda out: filling([out], [leaf])(self._key(key, out.device), count)

    def filler(self, draws: list[Tensor], leaves: list[Work], branch: int) -> Callable[[], None]:
        """Make ``fill()``, which overwrites the draws of several leaves with those of the group's current step.

        Args:
            draws: the tensors to overwrite, one for each leaf.
            leaves: leaves of one group, device and dtype.
            branch: 0 for the noise of the momentum branch, 1 for that of the direct branch.
        """
        group, numbers = leaves[0].group, [draw_number(w.number, branch) for w in leaves]
        key = self._key(group["noise_key"], leaves[0].param.device)
        runs = None if self.runs is None else [self.runs[w.param] for w in leaves]
        if not draws:  # they are not kept: :meth:`again` makes them
            return lambda: None
        fill = filling(draws, numbers, runs)
        return lambda: fill(key, group["noise_count"])

    def again(self, draws: list[Tensor], leaves: list[Work], branch: int, key: int, count: int) -> None:
        """Overwrite the draws of several leaves with Philox's draws of a key and a count."""
        runs = None if self.runs is None else [self.runs[w.param] for w in leaves]
        key_here = self._key(key, draws[0].device)
        filling(draws, [draw_number(w.number, branch) for w in leaves], runs)(key_here, count)

    def _key(self, key: int, device: torch.device) -> Tensor:
        """Return a key as a 0-d tensor on a device; it is cached, which saves a copy to the device at each step."""
        if (key, device) not in self._keys:
            self._keys[key, device] = torch.tensor(key, device=device)
        return self._keys[key, device]


class Chunk(NamedTuple):
    """Leaves that one call of the kernel draws: one in its place, or several in scratch memory, to be copied from there."""

    out: Tensor
    elements: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # starts, lengths and leaf numbers
    draws: list[Tensor]
    views: list[Tensor]


def filling(draws: list[Tensor], leaves: list[int], runs: list[Runs] | None = None) -> Callable[[Tensor, int], None]:
    """Make ``fill(key, count)``, which overwrites draws with those of Philox.

    Args:
        draws: the tensors to overwrite, of one device and dtype.
        leaves: their numbers.
        runs: the elements of each leaf that its tensor holds, as ranges; default: whole leaves.
    """
    device, dtype = draws[0].device, draws[0].dtype
    kernel = normals_kernel() if device.type == "cpu" and dtype in WIDE else None
    direct = kernel is not None and all(map(Tensor.is_contiguous, draws))
    chunks = _chunks(draws, leaves, runs) if direct else []

    def fill(key: Tensor, count: int) -> None:
        step = torch.full((), count, dtype=torch.int64, device=device)
        if kernel is not None and direct and not dispatch_modes():
            for out, elements, into, views in chunks:
                kernel(out, key, step, *elements)
                if views:
                    foreach_copy_(into, views)
            return
        if runs is None:
            elements = whole_leaves([x.numel() for x in draws], leaves)
        else:
            elements = parts_of_leaves(tuple(runs), tuple(leaves))
        for draw, piece in zip(draws, draw_elements(key, step, elements, dtype)):
            draw.copy_(piece.view(draw.shape))

    return fill


def _chunks(draws: list[Tensor], leaves: list[int], runs: list[Runs] | None) -> list[Chunk]:
    """Small leaves go together, up to ``BLOCK`` elements: a call of the kernel costs as much as some thousand elements."""
    groups: list[list[int]] = []
    size = 0
    for k, draw in enumerate(draws):
        size += draw.numel()
        if not groups or size > BLOCK:
            groups.append([])
            size = draw.numel()
        groups[-1].append(k)
    chunks: list[Chunk] = []
    for group in groups:
        ranges = [
            (a, n, leaves[k])
            for k in group
            for a, n in (runs[k] if runs is not None else ()) or ((0, draws[k].numel()),)
        ]
        starts, lengths, numbers = zip(*ranges)
        elements = (starts, lengths, numbers)
        into = [draws[k] for k in group]
        if len(group) == 1:
            chunks.append(Chunk(into[0].view(-1), elements, into, []))
            continue
        out = torch.empty(sum(x.numel() for x in into), dtype=into[0].dtype, device="cpu")
        views = [x.view(d.shape) for x, d in zip(out.split([d.numel() for d in into]), into)]
        chunks.append(Chunk(out, elements, into, views))
    return chunks
