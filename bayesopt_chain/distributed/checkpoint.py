"""Checkpoints of parameters and states on several ranks, by ``torch.distributed.checkpoint`` (DCP).

A checkpoint is a directory. Every rank writes the tensors or parts of tensors that no other rank holds. A table of contents,
which is written last, has the place of every element of every tensor, so that any number of ranks in any layout can read the
checkpoint. Examples of names in the table:

    params/layer.weight                    a DTensor in the shards of all ranks, or a plain tensor, once for all ranks
    state/0.Momentum.trace['layer.weight']
    chain 3/params/w                       with ``chains``, one tensor for each chain, by the global number of the chain

Three properties of DCP would lose data without a message, and are refused here. It takes plain tensors of one name on several
ranks for replicas and keeps one of them, even if they differ. It stores values that are not tensors for one rank only. When
it reads, it fills the tensors that both the checkpoint and the reader have, and leaves all others as they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.distributed.layout import runs_of
from bayesopt_chain.distributed.ranks import digest, gather_objects, together, world
from bayesopt_chain.distributed.shards import local

TABLE = ".metadata"  # the file of DCP's table of contents


def save(path: str | Path, tree: Mapping[str, Any], *, chains: range | None = None) -> None:
    """Write the tensors of all ranks into a directory. Call it on every rank, with the same ``path``.

    A checkpoint that is not complete has no table of contents, and :func:`load` refuses it.

    Args:
        path: a directory on storage that all ranks see. Every step that is saved needs a directory of its own.
        tree: dictionaries of tensors, such as ``{"params": params, "state": bc.state_dict(state)}``. DTensors are written
            shard by shard. Plain tensors must be equal on all ranks, except with ``chains``.
        chains: the global numbers of the chains of this rank, which axis 0 of every tensor counts. They are
            ``chains.numbers`` of :func:`bayesopt_chain.parallel` with a mesh. Default: the tensors are not stacked.

    Raises:
        TypeError: a leaf that is not a tensor.
        FileExistsError: the directory has a checkpoint already.
        ValueError: a plain tensor differs between ranks, or elements of a DTensor differ between ranks that both hold them;
            with ``chains``, a tensor is not stacked.

    Example:
        >>> import tempfile, torch, bayesopt_chain as bc
        >>> tx, params = bc.sghmc(0.1, temperature=0.01), {"w": torch.ones(2)}
        >>> state = tx.init(params)
        >>> folder = tempfile.mkdtemp() + "/step-100"
        >>> bc.distributed.save(folder, {"params": params, "state": bc.state_dict(state)})
        >>> _ = params["w"].zero_()
        >>> bc.distributed.load(folder, {"params": params, "state": bc.state_dict(state)})
        >>> params["w"]
        tensor([1., 1.])
    """
    from torch.distributed.checkpoint.state_dict_saver import save as write

    def checked() -> tuple[dict[str, Tensor], dict[tuple[str, int], Any]]:
        if (Path(path) / TABLE).exists():
            raise FileExistsError(f"save: {path} holds a checkpoint already; give every step that is saved a directory")
        tensors = _named("save", tree, chains)
        return tensors, {_piece(name, x): digest(local(x)) for name, x in tensors.items() if not _is_cut(x)}

    # Nothing is written before every rank has passed its checks: one that failed would leave the others waiting.
    tensors, digests = together(None, checked)
    every = gather_objects(digests, None)
    wrong = [piece[0] for piece, mine in digests.items() if any(theirs.get(piece, mine) != mine for theirs in every)]
    if wrong:
        raise ValueError(
            f"save: {', '.join(wrong[:4])}{', ...' if len(wrong) > 4 else ''} differ from rank to rank, and one of them would "
            "be kept: chains=chains.numbers for chains on ranks of their own, bc.distributed.broadcast for replicas that "
            "have drifted apart, DTensors for shards"
        )
    with _alone_without_a_warning() as alone:
        write(tensors, checkpoint_id=str(path), no_dist=alone)


def load(path: str | Path, tree: Mapping[str, Any], *, chains: range | None = None) -> None:
    """Read a checkpoint into the tensors of a tree. Call it on every rank.

    The number of ranks and the layout of the tensors may differ from those with which the checkpoint was saved. If anything is
    refused, no tensor was changed.

    Args:
        path: a directory that :func:`save` wrote.
        tree: dictionaries of tensors, as for :func:`save`. The tensors are overwritten in place.
        chains: the global numbers of the chains of this rank, which may differ from those with which it saved.

    Raises:
        FileNotFoundError: the directory has no complete checkpoint.
        TypeError: a leaf that is not a tensor.
        ValueError: a tensor is only in the tree or only in the checkpoint, or has another shape or dtype; a saved chain is
            loaded by no rank; the table of contents has anything but descriptions of tensors, in which case no code that it
            names is run.

    Example:
        >>> import tempfile, torch, bayesopt_chain as bc
        >>> folder = tempfile.mkdtemp() + "/step-100"
        >>> bc.distributed.save(folder, {"w": torch.ones(2)})
        >>> w = torch.zeros(2)
        >>> bc.distributed.load(folder, {"w": w})
        >>> w
        tensor([1., 1.])
    """
    from torch.distributed.checkpoint.state_dict_loader import load as read

    from bayesopt_chain.distributed.restricted import RestrictedReader

    def checked() -> tuple[dict[str, Tensor], list[int], set[int]]:
        if not (Path(path) / TABLE).exists():
            raise FileNotFoundError(
                f"load: there is no checkpoint in {path}, or it was not written to its end; load an earlier one"
            )
        tensors = _named("load", tree, chains)
        table = RestrictedReader(str(path)).read_metadata().state_dict_metadata
        saved = {number for name in table if (number := _chain_of(name)) is not None}
        here = {None, *(chains or ())}
        _require_fit(path, tensors, {name: about for name, about in table.items() if _chain_of(name) in here})
        return tensors, list(chains or ()), saved

    # Nothing is read before every rank has passed its checks, so that a refusal leaves all tensors as they were.
    tensors, mine, saved = together(None, checked)
    if left := saved - {number for theirs in gather_objects(mine, None) for number in theirs}:
        raise ValueError(
            f"load: {path} holds chains {sorted(saved)[:8]}{'...' if len(saved) > 8 else ''}, and no rank loads "
            f"{sorted(left)[:8]}: run as many chains as were saved"
        )
    with _alone_without_a_warning() as alone:
        read(tensors, storage_reader=RestrictedReader(str(path)), no_dist=alone)


def _is_cut(x: Tensor) -> bool:
    """Whether a tensor is a DTensor of which no two ranks hold the same elements, so that there is nothing to compare."""
    cut = is_dtensor(x) and not any(placement.is_replicate() for placement in x.placements)  # type: ignore[attr-defined]
    return cut and x.device_mesh.size() == world().size  # type: ignore[attr-defined]


def _piece(name: str, x: Tensor) -> tuple[str, int]:
    """A label of the part of a tensor that this rank holds. Ranks with equal labels must hold equal numbers."""
    return name, hash(runs_of(x)) if is_dtensor(x) else 0


@contextmanager
def _alone_without_a_warning() -> Iterator[bool]:
    """Yield whether this is the only process, and suppress the warning that DCP gives in that case."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield world().size == 1


def _named(who: str, tree: Mapping[str, Any], chains: range | None) -> dict[str, Tensor]:
    """The tensors of a tree of dictionaries, by their keys joined by ``/``.

    Args:
        who: the caller, for messages.
        tree: the tree.
        chains: the numbers of the chains that axis 0 of every tensor counts; each row is then a tensor of its own.

    Returns:
        Tensors that share their memory with those of the tree.

    Raises:
        TypeError: ``tree`` is not a dictionary, or a leaf is not a tensor.
        ValueError: two tensors have the same name; with ``chains``, a tensor is not stacked.
    """
    if not isinstance(tree, Mapping):
        raise TypeError(
            f"{who}: tree must be a dictionary, such as {{'state': bc.state_dict(state)}}, got {type(tree).__name__}"
        )
    out: dict[str, Tensor] = {}
    # A stack in place of a recursion; it is reversed so that the tensors come in the order of the tree.
    todo: list[tuple[str, Any]] = [(str(name), value) for name, value in reversed(list(tree.items()))]
    while todo:
        name, value = todo.pop()
        if isinstance(value, Mapping):
            todo += [(f"{name}/{inner}", x) for inner, x in reversed(list(value.items()))]
        elif not isinstance(value, Tensor):
            raise TypeError(
                f"{who}: {name} is {type(value).__name__}; only tensors can be spread over ranks: bc.state_dict(state) for the "
                "state of a chain, torch.distributed.checkpoint.state_dict.get_optimizer_state_dict for an optimizer of "
                "bc.optim"
            )
        elif name in out:
            raise ValueError(f"{who}: two tensors are named {name}; rename a key that contains '/'")
        else:
            out[name] = value.detach()
    if chains is None:
        return out
    for name, x in out.items():
        placements = tuple(getattr(x, "placements", ()))
        if x.ndim == 0 or len(x) != len(chains) or any(getattr(p, "dim", None) == 0 for p in placements):
            raise ValueError(
                f"{who}: {name} is of shape {tuple(x.shape)}{f', spread as {placements}' if placements else ''}; with chains= "
                f"axis 0 of every tensor counts the {len(chains)} chains of this rank"
            )
    return {f"chain {number}/{name}": x[i] for i, number in enumerate(chains) for name, x in out.items()}


def _chain_of(name: str) -> int | None:
    """The number of the chain to which a name of the table belongs; ``None`` for a tensor that was saved without chains."""
    first, _, rest = name.partition("/")
    number = first.removeprefix("chain ")
    return int(number) if rest and number != first and number.isdigit() else None


def _require_fit(path: Any, tensors: Mapping[str, Tensor], table: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose tensors differ in names, shapes or dtypes from the tensors that are to be overwritten.

    Args:
        path: the directory, for the message.
        tensors: the tensors that are to be overwritten.
        table: DCP's descriptions of the tensors of the checkpoint.

    Raises:
        ValueError: the message has the first five differences.
    """
    wrong = [f"{name} is not there" for name in tensors if name not in table]
    wrong += [f"{name} is not expected" for name in table if name not in tensors]
    for name, x in tensors.items():
        about = table.get(name)
        if about is None:
            continue
        dtype = getattr(getattr(about, "properties", None), "dtype", None)
        if dtype != x.dtype or tuple(about.size) != tuple(x.shape):
            size = tuple(getattr(about, "size", ()))
            wrong.append(f"{name} is {dtype} {size}, expected {x.dtype} {tuple(x.shape)}")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"load: the checkpoint in {path} does not fit: {'; '.join(wrong[:5])}{more}")
