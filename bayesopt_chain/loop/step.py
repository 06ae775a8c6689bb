r"""``make_step``: loss, gradient, chain and update as one pure function of (params, state, batch).

What a transformation asks for besides the gradient it says itself, by the keywords its ``update`` accepts:

    draw                    the gradient is taken at a draw from its posterior, for each of its samples
    curvature               the increment that ``curvature(params, batch)`` gives, where the gradient was taken
    gradient_variance       what ``gradient_variance(params, batch)`` gives: the variance of single-datum gradients
    hessian_diagonal        what ``hessian_diagonal(params, batch)`` gives
    per_sample_gradients    the gradient of every datum
    loss                    its value where the gradient was taken

and a link that acts on particles, stacked on axis 0, is given the gradient and the loss of each: going from one method to
another changes the transformation and nothing else.

What the model itself draws (dropout) is a function of the state: :mod:`bayesopt_chain.random.model_draws`. With ``m``
microbatches of ``n_i`` data the gradient is that of the whole batch's mean, ``sum_i n_i g_i / sum_i n_i``, in the
memory of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import _torch, batches, checks, tracing
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import ANY
from bayesopt_chain.core.op import owned
from bayesopt_chain.distributed import shards
from bayesopt_chain.distributed.ranks import DataParallel
from bayesopt_chain.distributed.replicated import refusing_replicated
from bayesopt_chain.fused import sgd as fused
from bayesopt_chain.links.foreign import keywords_of
from bayesopt_chain.links.skip_nonfinite import SkipNonfinite, SkipState
from bayesopt_chain.loop import options
from bayesopt_chain.loop.finite import FiniteCheck
from bayesopt_chain.loop.interrupts import uninterrupted
from bayesopt_chain.loop.module_state import ModuleState, started, stream_of
from bayesopt_chain.posterior import draw as drawing
from bayesopt_chain.random.model_draws import model_draws

Loss = Callable[[Any, Any], Any]


NO_GRADIENT = (
    "loss: does not depend on params, so that no gradient would hold the chain: compute it from the params it is given "
    "(a module by torch.func.functional_call(module, params, ...))"
)


class Info(NamedTuple):
    """What a step reports: the detached loss at the parameters it started from, and the loss's auxiliary output.

    ``finite``: whether loss and gradient are finite, 0-d, from ``make_step(..., check_finite=True)``; else ``()``.
    ``gradient_norm``, ``temperature``: of all gradients together, before the transformation, and as it is set for this
    step (0 where nothing is sampled), 0-d, from ``make_step(..., monitor=True)``; else ``()``.

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


class Evaluation(NamedTuple):
    """The gradient at one point, :class:`Info`, the further keywords of ``tx.update``, and the module's next buffers."""

    grads: Any
    info: Any
    extra: dict[str, Any]
    buffers: Any = ()


@dataclass(frozen=True)
class Step:
    """What :func:`make_step` returns: a callable that other loops (``capture``, ``parallel``) can look into.

    ``evaluate(params, state, batch, buffers)`` gives an :class:`Evaluation`; ``state`` is the transformation's.
    """

    evaluate: Callable[[Any, Any, Any, Any], Evaluation]
    tx: GradientTransformation
    inplace: bool = False
    fused: fused.FusedSGD | None = None
    finite: FiniteCheck | None = None
    buffers: Mapping[str, Tensor] | None = field(default=None, compare=False)
    monitor: bool = False
    ranks: DataParallel | None = None
    loss: Any = field(default=None, compare=False)

    def init(self, params: Any, *, like: Any = None, tx: Any = None, generator: torch.Generator | None = None) -> Any:
        """The state to start from: that of ``tx.init(params)`` or, where the step was given buffers, a :class:`ModuleState` of
        it, of copies of the buffers and of a key for what the module draws.

        Args:
            params: where to start.
            like: a state to start from, of an optimizer or of another temperature: what both remember, and the buffers, are
                taken over.
            tx: another transformation than the step's own.
            generator: source of the module's key (default: torch's global generator).
        """
        given = {} if like is None else {"like": like.inner if isinstance(like, ModuleState) else like}
        inner = (self.tx if tx is None else tx).init(params, **given)
        if self.buffers is None:
            return inner
        return started(inner, self.buffers, optree.tree_leaves(params), like, generator)

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Info]:
        if self.buffers is not None and not isinstance(state, ModuleState):
            raise ValueError(
                f"step: it was made with buffers=, so its state is what step.init(params) returns, not {type(state).__name__}; "
                "an optimizer's state goes in as step.init(params, like=state)"
            )
        if self.ranks is not None:
            self.ranks.compare_once(params, state)
        inner, buffers = (state.inner, state.buffers) if self.buffers is not None else (state, None)
        with model_draws(stream_of(state)):
            grads, info, extra, buffers = self.evaluate(params, inner, batch, buffers)
        if self.finite is not None:
            info = info._replace(finite=self.finite(params, state, batch, grads, info.loss))
        if self.monitor:
            info = options.monitored(info, grads, self.tx, inner)
        if not self.inplace:
            return self._move(params, state, inner, grads, info, extra, buffers)
        with uninterrupted():  # nothing is left half written
            return self._move(params, state, inner, grads, info, extra, buffers)

    def _move(
        self, params: Any, state: Any, inner: Any, grads: Any, info: Info, extra: dict[str, Any], buffers: Any
    ) -> tuple[Any, Any, Info]:
        after = None if self.fused is None else self.fused.move(params, grads, inner)
        if after is not None and self.buffers is None:
            return params, after, info
        with torch.no_grad():
            skipped = inner.skipped.clone() if isinstance(inner, SkipState) and self.buffers is not None else None
            params, inner = self._updated(params, inner, grads, extra) if after is None else (params, after)
            if self.buffers is None:
                return params, inner, info
            return params, state.advanced(inner, buffers, skipped, self.inplace), info

    def _updated(self, params: Any, state: Any, grads: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        if self.inplace:
            grads = writable(grads)
        updates, state = self.tx.update(grads, state, params=params, inplace=self.inplace, **extra)
        return apply(params, updates, self.inplace), state


def make_step(
    loss: Loss | None,
    tx: GradientTransformation,
    *,
    curvature: Callable[[Any, Any], Any] | None = None,
    gradient_variance: Callable[[Any, Any], Any] | None = None,
    hessian_diagonal: Callable[[Any, Any], Any] | None = None,
    keywords: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    microbatches: int = 1,
    autocast: torch.dtype | None = None,
    inplace: bool = False,
    check_finite: bool = False,
    monitor: bool = False,
    mesh: Any = None,
) -> Step:
    """One training or sampling step.

    Args:
        loss: ``loss(params, batch)`` returns a scalar, the mean negative log posterior per datum, or ``(scalar, aux)``; ``aux``
            is any tree, of tensors or not. With ``buffers``, ``loss(params, batch, buffers)`` returns ``(scalar, buffers)`` or
            ``(scalar, buffers, aux)``, with the buffers after this batch.
            ``None`` for a filter with ``curvature=bc.ekf.observe(...)``, which knows its likelihood and reads no gradient.
        tx: any gradient transformation of this library or of TorchOpt. Gradients are clipped by a link in front
            (``bc.chain(torchopt.clip_grad_norm(1.0), bc.sghmc(...))``): a clipped force is in general the gradient of
            no loss, so that where it clips, what is sampled is not ``exp(-loss / temperature)``.
        curvature: ``curvature(params, batch)`` whose result ``tx.update`` receives as ``curvature=``, such as an estimator
            of :mod:`bayesopt_chain.curvature`. It is not called for a ``tx`` that takes no curvature.
        gradient_variance: ``gradient_variance(params, batch)``, the variance of single-datum gradients as a tree like the
            parameters (a matrix for ``sgfs(dense=True)``), for a ``tx`` that takes it.
        hessian_diagonal: ``hessian_diagonal(params, batch)``, the diagonal of the mean loss's Hessian as a tree like the
            parameters, for a ``tx`` that takes it.
        keywords: further keywords of ``tx.update``, each a function of ``(params, batch)``:
            ``{"transition_noise": lambda params, batch: 0.01 * batch["days"]}``.
        buffers: of the module, as :func:`make_functional` gives them (an empty dictionary is fine): they travel with the state,
            which :meth:`Step.init` makes, each chain its own, and so does a key for what the module draws.
        microbatches: cut the batch along axis 0 into so many parts, gone through one after the other, and take the mean of
            their gradients, weighted by their sizes: a larger batch in the memory of a part. BatchNorm sees the parts.
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
        TypeError: ``tx`` is no gradient transformation; at the first step, params with a leaf that is no tensor.
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
    if not isinstance(tx, GradientTransformation):
        raise TypeError(f"make_step: tx is {tx!r}, not a gradient transformation")
    if isinstance(tx, SkipNonfinite):
        inner = make_step(
            loss,
            tx.transformation,
            curvature=curvature,
            gradient_variance=gradient_variance,
            hessian_diagonal=hessian_diagonal,
            keywords=keywords,
            buffers=buffers,
            microbatches=microbatches,
            autocast=autocast,
            inplace=inplace,
            check_finite=check_finite,
            monitor=monitor,
            mesh=mesh,
        )
        return replace(inner, evaluate=lambda p, s, *rest: inner.evaluate(p, s.inner, *rest), tx=tx, fused=None)
    accepts = keywords_of(tx)
    if curvature is None and "curvature" in getattr(tx, "required_kwargs", ()):
        raise ValueError(
            f"make_step: {tx!r} needs curvature: pass curvature=bc.curvature.ggn(forward, likelihood, structure)"
        )
    given = {"curvature": curvature, "gradient_variance": gradient_variance, "hessian_diagonal": hessian_diagonal}
    estimators = {k: fn for k, fn in given.items() if fn is not None and (k in accepts or ANY in accepts)}
    if keywords and (unknown := keywords.keys() - accepts) and ANY not in accepts:
        raise TypeError(
            f"make_step: {tx!r} takes no {', '.join(sorted(unknown))}=; it takes {', '.join(sorted(accepts))}"
        )
    estimators |= keywords or {}
    if loss is None and "curvature" not in estimators:
        raise ValueError(f"make_step: {tx!r} follows a gradient: pass a loss")
    if loss is None and (buffers is not None or microbatches > 1 or autocast is not None):
        raise ValueError(
            "make_step: buffers=, microbatches= and autocast= are of a loss, and there is none: leave them out"
        )
    by_datum = "per_sample_gradients" in accepts
    links = tx.links if isinstance(tx, Chain) else ()
    draws = [i for i, link in enumerate(links) if link.samples]
    stacked = any(link.acts_on_particles for link in links)
    if len(draws) > 1:
        raise ValueError(f"make_step: {len(draws)} links of this chain draw; one step takes gradients at one draw")
    if stacked and (draws or by_datum or estimators):
        raise ValueError(
            "make_step: a chain over particles takes their gradients and losses, and can ask for nothing else"
        )
    options.check(microbatches, autocast, "by datum" if by_datum else "of particles" if stacked else "", buffers)
    loss = loss if loss is None or autocast is None else options.under_autocast(loss, autocast)

    if mesh is not None and (by_datum or stacked or estimators or buffers):
        asked = (
            "per_sample_gradients" if by_datum else "particles" if stacked else next(iter(estimators or ["buffers"]))
        )
        raise ValueError(
            f"make_step: with mesh= the ranks exchange gradients and losses, and {tx!r} asks for {asked}, which would be "
            "of one rank's data alone; run it without mesh="
        )
    ranks = None if mesh is None else DataParallel(mesh)

    def gradient_of(params: Any, batch: Any, buffers: Any) -> tuple[Any, Info, Any]:
        """Gradient, report and next buffers of a batch, or of its parts one after the other."""
        assert loss is not None
        if by_datum:
            return *per_sample_gradients(options.without_buffers(loss, buffers), params, batch), buffers
        if microbatches == 1:
            return one_gradient(loss, params, batch, buffers)
        total = options.Mean()
        for part, weight in options.parts(batch, microbatches):
            grads, info, buffers = one_gradient(loss, params, part, buffers)
            total.add(grads, info.loss, info.aux, weight)
        return total.grads, Info(total.loss, _stacked(total.aux)), buffers

    def evaluate(params: Any, state: Any, batch: Any, buffers: Any) -> Evaluation:
        """Gradient, loss and further keywords at one point."""
        if loss is None:
            extra = {k: fn(params, batch) for k, fn in estimators.items()}
            return Evaluation(*_observed(params, extra["curvature"]), extra, buffers)
        grads, info, buffers = gradient_of(params, batch, buffers)
        if ranks is not None:
            grads, mean = ranks.gradient(grads, info.loss, batch)
            info = info._replace(loss=mean)
        extra = {k: fn(params, batch) for k, fn in estimators.items()}
        if by_datum:
            extra["per_sample_gradients"] = grads
            grads = optree.tree_map(lambda g: g.mean(0), grads)
        if "loss" in accepts:
            extra["loss"] = info.loss
        return Evaluation(grads, info, extra, buffers)

    def evaluate_particles(params: Any, state: Any, batch: Any, buffers: Any) -> Evaluation:
        """Gradients and losses of all particles, on axis 0."""
        grads, info, extra = torch.vmap(lambda p: tuple(evaluate(p, state, batch, buffers))[:3])(params)
        return Evaluation(grads, info, extra, buffers)

    def evaluate_draw(params: Any, state: Any, batch: Any, buffers: Any) -> Evaluation:
        """The same at every sample of the draw that a link asks for."""
        (i,) = draws
        with torch.no_grad():
            draw, points = drawing.drawn(tx, i, state, params)
        found: list[Evaluation] = []
        for point in points:
            found.append(evaluate(point, state, batch, buffers))
            buffers = found[-1].buffers
        with torch.no_grad():
            where, extra = state.layout.where[i], {"draw": draw}
            for k in found[0].extra:
                values = [each.extra[k] for each in found]
                extra[k] = _mean_precision(values) if k == "curvature" else drawing.gathered(values, where)
            mean = torch.stack([each.info.loss for each in found]).mean()
            aux = found[0].info.aux if len(found) == 1 else _stacked([each.info.aux for each in found])
            report = links[i].report(state[i], draw, mean, aux)
            grads = drawing.gathered([each.grads for each in found], where)
            return Evaluation(grads, Info(mean, aux) if report is None else report, extra, buffers)

    form = fused.recognise(tx) if inplace else None
    finite = FiniteCheck() if check_finite else None
    chosen = evaluate_draw if draws else evaluate_particles if stacked else evaluate
    return Step(chosen, tx, inplace, form, finite, buffers, monitor, ranks, loss)


def one_gradient(loss: Any, params: Any, batch: Any, buffers: Any) -> tuple[Any, Info, Any]:
    """Gradient, :class:`Info` and the buffers behind the batch, where there are any."""
    if buffers is None:
        return *gradient(loss, params, batch), None

    def with_buffers(params: Any, batch: Any) -> Any:
        out = loss(params, batch, buffers)
        new = out[1] if isinstance(out, tuple) and len(out) in (2, 3) else None
        if not isinstance(new, Mapping) or new.keys() != buffers.keys():
            raise ValueError(
                "loss: with buffers= it must return (scalar, buffers) or (scalar, buffers, aux), the buffers by the "
                f"names it was given, got {options.described(out)}; outputs, buffers = forward.with_buffers(params, "
                "batch, buffers) gives them"
            )
        return out[0], (dict(new), out[2] if len(out) == 3 else ())

    grads, info = gradient(with_buffers, params, batch)
    return grads, info._replace(aux=info.aux[1]), info.aux[0]


def _observed(params: Any, observation: Any) -> tuple[Any, Info]:
    """No gradient, and the mean negative log-likelihood of an observation that knows it."""
    if not hasattr(observation, "log_likelihood"):
        raise ValueError(
            f"make_step: without a loss, curvature must be of bc.ekf.observe, not {type(observation).__name__}: pass a loss"
        )
    mean = -observation.log_likelihood / observation.count
    return optree.tree_map(torch.zeros_like, params), Info(mean, ())


def _mean_precision(precisions: list) -> Any:
    """The mean of curvature at several draws; its datum count is one draw's."""
    total = precisions[0]
    for precision in precisions[1:]:
        total = total.add(precision)
    return total if len(precisions) == 1 else total.scale(1 / len(precisions))


def _stacked(trees: list) -> Any:
    """Trees with their tensors stacked on axis 0; what is no tensor is taken from the first."""
    return optree.tree_map(lambda *xs: torch.stack(xs) if torch.is_tensor(xs[0]) else xs[0], *trees)


def writable(grads: Any) -> Any:
    """The gradients, copied where overwriting one would change another."""
    leaves, spec = optree.tree_flatten(grads, none_is_leaf=True)
    mine = owned([shards.local(x) for x in leaves])
    return optree.tree_unflatten(spec, [shards.like(x, y) for x, y in zip(leaves, mine)])


def apply(params: Any, updates: Any, inplace: bool) -> Any:
    """``params + updates``; unlike ``torchopt.apply_updates`` it takes parameter trees with ``None``."""
    leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
    moves = optree.tree_leaves(updates, none_is_leaf=True)
    new = shards.add(leaves, moves, inplace)
    return params if inplace else optree.tree_unflatten(spec, new)


def gradient(loss: Loss, params: Any, batch: Any) -> tuple[Any, Info]:
    """Gradient tree of the loss, and :class:`Info`.

    Reverse mode through autograd; under a ``torch.func`` transformation (many chains by ``vmap``) through ``torch.func``.
    """
    leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
    checks.differentiable(leaves, params)
    here = [p for p in leaves if p is not None]
    if tracing.is_transformed():
        grads, info = _transformed_gradient(lambda x: value(loss, spec.unflatten(_among(leaves, x)), batch), here)
    else:
        points = [p.detach().requires_grad_() for p in here]
        was_enabled = torch.is_grad_enabled()
        _torch.set_grad_enabled(True)
        try:
            out, aux = value(loss, spec.unflatten(_among(leaves, points)), batch)
            found: Any = _torch.gradients(out, points) if out.requires_grad else ()
        finally:
            _torch.set_grad_enabled(was_enabled)
        missed = [p for p, g in zip(points, found) if g is None] if found else points
        if missed or not points:
            shards.require_reached(missed, [None] * len(missed))
            if len(missed) == len(points):
                raise ValueError(NO_GRADIENT)
            found = [torch.zeros_like(p) if g is None else g for p, g in zip(points, found)]
        grads, info = found, Info(shards.whole(out.detach()), detach(aux))
    grads = _among(leaves, grads)
    checks.dense(grads, params)
    return spec.unflatten(grads), info


def _among(leaves: Sequence[Any], given: Sequence[Tensor]) -> Sequence[Any]:
    """Tensors for the leaves that are there, in the places of these."""
    if len(given) == len(leaves):
        return given
    one_by_one = iter(given)
    return [None if p is None else next(one_by_one) for p in leaves]


def _transformed_gradient(at: Callable[[Any], tuple[Tensor, Any]], here: list[Tensor]) -> tuple[list[Tensor], Info]:
    """Gradients of a loss and its aux ``at`` the leaves that are there, through ``torch.func``."""
    kept: list[Any] = []  # what of aux is no tensor goes round it

    def checked(points: list[Tensor]) -> tuple[Tensor, Any]:
        out, aux = at(points)
        if not tracing.depends_on(out, points):
            raise ValueError(NO_GRADIENT)
        tensors, kept[:] = options.split(aux)
        return out, tensors

    grads, (out, tensors) = torch.func.grad_and_value(checked, has_aux=True)(here)
    return grads, Info(shards.whole(out.detach()), detach(options.joined(tensors, kept)))


def value(loss: Loss, params: Any, batch: Any) -> tuple[Tensor, Any]:
    """A loss, and what it returns besides (``()`` for nothing)."""
    with refusing_replicated(loss):
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


def per_sample_gradients(loss: Loss, params: Any, batch: Any) -> tuple[Any, Info]:
    """Gradient trees of each datum's loss, leaves ``[B, *leaf.shape]``, and :class:`Info` with the mean loss.

    Each tensor of the batch has one entry a datum on axis 0; the loss sees batches of one, and so does what it returns
    besides (tensors only), which comes with the data on axis 0.
    """

    leaves, spec = batches.flatten(batch)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if not tensors or any(x.ndim == 0 or x.shape[0] != tensors[0].shape[0] for x in tensors):
        raise ValueError("per-sample gradients: every tensor of the batch needs one entry a datum on axis 0")

    structures: list = []

    def flat(*datum: Tensor) -> tuple[list, Tensor, list]:
        given = iter(datum)
        one = spec.unflatten([next(given)[None] if isinstance(x, Tensor) else x for x in leaves])
        grads, info = gradient(loss, params, one)
        structures[:] = [optree.tree_structure(grads), optree.tree_structure(info.aux)]
        return optree.tree_leaves(grads), info.loss, optree.tree_leaves(info.aux)

    grads, losses, aux = torch.vmap(flat)(*tensors)
    return optree.tree_unflatten(structures[0], grads), Info(losses.mean(), optree.tree_unflatten(structures[1], aux))


def detach(tree: Any) -> Any:
    """The tree with its tensors detached."""
    if type(tree) is tuple and not tree:  # what most losses return besides
        return tree
    return optree.tree_map(lambda x: x.detach() if torch.is_tensor(x) else x, tree)  # pyright: ignore[reportArgumentType]
