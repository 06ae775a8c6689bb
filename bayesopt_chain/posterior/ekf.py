r"""The extended Kalman filter as a gradient transformation: every batch is an observation, the update moves the mean.

The batch's log-likelihood, weighed by lr, is linearised at the mean; its rows and the gradient condition the Gaussian that the
state remembers. On linear Gaussian models the dense filter is exact: one pass at lr = 1 is then the Bayesian posterior,
whatever the batches. The extended filter: Jazwinski (1970); as natural gradient: Ollivier (2018).

Parameters move and may be forgotten, theta_t = theta_{t-1} + w, w ~ N(0, diag(q)). With the information (inverse covariance)
Lambda, the batch's rows r (so that ``sum r r^T`` is its Fisher information) and its force f, all weighed by lr,

    predict    Lambda <- ((forgetting Lambda)^-1 + diag(q))^-1
    update     Lambda <- Lambda + sum r r^T,      theta <- theta + Lambda^-1 f,

where ``f = -B g`` for B data and the mean gradient g of the negative log-likelihood, and ``f = sum r e`` for whitened
innovations e. The log evidence grows by::

    log int p(y | theta) N(theta; m, Lambda^-1) = l - 1/2 log(det Lambda' / det Lambda) - 1/2 q,
        q = min_d |e - r d|^2 + d^T Lambda d    with l = log p(y | m) + |e|^2 / 2,
        q = -f^T d,  d = Lambda'^-1 f           with l = log p(y | m), where the innovations are not known,

which is exact where the model is linear and Gaussian. The dense filter carries a triangular root, Lambda = R^T R, through
orthogonal rotations,

    [ I                0 ]        [ *   *  ]        [ R   0 ]        [ R'  c ]
    [ R diag(q)^1/2    R ]  =  Q  [ 0   R' ],       [ r   e ]  =  Q  [ 0   d ],    Q orthogonal,   R' move = c,   d^2 = misfit,

so that no information matrix is ever formed: float32 then resolves what the matrix would lose (Bierman, 1977). The diagonal
filter keeps y, the diagonal of Lambda, and moves the mean by the whole of the batch,

    theta <- theta + (diag(y') + r^T r)^-1 f,     y <- y' + sum r^2:

Dividing f by y' alone would count the information of correlated features several times, and diverges. The low-rank filter is
LO-FI (Chang, Duran-Martin, Shestopaloff, Jones and Murphy, 2023), Lambda = diag(y) + W W^T,

    predict    y' = 1 / (1 / y + q),   W' = (y' / y) W chol((I + W^T diag(q / (1 + q y)) W)^-1)
    update     W' with the batch's rows, cut back to its rank by its singular values; what is cut off goes into y.

What a batch tells a filter: rows of information, whatever estimator they come from.

    information of the batch = sum_m r_m r_m^T,      force = the gradient of its log-likelihood at the mean

An :class:`Observation` of a Gaussian likelihood knows its innovations e too, each in units of its own noise, so that the
force is ``sum_m r_m e_m``: the filter then solves a least-squares problem instead of normal equations.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import TensorOps
from bayesopt_chain.curvature._chunks import pullback
from bayesopt_chain.curvature._structures import require_dense_fits
from bayesopt_chain.likelihoods import Likelihood, gaussian
from bayesopt_chain.likelihoods._likelihood import Elementwise
from bayesopt_chain.matching.response import Refused
from bayesopt_chain.posterior.gaussian import (
    Alone,
    Gaussian,
    PosteriorTransformation,
    over_prior,
    require_numbers,
    require_these,
    require_values,
    times,
    warn_of_rounding,
)
from bayesopt_chain.precision import Cholesky, Diagonal, LowRank, Precision, Woodbury, flatten, unflatten
from bayesopt_chain.precision._dense import signed
from bayesopt_chain.precision._low_rank import compress
from bayesopt_chain.schedules import is_number, is_schedule
from bayesopt_chain.tracing import is_readable, is_transformed
from bayesopt_chain.trees import (
    Tree,
    combine,
    common_dtype,
    copied,
    gram,
    inner,
    paths,
    paths_of,
    project,
    size,
    spread,
    upcast,
    wide,
)

__all__ = ["KalmanFilter", "Observation", "dense", "diagonal", "low_rank", "observe"]

Number = float | Tensor | Callable[[Tensor], Any]
WEIGHT = checks.number("(0, inf)", tensor=True, schedule=True)  # of the log-likelihood; at 0 the data would say nothing
PRIOR = checks.POSTERIOR.or_none()
SMALLEST = 1e-15  # a root of the output Hessian; below it the batch would say where to move and not how far


class Observation(NamedTuple):
    """A batch of M observations, linearised at the mean.

    Attributes:
        rows: leaves ``[M, *leaf.shape]``, for Gaussian noise the outputs' Jacobian over the noise's standard deviation.
        innovation: target minus output over the same standard deviation, ``[M]``; ``None`` where outputs are not independent,
            as those of classes.
        force: the gradient of the batch's log-likelihood, a tree like the parameters; ``None`` for Gaussian noise, whose
            innovations say it.
        seen: the number of data, 0-d.
        log_likelihood: of the batch at the mean, normalised, in nats, 0-d, float64; ``None`` where it is not known.
    """

    rows: Tree
    innovation: Tensor | None
    force: Tree | None
    seen: Tensor
    log_likelihood: Tensor | None


LIKELIHOOD = checks.Kind(
    lambda x: checks.LIKELIHOOD.fits(x) or checks.POSITIVES.fits(x),
    "one of bc.likelihoods, called, or a variance: a positive number, or a tensor of them",
    (int, float, Tensor),
)


@checks.takes(likelihood=LIKELIHOOD, linearisation=checks.one_of("tangent", "empirical"))
def observe(
    forward: Callable[[Tree, Any], Tensor],
    likelihood: Likelihood | float | Tensor = 1.0,
    *,
    linearisation: str = "tangent",
) -> Callable[[Tree, Any], Observation]:
    r"""Linearise a model for a filter: outputs, their Jacobian and the log-likelihood from one pass.

    ``"tangent"`` expands the log-likelihood at the filter's mean, with its expected (Fisher) Hessian: the extended Kalman
    filter. ``"empirical"`` takes the square of each datum's own gradient for that Hessian: one row a datum, for any likelihood,
    and noisier, as it depends on the target (Ollivier, 2018).

    Args:
        forward: ``forward(params, batch) -> outputs [B, *event]``; ``batch = (inputs, targets)``.
        likelihood: of :mod:`bayesopt_chain.likelihoods`, or the variance of Gaussian noise, in the targets' units squared: a
            number, or a tensor ``[*event]``. Default: variance 1.
        linearisation: "tangent" (default) or "empirical".

    Returns:
        ``estimate(params, batch)``, to be passed where a filter takes ``curvature``; ``make_step(None, tx, curvature=...)``
        asks for no loss beside it. Its cost is one backward pass over M outputs at once, M = B times the entries of an event
        ("empirical": B).

    Raises:
        ValueError: a variance that is not positive, a linearisation that does not exist; at the estimate, targets of
            a shape that the likelihood does not take.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> estimate = bc.ekf.observe(lambda params, batch: batch[0] @ params, 0.25)
        >>> observation = estimate(torch.zeros(2, 1), (torch.eye(2), torch.ones(2, 1)))
        >>> observation.innovation
        tensor([2., 2.])
    """
    chosen = likelihood if isinstance(likelihood, Likelihood) else gaussian(likelihood)

    def estimate(params: Tree, batch: Any) -> Observation:
        leaves, structure = optree.tree_flatten(params)

        def outputs(leaves: list[Tensor]) -> tuple[Tensor, tuple[()]]:
            f = forward(optree.tree_unflatten(structure, leaves), batch)
            if not (f.requires_grad or is_transformed()):
                raise ValueError(
                    "ekf.observe: forward does not depend on params: compute the outputs from what it is given"
                )
            return f, ()

        f, pull, _ = pullback(outputs, [leaf.detach() for leaf in leaves])
        return _observation(f, batch[1], pull, structure.unflatten, chosen, linearisation)

    return estimate


def _observation(
    f: Tensor,
    targets: Any,
    pull: Callable[[Tensor], list[Tensor]],
    tree: Callable[[list[Tensor]], Tree],
    chosen: Likelihood,
    linearisation: str,
) -> Observation:
    """What outputs ``f`` and their targets say.

    Args:
        f: ``[B, *event]``.
        targets: theirs.
        pull: cotangents ``[M, B, *event]`` to rows by leaf, ``[M, *leaf.shape]``.
        tree: rows, or tensors like the leaves, as a tree like the parameters.
        chosen, linearisation: as :func:`observe` has them.
    """
    nll = chosen.nll(f, targets).sum()
    known = torch.full((), float(f.shape[0]), dtype=torch.float64, device=f.device), -nll.to(torch.float64)
    if linearisation == "empirical":
        rows = pull(_separate(chosen.gradient(f, targets)[None]))
        return Observation(tree(rows), -f.new_ones(len(f)), tree([-row.sum(0) for row in rows]), *known)
    root = chosen.root(f, targets)
    if chosen.has_noise_scale:
        scale, innovation = root.diagonal().sqrt().reshape(-1), chosen.whitened(f, targets).reshape(-1)
    elif isinstance(root, Elementwise):
        scale = root.values.reshape(-1).clamp_min(SMALLEST)
        innovation = -chosen.gradient(f, targets).reshape(-1) / scale
    else:
        columns = [_separate(root.part(0, root.columns)), -chosen.gradient(f, targets)[None]]
        pulled = pull(torch.cat(columns))
        return Observation(tree([x[:-1] for x in pulled]), None, tree([x[-1] for x in pulled]), *known)
    rows = pull(torch.diag(scale).reshape(-1, *f.shape))
    force = None if chosen.has_noise_scale else tree(combine(innovation, rows))
    return Observation(tree(rows), innovation, force, *known)


def _separate(factors: Tensor) -> Tensor:
    """Columns ``[K, B, *event]`` as cotangents of one datum each, ``[K B, B, *event]``."""
    k, b = factors.shape[:2]
    flat = torch.diag_embed(factors.reshape(k, b, -1).mT)  # [K, E, B, B]
    return flat.movedim(1, -1).reshape(k * b, *factors.shape[1:])


def information(context: LinkContext, who: str) -> Observation:
    """Take the increment of an update, its keyword ``curvature``, apart: rows and force leaf by leaf.

    An increment is an :class:`Observation` or a precision that has rows. Beside a precision the keyword
    ``loss``, if there is one, is the mean negative log-likelihood of the batch.

    Args:
        context: of the filter in this update.
        who: the filter, for the errors.

    Raises:
        ValueError: no increment, one over other parameters, or an indefinite one.
        TypeError: a structure without rows.
    """
    increment, loss = context.extra.get("curvature"), context.extra.get("loss")
    if isinstance(increment, Observation):
        force = None if increment.force is None else upcast(optree.tree_leaves(increment.force))
        return increment._replace(rows=_require_over(increment.rows, context, who), force=force)
    if isinstance(increment, Precision):
        try:
            rows = increment.as_rows()
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{who}: {error}. A filter needs all rows of the batch: curvature of structure='root' (or 'dense'), or "
                "bc.ekf.observe. With a diagonal in their place the mean diverges where features are correlated. Where the "
                "rows do not fit, take smaller batches, or bc.vi.von, whose lr bounds the step"
            ) from None
        log_likelihood = None if loss is None else -loss.to(torch.float64) * increment.count
        return Observation(_require_over(rows, context, who), None, None, increment.count, log_likelihood)
    came = "no curvature" if increment is None else f"curvature of class {type(increment).__name__}"
    raise ValueError(
        f"{who}: update got {came}: pass curvature=estimate(params, batch) with an estimator of bc.curvature "
        "(structure='root'), or bc.ekf.observe (make_step does, given curvature=)"
    )


def _require_over(rows: Tree, context: LinkContext, who: str) -> list[Tensor]:
    """The leaves of a tree of rows over the parameters."""
    mine, shapes = upcast(optree.tree_leaves(rows)), [leaf.shape for leaf in context.params]
    if [row.shape[1:] for row in mine] != shapes:
        raise ValueError(
            f"{who}: the increment is over {dict(zip(paths(rows), [tuple(row.shape[1:]) for row in mine]))}, the parameters "
            f"have the shapes {[tuple(shape) for shape in shapes]}: estimate the curvature of these parameters"
        )
    return mine


def weighed(known: Observation, g: list, leaves: list[Tensor], lr: float | Tensor) -> Observation:
    """The batch times lr: its rows and innovations times lr^1/2, its force ``-lr B g`` unless it brought one.

    A leaf without a gradient is fixed, and its rows and its force are zero.
    """

    def of_moving(xs: list[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(x) if slope is None else x for x, slope in zip(xs, g)]

    force = known.force and of_moving(known.force)
    if known.innovation is None and force is None:
        force = [torch.zeros_like(p) if x is None else -times(x, known.seen) for x, p in zip(g, leaves)]
    root = lr.sqrt() if isinstance(lr, Tensor) else math.sqrt(lr)
    return known._replace(
        rows=[times(row, root) for row in of_moving(known.rows)],
        innovation=None if known.innovation is None else times(known.innovation, root),
        force=None if force is None else [times(x, lr) for x in force],
        log_likelihood=None if known.log_likelihood is None else known.log_likelihood * lr,
    )


class FilterState(NamedTuple):
    """What a filter remembers.

    Attributes:
        precision: the information Lambda over the tuple of leaves, in float32 at least: of the dense filter its Cholesky
            factor, of the others a diagonal and the rows W^T, of which the diagonal filter has none. Its ``count`` is the
            number of data so far, 0-d, float64.
        updates: the number of updates so far, 0-d, int64.
        log_evidence: of the scored data, in nats, 0-d, float64.
        scored: the number of data whose likelihood was known, 0-d, float64.
    """

    precision: Any
    updates: Tensor
    log_evidence: Tensor
    scored: Tensor


Conditioned = tuple[list[Tensor], Any, Tensor, Tensor]


@dataclass(frozen=True)
class Filter(Alone, Link, ABC):
    """A link that holds the information in some structure. Leaves are the parameters that are present."""

    state = FilterState

    lr: Number = 1.0
    prior: Gaussian | None = field(default=None, hash=False, compare=False)
    prior_precision: Any = field(default=1.0, hash=False, compare=False)
    transition_noise: Any = field(default=0.0, hash=False, compare=False)
    forgetting: float | Tensor = 1.0
    traits = Traits(
        on_shards="refused",
        refusal_hint=" (bc.vi.mean_field and bc.vi.ivon take them)",
        needs_params=True,
        checks_gradients=True,
        all_leaves=True,
        response=Refused("a filter carries its own noise; give it as transition_noise="),
        extra_kwargs=frozenset({"curvature", "loss", "lr", "transition_noise"}),
        required_kwargs=frozenset({"curvature"}),
    )
    instead = "the likelihood's weight is lr=, and a prior is prior_precision= or prior="

    def __post_init__(self) -> None:
        if self.prior is not None and not self._is_default("prior_precision", 1.0):
            raise ValueError(f"{self.name}: prior has a precision of its own: leave prior_precision out")

    @abstractmethod
    def start(self, prior: Precision, leaves: list[Tensor]) -> Any:
        """The information of a prior, in tensors of its own.

        Raises:
            ValueError: a prior that this structure cannot hold.
        """

    @abstractmethod
    def walk(self, before: Any, noise: list[Tensor], leaves: list[Tensor]) -> Any:
        """The information after a random walk of the parameters, whose variances are like the leaves."""

    @abstractmethod
    def condition(self, before: Any, batch: Observation, leaves: list[Tensor]) -> Conditioned:
        """What a weighed batch makes of the predicted information.

        Returns:
            The mean's moves, like the leaves; the information after the update; the growth ``log |Lambda'| / |Lambda|``, 0-d;
            the misfit q of the module's docstring, 0-d.
        """

    def only(self, old: Any, new: Any, moves: list[bool]) -> Any:
        """The new information, in which leaves that do not move keep the old one, where leaves are independent."""
        return new

    def precision(self, state: FilterState, params: Any) -> Any:
        """Lambda over the tree of params."""
        structure = optree.tree_structure(params)
        return state.precision._make(structure.unflatten(x) if isinstance(x, tuple) else x for x in state.precision)

    def init(self, leaves: list, context: LinkContext) -> Any:
        params = context.tree(leaves)
        checks.samplable(leaves, context.paths)
        checks.with_values("ekf", "params", leaves, context.paths)
        none, zero = (torch.zeros((), dtype=kind, device=leaves[0].device) for kind in (torch.int64, torch.float64))
        if not is_schedule(self.transition_noise):
            self._noise(self.transition_noise, none, params)
        first = self.start(self._prior(leaves, context), leaves)._replace(count=zero)
        return FilterState(first, none, zero.clone(), zero.clone())

    def _prior(self, leaves: list[Tensor], context: LinkContext) -> Precision:
        """The precision to start from."""
        if self.prior is not None:
            mean = over_prior(self.prior, leaves, context)
            require_values(mean, self.prior.mean, f"{self.name}: params", "prior.mean")
            return self.prior.precision
        values = self._numbers(self.prior_precision, context.tree(leaves), "prior_precision")
        return Diagonal(values, torch.zeros((), dtype=torch.float64, device=values[0].device))

    def _noise(self, value: Any, updates: Tensor, params: Any) -> list[Tensor] | None:
        """Variances of the random walk before update number ``updates``, like the leaves of ``params``."""
        value = value(updates) if is_schedule(value) else value
        if is_number(value) and value == 0:
            return None
        return self._numbers(value, params, "transition_noise", zero=True)

    def _numbers(self, value: Any, params: Any, what: str, zero: bool = False) -> list[Tensor]:
        """Finite numbers above 0, or ``zero``, like the leaves of ``params``."""
        given = spread(value, params, f"{self.name}: {what}")
        out = [v.expand(p.shape) for v, p in zip(given, optree.tree_leaves(params))]
        require_numbers(out, params, f"{self.name}: {what}", zero=zero)
        return out

    def update(self, g: list, state: Any, op: TensorOps, context: LinkContext) -> tuple[list, Any]:
        leaves, moving = upcast(context.params), [x is not None for x in g]
        lr = self._lr(context.extra.get("lr", self.lr), state.updates)
        noise = context.extra.get("transition_noise", self.transition_noise)
        noise = self._noise(noise, state.updates, context.tree(leaves))
        known = state.precision
        predicted = known if self._is_default("forgetting", 1.0) else known.scale(self.forgetting)
        predicted = predicted if noise is None else self.walk(predicted, noise, leaves)
        batch = weighed(information(context, self.name), upcast(g), leaves, lr)
        moves, new, growth, misfit = self.condition(predicted, batch, leaves)
        gained, scored = evidence(batch, growth, misfit)
        new = self.only(known, new, moving)._replace(count=known.count + batch.seen)
        state = FilterState(new, state.updates + 1, state.log_evidence + gained, state.scored + scored)
        return [move.to(p.dtype) if m else None for move, p, m in zip(moves, context.params, moving)], state

    def _lr(self, value: Number, updates: Tensor) -> float | Tensor:
        """The learning rate now."""
        lr: Any = value(updates) if is_schedule(value) else value
        if is_schedule(self.lr) or value is not self.lr:
            checks.number("[0, inf)", tensor=True)(f"{self.name}: lr", lr)
        return lr

    def _is_default(self, name: str, default: float) -> bool:
        value = getattr(self, name)
        return isinstance(value, (int, float)) and value == default


def evidence(batch: Observation, growth: Tensor, misfit: Tensor) -> tuple[float | Tensor, float | Tensor]:
    """What a batch adds to the log evidence, and how many data are scored by that."""
    if batch.log_likelihood is None:
        return 0.0, 0.0
    gained = batch.log_likelihood - 0.5 * (growth + misfit).to(torch.float64)
    if batch.force is None and batch.innovation is not None:
        gained = gained + 0.5 * batch.innovation.to(torch.float64).square().sum()
    return gained, batch.seen


@dataclass(frozen=True)
class DenseFilter(Filter):
    name = "ekf.dense"

    def start(self, prior: Precision, leaves: list[Tensor]) -> Cholesky:
        dtype = common_dtype(leaves)
        require_dense_fits(size(leaves), dtype, leaves[0].device)
        if isinstance(prior, Diagonal):
            root = torch.diag(flatten(optree.tree_leaves(prior.values), leaves).to(dtype).sqrt())
        else:
            known = prior.factorised()
            root = known.factor if isinstance(known, Cholesky) else torch.linalg.cholesky(known.to_dense())
        like = tuple(torch.zeros_like(p).detach() for p in leaves)  # tensors of a state share no memory
        return Cholesky(root.detach().to(dtype).clone(), like, prior.count)

    def walk(self, before: Cholesky, noise: list[Tensor], leaves: list[Tensor]) -> Cholesky:
        root, parameters = before.factor.mT, len(before.factor)
        walked = root * flatten(noise, leaves).to(root.dtype).sqrt()
        first = torch.eye(parameters, 2 * parameters, dtype=root.dtype, device=root.device)
        stacked = torch.cat([first, torch.cat([walked, root], dim=1)])
        return before._replace(factor=_triangle(stacked)[parameters:, parameters:].mT)

    def condition(self, before: Cholesky, batch: Observation, leaves: list[Tensor]) -> Conditioned:
        root = before.factor.mT
        parameters = root.shape[-1]
        rows = flatten(batch.rows, leaves).to(root.dtype)
        if batch.innovation is None:
            upper = _triangle(torch.cat([root, rows]))
            force = flatten(batch.force, leaves).to(root.dtype)
            solved = torch.linalg.solve_triangular(upper.mT, force[:, None], upper=False)
            misfit = -solved.square().sum()
        else:
            beside = torch.cat([root.new_zeros(parameters), batch.innovation.to(root.dtype)])[:, None]
            triangle = _triangle(torch.cat([torch.cat([root, rows]), beside], dim=1))
            upper, solved = triangle[:parameters, :parameters], triangle[:parameters, parameters:]
            left = triangle[parameters, parameters].square()
            misfit = left if batch.force is None else -solved.square().sum()
        moves = torch.linalg.solve_triangular(upper, solved, upper=True)[:, 0]
        growth = 2 * (upper.diagonal() / root.diagonal()).log().sum()
        after = before._replace(factor=upper.mT.clone(memory_format=torch.contiguous_format))
        return unflatten(moves, leaves), after, growth, misfit


def _triangle(stacked: Tensor) -> Tensor:
    """The triangular factor of rows, its diagonal not negative."""
    return signed(torch.linalg.qr(stacked, mode="r").R)


def solve_with_rows(
    diagonal: list[Tensor], rows: list[Tensor], force: list[Tensor], dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor, Tensor]:
    """``(D + r^T r)^-1 f = D^-1 (f - r^T (I + r D^-1 r^T)^-1 r D^-1 f)``, and growth and q as :func:`gain` has them for the
    innovations ``r D^-1 f``.

    By default in float64, for where the rows outweigh D by a factor s the difference loses s units of the last place.
    """
    d, r, f = ([x.to(dtype) for x in leaves] for leaves in (diagonal, rows, force))
    alone = [x / y for x, y in zip(f, d)]
    moves, growth, misfit = gain(d, r, project(r, alone))
    return [(x - move).to(like.dtype) for x, move, like in zip(alone, moves, force)], growth, misfit


def gain(diagonal: list[Tensor], rows: list[Tensor], innovation: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """``D^-1 r^T (I + r D^-1 r^T)^-1 e``, the Kalman gain of whitened innovations, the determinant's growth, and q."""
    roots = [d.sqrt() for d in diagonal]
    white = [row / root for row, root in zip(rows, roots)]
    lower = _capacity_root(white)
    e = innovation.to(lower.dtype)
    along = torch.cholesky_solve(e[:, None], lower)[:, 0]
    moves = [move / root for move, root in zip(combine(along, white), roots)]
    return moves, 2 * lower.diagonal().log().sum(), e @ along


def _capacity_root(white: list[Tensor]) -> Tensor:
    """The lower root of ``I + w w^T`` of whitened rows, which is never singular."""
    dtype = common_dtype(white)
    capacity = gram([w.to(dtype) for w in white])
    capacity.diagonal().add_(1)
    return torch.linalg.cholesky_ex(capacity).L


@dataclass(frozen=True)
class LowRankFilter(Filter):
    """A diagonal and as many directions as the rank; the diagonal filter is that of rank 0."""

    rank: int = 0

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "ekf.low_rank" if self.rank else "ekf.diagonal"

    def start(self, prior: Precision, leaves: list[Tensor]) -> LowRank:
        if self.rank > size(leaves):
            raise ValueError(f"{self.name}: rank={self.rank} is above the number of parameters, {size(leaves)}")
        rows = [p.new_zeros((self.rank, *p.shape), dtype=wide(p.dtype)) for p in leaves]
        if isinstance(prior, Woodbury):
            prior = prior.unfactorised()
        if isinstance(prior, Diagonal):
            diagonal = prior.values
        elif isinstance(prior, LowRank) and len(optree.tree_leaves(prior.rows)[0]) <= self.rank:
            diagonal, given = prior.diagonal, [x.detach() for x in optree.tree_leaves(prior.rows)]
            rows = [torch.cat([x.to(z.dtype), z[len(x) :]]) for x, z in zip(given, rows)]
        else:
            raise ValueError(
                f"{self.name}: it holds a diagonal and {self.rank} directions, the prior is {type(prior).__name__}: pass a "
                "Gaussian with a diagonal or low-rank precision of no more directions, or use bc.ekf.dense"
            )
        values = [v.detach().to(z.dtype, copy=True) for v, z in zip(optree.tree_leaves(diagonal), rows)]
        return LowRank(tuple(values), tuple(rows), prior.count)

    def walk(self, before: LowRank, noise: list[Tensor], leaves: list[Tensor]) -> LowRank:
        """``((diag(y) + W W^T)^-1 + diag(q))^-1``."""
        rows, shrinkage = before.rows, [1 / (1 + q * y) for q, y in zip(noise, before.diagonal)]
        if self.rank:
            capacity = project(rows, [row * (q * s) for row, q, s in zip(rows, noise, shrinkage)])
            capacity.diagonal().add_(1)
            lower = torch.linalg.cholesky_ex(capacity).L
            flat = [(row * s).reshape(self.rank, -1) for row, s in zip(rows, shrinkage)]
            flat = [torch.linalg.solve_triangular(lower.to(row.dtype), row, upper=False) for row in flat]
            rows = tuple(new.reshape(row.shape) for new, row in zip(flat, rows))
        return before._replace(diagonal=tuple(y * s for y, s in zip(before.diagonal, shrinkage)), rows=rows)

    def condition(self, before: LowRank, batch: Observation, leaves: list[Tensor]) -> Conditioned:
        diagonal, rows, e = list(before.diagonal), batch.rows, batch.innovation
        if self.rank:  # the directions are rows that observed what the mean says
            rows = [torch.cat([a, b]) for a, b in zip(before.rows, rows)]
            e = None if e is None else torch.cat([e.new_zeros(self.rank), e])
        if e is None:
            assert batch.force is not None
            dtype = (
                common_dtype(rows) if self.rank else torch.float64
            )  # a diagonal has nothing of the past's directions
            moves, growth, misfit = solve_with_rows(diagonal, rows, batch.force, dtype)
        else:
            moves, growth, misfit = gain(diagonal, rows, e)
        misfit = misfit if batch.force is None else -inner(batch.force, moves, moves)
        kept, overflow = before.rows, [row.square().sum(0) for row in rows]
        if self.rank:
            known = _capacity_root([row / d.sqrt() for row, d in zip(before.rows, diagonal)])
            growth = growth - 2 * known.diagonal().log().sum()
            kept, overflow = compress(rows, self.rank)
        after = tuple(y + x for y, x in zip(diagonal, overflow))
        return moves, before._replace(diagonal=after, rows=tuple(row.clone() for row in kept)), growth, misfit

    def only(self, old: LowRank, new: LowRank, moves: list[bool]) -> LowRank:
        if self.rank:
            return new
        return new._replace(diagonal=tuple(b if m else a for a, b, m in zip(old.diagonal, new.diagonal, moves)))

    def precision(self, state: FilterState, params: Any) -> Diagonal | LowRank:
        found = super().precision(state, params)
        return found if self.rank else Diagonal(found.diagonal, found.count)


class KalmanFilter(PosteriorTransformation):
    """What the functions of :mod:`bayesopt_chain.posterior.ekf` return.

    Its methods take the state of this transformation, or of a chain that has it as a link.
    """

    @checks.takes(params=checks.PARAMS)
    def posterior(self, state: Any, params: Any) -> Gaussian:
        """The Gaussian posterior around ``params``, of the type that ``bc.laplace`` gives.

        Args:
            state: from ``init`` or ``update``.
            params: the mean, a tree of the parameters.

        Returns:
            A :class:`Gaussian` with a decomposed precision.

        Raises:
            ValueError: parameters of other shapes than the state's; NaN in the state or the parameters (named).

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> tx, params = bc.ekf.dense(prior_precision=4.0), torch.zeros(2)
            >>> tx.posterior(tx.init(params), params).marginal_variance
            tensor([0.2500, 0.2500])
        """
        mine, link = self._state(state), self._link
        require_these([v.shape for v in mine.precision.diag()], params, str(link))
        posterior = Gaussian(copied(params), link.precision(mine, params)).factorised()
        leaves = optree.tree_leaves(params)
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in leaves):
            deviations = [v.sqrt() for v in optree.tree_leaves(posterior.marginal_variance)]
            warn_of_rounding(f"a deviation of {link}", paths_of(params), leaves, deviations)
        return posterior

    def log_evidence(self, state: Any) -> Tensor:
        """The log marginal likelihood of all data so far, in nats, accumulated batch by batch.

        Exact where the model is linear and Gaussian, for every structure that can hold the posterior; elsewhere that of the
        linearised model. With a Fisher increment (an estimator of ``bc.curvature``) it is as normalised as the loss; with
        lr other than 1 it is of the likelihood to the power lr.

        Args:
            state: from ``init`` or ``update``, or stacked ones.

        Returns:
            0-d, float64; ``[n]`` for n stacked states.

        Raises:
            ValueError: the log-likelihood of some batches is unknown.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> tx, params = bc.ekf.dense(prior_precision=1.0), torch.zeros(1)
            >>> step = bc.make_step(None, tx, curvature=bc.ekf.observe(lambda params, batch: batch[0] @ params))
            >>> params, state, _ = step(params, tx.init(params), (torch.ones(1, 1), torch.tensor([2.0])))
            >>> tx.log_evidence(state), torch.distributions.Normal(0.0, 2**0.5).log_prob(torch.tensor(2.0))
            (tensor(-2.2655, dtype=torch.float64), tensor(-2.2655))
        """
        mine = self._state(state)
        seen = mine.precision.count
        unknown = seen - mine.scored
        if is_readable(unknown) and bool((unknown != 0).any()):
            raise ValueError(
                f"{self._link.name}: the log-likelihood of {int(unknown.sum())} of {int(seen.sum())} data is unknown: "
                "pass loss= to update beside curvature= (make_step does), or use bc.ekf.observe"
            )
        return mine.log_evidence


@checks.factory_takes(lr=WEIGHT, prior=PRIOR)
def dense(
    lr: Number = 1.0,
    *,
    prior: Gaussian | None = None,
    prior_precision: Any = 1.0,
    transition_noise: Any = 0.0,
    forgetting: float | Tensor = 1.0,
) -> KalmanFilter:
    """The extended Kalman filter with every correlation, as a square root of the information.

    Its loss is the mean negative log-likelihood alone, which it multiplies by the datum count: the prior is ``prior``, or
    ``prior_precision`` about the first parameters. Each update takes the batch's ``curvature=``: what :func:`observe` makes of
    a model (the gradient is then not read, and ``make_step(None, tx, curvature=...)`` takes none), or an estimator's increment
    with ``structure="root"`` ("dense" is taken apart into rows by an eigendecomposition, which loses digits). Parameters
    without a gradient stay, and the batch says nothing of them.

    The state is a value: ``update`` returns a new one and leaves the one it was given as it was. ``inplace=True``, TorchOpt's
    default, concerns the gradients' buffers alone.

    Args:
        lr: weight of the log-likelihood; 1 is Bayes' rule, 0.5 counts every datum half. A number, a 0-d tensor read at every
            update, a schedule of the update count, or ``lr=`` of ``update``, which goes before.
        prior: a :class:`Gaussian` about the first parameters, such as the posterior of another method; instead of
            ``prior_precision``. ``init`` is given its mean.
        prior_precision: of the parameters at the start: a positive number or a tree that broadcasts to them.
        transition_noise: variance of the parameters' random walk before each update, in the parameters' units squared: a
            number or a tree that broadcasts, with zeros where a parameter stands still. Tensors are read at every update; a
            schedule of the update count, and ``transition_noise=`` of ``update``, give either.
        forgetting: in (0, 1]; the information is multiplied by it before each update.

    Returns:
        A transformation with ``posterior`` and ``log_evidence``. ``update`` needs ``params=`` and
        ``curvature=`` and costs ``O((P + M) P^2)`` for M rows; its state holds ``P^2`` numbers.

    Raises:
        ValueError: numbers out of range; at ``init``, a negative noise, or parameters that are not the
            prior's mean; at ``update``, no curvature, or that of other parameters.
        TypeError: at ``update``, curvature of a structure that is not made of rows (diagonal, low-rank, Kronecker):
            with a diagonal in their place the mean diverges where features are correlated.
        MemoryError: at ``init``, where ``P^2`` does not fit.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.ekf.dense(prior_precision=1.0)
        >>> step = bc.make_step(None, tx, curvature=bc.ekf.observe(lambda params, batch: batch[0] @ params, 1.0))
        >>> params = torch.zeros(1)
        >>> params, state, info = step(params, tx.init(params), (torch.ones(3, 1), torch.full((3,), 4.0)))
        >>> params, tx.posterior(state, params).marginal_variance
        (tensor([3.0000]), tensor([0.2500]))
    """
    link = DenseFilter(
        lr,
        prior=prior,
        prior_precision=prior_precision,
        transition_noise=transition_noise,
        forgetting=forgetting,
    )
    return KalmanFilter((link,))


@checks.factory_takes(lr=WEIGHT, prior=PRIOR)
def diagonal(
    lr: Number = 1.0,
    *,
    prior: Gaussian | None = None,
    prior_precision: Any = 1.0,
    transition_noise: Any = 0.0,
    forgetting: float | Tensor = 1.0,
) -> KalmanFilter:
    """The extended Kalman filter that keeps the diagonal of the information.

    Its mean moves by the exact gain of the diagonal prior, from the same curvature as :func:`dense` takes; between batches the
    correlations are forgotten. Its state holds one tensor for each parameter, an update costs ``O(M^2 P)`` for M rows.

    Args:
        lr, forgetting: as in :func:`dense`.
        prior_precision, transition_noise: as in :func:`dense`, in the parameters' units.
        prior: as in :func:`dense`, with a diagonal precision.

    Returns:
        A transformation like that of :func:`dense`.

    Raises:
        ValueError, TypeError: as :func:`dense`.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> from bayesopt_chain.precision import Root
        >>> tx, params = bc.ekf.diagonal(prior_precision=1.0), torch.zeros(2)
        >>> increment = Root(torch.tensor([[1.0, 1.0]]), torch.tensor(1.0))  # one datum, both features 1
        >>> updates, state = tx.update(torch.tensor([-3.0, -3.0]), tx.init(params), params=params, curvature=increment)
        >>> updates, tx.posterior(state, params).marginal_variance
        (tensor([1., 1.]), tensor([0.5000, 0.5000]))
    """
    link = LowRankFilter(
        lr,
        prior=prior,
        prior_precision=prior_precision,
        transition_noise=transition_noise,
        forgetting=forgetting,
    )
    return KalmanFilter((link,))


@checks.factory_takes(
    lr=WEIGHT,
    prior=PRIOR,
    rank=checks.number(f"[1, {checks.LARGEST}]", integer=True, hint="rank 0 is ekf.diagonal"),
)
def low_rank(
    lr: Number = 1.0,
    *,
    rank: int = 10,
    prior: Gaussian | None = None,
    prior_precision: Any = 1.0,
    transition_noise: Any = 0.0,
    forgetting: float | Tensor = 1.0,
) -> KalmanFilter:
    """The low-rank extended Kalman filter LO-FI: information of a diagonal and ``rank`` directions (Chang,
    Duran-Martin, Shestopaloff, Jones and Murphy, 2023).

    Exact as long as the information has no more directions than ``rank``. Its state holds ``rank + 1`` tensors for each
    parameter, an update costs ``O((rank + M)^2 P)``. Curvature as for :func:`dense`.

    Args:
        lr, forgetting: as in :func:`dense`.
        prior_precision, transition_noise: as in :func:`dense`, in the parameters' units.
        rank: at least 1 and at most the number of parameters.
        prior: as in :func:`dense`, with a diagonal or low-rank precision.

    Returns:
        A transformation like that of :func:`dense`.

    Raises:
        ValueError, TypeError: as :func:`dense`; a rank out of range.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.ekf.low_rank(rank=1), {"w": torch.zeros(2, 2)}
        >>> observation = bc.ekf.observe(lambda p, batch: (batch[0] @ p["w"]).sum(1))(params, (torch.ones(1, 2), torch.ones(1)))
        >>> updates, state = tx.update(params, tx.init(params), params=params, curvature=observation)
        >>> updates["w"]
        tensor([[0.2000, 0.2000],
                [0.2000, 0.2000]])
    """
    link = LowRankFilter(
        lr,
        rank=rank,
        prior=prior,
        prior_precision=prior_precision,
        transition_noise=transition_noise,
        forgetting=forgetting,
    )
    return KalmanFilter((link,))
