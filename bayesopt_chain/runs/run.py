"""What a run is: what was asked for, and what each of its steps gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """What :func:`sample` was asked for."""

    step: Callable
    params: Any
    state: Any
    feed: ResumableBatches
    steps: int
    burn_in: int
    thinning: int
    chains: int | None
    callbacks: Sequence[Callable[[Iteration], Any]]
    progress: bool

    def some(self, rows: slice, steps: int) -> Run:
        """The same run for some of its chains, up to a step. Callbacks are left out: they expect all chains."""
        both: Any = (self.params, self.state)
        params, state = optree.tree_map(lambda x: x[rows], both)
        step = self.step.some(rows)  # type: ignore[attr-defined]
        return self._replace(
            step=step, params=params, state=state, steps=steps, chains=rows.stop - rows.start, callbacks=()
        )


def iterated(
    step, params, state, feed: ResumableBatches, done: int, steps: int, burn_in: int, thinning: int
) -> Iterator[Iteration]:
    for n in range(done + 1, steps + 1):
        params, state, info = step(params, state, feed.next())
        yield Iteration(n, params, state, info, n > burn_in and (n - burn_in) % thinning == 0)
