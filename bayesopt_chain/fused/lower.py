"""Lowering: neighbouring links of a chain, called a run, are replaced by one link that sweeps memory once for all of them.

The link of a run reads and writes the same entries of the state as the links that it stands for. There are three runs, with
``g`` the gradient, ``u`` the update, ``v`` the velocity, ``e`` the noise of this step and ``m`` that of the step before:

    v <- mu v + g;  u <- f v                        momentum and a constant learning rate
    v <- mu v + g + e;  u <- f v;  v <- v + b e     the same with matched noise, which is drawn, scaled and added in the run
    u <- f (g + e + m);  m <- e                     a constant learning rate and the noise of SGD, which remembers its draw

Matched noise can be lowered if it enters the chain at one place only, there enters such a run, has constant coefficients and is
shaped by no preconditioner. A run gives the bits of its links one by one, pure and in place, with the kernel of
:mod:`bayesopt_chain.fused.sweep_cpu` or without. A chain that is one run and nothing else makes a pure step in one pass,
parameters included (:func:`moved`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import PURE, Leaves, TensorOps, are_small
from bayesopt_chain.core.state import State
from bayesopt_chain.fused.sweep_cpu import Pointers, pointers, sweep_kernel
from bayesopt_chain.links.langevin_noise import LangevinNoise, LangevinNoiseState
from bayesopt_chain.links.learning_rate import Scale
from bayesopt_chain.links.momentum import Momentum, TraceState
from bayesopt_chain.matching.filters import Filtered
from bayesopt_chain.matching.noise_inputs import NoiseInput
from bayesopt_chain.random import stream as keyed_stream
from bayesopt_chain.tracing import is_plain, is_transformed

BLOCK = 2**20  # elements; two float32 blocks fit a third-level cache, and smaller ones cost calls
_KINDS = frozenset((Tensor, torch.nn.Parameter))
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")
_ONE = {dtype: torch.ones((), dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64)}


@dataclass(frozen=True)
class MomentumThenScale(Link):
    """The run of a heavy-ball momentum and a constant factor behind it."""

    momentum: float
    factor: float

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, g: Leaves, states: Any, op: TensorOps, context: LinkContext | None, onto: Leaves | None = None
    ) -> tuple[Leaves, Any] | None:
        """All links of the run at once.

        With parameters ``onto`` their sums with the updates are returned in the place of the updates; ``None``, with nothing
        done, where the kernel cannot take these tensors.
        """
        first: TraceState = states[0]
        mu, factor, kernel = self.momentum, self.factor, sweep_kernel()
        if kernel and (onto or are_small(g)) and is_plain(g[0]) and all(map(_alike, g, first.trace)):
            sizes = tuple(map(Tensor.numel, g))
            if _suit_the_kernel((g, first.trace, onto or ()), sizes, g[0].dtype):
                u, v = _results(op, g, first.trace)
                lists, base = (g, first.trace, u, v), onto and pointers(onto)
                kernel(g[0].dtype, sizes, *map(pointers, lists), factor, mu, onto=base)
                return u, (first._replace(trace=tuple(v)), states[1])
        if onto:
            return None
        if op.inplace and not are_small(g) and not is_transformed() and all(map(_suit_out, first.trace, g)):
            # apply_updates goes from the first leaf to the last: this way each finds in cache what the other left there
            for t, x in reversed(list(zip(first.trace, g))):
                _in_blocks(t, x, mu, factor)
            return g, states
        v = op.average(first.trace, mu, g)
        return op.mul(op.put(g, v), factor), (first._replace(trace=tuple(v)), states[1])


def _alike(x: Tensor, t: Tensor) -> bool:
    return x.shape == t.shape


def _suit_the_kernel(lists: Sequence[Sequence[Tensor]], sizes: tuple[int, ...], dtype: torch.dtype | None) -> bool:
    """Whether the kernel, which checks nothing, may run over the memory of these lists of tensors.

    They must be dense tensors on a CPU, of this dtype and of these sizes, without gradients of their own. That nothing traces
    them the caller has to know.
    """
    if dtype not in _ONE:
        return False
    for tensors in lists:
        for x, n in zip(tensors, sizes):
            if type(x) not in _KINDS or x.dtype is not dtype or x.numel() != n or x.requires_grad:
                return False
            if not (x.is_cpu and x.is_contiguous()):
                return False
    return True


def _results(op: TensorOps, g: Leaves, kept: Sequence[Tensor]) -> tuple[Leaves, Sequence[Tensor]]:
    """The tensors that a kernel writes into: ``g`` and ``kept`` themselves in place, new ones otherwise."""
    if op.inplace:
        torch.autograd.graph.increment_version([*g, *kept])
        return g, kept
    return [torch.empty_like(x) for x in g], [torch.empty_like(x) for x in kept]


def _suit_out(t: Tensor, x: Tensor) -> bool:
    """Whether operations with ``out=``, which broadcast nothing and are not differentiated, may be used on two tensors."""
    same = t.dtype == x.dtype and t.shape == x.shape and t.device.type == "cpu" and t.dtype in _ONE
    return same and not (t.requires_grad or x.requires_grad)


def _in_blocks(t: Tensor, x: Tensor, mu: float, factor: float) -> None:
    """``t <- mu t + x; x <- factor t``, with the bits of ``mul_``, ``add_`` and ``mul``.

    The first is one pass as ``x + mu t / 1``: the division by one keeps the compiler from fusing product and sum, so that
    each is rounded by itself.
    """
    parts = [(t, x)]
    if t.numel() > BLOCK and t.is_contiguous() and x.is_contiguous():
        parts = zip(t.view(-1).split(BLOCK), x.view(-1).split(BLOCK))
    one = _ONE[t.dtype]
    for part, into in parts:
        torch.addcdiv(into, part, one, value=mu, out=part)
        torch.mul(part, factor, out=into)


@dataclass(frozen=True)
class Noisy(Link):
    """The run of matched noise, the momentum that it enters (or none), and a constant factor behind.

    It is given leaves without a gradient too: the generator draws one leaf after the other, so that leaving out one leaf's
    draw would change those of the leaves behind it.
    """

    noise: LangevinNoise
    momentum: float | None
    factor: float
    level: float  # of the noise
    deferred_gain: float  # what the velocity holds of it for the next step
    shapes: tuple[torch.Size, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype | None  # the dtype of all leaves; None where they have several
    variables: keyed_stream.Variables  # the draws of which the noise is made
    traits = Traits(all_leaves=True)

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, g: Leaves, states: Any, op: TensorOps, context: LinkContext | None, onto: Leaves | None = None
    ) -> tuple[Leaves, Any] | None:
        """All links of the run at once.

        With parameters ``onto`` their sums with the updates are returned in the place of the updates; ``None``, with nothing
        done, where the kernel cannot take these tensors.
        """
        noise: LangevinNoiseState = states[0 if self.momentum is None else 2]
        kept = noise.memory if self.momentum is None else states[0].trace
        plain = self.noise.noise == "gaussian" and is_plain(noise.key, noise.step) and noise.key.is_cpu
        if plain and sweep_kernel() and _suit_the_kernel((g, kept, onto or ()), self.sizes, self.dtype):
            drawn = self.variables.draw_in_spans(noise.key, noise.step, self.sizes, g[0].dtype)
            if self.momentum is None:  # it remembers the draw, and scales it as its links do
                drawn = ((span, e.mul_(self.level)) for span, e in drawn)
            u, after = _results(op, g, kept)
            self.sweep(drawn, g, kept, u, after, onto)
        elif onto:
            return None
        else:
            u, after = self._by_links(g, kept, noise, op)
        count = op.next_count(noise.step)
        if self.momentum is None:
            return u, (noise._replace(step=count, memory=tuple(after)), states[1])
        return u, (states[0]._replace(trace=tuple(after)), states[1], noise._replace(step=count))

    def sweep(
        self,
        drawn: Iterable[tuple[keyed_stream.Span, Tensor]],
        g: Sequence[Tensor],
        kept: Sequence[Tensor],
        u: Sequence[Tensor],
        t: Sequence[Tensor],
        onto: Sequence[Tensor] | None = None,
        known: Sequence[Sequence[Pointers | None]] | None = None,
    ) -> None:
        """Run the kernel of :mod:`bayesopt_chain.fused.sweep_cpu`, which checks nothing, over lists of contiguous tensors.

        Args:
            drawn: pairs of a span and its noise, flat.
            g: gradients.
            kept: the velocities, or without momentum the remembered draws.
            u, t: the tensors into which the updates and the new ``kept`` are written.
            onto: parameters, if their sums with the updates are to be written in the place of the updates.
            known: for every span the :func:`pointers` to ``kept``, ``u``, ``t`` and ``onto``, if they have been made before.
        """
        kernel: Any = sweep_kernel()
        f, mu = self.factor, self.momentum
        for n, (span, e) in enumerate(drawn):
            at = known[n] if known else (*map(pointers, (kept, u, t), [span] * 3), onto and pointers(onto, span))
            kernel(e.dtype, span.sizes, pointers(g, span), *at[:3], f, mu, e, self.deferred_gain, at[3])

    def _by_links(
        self, g: Sequence[Tensor | None], kept: Sequence[Tensor], noise: LangevinNoiseState, op: TensorOps
    ) -> tuple[list[Any], list[Tensor]]:
        """The run by tensor operations, for any tensors. A leaf without a gradient keeps its state."""
        live = [k for k, x in enumerate(g) if x is not None]
        here: Leaves = [x for x in g if x is not None]
        checks.own_key(noise.key, here)
        xi = self.variables.draw(noise.key, noise.step, noise.memory)
        e = [xi[k][0] * self.level if self.momentum is None else xi[k][0] for k in live]
        u, t = self._by_operations(here, [kept[k] for k in live], e, op)
        moved, after = list(g), list(kept)
        for k, x, y in zip(live, u, t):
            moved[k], after[k] = x, y
        return moved, after

    def _by_operations(self, g: Leaves, kept: Sequence[Tensor], e: Leaves, op: TensorOps) -> tuple[Leaves, Leaves]:
        """The arithmetic of the run on leaves that all have gradients, for the noise ``e``: updates and the new ``kept``."""
        if self.momentum is None:
            y = [x + m[0] for x, m in zip(e, kept)]
            after = op.put(kept, [x.unsqueeze(0) for x in e])
            return op.mul(op.add(g, y), self.factor), after
        g = op.add(g, e)
        v = op.average(kept, self.momentum, g)
        u = op.mul(op.put(g, v), self.factor)
        if self.deferred_gain:
            v = op.add(v, [x * self.deferred_gain for x in e])
        return u, v


def lower(links: Sequence[Link], plan: Any) -> dict[int, tuple[tuple[int, ...], Link]]:
    """Find the runs of a chain, each by the number of its first link; ``plan.order`` leaves the noise links out."""
    runs: dict[int, tuple[tuple[int, ...], Link]] = {}
    for i, k in zip(plan.order, plan.order[1:]):
        if (mu := _heavy_ball(links[i])) is not None and (factor := _constant(links[k])) is not None:
            runs[i] = ((i, k), MomentumThenScale(mu, factor))
    for n, injection in plan.noise.items():
        if len(injection.noise_inputs) == 1 and (run := _noisy(links, plan, n, injection)) is not None:
            runs[run[0][0]] = run
    return runs


def moved(chain: Chain, params: Any, grads: Any, state: Any) -> tuple[Any, State] | None:
    """A pure step of a chain that is one run and nothing else: the bits of ``update`` and ``apply_updates`` in one pass.

    Args:
        chain: the chain.
        params, grads: trees of one structure, of which all leaves are tensors.
        state: a state of the chain.

    Returns:
        New parameters and the new state; ``None``, with nothing done, for a chain with other links, and for trees or tensors
        that the kernel cannot take: all leaves of the run must have gradients, all tensors must be dense, on a CPU, and not
        traced.
    """
    plan = chain.plan(state)
    [(places, run), *more] = plan.stages or [((0,), chain)]
    if more or plan.drawn or not isinstance(run, MomentumThenScale | Noisy) or not is_plain():
        return None
    p: Any
    p, spec = optree.tree_flatten(params, none_is_leaf=True)
    try:
        g: Any = spec.flatten_up_to(grads)
    except ValueError:
        return None
    if spec != plan.spec or len(plan.where[places[0]]) != len(p) or not _KINDS.issuperset(map(type, [*p, *g])):
        return None
    layout = plan.layout
    for xs in (p, g):
        if tuple(map(_SHAPE, xs)) != layout.shapes or tuple(map(_DTYPE, xs)) != layout.dtypes:
            return None
    g = [x if x.is_contiguous() else x.contiguous() for x in g]
    states = [state[k] for k in places]
    if (done := run.update(g, states, PURE, None, p)) is None:
        return None
    new, entries = done
    # a key of its own: whoever overwrites one state must not change the other
    entries = [x._replace(key=x.key.clone()) if isinstance(x, LangevinNoiseState) else x for x in entries]
    after = dict(zip(places, entries))
    return spec.unflatten(new), State([after.get(k, entry) for k, entry in enumerate(state)], layout)


def _heavy_ball(link: Link) -> float | None:
    """The decay of a heavy-ball momentum; ``None`` for any other link, and for momentum with more to it."""
    if type(link) is not Momentum or link.nesterov or link.dampening or link.moment_requires_grad:
        return None
    return link.momentum


def _constant(link: Link) -> float | None:
    """The factor that a link multiplies by, if it is a number; ``None`` for schedules, tensors and other links."""
    if type(link) is not Scale or not isinstance(link.step_size, (int, float)):
        return None
    return link.sign * link.step_size


def level_of(noise: Link, noise_input: NoiseInput, remembers: bool) -> float | None:
    """The level of the noise that a run draws itself; ``None`` for noise that its link draws.

    Args:
        noise: the link that it comes from.
        noise_input: where it enters, with what coefficients.
        remembers: whether half of the noise is the last step's draw, as in SGD; else it is white, as under a momentum.
    """
    process = noise_input.process
    if not isinstance(noise, LangevinNoise) or noise.stream not in keyed_stream.IN_SPANS:
        return None
    if noise.room is not None:  # its draws are changed before they are used
        return None
    if noise_input.changes or noise_input.powers or not isinstance(process, Filtered) or process.d != (1.0,):
        return None
    level, *before = process.c
    return level if before == ([level] if remembers else []) else None


def _noisy(links: Sequence[Link], plan: Any, n: int, injection: Any) -> tuple[tuple[int, ...], Noisy] | None:
    """The run that the noise of link ``n`` enters, with the numbers of its links; ``None`` if it is none of these."""
    (noise_input,) = injection.noise_inputs
    i, layout = noise_input.entry_link, plan.layout
    mu = _heavy_ball(links[i]) if i != n and noise_input.transfer.pole_link == i else None
    level = level_of(links[n], noise_input, remembers=mu is None)
    if level is None or (mu is None and i != n):
        return None
    behind = [k for k in plan.order if k >= i and not set(noise_input.leaves).isdisjoint(plan.where[k])]
    run = (n, *behind[:1]) if mu is None else (*behind[:2], n)
    if len(run) < 2 + (mu is not None) or (factor := _constant(links[run[1]])) is None:
        return None
    shapes = tuple([layout.shapes[j] for j in noise_input.leaves])
    if any(plan.where[k] != noise_input.leaves for k in run) or None in shapes:
        return None
    sizes, dtypes = tuple([shape.numel() for shape in shapes]), {layout.dtypes[j] for j in noise_input.leaves}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    # where nothing remembers the draw, ``variables`` scale it to its level; else the run does, and remembers what it scaled
    gain, noise = noise_input.deferred_gain, links[n]
    return run, Noisy(noise, mu, factor, level, gain, shapes, sizes, dtype, injection.variables)  # pyright: ignore[reportArgumentType]
