"""Checkpoints of parameters and states on several ranks, by ``torch.distributed.checkpoint`` (DCP).

A checkpoint is a directory. Every rank writes the tensors or parts of tensors that no other rank holds. A table of contents,
which is written last, has the place of every element of every tensor, so that any number of ranks in any layout can read the
checkpoint. Examples of names in the table:

    params/layer.weight                    a DTensor in the shards of all ranks, or a plain tensor, once for all ranks
    state/0.Momentum.trace['layer.weight']
    chain 3/params/w                       with ``chains``, one tensor for each chain, by the global number of the chain

DCP stores no checksums. So a file beside the table has the SHA-256 of every other file (``sha256sum -c .sha256`` compares
them); the ranks share the work of comparing them before anything else is read.

Three properties of DCP would lose data without a message, and are refused here. It takes plain tensors of one name on several
ranks for replicas and keeps one of them, even if they differ. It stores values that are not tensors for one rank only. When
it reads, it fills the tensors that both the checkpoint and the reader have, and leaves all others as they were.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import is_dtensor, local
from bayesopt_chain.distributed.parts import runs_of
from bayesopt_chain.distributed.ranks import (
    DRIFTED,
    answers,
    digest,
    gather_objects,
    require_alike,
    require_fit,
    shown_some,
    together,
    world,
)
from bayesopt_chain.trees import named_leaves

TABLE = ".metadata"  # the file of DCP's table of contents
DIGESTS = ".sha256"  # the digests of all other files, as sha256sum writes them, behind the table
CHAIN = re.compile(r"chain ([0-9]{1,9})/")  # how the names of tensors of one chain begin
_CHAINS = checks.Kind(
    lambda x: isinstance(x, range) and min(x, default=0) >= 0, "a range of numbers of chains, as chains.numbers is"
).or_none()


@checks.takes(path=checks.FOLDER, tree=checks.ANY, chains=_CHAINS)
def save(path: str | Path, tree: Any, *, chains: range | None = None) -> None:
    """Write the tensors of all ranks into a directory. Call it on every rank, with the same ``path``.

    A checkpoint that is not complete has no table of contents, and :func:`load` refuses it. One that was cut off behind its
    table has no digests, and :func:`load` says so.

    Args:
        path: a directory on storage that all ranks see. Every step that is saved needs a directory of its own.
        tree: of tensors, such as ``{"params": params, "state": bc.state_dict(state)}``, whose names say link and leaf. DTensors
            are written shard by shard. Plain tensors must be equal on all ranks, except with ``chains``.
        chains: the global numbers of the chains of this rank, which axis 0 of every tensor counts. They are
            ``chains.numbers`` of :func:`bayesopt_chain.parallel` with a mesh. Default: the tensors are not stacked.

    Raises:
        TypeError: a leaf that is not a dense tensor with values.
        FileExistsError: the directory has a checkpoint already.
        OSError: it cannot be written, as on a full disk. It is raised on every rank.
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

    folder, rank = Path(path), world().rank

    def checked() -> tuple[dict[str, Tensor], dict[str, Any]]:
        if (folder / TABLE).exists():
            raise FileExistsError(f"save: {path} holds a checkpoint already; give every step that is saved a directory")
        tensors = _named("save", tree, chains)
        # Ranks with the same elements of a tensor must have equal numbers there. Of a tensor that is cut over all ranks no
        # two have the same, and nothing is compared.
        held = [
            (n, x, f" (elements {runs_of(x)})" if is_dtensor(x) else "") for n, x in tensors.items() if not _is_cut(x)
        ]
        return tensors, {name + elements: digest(local(x)) for name, x, elements in held}

    # Nothing is written before every rank has passed its checks: one that failed would leave the others waiting.
    tensors, digests = together(None, checked)
    require_alike("save: {}" + DRIFTED + ", chains=chains.numbers for chains on ranks of their own", digests, None)
    with _by_name(f"save: {path} cannot be written (is the disk full?)", OSError) as alone:
        write(tensors, checkpoint_id=str(path), no_dist=alone)

    def sums() -> list[str]:
        mine = [*folder.glob(f"__{rank}_*.distcp"), *[folder / TABLE] * (rank == 0)]
        return [f"{_sha256(file)}  {file.name}\n" for file in mine]

    def record() -> None:
        with open(folder / DIGESTS, "w") as file:
            file.writelines(itertools.chain(*every))
            file.flush()
            os.fsync(file.fileno())

    every = answers(None, sums)
    together(None, record if rank == 0 else lambda: None)


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _require_digests(folder: Path) -> None:
    """Compare the table of contents, and this rank's share of the other files, with their digests.

    Raises:
        ValueError: naming a file that differs; there are no digests to compare with.
    """
    record = folder / DIGESTS
    if not record.is_file():
        raise ValueError(
            f"load: {folder} has no digests: bc.distributed.save has not written it, or not to its end. Load an earlier "
            "checkpoint, or what torch itself has saved by torch.distributed.checkpoint.load"
        )
    lines = record.read_bytes().decode(errors="replace").split("\n")[:-1]
    digests = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    names = sorted(digests.keys() - {TABLE})
    for file in (TABLE, *names[world().rank :: world().size]):
        if not (folder / file).is_file() or _sha256(folder / file) != digests.get(file):
            raise ValueError(
                f"load: {file} of the checkpoint in {folder} is damaged: it is not the file whose digest stands in {DIGESTS}; "
                "load an earlier checkpoint"
            )


@checks.takes(path=checks.FOLDER, tree=checks.ANY, chains=_CHAINS)
def load(path: str | Path, tree: Any, *, chains: range | None = None) -> None:
    """Read a checkpoint into the tensors of a tree. Call it on every rank.

    The number of ranks and the layout of the tensors may differ from those with which the checkpoint was saved. If anything is
    refused, no tensor was changed. Every file is compared with its digest first.

    Args:
        path: a directory that :func:`save` wrote.
        tree: of tensors, as for :func:`save`. The tensors are overwritten in place.
        chains: the global numbers of the chains of this rank, which may differ from those with which it saved.

    Raises:
        FileNotFoundError: the directory has no complete checkpoint.
        TypeError: a leaf that is not a dense tensor with values.
        ValueError: a tensor is only in the tree or only in the checkpoint, or has another shape or dtype, or in the tree one
            element in several places, as ``x.expand`` gives it; a saved chain is
            loaded by no rank; a file differs from its digest, or there are no digests; the table of contents has anything but
            descriptions of tensors, in which case no code that it names is run.

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

    def checked() -> tuple[dict[str, Tensor], set[int]]:
        if not (Path(path) / TABLE).exists():
            raise FileNotFoundError(
                f"load: there is no checkpoint in {path}, or it was not written to its end; load an earlier one"
            )
        tensors = _named("load", tree, chains)
        _require_digests(Path(path))
        table: dict[str, Any] = RestrictedReader(str(path)).read_metadata().state_dict_metadata
        # without chains= a name that begins so is the user's own
        saved = {name: int(match[1]) for name in table if (match := CHAIN.match(name)) and chains is not None}
        here = {name: about for name, about in table.items() if saved.get(name) in {None, *(chains or ())}}
        require_fit(
            f"load: the checkpoint in {path} does not fit",
            {name: f"{x.dtype} {tuple(x.shape)}" for name, x in tensors.items()},
            {name: f"{about.properties.dtype} {tuple(about.size)}" for name, about in here.items()},
            [f"{n} has one element in several places; clone it" for n, x in tensors.items() if _repeats(local(x))],
        )
        return tensors, {*saved.values()}

    # Nothing is read before every rank has passed its checks, so that a refusal leaves all tensors as they were.
    tensors, saved = together(None, checked)
    if left := saved.difference(*gather_objects([*(chains or ())], None)):
        raise ValueError(
            f"load: {path} holds chains {shown_some(sorted(saved))}, and no rank loads {sorted(left)[:8]}: run as many chains "
            "as were saved"
        )
    with _by_name(f"load: {path} cannot be read", ValueError) as alone:
        read(tensors, storage_reader=RestrictedReader(str(path)), no_dist=alone)


def _repeats(x: Tensor) -> bool:
    """Whether a tensor has one element in several places, as ``x.expand`` gives it, so that nothing can be read into it."""
    return any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride()))


def _is_cut(x: Tensor) -> bool:
    """Whether a tensor is a DTensor of which no two ranks hold the same elements, so that there is nothing to compare."""
    cut = is_dtensor(x) and not any(placement.is_replicate() for placement in x.placements)  # type: ignore[attr-defined]
    return cut and x.device_mesh.size() == world().size  # type: ignore[attr-defined]


@contextmanager
def _by_name(what: str, kind: type[Exception]) -> Iterator[bool]:
    """Run DCP, and yield whether this is the only process, of which DCP would warn.

    Args:
        what: the first words of the message of an error, on every rank.
        kind: the class of that error. That of DCP is no ``Exception``, and its message is a traceback of each rank.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield world().size == 1
    except CheckpointException as error:
        rank, (why, _) = next(iter(error.failures.items()))
        raise kind(f"{what}: rank {rank} failed: {type(why).__name__}: {why}") from error


def _named(who: str, tree: Any, chains: range | None) -> dict[str, Tensor]:
    """The tensors of a tree, by their paths.

    Args:
        who: the caller, for messages.
        tree: the tree.
        chains: the numbers of the chains that axis 0 of every tensor counts; each row is then a tensor of its own.

    Returns:
        Tensors that share their memory with those of the tree.

    Raises:
        TypeError: a leaf is not a dense tensor with values.
        ValueError: two tensors have the same name; with ``chains``, a tensor is not stacked.
    """
    named: dict[str, Any] = (
        {"tree": None} if tree is None else {n: x for n, x in named_leaves(tree).items() if x is not None}
    )
    for name, x in named.items():
        if not isinstance(x, Tensor) or x.is_meta or x.layout != torch.strided:
            told = f"{x.layout} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"{who}: {name} is {told}; only dense tensors can be spread over ranks: bc.state_dict(state) for the "
                "state of a chain, for an optimizer torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
            )
    out: dict[str, Tensor] = {name: x.detach() for name, x in named.items()}
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
