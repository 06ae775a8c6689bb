r"""Langevin sampling preconditioned by the inverse of any Gaussian precision: ``P = Lambda^-1`` (Fisher, K-FAC, low rank).

With ``R R^T = Lambda^-1`` and ``e`` the noise that SGD of the same lr and momentum would be given,

    u = Lambda^-1 g + R e,      v <- mu v + u,      theta <- theta - lr v,

which samples ``exp(-loss / T)`` with the preconditioner frozen, exactly for quadratic losses at order 2, whether or not
``Lambda`` and the curvature commute. With ``Lambda`` the Hessian every direction is sampled at one speed.

It is :func:`bayesopt_chain.scale_by_preconditioner` of the precision in front of SGHMC. Langevin dynamics with a metric that
is frozen: Roberts and Stramer (2002); with the Fisher information: Girolami and Calderhead (2011).
"""

from __future__ import annotations

import torch

from bayesopt_chain.checks import MOMENTUM, factory_takes
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.links.langevin_noise import inject_langevin_noise
from bayesopt_chain.links.learning_rate import scale_by_neg_lr
from bayesopt_chain.links.momentum import add_momentum
from bayesopt_chain.links.preconditioner import SolvePrecision, SupportsSolve
from bayesopt_chain.schedules import ScalarOrSchedule


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
        Chain((SolvePrecision(precision),)),
        add_momentum(momentum),
        inject_langevin_noise(temperature, order=order, generator=generator),
        scale_by_neg_lr(lr),
    )
