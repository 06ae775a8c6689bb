"""What a chain is: links, run one after the other over the leaves of the gradient tree, and the noise between them.

A :class:`Chain` is a ``torchopt.base.GradientTransformation``, the pair ``(init, update)``, made of links; what
``add_momentum(0.9)`` returns is a chain of one link, so chains nest and associate by concatenation. The noise is matched to all
links by ``init``, for the leaves that it sees; how an update runs stands in :mod:`bayesopt_chain.core.update`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, Self

import optree
import torch
from torchopt.base import EmptyState, GradientTransformation, IdentityGradientTransformation

from bayesopt_chain import checks
from bayesopt_chain._torch import is_compiling, is_dtensor, run_uncompiled
from bayesopt_chain.core.link import ANY, Link, LinkContext
from bayesopt_chain.core.op import IN_PLACE, PURE, owned
from bayesopt_chain.core.state import Layout, State, selected, unshared, warm_start
from bayesopt_chain.core.update import Plan, Update
from bayesopt_chain.distributed import shards
from bayesopt_chain.matching.noise_inputs import note
from bayesopt_chain.matching.response import Noise, SelfContainedSampler
from bayesopt_chain.schedules import is_schedule, scalar
from bayesopt_chain.tracing import is_traced
from bayesopt_chain.trees import leaves_of, paths_of

SCHEDULED = ("step_size", "temperature", "schedule", "omega")  # fields of links that may be functions of the count


class Chain(GradientTransformation):
    """A gradient transformation made of links; what every function of this library returns.

    Attributes:
        links: the links, in the order written.

    Example:
        >>> import bayesopt_chain as bc
        >>> isinstance(bc.sgd(0.1), bc.Chain)
        True
    """

    def __new__(cls, links: Sequence[Link]) -> Self:
        def init(params: Any, **options: Any) -> Any:
            if any([is_dtensor(x) for x in optree.tree_leaves(params, none_is_leaf=True)]):
                return shards.start(self._start, params, **options)
            return self._start(params, **options)

        def update(updates: Any, state: Any, **options: Any) -> Any:
            if isinstance(state, State) and state.layout.pieces is not None:
                return shards.step(self._step, self.plan, updates, state, **options)
            # torch.compile replaces optree by functions of its own, which do not know the trees registered here
            return (partial(run_uncompiled, self._step) if is_compiling() else self._step)(updates, state, **options)

        self = super().__new__(cls, init, update)
        return self

    @checks.takes(links=checks.Kind(checks.SEQUENCE.fits, "a list of links, such as those of another chain, tx.links"))
    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)
        self.kinds = tuple([type(x).__name__ for x in self.links])
        self.extra_kwargs = frozenset[str]().union(*(x.traits.extra_kwargs for x in self.links))
        # the link that the refusal of an update without params= names
        self.needy = next((x for x in self.links if x.traits.needs_params), None)
        self.plans: dict[Layout, Plan] = {}
        self.last: tuple[Layout, Plan] | None = None

    @property
    def response(self) -> Any:
        """The response of the only link, or the tuple of all links' responses."""
        return self.links[0].response if len(self.links) == 1 else tuple([x.response for x in self.links])

    @property
    def required_kwargs(self) -> frozenset[str]:
        """The keywords without which ``update`` refuses."""
        return frozenset[str]().union(*(x.traits.required_kwargs for x in self.links))

    def chain(self, next: GradientTransformation) -> Chain:  # pyright: ignore[reportIncompatibleMethodOverride]
        """This chain followed by another transformation.

        Args:
            next: a chain, or a transformation of TorchOpt.

        Returns:
            The chain of all links, in this order.

        Example:
            >>> import bayesopt_chain as bc
            >>> bc.add_momentum(0.9).chain(bc.scale_by_neg_lr(0.1)) == bc.chain(bc.add_momentum(0.9), bc.scale_by_neg_lr(0.1))
            True
        """
        # a layer above this one, which knows TorchOpt's transformations
        return import_module("bayesopt_chain.compose").chain(self, next)

    def _replace(self, **kwargs: Any) -> GradientTransformation:  # pyright: ignore[reportIncompatibleMethodOverride]
        return GradientTransformation(self.init, self.update)._replace(**kwargs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, IdentityGradientTransformation):
            return not self.links
        return isinstance(other, Chain) and self.links == other.links

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.links) if self.links else hash(tuple(IdentityGradientTransformation()))

    def __reduce__(self) -> Any:
        return type(self), (self.links,)

    def __repr__(self) -> str:
        lines = [f"    {x.shown}," for x in self.links]
        noises = [i for i, x in enumerate(self.links) if isinstance(x.response, Noise)]
        if len(lines) == 1 and not noises:
            return self.links[0].shown
        for i in noises:
            masks = self.links[i].masks
            lines[i] += f"  # {note(self.links, [k for k, x in enumerate(self.links) if x.masks in ((), masks)], i)}"
        return "\n".join(["chain(", *lines, ")"])

    def plan(self, state: Any) -> Plan:
        """The plan of updates of states with this layout, which is made once.

        Args:
            state: of this chain.

        Returns:
            The plan, which holds among other things the noise that is matched to the links.

        Raises:
            ValueError: the state belongs to another chain.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> tx = bc.sghmc(0.1, temperature=0.5)
            >>> sorted(tx.plan(tx.init(torch.zeros(2))).noise)  # the noise is the second link
            [1]
        """
        if self.last is not None and isinstance(state, State) and state.layout is self.last[0]:
            return self.last[1]  # successive states hold the same layout object, which spares its hash in every update
        if not isinstance(state, State):
            raise ValueError(
                f"state: must be what init of this chain returned, got {type(state).__name__}; call init(params) "
                "first, init(params, like=state) to start from an optimizer's"
            )
        layout = state.layout
        if layout.kinds != self.kinds:
            raise ValueError(
                f"state: it is of the links ({', '.join(layout.kinds)}), this chain has ({', '.join(self.kinds)}); "
                "to go on from it, as from an optimizer's, call init(params, like=state) of this chain"
            )
        if layout not in self.plans:
            self.plans[layout] = Plan(self.links, layout)
        self.last = (layout, self.plans[layout])
        return self.plans[layout]

    def at(self, state: State, i: int, params: Any) -> tuple[LinkContext, list[Any]]:
        """The context of a link in a tree of parameters, and its leaves: for calls of a link's method outside an update.

        Args:
            state: of this chain.
            i: which link, from 0.
            params: the parameters, or a tree like them.

        Returns:
            The context of the link, and those leaves of ``params`` that it acts on.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> tx, params = bc.sgd(0.1, 0.9), {"w": torch.zeros(2)}
            >>> context, leaves = tx.at(tx.init(params), 0, params)
            >>> leaves
            [tensor([0., 0.])]
        """
        leaves, spec = leaves_of(params)
        where = state.layout.where[i]
        return Update(self.plan(state), PURE, spec, leaves, list(state)).at(i, where), [leaves[j] for j in where]

    def _start(self, params: Any, *, like: Any = None, whole: Any = None) -> State:
        """The first state for ``params``.

        Args:
            params: the parameters; of DTensors, this rank's parts.
            like: the state of an optimizer, or of a chain of another temperature, whose memory is taken over. Keys are new.
                The velocity of a sampler holds a part of its last draw, so that an optimizer that takes it over starts with
                that part.
            whole: the DTensors whose parts ``params`` are; None without shards.
        """
        samples = any(isinstance(x.response, Noise) for x in self.links)
        # a chain without noise accepts what TorchOpt accepts; noise puts conditions on the links
        for x in self.links if samples else ():
            checks.check_link(x)
        leaves, spec = leaves_of(params)
        here = {j for j, p in enumerate(leaves) if p is not None}
        # a mask may be a function of the user's: it is called once, also where several links have it
        masks = {
            id(mask): selected(mask, params if whole is None else spec.unflatten(whole))
            for x in self.links
            for mask in x.masks
        }
        where = tuple([tuple(sorted(here.intersection(*(masks[id(m)] for m in x.masks)))) for x in self.links])
        shapes, dtypes = (
            tuple([getattr(p, name) if hasattr(p, "requires_grad") else None for p in leaves])
            for name in ("shape", "dtype")
        )
        pieces = whole and tuple([shards.runs_of(x) if is_dtensor(x) else None for x in whole])
        layout = Layout(self.kinds, paths_of(params), shapes, dtypes, where, pieces)
        plan = self.plan(State((), layout))
        plan.spec = spec
        if whole is not None and plan.shards is not None:
            plan.shards.seen(whole, "params")
        by_noise_of_its_own = {
            j for x, w in zip(self.links, where) if isinstance(x.response, SelfContainedSampler) for j in w
        }
        if samples or by_noise_of_its_own:
            checks.samplable(leaves, layout.paths, by_noise_of_its_own.union(plan.noisy or here if samples else ()))
        # an update that does not run gives links their contexts; its entries are filled in link by link, and at the end each
        # noise looks at all of them
        update = Update(plan, PURE, spec, leaves, [EmptyState()] * len(self.links))
        for i, (x, w) in enumerate(zip(self.links, where)):
            if i in plan.noise:
                update.entries[i] = plan.noise[i].start(leaves)
            elif w or not here:  # a link whose masks select nothing has no state
                update.entries[i] = x.init([leaves[j] for j in w], update.at(i, w))
        for i, noise in plan.noise.items():
            noise.started(update.entries[i], update)
        state = State(update.entries, layout) if like is None else warm_start(State(update.entries, layout), like)
        return state if plan.shards is None else State(plan.shards.spread(state, leaves, plan.noise), layout)

    def _step(self, updates: Any, state: Any, *, params: Any = None, inplace: bool = True, **extra: Any) -> Any:
        """Transformed updates and the next state. See ``torchopt.base.GradientTransformation``."""
        if extra and (unknown := extra.keys() - self.extra_kwargs) and ANY not in self.extra_kwargs:
            raise TypeError(
                f"update() got {', '.join(sorted(unknown))}=, which no link of this chain takes; "
                f"its links take: {', '.join(sorted(self.extra_kwargs)) or 'no further keywords'}"
            )
        if params is None and self.needy is not None:
            raise ValueError(f"{self.needy.shown} needs the parameters: call update(updates, state, params=params)")
        plan = self.plan(state)
        g, spec = leaves_of(updates)
        p = plan.check(spec, g, params)
        # autograd may return one tensor for two leaves, which must not be overwritten twice
        if inplace and len(g) > 1 and len({id(x) for x in g if x is not None}) < len(g):
            g = owned(g)
        update = Update(plan, IN_PLACE if inplace else PURE, spec, p, list(state), g, extra, type(None) in map(type, g))
        update.run()
        new = State(update.entries, state.layout)
        return spec.unflatten(g), new if inplace or update.is_new or is_traced() else unshared(new, state)


def numbers_of(tx: GradientTransformation, count: int) -> dict[str, Any]:
    """What the links of a transformation hold besides their states, such as a rate, by the names of link and field.

    Args:
        tx: a chain, or a wrapper of one; a transformation of TorchOpt has no links.
        count: how many steps there were, at which schedules are read, as float32: processors may differ in the last place.

    Example:
        >>> import bayesopt_chain as bc
        >>> numbers = numbers_of(bc.sgd(bc.schedules.cosine(0.1, 10), 0.9), 5)
        >>> numbers["Momentum.momentum of link 0"], numbers["Scale.step_size of link 1"]
        (0.9, tensor(0.0500))
    """
    at = torch.tensor(count, device="cpu")
    return {
        f"{type(x).__name__}.{name} of link {i}": scalar(value(at), at.device).float()
        if name in SCHEDULED and is_schedule(value)
        else value
        for i, x in enumerate(getattr(tx, "links", ()))
        for name, value in vars(x).items()
    }
