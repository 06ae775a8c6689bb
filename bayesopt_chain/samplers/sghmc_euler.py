r"""SGHMC by explicit Euler, whose gradient is one step stale: for comparison with what others run under that name.

With step ``eps``, friction ``alpha`` and momentum scale ``sigma``,

    theta_{t+1} = theta_t + eps sigma^-2 m_t,
    m_{t+1} = m_t - eps (grad U(theta_t) + sigma^-2 alpha m_t) + N(0, 2 eps alpha T),

both right-hand sides at time ``t`` (Duffield et al., "Scalable Bayesian learning with posteriors", 2025, with ``beta = 0``).
With ``v = -m / eps`` this is SGD with momentum ``mu = 1 - eps alpha / sigma^2``, learning rate ``lr = eps^2 / sigma^2``, and an
update that arrives one step late. At T = 0 it is therefore *not* SGD with momentum, and it is stable only for
``lr * curvature < 1 - mu`` where SGD with momentum allows ``2 (1 + mu)``. :func:`bayesopt_chain.sghmc` is the same dynamics
without the delay.
"""

from __future__ import annotations

import torch

from bayesopt_chain.checks import MOMENTUM, POSITIVE, factory_takes
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.links.keyed import inject_filtered_noise
from bayesopt_chain.links.learning_rate import scale_by_neg_lr
from bayesopt_chain.links.momentum import add_momentum, delay
from bayesopt_chain.schedules import ScalarOrSchedule


@factory_takes(lr=POSITIVE, momentum=MOMENTUM)
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
