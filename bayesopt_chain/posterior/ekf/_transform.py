r"""The extended Kalman filter as a gradient transformation: every batch is an observation, the update moves the mean.

Parameters walk at random and may be forgotten, theta_t = theta_{t-1} + w, w ~ N(0, Q), and the batch's log-likelihood,
weighed by lr, is linearised there. With the information (inverse covariance) Lambda and the batch's rows r (so that
``sum r r^T`` is its Fisher information), count B and mean gradient g of the negative log-likelihood,

    predict    Lambda <- ((forgetting Lambda)^-1 + Q)^-1
    update     Lambda <- Lambda + lr sum r r^T,      theta <- theta - lr B Lambda^-1 g.

A Gaussian likelihood also comes as whitened innovations e, where ``B g = - sum r e``. The dense filter carries a
triangular root, Lambda = R^T R, through one orthogonal rotation

    [ I       0        0           ]           [ *    *    *  ]
    [ R s     R        0           ]   =  Q    [ 0    R'   c  ],     s = diag(Q)^1/2,   R' (theta' - theta) = c,
    [ 0   sqrt(lr) r   sqrt(lr) e  ]           [ 0    0    *  ]

so that no information matrix is ever formed: float32 then resolves what the matrix would lose (Bierman, 1977). The
diagonal filter keeps the diagonal of Lambda; the low-rank filter is LO-FI (Chang et al., 2023), Lambda = diag(y) + W W^T,

    predict    y' = 1 / (1 / y + q),   W' = (y' / y) W chol((I + W^T diag(q / (1 + q y)) W)^-1)
    update     W' with the batch's rows, cut back to its rank by its singular values; what is cut off goes into y.

On linear Gaussian models the filter is exact. One pass at lr = 1 is then the Bayesian posterior, whatever the batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.arguments import checked
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import At, Link
from bayesopt_chain.core.op import Op
from bayesopt_chain.core.response import Refused
from bayesopt_chain.curvature._memory import require_dense_fits
from bayesopt_chain.posterior.ekf._information import Information, information
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.state import find, require_these, times
from bayesopt_chain.precision import Cholesky, Diagonal, LowRank, Precision, flatten, shape_only, unflatten
from bayesopt_chain.precision._low_rank import compress
from bayesopt_chain.precision._triangular import signed
from bayesopt_chain.tracing import is_hidden
from bayesopt_chain.trees import common_dtype, gram, paths, project, size, spread


class DenseFilterState(NamedTuple):
    """``root``: ``[P, P]`` lower triangular, positive diagonal, ``Lambda = root root^T``. ``count``: 0-d, data so far."""

    root: Tensor
    count: Tensor


class DiagonalFilterState(NamedTuple):
    """``precision``: the diagonal of Lambda, one tensor for each parameter. ``count``: 0-d, data so far."""

    precision: tuple[Tensor, ...]
    count: Tensor


class LowRankFilterState(NamedTuple):
    """``diagonal``: y, one tensor for each parameter; ``rows``: W^T, ``[rank, *leaf.shape]`` each. ``count``: 0-d."""

    diagonal: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]
    count: Tensor


@dataclass(frozen=True)
class Filter(Link):
    """What the filters share; each answers ``start``, ``predict_and_update`` and ``precision``."""

    exacting = True

    lr: Any
    prior_precision: Any = field(hash=False, compare=False)
    transition_noise: Any = field(hash=False, compare=False)
    forgetting: Any
    accepts = frozenset({"curvature"})
    needs = frozenset({"curvature"})
    whole = True
    needs_params = True
    response = Refused("a filter carries its own noise; give it as transition_noise=")
    name = "ekf"
    state = None

    def init(self, leaves: list, at: At) -> Any:
        params = at.tree(leaves)
        checks.parameters(leaves, optree.tree_paths(params))
        prior = self._tree("prior_precision", self.prior_precision, params)
        self._noise(params)
        return self.start(prior, leaves, torch.zeros((), dtype=torch.float64, device=leaves[0].device))

    def update(self, g: list, state: Any, op: Op, at: At) -> tuple[list, Any]:
        leaves = at.params
        known = information(at.extra.get("curvature"), leaves, self.name)
        for i, (x, p) in enumerate(zip(g, leaves)):
            if x is not None and x.shape != p.shape:
                raise ValueError(
                    f"{self.name}: gradient {i} has shape {tuple(x.shape)}, the parameter {tuple(p.shape)}"
                )
        filled = [torch.zeros_like(p) if x is None else x for x, p in zip(g, leaves)]
        noise = self._noise(at.tree(leaves))
        moves, new = self.predict_and_update(state, known, filled, noise, leaves)
        new = self.only(state, new, [x is not None for x in g])
        return [None if x is None else m for x, m in zip(g, moves)], op.keep(state, new)

    def start(self, prior: list[Tensor], leaves: list[Tensor], count: Tensor) -> Any:
        raise NotImplementedError

    def predict_and_update(
        self, state: Any, known: Information, g: list[Tensor], noise: list[Tensor] | None, leaves: list[Tensor]
    ) -> tuple[list[Tensor], Any]:
        raise NotImplementedError

    def only(self, old: Any, new: Any, moves: list[bool]) -> Any:
        """The new state; where leaves are independent, without those that have no gradient."""
        return new

    def precision(self, state: Any, params: Any) -> Precision:
        raise NotImplementedError

    def shapes(self, state: Any) -> list | int:
        """The parameters' shapes that the state remembers, or their number."""
        return [x.shape for x in state[0]]

    def _noise(self, params: Any) -> list[Tensor] | None:
        """Transition variances like the parameters, ``None`` for none."""
        if isinstance(self.transition_noise, (int, float)) and self.transition_noise == 0:
            return None
        return self._tree("transition_noise", self.transition_noise, params)

    def _tree(self, name: str, value: Any, params: Any) -> list[Tensor]:
        out = [v.expand(p.shape) for v, p in zip(spread(value, params, name), optree.tree_leaves(params))]
        for path, v in zip(paths(params), out):
            if not is_hidden(v) and not bool((v.isfinite() & (v > 0)).all()):
                what = "is singular or negative" if name == "transition_noise" else "is not positive"
                cure = "; a number 0 switches it off" if name == "transition_noise" else ""
                raise ValueError(
                    f"{self.name}: {name} {what} at {path} (smallest entry {v.min().item():.3g}): "
                    f"pass positive, finite numbers{cure}"
                )
        return out

    def _weigh(self, rows: list[Tensor]) -> list[Tensor]:
        """Rows times the square root of lr."""
        root = self.lr.sqrt() if torch.is_tensor(self.lr) else math.sqrt(self.lr)
        return [times(row, root) for row in rows]

    def __str__(self) -> str:
        words = [f"lr={checks.show(self.lr)}"]
        words += [] if self._is_default("transition_noise", 0.0) else ["transition_noise=..."]
        words += [] if self._is_default("forgetting", 1.0) else [f"forgetting={self.forgetting}"]
        return f"{self.name}({', '.join(words)})"

    def _is_default(self, name: str, default: float) -> bool:
        value = getattr(self, name)
        return isinstance(value, (int, float)) and value == default


@dataclass(frozen=True)
class DenseFilter(Filter):
    name = "ekf.dense"
    state = DenseFilterState

    def start(self, prior, leaves, count):
        dtype = common_dtype(leaves)
        require_dense_fits(size(leaves), dtype, leaves[0].device)
        return DenseFilterState(torch.diag(flatten(prior, leaves).to(dtype).sqrt()), count)

    def predict_and_update(self, state, known, g, noise, leaves):
        parameters = state.root.shape[-1]
        root = times(state.root.mT, self.forgetting**0.5)
        rows = flatten(self._weigh(known.rows), leaves).to(root.dtype)
        if known.diagonal is not None:
            rows = torch.cat([rows, torch.diag(flatten(self._weigh([d.sqrt() for d in known.diagonal]), leaves))])
        right = rows.new_zeros((parameters + rows.shape[0], 0))
        if known.innovation is not None:
            right = torch.cat([root.new_zeros(parameters), self._weigh([known.innovation])[0].to(root.dtype)])[:, None]
        stacked = torch.cat([torch.cat([root, rows]), right], dim=1)
        if noise is not None:
            spread_out = flatten(noise, leaves).to(root.dtype).sqrt()
            walked = torch.cat([root * spread_out, rows.new_zeros((rows.shape[0], parameters))])
            first = torch.eye(parameters, stacked.shape[1] + parameters, dtype=root.dtype, device=root.device)
            stacked = torch.cat([first, torch.cat([walked, stacked], dim=1)])
        skip = 0 if noise is None else parameters
        rotated = signed(torch.linalg.qr(stacked, mode="r").R)[skip : skip + parameters, skip:]
        upper = rotated[:, :parameters]
        if known.innovation is None:
            force = -times(flatten(g, leaves).to(root.dtype), self.lr * known.count)
            solved = torch.linalg.solve_triangular(upper.mT, force[:, None], upper=False)
        else:
            solved = rotated[:, parameters:]
        moves = torch.linalg.solve_triangular(upper, solved, upper=True)[:, 0]
        return optree.tree_leaves(unflatten(moves, leaves)), DenseFilterState(
            upper.mT.contiguous(), state.count + known.count
        )

    def shapes(self, state):
        return state.root.shape[-1]

    def precision(self, state, params):
        return Cholesky(state.root, shape_only(params), state.count)


@dataclass(frozen=True)
class DiagonalFilter(Filter):
    name = "ekf.diagonal"
    state = DiagonalFilterState

    def start(self, prior, leaves, count):
        return DiagonalFilterState(tuple(v.clone() for v in prior), count)

    def predict_and_update(self, state, known, g, noise, leaves):
        before = [times(v, self.forgetting) for v in state.precision]
        if noise is not None:
            before = [v / (1 + q * v) for v, q in zip(before, noise)]
        rows = self._weigh(known.rows)
        after = [v + row.square().sum(0) for v, row in zip(before, rows)]
        if known.diagonal is not None:
            after = [v + times(d, self.lr) for v, d in zip(after, known.diagonal)]
        if known.innovation is None:
            moves = [-times(x, self.lr * known.count) / v for x, v in zip(g, after)]
        else:
            white = [row / v.sqrt() for row, v in zip(rows, before)]
            gain = gram(white) + torch.eye(rows[0].shape[0], dtype=common_dtype(white), device=rows[0].device)
            innovation = self._weigh([known.innovation])[0].to(gain.dtype)
            along = torch.linalg.solve_ex(gain, innovation).result  # never singular, and nothing to wait for
            moves = [torch.tensordot(along.to(row.dtype), row, dims=1) / v for row, v in zip(rows, before)]
        return moves, DiagonalFilterState(tuple(after), state.count + known.count)

    def only(self, old, new, moves):
        return new._replace(precision=tuple(b if m else a for a, b, m in zip(old.precision, new.precision, moves)))

    def precision(self, state, params):
        return Diagonal(optree.tree_unflatten(optree.tree_structure(params), state.precision), state.count)


@dataclass(frozen=True)
class LowRankFilter(Filter):
    rank: int = 10
    name = "ekf.low_rank"
    state = LowRankFilterState

    def start(self, prior, leaves, count):
        if self.rank > size(leaves):
            raise ValueError(f"ekf.low_rank: rank={self.rank} is above the number of parameters, {size(leaves)}")
        rows = tuple(p.new_zeros((self.rank, *p.shape)) for p in leaves)
        return LowRankFilterState(tuple(v.clone() for v in prior), rows, count)

    def predict_and_update(self, state, known, g, noise, leaves):
        diagonal, rows = self._predicted(state, noise)
        new = self._weigh(known.rows)
        joint = [torch.cat([a, b]) for a, b in zip(rows, new)]
        if known.diagonal is not None:
            diagonal = [y + times(d, self.lr) for y, d in zip(diagonal, known.diagonal)]
        if known.innovation is None:
            force = [-times(x, self.lr * known.count) for x in g]
        else:
            innovation = self._weigh([known.innovation])[0]
            force = [torch.tensordot(innovation.to(row.dtype), row, dims=1) for row in new]
        moves = LowRank(diagonal, joint, known.count).factorised().solve(force)
        kept, overflow = compress(joint, self.rank)
        after = tuple(y + x for y, x in zip(diagonal, overflow))
        return moves, LowRankFilterState(after, tuple(kept), state.count + known.count)

    def _predicted(self, state: LowRankFilterState, noise: list[Tensor] | None) -> tuple[list[Tensor], list[Tensor]]:
        root = self.forgetting**0.5
        diagonal = [times(y, self.forgetting) for y in state.diagonal]
        rows = [times(row, root) for row in state.rows]
        if noise is None:
            return diagonal, rows
        damped = [row * (q / (1 + q * y)) for row, q, y in zip(rows, noise, diagonal)]
        inner_matrix = project(rows, damped)
        inner_matrix = inner_matrix + torch.eye(self.rank, dtype=inner_matrix.dtype, device=inner_matrix.device)
        lower = torch.linalg.cholesky_ex(inner_matrix).L
        shrunk = [row / (1 + q * y) for row, q, y in zip(rows, noise, diagonal)]
        flat = [
            torch.linalg.solve_triangular(lower.to(row.dtype), row.reshape(self.rank, -1), upper=False).reshape(
                row.shape
            )
            for row in shrunk
        ]
        return [y / (1 + q * y) for y, q in zip(diagonal, noise)], flat

    def precision(self, state, params):
        diagonal, rows = (optree.tree_unflatten(optree.tree_structure(params), x) for x in state[:2])
        return LowRank(diagonal, rows, state.count)


class FilteredPosterior(Chain):
    """What the functions of :mod:`bayesopt_chain.posterior.ekf` return: a chain with a question for its state."""

    def __reduce__(self) -> Any:
        return type(self), (self.links,)

    def posterior(self, state: Any, params: Any) -> Gaussian:
        """The Gaussian posterior around ``params``, of the type that ``bc.laplace`` gives.

        Args:
            state: of this transformation, or of a chain that has it as a link.
            params: the mean, a tree of the parameters.
        """
        link = self.links[0]
        mine = find(state, link.state, str(link))
        require_these(link.shapes(mine), params, str(link))
        mean = optree.tree_map(torch.Tensor.detach, params)
        return Gaussian(mean, link.precision(mine, params).factorised())


@checked
def dense(
    lr: float | Tensor = 1.0,
    *,
    prior_precision: Any = 1.0,
    transition_noise: Any = 0.0,
    forgetting: float | Tensor = 1.0,
) -> FilteredPosterior:
    """The extended Kalman filter with every correlation, as a square root of the information.

    Its loss is the mean negative log-likelihood alone, which it multiplies by the datum count: the prior is
    ``prior_precision`` about the first parameters. Each update takes the batch's ``curvature=``: an estimator's increment
    with ``structure="root"`` (others are taken apart into rows, "dense" by an eigendecomposition that loses digits), or an
    :class:`Observation` from :func:`observe`, where the gradient is not read.

    Args:
        lr: weight of the log-likelihood; 1 is Bayes' rule, 0.5 counts every datum half. A number or a 0-d tensor.
        prior_precision: of the parameters at the start: a positive number or a tree that broadcasts to them.
        transition_noise: variance of the parameters' random walk before each update, in the parameters' units squared: a
            number (0: they stand still) or a tree of positive ones that broadcasts.
        forgetting: in (0, 1]; the information is multiplied by it before each update.

    Returns:
        A transformation with ``posterior``. ``update`` needs ``params=`` and ``curvature=`` and costs
        ``O((P + M) P^2)`` for M rows; its state holds ``P^2`` numbers.

    Raises:
        ValueError: numbers out of range; at ``init``, a noise that is negative, or singular (zero in places); at
            ``update``, no curvature, or that of other parameters.
        TypeError: at ``update``, curvature of a structure without rows (Kronecker, block).
        MemoryError: at ``init``, where ``P^2`` does not fit.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> forward = lambda params, batch: batch[0] @ params
        >>> tx = bc.ekf.dense(prior_precision=1.0)
        >>> loss = lambda params, batch: (forward(params, batch) - batch[1]).square().mean() / 2
        >>> step = bc.make_step(loss, tx, curvature=bc.ekf.observe(forward, variance=1.0))
        >>> params = torch.zeros(1)
        >>> params, state, info = step(params, tx.init(params), (torch.ones(3, 1), torch.full((3,), 4.0)))
        >>> params, tx.posterior(state, params).marginal_variance
        (tensor([3.0000]), tensor([0.2500]))
    """
    return FilteredPosterior((DenseFilter(*_common("ekf.dense", lr, prior_precision, transition_noise, forgetting)),))


@checked
def diagonal(
    lr: float | Tensor = 1.0,
    *,
    prior_precision: Any = 1.0,
    transition_noise: Any = 0.0,
    forgetting: float | Tensor = 1.0,
) -> FilteredPosterior:
    """The extended Kalman filter that keeps the diagonal of the information.

    It takes curvature of the structures "diagonal" and those of :func:`dense`. From an :class:`Observation` the mean moves
    by the exact gain of the diagonal prior. Its state holds one tensor for each parameter. Arguments, results and errors:
    :func:`dense`.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> from bayesopt_chain.precision import Diagonal
        >>> tx, params = bc.ekf.diagonal(prior_precision=1.0), torch.zeros(2)
        >>> increment = Diagonal(torch.tensor([3.0, 1.0]), torch.tensor(4.0))
        >>> updates, state = tx.update(torch.ones(2), tx.init(params), params=params, curvature=increment)
        >>> updates
        tensor([-1., -2.])
    """
    return FilteredPosterior(
        (DiagonalFilter(*_common("ekf.diagonal", lr, prior_precision, transition_noise, forgetting)),)
    )


@checked
def low_rank(
    lr: float | Tensor = 1.0,
    *,
    rank: int = 10,
    prior_precision: Any = 1.0,
    transition_noise: Any = 0.0,
    forgetting: float | Tensor = 1.0,
) -> FilteredPosterior:
    """The low-rank extended Kalman filter LO-FI: information of a diagonal and ``rank`` directions (Chang et al., 2023).

    Exact as long as the information has no more directions than ``rank``. Its state holds ``rank + 1`` tensors for each
    parameter, an update costs ``O((rank + M)^2 P)``. Curvature, other arguments, results and errors: :func:`dense`.

    Args:
        rank: at least 1 and at most the number of parameters.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.ekf.low_rank(rank=1), {"w": torch.zeros(2, 2)}
        >>> observation = bc.ekf.observe(lambda p, batch: (batch[0] @ p["w"]).sum(1))(params, (torch.ones(1, 2), torch.ones(1)))
        >>> updates, state = tx.update(params, tx.init(params), params=params, curvature=observation)
        >>> updates["w"]
        tensor([[0.2000, 0.2000],
                [0.2000, 0.2000]])
    """
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"ekf.low_rank: rank must be an integer of at least 1, got {rank!r}; rank 0 is ekf.diagonal")
    common = _common("ekf.low_rank", lr, prior_precision, transition_noise, forgetting)
    return FilteredPosterior((LowRankFilter(*common, rank=rank),))


def _common(who: str, lr: Any, prior_precision: Any, transition_noise: Any, forgetting: Any) -> tuple:
    if not torch.is_tensor(lr):
        checks.positive(f"{who}: lr", lr)
    if not torch.is_tensor(forgetting) and not (isinstance(forgetting, (int, float)) and 0 < forgetting <= 1):
        raise ValueError(f"{who}: forgetting must lie in (0, 1], got {forgetting!r}")
    for name, value in (("prior_precision", prior_precision), ("transition_noise", transition_noise)):
        if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{who}: {name} must be finite and not negative, got {value!r}")
    if isinstance(prior_precision, (int, float)) and prior_precision == 0:
        raise ValueError(f"{who}: prior_precision=0 leaves nothing to start from; pass a small positive number")
    return lr, prior_precision, transition_noise, forgetting
