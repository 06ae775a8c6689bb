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

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesopt_chain import _random
from bayesopt_chain._chain import Chain, _inject
from bayesopt_chain._noise_process import Conditions, Filtered
from bayesopt_chain.links.langevin_noise import LangevinNoise
from bayesopt_chain.links.learning_rate import Scale
from bayesopt_chain.links.momentum import BLOCK, Momentum
from bayesopt_chain.links.weight_decay import AddDecayedWeights, FlipSign

_DTYPES = (torch.float32, torch.float64)  # in bfloat16 torch 2.13's CPU kernel moves by the gradient, not the velocity
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

    def fits(self, params: list, g: list, state: tuple) -> bool:
        """Whether the kernel can take these tensors: dense and contiguous, of one device and dtype, not traced."""
        velocity = state[self.velocity].trace if self.velocity is not None else ()
        memory = state[self.noise].memory if self.noise is not None else ()
        first = next((x for x in g if x is not None), None)
        return (
            first is not None
            and first.dtype in _DTYPES
            and _random.is_plain(first)
            and all(
                x is None or (x.dtype == p.dtype == first.dtype and x.device == p.device == first.device)
                for x, p in zip(g, params)
            )
            and all(p is None or p.is_contiguous() for p in params)
            and all(v.dtype == p.dtype for v, p in zip(velocity, params) if p is not None)
            and all(t.is_contiguous() and not t.requires_grad for t in (*velocity, *memory))
        )

    def advance(self, params: list, g: list, state: tuple) -> tuple:
        """Move ``params`` and ``state`` in place, given gradients that may be overwritten. Returns the state."""
        live = [j for j, x in enumerate(g) if x is not None]
        g = [None if x is None else x.contiguous() for x in g]
        trace = state[self.velocity].trace if self.velocity is not None else None
        if self.noise is None:
            self._sweep([params[j] for j in live], [g[j] for j in live], trace and [trace[j] for j in live])
            return state
        plan = self.chain._program.plan([None] * len(self.chain.rules), len(g))
        placements = plan.placements[self.noise]
        noise = state[self.noise]
        processes = {placements[j].sources[0].process for j in live}
        level = _mean_of_two(processes, self.chain.rules[self.noise], len(placements[live[0]].sources), g[live[0]])
        if level is None:
            rule = self.chain.rules[self.noise]
            injection, after = rule.draw(placements, noise, g, {}, {}, True)
            g = _inject([injection], injection.at[live[0]], g, True)
            self._sweep([params[j] for j in live], [g[j] for j in live], trace and [trace[j] for j in live])
            return (*state[: self.noise], after, *state[self.noise + 1 :])
        generator = _random.seeded_generator(int(noise.key), int(noise.count))
        if len(live) == len(g) and all(x.numel() % _VECTOR == 0 for x in g[:-1]) and g[-1].numel() >= _VECTOR:
            for j, x in enumerate(g):
                self._noisy_sweep(
                    params[j], x, noise.memory[j][0], None if trace is None else trace[j], level, generator
                )
        else:
            flat = torch.empty(sum(m.numel() for m in noise.memory), dtype=g[live[0]].dtype)
            xi = flat.normal_(0.0, level, generator=generator).split([m.numel() for m in noise.memory])
            mine = [g[j] for j in live]
            fresh = [xi[j].view(g[j].shape) for j in live]
            kept = [noise.memory[j][0] for j in live]
            torch._foreach_add_(mine, kept)
            torch._foreach_add_(mine, fresh)
            torch._foreach_copy_(kept, fresh)
            self._sweep([params[j] for j in live], mine, trace and [trace[j] for j in live])
        noise.count.add_(1)
        return state

    def _noisy_sweep(self, p: Tensor, g: Tensor, kept: Tensor, v: Tensor | None, level: float, generator) -> None:
        """``e = kept + fresh; kept <- fresh``, then the sweep, block after block while they are in cache."""
        p, g, kept = p.detach().view(-1), g.view(-1), kept.view(-1)
        v = p if v is None else v.view(-1)
        blocks = max(p.numel() - _VECTOR, 0) // BLOCK  # the last block takes the rest, so that none is shorter than 16
        sizes = [BLOCK] * blocks + [p.numel() - blocks * BLOCK]
        for part in zip(p.split(sizes), g.split(sizes), kept.split(sizes), v.split(sizes)):
            theta, grad, noise, velocity = part
            grad.add_(noise)
            grad.add_(noise.normal_(0.0, level, generator=generator))
            self._sweep([theta], [grad], [velocity])

    def _sweep(self, p: list[Tensor], g: list[Tensor], v: list[Tensor] | None) -> None:
        torch._fused_sgd_(
            [x.detach() for x in p],
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


def _mean_of_two(processes: set, rule: LangevinNoise, sources: int, g: Tensor) -> float | None:
    """The level ``c`` of noise ``c (xi_t + xi_{t-1})`` drawn by a CPU generator, the form that has its own sweep."""
    if len(processes) != 1 or sources != 1 or g.device.type != "cpu" or rule.stream == "philox":
        return None
    (process,) = processes
    if not isinstance(process, Filtered) or len(process.c) != 2 or process.c[0] != process.c[1] or process.d != (1.0,):
        return None
    (level, _), _ = process.coefficients(Conditions(float(rule.temperature)), None)
    return level
