"""What the transformations that carry a posterior share: they find their state in that of a chain, and refuse bad values.

Their states are NamedTuples of tensors, with one tensor for each parameter that is present, in optree order.

The states in which a posterior accumulates (Laplace, SWAG, the filters) are values: ``update`` makes a new one and never
writes into the one it was given: ``inplace`` concerns the buffers of the gradients alone. A state that the user kept stays what
it was. The states of variational inference are an optimizer's, and ``inplace=True`` overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.state import State
from bayesopt_chain.distributed.shards import whole
from bayesopt_chain.tracing import is_hidden
from bayesopt_chain.trees import paths, require_like

Kind = TypeVar("Kind", bound=tuple[Any, ...])


class PosteriorTransformation(Chain):
    """A chain of one link. Its methods take the state of that link, or of a chain that the link is a part of."""

    @property
    def _link(self) -> Any:
        return self.links[0]

    def _state(self, state: Any) -> Any:
        return find(state, self._link.state, str(self._link))


def find(state: Any, kind: type[Kind], maker: str) -> Kind:
    """The one state of class ``kind`` in a chain's state."""
    if isinstance(state, kind):
        return state
    found = [entry for entry in state if isinstance(entry, kind)] if isinstance(state, tuple) else []
    if len(found) != 1:
        raise ValueError(
            f"state holds {len(found)} states of {maker}, not one: pass what init of this transformation, or of a chain "
            "with it, returned"
        )
    return found[0]


def names_in(state: Any, entry: Any) -> list[str]:
    """The paths of the leaves that the link with this entry acts on; empty for an entry that stands alone."""
    if not isinstance(state, State):
        return []
    where = next(where for mine, where in zip(state, state.layout.where) if mine is entry)
    return [state.layout.paths[j] for j in where]


def require_these(shapes: list | int, params: Any, who: str) -> None:
    """Refuse parameters of other shapes, or of another total size, than a state was made for."""
    leaves = optree.tree_leaves(params)
    mine: Any = [tuple(p.shape) for p in leaves]
    wanted: Any = shapes
    if isinstance(shapes, int):
        mine = sum(p.numel() for p in leaves)
    else:
        wanted = [tuple(s) for s in shapes]
    if mine != wanted:
        raise ValueError(
            f"{who}: the state is over parameters of {wanted}, params has {mine}: pass the tree that init was given "
            "(behind a mask, the leaves it selects)"
        )


def require_values(tree: Any, wanted: Any, what: str, where: str) -> None:
    """Refuse a tree that does not hold the values of another, by the leaf's name; inside a transform nothing is compared."""
    require_like(tree, wanted, what)
    for name, leaf, other in zip(paths(wanted), optree.tree_leaves(tree), optree.tree_leaves(wanted)):
        if not (is_hidden(leaf) or is_hidden(other) or torch.equal(leaf.detach(), other.detach().to(leaf))):
            raise ValueError(
                f"{what} at {name} differ from {where} (by up to {(leaf - other).abs().max().item():.3g}): start there"
            )


def require_finite(tree: Any, what: str) -> None:
    """Refuse a tree that holds NaN or infinities, by the leaf's name; inside a transform nothing can be checked."""
    for name, leaf in zip(paths(tree), optree.tree_leaves(tree)):
        if is_hidden(leaf) or _is_finite(leaf):
            continue
        kind = "NaN" if bool(leaf.isnan().any()) else "infinite"
        raise ValueError(
            f"{what} is {kind} at {name} ({int((~leaf.isfinite()).sum())} of {leaf.numel()} entries): a batch, a gradient, a "
            "curvature or a hyperparameter that is not finite went into it; go back to a state from before that"
        )


def _is_finite(leaf: Tensor) -> bool:
    """Whether all entries are finite.

    Zero times NaN or infinity is NaN, so that the sum of zero times each entry shows it, several times faster than a mask.
    """
    return not bool(whole((leaf.detach() * 0).sum()).isnan())


def times(x: Tensor, factor: float | Tensor) -> Tensor:
    """``x`` times a number or a 0-d tensor, in the dtype of ``x`` also where that is 0-d too."""
    return x * (factor.to(x.dtype) if torch.is_tensor(factor) else factor)


def device_of(leaves: Sequence[Tensor]) -> torch.device:
    """Where the first leaf is."""
    return leaves[0].device if leaves else torch.device("cpu")
