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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import checks, tracing
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import ANY
from bayesopt_chain.core.op import owned
from bayesopt_chain.distributed.ranks import DataParallel
from bayesopt_chain.distributed.replicated import refusing_replicated
from bayesopt_chain.fused import sgd as fused
from bayesopt_chain.links.foreign import keywords_of
from bayesopt_chain.links.skip_nonfinite import SkipNonfinite
from bayesopt_chain.loop.finite import FiniteCheck
from bayesopt_chain.loop.interrupts import uninterrupted
from bayesopt_chain.posterior import draw as drawing

Loss = Callable[[Any, Any], Any]


NO_GRADIENT = (
    "loss: does not depend on params, so that no gradient would hold the chain: compute it from the params it is given "
    "(a module by torch.func.functional_call(module, params, ...))"
)


class Info(NamedTuple):
    """What a step reports: the detached loss at the parameters it started from, and the loss's auxiliary output.

    ``finite``: whether loss and gradient are finite, 0-d, from ``make_step(..., check_finite=True)``; else ``()``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> step = bc.make_step(lambda p, batch: ((p - batch) ** 2).sum(), bc.sgd(0.1))
        >>> step(torch.zeros(1), bc.sgd(0.1).init(torch.zeros(1)), torch.ones(1))[2].loss
        tensor(1.)
    """

    loss: Tensor
    aux: Any
    finite: Any = ()


@dataclass(frozen=True)
class Step:
    """What :func:`make_step` returns: a callable that other loops (``capture``, ``parallel``) can look into.

    ``evaluate(params, state, batch)`` gives the gradient, :class:`Info` and the further keywords of ``tx.update``.
    """

    evaluate: Callable[[Any, Any, Any], tuple[Any, Info, dict[str, Any]]]
    tx: GradientTransformation
    inplace: bool = False
    fused: fused.FusedSGD | None = None
    finite: FiniteCheck | None = None
    ranks: DataParallel | None = None

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Info]:
        if self.ranks is not None:
            self.ranks.compare_once(params, state)
        grads, info, extra = self.evaluate(params, state, batch)
        if self.finite is not None:
            info = info._replace(finite=self.finite(params, state, batch, grads, info.loss))
        if not self.inplace:
            return self._move(params, state, grads, info, extra)
        with uninterrupted():  # nothing is left half written
            return self._move(params, state, grads, info, extra)

    def _move(self, params: Any, state: Any, grads: Any, info: Info, extra: dict[str, Any]) -> tuple[Any, Any, Info]:
        with torch.no_grad():
            if self.fused is not None:
                p, g = (optree.tree_leaves(tree, none_is_leaf=True) for tree in (params, grads))
                if self.fused.fits(p, g, state):
                    g = g if self.fused.leaves_gradients(p, g, state) else owned(g)
                    return params, self.fused.advance(p, g, state), info
            if self.inplace:
                grads = writable(grads)
            updates, state = self.tx.update(grads, state, params=params, inplace=self.inplace, **extra)
            params = apply(params, updates, self.inplace)
        return params, state, info


def make_step(
    loss: Loss | None,
    tx: GradientTransformation,
    *,
    curvature: Callable[[Any, Any], Any] | None = None,
    gradient_variance: Callable[[Any, Any], Any] | None = None,
    hessian_diagonal: Callable[[Any, Any], Any] | None = None,
    keywords: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    inplace: bool = False,
    check_finite: bool = False,
    mesh: Any = None,
) -> Step:
    """One training or sampling step.

    Args:
        loss: ``loss(params, batch)`` returns a scalar, the mean negative log posterior per datum, or ``(scalar, aux)``.
            ``None`` for a filter with ``curvature=bc.ekf.observe(...)``, which knows its likelihood and reads no gradient.
        tx: any gradient transformation of this library or of TorchOpt.
        curvature: ``curvature(params, batch)`` whose result ``tx.update`` receives as ``curvature=``, such as an estimator
            of :mod:`bayesopt_chain.curvature`. It is not called for a ``tx`` that takes no curvature.
        gradient_variance: ``gradient_variance(params, batch)``, the variance of single-datum gradients as a tree like the
            parameters (a matrix for ``sgfs(dense=True)``), for a ``tx`` that takes it.
        hessian_diagonal: ``hessian_diagonal(params, batch)``, the diagonal of the mean loss's Hessian as a tree like the
            parameters, for a ``tx`` that takes it.
        keywords: further keywords of ``tx.update``, each a function of ``(params, batch)``:
            ``{"transition_noise": lambda params, batch: 0.01 * batch["days"]}``.
        inplace: overwrite ``params`` and ``state`` instead of returning new ones. The tensors stay the same objects, except
            in states where a posterior accumulates (Laplace, SWAG, the filters), which are new ones at every step. The
            common chains (SGD, momentum, Nesterov, weight decay, matched noise, all of constant lr and temperature) then
            run fused; their values agree with ``update`` to one unit in the last place for each operation. Ctrl-C waits
            for the writes (not for the gradient), so that no step is left half made.
        check_finite: refuse a step whose loss or gradient is not finite, before anything is written. Where values cannot be
            looked at (captured, under :func:`parallel`) nothing is raised: ``info.finite`` says it. On a device it waits for
            the result. To leave such steps out instead, wrap the transformation: :func:`skip_nonfinite`.
        mesh: a DeviceMesh of one axis whose ranks share this chain and call the step with different data: the gradient and the
            loss are those of all of it, for one message a step. Every tensor of the batch has one entry a datum on axis 0.
            All ranks start from the same parameters and state (:func:`bayesopt_chain.distributed.broadcast`), which the
            first step compares; ``aux`` stays each rank's own.

    Returns:
        ``step(params, state, batch) -> (params, state, Info(loss, aux))``, detached. Parameters that the loss does not
        use have gradient zero. The state alone determines the noise, so that the same arguments give the same result.
        Where ``tx`` draws (variational inference), ``loss`` is the mean over its draws, tensors of ``aux`` have the draws
        on axis 0 if there are several, and the families of :mod:`bayesopt_chain.posterior.vi` report ``negative_elbo`` besides.

    Raises:
        ValueError: a ``tx`` that cannot do without curvature, and none is given; two links that draw; a ``tx`` that asks
            for more than gradient and loss, or a mesh of several axes, with ``mesh``; at the first step, ranks that are no
            replicas, a loss that is not a scalar or depends on none of ``params``, or a sparse gradient.
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
            inplace=inplace,
            check_finite=check_finite,
            mesh=mesh,
        )
        return replace(inner, evaluate=lambda p, s, batch: inner.evaluate(p, s.inner, batch), tx=tx, fused=None)
    accepts = keywords_of(tx)
    if curvature is None and "curvature" in getattr(tx, "needs", ()):
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
    by_datum = "per_sample_gradients" in accepts
    links = tx.links if isinstance(tx, Chain) else ()
    draws = [i for i, link in enumerate(links) if link.samples]
    stacked = any(link.stacked for link in links)
    if len(draws) > 1:
        raise ValueError(f"make_step: {len(draws)} links of this chain draw; one step takes gradients at one draw")
    if stacked and (draws or by_datum or estimators):
        raise ValueError(
            "make_step: a chain over particles takes their gradients and losses, and can ask for nothing else"
        )

    if mesh is not None and (by_datum or stacked or estimators):
        asked = "per_sample_gradients" if by_datum else "particles" if stacked else next(iter(estimators))
        raise ValueError(
            f"make_step: with mesh= the ranks exchange gradients and losses, and {tx!r} asks for {asked}, which would be "
            "of one rank's data alone; run it without mesh="
        )
    ranks = None if mesh is None else DataParallel(mesh)

    def evaluate(params: Any, batch: Any) -> tuple[Any, Info, dict[str, Any]]:
        """Gradient, loss and further keywords at one point."""
        if loss is None:
            extra = {k: fn(params, batch) for k, fn in estimators.items()}
            return *_observed(params, extra["curvature"]), extra
        grads, info = (per_sample_gradients if by_datum else gradient)(loss, params, batch)
        if ranks is not None:
            grads, mean = ranks.gradient(grads, info.loss, batch)
            info = info._replace(loss=mean)
        extra = {k: fn(params, batch) for k, fn in estimators.items()}
        if by_datum:
            extra["per_sample_gradients"] = grads
            grads = optree.tree_map(lambda g: g.mean(0), grads)
        if "loss" in accepts:
            extra["loss"] = info.loss
        return grads, info, extra

    def evaluate_particles(params: Any, state: Any, batch: Any) -> tuple[Any, Info, dict[str, Any]]:
        """Gradients and losses of all particles, on axis 0."""
        return torch.vmap(lambda p: evaluate(p, batch))(params)

    def evaluate_draw(params: Any, state: Any, batch: Any) -> tuple[Any, Info, dict[str, Any]]:
        """The same at every sample of the draw that a link asks for."""
        (i,) = draws
        with torch.no_grad():
            draw, points = drawing.drawn(tx, i, state, params)
        grads, infos, extras = zip(*(evaluate(point, batch) for point in points))
        with torch.no_grad():
            where, extra = state.layout.where[i], {"draw": draw}
            for k in extras[0]:
                values = [each[k] for each in extras]
                extra[k] = _mean_precision(values) if k == "curvature" else drawing.gathered(values, where)
            mean = torch.stack([info.loss for info in infos]).mean()
            aux = infos[0].aux if len(infos) == 1 else _stacked([info.aux for info in infos])
            report = links[i].report(state[i], draw, mean, aux)
            return drawing.gathered(list(grads), where), Info(mean, aux) if report is None else report, extra

    def evaluate_here(params: Any, state: Any, batch: Any) -> tuple[Any, Info, dict[str, Any]]:
        return evaluate(params, batch)

    form = fused.recognise(tx) if inplace else None
    finite = FiniteCheck() if check_finite else None
    chosen = evaluate_draw if draws else evaluate_particles if stacked else evaluate_here
    return Step(chosen, tx, inplace, form, finite, ranks)


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
    return optree.tree_unflatten(spec, owned(leaves))


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
    checks.differentiable(leaves, params)
    wanted = [i for i, p in enumerate(leaves) if p is not None]

    def value(chosen: list[Tensor]) -> tuple[Tensor, Any]:
        full = list(leaves)
        for i, p in zip(wanted, chosen):
            full[i] = p
        with refusing_replicated(loss):
            out = loss(optree.tree_unflatten(spec, full), batch)
        if isinstance(out, tuple) and len(out) != 2:
            raise ValueError(f"loss: must return a scalar or (scalar, aux), got a tuple of {len(out)}")
        out, aux = out if isinstance(out, tuple) else (out, ())
        if not torch.is_tensor(out) or out.ndim != 0:
            came = f"shape {tuple(out.shape)}" if torch.is_tensor(out) else repr(type(out).__name__)
            raise ValueError(
                f"loss: must return a scalar tensor (or (scalar, aux)), got {came}; take the mean over the batch"
            )
        return out, aux

    if tracing.is_transformed():

        def checked(chosen: list[Tensor]) -> tuple[Tensor, Any]:
            out, aux = value(chosen)
            if not tracing.depends_on(out, chosen):
                raise ValueError(NO_GRADIENT)
            return out, aux

        grads, (out, aux) = torch.func.grad_and_value(checked, has_aux=True)([leaves[i] for i in wanted])
    else:
        with torch.enable_grad():
            chosen = [leaves[i].detach().requires_grad_() for i in wanted]
            out, aux = value(chosen)
            grads = torch.autograd.grad(out, chosen, allow_unused=True) if out.requires_grad else ()
            if all(g is None for g in grads):
                raise ValueError(NO_GRADIENT)
            grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, chosen)]
    checks.dense(grads, wanted, params)
    full: list = [None] * len(leaves)
    for i, g in zip(wanted, grads):
        full[i] = g
    return optree.tree_unflatten(spec, full), Info(out.detach(), detach(aux))


def per_sample_gradients(loss: Loss, params: Any, batch: Any) -> tuple[Any, Info]:
    """Gradient trees of each datum's loss, leaves ``[B, *leaf.shape]``, and :class:`Info` with the mean loss.

    Each tensor of the batch has one entry a datum on axis 0; the loss sees batches of one, and so does what it returns
    besides (tensors only), which comes with the data on axis 0.
    """

    def one(datum: Any) -> tuple[Any, Info]:
        return gradient(loss, params, optree.tree_map(lambda x: x[None], datum))

    tensors, spec = optree.tree_flatten(batch)
    if not tensors or any(x.ndim == 0 or x.shape[0] != tensors[0].shape[0] for x in tensors):
        raise ValueError("per-sample gradients: every tensor of the batch needs one entry a datum on axis 0")

    structures: list = []

    def flat(*datum: Any) -> tuple[list, Tensor, list]:
        grads, info = one(optree.tree_unflatten(spec, list(datum)))
        structures[:] = [optree.tree_structure(grads), optree.tree_structure(info.aux)]
        return optree.tree_leaves(grads), info.loss, optree.tree_leaves(info.aux)

    grads, losses, aux = torch.vmap(flat)(*tensors)
    return optree.tree_unflatten(structures[0], grads), Info(losses.mean(), optree.tree_unflatten(structures[1], aux))


def detach(tree: Any) -> Any:
    """The tree with its tensors detached."""
    return optree.tree_map(lambda x: x.detach() if torch.is_tensor(x) else x, tree)
