"""What a link is: one idea of a chain, as a function of lists of leaves, and what it does to the noise.

Three rules keep links short. A link sees only the leaves that are there: masks and missing gradients are the chain's affair.
A preconditioner that learns does so from the clean gradient, and asks for the noise before it acts
(``context.with_noise``). A link that owns a pole names the field of its state that holds it: the chain rescales it before a
step and adds deferred noise after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torchopt.base import EmptyState

from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.core.state import edited
from bayesopt_chain.distributed.shards import Spread
from bayesopt_chain.matching.response import Linear, Response

if TYPE_CHECKING:
    from bayesopt_chain.core.update import Injection, Plan, Update
    from bayesopt_chain.matching.noise_inputs import NoiseInput


@dataclass(slots=True)
class LinkContext:
    """Where a link stands: in the user's tree, and in this step."""

    update: Update
    i: int  # the number of the link
    present: tuple[int, ...]  # the numbers of its leaves that are there now

    @property
    def plan(self) -> Plan:
        """What the chain knows of all its leaves."""
        return self.update.plan

    @property
    def index(self) -> tuple[int, ...]:
        """The numbers of the leaves that the link acts on."""
        return self.plan.where[self.i]

    @property
    def params(self) -> list[Any]:
        """The parameters of the leaves that are there."""
        params = self.update.params
        return [] if params is None else [params[j] for j in self.present]

    @property
    def paths(self) -> list[str]:
        """The paths of the leaves that the link acts on, as text."""
        return [self.plan.paths[j] for j in self.index]

    @property
    def extra(self) -> dict[str, Any]:
        """The keywords of ``update`` that the link takes."""
        accepts = self.plan.links[self.i].extra_kwargs
        return {k: v for k, v in self.update.extra.items() if k in accepts or ANY in accepts}

    def with_noise(self, denominators: Callable[[], Sequence[Tensor]]) -> Leaves:
        """The gradients with the noise that enters inside a metric which has just learned ``1 / P``, its ``denominators``.

        A metric that learns calls it once in ``update``, between learning and acting. They are asked for where noise enters.
        """
        if self.i in self.plan.entering:
            self.update.enter(self.i, dict(zip(self.present, denominators())))
        return [self.update.g[j] for j in self.present]

    def tree(self, leaves: Sequence[Any]) -> Any:
        """The user's tree: ``None`` where a gradient is missing, an empty node where a mask leaves a leaf out."""
        if self.plan.shards is not None:
            leaves = self.plan.shards.whole(self.present, leaves)
        if len(self.present) == self.update.spec.num_leaves:
            return self.update.spec.unflatten(leaves)
        shapes = self.plan.layout.shapes
        have = {**dict.fromkeys(self.index), **dict(zip(self.present, leaves))}
        return self.update.spec.unflatten(
            [have.get(j, None if shape is None else ()) for j, shape in enumerate(shapes)]
        )

    def leaves(self, tree: Any) -> list[Any]:
        """The leaves that are there, of a tree like the user's."""
        flat = self.update.spec.flatten_up_to(tree)
        return self.parts([flat[j] for j in self.present])

    def parts(self, values: list[Any], what: str = "updates") -> list[Any]:
        """Of what was given for each leaf that is there, the part that belongs to this rank."""
        return values if self.plan.shards is None else self.plan.shards.parts(self.present, values, what)


ANY = "**"  # among the keywords of a link that takes every keyword


@dataclass(frozen=True)
class Link:
    """One idea of a chain. Subclasses are frozen dataclasses, so that chains compare, hash, print and pickle.

    A state is a NamedTuple; a field with a tuple of one tensor for each leaf is a field by leaf. All methods see the leaves
    that are there; a link of ``all_leaves`` sees all of them, with ``None`` for a missing gradient, and its whole state.
    """

    # the link acts on the leaves that every mask selects
    masks: tuple[Any, ...] = field(default=(), kw_only=True, hash=False, repr=False)

    # the field of the state whose pole this link owns; a link of ``all_leaves`` rescales itself
    velocity: ClassVar[str] = ""
    carries: ClassVar[bool] = False  # whether that field is ``v = mu v + b g``, so that it may hold back half a noise
    rescales: ClassVar[bool] = False  # whether ``rescaled`` reaches all that it remembers, however many poles it has
    needs_params: ClassVar[bool] = False
    all_leaves: ClassVar[bool] = False
    # whether its gradients must be like its parameters, noise in the chain or not
    checks_gradients: ClassVar[bool] = False
    needs_all_gradients: ClassVar[bool] = False  # whether it cannot do without the gradient of any of its leaves
    acts_on_particles: ClassVar[bool] = False  # whether its leaves are particles, stacked on axis 0, that interact
    spread: ClassVar[Spread] = "shards"  # what it takes of parameters that are spread over ranks
    refusal_hint: ClassVar[str] = ""  # where it refuses them, what to take
    samples: ClassVar[int] = 0  # draws that the gradient is taken at, for a transform that carries a posterior

    @property
    def response(self) -> Response | None:
        """What it does to the gradient; ``None`` where nobody said."""
        return Linear()

    @property
    def shown(self) -> str:
        """The link with its masks."""
        masks = ", ".join(str(getattr(mask, "label", "...")) for mask in self.masks)
        return f"masked({self}, {masks})" if masks else str(self)

    @property
    def extra_kwargs(self) -> frozenset[str]:
        """The keywords of ``update`` that it takes."""
        return frozenset()

    @property
    def required_kwargs(self) -> frozenset[str]:
        """Those without which it refuses."""
        return frozenset()

    def init(self, leaves: Leaves, context: LinkContext) -> Any:
        """The first state."""
        return EmptyState()

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        """New leaves and state."""
        return g, state

    def apply_power(self, e: Leaves, power: float, state: Any, context: LinkContext) -> Leaves:
        """``P^power e`` of a preconditioner that does not learn, for noise of the leaves ``context.present``.

        ``e`` may be overwritten.
        """
        raise NotImplementedError

    def rescaled(self, state: Any, at: Sequence[int], factors: Leaves, op: TensorOps) -> Any:
        """Its state with what it remembers of the gradients of its leaves numbered ``at`` multiplied by these factors."""
        return edited(state, self.velocity, at, lambda v: op.mul(v, factors))

    def carrying(self, state: Any, at: Sequence[int], e: Leaves, op: TensorOps) -> Any:
        """Its state with the part of a noise that acts in the next step added to the velocity of these leaves."""
        return edited(state, self.velocity, at, lambda v: op.add(v, e))

    def rate(self, state: Any, n: int) -> list[Any]:
        """The magnitude of a changing gain at each of ``n`` leaves, 0-d."""
        raise NotImplementedError

    def injection(self, noise_inputs: Sequence[NoiseInput], plan: Plan) -> Injection:
        """What draws the noise of these sites, for a link whose response is ``Noise``."""
        raise NotImplementedError

    def sample(self, state: Any, params: Leaves, context: LinkContext) -> Any:
        """A draw from the posterior that the state carries, at whose leaves the gradient is to be taken."""
        raise NotImplementedError

    def report(self, state: Any, draw: Any, loss: Tensor, aux: Any) -> Any:
        """What a step that took its gradient at a draw says about itself; ``None`` for loss and aux alone."""
        return None
