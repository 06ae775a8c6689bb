"""What the transformations that carry a posterior share: finding their state in a chain's, schedules, writing in place.

Their states are NamedTuples of tensors, with one tensor for each parameter that is present, in optree order.

The states in which a posterior accumulates (Laplace, SWAG, the filters) are values: ``update`` makes a new one and never
writes into the one it was given, whatever ``inplace`` says, which concerns the buffers of the gradients alone. So a state
that was kept stays what it was. The states of variational inference are an optimizer's, and ``inplace=True`` overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import optree
import torch
from torch import Tensor

from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Rule
from bayesopt_chain.tracing import is_hidden
from bayesopt_chain.trees import paths

if TYPE_CHECKING:
    from typing_extensions import Self

State = TypeVar("State", bound=tuple)
ScalarOrSchedule: TypeAlias = float | Tensor | Callable[[Tensor], Any]


class PosteriorTransformation(Chain):
    """A chain of one rule, with questions for its state, or for that of a chain that has it as a link."""

    def __new__(cls, rules: tuple[Rule, ...]) -> Self:
        return super().__new__(cls, rules)  # pyright: ignore[reportReturnType]

    def __reduce__(self) -> Any:
        return type(self), (self.rules,)

    @property
    def _rule(self) -> Any:
        return self.rules[0]

    def _state(self, state: Any) -> Any:
        return find(state, self._rule.state, str(self._rule))


def present(leaves: Sequence[Tensor | None] | None) -> list[Tensor]:
    """The leaves that are there."""
    return [leaf for leaf in leaves or () if leaf is not None]


def spread_over(values: Sequence[Any], leaves: Sequence[Any] | None) -> list:
    """``values`` in the places of the leaves that are there, ``None`` in the others."""
    rest = iter(values)
    return [None if leaf is None else next(rest) for leaf in leaves or ()]


def find(state: Any, kind: type[State], maker: str) -> State:
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


def require_finite(tree: Any, what: str) -> None:
    """Refuse a tree that holds NaN or infinities, by the leaf's name; inside a transform nothing can be checked."""
    for name, leaf in zip(paths(tree), optree.tree_leaves(tree)):
        if is_hidden(leaf) or bool(leaf.isfinite().all()):
            continue
        kind = "NaN" if bool(leaf.isnan().any()) else "infinite"
        raise ValueError(
            f"{what} is {kind} at {name} ({int((~leaf.isfinite()).sum())} of {leaf.numel()} entries): a batch, a gradient, a "
            "curvature or a hyperparameter that is not finite went into it; go back to a state from before that"
        )


def written(old: Any, new: Any) -> Any:
    """``new`` in the tensors of ``old``, where the two are alike; what has outgrown its tensor gets one of its own."""
    olds, structure = optree.tree_flatten(old)
    news, grown = optree.tree_flatten(new)
    if structure != grown or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(olds, news)):
        return optree.tree_map(torch.clone, new)
    return optree.tree_unflatten(structure, [a if a is b else a.copy_(b) for a, b in zip(olds, news)])


def now(value: ScalarOrSchedule, count: Tensor) -> float | Tensor:
    """The value of a number, a 0-d tensor or a schedule of the update count, at this count."""
    if torch.is_tensor(value):
        return value.detach()
    return value(count) if callable(value) else value


def times(x: Tensor, factor: float | Tensor) -> Tensor:
    """``x`` times a number or a 0-d tensor, in the dtype of ``x`` also where that is 0-d too."""
    return x * (factor.to(x.dtype) if torch.is_tensor(factor) else factor)


def tensor_on(value: float | Tensor, device: torch.device) -> Tensor:
    """A float64 0-d tensor on a device, made there: a copy from the host could not be captured."""
    if torch.is_tensor(value):
        return value.to(device=device, dtype=torch.float64)
    return torch.full((), float(value), dtype=torch.float64, device=device)


def device_of(leaves: Sequence[Tensor]) -> torch.device:
    """Where the first leaf is."""
    return leaves[0].device if leaves else torch.device("cpu")
