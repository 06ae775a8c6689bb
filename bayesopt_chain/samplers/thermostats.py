r"""Thermostats: the friction ``xi`` is a variable that keeps the kinetic energy at its temperature, so that gradient noise of
unknown, constant strength is absorbed instead of heating the chain. ``d`` is the number of parameters that share a friction.

**The friction is the exponential of the thermostat's variable**, so that it is positive whatever the kinetic energy does,

    dp = -grad U dt - xi p dt + sqrt(2 gamma T) dW,      d log xi = (|p|^2 / (d T) - 1) / (gamma Q) dt.

With ``xi = gamma e^s`` the density ``exp(-U / T - |p|^2 / (2 T)) w(s)`` is stationary if ``w' / w = d Q gamma (gamma - xi)``:
position and velocity have the Gibbs law exactly, and ``xi`` has a Gamma law of mean ``gamma`` and shape ``d Q
gamma^2``. Gradient noise that is white in time adds to the injected noise of level ``2 gamma T``; where both together have the
level ``2 gamma' T``, the law of position and velocity is the same and ``xi`` has the mean ``gamma'``. (Where ``xi`` itself
follows the kinetic energy, as in the papers, its law is ``N(gamma, 1 / (d Q))``.
With ``d = 1`` the friction is then often negative, and at finite steps the velocity runs away.)

**SGNHT** (Ding, Fang, Babbush, Chen, Skeel and Neven, 2014), in SGD's ``lr`` and ``mu``, ``xi`` being the friction of
one update and ``a = exp(-xi)`` the velocity it keeps, from ``a = mu``:

    v <- a v + g + sqrt(2 T (1 - mu) / lr) n,     theta <- theta - lr v,
    log xi <- log xi + lr / ((1 - mu) Q) (lr (1 + a) / 2 |v|^2 / (d T) - 1).

The paper has 1 for ``(1 + a) / 2``, which is right only where friction vanishes with the step. With white noise the velocity of
SGD with momentum ``mu`` has ``lr (1 + mu) / 2 * Var(v) = T`` to first order in lr: with this factor ``a`` settles at
``mu`` and the bias is of first order in lr at every momentum; without it the temperature is off by the relative amount
``(1 - mu) / 2`` however small lr is. On a quadratic loss of curvature ``k`` and at constant ``a``, ``Var(theta) = lr (1
+ a) / (2 k) Var(v)``: where the kinetic energy is at ``T`` the variance is ``T / k`` at every stable lr.

**BADODAB** (Leimkuhler and Shang, "Adaptive thermostats for noisy gradient systems", 2016), with step ``h`` and friction
``gamma``, from ``xi = gamma``; one gradient a step, the two half kicks that meet between steps being one:

    B  p <- p - h g                          A  theta <- theta + (h / 2) p
    D  log xi <- log xi + (h / 2) (|p|^2 / (d T) - 1) / (gamma Q)
    O  p <- exp(-xi h) p + sqrt(gamma T (1 - exp(-2 xi h)) / xi) n
    D, A again.

Second order in ``h`` at fixed ``gamma``, fourth (second in lr) at fixed ``gamma h``, as BAOAB.

**The mass** ``Q`` (``thermostat_mass``) is a squared time, ``lr`` being ``h^2``: larger, slower. The papers' is ``Q
T``; ours leaves the thermostat's time scale alone when the temperature is ``1 / N``. The friction's relative standard
deviation is ``1 / sqrt(d Q gamma^2)``, ``gamma = (1 - mu) / sqrt(lr)``. The default is 1, and more where one
parameter's friction would vary by more than 32 %: ``Q = max(1, 10 / gamma^2)``, that is ``max(1, 10 lr / (1 - mu)^2)``.

**A cap.** The friction of one update (``xi``, ``xi h``) stays below 20: the velocity is forgotten there (``e^-20``),
and a start far from the mode, whose kinetic energy is many times ``T``, would otherwise drive ``log xi`` to values from
which it returns at the constant rate ``1 / (gamma Q)``. At momentum 0.5 and more the Gamma law of the default mass puts
less than ``1e-60`` beyond the cap.

*One* thermostat follows the mean kinetic energy of all parameters. The theory assumes that gradient noise has the same strength
everywhere; a thermostat *per parameter* also absorbs gradient noise that differs between parameters.

**There is no optimizer at T = 0**: a thermostat drives the kinetic energy to ``T``, and to reach 0 it would raise the
friction without end. Temperature 0 is therefore refused; :func:`bayesopt_chain.sghmc` has an optimizer as its limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import LinkContext
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.core.state import zeros
from bayesopt_chain.links.keyed import Keyed
from bayesopt_chain.schedules import ScalarOrSchedule, now, root

_HOT = checks.number(
    "(0, inf)",
    tensor=True,
    schedule=True,
    hint="a thermostat holds the kinetic energy at T and has no limit as T -> 0; "
    "use bc.sghmc, or bc.sgd(lr, momentum), to optimise",
)
_CAP = 20.0  # of the friction of one update


class ThermostatState(NamedTuple):
    """What a thermostat remembers.

    Attributes:
        key, count: of the random stream, 0-d int64.
        velocity: one tensor for each parameter.
        friction: ``xi``, one 0-d tensor in all, or one tensor for each leaf.
    """

    key: Tensor
    step: Tensor
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

    def init(self, leaves: Leaves, context: LinkContext) -> ThermostatState:
        key, count = self.start(leaves, context)
        shared = (torch.full((), self.friction, dtype=leaves[0].dtype, device=leaves[0].device),)
        friction = zeros(leaves, self.friction) if self.per_parameter else shared
        return ThermostatState(key, count, zeros(leaves), friction)

    def update(
        self, g: Leaves, state: ThermostatState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, ThermostatState]:
        temperature = checks.at_this_step("temperature", now(self.temperature, state.step))
        xi = [x for (x,) in self.normals(state, g, context)]
        moves, velocity, friction = self.advance(
            g, list(state.velocity), list(state.friction), xi, temperature, context
        )
        count = op.next_count(state.step)
        velocity, friction = tuple(op.put(state.velocity, velocity)), tuple(op.put(state.friction, friction))
        return op.put(g, moves), ThermostatState(state.key, count, velocity, friction)

    def advance(self, g: list, v: list, friction: list, n: list, temperature, context: LinkContext):
        """Moves, velocities and frictions after one step of the leaves that have a gradient."""
        raise NotImplementedError

    def kinetic(self, v: list, context: LinkContext) -> list:
        """``|v|^2 / d``: the mean over all parameters, wherever they lie, or each parameter's own."""
        if self.per_parameter:
            return [x * x for x in v]
        squares = [(x * x).sum().to(v[0].dtype) for x in v]
        return [context.total(squares) / context.numel(v)]

    def of_each_leaf(self, friction: list, leaves: list) -> list:
        """The friction that each leaf feels."""
        return friction if self.per_parameter else [friction[0].to(x.dtype) for x in leaves]

    def driven(self, friction: list, excess: list, rate: float, cap: float) -> list:
        """``xi <- min(cap, xi exp(rate excess))``, ``excess`` being the kinetic energy over ``T``, less 1."""
        return [torch.exp(torch.clamp(xi.log() + rate * x, max=math.log(cap))) for xi, x in zip(friction, excess)]


@dataclass(frozen=True)
class NoseHoover(Thermostat):
    """SGNHT; ``step`` is lr and ``friction`` is ``-log(momentum)``."""

    def advance(self, g, v, friction, n, temperature, context):
        lr, loss = self.step, -math.expm1(-self.friction)  # 1 - mu
        strength = root(2.0 * loss * temperature / lr)
        kept = [torch.exp(-xi) for xi in friction]
        v = [a * u + x + strength * e for u, x, a, e in zip(v, g, self.of_each_leaf(kept, v), n)]
        moves = [-lr * u for u in v]
        excess = [lr * (1.0 + a) / 2.0 * k / temperature - 1.0 for a, k in zip(kept, self.kinetic(v, context))]
        return moves, v, self.driven(friction, excess, lr / (loss * self.mass), _CAP)

    def __str__(self) -> str:
        return (
            f"sgnht({self.step}, {math.exp(-self.friction):.6g}, temperature={checks.show(self.temperature)}"
            f"{', per_parameter=True' if self.per_parameter else ''})"
        )


@dataclass(frozen=True)
class Badodab(Thermostat):
    """BADODAB; ``step`` is h and ``friction`` is gamma."""

    def advance(self, g, v, friction, n, temperature, context):
        h = self.step
        p = [u - h * x for u, x in zip(v, g)]
        first = p
        friction = self.half_thermostat_step(friction, p, temperature, context)
        p = [
            torch.exp(-xi * h) * u + root(2.0 * self.friction * temperature * h) * _ou_scale(2.0 * xi * h) * e
            for u, xi, e in zip(p, self.of_each_leaf(friction, p), n)
        ]
        friction = self.half_thermostat_step(friction, p, temperature, context)
        return [(h / 2.0) * (a + b) for a, b in zip(first, p)], p, friction

    def half_thermostat_step(self, friction: list, p: list, temperature, context: LinkContext) -> list:
        """D: the friction's half step."""
        rate = self.step / (2.0 * self.friction * self.mass)
        excess = [k / temperature - 1.0 for k in self.kinetic(p, context)]
        return self.driven(friction, excess, rate, _CAP / self.step)

    def __str__(self) -> str:
        return (
            f"badodab({self.step}, {self.friction}, temperature={checks.show(self.temperature)}"
            f"{', per_parameter=True' if self.per_parameter else ''})"
        )


def _ou_scale(x: Tensor) -> Tensor:
    """``sqrt((1 - exp(-x)) / x)``, also at 0."""
    small = x < 1e-4
    safe = torch.where(small, torch.ones_like(x), x)
    return torch.where(small, 1.0 - x / 2.0 + x * x / 6.0, -torch.expm1(-safe) / safe).sqrt()


@checks.factory_takes(lr=checks.POSITIVE, momentum=checks.MOMENTUM, temperature=_HOT)
def sgnht(
    lr: float,
    momentum: float = 0.9,
    *,
    temperature: ScalarOrSchedule,
    per_parameter: bool = False,
    thermostat_mass: float | None = None,
    generator: torch.Generator | None = None,
) -> Chain:
    """Stochastic gradient Nosé-Hoover thermostat (Ding et al., 2014): SGHMC whose friction absorbs gradient noise.

    Args:
        lr: learning rate, as in SGD.
        momentum: in (0, 1); ``-log(momentum)`` is where the friction of one update starts.
        temperature: positive number, 0-d tensor or schedule; ``1 / N`` for a loss that is a mean over ``N`` data. Along a
            schedule the thermostat follows with its response time, and the kinetic energy swings about the new value.
        per_parameter: a friction for each parameter, where gradient noise differs between them; default: one for all.
        thermostat_mass: ``Q``, positive, a squared time (lr is one); the friction's response time is about
            ``Q (1 - momentum) / lr`` updates. Default ``max(1, 10 lr / (1 - momentum)^2)``.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain. Its state holds one tensor for each parameter and one 0-d friction, or with ``per_parameter`` two tensors for
        each parameter. Under ``masked`` or ``partition`` each group has a thermostat of its own.

    Raises:
        ValueError: temperature 0 (no limit exists, see the module), momentum 0 (no friction could absorb more), or another
            argument out of range.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.samplers.sgnht(0.01, temperature=1.0), {"w": torch.zeros(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params=params)
        >>> [v.shape for v in updates.values()]
        [torch.Size([2])]
    """
    if momentum == 0.0:
        raise ValueError(
            "sgnht: momentum must lie in (0, 1), got 0.0; without momentum all velocity is lost in each update and no "
            "friction can absorb more: use bc.sgld, or a momentum such as 0.5"
        )
    mass = _mass("sgnht", thermostat_mass, (1.0 - momentum) / lr**0.5)
    return Chain((NoseHoover(lr, -math.log(momentum), temperature, mass, per_parameter, generator=generator),))


@checks.factory_takes(step_size=checks.POSITIVE, friction=checks.POSITIVE, temperature=_HOT)
def badodab(
    step_size: float,
    friction: float = 1.0,
    *,
    temperature: ScalarOrSchedule,
    per_parameter: bool = False,
    thermostat_mass: float | None = None,
    generator: torch.Generator | None = None,
) -> Chain:
    """The adaptive Langevin thermostat by the BADODAB splitting (Leimkuhler and Shang, 2016), of second order in the step.

    Args:
        step_size: ``h``, a time.
        friction: ``gamma``, an inverse time, where the friction starts, positive.
        temperature: positive number, 0-d tensor or schedule; ``1 / N`` for a loss that is a mean over ``N`` data. Along a
            schedule the thermostat follows with its response time, and the kinetic energy swings about the new value.
        per_parameter: a friction for each parameter, where gradient noise differs between them; default: one for all.
        thermostat_mass: ``Q``, positive, a squared time; the friction's response time is about ``Q friction``. Default
            ``max(1, 10 / friction^2)``.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain. Its state holds one tensor for each parameter and one 0-d friction, or with ``per_parameter`` two tensors for
        each parameter.

    Raises:
        ValueError: temperature 0 (no limit exists, see the module), or another argument out of range.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.samplers.badodab(0.1, temperature=0.0)
        Traceback (most recent call last):
            ...
        ValueError: badodab: temperature must be a positive, finite number ..., got 0.0; a thermostat ...
    """
    mass = _mass("badodab", thermostat_mass, friction)
    return Chain((Badodab(step_size, friction, temperature, mass, per_parameter, generator=generator),))


def _mass(who: str, mass: float | None, gamma: float) -> float:
    """``Q``; by default one friction's relative standard deviation is at most ``1 / sqrt(10)``."""
    if mass is None:
        return max(1.0, 10.0 / gamma**2)
    checks.POSITIVE(f"{who}: thermostat_mass", mass)
    return float(mass)
