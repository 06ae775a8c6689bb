"""Steps that hand the loss to the chain, for one chain or for particles that interact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchopt.base import GradientTransformation

from bayesopt_chain.loop.step import Info, Loss, apply, gradient, writable


def make_loss_step(loss: Loss, tx: GradientTransformation, *, inplace: bool = False) -> Callable:
    """:func:`bayesopt_chain.make_step` for chains whose ``update`` takes ``loss=``, such as contour SGLD.

    Args:
        loss: ``loss(params, batch)`` returns a scalar, or ``(scalar, aux)``.
        tx: the chain. inplace: overwrite params and state.

    Returns:
        ``step(params, state, batch) -> (params, state, Info(loss, aux))``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.samplers.contour_sgld(0.1, 0.0, 5.0, temperature=1.0), torch.ones(2)
        >>> step = bc.make_loss_step(lambda p, batch: (p**2).sum(), tx)
        >>> params, state, info = step(params, tx.init(params), ())
        >>> info.loss
        tensor(2.)
    """

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Info]:
        grads, info = gradient(loss, params, batch)
        return _advance(tx, grads, info, params, state, inplace)

    return step


def make_particle_step(loss: Loss, tx: GradientTransformation, *, inplace: bool = False) -> Callable:
    """One step of particles that interact: parameters stacked on axis 0, one chain over all of them.

    For independent chains use :func:`bayesopt_chain.parallel`.

    Args:
        loss: ``loss(params, batch)`` of *one* particle, a scalar or ``(scalar, aux)``.
        tx: a chain for stacked parameters (SVGD, replica exchange). It gets ``loss=``, ``[n]``, if it takes that.
        inplace: overwrite params and state.

    Returns:
        ``step(params, state, batch) -> (params, state, Info(loss, aux))`` with losses ``[n]``; one batch for all.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, particles = bc.samplers.svgd(0.1, temperature=1.0), torch.randn(4, 2)
        >>> step = bc.make_particle_step(lambda p, batch: (p**2).sum() / 2, tx)
        >>> particles, state, info = step(particles, tx.init(particles), ())
        >>> info.loss.shape
        torch.Size([4])
    """
    each = torch.vmap(lambda params, batch: gradient(loss, params, batch), in_dims=(0, None))

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Info]:
        grads, info = each(params, batch)
        return _advance(tx, grads, info, params, state, inplace)

    return step


def _advance(tx, grads, info: Info, params, state, inplace: bool):
    takes_loss = any("loss" in rule.accepts for rule in getattr(tx, "rules", ()))
    with torch.no_grad():
        extra = {"loss": info.loss} if takes_loss else {}
        updates, state = tx.update(
            writable(grads) if inplace else grads, state, params=params, inplace=inplace, **extra
        )
        return apply(params, updates, inplace), state, info
