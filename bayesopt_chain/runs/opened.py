"""Opening the draws of directories: whose chains they hold, and that no two of them are one chain."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch

from bayesopt_chain.distributed.shards import local
from bayesopt_chain.runs import checkpoint
from bayesopt_chain.runs.columns import Shard, side_by_side
from bayesopt_chain.runs.rescued import writers_of
from bayesopt_chain.runs.table import LEAF, Files, Group, Writer, grouped, read_index


class Opened(NamedTuple):
    """What :class:`Draws` is made of."""

    shards: list[Shard]
    spec: Any
    names: list[str]
    chains: int | None
    complete: bool
    why: str


def opened(paths: Sequence[Path], like: Any, skip: bool) -> Opened:
    """The draws of all writers of these runs, side by side.

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
    groups, every = list[Group](), list[Writer]()
    for path in paths:
        writers = writers_of(path)
        if not writers:
            _refuse_empty(path)
        groups += _groups_of(path, writers)
        every += writers
    first = every[0].index["identity"]
    for w in every:
        differing = [k for k in ("burn_in", "thinning", "tree") if w.index["identity"][k] != first[k]]
        if differing:
            raise ValueError(f"Draws.open: {w.folder} and {every[0].folder} hold runs with another {differing[0]}")
    files = list({id(s.files): s.files for g in groups for s, _ in g.segments}.values())
    damaged = _damaged(files) if skip else []
    for each in files if not skip else []:
        each.require()
    _require_chains_of_their_own(groups, damaged)
    spec, names = _leaves(every[0], like)
    leaves = {} if like is None else checkpoint.flat(like)[0]
    device = next((local(x).device for x in leaves.values() if not x.is_meta), torch.device("cpu"))
    shards = side_by_side(groups, device, None if like is None else leaves, damaged)
    newest = [g.newest for g in groups if g.newest is not None]
    even = len({sum(s.draws for s, _ in g.segments) for g in groups}) == 1
    complete = even and not damaged and all(w.index["complete"] for w in newest)
    why = next((w.index["why"] for w in newest if w.index["why"]), "")
    why = why or ("some of the chains have more draws" if not even else "")
    why = f"{len(damaged)} damaged files are left out" if damaged else why
    stacked = len(groups) > 1 or groups[0].stacked
    chains = sum(
        len(g.chains) if g.newest is None or g.newest.chains is not None else g.newest.index["chains"] or 1
        for g in groups
    )
    return Opened(shards, spec, names, chains if stacked else None, complete, why)


def _refuse_empty(path: Path) -> None:
    """Say why there is nothing in a directory.

    Raises:
        FileNotFoundError, ValueError: always.
    """
    if any(path.glob("*/lock")):
        begun = sorted(p.name.removeprefix("segment-") for p in path.glob("segment-*"))
        if begun:
            raise FileNotFoundError(
                f"Draws.open: {path} holds no run but the segments {', '.join(begun)}: Draws.open(path, segment={begun[0]!r})"
            )
        raise FileNotFoundError(f"Draws.open: none of the ranks that began a run in {path} has committed a draw yet")
    read_index(path)


def _damaged(files: Sequence[Files]) -> list[Files]:
    """Those that do not match their checksums, of which a warning names each."""
    out = []
    for each in files:
        try:
            each.verify()
        except (OSError, ValueError) as err:
            warnings.warn(f"Draws.open: left out: {err}", stacklevel=5)
            out.append(each)
    return out


def _groups_of(path: Path, writers: Sequence[Writer]) -> list[Group]:
    """All chains of a run.

    Raises:
        FileNotFoundError: nobody holds some of them.
    """
    if any(w.chains is None for w in writers):
        size = writers[0].index["rank"][1]
        if len(writers) < size:
            raise FileNotFoundError(
                f"Draws.open: {path} holds runs of {len(writers)} of {size} ranks; restore the others"
            )
        return [grouped([w], range(1))[0] for w in writers]
    total = writers[0].index["identity"]["total"]
    groups = grouped(writers, range(total))
    if missing := [group.chains for group in groups if group.newest is None]:
        raise FileNotFoundError(
            f"Draws.open: {path} holds no draws of {_shown(missing[0])} of {total}; restore the folder "
            "of the rank that ran them, or go on with the run"
        )
    return groups


def _require_chains_of_their_own(groups: Sequence[Group], damaged: Sequence[Files]) -> None:
    """Refuse chains that drew the same noise: they have a key in common, or the same first draw.

    Raises:
        ValueError: naming two of them.
    """
    seen: dict[Any, Group] = {}
    for g in groups:
        if g.newest is None:
            continue
        alone = g.newest.chains is None or len(g.newest.chains) == g.size
        told: list[Any] = list(g.newest.index["keys"]) if alone else []
        first = next((s.files for s, _ in g.segments if not any(s.files is x for x in damaged)), None)
        if first is not None and g.newest.chains is None:
            told.append(tuple(x.sums for n, x in sorted(first.part(0).entries.items()) if n.startswith(LEAF)))
        for key in told:
            other = seen.setdefault(key, g)
            if other is not g and other.newest is not g.newest and other.newest is not None:
                raise ValueError(
                    f"Draws.open: {other.newest.folder.name} and {g.newest.folder.name} drew the same noise, since their ranks "
                    "were seeded alike: they are one chain, not two. Make the chains with bc.parallel(step, n, mesh=mesh), or "
                    "seed each rank differently"
                )


def _leaves(writer: Writer, like: Any) -> tuple[Any, list[str]]:
    """Structure and names of the parameters, after ``like`` or the names in the paths."""
    names = writer.index["leaves"]
    if like is None:
        tree = checkpoint.nested(dict.fromkeys(names, 0))
        return optree.tree_structure(tree, none_is_leaf=True), list(checkpoint.flat(tree)[1])
    mine = list(checkpoint.flat(like)[0])
    if sorted(mine) != sorted(names):
        raise ValueError(f"Draws.open: {writer.folder} holds leaves {sorted(names)}, like has {sorted(mine)}")
    return optree.tree_structure(like, none_is_leaf=True), mine


def _shown(chains: range) -> str:
    """Consecutive chains in words."""
    return f"chain {chains.start}" if len(chains) == 1 else f"chains {chains.start} to {chains.stop - 1}"
