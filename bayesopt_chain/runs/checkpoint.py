"""Trees of tensors on disk, without pickle: one safetensors file, written whole or not at all.

A file holds ``{path: tensor}`` and, in its header, what it is a file of: every leaf's path, dtype and shape, the numbers
and strings among the leaves, the chain, the library's version and checksums of the data (:mod:`bayesopt_chain.runs.files`).
:func:`load` compares all of it with the tree it is to fill and names what differs.

Of several ranks each writes a file of its own, without a message, and the first one an index of them:

    run.rank-00000-of-00004.safetensors ...     what each rank saved
    run.index.safetensors                       which files belong together: those of the newest save

As many ranks load what each of them saved. Another number of ranks loads files that are alike (replicas), or the chains that
each of them has of states stacked on axis 0 (:func:`bayesopt_chain.parallel` with a mesh), in the order of the ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.distributed.ranks import share_of, world
from bayesopt_chain.loop.module_state import keyed
from bayesopt_chain.runs import files
from bayesopt_chain.runs.files import File

Scalar = bool | int | float | str | None


def flat(tree: Any) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
    """The tensors of a tree by path (``state/0/trace/1``), and its numbers, strings and ``None``.

    Raises:
        TypeError: a leaf that is neither.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Scalar] = {}
    accessors = optree.tree_accessors(tree, none_is_leaf=True)
    for accessor, leaf in zip(accessors, optree.tree_leaves(tree, none_is_leaf=True)):
        name = "/".join(str(getattr(entry, "field", entry.entry)) for entry in accessor) or "tensor"
        if torch.is_tensor(leaf):
            tensors[name] = leaf.detach()
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            scalars[name] = leaf
        else:
            raise TypeError(
                f"save: leaf {name} is {type(leaf).__name__}; only tensors, numbers and strings can be saved"
            )
    if len(tensors) + len(scalars) != len(accessors):
        raise ValueError("save: two leaves have the same path; rename a key that contains '/'")
    return tensors, scalars


def save(path: str | os.PathLike, tree: Any, *, tx: Any = None) -> None:
    """Write a tree to one safetensors file: atomically, and without pickle.

    Args:
        path: the file. It is replaced in one step; a crash leaves the old file or the new one. Under ``torchrun`` call
            it on every rank: each writes a file of its own, ``run.rank-00001-of-00004.safetensors`` for
            ``run.safetensors``, and the first one ``run.index.safetensors``.
        tree: any tree of tensors, numbers and strings, such as ``(params, state)``.
        tx: the chain whose state is in the tree. Its text is kept, and :func:`load` compares it.

    Raises:
        TypeError: a leaf of another type, or a DTensor.
        OSError: the file cannot be written; what stood there before is untouched.

    Example:
        >>> import tempfile, torch, bayesopt_chain as bc
        >>> tx, params = bc.sghmc(0.1, temperature=0.01), {"w": torch.ones(2)}
        >>> state = tx.init(params)
        >>> file = tempfile.mkdtemp() + "/run.safetensors"
        >>> bc.save(file, (params, state), tx=tx)
        >>> params, state = bc.load(file, like=(params, state), tx=tx)
        >>> params["w"]
        tensor([1., 1.])
    """
    kinds.require("save", path=(path, kinds.PATH))
    tensors, scalars = flat(tree)
    require_whole("save", tensors)
    if wrong := [name for name, x in tensors.items() if x.is_meta or x.layout != torch.strided]:
        raise TypeError(
            f"save: leaf {wrong[0]} is sparse, or on the device meta without values: x.to_dense(), or leave it out"
        )
    rank, size = world()
    mine = _files(Path(path), size)
    header = {"scalars": scalars, "chain": None if tx is None else repr(tx), **_streams(tree, tensors)}
    files.write(mine[rank], tensors, header)
    index = _index_of(Path(path))
    if rank == 0 and (size > 1 or index.exists()):
        files.write(index, {}, {"files": [file.name for file in mine]})


def load(path: str | os.PathLike, *, like: Any, tx: Any = None) -> Any:
    """Read a tree that :func:`save` wrote.

    Args:
        path: the file that was given to :func:`save`. What several ranks saved is loaded by as many, each its own; by
            another number of them if all saved the same, or if they saved chains: parameters and states stacked on axis
            0, of which each rank takes those that ``bc.parallel(step, n, mesh=mesh)`` gives it.
        like: a tree of the structure, shapes and dtypes to expect; its values do not matter and it is not changed. The
            tensors come back on the devices of this tree.
        tx: the chain, if :func:`save` was given one: a file of another chain is refused.

    Returns:
        A tree like ``like``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a truncated or damaged file, one that something else wrote, or one of another tree or chain; the
            message names what differs. Files of another number of ranks that are neither replicas nor chains.

    Example:
        >>> import tempfile, torch, bayesopt_chain as bc
        >>> file = tempfile.mkdtemp() + "/params.safetensors"
        >>> bc.save(file, {"w": torch.ones(2)})
        >>> bc.load(file, like={"w": torch.zeros(2)})
        {'w': tensor([1., 1.])}
    """
    kinds.require("load", path=(path, kinds.PATH))
    try:
        flat(like)
    except TypeError as err:
        raise TypeError(f"load: like must be a tree of tensors, numbers and strings: {err}") from None
    tensors, header = _found(Path(path), like)
    if tx is not None and header.get("chain") not in (None, repr(tx)):
        raise ValueError(f"load: {path} holds the state of another chain:\n{header['chain']}\nnot of\n{tx!r}")
    return filled(like, tensors, header.get("scalars", {}), str(path))


def _files(path: Path, size: int) -> list[Path]:
    """The files that so many ranks write where a user asked for ``path``."""
    return (
        [path]
        if size == 1
        else [path.with_name(f"{path.stem}.rank-{r:05d}-of-{size:05d}{path.suffix}") for r in range(size)]
    )


def _index_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.index{path.suffix}")


def _streams(tree: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """How many chains are stacked on axis 0 of a tree, where its random streams tell, and the streams' keys."""
    keys = [entry.key for entry in keyed(tree)]
    lengths = {len(x) if x.ndim else None for x in tensors.values()}
    stacked = bool(keys) and all(key.ndim == 1 for key in keys) and len(lengths) == 1
    return {
        "chains": lengths.pop() if stacked else None,
        "keys": sorted({int(k) for key in keys for k in key.reshape(-1) if k}),
    }


def _found(path: Path, like: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What this rank is to load: of its own file, or of those that another number of ranks wrote.

    Raises:
        FileNotFoundError: there is no file, or not all of the index.
        ValueError: files of other ranks that are neither replicas nor chains.
    """
    rank, size = world()
    index, own = _index_of(path), _files(path, size)[rank]
    if index.exists():
        names = File(index).metadata.get("files")
        if not isinstance(names, list) or not names or names != [p.name for p in _files(path, len(names))]:
            raise ValueError(f"load: {index} is damaged: it names {str(names)[:100]}")
        saved = [path.with_name(name) for name in names]
    else:
        saved = [own if own.exists() else path]
    if own in saved:
        return _read(own)
    if len(saved) > 1 and (missing := [file.name for file in saved if not file.exists()]):
        raise FileNotFoundError(
            f"load: {len(saved)} ranks saved {path}, and {missing[0]} is missing: save on every rank, or restore it"
        )
    opened = {file: File(file) for file in saved}
    headers = {file: x.metadata for file, x in opened.items()}
    sums = {file: tuple(x.entries[name].sums for name in sorted(x.entries)) for file, x in opened.items()}
    kinds = {(sums[file], _rest(about)): file for file, about in reversed(headers.items())}
    distinct = [file for file in saved if file in kinds.values()]
    chains = [headers[file].get("chains") for file in distinct]
    if len(distinct) == 1 and chains == [None]:
        return _read(distinct[0])
    told = [key for file in distinct for key in headers[file]["keys"]]
    if None in chains or len(set(told)) < len(told) or len({_rest(headers[file]) for file in distinct}) > 1:
        raise ValueError(
            f"load: {len(saved)} ranks saved {path}, and {size} load it: their files are neither alike nor of different chains "
            f"stacked on axis 0. Load it with {len(saved)} ranks, or one of the files by its name, such as {saved[0].name}"
        )
    return _rows(distinct, chains, like, rank, size), headers[distinct[0]]


def _rest(header: Mapping[str, Any]) -> str:
    """What of a tree is no tensor, and whose state it is."""
    return json.dumps([header.get("scalars"), header.get("chain")], sort_keys=True)


def _rows(files: Sequence[Path], chains: Sequence[Any], like: Any, rank: int, size: int) -> dict[str, Tensor]:
    """This rank's chains of those in the files: all of them where ``like`` has as many."""
    total = sum(chains)
    leaf = next(iter(flat(like)[0].values()))
    mine = range(total) if leaf.ndim and len(leaf) == total else share_of(total, rank, size)
    rows: list[dict[str, Tensor]] = []
    start = 0
    for file, n in zip(files, chains):
        first, stop = max(mine.start, start), min(mine.stop, start + n)
        if first < stop:
            tensors, _ = _read(file)
            rows.append({name: x[first - start : stop - start] for name, x in tensors.items()})
        start += n
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def filled(like: Any, tensors: Mapping[str, Tensor], scalars: Mapping[str, Scalar], where: str) -> Any:
    """``like`` with the values that were read, after comparing every leaf."""
    wanted, numbers = flat(like)
    differences = [f"{name} is missing" for name in (*wanted, *numbers) if name not in tensors and name not in scalars]
    differences += [f"{name} is a tensor, expected a number" for name in numbers if name in tensors]
    differences += [
        f"{name} is not expected" for name in (*tensors, *scalars) if name not in wanted and name not in numbers
    ]
    for name, leaf in wanted.items():
        got = tensors.get(name)
        if got is None and name in scalars:
            differences.append(f"{name} is a number, expected a tensor")
        elif got is not None and (got.shape != leaf.shape or got.dtype != leaf.dtype):
            differences.append(f"{name} is {got.dtype} {tuple(got.shape)}, expected {leaf.dtype} {tuple(leaf.shape)}")
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise ValueError(f"load: {where} does not fit the tree of like=: {'; '.join(differences[:5])}{more}")
    leaves, spec = optree.tree_flatten(like, none_is_leaf=True)
    values = {**scalars, **{name: tensors[name].to(leaf.device) for name, leaf in wanted.items()}}
    names = iter(_names(like))
    return optree.tree_unflatten(spec, [values[next(names)] for _ in leaves])


def _names(tree: Any) -> list[str]:
    accessors = optree.tree_accessors(tree, none_is_leaf=True)
    return ["/".join(str(getattr(entry, "field", entry.entry)) for entry in a) or "tensor" for a in accessors]


def require_whole(who: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse shards, of which each rank would write its own under one name.

    Raises:
        TypeError: a DTensor among the leaves.
    """
    for name, x in tensors.items():
        if is_dtensor(x):
            raise TypeError(
                f"{who}: leaf {name} is a DTensor, of which a rank holds a shard: bc.distributed.save(folder, tree) writes "
                "shards that any number of ranks reads, and x.full_tensor() is the whole"
            )


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, and what was said of them."""
    file = File(path)
    return {name: file.read(name) for name in file.entries}, file.metadata


def nested(flat: Mapping[str, Any]) -> Any:
    """A nested dictionary from one with paths as keys."""
    return flat["tensor"] if list(flat) == ["tensor"] else merged({}, flat)


def merged(tree: Any, flat: Mapping[str, Any]) -> Any:
    """Nested dictionaries with these values in them too, by their paths."""
    out: Any = optree.tree_map(lambda x: x, tree)
    for name, value in flat.items():
        *folders, last = name.split("/")
        inner = out
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = value
    return out
