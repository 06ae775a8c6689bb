r"""Laplace's approximation: sum the curvature along the trajectory, and the optimizer has a Gaussian posterior at its
end.

    Lambda = sum of the increments + prior,    theta ~ N(params, Lambda^-1)

    log Z ~ log p(D | params) + log p(params) + P/2 log 2 pi - 1/2 log |Lambda|        (MacKay 1992)

The transformation passes its updates through and adds up `curvature=<increment>` (see `bayesopt_chain.curvature`). The
increments are sums over data in nats, so that any split of the data into batches gives the same posterior; each datum
is to be counted once, at the final parameters: run one pass over the data after training.

Another temperature than Bayes' 1 / N divides the whole precision by T N: `exp(-loss / T)` for the mean loss per datum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import At, Link
from bayesopt_chain.core.op import Leaves, Op
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.precision import Diagonal, Precision, Zero
from bayesopt_chain.trees import Tree, require_like, spread


class LaplaceState(NamedTuple):
    """The sum of the increments so far; `Zero` before the first."""

    precision: Any


@dataclass(frozen=True)
class Accumulate(Link):
    """The link behind :func:`laplace`."""

    whole = True
    accepts = frozenset({"curvature"})

    def init(self, leaves: Leaves, at: At) -> LaplaceState:
        device = leaves[0].device if leaves else None
        return LaplaceState(Zero(torch.zeros((), dtype=torch.float64, device=device)))

    def update(self, g: Leaves, state: LaplaceState, op: Op, at: At) -> tuple[Leaves, LaplaceState]:
        increment = at.extra.get("curvature")
        if increment is None:
            return g, state
        if not isinstance(increment, Precision):
            raise TypeError(
                f"curvature is a {type(increment).__name__}: pass what an estimator of bayesopt_chain.curvature returns"
            )
        return g, LaplaceState(op.keep(state.precision, state.precision.add(increment)))

    def __str__(self) -> str:
        return "laplace()"


class Laplace(Chain):
    """What :func:`laplace` returns: a link with questions for its state."""

    def __reduce__(self) -> Any:
        return Laplace, (self.links,)

    def posterior(
        self,
        state: Any,
        params: Tree,
        *,
        prior_precision: Any = None,
        prior: Gaussian | None = None,
        temperature: float | None = None,
        likelihood_scale: float | Tensor = 1.0,
    ) -> Gaussian:
        """Return the Gaussian posterior around `params`.

        Args:
            state: this link's state, or that of a chain with this link in it.
            params: the mean: the tree whose curvature was accumulated (a subset's, if it was a subset's).
            prior_precision: of a zero-mean Gaussian prior, per parameter, not per datum: a number, a 0-d tensor, or a
            tree
                that broadcasts to the params. Kronecker structures take one number a parameter tensor.
            prior: a Gaussian prior instead, such as the last task's posterior (its structure must be the state's).
            temperature: None means Bayes; a number is per datum, as everywhere: the covariance times `temperature * N`.
            likelihood_scale: multiplies the data's part: `1 / variance` for increments of `gaussian(variance=1.0)`.

        Returns:
            A `Gaussian` whose precision is decomposed; differentiable in `prior_precision` and `likelihood_scale`.

        Raises:
            ValueError: where the precision is singular (names the parameter), both or neither prior is given, or the
            tree is
                not the increments'.
            TypeError: where the prior's structure is not the state's.

        >>> import torch, bayesopt_chain as bc
        >>> from bayesopt_chain import curvature, likelihoods
        >>> from bayesopt_chain.posterior.laplace import laplace
        >>> params, batch = torch.zeros(1, 1), (torch.full((4, 1), 2.0), torch.zeros(4, 1))
        >>> estimate = curvature.ggn(lambda params, batch: batch[0] @ params, likelihoods.gaussian(), structure="dense")
        >>> tx = laplace()
        >>> _, state = tx.update(torch.zeros(1, 1), tx.init(params), curvature=estimate(params, batch))
        >>> tx.posterior(state, params, prior_precision=4.0).marginal_variance
        tensor([[0.0500]])
        """
        if (prior is None) == (prior_precision is None):
            raise ValueError("pass one of prior_precision= (0.0 for none) and prior= (a Gaussian)")
        data = _find(state).precision
        if isinstance(data, Zero):
            data = Diagonal(optree.tree_map(torch.zeros_like, params), data.count)
            if prior is not None:
                raise ValueError("no curvature has been accumulated: the posterior is the prior")
        count = data.count
        if not (isinstance(likelihood_scale, (int, float)) and likelihood_scale == 1):
            data = data.scale(likelihood_scale)
        precision = data.add_diagonal(prior_precision) if prior is None else data.add(prior.precision)
        require_like(params, precision.diag(), "params")
        if temperature is not None:
            precision = precision.scale(1 / (temperature * count))
        return Gaussian(optree.tree_map(torch.Tensor.detach, params), precision.factorised())

    def log_evidence(
        self,
        state: Any,
        params: Tree,
        log_likelihood: Any,
        *,
        prior_precision: Any,
        prior_mean: Any = 0.0,
        likelihood_scale: float | Tensor = 1.0,
    ) -> Tensor:
        """Return Laplace's log marginal likelihood, in nats.

        Args:
            log_likelihood: summed, normalised log p(D | params): minus the sum of `likelihood.nll` over the data. With
                `likelihood_scale` it has to be that of the scaled likelihood.
            prior_mean: of the Gaussian prior: a number or a tree.
            state, params, prior_precision, likelihood_scale: as for `posterior`. The prior has to be proper.

        Returns:
            0-d, differentiable in `prior_precision`, `likelihood_scale` and what `log_likelihood` depends on.

        >>> import torch
        >>> from bayesopt_chain.posterior.laplace import laplace
        >>> tx, params = laplace(), torch.zeros(2)
        >>> tx.log_evidence(tx.init(params), params, -3.0, prior_precision=5.0)  # no data curvature: the joint's own
        tensor(-3.)
        """
        posterior = self.posterior(state, params, prior_precision=prior_precision, likelihood_scale=likelihood_scale)
        return posterior.log_evidence(log_likelihood + log_prior(params, prior_precision, prior_mean))


def laplace() -> Laplace:
    """Accumulate curvature into a Gaussian posterior; updates pass through.

    `update(updates, state, *, params=None, inplace=True, curvature=None)` adds an increment of
    `bayesopt_chain.curvature` to the state; without one the state stays. All increments of a state have one structure
    over one tree, which the first decides. In a chain the link may stand anywhere.

    Carrying one state on from task to task is online Laplace: the last posterior is the next prior, also for Kronecker
    factors, which add as sums over data (Ritter et al. 2018); `posterior(prior=)` does it from a stored posterior.

    Returns:
        A link with the methods `posterior` and `log_evidence`.

    Raises:
        TypeError: at `update`, an increment of another structure than the state's, or something else.
        ValueError: at `update`, an increment over another tree (names the leaf).

    >>> import torch
    >>> from bayesopt_chain.posterior.laplace import laplace
    >>> from bayesopt_chain.precision import Diagonal
    >>> tx, params = laplace(), {"w": torch.zeros(2)}
    >>> state = tx.init(params)
    >>> for _ in range(3):
    ...     increment = Diagonal({"w": torch.ones(2)}, torch.tensor(10.0))
    ...     updates, state = tx.update(params, state, curvature=increment)
    >>> tx.posterior(state, params, prior_precision=1.0).marginal_variance
    {'w': tensor([0.2500, 0.2500])}
    """
    return Laplace((Accumulate(),))


def log_prior(params: Tree, prior_precision: Any, prior_mean: Any = 0.0) -> Tensor:
    """Return the normalised log density of params under independent Gaussians, 0-d, in nats.

    `prior_precision`, `prior_mean`: numbers, 0-d tensors, or trees that broadcast to the params. A precision that is
    not positive gives -inf or nan.

    >>> import torch
    >>> from bayesopt_chain.posterior.laplace import log_prior
    >>> log_prior(torch.ones(2), 1.0)
    tensor(-2.8379)
    """
    total: Any = 0
    precisions, means = spread(prior_precision, params, "prior_precision"), spread(prior_mean, params, "prior_mean")
    for leaf, precision, mean in zip(optree.tree_leaves(params), precisions, means):
        normaliser = (precision / (2 * math.pi)).log().expand(leaf.shape).sum()
        total = total + 0.5 * (normaliser - (precision * (leaf - mean).square()).sum())
    return total


def _find(state: Any) -> LaplaceState:
    """Return the Laplace state in a chain's state."""
    if isinstance(state, LaplaceState):
        return state
    found = [entry for entry in state if isinstance(entry, LaplaceState)] if isinstance(state, tuple) else []
    if len(found) != 1:
        raise ValueError(
            f"state holds {len(found)} Laplace states, not one: pass the state of a chain with one laplace()"
        )
    return found[0]
