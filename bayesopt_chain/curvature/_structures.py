r"""Sums per-datum gradients into a precision; every structure is a class.

Over the rows r_kb = J_b^T s_kb of a batch, for K columns a datum and P parameters, the numbers held are

    dense      sum r r^T                        P^2        diagonal   sum r^2                     P
    root       the rows r                       K B P      low_rank   a streaming SVD of them     (rank + 1) P
    kronecker  factors of every leaf    sum d0^2 + d1^2

in float32 at least, whatever the parameters' dtype: a sum of many squares in bfloat16 would stop growing.

Refuses matrices that cannot fit into memory before they are allocated.

dense 8 P^2 bytes in float64 (4 P^2 in float32);   low_rank (rank + 1) P;   diagonal P
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.curvature._chunks import Chunk, Demand, Gradient
from bayesopt_chain.curvature._kinds import Kind, Matrix, Vector, mirrored, plus_gram
from bayesopt_chain.curvature._plan import UNUSED, TapPlan
from bayesopt_chain.curvature._taps import Use
from bayesopt_chain.likelihoods import OutputRoot
from bayesopt_chain.precision import (
    Dense,
    Diagonal,
    Eigenbasis,
    Kronecker,
    LowRank,
    Precision,
    Root,
    shape_only,
)
from bayesopt_chain.trees import Tree, common_dtype, size, wide

SMALL = 2**26  # bytes; for a factor that needs less the free memory is not looked up, which takes time


def available_bytes(device: torch.device) -> float:
    """Return the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_of_machine(), _of_group())


def _of_machine() -> int:
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _of_group() -> float:
    """Return what the control group of a container still allows, infinity without a limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return math.inf if limit == "max" else int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return math.inf


def require_dense_fits(parameters: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``MemoryError`` unless two ``[P, P]`` matrices (the sum and its Cholesky factor) fit."""
    item = dtype.itemsize
    needed, free = 2 * parameters**2 * item, available_bytes(device)
    if needed <= free:
        return
    fitting = [
        f"structure={name!r} ({_readable(numbers * item)})"
        for name, numbers in (("low_rank", 11 * parameters), ("diagonal", parameters))
        if numbers * item <= free
    ]
    raise MemoryError(
        f"a dense precision over {parameters:,} parameters and its factor need {_readable(needed)}, {device} has "
        f"{_readable(free)} free: use {' or '.join(fitting)} or 'kronecker', or curvature.subset for fewer parameters"
    )


def require_factor_fits(name: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``MemoryError`` unless a Kronecker factor of the named parameter and its decomposition fit.

    Held at once are the factor, its eigenvectors and a workspace of twice its size.
    """
    needed = 4 * rows * columns * dtype.itemsize
    if needed > SMALL and needed > (free := available_bytes(device)):
        raise MemoryError(
            f"a Kronecker precision needs {_readable(needed)} for a factor [{rows:,}, {columns:,}] of the parameter "
            f"{name} and its decomposition, {device} has {_readable(free)} free: leave the parameter out with "
            "curvature.subset, or use structure='diagonal' or 'low_rank'"
        )


def _readable(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"


class Structure(Demand, ABC):
    """A running sum over the data in one structure: ``add`` takes chunks, ``finish`` makes a precision of them."""

    def __init__(self, params: Tree, **asked: Any):
        """By default the rows of all leaves are formed, and the result holds a number for each parameter."""
        self.leaves, self.tree = optree.tree_flatten(params)
        numbers = size(params)
        super().__init__(**{"formed": numbers, "held": numbers, **asked})

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Add a chunk's gradients."""

    @abstractmethod
    def finish(self, count: Tensor) -> Precision:
        """Return the precision of all that was added."""

    def to_tree(self, leaves: list[Any]) -> Tree:
        return optree.tree_unflatten(self.tree, leaves)


class DiagonalSum(Structure):
    def __init__(self, params: Tree):
        # 48 were measured to be as fast as larger chunks, at less than half the memory of the whole batch; smaller
        # convolutions than of 128 are slower
        super().__init__(params, formed=0, few_data=48, few_shared=128)
        self.sums: dict[int, Tensor] = {}

    def of_last_layer(self, use: Use, x: Tensor, root: OutputRoot, outputs: Tensor) -> Callable[[], Tensor] | None:
        """The diagonal ``sum_k s_k^2``, ``[1, b, T, O]``: where every column stays within one position (or there is only one),
        the sum over columns of squared gradients of a weight is ``sum_t (sum_k s_tko^2) x_ti^2``."""
        if not root.separates_positions and outputs.ndim > 2:
            return None
        return lambda: use.canonical.g(x, root.diagonal()[None], len(outputs))

    def add(self, chunk: Chunk) -> None:
        for leaf, kind, x, g, _ in chunk.gradients:
            self.sums[leaf] = kind.squares(x(), g(), self.sums.get(leaf))
        for leaf, kind, x, d, _ in chunk.summed:
            self.sums[leaf] = kind.summed_squares(x(), d(), self.sums.get(leaf))

    def finish(self, count: Tensor) -> Diagonal:
        return Diagonal(self.to_tree([self.sums[i].reshape(leaf.shape) for i, leaf in enumerate(self.leaves)]), count)


class DenseSum(Structure):
    def __init__(self, params: Tree):
        parameters, dtype = size(params), common_dtype(params)
        super().__init__(params, held=parameters**2)
        require_dense_fits(parameters, dtype, self.leaves[0].device)
        self.like = shape_only(params)
        self.matrix: Tensor | None = None
        self.dtype = dtype

    def add(self, chunk: Chunk) -> None:
        if _is_one_layer(chunk.gradients):
            added = _of_one_layer(chunk.gradients)
            self.matrix = added if self.matrix is None else self.matrix + added
            return
        rows = torch.cat(
            [row.reshape(row.shape[0], row.shape[1:].numel()) for row in _rows(chunk, self.leaves)], dim=1
        ).to(self.dtype)
        self.matrix = plus_gram(self.matrix, rows)

    def finish(self, count: Tensor) -> Dense:
        matrix: Any = self.matrix
        return Dense(mirrored(matrix), self.like, count)


class RootRows(Structure):
    def __init__(self, params: Tree):
        # as much as may be: the rows are the result, and rows of one chunk need not be concatenated
        super().__init__(params, few_data=2**40)
        self.rows: list[list[Tensor]] = []

    def add(self, chunk: Chunk) -> None:
        rows = [row.unflatten(0, (-1, len(chunk.outputs))) for row in _rows(chunk, self.leaves)]
        self.rows.append([row.flatten(0, 1) for row in rows])

    def finish(self, count: Tensor) -> Root:
        first, *others = self.rows
        return Root(self.to_tree([torch.cat(rows) for rows in zip(*self.rows)] if others else first), count)


class LowRankSum(Structure):
    def __init__(self, params: Tree, rank: int):
        super().__init__(params, held=(rank + 1) * size(params))
        zeros = [torch.zeros_like(leaf, dtype=wide(leaf.dtype)) for leaf in self.leaves]
        rows = [leaf.expand(rank, *leaf.shape).clone() for leaf in zeros]
        self.count = torch.zeros((), dtype=torch.float64, device=zeros[0].device)
        self.sum = LowRank(self.to_tree(zeros), self.to_tree(rows), self.count)

    def add(self, chunk: Chunk) -> None:
        self.sum = self.sum.add(Root(self.to_tree(_rows(chunk, self.leaves)), self.count))

    def finish(self, count: Tensor) -> LowRank:
        return self.sum._replace(count=count)


class TappedSum(Structure):
    """A sum of products of layer inputs and output gradients, for which every matrix must have a tap.

    A vector without a tap is described too, since its only factor is formed from its gradients.
    """

    def __init__(self, params: Tree, widest: float = math.inf, **asked: Any):
        """``widest`` is the largest size of a factor that is a matrix."""
        matrices = [leaf for leaf in optree.tree_leaves(params) if leaf.ndim > 1]
        sizes = [n for leaf in matrices for n in (leaf.shape[0], leaf.shape[1:].numel())]
        held = sum(n * n if n <= widest else n for n in sizes)
        # the work is matrix products over whole chunks, which are slow where chunks are small
        super().__init__(params, formed=0, held=held, few_data=128, **asked)
        self.widest = widest

    def accepts(self, plan: TapPlan) -> None:
        without = [leaf for leaf in plan.generic if self.leaves[leaf].ndim > 1 or plan.reasons[leaf] == UNUSED]
        if without:
            which = "; ".join(f"{plan.names[leaf]}: {plan.reasons[leaf]}" for leaf in without)
            raise ValueError(
                f"a Kronecker precision cannot describe {len(without)} of {len(plan.names)} parameters ({which}): "
                "leave them out with curvature.subset, or use structure='dense', 'root', 'diagonal' or 'low_rank'"
            )


class KroneckerSum(TappedSum):
    """Both factors of every leaf. A datum counts by its targets' weights, in the factors and in ``Kronecker.data``.

    The factor of more than ``diagonal_above`` outputs is the diagonal of it, ``[O]``.
    """

    def __init__(self, params: Tree, sharing: str, diagonal_above: int | None = None):
        super().__init__(params, math.inf if diagonal_above is None else diagonal_above, weighs_inputs=True)
        self.sharing = sharing
        self.inputs: dict[int, Any] = {}
        self.outputs: dict[int, Any] = {}
        self.kinds: dict[int, Kind] = {}
        self.data: Any = 0  # the sum of the data's weights: a number while none has had any

    def is_wide(self, kind: Kind) -> bool:
        """Whether the factor of a leaf's outputs is held as its diagonal."""
        return isinstance(kind, (Matrix, Vector)) and kind.outputs > self.widest

    def of_last_layer(self, use: Use, x: Tensor, root: OutputRoot, outputs: Tensor) -> Callable[[], Tensor] | None:
        """The factor of the outputs: under expand the sum over positions of each one's own."""
        is_mixed = self.sharing == "reduce" or (isinstance(use.kind, Vector) and not root.separates_positions)
        if is_mixed and outputs.ndim > 2:
            return None
        if self.is_wide(use.kind):
            return lambda: root.diagonal().flatten(0, -2).sum(0)
        return root.gram if root.separates_positions else None

    def accepts(self, plan: TapPlan) -> None:
        super().accepts(plan)
        kinds: dict[int, Kind] = {leaf: Vector((self.leaves[leaf].numel(), 1)) for leaf in plan.generic}
        for index, kind in ({use.leaf: use.kind for use in plan.uses} | kinds).items():
            leaf = self.leaves[index]
            for rows, columns in kind.factors():
                if self.is_wide(kind) and rows > self.widest:
                    continue
                require_factor_fits(plan.names[index], rows, columns, wide(leaf.dtype), leaf.device)

    def add(self, chunk: Chunk) -> None:
        of_taps: dict[int, Tensor] = {}  # a layer's weight and bias share the factor of its output gradients
        weights, summed = chunk.weights, {gradient.leaf for gradient in chunk.summed}
        if chunk.first:
            self.data = self.data + (len(chunk.outputs) if weights is None else weights.of_data.sum())
        for leaf, kind, x, g, tap in (*chunk.gradients, *chunk.summed):
            self.kinds[leaf] = kind
            if chunk.first:
                of_positions = None if weights is None else weights.of_positions(leaf)
                self.inputs[leaf] = kind.input_factor(x(), self.sharing, self.inputs.get(leaf), of_positions)
            if tap not in of_taps:
                self.outputs[leaf] = self._of_outputs(kind, g(), self.outputs.get(leaf), leaf in summed)
            else:
                self.outputs[leaf] = of_taps[tap]
            if tap is not None:
                of_taps[tap] = self.outputs[leaf]

    def _of_outputs(self, kind: Kind, g: Tensor, total: Tensor | None, is_summed: bool) -> Tensor:
        if is_summed:
            return g if total is None else total + g
        if not self.is_wide(kind):
            return kind.output_factor(g, self.sharing, total)
        g = g.sum(2) if self.sharing == "reduce" and isinstance(kind, Matrix) else g
        squares = g.reshape(-1, g.shape[-1]).square().sum(0)
        return squares if total is None else total + squares

    def finish(self, count: Tensor) -> Kronecker:
        pairs = [
            self.kinds[i].order(mirrored(self.inputs[i]).to(wide(leaf.dtype)), mirrored(self.outputs[i]))
            for i, leaf in enumerate(self.leaves)
        ]
        left, right = (self.to_tree(list(factors)) for factors in zip(*pairs))
        diagonal = self.to_tree([leaf.new_zeros((), dtype=wide(leaf.dtype)) for leaf in self.leaves])
        data = self.data.to(count) if isinstance(self.data, Tensor) else count.clone()
        return Kronecker(left, right, diagonal, shape_only(self.to_tree(self.leaves)), data, seen=count)


class EigenbasisSum(TappedSum):
    """EKFAC: the curvature along each eigenvector of given Kronecker factors, which is a diagonal in rotated
    coordinates.
    """

    def __init__(self, params: Tree, basis: Kronecker | Eigenbasis):
        super().__init__(params)
        self.basis = basis.eigenbasis() if isinstance(basis, Kronecker) else basis
        if not isinstance(self.basis, Eigenbasis):
            raise TypeError(f"basis is a {type(basis).__name__}: pass a Kronecker precision (or its factorised form)")
        self.pairs = list(zip(optree.tree_leaves(self.basis.left), optree.tree_leaves(self.basis.right)))
        self.sums: dict[int, Tensor] = {}

    def add(self, chunk: Chunk) -> None:
        for leaf, kind, x, g, _ in chunk.gradients:
            kind, of_input, of_output = kind.rotated(x(), g(), *self.pairs[leaf])
            self.sums[leaf] = kind.squares(of_input, of_output, self.sums.get(leaf))

    def finish(self, count: Tensor) -> Eigenbasis:
        return self.basis._replace(values=self.to_tree([self.sums[i] for i in range(len(self.leaves))]), count=count)


def _is_one_layer(gradients: list[Gradient]) -> bool:
    """Whether all leaves are the weight and the bias of one layer, with enough columns for :func:`_of_one_layer` to pay."""
    first = gradients[0]
    if first.tap is None or any(other.tap != first.tap for other in gradients):
        return False
    g = first.g()
    return 2 * g.shape[0] >= g.shape[-1]


def _of_one_layer(gradients: list[Gradient]) -> Tensor:
    """``sum_b H_b (x) x_b x_b^T`` with ``H_b = sum_k g_kb g_kb^T``, as ``[P, P]``: the rows' Gram matrix without the rows.

    With O outputs and I inputs (1 among them for the bias) it takes ``b O^2 I^2`` products; K columns of rows take K times as
    many.
    """
    g = gradients[0].g().flatten(1, -2) if isinstance(gradients[0].kind, Matrix) else gradients[0].g()
    inputs = [
        gradient.x()[:, 0] if isinstance(gradient.kind, Matrix) else g.new_ones(g.shape[1], 1) for gradient in gradients
    ]
    x, outputs = torch.cat(inputs, 1), g.shape[2]
    of_outputs = torch.einsum("kbo,kbp->bop", g, g)
    summed = (of_outputs[..., None] * x[:, None, None]).flatten(1).mT @ x  # [O O I, I]
    matrix = summed.reshape(outputs, outputs, x.shape[1], -1).transpose(1, 2).reshape(outputs * x.shape[1], -1)
    place = torch.arange(matrix.shape[0], device=x.device).reshape(outputs, -1)  # of (o, i) in this matrix
    split = place.split([one.shape[1] for one in inputs], 1)
    is_turned = [isinstance(gradient.kind, Matrix) and gradient.kind.transposed for gradient in gradients]
    order = torch.cat([(one.mT if turned else one).flatten() for one, turned in zip(split, is_turned)])
    return matrix[order][:, order]


def _rows(chunk: Chunk, leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradients of every leaf as rows, ``[K b, *leaf.shape]``."""
    rows = {leaf: kind.rows(x(), g()) for leaf, kind, x, g, _ in chunk.gradients}
    return [rows[index].reshape(rows[index].shape[:2].numel(), *leaf.shape) for index, leaf in enumerate(leaves)]


class Options(NamedTuple):
    """What an estimator was told about its structure."""

    rank: int
    sharing: str
    basis: Kronecker | Eigenbasis | None
    diagonal_above: int | None = None


STRUCTURES: dict[str, Callable[[Tree, Options], Structure]] = {
    "dense": lambda params, options: DenseSum(params),
    "root": lambda params, options: RootRows(params),
    "diagonal": lambda params, options: DiagonalSum(params),
    "kronecker": lambda params, options: KroneckerSum(params, options.sharing, options.diagonal_above),
    "low_rank": lambda params, options: LowRankSum(params, options.rank),
}


def structure_sum(structure: str, params: Tree, options: Options) -> Structure:
    """Start the sum of a structure given by name."""
    if options.basis is not None and structure != "kronecker":
        raise ValueError(f"basis= is for structure='kronecker' (EKFAC), not {structure!r}")
    if options.diagonal_above is not None and structure != "kronecker":
        raise ValueError(f"diagonal_above= is for structure='kronecker', not {structure!r}")
    if options.basis is not None:
        return EigenbasisSum(params, options.basis)
    return STRUCTURES[structure](params, options)
