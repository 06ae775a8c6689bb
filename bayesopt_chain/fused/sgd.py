r"""One pass over parameters, gradients and velocities: what ``make_step(..., inplace=True)`` runs for the common chains.

SGD with everything torch's fused kernel knows, and matched noise in front of it:

    g <- +-g + wd theta + e,    v <- mu v + g,    theta <- theta - lr (v, or g + mu v with Nesterov).

:func:`recognise` reads a chain's rules and says whether it is of this form. It is not, and takes the links one by one
as ``update`` does, if it holds any other link (adaptive, clipping, masked, declared), a dampening, a second momentum or
scale, a learning rate or temperature that is a tensor or a schedule, or noise together with ``maximize``.
:meth:`FusedSGD.fits` declines tensors the kernels cannot take. The arithmetic is that of the links, with a
multiplication and the addition behind it rounded once: equal to one unit in the last place for each operation.

Matched noise is a fresh draw ``c xi`` and what a tensor ``s`` carries over from the last one, the velocity or, without
momentum, the remembered draw (:mod:`bayesopt_chain.core.matching`):

    v = keep s + g + c xi,    theta <- theta - lr v,    s <- momentum v + echo c xi,

``(keep, momentum, echo) = (mu, 1, 1 / mu)`` or ``(1, 0, 1)``; white noise has ``echo = 0``.
Three ways to run it, all the same stream:

* on a CPU a draw next to torch's fused kernel, block after block of a large leaf while all of it is in cache;
* on a CUDA device :mod:`bayesopt_chain.fused.langevin_cuda`, which draws in the kernel: 20 bytes a float32 parameter;
* any other noise drawn by its link, then torch's fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import tracing
from bayesopt_chain.core.chain import Chain, _inject
from bayesopt_chain.core.filters import Filtered
from bayesopt_chain.links.langevin_noise import LangevinNoise
from bayesopt_chain.links.learning_rate import Scale
from bayesopt_chain.links.momentum import Momentum
from bayesopt_chain.links.weight_decay import AddDecayedWeights, FlipSign
from bayesopt_chain.random import philox
from bayesopt_chain.random import stream as keyed_stream

_DTYPES = (torch.float32, torch.float64)  # in bfloat16 torch 2.13's CPU kernel moves by the gradient, not the velocity
BLOCK = 2**18  # elements drawn at a time: in cache, and few enough calls
_VECTOR = 16  # a CPU generator's normals come in groups of 16: pieces of such sizes draw what one piece would


@dataclass(frozen=True)
class FusedSGD:
    """A chain of that form. ``velocity`` and ``noise`` are the positions of those rules, ``None`` without them."""

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

    def fits(self, params: list, g: list, state: tuple) -> bool:
        """Whether the kernels, which check nothing, can take these tensors: dense and contiguous, of one device and dtype,
        the state's shaped like the parameters, not traced."""
        first = next((x for x in g if x is not None), None)
        if first is None or not tracing.is_plain(first):
            return False
        last = next(iter(self.last), None)
        if last is not None and not all(map(Tensor.is_set_to, last.viewed, last.views)):
            self.last.clear()  # somebody replaced the ``.data`` of a tensor
        return self._buffers(params, g, state).usable

    def advance(self, params: list, g: list, state: tuple) -> tuple:
        """Move ``params`` and ``state`` in place, given gradients that may be overwritten. Returns the state."""
        buffers = self._buffers(params, g, state)
        g = [x if x is None or x.is_contiguous() else x.contiguous() for x in g]
        live = [g[j] for j in buffers.live]
        if self.noise is None:
            self._sweep(buffers.theta, live, buffers.velocity)
            return state
        noise = state[self.noise]
        if buffers.own is None:
            injection, after = buffers.rule.draw(buffers.placements, noise, g, {}, {}, True)
            at = buffers.placements[buffers.live[0]].at
            live = [x for x in _inject([injection], at, g, True) if x is not None]
            self._sweep(buffers.theta, live, buffers.velocity)
            if injection.echo:
                torch._foreach_add_(buffers.velocity, [injection.noise[j] for j in buffers.live], alpha=buffers.echo)
            return (*state[: self.noise], after, *state[self.noise + 1 :])
        if buffers.by_kernel:
            self._kernels(buffers, live, noise)
        else:
            fill, echo = buffers.filler(noise), buffers.own.echo
            if buffers.splits:
                for x, number, sizes, blocks in zip(live, buffers.draws, buffers.sizes, buffers.blocks):
                    for grad, (theta, carried, fresh) in zip(x.view(-1).split(sizes), blocks):
                        fill(fresh, sizes, number)
                        self._with_noise([theta], [grad], [carried], [fresh], echo)
            else:
                fill(buffers.flat, buffers.sizes, 0)
                self._with_noise(buffers.theta, live, buffers.carried, buffers.fresh, echo)
        noise.count.add_(1)
        return state

    def _buffers(self, params: list, g: list, state: tuple) -> _Buffers:
        """The tensors as the kernels take them: those of the last call where they are the same objects."""
        trace = state[self.velocity].trace if self.velocity is not None else ()
        memory = state[self.noise].memory if self.noise is not None else ()
        key = (*params, *trace, *memory)
        last = next(iter(self.last), None)
        if (
            last is None
            or len(key) != len(last.key)
            or not all(map(is_, key, last.key))
            or last.absent != [x is None for x in g]
        ):
            last = _Buffers(self, params, g, trace, memory)
            self.last[:] = [last]
        return last

    def _with_noise(self, p: list[Tensor], g: list[Tensor], s: list[Tensor], fresh: list[Tensor], echo: float) -> None:
        """``v = keep s + g + fresh; theta <- theta - lr v; s <- momentum v + echo fresh`` (see the module's note)."""
        if self.momentum:
            torch._foreach_add_(g, fresh)
            self._sweep(p, g, s)
            if echo:
                torch._foreach_add_(s, fresh, alpha=echo)
        else:
            torch._foreach_add_(g, s)
            torch._foreach_add_(g, fresh)
            torch._foreach_copy_(s, fresh)
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
            **buffers.own._asdict(),
        }
        with torch.cuda.device_of(noise.key):
            for p, x, s, draw in zip(buffers.theta, g, buffers.carried, buffers.draws):
                langevin_step_(p, x, s, noise.key, noise.count, draw=draw, **numbers)

    def _sweep(self, p: list[Tensor], g: list[Tensor], v: list[Tensor]) -> None:
        torch._fused_sgd_(
            p,
            g,
            v if self.momentum else [],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=self.maximize,
            is_first_step=False,
        )


class _Own(NamedTuple):
    """Matched noise that the sweeps draw themselves: its level ``c`` and its echo."""

    level: float
    echo: float


class _Buffers:
    """Parameters, velocities and remembered draws of the leaves that have a gradient, as lists of dense tensors."""

    def __init__(self, form: FusedSGD, params: list, g: list, trace: tuple, memory: tuple) -> None:
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
            and (form.velocity is None or self._fits(params, [t.shape for t in trace]))
            and (form.noise is None or self._fits(params, [t.shape[1:] for t in memory]))
        )
        self.own = None
        if not self.usable:
            return
        self.theta = [params[j].detach() for j in self.live]
        self.viewed, self.views = [params[j] for j in self.live], list(self.theta)
        self.velocity = [trace[j] for j in self.live] if trace else []
        if form.noise is None:
            return
        self.rule = form.chain.rules[form.noise]
        self.placements = form.chain._program.layout(None, len(g)).plan.placements[form.noise]
        self.echo = self.placements[self.live[0]].echo
        self.own = _own([self.placements[j] for j in self.live], self.rule, first, bool(form.momentum))
        if self.own is None:
            return
        self.carried = self.velocity or [memory[j][0] for j in self.live]
        if not self.velocity:
            self._view([memory[j] for j in self.live])
        self.by_kernel = has_kernel(first)
        numbers = keyed_stream.draw_numbers(memory, [p.draws for p in self.placements.values()])
        self.draws = [numbers[j] for j in self.live]
        if self.by_kernel:
            return
        sizes = [0 if p is None else p.numel() for p in params]
        self.philox = self.rule.stream == "philox"
        if self.philox:  # each leaf has its own draw
            self.splits = max(sizes) >= BLOCK
        else:  # leaves draw one after the other what one draw would give
            whole = len(self.live) == len(g) and all(n % _VECTOR == 0 for n in sizes[:-1]) and sizes[-1] >= _VECTOR
            self.splits = whole and max(sizes) >= BLOCK
        if self.splits:
            self._view(self.velocity)
            self.sizes = [[sizes[j]] if self.philox else _block_sizes(sizes[j]) for j in self.live]
            scratch = torch.empty(max(map(max, self.sizes)), dtype=first.dtype)
            self.blocks = [
                list(zip(p.view(-1).split(n), s.view(-1).split(n), [scratch[:k] for k in n]))
                for p, s, n in zip(self.theta, self.carried, self.sizes)
            ]
        elif self.philox and numbers != list(range(len(sizes))):
            self.own = None
        else:
            self.sizes = sizes
            self.flat = torch.empty(sum(sizes), dtype=first.dtype)
            views = self.flat.split(sizes)
            self.fresh = [views[j].view(g[j].shape) for j in self.live]

    def filler(self, noise) -> Callable:
        """``fill(out, sizes, number)``: this step's noise for draws of these sizes, ``number`` being that of the first."""
        level = self.own.level
        if self.philox:

            def fill(out: Tensor, sizes: list[int], number: int) -> None:
                torch.ops.bayesopt_chain.philox_normals_(out, noise.key, noise.count, sizes, number)
                out.mul_(level)

            return fill
        generator = keyed_stream.seeded_generator(int(noise.key), int(noise.count))
        return lambda out, sizes, number: out.normal_(0.0, level, generator=generator)

    def _view(self, tensors: list[Tensor]) -> None:
        """Take note of tensors that views of are kept."""
        self.viewed += tensors
        self.views += [t.detach() for t in tensors]

    def _fits(self, params: list, shapes: list) -> bool:
        """Whether a state has these shapes for these parameters."""
        return len(shapes) == len(params) and all(shapes[j] == params[j].shape for j in self.live)


def _block_sizes(n: int) -> list[int]:
    """Blocks of ``BLOCK`` elements; the last takes the rest, so that none is shorter than 16."""
    blocks = max(n - _VECTOR, 0) // BLOCK
    return [BLOCK] * blocks + [n - blocks * BLOCK]


def _like(x: Tensor | None, first: Tensor) -> bool:
    return x is not None and x.dtype == first.dtype and x.device == first.device


def recognise(tx) -> FusedSGD | None:
    """The fused form of a chain, or ``None``."""
    if not isinstance(tx, Chain) or not tx.rules:
        return None
    *rules, last = tx.rules
    if type(last) is not Scale or last.sign > 0 or not isinstance(last.step_size, (int, float)):
        return None
    found: dict = {"lr": float(last.step_size)}
    for i, rule in enumerate(rules):
        if (
            type(rule) is LangevinNoise
            and rule.is_static
            and not rule.is_off
            and rule.lr is None
            and "noise" not in found
        ):
            found["noise"] = i
        elif type(rule) is FlipSign and not found.keys() & {"maximize", "weight_decay", "momentum"}:
            found["maximize"] = True
        elif type(rule) is AddDecayedWeights and not found.keys() & {"weight_decay", "momentum"}:
            if rule.flip and "maximize" in found:
                return None
            found["weight_decay"] = rule.weight_decay
            found["maximize"] = rule.flip or found.get("maximize", False)
        elif (
            type(rule) is Momentum and not rule.dampening and not rule.moment_requires_grad and "momentum" not in found
        ):
            found.update(momentum=rule.momentum, nesterov=rule.nesterov, velocity=i)
        else:
            return None
    if "noise" in found and found.get("maximize"):
        return None
    return FusedSGD(tx, **found)


def _own(placements: list, rule: LangevinNoise, g: Tensor, has_velocity: bool) -> _Own | None:
    """The noise as the sweeps and the kernel draw it; ``None`` for any other."""
    if len(set(placements)) != 1 or len(placements[0].sources) != 1 or rule.noise != "gaussian":
        return None
    process, echo = placements[0].sources[0].process, placements[0].echo
    if not (g.device.type == "cpu" or has_kernel(g)) or not isinstance(process, Filtered) or process.d != (1.0,):
        return None
    ((level, *more),) = placements[0].constants
    if has_velocity:
        return None if more else _Own(level, echo)
    return _Own(level, 1.0) if more == [level] else None


def has_kernel(g: Tensor) -> bool:
    """Whether :mod:`bayesopt_chain.fused.langevin_cuda` takes tensors like ``g``."""
    return g.device.type == "cuda" and g.dtype == torch.float32 and philox.has_triton()
