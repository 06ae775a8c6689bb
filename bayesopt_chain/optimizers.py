r"""TorchOpt's optimizers, each a chain, each with a temperature.

At ``temperature=0`` (the default) each is TorchOpt's optimizer to the last bit. At T > 0 the same chain carries matched
noise and samples ``exp(-loss / temperature)``; ``temperature = 1 / N`` is the Bayesian posterior for a loss that is a mean
over ``N`` data. Signatures are TorchOpt 0.7.3's, followed by keyword-only ``temperature`` and, where a preconditioner is
learned, ``freeze_after``.

Learning rates may be numbers, 0-d tensors (read at every update) or schedules ``count -> lr``; temperatures likewise.

The classes, ``SGD(params, lr, ...)``, differ from TorchOpt's functions in argument order and defaults (``SGD`` takes weight
decay before dampening, ``AdaMax`` has lr 0.002). Each has the signature of its namesake, read from it, and then keyword-only
``temperature`` (and ``freeze_after`` where a preconditioner is learned).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torchopt
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.checks import ARGUMENTS, factory_takes
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.distributed.ranks import require_named_chain
from bayesopt_chain.links.adam import scale_by_adam, scale_by_adamax, scale_by_radam
from bayesopt_chain.links.keyed import Keyed
from bayesopt_chain.links.langevin_noise import inject_langevin_noise
from bayesopt_chain.links.learning_rate import scale_by_neg_lr, scale_by_schedule
from bayesopt_chain.links.momentum import add_momentum
from bayesopt_chain.links.rms import scale_by_adadelta, scale_by_rms, scale_by_rss, scale_by_stddev
from bayesopt_chain.links.weight_decay import add_decayed_weights, flip_sign_and_add_weight_decay
from bayesopt_chain.matching.response import Noise
from bayesopt_chain.schedules import ScalarOrSchedule

_FROM_ZERO = checks.number("[0, inf]", tensor=True)  # what TorchOpt accepts


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


@factory_takes(betas=ARGUMENTS["betas"])
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
    return chain(
        flip_sign_and_add_weight_decay(weight_decay, maximize),
        scale_by_adam(*betas, eps, eps_root, moment_requires_grad, freeze_after=freeze_after),
        *_noise(temperature),
        scale_by_neg_lr(lr),
    )


@factory_takes(betas=ARGUMENTS["betas"])
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
    return chain(
        flip_sign_and_add_weight_decay(0.0, maximize),
        scale_by_adam(*betas, eps, eps_root, moment_requires_grad, freeze_after=freeze_after),
        add_decayed_weights(weight_decay, mask),
        *_noise(temperature),
        scale_by_neg_lr(lr),
    )


@factory_takes(betas=ARGUMENTS["betas"])
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
    return chain(
        flip_sign_and_add_weight_decay(weight_decay),
        scale_by_adamax(*betas, eps, moment_requires_grad, freeze_after=freeze_after),
        *_noise(temperature),
        scale_by_neg_lr(lr),
    )


@factory_takes(betas=ARGUMENTS["betas"])
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
    _FROM_ZERO("adagrad: lr_decay", lr_decay)
    _FROM_ZERO("adagrad: initial_accumulator_value", initial_accumulator_value)
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
    _FROM_ZERO("rmsprop: alpha", alpha)
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


@dataclass(frozen=True)
class _InverseTimeDecay:
    """``count -> 1 / (1 + decay_rate * count)``, AdaGrad's schedule in TorchOpt."""

    decay_rate: float

    def __call__(self, count: Tensor) -> Tensor:
        return 1 / (1 + self.decay_rate * count)


def _noise(temperature: ScalarOrSchedule) -> tuple[Chain, ...]:
    """The noise link, or nothing at the number 0: a chain that is the optimizer."""
    link = inject_langevin_noise(temperature)
    return (link,) if isinstance(link.response, Noise) else ()


DOC = """``torchopt.{name}`` with a temperature (torch's is :class:`bayesopt_chain.optim.{torchs}`).

    The chain is :func:`bayesopt_chain.{function}`.

    Args:
        params: an iterable of tensors.
        lr and the others: TorchOpt's, in TorchOpt's order, with the meaning of :func:`bayesopt_chain.{function}`.
        temperature: keyword only; number, 0-d tensor or schedule. Default 0, at which this is TorchOpt's class bit for bit.

    Raises:
        ValueError: as :func:`bayesopt_chain.{function}`.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> w = torch.zeros(2, requires_grad=True)
        >>> optimizer = bc.{name}([w], lr=0.1)
        >>> (w - 1).square().sum().backward()
        >>> optimizer.step()
        >>> bool((w > 0).all())
        True
    """
TORCHS = {"RMSProp": "RMSprop", "AdaGrad": "Adagrad", "AdaMax": "Adamax", "AdaDelta": "Adadelta"}  # spelled otherwise
META = """``torchopt.{name}`` with a temperature; see :func:`bayesopt_chain.{function}`.

    Args:
        module: whose parameters are replaced by their update in each ``step(loss)``, which keeps the graph.
        lr and the others: TorchOpt's, in TorchOpt's order, with the meaning of :func:`bayesopt_chain.{function}`.
        temperature: keyword only; number, 0-d tensor or schedule. Default 0, at which this is TorchOpt's class bit for bit.

    Raises:
        ValueError: as :func:`bayesopt_chain.{function}`.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> network = torch.nn.Linear(2, 1)
        >>> optimizer = bc.meta.{name}(network, lr=0.1)
        >>> optimizer.step(network(torch.ones(2)).square().sum())
    """


class _Optimizer(torchopt.Optimizer):
    """TorchOpt's, with its state from the start."""

    def add_param_group(self, params: Any) -> None:
        super().add_param_group(params)
        _require_one_rank(self)
        self.state_groups[-1] = self.impl.init(self.param_groups[-1])


class _MetaOptimizer(torchopt.MetaOptimizer):
    """TorchOpt's, with its state from the start, so that extracting and recovering it replays the noise."""

    def add_param_group(self, module: torch.nn.Module) -> None:
        super().add_param_group(module)
        _require_one_rank(self)
        self.state_groups[-1] = self.impl.init(tuple(optree.tree_leaves(self.param_containers_groups[-1])))  # pyright: ignore[reportArgumentType]


def _require_one_rank(optimizer: torchopt.Optimizer | torchopt.MetaOptimizer) -> None:
    """Refuse noise on several ranks: these classes, like TorchOpt's, have no argument that says what a rank is.

    Raises:
        ValueError: a temperature, and more than one rank.
    """
    name = type(optimizer).__name__
    torchs = f"bc.optim.{TORCHS.get(name, name)}"
    for link in getattr(optimizer.impl, "links", ()):
        if isinstance(link, Keyed):
            require_named_chain(f"bc.{name}", link.generator, f"take {torchs} with")


LARGEST = 1e15  # of a hyperparameter: beyond it the squares of float32 are infinite
_PARAMS = checks.Kind(
    lambda x: isinstance(x, (list, tuple)) and checks.TREE.fits(x), "tensors, one at least, in a list or an iterator"
)


def optimizer_class(namesake: type, build: Callable) -> type:
    """A class like ``namesake`` whose transformation is made by ``build``."""
    is_meta, name = issubclass(namesake, torchopt.MetaOptimizer), namesake.__name__
    base = _MetaOptimizer if is_meta else _Optimizer
    theirs = inspect.signature(namesake.__init__)
    ours = [p for name, p in inspect.signature(build).parameters.items() if name in ("temperature", "freeze_after")]
    signature = theirs.replace(parameters=[*theirs.parameters.values(), *ours], return_annotation=None)

    def __init__(self, *args, **kwargs) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = list(bound.arguments.values())
        target: Any = given[1]
        if is_meta:
            checks.MODULE(f"{name}: module", target)
        else:
            target = target if isinstance(target, (list, tuple)) or not checks.BATCHES.fits(target) else tuple(target)
            _PARAMS(f"{name}: params", target)
        settings = dict(list(bound.arguments.items())[2:])
        for word, value in settings.items():
            if isinstance(value, (int, float)) and abs(value) > LARGEST:
                raise ValueError(f"{name}: {word} must be at most {LARGEST:g}, got {checks.short(value)}")
        base.__init__(self, target, build(**settings))

    __init__.__signature__ = signature
    template = META if is_meta else DOC
    doc = template.format(name=name, function=build.__name__, torchs=TORCHS.get(name, name))
    return type(
        namesake.__name__,
        (base,),
        {
            "__init__": __init__,
            "__doc__": doc,
            "__module__": "bayesopt_chain.meta" if is_meta else "bayesopt_chain",
            "__qualname__": namesake.__name__,
        },
    )


SGD = optimizer_class(torchopt.SGD, sgd)
Adam = optimizer_class(torchopt.Adam, adam)
AdamW = optimizer_class(torchopt.AdamW, adamw)
AdaMax = optimizer_class(torchopt.AdaMax, adamax)
RAdam = optimizer_class(torchopt.RAdam, radam)
AdaGrad = optimizer_class(torchopt.AdaGrad, adagrad)
RMSProp = optimizer_class(torchopt.RMSProp, rmsprop)
AdaDelta = optimizer_class(torchopt.AdaDelta, adadelta)
