r"""The one stream of row numbers from which every order, fold, chain and rank reads its batches.

``N`` data and batches of ``b`` make ``K = floor(N / b)`` steps an epoch. Batch ``k`` of epoch ``e`` of chain ``c`` is

    rows(e, k, c) = pi_{e, c}[k b : (k + 1) b]

for a permutation ``pi`` of the data that is a function of (seed, e, c). It sorts the 62-bit Philox keys of the counters
(block, c, e), so that no generator is kept. An independent batch is the first ``b`` distinct numbers of the keys of step
``e K + k``, modulo ``N``. A fold is a part of one more permutation, and data that are left out are taken from the list before
it is permuted. Rank ``r`` of ``R`` takes the part ``[r b / R, (r + 1) b / R)`` of each batch, so that the ranks' batches
together are the batch of one process.

A kernel in C++ makes the same numbers for many chains at once: 5,000 chains that reshuffle 768 rows sort 5,000 times an epoch,
and a call of torch for each would take longer than their steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bayesopt_chain.checks import short
from bayesopt_chain.random import compiled
from bayesopt_chain.random.compiled import require_memory
from bayesopt_chain.random.philox import philox

Order = Literal["independent", "reshuffled", "palindrome", "fixed"]
Rule = Callable[[Tensor, int, int, int], Tensor]  # (rows, seed, epoch, chain): the rows in the order of that epoch

_SOURCE = Path(__file__).with_suffix(".cpp")
_FOLDS = 2**62  # the number of the permutation that folds are cut from; no epoch has it


class IndexStream:
    """Row numbers as a function of position.

    Args:
        size: number of data.
        batch_size: ``b``, of all ranks together.
        order: one of ``Order``, or a rule of one's own.
        seed: of the permutations.
        leave_out: the rows that each chain leaves out; one entry for all chains, or one for each.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        order: Order | Rule,
        seed: int,
        leave_out: Sequence[Tensor] = (),
    ) -> None:
        self.size, self.batch_size, self.order, self.seed = size, batch_size, order, seed
        everything = torch.arange(size, device="cpu")
        self.kept = [everything[~torch.isin(everything, rows.cpu())] for rows in leave_out] or [everything]
        self.least = min(len(rows) for rows in self.kept)  # data that the chain with the fewest goes through
        self._made: dict[int, tuple[int, Tensor]] = {}  # by chain the last permutation and its number
        self._together: tuple[tuple[int, int], Tensor] | None = None  # the last ones of so many chains, likewise

    @property
    def steps(self) -> int:
        """Batches an epoch."""
        return self.least // self.batch_size

    @property
    def period(self) -> int:
        """Epochs after which the noise of the batches has summed to zero."""
        return 2 if self.order == "palindrome" else 1

    def rows(self, epoch: int, offset: int, chain: int) -> Tensor:
        """The rows of one batch, int64 ``[b]``; the permutation of a chain's last epoch is kept."""
        if self.order == "independent":
            kept = self.kept[chain % len(self.kept)]
            return kept[_subset(self.seed, epoch * self.steps + offset, chain, len(kept), self.batch_size)]
        if self.order == "palindrome" and epoch % 2:
            offset = self.steps - 1 - offset
        made = self._made.get(chain)
        if made is None or made[0] != epoch // self.period:
            made = self._made[chain] = epoch // self.period, self.permuted(epoch, chain)
        return made[1][offset * self.batch_size : (offset + 1) * self.batch_size]

    def rows_of_chains(self, epoch: int, offset: int, chains: int) -> Tensor:
        """The rows of one batch of so many chains, ``[chains, b]``: what :meth:`rows` gives, int32 where one call draws all.

        They may lie in memory that a call for another epoch writes over.
        """
        n, b = self.least, self.batch_size
        named = self.order in ("independent", "reshuffled", "palindrome") and len(self.kept) == 1
        if not named or n >= 2**31 or not has_kernel():
            return torch.stack([self.rows(epoch, offset, chain) for chain in range(chains)])
        if self.order == "independent":
            number = epoch * self.steps + offset
            if 4 * b > n:  # so many keys modulo n would often be equal
                return self._of_kept(permutations(chains, n, 1, b, number, self.seed)[0])
            return self._of_kept(subsets(chains, n, b, number, self.seed))
        if self.order == "palindrome" and epoch % 2:
            offset = self.steps - 1 - offset
        name = epoch // self.period, chains
        if self._together is None or self._together[0] != name:
            memory = self._together[1] if self._together is not None and self.least == self.size else None
            self._together = None  # until its memory holds the next
            drawn = permutations(chains, n, self.steps, b, name[0], self.seed, memory)
            self._together = name, self._of_kept(drawn)
        return self._together[1][offset]

    def _of_kept(self, places: Tensor) -> Tensor:
        """The rows at these places among those that are not left out."""
        return places if self.least == self.size else self.kept[0].to(torch.int32)[places]

    def permuted(self, epoch: int, chain: int) -> Tensor:
        """The rows of a chain in the order in which an epoch goes through them (a palindrome's odd epochs: backward).

        Raises:
            ValueError: a rule of one's own that gives other rows than it was given.
        """
        kept = self.kept[chain % len(self.kept)]
        if self.order == "fixed":
            return kept
        if not callable(self.order):
            return kept[_permutation(self.seed, epoch // self.period, chain, len(kept))]
        given = self.order(kept, self.seed, epoch, chain)
        found = isinstance(given, Tensor) and given.dtype == torch.int64 and given.shape == kept.shape
        if not (found and torch.equal(given.sort().values, kept)):
            raise ValueError(
                f"epochs: order gave {short(given)} for epoch {epoch}, which is no permutation of the {len(kept)} rows it was "
                "given; return rows[permutation]"
            )
        return given


def folds(size: int, k: int, *, seed: int = 0) -> list[Tensor]:
    """Share ``size`` data out into ``k`` folds at random, for ``bc.epochs(data, b, chains=k, leave_out=folds)``.

    Args:
        size: number of data.
        k: number of folds, from 2 to ``size``.
        seed: of the permutation that is cut; another one than any epoch's.

    Returns:
        ``k`` int64 tensors of row numbers, ascending, of sizes that differ by at most one. Each row is in one of them.

    Raises:
        ValueError: ``k`` outside 2 to ``size``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> held_out = bc.data.folds(7, 3)
        >>> [len(rows) for rows in held_out], sorted(torch.cat(held_out).tolist())
        ([3, 2, 2], [0, 1, 2, 3, 4, 5, 6])
    """
    if not 2 <= k <= size:
        raise ValueError(f"folds: k must lie between 2 and the {size} data, got {k}")
    return [rows.sort().values for rows in _permutation(seed, _FOLDS, 0, size).tensor_split(k)]


def _keys(seed: int, number: int, chain: int, n: int, start: int = 0) -> Tensor:
    """``n`` integers below 2^62 from ``start`` on, of the stream (seed, number, chain): two of each block."""
    blocks = torch.arange(start // 2, (start + n + 1) // 2, device="cpu")
    zero = torch.zeros_like(blocks)
    counter = [blocks, zero + chain, zero + (number & 0xFFFFFFFF), zero + (number >> 32)]
    a, b, c, d = philox(counter, [zero + (seed & 0xFFFFFFFF), zero + (seed >> 32 & 0xFFFFFFFF)])
    keys = torch.stack([(a >> 1) << 31 | b >> 1, (c >> 1) << 31 | d >> 1], dim=1).reshape(-1)
    return keys[start % 2 :][:n]


def _permutation(seed: int, number: int, chain: int, size: int) -> Tensor:
    return _keys(seed, number, chain, size).argsort(stable=True)


def _subset(seed: int, step: int, chain: int, size: int, n: int) -> Tensor:
    """``n`` different numbers below ``size``: the first of the stream, or of a permutation where they are many."""
    if 4 * n > size:
        return _permutation(seed, step, chain, size)[:n]
    found: dict[int, None] = {}
    start = 0
    while len(found) < n:
        found.update(dict.fromkeys((_keys(seed, step, chain, 2 * n, start) % size).tolist()))
        start += 2 * n
    return torch.tensor(list(found)[:n], device="cpu")


@cache
def _library() -> Any | None:
    try:
        found = compiled.load(_SOURCE)
    except (compiled.CompileError, OSError):
        return None
    for kernel, counts in ((found.permutations, 4), (found.subsets, 3)):
        kernel.restype = None
        kernel.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * counts, *[ctypes.c_uint64] * 2, ctypes.c_int]
    return found


def has_kernel() -> bool:
    """Whether there is a kernel: where nothing compiles there is none."""
    return _library() is not None


def permutations(
    chains: int, n: int, batches: int, size: int, number: int, seed: int, memory: Tensor | None = None
) -> Tensor:
    """For each of so many chains the first batches of permutation ``number`` of ``n`` rows: int32 ``[batches, chains, size]``.

    The numbers of one batch lie together, since a step reads those of all chains. They are written into ``memory``, if that
    has their shape: memory that is new every time would cost a fifth of the time in page faults.
    """
    shape = (batches, chains, size)
    out = (
        memory if memory is not None and memory.shape == shape else torch.empty(shape, dtype=torch.int32, device="cpu")
    )
    _fill("permutations", out, chains, n, batches, size, number, seed & 2**64 - 1)
    return out


def subsets(chains: int, n: int, wanted: int, number: int, seed: int) -> Tensor:
    """For each of so many chains the first ``wanted`` different ones of its keys modulo ``n``: int32 ``[chains, wanted]``."""
    out = torch.empty(chains, wanted, dtype=torch.int32, device="cpu")
    _fill("subsets", out, chains, n, wanted, number, seed & 2**64 - 1)
    return out


def _fill(kernel: str, out: Tensor, chains: int, n: int, *numbers: int) -> None:
    """Call a kernel with several threads if there are many chains.

    Raises:
        ValueError: more rows of a chain than there are, or memory of another kind.
    """
    if not out.numel() <= chains * n < chains * 2**31:
        raise ValueError(
            f"row_numbers: {out.numel() // max(1, chains)} of {n} rows cannot be had, nor those of 2^31 or more"
        )
    require_memory("row_numbers", torch.device("cpu"), {"memory": (out, torch.int32, out.numel())})
    getattr(_library(), kernel)(out.data_ptr(), chains, n, *numbers, torch.get_num_threads() if chains > 64 else 1)
