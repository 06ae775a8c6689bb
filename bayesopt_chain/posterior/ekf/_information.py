r"""What a batch tells a filter: rows of information, whatever estimator they come from.

    information of the batch = sum_m r_m r_m^T,      force = the gradient of its log-likelihood at the mean

An :class:`Observation` of a Gaussian likelihood knows its innovations e too, each in units of its own noise, so that the
force is ``sum_m r_m e_m``: the filter then solves a least-squares problem instead of normal equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain._torch import gradients_of_columns
from bayesopt_chain.core.link import LinkContext
from bayesopt_chain.curvature._autodiff import vjp
from bayesopt_chain.likelihoods import Likelihood, gaussian
from bayesopt_chain.likelihoods._roots import Elementwise
from bayesopt_chain.posterior.gaussian import times
from bayesopt_chain.precision import Precision
from bayesopt_chain.tracing import is_transformed
from bayesopt_chain.trees import Tree, paths

SMALLEST = 1e-15  # a root of the output Hessian; below it the batch would say where to move and not how far


class Observation(NamedTuple):
    """A batch of M observations, linearised at the mean.

    Attributes:
        rows: leaves ``[M, *leaf.shape]``, for Gaussian noise the outputs' Jacobian over the noise's standard deviation.
        innovation: target minus output over the same standard deviation, ``[M]``; ``None`` where outputs are not independent,
            as those of classes.
        force: the gradient of the batch's log-likelihood, a tree like the parameters; ``None`` for Gaussian noise, whose
            innovations say it.
        seen: the number of data, 0-d.
        log_likelihood: of the batch at the mean, normalised, in nats, 0-d, float64.
    """

    rows: Tree
    innovation: Tensor | None
    force: Tree | None
    seen: Tensor
    log_likelihood: Tensor


LIKELIHOOD = kinds.Kind(
    lambda x: kinds.LIKELIHOOD.fits(x) or kinds.POSITIVES.fits(x),
    "one of bc.likelihoods, called, or a variance: a positive number, or a tensor of them",
    (int, float, Tensor),
)


class Information(NamedTuple):
    """What a filter conditions on.

    Attributes:
        rows: leaf by leaf ``[M, *leaf.shape]``.
        innovation: ``[M]``, or ``None``.
        force: like the leaves; ``None`` for Gaussian innovations.
        seen: the number of data, 0-d.
        log_likelihood: at the mean, in nats; ``None`` where it was not given.
    """

    rows: list[Tensor]
    innovation: Tensor | None
    force: list[Tensor] | None
    seen: Tensor
    log_likelihood: Tensor | None


@kinds.takes(likelihood=LIKELIHOOD, linearisation=kinds.one_of("tangent", "empirical"))
def observe(
    forward: Callable[[Tree, Any], Tensor],
    likelihood: Likelihood | float | Tensor = 1.0,
    *,
    linearisation: str = "tangent",
) -> Callable[[Tree, Any], Observation]:
    r"""Linearise a model for a filter: outputs, their Jacobian and the log-likelihood from one pass.

    ``"tangent"`` expands the log-likelihood at the filter's mean, with its expected (Fisher) Hessian: the extended Kalman
    filter. ``"empirical"`` takes the square of each datum's own gradient for that Hessian: one row a datum, for any likelihood,
    and noisier, as it depends on the target (Ollivier, 2018).

    Args:
        forward: ``forward(params, batch) -> outputs [B, *event]``; ``batch = (inputs, targets)``.
        likelihood: of :mod:`bayesopt_chain.likelihoods`, or the variance of Gaussian noise, in the targets' units squared: a
            number, or a tensor ``[*event]``. Default: variance 1.
        linearisation: "tangent" (default) or "empirical".

    Returns:
        ``estimate(params, batch)``, to be passed where a filter takes ``curvature``; ``make_step(None, tx, curvature=...)``
        asks for no loss beside it. Its cost is one backward pass over M outputs at once, M = B times the entries of an event
        ("empirical": B).

    Raises:
        ValueError: a variance that is not positive, a linearisation that does not exist; at the estimate, targets of
            a shape that the likelihood does not take.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> estimate = bc.ekf.observe(lambda params, batch: batch[0] @ params, 0.25)
        >>> observation = estimate(torch.zeros(2, 1), (torch.eye(2), torch.ones(2, 1)))
        >>> observation.innovation
        tensor([2., 2.])
    """
    chosen = likelihood if isinstance(likelihood, Likelihood) else gaussian(likelihood)

    def estimate(params: Tree, batch: Any) -> Observation:
        leaves, structure = optree.tree_flatten(params)
        f, pull = _evaluated(forward, leaves, structure, batch)

        def tree(values: list[Tensor]) -> Tree:
            return optree.tree_unflatten(structure, values)

        return _observation(f, batch[1], pull, tree, chosen, linearisation)

    return estimate


def _observation(
    f: Tensor,
    targets: Any,
    pull: Callable[[Tensor], list[Tensor]],
    tree: Callable[[list[Tensor]], Tree],
    chosen: Likelihood,
    linearisation: str,
) -> Observation:
    """What outputs ``f`` and their targets say.

    Args:
        f: ``[B, *event]``.
        targets: theirs.
        pull: cotangents ``[M, B, *event]`` to rows by leaf, ``[M, *leaf.shape]``.
        tree: rows, or tensors like the leaves, as a tree like the parameters.
        chosen, linearisation: as :func:`observe` has them.
    """
    is_gaussian = chosen.has_noise_scale
    nll = chosen.nll(f, targets).sum()
    known = torch.full((), float(f.shape[0]), dtype=torch.float64, device=f.device), -nll.to(torch.float64)
    if linearisation == "empirical":
        rows = pull(_separate(chosen.gradient(f, targets)[None]))
        return Observation(tree(rows), -f.new_ones(len(f)), tree([-row.sum(0) for row in rows]), *known)
    if is_gaussian:
        inverse_deviation = chosen.root(f, targets).diagonal().sqrt().reshape(-1)
        innovation = chosen.whitened(f, targets).reshape(-1)
        rows = pull(torch.diag(inverse_deviation).reshape(-1, *f.shape))
        return Observation(tree(rows), innovation, None, *known)
    slope, root = chosen.gradient(f, targets), chosen.root(f, targets)
    if isinstance(root, Elementwise):
        scale = root.scale.reshape(-1).clamp_min(SMALLEST)
        innovation = -slope.reshape(-1) / scale
        rows = pull(torch.diag(scale).reshape(-1, *f.shape))
        force = [weighted_sum(innovation, row) for row in rows]
    else:
        columns = torch.cat([_separate(root.part(0, root.columns)), -slope[None]])
        innovation, pulled = None, pull(columns)
        rows, force = [x[:-1] for x in pulled], [x[-1] for x in pulled]
    return Observation(tree(rows), innovation, tree(force), *known)


def _separate(factors: Tensor) -> Tensor:
    """Columns ``[K, B, *event]`` as cotangents of one datum each, ``[K B, B, *event]``."""
    k, b = factors.shape[:2]
    flat = torch.diag_embed(factors.reshape(k, b, -1).mT)  # [K, E, B, B]
    return flat.movedim(1, -1).reshape(k * b, *factors.shape[1:])


def _evaluated(
    forward: Callable[[Tree, Any], Tensor], leaves: list[Tensor], structure: Any, batch: Any
) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """Outputs, and the pullback of cotangents ``[M, *outputs.shape]`` to leaves ``[M, *leaf.shape]``. Through autograd; under
    a ``torch.func`` transformation (many filters by ``vmap``) through ``torch.func``."""

    def outputs(chosen: list[Tensor]) -> Tensor:
        return forward(optree.tree_unflatten(structure, chosen), batch)

    detached = [leaf.detach() for leaf in leaves]
    if is_transformed():
        f, back = vjp(outputs, detached)
        return f, lambda v: torch.vmap(lambda x: back(x)[0])(v)
    with torch.enable_grad():
        chosen = [leaf.requires_grad_() for leaf in detached]
        f = outputs(chosen)
        if not f.requires_grad:
            raise ValueError(
                "ekf.observe: forward does not depend on params: compute the outputs from what it is given"
            )

    def pull(v: Tensor) -> list[Tensor]:
        if v.shape[0] == 1:
            pulled = torch.autograd.grad(f, chosen, v[0], allow_unused=True)
            return [torch.zeros_like(leaf)[None] if x is None else x[None] for x, leaf in zip(pulled, chosen)]
        pulled = gradients_of_columns(f, chosen, v)
        return [leaf.new_zeros((v.shape[0], *leaf.shape)) if x is None else x for x, leaf in zip(pulled, chosen)]

    return f.detach(), pull


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """``sum_m weights_m rows_m`` of ``[M]`` and ``[M, *leaf.shape]``; ``torch.tensordot`` takes four times as long."""
    return (weights.to(rows.dtype) @ rows.reshape(rows.shape[0], rows.shape[1:].numel())).reshape(rows.shape[1:])


def information(context: LinkContext, who: str) -> Information:
    """Take the increment of an update, its keyword ``curvature``, apart.

    An increment is an :class:`Observation` or a precision that has rows. Beside a precision the keyword
    ``loss``, if there is one, is the mean negative log-likelihood of the batch.

    Args:
        context: of the filter in this update.
        who: the filter, for the errors.

    Raises:
        ValueError: no increment, one over other parameters, or an indefinite one.
        TypeError: a structure without rows.
    """
    increment, loss = context.extra.get("curvature"), context.extra.get("loss")
    innovation, force, log_likelihood = None, None, None
    if isinstance(increment, Observation):
        rows, innovation = _require_over(increment.rows, context, who), increment.innovation
        log_likelihood, seen = increment.log_likelihood, increment.seen
        force = None if increment.force is None else optree.tree_leaves(increment.force)
    elif isinstance(increment, Precision):
        rows, seen = _require_over(_rows(increment, who), context, who), increment.count
        log_likelihood = None if loss is None else -loss.to(torch.float64) * seen
    else:
        came = "no curvature" if increment is None else f"curvature of class {type(increment).__name__}"
        raise ValueError(
            f"{who}: update got {came}: pass curvature=estimate(params, batch) with an estimator of bc.curvature "
            "(structure='root'), or bc.ekf.observe (make_step does, given curvature=)"
        )
    return Information(rows, innovation, force, seen, log_likelihood)


def _require_over(rows: Tree, context: LinkContext, who: str) -> list[Tensor]:
    """The leaves of a tree of rows over the parameters."""
    mine, shapes = optree.tree_leaves(rows), [leaf.shape for leaf in context.params]
    if [row.shape[1:] for row in mine] != shapes:
        raise ValueError(
            f"{who}: the increment is over {dict(zip(paths(rows), [tuple(row.shape[1:]) for row in mine]))}, the parameters "
            f"have the shapes {[tuple(shape) for shape in shapes]}: estimate the curvature of these parameters"
        )
    return mine


def of_moving(known: Information, moves: list[bool]) -> Information:
    """What is known of the leaves that move, the others being fixed: the rows of a fixed leaf are zero."""
    force = known.force and [x if m else torch.zeros_like(x) for x, m in zip(known.force, moves)]
    rows = [row if m else torch.zeros_like(row) for row, m in zip(known.rows, moves)]
    return known._replace(rows=rows, force=force)


def weighed(known: Information, g: list, leaves: list[Tensor], lr: float | Tensor) -> Information:
    """The batch times lr: its rows and innovations times lr^1/2, its force ``-lr B g`` unless it brought one."""
    is_one = not isinstance(lr, Tensor) and lr == 1
    force = known.force
    if known.innovation is None and force is None:
        force = [torch.zeros_like(p) if x is None else -times(x, known.seen) for x, p in zip(g, leaves)]
    if is_one:
        return known._replace(force=force)
    root = lr.sqrt() if isinstance(lr, Tensor) else math.sqrt(lr)
    return known._replace(
        rows=[times(row, root) for row in known.rows],
        innovation=None if known.innovation is None else times(known.innovation, root),
        force=None if force is None else [times(x, lr) for x in force],
        log_likelihood=None if known.log_likelihood is None else known.log_likelihood * lr,
    )


def _rows(increment: Precision, who: str) -> Tree:
    try:
        return increment.as_rows()
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{who}: {error}. A filter needs all rows of the batch: curvature of structure='root' (or 'dense'), or "
            "bc.ekf.observe. With a diagonal in their place the mean diverges where features are correlated. Where the rows do "
            "not fit, take smaller batches, or bc.vi.von, whose lr bounds the step"
        ) from None
