"""Opening the draws of directories: whose chains they hold, and that no two of them are one chain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch

from bayesopt_chain.distributed.shards import local
from bayesopt_chain.runs import checkpoint
from bayesopt_chain.runs.files import File
from bayesopt_chain.runs.folder import HEAD, LEAF, Tile, drawn, folders_of, head_of, tiles_of
from bayesopt_chain.runs.pieces import Piece, side_by_side


class Opened(NamedTuple):
    """What :class:`Draws` is made of."""

    pieces: list[Piece]
    spec: Any
    names: list[str]
    chains: int | None
    complete: bool
    why: str
    identity: dict[str, Any]


class Chains(NamedTuple):
    """A folder that is read: some chains of a run."""

    folder: Path
    head: dict[str, Any]
    tiles: list[Tile]

    @property
    def step(self) -> int:
        """The last step of which a draw is there."""
        return self.tiles[-1].step if self.tiles else 0

    @property
    def size(self) -> int:
        """The number of draws, which damaged files may interrupt."""
        return sum(t.draws for t in self.tiles)

    @property
    def why(self) -> str:
        """Why there are not all draws."""
        if self.step > self.head["step"]:
            return self.tiles[-1].file.metadata["why"] or f"it was cut off after step {self.step}"
        return self.head["why"] or ("" if self.head["complete"] else f"it was cut off after step {self.head['step']}")


def opened(paths: Sequence[Path], like: Any, skip: bool) -> Opened:
    """The draws of all folders of these runs, side by side.

    Args:
        paths: of runs.
        like: the parameters, for their structure, their device and the layout of DTensors; ``None``: nested dictionaries, on
            the CPU.
        skip: whether damaged files are left out, with a warning; all files are read then.

    Raises:
        FileNotFoundError: no run, or a file of it is missing.
        ValueError: a damaged file, runs that do not belong together, or chains that drew the same noise.
    """
    if not paths:
        raise FileNotFoundError("Draws.open: no directory is named, or none fits the pattern")
    every = [one for path in paths for one in _run(path, skip)]
    first = every[0].head["identity"]
    for one in every:
        differing = [k for k in ("burn_in", "thinning", "tree") if one.head["identity"][k] != first[k]]
        if differing:
            raise ValueError(f"Draws.open: {one.folder} and {every[0].folder} hold runs with another {differing[0]}")
    _require_chains_of_their_own(every)
    names = every[0].head["leaves"]
    tree = checkpoint.nested(dict.fromkeys(names, 0)) if like is None else like
    mine = list(checkpoint.flat(tree)[like is None])
    if sorted(mine) != sorted(names):
        raise ValueError(f"Draws.open: {paths[0]} holds leaves {sorted(names)}, like has {sorted(mine)}")
    leaves = None if like is None else checkpoint.flat(like)[0]
    device = next((local(x).device for x in (leaves or {}).values() if not x.is_meta), torch.device("cpu"))
    pieces = side_by_side([one.tiles for one in every], device, leaves)
    even = len({one.size for one in every}) == 1
    why = next((one.why for one in every if one.why), "" if even else "some of the chains have more draws")
    if any(sum(t.draws for t in one.tiles) < _reach(one) for one in every):
        why = "damaged files are left out"
    stacked = len(every) > 1 or every[0].head["chains"] is not None
    chains = sum(one.head["chains"] or 1 for one in every) if stacked else None
    spec = optree.tree_structure(tree, none_is_leaf=True)
    return Opened(pieces, spec, mine, chains, not why, why, first)


def _reach(one: Chains) -> int:
    """How many draws there would be if no file were left out."""
    return drawn(one.head, max(one.step, one.head["step"]))


def _run(path: Path, skip: bool) -> list[Chains]:
    """All chains of one run, in the order of their numbers.

    Raises:
        FileNotFoundError: there is no run, or a folder of it is gone.
    """
    found = [(folder, head) for folder in folders_of(path) if (head := head_of(folder)) is not None]
    if not found:
        raise FileNotFoundError(f"Draws.open: there is no run in {path}: it has no {HEAD}")
    numbers = sorted(head.metadata["numbers"] for _, head in found if head.metadata["numbers"] is not None)
    total, ranks = found[0][1].metadata["identity"]["total"], found[0][1].metadata["rank"][1]
    at = 0
    for a, b in numbers:
        at = b if a == at else at
    if len(numbers) == len(found) and at != total:
        raise FileNotFoundError(
            f"Draws.open: {path} holds no draws of chain {at} of {total}; restore its folder, or go on with the run"
        )
    if not numbers and len(found) != ranks:
        raise FileNotFoundError(f"Draws.open: {path} holds runs of {len(found)} of {ranks} ranks; restore the others")
    if 0 < len(numbers) < len(found):
        raise ValueError(f"Draws.open: {path} holds folders of two runs; restore it, or give each run a directory")
    found.sort(key=lambda x: x[1].metadata["numbers"] or [])
    return [_chains(folder, head, skip) for folder, head in found]


def _chains(folder: Path, head: File, skip: bool) -> Chains:
    return Chains(folder, head.metadata, tiles_of(folder, head, skip))


def _require_chains_of_their_own(every: Sequence[Chains]) -> None:
    """Refuse chains that drew the same noise: they have a key in common, or the same first draws.

    Raises:
        ValueError: naming two of them.
    """
    seen = dict[Any, Chains]()
    for one in every:
        told = list[Any](one.head["keys"])
        if one.head["numbers"] is None and one.tiles:
            entries = one.tiles[0].file.entries
            told.append(tuple(x.sums for n, x in sorted(entries.items()) if n.startswith(LEAF)))
        for key in told:
            if (other := seen.setdefault(key, one)) is not one:
                raise ValueError(
                    f"Draws.open: {other.folder.name} and {one.folder.name} drew the same noise, since their ranks "
                    "were seeded alike: they are one chain, not two. Make the chains with bc.parallel(step, n, mesh=mesh), or "
                    "seed each rank differently"
                )
