"""Stages on disk and over ranks: each is done once, and a call that was killed goes on from where it was last written.

A stage that is done is one file with checksums (:mod:`bayesopt_chain.runs.files`), and so is what a stage under way writes now
and then. ``call.safetensors`` says of which call they are. Of several ranks each trains its share of the members; what they
reach is gathered on every rank, the first rank writes, and where numbers decide what is done next all take the first rank's.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain.distributed.ranks import (
    answers,
    chains_of,
    gather_tensors,
    require_alike,
    require_one_axis,
    world,
)
from bayesopt_chain.runs import files
from bayesopt_chain.runs.files import File
from bayesopt_chain.runs.run import difference

T = TypeVar("T")
CALL = "call.safetensors"


class Stages:
    """The stages of one call, in memory without a path.

    Attributes:
        path: the directory; of a process among several without a mesh a folder of its own.
        mesh: the ranks, ``None`` for one process.
        mine: the members of this rank.
        who: the function that was called, for messages.

    Args:
        about: of the call, by name; another one under the same path is refused.
        of_ranks: what all ranks have to have in common besides.
    """

    who = "posterior_ensemble"

    def __init__(
        self,
        path: str | Path | None,
        about: Mapping[str, Any],
        device: torch.device,
        mesh: Any,
        of_ranks: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.device, self.mesh, count = device, mesh, about["members"]
        self.mine = range(count)
        if mesh is not None:
            _require_ranks(self.who, mesh, count, {name: repr(x) for name, x in {**about, **(of_ranks or {})}.items()})
            self.mine = chains_of(count, mesh)
        elif self.path is not None and world().size > 1:
            self.path = self.path / f"rank-{world().rank:05d}-of-{world().size:05d}"
        self.of_first(lambda: self._claim(about))

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and speaks for all of them."""
        return self.mesh is None or self.mesh.get_local_rank() == 0

    def of_first(self, what: Callable[[], T]) -> T:
        """What comes of it where the first rank alone does it; what it raises, all raise."""
        if self.mesh is None:
            return what()
        return answers(self.mesh, lambda: what() if self.is_first else None)[0]  # pyright: ignore[reportReturnType]

    def _claim(self, about: Mapping[str, Any]) -> None:
        """Say whose directory it is.

        Raises:
            ValueError: another call's.
        """
        if self.path is None:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        file, mine = self.path / CALL, json.loads(json.dumps(dict(about)))
        if not file.exists():
            files.write(file, {}, mine)
        elif what := difference(read_or_refuse(file, lambda f: File(f).metadata, who=self.who), mine):
            raise ValueError(
                f"{self.who}: {self.path} holds another call: {what}; give this one a directory of its own"
            )

    def once(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the stage made: tensors, numbers, and containers of them; equal on all ranks."""
        if (found := self.read(name)) is None:
            made: Any = self.firsts(make())
            # as it is read again: products with another order of axes round in another way
            made = optree.tree_map(lambda x: x.contiguous() if isinstance(x, Tensor) else x, made)
            self.write(name, made)
            return made
        return found

    def read(self, name: str) -> dict[str, Any] | None:
        """What was written under a name, ``None`` if nothing was."""
        if self.path is None:
            return None
        file, read = self.path / f"{name}.safetensors", dict[str, Any]()
        self.of_first(
            lambda: (
                read.update(read_or_refuse(file, lambda f: files.read_tree(f, self.device), who=self.who))
                if file.exists()
                else None
            )
        )
        return self.firsts(read) or None

    def write(self, name: str, what: dict[str, Any]) -> None:
        """Write a stage, or how far it is."""
        if self.path is not None:
            file = self.path / f"{name}.safetensors"
            self.of_first(lambda: files.write_tree(file, what))

    def gathered(self, tree: T) -> T:
        """A tree of this rank's members ``[m, *]``, with those of all ranks ``[M, *]``; 0-d ones are the same on all."""
        if self.mesh is None:
            return tree
        leaves, spec = optree.tree_flatten(tree)  # pyright: ignore[reportArgumentType]
        parts = gather_tensors({str(i): x for i, x in enumerate(leaves)}, self.mesh)
        first = parts[0]  # of numbers, which all ranks have in common
        every = [torch.cat([part[name] for part in parts]) if x.ndim else x for name, x in first.items()]
        return spec.unflatten(every)  # pyright: ignore

    def own(self, tree: T) -> T:
        """Of a tree of all members ``[M, *]`` those of this rank."""
        rows = slice(self.mine.start, self.mine.stop)
        return optree.tree_map(lambda x: x[rows] if x.ndim else x, tree)  # pyright: ignore[reportArgumentType, reportReturnType]

    def firsts(self, value: T) -> T:
        """The first rank's value, on every rank: tensors, numbers, and containers of them."""
        if self.mesh is None:
            return value
        held = io.BytesIO()
        if self.is_first:
            torch.save(value, held)
        sent = [held.getvalue()]
        dist.broadcast_object_list(sent, group=self.mesh.get_group(), group_src=0)

        def placed(storage: Any, place: str) -> Any:
            return storage if place == "cpu" else storage.to(device=self.device)

        return torch.load(io.BytesIO(sent[0]), map_location=placed, weights_only=True)


def _require_ranks(who: str, mesh: Any, members: int, about: Mapping[str, str]) -> None:
    """Refuse a mesh that members cannot be shared out over, and ranks that were not given the same call.

    Raises:
        TypeError, ValueError: on every rank.
    """
    require_one_axis(mesh, who)
    if members < mesh.size():
        raise ValueError(
            f"{who}: members={members} on {mesh.size()} ranks leave some without one: pass members="
            f"{mesh.size()} or more, or start fewer ranks"
        )
    same = "the ranks were not given the same call: {} differ. Every rank is given all data and the same arguments; each trains"
    require_alike(f"{who}: {same} its share of the members", about, mesh)


def read_or_refuse(
    file: Path,
    read: Callable[[Path], Any],
    instead: str = "delete it, and it is made anew",
    who: str = "posterior_ensemble",
) -> Any:
    """What a file holds.

    Raises:
        ValueError: a damaged file, by name.
    """
    try:
        return read(file)
    except ValueError as err:
        raise ValueError(f"{who}: {str(err).removeprefix('load: ')}; {instead}") from err
