r"""``epochs``: minibatches in an order that is a pure function of (seed, epoch, offset), so that any position resumes.

``N`` data and batches of ``b`` make ``K = floor(N / b)`` steps an epoch. What the order does to a sampler (``C = s^2 /
b``, ``s^2`` the covariance of one datum's gradient; :func:`bayesopt_chain.diagnostics.heating` has the laws):

    independent    every batch a fresh subset: the noise of the gradients is white
    reshuffled     every epoch a new permutation, cut into K batches: the noise of an epoch sums to zero, which takes away
                   most of its effect on directions that relax slowly (fewer than one relaxation an epoch)
    palindrome     a permutation forward, then the same one backward (symmetric minibatch splitting; Paulin, Whalley, Chada
                   and Leimkuhler, 2024)
    fixed          the order of the data, every epoch the same: a bias of the mean that no number of epochs averages away

The row numbers come from :mod:`bayesopt_chain.data.index_stream`; the position is two integers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches, checks
from bayesopt_chain.data.index_stream import IndexStream, Order, Rule

Mesh = Any  # a DeviceMesh of one axis, or (rank, number of ranks)


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
        rank, ranks: this process among those that share each batch; 0 and 1 without ``mesh=``.
        batch_size, order, seed, chains, with_rows: as given.
    """

    drop_last = True  # as a batch sampler of torch says it

    def __init__(
        self,
        data: Any,
        batch_size: int,
        order: Order | Rule,
        seed: int,
        chains: int | None,
        leave_out: Sequence[Tensor],
        place: tuple[int, int],
        with_rows: bool,
    ) -> None:
        self.data = data
        self.batch_size = batch_size
        self.order: Any = order if isinstance(order, str) else getattr(order, "__qualname__", type(order).__name__)
        self.seed = seed
        self.chains = chains
        self.leaves, self.spec, self.size = columns(data)
        self.left_out = leave_out
        self.rank, self.ranks = place
        self.with_rows = with_rows
        self.stream = IndexStream(self.size, batch_size, order, seed, leave_out)  # pyright: ignore[reportArgumentType]
        self._go(0, 0)

    def __len__(self) -> int:
        return self.stream.steps

    @property
    def steps_per_epoch(self) -> float:
        """``K = N / b``, not rounded: ``N`` without the data that are left out, of the chain with the fewest.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> data = bc.epochs(torch.arange(10.0), 2, leave_out=torch.tensor([0, 1, 2]))
            >>> data.steps_per_epoch, len(data)
            (3.5, 3)
        """
        return self.stream.least / self.batch_size

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self) - self.offset):
            here = self.epoch, self.offset
            self.skip(1)  # before the batch is handed out, since whoever takes it may read the position of the next
            yield self.batch(*here)

    def batch(self, epoch: int, offset: int) -> Any:
        """Batch ``offset`` of an epoch, wherever the iteration stands: leaves ``[b, ...]`` or ``[chains, b, ...]``.

        With ``mesh=`` this rank's part of it; with ``with_rows=True`` the pair ``(batch, rows)``.
        """
        return self.of_rows(self.rows(epoch, offset))

    @checks.takes(epoch=checks.whole(0), offset=checks.whole(0))
    def rows(self, epoch: int, offset: int) -> Tensor:
        """The numbers of that batch's data, int64 ``[b]`` or ``[chains, b]``: a function of (seed, epoch, offset).

        Raises:
            TypeError: a position that is no pair of whole numbers.
            IndexError: an offset behind the last batch of the epoch.
            ValueError: a position before the first.
        """
        if offset >= len(self):
            raise IndexError(f"epochs: no batch at offset {offset} of epoch {epoch}; an epoch has {len(self)}, from 0")
        return self._numbers(epoch, offset).to(torch.int64)

    def _numbers(self, epoch: int, offset: int) -> Tensor:
        """What :meth:`rows` gives, int32 where one call draws for all chains, in memory that may be written over later."""
        if self.chains is None:
            return self.stream.rows(epoch, offset, 0)[self._mine]
        return self.stream.rows_of_chains(epoch, offset, self.chains)[:, self._mine]

    def ahead(self, count: int) -> list[Tensor]:
        """The numbers of the data of the next ``count`` batches, int32 or int64, from where the iteration stands.

        Those of one batch may be overwritten by the next call; of several batches, each has memory of its own.
        """
        here = self.epoch * len(self) + self.offset
        each = (self._numbers(*divmod(here + k, len(self))) for k in range(count))
        return [rows.clone() for rows in each] if count > 1 else [*each]

    def skip(self, count: int) -> None:
        """Move on by ``count`` batches."""
        self._go(*divmod(self.epoch * len(self) + self.offset + count, len(self)))

    def common_rows(self) -> Tensor:
        """The numbers of the data that batches are made of, int64 ``[n]``, ascending.

        Raises:
            ValueError: they differ from chain to chain.
        """
        if len(self.stream.kept) > 1:
            raise ValueError(
                "epochs: leave_out takes other data from each chain, so that no mean over the data is that of all chains; "
                "make one epochs(..., leave_out=rows) for each"
            )
        return self.stream.kept[0]

    @checks.takes(size=checks.WHOLE.or_none())
    def parts(self, size: int | None = None) -> Iterator[Any]:
        """All data once, without those left out: batches of ``size`` (default: ``batch_size``), the last one of what remains.

        Args:
            size: number of data in each.

        Returns:
            An iterator over trees like the data, without an axis for chains and without rows.

        Raises:
            TypeError, ValueError: a size that is no whole number, at least 1; chains that leave out different data.
        """
        for part in self.common_rows().split(self.batch_size if size is None else size):
            yield self._gathered(part)

    @property
    def _mine(self) -> slice:
        """This rank's part of a batch."""
        part = self.batch_size // self.ranks
        return slice(self.rank * part, (self.rank + 1) * part)

    def of_rows(self, rows: Tensor) -> Any:
        """The batch of these row numbers: what :meth:`batch` gives for its own."""
        batch = self._gathered(rows)
        return (batch, rows.to(torch.int64)) if self.with_rows else batch

    def _gathered(self, rows: Tensor) -> Any:
        if self.leaves is None:
            return rows.tolist()
        return self.spec.unflatten([leaf[rows.to(leaf.device)] for leaf in self.leaves])

    @checks.takes(step=checks.whole(0))
    def seek(self, step: int) -> None:
        """Go to the batch after ``step`` batches, counted from epoch 0.

        A ``DataLoader`` with workers fetches ahead of its use: to resume one, seek to the number of batches used.
        """
        self._go(*divmod(step, len(self)))

    @checks.takes(epoch=checks.whole(0))
    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self._go(epoch, 0)

    def _go(self, epoch: int, offset: int) -> None:
        self.epoch, self.offset = epoch, offset
        self.at_end = offset == 0 and epoch > 0 and (self.order != "palindrome" or epoch % 2 == 0)

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, and what it is a position in. It is the same on all ranks, and for any number."""
        return {"epoch": self.epoch, "offset": self.offset, **self._identity()}

    @checks.takes(state=checks.MAPPING)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position from :meth:`state_dict`.

        Raises:
            TypeError: a state without a position.
            ValueError: it is a position in another order, seed, batch size, number of data or of chains.
        """
        mine = self._identity()
        if differing := [name for name in mine if state.get(name) != mine[name]]:
            raise ValueError(
                "epochs: the state is that of other batches: "
                + ", ".join(f"{name}={state.get(name)!r} (here {mine[name]!r})" for name in differing)
            )
        for name in ("epoch", "offset"):
            checks.SEED(f"Epochs.load_state_dict: {name}", state.get(name))
        self.seek(state["epoch"] * len(self) + state["offset"])

    def _identity(self) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in ("order", "seed", "batch_size", "size", "chains")}
        return {**same, "left_out": [[len(rows), int(rows.sum())] for rows in self.left_out]} if self.left_out else same

    def __repr__(self) -> str:
        chains = "" if self.chains is None else f", chains={self.chains}"
        part = "" if self.ranks == 1 else f", part {self.rank} of {self.ranks}"
        return f"epochs({self.size} data, {self.batch_size}, order={self.order!r}, seed={self.seed}{chains}{part})"


@checks.takes(
    order=checks.Kind(
        lambda x: checks.FUNCTION.fits(x) or (isinstance(x, str) and x in get_args(Order)),
        f"one of {', '.join(get_args(Order))}, or a function of (rows, seed, epoch, chain)",
        (str,),
    ),
    batch_size=checks.INDEX,
    seed=checks.INDEX,
    chains=checks.WHOLE.or_none(),
    leave_out=checks.Kind(
        lambda x: (
            x is None or isinstance(x, Tensor) or (checks.SEQUENCE.fits(x) and all(isinstance(r, Tensor) for r in x))
        ),
        "a tensor of row numbers, a list of them, or None",
    ),
    with_rows=checks.BOOL,
    mesh=checks.ANY,
)
def epochs(
    data: Any,
    batch_size: int,
    *,
    order: Order | Rule = "reshuffled",
    seed: int = 0,
    chains: int | None = None,
    leave_out: Tensor | Sequence[Tensor] | None = None,
    mesh: Mesh | None = None,
    with_rows: bool = False,
) -> Epochs:
    """Minibatches of ``data``, in an order that resumes anywhere.

    Args:
        data: a tensor or a tree of tensors with one entry a datum on axis 0. Or anything else with a length, such as a
            ``Dataset``: a batch is then the list of its row numbers, and the result a ``batch_sampler=`` for
            ``torch.utils.data.DataLoader``.
        batch_size: ``b``, from 1 to the number of data ``N``. The ``N mod b`` data that fill no batch sit out that
            epoch.
        order: ``"reshuffled"`` (default), ``"independent"``, ``"palindrome"`` or ``"fixed"``; see the module.
            ``"fixed"`` warns. Or a function ``order(rows, seed, epoch, chain)`` that returns ``rows``, int64 ``[n]``, permuted;
            it must give the same for the same arguments.
        seed: of the order, an integer.
        chains: give each of so many chains of :func:`bayesopt_chain.parallel` an order of its own, batches with the
            chains on axis 0 (``batch_dim=0``). A chain's order does not depend on how many there are; chain 0 has that
            of ``chains=None``.
        leave_out: numbers of data that no batch holds, int64 ``[m]``; or one such tensor for each chain, as
            :func:`bayesopt_chain.data.folds` gives for cross-validation. Then an epoch is as long as that of the chain with
            the fewest data.
        mesh: ranks that share each batch: a ``DeviceMesh`` of one axis, or ``(rank, number of ranks)`` such as
            :func:`bayesopt_chain.distributed.world`. All of them are given *the whole data* and one seed; each gets its
            part of every batch, ``batch_size / ranks`` data, and the parts together are the batch of one process. Ranks
            that run chains of their own take no ``mesh``.
        with_rows: give ``(batch, rows)`` with the numbers of the batch's data, int64 ``[b]`` or ``[chains, b]``.

    Returns:
        :class:`Epochs`: iterable, an epoch a pass; ``state_dict``, ``load_state_dict`` and ``seek`` move its position.

    Raises:
        TypeError: ``data`` is neither a tree of tensors nor something with a length.
        ValueError: leaves of different lengths, a batch size outside 1 to ``N`` or that the ranks cannot share equally, an
            unknown order, ``order="fixed"`` with a batch size that does not divide ``N`` (the last data would never be
            used), or rows to leave out that are no rows of the data.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> x, y = torch.arange(6.0), torch.arange(6)
        >>> data = bc.epochs((x, y), 2, seed=1)
        >>> len(data), sorted(torch.cat([xb for xb, yb in data]).tolist()), data.at_end, data.epoch
        (3, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], True, 1)
        >>> first, second = (bc.epochs(x, 2, seed=1, mesh=(rank, 2)) for rank in range(2))
        >>> torch.equal(torch.cat([first.batch(0, 0), second.batch(0, 0)]), data.batch(0, 0)[0])
        True
    """
    batch_size, place = operator.index(batch_size), _place(mesh)
    size = columns(data)[2]
    left_out = _left_out(leave_out, size, chains)
    least = size - max([len(rows) for rows in left_out], default=0)
    if not 1 <= batch_size <= least:
        rest = "" if least == size else f" that are not left out ({size} in all)"
        raise ValueError(f"epochs: batch_size must lie between 1 and the {least} data{rest}, got {batch_size}")
    if batch_size % place[1]:
        near = batch_size - batch_size % place[1]
        raise ValueError(
            f"epochs: a batch of {batch_size} cannot be shared equally by {place[1]} ranks, and a rank with fewer data would "
            f"count as much as the others; take a batch_size of {near or place[1]} or {near + place[1]}"
        )
    if order == "fixed":
        if left := least % batch_size:
            raise ValueError(
                f"epochs: order='fixed' with batches of {batch_size} would never use the last {left} of {least} "
                "data; take a batch_size that divides their number, or order='reshuffled'"
            )
        checks.warn(
            "epochs: a fixed order biases the mean of a chain, and no number of epochs averages that away (its square is "
            "5 % of the variance at one relaxation an epoch, 20 % at two); order='reshuffled' has no such bias"
        )
    return Epochs(data, batch_size, order, operator.index(seed), chains, left_out, place, with_rows)


def _place(mesh: Mesh | None) -> tuple[int, int]:
    """The rank of this process and the number of ranks."""
    if mesh is None:
        return 0, 1
    if hasattr(mesh, "get_local_rank"):
        if mesh.ndim != 1:
            raise ValueError(
                f'epochs: mesh has {mesh.ndim} axes; give the one over which data are spread, such as mesh["data"]'
            )
        return mesh.get_local_rank(), mesh.size()
    if isinstance(mesh, tuple) and len(mesh) == 2 and 0 <= mesh[0] < mesh[1]:
        return operator.index(mesh[0]), operator.index(mesh[1])
    raise TypeError(f"epochs: mesh must be a DeviceMesh of one axis, or (rank, number of ranks), got {mesh!r}")


def _left_out(leave_out: Tensor | Sequence[Tensor] | None, size: int, chains: int | None) -> list[Tensor]:
    """The rows to leave out: none, of all chains, or of each."""
    if leave_out is None:
        return []
    each = [leave_out] if torch.is_tensor(leave_out) else list(leave_out)
    if not torch.is_tensor(leave_out) and len(each) != (chains or 1):
        raise ValueError(
            f"epochs: leave_out has {len(each)} folds for {chains or 1} chains; give one for each, chains={len(each)}"
        )
    for rows in each:
        if rows.dtype != torch.int64 or rows.ndim != 1 or (len(rows) and not (rows.min() >= 0 and rows.max() < size)):
            raise ValueError(
                f"epochs: leave_out must hold row numbers, int64 [m] from 0 to {size - 1}, got {rows.dtype} {list(rows.shape)}"
            )
    return [rows.cpu().unique() for rows in each]


def columns(data: Any, who: str = "epochs") -> tuple[list[Tensor] | None, Any, int]:
    """The tensors of a tree of data, its structure, and the number of data; of a dataset their number alone.

    Raises:
        TypeError: data that are neither. ValueError: tensors of different lengths.
    """
    leaves, spec = batches.flatten(data)
    if leaves and all(torch.is_tensor(leaf) for leaf in leaves):
        lengths = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
        if len(lengths) > 1 or None in lengths:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise ValueError(f"{who}: every tensor of data needs one entry a datum on axis 0, got shapes {shapes}")
        return leaves, spec, leaves[0].shape[0]
    if optree.tree_structure(data).num_nodes > 1 or not hasattr(data, "__len__"):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves if not torch.is_tensor(leaf)})) or "nothing"
        raise TypeError(
            f"{who}: data must be a tree of tensors, or a dataset with a length; it holds {kinds} (torch.as_tensor makes "
            "tensors of arrays, of pandas of its .to_numpy(); names need numbers)"
        )
    return None, None, len(data)
