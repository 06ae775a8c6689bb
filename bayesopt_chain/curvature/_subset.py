"""Restricts a model to some of its parameters, so that the rest costs nothing: the last layer, or a LoRA adapter.

forward(theta_kept) = forward(theta_kept, theta_frozen),   theta_frozen constant

Uncertainty in the last layer alone: Snoek et al. (2015); in any part of a network: Daxberger et al. (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain.trees import Tree, paths, require_like


def subset(
    forward: Callable[[Tree, Any], Tensor], params: Tree, keep: Sequence[str] | str | Callable[[str], bool] | Tree
) -> tuple[Callable[[dict[str, Tensor], Any], Tensor], dict[str, Tensor]]:
    """Keep some parameters and freeze the others at their values.

    Args:
        forward: ``forward(params, batch) -> outputs``.
        params: the whole tree.
        keep: a name or names (``"head"`` keeps ``head`` and everything under it; ``*`` matches anything), a function
            from a name to whether it is kept, or a tree of booleans that is a prefix of params. A leaf's name is its
            path joined by dots.

    Returns:
        ``(forward, kept)``: a forward function of the kept parameters, and the kept parameters, ``{name: leaf}``. In layers
        before the first kept parameter nothing is differentiated, and no activation is stored.

    Raises:
        ValueError: when a name matches nothing, nothing is kept, or the mask is no prefix of params.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature
        >>> params = {"body": torch.ones(2, 2), "head": {"w": torch.ones(2, 1)}}
        >>> forward, kept = curvature.subset(lambda p, batch: batch[0] @ p["body"] @ p["head"]["w"], params, "head")
        >>> list(kept), forward(kept, (torch.ones(1, 2), None))
        (['head.w'], tensor([[4.]]))
    """
    leaves, structure = optree.tree_flatten(params)
    names = paths(params)
    chosen = _chosen(keep, names, params)
    if not any(chosen):
        raise ValueError(f"keep={keep!r} keeps none of the parameters {', '.join(names)}")
    kept = {name: leaf for name, leaf, is_kept in zip(names, leaves, chosen) if is_kept}
    frozen = optree.tree_unflatten(structure, [leaf.detach() for leaf in leaves])
    return Kept(forward, frozen, tuple(names)), kept


class Kept:
    """``kept(some, batch)``: a forward function of some of the parameters, the others frozen at their values.

    Attributes:
        forward: the forward function of all parameters.
        frozen: the tree of all parameters, detached.
        names: the names of its leaves.
    """

    def __init__(self, forward: Callable[[Tree, Any], Tensor], frozen: Tree, names: tuple[str, ...]) -> None:
        self.forward, self.frozen, self.names = forward, frozen, names

    def __call__(self, some: dict[str, Tensor], batch: Any) -> Tensor:
        leaves, structure = optree.tree_flatten(self.frozen)
        chosen = [some.get(name, leaf) for name, leaf in zip(self.names, leaves)]
        return self.forward(optree.tree_unflatten(structure, chosen), batch)


def _chosen(keep: Any, names: list[str], params: Tree) -> list[bool]:
    if isinstance(keep, str):
        keep = [keep]
    if callable(keep):
        return [bool(keep(name)) for name in names]
    if isinstance(keep, (list, tuple)) and keep and all(isinstance(pattern, str) for pattern in keep):
        for pattern in keep:
            if not any(_matches(name, pattern) for name in names):
                raise ValueError(f"keep={pattern!r} matches none of the parameters {', '.join(names)}")
        return [any(_matches(name, pattern) for pattern in keep) for name in names]
    mask: Tree = keep
    try:
        return [bool(bit) for bit in optree.tree_leaves(optree.tree_broadcast_prefix(mask, params))]
    except ValueError as error:
        raise ValueError(
            f"keep is no prefix of params: pass names, a function or a tree of booleans ({error})"
        ) from None


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")


class Entries:
    """``forward({"entries": vector}, batch)``: a forward function of some entries of the parameters, the others frozen.

    Attributes:
        forward: the forward function of all parameters.
        frozen: the tree of all parameters, detached.
        places: a tree of the numbers of the chosen entries in each flattened leaf.
    """

    def __init__(self, forward: Callable[[Tree, Any], Tensor], frozen: Tree, places: Tree) -> None:
        self.forward, self.frozen, self.places = forward, frozen, places

    def __call__(self, some: dict[str, Tensor], batch: Any) -> Tensor:
        leaves, structure = optree.tree_flatten(self.frozen)
        where = optree.tree_leaves(self.places)
        parts = some["entries"].split([len(index) for index in where])
        whole = [
            leaf if not len(index) else leaf.reshape(-1).index_put((index,), part.to(leaf.dtype)).reshape(leaf.shape)
            for leaf, index, part in zip(leaves, where, parts)
        ]
        return self.forward(optree.tree_unflatten(structure, whole), batch)


def entries(forward: Callable[[Tree, Any], Tensor], params: Tree, mask: Tree) -> tuple[Entries, dict[str, Tensor]]:
    """Keep some entries of the parameters and freeze the others at their values: a subnetwork.

    Args:
        forward: ``forward(params, batch) -> outputs``.
        params: the whole tree.
        mask: a tree of boolean tensors like the parameters, True at the entries to keep.

    Returns:
        ``(forward, {"entries": vector})``, the kept entries leaf by leaf. Kronecker factors,
        which describe whole layers, refuse them: use "dense", "diagonal", "root" or "low_rank".

    Raises:
        ValueError: a mask of another tree or other shapes, or one that keeps nothing.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature
        >>> params = {"w": torch.ones(2, 2)}
        >>> forward, kept = curvature.entries(lambda p, b: b[0] @ p["w"], params, {"w": torch.eye(2).bool()})
        >>> kept, forward({"entries": torch.zeros(2)}, (torch.ones(1, 2), None))
        ({'entries': tensor([1., 1.])}, tensor([[1., 1.]]))
    """
    require_like(mask, params, "the mask")
    frozen = optree.tree_map(Tensor.detach, params)
    places = optree.tree_map(lambda m: m.reshape(-1).nonzero()[:, 0], mask)
    pieces = [p.reshape(-1)[i] for p, i in zip(optree.tree_leaves(frozen), optree.tree_leaves(places))]
    if not any(len(piece) for piece in pieces):
        raise ValueError("the mask keeps no entry of the parameters")
    return Entries(forward, frozen, places), {"entries": torch.cat(pieces)}
