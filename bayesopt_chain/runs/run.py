"""What a run is of: what was asked for, what each of its steps gives, and its batches, with a place that can be saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import optree
import torch

from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.distributed.ranks import gather_objects, hash_of_bits


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

    def state_dict(self) -> Any:
        """Tensors, numbers, strings, and dictionaries, lists and tuples of them."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from what :meth:`state_dict` gave."""


class Run(NamedTuple):
    """What :func:`sample` was asked for, with its arguments' names."""

    step: Callable
    params: Any
    state: Any
    batches: ResumableBatches
    steps: int
    burn_in: int
    thinning: int
    chains: int | None = None
    callbacks: Sequence[Callable[[Iteration], Any]] = ()
    progress: bool = False
    seed: int | None = None
    keep: bool = True

    @property
    def stateful(self) -> list[Stateful]:
        """Those of the callbacks that have a state."""
        return [x for x in self.callbacks if isinstance(x, Stateful)]

    def is_draw(self, step: int) -> bool:
        """Whether the parameters after this step are kept."""
        return step > self.burn_in and (step - self.burn_in) % self.thinning == 0

    def made(self, n: int, params: Any, state: Any) -> Iteration:
        """Make step number ``n``."""
        params, state, info = self.step(params, state, self.batches.next())
        return Iteration(n, params, state, info, self.is_draw(n))

    def some(self, rows: slice, steps: int) -> Run:
        """The same run for some of its chains, up to a step. Callbacks are left out: they expect all chains."""
        both: Any = (self.params, self.state)
        params, state = optree.tree_map(lambda x: x[rows], both)
        about = {"step": self.step.some(rows), "steps": steps, "chains": rows.stop - rows.start}  # type: ignore[attr-defined]
        return self._replace(params=params, state=state, callbacks=(), **about)


class ResumableBatches:
    """Batches without end, with a place in them that can be saved, returned to, and handed to another number of ranks.

    Ranks that share a chain have each the batches of its own part of the data; ``whole`` is what they have together.
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.position = 0
        self.is_one = isinstance(batches, (torch.Tensor, tuple, Mapping)) or not hasattr(batches, "__iter__")
        if isinstance(batches, Iterator) and not self.is_one:
            raise ValueError(
                f"batches: {type(batches).__name__} can be gone through only once; pass bc.epochs(...), a list or a DataLoader"
            )
        if isinstance(batches, list) and not batches:
            raise ValueError("batches: the list is empty")
        self.is_stateful = hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict")
        self.iterator: Iterator[Any] | None = None
        self.whole = _together([self._part()])
        self.start = self.state()

    def share(self, mesh: Any) -> None:
        """Learn what the batches of all ranks of a mesh are together, by one message.

        Raises:
            ValueError: ranks that go through parts of the data in one order, or of which some share batches and some do not.
        """
        self.whole = _together(gather_objects(self._part(hashed=True), mesh))
        self.start = self.state()

    def _part(self, hashed: bool = False) -> dict[str, Any]:
        """What this rank's batches are of; with a hash of the data where these are shuffled tensors, and it is asked for."""
        mine = self.batches
        if not isinstance(mine, Epochs):
            return {}
        hashed = hashed and mine.leaves is not None and mine.order != "fixed"
        bits = [int(hash_of_bits(x)) for x in mine.leaves or ()] if hashed else None
        about = {"data": mine.size, "batch": mine.batch_size, "order": mine.order}
        return {**about, "shared": mine.ranks > 1, "seed": mine.seed, "bits": bits}

    def next(self) -> Any:
        """The next batch."""
        self.position += 1
        if self.is_one:
            return self.batches
        if isinstance(self.batches, list):
            return self.batches[(self.position - 1) % len(self.batches)]
        for _ in range(2):
            if self.iterator is None:
                self.iterator = iter(self.batches)
            try:
                return next(self.iterator)
            except StopIteration:
                self.iterator = None
        raise ValueError(f"batches: {type(self.batches).__name__} gave no batch in a whole pass")

    def state(self) -> dict[str, Any]:
        """The place, as numbers and strings."""
        loader = self.batches.state_dict() if self.is_stateful else None
        return {"position": self.position, "loader": loader, "whole": self.whole}

    def rewind(self) -> None:
        """Go back to the beginning."""
        if self.position:
            self.seek(self.start)

    def seek(self, state: Mapping[str, Any]) -> None:
        """Go to a place that :meth:`state` gave, on this number of ranks or on another.

        Raises:
            ValueError: a place in other batches.
        """
        position, self.iterator = state["position"], None
        if self.is_stateful:
            self._seek_loader(state)
        elif not self.is_one and not isinstance(self.batches, list):
            if position:
                warnings.warn(
                    f"sample: {type(self.batches).__name__} cannot say where it stands: {position} batches are read and "
                    "skipped. If it shuffles, the run goes on with other batches than without the interruption; "
                    "bc.epochs(...) resumes exactly",
                    stacklevel=4,
                )
            for _ in range(position):
                self.next()
        self.position = position

    def _seek_loader(self, state: Mapping[str, Any]) -> None:
        theirs, loader = state["whole"], state["loader"]
        if theirs["ranks"] == self.whole["ranks"]:
            self.batches.load_state_dict(loader)
            return
        if not isinstance(self.batches, Epochs):
            raise ValueError(
                f"sample: {type(self.batches).__name__} stood somewhere in the batches of one of {theirs['ranks']} ranks, and "
                f"{self.whole['ranks']} share the data now: give each rank bc.epochs(...) of its part, which can be shared "
                "out anew"
            )
        if differing := [name for name in self.whole if name != "ranks" and theirs.get(name) != self.whole[name]]:
            told = ", ".join(f"{name}={theirs.get(name)!r} (here {self.whole[name]!r})" for name in differing)
            raise ValueError(
                f"sample: the batches of {theirs['ranks']} ranks were together of {told}: share the same data out over "
                f"{self.whole['ranks']}, with batches that are as large together"
            )
        self.batches.seek(loader["epoch"] * (loader["size"] // loader["batch_size"]) + loader["offset"])

    def follow(self, state: Mapping[str, Any]) -> None:
        """Go to the place at which another rank stands, in batches of this rank's own.

        Raises:
            ValueError: batches that can be sent to no place but their own.
        """
        if self.is_stateful and not isinstance(self.batches, Epochs):
            raise ValueError(
                f"sample: {type(self.batches).__name__} on several ranks cannot be sent to the place where the first rank "
                "resumes; bc.epochs(...) can"
            )
        if self.is_stateful:
            place = {name: state["loader"][name] for name in ("epoch", "offset")}
            state = {**state, "loader": {**self.batches.state_dict(), **place}}
        self.seek(state)


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """How many ranks share the data, and of how many data they have batches of which size.

    Raises:
        ValueError: ranks that go through parts of the data by one permutation; or of which some have ``mesh=`` and some not.
    """
    shared = {part.get("shared", False) for part in parts}
    if len(shared) > 1:
        raise ValueError("sample: some ranks gave bc.epochs a mesh=, and some did not: give it on all of them")
    seen: dict[Any, Any] = {}
    for part in parts if shared == {False} else ():
        if part.get("bits") is not None and seen.setdefault(part["seed"], part["bits"]) != part["bits"]:
            raise ValueError(
                f"sample: ranks go through different parts of the data with one seed, {part['seed']}, and so in one order; of "
                "sorted data their batches are alike, and the gradients' noise is up to as many times too large as there are "
                "ranks. Give bc.epochs the whole data on every rank, the batch size of all ranks together, and mesh="
            )
    if not all(parts):
        return {"ranks": len(parts)}
    own = parts[:1] if shared == {True} else parts  # with mesh= each of them knows the whole data
    order = "/".join(sorted({part["order"] for part in parts}))
    sizes = {name: sum(part[name] for part in own) for name in ("data", "batch")}
    return {"ranks": len(parts), **sizes, "order": order}
