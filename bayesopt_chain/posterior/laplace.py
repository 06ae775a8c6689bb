r"""Laplace's approximation: the curvature summed over the data makes a Gaussian posterior around the trained parameters.

    Lambda = sum of the increments + prior,    theta ~ N(params, Lambda^-1)

    log Z ~ log p(D | params) + log p(params) + P/2 log 2 pi - 1/2 log |Lambda|        (MacKay, 1992)

The transformation passes its updates through and adds up ``curvature=<increment>`` (see :mod:`bayesopt_chain.curvature`).
The increments are sums over data in nats, so that any split of the data into batches gives the same posterior, except in the
low-rank structure (see :func:`laplace`); each datum is to be counted once, at the final parameters: run one pass over the
data after training.

Another temperature than Bayes' 1 / N divides the whole precision by T N: ``exp(-loss / T)`` for the mean loss per datum.

How the precision becomes a posterior, under a prior or after another posterior, stands in ``gaussian.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.matching.response import Linear
from bayesopt_chain.posterior.gaussian import Gaussian, PosteriorTransformation, log_prior, posterior_of
from bayesopt_chain.precision import Diagonal, Precision, Zero
from bayesopt_chain.trees import Tree


class LaplaceState(NamedTuple):
    """What :func:`laplace` remembers.

    Attributes:
        precision: the sum of the increments so far; ``Zero`` before the first.
    """

    precision: Any


def _require_fit_for_shards(increment: Any, context: LinkContext) -> None:
    """Refuse an increment that couples elements, or lies otherwise than the parameters, where ranks hold parts of them."""
    if not isinstance(increment, Diagonal):
        raise ValueError(
            f"laplace: the parameters are DTensors, of which each rank has a part, and curvature is of structure "
            f"{type(increment).__name__}, which couples their elements: take a diagonal one "
            "(bc.curvature.diagonal_by_backward), or the posterior of a part of the model whose leaves are whole"
        )
    context.leaves(increment.values)  # which refuses other layouts


@dataclass(frozen=True)
class Accumulate(Link):
    """The link behind :func:`laplace`."""

    # gradients pass through
    traits = Traits(on_shards="tree", all_leaves=True, response=Linear(), extra_kwargs=frozenset({"curvature"}))
    state = LaplaceState

    def init(self, leaves: Leaves, context: LinkContext) -> LaplaceState:
        checks.with_values("laplace", "params", leaves, context.paths)
        device = leaves[0].device if leaves else None
        return LaplaceState(Zero(torch.zeros((), dtype=torch.float64, device=device)))

    def update(
        self, g: Leaves, state: LaplaceState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, LaplaceState]:
        increment = context.extra.get("curvature")
        if increment is None:
            return g, state
        if context.scope.shards is not None:
            _require_fit_for_shards(increment, context)
        if not isinstance(increment, Precision):
            raise TypeError(
                f"curvature is a {type(increment).__name__}: pass what an estimator of bayesopt_chain.curvature returns"
            )
        return g, LaplaceState(state.precision.add(increment))

    def __str__(self) -> str:
        return "laplace()"


class Laplace(PosteriorTransformation):
    """What :func:`laplace` returns: a transformation whose state, alone or within a chain's, makes a posterior."""

    @checks.takes(
        params=checks.PARAMS, prior_precision=checks.ANY, prior=checks.POSTERIOR, likelihood_scale=checks.SCALAR
    )
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
        """The Gaussian posterior around ``params``.

        Args:
            state: this link's state, or that of a chain with this link in it.
            params: the mean: the tree whose curvature was accumulated (a subset's, if it was a subset's).
            prior_precision: of a zero-mean Gaussian prior, per parameter, not per datum: a number (0 for none), a 0-d tensor
                or a tree that broadcasts to the params. Kronecker structures take one number for each parameter tensor.
            prior: a Gaussian prior instead, such as the posterior of the last task: of the structure that the state has.
                It counts as that many data more.
            temperature: None, the default, means Bayes; a number is per datum, as everywhere: the covariance times
                ``temperature * N``.
            likelihood_scale: multiplies the data's part: ``1 / variance`` for increments of ``gaussian(variance=1.0)``.
                Default 1.

        Returns:
            A :class:`Gaussian` whose precision is decomposed; differentiable in ``prior_precision`` and
            ``likelihood_scale``.

        Raises:
            ValueError: no curvature has been accumulated; both priors or neither is given; numbers out of range; NaN in the
                curvature or the params; a precision that is singular; a tree that is not the increments'. The last three
                name the parameter.
            TypeError: a prior of another structure than the state's.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> params, batch = torch.zeros(1, 1), (torch.full((4, 1), 2.0), torch.zeros(4, 1))
            >>> estimate = bc.curvature.ggn(lambda params, batch: batch[0] @ params, bc.likelihoods.gaussian(), "dense")
            >>> tx = bc.laplace()
            >>> _, state = tx.update(torch.zeros(1, 1), tx.init(params), curvature=estimate(params, batch))
            >>> posterior = tx.posterior(state, params, prior_precision=4.0)
            >>> posterior.marginal_variance
            tensor([[0.0500]])
            >>> tx.posterior(state, params, prior=posterior).marginal_variance  # the same data once more
            tensor([[0.0278]])
        """
        data = self._state(state).precision
        if isinstance(data, Zero):
            raise ValueError(
                "laplace: no curvature has been accumulated, so that the state knows nothing of the data: call "
                "update(..., curvature=estimate(params, batch)) on it first (make_step does, given curvature=)"
            )
        return posterior_of(
            data,
            params,
            prior_precision=prior_precision,
            prior=prior,
            temperature=temperature,
            likelihood_scale=likelihood_scale,
        )

    @checks.takes(
        params=checks.PARAMS,
        log_likelihood=checks.SCALAR,
        prior_precision=checks.ANY,
        prior=checks.POSTERIOR,
        prior_mean=checks.ANY,
        likelihood_scale=checks.SCALAR,
    )
    def log_evidence(
        self,
        state: Any,
        params: Tree,
        log_likelihood: float | Tensor,
        *,
        prior_precision: Any = None,
        prior: Gaussian | None = None,
        prior_mean: Any = 0.0,
        likelihood_scale: float | Tensor = 1.0,
    ) -> Tensor:
        """Laplace's log marginal likelihood, in nats.

        Args:
            state: as for :meth:`posterior`.
            params: as for :meth:`posterior`.
            log_likelihood: summed, normalised log p(D | params): minus the sum of ``likelihood.nll`` over the data. With
                ``likelihood_scale`` it has to be that of the scaled likelihood.
            prior_precision: as for :meth:`posterior`; the prior has to be proper, hence positive.
            prior: a Gaussian prior instead.
            prior_mean: of the prior with ``prior_precision``: a number or a tree. Default 0.
            likelihood_scale: as for :meth:`posterior`.

        Returns:
            0-d, differentiable in ``prior_precision``, ``likelihood_scale`` and what ``log_likelihood`` depends on.

        Raises:
            ValueError, TypeError: as :meth:`posterior`.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> from bayesopt_chain.precision import Diagonal
            >>> tx, params = bc.laplace(), torch.zeros(2)
            >>> one_datum = Diagonal(torch.tensor([3.0, 0.0]), torch.tensor(1.0))
            >>> _, state = tx.update(params, tx.init(params), curvature=one_datum)
            >>> tx.log_evidence(state, params, -1.0, prior_precision=1.0)  # -1 - log(4) / 2
            tensor(-1.6931)
        """
        posterior = self.posterior(
            state, params, prior_precision=prior_precision, prior=prior, likelihood_scale=likelihood_scale
        )
        if prior is None:
            return posterior.log_evidence(log_likelihood + log_prior(params, prior_precision, prior_mean))
        return posterior.log_evidence(log_likelihood + prior.log_prob(params))


def laplace() -> Laplace:
    """Accumulate curvature into a Gaussian posterior; updates pass through.

    ``update(updates, state, *, params=None, inplace=True, curvature=None)`` adds an increment of
    :mod:`bayesopt_chain.curvature` to the state; without one the state stays. All increments of a state have one structure
    over one tree, which the first decides. In a chain the link may stand anywhere.

    The state is a value: ``update`` returns a new one and leaves the one it was given as it was. ``inplace=True``, TorchOpt's
    default, concerns the gradients' buffers alone.

    Carrying one state on from task to task is online Laplace: the last posterior is the next prior, also for Kronecker
    factors, which add as sums over data (Ritter, Botev and Barber, 2018); ``posterior(prior=)`` does it from a stored
    posterior.

    The low-rank structure alone depends on how the data were split into batches: what exceeds its rank moves to the diagonal
    batch by batch, and the marginal variances of many small batches come out somewhat smaller. Take a rank well above the
    number of directions that the data determine, or another structure.

    Returns:
        A link with the methods ``posterior`` and ``log_evidence``.

    Raises:
        TypeError: at ``update``, an increment of another structure than the state's, or something else.
        ValueError: at ``update``, an increment over another tree (names the leaf).

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> from bayesopt_chain.precision import Diagonal
        >>> tx, params = bc.laplace(), {"w": torch.zeros(2)}
        >>> state = tx.init(params)
        >>> for _ in range(3):
        ...     increment = Diagonal({"w": torch.ones(2)}, torch.tensor(10.0))
        ...     updates, state = tx.update(params, state, curvature=increment)
        >>> tx.posterior(state, params, prior_precision=1.0).marginal_variance
        {'w': tensor([0.2500, 0.2500])}
    """
    return Laplace((Accumulate(),))
