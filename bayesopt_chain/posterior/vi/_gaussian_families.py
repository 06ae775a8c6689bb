"""``mean_field``, ``dense`` and ``low_rank``: the optimizer you have, moving a Gaussian instead of a point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torchopt.base import GradientTransformation

from bayesopt_chain.arguments import checked_types, with_options
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.vi._families import Dense, LowRank, MeanField
from bayesopt_chain.posterior.vi._transform import Variational, VariationalTransform
from bayesopt_chain.schedules import ScalarOrSchedule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(TypedDict, total=False):
    """The keywords that all families have; :func:`mean_field` says what they mean."""

    n_samples: int
    antithetic: bool
    stick_the_landing: bool
    weight_decay: float
    prior: Gaussian | None
    scale_optimizer: GradientTransformation | None
    generator: torch.Generator | None


@checked_types
@with_options(Options, Variational)
def mean_field(
    optimizer: GradientTransformation,
    *,
    temperature: ScalarOrSchedule,
    init_scale: Any = 1e-2,
    **options: Unpack[Options],
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
    return VariationalTransform((Variational(MeanField(init_scale), optimizer, temperature, **options),))


@checked_types
@with_options(Options, Variational)
def dense(
    optimizer: GradientTransformation,
    *,
    temperature: ScalarOrSchedule,
    init_scale: Any = 1e-2,
    **options: Unpack[Options],
) -> VariationalTransform:
    """One Gaussian over all parameters, every correlation kept: ``theta = mu + L z`` (Kucukelbir, Tran, Ranganath, Gelman and
    Blei, 2017).

    ``L`` is lower triangular; phi is ``L`` below its diagonal and the logarithm on it, so that it stays a Cholesky factor
    without ever being refactorised. Its state holds ``P^2`` numbers and twice what the optimizer remembers of them.

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
    return VariationalTransform((Variational(Dense(init_scale), optimizer, temperature, **options),))


@checked_types
@with_options(Options, Variational)
def low_rank(
    optimizer: GradientTransformation,
    *,
    temperature: ScalarOrSchedule,
    rank: int = 10,
    init_scale: Any = 1e-2,
    **options: Unpack[Options],
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
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"vi.low_rank: rank must be an integer of at least 1, got {rank!r}; rank 0 is vi.mean_field")
    return VariationalTransform((Variational(LowRank(init_scale, rank), optimizer, temperature, **options),))
