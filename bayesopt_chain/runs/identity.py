"""What a run is of: enough to refuse another one under the same path.

Known: burn-in and thinning; shapes and dtypes; the chain with every hyperparameter, its stream and its schedules, or an
optimizer with its groups; the data, by their number, shapes and the checksum of all that are tensors in memory; order and
seed of the epochs; the name and the code of the loss, a function or an object that is called, and what it sees; a seed, where
one was given. What cannot be known, such as the data of a stream, is ``None`` or "unknown", and is not compared.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from typing import Any, cast

import optree
import torch
from torch import Tensor

from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.distributed.shards import are_spread, local
from bayesopt_chain.loop.module_state import keyed
from bayesopt_chain.runs import checkpoint
from bayesopt_chain.runs.describe import UNKNOWN, VERSION, describe, difference
from bayesopt_chain.runs.run import Run

STATE = "1/"  # the paths of a state begin with it in a file of ``(params, state)``
INSTEAD = "give this run a directory of its own"


def identity_of(run: Run, total: int | None) -> dict[str, Any]:
    """What is known of a run, as JSON."""
    return {
        "version": VERSION,
        "burn_in": run.burn_in,
        "thinning": run.thinning,
        "keep": run.keep,
        "total": total,
        "sharded": are_spread((run.params, run.state)),
        "tree": shapes_of(run),
        "chain": chain_of(run.step),
        "each": each_of(run.step),
        "data": data_of(run),
        "loss": describe(getattr(_inner(run.step), "loss", None)),
        "losses": [],
        "seed": run.seed,
    }


def shapes_of(run: Run) -> dict[str, Any]:
    """Dtypes and shapes of one chain's parameters and state, by path; a state that grows has no shapes of its own."""
    tensors, _ = checkpoint.flat((run.params, run.state))
    fixed = {n: x for n, x in tensors.items() if not (getattr(run.step, "grows", False) and n.startswith(STATE))}
    return {n: [str(x.dtype), list(x.shape[run.chains is not None :])] for n, x in fixed.items()}


def _inner(step: Any) -> Any:
    return getattr(step, "step", step)


def chain_of(step: Any) -> Any:
    """The chain of a step, or what the step says of its optimizer; of chains with hyperparameters of their own what makes
    them."""
    inner = _inner(step)
    if (told := getattr(inner, "identity", None)) is not None:
        return told
    tx = getattr(inner, "tx", None)
    return None if tx is None else describe(tx)


def each_of(step: Any) -> dict[str, Any]:
    """Each chain's own hyperparameters, by its global number."""
    each, numbers = getattr(step, "each", None) or {}, getattr(step, "numbers", ())
    return {str(n): {k: x[i].tolist() for k, x in sorted(each.items())} for i, n in enumerate(numbers)} if each else {}


def data_of(run: Run) -> dict[str, Any] | None:
    """Number and shapes of the data, and a checksum of all that are tensors in memory; ``None`` where each chain has its own,
    or nothing is known."""
    batches = run.batches.batches
    if batches is None or getattr(run.step, "batch_dim", None) is not None:
        return None
    held: Any = batches
    about: dict[str, Any] = {"kind": type(batches).__name__}
    if isinstance(batches, Epochs):
        held, about = batches.leaves, {"kind": "epochs", **batches._identity()}
    elif isinstance(batches, torch.utils.data.DataLoader):
        held = getattr(batches.dataset, "tensors", None)
        size = len(batches.dataset) if hasattr(batches.dataset, "__len__") else None  # type: ignore[arg-type]
        about |= {"size": size, "batch_size": batches.batch_size}
    elif isinstance(batches, list) or run.batches.is_one:
        about = {"kind": "one batch" if run.batches.is_one else f"{len(batches)} batches"}
    about["ranks"] = run.batches.whole["ranks"]
    if isinstance(held, (Tensor, tuple, list, Mapping)):
        leaves = [x for x in optree.tree_leaves(cast(Any, held)) if isinstance(x, Tensor)]
        about["tensors"] = [[str(x.dtype), list(x.shape)] for x in leaves]
        about["checksum"] = _checksum(leaves)
    return about


def _checksum(leaves: list[Tensor]) -> Any:
    """The CRC-32 of all of these tensors, so that one label that was mended is seen."""
    crc = 0
    try:
        for x in leaves:
            x = local(x.detach())
            crc = zlib.crc32(x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, crc) if x.numel() else crc
    except (RuntimeError, TypeError, ValueError):  # sparse, quantised, on no device
        return UNKNOWN
    return crc


def require_same(folder: Any, theirs: Mapping[str, Any], mine: Mapping[str, Any], ranks: str) -> None:
    """Refuse a folder of another run; warn of a loss whose code has changed.

    Args:
        folder: of the other run, for the message.
        theirs: the identity that stands there.
        mine: that of this run.
        ranks: by how many ranks theirs was run, in words.

    Raises:
        ValueError: naming what differs.
    """
    if theirs["sharded"] != mine["sharded"]:
        kinds = [("plain tensors", "DTensors")[bool(x["sharded"])] for x in (theirs, mine)]
        raise ValueError(
            f"sample: {folder} holds a run of {kinds[0]}, and {kinds[1]} are given: go on with {kinds[0]} (DTensors "
            "on a mesh of one rank will do), or give this run a directory of its own"
        )
    if theirs["total"] != mine["total"]:
        raise ValueError(
            f"sample: {folder} holds a run of {theirs['total'] or 'unnumbered'} chains by {ranks}, and "
            f"{mine['total'] or 'unnumbered ones'} are to be run now: resume with as many, or give this run a "
            f"directory of its own"
        )
    for key in ("burn_in", "thinning"):
        _refuse(folder, difference(theirs[key], mine[key], key))
    _refuse(folder, difference(theirs.get("keep", True), mine["keep"], "keep"))
    known = theirs.get("version") == VERSION  # else it was described by other rules
    if known and theirs.get("chain") is not None and mine["chain"] is not None:
        _refuse(folder, difference(theirs["chain"], mine["chain"]))
    _refuse(folder, _tree_difference(theirs["tree"], mine["tree"]))
    if not known:
        return
    _refuse(folder, _seeds(theirs.get("seed"), mine["seed"]))
    for key in ("each", "data"):
        a, b = theirs.get(key), mine[key]
        if key == "each" and a and b:  # of the chains that both have
            a, b = ({n: x[n] for n in sorted(a.keys() & b.keys())} for x in (a, b))
        if a is None or b is None or (key == "data" and a.get("ranks") != b["ranks"]):
            continue
        _refuse(folder, difference(a, b, key))
    _compare_losses(folder, theirs, mine)


def _refuse(folder: Any, what: str) -> None:
    if what:
        raise ValueError(f"sample: {folder} holds another run: {what}; {INSTEAD}")


def _seeds(theirs: Any, mine: Any) -> str:
    """What differs between seeds, of which none was given perhaps."""
    return "" if theirs is None or mine is None else difference(theirs, mine, "seed")


def _tree_difference(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    for name in sorted({*theirs, *mine}):
        if theirs.get(name) != mine.get(name):
            return f"tree {name} is {theirs.get(name, 'absent')}, here {mine.get(name, 'absent')}"
    return ""


def _compare_losses(folder: Any, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse a loss of another name and a lambda of other code; warn of other changes in code and in what it sees."""
    a, b = theirs.get("loss"), mine["loss"]
    if not isinstance(a, dict) or not isinstance(b, dict):
        return
    _refuse(folder, difference(a.get("function"), b["function"], "loss"))
    if str(b["function"]).endswith("<lambda>"):  # a name that says nothing: all that is known of it is its code
        _refuse(folder, difference(a.get("code"), b["code"], "loss.code"))
    if any(not difference(known, b) for known in [a, *theirs.get("losses", [])]):
        return
    warnings.warn(
        f"sample: {folder} was sampled with a loss {a['function']} that was another one: {difference(a, b)}. If they compute "
        f"different things, its draws are of another posterior: {INSTEAD}",
        stacklevel=10,
    )


def losses_of(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """The identity that stands, with this run's loss among those that it was sampled with."""
    known = [theirs.get("loss"), *theirs.get("losses", [])]
    return {**theirs, "losses": known[1:] + ([] if mine["loss"] in known else [mine["loss"]])}


def keys_of(state: Any) -> list[int]:
    """The keys of all random streams of a state."""
    keys = [key for entry in keyed(state) for key in local(entry.key).reshape(-1).tolist()]
    return sorted({int(key) for key in keys if key})
