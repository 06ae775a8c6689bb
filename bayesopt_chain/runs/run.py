"""What a run is: what was asked for, and what each of its steps gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree

from bayesopt_chain.runs.resumable_batches import ResumableBatches


class Iteration(NamedTuple):
    """One step of a run: its number (from 1), what it returned, and whether it is a draw.

    The tensors are the step's own: one that works in place overwrites them in the next step.
    """

    step: int
    params: Any
    state: Any
    info: Any
    is_draw: bool


class Run(NamedTuple):
    """What :func:`sample` was asked for, with its arguments' names."""

    step: Callable
    params: Any
    state: Any
    batches: ResumableBatches
    steps: int
    burn_in: int
    thinning: int
    chains: int | None
    callbacks: Sequence[Callable[[Iteration], Any]]
    progress: bool
    seed: int | None = None

    def is_draw(self, step: int) -> bool:
        """Whether the parameters after this step are kept."""
        return step > self.burn_in and (step - self.burn_in) % self.thinning == 0

    def some(self, rows: slice, steps: int) -> Run:
        """The same run for some of its chains, up to a step. Callbacks are left out: they expect all chains."""
        both: Any = (self.params, self.state)
        params, state = optree.tree_map(lambda x: x[rows], both)
        step = self.step.some(rows)  # type: ignore[attr-defined]
        return self._replace(
            step=step, params=params, state=state, steps=steps, chains=rows.stop - rows.start, callbacks=()
        )
