"""The curvature of a whole data set as a linear operator of curvlinops, which has the algorithms that need products alone.

    G v = sum_b J_b^T S_b S_b^T J_b v,      S_b the root of the likelihood's expected Hessian (``likelihoods``)
    H v = d/d epsilon  grad nll(theta + epsilon v)

Hutch++ and XTrace estimate the trace, Lanczos' quadrature the spectral density; curvlinops' own operators know three losses of
torch, this one any likelihood, with its weights and masks, and any forward function. (Hutch++: Meyer and others, 2021.
XTrace: Epperly, Tropp and Webber, 2024. Spectra: Papyan, 2020.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.batches import picked
from bayesopt_chain.curvature._autodiff import vjp
from bayesopt_chain.curvature._plan import pair_targets
from bayesopt_chain.curvature._products import hvp, jvp
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.trees import Tree


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
