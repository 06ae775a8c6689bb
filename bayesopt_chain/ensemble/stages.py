"""Stages on disk: each is done once, and after a kill the call goes on in the stage that was under way.

A stage that is done is one file with checksums (:mod:`bayesopt_chain.runs.files`); one that runs has the folder of its run
(:func:`bayesopt_chain.sample`), from which it goes on bit for bit. ``call.safetensors`` says of which call they are.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import batches
from bayesopt_chain.distributed.ranks import together
from bayesopt_chain.ensemble.ranks import firsts, is_first
from bayesopt_chain.runs import files
from bayesopt_chain.runs.describe import difference
from bayesopt_chain.runs.files import File


class Stages:
    """The stages of one call; in memory without a path. Of several ranks the first writes, and all take what it has."""

    def __init__(
        self, path: str | Path | None, about: Mapping[str, Any], device: torch.device, mesh: Any = None
    ) -> None:
        self.path = None if path is None else Path(path)
        self.device, self.mesh = device, mesh
        self._of_first(lambda: self._claim(about))

    def _of_first(self, what: Callable[[], Any]) -> None:
        """Let the first rank do it; what it raises, all raise."""
        if self.mesh is None:
            what()
        else:
            together(self.mesh, lambda: what() if is_first(self.mesh) else None)

    def _claim(self, about: Mapping[str, Any]) -> None:
        """Say whose directory it is.

        Raises:
            ValueError: another call's.
        """
        if self.path is None:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        file, mine = self.path / "call.safetensors", json.loads(json.dumps(dict(about)))
        if file.exists():
            if what := difference(read_or_refuse(file, lambda f: File(f).metadata), mine):
                raise ValueError(
                    f"posterior_ensemble: {self.path} holds another call: {what}; give this one a directory of its own"
                )
        else:
            files.write(file, {}, mine)

    def once(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the stage made: tensors, numbers, and containers of them."""
        if self.path is None:
            return firsts(make(), self.mesh)
        file, path = self.path / f"{name}.safetensors", self.path
        if not firsts(file.exists(), self.mesh):
            made = make()

            def keep() -> None:
                files.write_tree(file, made)
                shutil.rmtree(path / "runs" / name, ignore_errors=True)

            self._of_first(keep)
        read: list[dict[str, Any]] = [{}]
        self._of_first(lambda: read.append(read_or_refuse(file, lambda f: files.read_tree(f, self.device))))
        return firsts(read[-1], self.mesh)

    def folder(self, stage: str, run: str = "run") -> Path | None:
        """Where a run of a stage keeps its draws until the stage is done."""
        return None if self.path is None else self.path / "runs" / stage / run


def read_or_refuse(file: Path, read: Callable[[Path], Any], instead: str = "delete it, and it is made anew") -> Any:
    """What a file holds.

    Raises:
        ValueError: a damaged file, by name.
    """
    try:
        return read(file)
    except ValueError as err:
        raise ValueError(f"posterior_ensemble: {str(err).removeprefix('load: ')}; {instead}") from err


def checksum(tree: Any) -> int:
    """The CRC-32 of all tensors of a tree."""
    crc = 0
    for x in batches.flatten(tree)[0]:
        if isinstance(x, Tensor) and x.numel():
            crc = zlib.crc32(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc
