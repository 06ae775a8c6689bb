r"""What a batch tells a filter: rows of information, whatever estimator they come from.

    information of the batch = sum_m r_m r_m^T,      force = the gradient of its log-likelihood at the mean

An :class:`Observation` of a Gaussian likelihood knows its innovations e too, each in units of its own noise, so that the
force is ``sum_m r_m e_m``: the filter then solves a least-squares problem instead of normal equations. One that is to be
linearised over the whole Gaussian, and not at its mean, comes :class:`Unlinearised`
(see :meth:`bayesopt_chain.likelihoods.Likelihood.straight_line`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain._torch import gradients_of_columns
from bayesopt_chain.curvature._autodiff import vjp
from bayesopt_chain.likelihoods import Likelihood, gaussian
from bayesopt_chain.likelihoods._roots import Elementwise
from bayesopt_chain.posterior.state import times
from bayesopt_chain.precision import Precision
from bayesopt_chain.tracing import is_transformed
from bayesopt_chain.trees import Tree, paths

LINEARISATIONS = ("tangent", "empirical", "statistical")
SMALLEST = 1e-15  # a root of the output Hessian; below it the batch would say where to move and not how far


class Observation(NamedTuple):
    """A batch of M observations, linearised at the mean.

    Attributes:
        rows: leaves ``[M, *leaf.shape]``, for Gaussian noise the outputs' Jacobian over the noise's standard deviation.
        innovation: target minus output over the same standard deviation, ``[M]``; ``None`` where outputs are not independent,
            as those of classes.
        force: the gradient of the batch's log-likelihood, a tree like the parameters; ``None`` for Gaussian noise, whose
            innovations say it.
        count: the number of data, 0-d.
        log_likelihood: of the batch at the mean, normalised, in nats, 0-d, float64.
    """

    rows: Tree
    innovation: Tensor | None
    force: Tree | None
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    log_likelihood: Tensor


class Unlinearised(NamedTuple):
    """A batch whose linearisation waits for the filter's covariance.

    ``jacobian``: of the outputs, leaves ``[G C, *leaf.shape]`` for G groups of C outputs that are observed together;
    ``outputs``: ``[G, C]``; ``targets``: ``[G]``; ``weights``: of them, ``[G]``, or ``None``; ``likelihood``: what finds the
    line; ``count``, ``log_likelihood``: as in :class:`Observation`.
    """

    jacobian: Tree
    outputs: Tensor
    targets: Tensor
    weights: Tensor | None
    likelihood: Likelihood
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    log_likelihood: Tensor


class Information(NamedTuple):
    """What a filter conditions on.

    Attributes:
        rows: leaf by leaf ``[M, *leaf.shape]``.
        innovation: ``[M]``, or ``None``.
        force: like the leaves; ``None`` for Gaussian innovations.
        count: the number of data, 0-d.
        log_likelihood: at the mean, in nats; ``None`` where it was not given.
        log_predictive: the log probability of the targets under the filter's prediction, where it is known directly.
    """

    rows: list[Tensor]
    innovation: Tensor | None
    force: list[Tensor] | None
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    log_likelihood: Tensor | None
    log_predictive: Tensor | None = None


def observe(
    forward: Callable[[Tree, Any], Tensor],
    likelihood: Likelihood | float | Tensor = 1.0,
    *,
    linearisation: str = "tangent",
) -> Callable[[Tree, Any], Observation | Unlinearised]:
    r"""Linearise a model for a filter: outputs, their Jacobian and the log-likelihood from one pass.

    ``"tangent"`` expands the log-likelihood at the filter's mean, with its expected (Fisher) Hessian: the extended Kalman
    filter. ``"empirical"`` takes the square of each datum's own gradient for that Hessian: one row a datum, for any likelihood,
    and noisier, as it depends on the target. ``"statistical"`` fits the line to the targets' mean ``E[y | theta]`` by least
    squares over the filter's Gaussian,

        A = Cov[y, f] Cov[f]^-1,    R = Cov[y] - A Cov[f] A^T,    y = E[y] + A (f - E[f]) + N(0, R),

    and so knows how wide the Gaussian is: a filter that is unsure takes smaller steps and claims less (statistical linear
    regression: Garcia-Fernandez, Tronarp and Särkkä, 2019). The outputs f are linear in the parameters in both; moments over
    them are by quadrature (Bernoulli, up to six classes), spherical cubature (more classes) or exact (Poisson, Gaussian).

    Args:
        forward: ``forward(params, batch) -> outputs [B, *event]``; ``batch = (inputs, targets)``.
        likelihood: of :mod:`bayesopt_chain.likelihoods`, or the variance of Gaussian noise, in the targets' units squared: a
            number, or a tensor ``[*event]``. Default: variance 1.
        linearisation: "tangent" (default), "empirical", or "statistical": the last for ``gaussian`` (where it is the
            tangent), ``bernoulli``, ``poisson`` and ``categorical``.

    Returns:
        ``estimate(params, batch)``, to be passed where a filter takes ``curvature``; ``make_step(None, tx, curvature=...)``
        asks for no loss beside it. Its cost is one backward pass over M outputs at once, M = B times the entries of an event
        ("empirical": B).

    Raises:
        ValueError: a variance that is not positive, a linearisation that does not exist or that the likelihood has none of; at
            the estimate, targets of a shape that the likelihood does not take.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> estimate = bc.ekf.observe(lambda params, batch: batch[0] @ params, 0.25)
        >>> observation = estimate(torch.zeros(2, 1), (torch.eye(2), torch.ones(2, 1)))
        >>> observation.innovation
        tensor([2., 2.])
    """
    chosen = likelihood if isinstance(likelihood, Likelihood) else gaussian(_variance(likelihood))
    if linearisation not in LINEARISATIONS:
        raise ValueError(f"ekf.observe: linearisation must be one of {LINEARISATIONS}, got {linearisation!r}")
    is_gaussian = chosen.has_noise_scale
    if linearisation == "statistical" and not is_gaussian and not chosen.has_straight_line:
        raise ValueError(
            f"ekf.observe: the {chosen.name} likelihood has no moments to linearise by, only those have whose targets have one "
            "output with a known mean and variance (gaussian, bernoulli, poisson and the like) and categorical: use "
            "linearisation='tangent'"
        )

    def estimate(params: Tree, batch: Any) -> Observation | Unlinearised:
        leaves, structure = optree.tree_flatten(params)
        f, pull = _evaluated(forward, leaves, structure, batch)
        if is_gaussian or linearisation == "statistical":
            nll, slope = chosen.nll(f, batch[1]).sum(), f
        else:
            nll, slope = chosen.nll(f, batch[1]).sum(), chosen.gradient(f, batch[1])
        known = torch.full((), float(f.shape[0]), dtype=torch.float64, device=f.device), -nll.to(torch.float64)
        if linearisation == "empirical":
            rows = pull(_separate(slope[None]))
            force = [-row.sum(0) for row in rows]
            tree, forces = (optree.tree_unflatten(structure, x) for x in (rows, force))
            return Observation(tree, -torch.ones_like(rows[0].reshape(len(f), -1)[:, 0]), forces, *known)
        if is_gaussian:
            inverse_deviation = chosen.root(f, batch[1]).diagonal().sqrt().reshape(-1)
            innovation = chosen.whitened(f, batch[1]).reshape(-1)
            rows = pull(torch.diag(inverse_deviation).reshape(-1, *f.shape))
            return Observation(optree.tree_unflatten(structure, rows), innovation, None, *known)
        if linearisation == "statistical":
            jacobian = pull(torch.eye(f.numel(), dtype=f.dtype, device=f.device).reshape(-1, *f.shape))
            groups = f.reshape(-1, chosen.grouping(f.shape[1:]).width)
            labels, weights = chosen.labels(batch[1]).reshape(-1), chosen.weights(batch[1])
            weights = None if weights is None else weights.reshape(-1).to(f.dtype)
            tree = optree.tree_unflatten(structure, jacobian)
            return Unlinearised(tree, groups, labels, weights, chosen, *known)
        root = chosen.root(f, batch[1])
        if isinstance(root, Elementwise):
            scale = root.scale.reshape(-1).clamp_min(SMALLEST)
            innovation = -slope.reshape(-1) / scale
            rows = pull(torch.diag(scale).reshape(-1, *f.shape))
            force = [weighted_sum(innovation, row) for row in rows]
        else:
            columns = torch.cat([_separate(root.part(0, root.columns)), -slope[None]])
            innovation, pulled = None, pull(columns)
            rows, force = [x[:-1] for x in pulled], [x[-1] for x in pulled]
        tree, forces = (optree.tree_unflatten(structure, x) for x in (rows, force))
        return Observation(tree, innovation, forces, *known)

    return estimate


def _variance(value: Any) -> Any:
    if not isinstance(value, (int, float, Tensor)) or isinstance(value, bool):
        raise TypeError(
            f"ekf.observe: likelihood must be one of bc.likelihoods or a variance, got {type(value).__name__}"
        )
    if not bool(torch.as_tensor(value > 0).all()):
        raise ValueError(f"ekf.observe: variance must be positive, got {value}")
    return value


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
    return (weights.to(rows.dtype) @ rows.reshape(rows.shape[0], -1)).reshape(rows.shape[1:])


def information(
    increment: Any, leaves: list[Tensor], who: str, loss: Tensor | None, solve: Callable[[Tree], Tree]
) -> Information:
    """Take an increment apart.

    Args:
        increment: a precision that has rows, an :class:`Observation` or an :class:`Unlinearised` one.
        leaves: the parameters'.
        who: the filter, for the errors.
        loss: the mean negative log-likelihood of the batch, if it is known.
        solve: the filter's covariance times rows, a tree like the increment's.

    Raises:
        ValueError: none given, one over other parameters, or an indefinite one.
        TypeError: a structure without rows.
    """
    innovation, force, log_predictive, log_likelihood = None, None, None, None
    if isinstance(increment, Unlinearised):
        rows, innovation, log_predictive = _linearised(increment, leaves, who, solve)
    elif isinstance(increment, Observation):
        rows, innovation, log_likelihood = increment.rows, increment.innovation, increment.log_likelihood
        force = None if increment.force is None else optree.tree_leaves(increment.force)
    elif isinstance(increment, Precision):
        rows = _rows(increment, who)
        log_likelihood = None if loss is None else -loss.to(torch.float64) * increment.count
    else:
        came = "no curvature" if increment is None else f"curvature of class {type(increment).__name__}"
        raise ValueError(
            f"{who}: update got {came}: pass curvature=estimate(params, batch) with an estimator of bc.curvature "
            "(structure='root'), or bc.ekf.observe (make_step does, given curvature=)"
        )
    flat = _require_over(rows, leaves, who)
    return Information(flat, innovation, force, increment.count, log_likelihood, log_predictive)


def _linearised(
    increment: Unlinearised, leaves: list[Tensor], who: str, solve: Callable[[Tree], Tree]
) -> tuple[Tree, Tensor, Tensor]:
    """Rows and innovations of the line through the moments, and the targets' log probability under them."""
    jacobian = _require_over(increment.jacobian, leaves, who)
    groups, size = increment.outputs.shape
    spread: Any = 0
    for j, moved in zip(jacobian, optree.tree_leaves(solve(increment.jacobian))):
        a, b = (x.reshape(groups, size, -1).to(torch.float64) for x in (j, moved))
        spread = spread + a @ b.mT
    line = increment.likelihood.straight_line
    slope, innovation, log_predictive = line(increment.outputs.to(torch.float64), increment.targets, spread)
    if increment.weights is not None:
        weights = increment.weights.to(torch.float64)
        root = weights.sqrt()
        slope, innovation, log_predictive = (
            slope * root[:, None, None],
            innovation * root[:, None],
            log_predictive * weights,
        )
    kept = slope.shape[1]
    rows = [(slope.to(j.dtype) @ j.reshape(groups, size, -1)).reshape(groups * kept, *j.shape[1:]) for j in jacobian]
    tree = optree.tree_unflatten(optree.tree_structure(increment.jacobian), rows)
    return tree, innovation.reshape(-1).to(increment.outputs.dtype), log_predictive.sum()


def _require_over(rows: Tree, leaves: list[Tensor], who: str) -> list[Tensor]:
    flat = optree.tree_leaves(rows)
    if [row.shape[1:] for row in flat] != [leaf.shape for leaf in leaves]:
        raise ValueError(
            f"{who}: the increment is over {dict(zip(paths(rows), [tuple(r.shape[1:]) for r in flat]))}, the parameters have "
            f"the shapes {[tuple(leaf.shape) for leaf in leaves]}: estimate the curvature of these parameters"
        )
    return flat


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
        force = [torch.zeros_like(p) if x is None else -times(x, known.count) for x, p in zip(g, leaves)]
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
