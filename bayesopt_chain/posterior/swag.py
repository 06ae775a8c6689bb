r"""SWAG: the iterates of an optimizer, summarised as a Gaussian (Maddox et al., 2019).

Over the collected iterates theta_1 ... theta_n, with the running mean m_n and the last K deviations d_i = theta_i - m_i,

    m_n = m_{n-1} + (theta_n - m_{n-1}) / n
    s_n = s_{n-1} + (theta_n - m_{n-1}) (theta_n - m_n)

    theta ~ N(m_n,  1/2 diag(s_n / n) + 1/2 sum_i d_i d_i^T / (k - 1)),        k = min(n, K).

``s_n / n`` is the paper's mean square minus square mean, summed without their cancellation (Welford, 1962). With K = 0 the
covariance is ``diag(s_n / n)`` and the mean alone is stochastic weight averaging (Izmailov et al., 2018). Several runs,
their states stacked, make MultiSWAG (Wilson and Izmailov, 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.arguments import checked
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import At, Link
from bayesopt_chain.core.op import Leaves, Op
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.state import device_of, find, require_these
from bayesopt_chain.precision import Diagonal, low_rank_covariance
from bayesopt_chain.tracing import is_hidden, is_readable
from bayesopt_chain.trees import paths, size


class SwagState(NamedTuple):
    """``mean``: m; ``squares``: s; ``deviations``: the ring of d, ``[K, *leaf.shape]``; one tensor for each parameter.

    ``collected``: iterates so far, ``count``: updates so far; 0-d int64.
    """

    mean: tuple[Tensor, ...]
    squares: tuple[Tensor, ...]
    deviations: tuple[Tensor, ...]
    collected: Tensor
    count: Tensor


@dataclass(frozen=True)
class Collect(Link):
    """The link behind :func:`swag`."""

    exacting = True

    rank: int
    start: int
    every: int
    needs_params = True
    whole = True

    def init(self, leaves: Leaves, at: At) -> SwagState:
        if self.rank > size(leaves):
            raise ValueError(f"swag: rank={self.rank} is above the number of parameters, {size(leaves)}")
        zeros = tuple(torch.zeros_like(p).detach() for p in leaves)
        ring = tuple(p.new_zeros((self.rank, *p.shape)) for p in leaves)
        none = torch.zeros((), dtype=torch.int64, device=device_of(leaves))
        return SwagState(zeros, tuple(z.clone() for z in zeros), ring, none, none.clone())

    def update(self, g: list, state: SwagState, op: Op, at: At) -> tuple[list, SwagState]:
        moved = [p.detach() if u is None else (p + u).detach() for p, u in zip(at.params, g)]
        due = (state.count >= self.start) & ((state.count - self.start) % self.every == 0)
        new = self._collected(state, moved, due)._replace(count=state.count + 1)
        return g, op.keep(state, new)

    def _collected(self, state: SwagState, moved: list[Tensor], due: Tensor) -> SwagState:
        """The state with one more iterate where it is due; values, not a branch, so that a step can be captured."""
        if is_readable(due) and not due:
            return state
        n = state.collected + due
        weight = 1 / n.clamp(min=1)
        mean = [torch.where(due, m + (x - m) * weight.to(m.dtype), m) for m, x in zip(state.mean, moved)]
        squares = [
            torch.where(due, s + (x - a) * (x - b), s) for s, x, a, b in zip(state.squares, moved, state.mean, mean)
        ]
        deviations = state.deviations
        if self.rank:
            place = (torch.arange(self.rank, device=n.device) == (n - 1) % self.rank) & due
            deviations = tuple(
                torch.where(place.reshape(-1, *[1] * x.ndim), (x - m)[None], d)
                for d, x, m in zip(state.deviations, moved, mean)
            )
        return SwagState(tuple(mean), tuple(squares), deviations, n, state.count)

    def __str__(self) -> str:
        return f"swag(rank={self.rank}, start={self.start}, every={self.every})"


class Swag(Chain):
    """What :func:`swag` returns: a link with questions for its state, or for that of a chain with it as a link."""

    def __reduce__(self) -> Any:
        return Swag, (self.links,)

    def mean(self, state: Any, params: Any) -> Any:
        """The stochastic weight average, a tree like ``params``; ``params`` itself before the first iterate."""
        mine = find(state, SwagState, str(self.links[0]))
        require_these([m.shape for m in mine.mean], params, str(self.links[0]))
        leaves, structure = optree.tree_flatten(params)
        means = [torch.where(mine.collected > 0, m, p.detach()) for m, p in zip(mine.mean, leaves)]
        return optree.tree_unflatten(structure, means)

    def posterior(self, state: Any, params: Any) -> Gaussian:
        """The Gaussian of the iterates, around their mean, of the type that ``bc.laplace`` gives.

        Args:
            state: with at least two collected iterates.
            params: any parameters; their tree is what counts.

        Raises:
            ValueError: fewer than two iterates collected, or a parameter that never moved (named).
        """
        link, mine = self.links[0], find(state, SwagState, str(self.links[0]))
        if not is_hidden(mine.collected) and int(mine.collected) < 2:
            raise ValueError(
                f"swag: {int(mine.collected)} iterates collected, at least 2 make a covariance: run on past "
                f"start={link.start} with every={link.every}, or use mean(state, params)"
            )
        structure = optree.tree_structure(params)
        variances = [s / mine.collected.to(s.dtype) for s in mine.squares]
        for name, v in zip(paths(params), variances):
            if not is_hidden(v) and not bool((v > 0).all()):
                raise ValueError(f"swag: {name} has entries that never moved: leave them out of it by bc.masked")
        data = torch.zeros((), dtype=torch.float64, device=mine.count.device)
        mean = self.mean(state, params)
        if link.rank == 0:
            inverse = optree.tree_unflatten(structure, [1 / v for v in variances])
            return Gaussian(mean, Diagonal(inverse, data).factorised())
        spread = 2 * (mine.collected.clamp(max=link.rank) - 1).to(torch.float64)
        rows = [d / spread.sqrt().to(d.dtype) for d in mine.deviations]
        diagonal, rows = (optree.tree_unflatten(structure, x) for x in ([v / 2 for v in variances], rows))
        return Gaussian(mean, low_rank_covariance(diagonal, rows, data))


@checked
def swag(rank: int = 20, *, start: int = 0, every: int = 1) -> Swag:
    """Collect the iterates of the optimizer before it in the chain; updates pass through.

    It stands last, for it takes the updates it sees for the parameters' moves. Batch-norm statistics are the model's, not
    the parameters': recompute them at the mean or at every draw.

    Args:
        rank: deviations kept, K: 0 (the mean and the variances alone) or at least 2, at most the number of parameters.
        start: updates to let pass before the first iterate is collected.
        every: updates from one collected iterate to the next, such as those of an epoch.

    Returns:
        A link with the methods ``mean`` and ``posterior``. Its state holds ``rank + 2`` tensors for each parameter.

    Raises:
        ValueError: a rank of 1, or below 0; at ``init``, above the number of parameters; a schedule out of range.

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
    if not isinstance(rank, int) or rank < 0 or rank == 1:
        raise ValueError(f"swag: rank must be 0 or an integer of at least 2 (k - 1 divides), got {rank!r}")
    if start < 0 or every < 1:
        raise ValueError(f"swag: start must be at least 0 and every at least 1, got start={start}, every={every}")
    return Swag((Collect(rank, start, every),))
