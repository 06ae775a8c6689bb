r"""The extended Kalman filter as a gradient transformation: every batch is an observation, the update moves the mean.

The batch's log-likelihood, weighed by lr, is linearised at the mean; its rows and the gradient condition the Gaussian that the
state remembers (see :mod:`bayesopt_chain.posterior.ekf._structures` for the equations). On linear Gaussian models the dense
filter is exact: one pass at lr = 1 is then the Bayesian posterior, whatever the batches. The extended filter: Jazwinski (1970);
as natural gradient: Ollivier (2018).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import TensorOps
from bayesopt_chain.matching.response import Refused, Response
from bayesopt_chain.posterior.draw import warn_of_rounding
from bayesopt_chain.posterior.ekf._structures import (
    DenseRoot,
    LowRankInformation,
    Observation,
    Structure,
    Tally,
    information,
    of_moving,
    weighed,
)
from bayesopt_chain.posterior.gaussian import (
    Alone,
    Gaussian,
    PosteriorTransformation,
    require_numbers,
    require_these,
    require_values,
)
from bayesopt_chain.precision import Diagonal, Precision
from bayesopt_chain.schedules import is_number, is_schedule
from bayesopt_chain.tracing import is_readable
from bayesopt_chain.trees import copied, paths_of, spread, upcast

Number = float | Tensor | Callable[[Tensor], Any]
WEIGHT = checks.number("(0, inf)", tensor=True, schedule=True)  # of the log-likelihood; at 0 the data would say nothing

PRIOR = checks.POSTERIOR.or_none()


@dataclass(frozen=True)
class Filter(Alone, Link):
    """The link behind the filters."""

    structure: Structure
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
    )
    instead = "the likelihood's weight is lr=, and a prior is prior_precision= or prior="

    def __post_init__(self) -> None:
        if self.prior is not None and not self._is_default("prior_precision", 1.0):
            raise ValueError(f"{self.name}: prior has a precision of its own: leave prior_precision out")

    @property
    def response(self) -> Response:
        return Refused("a filter carries its own noise; give it as transition_noise=")

    @property
    def extra_kwargs(self) -> frozenset[str]:
        return frozenset({"curvature", "loss", "lr", "transition_noise"})

    @property
    def required_kwargs(self) -> frozenset[str]:
        return frozenset({"curvature"})

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.structure.name

    @property
    def state(self) -> type:
        return self.structure.state

    def init(self, leaves: list, context: LinkContext) -> Any:
        params = context.tree(leaves)
        checks.samplable(leaves, context.paths)
        checks.with_values("ekf", "params", leaves, context.paths)
        device = leaves[0].device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        count = torch.zeros((), dtype=torch.int64, device=device)

        if not is_schedule(self.transition_noise):
            self._noise(self.transition_noise, count, params)
        return self.structure.start(self._prior(params), upcast(leaves), Tally(zero, count, zero.clone(), zero.clone()))

    def _prior(self, params: Any) -> Precision:
        """The precision to start from."""
        if self.prior is not None:
            require_values(params, self.prior.mean, f"{self.name}: params", "prior.mean")
            return self.prior.precision
        values = self._numbers(self.prior_precision, params, "prior_precision")
        tree = optree.tree_unflatten(optree.tree_structure(params), values)
        return Diagonal(tree, torch.zeros((), dtype=torch.float64, device=values[0].device))

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
        params = context.tree(leaves)
        lr = self._lr(context.extra.get("lr", self.lr), state.tally.updates)
        noise = context.extra.get("transition_noise", self.transition_noise)
        noise = self._noise(noise, state.tally.updates, params)
        predicted = state if self._is_default("forgetting", 1.0) else self.structure.forget(state, self.forgetting)
        predicted = predicted if noise is None else self.structure.walk(predicted, noise, leaves)
        known = information(context, self.name)
        batch = weighed(known if all(moving) else of_moving(known, moving), upcast(g), leaves, lr)
        moves, new, growth, misfit = self.structure.update(predicted, batch, leaves)
        gained, scored = evidence(batch, growth, misfit)
        seen, updates, log_evidence, known_of = state.tally
        tally = Tally(seen + batch.seen, updates + 1, log_evidence + gained, known_of + scored)
        new = self.structure.only(state, new, moving)._replace(tally=tally)
        return [move.to(p.dtype) if m else None for move, p, m in zip(moves, context.params, moving)], new

    def _lr(self, value: Number, updates: Tensor) -> float | Tensor:
        """The learning rate now."""
        lr: Any = value(updates) if is_schedule(value) else value
        if is_schedule(self.lr) or value is not self.lr:
            checks.number("[0, inf)", tensor=True)(f"{self.name}: lr", lr)
        return lr

    def __str__(self) -> str:
        words = [f"lr={checks.show(self.lr)}"]
        words += [] if self.prior is None else ["prior=..."]
        words += [] if self._is_default("transition_noise", 0.0) else ["transition_noise=..."]
        words += [] if self._is_default("forgetting", 1.0) else [f"forgetting={self.forgetting}"]
        return f"{self.name}({', '.join(words)})"

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
        mine, structure = self._state(state), self._link.structure
        require_these(structure.shapes(mine), params, str(self._link))
        posterior = Gaussian(copied(params), structure.precision(mine, params)).factorised()
        leaves = optree.tree_leaves(params)
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in leaves):
            deviations = [v.sqrt() for v in optree.tree_leaves(posterior.marginal_variance)]
            warn_of_rounding(f"a deviation of {self._link}", paths_of(params), leaves, deviations)
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
        mine = self._state(state).tally
        unknown = mine.seen - mine.scored
        if is_readable(unknown) and bool((unknown != 0).any()):
            raise ValueError(
                f"{self._link.name}: the log-likelihood of {int(unknown.sum())} of {int(mine.seen.sum())} data is unknown: "
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
    link = Filter(
        DenseRoot(),
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
    link = Filter(
        LowRankInformation(0),
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
    link = Filter(
        LowRankInformation(rank),
        lr,
        prior=prior,
        prior_precision=prior_precision,
        transition_noise=transition_noise,
        forgetting=forgetting,
    )
    return KalmanFilter((link,))
