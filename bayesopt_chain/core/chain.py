"""What a chain is: links, run one after the other over the leaves of the gradient tree, and the noise between them.

A :class:`Chain` is a ``torchopt.base.GradientTransformation``, the pair ``(init, update)``, made of links; what
``add_momentum(0.9)`` returns is a chain of one link, so chains nest and associate by concatenation. An update draws the noise,
rescales velocities where a rate changed, and then lets every link learn, noise in, the link act, and its velocity keep what
it carries of the noise. Masks, missing gradients, keywords and the two modes of writing are settled here, and no link knows
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation, IdentityGradientTransformation

from bayesopt_chain import checks
from bayesopt_chain.arguments import check_link
from bayesopt_chain.core import injection
from bayesopt_chain.core.leaves import owned, repeats
from bayesopt_chain.core.link import At, Link, require_samplable, show
from bayesopt_chain.core.matching import Site, describe, match
from bayesopt_chain.core.op import IN_PLACE, PURE, Op
from bayesopt_chain.core.response import Metric, Noise
from bayesopt_chain.core.scalar_or_schedule import require_valid
from bayesopt_chain.core.state import ALL, Layout, State, edit_velocity, part, path_name, put_back, selected, unshared
from bayesopt_chain.core.warm_start import warm_start
from bayesopt_chain.random.stream import leaf_numbers
from bayesopt_chain.tracing import is_traced

if TYPE_CHECKING:
    from typing_extensions import Self

ANY = "**"  # among the keywords of a link that takes every keyword


class Stage(NamedTuple):
    """A link's turn in an update, or that of a lowered run of links."""

    run: tuple[int, ...]
    link: Link
    learns: bool
    enter: bool  # whether noise enters before it (inside it, if it learns)
    accepts: frozenset[str]

    def takes(self, keyword: str) -> bool:
        """Whether it takes a keyword of ``update``."""
        return keyword in self.accepts or ANY in self.accepts


class Plan:
    """What a chain works out once for a layout."""

    def __init__(self, links: Sequence[Link], layout: Layout, lower: Callable[..., Any] | None) -> None:
        self.paths, self.where, self.layout, self.links = layout.paths, layout.where, layout, links
        self.numbers = leaf_numbers(layout.paths)
        self.absent = frozenset(j for j, shape in enumerate(layout.shapes) if shape is None)
        self.position = [{j: k for k, j in enumerate(w)} for w in layout.where]
        self.order = [i for i, x in enumerate(links) if not isinstance(x.response, Noise)]
        self.sites = self.matched()
        self.noisy = sorted({j for sites in self.sites.values() for s in sites for j in s.leaves})
        self.coupled = [i for i, x in enumerate(links) if x.coupled]
        self.exact = sorted({*self.noisy, *(j for x, w in zip(links, layout.where) if x.exacting for j in w)})
        self.stacked = {j for x, w in zip(links, layout.where) if x.samples > 1 for j in w}
        self.stages = self.staged(lower(links, self) if lower else {})
        self.spec: Any = None  # the structure of updates that was compared with the paths last

    def matched(self) -> dict[int, list[Site]]:
        """The sites of every noise link."""
        links = self.links
        groups: dict[tuple[int, ...], list[int]] = {}  # leaves by the links that act on them
        for j in sorted({j for w in self.where for j in w}):
            groups.setdefault(tuple(i for i, w in enumerate(self.where) if j in w), []).append(j)
        out: dict[int, list[Site]] = {i: [] for i, x in enumerate(links) if isinstance(x.response, Noise)}
        for acting, leaves in groups.items():
            n, found = match(links, acting, tuple(leaves))
            for site in found:
                mixing = [m for m, _ in site.colours if not links[m].response.diagonal]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
                if site.constants is None and site.owner is not None and links[site.owner].velocity == ALL:
                    mixing.append(site.owner)
                if mixing := [m for m in mixing if self.where[m] != site.leaves]:
                    raise ValueError(
                        f"chain: {show(links[mixing[0]])} mixes its leaves, so the same links must act on all of them"
                    )
                enters = next((i for i in self.order if i >= site.enters), len(links))
                out[n].append(site._replace(enters=enters))  # pyright: ignore[reportArgumentType]
        for i, sites in out.items():
            row = {pair: k for k, pair in enumerate(injection.pairs(sites))}
            out[i] = [s._replace(rows=tuple(row[j, n] for j in s.leaves)) for n, s in enumerate(sites)]
        return out

    def staged(self, runs: dict[int, tuple[tuple[int, ...], Link]]) -> list[Stage]:
        """The links in order, runs of them lowered where no noise enters in between and the same leaves are meant."""
        links = self.links
        entering = {s.enters for sites in self.sites.values() for s in sites}
        stages, taken = list[Stage](), set[int]()
        for i in self.order:
            if i in taken:
                continue
            run, link = runs.get(i, ((i,), links[i]))
            if any(self.where[k] != self.where[i] or k in entering for k in run[1:]):
                run, link = (i,), links[i]
            taken |= set(run)
            learns = isinstance(x := links[i].response, Metric) and x.learns
            stages.append(Stage(run, link, learns, i in entering, frozenset().union(*(links[k].accepts for k in run))))
        return stages

    def check(self, spec: Any, g: list[Any], params: Any) -> list[Any] | None:
        """The leaves of the parameters, once updates and parameters are known to be of the state's leaves.

        Raises:
            ValueError, TypeError: another structure; where noise enters also another shape, dtype or device.
        """
        layout = self.layout
        if spec != self.spec:
            paths = paths_of(spec.unflatten(g))
            if paths != layout.paths:
                came, known = (", ".join(x[:8]) + (", ..." if len(x) > 8 else "") for x in (paths, layout.paths))
                raise ValueError(
                    f"updates: their structure has the leaves ({came}), the state is for ({known}); "
                    "call init with these parameters"
                )
            self.spec = spec
        p, structure = (None, spec) if params is None else optree.tree_flatten(params, none_is_leaf=True)
        if not (self.exact or self.coupled):
            return p
        if structure != spec:
            raise ValueError(f"updates: structure {spec} differs from that of params, {structure}")
        for j in self.exact:
            x = g[j]
            if x is None:
                continue
            if not isinstance(x, Tensor):
                raise TypeError(f"updates: leaf {j} is {checks.short(x)}, not a tensor")
            if x.layout is not torch.strided:
                raise ValueError(
                    f"updates: leaf {j} is sparse ({x.layout}), and noise is dense: build the layer with sparse=False "
                    "(torch.nn.Embedding), or pass .to_dense()"
                )
            if x.dtype != layout.dtypes[j] or (x.shape != layout.shapes[j] and j not in self.stacked):
                checks.alike("updates", j, x, "the state has", layout.shapes[j], layout.dtypes[j], x.device)
            if p is not None and x.device != p[j].device:
                checks.alike("updates", j, x, "params have", x.shape, x.dtype, p[j].device)
        for i in self.coupled:
            if absent := [layout.paths[j] for j in self.where[i] if g[j] is None]:
                raise ValueError(
                    f"{show(self.links[i])}: every parameter needs a gradient, since it couples them; {absent[0]} has none"
                )
        return p

    def template(self, j: int) -> Tensor:
        """Something shaped like leaf ``j``, without its memory."""
        return torch.empty((), dtype=self.layout.dtypes[j]).expand(self.layout.shapes[j])


class Chain(GradientTransformation):
    """A gradient transformation made of links; what every function of this library returns.

    Attributes:
        links: the links, in the order written.

    Example:
        >>> import bayesopt_chain as bc
        >>> isinstance(bc.sgd(0.1), bc.Chain)
        True
    """

    links: tuple[Link, ...]
    lower: Callable[..., Any] | None
    kinds: tuple[str, ...]
    accepts: frozenset[str]
    needy: Link | None
    plans: dict[Layout, Plan]
    last: tuple[Layout | None, Plan | None]
    compose: ClassVar[Callable[..., Chain]]  # set by the layer above, which knows what others wrote

    def __new__(cls, links: Sequence[Link], lower: Callable[..., Any] | None = None) -> Self:
        self = super().__new__(cls, lambda params, **k: self._start(params, **k), lambda *a, **k: self._step(*a, **k))
        self.links, self.lower = tuple(links), lower
        self.kinds = tuple([type(x).__name__ for x in self.links])
        self.accepts = frozenset().union(*(x.accepts for x in self.links))
        self.needy = next((x for x in self.links if x.needs_params), None)
        self.plans, self.last = dict[Layout, Plan](), (None, None)
        return self

    @property
    def response(self) -> Any:
        """The response of the only link, or the tuple of all links' responses."""
        responses = tuple(x.response for x in self.links)
        return responses[0] if len(responses) == 1 else responses

    @property
    def needs(self) -> frozenset[str]:
        """The keywords without which ``update`` refuses."""
        return frozenset().union(*(x.needs for x in self.links))

    def with_links(self, links: Sequence[Link]) -> Chain:
        """The same kind of transformation with other links in the places of its own."""
        return type(self)(links, self.lower)

    def chain(self, next: GradientTransformation) -> Chain:  # pyright: ignore[reportIncompatibleMethodOverride]
        """This chain followed by ``next``."""
        return self.compose(self, next)

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
        return type(self), (self.links, self.lower)

    def __repr__(self) -> str:
        if len(self.links) == 1 and not isinstance(self.links[0].response, Noise):
            return show(self.links[0])
        lines = [f"    {show(x)},{describe(self.links, i)}" for i, x in enumerate(self.links)]
        return "\n".join(["chain(", *lines, ")"])

    def plan(self, state: Any) -> Plan:
        """What is worked out for a state's layout.

        Raises:
            ValueError: the state is another chain's.
        """
        if isinstance(state, State) and state.layout is self.last[0]:  # a state hands its layout on
            return self.last[1]  # pyright: ignore[reportReturnType]
        if not isinstance(state, State):
            raise ValueError(
                f"state: must be what init of this chain returned, got {type(state).__name__}; call init first, with "
                "init(params, like=state) to start from an optimizer's"
            )
        layout = state.layout
        if layout.kinds != self.kinds:
            raise ValueError(
                f"state: it is of the links ({', '.join(layout.kinds)}), this chain has ({', '.join(self.kinds)}); "
                "to go on from it, as from an optimizer's or at another temperature, call init(params, like=state) of "
                "this chain"
            )
        if layout not in self.plans:
            self.plans[layout] = Plan(self.links, layout, self.lower)
        self.last = (layout, self.plans[layout])
        return self.plans[layout]

    def at(self, state: State, i: int, params: Any) -> tuple[At, list[Any]]:
        """Where link ``i`` stands in a tree of parameters, and its leaves."""
        leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
        where = state.layout.where[i]
        return At(spec, where, where, leaves, self.plan(state), {}), [leaves[j] for j in where]

    def _start(self, params: Any, *, like: Any = None) -> State:
        """State for ``params``; ``like`` is the state of an optimizer, or of another temperature, to take over what
        both remember.

        The velocity of a sampler holds half of its last draw, with which an optimizer that takes it over starts. Keys are new.
        """
        if any(isinstance(x.response, Noise) for x in self.links):
            for x in self.links:
                check_link(x)
        leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
        here = {j for j, p in enumerate(leaves) if p is not None}
        masks = {id(mask): selected(mask, params) for x in self.links for mask in x.masks}
        where = tuple([tuple(sorted(here.intersection(*(masks[id(m)] for m in x.masks)))) for x in self.links])
        layout = Layout(
            self.kinds,
            paths_of(params),
            tuple([getattr(p, "shape", None) for p in leaves]),
            tuple([getattr(p, "dtype", None) for p in leaves]),
            where,
        )
        plan = self.plan(State((), layout))
        plan.spec = spec
        if plan.sites:
            noisy = plan.noisy or sorted(here)
            require_samplable([leaves[j] for j in noisy], [layout.paths[j] for j in noisy])
        entries = [
            injection.start(x, plan.sites[i], leaves)  # pyright: ignore[reportArgumentType]
            if i in plan.sites
            else x.init([leaves[j] for j in w], At(spec, w, w, leaves, plan, {}))
            for i, (x, w) in enumerate(zip(self.links, where))
        ]
        if plan.sites:
            for i, weather in self._foresee(plan, entries):
                self.links[i].started(plan.sites[i], weather, leaves, partial(self._coloured, plan, entries))  # pyright: ignore[reportAttributeAccessIssue]
        state = State(entries, layout)
        return state if like is None else warm_start(state, like)

    def _step(self, updates: Any, state: Any, *, params: Any = None, inplace: bool = True, **extra: Any) -> Any:
        """Transformed updates and the next state. See ``torchopt.base.GradientTransformation``."""
        if extra and (unknown := extra.keys() - self.accepts) and ANY not in self.accepts:
            raise TypeError(
                f"update() got {', '.join(sorted(unknown))}=, which no link of this chain takes; "
                f"its links take: {', '.join(sorted(self.accepts)) or 'no further keywords'}"
            )
        if params is None and self.needy is not None:
            raise ValueError(f"{show(self.needy)} needs the parameters: call update(updates, state, params=params)")
        plan, links, op = self.plan(state), self.links, IN_PLACE if inplace else PURE
        g, spec = optree.tree_flatten(updates, none_is_leaf=True)
        p = plan.check(spec, g, params)
        if inplace and len(g) > 1 and repeats(g):
            g = owned(g)
        entries, missing = list(state), any([x is None for x in g])
        noises = self._draw(plan, entries, g, op) if plan.sites else []
        for stage in plan.stages:
            i = stage.run[0]
            where, link = plan.where[i], stage.link
            present = tuple([j for j in where if g[j] is not None]) if missing and not link.whole else where
            if where and not present:
                continue
            keep = [plan.position[i][j] for j in present] if len(present) < len(where) else None
            at = At(
                spec, where, present, p, plan, {k: v for k, v in extra.items() if stage.takes(k)} if extra else extra
            )
            mine = entries[i] if len(stage.run) == 1 else tuple([entries[k] for k in stage.run])
            if keep is not None:
                mine = (
                    part(mine, keep, len(where)) if len(stage.run) == 1 else [part(x, keep, len(where)) for x in mine]
                )
            if stage.learns:
                mine, learned = link.learn([g[j] for j in present], mine, op, at)
                at = at._replace(learned=learned)
            if stage.enter:
                self._enter(plan, i, noises, entries, g, op, at, mine if stage.learns else None)
            new, after = link.update([g[j] for j in present], mine, op, at)
            for k, old, entry in zip(
                stage.run, [entries[k] for k in stage.run], [after] if len(stage.run) == 1 else after
            ):
                entries[k] = entry if keep is None else put_back(old, keep, len(where), entry)
            for j, y in zip(present, new):
                g[j] = y
            for x in noises:  # the one place that knows of carried noise
                if x.site.carried and x.site.owner == i:
                    self._edit(plan, entries, x, lambda v, x=x: op.add(v, x.noise, x.site.carried))
        if noises:
            self._enter(plan, len(links), noises, entries, g, op, None, None)
            for j in plan.noisy:  # coefficients of another precision promote 0-d leaves
                g[j] = g[j] if g[j] is None else g[j].to(plan.layout.dtypes[j])
        new_state = State(entries, state.layout)
        return spec.unflatten(g), new_state if inplace or is_traced() else unshared(new_state, state)

    def _foresee(self, plan: Plan, entries: list[Any]) -> list[tuple[int, injection.Weather]]:
        """Temperature and coefficients of every noise link; refuses values out of range before anything is changed."""
        checked: set[int] = set()

        def rates(i: int, leaves: Sequence[int]) -> Tensor:
            """What a changing gain is now, by leaf."""
            every = self.links[i].rate(entries[i], len(plan.where[i]))
            for value in every:
                if id(value) not in checked:
                    require_valid("lr", value)
                    checked.add(id(value))
            return torch.stack([every[plan.position[i][j]].to(torch.float64) for j in leaves])

        return [(i, injection.foresee(self.links[i], sites, entries[i], rates)) for i, sites in plan.sites.items()]  # pyright: ignore[reportArgumentType]

    def _draw(self, plan: Plan, entries: list[Any], g: list[Any], op: Op) -> list[injection.Injected]:
        """This step's noise. Where a rate rose, the velocity of the step before is too hot, and is rescaled."""
        noises: list[injection.Injected] = []
        for i, weather in self._foresee(plan, entries):
            new, entries[i] = injection.draw(self.links[i], plan.sites[i], entries[i], weather, g, plan.numbers, op)  # pyright: ignore[reportArgumentType]
            noises += new
        for x in noises:
            if x.scale is not None and x.site.owner is not None and x.leaves:
                self._edit(plan, entries, x, lambda v, x=x: op.mul(v, [s.to(t.dtype) for s, t in zip(x.scale, v)]))  # pyright: ignore[reportArgumentType]
        return noises

    def _edit(self, plan: Plan, entries: list[Any], x: injection.Injected, change: Callable[..., Any]) -> None:
        """Change what the owner of the pole remembers of the leaves of noise ``x``."""
        i = x.site.owner
        assert i is not None
        at = [plan.position[i][j] for j in x.leaves]
        entries[i] = edit_velocity(self.links[i].velocity, entries[i], at, change)  # pyright: ignore[reportArgumentType]

    def _enter(
        self, plan: Plan, i: int, noises: list[Any], entries: list[Any], g: list[Any], op: Op, at: At | None, mine: Any
    ) -> None:
        """Colour and add the noise that enters before link ``i``, or inside it with the state ``mine``."""
        for n, x in enumerate(noises):
            if x.site.enters != i or not x.leaves:
                continue
            e = self._coloured(plan, entries, x.site, x.leaves, x.noise, i, at, mine)
            old = [g[j] for j in x.leaves]
            hot = x.hot
            new = op.add(old, e) if hot is None else op.put(old, [torch.where(hot, y + z, y) for y, z in zip(old, e)])
            for j, y in zip(x.leaves, new):
                g[j] = y
            noises[n] = x._replace(noise=e if x.site.carried else ())

    def _coloured(
        self,
        plan: Plan,
        entries: list[Any],
        site: Site,
        leaves: Sequence[int],
        e: Any,
        i: int = -1,
        at: Any = None,
        mine: Any = None,
    ) -> Any:
        """The noise of these leaves of a site as the metrics shape it; link ``i`` has just learned, to the state ``mine``."""
        for m, power in site.colours:
            if m == i and mine is not None:
                place = {j: n for n, j in enumerate(at.present)}
                e = self.links[m].colour(mine, at, [place[j] for j in leaves], e, power)
            elif not getattr(self.links[m].response, "learns", False):  # before the first step it has learned nothing
                where = plan.where[m]
                k = [plan.position[m][j] for j in leaves]
                e = self.links[m].colour(entries[m], At(plan.spec, where, where, None, plan, {}), k, e, power)
        return e


def paths_of(tree: Any) -> tuple[str, ...]:
    """The leaves' paths, as text."""
    return tuple([path_name(path) for path in optree.tree_paths(tree, none_is_leaf=True)])
