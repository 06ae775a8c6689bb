r"""SGD and heavy-ball momentum with a temperature: SGD, SGLD, SGHMC."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesopt_chain._torch import fused_sgd_
from bayesopt_chain.optim import _noise
from bayesopt_chain.optim._plan import Clock, FusedMove, Plan
from bayesopt_chain.optim._refusals import momentum_of
from bayesopt_chain.optim._rule import Linear
from bayesopt_chain.optim._sampling import Sampling

_TOLD = (("lr", float), ("momentum", float), ("weight_decay", float), ("nesterov", bool), ("maximize", bool))
_ALWAYS = Clock(1)  # no number of these steps depends on their count


class SGD(Sampling, torch.optim.SGD):
    r"""``torch.optim.SGD`` with a temperature (TorchOpt's is :class:`bayesopt_chain.SGD`).

    At ``temperature=0`` this is torch's own step, to the last bit, whichever of torch's implementations runs. At a
    temperature ``T > 0`` noise follows torch's step (:mod:`bayesopt_chain.optim._rule`), such that at constant
    hyperparameters the parameters sample ``exp(-loss / T)``, exactly for every quadratic loss and stable lr. With
    ``V`` the momentum buffer, ``b = 1 - dampening`` and ``xi_t`` standard normals,

        V <- mu V + b g,    theta <- theta - lr V                                                    (torch)
        e = (b T (1 - mu) / (2 lr))^(1/2) (xi_t + xi_{t-1}),    V <- V + e,    theta <- theta - lr e

    Nesterov is ``theta <- theta - lr g - lr mu V``: two branches with a noise each, the second of step size ``lr mu``.
    Weight decay is in the gradient: an exact Gaussian prior of precision ``weight_decay / T``. ``maximize`` samples
    ``exp(+loss / T)``. Where neither ``foreach`` nor ``fused`` is given, torch's step is its fused kernel at ``T > 0`` (on a
    CPU, in float32 and float64, without dampening, from the second step on), one unit in the last place away.

    Everything in a parameter group is read at every step, ``temperature`` included. Along an lr that falls, and momenta that
    rise, the variance stays exact at every step (:mod:`bayesopt_chain.optim._rule`). At a rise of lr it does not: under cosine
    cycles with restarts it is off by -21 % to +36 % at the restart, at most 7 % RMS, while ``lr * curvature <= 0.3``. After
    a change of temperature it goes to the new value without overshooting. ``lr = 0`` moves nothing.

    Args:
        params: as in torch: tensors, ``named_parameters()``, or dicts (groups). The noise of a parameter is numbered by
            its name, bare ones by their index.
        lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, differentiable, fused: torch's.
        temperature: a number or a 0-d tensor (read at every step). With a loss that is a mean over ``N`` data
            ``1 / N`` samples the posterior.
        generator: source of the noise's key, used once, when the optimizer is made. Default: torch's global generator, used
            when a temperature is first above 0.
        stream: ``"generator"`` (default on a CPU) is torch's generator, reseeded with 32 bits for every leaf and step:
            among ``n`` leaf-steps about ``n^2 / 2^33`` pairs share a draw. ``"philox"`` (always used on other devices)
            has none; on a CPU it pays for leaves of 10^4 elements and more, where a C++ compiler is found.
        keep_draws: ``False`` makes the last draw again in every step instead of keeping it, the same to the last bit: 4 bytes
            a parameter less, for a second draw a step. It asks for Philox: ``stream="philox"`` on a CPU, the default elsewhere.

        heat_guard, steps_per_epoch: watch for the heat of minibatches (docs/minibatches.md); ``None`` does not.
        room_for: a report of :func:`bayesopt_chain.diagnostics.heating`, made for the chain of these numbers (``bc.sgd``,
            ``bc.sghmc``, ``bc.sgld``) at ``dict(model.named_parameters())`` or at the list of parameters. The draws then leave
            room for the noise that minibatches bring, as :func:`bayesopt_chain.inject_langevin_noise` says. It is for one group
            of plain parameters at constant numbers without Nesterov's momentum, which all have a gradient in every step. A
            state dict knows of it, and the guard does not look.

    State: in float32, 8 bytes a parameter with momentum (velocity and last draw), 4 without, 12 with Nesterov.

    Raises:
        ValueError: at T > 0: momentum outside [0, 1), dampening of 1 or more, a negative lr, ``differentiable`` with an
            lr or weight decay that requires grad, complex parameters, or ``stream="generator"`` for parameters that are
            spread over ranks; a negative or infinite temperature; ``room_for`` of another chain, order, dtype or parameters.
            Nothing has moved then.

    The noise does not reach the model's own draws: dropout takes torch's global generator. :func:`as_step` seeds it
    too.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = bc.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, temperature=1e-3)
        >>> model(torch.ones(2, 3)).square().mean().backward()
        >>> optimizer.step()
        >>> sorted(name for name, x in optimizer.state[model.weight].items() if torch.is_tensor(x))
        ['momentum_buffer', 'noise']

        One that leaves room for the noise of its batches:

        >>> loss = lambda w, batch: (w["w"] - batch).square().mean() / 2
        >>> data, w = bc.epochs(torch.linspace(-3**0.5, 3**0.5, 1000), 20), torch.zeros((), requires_grad=True)
        >>> noise = bc.diagnostics.gradient_noise(loss, {"w": w.detach()}, data)
        >>> tx = bc.sgd(0.001, momentum=0.9, temperature=1e-3)
        >>> report = bc.diagnostics.heating(tx, noise, curvature=torch.ones(1, 1), again=noise)
        >>> optimizer = bc.optim.SGD([("w", w)], 0.001, momentum=0.9, temperature=1e-3, room_for=report)
    """

    timeless = True
    takes_room = True

    def _clock(self, state: dict[str, Any]) -> Clock:
        return _ALWAYS

    def _move(self, plan: Plan) -> None:
        if plan.moves is None:
            plan.moves = self._fused_moves(plan)
        grads = list(map(FusedMove.gradients, plan.moves))
        if not plan.moves or None in grads:
            return self._torch_step(None)
        for move, g in zip(plan.moves, grads):
            fused_sgd_(move.params, g, move.velocities, **{name: kind(move.group[name]) for name, kind in _TOLD})

    def _fused_moves(self, plan: Plan) -> list[FusedMove]:
        """What torch's fused kernel is to do; nothing where a group asks for another implementation or for dampening, and where
        a leaf has no noise or no velocity yet."""
        moves: list[FusedMove] = []
        for group in self.param_groups:
            work = [w for w in plan.noisy if w.group is group]
            asked = group.get("foreach") is not None or group.get("fused") is not None or group.get("differentiable")
            if asked or group["dampening"] or len(work) != sum([p.grad is not None for p in group["params"]]):
                return []
            velocities = [w.state.get("momentum_buffer") for w in work] if group["momentum"] else []
            if any([v is None for v in velocities]):
                return []
            if work:
                moves.append(FusedMove(group, [w.param for w in work], velocities))  # pyright: ignore[reportArgumentType]
        return moves

    def _linear(self, group: dict[str, Any], clock: Clock) -> Linear:
        lr, momentum = float(group["lr"]), float(group["momentum"])
        if not momentum and group["nesterov"]:
            raise ValueError(f"{self._name}: Nesterov's momentum must stay above 0 at temperature > 0, got {momentum}")
        if not momentum:
            return Linear(lr)
        momentum_of(self._name, momentum, "momentum")
        gain = 1.0 - float(group["dampening"])
        if gain <= 0.0:
            raise ValueError(f"{self._name}: dampening must be below 1 at temperature > 0, got {group['dampening']}")
        if group["nesterov"]:
            return Linear(lr * momentum, momentum, gain, "momentum_buffer", direct=lr)
        return Linear(lr, momentum, gain, "momentum_buffer")


class SGHMC(SGD):
    """SGD with momentum 0.9 that samples; :func:`bayesopt_chain.sghmc` as a ``torch.optim.Optimizer``.

    The one-line change from ``torch.optim.SGD(params, lr, momentum=0.9)``. See :class:`SGD` for the equations, the
    other arguments and what may change while it runs. 8 bytes of state a parameter in float32, the parameters not
    copied.

    Args:
        params: as in :class:`SGD`.
        lr: learning rate.
        momentum: in [0, 1).
        temperature: ``1 / N`` for the posterior where the loss is a mean over ``N`` data.
        generator, stream: as in :class:`SGD`.
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
        stream: _noise.Stream | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, lr, momentum, temperature=temperature, generator=generator, stream=stream, **kwargs)


class SGLD(SGD):
    """SGD that samples: Langevin dynamics; :func:`bayesopt_chain.sgld` as a ``torch.optim.Optimizer``.

    ``theta <- theta - lr g - (T lr / 2)^(1/2) (xi_t + xi_{t-1})``, exact on quadratic losses at every stable lr. Mixes
    slowly: :class:`SGHMC` costs 4 bytes more a parameter. See :class:`SGD` for the other arguments.

    Args:
        params: as in :class:`SGD`.
        lr: learning rate.
        temperature: ``1 / N`` for the posterior where the loss is a mean over ``N`` data.
        generator, stream: as in :class:`SGD`.
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
        stream: _noise.Stream | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, lr, temperature=temperature, generator=generator, stream=stream, **kwargs)
