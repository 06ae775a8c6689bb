"""Products with curvature matrices, in torch.func's conventions, and of a whole data set as an operator of curvlinops.

    hvp     H v,         H = d^2 f / d theta^2                    f(theta) -> scalar
    fvp     J^T J v,     J the Jacobian of f, one row a datum     f(theta) -> losses [B]: the empirical Fisher
    ggnvp   J^T H J v,   J of forward, H the Hessian of loss      loss(forward(theta)) -> scalar

A product is one forward-mode pass J v and one reverse-mode pass J^T u. Where an operation has no forward mode (some
fused kernels) its plain form is tried, and then two reverse passes: u -> J^T u is linear, so that its own pullback is
v -> J v. Pearlmutter 1994; Schraudolph 2002.

The operator has, over all batches,

    G v = sum_b J_b^T S_b S_b^T J_b v,      S_b the root of the likelihood's expected Hessian (``likelihoods``)

or ``H v`` of the summed loss, for what needs products alone: Hutch++ and XTrace estimate the trace, Lanczos' quadrature the
spectral density. curvlinops' own operators know three losses of torch, this one any likelihood, with its weights and masks, and
any forward function. (Hutch++: Meyer and others, 2021. XTrace: Epperly, Tropp and Webber, 2024. Spectra: Papyan, 2020.)

Linear systems with such a product are solved by preconditioned conjugate gradients (Hestenes and Stiefel 1952) for symmetric
positive definite A and M ~ A^-1, so that Newton steps need no matrix:

    x_{t+1} = x_t + a_t p_t,   r_{t+1} = r_t - a_t A p_t,   p_{t+1} = M r_{t+1} + b_t p_t
    a_t = r_t^T M r_t / p_t^T A p_t,   b_t = r_{t+1}^T M r_{t+1} / r_t^T M r_t

Damping solves with ``A + damping I`` (Martens 2010). All leaves of a tree are one vector there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.batches import picked
from bayesopt_chain.curvature._autodiff import UNSUPPORTED, double_backward, vjp, without_fused_recurrence
from bayesopt_chain.curvature._plan import over_data, pair_targets, parts
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.precision import flatten, unflatten
from bayesopt_chain.trees import Tree, require_like


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
            results = [f(params, datum) for datum in parts(batch, 1)]
            return optree.tree_map(lambda *values: torch.stack(values), *results)

    return each


@checks.takes(kind=checks.one_of("ggn", "hessian"), batches=checks.BATCHES)
def linear_operator(
    forward: Callable[[Tree, Any], Tensor],
    likelihood: Likelihood,
    params: Tree,
    batches: Iterable[Any],
    kind: Literal["ggn", "hessian"] = "ggn",
    *,
    targets: Callable[[Any], Any] | str = pair_targets,
) -> Any:
    """The curvature summed over a data set, for the algorithms of curvlinops (the extra ``curvlinops``), such as the traces of
    Hutch++ (Meyer and others, 2021) and the spectra of Papyan (2020).

    Args:
        forward: ``forward(params, batch) -> outputs [B, *event]``.
        likelihood: from :mod:`bayesopt_chain.likelihoods`.
        params: where the curvature is taken: a tree of P numbers.
        batches: the data, read once for every product: a list, or a ``DataLoader`` that does not shuffle.
        kind: "ggn" (default), the matrix of :func:`bayesopt_chain.curvature.ggn`, or "hessian" of the summed loss.
        targets: from a batch to its targets, or their key. Default: the second entry of a pair.

    Returns:
        A symmetric ``curvlinops`` operator ``[P, P]``: ``operator @ v`` for a vector ``[P]``, a matrix ``[P, K]`` or a list of
        tensors like the parameters, leaf by leaf.

    Raises:
        ImportError: curvlinops is not installed.
        ValueError: another kind; batches that can be read only once.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> from curvlinops import hutchpp_trace                                      # doctest: +SKIP
        >>> forward = lambda w, batch: batch[0] @ w
        >>> data = [(torch.eye(3), torch.zeros(3, 1))]
        >>> operator = bc.curvature.linear_operator(                                  # doctest: +SKIP
        ...     forward, bc.likelihoods.gaussian(0.5), torch.zeros(3, 1), data
        ... )
        >>> hutchpp_trace(operator, num_matvecs=9)                                    # doctest: +SKIP
        tensor(6.)
    """
    if iter(batches) is batches:
        raise ValueError("linear_operator: the batches can be read only once: pass a list of them, or a DataLoader")
    checks.installed("linear_operator", "curvlinops", "curvlinops")
    from curvlinops._torch_base import PyTorchLinearOperator  # pyright: ignore[reportMissingImports]

    leaves, structure = optree.tree_flatten(params)
    labels_of = picked(targets, pair_targets)

    def product(vector: list[Tensor]) -> list[Tensor]:
        tangent: Any = optree.tree_unflatten(structure, vector)
        total = [torch.zeros_like(leaf) for leaf in leaves]
        for batch in batches:
            multiply = _ggn_product if kind == "ggn" else _hessian_product
            part = multiply(lambda p, batch=batch: forward(p, batch), likelihood, params, tangent, labels_of(batch))
            total = [a + b for a, b in zip(total, optree.tree_leaves(part))]
        return total

    class Curvature(PyTorchLinearOperator):
        """Products one column at a time."""

        SELF_ADJOINT = True

        def _matmat(self, X: list[Tensor]) -> list[Tensor]:
            with torch.no_grad():
                columns = [product([x[..., k] for x in X]) for k in range(X[0].shape[-1])]
            return [torch.stack(parts, -1) for parts in zip(*columns)]

        def _adjoint(self) -> Curvature:
            return self

        @property
        def device(self) -> torch.device:
            return leaves[0].device

        @property
        def dtype(self) -> torch.dtype:
            return leaves[0].dtype

    shapes = [tuple(leaf.shape) for leaf in leaves]
    return Curvature(shapes, shapes)


def _ggn_product(outputs_of: Any, likelihood: Likelihood, params: Tree, tangent: Tree, labels: Any) -> Tree:
    outputs, pull = vjp(outputs_of, params)
    _, along = jvp(outputs_of, (params,), (tangent,))
    root = likelihood.root(outputs, labels)
    weights = outputs.new_zeros(outputs.shape[0], root.columns)
    _, transposed = vjp(root.combine, weights)  # S^T u of the linear map w -> S w
    return pull(root.combine(transposed(along)[0]))[0]


def _hessian_product(outputs_of: Any, likelihood: Likelihood, params: Tree, tangent: Tree, labels: Any) -> Tree:
    return hvp(lambda p: likelihood.nll(outputs_of(p), labels).sum(), (params,), (tangent,))[1]


class CGInfo(NamedTuple):
    """How a solve ended.

    Attributes:
        iterations: how many were run.
        residual: ``|b - (A + damping I) x|``.
        converged: whether the residual is within the tolerances.
    """

    iterations: int
    residual: float
    converged: bool


@checks.takes(
    product=checks.FUNCTION,
    b=checks.TREE,
    damping=checks.SCALAR,
    preconditioner=checks.FUNCTION.or_none(),
    rtol=checks.NUMBER,
    atol=checks.NUMBER,
    maxiter=checks.WHOLE.or_none(),
)
def cg(
    product: Callable[[Tree], Tree],
    b: Tree,
    *,
    damping: float | Tensor = 0.0,
    x0: Tree | None = None,
    preconditioner: Callable[[Tree], Tree] | None = None,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
) -> tuple[Tree, CGInfo]:
    """Solve ``(A + damping I) x = b`` for a symmetric positive definite matrix, on the device of ``b``.

    Args:
        product: ``x -> A x``, from a tree like ``b`` to another.
        b: right-hand side, a tree.
        damping: added to the diagonal of A, such as a prior precision: a non-negative number or 0-d tensor. Default 0.
        x0: where to start; default zero.
        preconditioner: ``r -> M r``, M near ``(A + damping I)^-1``, such as the ``solve`` of a diagonal or Kronecker
            precision.
        rtol, atol: stop once ``|r| <= max(rtol |b|, atol)``.
        maxiter: the most iterations that are run; default 10 times the number of unknowns.

    Returns:
        ``(x, CGInfo)``.

    Raises:
        ValueError: when the matrix is not positive definite along a search direction, the damping is negative, or x0
            is not like b.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> x, info = curvature.cg(lambda x: A @ x, torch.tensor([3.0, 0.0]))
        >>> x.round(decimals=4), info.iterations
        (tensor([ 2., -1.]), 2)
    """
    if float(damping) < 0:
        raise ValueError(f"damping={float(damping)}: pass a number that is not negative")

    def applied(f: Callable[[Tree], Tree], v: Tensor) -> Tensor:
        return flatten(f(unflatten(v, b)), b)

    def conditioned(v: Tensor) -> Tensor:
        return v if preconditioner is None else applied(preconditioner, v)

    r = flatten(b, b)
    x, bound = 0.0 * r, max(rtol * float(r.norm()), atol)
    if x0 is not None:
        require_like(x0, b, "x0")
        x = flatten(x0, b)
        r = r - applied(product, x) - damping * x
    p = z = conditioned(r)
    iterations = 0
    while float(r.norm()) > bound and iterations < (10 * r.numel() if maxiter is None else maxiter):
        Ap = applied(product, p) + damping * p
        curvature = p @ Ap
        if curvature <= 0:
            raise ValueError(
                "the matrix is not positive definite along a search direction: add a prior precision, or use the GGN"
            )
        a = (r @ z) / curvature
        before, x, r = r @ z, x + a * p, r - a * Ap
        z = conditioned(r)
        p = z + (r @ z) / before * p
        iterations += 1
    residual = float(r.norm())
    return unflatten(x, b), CGInfo(iterations, residual, residual <= bound)
