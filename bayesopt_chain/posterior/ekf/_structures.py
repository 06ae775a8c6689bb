r"""What the extended Kalman filters remember, and one prediction and update of it.

Parameters walk at random and may be forgotten, theta_t = theta_{t-1} + w, w ~ N(0, Q). With the information (inverse
covariance) Lambda, the batch's rows r (so that ``sum r r^T`` is its Fisher information) and its force f, all weighed by lr,

    predict    Lambda <- ((forgetting Lambda)^-1 + Q)^-1
    update     Lambda <- Lambda + sum r r^T,      theta <- theta + Lambda^-1 f,

where ``f = -B g`` for B data and the mean gradient g of the negative log-likelihood, and ``f = sum r e`` for whitened
innovations e of a Gaussian likelihood. The dense filter carries a triangular root, Lambda = R^T R, through one orthogonal
rotation

    [ I       0   0 ]           [ *    *    *  ]
    [ R s     R   0 ]   =  Q    [ 0    R'   c  ],     s = diag(Q)^1/2,   R' (theta' - theta) = c,
    [ 0       r   e ]           [ 0    0    *  ]

so that no information matrix is ever formed: float32 then resolves what the matrix would lose (Bierman, 1977). The diagonal
filter keeps y, the diagonal of Lambda, and moves the mean by the whole of the batch,

    theta <- theta + (diag(y') + r^T r)^-1 f,     y <- y' + sum r^2:

to divide f by y instead adds up what correlated features say of each other, and diverges. The low-rank filter is LO-FI
(Chang, Duran-Martin, Shestopaloff, Jones and Murphy, 2023), Lambda = diag(y) + W W^T,

    predict    y' = 1 / (1 / y + q),   W' = (y' / y) W chol((I + W^T diag(q / (1 + q y)) W)^-1)
    update     W' with the batch's rows, cut back to its rank by its singular values; what is cut off goes into y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.curvature._memory import require_dense_fits
from bayesopt_chain.posterior.state import times
from bayesopt_chain.precision import Cholesky, Diagonal, LowRank, Precision, flatten, shape_only, unflatten
from bayesopt_chain.precision._low_rank import compress
from bayesopt_chain.precision._triangular import signed
from bayesopt_chain.trees import combine, common_dtype, gram, project, size


class DenseFilterState(NamedTuple):
    """``root``: ``[P, P]`` lower triangular, positive diagonal, ``Lambda = root root^T``. ``count``: 0-d, data so far."""

    root: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]


class DiagonalFilterState(NamedTuple):
    """``precision``: the diagonal of Lambda, one tensor for each parameter. ``count``: 0-d, data so far."""

    precision: tuple[Tensor, ...]
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]


class LowRankFilterState(NamedTuple):
    """``diagonal``: y, one tensor for each parameter; ``rows``: W^T, ``[rank, *leaf.shape]`` each. ``count``: 0-d."""

    diagonal: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]


class Weighed(NamedTuple):
    """A batch, weighed by lr: rows r, the innovations e, if known, the force f, the number of data."""

    rows: list[Tensor]
    innovation: Tensor | None
    force: list[Tensor]
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]


class Structure:
    """What a filter remembers of the information. Leaves are the parameters that are present."""

    name: str
    state: type

    def start(self, prior: list[Tensor], leaves: list[Tensor], count: Tensor) -> Any:
        """The state of a diagonal prior."""
        raise NotImplementedError

    def step(
        self, state: Any, batch: Weighed, noise: list[Tensor] | None, forgetting: Any, leaves: list[Tensor]
    ) -> tuple[list[Tensor], Any]:
        """The moves of the leaves, and the state after one prediction and update."""
        raise NotImplementedError

    def only(self, old: Any, new: Any, moves: list[bool]) -> Any:
        """The new state; where leaves are independent, the old one of those that do not move."""
        return new

    def precision(self, state: Any, params: Any) -> Precision:
        """Lambda over the tree of params."""
        raise NotImplementedError

    def shapes(self, state: Any) -> list | int:
        """The parameters' shapes that the state remembers, or their number."""
        return [x.shape for x in state[0]]


@dataclass(frozen=True)
class DenseRoot(Structure):
    name = "ekf.dense"
    state = DenseFilterState

    def start(self, prior: list[Tensor], leaves: list[Tensor], count: Tensor) -> DenseFilterState:
        dtype = common_dtype(leaves)
        require_dense_fits(size(leaves), dtype, leaves[0].device)
        return DenseFilterState(torch.diag(flatten(prior, leaves).to(dtype).sqrt()), count)

    def step(
        self, state: Any, batch: Weighed, noise: list[Tensor] | None, forgetting: Any, leaves: list[Tensor]
    ) -> tuple[list[Tensor], Any]:
        root = times(state.root.mT, forgetting**0.5)
        rows = flatten(batch.rows, leaves).to(root.dtype)
        deviations = None if noise is None else flatten(noise, leaves).to(root.dtype).sqrt()
        innovation = None if batch.innovation is None else batch.innovation.to(root.dtype)
        upper, solved = rotated(root, rows, innovation, deviations)
        if innovation is None:
            force = flatten(batch.force, leaves).to(root.dtype)
            solved = torch.linalg.solve_triangular(upper.mT, force[:, None], upper=False)
        moves = torch.linalg.solve_triangular(upper, solved, upper=True)[:, 0]
        after = DenseFilterState(upper.mT.clone(memory_format=torch.contiguous_format), state.count + batch.count)
        return optree.tree_leaves(unflatten(moves, leaves)), after

    def shapes(self, state: Any) -> int:
        return state.root.shape[-1]

    def precision(self, state: Any, params: Any) -> Cholesky:
        return Cholesky(state.root, shape_only(params), state.count)


def rotated(root: Tensor, rows: Tensor, innovation: Tensor | None, deviations: Tensor | None) -> tuple[Tensor, Tensor]:
    """R' and c of the rotation above, ``[P, P]`` and ``[P, 1]`` (``[P, 0]`` without innovations).

    Args:
        root: R, ``[P, P]``.
        rows: r, ``[M, P]``.
        innovation: e, ``[M]``.
        deviations: s, ``[P]``; ``None`` where the parameters stand still.
    """
    parameters = root.shape[-1]
    right = rows.new_zeros((parameters + rows.shape[0], 0))
    if innovation is not None:
        right = torch.cat([root.new_zeros(parameters), innovation])[:, None]
    stacked = torch.cat([torch.cat([root, rows]), right], dim=1)
    skip = 0
    if deviations is not None:
        walked = torch.cat([root * deviations, rows.new_zeros((rows.shape[0], parameters))])
        first = torch.eye(parameters, stacked.shape[1] + parameters, dtype=root.dtype, device=root.device)
        stacked = torch.cat([first, torch.cat([walked, stacked], dim=1)])
        skip = parameters
    triangle = signed(torch.linalg.qr(stacked, mode="r").R)[skip : skip + parameters, skip:]
    return triangle[:, :parameters], triangle[:, parameters:]


@dataclass(frozen=True)
class DiagonalInformation(Structure):
    name = "ekf.diagonal"
    state = DiagonalFilterState

    def start(self, prior: list[Tensor], leaves: list[Tensor], count: Tensor) -> DiagonalFilterState:
        return DiagonalFilterState(tuple(v.clone() for v in prior), count)

    def step(
        self, state: Any, batch: Weighed, noise: list[Tensor] | None, forgetting: Any, leaves: list[Tensor]
    ) -> tuple[list[Tensor], Any]:
        before = [times(y, forgetting) for y in state.precision]
        if noise is not None:
            before = [y / (1 + q * y) for y, q in zip(before, noise)]
        if batch.innovation is None:
            moves = solve_with_rows(before, batch.rows, batch.force)
        else:
            moves = gain(before, batch.rows, batch.innovation)
        after = tuple(y + row.square().sum(0) for y, row in zip(before, batch.rows))
        return moves, DiagonalFilterState(after, state.count + batch.count)

    def only(self, old: Any, new: Any, moves: list[bool]) -> Any:
        return new._replace(precision=tuple(b if m else a for a, b, m in zip(old.precision, new.precision, moves)))

    def precision(self, state: Any, params: Any) -> Diagonal:
        return Diagonal(optree.tree_unflatten(optree.tree_structure(params), state.precision), state.count)


def solve_with_rows(diagonal: list[Tensor], rows: list[Tensor], force: list[Tensor]) -> list[Tensor]:
    """``(D + r^T r)^-1 f = D^-1 (f - r^T (I + r D^-1 r^T)^-1 r D^-1 f)``.

    In float64, for where the rows outweigh D by a factor s the difference loses s units of the last place.
    """
    d, r, f = ([x.to(torch.float64) for x in leaves] for leaves in (diagonal, rows, force))
    scaled = [row / x for row, x in zip(r, d)]
    capacity = _capacity([row / x.sqrt() for row, x in zip(r, d)])
    along = torch.linalg.solve_ex(capacity, project(scaled, f)).result  # never singular, and nothing to wait for
    return [(x / y - move).to(like.dtype) for x, y, move, like in zip(f, d, combine(along, scaled), force)]


def gain(diagonal: list[Tensor], rows: list[Tensor], innovation: Tensor) -> list[Tensor]:
    """``D^-1 r^T (I + r D^-1 r^T)^-1 e``: the Kalman gain of whitened innovations."""
    capacity = _capacity([row / d.sqrt() for row, d in zip(rows, diagonal)])
    along = torch.linalg.solve_ex(capacity, innovation.to(capacity.dtype)).result
    return [torch.tensordot(along.to(row.dtype), row, dims=1) / d for row, d in zip(rows, diagonal)]


def _capacity(white: list[Tensor]) -> Tensor:
    """``I + w w^T`` of whitened rows."""
    dtype = common_dtype(white)
    return gram([w.to(dtype) for w in white]) + torch.eye(white[0].shape[0], dtype=dtype, device=white[0].device)


@dataclass(frozen=True)
class LowRankInformation(Structure):
    rank: int
    name = "ekf.low_rank"
    state = LowRankFilterState

    def start(self, prior: list[Tensor], leaves: list[Tensor], count: Tensor) -> LowRankFilterState:
        if self.rank > size(leaves):
            raise ValueError(f"ekf.low_rank: rank={self.rank} is above the number of parameters, {size(leaves)}")
        rows = tuple(p.new_zeros((self.rank, *p.shape)) for p in leaves)
        return LowRankFilterState(tuple(v.clone() for v in prior), rows, count)

    def step(
        self, state: Any, batch: Weighed, noise: list[Tensor] | None, forgetting: Any, leaves: list[Tensor]
    ) -> tuple[list[Tensor], Any]:
        diagonal = [times(y, forgetting) for y in state.diagonal]
        rows = [times(row, forgetting**0.5) for row in state.rows]
        if noise is not None:
            diagonal, rows = walked_low_rank(diagonal, rows, noise)
        force = batch.force
        if batch.innovation is not None:
            force = [torch.tensordot(batch.innovation.to(row.dtype), row, dims=1) for row in batch.rows]
        joint = [torch.cat([a, b]) for a, b in zip(rows, batch.rows)]
        moves = LowRank(diagonal, joint, batch.count).factorised().solve(force)
        kept, overflow = compress(joint, self.rank)
        after = tuple(y + x for y, x in zip(diagonal, overflow))
        return moves, LowRankFilterState(after, tuple(row.clone() for row in kept), state.count + batch.count)

    def precision(self, state: Any, params: Any) -> LowRank:
        diagonal, rows = (optree.tree_unflatten(optree.tree_structure(params), x) for x in state[:2])
        return LowRank(diagonal, rows, state.count)


def walked_low_rank(
    diagonal: list[Tensor], rows: list[Tensor], noise: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """y' and W'^T after a random walk of variance q: ``((diag(y) + W W^T)^-1 + diag(q))^-1``."""
    rank = rows[0].shape[0]
    damped = [row * (q / (1 + q * y)) for row, q, y in zip(rows, noise, diagonal)]
    inner_matrix = project(rows, damped)
    inner_matrix = inner_matrix + torch.eye(rank, dtype=inner_matrix.dtype, device=inner_matrix.device)
    lower = torch.linalg.cholesky_ex(inner_matrix).L
    shrunk = [(row / (1 + q * y)).reshape(rank, -1) for row, q, y in zip(rows, noise, diagonal)]
    flat = [torch.linalg.solve_triangular(lower.to(row.dtype), row, upper=False) for row in shrunk]
    walked = [row.reshape(like.shape) for row, like in zip(flat, rows)]
    return [y / (1 + q * y) for y, q in zip(diagonal, noise)], walked
