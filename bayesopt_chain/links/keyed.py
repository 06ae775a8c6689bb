r"""Links that draw random numbers, which are a function of the key and the step count in the link's state.

A run that is restored from a saved state therefore draws the same numbers as a run that was not interrupted.

Filtered noise has constants that a sampler gives itself, while :mod:`bayesopt_chain.links.langevin_noise` matches them to its
chain:

    e_t = sqrt(T) gain(t) sum_k current_k xi_k(t)  +  sqrt(T') gain(t-1) sum_k later_k xi_k(t-1)

Here ``T`` and ``T'`` are the temperatures of step ``t`` and of the step before, and ``xi_k(t)`` are independent draws of
variance 1. A step takes as many draws as ``current`` has entries. The second sum is computed at step ``t - 1`` and remembered
as one tensor for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.core.state import zeros
from bayesopt_chain.matching.response import Response, SelfContainedSampler
from bayesopt_chain.random import stream as keyed_stream
from bayesopt_chain.schedules import ScalarOrSchedule, is_zero, now, root


@dataclass(frozen=True)
class Keyed(Link):
    """A link that draws random numbers. The fields ``key`` and ``step`` of its state are 0-d int64.

    Attributes:
        generator: the source of the key; ``None`` for torch's global generator.
    """

    traits = Traits(response=SelfContainedSampler(), on_shards="elementwise", checks_gradients=True)

    generator: torch.Generator | None = field(default=None, kw_only=True, hash=False, compare=False, repr=False)

    def start(self, leaves: Sequence[Tensor], context: LinkContext) -> tuple[Tensor, Tensor]:
        """Make the key and the step count of a new state.

        Args:
            leaves: the parameters; at least one.
            context: the context of ``init``.

        Returns:
            A new key and a step count of zero, 0-d int64 on the device of the first parameter.

        Raises:
            TypeError, ValueError: parameters that cannot be sampled, such as integers or one tensor twice.
        """
        checks.samplable(leaves, context.paths)
        device = leaves[0].device
        return keyed_stream.new_key(self.generator, device), torch.zeros((), dtype=torch.int64, device=device)

    def normals(
        self, state: Any, g: Leaves, context: LinkContext, draws: int = 1, kind: str = "gaussian"
    ) -> list[list[Tensor]]:
        """Draw the random variables of this step.

        Args:
            state: the state of the link.
            g: the gradients of the leaves that have one.
            context: the context of this update.
            draws: how many variables of the shape of each gradient.
            kind: their distribution, ``"gaussian"`` or ``"uniform"``, on [0, 1).

        Returns:
            For each gradient a list of ``draws`` independent tensors of its shape.

        Raises:
            ValueError: the gradients have an axis of ``vmap`` that the key lacks.
        """
        checks.own_key(state.key, g)
        given, scope = dict(zip(context.present, g)), context.scope
        every = tuple([draws * (j in given) for j in scope.index])  # a leaf without a gradient draws nothing
        key: Tensor = state.key
        like = [given.get(j, key).unsqueeze(0) for j in scope.index]
        xi = keyed_stream.Variables(scope.numbers, every, kind, runs=scope.pieces).draw(key, state.step, like)
        return [x for j, x in zip(context.scope.index, xi) if j in given]


class FilteredNoiseState(NamedTuple):
    """The state of the noise.

    Attributes:
        key: the key of the random stream, 0-d int64.
        step: how many updates were made, 0-d int64.
        memory: for each leaf the part of the next step's noise that is already drawn; empty for white noise.
        begins_anew: whether ``init(params, like=...)`` makes this state new; true, since the noise belongs to its own chain.
    """

    key: Tensor
    step: Tensor
    memory: tuple[Tensor, ...]
    begins_anew = True


@dataclass(frozen=True)
class FilteredNoise(Keyed):
    """The link that :func:`inject_filtered_noise` returns, with the same arguments."""

    temperature: ScalarOrSchedule
    current: tuple[float, ...]
    later: tuple[float, ...] = ()
    gain: Callable[[Tensor], Any] | None = None
    beside: tuple[int, int] = (0, 0)
    batch_order: str | None = None

    @property
    def response(self) -> Response:
        return SelfContainedSampler(*self.beside)

    def init(self, leaves: Leaves, context: LinkContext) -> FilteredNoiseState:
        # Called for its refusal only: a stream has numbers for so many draws of a leaf and no more.
        keyed_stream.draw_numbers(context.scope.numbers, (len(self.current),) * len(context.scope.index))
        state = FilteredNoiseState(*self.start(leaves, context), zeros(leaves) if self.later else ())
        self.scale(state.step)
        return state

    def scale(self, count: Tensor) -> Any:
        """The common factor ``sqrt(T) gain`` of all constants at a step.

        Args:
            count: how many updates were made, 0-d int64.

        Returns:
            A number or a 0-d tensor.

        Raises:
            ValueError: the temperature at this step is negative or not finite.
        """
        temperature = checks.at_this_step("temperature", now(self.temperature, count))
        return root(temperature) * (1.0 if self.gain is None else now(self.gain, count))

    def update(
        self, g: Leaves, state: FilteredNoiseState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, FilteredNoiseState]:
        temperature, scale = now(self.temperature, state.step), self.scale(state.step)
        xi = self.normals(state, g, context, len(self.current))
        e: list[Any] = [sum((z * (scale * c) for z, c in zip(x, self.current)), start=0) for x in xi]
        memory = state.memory
        if self.later:
            e = [y + kept for y, kept in zip(e, memory)]
            later: list[Any] = [sum((z * (scale * c) for z, c in zip(x, self.later)), start=0) for x in xi]
            memory = tuple(op.put(memory, later))
        e = [y.to(x.dtype) for x, y in zip(g, e)]
        if isinstance(temperature, Tensor):
            # At the temperature 0 the gradient keeps its bits: adding 0 would turn -0 into 0, and remembered noise is left out.
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
    """Add noise whose constants the caller gives.

    Args:
        temperature: the factor of the variance, a number, a 0-d tensor or a schedule ``count -> temperature``. The number 0
            makes this the empty chain.
        current: the factor of each draw of a step in the noise of that step.
        later: the factor of each draw of a step in the noise of the next step (default: none).
        beside: ``(before, behind)``, how many links directly in front of this one and directly behind it the constants are
            meant for. A chain with other links is refused.
        gain: a further factor as a function of the number of updates so far (default: 1).
        generator: the source of the random key (default: torch's global generator).
        batch_order: the order of the batches that the sampler is meant for; ``bc.sample`` refuses others (default: any).

    Returns:
        A link; its state has one tensor of the shape of each parameter if ``later`` is given, and none otherwise.

    Raises:
        ValueError: a temperature that is negative or not finite.

    Example:
        >>> inject_filtered_noise(0.5, (1.0,), beside=(0, 1))
        noise(0.5)
    """
    checks.TEMPERATURE("temperature", temperature)
    if is_zero(temperature):
        return Chain(())
    if isinstance(temperature, int):
        temperature = float(temperature)
    link = FilteredNoise(
        temperature, tuple(current), tuple(later), gain, beside, batch_order=batch_order, generator=generator
    )
    return Chain((link,))
