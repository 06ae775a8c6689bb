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

**Splittings** of underdamped Langevin dynamics, in their usual parametrisation by step ``h`` and friction ``gamma``:

    d theta = p dt,      dp = -grad U dt - gamma p dt + sqrt(2 gamma T) dW.

With the flows A (drift), B (kick), O (exact Ornstein-Uhlenbeck) and U (A and O solved together, exactly) a step is a
palindrome. Each needs one gradient, and between two gradients the parameters move as SGD with momentum moves them. With
``mu = exp(-gamma h)`` they are the chains

    BAOAB   lr = h^2 (1 + mu) / 2,  momentum mu,  noise sqrt(2 T (1 - mu) / lr) (xi_t + xi_{t-1}) / 2   = sghmc, order 2
    OBABO   the same lr and momentum,             noise sqrt(2 T (1 - mu) / lr) xi_t                    = sghmc, order 1
    UBU     lr = h (1 - mu) / gamma, momentum mu, noise e_t = -n1_t / lr - n2_{t-1} / h + mu n1_{t-1} / lr.

In BAOAB and OBABO these are the positions at the ends of the steps (a first half kick apart), in UBU those in its middle,
where its gradient is taken. ``n1, n2`` are the exact displacements of position and velocity by the noise within a step,

    Var n1 = (2 T / gamma) (h - 2 (1 - mu) / gamma + (1 - mu^2) / (2 gamma)),  Var n2 = T (1 - mu^2),
    Cov(n1, n2) = (T / gamma) (1 - mu)^2.

Bias of the parameters' law, on a smooth loss: second order in ``h`` at fixed ``gamma`` for all three. At fixed ``mu``, that
is for friction that grows as ``1 / h``, BAOAB's is of fourth order in ``h`` (second in lr), and on quadratic losses it is
zero at any. OBABO's variance on curvature ``k`` is ``T / k / (1 - h^2 k / 4)``.

Leimkuhler and Matthews, "Rational construction of stochastic numerical methods for molecular sampling" (2013); Bussi and
Parrinello (2007); Sanz-Serna and Zygalakis, "Wasserstein distance estimates for the distributions of numerical
approximations to ergodic stochastic differential equations" (2021).
"""

from __future__ import annotations

import math
from typing import NamedTuple

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


class ChainParameters(NamedTuple):
    """``lr`` and ``momentum`` of the SGD inside a splitting."""

    lr: float
    momentum: float


@checks.factory_takes()
def baoab(
    step_size: float, friction: float, *, temperature: ScalarOrSchedule, generator: torch.Generator | None = None
) -> Chain:
    """Langevin dynamics by the BAOAB splitting (Leimkuhler and Matthews, 2013), one gradient a step. At
    ``temperature=0`` it is SGD with momentum.

    Args:
        step_size: ``h``, a time, positive; the learning rate is ``h^2 (1 + mu) / 2``.
        friction: ``gamma``, an inverse time, positive.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data, 1 for an unnormalised loss. Along a schedule the
            variance stays between the old and the new value and never turns.
        generator: source of the random key (default: torch's global generator).

    Returns:
        The chain ``sghmc(lr, mu)`` with matched noise.

    Raises:
        ValueError: a step size or friction that is not positive and finite.

    Example:
        >>> import bayesopt_chain as bc
        >>> lr, momentum = bc.samplers.splitting_parameters(0.1, friction=1.0)
        >>> bc.samplers.baoab(0.1, friction=1.0, temperature=0.0) == bc.sghmc(lr, momentum, temperature=0.0)
        True
    """
    lr, momentum = splitting_parameters(step_size, friction)
    return sghmc(lr, momentum, temperature=temperature, generator=generator)


@checks.factory_takes()
def obabo(
    step_size: float, friction: float, *, temperature: ScalarOrSchedule, generator: torch.Generator | None = None
) -> Chain:
    """Langevin dynamics by the OBABO splitting (Bussi and Parrinello, 2007).

    Its parameters are those of SGHMC with white noise, so that :func:`baoab` has the smaller bias at the same cost.

    Args:
        step_size: ``h``, a time, positive.
        friction: ``gamma``, an inverse time, positive.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data, 1 for an unnormalised loss. Along a schedule the
            variance stays between the old and the new value, but may turn on its way.
        generator: source of the random key (default: torch's global generator).

    Returns:
        The chain ``sghmc(lr, mu, order=1)``.

    Raises:
        ValueError: a step size or friction that is not positive and finite.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> from bayesopt_chain.testing import stationary_covariance
        >>> tx = bc.samplers.obabo(0.2, friction=1.0, temperature=1.0)
        >>> k = torch.tensor([[4.0]], dtype=torch.float64)
        >>> round(stationary_covariance(tx, k).item() * 4 * (1 - 0.2**2 * 4 / 4), 12)
        1.0
    """
    lr, momentum = splitting_parameters(step_size, friction)
    return sghmc(lr, momentum, temperature=temperature, order=1, generator=generator)


@checks.factory_takes(step_size=checks.POSITIVE, friction=checks.POSITIVE)
def ubu(
    step_size: float, friction: float, *, temperature: ScalarOrSchedule, generator: torch.Generator | None = None
) -> Chain:
    """Langevin dynamics by the UBU splitting (Sanz-Serna and Zygalakis, 2021), its two noises having their exact joint law.

    The parameters are the mid-step positions, where UBU takes its gradient. At ``temperature=0`` it is SGD with momentum
    ``exp(-gamma h)`` and learning rate ``h (1 - exp(-gamma h)) / gamma``. Two normals a parameter and step.

    Args:
        step_size: ``h``, a time, positive.
        friction: ``gamma``, an inverse time, positive.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data, 1 for an unnormalised loss. Along a schedule the
            variance stays between the old and the new value and never turns.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds two tensors for each parameter.

    Raises:
        ValueError: a step size or friction that is not positive and finite.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.samplers.ubu(0.1, friction=2.0, temperature=1.0), torch.zeros(3)
        >>> updates, state = tx.update(torch.ones(3), tx.init(params), params=params, inplace=False)
        >>> updates.shape
        torch.Size([3])
    """
    return _ubu(step_size, friction, temperature, generator)


@checks.factory_takes(step_size=checks.POSITIVE, friction=checks.POSITIVE)
def palindromic_ubu(
    step_size: float, friction: float, *, temperature: ScalarOrSchedule, generator: torch.Generator | None = None
) -> Chain:
    """Symmetric minibatch splitting (Paulin, Whalley, Chada and Leimkuhler, 2024): :func:`ubu` on palindromic epochs.

    The batches of an epoch come in an order, and in the next in the reverse one, ``bc.epochs(..., order="palindrome")``:
    the steps of both together are a palindrome, whose bias by the batches is of second order in ``h`` where that of
    independent batches is of first. It asks for a memory of about an epoch, ``friction * step_size`` times the batches of an
    epoch at most about 1; with a shorter one palindromes are no better than reshuffled epochs (docs/minibatches.md).

    Args:
        step_size: ``h``, a time, positive.
        friction: ``gamma``, an inverse time, positive.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data, 1 for an unnormalised loss. Along a schedule the
            variance stays between the old and the new value and never turns.
        generator: source of the random key (default: torch's global generator).

    Returns:
        The chain of :func:`ubu`, which :func:`bayesopt_chain.sample` refuses to run on ``bc.epochs`` of another order; a loop
        of one's own has to see to that.

    Raises:
        ValueError: a step size or friction that is not positive and finite.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
        >>> tx = bc.samplers.palindromic_ubu(0.1, 1.0, temperature=1 / 12)
        >>> step, w = bc.make_step(lambda w, batch: (batch[0] - w).square().mean(), tx), torch.zeros(2)
        >>> data = bc.epochs((x,), 3, order="palindrome", seed=0)
        >>> len(bc.sample(step, w, tx.init(w), data, steps=16, burn_in=8))
        8
    """
    return _ubu(step_size, friction, temperature, generator, "palindrome")


def _ubu(
    h: float,
    gamma: float,
    temperature: ScalarOrSchedule,
    generator: torch.Generator | None,
    batch_order: str | None = None,
) -> Chain:
    """UBU with a step ``h`` and friction ``gamma``, for batches of an order, if it is meant for one."""
    mu = math.exp(-gamma * h)
    lr = h * -math.expm1(-gamma * h) / gamma
    n1, n2, n2_alone = ubu_noise(h, gamma)
    return chain(
        inject_filtered_noise(
            temperature,
            (-n1 / lr, 0.0),
            (mu * n1 / lr - n2 / h, -n2_alone / h),
            beside=(0, 2),
            generator=generator,
            batch_order=batch_order,
        ),
        add_momentum(mu),
        scale_by_neg_lr(lr),
    )


def splitting_parameters(step_size: float, friction: float) -> ChainParameters:
    """``lr = h^2 (1 + mu) / 2`` and ``momentum = mu = exp(-gamma h)`` of BAOAB and OBABO.

    Args:
        step_size: ``h``, a time, positive.
        friction: ``gamma``, an inverse time, positive.

    Returns:
        ``(lr, momentum)``, a named tuple.

    Raises:
        ValueError: a step size or friction that is not positive and finite.

    Example:
        >>> import bayesopt_chain as bc
        >>> lr, momentum = bc.samplers.splitting_parameters(0.1, friction=1.0)
        >>> round(lr, 6), round(momentum, 6)
        (0.009524, 0.904837)
    """
    checks.POSITIVE("step_size", step_size)
    checks.POSITIVE("friction", friction)
    mu = math.exp(-friction * step_size)
    if mu == 1.0:
        raise ValueError(
            f"step_size * friction = {step_size * friction:.3g} is lost to rounding; raise step_size or friction"
        )
    return ChainParameters(step_size**2 * (1.0 + mu) / 2.0, mu)


def ubu_noise(h: float, gamma: float) -> tuple[float, float, float]:
    """``(a, b, c)`` at T = 1 such that ``n1 = a xi_1`` and ``n2 = b xi_1 + c xi_2``."""
    x = gamma * h
    if x < 1.0:  # the closed form below loses x^-3 digits to cancellation
        bracket = sum((-x) ** n / math.factorial(n) * (2.0 - 2.0 ** (n - 1)) for n in range(3, 30))
    else:
        bracket = x + 2.0 * math.expm1(-x) - 0.5 * math.expm1(-2.0 * x)
    a = math.sqrt(2.0 * bracket) / gamma
    b = math.expm1(-x) ** 2 / gamma / a
    return a, b, math.sqrt(max(-math.expm1(-2.0 * x) - b * b, 0.0))
