r"""Langevin samplers: SGLD (Welling and Teh, 2011) and SGHMC (Chen, Fox and Guestrin, 2014) as chains.

With ``lr`` and ``momentum`` in SGD's sense,

    order 1:  v <- mu v + g + sqrt(2 T (1 - mu) / lr) xi_t,                     theta <- theta - lr v
    order 2:  v <- mu v + g + sqrt(2 T (1 - mu) / lr) (xi_t + xi_{t-1}) / 2,    theta <- theta - lr v.

``mu = 0`` is SGLD; its order 2 is the Leimkuhler-Matthews scheme. Order 2 with momentum is BAOA: kick, half drift,
Ornstein-Uhlenbeck, half drift, with one gradient a step. On a quadratic loss of curvature ``h`` the stationary variance is
``T / h`` for order 2 and too large by the factor ``1 + y / (2 (1 + mu) - y)``, ``y = lr h``, for order 1.

SGHMC is also written with a step ``eps``, friction ``alpha``, momentum scale ``sigma`` and gradient-noise estimate ``beta``,

    m <- m - eps (g + alpha m / sigma^2) + N(0, eps T (2 alpha - eps T beta)),     theta <- theta + eps m / sigma^2.

With ``v = -m / eps`` that is the order-1 scheme above, ``lr = eps^2 / sigma^2``, ``mu = 1 - eps alpha / sigma^2``, at the
temperature ``T (1 - eps T beta / (2 alpha))``.

Explicit Euler takes both right-hand sides at one time (Duffield et al., "Scalable Bayesian learning with posteriors", 2025), so
that the update arrives one step late. At T = 0 it is therefore *not* SGD with momentum, and it is stable only for
``lr * curvature < 1 - mu`` where SGD with momentum allows ``2 (1 + mu)``. It is here as :func:`sghmc_euler`, for comparison
with what others run under that name.
"""

from __future__ import annotations

import torch

from bayesopt_chain import checks
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.links.keyed import inject_filtered_noise
from bayesopt_chain.links.langevin_noise import inject_langevin_noise
from bayesopt_chain.links.learning_rate import scale_by_neg_lr
from bayesopt_chain.links.momentum import add_momentum, delay
from bayesopt_chain.schedules import ScalarOrSchedule


@checks.factory_takes()
def sgld(
    lr: ScalarOrSchedule,
    *,
    temperature: ScalarOrSchedule,
    order: int = 2,
    generator: torch.Generator | None = None,
) -> Chain:
    """Stochastic gradient Langevin dynamics (Welling and Teh, 2011). At ``temperature=0`` it is SGD.

    Args:
        lr: learning rate, as in SGD: number, 0-d tensor or schedule. With ``order=2`` the variance of a quadratic loss is exact
            at every step while lr falls; docs/theory.md has a table of what rises cost.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data, 1 for an unnormalised loss; no default. Behind a
            change of it the variance goes to the new value without turning; with ``order=1`` it may turn on its way.
        order: 2 (Leimkuhler-Matthews) or 1 (classical).
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds one tensor for each parameter (order 2) or none (order 1).

    Raises:
        ValueError: a temperature that is negative, NaN or infinite; an order other than 1 or 2.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.sgld(0.1, temperature=0.5)
        chain(
            inject_langevin_noise(0.5),  # acts here, matched to F = 0.1
            scale_by_neg_lr(0.1),
        )
    """
    noise = inject_langevin_noise(temperature, order=order, generator=generator)
    return chain(noise, scale_by_neg_lr(lr))


@checks.factory_takes()
def sghmc(
    lr: ScalarOrSchedule,
    momentum: float = 0.9,
    *,
    temperature: ScalarOrSchedule,
    order: int = 2,
    generator: torch.Generator | None = None,
) -> Chain:
    """Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin, 2014). At ``temperature=0`` it is SGD with momentum.

    Args:
        lr: learning rate, as in SGD: number, 0-d tensor or schedule. With ``order=2`` the variance of a quadratic loss is exact
            at every step while lr falls; docs/theory.md has a table of what rises cost.
        momentum: in [0, 1); ``1 - momentum`` is the friction.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data, 1 for an unnormalised loss; no default. Behind a
            change of it the variance goes to the new value without turning; with ``order=1`` it may turn on its way.
        order: 2 (BAOA, exact on quadratics) or 1 (classical).
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds one tensor for each parameter: the velocity carries the part of the noise that acts in the next
        update, under a schedule too. With momentum below 1/16, order 2 keeps one more.

    Raises:
        ValueError: momentum outside [0, 1), at ``init``, if the temperature is not the number 0.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.sghmc(0.1, temperature=1 / 500), {"w": torch.zeros(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params=params)
    """
    return chain(
        add_momentum(momentum),
        inject_langevin_noise(temperature, order=order, generator=generator),
        scale_by_neg_lr(lr),
    )


def sghmc_from_friction(
    lr: float, alpha: float, beta: float = 0.0, sigma: float = 1.0, temperature: float = 1.0
) -> dict[str, float]:
    """Keywords of :func:`sghmc` for the parametrisation by friction.

    Args:
        lr: its step ``eps``, positive.
        alpha: friction, positive, ``eps alpha / sigma^2`` at most 1.
        beta: estimate of the gradient noise, whose share is left out of the injected noise.
        sigma: momentum scale, positive.
        temperature: ``T``, ``1 / N`` for a loss that is a mean over ``N`` data.

    Returns:
        ``{"lr": eps^2 / sigma^2, "momentum": 1 - eps alpha / sigma^2, "temperature": T (1 - eps T beta / (2 alpha))}``.

    Raises:
        ValueError: the friction is too strong for the step (the momentum would be negative), or ``beta`` so large that the
            noise variance would be.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.samplers.sghmc_from_friction(lr=0.5, alpha=0.25)
        {'lr': 0.25, 'momentum': 0.875, 'temperature': 1.0}
    """
    for name, value in (("lr", lr), ("alpha", alpha), ("sigma", sigma), ("temperature", temperature)):
        checks.POSITIVE(f"sghmc_from_friction: {name}", value)
    checks.NUMBER("sghmc_from_friction: beta", beta)
    momentum = 1.0 - lr * alpha / sigma**2
    if momentum < -1e-12:
        raise ValueError(
            f"sghmc_from_friction: lr * alpha / sigma^2 = {1 - momentum:.3g} exceeds 1, so the momentum would be "
            "negative; lower lr or alpha"
        )
    share = 1.0 - lr * temperature * beta / (2.0 * alpha)
    if not share >= 0.0:
        raise ValueError(
            f"sghmc_from_friction: beta={beta} makes the noise variance negative; it may be at most "
            f"2 alpha / (lr temperature) = {2 * alpha / (lr * temperature):.3g}"
        )
    return {"lr": lr**2 / sigma**2, "momentum": max(momentum, 0.0), "temperature": temperature * share}


def sghmc_to_friction(lr: float, momentum: float, sigma: float = 1.0, temperature: float = 1.0) -> dict[str, float]:
    """The inverse of :func:`sghmc_from_friction`, with ``beta = 0``.

    Args:
        lr: learning rate of :func:`sghmc`, positive.
        momentum: its momentum, in [0, 1).
        sigma: the momentum scale to express them in, positive.
        temperature: its temperature, positive, ``1 / N`` for a loss that is a mean over ``N`` data.

    Returns:
        ``lr`` (the step ``eps``), ``alpha``, ``beta``, ``sigma`` and ``temperature``.

    Raises:
        ValueError: an argument out of range.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.samplers.sghmc_to_friction(0.25, 0.875)
        {'lr': 0.5, 'alpha': 0.25, 'beta': 0.0, 'sigma': 1.0, 'temperature': 1.0}
    """
    for name, value in (("lr", lr), ("sigma", sigma), ("temperature", temperature)):
        checks.POSITIVE(f"sghmc_to_friction: {name}", value)
    checks.MOMENTUM("sghmc_to_friction: momentum", momentum)
    eps = sigma * lr**0.5
    alpha = (1.0 - momentum) * sigma**2 / eps
    return {"lr": eps, "alpha": alpha, "beta": 0.0, "sigma": sigma, "temperature": temperature}


@checks.factory_takes(lr=checks.POSITIVE, momentum=checks.MOMENTUM)
def sghmc_euler(
    lr: float, momentum: float = 0.9, *, temperature: ScalarOrSchedule, generator: torch.Generator | None = None
) -> Chain:
    """SGHMC by explicit Euler, with a gradient one step stale. For comparison; prefer :func:`bayesopt_chain.sghmc`.

    Args:
        lr: learning rate in SGD's sense, ``eps^2 / sigma^2``; see :func:`bayesopt_chain.sghmc_from_friction`.
        momentum: in [0, 1), ``1 - eps alpha / sigma^2``.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data, 1 for an unnormalised loss. Along a schedule the
            variance stays between the old and the new value and never turns.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds two tensors for each parameter. At ``temperature=0`` it is SGD with momentum whose update
        arrives one step late.

    Raises:
        ValueError: lr not positive, momentum outside [0, 1).

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.samplers.sghmc_euler(0.1, temperature=1.0), torch.zeros(2)
        >>> first, state = tx.update(torch.ones(2), tx.init(params), params=params, inplace=False)
        >>> first
        tensor([-0., -0.])
    """
    level = (2.0 * (1.0 - momentum) / lr) ** 0.5
    return chain(
        inject_filtered_noise(temperature, (level,), beside=(0, 3 if momentum else 2), generator=generator),
        add_momentum(momentum),
        delay(),
        scale_by_neg_lr(lr),
    )
