r"""torch's optimizers with a temperature: what each of them says of its step, of which the noise is made.

:class:`SGD` has no preconditioner; :class:`SGLD` and :class:`SGHMC`, the samplers of Welling and Teh (2011) and of Chen, Fox
and Guestrin (2014), are SGD with other arguments. Their noise makes them exact on quadratic losses at every stable learning
rate.

Adam, AdamW, NAdam, RMSprop and Adagrad divide by a diagonal ``D = 1/P`` that they compute from the gradients.
After torch's step, noise with a covariance proportional to ``P`` is added to the parameter, and noise to the first moment (the
velocity ``V``):

    theta <- (1 - s) theta - h V / D,     V <- V + D^(1/2) e,     theta <- theta - h D^(-1/2) e

:mod:`bayesopt_chain.optim._rule` defines the symbols and computes ``e`` from the numbers that each class gives in ``_linear``.
Adam's bias correction of the first moment is a step size that falls during the first steps, which the rule takes into account.
Noise is never added to the averages from which ``D`` is computed, since it would raise ``D``, and with it the scale of the
next noise.

**What is sampled.** With a frozen ``P`` a class samples exactly ``exp(-loss / T)``. While ``P`` follows the recent gradients,
the target is roughly ``P^-1 exp(-loss / T)``, and the error grows as lr falls. ``freeze_after=n`` holds ``P`` fixed after ``n``
updates of a parameter, which is the only way to make sampling exact. From then on the step is momentum with a fixed
preconditioner, at T = 0 too. With a decoupled weight decay (AdamW) and a frozen ``P`` the prior has exactly the precision
``weight_decay D / T``. A parameter whose gradient has always been zero has ``P = 1 / eps``, and noise of that size: raise
``eps`` at T > 0. (Adagrad does not move such parameters.)

The others sample nothing. At temperature 0 they make torch's own steps. A temperature above 0 raises ValueError, with the
reason and an alternative:

| class | why no temperature above 0 | what to use instead |
| --- | --- | --- |
| Adadelta | its scale is computed from its own updates, noise included, which would heat the chain | RMSprop, Adam |
| Adamax, RAdam | only the chains ``bc.adamax`` and ``bc.radam`` make their noise | Adam, these chains in :class:`Optimizer` |
| Adafactor | its step size depends on the parameters, and it clips its update: the step is not linear in the gradient | Adam |
| ASGD | it averages its iterates inside its step, before noise could enter | SGLD, and average the draws |
| LBFGS | it searches along lines and evaluates the loss several times a step | SGHMC |
| Muon | it orthogonalises its momentum, and no matched noise is known for a non-linear map of a memory | SGHMC |
| Rprop | it uses only the sign of the gradient, so that its steps sample no temperature | RMSprop |
| SparseAdam | it moves only rows that have a gradient, while noise has to move all rows | Adam with ``sparse=False`` |

Sources: Kingma and Ba (2014) for Adam, Loshchilov and Hutter (2019) for the decoupled weight decay, Li et al. (2016) for
sampling with the preconditioner of RMSprop, and torch's documentation for the other rules.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.engine.optimizer_cpu import MOMENT, MOMENTUM, PLAIN, SCALED, SCALED_MOMENTUM
from bayesopt_chain.optim._rule import Linear
from bayesopt_chain.optim._sampling import Sampling


def _momentum_of(who: str, value: Any, what: str) -> float:
    """Read a momentum, or the decay of an average.

    Raises:
        ValueError: it lies outside [0, 1).
    """
    momentum = float(value)
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"{who}: {what} must lie in [0, 1) at temperature > 0, got {momentum}")
    return momentum


class SGD(Sampling, torch.optim.SGD):
    r"""``torch.optim.SGD`` with a temperature (TorchOpt's is :class:`bayesopt_chain.SGD`).

    At ``temperature=0`` this is torch's own step, bit for bit, in each of torch's implementations. At a temperature
    ``T > 0`` noise is added after torch's step (:mod:`bayesopt_chain.optim._rule`), such that at constant hyperparameters
    the parameters sample ``exp(-loss / T)``. This is exact for every quadratic loss and stable lr. With the momentum buffer
    ``V``, the gradient ``g``, ``b = 1 - dampening`` and standard normals ``xi_t``,

        V <- mu V + b g,    theta <- theta - lr V                                                    (torch)
        e = (b T (1 - mu) / (2 lr))^(1/2) (xi_t + xi_{t-1}),    V <- V + e,    theta <- theta - lr e

    With Nesterov's momentum the step is ``theta <- theta - lr g - lr mu V``, which has two branches with a noise each; the
    second branch has the step size ``lr mu``. Weight decay is part of the gradient, and is an exact Gaussian prior of
    precision ``weight_decay / T``. ``maximize`` samples ``exp(+loss / T)``. On a CPU, in float32 and float64, the step at
    ``T > 0`` and its noise are one pass over memory, whose result differs from torch's in the last place; ``foreach`` or
    ``fused=False`` ask for torch's own step. ``fused=True`` with float16 or bfloat16 on a CPU is refused at ``T > 0``, since
    the fused kernel of torch 2.13 does not move such parameters.

    Everything in a parameter group is read at every step, ``temperature`` included. While lr falls or momentum rises, the
    variance stays exact at every step (:mod:`bayesopt_chain.optim._rule`), but for Nesterov's momentum where it rises:
    behind a jump from .1 to .9 at one lr it is off by -6 % to +46 % while ``lr * curvature <= 1``, from .5 to .9 by -2 % to
    +13 %; from .9 to .95 by less than 2 %. Momentum 0 is refused there. When lr rises it is not exact either: under cosine
    cycles with restarts it is off by -21 % to +36 % at the restart, at most 7 % RMS, while ``lr * curvature <= 0.3``. After
    a change of temperature the variance goes to its new value without overshooting. ``lr = 0`` moves nothing.

    Args:
        params: as in torch: tensors, ``named_parameters()``, or dicts (groups). The noise of a parameter depends on its name,
            or on its index if parameters have no names.
        lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, differentiable, fused: as in ``torch.optim.SGD``.
        temperature: a number or a 0-d tensor (read at every step). With a loss that is a mean over ``N`` data
            ``1 / N`` samples the posterior. Default 0.
        generator: source of the key of the noise, used once, when the optimizer is made. Default: torch's global generator,
            used when a temperature is first above 0. Two optimizers over parts of one model need keys of their own: with equal
            keys and names (or indices, without names) they draw the same noise, of which nobody warns.
        keep_draws: ``False`` makes the last draw again in every step, bit for bit, instead of keeping it. This saves 4 bytes
            per parameter in float32, and costs a second draw per step. Default: True.
        heat_guard: ``"warn"`` (default) or a :class:`bayesopt_chain.diagnostics.HeatGuard` warns if the noise of minibatches
            raises the temperature (docs/minibatches.md). ``None``: no guard.
        steps_per_epoch: the number of steps in an epoch, for the default guard. Default: unknown.

    The state takes, in float32, 8 bytes per parameter with momentum (velocity and last draw), 4 without, 12 with Nesterov.

    Raises:
        ValueError: at T > 0: momentum outside [0, 1), dampening of 1 or more, a negative lr, ``differentiable``, complex
            parameters; a negative or infinite temperature.
            Nothing has moved then.

    The key of the noise does not seed the model's own random numbers: dropout uses torch's global generator. :func:`as_step`
    seeds that one too.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = bc.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, temperature=1e-3)
        >>> model(torch.ones(2, 3)).square().mean().backward()
        >>> optimizer.step()
        >>> sorted(name for name, x in optimizer.state[model.weight].items() if x.ndim)  # the others are numbers
        ['momentum_buffer', 'noise']
    """

    def _linear(self, group: dict[str, Any], counts: tuple[float, ...]) -> Linear:
        """Return the numbers of SGD's step; raise ValueError for numbers that no noise is known for."""
        lr, nesterov = float(group["lr"]), group["nesterov"]
        momentum = _momentum_of(self._name, group["momentum"], "momentum")
        if not momentum:
            if nesterov:
                raise ValueError(
                    f"{self._name}: Nesterov's momentum must stay above 0 at temperature > 0, got {momentum}"
                )
            return Linear(lr, kind=PLAIN)
        gain = 1.0 - float(group["dampening"])
        if gain <= 0.0:
            raise ValueError(f"{self._name}: dampening must be below 1 at temperature > 0, got {group['dampening']}")
        # theta' = theta - lr V', or theta - lr g - lr mu V'
        h, direct, branches = (lr * momentum, lr, 2) if nesterov else (lr, 0.0, 1)
        return Linear(h, momentum, gain, direct, 0.0, 1.0, 1.0, "momentum_buffer", MOMENTUM, None, branches)


class SGHMC(SGD):
    """Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin, 2014): SGD with momentum and a temperature.

    It is :func:`bayesopt_chain.sghmc` as a ``torch.optim.Optimizer``, and replaces
    ``torch.optim.SGD(params, lr, momentum=0.9)``. See :class:`SGD` for the equations, for the other arguments, and for the
    hyperparameters that may change during a run. The state takes 8 bytes per parameter in float32.

    Args:
        params: as in :class:`SGD`.
        lr: learning rate, a number or a 0-d tensor.
        momentum: in [0, 1). Default 0.9.
        temperature: a number or a 0-d tensor; ``1 / N`` for the posterior if the loss is a mean over ``N`` data.
        generator: as in :class:`SGD`.
        kwargs: further arguments of :class:`SGD`.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> theta = torch.zeros(2, requires_grad=True)
        >>> optimizer = bc.optim.SGHMC([theta], lr=0.1, temperature=0.5)
        >>> (0.5 * theta.square().sum()).backward()
        >>> optimizer.step()
        >>> optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["temperature"]
        (0.9, 0.5)
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        momentum: float = 0.9,
        *,
        temperature: float | Tensor,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, lr, momentum, temperature=temperature, generator=generator, **kwargs)


class SGLD(SGD):
    """Stochastic gradient Langevin dynamics (Welling and Teh, 2011): SGD without momentum and with a temperature.

    It is :func:`bayesopt_chain.sgld` as a ``torch.optim.Optimizer``. The step is
    ``theta <- theta - lr g - (T lr / 2)^(1/2) (xi_t + xi_{t-1})``, which is exact on quadratic losses at every stable lr. It
    mixes more slowly than :class:`SGHMC`, which takes 4 bytes more per parameter. See :class:`SGD` for the other arguments.

    Args:
        params: as in :class:`SGD`.
        lr: learning rate, a number or a 0-d tensor.
        temperature: a number or a 0-d tensor; ``1 / N`` for the posterior if the loss is a mean over ``N`` data.
        generator: as in :class:`SGD`.
        kwargs: further arguments of :class:`SGD`.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> theta = torch.zeros(2, requires_grad=True)
        >>> optimizer = bc.optim.SGLD([theta], lr=0.1, temperature=0.5)
        >>> (0.5 * theta.square().sum()).backward()
        >>> optimizer.step()
        >>> bool(theta.any())
        True
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        *,
        temperature: float | Tensor,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, lr, temperature=temperature, generator=generator, **kwargs)


_COMMON = """
    At ``temperature=0`` this is torch's own step, bit for bit, in each of torch's implementations. At T > 0 noise is added to
    the first moment and the parameter after torch's step. On a CPU, in float32 and float64, Adam, AdamW and RMSprop make step
    and noise in one pass over memory from the second step on, unless ``foreach`` is given; the result differs from torch's
    step followed by noise by a few units in the last place. :mod:`bayesopt_chain.optim.classes` has the equations, and says
    what is sampled while the preconditioner ``P = 1 / D`` learns.

    Args:
        params: as in torch: tensors, ``named_parameters()``, or dicts (groups).
        temperature: a number or a 0-d tensor (read at every step). With a loss that is a mean over ``N`` data, ``1 / N``
            samples the posterior. Default 0.
        generator, keep_draws, heat_guard, steps_per_epoch: see :class:`SGD`.
        freeze_after: the number of updates after which ``P`` no longer learns, which makes sampling exact.
            Default: never.
        others: torch's arguments, in torch's order.

    Raises:
        ValueError: at T > 0, ``differentiable``, ``capturable`` or complex parameters.
"""


class _TwoMoments(Sampling):
    """The common part of the classes that keep two moments: ``exp_avg`` averages the gradient with the decay ``b1``."""

    def _first_moment(self, group: dict[str, Any], step_size: float, direct: float = 0.0) -> Linear:
        """Return the numbers of a step whose velocity is ``exp_avg``: ``V' = b1 V + (1 - b1) g``."""
        b1 = _momentum_of(self._name, group["betas"][0], "betas[0]")
        shrink = float(group["lr"]) * float(group["weight_decay"]) if group.get("decoupled_weight_decay") else 0.0
        return Linear(step_size, b1, 1.0 - b1, direct, shrink, velocity="exp_avg")


class _Adam(_TwoMoments):
    """What Adam and AdamW share, whose noise is the same."""

    def _denominator(self, group: dict[str, Any], updates: float, get: Callable[[str], Tensor]) -> Tensor:
        correction = (1.0 - float(group["betas"][1]) ** updates) ** 0.5
        square = get("max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq")
        return square.sqrt().div_(correction).add_(group["eps"])

    def _linear(self, group: dict[str, Any], counts: tuple[float, ...]) -> Linear:
        b1, b2 = (_momentum_of(self._name, b, f"betas[{i}]") for i, b in enumerate(group["betas"]))
        linear = self._first_moment(group, float(group["lr"]) / (1.0 - b1 ** counts[0]))
        if group["amsgrad"]:
            return linear
        learned = self._learned(group, counts)
        correction = (1.0 - b2**learned) ** -0.5
        return Linear(*linear[:5], b2 if learned == counts[0] else 1.0, correction, "exp_avg", MOMENT, "exp_avg_sq")


class Adam(_Adam, torch.optim.Adam):
    __doc__ = f"""``torch.optim.Adam`` with a temperature (TorchOpt's is :class:`bayesopt_chain.Adam`).

    ``D = (v / (1 - b2^t))^(1/2) + eps`` with the averaged squared gradient ``v``, and ``h = lr / (1 - b1^t)``. With
    ``amsgrad``, ``v`` is replaced by its largest value so far.
    {_COMMON}
    Example:
        >>> import torch, bayesopt_chain as bc
        >>> theta = torch.ones(2, requires_grad=True)
        >>> optimizer = bc.optim.Adam([theta], lr=0.1, temperature=1e-3, freeze_after=100)
        >>> (0.5 * theta.square().sum()).backward()
        >>> optimizer.step()
        >>> sorted(name for name, x in optimizer.state[theta].items() if x.ndim)  # the others are numbers
        ['exp_avg', 'exp_avg_sq', 'noise']
    """


class AdamW(_Adam, torch.optim.AdamW):
    __doc__ = f"""``torch.optim.AdamW`` with a temperature (TorchOpt's is :class:`bayesopt_chain.AdamW`).

    Adam with decoupled weight decay ``wd``, ``theta <- (1 - lr wd) theta - h V / D``. The variance of its noise is that of
    Adam times ``1 + b1 lr wd / (1 - b1)``, and the prior that is sampled has precision ``wd D / T``. The variance of the
    parameters is exact while lr falls. If ``b1`` changes while ``wd > 0``, the variance is off for a while: by at most the
    factor ``1 + 5 lr wd`` if ``b1`` goes from 0.9 to 0.95, which is 0.5 % at lr 0.01 and ``wd`` 0.1.
    {_COMMON}
    Example:
        >>> import torch, bayesopt_chain as bc
        >>> theta = torch.ones(2, requires_grad=True)
        >>> bc.optim.AdamW([theta], lr=0.1, temperature=1e-3).param_groups[0]["weight_decay"]
        0.01
    """


class NAdam(_TwoMoments, torch.optim.NAdam):
    __doc__ = f"""``torch.optim.NAdam`` with a temperature.

    Adam with Nesterov's momentum: ``theta <- theta - (h_1 g + h V) / D`` has two branches with a noise each. With
    ``mu_t = b1 (1 - 0.96^(t momentum_decay) / 2)`` and the product ``Pi_t = mu_1 ... mu_t``, ``h_1 = lr (1 - mu_t) / (1 -
    Pi_t)`` and ``h = lr mu_{{t+1}} / (1 - Pi_{{t+1}})``. The two last draws take 8 bytes per parameter, in float32, in
    addition to NAdam's own state.
    {_COMMON}
    Example:
        >>> import torch, bayesopt_chain as bc
        >>> theta = torch.ones(2, requires_grad=True)
        >>> bc.optim.NAdam([theta], temperature=1e-3).param_groups[0]["lr"]
        0.002
    """

    counters = MappingProxyType({"step": 0.0, "mu_product": 1.0})

    def _momenta(self, group: dict[str, Any], updates: float) -> tuple[float, float]:
        """Return ``mu_t`` and ``mu_{t+1}`` at update ``t``."""
        b1, decay = float(group["betas"][0]), float(group["momentum_decay"])
        now, then = (b1 * (1.0 - 0.5 * 0.96 ** (t * decay)) for t in (updates, updates + 1))
        return now, then

    def _linear(self, group: dict[str, Any], counts: tuple[float, ...]) -> Linear:
        lr, (now, then) = float(group["lr"]), self._momenta(group, counts[0])
        product = counts[1] * now
        direct = lr * (1.0 - now) / (1.0 - product)
        return self._first_moment(group, lr * then / (1.0 - product * then), direct)._replace(branches=2)

    def _denominator(self, group: dict[str, Any], updates: float, get: Callable[[str], Tensor]) -> Tensor:
        return get("exp_avg_sq").div(1.0 - float(group["betas"][1]) ** updates).sqrt_().add_(group["eps"])

    def _count_update(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        super()._count_update(state, group)
        # torch keeps the product of the momenta in the state, and updates it in its own step only
        state["mu_product"] *= self._momenta(group, int(state["step"]))[0]


class RMSprop(Sampling, torch.optim.RMSprop):
    __doc__ = f"""``torch.optim.RMSprop`` with a temperature (TorchOpt's is :class:`bayesopt_chain.RMSProp`).

    ``D = v^(1/2) + eps`` with the averaged squared gradient ``v``, and with ``centered`` ``D = (v - m^2)^(1/2) + eps`` with
    the averaged gradient ``m``. The momentum averages scaled gradients, ``V <- mu V + g / D``, ``theta <- theta - lr V``, so
    that the noise of ``V`` is ``D^(-1/2) e``. Without momentum this is preconditioned SGLD (pSGLD; Li et al., 2016).
    {_COMMON}
    Example:
        >>> import torch, bayesopt_chain as bc
        >>> theta = torch.ones(2, requires_grad=True)
        >>> bc.optim.RMSprop([theta], temperature=1e-3).param_groups[0]["lr"]
        0.01
    """

    averages_scaled = True

    def _linear(self, group: dict[str, Any], counts: tuple[float, ...]) -> Linear:
        lr, mu = float(group["lr"]), _momentum_of(self._name, group["momentum"], "momentum")
        kind = None if group["centered"] else SCALED_MOMENTUM if mu else SCALED
        square_decay = float(group["alpha"]) if self._learned(group, counts) == counts[0] else 1.0
        velocity = "momentum_buffer" if mu else None
        return Linear(lr, mu, 1.0, 0.0, 0.0, square_decay, 1.0, velocity, kind, "square_avg")

    def _denominator(self, group: dict[str, Any], updates: float, get: Callable[[str], Tensor]) -> Tensor:
        square = get("square_avg")
        if group["centered"]:
            return square.addcmul(get("grad_avg"), get("grad_avg"), value=-1.0).sqrt_().add_(group["eps"])
        return square.sqrt().add_(group["eps"])


class Adagrad(Sampling, torch.optim.Adagrad):
    __doc__ = f"""``torch.optim.Adagrad`` with a temperature (TorchOpt's is :class:`bayesopt_chain.AdaGrad`).

    ``D`` is the root of the summed squared gradients plus eps, and ``h = lr / (1 + (t - 1) lr_decay)``. There is no momentum.
    ``D`` grows without bound, so that the chain slows down unless ``D`` is frozen. Elements whose gradient has always been
    zero do not move.
    {_COMMON}
    Example:
        >>> import torch, bayesopt_chain as bc
        >>> theta = torch.ones(2, requires_grad=True)
        >>> bc.optim.Adagrad([theta], temperature=1e-3).param_groups[0]["lr"]
        0.01
    """

    def _linear(self, group: dict[str, Any], counts: tuple[float, ...]) -> Linear:
        return Linear(float(group["lr"]) / (1.0 + (counts[0] - 1.0) * float(group["lr_decay"])))

    def _denominator(self, group: dict[str, Any], updates: float, get: Callable[[str], Tensor]) -> Tensor:
        total = get("sum")
        # an infinite denominator keeps noise from elements that torch does not move
        return torch.where(total > 0.0, total.sqrt().add_(group["eps"]), float("inf"))


def _refused(theirs: type[torch.optim.Optimizer], reason: str, hint: str) -> Any:
    """Make a subclass of a torch optimizer that refuses every temperature but 0.

    Args:
        theirs: the class of ``torch.optim``.
        reason: why no noise is known, as the rest of a sentence that begins with the name of the class.
        hint: what to use instead.
    """
    name = theirs.__name__
    doc = f"""``torch.optim.{name}`` at temperature 0; a temperature above 0 is refused: {name} {reason}.

    Args:
        params and the others: torch's, in torch's order.
        temperature: 0.

    Raises:
        ValueError: a temperature above 0.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> w = torch.zeros(2, 2, requires_grad=True)
        >>> isinstance(bc.optim.{name}([w]), torch.optim.{name})
        True
    """
    body = {"__doc__": doc, "__module__": __name__, "refusal": f"{name} {reason}; use {hint}"}
    return type(name, (Sampling, theirs), body)


Adadelta = _refused(
    torch.optim.Adadelta,
    "scales by its own updates, noise included, and would heat itself",
    "bc.optim.RMSprop or Adam",
)
Adamax = _refused(
    torch.optim.Adamax,
    "divides by a running maximum, whose noise only its chain makes",
    "bc.optim.Adam, or bc.optim.Optimizer with bc.adamax",
)
RAdam = _refused(
    torch.optim.RAdam,
    "divides by nothing in its first updates, and only its chain makes noise that follows that",
    "bc.optim.Adam, or bc.optim.Optimizer with bc.radam",
)
Adafactor = _refused(
    torch.optim.Adafactor,
    "has a step size that depends on the parameters and clips its update, which is no linear function of the gradient",
    "bc.optim.Adam",
)
ASGD = _refused(
    torch.optim.ASGD,
    "averages its iterates inside its step, before noise could enter",
    "bc.optim.SGLD and average the draws",
)
LBFGS = _refused(
    torch.optim.LBFGS,
    "searches along lines and evaluates the loss several times a step",
    "bc.optim.SGHMC",
)
Muon = _refused(
    torch.optim.Muon,
    "orthogonalises its momentum: memory before a non-linear map, behind which no noise can be matched",
    "bc.optim.SGHMC",
)
Rprop = _refused(
    torch.optim.Rprop,
    "uses the gradient's sign alone, which no temperature belongs to",
    "bc.optim.RMSprop",
)
SparseAdam = _refused(
    torch.optim.SparseAdam,
    "moves only rows that have a gradient, while a sample moves all",
    "bc.optim.Adam with sparse=False",
)
