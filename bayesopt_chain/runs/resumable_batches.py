"""Batches without end, with a place in them that can be saved, returned to, and handed to another number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.distributed.ranks import gather_objects, hash_of_bits


class ResumableBatches:
    """Batches without end, with a place in them that can be saved and returned to.

    Ranks that share a chain have each the batches of its own part of the data; ``whole`` is what they have together.
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.position = 0
        self.is_one = batches is None or torch.is_tensor(batches) or isinstance(batches, (tuple, Mapping))
        self.is_one = self.is_one or not hasattr(batches, "__iter__")
        if not self.is_one and isinstance(batches, Iterator):
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
        """Learn what the batches of all ranks of a mesh are together; two messages.

        Raises:
            ValueError: ranks that go through parts of the data in one order, or of which some share batches and some do not.
        """
        parts = gather_objects(self._part(), mesh)
        _require_orders_of_their_own(gather_objects(self._order(), mesh), parts)
        self.whole = _together(parts)
        self.start = self.state()

    def _part(self) -> dict[str, Any]:
        """What this rank's batches are of."""
        if not isinstance(self.batches, Epochs):
            return {}
        about = {"data": self.batches.size, "batch": self.batches.batch_size, "order": self.batches.order}
        return {**about, "shared": self.batches.ranks > 1}

    def _order(self) -> Any:
        """Seed of this rank's batches, and a hash of the data; none where they are not ``bc.epochs`` of tensors."""
        if not isinstance(self.batches, Epochs) or self.batches.leaves is None or self.batches.order == "fixed":
            return None
        return self.batches.seed, [int(hash_of_bits(x)) for x in self.batches.leaves]

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
        if not self.is_stateful:
            self.seek(state)
        elif isinstance(self.batches, Epochs):
            place = {name: state["loader"][name] for name in ("epoch", "offset")}
            self.seek({**state, "loader": {**self.batches.state_dict(), **place}})
        else:
            raise ValueError(
                f"sample: {type(self.batches).__name__} on several ranks cannot be sent to the place where the first rank "
                "resumes; bc.epochs(...) can"
            )


def _require_orders_of_their_own(orders: list[Any], parts: list[dict[str, Any]]) -> None:
    """Refuse parts of the data that all ranks go through by the same permutation.

    Raises:
        ValueError: naming the seed; or where some ranks have ``mesh=`` and some do not.
    """
    shared = {part.get("shared", False) for part in parts}
    if len(shared) > 1:
        raise ValueError("sample: some ranks gave bc.epochs a mesh=, and some did not: give it on all of them")
    seen: dict[Any, list[int]] = {}
    for seed, data in [order for order in orders if order is not None and shared == {False}]:
        if seen.setdefault(seed, data) != data:
            raise ValueError(
                f"sample: ranks go through different parts of the data with one seed, {seed}, and so in one order; of sorted "
                "data their batches are alike, and the gradients' noise is up to as many times too large as there are ranks. "
                "Give bc.epochs the whole data on every rank, the batch size of all ranks together, and mesh="
            )


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """How many ranks share the data, and of how many data they have batches of which size."""
    whole: dict[str, Any] = {"ranks": len(parts)}
    if all(parts) and parts[0]["shared"]:  # each of them knows the whole data
        whole |= {name: parts[0][name] for name in ("data", "batch", "order")}
    elif all(parts):
        orders = sorted({part["order"] for part in parts})
        whole |= {name: sum(part[name] for part in parts) for name in ("data", "batch")} | {"order": "/".join(orders)}
    return whole
