r"""Predicts with the model linearised at the posterior's mean, which is where a Gauss-Newton posterior belongs.

    f(theta) ~ f(mean) + J (theta - mean)   =>   f ~ N(f(mean), J Lambda^-1 J^T),   J [E, P] of one datum's E outputs

The rows of J come a chunk of data at a time. Where the precision is diagonal in a basis u_i (x) v_j of every layer
(diagonal and Kronecker precisions), a layer's rows g x^T are not formed: in that basis the covariance is
``sum_oi g_ko g_lo x_i^2 / lambda_oi``. A dense precision has its factor L: the covariance is ``V^T V`` with ``L V = J^T``.
The linearised model is that of Immer et al. 2021.

With its graph: outputs that can be differentiated, their covariance across inputs, and its draws.

    f(x) ~ N( f(mean, x),  J(x) Lambda^-1 J(x')^T ),      J(x) = d f(theta, x) / d theta at the mean
    f_s(x) = f(mean, x) + J(x) (theta_s - mean),          theta_s ~ N(mean, Lambda^-1)

The rows of J are held, for all data at once where the covariance is joint,
so that autograd can go back through them to the inputs and to whatever the precision depends on. Draws are directional
derivatives and hold no J; the same draws of the parameters are the same functions at other inputs.

Many targets a datum, such as the pixels of an image. A datum of T targets with C outputs each has a covariance of ``(T C)^2``
numbers, of an image of 256 x 256 pixels and three classes 4e10. What a target's own distribution needs is ``C x C``, and the
Jacobian of a few targets at a time:

    f_t ~ N(f_t(mean), J_t Lambda^-1 J_t^T),        J_t [C, P],  for a block of targets t after another

Where the kept parameters are one linear layer or convolution whose output is the model's, J_t is the patch x_t that the layer
sees there: ``f_t = W x_t + b`` needs no backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches, checks
from bayesopt_chain.curvature import jvp
from bayesopt_chain.curvature._autodiff import UNSUPPORTED, double_backward
from bayesopt_chain.curvature._chunks import BatchPullback, Demand, Gradient
from bayesopt_chain.curvature._kinds import Kind, Matrix, Vector, turned
from bayesopt_chain.curvature._plan import Affine, TapPlan, batch_size, fresh_leaves, make_plan, over_data, parts
from bayesopt_chain.curvature._taps import Check, Checks, Taps
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.likelihoods._likelihood import Elementwise
from bayesopt_chain.posterior.gaussian import Gaussian, white
from bayesopt_chain.posterior.last_layer import with_gradients
from bayesopt_chain.precision import LayerBases, Precision
from bayesopt_chain.tracing import is_transformed
from bayesopt_chain.trees import Tree, common_dtype, flatten, size, unflatten, wide

ROW_BYTES = 2**28  # of Jacobians held at once where the covariance is not joint


def needs_graph(*trees: Any) -> bool:
    """Whether somebody may differentiate what is computed from these: a transformation runs, or a tensor asks for gradients."""
    if is_transformed():
        return True
    leaves = [leaf for tree in trees for leaf in batches.flatten(tree)[0]]
    return torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def with_graph(
    forward: Callable[[Tree, Any], Tensor], posterior: Gaussian, batch: Any, joint: bool
) -> tuple[Tensor, Tensor]:
    """Mean ``[B, *event]`` and covariance ``[B, E, E]``, or ``[B E, B E]`` where it is joint, both with their graphs."""
    precision, count = posterior.precision.factorised(), batch_size(batch)
    try:
        mean = forward(posterior.mean, batch)
    except RuntimeError:  # a forward function that takes derivatives itself needs gradients on
        mean = with_gradients(forward)(posterior.mean, batch)
    entries, parameters = mean.shape[1:].numel(), size(posterior.mean)
    row = 3 * parameters * entries * common_dtype(posterior.mean).itemsize
    at_once = count if joint else max(1, ROW_BYTES // row)
    covariances = []
    for some in parts(batch, at_once) if at_once < count else [batch]:
        rows = flatten(jacobian(forward, posterior.mean, some), posterior.mean)
        rows = rows.reshape(1 if joint else -1, len(rows) if joint else entries, parameters)
        covariances.append(_between(rows, posterior.mean, precision))
    return mean, covariances[0][0] if joint else torch.cat(covariances)


def jacobian(forward: Callable[[Tree, Any], Tensor], params: Tree, batch: Any) -> Tree:
    """Rows ``[B E, *leaf.shape]`` of the outputs' Jacobian, which autograd can go through."""
    with double_backward():  # autograd goes through these rows once more
        try:
            rows = over_data(lambda datum: torch.func.jacrev(lambda p: forward(p, datum)[0])(params), batch)
        except UNSUPPORTED:  # without a batching rule, one that looks at numbers or differentiates
            each = [plain_rows(forward, params, datum) for datum in parts(batch, 1)]
            rows = optree.tree_map(lambda *xs: torch.stack(xs), *each)
    return optree.tree_map(lambda x, p: x.reshape(x.shape[: x.ndim - p.ndim].numel(), *p.shape), rows, params)


def plain_rows(forward: Callable[[Tree, Any], Tensor], params: Tree, datum: Any) -> Tree:
    """Rows ``[E, *leaf.shape]`` of one datum by backward passes alone, with their graph where somebody needs it."""
    leaves, structure = optree.tree_flatten(params)
    graph = needs_graph(datum, params)
    with torch.enable_grad():
        chosen = [leaf if leaf.requires_grad else leaf.detach().requires_grad_() for leaf in leaves]
        outputs = forward(structure.unflatten(chosen), datum)[0].flatten()
        grad = partial(torch.autograd.grad, retain_graph=True, create_graph=graph, materialize_grads=True)
        each = [grad(f, chosen) for f in outputs]
    return structure.unflatten([torch.stack(rows) for rows in zip(*each)])


@checks.takes(forward=checks.FUNCTION, batch=checks.BATCH)
def functional_samples(
    forward: Callable[[Tree, Any], Tensor],
    posterior: Gaussian,
    batch: Any,
    *,
    samples: int = 100,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw functions of the linearised model and evaluate them at a batch.

    Args:
        forward: ``forward(params, batch) -> outputs [B, *event]``.
        posterior: over its parameters.
        batch: as ``forward`` takes it.
        samples: how many functions. Default 100.
        generator: source of randomness. A generator of the same seed gives the same functions, at any inputs. Default:
            torch's global generator.

    Returns:
        ``[samples, B, *event]``: values of one function belong together across data. They have gradients in the batch.

    Raises:
        ValueError: fewer than one sample; a precision that is not positive definite.

    Example:
        >>> import torch
        >>> import bayesopt_chain as bc
        >>> from bayesopt_chain.posterior.gaussian import Gaussian
        >>> from bayesopt_chain.precision import Diagonal
        >>> posterior = Gaussian(torch.ones(1), Diagonal(torch.ones(1), torch.tensor(1.0)))
        >>> batch = torch.tensor([1.0, 2.0]), None
        >>> lines = bc.posterior.functional_samples(lambda w, batch: batch[0] * w, posterior, batch, samples=3)
        >>> torch.equal(2 * lines[:, 0], lines[:, 1])
        True
    """
    precision = posterior.precision.factorised()
    moves = precision.sqrt_solve(white(posterior.mean, (samples,), generator))

    def along(move: Tree) -> Tensor:
        value, change = jvp(lambda p: forward(p, batch), (posterior.mean,), (move,))
        return value + change

    wanted = needs_graph(batch, posterior.precision)
    with torch.set_grad_enabled(wanted), checks.blaming("functional_samples", "forward or batch"):
        try:
            return torch.vmap(along)(moves)
        except UNSUPPORTED:
            pass  # what vmap refuses goes one function at a time
        try:
            return torch.stack([along(optree.tree_map(lambda x, s=s: x[s], moves)) for s in range(samples)])
        except RuntimeError:  # as in jacobian
            rows = flatten(jacobian(forward, posterior.mean, batch), posterior.mean)
            mean = with_gradients(forward)(posterior.mean, batch)
            return mean + (flatten(moves, posterior.mean) @ rows.mT).reshape(samples, *mean.shape)


MOST = 1000  # independent outputs of a datum whose covariance is a matrix


@checks.takes(forward=checks.FUNCTION, batch=checks.BATCH, joint=checks.BOOL, chunk_bytes=checks.WHOLE)
def linearized(
    forward: Callable[[Tree, Any], Tensor],
    posterior: Gaussian,
    batch: Any,
    *,
    joint: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the outputs under a Gaussian posterior.

    Args:
        forward: ``forward(params, batch) -> outputs [B, *event]``; a datum's outputs depend on that datum only.
        posterior: its mean is a tree that ``forward`` takes; any precision structure.
        batch: any tree of tensors with one entry a datum on the first axis, handed on to ``forward``; for a pair
            ``(inputs, targets)`` the targets may be None.
        joint: whether the covariance is that of all data together. Default False: of each datum's own outputs.
        chunk_bytes: bound on the rows and activations held at once; one datum with all its outputs is the least
            possible. Default as in :func:`bayesopt_chain.curvature.ggn`.

    Returns:
        ``(mean [B, *event], covariance [B, E, E])``, E the number of outputs of a datum; with ``joint`` the covariance is
        ``[B E, B E]``, data first. Of more than 1,000 outputs of a linear layer that are independent, as under a diagonal
        Kronecker factor of the outputs, it is the variances alone, ``[B, E]``. Observation noise is not included. Where the
        batch or the precision asks for gradients, or inside a transformation of ``torch.func``, both have them; the rows of
        the Jacobian are then held.

    Raises:
        ValueError: for a singular precision, or a forward function that mixes data.

    Example:
        >>> import torch
        >>> import bayesopt_chain as bc
        >>> from bayesopt_chain.posterior.gaussian import Gaussian
        >>> from bayesopt_chain.precision import Diagonal
        >>> posterior = Gaussian(torch.ones(2, 1), Diagonal(torch.full((2, 1), 4.0), torch.tensor(1.0)))
        >>> mean, covariance = bc.posterior.linearized(lambda w, batch: batch[0] @ w, posterior, (torch.ones(1, 2), None))
        >>> mean.item(), covariance.item()
        (2.0, 0.5)
    """
    return linearized_by(Checks(), forward, posterior, batch, joint, chunk_bytes)


def linearized_by(
    checks: Checks,
    forward: Callable[[Tree, Any], Tensor],
    posterior: Gaussian,
    batch: Any,
    joint: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, with the checks that earlier batches of this forward function have passed."""
    if joint or needs_graph(batch, posterior.precision, posterior.mean):
        with torch.set_grad_enabled(needs_graph(batch, posterior.precision, posterior.mean)):
            mean, covariance = with_graph(forward, posterior, batch, joint)
    else:
        mean, covariance = _without_graph(checks, forward, posterior, batch, chunk_bytes)
    return mean.to(covariance.dtype), covariance  # of a model in bfloat16 both are float32


@torch.no_grad()
def _without_graph(
    checks: Checks,
    forward: Callable[[Tree, Any], Tensor],
    posterior: Gaussian,
    batch: Any,
    chunk_bytes: int | None,
) -> tuple[Tensor, Tensor]:
    params, precision = posterior.mean, posterior.precision.factorised()
    bases = precision.layer_bases()
    sizes = [leaf.numel() for leaf in optree.tree_leaves(params)]
    if isinstance(forward, Affine) and batch[0].ndim == 2:
        mean = forward(params, batch)
        row = 3 * sum(sizes) * mean.shape[1] * mean.element_size()
        at_once = len(mean) if bases else max(1, (ROW_BYTES if chunk_bytes is None else chunk_bytes) // row)
        parts = [of_affine(forward, params, x, bases, precision) for x in batch[0].split(at_once)]
        return mean, torch.cat(parts)
    formed = max(sizes) if bases else 3 * sum(sizes)

    def run(plan: TapPlan, check: Check) -> tuple[Tensor, Tensor]:
        means, covariances = [], []
        demand = Demand(formed, sum(sizes), columns_together=True)
        for chunk in BatchPullback(forward, params, batch, None, _every_output, demand, chunk_bytes).chunks(
            plan, check
        ):
            means.append(chunk.outputs)
            covariances.append(_of_gradients(chunk.gradients, params, precision, bases))
            del chunk  # before the next one is made
        return torch.cat(means[::-1]), torch.cat(covariances[::-1])  # chunks come last data first

    return checks.run(params, batch, lambda: make_plan(forward, params, batch), run)


def of_affine(
    forward: Affine, params: Any, x: Tensor, bases: list[LayerBases] | None, precision: Precision | None
) -> Tensor:
    """The covariance of ``W x + b``, whose output gradients are the unit vectors, those of one datum for all.

    With U and V the bases of W and v its variances there it is ``U diag(v (V^T x)^2) U^T``, and likewise of b. Of more than
    :data:`MOST` outputs with U = 1, as under a diagonal factor of the outputs, it is its diagonal alone, ``[b, E]``.
    """
    uses, seen = forward.uses(params, x.to(wide(x.dtype)))
    outputs = params[forward.weight].shape[0]
    if bases and outputs > MOST and all(left is None or left.ndim == 1 for left, _, _ in bases):
        variances: Any = 0
        for use, inputs in zip(uses, seen):
            _, right, values = bases[use.leaf]
            inputs = inputs if inputs.ndim > 1 else inputs.new_ones(x.shape[0], 1)
            inputs = inputs if right is None else turned(inputs, right)
            variances = variances + inputs.square() @ values.reciprocal().reshape(outputs, -1).mT
        return variances
    times = 1 if bases else len(x)  # rows are formed for every datum
    units = torch.eye(outputs, dtype=wide(x.dtype), device=x.device)[:, None].expand(-1, times, -1)
    gradients = [
        Gradient(
            use.leaf,
            use.kind,
            partial(use.canonical.x, inputs, x.shape[0]),
            partial(use.canonical.g, inputs, units, times),
        )
        for use, inputs in zip(uses, seen)
    ]
    return _of_gradients(gradients, params, precision, bases)


LAYER = 64  # times as many targets at once where they need no backward pass


def by_target(
    forward: Callable[[Tree, Any], Tensor], posterior: Gaussian, datum: Any, likelihood: Likelihood, at_once: int
) -> tuple[Tensor, Tensor]:
    """Mean ``[1, *positions, C]`` and covariance ``[1, *positions, C, C]`` of each target of a datum alone, ``at_once`` of them
    in a block."""
    whole = with_gradients(forward)(posterior.mean, datum)
    grouping = likelihood.grouping(whole.shape[1:])
    mean, width = grouping.split(whole), grouping.width
    by_rows = posterior.precision.layer_bases() is None and posterior.precision.lower_factor() is None
    inputs = None if by_rows else _inputs_of_layer(forward, posterior.mean, datum, mean.reshape(-1, width))
    if inputs is not None:
        found = torch.cat([_of_layer(posterior, some) for some in inputs.split(LAYER * at_once)])
        return mean, found.reshape(*mean.shape[:-1], *found.shape[1:])
    order = torch.arange(whole[0].numel(), device="cpu") if grouping.order is None else grouping.order
    blocks = []
    for some in order.to(whole.device).split(at_once * width):
        _, covariance = linearized(lambda p, batch, some=some: forward(p, batch).flatten(1)[:, some], posterior, datum)
        targets = covariance.reshape(-1, width, len(some) // width, width)
        blocks.append(targets.diagonal(dim1=0, dim2=2).movedim(-1, 0))
    return mean, torch.cat(blocks).reshape(*mean.shape, width)


def _inputs_of_layer(forward: Callable[[Tree, Any], Tensor], params: Tree, datum: Any, wanted: Tensor) -> Tensor | None:
    """What the kept layer sees at each target, ``[T, I]``; None where the outputs ``[T, C]`` are not that layer's there."""
    leaves, structure, _ = fresh_leaves(params)
    taps = Taps(leaves, 1)
    with taps:
        with_gradients(forward)(structure.unflatten(leaves), datum)
    uses = {use.leaf: (use, x) for use, x in zip(taps.uses, taps.inputs)}
    matrices = [(use, x) for use, x in uses.values() if isinstance(use.kind, Matrix) and not use.kind.transposed]
    biases = [leaf for leaf, (use, _) in uses.items() if isinstance(use.kind, Vector)]
    if len(taps.uses) != len(leaves) or len(matrices) != 1 or len(biases) != len(leaves) - 1 or len(biases) > 1:
        return None
    use, x = matrices[0]
    seen = use.canonical.x(x, 1)[0]
    found = seen @ leaves[use.leaf].reshape(use.kind.shape).mT + sum(leaves[leaf] for leaf in biases)
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return None
    close = (found - wanted).abs().amax() <= torch.finfo(found.dtype).eps ** 0.5 * wanted.abs().amax()
    return seen if bool(close) else None


def _of_layer(posterior: Gaussian, x: Tensor) -> Tensor:
    """The covariance ``[T, C, C]`` of ``W x + b``: each target as a datum of a linear layer."""
    leaves = optree.tree_leaves(posterior.mean)  # named by their numbers, so that their order stays
    flat = {str(i): leaf.flatten(1) if leaf.ndim > 1 else leaf for i, leaf in enumerate(leaves)}
    weight = next(name for name, leaf in flat.items() if leaf.ndim > 1)
    layer = Affine(weight, next((name for name in flat if name != weight), None))
    return of_affine(layer, flat, x, posterior.precision.layer_bases(), posterior.precision)


def _every_output(outputs: Tensor, targets: Any) -> Elementwise:
    """Return the root whose columns pull back to the rows of the Jacobian."""
    return Elementwise(torch.ones_like(outputs))


def _together(rows: dict[int, Tensor], params: Tree) -> Tensor:
    """The Jacobian's rows ``[b, K, P]`` from those of each leaf, ``[K, b, d0, d1]``, by its number."""
    every = [rows[i].flatten(2) for i in range(len(rows))]
    return torch.cat(every, 2).transpose(0, 1).to(common_dtype(params))


def _of_gradients(gradients: list[Gradient], params: Tree, precision: Any, bases: list[LayerBases] | None) -> Tensor:
    """Sum the leaves' parts in the bases in which the precision is diagonal, or go by rows."""
    if bases:
        return reduce(torch.add, (_in_basis(kind, x(), g(), bases[leaf]) for leaf, kind, x, g, _ in gradients))
    rows = {leaf: kind.rows(x(), g()) for leaf, kind, x, g, _ in gradients}
    return _between(_together(rows, params), params, precision)


def _in_basis(kind: Kind, x: Tensor, g: Tensor, basis: LayerBases) -> Tensor:
    left, right, values = basis
    if left is not None and right is not None and kind.shape != (len(left), len(right)):
        # a matrix without a tap, such as tied weights: its gradients come whole, ``[K, b, d0 d1]``
        g = turned(turned(g.unflatten(-1, (len(left), len(right))), right).mT, left).mT.flatten(2)
    elif left is not None and right is not None:
        kind, x, g = kind.rotated(x, g, left, right)
    return kind.covariance(x, g, values.reciprocal().reshape(kind.shape))


def _between(rows: Tensor, params: Tree, precision: Precision) -> Tensor:
    """``J Lambda^-1 J^T``, ``[b, K, K]``, of rows ``[b, K, P]``."""
    factor = precision.lower_factor()
    if factor is None:
        return rows @ flatten(precision.solve(unflatten(rows, params)), params).to(rows.dtype).mT
    columns = rows.reshape(-1, rows.shape[2]).mT.to(factor.dtype)
    solved = torch.linalg.solve_triangular(factor, columns, upper=False).mT.reshape(rows.shape)
    return solved @ solved.mT
