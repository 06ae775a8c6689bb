"""What a link is: one step of a chain, as a function of lists of leaves, and how noise passes through it.

Three rules keep links short. A link sees only the leaves that have a gradient: the chain settles masks and missing gradients.
A preconditioner that learns does so from the clean gradient, and asks for the noise before it acts
(:meth:`LinkContext.with_noise`). A link that remembers earlier gradients names the field of its state that holds this memory:
the chain rescales the field before a step in which a rate changed, and adds the deferred part of the noise to it after a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar, Literal

import optree
import torch
from torch import Tensor
from torchopt.base import EmptyState

from bayesopt_chain.checks import as_call, is_spread, short
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.core.state import Layout, edited
from bayesopt_chain.distributed.shards import Sharding
from bayesopt_chain.engine.parts import Part
from bayesopt_chain.matching.noise_inputs import NoiseInput
from bayesopt_chain.matching.response import Response
from bayesopt_chain.random.stream import leaf_numbers
from bayesopt_chain.trees import broadcast_prefix, paths_of

ANY = "**"  # among the keywords of a link, says that the link takes every keyword


@dataclass(frozen=True, slots=True)
class LinkScope:
    """The leaves that a link acts on, and its neighbours: what is the same in every update of one layout."""

    index: tuple[int, ...]  # the numbers of these leaves, in the order of the user's tree
    paths: tuple[str, ...]
    numbers: tuple[int, ...]  # by which a random stream knows these leaves: hashes of their paths
    # the elements of each leaf that are on this rank; None where no parameter is sharded
    pieces: tuple[Any, ...] | None
    # the leaves of a tree into which the link puts its own: () for leaves that a mask leaves out, None for the others
    blank: tuple[Any, ...]
    extra_kwargs: frozenset[str]  # the keywords of ``update`` that the link takes
    before: tuple[Link, ...]  # the links in front of it that act on any of its leaves
    behind: tuple[Link, ...]
    shards: Sharding | None

    @staticmethod
    def of(links: Sequence[Link], i: int, layout: Layout, shards: Sharding | None) -> LinkScope:
        """The scope of link number ``i``."""
        index, acting, numbers = layout.where[i], set(layout.where[i]), leaf_numbers(layout.paths)
        return LinkScope(
            index,
            paths=tuple([layout.paths[j] for j in index]),
            numbers=tuple([numbers[j] for j in index]),
            pieces=None if layout.pieces is None else tuple([layout.pieces[j] for j in index]),
            blank=tuple([None if j in acting or x is None else () for j, x in enumerate(layout.shapes)]),
            extra_kwargs=links[i].traits.extra_kwargs,
            before=tuple([x for x, where in zip(links[:i], layout.where) if not acting.isdisjoint(where)]),
            behind=tuple(
                [x for x, where in zip(links[i + 1 :], layout.where[i + 1 :]) if not acting.isdisjoint(where)]
            ),
            shards=shards,
        )


@dataclass(slots=True)
class LinkContext:
    """What a link may know besides gradients and state: its leaves, the parameters, the keywords of this update, the noise.

    Attributes:
        scope: what is the same in every update.
        present: the numbers of the leaves that have a gradient in this update, in the order of the user's tree; in ``init``
            of all leaves that the link acts on.
        all_params: the parameters of all leaves, in the order of the user's tree; ``None`` if ``update`` was not given them.
    """

    scope: LinkScope
    present: tuple[int, ...]
    _spec: optree.PyTreeSpec  # of the user's tree
    all_params: Sequence[Any] | None
    _extra: dict[str, Any]
    _let_noise_in: Callable[[Callable[[], Sequence[Tensor]]], Leaves] | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of these leaves as text, ``['layer']['weight']``; empty for a bare tensor."""
        return self.scope.paths

    @property
    def params(self) -> list[Any]:
        """The parameters of the leaves that are present.

        Raises:
            ValueError: there are none, since ``update`` was called without them. A link whose traits say ``needs_params``
                is not reached then.
        """
        if self.all_params is None:
            raise ValueError(
                "update: a link of this chain needs the parameters: call update(updates, state, params=params)"
            )
        return [self.all_params[j] for j in self.present]

    @property
    def extra(self) -> dict[str, Any]:
        """The keywords of ``update`` that the link takes."""
        return {k: v for k, v in self._extra.items() if not self.scope.extra_kwargs.isdisjoint((k, ANY))}

    def with_noise(self, denominators: Callable[[], Sequence[Tensor]]) -> Leaves:
        """Let the noise enter inside a preconditioner that has just learned ``1 / P``, and return the noisy gradients.

        A preconditioner that learns calls it once in ``update``, between learning and acting.

        Args:
            denominators: gives ``1 / P`` for each leaf that is present; it is called only where noise enters.

        Raises:
            TypeError: the link's response is not ``Preconditioner(learns=True)``.
        """
        if self._let_noise_in is None:
            raise TypeError(
                "with_noise: the response of this link is not Preconditioner(learns=True): noise enters before it acts"
            )
        return self._let_noise_in(denominators)

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Put these leaves into a tree like the user's, with ``None`` for a missing gradient and ``()`` for a masked leaf.

        Where parameters are sharded it is a tree of DTensors.
        """
        if self.scope.shards is not None:
            leaves = self.scope.shards.laid_out(self.present, leaves)
        every = list(self.scope.blank)
        for j, x in zip(self.present, leaves):
            every[j] = x
        return self._spec.unflatten(every)

    def leaves(self, tree: Any) -> list[Any]:
        """Take the leaves that are present out of a tree like the user's; of DTensors, this rank's parts."""
        flat = self._spec.flatten_up_to(tree)
        return self.parts([flat[j] for j in self.present])

    def parts(self, values: list[Any], what: str = "updates") -> list[Any]:
        """Take the part that belongs to this rank of values that were given for each leaf that is present."""
        return values if self.scope.shards is None else self.scope.shards.parts(self.present, values, what)

    def broadcast(self, tree: Any, what: str, *, detached: bool = True) -> list[Tensor]:
        """A tensor for each of the link's leaves, from a tree like the parameters, or a prefix of one. For use in ``init``.

        The tree may also be one of the link's own leaves alone. Its entries are numbers, or tensors that broadcast to the
        parameter; they get the parameter's dtype and device, and are not expanded. Where parameters are sharded, a tensor is
        sharded like its parameter, and this rank's part of it is returned.

        Args:
            tree: the user's argument.
            what: the name of that argument, for error messages.
            detached: whether the tensors are detached from the graph of the user's.

        Raises:
            ValueError: the tree has another structure, or an entry is no number or has another shape; names its path.
        """
        if paths_of(tree) == self.paths:
            values = optree.tree_leaves(tree, none_is_leaf=True)
        else:
            every = broadcast_prefix(tree, self._spec.unflatten(list(self.all_params or ())), what)
            values = [every[j] for j in self.present]
        out: list[Tensor] = []
        for value, p, path in zip(self.parts(values, what), self.params, self.paths):
            if not isinstance(value, (Real, Tensor)) or (isinstance(value, Tensor) and value.is_meta and not p.is_meta):
                raise ValueError(
                    f"{what} at {path or 'tensor'} is {short(value)}, which is no number and no tensor with values"
                )
            x = torch.as_tensor(
                value.detach() if detached and isinstance(value, Tensor) else value, dtype=p.dtype, device=p.device
            )
            if not is_spread(x.shape, p.shape):
                raise ValueError(
                    f"{what} at {path or 'tensor'} has shape {tuple(x.shape)}, which does not broadcast to the parameter's "
                    f"{tuple(p.shape)}; pass numbers, or tensors like the parameters"
                )
            out.append(x)
        return out

    def spread(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of this rank's elements of the leaves that are present, laid out as these leaves are.

        Where parameters are sharded they are DTensors, else the tensors themselves.
        """
        return list(leaves) if self.scope.shards is None else self.scope.shards.laid_out(self.present, leaves)

    def total(self, values: Sequence[Tensor]) -> Tensor:
        """The sum of ``values`` of one shape, one for each leaf that is present.

        Where ranks hold parts of the leaves it is the sum over the ranks too, which takes messages.
        """
        return (
            sum(values[1:], values[0]) if self.scope.shards is None else self.scope.shards.total(self.present, values)
        )

    def numel(self, leaves: Sequence[Tensor]) -> int:
        """The number of elements of the leaves that are present, on all ranks together, given this rank's tensors of them."""
        return sum(map(Tensor.numel, leaves)) if self.scope.shards is None else self.scope.shards.count(self.present)


OnShards = Literal["refused", "elementwise", "tree"]


@dataclass(frozen=True)
class Traits:
    """What a chain has to know of a link besides its response.

    Every default is the safe one: a link that leaves a trait out may be refused in some chain, but never gives a wrong result.

    Attributes:
        on_shards: what the link can do with parameters of which every rank holds a part (FSDP2, tensor parallelism).
            ``"refused"``: nothing, so that a chain with this link refuses such parameters. ``"elementwise"``: each element
            is treated by itself, so that the link is given this rank's part of each leaf. ``"tree"``: the link takes the
            tree of DTensors.
        refusal_hint: appended to the refusal of sharded parameters: what to use instead of this link.
        needs_params: whether ``update`` needs ``params=``; the chain refuses a call without it before anything is changed.
        checks_gradients: whether gradients have to be dense tensors like the parameters also in a chain without noise.
        needs_all_gradients: whether a missing gradient is refused, since the link couples its leaves.
        all_leaves: whether the link is given all of its leaves, ``None`` for a missing gradient, and its whole state; else
            only the leaves that are present, and of the state what belongs to them.
        acts_on_particles: whether the link's leaves are stacked particles (axis 0), and each particle's update depends on the
            others.
        samples: the number of draws at which the gradient is taken, for a link that carries a posterior. Such a link has a
            method ``draw(state, leaves, names)``: of its whole state, the parameters that it acts on and their paths. What it
            returns has a field ``params``, a tensor for each leaf, shaped as the leaf for one draw, else with the draws in
            front.
        velocity: the field of the state that is the memory of the link's only pole, one tensor for each leaf. Without it a
            chain with a changing learning rate or temperature is refused. A link with ``all_leaves`` rescales itself.
        response: what the link does to the gradient as a filter, of a link for which that is always the same.
        extra_kwargs: the keywords of ``update`` that the link takes; :data:`ANY` among them stands for every keyword.
        required_kwargs: the keywords of ``update`` without which the link refuses.
        carries: whether that field is ``v = mu v + b g``, so that it may hold the deferred part of a noise.
    """

    on_shards: OnShards = "refused"
    refusal_hint: str = ""
    needs_params: bool = False
    checks_gradients: bool = False
    needs_all_gradients: bool = False
    all_leaves: bool = False
    acts_on_particles: bool = False
    samples: int = 0
    velocity: str = ""
    carries: bool = False
    response: Response | None = None
    extra_kwargs: frozenset[str] = frozenset()
    required_kwargs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Link:
    """One step of a chain. Subclasses are frozen dataclasses, so that chains compare, hash, print and pickle.

    Every subclass defines ``traits``, which is what the chain has to know of it, and the functions ``init`` and ``update``; and
    ``response``, where what the link does to the gradient as a filter depends on its fields. The other methods are for the
    links that their docstrings name.

    The state of a link is a NamedTuple. A field that is a tuple with one tensor for each leaf is a field by leaf. Methods see
    the leaves that have a gradient, and the part of the state that belongs to these leaves; a link with the trait
    ``all_leaves`` sees all leaves and its whole state.
    """

    # the link acts on the leaves that every mask selects
    masks: tuple[Any, ...] = field(default=(), kw_only=True, hash=False, repr=False)

    traits: ClassVar[Traits] = Traits()

    def __str__(self) -> str:
        return as_call(self)

    @property
    def response(self) -> Response | None:
        """What the link does to the gradient as a filter; with ``None`` no noise can be matched to the link."""
        return self.traits.response

    @property
    def part(self) -> Part | None:
        """What an engine has to know to act in the link's place; with ``None`` the link acts by itself."""
        return None

    @property
    def shown(self) -> str:
        """The link and its masks, as ``repr`` of a chain shows them."""
        masks = ", ".join(str(getattr(mask, "label", "...")) for mask in self.masks)
        return f"masked({self}, {masks})" if masks else str(self)

    def require_around(self, before: Sequence[Link], behind: Sequence[Link]) -> None:
        """Refuse links beside which this one would be wrong in silence. A chain calls it once for each layout.

        Args:
            before: the links in front that act on any of this link's leaves; for a link within a wrapper those in front of
                the wrapper.
            behind: the links behind, likewise.

        Raises:
            ValueError: a link that may not stand there.
        """

    def init(self, leaves: Leaves, context: LinkContext) -> Any:
        """Make the first state.

        Args:
            leaves: the parameters that the link acts on.
            context: the link's view of the tree.

        Returns:
            A NamedTuple of tensors and tuples of tensors; ``EmptyState()`` for a link without memory.
        """
        return EmptyState()

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        """Turn the gradients, as the links in front of this one left them, into this link's updates and its next state.

        Args:
            g: the gradients of the leaves that have one. With ``op`` in place they may be overwritten.
            state: the part of the state that belongs to these leaves.
            op: the operations, pure or in place, that the link is written in.
            context: the link's view of the tree, the parameters and the keywords of this update.

        Returns:
            The updates, shaped as ``g``, and the next state, structured as ``state``.
        """
        return g, state

    def apply_power(self, e: Leaves, power: float, state: Any, context: LinkContext) -> Leaves:
        """Shape noise by a power of the preconditioner ``P``. For links with response ``Preconditioner`` that do not learn.

        Args:
            e: noise of the leaves that have a gradient; it may be overwritten.
            power: 1/2 for noise of covariance ``P``, -1/2 for noise of covariance ``1 / P``.
            state: the part of the state that belongs to these leaves.
            context: the link's view of the tree.

        Returns:
            ``P^power e``, shaped as ``e``.
        """
        raise NotImplementedError

    def rescaled(self, state: Any, at: Sequence[int], factors: Sequence[Any], op: TensorOps) -> Any:
        """Multiply the memory of some leaves. The chain calls it before a step in which a rate changed.

        Args:
            state: the link's whole state.
            at: the places of these leaves among the link's own.
            factors: a number or a 0-d float64 tensor for each: by them the memory gets the variance that it has under the
                new rate.
            op: the operations, pure or in place.

        Returns:
            The state with the field ``traits.velocity`` multiplied.
        """
        return edited(state, self.traits.velocity, at, lambda v: op.mul(v, factors))

    def injection(self, noise_inputs: Sequence[NoiseInput], layout: Layout) -> Any:
        """Make the object that draws the noise. For links with response ``Noise``.

        Args:
            noise_inputs: where in the chain this noise enters.
            layout: the leaves of the chain.
        """
        raise NotImplementedError

    def rate(self, state: Any, n: int) -> list[Any]:
        """The magnitude of the gain in this step. For links with response ``Rate``.

        Args:
            state: the link's whole state.
            n: the number of the link's leaves.

        Returns:
            ``n`` tensors, 0-d.
        """
        raise NotImplementedError

    def report(self, state: Any, draw: Any, loss: Tensor) -> dict[str, Any]:
        """What a step whose gradient was taken at a draw reports besides its loss.

        Args:
            state: the link's whole state, before the step.
            draw: what ``draw`` of the link returned.
            loss: 0-d, at the draw.

        Returns:
            Fields of :class:`bayesopt_chain.Info`, by name.
        """
        return {}


@dataclass(frozen=True, eq=False)
class HoldsTree(Link):
    """A link with arguments that are trees of tensors, of which a dataclass would ask the truth value to compare them."""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        both: Any = [[getattr(x, f.name) for f in fields(self)] for x in (self, other)]
        (mine, structure), (theirs, others) = map(optree.tree_flatten, both)
        return structure == others and all(map(_are_equal, mine, theirs))

    __hash__ = Link.__hash__


def _are_equal(x: object, y: object) -> bool:
    """Whether two leaves, tensors or anything else, are equal."""
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return torch.equal(torch.as_tensor(x, device="cpu"), torch.as_tensor(y, device="cpu"))
    return x == y
