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
    leaves = optree.tree_leaves(tree, none_is_leaf=True)
    named = dict(zip(names := _names(tree), leaves))
    if len(named) < len(names):
        raise ValueError("save: two leaves have the same path; rename a key that contains '/'")
    tensors = {name: x.detach() for name, x in named.items() if torch.is_tensor(x)}
    scalars = {name: x for name, x in named.items() if name not in tensors}
    if wrong := [n for n, x in scalars.items() if x is not None and not isinstance(x, (bool, int, float, str))]:
        raise TypeError(
            f"save: leaf {wrong[0]} is {type(named[wrong[0]]).__name__}; only tensors, numbers and strings can be saved"
        )
    return tensors, scalars


def _names(tree: Any) -> list[str]:
    accessors = optree.tree_accessors(tree, none_is_leaf=True)
    return ["/".join(str(getattr(entry, "field", entry.entry)) for entry in a) or "tensor" for a in accessors]


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
    if wrong := [name for name, x in tensors.items() if is_dtensor(x)]:
        raise TypeError(
            f"save: leaf {wrong[0]} is a DTensor, of which a rank holds a shard: bc.distributed.save(folder, tree) writes "
            "shards that any number of ranks reads, and x.full_tensor() is the whole"
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
    file = File(_saved(Path(path), *world()))
    tensors, header = {name: file.read(name) for name in file.entries}, file.metadata
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
    here, there = ({n: _kind(x) for n, x in {**a, **b}.items()} for a, b in ((wanted, numbers), (tensors, scalars)))
    differences = [f"{n} is {there.get(n, 'missing')}, expected {x}" for n, x in here.items() if there.get(n) != x]
    differences += [f"{n} is not expected" for n in there if n not in here]
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise ValueError(f"load: {where} does not fit the tree of like=: {'; '.join(differences[:5])}{more}")
    values = {**scalars, **{name: tensors[name].to(leaf.device) for name, leaf in wanted.items()}}
    return optree.tree_structure(like, none_is_leaf=True).unflatten([values[name] for name in _names(like)])


def _kind(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if torch.is_tensor(x) else "a number"


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
