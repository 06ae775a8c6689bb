r"""Noise whose constants a sampler states itself, instead of having them matched to its chain:

    e_t = sqrt(T) gain(t) (sum_k current_k xi_k(t)  +  sum_k later_k xi_k(t-1)),      xi_k standard normal,

``current`` having one entry for each draw of a step. What is added later is remembered as one tensor for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import LinkContext
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.links.keyed import Keyed
from bayesopt_chain.links.leaves import zeros
from bayesopt_chain.matching.response import Response, SelfContainedSampler
from bayesopt_chain.random.stream import draw_numbers
from bayesopt_chain.schedules import ScalarOrSchedule, is_zero, now, root


class FilteredNoiseState(NamedTuple):
    """Stream; for each leaf what the next step adds (empty for white noise)."""

    key: Tensor
    step: Tensor
    memory: tuple[Tensor, ...]
    begins_anew = True  # at a warm start: the noise is matched to its own chain


@dataclass(frozen=True)
class FilteredNoise(Keyed):
    """The link behind :func:`inject_filtered_noise`."""

    temperature: ScalarOrSchedule
    current: tuple[float, ...]
    later: tuple[float, ...] = ()
    gain: Callable[[Tensor], Any] | None = None
    beside: tuple[int, int] = (0, 0)
    noise: str = "gaussian"
    batch_order: str | None = None  # of the batches that the sampler is meant for; ``bc.sample`` refuses others

    @property
    def response(self) -> Response:
        return SelfContainedSampler(*self.beside)

    def init(self, leaves: Leaves, context: LinkContext) -> FilteredNoiseState:
        # refuses more draws than a stream has numbers for
        draw_numbers(context.numbers, (len(self.current),) * len(context.index))
        state = FilteredNoiseState(*self.start(leaves, context), zeros(leaves) if self.later else ())
        self.scale(state.step)
        return state

    def scale(self, count: Tensor) -> Any:
        """The factor of all constants in a step; refuses a temperature out of range."""
        temperature = now(self.temperature, count)
        checks.at_this_step("temperature", temperature)
        return root(temperature) * (1.0 if self.gain is None else now(self.gain, count))

    def update(
        self, g: Leaves, state: FilteredNoiseState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, FilteredNoiseState]:
        temperature, scale = now(self.temperature, state.step), self.scale(state.step)
        xi = self.normals(state, g, context, len(self.current), self.noise)
        e: list[Any] = [sum((z * (scale * c) for z, c in zip(x, self.current)), start=0) for x in xi]
        memory = state.memory
        if self.later:
            e = [y + kept for y, kept in zip(e, memory)]
            later: list[Any] = [sum((z * (scale * c) for z, c in zip(x, self.later)), start=0) for x in xi]
            memory = tuple(op.put(memory, later))
        e = [y.to(x.dtype) for x, y in zip(g, e)]
        if isinstance(temperature, Tensor):
            g = op.put(g, [torch.where(temperature > 0, x + y, x) for x, y in zip(g, e)])
        else:
            g = op.add(g, e)
        return g, FilteredNoiseState(state.key, op.next_count(state.step), memory)

    def __str__(self) -> str:
        return f"noise({checks.show(self.temperature)})"


def inject_filtered_noise(
    temperature: ScalarOrSchedule,
    current: tuple[float, ...],
    later: tuple[float, ...] = (),
    *,
    beside: tuple[int, int],
    gain: Callable[[Tensor], Any] | None = None,
    generator: torch.Generator | None = None,
    batch_order: str | None = None,
) -> Chain:
    """Add noise with constants given by the caller; at the number ``temperature=0`` the identity.

    Args:
        temperature: number, 0-d tensor or schedule; scales the variance.
        current: factor of each of this step's draws. later: their factors in the next step's noise (default: none).
        beside: (before, behind), how many neighbours the constants are right for; a chain in which others act is refused.
        gain: a further factor as a function of the count.
        generator: source of the random key.
        batch_order: of the batches that the sampler is meant for.

    Returns:
        A link.
    """
    checks.temperature(temperature)
    if is_zero(temperature):
        return Chain(())
    if isinstance(temperature, int):
        temperature = float(temperature)
    link = FilteredNoise(
        temperature, tuple(current), tuple(later), gain, beside, batch_order=batch_order, generator=generator
    )
    return Chain((link,))
