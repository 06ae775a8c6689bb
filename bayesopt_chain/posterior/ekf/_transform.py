r"""The extended Kalman filter as a gradient transformation: every batch is an observation, the update moves the mean.

The batch's log-likelihood, weighed by lr, is linearised at the mean; its rows and the gradient condition the Gaussian that the
state remembers (see :mod:`bayesopt_chain.posterior.ekf._structures` for the equations). On linear Gaussian models the dense
filter is exact: one pass at lr = 1 is then the Bayesian posterior, whatever the batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.arguments import checked
from bayesopt_chain.core.link import At, Link
from bayesopt_chain.core.op import Op
from bayesopt_chain.core.response import Refused, Response
from bayesopt_chain.posterior.ekf._information import Information, information, of_moving
from bayesopt_chain.posterior.ekf._structures import (
    DenseRoot,
    DiagonalInformation,
    LowRankInformation,
    Structure,
    Weighed,
)
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.state import PosteriorTransformation, require_these, times
from bayesopt_chain.tracing import is_hidden
from bayesopt_chain.trees import paths, spread


@dataclass(frozen=True)
class Filter(Link):
    """The link behind the filters."""

    exacting = True

    structure: Structure
    lr: Any
    prior_precision: Any = field(hash=False, compare=False)
    transition_noise: Any = field(hash=False, compare=False)
    forgetting: Any
    whole = True
    needs_params = True

    @property
    def response(self) -> Response:
        return Refused("a filter carries its own noise; give it as transition_noise=")

    @property
    def accepts(self) -> frozenset[str]:
        return frozenset({"curvature"})

    @property
    def needs(self) -> frozenset[str]:
        return self.accepts

    @property
    def name(self) -> str:
        return self.structure.name

    @property
    def state(self) -> type:
        return self.structure.state

    def init(self, leaves: list, at: At) -> Any:
        params = at.tree(leaves)
        checks.parameters(leaves, optree.tree_paths(params))
        prior = self._tree("prior_precision", self.prior_precision, params)
        self._noise(params)
        return self.structure.start(prior, leaves, torch.zeros((), dtype=torch.float64, device=leaves[0].device))

    def update(self, g: list, state: Any, op: Op, at: At) -> tuple[list, Any]:
        leaves = at.params
        known = information(at.extra.get("curvature"), leaves, self.name)
        moving = [x is not None for x in g]
        batch = weighed(known if all(moving) else of_moving(known, moving), g, leaves, self.lr)
        moves, new = self.structure.step(state, batch, self._noise(at.tree(leaves)), self.forgetting, leaves)
        return [move if m else None for move, m in zip(moves, moving)], self.structure.only(state, new, moving)

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

    def __str__(self) -> str:
        words = [f"lr={checks.show(self.lr)}"]
        words += [] if self._is_default("transition_noise", 0.0) else ["transition_noise=..."]
        words += [] if self._is_default("forgetting", 1.0) else [f"forgetting={self.forgetting}"]
        return f"{self.name}({', '.join(words)})"

    def _is_default(self, name: str, default: float) -> bool:
        value = getattr(self, name)
        return isinstance(value, (int, float)) and value == default


def weighed(known: Information, g: list, leaves: list[Tensor], lr: float | Tensor) -> Weighed:
    """What a batch weighs: its rows and innovations times lr^1/2, its force ``-lr B g``."""
    root = lr.sqrt() if torch.is_tensor(lr) else math.sqrt(lr)
    force = [torch.zeros_like(p) if x is None else -times(x, lr * known.count) for x, p in zip(g, leaves)]
    return Weighed(
        [times(row, root) for row in known.rows],
        None if known.innovation is None else times(known.innovation, root),
        force,
        known.count,
    )


class KalmanFilter(PosteriorTransformation):
    """What the functions of :mod:`bayesopt_chain.posterior.ekf` return: a chain with a question for its state."""

    def posterior(self, state: Any, params: Any) -> Gaussian:
        """The Gaussian posterior around ``params``, of the type that ``bc.laplace`` gives.

        Args:
            state: of this transformation, or of a chain that has it as a link.
            params: the mean, a tree of the parameters.

        Returns:
            A :class:`Gaussian` with a decomposed precision.

        Raises:
            ValueError: parameters of other shapes than the state's; NaN in the state or the parameters (named).
        """
        mine, structure = self._state(state), self._link.structure
        require_these(structure.shapes(mine), params, str(self._link))
        mean = optree.tree_map(torch.Tensor.detach, params)
        return Gaussian(mean, structure.precision(mine, params)).factorised()


@checked
def dense(
    lr: float | Tensor = 1.0,
    *,
    prior_precision: Any = 1.0,
    transition_noise: Any = 0.0,
    forgetting: float | Tensor = 1.0,
) -> KalmanFilter:
    """The extended Kalman filter with every correlation, as a square root of the information.

    Its loss is the mean negative log-likelihood alone, which it multiplies by the datum count: the prior is
    ``prior_precision`` about the first parameters. Each update takes the batch's ``curvature=``: an estimator's increment
    with ``structure="root"`` ("dense" is taken apart into rows by an eigendecomposition, which loses digits), or an
    :class:`Observation` from :func:`observe`, where the gradient is not read. Parameters without a gradient stay, and the
    batch says nothing of them.

    The state is a value: ``update`` returns a new one and leaves the one it was given as it was. ``inplace=True``, TorchOpt's
    default, concerns the gradients' buffers alone.

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
        TypeError: at ``update``, curvature of a structure that is not made of rows (diagonal, low-rank, Kronecker, block):
            with a diagonal in their place the mean diverges where features are correlated.
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
    return _filter(DenseRoot(), lr, prior_precision, transition_noise, forgetting)


@checked
def diagonal(
    lr: float | Tensor = 1.0,
    *,
    prior_precision: Any = 1.0,
    transition_noise: Any = 0.0,
    forgetting: float | Tensor = 1.0,
) -> KalmanFilter:
    """The extended Kalman filter that keeps the diagonal of the information.

    Its mean moves by the exact gain of the diagonal prior, from the same curvature as :func:`dense` takes; between batches the
    correlations are forgotten. Its state holds one tensor for each parameter, an update costs ``O(M^2 P)`` for M rows.
    Arguments, results and errors: :func:`dense`.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> from bayesopt_chain.precision import Root
        >>> tx, params = bc.ekf.diagonal(prior_precision=1.0), torch.zeros(2)
        >>> increment = Root(torch.tensor([[1.0, 1.0]]), torch.tensor(1.0))  # one datum, both features 1
        >>> updates, state = tx.update(torch.tensor([-3.0, -3.0]), tx.init(params), params=params, curvature=increment)
        >>> updates, tx.posterior(state, params).marginal_variance
        (tensor([1., 1.]), tensor([0.5000, 0.5000]))
    """
    return _filter(DiagonalInformation(), lr, prior_precision, transition_noise, forgetting)


@checked
def low_rank(
    lr: float | Tensor = 1.0,
    *,
    rank: int = 10,
    prior_precision: Any = 1.0,
    transition_noise: Any = 0.0,
    forgetting: float | Tensor = 1.0,
) -> KalmanFilter:
    """The low-rank extended Kalman filter LO-FI: information of a diagonal and ``rank`` directions (Chang,
    Duran-Martin, Shestopaloff, Jones and Murphy, 2023).

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
    return _filter(LowRankInformation(rank), lr, prior_precision, transition_noise, forgetting)


def _filter(
    structure: Structure, lr: Any, prior_precision: Any, transition_noise: Any, forgetting: Any
) -> KalmanFilter:
    checks.number(f"{structure.name}: lr", lr, "(0, inf)", tensor=True)
    return KalmanFilter((Filter(structure, lr, prior_precision, transition_noise, forgetting),))
