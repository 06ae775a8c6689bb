r"""``make_step``: loss, gradient, chain and update as one pure function of (params, state, batch).

A step has three parts:

    source     computes the gradient and the further keywords of ``tx.update`` (:mod:`bayesopt_chain.loop.sources`)
    tx         the chain, which turns them into an update of the parameters
    memory     what the state holds besides that of ``tx``: the buffers of a module (:mod:`bayesopt_chain.loop.module_state`),
               or the reference of an estimator (:mod:`bayesopt_chain.loop.gradients`)

The random numbers of the model itself (dropout) are a function of the state (:mod:`bayesopt_chain.loop.model_draws`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import _torch, checks, tracing
from bayesopt_chain.core.chain import Chain, numbers_of
from bayesopt_chain.core.op import owned
from bayesopt_chain.distributed import shards
from bayesopt_chain.distributed.ranks import COMPARED, Ranks
from bayesopt_chain.engine.engine import moved
from bayesopt_chain.links.wrapper import MasterState, SkipState, Weighted, unwrapped, weight_of
from bayesopt_chain.loop import sources
from bayesopt_chain.loop.gradients import EstimatedState, EstimatorMemory, GradientEstimator
from bayesopt_chain.loop.interrupts import uninterrupted
from bayesopt_chain.loop.loss import PLAIN, Evaluation, GradientSource, Info, Loss, detach, monitored, unshared
from bayesopt_chain.loop.model_draws import model_draws
from bayesopt_chain.loop.module_state import Memory, ModuleMemory, ModuleState
from bayesopt_chain.trees import all_finite, found_finite, leaves_of


class FiniteCheck:
    """Raises before anything is written if a step's loss or gradient is not finite.

    Attributes:
        calls: the number of calls so far, which the message gives.
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, params: Any, state: Any, batch: Any, grads: Any, loss: Tensor) -> Tensor:
        """Check the loss and the gradient of a step.

        Args:
            params, state, batch: the arguments of the step, which are searched for the cause.
            grads: the gradient, a tree like the parameters.
            loss: the loss, 0-d.

        Returns:
            Whether loss and gradient are finite, a 0-d tensor of bools.

        Raises:
            FloatingPointError: they are not, and the value can be read (it cannot under capture or vmap). The message names the
                call, the leaf, and what was not finite before the step.
        """
        self.calls += 1
        leaves: list[Any] = optree.tree_leaves(grads)
        # all ranks that hold parts of the gradient must agree: if only some of them raised, the others would wait for them
        flag = shards.everywhere(all_finite([loss, *map(_torch.local, leaves)]), leaves)
        if tracing.is_hidden(flag) or bool(flag):
            return flag
        bad = ([f"the loss is {loss.item()}"] if not bool(torch.isfinite(loss).all()) else []) + _not_finite(
            "the gradient", grads
        )
        before = [*_not_finite("batch", batch), *_not_finite("params", params), *_not_finite("state", state)]
        cause = (
            f"; not finite before the step: {', '.join(before)}" if before else "; params, state and batch are finite"
        )
        raise FloatingPointError(
            f"call {self.calls} of this step: {', '.join(bad)}{cause}. Nothing was written: leave this batch out "
            "(bc.skip_nonfinite(tx) does), lower lr, or clip the gradient (torchopt.clip_grad_norm)"
        )


def _not_finite(what: str, tree: Any) -> list[str]:
    """Describe each leaf of a tree that holds NaN or infinities, and count these entries."""
    found = []
    for path, x in zip(optree.tree_paths(tree), optree.tree_leaves(tree)):
        x = _torch.local(x)
        if isinstance(x, Tensor) and x.layout is torch.strided and not found_finite([x]):
            wrong = x.numel() - int(torch.isfinite(x).sum())
            kind = "nan" if bool(torch.isnan(x).any()) else "inf"
            found.append(f"{what}{checks.name(path) if path else ''} has {kind} in {wrong} of {x.numel()} entries")
    return found


@dataclass(frozen=True)
class Step:
    """The step that :func:`make_step` returns. ``capture`` and ``parallel`` read its attributes.

    Attributes:
        source: computes the gradient and the further keywords that the transformation asks for.
        tx: the transformation.
        inplace: whether parameters and state are overwritten.
        finite: the check of ``check_finite=True``, or ``None``.
        memory: makes the state of a step that holds buffers or the memory of an estimator, or ``None``.
        monitor: whether the norm of the gradient and the temperature are reported.
        ranks: the ranks that share this chain.
        loss: the loss or estimator that :func:`make_step` was given. A run on disk compares it with that of the run it resumes.
        heat_guard: reads the gradient of each step before anything moves, or ``None``.
        observe: a function of (params, grads, batch), whose result is reported, or ``None``.
    """

    source: GradientSource
    tx: GradientTransformation
    inplace: bool = False
    finite: FiniteCheck | None = None
    memory: Memory | None = None
    monitor: bool = False
    ranks: Ranks = field(default_factory=lambda: Ranks(None), compare=False)
    loss: Any = field(default=None, compare=False)
    heat_guard: sources.HeatWatch | None = None
    observe: Callable[[Any, Any, Any], Any] | None = field(default=None, compare=False)

    @checks.takes(params=checks.ANY)
    def init(self, params: Any, *, like: Any = None, tx: Any = None, generator: torch.Generator | None = None) -> Any:
        """Make the state to start from.

        Args:
            params: the parameters to start from.
            like: a state of an optimizer, or of the chain at another temperature. The fields that both states have, and
                buffers, are copied from it. Default: none.
            tx: another transformation to use in place of the step's own. Default: the step's own.
            generator: source of the key for the random numbers of a module (default: torch's global generator).

        Returns:
            The state of ``tx.init(params)``. If the step was made with ``buffers=``, a ``ModuleState`` of that state, of copies
            of the buffers and of a key; if it follows an estimator, an ``EstimatedState`` of that state and of the estimator's
            memory.

        Raises:
            ValueError: the transformation or the estimator cannot start from these parameters.

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
        given = {} if like is None else {"like": like}
        inner = (self.tx if tx is None else tx).init(params, **given)
        return inner if self.memory is None else self.memory.start(inner, params, like, generator)

    def refresh(self, params: Any, state: Any) -> Any:
        """Move the reference of the estimator that the step follows to these parameters.

        Args:
            params: the current parameters of the chain.
            state: the state of the step.

        Returns:
            The state with the new reference. For :func:`bayesopt_chain.gradients.svrg` this takes one gradient of all data;
            control variates keep their reference.

        Raises:
            TypeError: ``params`` are no tree of tensors.
            ValueError: the step follows the gradient of a loss, which has no reference; the state is not of this step; the
                parameters have another structure or other shapes than the reference.

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
        checks.PARAMS("refresh: params", params)
        _require(self.memory, state)
        with uninterrupted():
            return self.memory.refreshed(params, state, self.inplace)

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Info]:
        """Make the step.

        Args:
            params: the parameters, a tree of tensors.
            state: the state, as :meth:`init`, ``tx.init`` or the last step returned it.
            batch: passed on to the loss.

        Returns:
            ``(params, state, Info)``; with ``inplace`` the first two hold the tensors that were given.

        Raises:
            ValueError: the state is not of this step.
            FloatingPointError: with ``check_finite``, the loss or the gradient is not finite.

        ``torch.compile`` does not compile a step that it meets, and warns. :func:`bayesopt_chain.capture` compiles whole steps.
        """
        if torch.compiler.is_dynamo_compiling():  # tested here, since dynamo cannot trace what follows
            return _compiled_by_bc_capture_only(self, params, state, batch)
        ranks = self.ranks
        if ranks.calls in COMPARED:
            ranks.compare(partial(numbers_of, self.tx), params, state)
        ranks.calls += 1
        inner, carried = state, None
        if self.memory is not None:
            _require(self.memory, state)
            inner, carried = state.inner, state.carried
        with model_draws(stream_of(state)):
            found = self.source(params, inner, batch, carried)
        if self.heat_guard is not None:
            self.heat_guard.watch(self.tx, params, inner, found.grads)
        if self.finite is not None:
            finite = self.finite(params, state, batch, found.grads, found.info.loss)
            found = found._replace(info=found.info._replace(finite=finite))
        if self.monitor:
            found = found._replace(info=monitored(found.info, found.grads, self.tx, inner))
        if self.observe is not None:
            with torch.no_grad():
                seen = detach(self.observe(params, found.grads, batch))
            found = found._replace(info=found.info._replace(observed=seen))
        if not self.inplace:
            return self._move(params, state, inner, found)
        if self.observe is not None or type(found.info.aux) is not tuple or found.info.aux:
            aux, seen = (unshared(x, params, found.grads) for x in (found.info.aux, found.info.observed))
            found = found._replace(info=found.info._replace(aux=aux, observed=seen))
        with uninterrupted():  # Ctrl-C between two writes would leave parameters and state of different steps
            return self._move(params, state, inner, found)

    def _move(self, params: Any, state: Any, inner: Any, found: Evaluation) -> tuple[Any, Any, Info]:
        """Update the parameters and the state.

        Args:
            params: the parameters.
            state: the state of the step.
            inner: the state of the transformation, a part of ``state`` or the same.
            found: the evaluation of the source.

        Returns:
            ``(params, state, Info)`` after the step.
        """
        grads, info, extra, carried = found
        was_enabled = torch.is_grad_enabled()
        _torch.set_grad_enabled(False)
        try:
            # ``advanced`` compares the numbers of skipped steps before and after this step; in place the old one is lost
            skipped = inner.skipped.clone() if self.memory is not None and isinstance(inner, SkipState) else None
            # one sweep that moves the parameters saves the updates and a pass over memory
            swept = (
                moved(self.tx.plan(inner), params, grads, inner, self.inplace)
                if isinstance(self.tx, Chain) and not extra
                else None
            )
            if swept is not None:
                params, after = swept
            else:
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
    """A step of a chain whose draws have weights. It reports the weight of the parameters that it started from."""

    def _move(self, params: Any, state: Any, inner: Any, found: Evaluation) -> tuple[Any, Any, Info]:
        skipped = inner.skipped.clone() if isinstance(inner, SkipState) else None  # a step in place overwrites it
        params, state, info = super()._move(params, state, inner, found)
        after = state if self.memory is None else state.inner
        weight = weight_of(self.tx, after)
        if skipped is not None:  # after a skipped step the next one starts from the same parameters and reports them
            weight = torch.where(after.skipped == skipped, weight, 0.0)
        return params, state, info._replace(weight=weight)


_KEYWORDS = checks.Kind(
    lambda x: x is None or (isinstance(x, Mapping) and all(map(callable, x.values()))),
    "a dictionary of functions of (params, batch), or None",
)


@checks.takes(
    loss=checks.Kind(
        lambda x: x is None or callable(x) or isinstance(x, GradientEstimator),
        "loss(params, batch), an estimator of bc.gradients, or None for a filter",
    ),
    tx=checks.instance(GradientTransformation, "a gradient transformation"),
    keywords=_KEYWORDS,
    buffers=checks.BY_NAME.or_none(),
    microbatches=checks.WHOLE,
    autocast=checks.Kind(
        lambda x: x is torch.bfloat16,
        "torch.bfloat16",
        (torch.dtype,),
        "float16 gradients underflow without a scaled loss",
    ),
    inplace=checks.BOOL,
    check_finite=checks.BOOL,
    monitor=checks.BOOL,
    heat_guard=checks.having("a bc.diagnostics.HeatGuard, or None", "watch"),
    observe=checks.FUNCTION,
    mesh=checks.ANY,
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
    observe: Callable[[Any, Any, Any], Any] | None = None,
    mesh: Any = None,
) -> Step:
    """Make one training or sampling step: loss, gradient, chain and update as one function of (params, state, batch).

    Args:
        loss: ``loss(params, batch)`` returns a scalar, the mean negative log posterior per datum, or ``(scalar, aux)``; ``aux``
            is any tree, of tensors or not. With ``buffers``, ``loss(params, batch, buffers)`` returns ``(scalar, buffers)`` or
            ``(scalar, buffers, aux)``, with the buffers after this batch.
            Or an estimator of :mod:`bayesopt_chain.gradients`, whose memory is part of the state: start from
            ``step.init(params)``, and move its reference with ``state = step.refresh(params, state)``.
            Or ``None`` for a filter with ``curvature=bc.ekf.observe(...)``, which has its own likelihood and reads no gradient.
        tx: any gradient transformation of this library or of TorchOpt. To clip gradients, put a link in front of it
            (``bc.chain(torchopt.clip_grad_norm(1.0), bc.sghmc(...))``). A clipped gradient is in general the gradient of
            no loss, so that a chain whose gradients are clipped does not sample ``exp(-loss / temperature)``.
        curvature: ``curvature(params, batch)``, whose result ``tx.update`` receives as ``curvature=``, such as an estimator
            of :mod:`bayesopt_chain.curvature`. It is not called for a ``tx`` that takes no curvature, so that ``tx`` can be
            replaced without other changes. Default: none.
        keywords: further keywords of ``tx.update``, each a function of ``(params, batch)``:
            ``{"gradient_variance": fn}`` for ``bc.samplers.sgfs``, where ``fn`` returns the variance of single-datum
            gradients;
            ``{"transition_noise": lambda params, batch: 0.01 * batch["days"]}`` for a filter. Default: none.
        buffers: the buffers of the module, as :func:`make_functional` returns them (possibly an empty dictionary). They become
            part of the state that :meth:`Step.init` makes, together with a key for the module's random numbers, so that each
            chain has its own. Default: none.
        microbatches: the number of parts into which the batch is cut along axis 0. The parts are evaluated one after the other,
            in the memory of one part, and their gradients are averaged with their sizes as weights. BatchNorm sees single
            parts. Tensors of ``aux`` have the parts on axis 0. Every part gets the 0-d tensors and other leaves of the batch.
            Default 1.
        autocast: ``torch.bfloat16`` evaluates the loss under ``torch.autocast``. Parameters and noise keep their dtype.
            Default: none.
        inplace: overwrite ``params`` and ``state`` instead of returning new ones. The tensors stay the same objects, except
            in the states of posteriors that accumulate (Laplace, SWAG, the filters), which are new at every step. The
            common chains (SGD, momentum, Nesterov, weight decay, matched noise, all of constant lr and temperature) then
            run in one pass, with the bits of ``update``. Ctrl-C waits
            for the end of the writes, but not of the gradient. Default: False.
        check_finite: raise before anything is written if the loss or the gradient is not finite. If values cannot be
            read (in captured steps and under :func:`parallel`) nothing is raised, and ``info.finite`` holds the result. On an
            accelerator each step waits for the result. To skip such steps instead, wrap the transformation with
            :func:`skip_nonfinite`. Default: False.
        monitor: report the norm of the gradient and the current temperature too, which takes one pass over the gradients.
            Default: False.
        heat_guard: a :class:`bayesopt_chain.diagnostics.HeatGuard`, which reads the gradients of each step and warns once if
            the noise of minibatches raises the temperature. It cannot be used with captured steps or :func:`parallel`.
            Default: none.
        observe: ``observe(params, grads, batch)``, whose result, a tree of tensors, is ``info.observed``: observables of the
            parameters that the step started from, at no second gradient. ``grads`` is the gradient that the transformation
            gets, and must not be written to. Default: none.
        mesh: a DeviceMesh of one axis whose ranks share this chain and call the step with different data. The gradient and the
            loss are averaged over all data, by one message per step. Every tensor of the batch has the data on axis 0.
            All ranks have to start from the same parameters and state (:func:`bayesopt_chain.distributed.broadcast`) and to
            have the same chain, so that these stay equal, bit for bit; the steps 1, 2, 4, 16, 64 and so on compare them.
            ``aux`` is not averaged. Default: one process.

    Parameters that are DTensors are shared by the ranks of their mesh, which compare the numbers of the chain, such as rates
    and schedules, at the same steps, and every leaf that is whole on each of them.

    Returns:
        ``step(params, state, batch) -> (params, state, Info(loss, aux))``, detached. Parameters that the loss does not
        use have gradient zero. The noise is a function of the state, so that the same arguments give the same result. If the
        state has a key (at a temperature, or with ``buffers``), the model's own random numbers, such as dropout, are a function
        of the state too, and torch's global generator does not change.
        If ``tx`` draws the parameters (variational inference), ``loss`` is the mean over its draws, tensors of ``aux`` have the
        draws on axis 0 if there are several, and the report of the families of :mod:`bayesopt_chain.posterior.vi` has a
        ``negative_elbo`` too.

    Raises:
        ValueError: ``tx`` needs curvature, and none is given; two links draw; arguments contradict each other; with
            ``mesh``, a ``tx`` that asks for more than gradient and loss, buffers, or a mesh of several axes; at a
            comparison, ranks of one chain that differ; at the first step, a loss that is not a scalar or depends on none of
            ``params``, or a sparse gradient.
        TypeError: ``tx`` is no gradient transformation; ``loss`` is neither a function nor an estimator; ``tx`` does not take
            one of the keywords; at the first step, a leaf of params is no tensor.
        FloatingPointError: with ``check_finite``, the loss or the gradient is not finite; the message names call and leaf.

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
    if heat_guard is not None:
        heat_guard.require(tx)
    chain = unwrapped(tx)
    ranks = Ranks(mesh)
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
    # a class of its own, so that the steps of all other chains need not ask
    weighted = any([isinstance(link, Weighted) for link in getattr(chain, "links", ())])
    return (WeightedStep if weighted else Step)(
        source,
        tx,
        inplace,
        FiniteCheck() if check_finite else None,
        memory,
        monitor,
        ranks,
        loss,
        heat_guard,
        observe,
    )


def stream_of(state: Any) -> tuple[Tensor, Tensor] | None:
    """Find the key and the count on which the model's own random numbers depend.

    Returns:
        Those of the module if the state has buffers, else the first among the states of the links; ``None`` if there are none.
    """
    if not isinstance(state, tuple):
        return None
    if isinstance(state, ModuleState):
        return state.stream
    if isinstance(state, (SkipState, MasterState, EstimatedState)):
        return stream_of(state.inner)
    if isinstance(key := getattr(state, "key", None), Tensor):
        count = getattr(state, "step", None)
        if isinstance(count, Tensor) and key.ndim == count.ndim == 0:
            return key, count
    for x in state:  # a tuple of tensors is a field with one for each leaf, which holds no state
        if (
            isinstance(x, tuple)
            and x
            and not (type(x) is tuple and isinstance(x[0], Tensor))
            and (found := stream_of(x))
        ):
            return found
    return None


def apply(params: Any, updates: Any, inplace: bool) -> Any:
    """Add updates to parameters. Unlike ``torchopt.apply_updates`` this takes DTensors, and trees with ``None`` as a leaf.

    Args:
        params: the parameters, a tree.
        updates: a tree like the parameters; a parameter whose update is ``None`` stays as it is.
        inplace: whether to write into the parameters.

    Returns:
        The new parameters; with ``inplace`` the tree that was given.
    """
    (leaves, spec), (moves, _) = leaves_of(params), leaves_of(updates)
    if not PLAIN.issuperset(map(type, leaves)):
        new = shards.add(leaves, moves, inplace)
    elif inplace:
        new = [p if u is None else p.add_(u) for p, u in zip(leaves, moves)]
    else:
        new = [p if u is None else p.add(u) for p, u in zip(leaves, moves)]
    return params if inplace else optree.tree_unflatten(spec, new)


def _writable(grads: Any) -> Any:
    """Copy gradients that share memory, since an update in place of one would change the other."""
    leaves, spec = leaves_of(grads)
    mine = owned([_torch.local(x) for x in leaves])
    return optree.tree_unflatten(spec, [_torch.like(x, y) for x, y in zip(leaves, mine)])


@_torch.uncompiled
def _compiled_by_bc_capture_only(step: Step, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Info]:
    """Make a step inside of code that ``torch.compile`` compiles, uncompiled, and warn.

    Dynamo can trace neither the ``torch.func`` transformations of a step nor its random numbers.
    """
    checks.warn(
        "make_step: torch.compile leaves this step as it is, and compiles only what stands around it; "
        "bc.capture(step, params, state, batch) compiles the whole step"
    )
    return step(params, state, batch)


def _require(memory: Memory, state: Any) -> None:
    """Raise ValueError if a state has another class than the states of this step."""
    if not isinstance(state, memory.kind):
        raise ValueError(
            f"step: it was made with {memory.option}, so its state is what step.init(params) returns, not "
            f"{type(state).__name__}; an optimizer's state goes in as step.init(params, like=state)"
        )
