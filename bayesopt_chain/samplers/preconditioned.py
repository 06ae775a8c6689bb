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

**Whether the chain is stable** with its preconditioner as it is now: an update maps ``x = (theta, state)`` to ``x'``. With
``J = dx' / dx`` at the given parameters and state (the noise, which is the same for both, drops out) a small displacement
becomes ``J^n dx`` after ``n`` updates and grows as ``rho(J)^n``: the chain diverges where the spectral radius exceeds 1.
``rho`` is found by power iteration, ``dx <- J dx / |J dx|``, as the geometric mean of ``|J dx|`` over the second half, so that
pairs of complex eigenvalues count too.

For a chain of learning rate ``lr``, heavy-ball momentum ``mu`` and a frozen preconditioner ``P`` on curvature ``H`` this is the
condition ``lr lambda_max(P^(1/2) H P^(1/2)) < 2 (1 + mu)``; for Adam's first moment, ``< 2 (1 + b1) / (1 - b1)``
(Cohen et al., 2022).

A preconditioner that learns steps back where the loss is steep; one that ``freeze_after`` stopped cannot. No chain
knows its loss's curvature, so that no update can tell: :func:`step_growth` is what to call once the scale is frozen, or
before the first update of RAdam, whose first updates are not scaled at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import checks
from bayesopt_chain.checks import MOMENTUM, factory_takes
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.curvature import jvp
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


@checks.takes()
def step_growth(
    loss: Callable[[Any, Any], Any],
    tx: GradientTransformation,
    params: Any,
    state: Any,
    batch: Any,
    *,
    steps: int = 100,
    generator: torch.Generator | None = None,
) -> float:
    """The factor by which one update multiplies small displacements in the long run; above 1 the chain diverges.

    Call it behind ``freeze_after`` with a batch as large as fits. While a preconditioner still learns, the answer is that
    of its derivative at this one point and says little.

    Args:
        loss: ``loss(params, batch)``, a scalar or ``(scalar, aux)``, twice differentiable by ``torch.func``.
        tx: any gradient transformation whose ``update`` takes no further keywords.
        params: the parameters, where the curvature is taken.
        state: the state of ``tx`` there; it is left as it is.
        batch: what the loss is evaluated on.
        steps: iterations, each the cost of about three gradients; the answer is right to about ``3 / steps``.
        generator: of the first displacement (default: a fixed seed).

    Returns:
        The spectral radius of one update.

    Raises:
        ValueError: ``steps`` below 2; parameters without a floating-point leaf.

    Warns:
        RuntimeWarning: the answer exceeds 1 by more than ``3 / steps``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def loss(p, batch):
        ...     return 50.0 * (p**2).sum()  # curvature 100
        >>> tx, p = bc.sgd(0.015), torch.ones(2)
        >>> round(bc.samplers.step_growth(loss, tx, p, tx.init(p), ()), 3)
        0.5
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise ValueError(f"step_growth: steps must be a whole number, at least 2, got {steps!r}")
    both: Any = (params, state)
    leaves, spec = optree.tree_flatten(both)
    moving = [i for i, x in enumerate(leaves) if torch.is_tensor(x) and x.is_floating_point() and x.numel()]
    if not moving:
        raise ValueError("step_growth: neither params nor state has a floating-point tensor, so that nothing can grow")

    def value(p: Any) -> Tensor:
        out = loss(p, batch)
        return out[0] if isinstance(out, tuple) else out

    def step(chosen: list[Tensor]) -> list[Tensor]:
        full = list(leaves)
        for i, x in zip(moving, chosen):
            full[i] = x
        p, s = optree.tree_unflatten(spec, full)
        updates, s = tx.update(torch.func.grad(value)(p), s, params=p, inplace=False)
        p = optree.tree_map(lambda x, u: x + u, p, updates)
        moved: Any = (p, s)
        after = optree.tree_leaves(moved)
        return [after[i] for i in moving]

    here = [leaves[i].detach() for i in moving]
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    dx = [torch.randn(x.shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device) for x in here]
    logs = []
    for _ in range(steps):
        dx = jvp(step, (here,), (dx,))[1]
        size = math.sqrt(sum(float(x.double().square().sum()) for x in dx))
        if not 0.0 < size < math.inf:
            return 0.0 if size == 0.0 else math.inf
        logs.append(math.log(size))
        dx = [x / size for x in dx]
    late = logs[steps // 2 :]
    growth = math.exp(sum(late) / len(late))
    if growth > 1.0 + 3.0 / steps:
        checks.warn(
            f"step_growth: an update multiplies small displacements by {growth:.3g}, so that the chain diverges; lower lr"
            " (by a schedule from the update on at which freeze_after stops the preconditioner), or freeze later",
            RuntimeWarning,
        )
    return growth
