"""What a run is of: enough to refuse another one under the same path. What cannot be known is ``None``, and refuses nothing."""

from __future__ import annotations

import hashlib
import re
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
from bayesopt_chain.runs.run import Run

STATE, ROWS = "1/", 64  # the paths of a state begin with it in a file of ``(params, state)``; data that are looked at


def identity_of(run: Run, total: int | None) -> dict[str, Any]:
    """Burn-in, thinning, chains, shapes, the chain's text with its hyperparameters, the data, and the loss."""
    return {
        "burn_in": run.burn_in, "thinning": run.thinning, "total": total, "spread": are_spread((run.params, run.state)),
        "tree": shapes_of(run), "chain": chain_of(run.step), "data": data_of(run), "loss": loss_of(run.step),
        "each": each_of(run.step),
    }  # fmt: skip


def shapes_of(run: Run) -> dict[str, Any]:
    """By path what the tensors of a run are, one chain's; of a state that grows, which has no shape of its own, nothing."""
    tensors, _ = checkpoint.flat((run.params, run.state))
    fixed = {n: x for n, x in tensors.items() if not (getattr(run.step, "grows", False) and n.startswith(STATE))}
    return {n: [str(x.dtype), list(x.shape[run.chains is not None :])] for n, x in fixed.items()}


def _plain(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def chain_of(step: Any) -> str | None:
    """The text of a chain or of an optimizer's groups; functions without their addresses."""
    inner = getattr(step, "step", step)
    tx = getattr(inner, "tx", None)
    if tx is not None:
        return _plain(repr(tx))
    if (optimizer := getattr(inner, "optimizer", None)) is not None:
        kinds = (bool, int, float, str)
        groups = [
            {k: v for k, v in g.items() if isinstance(v, kinds) and k not in ("lr", "initial_lr")}
            | {"lr": g.get("initial_lr", g["lr"])}
            for g in optimizer.param_groups
        ]
        return f"{type(optimizer).__name__}({groups})"
    return None


def each_of(step: Any) -> dict[str, Any]:
    """By the global number of a chain its own hyperparameters."""
    each, numbers = getattr(step, "each", None) or {}, getattr(step, "numbers", ())
    return {str(n): {k: x[i].tolist() for k, x in sorted(each.items())} for i, n in enumerate(numbers)} if each else {}


def data_of(run: Run) -> dict[str, Any] | None:
    """Shapes of the data, and a checksum of some of them; ``None`` where each chain has its own, or nothing can be said."""
    batches = run.feed.batches
    if batches is None or getattr(run.step, "batch_dim", None) is not None:
        return None
    held = batches.leaves if isinstance(batches, Epochs) else batches
    if isinstance(held, torch.utils.data.DataLoader):
        held = getattr(held.dataset, "tensors", None)
    if held is None or not isinstance(held, (Tensor, tuple, list, Mapping)):
        return None
    kind = (
        "one batch"
        if run.feed.is_one
        else f"{len(held)} batches"
        if isinstance(batches, list)
        else type(batches).__name__
    )  # type: ignore[arg-type]
    how = batches._identity() if isinstance(batches, Epochs) else kind
    try:
        leaves = [x for x in optree.tree_leaves(cast(Any, held)) if isinstance(x, Tensor)]
        crc = 0
        for x in leaves[:ROWS]:
            x = local(x.detach())
            some = (
                x[torch.linspace(0, len(x) - 1, min(ROWS, len(x)), device=x.device).long()] if x.ndim and len(x) else x
            )
            crc = zlib.crc32(some.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
    except (RuntimeError, TypeError, ValueError):
        return None
    return {
        "ranks": run.feed.whole["ranks"],
        "kinds": [[str(x.dtype), list(x.shape)] for x in leaves[:ROWS]],
        "tensors": len(leaves),
        "crc": crc,
        "batches": how,
    }


def loss_of(step: Any) -> list[str] | None:
    """Name and digest of the code of a loss: of those that have any."""
    inner = getattr(step, "step", step)
    loss = getattr(inner, "loss", None)
    code = getattr(getattr(loss, "__wrapped__", loss), "__code__", None)
    if loss is None or code is None:
        return None
    return [f"{loss.__module__}.{loss.__qualname__}", _digest(code)]


def _digest(code: Any) -> str:
    said = [
        code.co_code.hex(),
        *(_digest(c) if hasattr(c, "co_code") else repr(c) for c in code.co_consts),
        *code.co_names,
    ]
    return hashlib.sha256(_plain(" ".join(said)).encode()).hexdigest()[:16]


def require_same(folder: Any, theirs: Mapping[str, Any], mine: Mapping[str, Any], ranks: str) -> None:
    """Refuse a folder of another run; of another loss, warn.

    Raises:
        ValueError: naming what differs.
    """
    if theirs["spread"] != mine["spread"]:
        kinds = [("plain tensors", "DTensors")[bool(x["spread"])] for x in (theirs, mine)]
        raise ValueError(
            f"sample: {folder} holds a run of {kinds[0]}, and {kinds[1]} are given: go on with {kinds[0]} (DTensors "
            "on a mesh of one rank will do), or give this run a directory of its own"
        )
    if theirs["total"] != mine["total"] and None not in (theirs["total"], mine["total"]):
        raise ValueError(
            f"sample: {folder} holds a run of {theirs['total']} chains by {ranks}, and {mine['total']} are to be run now: "
            "resume with as many, or give this run a directory of its own"
        )
    for key in ("burn_in", "thinning", "total", "tree", "chain", "data", "each"):
        a, b = theirs[key], mine[key]
        known = key in ("burn_in", "thinning", "total", "tree", "each") or None not in (a, b)
        if key == "data" and known and a["ranks"] != b["ranks"]:
            continue
        if key == "each":  # of the chains that both have
            a, b = ({n: x[n] for n in sorted(a.keys() & b.keys())} for x in (a, b))
        if a != b and known:
            raise ValueError(
                f"sample: {folder} holds another run: {key} {_difference(a, b)}; give this run a directory of its own"
            )
    if None not in (theirs["loss"], mine["loss"]) and theirs["loss"] != mine["loss"]:
        warnings.warn(
            f"sample: {folder} was sampled with the loss {theirs['loss'][0]}, whose code is not that of {mine['loss'][0]}: if "
            "they are different functions, its draws are of another posterior, and this run needs a directory of its own",
            stacklevel=7,
        )


def _difference(theirs: Any, mine: Any) -> str:
    if isinstance(theirs, dict) and isinstance(mine, dict):
        if (
            isinstance(theirs.get("batches"), dict)
            and isinstance(mine.get("batches"), dict)
            and theirs["batches"] != mine["batches"]
        ):
            a, b = theirs["batches"], mine["batches"]
            return "of other batches: " + ", ".join(f"{n}={a.get(n)!r} (here {b[n]!r})" for n in b if a.get(n) != b[n])
        for name in sorted({*theirs, *mine}):
            if theirs.get(name) != mine.get(name):
                return f"{name} is {theirs.get(name, 'absent')}, here {mine.get(name, 'absent')}"
    return f"is {theirs!r}, here {mine!r}"


def keys_of(state: Any) -> list[int]:
    """The keys of all random streams of a state."""
    keys = [key for entry in keyed(state) for key in entry.key.reshape(-1).tolist()]
    return sorted({int(key) for key in keys if key})
