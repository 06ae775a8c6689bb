"""What a run is: what was asked for, and what each of its steps gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

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


@runtime_checkable
class Stateful(Protocol):
    """A callback that has a state, which goes into every checkpoint: a run that goes on hands it back.

    So it sees every step once: after an interruption the steps behind the checkpoint are made again, and it is called again.
    """

    def __call__(self, it: Iteration, /) -> Any:
        """Look at a step."""
        ...

    def state_dict(self) -> Any:
        """Tensors, numbers, strings, and dictionaries, lists and tuples of them."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from what :meth:`state_dict` gave."""
        ...


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
    keep: bool = True

    @property
    def stateful(self) -> list[Stateful]:
        """Those of the callbacks that have a state."""
        return [x for x in self.callbacks if isinstance(x, Stateful)]

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
