r"""At what temperature does a chain run: kinetic and configurational, leaf by leaf, against the one it was given.

Let ``theta' = theta - d`` be a step, ``d = F(z) (grad + e)`` with noise ``e`` matched to ``F``, ``F_0`` the first number of
its response (the displacement that a unit gradient causes at once) and ``k`` a curvature. The chain answers a force by
``chi(z) = H / (1 + k H)``, ``H = F / (z - 1)``; its spectrum is ``-T cot(w/2) Im chi``, so that the autocovariance obeys

    C(j) - C(j + 1) = T/2 (chi_{j+1} + chi_j),      chi_0 = 0,   chi_1 = F_0 whatever the curvature.

Two readings follow which are exactly ``T`` for every stable learning rate, every curvature and every ``F``:

    kinetic           <d^2> / F_0 = 2 (C(0) - C(1)) / F_0           of each element, without decay or with, any momentum
    configurational   <(theta - c) dU/dtheta> = k C(0)              c any constant, U the loss with its decay

With a frozen diagonal preconditioner ``F_0`` has an entry for each element. In terms of a velocity ``v``, ``d = lr v``: for
momentum ``<d^2> / F_0 = lr <v^2>``, for Nesterov ``F_0 = lr (1 + mu)`` and ``d = lr (grad + e + mu v)``, for Adam ``F_0 =
lr (1 - b1) P`` and ``lr <m P m> / (1 - b1)``, without momentum ``lr <(grad + e)^2>``. Where the velocity carries half the
noise the field ``q`` of the state has ``2 lr mu^2 <q^2> / (1 + mu) = T`` besides. The configurational temperature is the
virial theorem's (Rugh, 1997); both were read off samplers of neural networks by Wenzel et al. (2020).

White noise of variance ``B`` on the gradient adds ``B sum_j F_j^2`` to ``<d^2>``. It spends the share ``rho = B F(1) / 2T``
of the noise budget, so that it adds ``w rho`` to the ratio ``<d^2> / (F_0 T)``, ``w = 2 sum_j F_j^2 / (F_0 F(1))``, for
momentum ``2 / (1 + mu)``. What is reported is ``1 + (ratio - 1) / w``, which reads ``1 + rho``. With ``order=1`` all noise is
white and the ratio itself is ``w + O(lr k)``: what is reported is ``ratio / w``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args, runtime_checkable

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link
from bayesopt_chain.core.op import PURE
from bayesopt_chain.core.state import State
from bayesopt_chain.data.index_stream import Order
from bayesopt_chain.distributed import shards
from bayesopt_chain.links.langevin_noise import LangevinNoise
from bayesopt_chain.links.master_weights import MasterWeights
from bayesopt_chain.links.wrapper import unwrapped
from bayesopt_chain.loop.loss import gradient
from bayesopt_chain.matching import law
from bayesopt_chain.matching.response import Decay, Linear, Noise, Preconditioner, Rate, SelfContainedSampler
from bayesopt_chain.schedules import now
from bayesopt_chain.testing._linear_system import IMPULSE, OneUpdate
from bayesopt_chain.trees import paths_of

if TYPE_CHECKING:
    from bayesopt_chain.runs.draws import Draws
    from bayesopt_chain.runs.run import Iteration

BATCHES = 20  # into which a series is cut for its standard error
MARGIN = 3.0  # standard errors that an excess must stand above before anybody is warned


class Estimate(NamedTuple):
    """A mean over a run, with the standard error that its autocorrelation leaves.

    Attributes:
        value: the mean.
        standard_error: of the mean, from the spread of the means of 20 successive parts.
    """

    value: float
    standard_error: float

    @property
    def interval(self) -> tuple[float, float]:
        """Two standard errors to either side: about 95 %."""
        return self.value - 2 * self.standard_error, self.value + 2 * self.standard_error

    def __str__(self) -> str:
        return f"{self.value:.3f} +- {2 * self.standard_error:.3f}"


def estimate(series: Tensor) -> Estimate:
    """Mean and standard error of a series ``[S]`` or ``[S, chains]``.

    Example:
        >>> import torch
        >>> estimate(torch.tensor([1.0, 3.0] * 50)).value
        2.0
    """
    x = series.to(torch.float64)
    x = x[:, None] if x.ndim == 1 else x
    size = max(1, len(x) // BATCHES)
    count = len(x) // size
    means = x[len(x) - count * size :].reshape(count, size, -1).mean(1).flatten()
    error = float(means.std() / math.sqrt(len(means))) if len(means) > 1 else math.inf
    return Estimate(float(x.mean()), error)


class ThermalLeaf(NamedTuple):
    """What the next step of a torch optimizer does to one parameter, as the readings of this module need it.

    Attributes:
        temperature: that of its group.
        gain: ``F_0``, a number or a tensor like the parameter.
        white: ``w``.
        decay: the weight decay that is a part of the loss; ``None`` where there is one that is not.
        sign: -1 where the optimizer climbs the loss.
    """

    temperature: float
    gain: float | Tensor
    white: float
    decay: float | None
    sign: float = 1.0


@runtime_checkable
class Thermal(Protocol):
    """An optimizer that knows its own response: those of :mod:`bayesopt_chain.optim`."""

    def thermal_leaves(self) -> Mapping[str, ThermalLeaf]:
        """By the parameter's name, what the next step does to it; without those that get no noise."""
        ...


class Temperatures(NamedTuple):
    """Temperatures over the one that was asked for, so that 1 is right. Each is a mapping from the path of a leaf.

    Attributes:
        kinetic: from the size of the steps.
        configurational: from the parameters and the gradient of the loss, weight decay included.
        data: the part of the configurational one that the loss contributes, the rest being the chain's weight decay.
    """

    kinetic: Mapping[str, Estimate]
    configurational: Mapping[str, Estimate]
    data: Mapping[str, Estimate]

    def __str__(self) -> str:
        names = [*dict.fromkeys([*self.kinetic, *self.configurational])]
        width = max(map(len, [*names, "leaf"]))
        lines = [f"{'leaf':<{width}}  kinetic / T        configurational / T"]
        for name in names:
            cells = [str(part[name]) if name in part else "-" for part in (self.kinetic, self.configurational)]
            lines.append(f"{name:<{width}}  {cells[0]:<18} {cells[1]}")
        return "\n".join(lines)


@kinds.takes(draws=kinds.SAMPLED, tx=kinds.TX_OR_OPTIMIZER, thermometer=kinds.THERMOMETER)
def temperatures(
    draws: Draws | None = None,
    tx: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    batches: Iterable[Any] | None = None,
    *,
    thermometer: Thermometer | None = None,
    temperature: float | None = None,
) -> Temperatures:
    """Kinetic and configurational temperature of every leaf, over the chain's own.

    Args:
        draws: of :func:`bayesopt_chain.sample`; with ``tx``, ``loss`` and ``batches`` they give the configurational ones.
        tx: the chain, or the optimizer of :mod:`bayesopt_chain.optim`, that made them. Weight decay and localisation at its
            head count as a part of the loss.
        loss: ``loss(params, batch)`` as the step had it.
        batches: all data, in batches of one size; gone through once for each draw.
        thermometer: the callback that watched the run; it gives the kinetic ones.
        temperature: of the chain, if it is not a number in ``tx``.

    Returns:
        :class:`Temperatures`; ``print`` it. The configurational ones are centred for each half of the draws at the mean of
        the other half, so that no curvature of the estimate itself enters.

    Raises:
        ValueError: neither draws with a loss nor a thermometer; fewer than four draws; weight decay behind a momentum or a
            preconditioner, which is no part of the loss.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> loss = lambda w, batch: (w**2).sum() / 2
        >>> tx, w = bc.sghmc(0.2, temperature=0.5, generator=torch.Generator().manual_seed(0)), torch.zeros(200)
        >>> meter = bc.diagnostics.Thermometer(tx)
        >>> draws = bc.sample(
        ...     bc.make_step(loss, tx), w, tx.init(w), None, steps=600, burn_in=200, thinning=4, callbacks=[meter]
        ... )
        >>> report = bc.diagnostics.temperatures(draws, tx, loss, [None], thermometer=meter)
        >>> abs(report.kinetic["tensor"].value - 1) < 0.05, abs(report.configurational["tensor"].value - 1) < 0.1
        (True, True)
    """
    kinetic = {} if thermometer is None else thermometer.estimates
    if loss is None:
        if thermometer is None:
            raise ValueError("temperatures: pass draws with tx, loss and batches, or thermometer=, or both")
        return Temperatures(kinetic, {}, {})
    if draws is None or tx is None or batches is None:
        raise ValueError("temperatures: the configurational ones need draws, tx, loss and batches")
    if len(draws) < 4:
        raise ValueError(f"temperatures: needs at least 4 draws, got {len(draws)}; run longer")
    batches = list(batches)
    if not batches:
        raise ValueError("temperatures: batches is empty")
    total: dict[str, list[Tensor]] = {}
    data: dict[str, list[Tensor]] = {}
    centres = _other_halves(draws)
    judge = forces_of(tx, _chains(draws[0], draws.chains)[0], temperature)
    for n, draw in enumerate(draws):
        rows: list[tuple[dict[str, float], dict[str, float]]] = []
        for c, params in enumerate(_chains(draw, draws.chains)):
            centre = _chains(centres[n >= len(draws) // 2], draws.chains)[c]
            rows.append(_virial(judge, params, centre, loss, batches))
        for out, k in ((total, 0), (data, 1)):
            for name, level in judge.levels.items():
                out.setdefault(name, []).append(torch.tensor([row[k][name] / level for row in rows], device="cpu"))
    found = [{name: estimate(torch.stack(x)) for name, x in part.items()} for part in (total, data)]
    return Temperatures(kinetic, *found)


class Thermometer:
    """Reads the kinetic temperature of a run, as a callback of :func:`bayesopt_chain.sample`.

    It looks at the step that follows each draw, and keeps one copy of the parameters. Where learning rate, temperature or
    preconditioner change, it reads the chain's gains once for each draw, which costs about three updates (not gradients);
    else once in all. Of a resumed run it sees the steps that this process makes.

    Args:
        tx: the chain that the step runs: matched noise, and preconditioners that are diagonal. Or the optimizer of
            :mod:`bayesopt_chain.optim` inside ``bc.optim.as_step``, made with ``model.named_parameters()``.
        order: of the batches. Independent ones heat the chain by what is read here; those of ``bc.epochs`` in the order
            ``"reshuffled"`` or ``"palindrome"`` by less, and no warning is given (:func:`heating` predicts how much).
        warn_above: the excess over 1 above which :func:`bayesopt_chain.sample` warns when the run ends.

    Raises:
        TypeError: ``tx`` is no chain of this library.
        ValueError: a chain without noise, or with noise that is not matched (thermostats): those have their own velocity; use
            the configurational temperature.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, w = bc.sgld(0.2, temperature=0.5, generator=torch.Generator().manual_seed(0)), torch.zeros(1000)
        >>> meter = bc.diagnostics.Thermometer(tx)
        >>> step = bc.make_step(lambda w, batch: (w**2).sum() / 2, tx)
        >>> _ = bc.sample(step, w, tx.init(w), None, steps=200, burn_in=50, callbacks=[meter])
        >>> abs(meter.estimates["tensor"].value - 1) < 0.05
        True
    """

    @kinds.takes(tx=kinds.ANY, order=kinds.one_of(*get_args(Order)), warn_above=kinds.real("[0, inf]"))
    def __init__(self, tx: Any, *, order: str = "independent", warn_above: float = 0.1) -> None:
        inner, _ = _unwrapped(tx, None)
        self.tx, self.order, self.warn_above, self.is_constant = inner, order, warn_above, False
        if isinstance(inner, Chain):
            _require_matched_noise(inner)
            changing = (isinstance(x.response, Rate) or _learns(x.response) for x in inner.links)
            self.is_constant = not any(changing) and all(
                x.is_static for x in inner.links if isinstance(x, LangevinNoise)
            )
        elif not isinstance(inner, Thermal):
            raise TypeError(
                f"Thermometer: tx is {type(tx).__name__}, not a chain of this library and not an optimizer of bc.optim"
            )
        self.series: dict[str, list[Tensor]] = {}
        self._scales: list[list[Tensor | None]] | None = None
        self._white: list[float] = []
        self._paths: tuple[str, ...] = ()
        self._before: tuple[int, list[list[Any]]] | None = None

    @kinds.takes(it=kinds.Kind(lambda x: hasattr(x, "is_draw"), "a step as bc.iterate gives it"))
    def __call__(self, it: Iteration) -> None:
        """Look at a step."""
        with torch.no_grad():
            if self._before is not None and self._before[0] + 1 == it.step:
                self._measure(it)
            self._before = None
            if it.is_draw:
                self._prepare(it)

    @property
    def estimates(self) -> dict[str, Estimate]:
        """By the path of the leaf, its kinetic temperature over the one asked for; leaves without noise are left out."""
        return {name: estimate(torch.stack(x)) for name, x in self.series.items()}

    def postfix(self) -> dict[str, str]:
        """What a progress bar shows.

        Returns:
            ``{"T": text}``, the mean over leaves and the last 20 readings, over the temperature asked for; empty before the
            first reading.

        Example:
            >>> import bayesopt_chain as bc
            >>> bc.diagnostics.Thermometer(bc.sgld(0.1, temperature=0.5)).postfix()
            {}
        """
        recent = [x for series in self.series.values() for x in series[-BATCHES:]]
        return {"T": f"{float(torch.stack(recent).mean()):.3f}"} if recent else {}

    def warning(self) -> str | None:
        """What :func:`bayesopt_chain.sample` warns of when the run ends.

        Returns:
            One line if minibatches heat the chain by more than ``warn_above``, else ``None``.

        Example:
            >>> import bayesopt_chain as bc
            >>> bc.diagnostics.Thermometer(bc.sgld(0.1, temperature=0.5)).warning() is None
            True
        """
        if self.order != "independent":
            return None
        worst = self.hottest()
        if worst is None:
            return None
        name, read = worst
        return (
            f"the data heat the chain: the kinetic temperature of {name} is {read} times the one asked for, more than "
            f"{self.warn_above:.0%} above it. Lower lr, enlarge the batch, or use bc.epochs in the order 'palindrome' or "
            "bc.gradients; bc.diagnostics.heating predicts what each of these leaves"
        )

    def hottest(self) -> tuple[str, Estimate] | None:
        """The leaf with the highest kinetic temperature, if it is too high for certain.

        Returns:
            The leaf's path and its temperature over the one asked for; ``None`` unless that exceeds ``1 + warn_above`` by
            three standard errors.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> meter = bc.diagnostics.Thermometer(bc.sgld(0.1, temperature=0.5))
            >>> meter.series["w"] = [torch.tensor(1.5)] * 40
            >>> meter.hottest()[0]
            'w'
        """
        sure = {n: e for n, e in self.estimates.items() if e.value - MARGIN * e.standard_error > 1 + self.warn_above}
        return max(sure.items(), key=lambda item: item[1].value) if sure else None

    def _prepare(self, it: Iteration) -> None:
        """Remember where the next step starts, and what it may move."""
        if isinstance(self.tx, Thermal):
            known = self.tx.thermal_leaves()
            self._paths = names_of(paths_of(it.params))
            at = [known.get(path) for path in self._paths]
            if known and not any(at):
                raise ValueError(
                    f"Thermometer: the optimizer's parameters are named {', '.join(list(known)[:3])}, those of the step "
                    f"{', '.join(self._paths[:3])}; build the optimizer with model.named_parameters()"
                )
            self._scales = [[None if x is None else _number(x.gain * x.temperature) for x in at]]
            self._white = [1.0 if x is None else x.white for x in at]
            kept = [None if x is None else x.clone() for x in optree.tree_leaves(it.params, none_is_leaf=True)]
            self._before = it.step, [kept]
            return
        _, state = _unwrapped(self.tx, it.state)
        stacked = state.layout.shapes != tuple(
            getattr(shards.local(p), "shape", None) for p in optree.tree_leaves(it.params, none_is_leaf=True)
        )
        chains = _count(it.params) if stacked else None
        params = _chains(it.params, chains)
        if self._scales is None or not self.is_constant:
            states = _chains(state, chains)
            if self.is_constant:
                states = states[:1]
            self._paths = names_of(paths_of(params[0]))
            self._white = _white(self.tx, states[0])
            self._scales = [_scales(self.tx, p, s) for p, s in zip(params, states)]
        kept = [[None if x is None else x.clone() for x in optree.tree_leaves(p, none_is_leaf=True)] for p in params]
        self._before = it.step, kept

    def _measure(self, it: Iteration) -> None:
        """Compare the step with what it should be."""
        assert self._before is not None and self._scales is not None
        kept = self._before[1]
        params = _chains(it.params, len(kept) if len(kept) > 1 or self._stacked(it) else None)
        rows: dict[str, list[float]] = {}
        for n, (old, new) in enumerate(zip(kept, params)):
            scales = self._scales[n % len(self._scales)]
            for path, x, y, scale, white in zip(
                self._paths, old, optree.tree_leaves(new, none_is_leaf=True), scales, self._white
            ):
                if scale is None or _mean((scale > 0).double()) < 1.0:
                    continue
                ratio = _mean((y.double() - x.double()) ** 2 / scale)
                rows.setdefault(path, []).append(ratio / -white if white < 0 else 1 + (ratio - 1) / white)
        for path, row in rows.items():
            if len(row) == len(kept):
                self.series.setdefault(path, []).append(torch.tensor(row, dtype=torch.float64, device="cpu"))

    def _stacked(self, it: Iteration) -> bool:
        assert self._before is not None
        shapes = [getattr(x, "shape", None) for x in self._before[1][0]]
        return shapes != [getattr(x, "shape", None) for x in optree.tree_leaves(it.params, none_is_leaf=True)]


def _require_matched_noise(tx: Chain) -> None:
    own = [x for x in tx.links if isinstance(x.response, SelfContainedSampler)]
    if own or not any(isinstance(x.response, Noise) for x in tx.links):
        raise ValueError(
            f"Thermometer: {own[0] if own else 'this chain'} has no matched noise; the configurational temperature "
            "(bc.diagnostics.temperatures with a loss) is what there is to read"
        )


def gains(tx: Chain, params: Any, state: Any) -> list[Tensor | None]:
    """``F_0``: how far a unit gradient moves each element in the step it arrives, float64; ``None`` without leaf.

    Raises:
        ValueError: the elements act on each other, as a dense preconditioner makes them.
    """
    entries = [_at_rest(link, entry) for link, entry in zip(tx.links, state)]
    one = OneUpdate(tx, params, State(entries, state.layout))
    generator = torch.Generator().manual_seed(0)
    uneven = [
        IMPULSE * (1 + torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu").to(x.device))
        for x in one.params
    ]
    even = [torch.full_like(x, IMPULSE) for x in one.params]
    found: list[Tensor] = []
    for move, other, height in zip(one(gradient=even)[0], one(gradient=uneven)[0], uneven):
        gain = -move / IMPULSE
        # An element whose gain depends on how high its neighbours' impulses are has no gain of its own.
        if bool(((gain + other / height).abs() > 1e-5 * gain.abs().amax()).any()):
            raise ValueError(
                "Thermometer: the elements of this chain act on each other (a dense preconditioner, particles), so that no "
                "element has a temperature of its own; use the configurational one, bc.diagnostics.temperatures with a loss"
            )
        found.append(gain)
    each = iter(found)
    return [None if p is None else next(each) for p in optree.tree_leaves(params, none_is_leaf=True)]


def _at_rest(link: Link, entry: Any) -> Any:
    """A link's state without velocity and remembered draws, beside which the response to an impulse would round."""
    field = "memory" if isinstance(link, LangevinNoise) else link.traits.velocity
    if not hasattr(entry, field):
        return entry
    return entry._replace(**{field: tuple(torch.zeros_like(t) for t in getattr(entry, field))})


def _scales(tx: Chain, params: Any, state: Any) -> list[Tensor | None]:
    """``F_0 T`` for each element, ``None`` where no noise enters; of DTensors spread as they are."""
    levels = _levels(tx, state, None)
    leaves: list[Any] = optree.tree_leaves(params, none_is_leaf=True)
    if shards.are_spread(params):  # elementwise links know no neighbours: each rank asks for its own elements
        entries: list[Any] = [optree.tree_map(shards.local, entry) for entry in state]
        state = State(entries, state.layout._replace(pieces=None))
        params = optree.tree_map(shards.local, params, none_is_leaf=True)
    return [
        None if g is None or name not in levels else shards.like(x, g * levels[name])
        for name, x, g in zip(names_of(state.layout.paths), leaves, gains(tx, params, state))
    ]


def _number(x: float | Tensor) -> Tensor:
    """A number or a tensor in float64."""
    return x.double() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device="cpu")


def _mean(x: Tensor) -> float:
    """The mean over all elements, wherever they lie."""
    return float(shards.whole(x.sum())) / x.numel()


def _levels(tx: Chain, state: Any, temperature: float | None, step: int | None = None) -> dict[str, float]:
    """The temperature of each leaf that noise enters, at a step or at that of the state."""
    plan, out, names = tx.plan(state), dict[str, float](), names_of(state.layout.paths)
    for i, noise in plan.noise.items():
        link: Any = tx.links[i]
        at = state[i].step if step is None else torch.full_like(state[i].step, step)
        level = float(now(link.temperature, at)) if temperature is None else temperature
        out |= {names[j]: level for j in noise.leaves if level > 0}
    if not out and temperature is not None:
        out = dict.fromkeys(names, temperature)
    return out


def _white(tx: Chain, state: Any) -> list[float]:
    """``w`` of each leaf; its negative where the chain's own noise is white."""
    out: list[float] = []
    for j in range(len(state.layout.paths)):
        b, a, white = (1.0,), (1.0,), False
        for link, where in zip(tx.links, state.layout.where):
            if j not in where:
                continue
            if isinstance(link, LangevinNoise):
                white |= link.order == 1
            if isinstance(x := link.response, (Linear, Preconditioner)):
                b, a = law.multiply(b, x.b), law.multiply(a, x.a)
        out.append(-squares(b, a) if white else squares(b, a))
    return out


def squares(b: Sequence[float], a: Sequence[float]) -> float:
    """``2 sum_j F_j^2 / (F_0 F(1))`` of ``F = b / a``, by its impulse response."""
    if not sum(b) or not b[0]:
        return 1.0
    past: list[float] = []
    total, level = 0.0, sum(b) / sum(a)
    for j in range(100_000):
        x = (b[j] if j < len(b) else 0.0) - sum(a[i] * past[-i] for i in range(1, min(len(a), len(past) + 1)))
        x /= a[0]
        past = [*past, x][-len(a) :]
        total += x * x
        if j >= len(b) and max(map(abs, past)) < 1e-14 * abs(level):
            break
    return 2 * total / (b[0] / a[0] * level)


class Forces(NamedTuple):
    """What made some draws, as a check against their loss needs it.

    Attributes:
        levels: by the name of each leaf that gets noise, its temperature.
        of: ``of(params, grads)`` gives for each leaf the gradient of loss and prior together, from that of the loss.
    """

    levels: dict[str, float]
    of: Callable[[Any, Sequence[Any]], list[Any]]


def forces_of(tx: Any, params: Any, temperature: float | None = None, step: int | None = None) -> Forces:
    """Temperatures and forces of a chain, or of an optimizer by its groups as they are now.

    Args:
        tx: a chain, perhaps inside :func:`bayesopt_chain.skip_nonfinite`, or an optimizer of :mod:`bayesopt_chain.optim`. One
            without names has those of the model that :func:`bayesopt_chain.collect` was given with it.
        params: parameters as it has them.
        temperature: in the place of its own.
        step: the number of steps at which a chain's schedule of temperatures is read. Default: its first step.

    Raises:
        ValueError: parameters of other names than the optimizer's; when forces are asked for, a prior that is no part of the
            loss.
    """
    if not isinstance(tx, Thermal):
        chain, _ = _unwrapped(tx, None)
        own = [x for link in chain.links if isinstance(x := getattr(link, "generator", None), torch.Generator)]
        before = [generator.get_state() for generator in own]
        with torch.random.fork_rng(devices=[]):
            state = chain.init(params)
        for generator, was in zip(own, before):
            generator.set_state(was)
        return Forces(_levels(chain, state, temperature, step), partial(with_decay, chain, state))
    from bayesopt_chain.runs.collect import with_names

    leaves, names = with_names(tx).thermal_leaves(), names_of(paths_of(params))
    if not any(path in leaves for path in names):
        raise ValueError(
            f"temperatures: the draws have the leaves {', '.join(names[:3])}, the optimizer gives noise to "
            f"{', '.join(list(leaves)[:3]) or 'none'}; build it with model.named_parameters()"
        )
    levels = {name: temperature or leaves[name].temperature for name in names if name in leaves}
    return Forces(levels, partial(_with_decay_of, leaves))


def _with_decay_of(leaves: Mapping[str, ThermalLeaf], params: Any, grads: Sequence[Any]) -> list[Any]:
    """The gradient that an optimizer follows: of the loss, with the weight decay of each leaf's group."""
    out = list(grads)
    for j, (name, p) in enumerate(zip(names_of(paths_of(params)), optree.tree_leaves(params, none_is_leaf=True))):
        leaf = leaves.get(name)
        if leaf is None or out[j] is None:
            continue
        if leaf.decay is None:
            raise ValueError(
                "temperatures: a decoupled weight decay is no part of the loss; put the prior into the loss, or use an "
                "optimizer whose weight decay is in the gradient"
            )
        out[j] = leaf.sign * out[j] + leaf.decay * p
    return out


def _virial(
    judge: Forces,
    params: Any,
    centre: Any,
    loss: Callable[[Any, Any], Any],
    batches: Sequence[Any],
) -> tuple[dict[str, float], dict[str, float]]:
    """``(theta - c) dU/dtheta`` per element of each leaf, and the part of it that the loss contributes."""
    grads: Any = None
    for batch in batches:
        g, _ = gradient(loss, params, batch)
        grads = g if grads is None else optree.tree_map(torch.add, grads, g)
    mine = [None if g is None else g / len(batches) for g in optree.tree_leaves(grads, none_is_leaf=True)]
    forces = judge.of(params, mine)
    out: tuple[dict[str, float], dict[str, float]] = ({}, {})
    flat = [optree.tree_leaves(tree, none_is_leaf=True) for tree in (params, centre)]
    for name, p, c, whole, data in zip(names_of(paths_of(params)), *flat, forces, mine):
        if p is not None and p.numel():
            away = p.double() - c.double()
            for part, force in zip(out, (whole, data)):
                part[name] = _mean(away * force.double())
    return out


def with_decay(tx: Chain, state: Any, params: Any, grads: Sequence[Any]) -> list[Any]:
    """The gradient of the loss with the weight decay and localisation that stand at the head of a chain.

    Raises:
        ValueError: one stands further behind, where it is no part of the loss.
    """
    g, head = list(grads), True
    for i, link in enumerate(tx.links):
        if isinstance(link.response, Noise) or not state.layout.where[i]:
            continue
        if isinstance(link.response, Decay):
            if not head:
                raise ValueError(
                    f"temperatures: {link} stands behind a momentum or a preconditioner, where it is no part of the loss; "
                    "write it first, or put the prior into the loss"
                )
            at, _ = tx.at(state, i, params)
            new, _ = link.update([g[j] for j in at.present], state[i], PURE, at)
            for j, y in zip(at.present, new):
                g[j] = y
        elif link.response != Linear():
            head = False
    return g


def names_of(paths: Sequence[str]) -> tuple[str, ...]:
    """What a report calls these leaves: ``layer/weight`` for ``['layer']['weight']``, ``tensor`` for a bare tensor.

    Leaves that would have one name, as ``['a']['b']`` and ``['a/b']``, are called by their paths.
    """
    names = [path[1:-1].replace("][", "/").replace("'", "") or "tensor" for path in paths]
    often = Counter(names)
    return tuple([path if often[name] > 1 else name for path, name in zip(paths, names)])


def _learns(response: Any) -> bool:
    return isinstance(response, Preconditioner) and response.learns


def _unwrapped(tx: Any, state: Any) -> tuple[Any, Any]:
    """The chain inside wrappers, such as that of :func:`bayesopt_chain.skip_nonfinite`, and its state."""
    if isinstance(tx, MasterWeights):
        raise TypeError(
            "Thermometer: tx is with_master_weights(...), whose parameters move by their rounding as well; read the "
            "temperature of the same chain with float32 parameters"
        )
    while hasattr(state, "inner") and not isinstance(state, State):
        state = state.inner
    return unwrapped(tx), state


def _count(params: Any) -> int:
    return int(next(p for p in optree.tree_leaves(params)).shape[0])


def _chains(tree: Any, n: int | None) -> list[Any]:
    """The trees of ``n`` chains stacked on axis 0, or the one tree."""
    return [tree] if n is None else [optree.tree_map(lambda t, i=i: t[i], tree) for i in range(n)]


def _other_halves(draws: Draws) -> tuple[Any, Any]:
    """For each half of the draws the mean of the other one."""
    half = len(draws) // 2
    first, second = (
        optree.tree_map(lambda x: x.double().mean(0), part.params) for part in (draws[:half], draws[half:])
    )
    return second, first
