r"""What made some draws: the temperature of each leaf, and the force on it, of the loss and of the prior together.

A check of draws against their loss needs both, from a chain or from an optimizer of :mod:`bayesopt_chain.optim`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import optree
import torch

from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.op import PURE
from bayesopt_chain.core.state import State
from bayesopt_chain.links.master_weights import MasterWeights
from bayesopt_chain.links.wrapper import unwrapped
from bayesopt_chain.matching.response import Decay, Linear, Noise
from bayesopt_chain.schedules import now
from bayesopt_chain.trees import paths_of


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


def levels_of(tx: Chain, state: Any, temperature: float | None = None, step: int | None = None) -> dict[int, float]:
    """The temperature of each leaf that noise enters, by its number, at a step or at that of the state."""
    plan, out = tx.plan(state), dict[int, float]()
    for i, noise in plan.noise.items():
        link: Any = tx.links[i]
        at = state[i].step if step is None else torch.full_like(state[i].step, step)
        level = float(now(link.temperature, at)) if temperature is None else temperature
        out |= dict.fromkeys(noise.leaves, level) if level > 0 else {}
    if not out and temperature is not None:
        out = dict.fromkeys(range(len(state.layout.paths)), temperature)
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
        chain, _ = inner(tx, None)
        own = [x for link in chain.links if isinstance(x := getattr(link, "generator", None), torch.Generator)]
        before = [generator.get_state() for generator in own]
        with torch.random.fork_rng(devices=[]):
            state = chain.init(params)
        for generator, was in zip(own, before):
            generator.set_state(was)
        names = names_of(state.layout.paths)
        levels = {names[j]: level for j, level in levels_of(chain, state, temperature, step).items()}
        return Forces(levels, partial(with_decay, chain, state))
    from bayesopt_chain.runs.collect import with_names

    leaves, names = with_names(tx).thermal_leaves(), names_of(paths_of(params))
    if not any(path in leaves for path in names):
        raise ValueError(
            f"doctor: the draws have the leaves {', '.join(names[:3])}, the optimizer gives noise to "
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
                "doctor: a decoupled weight decay is no part of the loss; put the prior into the loss, or use an "
                "optimizer whose weight decay is in the gradient"
            )
        out[j] = leaf.sign * out[j] + leaf.decay * p
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
                    f"doctor: {link} stands behind a momentum or a preconditioner, where it is no part of the loss; "
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
    parts = [[part.strip("'\"") for part in path[1:-1].split("][")] for path in paths]
    names = ["/".join(each) or "tensor" for each in parts]
    often = Counter(names)
    return tuple([path if often[name] > 1 else name for path, name in zip(paths, names)])


def inner(tx: Any, state: Any) -> tuple[Any, Any]:
    """The chain inside wrappers, such as that of :func:`bayesopt_chain.skip_nonfinite`, and its state."""
    if isinstance(tx, MasterWeights):
        raise TypeError(
            "tx is with_master_weights(...), whose parameters move by their rounding as well; read the temperature of the same "
            "chain with float32 parameters"
        )
    while hasattr(state, "inner") and not isinstance(state, State):
        state = state.inner
    return unwrapped(tx), state
