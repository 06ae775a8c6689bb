r"""Gradient estimators with less minibatch noise, which :func:`make_step` takes in place of a loss.

Each subtracts a correction ``c`` from the gradient ``g`` of the batch at ``theta``. The mean of ``c`` over the batches is zero,
so that the estimate ``g - c`` is unbiased:

* **Control variates** (Baker, Fearnhead, Fox and Nemeth, 2019): ``c = grad_batch(theta*) - grad_full(theta*)`` at a mode
  ``theta*``, which is found once by optimising. A step takes two gradients of the batch.
* **SVRG** (Johnson and Zhang, 2013; for Langevin dynamics Dubey et al., 2016): the same at a snapshot ``theta*`` of the chain,
  which is renewed now and then. A step takes two gradients of the batch.

A correction reduces the noise if the gradients of a batch at ``theta`` and at ``theta*`` are correlated, as they are for a loss
near a quadratic. For a network they may not be, and then the correction *adds* noise. The change of the noise, ::

    tr Cov(g - c) - tr Cov(g) = E |c|^2 - 2 E <g, c>,

is therefore measured: :func:`noise_left` is the ratio of the two traces, which control variates look at before the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import optree
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bayesopt_chain import batches as any_batch
from bayesopt_chain import checks, tracing
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.loop.loss import Info, Loss, gradient
from bayesopt_chain.random.stream import keyed
from bayesopt_chain.trees import copied, inner, require_like

__all__ = [
    "GradientEstimator",
    "control_variates",
    "mean_gradient",
    "noise_left",
    "svrg",
]


_ALL_DATA = checks.Kind(  # a DataLoader with drop_last leaves out some data, others in every pass
    lambda x: (
        isinstance(x, Iterable)
        and not getattr(x, "with_rows", False)  # a pass over all data has no rows
        and not (
            isinstance(x, DataLoader)
            and x.drop_last
            and isinstance(x.sampler, Sized)
            and len(x.sampler) % (x.batch_size or 1)
        )
    ),
    "bc.epochs(...), without with_rows=, or batches of all data, to be gone through again; of a DataLoader with "
    "drop_last=False",
    (DataLoader, Epochs),
)
MEASURED = 32  # largest number of batches that :func:`noise_left` evaluates


class ReferenceState(NamedTuple):
    """The reference parameters ``theta*`` and the gradient of the whole loss there, each a tree like the parameters."""

    reference: Any
    full_gradient: Any


class GradientEstimator(NamedTuple):
    """An estimator of the gradient as three functions. The functions of this module return one; others may be written.

    Attributes:
        init: ``init(params)`` returns the memory of the estimator, a tree of tensors.
        estimate: ``estimate(params, memory, batch)`` returns ``(gradient, Info)``. An estimator that subtracts a correction of
            mean zero from the gradient of the batch returns ``(gradient, Info, correction)`` with the correction as a tree like
            the parameters, which :func:`noise_left` takes.
        refresh: ``refresh(params, memory)`` returns the memory with its reference moved to ``params``. An estimator whose
            reference does not move returns ``memory``.
    """

    init: Callable[[Any], Any]
    estimate: Callable[[Any, Any, Any], Any]
    refresh: Callable[[Any, Any], Any]


class EstimatedState(NamedTuple):
    """The state of a step that follows an estimator.

    Attributes:
        inner: the state of the transformation.
        estimator: the memory of the estimator, such as a :class:`ReferenceState`.
    """

    inner: Any
    estimator: Any

    @property
    def carried(self) -> Any:
        """The memory of the estimator."""
        return self.estimator

    def advanced(self, inner: Any, carried: Any, skipped: Tensor | None, inplace: bool) -> EstimatedState:
        """Make the state after a step. The memory of the estimator stays the same, since only ``refresh`` changes it.

        Args:
            inner: the new state of the transformation.
            carried, skipped, inplace: not needed here.
        """
        return EstimatedState(inner, self.estimator)


@dataclass(frozen=True)
class EstimatorMemory:
    """Makes and renews the state of a step that follows an estimator; see :class:`bayesopt_chain.loop.module_state.Memory`."""

    kind: ClassVar[type] = EstimatedState
    option: ClassVar[str] = "an estimator of bc.gradients"
    estimator: GradientEstimator

    def start(self, inner: Any, params: Any, like: Any, generator: torch.Generator | None) -> EstimatedState:
        """Make the state around that of the transformation, with the memory of ``like``, or a new one at the parameters."""
        memory = like.estimator if isinstance(like, EstimatedState) else self.estimator.init(params)
        return EstimatedState(inner, memory)

    def refreshed(self, params: Any, state: EstimatedState, inplace: bool) -> EstimatedState:
        """Move the reference to ``params``.

        Raises:
            ValueError: ``params`` have another structure or other shapes than the reference; the state is of stacked chains.
        """
        if any(entry.key.ndim for entry in keyed(state.inner)):  # the loss would be one of all chains
            raise ValueError(
                "refresh: the state is of stacked chains; refresh each of them by torch.vmap(step.refresh)(params, state)"
            )
        fresh = self.estimator.refresh(params, state.estimator)
        require_like(fresh, state.estimator, "refresh: params, as the estimator's memory,")
        if inplace:
            fresh = optree.tree_map(lambda old, new: old.copy_(new), state.estimator, fresh)
        return EstimatedState(state.inner, fresh)


@checks.takes(
    estimator=checks.instance(GradientEstimator, "one of bc.gradients, such as svrg(loss, data)"),
    memory=checks.Kind(
        lambda x: hasattr(x, "_fields"), "the memory of the estimator: estimator.init(params)"
    ).or_none(),
)
def noise_left(estimator: GradientEstimator, params: Any, batches: Iterable[Any], *, memory: Any = None) -> float:
    r"""Measure the ratio of the minibatch noise of an estimator at ``params`` to that of the plain gradient.

    Args:
        estimator: an estimator that subtracts a correction.
        params: the parameters at which to measure, such as a draw from the posterior. At the reference itself the corrections
            fit best, so that the result there says nothing about other parameters.
        batches: batches as the step gets them. At most 32 are used, and the position of ``bc.epochs(...)`` does not change.
        memory: the memory of the estimator (default: ``estimator.init(params)``).

    Returns:
        ``tr Cov(g - c) / tr Cov(g)``: 0 without any noise, 1 with as much noise as the plain gradient has, and more than 1 if
        the correction adds noise.

    Raises:
        ValueError: there are fewer than two batches, or the estimator subtracts nothing.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> data = bc.epochs(torch.randn(100, 2, dtype=torch.float64), 10)
        >>> loss = lambda p, batch: ((p - batch) ** 2).sum(-1).mean()
        >>> here, mode = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        >>> estimator = bc.gradients.control_variates(loss, data, mode=mode)
        >>> bc.gradients.noise_left(estimator, here, data) < 1e-6      # a quadratic loss: the noise is the same
        True
    """
    memory = estimator.init(params) if memory is None else memory
    m, sums, squares = 0, [], [0.0, 0.0]
    for m, batch in enumerate(_first_batches(batches), 1):
        grads, _, *correction = estimator.estimate(params, memory, batch)
        if not correction:
            raise ValueError("noise_left: this estimator subtracts no correction, so that there is nothing to compare")
        both = [grads, optree.tree_map(torch.add, grads, correction[0])]  # g - c, and g
        squares = [total + float(inner(x, x, params)) for total, x in zip(squares, both)]
        sums = both if m == 1 else [optree.tree_map(torch.add, *pair) for pair in zip(sums, both)]
    if m < 2:
        raise ValueError(f"noise_left: needs at least two batches, got {m}")
    left, plain = [total - float(inner(x, x, params)) / m for total, x in zip(squares, sums)]
    return max(left, 0.0) / plain if plain > 0 else math.nan


def _first_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the first ``MEASURED`` batches, without moving the position of ``bc.epochs(...)``."""
    if isinstance(batches, Epochs):
        here = batches.epoch
        yield from (batches.batch(here, k) for k in range(min(len(batches), MEASURED)))
    else:
        yield from (batch for batch, _ in zip(batches, range(MEASURED)))


def _with_measured_init(
    estimator: GradientEstimator, batches: Iterable[Any], places: Sequence[Any]
) -> GradientEstimator:
    """Return the estimator with an ``init`` that raises if the corrections do not reduce the noise.

    Args:
        estimator: the estimator.
        batches: the batches to measure with.
        places: parameters at which to measure, in addition to those given to ``init``.
    """

    def init(params: Any) -> Any:
        memory = estimator.init(params)
        leaves: list[Any] = optree.tree_leaves(params)
        if any(tracing.is_hidden(leaf) for leaf in leaves):  # under vmap the ratio cannot be compared with 1
            return memory
        for place in [params, *places]:
            left = noise_left(estimator, place, batches, memory=memory)
            if left >= 1.0:
                where = "the parameters" if place is params else "a place of at="
                raise ValueError(
                    f"bc.gradients: at {where} the corrections leave {left:.3g} times the noise that the batches have "
                    "without them. They fit losses near a quadratic: pass the loss itself to make_step, with larger batches or "
                    "another order of them"
                )
        return memory

    return estimator._replace(init=init)


@checks.takes(
    at=checks.SEQUENCE,
    mode=checks.PLACE._replace(
        words="finite parameters near a minimum of the loss",
        hint="run the chain at temperature=0 first, or use svrg, which takes its references on the way",
    ),
)
def control_variates(loss: Loss, data: Iterable[Any], mode: Any, *, at: Sequence[Any] = ()) -> GradientEstimator:
    """Estimate gradients with control variates: the gradients of the same batch at a mode of the loss.

    The estimate is ``grad_batch(theta) - grad_batch(theta*) + grad_full(theta*)`` with the mode ``theta*`` (Baker, Fearnhead,
    Fox and Nemeth, 2019). It is for posteriors near a Gaussian, as those of linear and logistic models and of last layers. On
    networks it may add noise (1.75 times the noise of plain gradients on an MLP 196-20-10); then ``init`` raises.

    Args:
        loss: ``loss(params, batch)``, a mean over the batch that contains the prior.
        data: all data, as ``bc.epochs(...)`` or as batches that can be iterated over repeatedly.
        mode: parameters near a minimum of the loss: run the chain at ``temperature=0`` first.
        at: draws from a short run, at which the remaining noise is measured before the run, in addition to the parameters given
            to ``init``. A measurement at the mode itself says nothing, since no noise is left there. Default: none.

    Returns:
        A :class:`GradientEstimator` for :func:`bayesopt_chain.make_step`, which costs two gradients of the batch. Its
        ``refresh`` changes nothing.

    Raises:
        ValueError: there is no mode, or one that is not finite; at ``init``, the mode has another structure or other shapes
            than the parameters, or the noise is not reduced.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> data = bc.epochs(torch.randn(100, 2), 10)
        >>> loss = lambda p, batch: ((p - batch) ** 2).sum(-1).mean()
        >>> step = bc.make_step(bc.gradients.control_variates(loss, data, mode=data.data.mean(0)), bc.sgd(0.5))
        >>> params = torch.zeros(2)
        >>> params, state, info = step(params, step.init(params), data.batch(0, 0))
        >>> torch.allclose(params, data.data.mean(0), atol=1e-6)      # the gradient of all data, whatever the batch
        True
    """
    mode = copied(mode)
    full_gradient = mean_gradient(loss, data)

    def init(params: Any) -> ReferenceState:
        require_like(mode, params, "control_variates: mode")
        return _reference(mode, full_gradient)

    return _with_measured_init(
        GradientEstimator(init, lambda params, state, batch: _corrected(loss, params, state, batch), _keep), data, at
    )


def svrg(loss: Loss, data: Iterable[Any]) -> GradientEstimator:
    """Estimate gradients with control variates at a snapshot of the chain: SVRG (Johnson and Zhang, 2013; Dubey et al., 2016).

    The estimate is ``grad_batch(theta) - grad_batch(theta*) + grad_full(theta*)`` with the snapshot ``theta*``. Where the
    snapshot is far away the corrections may add noise, and heat the chain: measure it before a refresh, as
    ``noise_left(estimator, params, data, memory=state.estimator)``.

    Args:
        loss: ``loss(params, batch)``, a mean over the batch that contains the prior.
        data: all data, as ``bc.epochs(...)`` or as batches that can be iterated over repeatedly.

    Returns:
        A :class:`GradientEstimator` for :func:`bayesopt_chain.make_step`, which costs two gradients of the batch. Call
        ``state = step.refresh(params, state)`` about once in an epoch to move the snapshot, which costs one gradient of all
        data; of stacked chains ``torch.vmap(step.refresh)(params, state)``.

    Raises:
        ValueError: at a step, the loss is no scalar.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> data = bc.epochs(torch.randn(100, 2), 20)
        >>> loss = lambda p, batch: ((p - batch) ** 2).sum(-1).mean()
        >>> step = bc.make_step(bc.gradients.svrg(loss, data), bc.sgld(0.1, temperature=1 / 100))
        >>> params = torch.zeros(2)
        >>> state = step.init(params)
        >>> for epoch in range(2):
        ...     state = step.refresh(params, state)
        ...     for batch in data:
        ...         params, state, info = step(params, state, batch)
    """
    full_gradient = mean_gradient(loss, data)
    return GradientEstimator(
        lambda params: _reference(params, full_gradient),
        lambda params, state, batch: _corrected(loss, params, state, batch),
        lambda params, state: _reference(params, full_gradient),
    )


@checks.takes(data=_ALL_DATA)
def mean_gradient(loss: Loss, data: Iterable[Any]) -> Callable[[Any], Any]:
    """Make the gradient of the loss over all data, as a function of the parameters.

    Args:
        loss: ``loss(params, batch)``, a mean over the batch.
        data: ``bc.epochs(...)``, without the data that it leaves out, and without a change of its position; or batches, which
            are iterated over at each call and weighted by their sizes (the length of axis 0 of their tensors).

    Returns:
        ``full_gradient(params)``, a tree like the parameters.

    Raises:
        TypeError: ``data`` cannot be iterated over.
        ValueError: the data differ from chain to chain; a ``DataLoader`` with ``drop_last=True`` leaves data out; at a call,
            there is no batch, as of an iterator that is used up, or the tensors of a batch have other lengths, so that its
            share of the data is not known.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> full = bc.gradients.mean_gradient(lambda p, x: (p * x).mean(), torch.tensor([[1.0], [3.0]]))
        >>> full(torch.tensor(5.0))
        tensor(2.)
    """
    if isinstance(data, Epochs):
        data.common_rows()  # raises if the data differ from chain to chain

    def full_gradient(params: Any) -> Any:
        total: Any = None
        n = 0
        for batch in any_batch.each_once(data):
            size = any_batch.size(batch, 1)
            if not size:
                continue
            grads, _ = gradient(loss, params, batch)
            grads = optree.tree_map(lambda g, size=size: g * size, grads)
            total = grads if total is None else optree.tree_map(torch.add, total, grads)
            n += size
        if n == 0:
            raise ValueError(
                "mean_gradient: data is empty; pass bc.epochs(...) or a sequence that can be gone through again, not an "
                "iterator"
            )
        return optree.tree_map(lambda g: g / n, total)

    return full_gradient


def _reference(params: Any, full_gradient: Callable[[Any], Any]) -> ReferenceState:
    """Copy the parameters as a reference, and compute the gradient of all data there."""
    reference = copied(params)
    return ReferenceState(reference, optree.tree_map(Tensor.detach, full_gradient(reference)))


def _corrected(loss: Loss, params: Any, state: ReferenceState, batch: Any) -> tuple[Any, Info, Any]:
    """Return ``g - c``, the report and ``c = grad_batch(theta*) - grad_full(theta*)``."""
    here, info = gradient(loss, params, batch)
    there, _ = gradient(loss, state.reference, batch)
    grads = optree.tree_map(lambda a, b, full: a - b + full, here, there, state.full_gradient)
    return grads, info, optree.tree_map(torch.sub, there, state.full_gradient)


def _keep(params: Any, state: Any) -> Any:
    """Return the memory unchanged: the ``refresh`` of an estimator whose reference does not move."""
    return state
