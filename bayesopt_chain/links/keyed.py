"""Links that draw random numbers: all of them follow from the key and the step count in the state."""

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
    """A link that draws: its state has ``key`` and ``step``, 0-d int64, the stream of :mod:`bayesopt_chain.random.stream`."""

    traits = Traits(on_shards="elementwise", checks_gradients=True)

    generator: torch.Generator | None = field(default=None, kw_only=True, hash=False, compare=False, repr=False)
    stream: keyed_stream.Stream | None = field(default=None, kw_only=True)

    def start(self, leaves: Sequence[Tensor], context: LinkContext) -> tuple[Tensor, Tensor]:
        """A fresh key and a count of zero, on the parameters' device."""
        checks.samplable(leaves, context.paths)
        device = leaves[0].device
        return keyed_stream.new_key(self.generator, device), torch.zeros((), dtype=torch.int64, device=device)

    def normals(
        self, state: Any, g: Leaves, context: LinkContext, draws: int = 1, kind: str = "gaussian"
    ) -> list[list[Tensor]]:
        """``draws`` variables like every gradient, for this step of the state's stream."""
        checks.own_key(state.key, g)
        given, scope = dict(zip(context.present, g)), context.scope
        # a leaf without a gradient takes its share of a positional stream all the same
        like = [
            given[j] if j in given else torch.empty((), dtype=dtype, device=state.key.device).expand(shape)
            for j, dtype, shape in zip(scope.index, scope.dtypes, scope.shapes)
        ]
        variables = keyed_stream.Variables(scope.numbers, (draws,) * len(like), kind, self.stream, runs=scope.pieces)
        xi = variables.draw(state.key, state.step, [x.unsqueeze(0) for x in like])
        return [x for j, x in zip(context.index, xi) if j in given]
