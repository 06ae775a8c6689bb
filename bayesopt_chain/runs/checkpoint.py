"""Trees of tensors on disk, without pickle: one safetensors file, written whole or not at all.

A file holds ``{path: tensor}`` and, in its header, what it is a file of: every leaf's path, dtype and shape, the numbers
and strings among the leaves, the chain, the library's version and checksums of the data (:mod:`bayesopt_chain.runs.files`).
:func:`load` compares all of it with the tree it is to fill and names what differs.

Of several ranks each writes a file of its own, without a message:

    run.rank-00000-of-00004.safetensors ...     what each rank saved

and as many ranks load what each of them saved. What one process saved is loaded by any number of them, each the whole. Shards
of DTensors, and another number of ranks: :func:`bayesopt_chain.distributed.save`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.distributed.ranks import world
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
            ``run.safetensors``.
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
    header = {"scalars": scalars, "chain": None if tx is None else repr(tx)}
    files.write(_mine(Path(path), *world()), tensors, header)


def load(path: str | os.PathLike, *, like: Any, tx: Any = None) -> Any:
    """Read a tree that :func:`save` wrote.

    Args:
        path: the file that was given to :func:`save`. What several ranks saved is loaded by as many, each its own.
        like: a tree of the structure, shapes and dtypes to expect; its values do not matter and it is not changed. The
            tensors come back on the devices of this tree.
        tx: the chain, if :func:`save` was given one: a file of another chain is refused.

    Returns:
        A tree like ``like``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a truncated or damaged file, one that something else wrote, or one of another tree or chain; the
            message names what differs. Files of another number of ranks, or of several.

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
    tensors, header = _read(_saved(Path(path), *world()))
    if tx is not None and header.get("chain") not in (None, repr(tx)):
        raise ValueError(f"load: {path} holds the state of another chain:\n{header['chain']}\nnot of\n{tx!r}")
    return filled(like, tensors, header.get("scalars", {}), str(path))


def _mine(path: Path, rank: int, size: int) -> Path:
    """The file that a rank writes where a user asked for ``path``."""
    return path if size == 1 else path.with_name(f"{path.stem}.rank-{rank:05d}-of-{size:05d}{path.suffix}")


def _saved(path: Path, rank: int, size: int) -> Path:
    """The file that this rank is to load.

    Raises:
        FileNotFoundError: there is none, or this rank's is missing among the others.
        ValueError: another number of ranks saved, or several numbers of them did.
    """
    ranked = re.compile(re.escape(path.stem) + r"\.rank-\d{5}-of-(\d{5})" + re.escape(path.suffix))
    found = [match for file in path.parent.glob("*") if (match := ranked.fullmatch(file.name))]
    sizes = sorted({int(match[1]) for match in found} | ({1} if path.exists() else set()))
    if len(sizes) > 1:
        raise ValueError(
            f"load: {path} was saved by {' and by '.join(map(str, sizes))} ranks, and which is newer no file says: remove "
            f"the files of the older, such as {found[0][0]}"
        )
    if sizes in ([], [1]):
        return path
    if sizes != [size]:
        raise ValueError(
            f"load: {sizes[0]} ranks saved {path}, and {size} load it: load it with {sizes[0]}, or one rank's by its "
            f"name, such as {found[0][0]}. bc.distributed.save(folder, tree) writes what any number of ranks reads"
        )
    own = _mine(path, rank, size)
    if not own.exists():
        raise FileNotFoundError(
            f"load: {size} ranks saved {path}, and {own.name} is missing: save on every rank, or restore it"
        )
    return own


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
