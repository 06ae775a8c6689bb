"""Links that draw random numbers, which are a function of the key and the step count in the link's state.

A run that is restored from a saved state therefore draws the same numbers as a run that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves
from bayesopt_chain.random import stream as keyed_stream


@dataclass(frozen=True)
class Keyed(Link):
    """A link that draws random numbers. The fields ``key`` and ``step`` of its state are 0-d int64.

    Attributes:
        generator: the source of the key; ``None`` for torch's global generator.
    """

    traits = Traits(on_shards="elementwise", checks_gradients=True)

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
