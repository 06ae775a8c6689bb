"""Products with curvature matrices, in torch.func's conventions.

    hvp     H v,         H = d^2 f / d theta^2                    f(theta) -> scalar
    fvp     J^T J v,     J the Jacobian of f, one row a datum     f(theta) -> losses [B]: the empirical Fisher
    ggnvp   J^T H J v,   J of forward, H the Hessian of loss      loss(forward(theta)) -> scalar

A product is one forward-mode pass J v and one reverse-mode pass J^T u. Where an operation has no forward mode (some
fused kernels) its plain form is tried, and then two reverse passes: u -> J^T u is linear, so that its own pullback is
v -> J v. Pearlmutter 1994; Schraudolph 2002.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.curvature._autodiff import UNSUPPORTED, double_backward, vjp, without_fused_recurrence
from bayesopt_chain.curvature._plan import batch_size, over_data, part
from bayesopt_chain.trees import Tree


@checks.takes()
def jvp(f: Callable[..., Any], primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    """Multiply the Jacobian of a function by a vector, by forward mode or, where an operation has none, by what works.

    Args:
        f: ``f(*primals)`` returns any tree.
        primals: the arguments at which the derivative is taken, a tuple of trees.
        tangents: the vector, a tuple like the primals.

    Returns:
        ``(f(*primals), product)``, the product a tree like the outputs.

    Raises:
        RuntimeError: torch's, for tangents that are not like the primals; an operation of ``f`` that has neither forward mode
            nor a second derivative.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature
        >>> curvature.jvp(torch.square, (torch.tensor(3.0),), (torch.tensor(1.0),))
        (tensor(9.), tensor(6.))
    """
    try:
        return _forward_mode(f, primals, tangents)
    except UNSUPPORTED:
        with double_backward():
            try:
                return _forward_mode(f, primals, tangents)
            except UNSUPPORTED:
                output, pull = vjp(f, *primals)
                zeros = optree.tree_map(torch.zeros_like, output)
                _, push = vjp(lambda u: pull(u), zeros)
                return output, push(tuple(tangents))[0]


def _forward_mode(f: Callable[..., Any], primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    result = torch.func.jvp(f, primals, tangents)
    return result[0], result[1]


@checks.takes(has_aux=checks.BOOL)
def hvp(f: Callable[..., Any], primals: tuple, tangents: tuple, *, has_aux: bool = False) -> tuple:
    """Multiply the Hessian of a scalar function by a vector.

    Args:
        f: ``f(*primals)`` returns a scalar, or ``(scalar, aux)`` with ``has_aux``.
        primals: the arguments at which the derivative is taken, a tuple of trees.
        tangents: the vector, a tuple like the primals.
        has_aux: whether ``f`` returns a second value.

    Returns:
        ``(gradient, product)``, and ``aux`` with ``has_aux``. Both are trees like the primal; for several primals
        tuples of trees.

    Raises:
        RuntimeError: torch's, where ``f`` returns no scalar, or the tangents are not like the primals.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature
        >>> curvature.hvp(lambda x: (x**3).sum(), (torch.tensor([1.0, 2.0]),), (torch.tensor([1.0, 1.0]),))
        (tensor([ 3., 12.]), tensor([ 6., 12.]))
    """

    def scalar(*args: Any) -> Tensor:
        return f(*args)[0] if has_aux else f(*args)

    gradient = torch.func.grad(scalar, argnums=tuple(range(len(primals))))
    value, product = jvp(gradient, primals, tangents)
    result = (_alone(value), _alone(product))
    return (*result, f(*primals)[1]) if has_aux else result


@checks.takes()
def fvp(f: Callable[..., Tensor], primals: tuple, tangents: tuple, *, normalise: bool = False) -> tuple[Tensor, Any]:
    """Multiply the empirical Fisher matrix by a vector.

    Args:
        f: ``f(*primals)`` returns one loss (or log-likelihood) a datum, ``[B]``.
        primals: the arguments at which the derivative is taken, a tuple of trees.
        tangents: the vector, a tuple like the primals.
        normalise: divide by B; default is the sum over data.

    Returns:
        ``(f(*primals), product)``, the product a tree like the primal; for several primals a tuple of trees.

    Raises:
        ValueError: when ``f`` returns something else than one loss a datum.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> curvature.fvp(lambda w: x @ w, (torch.zeros(2),), (torch.tensor([1.0, 0.0]),))[1]
        tensor([2., 2.])
    """
    losses, pull = vjp(f, *primals)
    if losses.ndim != 1:
        raise ValueError(f"f returned {tuple(losses.shape)}: return one loss a datum, [B]")
    _, along = jvp(f, primals, tangents)
    return losses, _alone(pull(along / losses.shape[0] if normalise else along))


@checks.takes()
def ggnvp(
    forward: Callable[..., Any], loss: Callable[[Any], Tensor], primals: tuple, tangents: tuple
) -> tuple[Any, Any]:
    """Multiply the generalised Gauss-Newton matrix of ``loss(forward(*primals))`` by a vector.

    Args:
        forward: ``forward(*primals)`` returns outputs, any tree.
        loss: from outputs to a scalar; sum over data for the GGN of the sum.
        primals: the arguments at which the derivative is taken, a tuple of trees.
        tangents: the vector, a tuple like the primals.

    Returns:
        ``(forward(*primals), product)``, the product a tree like the primal; for several primals a tuple of trees.

    Raises:
        RuntimeError: torch's, where ``loss`` returns no scalar, or the tangents are not like the primals.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature
        >>> w, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> curvature.ggnvp(lambda w: w.sum(), lambda f: f**2, (w,), (v,))[1]
        tensor([2., 2.])
    """
    outputs, pull = vjp(forward, *primals)
    _, along = jvp(forward, primals, tangents)
    _, curved = hvp(loss, (outputs,), (along,))
    return outputs, _alone(pull(curved))


def _alone(trees: tuple) -> Any:
    """Take the tree of a single primal out of its tuple, as ``torch.func.grad`` does."""
    return trees[0] if len(trees) == 1 else trees


def per_sample(f: Callable[[Tree, Any], Any]) -> Callable[[Tree, Any], Any]:
    """Turn a function of (params, batch) into one that is evaluated for every datum alone, a batch of one.

    Args:
        f: ``f(params, batch)`` returns any tree of tensors; the batch is a tree of tensors with one entry a datum on
            the first axis.

    Returns:
        A function with an added axis [B] in front of every output. Compose with torch.func:
        ``per_sample(torch.func.grad(loss))`` gives per-sample gradients, leaves ``[B, *leaf.shape]``.

    Raises:
        ValueError: a batch without an axis of data, or whose tensors disagree about its length.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature
        >>> loss = lambda w, batch: ((batch[0] * w - batch[1]) ** 2).mean()
        >>> batch = (torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
        >>> curvature.per_sample(torch.func.grad(loss))(torch.tensor(1.0), batch)
        tensor([2., 8.])
    """
    f = without_fused_recurrence(f)

    def each(params: Tree, batch: Any) -> Any:
        try:
            return over_data(lambda datum: f(params, datum), batch)
        except Exception:  # what cannot be vmapped is done datum by datum; if that fails too, the user sees why
            results = [f(params, part(batch, i, i + 1)) for i in range(batch_size(batch))]
            return optree.tree_map(lambda *values: torch.stack(values), *results)

    return each
