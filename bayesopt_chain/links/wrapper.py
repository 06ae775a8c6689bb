"""Transformations in others: any as a link of a chain, and wrappers around a chain; and the weights that chains give draws.

Links of this library act on lists of leaves. A transformation of another library, or of the user, which stands in a chain as
the link :class:`Foreign`, is given trees like the parameters, as its author expects. The state of a :class:`Wrapper` has the
state of the chain inside as its field ``inner``.

Draws of a link that is :class:`Weighted` have importance weights, so that averages over them have to be weighted averages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import optree
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain.core.link import ANY, Link, LinkContext, Traits
from bayesopt_chain.core.op import PURE, Leaves, TensorOps
from bayesopt_chain.matching.response import Response


def keywords_of(link: GradientTransformation) -> frozenset[str]:
    """The keywords that the ``update`` of a transformation takes besides ``params`` and ``inplace``.

    Args:
        link: a transformation of this library, of TorchOpt or of the user.

    Returns:
        The names; :data:`bayesopt_chain.core.link.ANY` among them stands for every keyword.

    Example:
        >>> import torchopt
        >>> keywords_of(torchopt.transform.scale(2.0))
        frozenset()
    """
    extra_kwargs: frozenset[str] | None = getattr(link, "extra_kwargs", None)
    if extra_kwargs is not None:
        return extra_kwargs
    parameters = list(inspect.signature(link.update).parameters.values())[2:]
    names = {ANY if p.kind is p.VAR_KEYWORD else p.name for p in parameters}
    return frozenset(names) - {"params", "inplace"}


class Wrapper(GradientTransformation):
    """A transformation around another one.

    Attributes:
        around: makes, of the transformation inside, an object with the functions ``init`` and ``update`` of the wrapper.
        transformation: the transformation inside.
    """

    around: ClassVar[Callable[[GradientTransformation], Any]]
    transformation: GradientTransformation

    def __new__(cls, transformation: GradientTransformation) -> Self:
        around = cls.around(transformation)
        self = super().__new__(cls, init=around.init, update=around.update)
        self.transformation = transformation
        return self

    @property
    def links(self) -> tuple[Any, ...]:
        """The links of the chain inside; none of another transformation."""
        return getattr(self.transformation, "links", ())

    @property
    def extra_kwargs(self) -> frozenset[str]:
        """The keywords that ``update`` takes and passes on to the transformation inside."""
        return keywords_of(self.transformation)

    @property
    def required_kwargs(self) -> frozenset[str]:
        """The keywords without which the transformation inside refuses an update."""
        return getattr(self.transformation, "required_kwargs", frozenset())

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.transformation == other.transformation

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self), self.transformation))

    def __reduce__(self) -> Any:
        return type(self), (self.transformation,)


def unwrapped(tx: GradientTransformation) -> GradientTransformation:
    """The transformation inside all wrappers; ``tx`` itself if it is not a wrapper."""
    while isinstance(tx, Wrapper):
        tx = tx.transformation
    return tx


def state_inside(tx: GradientTransformation, state: Any) -> Any:
    """The state of the transformation that :func:`unwrapped` returns.

    Args:
        tx: a transformation, with any number of wrappers.
        state: its state.
    """
    while isinstance(tx, Wrapper):
        tx, state = tx.transformation, state.inner
    return state


class Weighted:
    """A link whose draws have weights.

    After each update the field ``weight`` of its state, 0-d, is the weight of the parameters from which that update started.
    """


def weight_of(tx: GradientTransformation, state: Any) -> Tensor:
    """The weight, 0-d, of the parameters from which the last update of a chain started.

    Args:
        tx: a chain with one link that is :class:`Weighted`, or a wrapper of such a chain.
        state: the state of ``tx`` after that update.

    Returns:
        A copy, which later updates in place do not change.
    """
    entries: Any = zip(getattr(tx, "links", ()), state_inside(tx, state))
    return next(entry.weight for link, entry in entries if isinstance(link, Weighted)).clone()


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
        tensors, structure = optree.tree_flatten(state)
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
