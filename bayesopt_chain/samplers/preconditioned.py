r"""Langevin samplers with a preconditioner ``P``. If it is frozen, each of them samples ``exp(-loss / T)``.

**A diagonal that is learned from the gradients:**

    pSGLD            nu <- alpha nu + (1 - alpha) g^2,  P = 1 / (sqrt(nu) + eps),
                     theta <- theta - lr (P g + sqrt(2 T P / lr) xi)
    Adam-SGHMC       the first moment takes gradient and noise, P = 1 / (sqrt(nu_hat) + eps)
    adaptive SGHMC   v <- mu v + P (g + noise),  theta <- theta - lr v,  P = 1 / (sqrt(V) + eps), averaged over a window
                     that adapts, from tau = m = V = 0:
                     m <- m + (g - m) / (tau + 1),  V <- V + (g^2 - V) / (tau + 1),  tau <- 1 + tau (1 - m^2 / V).

``m`` and ``V`` are averages of ``g`` and ``g^2`` with the same weights, which are positive and, since the first has
weight 1, sum to 1: ``0 <= m^2 <= V`` and ``1 <= tau``, always, and no starting value is mixed in. (With the weight ``1
/ tau``, as printed in the paper, ``tau = 1`` keeps the last gradient alone, ``m^2 = V``, and ``tau`` never grows;
rounding then makes ``V`` negative.)

The noise never reaches the statistics that make ``P``, and its constants are matched to the chain.

While ``P`` follows the gradients none of them is exact: the target is roughly ``P^-1 exp(-loss / T)``. **Freeze P** after
burn-in (``freeze_after``): from there on sampling is exact where the chain is. The drift ``T div P`` of Riemannian Langevin
dynamics would repair it only where ``P`` is a function of the parameters alone, that is for ``alpha = 0`` and full gradients.

Li, Chen, Carlson and Carin, "Preconditioned stochastic gradient Langevin dynamics" (2016); Springenberg, Klein, Falkner and
Hutter, "Bayesian optimization with robust Bayesian neural networks" (2016). The latter's noise has variance
``2 lr (1 - mu) P - lr^2``, the second term being its estimate of the gradients' own noise; nothing is subtracted here.

**A frozen precision of any structure** (Fisher, K-FAC, low rank), ``P = Lambda^-1 = R R^T``. With ``e`` the noise that SGD of
the same lr and momentum would be given,

    u = Lambda^-1 g + R e,      v <- mu v + u,      theta <- theta - lr v,

which samples ``exp(-loss / T)`` exactly for quadratic losses at order 2, whether or not ``Lambda`` and the curvature commute.
With ``Lambda`` the Hessian every direction is sampled at one speed. Langevin dynamics with a metric that is frozen: Roberts and
Stramer (2002); with the Fisher information: Girolami and Calderhead (2011).
"""

from __future__ import annotations

import torch

from bayesopt_chain.checks import MOMENTUM, factory_takes
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.links.adam import scale_by_adam
from bayesopt_chain.links.langevin_noise import inject_langevin_noise
from bayesopt_chain.links.learning_rate import scale_by_neg_lr
from bayesopt_chain.links.momentum import add_momentum
from bayesopt_chain.links.preconditioner import SupportsSolve, scale_by_preconditioner
from bayesopt_chain.links.rms import scale_by_adaptive_window, scale_by_rms
from bayesopt_chain.schedules import ScalarOrSchedule


@factory_takes()
def psgld(
    lr: ScalarOrSchedule = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    *,
    temperature: ScalarOrSchedule,
    freeze_after: int | None = None,
    order: int = 2,
    generator: torch.Generator | None = None,
) -> Chain:
    """Preconditioned SGLD (Li et al., 2016): RMSprop with noise. At ``temperature=0`` it is RMSprop.

    Args:
        lr: learning rate: number, 0-d tensor or schedule.
        alpha: weight of the past in the average of squared gradients, in [0, 1).
        eps: added to its root.
        temperature: number, 0-d tensor or schedule; ``1 / N`` for a loss that is a mean over ``N`` data.
        freeze_after: number of updates after which the preconditioner stays as it is; sampling is exact from there on, if the
            chain is stable with that preconditioner: see :func:`step_growth`.
        order: 2 (default) or 1, as for :func:`bayesopt_chain.sgld`.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds two tensors for each parameter, one at order 1.

    Raises:
        ValueError: an argument out of range.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.samplers.psgld(0.01, temperature=1 / 500, freeze_after=1000)
        chain(
            scale_by_rms(decay=0.99, eps=1e-08, freeze_after=1000),
            inject_langevin_noise(0.002),  # acts inside scale_by_rms, matched to F = 0.01
            scale_by_neg_lr(0.01),
        )
    """
    return chain(
        scale_by_rms(alpha, eps, freeze_after=freeze_after),
        inject_langevin_noise(temperature, order=order, generator=generator),
        scale_by_neg_lr(lr),
    )


@factory_takes()
def adam_sghmc(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    *,
    temperature: ScalarOrSchedule,
    freeze_after: int | None = None,
    order: int = 2,
    generator: torch.Generator | None = None,
) -> Chain:
    """SGHMC preconditioned by Adam (Kingma and Ba, 2014): the first moment is the momentum. At ``temperature=0`` it is Adam.

    Args:
        lr: learning rate: number, 0-d tensor or schedule.
        betas: weights of the past in the two moments, in [0, 1).
        eps: added to the root.
        temperature: number, 0-d tensor or schedule; ``1 / N`` for a loss that is a mean over ``N`` data.
        freeze_after: number of updates after which the preconditioner stays as it is; sampling is exact from there on, if the
            chain is stable with that preconditioner: see :func:`step_growth`.
        order: 2 or 1, as for :func:`bayesopt_chain.sghmc`.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds three tensors for each parameter, two at order 1.

    Raises:
        ValueError: an argument out of range.

    Example:
        >>> import bayesopt_chain as bc
        >>> tx = bc.samplers.adam_sghmc(1e-3, temperature=1 / 500, freeze_after=1000)
    """
    return chain(
        scale_by_adam(*betas, eps, freeze_after=freeze_after),
        inject_langevin_noise(temperature, order=order, generator=generator),
        scale_by_neg_lr(lr),
    )


@factory_takes()
def adaptive_sghmc(
    lr: ScalarOrSchedule = 1e-2,
    momentum: float = 0.95,
    *,
    temperature: ScalarOrSchedule,
    burn_in: int,
    eps: float = 1e-8,
    order: int = 2,
    generator: torch.Generator | None = None,
) -> Chain:
    """Scale-adapted SGHMC (Springenberg et al., 2016): momentum behind ``V^(-1/2)``, learned during ``burn_in`` updates.

    At ``temperature=0`` it is SGD with momentum behind that scaling.

    Args:
        lr: learning rate, the square of the paper's step: number, 0-d tensor or schedule.
        momentum: in [0, 1), one less the paper's ``mdecay``.
        temperature: number, 0-d tensor or schedule; ``1 / N`` for a loss that is a mean over ``N`` data.
        burn_in: updates after which the scale is frozen, at least 1. Collect samples after them, if the chain is stable with
            that scale: see :func:`step_growth`.
        eps: added to the root of the mean square, positive.
        order: 2 or 1, as for :func:`bayesopt_chain.sghmc`.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds five tensors for each parameter, four at order 1.

    Raises:
        ValueError: no burn-in, or another argument out of range.

    Example:
        >>> import bayesopt_chain as bc
        >>> tx = bc.samplers.adaptive_sghmc(0.01, temperature=1 / 500, burn_in=1000)
    """
    return chain(
        scale_by_adaptive_window(burn_in, eps),
        add_momentum(momentum),
        inject_langevin_noise(temperature, order=order, generator=generator),
        scale_by_neg_lr(lr),
    )


@factory_takes(momentum=MOMENTUM)
def langevin_with_precision(
    precision: SupportsSolve,
    lr: ScalarOrSchedule,
    momentum: float = 0.0,
    *,
    temperature: ScalarOrSchedule,
    order: int = 2,
    generator: torch.Generator | None = None,
) -> Chain:
    """SGLD or SGHMC preconditioned by ``Lambda^-1``. At ``temperature=0`` it is (natural-)gradient descent with momentum.

    Args:
        precision: answers ``solve(tree)`` and ``sqrt_solve(tree)``, such as any precision of this library; it is frozen.
            Decompose it first (``precision.factorised()``) so that steps only solve.
        lr: learning rate, positive.
        momentum: in [0, 1).
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data.
        order: 2 (matched noise) or 1 (white).
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds up to two tensors for each parameter.

    Raises:
        TypeError: a precision without ``solve`` or ``sqrt_solve``.
        ValueError: an argument out of range.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> class Diagonal:
        ...     def solve(self, x): return x / torch.tensor([1.0, 4.0])
        ...     def sqrt_solve(self, x): return x / torch.tensor([1.0, 2.0])
        >>> tx, params = bc.samplers.langevin_with_precision(Diagonal(), 1.0, temperature=0.0), torch.zeros(2)
        >>> tx.update(torch.ones(2), tx.init(params), params=params, inplace=False)[0]
        tensor([-1.0000, -0.2500])
    """
    for method in ("solve", "sqrt_solve"):
        if not callable(getattr(precision, method, None)):
            raise TypeError(
                f"langevin_with_precision: precision has no {method}(tree), got {type(precision).__name__}; "
                "pass a precision of bc.precision, or an object with solve and sqrt_solve"
            )
    return chain(
        scale_by_preconditioner(precision),
        add_momentum(momentum),
        inject_langevin_noise(temperature, order=order, generator=generator),
        scale_by_neg_lr(lr),
    )
