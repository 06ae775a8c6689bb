r"""``torch.optim.SGD`` with a temperature, with or without momentum: SGD, SGLD, SGHMC.

:class:`SGLD` and :class:`SGHMC` are :class:`SGD` with other arguments. The samplers are those of Welling and Teh (2011) and of
Chen, Fox and Guestrin (2014), with the noise of :mod:`bayesopt_chain.optim._rule`, which makes them exact on quadratic losses
at every stable learning rate.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.engine.optimizer_cpu import MOMENTUM, PLAIN
from bayesopt_chain.optim._checks import momentum_of
from bayesopt_chain.optim._rule import Linear
from bayesopt_chain.optim._sampling import Sampling


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
    ``fused=False`` ask for torch's own step.

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

    counters = MappingProxyType({})

    def _linear(self, group: dict[str, Any], counts: tuple[float, ...]) -> Linear:
        """Return the numbers of SGD's step; raise ValueError for numbers that no noise is known for."""
        lr, momentum, nesterov = float(group["lr"]), float(group["momentum"]), group["nesterov"]
        if not momentum and nesterov:
            raise ValueError(f"{self._name}: Nesterov's momentum must stay above 0 at temperature > 0, got {momentum}")
        if not momentum:
            return Linear(lr, kind=PLAIN)
        momentum_of(self._name, momentum, "momentum")
        gain = 1.0 - float(group["dampening"])
        if gain <= 0.0:
            raise ValueError(f"{self._name}: dampening must be below 1 at temperature > 0, got {group['dampening']}")
        if nesterov:  # theta' = theta - lr g - lr mu V'
            return Linear(lr * momentum, momentum, gain, lr, 0.0, 1.0, 1.0, "momentum_buffer", MOMENTUM, branches=2)
        return Linear(lr, momentum, gain, 0.0, 0.0, 1.0, 1.0, "momentum_buffer", MOMENTUM)


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
