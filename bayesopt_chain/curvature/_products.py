"""Products with curvature matrices, and the small matrices themselves, in torch.func's conventions.

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

from bayesopt_chain.curvature._chunks import batch_size, part, plain_kernels
from bayesopt_chain.trees import Tree, flatten, shape_only, size, unflatten

_UNSUPPORTED = (RuntimeError, NotImplementedError)


def jvp(f: Callable[..., Any], primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    """Return `(f(*primals), J v)`, by forward mode or, where an operation has none, by what works.

    >>> import torch
    >>> from bayesopt_chain import curvature
    >>> curvature.jvp(torch.square, (torch.tensor(3.0),), (torch.tensor(1.0),))
    (tensor(9.), tensor(6.))
    """
    try:
        return torch.func.jvp(f, primals, tangents)
    except _UNSUPPORTED:
        with plain_kernels():
            try:
                return torch.func.jvp(f, primals, tangents)
            except _UNSUPPORTED:
                output, vjp = torch.func.vjp(f, *primals)
                zeros = optree.tree_map(torch.zeros_like, output)
                _, pull = torch.func.vjp(lambda u: vjp(u), zeros)
                return output, pull(tuple(tangents))[0]


def hvp(f: Callable[..., Any], primals: tuple, tangents: tuple, *, has_aux: bool = False) -> tuple:
    """Multiply the Hessian of a scalar function by a vector.

    Args:
        f: `f(*primals)` returns a scalar, or `(scalar, aux)` with `has_aux`.
        primals: where, a tuple of arguments (trees). tangents: the vector, alike.

    Returns:
        `(gradient, product)`, tuples like the primals, and `aux` with `has_aux`.

    >>> import torch
    >>> from bayesopt_chain import curvature
    >>> curvature.hvp(lambda x: (x**3).sum(), (torch.tensor([1.0, 2.0]),), (torch.tensor([1.0, 1.0]),))
    ((tensor([ 3., 12.]),), (tensor([ 6., 12.]),))
    """

    def scalar(*args: Any) -> Tensor:
        return f(*args)[0] if has_aux else f(*args)

    gradient = torch.func.grad(scalar, argnums=tuple(range(len(primals))))
    value, product = jvp(gradient, primals, tangents)
    return (value, product, f(*primals)[1]) if has_aux else (value, product)


def fvp(f: Callable[..., Tensor], primals: tuple, tangents: tuple, *, normalise: bool = False) -> tuple:
    """Multiply the empirical Fisher matrix by a vector.

    Args:
        f: `f(*primals)` returns one loss (or log-likelihood) a datum, `[B]`.
        primals, tangents: as for `hvp`.
        normalise: divide by B; default is the sum over data.

    Returns:
        `(f(*primals), product)`.

    >>> import torch
    >>> from bayesopt_chain import curvature
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
    >>> curvature.fvp(lambda w: x @ w, (torch.zeros(2),), (torch.tensor([1.0, 0.0]),))[1]
    (tensor([2., 2.]),)
    """
    losses, vjp = torch.func.vjp(f, *primals)
    if losses.ndim != 1:
        raise ValueError(f"f returned {tuple(losses.shape)}: return one loss a datum, [B]")
    _, along = jvp(f, primals, tangents)
    return losses, vjp(along / losses.shape[0] if normalise else along)


def ggnvp(
    forward: Callable[..., Any], loss: Callable[[Any], Tensor], primals: tuple, tangents: tuple
) -> tuple[Any, tuple]:
    """Multiply the generalised Gauss-Newton matrix of `loss(forward(*primals))` by a vector.

    Args:
        forward: `forward(*primals)` returns outputs, any tree.
        loss: from outputs to a scalar; sum over data for the GGN of the sum.
        primals, tangents: as for `hvp`.

    Returns:
        `(forward(*primals), product)`.

    >>> import torch
    >>> from bayesopt_chain import curvature
    >>> w, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
    >>> curvature.ggnvp(lambda w: w.sum(), lambda f: f**2, (w,), (v,))[1]
    (tensor([2., 2.]),)
    """
    outputs, vjp = torch.func.vjp(forward, *primals)
    _, along = jvp(forward, primals, tangents)
    _, curved = hvp(loss, (outputs,), (along,))
    return outputs, vjp(curved[0])


def per_sample(f: Callable[[Tree, Any], Any]) -> Callable[[Tree, Any], Any]:
    """Turn a function of (params, batch) into one that is evaluated for every datum alone, a batch of one.

    Returns:
        A function with an added axis [B] in front of every output. Compose with torch.func:
        `per_sample(torch.func.grad(loss))` gives per-sample gradients, leaves `[B, *leaf.shape]`.

    >>> import torch
    >>> from bayesopt_chain import curvature
    >>> loss = lambda w, batch: ((batch[0] * w - batch[1]) ** 2).mean()
    >>> batch = (torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
    >>> curvature.per_sample(torch.func.grad(loss))(torch.tensor(1.0), batch)
    tensor([2., 8.])
    """

    def each(params: Tree, batch: Any) -> Any:
        leaves, structure = optree.tree_flatten(batch)
        batched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim]

        def one(tensors: list[Tensor]) -> Any:
            datum = list(leaves)
            for i, tensor in zip(batched, tensors):
                datum[i] = tensor[None]
            return f(params, optree.tree_unflatten(structure, datum))

        try:
            return torch.vmap(one)([leaves[i] for i in batched])
        except Exception:  # what cannot be vmapped is done datum by datum; if that fails too, the user sees why
            results = [f(params, part(batch, i, i + 1)) for i in range(batch_size(batch))]
            return optree.tree_map(lambda *values: torch.stack(values), *results)

    return each


Matrix = Callable[[Tree], Tensor]


def hessian_matrix(f: Callable[[Tree], Tensor], *, chunk_size: int = 64) -> Matrix:
    """Return `params -> H`, `[P, P]`, of a scalar function, `chunk_size` columns at a time.

    >>> import torch
    >>> from bayesopt_chain import curvature
    >>> curvature.hessian_matrix(lambda x: x[0] ** 2 * x[1])(torch.tensor([1.0, 2.0]))
    tensor([[4., 2.],
            [2., 0.]])
    """
    return _matrix(lambda params, like: _hessian_products(f, params, like), chunk_size, diagonal=False)


def hessian_diagonal(f: Callable[[Tree], Tensor], *, chunk_size: int = 64) -> Matrix:
    """Return `params -> diag H`, `[P]`, of a scalar function; holds `chunk_size` columns.

    >>> import torch
    >>> from bayesopt_chain import curvature
    >>> curvature.hessian_diagonal(lambda x: x[0] ** 2 * x[1])(torch.tensor([1.0, 2.0]))
    tensor([4., 0.])
    """
    return _matrix(lambda params, like: _hessian_products(f, params, like), chunk_size, diagonal=True)


def ggn_matrix(forward: Callable[[Tree], Tensor], loss: Callable[[Tensor], Tensor], *, chunk_size: int = 64) -> Matrix:
    """Return `params -> J^T H J`, `[P, P]`, of `loss(forward(params))`, `chunk_size` columns at a time.

    >>> import torch
    >>> from bayesopt_chain import curvature
    >>> curvature.ggn_matrix(lambda x: x.sum(), torch.square)(torch.zeros(2))
    tensor([[2., 2.],
            [2., 2.]])
    """
    return _matrix(lambda params, like: _ggn_products(forward, loss, params, like), chunk_size, diagonal=False)


def ggn_diagonal(
    forward: Callable[[Tree], Tensor], loss: Callable[[Tensor], Tensor], *, chunk_size: int = 64
) -> Matrix:
    """Return `params -> diag(J^T H J)`, `[P]`; holds `chunk_size` columns. For likelihoods `curvature.ggn` is far
    cheaper.

    >>> import torch
    >>> from bayesopt_chain import curvature
    >>> curvature.ggn_diagonal(lambda x: x[0] * x[1], torch.square)(torch.tensor([1.0, 2.0]))
    tensor([8., 2.])
    """
    return _matrix(lambda params, like: _ggn_products(forward, loss, params, like), chunk_size, diagonal=True)


def fisher_matrix(f: Callable[[Tree], Tensor], *, chunk_size: int = 64) -> Matrix:
    """Return `params -> J^T J`, `[P, P]`, the empirical Fisher of per-datum losses f(params) `[B]`.

    >>> import torch
    >>> from bayesopt_chain import curvature
    >>> curvature.fisher_matrix(lambda x: torch.stack([x[0], x[0] + x[1]]))(torch.zeros(2))
    tensor([[2., 1.],
            [1., 1.]])
    """
    return ggn_matrix(f, lambda losses: losses.square().sum() / 2, chunk_size=chunk_size)


def fisher_diagonal(f: Callable[[Tree], Tensor], *, chunk_size: int = 64) -> Matrix:
    """Return `params -> diag(J^T J)`, `[P]`, of per-datum losses f(params) `[B]`.

    >>> import torch
    >>> from bayesopt_chain import curvature
    >>> curvature.fisher_diagonal(lambda x: torch.stack([x[0], x[0] + x[1]]))(torch.zeros(2))
    tensor([2., 1.])
    """
    return ggn_diagonal(f, lambda losses: losses.square().sum() / 2, chunk_size=chunk_size)


def _hessian_products(f: Any, params: Tree, like: Tree) -> Callable[[Tensor], Tensor]:
    _, vjp = torch.func.vjp(torch.func.grad(lambda vector: f(unflatten(vector, like))), flatten(params, like))
    return lambda v: vjp(v)[0]


def _ggn_products(forward: Any, loss: Any, params: Tree, like: Tree) -> Callable[[Tensor], Tensor]:
    """Linearise once: J v is the pullback of the pullback, which is linear."""
    outputs, vjp = torch.func.vjp(lambda vector: forward(unflatten(vector, like)), flatten(params, like))
    _, push = torch.func.vjp(lambda u: vjp(u)[0], torch.zeros_like(outputs))
    _, curve = torch.func.vjp(torch.func.grad(loss), outputs)
    return lambda v: vjp(curve(push(v)[0])[0])[0]


def _matrix(linearise: Any, chunk_size: int, diagonal: bool) -> Matrix:
    def of(params: Tree) -> Tensor:
        like, parameters = shape_only(params), size(params)
        with torch.no_grad():
            product = _working(linearise, params, like)
            units = torch.eye(parameters, dtype=flatten(params, like).dtype, device=flatten(params, like).device)
            pieces = []
            for start in range(0, parameters, chunk_size):
                rows = torch.vmap(product)(units[start : start + chunk_size])
                pieces.append(rows[:, start:].diagonal() if diagonal else rows)
        return torch.cat(pieces)

    return of


def _working(linearise: Any, params: Tree, like: Tree) -> Callable[[Tensor], Tensor]:
    """Linearise; where a kernel cannot be differentiated twice, in its plain form."""
    product = linearise(params, like)
    try:
        product(torch.zeros_like(flatten(params, like)))
    except _UNSUPPORTED:
        with plain_kernels():
            return linearise(params, like)
    return product
