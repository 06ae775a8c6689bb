"""The linearised model with its graph: outputs that can be differentiated, their covariance across inputs, and its draws.

    f(x) ~ N( f(mean, x),  J(x) Lambda^-1 J(x')^T ),      J(x) = d f(theta, x) / d theta at the mean
    f_s(x) = f(mean, x) + J(x) (theta_s - mean),          theta_s ~ N(mean, Lambda^-1)

The linearised model is that of Immer et al. (2021). The rows of J are held, for all data at once where the covariance is joint,
so that autograd can go back through them to the inputs and to whatever the precision depends on. Draws are directional
derivatives and hold no J; the same draws of the parameters are the same functions at other inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches, kinds
from bayesopt_chain.curvature import jvp
from bayesopt_chain.curvature._autodiff import double_backward
from bayesopt_chain.curvature._plan import batch_size, part
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.tracing import is_transformed
from bayesopt_chain.trees import Tree, common_dtype, flatten, size

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
        with torch.enable_grad():
            mean = forward(posterior.mean, batch).detach()
    entries = mean.shape[1:].numel()
    row = 3 * size(posterior.mean) * entries * common_dtype(posterior.mean).itemsize
    at_once = count if joint else max(1, ROW_BYTES // row)
    covariances = []
    for start in range(0, count, at_once):
        some = part(batch, start, min(count, start + at_once)) if at_once < count else batch
        rows = jacobian(forward, posterior.mean, some)
        left = flatten(rows, posterior.mean)
        right = flatten(precision.solve(rows), posterior.mean).to(left.dtype)
        if joint:
            return mean, left @ right.mT
        left, right = (x.reshape(-1, entries, x.shape[1]) for x in (left, right))
        covariances.append(left @ right.mT)
    return mean, torch.cat(covariances)


def jacobian(forward: Callable[[Tree, Any], Tensor], params: Tree, batch: Any) -> Tree:
    """Rows ``[B E, *leaf.shape]`` of the outputs' Jacobian, which autograd can go through."""
    leaves, structure = batches.flatten(batch)
    is_datum = [isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in leaves]
    data = [leaf for leaf, chosen in zip(leaves, is_datum) if chosen]

    def one(*datum: Tensor) -> Tree:
        given = iter(datum)
        whole = structure.unflatten([next(given)[None] if chosen else x for x, chosen in zip(leaves, is_datum)])
        with double_backward():  # autograd goes through these rows once more
            return torch.func.jacrev(lambda p: forward(p, whole)[0])(params)

    try:
        rows = torch.vmap(one)(*data)
    except (RuntimeError, NotImplementedError):  # an operation without a batching rule, or one that looks at numbers
        try:
            each = [one(*(x[n] for x in data)) for n in range(data[0].shape[0])]
        except RuntimeError:  # a forward function that takes derivatives itself: rows without a graph
            each = [plain_rows(forward, params, part(batch, n, n + 1)) for n in range(data[0].shape[0])]
        rows = optree.tree_map(lambda *xs: torch.stack(xs), *each)
    return optree.tree_map(lambda x, p: x.reshape(-1, *p.shape), rows, params)


def plain_rows(forward: Callable[[Tree, Any], Tensor], params: Tree, datum: Any) -> Tree:
    """Rows ``[E, *leaf.shape]`` of one datum by backward passes alone."""
    leaves, structure = optree.tree_flatten(params)
    with torch.enable_grad():
        chosen = [leaf.detach().requires_grad_() for leaf in leaves]
        outputs = forward(structure.unflatten(chosen), datum)[0].flatten()
        each = [torch.autograd.grad(f, chosen, retain_graph=True, materialize_grads=True) for f in outputs]
    return structure.unflatten([torch.stack(rows) for rows in zip(*each)])


@kinds.takes(forward=kinds.FUNCTION, batch=kinds.BATCH)
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
    with torch.no_grad():
        noise = optree.tree_map(
            lambda p: torch.randn((samples, *p.shape), dtype=p.dtype, device=p.device, generator=generator),
            posterior.mean,
        )
    moves = precision.sqrt_solve(noise)

    def along(move: Tree) -> Tensor:
        value, change = jvp(lambda p: forward(p, batch), (posterior.mean,), (move,))
        return value + change

    with torch.set_grad_enabled(needs_graph(batch, posterior.precision)):
        try:
            return torch.vmap(along)(moves)
        except (RuntimeError, NotImplementedError):
            pass
        try:
            return torch.stack([along(optree.tree_map(lambda x, s=s: x[s], moves)) for s in range(samples)])
        except RuntimeError:  # as in jacobian
            rows = flatten(jacobian(forward, posterior.mean, batch), posterior.mean)
            with torch.enable_grad():
                mean = forward(posterior.mean, batch).detach()
            return mean + (flatten(moves, posterior.mean) @ rows.mT).reshape(samples, *mean.shape)
