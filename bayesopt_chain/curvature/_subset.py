"""Restricts a model to some of its parameters, so that the rest costs nothing: the last layer, or a LoRA adapter.

forward(theta_kept) = forward(theta_kept, theta_frozen),   theta_frozen constant

Uncertainty in the last layer alone: Snoek et al. (2015); in any part of a network: Daxberger et al. (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import optree
from torch import Tensor

from bayesopt_chain.checks import short
from bayesopt_chain.trees import Tree, paths


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
        bits: list[Any] = optree.broadcast_prefix(mask, params)
    except ValueError:
        bits = [None]
    if not all(isinstance(bit, bool) for bit in bits):
        raise ValueError(
            f"keep={short(keep)} is no prefix of params: pass names, a function of a name, or a tree of booleans"
        )
    return bits


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")
