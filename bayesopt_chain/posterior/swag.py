r"""SWAG: the iterates of an optimizer, summarised as a Gaussian (Maddox, Garipov, Izmailov, Vetrov and Wilson, 2019).

Over the collected iterates theta_1 ... theta_n, with the running mean m_n and the last K deviations d_i = theta_i - m_i,

    m_n = m_{n-1} + (theta_n - m_{n-1}) / n
    s_n = s_{n-1} + (theta_n - m_{n-1}) (theta_n - m_n)

    theta ~ N(m_n,  1/2 diag(s_n / n) + 1/2 sum_i d_i d_i^T / (k - 1)),        k = min(n, K),

where no entry of either diagonal is below a floor (1e-30, as in the paper's code).

``s_n / n`` is the paper's mean square minus square mean, summed without their cancellation (Welford, 1962). With K = 0 the
covariance is ``diag(s_n / n)`` and the mean alone is stochastic weight averaging (Izmailov, Podoprikhin, Garipov, Vetrov and
Wilson, 2018). Several runs, their states stacked, make MultiSWAG (Wilson and Izmailov, 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.matching.response import Linear
from bayesopt_chain.posterior.gaussian import (
    Gaussian,
    PosteriorTransformation,
    device_of,
    require_finite,
    require_these,
)
from bayesopt_chain.precision import Diagonal, low_rank_covariance
from bayesopt_chain.tracing import is_hidden, is_readable
from bayesopt_chain.trees import size, wide


class SwagState(NamedTuple):
    """What :func:`swag` remembers.

    Attributes:
        mean: m, one tensor for each parameter, in float32 at least: in 16 bits a sum of hundreds takes up no more.
        squares: s, likewise.
        deviations: the last K deviations d, ``[K, *leaf.shape]`` for each parameter; the oldest is overwritten first.
        collected: how many iterates were collected, 0-d int64.
        step: how many updates there were, 0-d int64.
    """

    mean: tuple[Tensor, ...]
    squares: tuple[Tensor, ...]
    deviations: tuple[Tensor, ...]
    collected: Tensor
    step: Tensor


def collected(state: SwagState, iterate: list[Tensor], due: Tensor, rank: int) -> SwagState:
    """The state with one more iterate, where one is due.

    ``torch.where`` chooses, so that a captured step, in which no tensor can be read, needs no branch.
    """
    if is_readable(due) and not due:
        return state
    n = state.collected + due
    weight = 1 / n.clamp(min=1)
    mean = [torch.where(due, m + (x - m) * weight.to(m.dtype), m) for m, x in zip(state.mean, iterate)]
    squares = [
        torch.where(due, s + (x - a) * (x - b), s) for s, x, a, b in zip(state.squares, iterate, state.mean, mean)
    ]
    deviations = state.deviations
    if rank:
        place = (torch.arange(rank, device=n.device) == (n - 1) % rank) & due
        deviations = tuple(
            torch.where(place.reshape(-1, *[1] * x.ndim), (x - m)[None].to(d.dtype), d)
            for d, x, m in zip(state.deviations, iterate, mean)
        )
    return SwagState(tuple(mean), tuple(squares), deviations, n, state.step)


@dataclass(frozen=True)
class Collect(Link):
    """The link behind :func:`swag`."""

    rank: int
    start: int
    every: int
    variance_floor: float
    # gradients pass through
    name = "swag"
    traits = Traits(needs_params=True, checks_gradients=True, all_leaves=True, response=Linear())
    state = SwagState

    def require_around(self, before: Sequence[Link], behind: Sequence[Link]) -> None:
        for link in behind:
            if link.response != Linear():
                raise ValueError(
                    f"swag: {link.shown} stands behind it, so that what arrives here is not yet the step whose end it "
                    "collects; write swag last: bc.chain(bc.sgd(...), bc.swag(...))"
                )

    def init(self, leaves: Leaves, context: LinkContext) -> SwagState:
        checks.with_values("swag", "params", leaves, context.paths)
        if self.rank > size(leaves):
            raise ValueError(f"swag: rank={self.rank} is above the number of parameters, {size(leaves)}")
        zeros = tuple(torch.zeros_like(p, dtype=wide(p.dtype)).detach() for p in leaves)
        ring = tuple(p.new_zeros((self.rank, *p.shape)) for p in leaves)
        none = torch.zeros((), dtype=torch.int64, device=device_of(leaves))
        return SwagState(zeros, tuple(z.clone() for z in zeros), ring, none, none.clone())

    def update(self, g: Leaves, state: SwagState, op: TensorOps, context: LinkContext) -> tuple[Leaves, SwagState]:
        iterate = [p.detach() if u is None else (p + u).detach() for p, u in zip(context.params, g)]
        due = (state.step >= self.start) & ((state.step - self.start) % self.every == 0)
        return g, collected(state, iterate, due, self.rank)._replace(step=state.step + 1)


class Swag(PosteriorTransformation):
    """What :func:`swag` returns: a transformation whose state, alone or within a chain's, has a mean and a posterior."""

    @checks.takes(params=checks.PARAMS)
    def mean(self, state: Any, params: Any) -> Any:
        """The stochastic weight average.

        Args:
            state: of this link, or of a chain that has it as a link.
            params: any parameters; their tree is what counts.

        Returns:
            A tree like ``params``; the values of ``params`` themselves before the first iterate.

        Raises:
            ValueError: parameters of other shapes than the state's.
        """
        return optree.tree_map(lambda m, p: m.to(p.dtype), self._mean(self._state(state), params), params)

    def _mean(self, mine: SwagState, params: Any) -> Any:
        """The same in float32 at least."""
        require_these([m.shape for m in mine.mean], params, str(self._link))
        leaves, structure = optree.tree_flatten(params)
        means = [torch.where(mine.collected > 0, m, p.detach()) for m, p in zip(mine.mean, leaves)]
        return optree.tree_unflatten(structure, means)

    @checks.takes(params=checks.PARAMS)
    def posterior(self, state: Any, params: Any) -> Gaussian:
        """The Gaussian of the iterates, around their mean, of the type that ``bc.laplace`` gives.

        Args:
            state: with at least two collected iterates.
            params: any parameters; their tree is what counts.

        Returns:
            A :class:`Gaussian`, in float32 at least. Entries that never moved have the variance ``variance_floor``: draws leave
            them at their mean.

        Raises:
            ValueError: fewer than two iterates collected, iterates with NaN (named), parameters of other shapes.
        """
        link, mine = self._link, self._state(state)
        if not is_hidden(mine.collected) and int(mine.collected) < 2:
            raise ValueError(
                f"swag: {int(mine.collected)} iterates collected, at least 2 make a covariance: run on past "
                f"start={link.start} with every={link.every}, or use mean(state, params)"
            )
        mean, structure = self._mean(mine, params), optree.tree_structure(params)
        variances = [_floored(s / mine.collected.to(s.dtype), link.variance_floor) for s in mine.squares]
        require_finite(mean, "swag: the mean of the iterates")
        require_finite(optree.tree_unflatten(structure, variances), "swag: the variance of the iterates")
        data = torch.zeros((), dtype=torch.float64, device=mine.step.device)
        if link.rank == 0:
            inverse = optree.tree_unflatten(structure, [1 / v for v in variances])
            return Gaussian(mean, Diagonal(inverse, data)).factorised()
        divisor = 2 * (mine.collected.clamp(max=link.rank) - 1).to(torch.float64)  # half of the covariance is low rank
        rows = [d.to(s.dtype) / divisor.sqrt().to(s.dtype) for d, s in zip(mine.deviations, mine.squares)]
        halves = [_floored(v / 2, link.variance_floor) for v in variances]
        diagonal, rows = (optree.tree_unflatten(structure, x) for x in (halves, rows))
        return Gaussian(mean, low_rank_covariance(diagonal, rows, data)).factorised()


def _floored(variance: Tensor, floor: float) -> Tensor:
    """A variance of at least the floor, and of at least what the dtype can invert."""
    return variance.clamp(min=max(floor, 4 * torch.finfo(variance.dtype).tiny))


@checks.factory_takes()
def swag(rank: int = 20, *, start: int = 0, every: int = 1, variance_floor: float = 1e-30) -> Swag:
    """Collect the iterates of the optimizer before it in the chain; updates pass through.

    It must stand last in the chain, since it takes the updates that it sees for the moves of the parameters. ``bc.chain``
    refuses what stands behind it, also behind a wrapper such as ``bc.skip_nonfinite``; ``torchopt.chain`` cannot see it.
    Statistics of batch norm belong to the model and are not averaged: recompute them at the mean or at every draw.

    The state is a value: ``update`` returns a new one and leaves the one it was given as it was. ``inplace=True``, TorchOpt's
    default, concerns the gradients' buffers alone.

    Args:
        rank: deviations kept, K: 0 (the mean and the variances alone) or at least 2, at most the number of parameters.
        start: updates to let pass before the first iterate is collected.
        every: updates from one collected iterate to the next, such as those of an epoch.
        variance_floor: least variance of an entry, in the parameters' units squared. Ordinary networks have entries that
            never move: a bias before batch norm, the row of an unused token, a dead unit. Draws leave these at their mean, to
            within 1e-15 by default. What the parameters' dtype cannot invert is raised to four times its smallest normal
            number.

    Returns:
        A link with the methods ``mean`` and ``posterior``. Its state holds ``rank + 2`` tensors for each parameter.

    Raises:
        ValueError: a rank of 1, or below 0; at ``init``, above the number of parameters; a schedule or a floor out of range.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> average = bc.swag(rank=0)
        >>> tx = bc.chain(bc.sgd(0.5), average)
        >>> params = torch.zeros(1)
        >>> state = tx.init(params)
        >>> for gradient in (-2.0, 1.0):  # iterates 1 and 0.5
        ...     updates, state = tx.update(torch.tensor([gradient]), state, params=params, inplace=False)
        ...     params = params + updates
        >>> average.mean(state, params), average.posterior(state, params).marginal_variance
        (tensor([0.7500]), tensor([0.0625]))
    """
    if rank == 1:
        raise ValueError("swag: rank must be 0 or at least 2 (k - 1 divides), got 1")
    return Swag((Collect(rank, start, every, variance_floor),))
