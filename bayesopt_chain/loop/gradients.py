r"""Gradient estimators with less minibatch noise, that any chain can be fed from.

Both subtract from the batch's gradient at ``theta`` its gradient at a reference ``theta*`` and add the mean over all data:

    g(theta) = grad_batch(theta) - grad_batch(theta*) + grad_full(theta*),

unbiased for every ``theta*``, with noise that vanishes as ``theta -> theta*``.

* **control variates** (Baker, Fearnhead, Fox and Nemeth, 2019): ``theta*`` is a mode, found once by optimising.
* **SVRG** (Johnson and Zhang, 2013; Dubey et al., 2016, for Langevin): ``theta*`` is a snapshot of the chain, refreshed now
  and then.

An estimator has three functions: ``init(params) -> state``, ``estimate(params, state, batch) -> (grads, Info)`` and
``refresh(params, state) -> state``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain.loop.interrupts import uninterrupted
from bayesopt_chain.loop.step import Info, Loss, apply, gradient

__all__ = ["GradientEstimator", "control_variates", "make_estimated_step", "mean_gradient", "svrg"]


class ReferenceState(NamedTuple):
    """The reference parameters ``theta*`` and the gradient of the whole loss there, each a tree like the parameters."""

    reference: Any
    full_gradient: Any


class GradientEstimator(NamedTuple):
    """``init(params)``, ``estimate(params, state, batch)`` and ``refresh(params, state)``; see the module."""

    init: Callable[[Any], ReferenceState]
    estimate: Callable[[Any, ReferenceState, Any], tuple[Any, Info]]
    refresh: Callable[[Any, ReferenceState], ReferenceState]


def control_variates(loss: Loss, full_gradient: Callable[[Any], Any], mode: Any) -> GradientEstimator:
    """Gradients corrected by their values at a mode of the loss.

    Args:
        loss: ``loss(params, batch)``, mean over the batch, prior included.
        full_gradient: gradient of the mean over *all* data; :func:`mean_gradient` makes one from batches.
        mode: parameters near a minimum of the loss: run the chain at ``temperature=0`` first.

    Returns:
        A :class:`GradientEstimator` that costs two gradients of the batch. ``refresh`` changes nothing.

    Raises:
        ValueError: no mode; at ``init``, a mode that is not like the parameters.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> data = torch.randn(100, 2)
        >>> loss = lambda p, batch: ((p - batch) ** 2).sum(-1).mean()
        >>> estimator = bc.gradients.control_variates(loss, bc.gradients.mean_gradient(loss, [data]), mode=data.mean(0))
        >>> params = torch.zeros(2)
        >>> grads, info = estimator.estimate(params, estimator.init(params), data[:10])
        >>> torch.allclose(grads, 2 * (params - data.mean(0)), atol=1e-6)
        True
    """
    if mode is None or not optree.tree_leaves(mode):
        raise ValueError(
            f"control_variates: mode must be parameters near a minimum of the loss, got {mode!r}; "
            "run the chain at temperature=0 first, or use svrg, which takes its references on the way"
        )
    mode = optree.tree_map(lambda p: p.detach().clone(), mode)

    def init(params: Any) -> ReferenceState:
        same = optree.tree_structure(params) == optree.tree_structure(mode) and all(
            p.shape == m.shape for p, m in zip(optree.tree_leaves(params), optree.tree_leaves(mode))
        )
        if not same:
            raise ValueError(
                "control_variates: mode differs from params in structure or shapes; pass it as the chain's own"
            )
        return _reference(mode, full_gradient)

    return GradientEstimator(init, lambda params, state, batch: _corrected(loss, params, state, batch), _keep)


def svrg(loss: Loss, full_gradient: Callable[[Any], Any]) -> GradientEstimator:
    """Gradients corrected by their values at a snapshot of the chain.

    Args:
        loss: ``loss(params, batch)``, mean over the batch, prior included.
        full_gradient: gradient of the mean over *all* data; :func:`mean_gradient` makes one from batches.

    Returns:
        A :class:`GradientEstimator` that costs two gradients of the batch. Call ``refresh(params, state)`` once an epoch or so:
        one gradient of all data.

    Raises:
        ValueError: at a step, a loss that is no scalar.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> data = torch.randn(100, 2)
        >>> loss = lambda p, batch: ((p - batch) ** 2).sum(-1).mean()
        >>> estimator = bc.gradients.svrg(loss, bc.gradients.mean_gradient(loss, data.split(20)))
        >>> step = bc.gradients.make_estimated_step(estimator, bc.sgld(0.1, temperature=1 / 100))
        >>> params = torch.zeros(2)
        >>> state = step.init(params)
        >>> for epoch in range(2):
        ...     state = step.refresh(params, state)
        ...     for batch in data.split(20):
        ...         params, state, info = step(params, state, batch)
    """
    return GradientEstimator(
        lambda params: _reference(params, full_gradient),
        lambda params, state, batch: _corrected(loss, params, state, batch),
        lambda params, state: _reference(params, full_gradient),
    )


def mean_gradient(loss: Loss, batches: Iterable[Any]) -> Callable[[Any], Any]:
    """The gradient of the loss over all data, as a function of the parameters.

    Args:
        loss: ``loss(params, batch)``, mean over the batch.
        batches: all data, in batches of one size (else the mean of their means is not the mean), gone through at each call.

    Returns:
        ``full_gradient(params)``, a tree like the parameters.

    Raises:
        ValueError: at a call, no batch, such as of an iterator that is used up.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> full = bc.gradients.mean_gradient(lambda p, x: (p * x).mean(), torch.tensor([[1.0], [3.0]]))
        >>> full(torch.tensor(5.0))
        tensor(2.)
    """

    def full_gradient(params: Any) -> Any:
        total: Any = None
        n = 0
        for batch in batches:
            grads, _ = gradient(loss, params, batch)
            total = grads if total is None else optree.tree_map(torch.add, total, grads)
            n += 1
        if n == 0:
            raise ValueError(
                "mean_gradient: batches is empty; pass a sequence that can be gone through again, not an iterator"
            )
        return optree.tree_map(lambda g: g / n, total)

    return full_gradient


class EstimatedStep:
    """One step of a chain fed from an estimator; state is ``(estimator state, chain state)``."""

    def __init__(self, estimator: GradientEstimator, tx: GradientTransformation, inplace: bool) -> None:
        self.estimator, self.tx, self.inplace = estimator, tx, inplace

    def init(self, params: Any) -> tuple:
        """State of estimator and chain."""
        return self.estimator.init(params), self.tx.init(params)

    def refresh(self, params: Any, state: tuple) -> tuple:
        """The state with the estimator's reference moved to ``params``, where it has one that moves."""
        fresh: Any = self.estimator.refresh(params, state[0])
        if self.inplace:
            with uninterrupted():
                fresh = optree.tree_map(lambda old, new: old.copy_(new), state[0], fresh)
        return fresh, state[1]

    def __call__(self, params: Any, state: tuple, batch: Any):
        """``(params, state, Info)``."""
        grads, info = self.estimator.estimate(params, state[0], batch)
        with torch.no_grad(), uninterrupted() if self.inplace else nullcontext():
            updates, chain_state = self.tx.update(grads, state[1], params=params, inplace=self.inplace)
            params = apply(params, updates, self.inplace)
        return params, (state[0], chain_state), info


def make_estimated_step(
    estimator: GradientEstimator, tx: GradientTransformation, *, inplace: bool = False
) -> EstimatedStep:
    """One step of a chain whose gradients come from an estimator.

    Args:
        estimator: from :func:`control_variates` or :func:`svrg`, or three functions like theirs.
        tx: any gradient transformation.
        inplace: overwrite params and state.

    Returns:
        A callable ``step(params, state, batch) -> (params, state, Info)`` with ``init(params)`` and ``refresh(params, state)``.

    Raises:
        TypeError: ``tx`` is no gradient transformation.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> data = torch.arange(6.0).split(2)
        >>> def loss(p, batch):
        ...     return ((p - batch) ** 2).mean() / 2
        >>> estimator = bc.gradients.control_variates(loss, bc.gradients.mean_gradient(loss, data), torch.tensor(2.0))
        >>> step = bc.gradients.make_estimated_step(estimator, bc.sgd(1.0))
        >>> params = torch.tensor(2.0)
        >>> params, state, info = step(params, step.init(params), data[0])
        >>> params      # at the mode the estimate is the whole gradient, -0.5, whatever the batch
        tensor(2.5000)
    """
    if not isinstance(tx, GradientTransformation):
        raise TypeError(f"make_estimated_step: tx is {tx!r}, not a gradient transformation")
    return EstimatedStep(estimator, tx, inplace)


def _reference(params: Any, full_gradient: Callable[[Any], Any]) -> ReferenceState:
    reference = optree.tree_map(lambda p: p.detach().clone(), params)
    return ReferenceState(reference, optree.tree_map(Tensor.detach, full_gradient(reference)))


def _corrected(loss: Loss, params: Any, state: ReferenceState, batch: Any) -> tuple[Any, Info]:
    here, info = gradient(loss, params, batch)
    there, _ = gradient(loss, state.reference, batch)
    return optree.tree_map(lambda a, b, full: a - b + full, here, there, state.full_gradient), info


def _keep(params: Any, state: ReferenceState) -> ReferenceState:
    return state
