"""A gradient transformation of another library, or of the user, as a link of a chain.

Links of this library act on lists of leaves. The transformation is given trees like the parameters, as its author expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import PURE, Leaves, TensorOps
from bayesopt_chain.matching.response import Response
from bayesopt_chain.trees import flattened


@dataclass(frozen=True)
class Foreign(Link):
    """The link that stands for a foreign transformation.

    Attributes:
        transformation: the ``GradientTransformation``.
        declared: its response; ``None`` if nobody declared it, so that no noise can be matched to it.
        name: its name in messages and in ``repr``.
        keywords: the keywords that its ``update`` takes.
    """

    transformation: Any
    declared: Response | None = None
    name: str = "foreign link"
    keywords: frozenset[str] = frozenset()
    traits: ClassVar[Traits] = Traits(on_shards="tree", all_leaves=True)

    @property
    def response(self) -> Response | None:
        return self.declared

    @property
    def extra_kwargs(self) -> frozenset[str]:
        return self.keywords

    def require_around(self, before: Sequence[Link], behind: Sequence[Link]) -> None:
        inside = self.transformation
        while hasattr(inside, "transformation"):  # a wrapper, whose links see nothing outside of it
            inside = inside.transformation
        for link in getattr(inside, "links", ()):
            link.require_around(before, behind)

    def init(self, leaves: Leaves, context: LinkContext) -> Any:
        return self.transformation.init(context.tree(leaves))

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        params = context.tree(context.params) if context.has_params else None
        new, later = self.transformation.update(
            context.tree(g), state, params=params, inplace=op.inplace, **context.extra
        )
        # The updates may be tensors of the transformation's own state, which later links must not overwrite in place.
        new = _copied(g, context.leaves(new), op)
        # In place the state stays in its tensors, although TorchOpt's own transformations make new ones.
        return new, op.keep(state, later)

    def rescaled(self, state: Any, at: Sequence[int], factors: Sequence[Any], op: TensorOps) -> Any:
        factor = factors[0]  # one for the whole state, because it is not known which tensor of it belongs to which leaf
        tensors, structure = flattened(state)
        new = [PURE.mul([t], [factor])[0] if t.is_floating_point() else t for t in tensors]
        return op.keep(state, structure.unflatten(new))

    def __str__(self) -> str:
        return self.name


def _copied(old: Sequence[Any], new: Sequence[Any], op: TensorOps) -> list[Any]:
    """Copy updates into the gradients' tensors (in place) or into tensors of their own; missing ones stay ``None``."""
    live = [n for n, x in enumerate(old) if x is not None and new[n] is not None and new[n] is not x]
    out = list(new)
    for n, y in zip(live, op.copy([old[n] for n in live], [new[n] for n in live])):
        out[n] = y
    return out
