"""What a link is: one idea of a chain, as a function of lists of leaves, and what it does to the noise.

Three rules keep links short. A link sees only the leaves that are there: masks and missing gradients are the chain's affair.
A metric that learns does so in ``learn``, from the clean gradient, before noise is added. A link that owns a pole names the
field of its state that holds it: the chain rescales it before a step and adds carried noise after (see ``matching``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torchopt.base import EmptyState

from bayesopt_chain import checks
from bayesopt_chain.core.op import Leaves, Op
from bayesopt_chain.core.response import Linear, Response
from bayesopt_chain.random import stream as keyed_stream
from bayesopt_chain.tracing import batch_levels, is_transformed


class At(NamedTuple):
    """Where a link stands: in the user's tree, and in this step."""

    spec: Any  # the structure of the user's tree
    index: tuple[int, ...]  # the numbers of the leaves that the link acts on  # pyright: ignore[reportIncompatibleMethodOverride]
    present: tuple[int, ...]  # those of them that are there now
    all_params: Sequence[Any] | None
    plan: Any
    extra: dict[str, Any]  # the keywords it takes
    learned: Any = ()  # what its ``learn`` gave in this step

    @property
    def params(self) -> list[Any]:
        """The parameters of the leaves that are there."""
        assert self.all_params is not None
        return [self.all_params[j] for j in self.present]

    @property
    def paths(self) -> list[str]:
        """The paths of the leaves that the link acts on, as text."""
        return [self.plan.paths[j] for j in self.index]

    def tree(self, leaves: Sequence[Any]) -> Any:
        """The user's tree: ``None`` where a gradient is missing, an empty node where a mask leaves a leaf out."""
        if len(self.present) == self.spec.num_leaves:
            return self.spec.unflatten(leaves)
        have = {**dict.fromkeys(self.index), **dict(zip(self.present, leaves))}
        absent = self.plan.absent
        return self.spec.unflatten([have.get(j, None if j in absent else ()) for j in range(self.spec.num_leaves)])

    def leaves(self, tree: Any) -> list[Any]:
        """The leaves that are there, of a tree like the user's."""
        flat = self.spec.flatten_up_to(tree)
        return [flat[j] for j in self.present]


@dataclass(frozen=True)
class Link:
    """One idea of a chain. Subclasses are frozen dataclasses, so that chains compare, hash, print and pickle.

    A state is a NamedTuple; a field with a tuple of one tensor for each leaf is a field by leaf. ``init`` and ``update``
    see the leaves that are there; a ``whole`` link sees all its leaves, with ``None`` for a missing gradient, and its whole
    state.
    """

    masks: tuple[Any, ...] = field(default=(), kw_only=True, hash=False, repr=False)  # all of them select its leaves

    velocity: ClassVar[str | None] = None  # the field of the state whose pole this link owns
    carries: ClassVar[bool] = False  # whether that field is ``v = mu v + b g``, so that it may hold back half a noise
    needs_params: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    exacting: ClassVar[bool] = False  # whether its gradients must be like its parameters, noise in the chain or not
    coupled: ClassVar[bool] = False  # whether it cannot do without the gradient of any of its leaves
    stacked: ClassVar[bool] = False  # whether its leaves are particles, stacked on axis 0, that interact
    samples: ClassVar[int] = 0  # draws that the gradient is taken at, for a transform that carries a posterior

    @property
    def response(self) -> Response | None:
        """What it does to the gradient; ``None`` where nobody said."""
        return Linear()

    @property
    def accepts(self) -> frozenset[str]:
        """The keywords of ``update`` that it takes."""
        return frozenset()

    @property
    def needs(self) -> frozenset[str]:
        """Those without which it refuses."""
        return frozenset()

    def init(self, leaves: Leaves, at: At) -> Any:
        """The first state."""
        return EmptyState()

    def learn(self, g: Leaves, state: Any, op: Op, at: At) -> tuple[Any, Any]:
        """The state of a metric that has seen the clean gradient, and what ``colour`` and ``update`` need of this step."""
        return state, ()

    def update(self, g: Leaves, state: Any, op: Op, at: At) -> tuple[Leaves, Any]:
        """New leaves and state."""
        return g, state

    def colour(self, state: Any, at: At, k: Sequence[int], e: Leaves, power: float) -> Leaves:
        """``P^power e`` for the leaves numbered ``k`` among the link's own; ``e`` may be overwritten."""
        raise NotImplementedError

    def rate(self, state: Any, n: int) -> list[Any]:
        """The magnitude of a changing gain at each of ``n`` leaves, 0-d."""
        raise NotImplementedError

    def sample(self, state: Any, params: Leaves, at: At) -> Any:
        """A draw from the posterior that the state carries, at whose leaves the gradient is to be taken."""
        raise NotImplementedError

    def report(self, state: Any, draw: Any, loss: Tensor, aux: Any) -> Any:
        """What a step that took its gradient at a draw says about itself; ``None`` for loss and aux alone."""
        return None

    def __str__(self) -> str:
        return repr(self)


def show(link: Link) -> str:
    """A link with its masks."""
    if not link.masks:
        return str(link)
    return f"masked({link}, {', '.join(str(getattr(mask, 'label', '...')) for mask in link.masks)})"


@dataclass(frozen=True)
class Keyed(Link):
    """A link that draws: its state has ``key`` and ``count``, 0-d int64, the stream of :mod:`bayesopt_chain.random.stream`."""

    exacting = True

    generator: torch.Generator | None = field(default=None, kw_only=True, hash=False, compare=False, repr=False)
    stream: keyed_stream.Stream | None = field(default=None, kw_only=True)

    def start(self, leaves: Sequence[Tensor], at: At) -> tuple[Tensor, Tensor]:
        """A fresh key and a count of zero, on the parameters' device."""
        require_samplable(leaves, at.paths)
        return keyed_stream.new_key(self.generator, leaves[0].device), torch.zeros(
            (), dtype=torch.int64, device=leaves[0].device
        )

    def normals(self, state: Any, g: Leaves, at: At, draws: int = 1, kind: str = "gaussian") -> list[list[Tensor]]:
        """``draws`` variables like every gradient, for this step of the state's stream."""
        require_own_key(state.key, g)
        given = dict(zip(at.present, g))
        like = [given[j] if j in given else at.plan.template(j) for j in at.index]
        numbers = [at.plan.numbers[j] for j in at.index]
        xi = keyed_stream.normals(
            state.key,
            state.count,
            [t.unsqueeze(0) for t in like],
            [draws] * len(like),
            kind,
            self.stream,
            numbers=numbers,
        )
        return [x for j, x in zip(at.index, xi) if j in given]


def require_samplable(leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Refuse parameters that cannot be sampled: none at all, no real floating-point tensors, or one tensor twice.

    Raises:
        TypeError, ValueError: naming the leaves.
    """
    checks.parameters(leaves, paths)
    if is_transformed():
        return
    seen: dict[tuple[int, int], str] = {}
    for leaf, path in zip(leaves, paths):
        if leaf.numel() and leaf.layout is torch.strided and leaf.device.type != "meta":
            place = (leaf.data_ptr(), leaf.numel())
            if place[0] and seen.setdefault(place, path) != path:
                raise ValueError(
                    f"params: {seen[place]} and {path} are one tensor; each would get noise of its own, and together they "
                    "would sample at twice the temperature. Pass the tensor once, and let the loss use it twice"
                )


def require_own_key(key: Tensor, g: Sequence[Tensor]) -> None:
    """Refuse gradients with a ``vmap`` axis that the key lacks: every lane would get the same noise.

    Raises:
        ValueError: with what to do instead.
    """
    if is_transformed() and any(batch_levels(x) - batch_levels(key) for x in g):
        raise ValueError(
            "state: its key is one for all lanes of vmap, while the gradients differ, so that every lane would get the same "
            "noise: give each lane a state of its own, as bc.parallel does, or bc.stack(bc.fork(state, n))"
        )
