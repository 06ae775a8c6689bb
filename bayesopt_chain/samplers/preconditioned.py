r"""Samplers with a diagonal preconditioner learned from the gradients. With frozen ``P`` each samples ``exp(-loss / T)``:

    pSGLD            nu <- alpha nu + (1 - alpha) g^2,  P = 1 / (sqrt(nu) + eps),
                     theta <- theta - lr (P g + sqrt(2 T P / lr) xi)
    its correction   theta <- theta - lr (P g - T dP/dtheta + sqrt(2 T P / lr) xi)
    Adam-SGHMC       the first moment takes gradient and noise, P = 1 / (sqrt(nu_hat) + eps)
    adaptive SGHMC   v <- mu v + P (g + noise),  theta <- theta - lr v,  P = V^(-1/2), V averaged over a window tau that
                     adapts: tau <- tau + 1 - tau m^2 / V,  m <- m + (g - m) / tau,  V <- V + (g^2 - V) / tau.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import At
from bayesopt_chain.core.op import Leaves, Op
from bayesopt_chain.core.scalar_or_schedule import ScalarOrSchedule, by_count, is_zero, new_counts, now, scalar
from bayesopt_chain.links.adam import scale_by_adam
from bayesopt_chain.links.adaptive_window import scale_by_adaptive_window
from bayesopt_chain.links.langevin_noise import inject_langevin_noise
from bayesopt_chain.links.learning_rate import scale_by_neg_lr
from bayesopt_chain.links.momentum import add_momentum
from bayesopt_chain.links.rms import RunningScale, RunningScaleState, inverse_coloured, require_settings, scale_by_rms


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
    """Preconditioned SGLD: RMSprop with noise. At ``temperature=0`` it is RMSprop.

    Args:
        lr: learning rate. alpha: weight of the past in the average of squared gradients. eps: added to its root.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data.
        freeze_after: number of updates after which the preconditioner stays as it is; sampling is exact from there on.
        order: 2 or 1, as for :func:`bayesopt_chain.sgld`.
        generator: source of the random key (default: torch's global generator).

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


@dataclass(frozen=True)
class RunningScaleWithDivergence(RunningScale):
    """RMSprop's scaling, less ``T dP/dtheta``; takes the Hessian, a precision with its datum count, as ``curvature=``."""

    temperature: ScalarOrSchedule = 0.0

    @property
    def accepts(self) -> frozenset[str]:
        return frozenset({"curvature"})

    @property
    def needs(self) -> frozenset[str]:
        return self.accepts

    def init(self, leaves: Leaves, at: At) -> RunningScaleState:
        return super().init(leaves, at)._replace(count=new_counts(leaves))

    def learn(self, g: Leaves, state: RunningScaleState, op: Op, at: At) -> tuple[RunningScaleState, Any]:
        curvature = at.extra.get("curvature")
        if not (callable(getattr(curvature, "diag", None)) and hasattr(curvature, "count")):
            raise ValueError(
                f"psgld_corrected: update got curvature={type(curvature).__name__}, but it needs the loss's Hessian, an increment "
                "of an estimator of bc.curvature (make_step passes it, given curvature=); or use psgld"
            )
        hessian = [h / curvature.count.to(h.dtype) for h in at.leaves(curvature.diag())]
        strength = by_count(self._strength, state.count)
        state, denominators = super().learn(g, state, op, at)
        drifts = list[Tensor]()
        for x, nu, h, t in zip(g, state.nu, hessian, strength):
            root = nu.sqrt()
            slope = (1.0 - self.decay) * x * h / torch.where(root > 0, root, torch.ones_like(root))
            drifts.append((t * slope / (root + self.eps) ** 2).to(x.dtype))
        return state, list(zip(denominators, drifts))

    def colour(self, state: RunningScaleState, at: At, k: Sequence[int], e: Leaves, power: float) -> Leaves:
        return inverse_coloured(e, [at.learned[n][0] for n in k], power)

    def update(self, g: Leaves, state: RunningScaleState, op: Op, at: At) -> tuple[Leaves, RunningScaleState]:
        g = op.div(g, [d for d, _ in at.learned])
        return op.add(g, [drift for _, drift in at.learned]), state

    def _strength(self, count: Tensor) -> Tensor:
        """The temperature while the preconditioner still learns, then 0."""
        temperature = scalar(now(self.temperature, count), count.device)
        if self.freeze_after is None:
            return temperature
        return torch.where(count < self.freeze_after, temperature, torch.zeros_like(temperature))

    def __str__(self) -> str:
        return super().__str__().replace("scale_by_rms", "scale_by_rms_corrected")


def psgld_corrected(
    lr: ScalarOrSchedule = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    *,
    temperature: ScalarOrSchedule,
    freeze_after: int | None = None,
    generator: torch.Generator | None = None,
) -> Chain:
    """Preconditioned SGLD with its drift ``T div P``. Arguments as :func:`psgld`; white noise.

    ``update`` takes the loss's Hessian as ``curvature=``, a precision with its datum count of which the diagonal is used, such as
    an increment of ``bc.curvature.hessian(loss, "diagonal")``. The correction is
    exact, to first order in lr, for ``alpha=0`` with full gradients and a large ``eps``; with memory in the average it is a
    heuristic (see the module), and ``freeze_after`` is the cure.

    Raises:
        ValueError: at ``update``, a missing ``curvature=``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.samplers.psgld_corrected(0.01, alpha=0.0, eps=1.0, temperature=1.0), torch.zeros(2)
        >>> curvature = bc.precision.Diagonal(torch.ones(2), torch.tensor(1.0))
        >>> updates, state = tx.update(torch.ones(2), tx.init(params), params=params, curvature=curvature, inplace=False)
        >>> updates.shape
        torch.Size([2])
    """
    checks.temperature(temperature)
    if is_zero(temperature):
        return psgld(lr, alpha, eps, temperature=0.0, freeze_after=freeze_after)
    require_settings(eps, freeze_after)
    return chain(
        Chain((RunningScaleWithDivergence(False, alpha, eps, 0.0, freeze_after, temperature=temperature),)),
        inject_langevin_noise(temperature, order=1, generator=generator),
        scale_by_neg_lr(lr),
    )


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
    """SGHMC preconditioned by Adam: the first moment is the momentum. At ``temperature=0`` it is Adam.

    Args:
        lr: learning rate. betas: weights of the past in the two moments. eps: added to the root.
        temperature, freeze_after, order, generator: as for :func:`psgld`.

    Example:
        >>> import bayesopt_chain as bc
        >>> tx = bc.samplers.adam_sghmc(1e-3, temperature=1 / 500, freeze_after=1000)
    """
    return chain(
        scale_by_adam(*betas, eps, freeze_after=freeze_after),
        inject_langevin_noise(temperature, order=order, generator=generator),
        scale_by_neg_lr(lr),
    )


def adaptive_sghmc(
    lr: ScalarOrSchedule = 1e-2,
    momentum: float = 0.95,
    *,
    temperature: ScalarOrSchedule,
    burn_in: int,
    order: int = 2,
    generator: torch.Generator | None = None,
) -> Chain:
    """Scale-adapted SGHMC (Springenberg et al., 2016): momentum behind ``V^(-1/2)``, learned during ``burn_in`` updates.

    At ``temperature=0`` it is SGD with momentum behind that scaling.

    Args:
        lr: learning rate, the square of the paper's step. momentum: in [0, 1), one less the paper's ``mdecay``.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data.
        burn_in: updates after which the scale is frozen, at least 1. Collect samples after them.
        order: 2 or 1, as for :func:`bayesopt_chain.sghmc`.
        generator: source of the random key (default: torch's global generator).

    Example:
        >>> import bayesopt_chain as bc
        >>> tx = bc.samplers.adaptive_sghmc(0.01, temperature=1 / 500, burn_in=1000)
    """
    return chain(
        scale_by_adaptive_window(burn_in),
        add_momentum(momentum),
        inject_langevin_noise(temperature, order=order, generator=generator),
        scale_by_neg_lr(lr),
    )
