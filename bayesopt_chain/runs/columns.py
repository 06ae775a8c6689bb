"""Columns of draws: the rows of one leaf over all draws, out of memory or out of many files, read when they are needed.

Draws are numbered ``0, ..., S - 1`` over shards, which follow one another. A shard holds tensors in memory, or cells: the
rows of some segments of the table, side by side on the axis of chains. A large column on disk is a :class:`StoredTensor`:
indexing its first axis reads those rows alone, and any other operation reads all of it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.runs.files import BLOCK, DTYPES
from bayesopt_chain.runs.table import LEAF, STEP, Files, Group, laid_out

LAZY = 1 << 20  # bytes of a column on disk from which it is a StoredTensor
SPAN = 1 << 26  # bytes of a column that are read at once


class Cell(NamedTuple):
    """Some draws of some chains, out of one segment."""

    files: Files
    rows: slice
    chains: slice | None
    stacked: bool


class Shard(NamedTuple):
    """Consecutive draws: leaves ``[S, ...]`` by name, or cells of the table, which stand side by side on axis 1.

    What is read out of cells comes to ``device``, except for the steps.
    """

    size: int
    leaves: Mapping[str, Tensor] | None
    cells: tuple[Cell, ...] = ()
    like: Mapping[str, Any] | None = None
    device: torch.device = torch.device("cpu")

    def to(self, device: torch.device) -> Shard:
        """The same draws on a device."""
        if self.leaves is None:
            return self._replace(device=device)
        return self._replace(leaves={name: x if name == STEP else x.to(device) for name, x in self.leaves.items()})

    def place(self, name: str) -> torch.device:
        """The device of a column."""
        return self.device if self.leaves is None else self.leaves[name].device

    def names(self) -> list[str]:
        """The names of its columns."""
        return list(self.leaves if self.leaves is not None else self.cells[0].files.columns)

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype of a column, and the shape of one of its rows."""
        if self.leaves is not None:
            x = self.leaves[name]
            return x.dtype, tuple(x.shape[1:])
        dtype, (_, *shape) = self.cells[0].files.columns[name]
        if name == STEP:
            return DTYPES[dtype], ()
        if any(cell.stacked for cell in self.cells) or len(self.cells) > 1:
            lengths = [_length(cell, cell.files.columns[name][1]) for cell in self.cells]
            shape = [sum(lengths), *(shape[1:] if self.cells[0].stacked else shape)]
        return DTYPES[dtype], tuple(shape)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Consecutive rows of a column."""
        low, high, _ = rows.indices(self.size)
        if self.leaves is not None:
            return self.leaves[name] if (low, high) == (0, self.size) else self.leaves[name][low:high]
        like, parts = (self.like or {}).get(name.removeprefix(LEAF)), []
        for cell in self.cells:
            start = cell.rows.start or 0
            x = cell.files.column(name, like, slice(start + low, start + high))
            if name == STEP:
                return x
            x = x if cell.chains is None else x[:, cell.chains]
            parts.append(x if cell.stacked or len(self.cells) == 1 else x[:, None])
        return laid_out((parts[0] if len(parts) == 1 else torch.cat(parts, 1)).to(self.device), like)

    def read_elements(self, name: str, rows: slice, low: int, high: int) -> Tensor:
        """Elements ``low`` to ``high`` of consecutive rows, each taken as flat: ``[rows, high - low]``."""
        alone = self.cells[0] if len(self.cells) == 1 and self.like is None else None
        if alone is not None and alone.chains is None and alone.files.parts[0]["boxes"] is None:
            a, b, _ = rows.indices(self.size)
            start = alone.rows.start or 0
            return alone.files.part(0).read_columns(name, slice(start + a, start + b), low, high).to(self.device)
        x = self.read(name, rows)
        return x.reshape(len(x), -1)[:, low:high]


def _length(cell: Cell, shape: Sequence[int]) -> int:
    """How many chains a cell has."""
    return len(range(*(cell.chains or slice(None)).indices(shape[1]))) if cell.stacked else 1


def side_by_side(
    groups: Sequence[Group],
    device: torch.device,
    like: Mapping[str, Any] | None = None,
    without: Sequence[Files] = (),
) -> list[Shard]:
    """The draws that all groups have, cut wherever one of them begins another file.

    Args:
        groups: of chains.
        device: to which what is read comes.
        like: parameters as which DTensors are to come.
        without: files whose draws are left out.
    """
    ends = [[0, *itertools.accumulate(s.draws for s, _ in g.segments)] for g in groups]
    size = min((e[-1] for e in ends), default=0)
    cuts = sorted({x for e in ends for x in e if x <= size})
    wrong = {id(files) for files in without}
    out = []
    for a, b in itertools.pairwise(cuts):
        cells = []
        for g, e in zip(groups, ends):
            k = bisect.bisect_right(e, a) - 1
            segment, chains = g.segments[k]
            chains = chains if g.stacked else None
            if chains is not None and chains == slice(0, _chains_of(segment.files)):
                chains = None
            cells.append(Cell(segment.files, slice(a - e[k], b - e[k]), chains, g.stacked))
        if not any(id(cell.files) in wrong for cell in cells):
            out.append(Shard(b - a, None, tuple(cells), like, device))
    return out


def _chains_of(files: Files) -> int | None:
    return next(
        (shape[1] for name, (_, shape) in files.columns.items() if name.startswith(LEAF) and len(shape) > 1), None
    )


class Column:
    """One column of some draws: where its rows lie, and how they are read.

    Attributes:
        shards: of all draws.
        rows: the numbers of the draws that are wanted, over all shards.
        name: of the column.
        dtype, shape: of the column of these draws.
    """

    def __init__(self, shards: Sequence[Shard], rows: Sequence[int], name: str) -> None:
        self.shards, self.rows, self.name = shards, rows, name
        self.ends = list(itertools.accumulate(s.size for s in shards))
        self.dtype, row = shards[0].kind(name)
        self.shape = (len(rows), *row)
        self.row_bytes = math.prod(row) * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        """To which its rows come."""
        return self.shards[0].place(self.name)

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return self.row_bytes * len(self.rows)

    def at(self, rows: Sequence[int]) -> Column:
        """The column of other draws."""
        return Column(self.shards, rows, self.name)

    def spans(self) -> Iterator[tuple[Shard, slice, list[int] | None]]:
        """What to read: consecutive rows of a shard, and which of them are wanted, if not all."""
        most = max(1, SPAN // max(1, self.row_bytes))
        i = 0
        while i < len(self.rows):
            k = bisect.bisect_right(self.ends, self.rows[i])
            before = self.ends[k] - self.shards[k].size
            first = last = self.rows[i] - before
            j = i + 1
            # Rows that lie closer than a block of checksums are read together.
            near = max(1, BLOCK // max(1, self.row_bytes))
            while j < len(self.rows) and j - i < most:
                row = self.rows[j] - before
                if not last < row < self.shards[k].size or row - last > near or row - first >= most:
                    break
                last, j = row, j + 1
            wanted = [self.rows[n] - before - first for n in range(i, j)]
            yield self.shards[k], slice(first, last + 1), None if len(wanted) == last + 1 - first else wanted
            i = j

    def read(self, then: Any = ()) -> Tensor:
        """All rows, each cut by a further index."""
        parts = []
        for shard, rows, wanted in self.spans():
            x = shard.read(self.name, rows)
            x = x if wanted is None else x[wanted]
            parts.append(x[(slice(None), *then)].clone() if then else x)  # a view would hold all that was read
        if not parts:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)[(slice(None), *then)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_elements(self, low: int, high: int) -> Tensor:
        """Elements ``low`` to ``high`` of every row, each taken as flat: ``[rows, high - low]``."""
        parts = []
        for shard, rows, wanted in self.spans():
            x = shard.read_elements(self.name, rows, low, high)
            parts.append(x if wanted is None else x[wanted])
        return torch.cat(parts) if parts else torch.empty(0, high - low, dtype=self.dtype, device=self.device)


class StoredTensor(Tensor):
    """A large column on disk, as a tensor that is read when it is needed; it cannot be written to.

    ``x[::10]`` is another one, ``x[5]`` and ``x[:, 0]`` read what they need, and any other operation reads all rows: of a
    column that is larger than the memory take some rows, or :meth:`elements`.

    Example:
        >>> shard = Shard(4, {"params/w": torch.arange(8.0).reshape(4, 2)})
        >>> x = StoredTensor(Column([shard], range(4), "params/w"))
        >>> x.shape, x[::2].shape, x[3], x[:, 1]
        (torch.Size([4, 2]), torch.Size([2, 2]), tensor([6., 7.]), tensor([1., 3., 5., 7.]))
        >>> x.mean()
        tensor(3.5000)
    """

    column: Column

    @staticmethod
    def __new__(cls, column: Column) -> StoredTensor:
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        self = make(cls, column.shape, dtype=column.dtype, device=column.device)
        self.column = column
        return self

    def elements(self, low: int, high: int) -> Tensor:
        """Elements ``low`` to ``high`` of every row, each taken as flat; read without the others.

        Args:
            low, high: numbers of elements of a row.

        Returns:
            ``[rows, high - low]``.

        Raises:
            ValueError: a damaged file.
        """
        return self.column.read_elements(low, high)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is Tensor.__getitem__ and isinstance(args[0], StoredTensor):
            return args[0]._picked(args[1])
        if name in _SEEN or getattr(func, "__self__", None) in _SEEN_PROPERTIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (
            name == "__setitem__"
            or (name.endswith("_") and not name.endswith("__"))
            or (name.startswith("__i") and name in _IN_PLACE)
        ):
            raise RuntimeError("draws on disk cannot be written to: take a copy, x.clone()")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_loaded(args), **_loaded(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_loaded(args), **_loaded(kwargs or {}))

    def _picked(self, index: Any) -> Tensor:
        first, *rest = index if isinstance(index, tuple) else (index,)
        rows = self.column.rows
        if isinstance(first, Tensor) and first.dtype == torch.bool and first.shape == (len(rows),):
            first = first.nonzero().reshape(-1).tolist()
        if isinstance(first, Tensor) and first.ndim == 1 and not first.is_floating_point():
            first = first.tolist()
        if isinstance(first, int) and not isinstance(first, bool):
            x = self.column.at([rows[first]]).read()[0]
            return x[tuple(rest)] if rest else x
        plain = all(isinstance(x, (int, slice)) and not isinstance(x, bool) for x in rest)
        if isinstance(first, slice) and plain:
            column = self.column.at(rows[first])
            if len(rest) == 1 and len(column.shape) == 2:
                low, high, step = (
                    rest[0] if isinstance(rest[0], slice) else slice(rest[0], rest[0] + 1 or None)
                ).indices(column.shape[1])
                if step == 1 and isinstance(rest[0], slice):
                    return column.read_elements(low, max(low, high))
                if isinstance(rest[0], int) and -column.shape[1] <= rest[0] < column.shape[1]:
                    return column.read_elements(low, low + 1)[:, 0]
            return column.read(rest) if rest else StoredTensor(column)
        if isinstance(first, list) and not rest and all(type(i) is int for i in first):
            return self.column.at([rows[i] for i in first]).read()
        return self.column.read()[index]


_SEEN = {"size", "dim", "numel", "nelement", "__len__", "is_floating_point", "is_complex", "element_size", "ndimension"}
_SEEN_PROPERTIES = [
    getattr(Tensor, name)
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "requires_grad",
        "nbytes",
        "is_cuda",
        "is_cpu",
        "is_sparse",
    )
]
_IN_PLACE = {
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ifloordiv__",
    "__imod__",
    "__ipow__",
    "__iand__",
    "__ior__",
}


def _loaded(x: Any) -> Any:
    """Arguments with what is stored read."""
    if isinstance(x, StoredTensor):
        return x.column.read()
    if isinstance(x, dict):
        return {k: _loaded(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return type(x)(map(_loaded, x))
    return x


def loaded(x: Tensor) -> Tensor:
    """The tensor itself, read if it is stored."""
    return x.column.read() if isinstance(x, StoredTensor) else x
