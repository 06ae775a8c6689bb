r"""``make_step``: loss, gradient, chain and update as one pure function of (params, state, batch).

A step has three parts, each with a file of its own:

    source     where the gradient and the further keywords of ``tx.update`` come from (:mod:`bayesopt_chain.loop.sources`)
    tx         what becomes of them
    memory     what is remembered besides the state of ``tx``: a module's buffers, the reference of an estimator

What the model itself draws (dropout) is a function of the state: :mod:`bayesopt_chain.random.model_draws`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import _torch, kinds
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.op import owned
from bayesopt_chain.distributed import shards
from bayesopt_chain.distributed.ranks import DataParallel
from bayesopt_chain.fused import lower
from bayesopt_chain.fused import sgd as fused
from bayesopt_chain.links.master_weights import MasterState
from bayesopt_chain.links.skip_nonfinite import SkipState
from bayesopt_chain.links.weighted import Weighted, weight_of
from bayesopt_chain.links.wrapper import unwrapped
from bayesopt_chain.loop import sources
from bayesopt_chain.loop.finite import FiniteCheck
from bayesopt_chain.loop.gradients import EstimatedState, EstimatorMemory, GradientEstimator
from bayesopt_chain.loop.interrupts import uninterrupted
from bayesopt_chain.loop.loss import PLAIN, Evaluation, GradientSource, Info, Loss
from bayesopt_chain.loop.module_state import Memory, ModuleMemory, ModuleState
from bayesopt_chain.loop.monitor import monitored
from bayesopt_chain.random.model_draws import model_draws


@dataclass(frozen=True)
class Step:
    """What :func:`make_step` returns: a callable that other loops (``capture``, ``parallel``) can look into.

    Attributes:
        source: gives the gradient and whatever else the transformation asks for.
        tx: the transformation.
        inplace: whether parameters and state are overwritten.
        fused: the kernels that run this chain in place, where there are some.
        finite: the check of ``check_finite=True``.
        memory: what is remembered besides the transformation's state.
        monitor: whether the norm of the gradient and the temperature are reported.
        ranks: the ranks that share this chain.
        loss: what :func:`make_step` was given, by which a run on disk knows what it samples.
    """

    source: GradientSource
    tx: GradientTransformation
    inplace: bool = False
    fused: fused.FusedSGD | None = None
    finite: FiniteCheck | None = None
    memory: Memory | None = None
    monitor: bool = False
    ranks: DataParallel | None = None
    loss: Any = field(default=None, compare=False)

    @property
    def heat_guard(self) -> sources.HeatWatch | None:
        """What looks at the gradients of this step."""
        return self.source.guard if isinstance(self.source, sources.Watched) else None

    def init(self, params: Any, *, like: Any = None, tx: Any = None, generator: torch.Generator | None = None) -> Any:
        """Make the state to start from.

        Args:
            params: where to start.
            like: a state to start from, of an optimizer or of another temperature: what both remember is taken over, the
                buffers included.
            tx: another transformation than the step's own.
            generator: source of the key for what a module draws (default: torch's global generator).

        Returns:
            The state of ``tx.init(params)``. Where the step was given buffers, a ``ModuleState`` of it, of copies of the
            buffers and of a key; where it follows an estimator, an ``EstimatedState`` of it and of the estimator's memory.

        Raises:
            ValueError: parameters that the transformation or the estimator cannot start from.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> module = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
            >>> forward, params, buffers = bc.make_functional(module)
            >>> def loss(params, batch, buffers):
            ...     outputs, buffers = forward.with_buffers(params, batch, buffers)
            ...     return outputs.square().mean(), buffers
            >>> step = bc.make_step(loss, bc.sgd(0.1), buffers=buffers)
            >>> sorted(step.init(params).buffers)
            ['1.num_batches_tracked', '1.running_mean', '1.running_var']
        """
        kinds.require("step: init", tx=(tx, kinds.TX.or_none()), generator=(generator, kinds.GENERATOR))
        given = {} if like is None else {"like": like.inner if isinstance(like, ModuleState | EstimatedState) else like}
        inner = (self.tx if tx is None else tx).init(params, **given)
        return inner if self.memory is None else self.memory.start(inner, params, like, generator)

    def refresh(self, params: Any, state: Any) -> Any:
        """Move the reference of the estimator that the step follows to these parameters.

        Args:
            params: near which the chain is now.
            state: of the step.

        Returns:
            The state with another reference: for :func:`bayesopt_chain.gradients.svrg` after one gradient of all data, for
            control variates the same.

        Raises:
            TypeError: parameters that are no tensors.
            ValueError: the step follows the gradient of a loss, which refers to nothing; a state that is not of this step, or
                parameters of another structure or shape than its reference.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> data = torch.arange(6.0).split(2)
            >>> loss = lambda p, batch: ((p - batch) ** 2).mean() / 2
            >>> step = bc.make_step(bc.gradients.svrg(loss, data), bc.sgd(1.0))
            >>> state = step.init(torch.tensor(0.0))
            >>> params, state, info = step(torch.tensor(0.0), state, data[0])
            >>> step.refresh(params, state).estimator.reference
            tensor(2.5000)
        """
        if not isinstance(self.memory, EstimatorMemory):
            raise ValueError(
                "refresh: this step follows the gradient of a loss, which has no reference to move; pass "
                "bc.gradients.svrg(loss, data) to make_step in the place of the loss"
            )
        kinds.require("refresh", params=(params, kinds.PARAMS))
        _require(self.memory, state)
        with uninterrupted():
            return self.memory.refreshed(params, state, self.inplace)

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Info]:
        """Make the step.

        Args:
            params: where to start.
            state: what :meth:`init`, ``tx.init`` or the last step returned.
            batch: passed on to the loss.

        Returns:
            ``(params, state, Info)``; in place the first two are those that were given.

        Raises:
            ValueError: a state that is not of this step.
            FloatingPointError: with ``check_finite``, a loss or gradient that is not finite.

        ``torch.compile`` around a step leaves it as it is, with a warning: :func:`bayesopt_chain.capture` compiles it whole.
        """
        if torch.compiler.is_dynamo_compiling():
            return _compiled_by_bc_capture_only(self, params, state, batch)
        if self.ranks is not None:
            self.ranks.compare_once(params, state)
        inner, carried = state, None
        if self.memory is not None:
            _require(self.memory, state)
            inner, carried = state.inner, state.carried
        with model_draws(stream_of(state)):
            found = self.source(params, inner, batch, carried)
        if self.finite is not None:
            finite = self.finite(params, state, batch, found.grads, found.info.loss)
            found = found._replace(info=found.info._replace(finite=finite))
        if self.monitor:
            found = found._replace(info=monitored(found.info, found.grads, self.tx, inner))
        if not self.inplace:
            return self._move(params, state, inner, found)
        with uninterrupted():  # between two writes Ctrl-C would leave a step half made
            return self._move(params, state, inner, found)

    def _move(self, params: Any, state: Any, inner: Any, found: Evaluation) -> tuple[Any, Any, Info]:
        """Update the parameters and the state."""
        grads, info, extra, carried = found
        after = None if self.fused is None else self.fused.move(params, grads, inner)
        if after is not None and self.memory is None:
            return params, after, info
        was_enabled = torch.is_grad_enabled()
        _torch.set_grad_enabled(False)
        try:
            # ``advanced`` compares the number of steps left out before and behind this one; an update in place overwrites it
            skipped = inner.skipped.clone() if self.memory is not None and isinstance(inner, SkipState) else None
            swept = None
            if not self.inplace and not extra and isinstance(self.tx, Chain):
                swept = lower.moved(self.tx, params, grads, inner)
            if swept is not None:
                params, after = swept
            elif after is None:
                if self.inplace:
                    grads = _writable(grads)
                updates, after = self.tx.update(grads, inner, params=params, inplace=self.inplace, **extra)
                params = apply(params, updates, self.inplace)
            if self.memory is not None:
                after = state.advanced(after, carried, skipped, self.inplace)
            return params, after, info
        finally:
            _torch.set_grad_enabled(was_enabled)


class WeightedStep(Step):
    """A step of a chain whose draws have weights: it reports that of the parameters which it started from."""

    def _move(self, params: Any, state: Any, inner: Any, found: Evaluation) -> tuple[Any, Any, Info]:
        skipped = inner.skipped.clone() if isinstance(inner, SkipState) else None  # which a step in place overwrites
        params, state, info = super()._move(params, state, inner, found)
        after = state if self.memory is None else state.inner
        weight = weight_of(self.tx, after)
        if skipped is not None:  # one that was left out counts nothing: the next starts from the same parameters
            weight = torch.where(after.skipped == skipped, weight, 0.0)
        return params, state, info._replace(weight=weight)


_KEYWORDS = kinds.Kind(
    lambda x: x is None or (isinstance(x, Mapping) and all(map(callable, x.values()))),
    "a dictionary of functions of (params, batch), or None",
)
_BUFFERS = kinds.Kind(
    lambda x: x is None or (isinstance(x, Mapping) and all(isinstance(b, Tensor) for b in x.values())),
    "the buffers of a module by name, or None",
)


def make_step(
    loss: Loss | GradientEstimator | None,
    tx: GradientTransformation,
    *,
    curvature: Callable[[Any, Any], Any] | None = None,
    keywords: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    microbatches: int = 1,
    autocast: torch.dtype | None = None,
    inplace: bool = False,
    check_finite: bool = False,
    monitor: bool = False,
    heat_guard: sources.HeatWatch | None = None,
    mesh: Any = None,
) -> Step:
    """Make one training or sampling step: loss, gradient, chain and update as one function of (params, state, batch).

    Args:
        loss: ``loss(params, batch)`` returns a scalar, the mean negative log posterior per datum, or ``(scalar, aux)``; ``aux``
            is any tree, of tensors or not. With ``buffers``, ``loss(params, batch, buffers)`` returns ``(scalar, buffers)`` or
            ``(scalar, buffers, aux)``, with the buffers after this batch.
            Or an estimator of :mod:`bayesopt_chain.gradients`, whose memory travels with the state: begin with
            ``step.init(params)``, and move its reference with ``state = step.refresh(params, state)``.
            ``None`` for a filter with ``curvature=bc.ekf.observe(...)``, which knows its likelihood and reads no gradient.
        tx: any gradient transformation of this library or of TorchOpt. Gradients are clipped by a link in front
            (``bc.chain(torchopt.clip_grad_norm(1.0), bc.sghmc(...))``): a clipped force is in general the gradient of
            no loss, so that where it clips, what is sampled is not ``exp(-loss / temperature)``.
        curvature: ``curvature(params, batch)`` whose result ``tx.update`` receives as ``curvature=``, such as an estimator
            of :mod:`bayesopt_chain.curvature`. It is not called for a ``tx`` that takes no curvature, so that going from one
            method to another changes ``tx`` alone.
        keywords: further keywords of ``tx.update``, each a function of ``(params, batch)``:
            ``{"gradient_variance": fn}`` for ``bc.samplers.sgfs``, where ``fn`` returns the variance of single-datum
            gradients; ``{"hessian_diagonal": fn}`` for ``bc.samplers.psgld(corrected=True)``;
            ``{"transition_noise": lambda params, batch: 0.01 * batch["days"]}`` for a filter.
        buffers: of the module, as :func:`make_functional` gives them (an empty dictionary is fine). They travel with the state,
            which :meth:`Step.init` makes, so that each chain has its own; a key for what the module draws does too.
        microbatches: cut the batch along axis 0 into so many parts, go through them one after the other, and take the mean of
            their gradients, weighted by their sizes: a larger batch in the memory of one part. BatchNorm sees the parts.
            Tensors of ``aux`` then have the parts on axis 0; 0-d tensors and what is no tensor belong to every part.
        autocast: ``torch.bfloat16`` runs the loss under ``torch.autocast``; parameters and noise stay as they are.
        inplace: overwrite ``params`` and ``state`` instead of returning new ones. The tensors stay the same objects, except
            in states where a posterior accumulates (Laplace, SWAG, the filters), which are new ones at every step. The
            common chains (SGD, momentum, Nesterov, weight decay, matched noise, all of constant lr and temperature) then
            run fused; their values agree with ``update`` to one unit in the last place for each operation. Ctrl-C waits
            for the writes (not for the gradient), so that no step is left half made.
        check_finite: refuse a step whose loss or gradient is not finite, before anything is written. Where values cannot be
            looked at (captured, under :func:`parallel`) nothing is raised: ``info.finite`` says it. On a device it waits for
            the result. To leave such steps out instead, wrap the transformation: :func:`skip_nonfinite`.
        monitor: report the norm of the gradient and the temperature in force too, for one pass over the gradients.
        heat_guard: a :class:`bayesopt_chain.diagnostics.HeatGuard`, which looks at the gradients as they pass and warns once if
            minibatches heat the chain. It asks for steps that run one by one: not captured, not under :func:`parallel`.
        mesh: a DeviceMesh of one axis whose ranks share this chain and call the step with different data: the gradient and the
            loss are those of all of it, for one message a step. Every tensor of the batch has one entry a datum on axis 0.
            All ranks start from the same parameters and state (:func:`bayesopt_chain.distributed.broadcast`), which the
            first step compares; ``aux`` stays each rank's own.

    Returns:
        ``step(params, state, batch) -> (params, state, Info(loss, aux))``, detached. Parameters that the loss does not
        use have gradient zero. The state alone determines the noise, so that the same arguments give the same result; where
        it has a key (at a temperature, or with ``buffers``) it determines what the model draws too, dropout for one, and
        torch's global generator is left as it was.
        Where ``tx`` draws (variational inference), ``loss`` is the mean over its draws, tensors of ``aux`` have the draws
        on axis 0 if there are several, and the families of :mod:`bayesopt_chain.posterior.vi` report ``negative_elbo`` besides.

    Raises:
        ValueError: a ``tx`` that cannot do without curvature, and none is given; two links that draw; arguments at odds; with
            ``mesh``, a ``tx`` that asks for more than gradient and loss, buffers, or a mesh of several axes; at the first
            step, ranks that are no replicas, a loss that is not a scalar or depends on none of ``params``, or a sparse
            gradient.
        TypeError: ``tx`` is no gradient transformation; ``loss`` is neither a function nor an estimator; a keyword that ``tx``
            does not take; at the first step, params with a leaf that is no tensor.
        FloatingPointError: with ``check_finite``, a loss or gradient that is not finite, naming call and leaf.

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
    kinds.require(
        "make_step",
        inplace=(inplace, kinds.BOOL),
        check_finite=(check_finite, kinds.BOOL),
        monitor=(monitor, kinds.BOOL),
        keywords=(keywords, _KEYWORDS),
        buffers=(buffers, _BUFFERS),
    )
    if not isinstance(tx, GradientTransformation):
        raise TypeError(f"make_step: tx is {tx!r}, not a gradient transformation")
    if loss is not None and not callable(loss) and not isinstance(loss, GradientEstimator):
        raise TypeError(
            f"make_step: loss is {loss!r}; pass loss(params, batch), an estimator of bc.gradients, or None for a filter"
        )
    if heat_guard is not None:
        if not callable(getattr(heat_guard, "watch", None)):
            raise ValueError(f"make_step: heat_guard must be a bc.diagnostics.HeatGuard or None, got {heat_guard!r}")
        heat_guard.require(tx)
    chain = unwrapped(tx)
    ranks = None if mesh is None else DataParallel(mesh)
    source = sources.source_of(
        loss,
        chain,
        functions=sources.functions_of(chain, curvature, keywords),
        buffers=buffers,
        microbatches=microbatches,
        autocast=autocast,
        ranks=ranks,
    )
    memory: Memory | None = None
    if isinstance(loss, GradientEstimator):
        memory = EstimatorMemory(loss)
    elif buffers is not None:
        memory = ModuleMemory(buffers)
    source = source if chain is tx else sources.Inside(source, tx)
    weighted = any([isinstance(link, Weighted) for link in getattr(chain, "links", ())])
    return (WeightedStep if weighted else Step)(
        source if heat_guard is None else sources.Watched(source, heat_guard, tx),
        tx,
        inplace,
        fused.recognise(tx) if inplace else None,
        FiniteCheck() if check_finite else None,
        memory,
        monitor,
        ranks,
        loss,
    )


def stream_of(state: Any) -> tuple[Tensor, Tensor] | None:
    """Find the key and the count that the model's draws follow: the module's own, else the first among the links' states."""
    if isinstance(state, ModuleState):
        return state.stream
    if isinstance(state, SkipState | MasterState | EstimatedState):
        return stream_of(state.inner)
    if isinstance(state, tuple):
        for entry in (state, *state):
            key, count = getattr(entry, "key", None), getattr(entry, "step", None)
            if isinstance(key, Tensor) and isinstance(count, Tensor) and key.ndim == count.ndim == 0:
                return key, count
    return None


def apply(params: Any, updates: Any, inplace: bool) -> Any:
    """Add updates to parameters; unlike ``torchopt.apply_updates`` it takes parameter trees with ``None``."""
    leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
    moves = optree.tree_leaves(updates, none_is_leaf=True)
    if not all([type(p) in PLAIN for p in leaves]):
        new = shards.add(leaves, moves, inplace)
    elif inplace:
        new = [p if u is None else p.add_(u) for p, u in zip(leaves, moves)]
    else:
        new = [p if u is None else p.add(u) for p, u in zip(leaves, moves)]
    return params if inplace else optree.tree_unflatten(spec, new)


def _writable(grads: Any) -> Any:
    """Copy the gradients of which overwriting one would change another."""
    leaves, spec = optree.tree_flatten(grads, none_is_leaf=True)
    mine = owned([shards.local(x) for x in leaves])
    return optree.tree_unflatten(spec, [shards.like(x, y) for x, y in zip(leaves, mine)])


@_torch.uncompiled
def _compiled_by_bc_capture_only(step: Step, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Info]:
    """A step in the middle of what ``torch.compile`` compiles: dynamo can follow neither its transformations nor its draws."""
    warnings.warn(
        "make_step: torch.compile leaves this step as it is, and compiles only what stands around it; "
        "bc.capture(step, params, state, batch) compiles the whole step",
        stacklevel=3,
    )
    return step(params, state, batch)


def _require(memory: Memory, state: Any) -> None:
    """Refuse the state of another step."""
    if not isinstance(state, memory.kind):
        raise ValueError(
            f"step: it was made with {memory.option}, so its state is what step.init(params) returns, not "
            f"{type(state).__name__}; an optimizer's state goes in as step.init(params, like=state)"
        )
