"""A transformation of another library, or of the user, as a link: it is given trees, as its author expects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain.core.link import ANY, Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.matching.response import Response
from bayesopt_chain.trees import flattened


@dataclass(frozen=True)
class Foreign(Link):
    """The link that stands for such a transformation.

    Where a learning rate changes, what it remembers is scaled by ``rescale``, or all of its floating-point state by one factor.
    """

    transformation: Any  # a ``GradientTransformation``
    declared: Response | None = None  # None: nobody declared it
    name: str = "foreign link"
    keywords: frozenset[str] = frozenset()
    rescale: Callable[[Any, Tensor], Any] | None = None

    @property
    def response(self) -> Response | None:
        return self.declared

    @property
    def traits(self) -> Traits:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Traits(on_shards="tree", all_leaves=True, rescales=self.rescale is not None)

    @property
    def extra_kwargs(self) -> frozenset[str]:
        return self.keywords

    def init(self, leaves: Leaves, context: LinkContext) -> Any:
        return self.transformation.init(context.tree(leaves))

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        params = context.tree(context.params) if context.has_params else None
        new, state = self.transformation.update(
            context.tree(g), state, params=params, inplace=op.inplace, **context.extra
        )
        return _copied(
            g, context.leaves(new), op
        ), state  # it may return its own state, which no later link may overwrite

    def rescaled(self, state: Any, at: Sequence[int], factors: Leaves, op: TensorOps) -> Any:
        factor = factors[0]  # which tensor belongs to which leaf is not known
        if self.rescale is not None:
            return op.keep(state, self.rescale(state, factor))
        tensors, structure = flattened(state)
        new = [t * factor.to(t.dtype) if t.is_floating_point() else t for t in tensors]
        return op.keep(state, structure.unflatten(new))

    def __str__(self) -> str:
        return self.name


def _copied(old: Sequence[Any], new: Sequence[Any], op: TensorOps) -> list[Any]:
    live = [n for n, x in enumerate(old) if x is not None and new[n] is not None and new[n] is not x]
    out = list(new)
    for n, y in zip(live, op.copy([old[n] for n in live], [new[n] for n in live])):
        out[n] = y
    return out


def keywords_of(link: GradientTransformation) -> frozenset[str]:
    """Named keywords of an ``update`` beyond the protocol's own."""
    extra_kwargs: frozenset[str] | None = getattr(link, "extra_kwargs", None)
    if extra_kwargs is not None:
        return extra_kwargs
    parameters = list(inspect.signature(link.update).parameters.values())[2:]
    names = {ANY if p.kind is p.VAR_KEYWORD else p.name for p in parameters}
    return frozenset(names) - {"params", "inplace"}
