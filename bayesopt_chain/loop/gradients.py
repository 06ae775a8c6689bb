r"""Gradient estimators with less minibatch noise, which :func:`make_step` takes in the place of a loss.

Each subtracts from the batch's gradient at ``theta`` a correction ``c`` whose mean over the batches is zero,

    g(theta) = grad_batch(theta) - c,

so that it is unbiased, and the noise that is left depends on how alike the two are:

* **control variates** (Baker, Fearnhead, Fox and Nemeth, 2019): ``c = grad_batch(theta*) - grad_full(theta*)`` at a mode
  ``theta*``, found once by optimising. Two gradients of the batch a step.
* **SVRG** (Johnson and Zhang, 2013; Dubey et al., 2016, for Langevin): ``theta*`` is a snapshot of the chain, refreshed now
  and then. Two gradients of the batch a step.
* **stored control variates** (:mod:`bayesopt_chain.loop.gradient_table`): the projections of single-datum gradients at
  ``theta*`` are kept in a table. One gradient of the batch a step.

A correction helps where the batch's gradients at ``theta`` and ``theta*`` go together, as they do where the loss is near a
quadratic. On a network they need not, and then it *adds* noise. What is left, ::

    tr Cov(g - c) - tr Cov(g) = E |c|^2 - 2 E <g, c> = -E d,       d = 2 <g, c> - |c|^2,

is therefore measured: as a ratio before the run (:func:`noise_left`), and by ``d`` at every step of it, which costs two inner
products and no gradient. A step refuses to go on where ``E d < 0`` is certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches as any_batch
from bayesopt_chain import tracing
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.loop.gradient_table import GradientTable, gradient_table, gradient_table_correction
from bayesopt_chain.loop.loss import Info, Loss, gradient
from bayesopt_chain.trees import inner

__all__ = [
    "GradientEstimator",
    "GradientTable",
    "check_noise",
    "control_variates",
    "gradient_table",
    "mean_gradient",
    "noise_left",
    "stored_control_variates",
    "svrg",
]

WINDOW = 256  # steps after which the sums of the watch count half
LOOK = 32  # steps between two looks at them
CERTAIN = 3.0  # standard errors below zero at which a correction is refused
MEASURED = 32  # batches that are looked at before a run


class ReferenceState(NamedTuple):
    """The reference parameters ``theta*`` and the gradient of the whole loss there, each a tree like the parameters."""

    reference: Any
    full_gradient: Any


class GradientEstimator(NamedTuple):
    """An estimator of the gradient, as three functions: one of this module, or your own.

    Attributes:
        init: ``init(params)`` returns what the estimator remembers, a tree of tensors.
        estimate: ``estimate(params, memory, batch)`` returns the gradient and :class:`Info`; an estimator that subtracts a
            correction of mean zero from the gradient of the batch returns the correction, a tree like the parameters, as a
            third, and the step then watches whether it leaves less noise.
        refresh: ``refresh(params, memory)`` returns the memory with its reference moved to ``params``, where it has one that
            moves.
    """

    init: Callable[[Any], Any]
    estimate: Callable[[Any, Any, Any], Any]
    refresh: Callable[[Any, Any], Any]


class EstimatedState(NamedTuple):
    """The state of a step that follows an estimator.

    Attributes:
        inner: the state of the transformation.
        estimator: what the estimator remembers, such as a :class:`ReferenceState`.
        watch: float64 ``[4]``: the number of steps looked at, and over them the sums of ``<g, c>``, ``|c|^2`` and ``d^2``.
    """

    inner: Any
    estimator: Any
    watch: Tensor

    @property
    def carried(self) -> tuple[Any, Tensor]:
        """What the estimator remembers, and what was seen of its corrections."""
        return self.estimator, self.watch

    def advanced(self, inner: Any, carried: Any, skipped: Tensor | None, inplace: bool) -> EstimatedState:
        """Make the state after a step: what the estimator remembers changes by ``refresh`` alone."""
        watch = carried[1] if skipped is None else torch.where(inner.skipped == skipped, carried[1], self.watch)
        return EstimatedState(inner, self.estimator, self.watch.copy_(watch) if inplace else watch)


@dataclass(frozen=True)
class EstimatorMemory:
    """What an estimator remembers, which starts at the parameters."""

    kind: ClassVar[type] = EstimatedState
    option: ClassVar[str] = "an estimator of bc.gradients"
    estimator: GradientEstimator

    def start(self, inner: Any, params: Any, like: Any, generator: torch.Generator | None) -> EstimatedState:
        """Take the reference of ``like``, where it has one, or make one at the parameters."""
        memory = like.estimator if isinstance(like, EstimatedState) else self.estimator.init(params)
        leaves: list[Any] = optree.tree_leaves(params)
        return EstimatedState(inner, memory, torch.zeros(4, dtype=torch.float64, device=leaves[0].device))

    def refreshed(self, params: Any, state: EstimatedState, inplace: bool) -> EstimatedState:
        """Move the reference to ``params``; what was seen of the corrections from the old one is forgotten."""
        fresh = self.estimator.refresh(params, state.estimator)
        if _shapes(fresh) != _shapes(state.estimator):
            raise ValueError(
                "refresh: params are a tree of another structure, or of other shapes, than the state's; pass the parameters of "
                "this step"
            )
        if not inplace:
            return EstimatedState(state.inner, fresh, torch.zeros_like(state.watch))
        fresh = optree.tree_map(lambda old, new: old.copy_(new), state.estimator, fresh)
        return EstimatedState(state.inner, fresh, state.watch.zero_())


def _shapes(tree: Any) -> tuple[Any, ...]:
    leaves, structure = optree.tree_flatten(tree)
    return structure, [x.shape for x in leaves]


def watched(watch: Tensor, grads: Any, correction: Any) -> Tensor:
    """Add one step to the watch of an estimate ``grads = g - c``; refuse a correction that certainly adds noise.

    Raises:
        ValueError: it leaves more noise than the batch has, by three standard errors; where values can be read for nothing.
    """
    left, squared = (inner(x, correction, grads).to(torch.float64) for x in (grads, correction))
    together = left + squared
    new = torch.stack([torch.ones_like(squared), together, squared, (left + together).square()])
    watch = torch.where(watch[0] >= WINDOW, watch / 2, watch) + new
    if tracing.is_readable(watch):
        seen, *_ = sums = watch.tolist()
        if seen % LOOK == 0:
            _require_less(*sums)
    return watch


def _require_less(seen: float, together: float, squared: float, spread: float) -> None:
    """Refuse a correction whose ``E d`` is certainly below zero."""
    saved = (2 * together - squared) / seen
    if saved < -CERTAIN * math.sqrt(max(spread / seen - saved**2, 0.0) / seen) - 1e-12 * squared:
        raise ValueError(
            f"bc.gradients: the corrections leave more noise than the plain gradients of the batches have: over the last "
            f"{seen:.0f} steps <g, c> / <c, c> is {together / squared:.3g}, and below 0.5 they do harm. They fit losses near a "
            "quadratic, which this one is not between here and the reference: pass the loss itself to make_step, with "
            "larger batches or another order of them; svrg may be refreshed more often"
        )


def check_noise(state: EstimatedState) -> Tensor:
    """Say how well the corrections of the last steps fit, and refuse those that do harm.

    Steps on a CPU do this by themselves. Steps that are captured, compiled, on a device or of many chains cannot: call it
    between them now and then.

    Args:
        state: of a step that follows an estimator; of stacked chains too.

    Returns:
        ``<g, c> / <c, c>``, a mean over the last 256 steps or so, 0-d or ``[chains]``: 1 where the corrections are the noise of
        the batches, 1/2 where they leave as much as there was. NaN before the first step, and where nothing is
        subtracted.

    Raises:
        ValueError: some chain's corrections leave more noise than the plain gradients have, by three standard errors.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> data = bc.epochs(torch.randn(100, 2), 10)
        >>> loss = lambda p, batch: ((p - batch) ** 2).sum(-1).mean()
        >>> step = bc.make_step(bc.gradients.svrg(loss, data), bc.sgd(0.1))
        >>> params = torch.zeros(2)
        >>> state = step.init(params)
        >>> for batch in data:
        ...     params, state, info = step(params, state, batch)
        >>> bool(bc.gradients.check_noise(state) > 0.5)
        True
    """
    watch = state.watch.detach()
    for chain in watch.reshape(-1, 4).tolist():
        if chain[0] >= LOOK:
            _require_less(*chain)
    return watch[..., 1] / watch[..., 2]


def noise_left(estimator: GradientEstimator, params: Any, batches: Iterable[Any], *, memory: Any = None) -> float:
    r"""Measure what an estimator leaves of the batches' noise at ``params``.

    Args:
        estimator: one that subtracts a correction.
        params: where to look: a draw of the posterior. At the reference itself nothing is left, and that says nothing.
        batches: as the step is given them; ``bc.epochs(...)`` keeps its position. At most 32 are looked at.
        memory: what the estimator remembers (default: ``estimator.init(params)``).

    Returns:
        ``tr Cov(g - c) / tr Cov(g)``: 0 where all noise is gone, 1 where there is as much as without it, and more where it
        does harm.

    Raises:
        ValueError: fewer than two batches, or an estimator that subtracts nothing.

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
    for m, batch in enumerate(_some(batches), 1):
        grads, _, *correction = estimator.estimate(params, memory, batch)
        if not correction:
            raise ValueError("noise_left: this estimator subtracts no correction, so that there is nothing to compare")
        both = [grads, optree.tree_map(torch.add, grads, correction[0])]
        squares = [total + float(inner(x, x, params)) for total, x in zip(squares, both)]
        sums = both if m == 1 else [optree.tree_map(torch.add, *pair) for pair in zip(sums, both)]
    if m < 2:
        raise ValueError(f"noise_left: needs at least two batches, got {m}")
    left, plain = [total - float(inner(x, x, params)) / m for total, x in zip(squares, sums)]
    return max(left, 0.0) / plain if plain > 0 else math.nan


def _some(batches: Iterable[Any]) -> Iterator[Any]:
    """The first batches, as many as are looked at before a run."""
    if isinstance(batches, Epochs):
        here = batches.epoch
        yield from (batches.batch(here, k) for k in range(min(len(batches), MEASURED)))
    else:
        yield from (batch for batch, _ in zip(batches, range(MEASURED)))


def _measured(estimator: GradientEstimator, batches: Iterable[Any], places: Sequence[Any]) -> GradientEstimator:
    """The estimator whose ``init`` refuses where it does not leave less noise than there is, at the parameters or a place."""

    def init(params: Any) -> Any:
        memory = estimator.init(params)
        leaves: list[Any] = optree.tree_leaves(params)
        if any(tracing.is_hidden(leaf) for leaf in leaves):
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


def control_variates(loss: Loss, data: Iterable[Any], mode: Any, *, at: Sequence[Any] = ()) -> GradientEstimator:
    """Gradients corrected by their values at a mode of the loss.

    For posteriors near a quadratic: linear and logistic models, last layers. On networks it may leave more noise than it
    finds (1.75 times on an MLP 196-20-10), which is refused when it is measured.

    Args:
        loss: ``loss(params, batch)``, mean over the batch, prior included.
        data: all of it, ``bc.epochs(...)`` or batches that can be gone through again and again.
        mode: parameters near a minimum of the loss: run the chain at ``temperature=0`` first.
        at: draws from a short run, at which to measure before the run what is left of the noise; besides, that is done at the
            parameters given to ``init``. At the mode itself nothing is left, which says nothing.

    Returns:
        A :class:`GradientEstimator` for :func:`bayesopt_chain.make_step`, which costs two gradients of the batch. ``refresh``
        changes nothing.

    Raises:
        ValueError: no mode; at ``init``, a mode that is not like the parameters, or no less noise than without it; the last
            also at a step.

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
    if mode is None or not optree.tree_leaves(mode):
        raise ValueError(
            f"control_variates: mode must be parameters near a minimum of the loss, got {mode!r}; "
            "run the chain at temperature=0 first, or use svrg, which takes its references on the way"
        )
    mode = optree.tree_map(lambda p: p.detach().clone(), mode)
    full_gradient = mean_gradient(loss, data)

    def init(params: Any) -> ReferenceState:
        _require_like(params, mode, "control_variates: mode")
        return _reference(mode, full_gradient)

    estimator = GradientEstimator(init, lambda params, state, batch: _corrected(loss, params, state, batch), _keep)
    return _measured(estimator, data, at)


def svrg(loss: Loss, data: Iterable[Any]) -> GradientEstimator:
    """Gradients corrected by their values at a snapshot of the chain.

    Args:
        loss: ``loss(params, batch)``, mean over the batch, prior included.
        data: all of it, ``bc.epochs(...)`` or batches that can be gone through again and again.

    Returns:
        A :class:`GradientEstimator` for :func:`bayesopt_chain.make_step`, which costs two gradients of the batch. Call
        ``state = step.refresh(params, state)`` once an epoch or so: one gradient of all data.

    Raises:
        ValueError: at a step, a loss that is no scalar, or a snapshot so far away that the corrections add noise.

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


def stored_control_variates(
    loss: Loss, table: GradientTable, *, data: Iterable[Any] | None = None, at: Sequence[Any] = ()
) -> GradientEstimator:
    r"""Gradients corrected by a table of single-datum gradients at a reference: no second gradient.

    Where the batch holds the data ``b``, ``g = grad_batch(theta) - Q (mean_{i in b} z_i - mean z)``, with the directions
    ``Q`` and the numbers ``z`` of :func:`gradient_table`. Noise in the span of ``Q`` is what control variates at the reference
    leave, noise outside it that of the batch. In linear regression with 1,000 data and 5 parameters, batches of 32, learning
    rate 0.1 and momentum 0.9 a variance 18 times too large becomes one of less than 1.15 times with five directions.

    Args:
        loss: ``loss(params, batch)``, mean over the batch, prior included.
        table: from :func:`gradient_table`.
        data: ``bc.epochs(..., with_rows=True)`` to measure with, before the run, what is left of the noise; default: measure
            during the run alone.
        at: draws from a short run at which to measure, besides the parameters given to ``init``.

    Returns:
        A :class:`GradientEstimator` for :func:`bayesopt_chain.make_step`, whose batches are those of ``bc.epochs(...,
        with_rows=True)``, the pairs ``(batch, rows)``. It costs one gradient of the batch and ``2 r`` operations a parameter.

    Raises:
        ValueError: at ``init``, parameters unlike those of the table, or no less noise than without it; the last also at a
            step.
        TypeError: at a step, a batch that is no pair with the numbers of its data.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
        >>> loss = lambda w, x: ((x @ w - 1) ** 2).mean() / 2
        >>> data, mode = bc.epochs(x, 10, with_rows=True), torch.linalg.lstsq(x, torch.ones(100)).solution
        >>> table = bc.gradients.gradient_table(loss, data, mode, rank=3)
        >>> estimator = bc.gradients.stored_control_variates(loss, table, data=data)
        >>> step = bc.make_step(estimator, bc.sghmc(0.1, temperature=1 / 100))
        >>> params, state = mode, step.init(mode)
        >>> for batch_and_rows in data:
        ...     params, state, info = step(params, state, batch_and_rows)
    """

    def init(params: Any) -> tuple[()]:
        _require_like(params, optree.tree_map(lambda rows: rows[0], table.directions), "stored_control_variates: table")
        return ()

    def estimate(params: Any, memory: Any, batch: Any) -> tuple[Any, Info, Any]:
        if not (isinstance(batch, tuple) and len(batch) == 2 and getattr(batch[1], "dtype", None) == torch.int64):
            raise TypeError(
                "stored_control_variates: a batch must be the pair (batch, rows) with the numbers of its data, int64 [b], got "
                f"{type(batch).__name__}; make the batches with bc.epochs(data, b, with_rows=True)"
            )
        grads, info = gradient(loss, params, batch[0])
        correction = gradient_table_correction(table, batch[1])
        return optree.tree_map(torch.sub, grads, correction), info, correction

    estimator = GradientEstimator(init, estimate, _keep)
    return estimator if data is None else _measured(estimator, data, at)


def mean_gradient(loss: Loss, data: Iterable[Any]) -> Callable[[Any], Any]:
    """The gradient of the loss over all data, as a function of the parameters.

    Args:
        loss: ``loss(params, batch)``, mean over the batch.
        data: ``bc.epochs(...)``, whose data are taken without those that it leaves out and whose position stays; or
            batches, gone through at each call and weighted by their sizes, which stand on axis 0 of their tensors.

    Returns:
        ``full_gradient(params)``, a tree like the parameters.

    Raises:
        TypeError: data that cannot be gone through.
        ValueError: data that differ from chain to chain; at a call, no batch, such as of an iterator that is used up.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> full = bc.gradients.mean_gradient(lambda p, x: (p * x).mean(), torch.tensor([[1.0], [3.0]]))
        >>> full(torch.tensor(5.0))
        tensor(2.)
    """
    if not isinstance(data, Iterable):
        raise TypeError(
            f"mean_gradient: data must be bc.epochs(...) or batches of all data, got {type(data).__name__}, which cannot "
            "be gone through"
        )
    if isinstance(data, Epochs):
        data.common_rows()

    def full_gradient(params: Any) -> Any:
        total: Any = None
        n = 0
        for batch in data.parts() if isinstance(data, Epochs) else data:
            grads, _ = gradient(loss, params, batch)
            size = _size(batch)
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


def _size(batch: Any) -> int:
    """Number of data of a batch; 1 where nothing says it."""
    leaves, _ = any_batch.flatten(batch)
    return next((x.shape[0] for x in leaves if isinstance(x, Tensor) and x.ndim), 1)


def _require_like(params: Any, like: Any, what: str) -> None:
    same = optree.tree_structure(params) == optree.tree_structure(like) and all(
        p.shape == m.shape for p, m in zip(optree.tree_leaves(params), optree.tree_leaves(like))
    )
    if not same:
        raise ValueError(f"{what} differs from params in structure or shapes; pass it as the chain's own")


def _reference(params: Any, full_gradient: Callable[[Any], Any]) -> ReferenceState:
    reference = optree.tree_map(lambda p: p.detach().clone(), params)
    return ReferenceState(reference, optree.tree_map(Tensor.detach, full_gradient(reference)))


def _corrected(loss: Loss, params: Any, state: ReferenceState, batch: Any) -> tuple[Any, Info, Any]:
    here, info = gradient(loss, params, batch)
    there, _ = gradient(loss, state.reference, batch)
    grads = optree.tree_map(lambda a, b, full: a - b + full, here, there, state.full_gradient)
    return grads, info, optree.tree_map(torch.sub, there, state.full_gradient)


def _keep(params: Any, state: Any) -> Any:
    return state
