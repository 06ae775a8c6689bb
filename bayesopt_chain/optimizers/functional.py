r"""TorchOpt's optimizers, each a chain, each with a temperature.

At ``temperature=0`` (the default) each is TorchOpt's optimizer to the last bit. At T > 0 the same chain carries matched
noise and samples ``exp(-loss / temperature)``; ``temperature = 1 / N`` is the Bayesian posterior for a loss that is a mean
over ``N`` data. Signatures are TorchOpt 0.7.3's, followed by keyword-only ``temperature`` and, where a preconditioner is
learned, ``freeze_after``.

Learning rates may be numbers, 0-d tensors (read at every update) or schedules ``count -> lr``; temperatures likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bayesopt_chain.checks import factory_takes, number, short
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.links.adam import scale_by_adam, scale_by_adamax, scale_by_radam
from bayesopt_chain.links.langevin_noise import inject_langevin_noise
from bayesopt_chain.links.learning_rate import scale_by_neg_lr, scale_by_schedule
from bayesopt_chain.links.momentum import add_momentum
from bayesopt_chain.links.rms import scale_by_adadelta, scale_by_rms, scale_by_rss, scale_by_stddev
from bayesopt_chain.links.weight_decay import add_decayed_weights, flip_sign_and_add_weight_decay
from bayesopt_chain.matching.response import Noise
from bayesopt_chain.schedules import ScalarOrSchedule

_NUMBER = number(tensor=True)


@factory_takes()
def sgd(
    lr: ScalarOrSchedule,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    *,
    moment_requires_grad: bool = False,
    maximize: bool = False,
    temperature: ScalarOrSchedule = 0.0,
) -> Chain:
    r"""Stochastic gradient descent; at T > 0 SGLD or SGHMC with exact noise.

    Samples ``exp(-(loss + weight_decay |theta|^2 / 2) / temperature)``, exactly on quadratic losses at every stable lr.

    Args:
        lr: learning rate: number, 0-d tensor or schedule. At T > 0 the variance of a quadratic loss is exact at every step
            while lr falls; docs/theory.md has a table of what rises cost. With Nesterov's momentum a step of lr 0 in the
            middle costs up to 12 % of the variance behind it; at the end it costs nothing.
        momentum, dampening, nesterov: as in ``torch.optim.SGD``; momentum below 1 at T > 0.
        weight_decay: added to the gradient: a Gaussian prior of precision ``weight_decay / temperature``.
        moment_requires_grad: create the velocity with ``requires_grad=True``, for meta-learning.
        maximize: climb instead; the target becomes ``exp(+loss / temperature)``.
        temperature: number, 0-d tensor or schedule; 0 is TorchOpt's ``sgd``. Behind a change of it the variance goes to the new
            value without turning.

    Returns:
        The chain, to be used as any ``torchopt.base.GradientTransformation``.

    Raises:
        TypeError, ValueError: a negative lr, momentum or weight decay, Nesterov without momentum or with dampening; at
            ``init``, at T > 0, momentum of 1 or more, or parameters that cannot be sampled.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.sgd(0.1, temperature=1 / 1000), {"w": torch.zeros(3)}
        >>> updates, state = tx.update({"w": torch.ones(3)}, tx.init(params), params=params)
        >>> updates["w"].shape
        torch.Size([3])
    """
    return chain(
        flip_sign_and_add_weight_decay(weight_decay, maximize),
        add_momentum(momentum, dampening, nesterov, moment_requires_grad=moment_requires_grad),
        *_noise(temperature),
        scale_by_neg_lr(lr),
    )


@factory_takes()
def adam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    eps_root: float = 0.0,
    moment_requires_grad: bool = False,
    maximize: bool = False,
    use_accelerated_op: bool = False,
    temperature: ScalarOrSchedule = 0.0,
    freeze_after: int | None = None,
) -> Chain:
    """Adam (Kingma and Ba, 2014); at T > 0 SGHMC whose preconditioner ``P`` is Adam's.

    While ``P`` follows the gradients the target is roughly ``P^-1 exp(-loss / temperature)``; from ``freeze_after`` updates
    on ``P`` is frozen and the target is ``exp(-loss / temperature)``.

    Args:
        lr: learning rate.
        betas: weights of the past in the first and second moment.
        eps, eps_root: added outside and inside the root.
        weight_decay: added to the gradient.
        moment_requires_grad: create the moments with ``requires_grad=True``.
        maximize: climb instead.
        use_accelerated_op: accepted for TorchOpt's sake; the updates are the same.
        temperature: number, 0-d tensor or schedule; 0 is TorchOpt's ``adam``.
        freeze_after: number of updates after which the second moment stays as it is.

    Returns:
        The chain, to be used as any ``torchopt.base.GradientTransformation``.

    Raises:
        TypeError, ValueError: a negative lr, eps or weight decay, betas outside [0, 1); at ``init``, at T > 0,
            parameters that cannot be sampled.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.adam(1e-3, temperature=1e-4, freeze_after=500)
        chain(
            scale_by_adam(b1=0.9, b2=0.999, eps=1e-08, freeze_after=500),
            inject_langevin_noise(0.0001),  # acts inside scale_by_adam, matched to F = 0.0001 / (1 - 0.9/z)
            scale_by_neg_lr(0.001),
        )
    """
    _betas(betas)
    return chain(
        flip_sign_and_add_weight_decay(weight_decay, maximize),
        scale_by_adam(*betas, eps, eps_root, moment_requires_grad, freeze_after=freeze_after),
        *_noise(temperature),
        scale_by_neg_lr(lr),
    )


@factory_takes()
def adamw(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    eps_root: float = 0.0,
    mask: Any | Callable | None = None,
    moment_requires_grad: bool = False,
    maximize: bool = False,
    use_accelerated_op: bool = False,
    temperature: ScalarOrSchedule = 0.0,
    freeze_after: int | None = None,
) -> Chain:
    """AdamW (Loshchilov and Hutter, 2019); at T > 0 it samples with the prior that its decay amounts to.

    Behind the preconditioner ``P`` the decay is a Gaussian prior of precision ``weight_decay / (P temperature)``; the noise
    is matched to it.

    Args:
        lr, betas, eps, eps_root, moment_requires_grad, maximize, use_accelerated_op: as in :func:`adam`.
        temperature: number, 0-d tensor or schedule; 0 is TorchOpt's ``adamw``.
        freeze_after: number of updates after which the second moment stays as it is.
        weight_decay: decoupled: added behind the preconditioner.
        mask: tree of booleans, prefix of the parameters, or a function to one: which leaves decay. (TorchOpt's flat mode
            ignores it.)

    Returns:
        The chain, to be used as any ``torchopt.base.GradientTransformation``.

    Raises:
        ValueError: as :func:`adam`; at ``update``, missing parameters.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, p = bc.adamw(mask={"w": True, "b": False}), {"w": torch.ones(1), "b": torch.ones(1)}
        >>> tx.update({"w": torch.zeros(1), "b": torch.zeros(1)}, tx.init(p), params=p, inplace=False)[0]["b"]
        tensor([-0.])
    """
    _betas(betas)
    return chain(
        flip_sign_and_add_weight_decay(0.0, maximize),
        scale_by_adam(*betas, eps, eps_root, moment_requires_grad, freeze_after=freeze_after),
        add_decayed_weights(weight_decay, mask),
        *_noise(temperature),
        scale_by_neg_lr(lr),
    )


@factory_takes()
def adamax(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    moment_requires_grad: bool = False,
    temperature: ScalarOrSchedule = 0.0,
    freeze_after: int | None = None,
) -> Chain:
    """AdaMax (Kingma and Ba, 2014): Adam with a running maximum in the place of the second moment.

    While ``P`` follows the gradients the target is roughly ``P^-1 exp(-loss / temperature)``; from ``freeze_after`` updates
    on it is ``exp(-loss / temperature)``.

    Args:
        lr: learning rate.
        betas: weights of the past in the first moment and in the maximum.
        eps: added to it.
        weight_decay: added to the gradient.
        moment_requires_grad: create the moments with ``requires_grad=True``.
        temperature: number, 0-d tensor or schedule; 0 is TorchOpt's ``adamax``.
        freeze_after: number of updates after which the second moment stays as it is.

    Returns:
        The chain, to be used as any ``torchopt.base.GradientTransformation``.

    Raises:
        ValueError: as :func:`adam`.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.adamax(0.01)
        chain(
            scale_by_adamax(b1=0.9, b2=0.999, eps=1e-06),
            scale_by_neg_lr(0.01),
        )
    """
    _betas(betas)
    return chain(
        flip_sign_and_add_weight_decay(weight_decay),
        scale_by_adamax(*betas, eps, moment_requires_grad, freeze_after=freeze_after),
        *_noise(temperature),
        scale_by_neg_lr(lr),
    )


@factory_takes()
def radam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    moment_requires_grad: bool = False,
    temperature: ScalarOrSchedule = 0.0,
    freeze_after: int | None = None,
) -> Chain:
    """RAdam (Liu et al., 2019): Adam that scales by the second moment only once its variance is known.

    While ``P`` follows the gradients the target is roughly ``P^-1 exp(-loss / temperature)``; from ``freeze_after`` updates
    on it is ``exp(-loss / temperature)``.

    Args:
        lr: learning rate.
        betas: weights of the past in the first moment and in the second.
        eps: added to the root.
        weight_decay: added to the gradient.
        moment_requires_grad: create the moments with ``requires_grad=True``.
        temperature: number, 0-d tensor or schedule; 0 is TorchOpt's ``radam``.
        freeze_after: number of updates after which the second moment stays as it is.

    Returns:
        The chain, to be used as any ``torchopt.base.GradientTransformation``.

    Raises:
        ValueError: as :func:`adam`.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.radam(0.01)
        chain(
            scale_by_radam(b1=0.9, b2=0.999, eps=1e-06),
            scale_by_neg_lr(0.01),
        )
    """
    _betas(betas)
    return chain(
        flip_sign_and_add_weight_decay(weight_decay),
        scale_by_radam(*betas, eps, moment_requires_grad, freeze_after=freeze_after),
        *_noise(temperature),
        scale_by_neg_lr(lr),
    )


@factory_takes()
def adagrad(
    lr: ScalarOrSchedule = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    *,
    maximize: bool = False,
    temperature: ScalarOrSchedule = 0.0,
    freeze_after: int | None = None,
) -> Chain:
    """AdaGrad (Duchi et al., 2011); at T > 0 SGLD with AdaGrad's preconditioner. Target as :func:`adam`.

    Args:
        lr, lr_decay: the step size is ``lr / (1 + lr_decay * count)``.
        weight_decay: added to the gradient.
        initial_accumulator_value: first sum of squares.
        eps: added to the root.
        maximize: climb instead.
        temperature: number, 0-d tensor or schedule; 0 is TorchOpt's ``adagrad``.
        freeze_after: number of updates after which the sum of squares stays as it is.

    Returns:
        The chain, to be used as any ``torchopt.base.GradientTransformation``.

    Raises:
        TypeError, ValueError: a negative lr, lr_decay, weight decay, eps or first sum; at ``init``, at T > 0,
            parameters that cannot be sampled.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.adagrad(0.1).links[-1]
        Scale(step_size=0.1, sign=-1)
    """
    _nonnegative("lr_decay", lr_decay)
    _nonnegative("initial_accumulator_value", initial_accumulator_value)
    return chain(
        flip_sign_and_add_weight_decay(weight_decay, maximize),
        scale_by_rss(initial_accumulator_value, eps, freeze_after=freeze_after),
        *_noise(temperature),
        scale_by_schedule(_InverseTimeDecay(lr_decay)),
        scale_by_neg_lr(lr),
    )


@factory_takes()
def rmsprop(
    lr: ScalarOrSchedule = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    *,
    initial_scale: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    temperature: ScalarOrSchedule = 0.0,
    freeze_after: int | None = None,
) -> Chain:
    """RMSprop (Tieleman and Hinton, 2012); at T > 0 pSGLD without its drift correction. Target as :func:`adam`.

    Args:
        lr: learning rate.
        alpha: weight of the past in the mean of squares; eps is added to its root.
        weight_decay: added to the gradient.
        momentum, nesterov: momentum behind the scaling.
        centered: divide by the standard deviation instead.
        initial_scale: first mean of squares.
        maximize: climb instead.
        temperature: number, 0-d tensor or schedule; 0 is TorchOpt's ``rmsprop``.
        freeze_after: number of updates after which the mean of squares stays as it is.

    Returns:
        The chain, to be used as any ``torchopt.base.GradientTransformation``.

    Raises:
        TypeError, ValueError: a negative lr, alpha, eps, weight decay or momentum; at ``init``, at T > 0, momentum of 1
            or more, or parameters that cannot be sampled.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.rmsprop(0.01, momentum=0.9)
        chain(
            scale_by_rms(decay=0.99, eps=1e-08),
            add_momentum(0.9),
            scale_by_neg_lr(0.01),
        )
    """
    _nonnegative("alpha", alpha)
    scaler = scale_by_stddev if centered else scale_by_rms
    return chain(
        flip_sign_and_add_weight_decay(weight_decay, maximize),
        scaler(alpha, eps, initial_scale, freeze_after=freeze_after),
        add_momentum(momentum, nesterov=nesterov),
        *_noise(temperature),
        scale_by_neg_lr(lr),
    )


@factory_takes()
def adadelta(
    lr: ScalarOrSchedule = 1e-3,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    moment_requires_grad: bool = False,
    temperature: ScalarOrSchedule = 0.0,
) -> Chain:
    """AdaDelta (Zeiler, 2012). Its scale is fed by its own updates, so that T > 0 is refused when ``init`` is called.

    Args:
        lr, rho, eps, weight_decay, moment_requires_grad: as in TorchOpt.
        temperature: 0, in the units of the loss; no noise is matched to this rule.

    Returns:
        The chain, to be used as any ``torchopt.base.GradientTransformation``.

    Raises:
        TypeError, ValueError: a negative lr, eps or weight decay, ``rho`` outside [0, 1); at ``init``, a temperature
            above 0.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.adadelta(1.0)
        chain(
            scale_by_adadelta(rho=0.9, eps=1e-06),
            scale_by_neg_lr(1.0),
        )
    """
    return chain(
        flip_sign_and_add_weight_decay(weight_decay),
        scale_by_adadelta(rho, eps, moment_requires_grad),
        *_noise(temperature),
        scale_by_neg_lr(lr),
    )


class _InverseTimeDecay:
    """``count -> 1 / (1 + decay_rate * count)``, AdaGrad's schedule in TorchOpt."""

    def __init__(self, decay_rate: float) -> None:
        self.decay_rate = decay_rate

    def __call__(self, count: Tensor):
        return 1 / (1 + self.decay_rate * count)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _InverseTimeDecay) and other.decay_rate == self.decay_rate

    def __hash__(self) -> int:
        return hash(self.decay_rate)


def _noise(temperature: ScalarOrSchedule) -> tuple[Chain, ...]:
    """The noise link, or nothing at the number 0: a chain that is the optimizer."""
    link = inject_langevin_noise(temperature)
    return (link,) if isinstance(link.response, Noise) else ()


def _betas(betas: tuple[float, float]) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers, got {short(betas)}")
    for i, beta in enumerate(betas):
        _NUMBER(f"betas[{i}]", beta, ranges=False)
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}; it must lie in [0, 1)")


def _nonnegative(name: str, value: float) -> None:
    _NUMBER(name, value, ranges=False)
    if not value >= 0.0:
        raise ValueError(f"Invalid {name} value: {value}; it must not be negative")
