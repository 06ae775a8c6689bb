"""Members over ranks: each rank runs its share of the members, and all ranks know what became of all of them.

Every rank holds the data and the starts of all members. A run is shared out (:func:`bayesopt_chain.parallel` with a mesh), and
its draws are gathered on every rank. What is worked out from them, scores, weights and curvatures, every rank works out for
itself; where the next run depends on it, all ranks take the first one's numbers, so that machines which round differently
cannot part.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain.distributed.ranks import gather_objects, gather_tensors, require_one_axis
from bayesopt_chain.runs.draws import Draws

T = TypeVar("T")


def require_ranks(mesh: Any, members: int, about: dict[str, Any]) -> None:
    """Refuse a mesh that members cannot be shared out over, and ranks that were not given the same call.

    Raises:
        TypeError, ValueError: on every rank.
    """
    require_one_axis(mesh, "posterior_ensemble")
    if members < mesh.size():
        raise ValueError(
            f"posterior_ensemble: members={members} on {mesh.size()} ranks leave some without one: pass members="
            f"{mesh.size()} or more, or start fewer ranks"
        )
    every = gather_objects(about, mesh)
    if wrong := sorted(k for k in about if any(theirs[k] != about[k] for theirs in every)):
        raise ValueError(
            f"posterior_ensemble: the ranks were not given the same call: {', '.join(wrong)} differ. Every rank is given all "
            "data and the same arguments; each trains its share of the members"
        )


def is_first(mesh: Any) -> bool:
    """Whether this rank writes and speaks for all of them."""
    return mesh is None or mesh.get_local_rank() == 0


def elsewhere(device: torch.device) -> Callable[[Any, str], Any]:
    """For ``torch.load``: what was not on the CPU comes to a device, which need not be the one it was on."""
    return lambda storage, place: storage if place == "cpu" else storage.to(device=device)


def firsts(value: T, mesh: Any) -> T:
    """The first rank's value, on every rank: tensors, numbers, and containers of them."""
    if mesh is None:
        return value
    device = torch.device("cpu") if mesh.device_type != "cuda" else torch.device("cuda", torch.cuda.current_device())
    held = io.BytesIO()
    if is_first(mesh):
        torch.save(value, held)
    (size, *_) = gather_objects(held.tell(), mesh)
    raw = torch.zeros(size, dtype=torch.uint8, device="cpu")
    if is_first(mesh):
        raw = torch.frombuffer(bytearray(held.getvalue()), dtype=torch.uint8)
    raw = raw.to(device)
    dist.broadcast(raw, group=mesh.get_group(), group_src=0)
    return torch.load(io.BytesIO(raw.cpu().numpy().tobytes()), map_location=elsewhere(device), weights_only=True)


def of_all_members(drawn: Draws, mesh: Any) -> Draws:
    """The draws of all members, and where their runs ended, on every rank."""
    states = gather_objects((len(drawn), drawn.complete, drawn.why), mesh)
    complete = all(done for _, done, _ in states)
    why = next((why for _, _, why in states if why), "")
    if any(size == 0 for size, _, _ in states):  # as in one process, where all members end together
        return drawn.with_columns({}, chains=None, complete=False, why=why)
    gathered = drawn.gather(mesh)
    if complete:
        ended: Any = drawn.last
        leaves, spec = optree.tree_flatten(ended)
        parts = gather_tensors({str(i): x for i, x in enumerate(leaves)}, mesh)
        together: Any = spec.unflatten([torch.cat([part[name] for part in parts]) for name in parts[0]])
        gathered.last = together
    return gathered


def rows_of(tree: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Some members of stacked tensors."""
    return {name: x[rows] for name, x in tree.items()}
