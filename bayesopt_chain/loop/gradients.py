r"""Gradient estimators with less minibatch noise, which :func:`make_step` takes in the place of a loss.

Both subtract from the batch's gradient at ``theta`` its gradient at a reference ``theta*`` and add the mean over all data:

    g(theta) = grad_batch(theta) - grad_batch(theta*) + grad_full(theta*),

unbiased for every ``theta*``, with noise that vanishes as ``theta -> theta*``.

* **control variates** (Baker, Fearnhead, Fox and Nemeth, 2019): ``theta*`` is a mode, found once by optimising.
* **SVRG** (Johnson and Zhang, 2013; Dubey et al., 2016, for Langevin): ``theta*`` is a snapshot of the chain, refreshed now
  and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.loop.loss import Info, Loss, gradient

__all__ = ["GradientEstimator", "control_variates", "mean_gradient", "svrg"]


class ReferenceState(NamedTuple):
    """The reference parameters ``theta*`` and the gradient of the whole loss there, each a tree like the parameters."""

    reference: Any
    full_gradient: Any


class GradientEstimator(NamedTuple):
    """Three functions; those of :func:`control_variates` and :func:`svrg`, or your own.

    Attributes:
        init: ``init(params)`` returns what the estimator remembers, a tree of tensors.
        estimate: ``estimate(params, memory, batch)`` returns the gradient and :class:`Info`.
        refresh: ``refresh(params, memory)`` returns the memory with its reference moved to ``params``, where it has one that
            moves.
    """

    init: Callable[[Any], Any]
    estimate: Callable[[Any, Any, Any], tuple[Any, Info]]
    refresh: Callable[[Any, Any], Any]


class EstimatedState(NamedTuple):
    """The state of a step that follows an estimator.

    Attributes:
        inner: the state of the transformation.
        estimator: what the estimator remembers, such as a :class:`ReferenceState`.
    """

    inner: Any
    estimator: Any

    @property
    def carried(self) -> Any:
        """What the estimator remembers."""
        return self.estimator

    def advanced(self, inner: Any, carried: Any, skipped: Tensor | None, inplace: bool) -> EstimatedState:
        """Make the state after a step: what the estimator remembers changes by ``refresh`` alone."""
        return EstimatedState(inner, carried)


@dataclass(frozen=True)
class EstimatorMemory:
    """What an estimator remembers, which starts at the parameters."""

    kind: ClassVar[type] = EstimatedState
    option: ClassVar[str] = "an estimator of bc.gradients"
    estimator: GradientEstimator

    def start(self, inner: Any, params: Any, like: Any, generator: torch.Generator | None) -> EstimatedState:
        """Take the reference of ``like``, where it has one, or make one at the parameters."""
        return EstimatedState(
            inner, like.estimator if isinstance(like, EstimatedState) else self.estimator.init(params)
        )

    def refreshed(self, params: Any, state: EstimatedState, inplace: bool) -> EstimatedState:
        """Move the reference to ``params``."""
        fresh = self.estimator.refresh(params, state.estimator)
        if inplace:
            fresh = optree.tree_map(lambda old, new: old.copy_(new), state.estimator, fresh)
        return EstimatedState(state.inner, fresh)


def control_variates(loss: Loss, full_gradient: Callable[[Any], Any], mode: Any) -> GradientEstimator:
    """Gradients corrected by their values at a mode of the loss.

    Args:
        loss: ``loss(params, batch)``, mean over the batch, prior included.
        full_gradient: gradient of the mean over *all* data; :func:`mean_gradient` makes one from batches.
        mode: parameters near a minimum of the loss: run the chain at ``temperature=0`` first.

    Returns:
        A :class:`GradientEstimator` for :func:`bayesopt_chain.make_step`, which costs two gradients of the batch. ``refresh``
        changes nothing.

    Raises:
        ValueError: no mode; at ``init``, a mode that is not like the parameters.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> data = torch.randn(100, 2)
        >>> loss = lambda p, batch: ((p - batch) ** 2).sum(-1).mean()
        >>> estimator = bc.gradients.control_variates(loss, bc.gradients.mean_gradient(loss, [data]), mode=data.mean(0))
        >>> tx, params = bc.sgd(0.5), torch.zeros(2)
        >>> step = bc.make_step(estimator, tx)
        >>> params, state, info = step(params, step.init(params), data[:10])
        >>> torch.allclose(params, data.mean(0), atol=1e-6)      # the gradient of all data, whatever the batch
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
        A :class:`GradientEstimator` for :func:`bayesopt_chain.make_step`, which costs two gradients of the batch. Call
        ``state = step.refresh(params, state)`` once an epoch or so: one gradient of all data.

    Raises:
        ValueError: at a step, a loss that is no scalar.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> data = torch.randn(100, 2)
        >>> loss = lambda p, batch: ((p - batch) ** 2).sum(-1).mean()
        >>> estimator = bc.gradients.svrg(loss, bc.gradients.mean_gradient(loss, data.split(20)))
        >>> step = bc.make_step(estimator, bc.sgld(0.1, temperature=1 / 100))
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


def _reference(params: Any, full_gradient: Callable[[Any], Any]) -> ReferenceState:
    reference = optree.tree_map(lambda p: p.detach().clone(), params)
    return ReferenceState(reference, optree.tree_map(Tensor.detach, full_gradient(reference)))


def _corrected(loss: Loss, params: Any, state: ReferenceState, batch: Any) -> tuple[Any, Info]:
    here, info = gradient(loss, params, batch)
    there, _ = gradient(loss, state.reference, batch)
    return optree.tree_map(lambda a, b, full: a - b + full, here, there, state.full_gradient), info


def _keep(params: Any, state: ReferenceState) -> ReferenceState:
    return state
