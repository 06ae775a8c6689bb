r"""Noise whose constants a sampler states itself, instead of having them matched to its chain:

    e_t = sqrt(T) (sum_k current_k xi_k(t)  +  sum_k later_k xi_k(t-1)),      xi_k standard normal,

``current`` having one entry for each draw of a step. What is added later is remembered as one tensor for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain, Rule
from bayesopt_chain.core.leaves import zeros_like
from bayesopt_chain.links import own_noise


class FilteredNoiseState(NamedTuple):
    """Stream; for each leaf what the next step adds (empty for white noise)."""

    key: Tensor
    count: Tensor
    memory: tuple[Tensor, ...]


@dataclass(frozen=True)
class FilteredNoise(Rule):
    """The rule behind :func:`inject_filtered_noise`."""

    temperature: Any
    current: tuple[float, ...]
    later: tuple[float, ...] = ()
    gain: Callable[[Tensor], Any] | None = None
    generator: torch.Generator | None = field(default=None, hash=False, compare=False)
    response = own_noise.ITS_OWN_NOISE

    def init(self, params):
        key, count = own_noise.start(params, self.generator)
        return FilteredNoiseState(key, count, zeros_like(params) if self.later else ())

    def update(self, g, state, params, ctx):
        temperature = own_noise.now(self.temperature, state.count)
        scale = own_noise.root(temperature)
        if self.gain is not None:
            scale = scale * own_noise.now(self.gain, state.count)
        xi = own_noise.draw(state, list(state.memory or params or g), len(self.current))
        hot = temperature > 0 if torch.is_tensor(temperature) else None
        out, memory = [], list(state.memory)
        for i, x in enumerate(g):
            if x is None:
                out.append(None)
                continue
            e = sum(z * (scale * c) for z, c in zip(xi[i], self.current))
            if self.later:
                e = e + state.memory[i]
                memory[i] = sum(z * (scale * c) for z, c in zip(xi[i], self.later))
            e = e.to(x.dtype)
            out.append(x + e if hot is None else torch.where(hot, x + e, x))
        return (
            own_noise.emit(g, out, ctx.inplace),
            FilteredNoiseState(
                state.key,
                own_noise.tick(state.count, ctx.inplace),
                own_noise.write(state.memory, memory, ctx.inplace),
            ),
        )

    def __str__(self) -> str:
        return f"noise({checks.show(self.temperature)})"


def inject_filtered_noise(
    temperature: Any,
    current: tuple[float, ...],
    later: tuple[float, ...] = (),
    *,
    gain: Callable[[Tensor], Any] | None = None,
    generator: torch.Generator | None = None,
) -> Chain:
    """Add noise with constants given by the caller; at the number ``temperature=0`` the identity.

    Args:
        temperature: number, 0-d tensor or schedule; scales the variance.
        current: factor of each of this step's draws. later: their factors in the next step's noise (default: none).
        gain: a further factor as a function of the count.
        generator: source of the random key.
    """
    checks.temperature(temperature)
    if own_noise.is_zero(temperature):
        return Chain(())
    if isinstance(temperature, int):
        temperature = float(temperature)
    return Chain((FilteredNoise(temperature, tuple(current), tuple(later), gain, generator),))
