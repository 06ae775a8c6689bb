"""Stages on disk, over ranks and on standard error: each is done once, and a call that was killed goes on from where it was.

A stage that is done is one file with checksums (:mod:`bayesopt_chain.runs.files`), and so is what a stage under way writes now
and then. ``call.safetensors`` says of which call they are. Of several ranks each trains its share of the members; what they
reach is gathered on every rank, the first rank writes and speaks, and where numbers decide what is done next all take the first
rank's.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain.distributed.ranks import answers, chains_of, gather_tensors, require_alike, require_one_axis, world
from bayesopt_chain.runs import files
from bayesopt_chain.runs.run import difference

T = TypeVar("T")
CALL = "call"


class Stages:
    """The stages of one call, in memory without a path.

    Attributes:
        path: the directory; of a process among several without a mesh a folder of its own.
        mesh: the ranks, ``None`` for one process.
        mine: the members of this rank.
        who: the function that was called, for messages.
        name, step, total: of the stage that is under way.

    Args:
        about: of the call, by name, ``members`` among it; another one under the same path, or on another rank, is refused.
        shown: whether lines on standard error, about ten for each stage, say how far it is.

    Raises:
        TypeError, ValueError: on every rank: a mesh that members cannot be shared out over; another call.
    """

    who = "posterior_ensemble"

    def __init__(
        self, path: str | Path | None, about: Mapping[str, Any], device: torch.device, mesh: Any, shown: bool = False
    ) -> None:
        self.path = None if path is None else Path(path)
        self.device, self.mesh, self.mine = device, mesh, range(about["members"])
        if mesh is not None:
            require_one_axis(mesh, self.who)
            self.mine = chains_of(about["members"], mesh, f"{self.who}: members:")
            require_alike(
                self.who
                + ": the ranks were not given the same call: {} differ. Every rank is given all data and the same "
                "arguments",
                {name: repr(x) for name, x in about.items()},
                mesh,
            )
        elif self.path is not None and world().size > 1:
            self.path = self.path / f"rank-{world().rank:05d}-of-{world().size:05d}"
        self.shown, self.started = shown and self.is_first, time.monotonic()
        self.begin("training", 1)
        self._claim(about)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and speaks for all of them."""
        return self.mesh is None or self.mesh.get_local_rank() == 0

    def say(self, what: str) -> None:
        """Write a line."""
        if self.shown:
            print(f"{self.who}: {what}", file=sys.stderr, flush=True)

    def begin(self, name: str, total: int, step: int = 0) -> None:
        """Begin a stage of so many steps, or go on with it."""
        self.name, self.total, self.step = name, total, step

    def advance(self) -> None:
        """Count a step."""
        self.step += 1
        if 10 * self.step // self.total > 10 * (self.step - 1) // self.total:
            self.say(f"{self.name}, step {self.step} of {self.total}, {time.monotonic() - self.started:.0f} s")

    def of_first(self, what: Callable[..., T], *given: Any) -> T:
        """What comes of a function where the first rank alone calls it: tensors, numbers, and containers of them. What it
        raises, all raise."""
        if self.mesh is None:
            return what(*given)
        held = io.BytesIO()
        answers(self.mesh, lambda: torch.save(what(*given), held) if self.is_first else None)
        sent = [held.getvalue()]
        dist.broadcast_object_list(sent, group=self.mesh.get_group(), group_src=0)
        return torch.load(io.BytesIO(sent[0]), map_location=self.device, weights_only=True)

    def _claim(self, about: Mapping[str, Any]) -> None:
        """Say whose directory it is.

        Raises:
            ValueError: another call's.
        """
        mine = dict(about)
        if self.path is not None and (what := difference(self.once(CALL, lambda: mine), mine)):
            raise ValueError(
                f"{self.who}: {self.path} holds another call: {what}; give this one a directory of its own"
            )

    def once(self, name: str, make: Callable[[], Any]) -> dict[str, Any]:
        """What the stage made: tensors, numbers, and containers of them; equal on all ranks."""
        if (found := self.read(name)) is None:
            # as it is read again: products with another order of axes round in another way
            own: Any = optree.tree_map(lambda x: x.contiguous() if isinstance(x, Tensor) else x, make())
            found = self.of_first(lambda: own)
            self.write(name, found)
        return found

    def read(self, name: str) -> dict[str, Any] | None:
        """What was written under a name, ``None`` if nothing was."""
        if self.path is None:
            return None
        file = self.path / f"{name}.safetensors"
        return self.of_first(lambda: stored(file, self.device, self.who) if file.exists() else None)

    def write(self, name: str, what: dict[str, Any]) -> None:
        """Write a stage, or how far it is."""
        if self.path is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            self.of_first(files.write_tree, self.path / f"{name}.safetensors", what)

    def gathered(self, tree: T) -> T:
        """A tree of this rank's members ``[m, *]``, with those of all ranks ``[M, *]``; 0-d ones are the same on all."""
        if self.mesh is None:
            return tree
        leaves, spec = optree.tree_flatten(cast(Any, tree))
        parts = gather_tensors({str(i): x for i, x in enumerate(leaves)}, self.mesh)
        return cast(
            Any,
            spec.unflatten(torch.cat([part[str(i)] for part in parts]) if x.ndim else x for i, x in enumerate(leaves)),
        )


def stored(file: Path, device: torch.device, who: str, instead: str = "delete it, and it is made anew") -> Any:
    """What a file holds; of a damaged one it is said which function read it, and what to do instead."""
    try:
        return files.read_tree(file, device)
    except ValueError as err:
        raise ValueError(f"{who}: {str(err).removeprefix('load: ')}; {instead}") from err
