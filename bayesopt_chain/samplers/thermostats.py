r"""Thermostats: the friction ``xi`` is a variable that keeps the kinetic energy at its temperature, so that gradient noise of
unknown, constant strength is absorbed instead of heating the chain. ``d`` is the number of parameters.

**SGNHT** (Ding, Fang, Babbush, Chen, Skeel and Neven, 2014), in SGD's ``lr`` and ``mu``, from ``xi = 1 - mu``:

    v <- (1 - xi) v + g + sqrt(2 T (1 - mu) / lr) n,     theta <- theta - lr v,
    xi <- xi + (lr / Q) (lr (1 - xi / 2) |v|^2 / (d T) - 1).

The paper has 1 for ``1 - xi / 2``, which is right only where friction vanishes with the step. With white noise the
velocity of SGD with momentum ``mu`` has ``lr (1 + mu) / 2 * Var(v) = T`` to first order in lr, and ``1 + mu = 2 - xi``: with
this factor ``xi`` settles at ``1 - mu`` and the bias is of first order in lr at every momentum; without it the temperature
is off by the relative amount ``(1 - mu) / 2`` however small lr is.

**BADODAB** (Leimkuhler and Shang, "Adaptive thermostats for noisy gradient systems", 2016), with step ``h`` and friction
``gamma``, from ``xi = gamma``; one gradient a step, the two half kicks that meet between steps being one:

    B  p <- p - h g                          A  theta <- theta + (h / 2) p
    D  xi <- xi + (h / 2) (|p|^2 / (d T) - 1) / Q
    O  p <- exp(-xi h) p + sqrt(gamma T (1 - exp(-2 xi h)) / xi) n
    D, A again.

Second order in ``h`` at fixed ``gamma``, fourth (second in lr) at fixed ``gamma h``, as BAOAB. ``Q`` (``thermostat_mass``) is a
squared time: larger, slower. The papers' is ``Q T``; ours leaves the thermostat's time scale alone when the temperature is
``1 / N``. The stationary law of ``xi`` is about ``N(friction, 1 / (d Q))`` in continuous time.

*One* thermostat follows the mean kinetic energy of all parameters, which is what the theory of scalar gradient noise asks
for; one *per parameter* also absorbs gradient noise that differs between parameters.

**There is no optimizer at T = 0**: a thermostat drives the kinetic energy to ``T``, and to reach 0 it would raise the
friction for ever. Temperature 0 is refused; :func:`bayesopt_chain.sghmc` is the sampler to take there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import At, Keyed
from bayesopt_chain.core.op import Leaves, Op
from bayesopt_chain.core.response import OwnNoise, Response
from bayesopt_chain.core.scalar_or_schedule import ScalarOrSchedule, now, require_valid, root
from bayesopt_chain.core.state import zeros

_WHY = (
    "a thermostat holds the kinetic energy at T and has no limit as T -> 0; "
    "use bc.sghmc, or bc.sgd(lr, momentum), to optimise"
)


class ThermostatState(NamedTuple):
    """Stream; velocity of each parameter; the friction ``xi``: one 0-d tensor in all, or one tensor for each leaf."""

    key: Tensor
    count: Tensor
    velocity: tuple[Tensor, ...]
    friction: tuple[Tensor, ...]


@dataclass(frozen=True)
class Thermostat(Keyed):
    """What both thermostats share: their state, and the kinetic energy that drives them."""

    step: float
    friction: float
    temperature: ScalarOrSchedule
    mass: float
    per_parameter: bool

    @property
    def response(self) -> Response:
        return OwnNoise()

    def init(self, leaves: Leaves, at: At) -> ThermostatState:
        key, count = self.start(leaves, at)
        shared = (torch.full((), self.friction, dtype=leaves[0].dtype, device=leaves[0].device),)
        friction = zeros(leaves, self.friction) if self.per_parameter else shared
        return ThermostatState(key, count, zeros(leaves), friction)

    def update(self, g: Leaves, state: ThermostatState, op: Op, at: At) -> tuple[Leaves, ThermostatState]:
        temperature = now(self.temperature, state.count)
        require_valid("temperature", temperature)
        xi = [x for (x,) in self.normals(state, g, at)]
        moves, velocity, friction = self.advance(g, list(state.velocity), list(state.friction), xi, temperature)
        return op.put(g, moves), ThermostatState(
            state.key,
            *op.count([state.count]),
            tuple(op.put(state.velocity, velocity)),
            tuple(op.put(state.friction, friction)),
        )

    def advance(self, g: list, v: list, friction: list, n: list, temperature):
        """Moves, velocities and frictions after one step of the leaves that have a gradient."""
        raise NotImplementedError

    def kinetic(self, v: list) -> list:
        """``|v|^2 / d``: the mean over all parameters, or each parameter's own."""
        if self.per_parameter:
            return [x * x for x in v]
        return [sum((x * x).sum().to(v[0].dtype) for x in v) / sum(x.numel() for x in v)]

    def each(self, friction: list, leaves: list) -> list:
        """The friction that each leaf feels."""
        return friction if self.per_parameter else [friction[0].to(x.dtype) for x in leaves]


@dataclass(frozen=True)
class NoseHoover(Thermostat):
    """SGNHT; ``step`` is lr and ``friction`` is ``1 - momentum``."""

    def advance(self, g, v, friction, n, temperature):
        lr = self.step
        strength = root(2.0 * self.friction * temperature / lr)
        v = [(1.0 - xi) * u + x + strength * e for u, x, xi, e in zip(v, g, self.each(friction, v), n)]
        moves = [-lr * u for u in v]
        friction = [
            xi + (lr / self.mass) * (lr * (1.0 - xi / 2.0) * k / temperature - 1.0)
            for xi, k in zip(friction, self.kinetic(v))
        ]
        return moves, v, friction

    def __str__(self) -> str:
        name = "sgnht_per_parameter" if self.per_parameter else "sgnht"
        return f"{name}({self.step}, {1.0 - self.friction:.6g}, temperature={checks.show(self.temperature)})"


@dataclass(frozen=True)
class Badodab(Thermostat):
    """BADODAB; ``step`` is h and ``friction`` is gamma."""

    def advance(self, g, v, friction, n, temperature):
        h = self.step
        p = [u - h * x for u, x in zip(v, g)]
        first = p
        friction = self.half_turn(friction, p, temperature)
        p = [
            torch.exp(-xi * h) * u + root(2.0 * self.friction * temperature * h) * _ou_scale(2.0 * xi * h) * e
            for u, xi, e in zip(p, self.each(friction, p), n)
        ]
        friction = self.half_turn(friction, p, temperature)
        return [(h / 2.0) * (a + b) for a, b in zip(first, p)], p, friction

    def half_turn(self, friction: list, p: list, temperature) -> list:
        rate = self.step / (2.0 * self.mass)
        return [xi + rate * (k / temperature - 1.0) for xi, k in zip(friction, self.kinetic(p))]

    def __str__(self) -> str:
        name = "badodab_per_parameter" if self.per_parameter else "badodab"
        return f"{name}({self.step}, {self.friction}, temperature={checks.show(self.temperature)})"


def _ou_scale(x: Tensor) -> Tensor:
    """``sqrt((1 - exp(-x)) / x)``, also at 0 and for negative ``x``."""
    small = x.abs() < 1e-4
    safe = torch.where(small, torch.ones_like(x), x)
    return torch.where(small, 1.0 - x / 2.0 + x * x / 6.0, -torch.expm1(-safe) / safe).sqrt()


def sgnht(
    lr: float,
    momentum: float = 0.9,
    *,
    temperature: ScalarOrSchedule,
    thermostat_mass: float = 1.0,
    generator: torch.Generator | None = None,
) -> Chain:
    """Stochastic gradient Nosé-Hoover thermostat, one friction for all parameters.

    Args:
        lr: learning rate, as in SGD. momentum: in [0, 1); ``1 - momentum`` is where the friction starts.
        temperature: positive number, 0-d tensor or schedule; ``1 / N`` for a loss that is a mean over ``N`` data.
        thermostat_mass: ``Q``, positive; the friction's response time is about ``sqrt(Q / lr)`` updates.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds one tensor for each parameter and one 0-d friction. Under ``masked`` or ``partition`` each
        group has a thermostat of its own.

    Raises:
        ValueError: temperature 0 (no limit exists, see the module), or another argument out of range.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.samplers.sgnht(0.01, temperature=1.0), {"w": torch.zeros(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params=params)
        >>> state[0].friction[0].shape
        torch.Size([])
    """
    return _nose_hoover("sgnht", lr, momentum, temperature, thermostat_mass, False, generator)


def sgnht_per_parameter(
    lr: float,
    momentum: float = 0.9,
    *,
    temperature: ScalarOrSchedule,
    thermostat_mass: float = 1.0,
    generator: torch.Generator | None = None,
) -> Chain:
    """Stochastic gradient Nosé-Hoover thermostat with a friction for each parameter. Arguments as :func:`sgnht`.

    Returns:
        A chain; its state holds two tensors for each parameter.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> bc.samplers.sgnht_per_parameter(0.01, temperature=1.0).init({"w": torch.zeros(2)})[0].friction
        (tensor([0.1000, 0.1000]),)
    """
    return _nose_hoover("sgnht_per_parameter", lr, momentum, temperature, thermostat_mass, True, generator)


def badodab(
    step_size: float,
    friction: float = 1.0,
    *,
    temperature: ScalarOrSchedule,
    thermostat_mass: float = 1.0,
    generator: torch.Generator | None = None,
) -> Chain:
    """The adaptive Langevin thermostat by the BADODAB splitting, of second order in the step, one friction for all.

    Args:
        step_size: ``h``, a time. friction: ``gamma``, where the friction starts, positive.
        temperature: positive number, 0-d tensor or schedule; ``1 / N`` for a loss that is a mean over ``N`` data.
        thermostat_mass: ``Q``, positive; the friction's response time is about ``sqrt(Q)``.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds one tensor for each parameter and one 0-d friction.

    Raises:
        ValueError: temperature 0 (no limit exists, see the module), or another argument out of range.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.samplers.badodab(0.1, temperature=0.0)
        Traceback (most recent call last):
            ...
        ValueError: badodab: temperature must be positive, got 0.0: a thermostat holds the kinetic energy at T ...
    """
    return _badodab("badodab", step_size, friction, temperature, thermostat_mass, False, generator)


def badodab_per_parameter(
    step_size: float,
    friction: float = 1.0,
    *,
    temperature: ScalarOrSchedule,
    thermostat_mass: float = 1.0,
    generator: torch.Generator | None = None,
) -> Chain:
    """The adaptive Langevin thermostat with a friction for each parameter. Arguments as :func:`badodab`.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> bc.samplers.badodab_per_parameter(0.1, temperature=1.0).init(torch.zeros(2))[0].friction
        (tensor([1., 1.]),)
    """
    return _badodab("badodab_per_parameter", step_size, friction, temperature, thermostat_mass, True, generator)


def _nose_hoover(who: str, lr, momentum, temperature, mass, per_parameter: bool, generator) -> Chain:
    checks.positive(f"{who}: lr", lr)
    checks.momentum(f"{who}: momentum", momentum)
    checks.positive(f"{who}: thermostat_mass", mass)
    checks.positive_temperature(who, temperature, _WHY)
    return Chain((NoseHoover(lr, 1.0 - momentum, temperature, mass, per_parameter, generator=generator),))


def _badodab(who: str, step_size, friction, temperature, mass, per_parameter: bool, generator) -> Chain:
    checks.positive(f"{who}: step_size", step_size)
    checks.positive(f"{who}: friction", friction)
    checks.positive(f"{who}: thermostat_mass", mass)
    checks.positive_temperature(who, temperature, _WHY)
    return Chain((Badodab(step_size, friction, temperature, mass, per_parameter, generator=generator),))
