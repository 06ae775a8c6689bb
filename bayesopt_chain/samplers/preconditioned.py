r"""Samplers with a diagonal preconditioner learned from the gradients. With frozen ``P`` each samples ``exp(-loss / T)``:

    pSGLD            nu <- alpha nu + (1 - alpha) g^2,  P = 1 / (sqrt(nu) + eps),
                     theta <- theta - lr (P g + sqrt(2 T P / lr) xi)
    its correction   theta <- theta - lr (P g - T dP/dtheta + sqrt(2 T P / lr) xi)
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
dynamics, with ``H`` the Hessian ``T dP_i / dtheta_i = -T (1 - alpha) P_i^2 g_i H_ii / sqrt(nu_i)``, repairs ``P`` only where
it is a function of the parameters alone, that is for ``alpha = 0`` and full gradients; with memory in ``nu`` it does not.

Li, Chen, Carlson and Carin, "Preconditioned stochastic gradient Langevin dynamics" (2016); Springenberg, Klein, Falkner and
Hutter, "Bayesian optimization with robust Bayesian neural networks" (2016). The latter's noise has variance
``2 lr (1 - mu) P - lr^2``, the second term being its estimate of the gradients' own noise; nothing is subtracted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core import counters
from bayesopt_chain.core.chain import Chain, Rule, chain
from bayesopt_chain.core.leaves import each, zeros_like
from bayesopt_chain.core.response import Adaptive
from bayesopt_chain.links import own_noise
from bayesopt_chain.links.adaptive import RunningScale, _noisy, _rms, scale_by_adam, scale_by_rms
from bayesopt_chain.links.langevin_noise import Temperature, inject_langevin_noise
from bayesopt_chain.links.learning_rate import ScalarOrSchedule, scale_by_neg_lr
from bayesopt_chain.links.momentum import add_momentum


def psgld(
    lr: ScalarOrSchedule = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    *,
    temperature: Temperature,
    freeze_after: int | None = None,
    order: int | None = None,
    corrected: bool = False,
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
        order: 2 (default) or 1, as for :func:`bayesopt_chain.sgld`; 1 with ``corrected``.
        corrected: add the drift ``T div P``. ``update`` then takes the diagonal of the loss's Hessian as ``hessian_diagonal=``,
            a tree like the parameters. The correction is exact, to first order in lr, for ``alpha=0`` with full gradients and
            a large ``eps``; with memory in the average it is a heuristic (see the module), and ``freeze_after`` is the cure.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds two tensors for each parameter, one at order 1.

    Raises:
        ValueError: an argument out of range; ``order=2`` with ``corrected``; at ``update``, a missing ``hessian_diagonal=``.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.samplers.psgld(0.01, temperature=1 / 500, freeze_after=1000)
        chain(
            scale_by_rms(decay=0.99, eps=1e-08, freeze_after=1000),
            inject_langevin_noise(0.002),  # acts inside scale_by_rms, matched to F = 0.01
            scale_by_neg_lr(0.01),
        )
    """
    checks.temperature(temperature)
    if corrected and order not in (None, 1):
        raise ValueError(f"psgld: order must be 1 with corrected=True, whose noise is white, got {order!r}")
    corrected = corrected and not own_noise.is_zero(temperature)  # T div P is 0 there
    scaling = scale_by_rms(alpha, eps, freeze_after=freeze_after)
    if corrected:
        scaling = Chain((RunningScaleWithDivergence(_rms, alpha, eps, 0.0, freeze_after, temperature=temperature),))
    return chain(
        scaling,
        inject_langevin_noise(temperature, order=order or (1 if corrected else 2), generator=generator),
        scale_by_neg_lr(lr),
    )


@dataclass(frozen=True)
class RunningScaleWithDivergence(RunningScale):
    """RMSprop's scaling, less ``T dP/dtheta``; takes the Hessian's diagonal as ``hessian_diagonal=``."""

    temperature: Any = 0.0
    accepts = frozenset({"hessian_diagonal"})

    def init(self, params):
        return super().init(params)._replace(count=counters.zeros(params))

    def update(self, g, state, params, ctx):
        if ctx.extra.get("hessian_diagonal") is None:
            raise ValueError(
                "psgld: with corrected=True update needs hessian_diagonal=, the diagonal of the loss's Hessian as a tree "
                "like the parameters; pass make_step(..., hessian_diagonal=fn), or use corrected=False"
            )
        hessian = optree.tree_leaves(ctx.extra["hessian_diagonal"], none_is_leaf=True)
        clean = [None if x is None else x.clone() for x in g] if ctx.inplace else g
        strength = counters.each(self._strength, state.count)
        out, state = super().update(g, state, params, ctx)

        def drift(u: Tensor, x: Tensor, nu: Tensor, h: Tensor, strength: Tensor) -> Tensor:
            root = nu.sqrt()
            slope = (1.0 - self.decay) * x * h / torch.where(root > 0, root, torch.ones_like(root))
            slope = strength * slope / (root + self.eps) ** 2
            return (u.add_ if ctx.inplace else u.add)(slope.to(u.dtype))

        return each(drift, out, clean, state.nu, hessian, strength), state

    def _strength(self, count: Tensor) -> Tensor:
        """The temperature while the preconditioner still learns, then 0."""
        temperature = counters.scalar(own_noise.now(self.temperature, count), count.device)
        if self.freeze_after is None:
            return temperature
        return torch.where(count < self.freeze_after, temperature, torch.zeros_like(temperature))

    def __str__(self) -> str:
        return super().__str__().replace("scale_by_rms", "scale_by_rms_corrected")


def adam_sghmc(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    *,
    temperature: Temperature,
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


class AdaptiveWindowState(NamedTuple):
    """Window ``tau``, mean ``m`` and mean square ``V`` of the gradients, like each parameter; updates seen."""

    tau: tuple[Tensor, ...]
    mean: tuple[Tensor, ...]
    square: tuple[Tensor, ...]
    count: tuple[Tensor, ...]


@dataclass(frozen=True)
class AdaptiveWindow(Rule):
    """Divide by the root of a mean square whose window follows the gradients' signal-to-noise ratio."""

    freeze_after: int
    eps: float = 1e-8
    response = Adaptive()

    def init(self, params):
        return AdaptiveWindowState(*(zeros_like(params) for _ in range(3)), counters.zeros(params))

    def update(self, g, state, params, ctx):
        tau, mean, square = list(state.tau), list(state.mean), list(state.square)
        for i, x in enumerate(g):
            if x is None:
                continue
            learn = state.count[i] < self.freeze_after
            x = x.detach()
            new_mean = mean[i] + (x - mean[i]) / (tau[i] + 1.0)
            new_square = square[i] + (x * x - square[i]) / (tau[i] + 1.0)
            positive = new_square > 0  # not where every gradient has been 0, or its square underflows
            signal = torch.where(positive, new_mean * new_mean / torch.where(positive, new_square, 1.0), 0.0)
            window = 1.0 + tau[i] * (1.0 - signal.clamp(max=1.0))
            tau[i] = torch.where(learn, window, tau[i])
            mean[i] = torch.where(learn, new_mean, mean[i])
            square[i] = torch.where(learn, new_square, square[i])
        state = AdaptiveWindowState(
            own_noise.write(state.tau, tau, ctx.inplace),
            own_noise.write(state.mean, mean, ctx.inplace),
            own_noise.write(state.square, square, ctx.inplace),
            counters.increment(state.count, g, ctx.inplace),
        )
        denominators = each(lambda x, v: v.sqrt().add(self.eps), g, state.square)
        return each(Tensor.div_ if ctx.inplace else Tensor.div, _noisy(g, denominators, ctx), denominators), state

    def __str__(self) -> str:
        return f"scale_by_adaptive_window(freeze_after={self.freeze_after}, eps={self.eps})"


def scale_by_adaptive_window(freeze_after: int, eps: float = 1e-8) -> Chain:
    """Divide by the root of the gradients' mean square over a window that adapts (Springenberg et al., 2016).

    Args:
        freeze_after: updates of burn-in, at least 1, after which the scale stays as it is.
        eps: added to the root, positive. A parameter whose gradient is always 0 is multiplied by ``1 / eps``, and so is
            its noise's variance.

    Returns:
        A link; its state holds three tensors for each parameter.

    Raises:
        ValueError: no burn-in, or ``eps`` not positive.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.samplers.scale_by_adaptive_window(10)
        >>> tx.update([torch.tensor([2.0])], tx.init([torch.zeros(1)]), inplace=False)[0]
        [tensor([1.])]
    """
    if isinstance(freeze_after, bool) or not isinstance(freeze_after, int) or freeze_after < 1:
        raise ValueError(
            f"scale_by_adaptive_window: freeze_after must be a number of burn-in updates, at least 1, got {freeze_after!r}; "
            "nothing is learned without one, and sampling is exact only behind it"
        )
    checks.positive("scale_by_adaptive_window: eps", eps)
    return Chain((AdaptiveWindow(freeze_after, float(eps)),))


def adaptive_sghmc(
    lr: ScalarOrSchedule = 1e-2,
    momentum: float = 0.95,
    *,
    temperature: Temperature,
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
