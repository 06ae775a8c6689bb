"""``mean_field``, ``dense`` and ``low_rank``: the optimizer you have, moving a Gaussian instead of a point."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import checks
from bayesopt_chain.posterior.draw import Draw
from bayesopt_chain.posterior.gaussian import (
    Gaussian,
    PosteriorTransformation,
    names_in,
    require_finite,
    require_these,
)
from bayesopt_chain.posterior.vi._families import Dense, LowRank, MeanField
from bayesopt_chain.schedules import ScalarOrSchedule
from bayesopt_chain.trees import copied, paths_of


class DrawingTransformation(PosteriorTransformation):
    """What the functions of :mod:`bayesopt_chain.posterior.vi` return.

    Its methods take the state of this transformation, or of a chain that has it as a link.
    """

    @checks.takes(params=checks.PARAMS)
    def sample(self, state: Any, params: Any) -> Draw:
        """Draw parameters from the posterior, to take the loss's gradient at.

        Args:
            state: from ``init`` or ``update``. One state gives one draw: it does not change by drawing.
            params: the mean.

        Returns:
            A :class:`Draw`; the leaves of ``draw.params`` are like the parameters for ``n_samples=1``, else they have
            the samples on axis 0.

        Raises:
            ValueError: a state of another transformation.
        """
        leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
        entry, here = self._state(state), [i for i, leaf in enumerate(leaves) if leaf is not None]
        names = names_in(state, entry) or [paths_of(params)[i] for i in here]
        draw = self._link.draw(entry, [leaves[i] for i in here], names)
        drawn = dict(zip(here, draw.params))
        return draw._replace(params=optree.tree_unflatten(spec, [drawn.get(i) for i in range(len(leaves))]))

    @checks.takes(params=checks.PARAMS)
    def posterior(self, state: Any, params: Any) -> Gaussian:
        """The Gaussian posterior around ``params``, of the type that ``bc.laplace`` gives.

        Args:
            state: from ``init`` or ``update``.
            params: the mean.

        Returns:
            A :class:`Gaussian` with a decomposed precision.

        Raises:
            ValueError: at ``temperature=0``, where there is none; parameters of other shapes than the state's; NaN in the
                state or the parameters (named).
        """
        mine, link = self._state(state), self._link
        require_these(link.shapes(mine), params, str(link))
        if link.is_deterministic:
            raise ValueError(f"{link.name}: at temperature=0 there is no posterior; pass temperature=1 / N")
        require_finite(params, "the posterior's mean")  # which is named, as numbers of phi are not
        return Gaussian(copied(params), link.precision(mine, params)).factorised()


class VariationalTransform(DrawingTransformation):
    """What ``mean_field``, ``dense`` and ``low_rank`` return."""

    @checks.takes(
        loss=checks.SCALAR, draw=checks.Kind(lambda x: isinstance(x, Draw), "what tx.sample(state, params) returned")
    )
    def negative_elbo(self, state: Any, loss: Tensor, draw: Draw | None = None) -> Tensor:
        """The negative ELBO per datum, in nats: ``loss - T H[q]``.

        Args:
            state: from ``init`` or ``update``.
            loss: the mean loss over the draws from that state, 0-d.
            draw: those draws, needed with ``prior`` and ``weight_decay``, for the prior's density there (with ``weight_decay``
                without its normaliser, a constant).

        Returns:
            0-d, differentiable in ``loss``.

        Raises:
            ValueError: with ``prior`` or ``weight_decay`` and no draw.
        """
        return self._link.negative_elbo(self._state(state), loss, draw)


TAKEN: dict[str, checks.Kind] = {"n_samples": checks.WHOLE, "prior": checks.POSTERIOR.or_none()}  # at any temperature


@checks.link_takes(**TAKEN)
def mean_field(
    optimizer: GradientTransformation,
    *,
    temperature: ScalarOrSchedule,
    init_scale: Any = 1e-2,
    n_samples: int = 1,
    antithetic: bool = False,
    stick_the_landing: bool = True,
    weight_decay: float = 0.0,
    prior: Gaussian | None = None,
    scale_optimizer: GradientTransformation | None = None,
    generator: torch.Generator | None = None,
) -> VariationalTransform:
    """Independent Gaussians on every parameter: ``theta = mu + sigma * z``. Bayes by backprop (Blundell, Cornebise, Kavukcuoglu
    and Wierstra, 2015).

    Args:
        optimizer: any of TorchOpt or this library; it moves the mean, which is the parameters, and log sigma.
        temperature: ``1 / N`` for a loss that is the mean negative log posterior over ``N`` data; a number, a 0-d tensor
            read at every update, or a schedule of the update count. At the number 0 the optimizer runs alone.
        init_scale: first standard deviations, in the parameters' units: a number, or a tree that broadcasts to the
            parameters, so that every leaf has its own. Far below the posterior's, the
            estimate of ``stick_the_landing`` has a variance of about ``(temperature / init_scale)^2``: raise ``init_scale``,
            or set ``stick_the_landing=False``.
        n_samples: draws for each update. More than one put the samples on axis 0 of draws and gradients.
        antithetic: draw in pairs ``mu +- displacement``; ``n_samples`` must be even.
        stick_the_landing: estimate the gradient along the path only: no variance at the optimum, when the posterior is in
            the family (see :mod:`bayesopt_chain.posterior.vi`).
        weight_decay: delta per datum, the prior of precision ``delta / temperature`` about zero, for a loss that leaves it
            out; the optimizer's own weight decay would miss its effect on sigma.
        prior: a :class:`Gaussian` over the parameters, such as the posterior of earlier data, for a loss that leaves it out
            (the mean negative log-likelihood); instead of ``weight_decay``.
        scale_optimizer: for log sigma, instead of ``optimizer``; for instance one without weight decay. It sees the
            tuple of phi's tensors, not the tree of parameters.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A transformation with ``sample``, ``posterior`` and ``negative_elbo``. ``update`` needs ``params=`` and, unless the
        temperature is the number 0, ``draw=``, the draw from the very state it is passed. Its state holds phi and twice
        what the optimizer remembers.

    Raises:
        ValueError: a temperature or scale that makes no sense; at ``update``, no draw, or one from another state.
        TypeError: an optimizer that is no gradient transformation; at ``init``, parameters that are not floating point.

    Example:
        >>> import torch, torchopt, bayesopt_chain as bc
        >>> tx = bc.vi.mean_field(torchopt.adam(1e-2), temperature=1 / 100)
        >>> params = {"w": torch.zeros(2)}
        >>> state = tx.init(params)
        >>> draw = tx.sample(state, params)
        >>> grads = {"w": draw.params["w"] - 1.0}  # of the loss |w - 1|^2 / 2 at the draw
        >>> updates, state = tx.update(grads, state, params=params, draw=draw, inplace=False)
        >>> tx.posterior(state, params).marginal_variance["w"].shape
        torch.Size([2])
    """
    link = MeanField(
        optimizer,
        init_scale,
        temperature=temperature,
        n_samples=n_samples,
        antithetic=antithetic,
        stick_the_landing=stick_the_landing,
        weight_decay=weight_decay,
        prior=prior,
        scale_optimizer=scale_optimizer,
        generator=generator,
    )
    return VariationalTransform((link,))


@checks.link_takes(**TAKEN)
def dense(
    optimizer: GradientTransformation,
    *,
    temperature: ScalarOrSchedule,
    init_scale: Any = 1e-2,
    n_samples: int = 1,
    antithetic: bool = False,
    stick_the_landing: bool = True,
    weight_decay: float = 0.0,
    prior: Gaussian | None = None,
    scale_optimizer: GradientTransformation | None = None,
    generator: torch.Generator | None = None,
) -> VariationalTransform:
    """One Gaussian over all parameters, every correlation kept: ``theta = mu + L z`` (Kucukelbir, Tran, Ranganath, Gelman and
    Blei, 2017).

    ``L = D (1 + N)`` is lower triangular; phi is N, strictly lower triangular, and the logarithm of the diagonal D, so that it
    stays a Cholesky factor without ever being refactorised, and a step of the optimizer is as large in any units. Its state
    holds ``P^2`` numbers and twice what the optimizer remembers of them.

    Args:
        optimizer, temperature, n_samples, antithetic, stick_the_landing, weight_decay, prior, scale_optimizer, generator: as
            in :func:`mean_field`.
        init_scale: first standard deviations, as in :func:`mean_field`.

    Returns:
        A transformation like that of :func:`mean_field`.

    Raises:
        ValueError, TypeError: as :func:`mean_field`.
        MemoryError: at ``init``, where ``P^2`` does not fit.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.vi.dense(bc.adam(1e-2), temperature=0.01, init_scale=0.1)
        >>> params = torch.zeros(3)
        >>> tx.posterior(tx.init(params), params).marginal_variance
        tensor([0.0100, 0.0100, 0.0100])
    """
    link = Dense(
        optimizer,
        init_scale,
        temperature=temperature,
        n_samples=n_samples,
        antithetic=antithetic,
        stick_the_landing=stick_the_landing,
        weight_decay=weight_decay,
        prior=prior,
        scale_optimizer=scale_optimizer,
        generator=generator,
    )
    return VariationalTransform((link,))


@checks.link_takes(rank=checks.number(f"[1, {checks.LARGEST}]", integer=True, hint="rank 0 is vi.mean_field"), **TAKEN)
def low_rank(
    optimizer: GradientTransformation,
    *,
    temperature: ScalarOrSchedule,
    rank: int = 10,
    init_scale: Any = 1e-2,
    n_samples: int = 1,
    antithetic: bool = False,
    stick_the_landing: bool = True,
    weight_decay: float = 0.0,
    prior: Gaussian | None = None,
    scale_optimizer: GradientTransformation | None = None,
    generator: torch.Generator | None = None,
) -> VariationalTransform:
    """A low-rank plus diagonal covariance: ``theta = mu + B z + d * eps`` (Ong, Nott and Smith, 2018).

    ``B`` starts random, sharing the first variance ``init_scale ** 2`` with ``d`` in halves, for at ``B = 0`` its gradient
    vanishes. Adam moves every entry of ``B`` by its lr at once, however small ``B`` is: give ``scale_optimizer`` a smaller
    lr than the mean's. Without ``stick_the_landing`` the entropy's gradient is exact. Its state holds ``rank + 1`` tensors
    for each parameter and twice what the optimizer remembers of them.

    Args:
        optimizer, temperature, n_samples, antithetic, stick_the_landing, weight_decay, prior, scale_optimizer, generator: as
            in :func:`mean_field`.
        init_scale: first standard deviations, as in :func:`mean_field`.
        rank: columns of ``B``, at least 1 and at most the number of parameters.

    Returns:
        A transformation like that of :func:`mean_field`.

    Raises:
        ValueError, TypeError: as :func:`mean_field`; a rank out of range.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.vi.low_rank(bc.adam(1e-2), temperature=0.01, rank=2, n_samples=4, antithetic=True)
        >>> params = {"w": torch.zeros(3, 2)}
        >>> tx.sample(tx.init(params), params).params["w"].shape
        torch.Size([4, 3, 2])
    """
    link = LowRank(
        optimizer,
        init_scale,
        rank=rank,
        temperature=temperature,
        n_samples=n_samples,
        antithetic=antithetic,
        stick_the_landing=stick_the_landing,
        weight_decay=weight_decay,
        prior=prior,
        scale_optimizer=scale_optimizer,
        generator=generator,
    )
    return VariationalTransform((link,))
