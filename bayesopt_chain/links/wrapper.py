"""Wrappers, whose state has the state of the chain inside as its field ``inner``, and the weights that chains give draws.

Draws of a link that is :class:`Weighted` have importance weights, so that averages over them have to be weighted averages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Self

from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain.core.link import ANY


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
