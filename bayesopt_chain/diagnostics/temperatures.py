r"""At what temperature a chain runs, leaf by leaf, against the one it was given: the virial theorem.

For a chain whose noise is matched, at every stable learning rate, curvature ``k`` and response,

    <(theta - c) dU/dtheta> = k C(0) = T,          c any constant, U the loss with its decay, C(0) the variance.

This is the configurational temperature (Rugh, 1997); it was read off samplers of neural networks by Wenzel et al. (2020).

The gain ``F_0`` of an element is how far a unit gradient moves it in the step in which it arrives, read by an impulse through
``tx.update``: with a frozen diagonal preconditioner there is one for each element.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link
from bayesopt_chain.core.op import PURE
from bayesopt_chain.core.state import State
from bayesopt_chain.distributed import shards
from bayesopt_chain.links.langevin_noise import LangevinNoise
from bayesopt_chain.links.master_weights import MasterWeights
from bayesopt_chain.links.wrapper import unwrapped
from bayesopt_chain.loop.loss import gradient
from bayesopt_chain.matching.response import Decay, Linear, Noise
from bayesopt_chain.schedules import now
from bayesopt_chain.testing._linear_system import IMPULSE, OneUpdate
from bayesopt_chain.trees import paths_of

if TYPE_CHECKING:
    from bayesopt_chain.runs.draws import Draws

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
    """What the next step of a torch optimizer does to one parameter.

    Attributes:
        temperature: that of its group.
        decay: the weight decay that is a part of the loss; ``None`` where there is one that is not.
        sign: -1 where the optimizer climbs the loss.
    """

    temperature: float
    decay: float | None
    sign: float = 1.0


@runtime_checkable
class Thermal(Protocol):
    """An optimizer that describes its leaves: those of :mod:`bayesopt_chain.optim`."""

    def thermal_leaves(self) -> Mapping[str, ThermalLeaf]:
        """By the parameter's name, what the next step does to it; without those that get no noise."""
        ...


class Temperatures(NamedTuple):
    """Temperatures over the one that was asked for, so that 1 is right. Each is a mapping from the path of a leaf.

    Attributes:
        configurational: from the parameters and the gradient of the loss, weight decay included.
        data: the part of it that the loss contributes, the rest being the chain's weight decay.
    """

    configurational: Mapping[str, Estimate]
    data: Mapping[str, Estimate]

    def __str__(self) -> str:
        width = max(map(len, [*self.configurational, "leaf"]))
        lines = [f"{name:<{width}}  {estimate}" for name, estimate in self.configurational.items()]
        return "\n".join([f"{'leaf':<{width}}  configurational / T", *lines])


@kinds.takes(draws=kinds.SAMPLED, tx=kinds.TX_OR_OPTIMIZER)
def temperatures(
    draws: Draws,
    tx: Any,
    loss: Callable[[Any, Any], Any],
    batches: Iterable[Any],
    *,
    temperature: float | None = None,
) -> Temperatures:
    """Configurational temperature of every leaf, over the chain's own.

    Args:
        draws: of :func:`bayesopt_chain.sample`.
        tx: the chain, or the optimizer of :mod:`bayesopt_chain.optim`, that made them. Weight decay and localisation at its
            head count as a part of the loss.
        loss: ``loss(params, batch)`` as the step had it.
        batches: all data, in batches of one size; gone through once for each draw.
        temperature: of the chain, if it is not a number in ``tx``.

    Returns:
        :class:`Temperatures`; ``print`` it. They are centred for each half of the draws at the mean of the other half, so that
        no curvature of the estimate itself enters.

    Raises:
        ValueError: fewer than four draws; no batch; weight decay behind a momentum or a preconditioner, which is no part of the
            loss.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> loss = lambda w, batch: (w**2).sum() / 2
        >>> tx, w = bc.sghmc(0.2, temperature=0.5, generator=torch.Generator().manual_seed(0)), torch.zeros(200)
        >>> draws = bc.sample(bc.make_step(loss, tx), w, tx.init(w), None, steps=600, burn_in=200, thinning=4)
        >>> report = bc.diagnostics.temperatures(draws, tx, loss, [None])
        >>> abs(report.configurational["tensor"].value - 1) < 0.1
        True
    """
    if len(draws) < 4:
        raise ValueError(f"temperatures: draws must be at least 4, got {len(draws)}; run longer")
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
    return Temperatures(*({name: estimate(torch.stack(x)) for name, x in part.items()} for part in (total, data)))


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
                "the elements of this chain act on each other (a dense preconditioner, particles), so that no element has a "
                "gain of its own; bc.diagnostics.temperatures reads the configurational temperature"
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


def _unwrapped(tx: Any, state: Any) -> tuple[Any, Any]:
    """The chain inside wrappers, such as that of :func:`bayesopt_chain.skip_nonfinite`, and its state."""
    if isinstance(tx, MasterWeights):
        raise TypeError(
            "tx is with_master_weights(...), whose parameters move by their rounding as well; read the temperature of the same "
            "chain with float32 parameters"
        )
    while hasattr(state, "inner") and not isinstance(state, State):
        state = state.inner
    return unwrapped(tx), state


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
