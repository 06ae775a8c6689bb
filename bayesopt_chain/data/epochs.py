r"""``epochs``: minibatches in an order that is a pure function of (seed, epoch, offset), so that any position resumes.

``N`` data and batches of ``b`` make ``K = floor(N / b)`` steps an epoch. What the order does to a sampler (``C = s^2 /
b``, ``s^2`` the covariance of one datum's gradient; :func:`bayesopt_chain.diagnostics.heating` has the laws):

    independent    every batch a fresh subset: the noise of the gradients is white
    reshuffled     every epoch a new permutation, cut into K batches: the noise of an epoch sums to zero, which takes away
                   most of its effect on directions that relax slowly (fewer than one relaxation an epoch)
    palindrome     a permutation forward, then the same one backward (symmetric minibatch splitting; Paulin, Whalley, Chada
                   and Leimkuhler, 2024)
    fixed          the order of the data, every epoch the same: a bias of the mean that no number of epochs averages away

Permutations sort 62-bit Philox keys of the counter (block, chain, epoch); a subset is the first ``b`` distinct numbers
of such a stream. No generator is kept: the position is two integers.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches
from bayesopt_chain.random.philox import philox

Order = Literal["independent", "reshuffled", "palindrome", "fixed"]


class Epochs:
    """Batches of a data set; made by :func:`epochs`.

    Iterating gives the rest of the current epoch, so that ``for batch in data`` once is one epoch, again the next one,
    and after an interruption the rest of the one that was left. ``len`` is the number of steps an epoch.

    Attributes:
        epoch: the epoch of the next batch, from 0.
        offset: its number in that epoch, from 0.
        at_end: whether the last batch given ended an epoch (``"palindrome"``: a pass forward and back). There the
            noise of reshuffled batches disturbs the parameters least: the place to keep draws.
        size: number of data.
        batch_size, order, seed, chains: as given.
    """

    def __init__(self, data: Any, batch_size: int, order: Order, seed: int, chains: int | None) -> None:
        self.data = data
        self.batch_size = batch_size
        self.order: Order = order
        self.seed = seed
        self.chains = chains
        self.leaves, self.spec, self.size = _columns(data)
        self.epoch = 0
        self.offset = 0
        self.at_end = False
        self._shuffled: tuple[int, Tensor] | None = None  # the last permutation made, by epoch

    def __len__(self) -> int:
        return self.size // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self) - self.offset):
            yield self.batch(*self._advance())

    def batch(self, epoch: int, offset: int) -> Any:
        """Batch ``offset`` of an epoch, wherever the iteration stands: leaves ``[b, ...]`` or ``[chains, b, ...]``."""
        if self.leaves is None:
            raise TypeError(
                f"epochs: {type(self.data).__name__} is not a tree of tensors; read it with "
                "DataLoader(dataset, batch_sampler=epochs.indices)"
            )
        rows = self.rows(epoch, offset)
        return self.spec.unflatten([leaf[rows.to(leaf.device)] for leaf in self.leaves])

    def rows(self, epoch: int, offset: int) -> Tensor:
        """The numbers of that batch's data, int64 ``[b]`` or ``[chains, b]``: a function of (seed, epoch, offset)."""
        if not (0 <= offset < len(self) and epoch >= 0):
            raise IndexError(f"epochs: no batch {offset} in epoch {epoch}; an epoch has {len(self)}, from 0")
        if self.order == "independent":
            step = epoch * len(self) + offset
            each = [_subset(self.seed, step, c, self.size, self.batch_size) for c in range(self.chains or 1)]
            return torch.stack(each) if self.chains is not None else each[0]
        if self.order == "palindrome" and epoch % 2:
            offset = len(self) - 1 - offset
        start = offset * self.batch_size
        return self._permutation(epoch)[..., start : start + self.batch_size]

    def _permutation(self, epoch: int) -> Tensor:
        number = {"palindrome": epoch // 2, "fixed": 0}.get(self.order, epoch)
        if self._shuffled is None or self._shuffled[0] != number:
            if self.order == "fixed":
                each = [torch.arange(self.size)] * (self.chains or 1)
            else:
                each = [_permutation(self.seed, number, c, self.size) for c in range(self.chains or 1)]
            self._shuffled = number, torch.stack(each) if self.chains is not None else each[0]
        return self._shuffled[1]

    def _advance(self) -> tuple[int, int]:
        """The position of the next batch; the iteration moves past it."""
        here = self.epoch, self.offset
        last = self.offset == len(self) - 1
        self.at_end = last and (self.order != "palindrome" or self.epoch % 2 == 1)
        self.epoch, self.offset = (self.epoch + 1, 0) if last else (self.epoch, self.offset + 1)
        return here

    @property
    def indices(self) -> Indices:
        """The same order as lists of row numbers: a ``batch_sampler=`` for ``torch.utils.data.DataLoader``."""
        if self.chains is not None:
            raise ValueError("epochs: indices are one chain's; make one epochs(..., seed=...) for each loader")
        return Indices(self)

    def seek(self, step: int) -> None:
        """Go to the batch after ``step`` batches, counted from epoch 0.

        A ``DataLoader`` with workers fetches ahead of its use: to resume one, seek to the number of batches used.
        """
        if step < 0:
            raise ValueError(f"epochs: seek to a step from 0, got {step}")
        self.epoch, self.offset = divmod(step, len(self))
        self.at_end = self.offset == 0 and self.epoch > 0 and (self.order != "palindrome" or self.epoch % 2 == 0)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.seek(epoch * len(self))

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, and what it is a position in."""
        return {"epoch": self.epoch, "offset": self.offset, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position from :meth:`state_dict`.

        Raises:
            ValueError: it is a position in another order, seed, batch size, number of data or of chains.
        """
        mine = self._identity()
        if differing := [name for name in mine if state.get(name) != mine[name]]:
            raise ValueError(
                "epochs: the state is that of other batches: "
                + ", ".join(f"{name}={state.get(name)!r} (here {mine[name]!r})" for name in differing)
            )
        self.seek(state["epoch"] * len(self) + state["offset"])

    def _identity(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("order", "seed", "batch_size", "size", "chains")}

    def __repr__(self) -> str:
        chains = "" if self.chains is None else f", chains={self.chains}"
        return f"epochs({self.size} data, {self.batch_size}, order={self.order!r}, seed={self.seed}{chains})"


class Indices:
    """Lists of row numbers, an epoch a pass: the ``batch_sampler`` of a :class:`Epochs`, whose position it shares."""

    def __init__(self, owner: Epochs) -> None:
        self.owner = owner
        self.batch_size = owner.batch_size
        self.drop_last = True

    def __len__(self) -> int:
        return len(self.owner)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self.owner) - self.owner.offset):
            yield self.owner.rows(*self.owner._advance()).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.owner.set_epoch(epoch)


def epochs(
    data: Any, batch_size: int, *, order: Order = "reshuffled", seed: int = 0, chains: int | None = None
) -> Epochs:
    """Minibatches of ``data``, in an order that resumes anywhere.

    Args:
        data: a tensor or a tree of tensors with one entry a datum on axis 0. For :attr:`Epochs.indices` alone, anything
            with a length, such as a ``Dataset``.
        batch_size: ``b``, from 1 to the number of data ``N``. The ``N mod b`` data that fill no batch sit out that
            epoch.
        order: ``"reshuffled"`` (default), ``"independent"``, ``"palindrome"`` or ``"fixed"``; see the module.
            ``"fixed"`` warns.
        seed: of the order, an integer.
        chains: give each of so many chains of :func:`bayesopt_chain.parallel` an order of its own, batches with the
            chains on axis 0 (``batch_dim=0``). A chain's order does not depend on how many there are; chain 0 has that
            of ``chains=None``.

    Returns:
        :class:`Epochs`: iterable, an epoch a pass; ``state_dict``, ``load_state_dict`` and ``seek`` move its position.

    Raises:
        TypeError: ``data`` is neither a tree of tensors nor something with a length.
        ValueError: leaves of different lengths, a batch size outside 1 to ``N``, an unknown order, or ``order="fixed"``
            with a batch size that does not divide ``N`` (the last data would never be used).

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> x, y = torch.arange(6.0), torch.arange(6)
        >>> data = bc.epochs((x, y), 2, seed=1)
        >>> len(data), sorted(torch.cat([xb for xb, yb in data]).tolist()), data.at_end, data.epoch
        (3, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], True, 1)
    """
    if order not in get_args(Order):
        raise ValueError(f"epochs: order must be one of {', '.join(get_args(Order))}, got {order!r}")
    if chains is not None and chains < 1:
        raise ValueError(f"epochs: chains must be at least 1, got {chains}")
    made = Epochs(data, operator.index(batch_size), order, operator.index(seed), chains)
    if not 1 <= made.batch_size <= made.size:
        raise ValueError(f"epochs: batch_size must lie between 1 and the {made.size} data, got {batch_size}")
    if order == "fixed":
        if left := made.size % made.batch_size:
            raise ValueError(
                f"epochs: order='fixed' with batches of {batch_size} would never use the last {left} of {made.size} "
                "data; take a batch_size that divides their number, or order='reshuffled'"
            )
        warnings.warn(
            "epochs: a fixed order biases the mean of a chain, and no number of epochs averages that away (its square is "
            "5 % of the variance at one relaxation an epoch, 20 % at two); order='reshuffled' has no such bias",
            stacklevel=2,
        )
    return made


def _columns(data: Any) -> tuple[list[Tensor] | None, Any, int]:
    """The tensors of a tree of data, its structure, and the number of data."""
    leaves, spec = batches.flatten(data)
    if leaves and all(torch.is_tensor(leaf) for leaf in leaves):
        lengths = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
        if len(lengths) > 1 or None in lengths:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise ValueError(f"epochs: every tensor of data needs one entry a datum on axis 0, got shapes {shapes}")
        return leaves, spec, leaves[0].shape[0]
    if optree.tree_structure(data).num_nodes > 1 or not hasattr(data, "__len__"):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves if not torch.is_tensor(leaf)})) or "nothing"
        raise TypeError(f"epochs: data must be a tree of tensors, or something with a length; it holds {kinds}")
    return None, None, len(data)


def _keys(seed: int, number: int, chain: int, n: int, start: int = 0) -> Tensor:
    """``n`` integers below 2^62 from ``start`` on, of the stream (seed, number, chain)."""
    block = torch.arange(start // 2, (start + n + 1) // 2)
    counter = [block, *(torch.full_like(block, v) for v in (chain, number & 0xFFFFFFFF, number >> 32))]
    key = [torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32 & 0xFFFFFFFF)]
    a, b, c, d = philox(counter, key)
    words = torch.stack([(a >> 1) << 31 | b >> 1, (c >> 1) << 31 | d >> 1], dim=1).reshape(-1)
    return words[start % 2 :][:n]


def _permutation(seed: int, epoch: int, chain: int, size: int) -> Tensor:
    return _keys(seed, epoch, chain, size).argsort(stable=True)


def _subset(seed: int, step: int, chain: int, size: int, n: int) -> Tensor:
    """``n`` different numbers below ``size``: the first of the stream, or of a permutation where they are many."""
    if 4 * n > size:
        return _permutation(seed, step, chain, size)[:n]
    found: dict[int, None] = {}
    start = 0
    while len(found) < n:
        found.update(dict.fromkeys((_keys(seed, step, chain, 2 * n, start) % size).tolist()))
        start += 2 * n
    return torch.tensor(list(found)[:n])
