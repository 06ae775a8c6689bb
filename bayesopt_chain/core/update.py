"""How an update runs: what is worked out once for the leaves of a state, and one update in progress.

An update first draws the noise, and rescales velocities where a rate changed. Then each link has its turn, in order: the noise
that enters in front of it is added to the gradients, the link acts, and the part of the noise that acts one step later is added
to its velocity. Masks and missing gradients are handled here, so that a link sees only leaves that have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.link import Link, LinkContext, LinkScope
from bayesopt_chain.core.op import PURE, Leaves, TensorOps
from bayesopt_chain.core.state import Layout, edited, is_by_leaf, replaced
from bayesopt_chain.distributed.shards import Sharding
from bayesopt_chain.engine.engine import Engine, engines
from bayesopt_chain.matching.noise_inputs import NoiseInput, match
from bayesopt_chain.matching.response import Noise, Preconditioner
from bayesopt_chain.trees import leaves_of, paths_of

Rates = Callable[[int, Sequence[int]], Tensor]  # the gain of a link in this step, for each of these leaves


class Injected(NamedTuple):
    """The noise that enters at one noise input in this step, for those of its leaves that have a gradient."""

    noise_input: NoiseInput
    leaves: list[int]
    noise: Leaves
    scale: Sequence[Tensor | float] | None  # what the velocity is multiplied by before the step
    # where False (the temperature is 0 now) no noise is added, and the gradients keep their bits
    is_positive_temperature: Tensor | None
    shares: Sequence[Tensor | float] | None = None  # of the noise that the velocity keeps for the next step; None for 1
    has_entered: bool = False


class Plan:
    """What a chain needs in every update of one layout: the order of the links, the noise, and which leaves are checked."""

    def __init__(self, links: Sequence[Link], layout: Layout) -> None:
        self.links, self.layout, self.paths, self.where = links, layout, layout.paths, layout.where
        self.shards = None if layout.pieces is None else Sharding(layout, links)
        self.scopes = [LinkScope.of(links, i, layout, self.shards) for i in range(len(links))]
        self.position = [{j: k for k, j in enumerate(w)} for w in self.where]
        self.order = [i for i, x in enumerate(links) if not isinstance(x.response, Noise)]
        self.learning = {i for i in self.order if isinstance(x := links[i].response, Preconditioner) and x.learns}
        matched = match(links, self.where, [j for j, shape in enumerate(layout.shapes) if shape is not None])
        for x, scope in zip(links, self.scopes):
            x.require_around(scope.before, scope.behind)
        # of every noise link what draws its noise, a bayesopt_chain.links.langevin_noise.LangevinInjection
        self.noise: dict[int, Any] = {i: links[i].injection(x, layout) for i, x in matched.items()}
        self.entering = {noise_input.entry_link for noise_inputs in matched.values() for noise_input in noise_inputs}
        self.noisy = sorted({j for injection in self.noise.values() for j in injection.leaves})
        self.needs_all_gradients = [i for i, x in enumerate(links) if x.traits.needs_all_gradients]
        # leaves whose gradients are checked
        self.exact = sorted(
            {*self.noisy, *(j for x, w in zip(links, self.where) if x.traits.checks_gradients for j in w)}
        )
        self.sampled = {j for x, w in zip(links, self.where) if x.traits.samples > 1 for j in w}
        found = {} if self.shards is not None else engines(links, self)
        inside = {k for engine in found.values() for k in engine.run if k not in found}
        # the turns of an update: numbers of links, and engines that act in the place of several
        self.turns: list[int | Engine] = [
            found.get(i, i)
            for i in range(len(links))
            if i not in inside and (i in found or i not in self.noise or i in self.entering)
        ]
        self.engine = next((x for x in found.values() if x.is_whole), None)  # where the chain is one engine
        # the structure of the last tree of updates whose paths were compared, so that the next like it is not compared again
        self.spec: optree.PyTreeSpec | None = None

    def check(self, spec: optree.PyTreeSpec, g: list[Any], params: Any) -> list[Any] | None:
        """Check that updates and parameters fit the state, and return the leaves of the parameters.

        Raises:
            ValueError, TypeError: another structure; where noise enters also another shape, dtype or device.
        """
        if spec != self.spec:
            self.require_paths(paths_of(spec.unflatten(g)))
            self.spec = spec
        p, structure = (None, spec) if params is None else leaves_of(params)
        if self.exact or self.needs_all_gradients:
            if structure != spec:
                raise ValueError(f"updates: structure {spec} differs from that of params, {structure}")
            self.require_like(g, p)
        for i in self.needs_all_gradients:
            if absent := [self.paths[j] for j in self.where[i] if g[j] is None]:
                raise ValueError(
                    f"{self.links[i].shown}: every parameter needs a gradient, since it couples them; {absent[0]} has none"
                )
        return p

    def require_paths(self, paths: Sequence[str]) -> None:
        """Refuse updates whose leaves have other paths than the state's."""
        if paths != self.paths:
            came, known = (", ".join(x[:8]) + (", ..." if len(x) > 8 else "") for x in (paths, self.paths))
            raise ValueError(
                f"updates: their structure has the leaves ({came}), the state is for ({known}); "
                "call init with these parameters"
            )

    def require_like(self, g: Sequence[Any], p: Sequence[Any] | None) -> None:
        """Refuse gradients that are not dense tensors like the leaves; those at several draws have an axis in front."""
        shapes, dtypes = self.layout.shapes, self.layout.dtypes
        for j in [j for j in self.exact if g[j] is not None]:
            x = g[j]
            if not isinstance(x, Tensor) or x.layout is not torch.strided:
                checks.dense(f"updates: leaf {j}", x)
            if x.dtype != dtypes[j] or (x.shape != shapes[j] and j not in self.sampled):
                checks.unlike("updates", j, x, "the state has", shapes[j], dtypes[j], x.device)
            if p is not None and x.device != p[j].device:
                checks.unlike("updates", j, x, "params have", x.shape, x.dtype, p[j].device)


@dataclass(slots=True)
class Update:
    """An update in progress.

    Attributes:
        plan: what is the same in every update.
        op: the operations, pure or in place.
        spec: the structure of the user's tree.
        params: the parameters, one for each leaf of the tree; None if ``update`` was called without them.
        entries: the state of each link; replaced while the update runs.
        g: the gradients of all leaves, which each link replaces by its updates; None where a leaf has none.
        extra: the keywords of this update.
        missing: whether any leaf has no gradient.
        noises: the noise drawn for this step, each until its link has had its turn.
        is_new: whether one engine made all entries, which then share no memory with those of before.
    """

    plan: Plan
    op: TensorOps
    spec: optree.PyTreeSpec
    params: list[Any] | None
    entries: list[Any]
    g: list[Any] = field(default_factory=list[Any])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    missing: bool = False
    noises: list[Injected] = field(default_factory=lambda: [])  # to call ``list[Injected]`` is slow
    is_new: bool = False

    def run(self) -> None:
        """Run the update: read all numbers, draw the noise, rescale velocities, then let one after the other act."""
        numbers = {x: x.numbers(self.entries, self.g) for x in self.plan.turns if isinstance(x, Engine)}
        drawn = [x.noise for x, found in numbers.items() if found]  # an engine draws by itself
        if waiting := [i for i in self.plan.noise if i not in drawn]:
            self.draw(waiting)
        for turn in self.plan.turns:
            if isinstance(turn, int):
                self.take(turn)
            elif (found := numbers[turn]) and turn.act(self, found):
                self.is_new = turn.is_whole and turn.centre is None  # a centre stays as it is, and would be shared
            else:
                if found and turn.noise is not None:
                    self.draw([turn.noise])
                for i in turn.run:
                    self.take(i)
        dtypes = self.plan.layout.dtypes
        for j in self.plan.noisy:  # a 0-d leaf times a coefficient of a wider dtype has the wider dtype
            if (x := self.g[j]) is not None and x.dtype != dtypes[j]:
                self.g[j] = x.to(dtypes[j])

    def rates(self, i: int, leaves: Sequence[int]) -> Tensor:
        """The gain of link ``i`` in this step, for each of these leaves: float64 ``[leaves]``."""
        every = self.plan.links[i].rate(self.entries[i], len(self.plan.where[i]))
        for value in {id(value): value for value in every}.values():
            checks.at_this_step("lr", value)
        return torch.stack([every[k].to(torch.float64) for k in self.positions(i, leaves)])

    def draw(self, links: Iterable[int]) -> None:
        """Draw the noise of these links, and rescale velocities whose variance belongs to another learning rate."""
        drawn = {i: (noise := self.plan.noise[i], noise.strength(self.entries[i], self.rates)) for i in links}
        before = len(self.noises)
        for i, (noise, strength) in drawn.items():
            new, self.entries[i] = noise.draw(self.entries[i], strength, self.g, self.op)
            self.noises += new
        for x in self.noises[before:]:
            if x.scale is not None and x.leaves and (i := x.noise_input.transfer.pole_link) is not None:
                at = self.positions(i, x.leaves)
                self.entries[i] = self.plan.links[i].rescaled(self.entries[i], at, x.scale, self.op)

    def take(self, i: int) -> None:
        """Let a link take its turn: noise enters, it acts, and its velocity keeps the deferred noise."""
        link, where, learns = self.plan.links[i], self.plan.where[i], i in self.plan.learning
        some = self.missing and not link.traits.all_leaves  # a gradient is missing, and the link does not see that leaf
        present = tuple([j for j in where if self.g[j] is not None]) if some else where
        if not present:
            return
        if self.noises and not learns:
            self.enter(i)
        state = self.part(i, present) if some else self.entries[i]
        new, after = link.update([self.g[j] for j in present], state, self.op, self.at(i, present))
        self.entries[i] = self.whole(i, present, after) if some else after
        for j, y in zip(present, new):
            self.g[j] = y
        for x in self.noises:
            if learns and x.noise_input.entry_link == i and x.noise and not x.has_entered:
                raise ValueError(
                    f"{link.shown}: it learns, so its update must ask for the noise: context.with_noise(denominators)"
                )
        self.carry(i)

    def carry(self, i: int) -> None:
        """Let the velocity of link ``i`` keep the part of the noise that acts in the next step."""
        for x in self.noises:
            if x.noise and x.noise_input.deferred_gain and x.noise_input.transfer.pole_link == i:
                waits = PURE.mul(x.noise, [x.noise_input.deferred_gain * k for k in x.shares or [1.0] * len(x.noise)])
                velocity, at = self.plan.links[i].traits.velocity, self.positions(i, x.leaves)
                self.entries[i] = edited(self.entries[i], velocity, at, partial(self.op.add, ys=waits))

    def at(self, i: int, present: tuple[int, ...]) -> LinkContext:
        """Make the context of link ``i`` for a turn in which these of its leaves have gradients."""
        ask = partial(self.with_noise, i, present) if i in self.plan.learning else None
        return LinkContext(self.plan.scopes[i], present, self.spec, self.params, self.extra, ask)

    def with_noise(self, i: int, present: Sequence[int], denominators: Callable[[], Sequence[Tensor]]) -> Leaves:
        """Let the noise enter inside link ``i``, which has just learned, and return the gradients of these leaves."""
        if i in self.plan.entering:
            self.enter(i, dict(zip(present, denominators())))
        return [self.g[j] for j in present]

    def enter(self, i: int, denominators: Mapping[int, Tensor] | None = None) -> None:
        """Shape and add the noise that enters before link ``i``, or inside it, which has learned ``1 / P`` of each leaf."""
        for n, x in enumerate(self.noises):
            if x.noise_input.entry_link != i or x.has_entered or not x.noise:
                continue
            e = self.apply_powers(x.noise_input, x.leaves, x.noise, denominators)
            if x.is_positive_temperature is not None:  # x + (-0.0) has the bits of x, also for x = -0.0
                e = [torch.where(x.is_positive_temperature, y, -0.0) for y in e]
            for j, y in zip(x.leaves, self.op.add([self.g[j] for j in x.leaves], e)):
                self.g[j] = y
            self.noises[n] = x._replace(noise=e if x.noise_input.deferred_gain else [], has_entered=True)

    def apply_powers(
        self,
        noise_input: NoiseInput,
        leaves: Sequence[int],
        e: Leaves,
        denominators: Mapping[int, Tensor] | None = None,
    ) -> Leaves:
        """Shape the noise of these leaves by the preconditioners, among which one that has learned nothing yet is 1."""
        for m, power in noise_input.powers:
            if m not in self.plan.learning:
                e = self.plan.links[m].apply_power(e, power, self.part(m, leaves), self.at(m, tuple(leaves)))
            elif denominators is not None:
                factors = [denominators[j] ** -power for j in leaves]
                e = [x * f if f.requires_grad else x.mul_(f) for x, f in zip(e, factors)]
        return e

    def part(self, i: int, leaves: Sequence[int]) -> Any:
        """The state of link ``i`` restricted to these leaves. Fields without a tensor for each leaf are kept as they are."""
        entry, n = self.entries[i], len(self.plan.where[i])
        if len(leaves) == n or not hasattr(entry, "_fields"):
            return entry
        keep = self.positions(i, leaves)
        return type(entry)(*[tuple([f[k] for k in keep]) if is_by_leaf(f, n) else f for f in entry])

    def whole(self, i: int, leaves: Sequence[int], part: Any) -> Any:
        """The state of link ``i`` in which ``part`` has replaced what belongs to these leaves."""
        old, n, keep = self.entries[i], len(self.plan.where[i]), self.positions(i, leaves)
        if not hasattr(part, "_fields"):
            return part
        return type(part)(*[replaced(f, keep, x) if is_by_leaf(f, n) else x for f, x in zip(old, part)])

    def positions(self, i: int, leaves: Sequence[int]) -> list[int]:
        """The places of these leaves among those of link ``i``."""
        return [self.plan.position[i][j] for j in leaves]
