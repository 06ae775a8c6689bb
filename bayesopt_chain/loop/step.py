r"""``make_step``: loss, gradient, chain and update as one pure function of (params, state, batch)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import _fused

Loss = Callable[[Any, Any], Any]


class Info(NamedTuple):
    """What a step reports: the detached loss at the parameters it started from, and the loss's auxiliary output."""

    loss: Tensor
    aux: Any


@dataclass(frozen=True)
class Step:
    """What :func:`make_step` returns: a callable that other loops (``capture``, ``parallel``) can look into."""

    loss: Loss
    tx: GradientTransformation
    curvature: Callable[[Any, Any], Any] | None = None
    inplace: bool = False
    fused: _fused.FusedSGD | None = None

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Info]:
        grads, info = gradient(self.loss, params, batch)
        extra = {} if self.curvature is None else {"curvature": self.curvature(params, batch)}
        with torch.no_grad():
            if self.fused is not None:
                p, g = (optree.tree_leaves(tree, none_is_leaf=True) for tree in (params, grads))
                if self.fused.fits(p, g, state):
                    return params, self.fused.advance(p, g, state), info
            updates, state = self.tx.update(grads, state, params=params, inplace=self.inplace, **extra)
            params = apply(params, updates, self.inplace)
        return params, state, info


def make_step(
    loss: Loss,
    tx: GradientTransformation,
    *,
    curvature: Callable[[Any, Any], Any] | None = None,
    inplace: bool = False,
) -> Step:
    """One training or sampling step.

    Args:
        loss: ``loss(params, batch)`` returns a scalar, the mean negative log posterior per datum, or ``(scalar, aux)``.
        tx: any gradient transformation of this library or of TorchOpt.
        curvature: ``curvature(params, batch)`` whose result ``tx.update`` receives as ``curvature=``.
        inplace: overwrite ``params`` and ``state`` instead of returning new ones. The tensors stay the same objects. The
            common chains (SGD, momentum, Nesterov, weight decay, matched noise, all of constant lr and temperature) then
            run fused; their values agree with ``update`` to one unit in the last place for each operation.

    Returns:
        ``step(params, state, batch) -> (params, state, Info(loss, aux))``, detached. Parameters that the loss does not
        use have gradient zero. The state alone determines the noise, so that the same arguments give the same result.

    Raises:
        ValueError: at the first step, a loss that is not a scalar.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def loss(params, batch):
        ...     return ((batch @ params["w"]) ** 2).mean()
        >>> tx, params = bc.sgd(0.1), {"w": torch.ones(2)}
        >>> step = bc.make_step(loss, tx)
        >>> params, state, info = step(params, tx.init(params), torch.eye(2))
        >>> params["w"], info.loss
        (tensor([0.9000, 0.9000]), tensor(1.))
    """
    if not isinstance(tx, GradientTransformation):
        raise TypeError(f"make_step: tx is {tx!r}, not a gradient transformation")

    fused = _fused.recognise(tx) if inplace and curvature is None else None
    return Step(loss, tx, curvature, inplace, fused)


def apply(params: Any, updates: Any, inplace: bool) -> Any:
    """``params + updates``; unlike ``torchopt.apply_updates`` it takes parameter trees with ``None``."""
    leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
    moves = optree.tree_leaves(updates, none_is_leaf=True)
    new = [p if u is None else p.add_(u) if inplace else p.add(u) for p, u in zip(leaves, moves)]
    return params if inplace else optree.tree_unflatten(spec, new)


def gradient(loss: Loss, params: Any, batch: Any) -> tuple[Any, Info]:
    """Gradient tree of the loss, and :class:`Info`.

    Reverse mode through autograd; under a ``torch.func`` transformation (many chains by ``vmap``) through ``torch.func``.
    """
    leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
    wanted = [i for i, p in enumerate(leaves) if p is not None]

    def value(chosen: list[Tensor]) -> tuple[Tensor, Any]:
        full = list(leaves)
        for i, p in zip(wanted, chosen):
            full[i] = p
        out = loss(optree.tree_unflatten(spec, full), batch)
        out, aux = out if isinstance(out, tuple) else (out, ())
        if not torch.is_tensor(out) or out.ndim != 0:
            came = f"shape {tuple(out.shape)}" if torch.is_tensor(out) else repr(type(out).__name__)
            raise ValueError(
                f"loss: must return a scalar tensor (or (scalar, aux)), got {came}; take the mean over the batch"
            )
        return out, aux

    if torch._C._functorch.peek_interpreter_stack() is not None:
        grads, (out, aux) = torch.func.grad_and_value(value, has_aux=True)([leaves[i] for i in wanted])
    else:
        with torch.enable_grad():
            chosen = [leaves[i].detach().requires_grad_() for i in wanted]
            out, aux = value(chosen)
            if not out.requires_grad:
                raise ValueError("loss: does not depend on params; compute it from the params it is given")
            grads = torch.autograd.grad(out, chosen, materialize_grads=True)
    full: list = [None] * len(leaves)
    for i, g in zip(wanted, grads):
        full[i] = g
    return optree.tree_unflatten(spec, full), Info(out.detach(), detach(aux))


def detach(tree: Any) -> Any:
    """The tree with its tensors detached."""
    return optree.tree_map(lambda x: x.detach() if torch.is_tensor(x) else x, tree)
