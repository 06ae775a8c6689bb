r"""Transformations in others: any as a link of a chain, and wrappers around a chain; and the weights that chains give draws.

Links of this library act on lists of leaves. A transformation of another library, or of the user, which stands in a chain as
the link :class:`Foreign`, is given trees like the parameters, as its author expects. The state of a :class:`Wrapper` has the
state of the chain inside as its field ``inner``.

Draws of a link that is :class:`Weighted` have importance weights, so that averages over them have to be weighted averages.

``skip_nonfinite`` skips every step whose gradient has NaN or infinite entries, which would enter velocities and averages and
never leave them. With ``ok`` true if every entry of the gradient ``g`` is finite, a step is

    updates, state' = tx.update(g, state)     if ok,
    updates, state' = 0, state                otherwise.

A skipped step leaves the parameters, velocities, averages, step counts and the position of the random stream as they were, and
the next step draws the noise that the skipped step would have drawn. A run in which some batches have bad gradients is
therefore equal, bit for bit, to the run over the other batches.

``with_master_weights`` updates parameters of 16 bits with the accuracy of float32. A bfloat16 number has 8 significant bits.
Adding less than about 1/512 of it rounds to no change, and most steps of a sampler are smaller than that. Let ``p`` be a narrow
leaf (bfloat16 or float16), and

    m = p + r                                    the master weight, float32; ``r`` is in the state, 0 at first
    u, inner' = tx.update(g, inner, params=m)    with the gradient in float32
    v = narrow(narrow(m + u) - p)                what this update returns
    r' = m + u - p',    p' = narrow(p + v)       what ``apply_updates`` makes of it

so that ``m' = p' + r' = m + u``. If a step is smaller than half of the parameter, ``p' = narrow(m')``, and the difference of
``m'`` and ``p'`` is exact in float32 (Sterbenz 1974). The master weights are then equal, bit for bit, to the parameters of the
same chain in float32 whose gradients are taken at ``p``. After a larger step, for example across zero, ``p'`` differs from
``m'`` by the rounding of ``v``, and the master weight has the error of rounding ``p'`` to float32. The state has the difference
and not the master weight itself, so that the chain goes on from a parameter that was changed from outside. Leaves of other
dtypes are updated as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import checks, tracing
from bayesopt_chain._torch import local
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import ANY, Link, LinkContext, Traits
from bayesopt_chain.core.op import PURE, Leaves, TensorOps
from bayesopt_chain.distributed.shards import everywhere
from bayesopt_chain.matching.response import Response
from bayesopt_chain.trees import all_finite

NARROW = (torch.bfloat16, torch.float16)


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

    @property
    def traits(self) -> Traits:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Traits(on_shards="tree", all_leaves=True, response=self.declared, extra_kwargs=self.keywords)

    def require_around(self, before: Sequence[Link], behind: Sequence[Link]) -> None:
        inside = self.transformation
        while hasattr(inside, "transformation"):  # a wrapper, whose links see nothing outside of it
            inside = inside.transformation
        for link in getattr(inside, "links", ()):
            link.require_around(before, behind)

    def init(self, leaves: Leaves, context: LinkContext) -> Any:
        return self.transformation.init(context.tree(leaves))

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        params = None if context.all_params is None else context.tree(context.params)
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


class SkipState(NamedTuple):
    """The state of a transformation in ``skip_nonfinite``.

    Attributes:
        inner: the state of the transformation itself.
        skipped: how many updates were skipped, 0-d int64.
    """

    inner: Any
    skipped: Tensor


@dataclass(frozen=True)
class _Skip:
    """The methods ``init`` and ``update`` of :class:`SkipNonfinite`, which call those of the transformation ``tx``."""

    tx: Any

    def init(self, params: Any, **options: Any) -> SkipState:
        leaves = [x for x in optree.tree_leaves(params) if isinstance(x, Tensor)]
        device = leaves[0].device if leaves else torch.device("cpu")
        return SkipState(self.tx.init(params, **options), torch.zeros((), dtype=torch.int64, device=device))

    def update(self, updates: Any, state: SkipState, *, params: Any = None, inplace: bool = True, **extra: Any) -> Any:
        both: Any = (updates, extra)
        leaves: list[Any] = optree.tree_leaves(both)
        # Where ranks hold parts of the gradients, all of them have to skip the step if the part of one of them is bad.
        ok = everywhere(all_finite([local(x) for x in leaves]), leaves)
        if not tracing.is_readable(ok):
            return self._choose(ok, updates, state, params, inplace, extra)
        if bool(ok):
            updates, inner = self.tx.update(updates, state.inner, params=params, inplace=inplace, **extra)
            return updates, SkipState(inner, state.skipped if inplace else state.skipped.clone())
        still = optree.tree_map(Tensor.zero_ if inplace else torch.zeros_like, _first(updates, params))
        if inplace:
            return still, SkipState(state.inner, state.skipped.add_(1))
        return still, SkipState(optree.tree_map(torch.clone, state.inner), state.skipped + 1)

    def _choose(
        self, ok: Tensor, updates: Any, state: SkipState, params: Any, inplace: bool, extra: dict[str, Any]
    ) -> Any:
        """Make the update where ``ok`` cannot be read: compute it in any case, and choose the result by ``torch.where``.

        The transformation is given zeros in the place of a bad gradient, so that autograd meets no entry that is not finite.

        Raises:
            ValueError: the new state has another structure than the old one, so that one of both cannot be chosen.
        """
        given: Any = (updates, extra)

        def kept(x: Any) -> Any:
            return _where(ok, x, 0.0)

        safe: Any = optree.tree_map(kept, given)
        moves, inner = self.tx.update(safe[0], state.inner, params=params, inplace=False, **safe[1])
        moves = optree.tree_map(kept, moves)
        old, structure = optree.tree_flatten(state.inner)
        new, grown = optree.tree_flatten(inner)
        if structure != grown or any(a.shape != b.shape for a, b in zip(old, new)):
            raise ValueError(
                "skip_nonfinite: the state grows with the update, so that it cannot be kept without looking at the gradient; "
                "use a structure of curvature whose size stays, or leave this step uncaptured and unstacked"
            )
        chosen = [_where(ok, b, a) for a, b in zip(old, new)]
        skipped = state.skipped + (~ok).to(torch.int64)
        if inplace:
            moves = optree.tree_map(Tensor.copy_, _first(updates, params), moves)
            chosen, skipped = [a.copy_(b) for a, b in zip(old, chosen)], state.skipped.copy_(skipped)
        return moves, SkipState(optree.tree_unflatten(structure, chosen), skipped)


class SkipNonfinite(Wrapper):
    """The transformation that :func:`skip_nonfinite` returns.

    Attributes:
        transformation: the transformation whose updates are skipped.
    """

    around = _Skip

    def __repr__(self) -> str:
        return f"skip_nonfinite({self.transformation!r})"


def skip_nonfinite(tx: GradientTransformation) -> SkipNonfinite:
    """Skip every update whose gradient is not finite, and count them.

    Wrap a whole chain or optimizer. Inside a chain only the wrapped links would be skipped, and a chain that samples refuses
    that. The gradients and the tensors among the keywords (``loss=``, gradients of single data) are examined; a gradient may
    be ``None``. Under ``vmap`` each chain skips its own steps.

    On a CPU this costs one pass over the gradients. Where reading a value would wait for the device or is impossible (on a GPU,
    under tracing or ``vmap``), the update is computed in any case and one of both results is chosen; with ``inplace=True`` this
    needs memory for a second state.

    Args:
        tx: any gradient transformation of this library or of TorchOpt, at any temperature.

    Returns:
        A transformation whose state is ``SkipState(inner, skipped)``. Pass ``state.inner`` to functions that take the state of
        ``tx``, for example ``link.posterior(state.inner, params)``. A skipped step returns updates of zero and the state as it
        was.

    Raises:
        TypeError: ``tx`` is no gradient transformation.
        ValueError: at an update where values cannot be read, a state whose size changes with the update
            (``structure="root"``).

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.skip_nonfinite(bc.sgd(0.1, 0.9)), torch.ones(2)
        >>> state = tx.init(params)
        >>> updates, state = tx.update(torch.tensor([1.0, torch.nan]), state, params=params)
        >>> updates, state.skipped, state.inner[0].trace
        (tensor([0., 0.]), tensor(1), (tensor([0., 0.]),))
    """
    if not isinstance(tx, GradientTransformation):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"skip_nonfinite: tx is {tx!r}, not a gradient transformation")
    return SkipNonfinite(tx)


def _first(updates: Any, params: Any) -> Any:
    """Gradients shaped as the parameters: the first of those at several draws, which are stacked on a further axis 0."""
    if params is None:
        return updates
    leaves, spec = optree.tree_flatten(updates, none_is_leaf=True)
    pairs = zip(leaves, optree.tree_leaves(params, none_is_leaf=True))
    return spec.unflatten([x if x is None or p is None or x.ndim == p.ndim else x[0] for x, p in pairs])


def _where(ok: Tensor, x: Any, other: Any) -> Any:
    """Choose ``x`` if ``ok`` and ``other`` if not.

    ``x`` is returned unchanged if it is not a tensor, or if it has integers and ``other`` is a number.
    """
    if not isinstance(x, Tensor) or (not isinstance(other, Tensor) and not (x.is_floating_point() or x.is_complex())):
        return x
    return torch.where(ok.to(x.device), x, other)


class MasterState(NamedTuple):
    """The state of a chain with master weights.

    Attributes:
        inner: the state of the chain inside.
        residue: for each narrow leaf, in the order of the tree, the master weight minus the parameter, float32, of the shape
            of the leaf.
    """

    inner: Any
    residue: tuple[Tensor, ...]


@dataclass(frozen=True)
class _AtMasters:
    """The methods ``init`` and ``update`` of :class:`MasterWeights`, which call those of the transformation ``tx``."""

    tx: Any

    def init(self, params: Any, *, like: Any = None) -> MasterState:
        leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
        given = {} if like is None else {"like": like}
        residue = [torch.zeros_like(p, dtype=torch.float32) for p in leaves if _is_narrow(p)]
        return MasterState(self.tx.init(spec.unflatten(map(_wide, leaves)), **given), tuple(residue))

    def update(
        self, updates: Any, state: MasterState, *, params: Any = None, inplace: bool = True, **extra: Any
    ) -> Any:
        if params is None:
            raise ValueError("with_master_weights needs the parameters: call update(updates, state, params=params)")
        g, spec = optree.tree_flatten(updates, none_is_leaf=True)
        p = optree.tree_leaves(params, none_is_leaf=True)
        m = _masters(p, state.residue)
        trees = [spec.unflatten(leaves) for leaves in (map(_wide, g), m)]
        moves, inner = self.tx.update(trees[0], state.inner, params=trees[1], inplace=inplace, **extra)
        u = optree.tree_leaves(moves, none_is_leaf=True)
        residue = list(state.residue)
        for k, j in enumerate([j for j, x in enumerate(p) if _is_narrow(x)]):
            if u[j] is None:
                continue
            new = m[j] + u[j]
            v = (new.to(p[j].dtype).float() - p[j].float()).to(p[j].dtype)
            r = new - (p[j] + v).float()
            u[j], residue[k] = (g[j].copy_(v), residue[k].copy_(r)) if inplace else (v, r)
        return spec.unflatten(u), MasterState(inner, tuple(residue))


class MasterWeights(Wrapper):
    """The transformation that :func:`with_master_weights` returns.

    Attributes:
        transformation: the transformation inside.
    """

    around = _AtMasters

    @checks.takes(params=checks.PARAMS, state=checks.instance(MasterState, "a state of this transformation"))
    def masters(self, state: MasterState, params: Any) -> Any:
        """The master weights.

        Args:
            state: the state of this transformation.
            params: the parameters.

        Returns:
            A tree like ``params`` with float32 leaves in the place of the narrow ones.

        Raises:
            TypeError: ``state`` is not a ``MasterState``, or ``params`` are not tensors.
            ValueError: the state belongs to other parameters.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> tx, params = bc.with_master_weights(bc.sgd(0.001)), torch.ones(1, dtype=torch.bfloat16)
            >>> updates, state = tx.update(torch.ones_like(params), tx.init(params), params=params)
            >>> params + updates, tx.masters(state, params + updates)
            (tensor([1.], dtype=torch.bfloat16), tensor([0.9990]))
        """
        leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
        narrow = [p.shape for p in leaves if _is_narrow(p)]
        if narrow != (of := [r.shape for r in state.residue]):
            raise ValueError(f"masters: params have narrow leaves of the shapes {narrow}, the state is for {of}")
        return spec.unflatten(_masters(leaves, state.residue))

    def __repr__(self) -> str:
        return f"with_master_weights({self.transformation!r})"


def with_master_weights(tx: GradientTransformation) -> MasterWeights:
    """Update bfloat16 and float16 parameters by float32 master weights, so that small steps and small noise are not lost.

    Wrap a whole chain. Gradients are taken at the narrow parameters. The state takes four bytes for each narrow parameter, in
    addition to the state of the chain, whose velocities and averages are float32.

    Args:
        tx: a chain of this library or a transformation of TorchOpt, at any temperature, that follows the gradient at the
            parameters.

    Returns:
        A transformation of state ``MasterState(inner, residue)``, with a method ``masters(state, params)`` that gives the
        float32 weights. Its updates have the dtypes of the parameters.

    Raises:
        TypeError: ``tx`` is no gradient transformation.
        ValueError: ``tx`` carries a posterior of its own, needs curvature or is a wrapper itself; at an update, ``params`` are
            missing.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> params = torch.ones(3, dtype=torch.bfloat16)
        >>> step = bc.make_step(lambda p, batch: p.float().sum(), bc.with_master_weights(bc.sgd(0.001)))
        >>> state = step.init(params)
        >>> for _ in range(4):
        ...     params, state, info = step(params, state, None)
        >>> params
        tensor([0.9961, 0.9961, 0.9961], dtype=torch.bfloat16)
    """
    if not isinstance(tx, GradientTransformation):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"with_master_weights: tx is {tx!r}, not a gradient transformation")
    if isinstance(tx, Wrapper):
        raise ValueError(
            f"with_master_weights: tx is {type(tx).__name__}; wrap the chain first: skip_nonfinite(with_master_weights(tx))"
        )
    for link in tx.links if isinstance(tx, Chain) else ():
        if link.traits.samples or link.traits.required_kwargs:
            raise ValueError(
                f"with_master_weights: {link.shown} takes its gradient at a draw, or needs "
                f"{', '.join(sorted(link.traits.required_kwargs)) or 'draws'}, which would be rounded; keep float32 "
                "parameters, and let the model compute in make_step(..., autocast=torch.bfloat16)"
            )
    return MasterWeights(tx)


def _is_narrow(x: Any) -> bool:
    """Whether a leaf is a tensor of 16 bits, which gets a master weight."""
    return isinstance(x, Tensor) and x.dtype in NARROW


def _wide(x: Any) -> Any:
    """A narrow gradient or parameter in float32."""
    return x.float() if _is_narrow(x) else x


def _masters(leaves: list[Any], residue: tuple[Tensor, ...]) -> list[Any]:
    """The parameters, with master weights in the place of the narrow ones."""
    beyond = iter(residue)
    return [p.detach().float() + next(beyond) if _is_narrow(p) else p for p in leaves]
