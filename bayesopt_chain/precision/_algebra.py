"""One set of questions to ask of any Gaussian precision, so that a method never asks what it is.

A precision ``Lambda`` is a symmetric positive semidefinite operator on parameter trees. In the algebra below ``x`` is a
tree like the parameters, or a batch of them: leaves ``[*lead, *leaf.shape]``.

    add            Lambda + Lambda'               solve         Lambda^-1 x
    scale          c Lambda                       sqrt_solve    R x  with  R R^T = Lambda^-1   (sampling)
    add_diagonal   Lambda + diag(d)               inverse_diag  the diagonal of Lambda^-1, a tree
    quad           x^T Lambda x, shape [*lead]    diag          the diagonal of Lambda, a tree
    logdet         log |Lambda|, 0-d              to_dense      the matrix [P, P], leaves in optree order
    times          Lambda x

What decomposes a precision (``solve, sqrt_solve, logdet, inverse_diag``) is answered by ``factorised()``, which does the
decomposition once and also refuses, by name, a precision that is not positive definite. Two more questions are about
what a structure can do: ``as_rows()`` and ``layer_bases()``. A new structure is a class here, an entry in the table of
:mod:`bayesopt_chain.curvature` (``_structures.py``) and a test.

A precision is held in float32 at least; answers that are like ``x`` have the dtypes of ``x``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.tracing import is_hidden
from bayesopt_chain.trees import Tree, as_tensor


class LayerBases(NamedTuple):
    """How a precision sees one leaf as a matrix ``[d0, d1]``: diagonal in the basis ``u_i (x) v_j``.

    Attributes:
        left: U, ``[d0, d0]``, or one axis ``[d0]`` for the identity; None where both bases are the identity.
        right: V, ``[d1, d1]`` or ``[d1]``; None as for ``left``.
        values: the eigenvalues, as many as the leaf has entries.
    """

    left: Tensor | None
    right: Tensor | None
    values: Tensor


class Precision:
    """The algebra of precisions; each structure is a NamedTuple of tensors and trees with these methods.

    Attributes:
        count: the number of data behind the precision, a 0-d tensor; ``add`` sums it and ``scale`` scales it.
    """

    __slots__ = ()
    count: Tensor

    def add(self, other: Any) -> Any:
        """Return the sum with another precision over the same tree.

        Raises:
            TypeError: for another structure.
            ValueError: for another tree (names the leaf).
        """
        raise NotImplementedError

    def scale(self, factor: float | Tensor) -> Any:
        """Return the precision, and its count, times a non-negative number."""
        raise NotImplementedError

    def add_diagonal(self, value: Any) -> Any:
        """Return the precision plus a diagonal.

        Args:
            value: a number, a 0-d tensor, or a tree that broadcasts to the params.

        Raises:
            ValueError: for a tree that does not broadcast, or that the structure cannot take up (names the leaf).
        """
        raise NotImplementedError

    def factorised(self) -> Any:
        """Return the same precision decomposed for solving.

        Raises:
            ValueError: where it is not positive definite (names the leaf).
        """
        raise NotImplementedError

    def diag(self) -> Tree:
        """Return the diagonal as a tree."""
        raise NotImplementedError

    def entries(self) -> Tree:
        """Return a tree with one tensor a leaf that is finite where the precision is: the diagonal, or what costs less."""
        return self.diag()

    def quad(self, tree: Tree) -> Tensor:
        """Return ``x^T Lambda x``, shape ``[*lead]``."""
        raise NotImplementedError

    def times(self, tree: Tree) -> Tree:
        """Return ``Lambda x`` for one tree ``x``: half the gradient of :meth:`quad`."""
        leaves, structure = optree.tree_flatten(tree)

        def half(leaves: list[Tensor]) -> Tensor:
            return 0.5 * self.quad(optree.tree_unflatten(structure, leaves))

        return optree.tree_unflatten(structure, torch.func.grad(half)(leaves))

    def to_dense(self) -> Tensor:
        """Return the matrix ``[P, P]``, the leaves flattened in optree order."""
        raise NotImplementedError

    def as_rows(self) -> Tree:
        """Return rows, leaves ``[M, *leaf.shape]``, with ``Lambda = rows^T rows``.

        Raises:
            TypeError: for a structure that is not made of rows.
            ValueError: for an indefinite precision.
        """
        raise TypeError(f"a precision of class {type(self).__name__} is not made of rows")

    def layer_bases(self) -> list[LayerBases] | None:
        """Return, leaf by leaf, the basis in which a decomposed precision is diagonal; None where there is none."""
        return None

    def solve(self, tree: Tree) -> Tree:
        """Return ``Lambda^-1 x``."""
        return self.factorised().solve(tree)

    def sqrt_solve(self, tree: Tree) -> Tree:
        """Return ``R x`` with ``R R^T = Lambda^-1``: white noise in, a draw of covariance ``Lambda^-1`` out."""
        return self.factorised().sqrt_solve(tree)

    def logdet(self) -> Tensor:
        """Return ``log |Lambda|``."""
        return self.factorised().logdet()

    def inverse_diag(self) -> Tree:
        """Return the diagonal of ``Lambda^-1``, the marginal variances, as a tree."""
        return self.factorised().inverse_diag()


def like(tree: Tree, other: Tree) -> Tree:
    """Bring an answer into the dtypes of the question."""
    return optree.tree_map(lambda leaf, asked: leaf.to(asked.dtype), tree, other)


def total(parts: Iterable[Tensor]) -> Tensor:
    """Add the parts of a sum over leaves, of which there is at least one."""
    first, *others = parts
    for other in others:
        first = first + other
    return first


def require_same_structure(left: Precision, right: Any, *accepted: type) -> None:
    """Raise ``TypeError`` unless ``right`` is one of the classes that can be added to ``left``."""
    if not isinstance(right, accepted or (type(left),)):
        raise TypeError(
            f"cannot add {type(right).__name__} to {type(left).__name__}: one posterior has one structure; "
            "build every estimator with the same structure= (and give a new structure a new state)"
        )


def require_positive(values: Tensor, name: str) -> None:
    """Raise ``ValueError`` where values that must be positive are not; inside a transform nothing can be checked."""
    if not is_hidden(values) and not bool((values > 0).all()):
        raise ValueError(
            f"the precision is singular or indefinite at {name} (smallest value {values.min().item():.3g}): "
            "pass a larger prior_precision, or more data"
        )


def as_count(count: float | Tensor, device: torch.device | None = None) -> Tensor:
    """Return a datum count as a 0-d float64 tensor, which holds any number of data exactly."""
    if isinstance(count, Tensor):
        return count
    return as_tensor(float(count), torch.float64, device)
