r"""Splittings of underdamped Langevin dynamics, in their usual parametrisation by step ``h`` and friction ``gamma``:

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
from bayesopt_chain.links.learning_rate import scale_by_neg_lr
from bayesopt_chain.links.momentum import add_momentum
from bayesopt_chain.samplers.langevin import sghmc
from bayesopt_chain.schedules import ScalarOrSchedule


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
