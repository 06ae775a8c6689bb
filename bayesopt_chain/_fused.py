r"""One pass over parameters, gradients and velocities: what ``make_step(..., inplace=True)`` runs for the common chains.

SGD with everything torch's fused kernel knows, and matched noise in front of it:

    g <- +-g + wd theta + e,    v <- mu v + g,    theta <- theta - lr (v, or g + mu v with Nesterov).

:func:`recognise` reads a chain's rules and says whether it is of this form. It is not, and takes the links one by one
as ``update`` does, if it holds any other link (adaptive, clipping, masked, declared), a dampening, a second momentum or
scale, a learning rate or temperature that is a tensor or a schedule, or noise together with ``maximize``.
:meth:`FusedSGD.fits` declines tensors the kernel cannot take. The arithmetic is that of the links, with a
multiplication and the addition behind it rounded once: equal to one unit in the last place for each operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_

import torch
from torch import Tensor

from bayesopt_chain import _random
from bayesopt_chain._chain import Chain, _inject
from bayesopt_chain._noise_process import Conditions, Filtered
from bayesopt_chain.links.langevin_noise import LangevinNoise
from bayesopt_chain.links.learning_rate import Scale
from bayesopt_chain.links.momentum import Momentum
from bayesopt_chain.links.weight_decay import AddDecayedWeights, FlipSign

_DTYPES = (torch.float32, torch.float64)  # in bfloat16 torch 2.13's CPU kernel moves by the gradient, not the velocity
BLOCK = 2**18  # elements drawn at a time: the draw dwarfs what a smaller block would save
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
    last: list = field(
        default_factory=list, repr=False, compare=False
    )  # the last call's buffers, nothing the noise needs

    def fits(self, params: list, g: list, state: tuple) -> bool:
        """Whether the kernel can take these tensors: dense and contiguous, of one device and dtype, not traced."""
        first = next((x for x in g if x is not None), None)
        return first is not None and _random.is_plain(first) and self._buffers(params, g, state).usable

    def advance(self, params: list, g: list, state: tuple) -> tuple:
        """Move ``params`` and ``state`` in place, given gradients that may be overwritten. Returns the state."""
        buffers = self._buffers(params, g, state)
        g = [x if x is None or x.is_contiguous() else x.contiguous() for x in g]
        live = [g[j] for j in buffers.live]
        if self.noise is None:
            self._sweep(buffers.theta, live, buffers.velocity)
            return state
        noise = state[self.noise]
        if buffers.level is None:
            injection, after = buffers.rule.draw(buffers.placements, noise, g, {}, {}, True)
            live = [x for x in _inject([injection], injection.at[buffers.live[0]], g, True) if x is not None]
            self._sweep(buffers.theta, live, buffers.velocity)
            return (*state[: self.noise], after, *state[self.noise + 1 :])
        generator = _random.seeded_generator(int(noise.key), int(noise.count))
        if buffers.splits:
            velocities = buffers.velocity or buffers.theta
            for part in zip(buffers.theta, live, buffers.kept, velocities):
                self._noisy_sweep(*part, buffers.level, generator)
        else:
            buffers.flat.normal_(0.0, buffers.level, generator=generator)
            torch._foreach_add_(live, buffers.kept)
            torch._foreach_add_(live, buffers.fresh)
            torch._foreach_copy_(buffers.kept, buffers.fresh)
            self._sweep(buffers.theta, live, buffers.velocity)
        noise.count.add_(1)
        return state

    def _buffers(self, params: list, g: list, state: tuple) -> _Buffers:
        """The tensors as the kernel takes them: those of the last call where they are the same objects."""
        trace = state[self.velocity].trace if self.velocity is not None else ()
        memory = state[self.noise].memory if self.noise is not None else ()
        key = (*params, *trace, *memory)
        last = self.last[0] if self.last else None
        if (
            last is None
            or len(key) != len(last.key)
            or not all(map(is_, key, last.key))
            or last.absent != [x is None for x in g]
        ):
            last = _Buffers(self, params, g, trace, memory)
            self.last[:] = [last]
        return last

    def _noisy_sweep(self, p: Tensor, g: Tensor, kept: Tensor, v: Tensor, level: float, generator) -> None:
        """``e = kept + fresh; kept <- fresh``, then the sweep, block after block while they are in cache."""
        p, g, kept, v = p.view(-1), g.view(-1), kept.view(-1), v.view(-1)
        blocks = max(p.numel() - _VECTOR, 0) // BLOCK  # the last block takes the rest, so that none is shorter than 16
        sizes = [BLOCK] * blocks + [p.numel() - blocks * BLOCK]
        for part in zip(p.split(sizes), g.split(sizes), kept.split(sizes), v.split(sizes)):
            theta, grad, noise, velocity = part
            grad.add_(noise)
            grad.add_(noise.normal_(0.0, level, generator=generator))
            self._sweep([theta], [grad], [velocity])

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


class _Buffers:
    """Parameters, velocities and remembered draws of the leaves that have a gradient, as lists of dense tensors."""

    def __init__(self, form: FusedSGD, params: list, g: list, trace: tuple, memory: tuple) -> None:
        self.key = (*params, *trace, *memory)
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
        )
        self.level = None
        if not self.usable:
            return
        self.theta = [params[j].detach() for j in self.live]
        self.velocity = [trace[j] for j in self.live] if trace else []
        if form.noise is None:
            return
        self.rule = form.chain.rules[form.noise]
        plan = form.chain._program.plan([None] * len(form.chain.rules), len(g))
        self.placements = plan.placements[form.noise]
        self.level = _mean_of_two([self.placements[j] for j in self.live], self.rule, first)
        if self.level is None:
            return
        self.kept = [memory[j][0] for j in self.live]
        sizes = [m.numel() for m in memory]
        whole = len(self.live) == len(g) and all(n % _VECTOR == 0 for n in sizes[:-1]) and sizes[-1] >= _VECTOR
        self.splits = whole and max(sizes) >= BLOCK  # leaves draw one after the other what one draw would give
        if not self.splits:
            self.flat = torch.empty(sum(sizes), dtype=first.dtype)
            views = self.flat.split(sizes)
            self.fresh = [views[j].view(g[j].shape) for j in self.live]


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


def _mean_of_two(placements: list, rule: LangevinNoise, g: Tensor) -> float | None:
    """The level ``c`` of noise ``c (xi_t + xi_{t-1})`` drawn by a CPU generator, the form that has its own sweep."""
    if (
        len(set(placements)) != 1
        or len(placements[0].sources) != 1
        or g.device.type != "cpu"
        or rule.stream == "philox"
        or rule.noise != "gaussian"
    ):
        return None
    process = placements[0].sources[0].process
    if not isinstance(process, Filtered) or len(process.c) != 2 or process.c[0] != process.c[1] or process.d != (1.0,):
        return None
    (level, _), _ = process.coefficients(Conditions(float(rule.temperature)), None)
    return level
