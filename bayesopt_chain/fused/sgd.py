r"""One pass over parameters, gradients and velocities: what ``make_step(..., inplace=True)`` runs for the common chains.

SGD with everything torch's fused kernel knows, and matched noise in front of it:

    g <- +-g + wd theta + e,    v <- mu v + g,    theta <- theta - lr (v, or g + mu v with Nesterov).

:func:`recognise` reads a chain's links and says whether it is of this form. It is not, and takes the links one by one
as ``update`` does, if it holds any other link (adaptive, clipping, masked, declared), a dampening, a second momentum or
scale, a learning rate or temperature that is a tensor or a schedule, or noise together with ``maximize``.
:meth:`FusedSGD.move` declines tensors the kernels cannot take. The arithmetic is that of the links, with a
multiplication and the addition behind it rounded once: equal to one unit in the last place for each operation.

Matched noise is a fresh draw ``c xi`` and what a tensor ``s`` carries over from the last one, the velocity or, without
momentum, the remembered draw (:mod:`bayesopt_chain.matching.noise_inputs`):

    v = keep s + g + c xi,    theta <- theta - lr v,    s <- momentum v + carried c xi,

``(keep, momentum, carried) = (mu, 1, 1 / mu)`` or ``(1, 0, 1)``; white noise has ``carried = 0``.
Four ways to run it, all the same stream:

* on a CPU, for SGD and heavy ball where every leaf has a gradient, chunk by chunk a draw and one pass of
  :mod:`bayesopt_chain.fused.sweep_cpu` while all of it is in cache; gradients stay as they are;
* on a CPU otherwise a draw next to torch's fused kernel, block after block of a large leaf while all of it is in cache;
* on a CUDA device :mod:`bayesopt_chain.fused.langevin_cuda`, which draws in the kernel: 20 bytes a float32 parameter;
* any other noise drawn by its link, then torch's fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import tracing
from bayesopt_chain._torch import foreach_add_, foreach_copy_, fused_sgd_
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.op import IN_PLACE, owned
from bayesopt_chain.core.state import State
from bayesopt_chain.fused.sweep_cpu import pointers, sweep_kernel
from bayesopt_chain.links.langevin_noise import LangevinNoise
from bayesopt_chain.links.learning_rate import Scale
from bayesopt_chain.links.momentum import Momentum
from bayesopt_chain.links.weight_decay import AddDecayedWeights, FlipSign
from bayesopt_chain.matching.filters import Filtered
from bayesopt_chain.matching.noise_inputs import NoiseInput
from bayesopt_chain.random import philox
from bayesopt_chain.random import stream as keyed_stream

_KINDS = (Tensor, torch.nn.Parameter)  # subclasses may keep their numbers elsewhere
_DTYPES = (torch.float32, torch.float64)  # in bfloat16 torch 2.13's CPU kernel moves by the gradient, not the velocity
BLOCK = 2**18  # elements drawn at a time: in cache, and few enough calls
_VECTOR = 16  # a CPU generator's normals come in groups of 16: pieces of such sizes draw what one piece would


@dataclass(frozen=True)
class FusedSGD:
    """A chain of that form. ``velocity`` and ``noise`` are the numbers of those links, ``None`` without them."""

    chain: Chain
    lr: float
    velocity: int | None = None
    noise: int | None = None
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False
    last: list = field(default_factory=list, repr=False, compare=False)  # the last call's buffers, to be found again

    def __reduce__(self):
        return recognise, (self.chain,)

    def move(self, params: Any, grads: Any, state: State) -> State | None:
        """Move ``params`` and ``state`` in place, and return the state; gradients may be overwritten.

        ``None``, with nothing changed, where the kernels, which check nothing, cannot take these tensors: they must be dense
        and contiguous, of one device and dtype, the state's shaped like the parameters, and not traced.
        """
        p, g, spec = self._leaves(params, grads)
        live = [x for x in g if x is not None]
        if not live or not tracing.is_plain(live[0]):
            return None
        buffers = self._buffers(p, g, state, spec)
        if not buffers.usable:
            return None
        if buffers.places is not None:  # addresses, of which autograd knows nothing
            self._sweep_at_once(buffers, live, state[self.noise])  # pyright: ignore[reportArgumentType, reportCallIssue]
            return state
        with torch.no_grad():
            return self._advance(buffers, owned(g), state)

    def _leaves(self, params: Any, grads: Any) -> tuple[list, list, Any]:
        """The leaves of both trees and their structure, which is looked for only where it is not the last one."""
        if self.last:
            spec = self.last[0].spec
            try:
                return spec.flatten_up_to(params), spec.flatten_up_to(grads), spec
            except ValueError:
                pass
        p, spec = optree.tree_flatten(params, none_is_leaf=True)
        return p, spec.flatten_up_to(grads), spec

    def _advance(self, buffers: _Buffers, g: list, state: State) -> State:
        """By torch's kernels, or with the noise drawn on the device."""
        live = [x if x.is_contiguous() else x.contiguous() for x in g if x is not None]
        if self.noise is None:
            self._sweep(buffers.theta, live, buffers.velocity)
            return state
        noise = state[self.noise]
        if buffers.own is None:
            noise_input, injection = buffers.noise_input, buffers.plan.noise[self.noise]
            (x,), after = injection.draw(noise, injection.strength(noise), g, IN_PLACE)
            self._sweep(buffers.theta, IN_PLACE.add(live, x.noise), buffers.velocity)
            if noise_input.deferred_gain:
                IN_PLACE.add(buffers.velocity, x.noise, noise_input.deferred_gain)
            return state.replace(self.noise, after)
        if buffers.by_kernel:
            self._kernels(buffers, live, noise)
        else:
            fill, carried = buffers.filler(noise), buffers.own.carried
            if buffers.splits:
                for x, number, sizes, blocks in zip(live, buffers.draws, buffers.sizes, buffers.blocks):
                    for grad, (theta, kept, fresh) in zip(x.view(-1).split(sizes), blocks):
                        fill(fresh, sizes, [number])
                        self._with_noise([theta], [grad], [kept], [fresh], carried)
            else:
                fill(buffers.flat, buffers.sizes, buffers.numbers)
                self._with_noise(buffers.theta, live, buffers.carried, buffers.fresh, carried)
        noise.count.add_(1)
        return state

    def _sweep_at_once(self, buffers: _Buffers, g: list[Tensor], noise: Any) -> None:
        """The draw, and one pass for the rest; gradients are only read."""
        kernel, own, dtype = sweep_kernel(), buffers.own, g[0].dtype
        assert kernel is not None and own is not None and buffers.places is not None
        if not all(map(Tensor.is_contiguous, g)):
            g = [x.contiguous() for x in g]
        parts = buffers.variables.draw_in_spans(noise.key, noise.count, buffers.elements, dtype)
        for (part, e), (theta, kept) in zip(parts, buffers.places):
            x = pointers(g, part)
            kernel(dtype, part.sizes, x, kept, theta, kept, -self.lr, self.momentum or None, e, own.carried, True)
        torch.autograd.graph.increment_version([*buffers.theta, *buffers.carried])
        noise.count.add_(1)

    def _buffers(self, params: list, g: list, state: tuple, spec: Any) -> _Buffers:
        """The tensors as the kernels take them: those of the last call where they are the same objects, and nobody has replaced
        the ``.data`` of one."""
        trace = state[self.velocity].trace if self.velocity is not None else ()
        memory = state[self.noise].memory if self.noise is not None else ()
        key = (*params, *trace, *memory)
        last = self.last[0] if self.last else None
        if (
            last is None
            or len(key) != len(last.key)
            or not all(map(is_, key, last.key))
            or last.absent != [x is None for x in g]
            or not all(map(Tensor.is_set_to, last.viewed, last.views))
        ):
            last = _Buffers(self, params, g, self.chain.plan(state), trace, memory, spec)
            self.last[:] = [last]
        return last

    def _with_noise(
        self, p: list[Tensor], g: list[Tensor], s: list[Tensor], fresh: list[Tensor], carried: float
    ) -> None:
        """``v = keep s + g + fresh; theta <- theta - lr v; s <- momentum v + carried fresh`` (see the module's note)."""
        if self.momentum:
            foreach_add_(g, fresh)
            self._sweep(p, g, s)
            if carried:
                foreach_add_(s, fresh, alpha=carried)
        else:
            foreach_add_(g, s)
            foreach_add_(g, fresh)
            foreach_copy_(s, fresh)
            self._sweep(p, g, [])

    def _kernels(self, buffers: _Buffers, g: list[Tensor], noise) -> None:
        """The same on the device, one launch a leaf."""
        from bayesopt_chain.fused.langevin_cuda import langevin_step_

        keep, momentum = (self.momentum, 1.0) if self.momentum else (1.0, 0.0)
        numbers = {
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "keep": keep,
            "momentum": momentum,
            **buffers.own._asdict(),  # pyright: ignore[reportOptionalMemberAccess]
        }
        with torch.cuda.device_of(noise.key):
            for p, x, s, draw in zip(buffers.theta, g, buffers.carried, buffers.draws):
                langevin_step_(p, x, s, noise.key, noise.count, draw=draw - (draw >> 31 << 32), **numbers)

    def _sweep(self, p: list[Tensor], g: list[Tensor], v: list[Tensor]) -> None:
        fused_sgd_(
            p,
            g,
            v if self.momentum else [],
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            maximize=self.maximize,
        )


class _Own(NamedTuple):
    """Matched noise that the sweeps draw themselves: its level ``c`` and the factor of what is carried over."""

    level: float
    carried: float


class _Buffers:
    """Parameters, velocities and remembered draws of the leaves that have a gradient, as lists of dense tensors."""

    def __init__(
        self, form: FusedSGD, params: list, g: list, plan: Any, trace: tuple, memory: tuple, spec: Any
    ) -> None:
        self.plan, self.spec = plan, spec
        here = [j for j, p in enumerate(params) if p is not None]
        place = {j: k for k, j in enumerate(here)}
        self.key = (*params, *trace, *memory)
        self.viewed: list[Tensor] = []
        self.views: list[Tensor] = []
        self.absent = [x is None for x in g]
        self.live = [j for j, x in enumerate(g) if x is not None]
        first = g[self.live[0]]
        self.usable = (
            first.dtype in _DTYPES
            and all(x is None or (_like(x, first) and _like(p, first)) for x, p in zip(g, params))
            and all(params[j].is_contiguous() for j in self.live)
            and all(
                _like(t, first) and t.is_contiguous() and not t.requires_grad for t in (*trace, *memory) if t.numel()
            )
            and (form.velocity is None or [t.shape for t in trace] == [params[j].shape for j in here])
            and (form.noise is None or [t.shape[1:] for t in memory] == [params[j].shape for j in here])
        )
        self.own = self.places = None
        if not self.usable:
            return
        self.theta = [params[j].detach() for j in self.live]
        self.viewed, self.views = [params[j] for j in self.live], list(self.theta)
        self.velocity = [trace[place[j]] for j in self.live] if trace else []
        if form.noise is None:
            return
        link, noise_inputs = plan.noise[form.noise].link, plan.noise[form.noise].noise_inputs
        if not noise_inputs:  # a learning rate of zero
            self.usable = False
            return
        (self.noise_input,) = noise_inputs
        self.own = _own(self.noise_input, link, first, bool(form.momentum))  # pyright: ignore[reportArgumentType]
        if self.own is None:
            return
        self.carried = self.velocity or [memory[place[j]][0] for j in self.live]
        if not self.velocity:
            self._view([memory[place[j]] for j in self.live])
        self.by_kernel = has_kernel(first)
        self.draws = [plan.numbers[j] for j in self.live]
        if self.by_kernel:
            return
        sizes = [params[j].numel() for j in here]
        plain = not (form.nesterov or form.weight_decay or form.maximize) and len(self.live) == len(here)
        if plain and sweep_kernel() is not None:
            self._view(self.velocity)
            stream = link.stream  # pyright: ignore[reportAttributeAccessIssue]
            self.elements = tuple(sizes)
            self.variables = keyed_stream.Variables(tuple(self.draws), stream=stream, scale=self.own.level)
            parts = keyed_stream.spans(self.elements, stream == "philox")
            self.places = [(pointers(self.theta, part), pointers(self.carried, part)) for part in parts]
            return
        self.philox = link.stream == "philox"  # pyright: ignore[reportAttributeAccessIssue]
        if self.philox:  # each leaf has its own draw
            self.splits = max(sizes) >= BLOCK
        else:  # leaves draw one after the other what one draw would give
            whole = len(self.live) == len(here) and all(n % _VECTOR == 0 for n in sizes[:-1]) and sizes[-1] >= _VECTOR
            self.splits = whole and max(sizes) >= BLOCK
        if self.splits:
            self._view(self.velocity)
            self.sizes = [[params[j].numel()] if self.philox else _block_sizes(params[j].numel()) for j in self.live]
            scratch = torch.empty(max(map(max, self.sizes)), dtype=first.dtype)
            self.blocks = [
                list(zip(p.view(-1).split(n), s.view(-1).split(n), [scratch[:k] for k in n]))
                for p, s, n in zip(self.theta, self.carried, self.sizes)
            ]
        else:
            self.sizes, self.numbers = sizes, [plan.numbers[j] for j in here]
            self.flat = torch.empty(sum(sizes), dtype=first.dtype)
            views = self.flat.split(sizes)
            self.fresh = [views[place[j]].view(g[j].shape) for j in self.live]

    def filler(self, noise) -> Callable:
        """``fill(out, sizes, numbers)``: this step's noise for draws of these sizes and numbers."""
        level = self.own.level  # pyright: ignore[reportOptionalMemberAccess]
        if self.philox:

            def fill(out: Tensor, sizes: list[int], numbers: list[int]) -> None:
                torch.ops.bayesopt_chain.philox_normals_(out, noise.key, noise.count, [], sizes, numbers)
                out.mul_(level)

            return fill
        generator = keyed_stream.seeded_generator(int(noise.key), int(noise.count))
        return lambda out, sizes, numbers: out.normal_(0.0, level, generator=generator)

    def _view(self, tensors: list[Tensor]) -> None:
        """Take note of tensors that views of are kept."""
        self.viewed += tensors
        self.views += [t.detach() for t in tensors]


def _block_sizes(n: int) -> list[int]:
    """Blocks of ``BLOCK`` elements; the last takes the rest, so that none is shorter than 16."""
    blocks = max(n - _VECTOR, 0) // BLOCK
    return [BLOCK] * blocks + [n - blocks * BLOCK]


def _like(x: Tensor | None, first: Tensor) -> bool:
    return x is not None and type(x) in _KINDS and x.dtype == first.dtype and x.device == first.device


def recognise(tx) -> FusedSGD | None:
    """The fused form of a chain, or ``None``."""
    if not isinstance(tx, Chain) or not tx.links or any(link.masks for link in tx.links):
        return None
    *links, last = tx.links
    if type(last) is not Scale or last.sign > 0 or not isinstance(last.step_size, (int, float)):
        return None
    found: dict = {"lr": float(last.step_size)}
    for i, link in enumerate(links):
        if isinstance(link, LangevinNoise):
            if not link.is_static or link.temperature == 0 or "noise" in found:
                return None
            found["noise"] = i
        elif type(link) is FlipSign and not found.keys() & {"maximize", "weight_decay", "momentum"}:
            found["maximize"] = True
        elif type(link) is AddDecayedWeights and not found.keys() & {"weight_decay", "momentum"}:
            if link.flip and "maximize" in found:
                return None
            found["weight_decay"] = link.weight_decay
            found["maximize"] = link.flip or found.get("maximize", False)
        elif type(link) is Momentum and "momentum" not in found:
            if link.dampening or link.moment_requires_grad:
                return None
            found.update(momentum=link.momentum, nesterov=link.nesterov, velocity=i)
        else:
            return None
    if "noise" in found and found.get("maximize"):
        return None
    return FusedSGD(tx, **found)


def _own(noise_input: NoiseInput, link: LangevinNoise, g: Tensor, has_velocity: bool) -> _Own | None:
    """The noise as the sweeps and the kernel draw it; ``None`` for any other."""
    process = noise_input.process
    if link.noise != "gaussian" or noise_input.changes or not isinstance(process, Filtered) or process.d != (1.0,):
        return None
    if link.stream not in keyed_stream.IN_SPANS:  # any other is drawn by its link
        return None
    if not (g.device.type == "cpu" or has_kernel(g)):
        return None
    level, *more = process.c
    if has_velocity:
        return None if more else _Own(level, noise_input.deferred_gain)
    return _Own(level, 1.0) if more == [level] else None


def has_kernel(g: Tensor) -> bool:
    """Whether :mod:`bayesopt_chain.fused.langevin_cuda` takes tensors like ``g``."""
    return g.device.type == "cuda" and g.dtype == torch.float32 and philox.has_triton()
