"""The gradient of a loss at one point, and the report of a step (:class:`Info`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain import _torch, checks, tracing
from bayesopt_chain._torch import whole
from bayesopt_chain.links.wrapper import state_inside
from bayesopt_chain.schedules import now, scalar
from bayesopt_chain.trees import leaves_of

Loss = Callable[..., Any]  # loss(params, batch), or loss(params, batch, buffers) of a module with buffers


NO_GRADIENT = (
    "loss: does not depend on params, so that no gradient would hold the chain: compute it from the params it is given "
    "(a module by torch.func.functional_call(module, params, ...)), and outside of torch.inference_mode(), which records none"
)

# classes that need no further checks; DTensors and other subclasses may override operations
PLAIN = frozenset((Tensor, torch.nn.Parameter))
_LAYOUT = attrgetter("layout")
_HAS_RANKS = dist.is_available()


class Info(NamedTuple):
    """The report of a step, or, of several captured steps, their reports stacked on axis 0.

    Attributes:
        loss: the loss at the parameters that the step started from, 0-d and detached.
        aux: the auxiliary output of the loss, detached; ``()`` if the loss returns none.
        finite: with ``make_step(..., check_finite=True)``, whether loss and gradient are finite, 0-d; else ``()``.
        gradient_norm: with ``make_step(..., monitor=True)``, the Euclidean norm of the gradient over all leaves, before the
            transformation, 0-d; else ``()``.
        temperature: with ``make_step(..., monitor=True)``, the temperature of this step, 0-d, and 0 for a chain that does not
            sample; else ``()``.
        weight: the weight, in means over draws, of the parameters that the step started from, 0-d, for a chain whose draws
            have weights (:func:`bayesopt_chain.samplers.samadams`); ``()`` if all draws have equal weights.
        observed: the result of ``make_step(..., observe=)``, detached; else ``()``.
        negative_elbo: of a variational step, the negative evidence lower bound per datum, in nats, 0-d; else ``()``.
        draws: with ``capture(..., draws=True)``, the parameters after every step, stacked on axis 0; else ``()``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> step = bc.make_step(lambda p, batch: ((p - batch) ** 2).sum(), bc.sgd(0.1))
        >>> step(torch.zeros(1), bc.sgd(0.1).init(torch.zeros(1)), torch.ones(1))[2].loss
        tensor(1.)
    """

    loss: Tensor
    aux: Any
    finite: Any = ()
    gradient_norm: Any = ()
    temperature: Any = ()
    weight: Any = ()
    observed: Any = ()
    negative_elbo: Any = ()
    draws: Any = ()


class Evaluation(NamedTuple):
    """The result of a :class:`GradientSource`.

    Attributes:
        grads: the gradient that ``tx.update`` receives, a tree like the parameters.
        info: the report of the step.
        extra: further keywords of ``tx.update``, by name.
        carried: the value that the source gets in the next step: the buffers of a module, the memory of an estimator, or
            ``None``.
    """

    grads: Any
    info: Any
    extra: dict[str, Any]
    carried: Any = None


class GradientSource(Protocol):
    """Computes the gradient of a step: :class:`LossGradient`, and the classes of :mod:`bayesopt_chain.loop.sources`."""

    def __call__(self, params: Any, state: Any, batch: Any, carried: Any) -> Evaluation:
        """Evaluate at ``params``.

        Args:
            params: the parameters before the step.
            state: the state of the transformation.
            batch: the batch of the step.
            carried: ``carried`` of the last evaluation.

        Returns:
            The gradient, the report, further keywords, and the value to carry to the next step.
        """
        ...


@dataclass(frozen=True)
class LossGradient:
    """The gradient of ``loss(params, batch)``, or of ``loss(params, batch, buffers)`` if ``carried`` holds buffers."""

    loss: Loss

    def __call__(self, params: Any, state: Any, batch: Any, carried: Any) -> Evaluation:
        """Take one gradient."""
        if carried is None:
            return Evaluation(*gradient(self.loss, params, batch), {})

        def with_buffers(params: Any, batch: Any) -> Any:
            out = self.loss(params, batch, carried)
            new = out[1] if isinstance(out, tuple) and len(out) in (2, 3) else None
            if not isinstance(new, Mapping) or new.keys() != carried.keys():
                raise ValueError(
                    "loss: with buffers= it must return (scalar, buffers) or (scalar, buffers, aux), the buffers by the "
                    f"names it was given, got {_described(out)}; outputs, buffers = forward.with_buffers(params, "
                    "batch, buffers) gives them"
                )
            return out[0], (dict(new), out[2] if len(out) == 3 else ())

        grads, info = gradient(with_buffers, params, batch)
        buffers, aux = info.aux
        return Evaluation(grads, info._replace(aux=aux), {}, buffers)


def gradient(loss: Loss, params: Any, batch: Any) -> tuple[Any, Info]:
    """Differentiate ``loss(params, batch)`` with respect to the parameters.

    The gradient is taken in reverse mode by autograd. Inside of a ``torch.func`` transformation (many chains under ``vmap``) it
    is taken by ``torch.func``, since autograd cannot differentiate through the wrapped tensors there.

    Args:
        loss: returns a scalar, or ``(scalar, aux)``.
        params: a tree of tensors; ``None`` stands for a parameter that is absent.
        batch: passed on to the loss.

    Returns:
        The gradient, a tree like the parameters with zeros for parameters that the loss does not use, and :class:`Info`. Both
        are detached.

    Raises:
        TypeError: a leaf of the parameters is no real floating-point tensor.
        ValueError: the loss is no scalar, or depends on none of the parameters; a gradient is sparse.
    """
    leaves: list[Any]
    leaves, spec = leaves_of(params)
    if not (PLAIN.issuperset(map(type, leaves)) and all(map(Tensor.is_floating_point, leaves))):
        leaves, spec = optree.tree_flatten(params)  # without absent parameters, which the structure keeps
        checks.differentiable(leaves, params)
    if tracing.is_transformed():
        grads, info = _transformed_gradient(lambda x: value(loss, spec.unflatten(x), batch), leaves)
    else:
        # new leaves of autograd, so that the caller's tensors get neither a gradient nor a graph
        points = [p.detach().requires_grad_() for p in leaves]
        was_enabled = torch.is_grad_enabled()
        _torch.set_grad_enabled(True)
        try:
            out, aux = value(loss, spec.unflatten(points), batch)
            grads: Any = _torch.gradients(out, points) if out.requires_grad else ()
        finally:
            _torch.set_grad_enabled(was_enabled)
        if not grads or NoneType in map(type, grads):
            grads = _with_zeros(points, grads)
        out = out.detach()
        info = Info(out if type(out) is Tensor else _torch.whole(out), detach(aux))
    if {*map(_LAYOUT, grads)} != {torch.strided}:
        for path, g in zip(optree.tree_paths(params), grads):
            checks.dense(f"loss: the gradient of leaf {checks.name(path)}", g)
    return spec.unflatten(grads), info


def _with_zeros(points: Sequence[Tensor], found: Sequence[Tensor | None]) -> list[Tensor]:
    """Fill in zeros for parameters that the loss does not use; raise ValueError if it uses none, or leaves out a DTensor."""
    found = found or [None] * len(points)
    # a module under fully_shard computes with other parameters than those that it is given
    if any(g is None and _torch.is_dtensor(x) for x, g in zip(points, found)):
        raise ValueError(f"loss: does not depend on a DTensor among params; leave it out of params. If {FULLY_SHARDED}")
    if all(g is None for g in found):
        raise ValueError(NO_GRADIENT)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(points, found)]


def _transformed_gradient(at: Callable[[Any], tuple[Tensor, Any]], here: list[Tensor]) -> tuple[list[Tensor], Info]:
    """Compute the gradient, value and auxiliary output of a function ``at`` of tensors, by ``torch.func``."""
    kept: list[Any] = []  # entries of aux that are no tensors, which torch.func does not return

    def checked(points: list[Tensor]) -> tuple[Tensor, Any]:
        out, aux = at(points)
        if not (out.requires_grad and any(_torch.level(out) == _torch.level(x) for x in points)):
            raise ValueError(NO_GRADIENT)
        tensors, kept[:] = split(aux)
        return out, tensors

    grads, (out, tensors) = torch.func.grad_and_value(checked, has_aux=True)(here)
    return grads, Info(_torch.whole(out.detach()), detach(joined(tensors, kept)))


def value(loss: Loss, params: Any, batch: Any) -> tuple[Tensor, Any]:
    """Evaluate a loss.

    Args:
        loss: ``loss(params, batch)``, which returns a scalar or ``(scalar, aux)``.
        params: the parameters, a tree of tensors.
        batch: passed on to the loss.

    Returns:
        The scalar, and the auxiliary output (``()`` if there is none).

    Raises:
        ValueError: the loss returned no real scalar.
    """
    if _HAS_RANKS and dist.is_initialized() and dist.get_world_size() > 1 and _is_new(loss):
        with torch.nn.modules.module.register_module_forward_pre_hook(_refuse_wrapped):
            out = loss(params, batch)
    else:
        out = loss(params, batch)
    aux: Any = ()
    if isinstance(out, tuple):
        if len(out) != 2:
            raise ValueError(f"loss: must return a scalar or (scalar, aux), got a tuple of {len(out)}")
        out, aux = out
    if not isinstance(out, Tensor) or out.ndim != 0 or out.is_complex():
        came = f"shape {tuple(out.shape)}, {out.dtype}" if isinstance(out, Tensor) else repr(type(out).__name__)
        raise ValueError(
            f"loss: must return a real scalar tensor (or (scalar, aux)), got {came}; take the mean over the batch"
        )
    return out, aux


def detach(tree: Any) -> Any:
    """Detach the tensors of a tree; anything else stays as it is."""
    if type(tree) is tuple and not tree:  # the aux of most losses, for which walking a tree would be slow
        return tree
    return optree.tree_map(lambda x: x.detach() if torch.is_tensor(x) else x, tree)  # pyright: ignore[reportArgumentType]


def unshared(tree: Any, *written: Any) -> Any:
    """Copy the tensors of a tree that share memory with trees that are written to next; anything else stays as it is."""
    others: Any = written
    memory = {_torch.storage_of(_torch.local(x)) for x in optree.tree_leaves(others)} if tracing.is_plain() else None

    def kept(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            return x
        return x.clone() if memory is None or _torch.storage_of(_torch.local(x)) in memory else x

    return optree.tree_map(kept, tree)  # pyright: ignore[reportArgumentType]


def split(aux: Any) -> tuple[list[Tensor], list[Any]]:
    """Separate the tensors of a tree from its structure and its other leaves, for :func:`joined`."""
    leaves, structure = optree.tree_flatten(aux, none_is_leaf=True)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return tensors, [structure, *[None if isinstance(x, Tensor) else (x,) for x in leaves]]


def joined(tensors: Sequence[Tensor], rest: Sequence[Any]) -> Any:
    """Rebuild the tree that :func:`split` separated."""
    structure, *places = rest
    given = iter(tensors)
    return structure.unflatten([next(given) if place is None else place[0] for place in places])


def _described(out: Any) -> str:
    """Describe the types that a loss returned, for a message."""
    if isinstance(out, tuple):
        return f"a tuple of {len(out)}: ({', '.join(type(x).__name__ for x in out)})"
    return type(out).__name__


# Two wrappers work with ``loss.backward()`` and ``.grad`` only, while a step computes gradients by ``torch.autograd.grad`` or
# ``torch.func.grad``. These do not run the hooks of DistributedDataParallel, so that each rank would follow the gradient of its
# own data, without an error. A module under ``fully_shard`` computes with parameters that it gathers itself and not with those
# that ``torch.func.functional_call`` gives it, so that the gradient would be zero.

FULLY_SHARDED = (
    "the module is under fully_shard and computes with the parameters that it gathers itself, not with those it is handed. "
    "Train it by loss.backward() and an optimizer of bc.optim, such as bc.optim.SGHMC(model.parameters(), lr, temperature=T, "
    "generator=bc.distributed.generator(seed))"
)
_seen: WeakSet[Callable[..., Any]] = WeakSet()  # losses that were evaluated under :func:`_refuse_wrapped` once


def _is_new(loss: Callable[..., Any]) -> bool:
    """Whether a loss is evaluated for the first time. One that cannot be hashed or referenced weakly is new every time."""
    with suppress(TypeError):
        known = loss in _seen
        _seen.add(loss)
        return not known
    return True


def _refuse_wrapped(module: torch.nn.Module, args: Any) -> None:
    """A hook in front of every call of a module: refuse one under DistributedDataParallel or ``fully_shard``."""
    if _torch.spread_parts(module, _torch.REPLICATED):
        raise ValueError(
            "loss: the module is wrapped in DistributedDataParallel, whose hooks see loss.backward() and not the gradients "
            "that a step asks for, so that every rank would follow its own data. Call the module inside (model.module), and "
            "average over the ranks with bc.make_step(loss, tx, mesh=mesh)"
        )
    if _torch.spread_parts(module, _torch.SHARDED):
        raise ValueError(f"loss: {FULLY_SHARDED}")


def monitored(info: Any, grads: Any, tx: Any, state: Any) -> Any:
    """Fill in the norm of the gradient and the temperature of a report.

    Args:
        info: the report.
        grads: the gradient before the transformation, a tree.
        tx: the transformation.
        state: the state of the transformation before the step.

    Returns:
        The report with both.
    """
    with torch.no_grad():
        # the norms of leaves first, and then their norm: no copy of all gradients is made
        norms = [whole(torch.linalg.vector_norm(g)) for g in optree.tree_leaves(grads)]
        norm = torch.linalg.vector_norm(torch.stack([x.to(info.loss.dtype) for x in norms]))
        return info._replace(gradient_norm=norm, temperature=temperature(tx, state, info.loss))


def temperature(tx: Any, state: Any, like: Tensor) -> Tensor:
    """Evaluate the temperature of a chain at the count of steps in its state.

    Args:
        tx: the transformation.
        state: its state.
        like: a tensor with the dtype and device of the result.

    Returns:
        A 0-d tensor, which is 0 if no link samples; one entry per link if several links sample.
    """
    links = getattr(tx, "links", ())
    found = [
        scalar(now(link.temperature, entry.step), like.device).to(like.dtype)
        for link, entry in zip(links, state_inside(tx, state))
        if hasattr(link, "temperature") and isinstance(getattr(entry, "step", None), Tensor)
    ]
    return found[0] if len(found) == 1 else torch.stack(found) if found else like.new_zeros(())
