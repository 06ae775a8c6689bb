"""Stages on disk: each is done once, and after a kill the call goes on in the stage that was under way.

A stage that is done is one file, written under another name and moved; one that runs has the folder of its run
(:func:`bayesopt_chain.sample`), from which it goes on bit for bit. ``call.json`` says of which call they are.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import batches
from bayesopt_chain.checks import short
from bayesopt_chain.distributed.ranks import together
from bayesopt_chain.ensemble.ranks import elsewhere, firsts, is_first
from bayesopt_chain.runs.describe import difference


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
        file, mine = self.path / "call.json", json.loads(json.dumps(dict(about)))
        if file.exists():
            if what := difference(read_or_refuse(file, lambda f: json.loads(f.read_text())), mine):
                raise ValueError(
                    f"posterior_ensemble: {self.path} holds another call: {what}; give this one a directory of its own"
                )
        else:
            _write(file, lambda name: Path(name).write_text(json.dumps(mine, indent=1)))

    def once(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the stage made: tensors, numbers, and containers of them."""
        if self.path is None:
            return firsts(make(), self.mesh)
        file, path = self.path / f"{name}.pt", self.path
        if not firsts(file.exists(), self.mesh):
            made = make()

            def keep() -> None:
                _write(file, lambda temporary: torch.save(made, temporary))
                shutil.rmtree(path / "runs" / name, ignore_errors=True)

            self._of_first(keep)
        read: list[dict[str, Any]] = [{}]
        self._of_first(lambda: read.append(read_or_refuse(file, self._read)))
        return firsts(read[-1], self.mesh)

    def _read(self, file: Path) -> Any:
        return loaded(file, self.device)

    def folder(self, stage: str, run: str = "run") -> Path | None:
        """Where a run of a stage keeps its draws until the stage is done."""
        return None if self.path is None else self.path / "runs" / stage / run


def loaded(file: Path, device: torch.device) -> Any:
    """The tensors, numbers and containers that a file holds; what was not on the CPU comes to a device."""
    return torch.load(file, weights_only=True, map_location=elsewhere(device))


def read_or_refuse(file: Path, read: Callable[[Path], Any], instead: str = "delete it, and it is made anew") -> Any:
    """What a file holds.

    Raises:
        ValueError: a damaged file, by name.
    """
    try:
        return read(file)
    except OSError:
        raise
    except Exception as err:
        raise ValueError(f"posterior_ensemble: {file} is damaged ({short(str(err))}): {instead}") from err


def checksum(tree: Any) -> int:
    """The CRC-32 of all tensors of a tree."""
    crc = 0
    for x in batches.flatten(tree)[0]:
        if isinstance(x, Tensor) and x.numel():
            crc = zlib.crc32(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc


def _write(file: Path, write: Callable[[Path], Any]) -> None:
    temporary = file.with_suffix(f".{os.getpid()}")
    write(temporary)
    os.replace(temporary, file)
