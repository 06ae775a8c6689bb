r"""One set of questions to ask of any Gaussian precision, so that a method never asks which structure it has.

A precision ``Lambda`` is a symmetric positive semidefinite operator on parameter trees. In the algebra below ``x`` is a
tree like the parameters, or a batch of them: leaves ``[*lead, *leaf.shape]``.

    add            Lambda + Lambda'               solve         Lambda^-1 x
    scale          c Lambda                       sqrt_solve    R x  with  R R^T = Lambda^-1   (sampling)
    add_diagonal   Lambda + diag(d)               inverse_diag  the diagonal of Lambda^-1, a tree
    quad           x^T Lambda x, shape [*lead]    diag          the diagonal of Lambda, a tree
    logdet         log |Lambda|, 0-d              to_dense      the matrix [P, P], leaves in optree order
    times          Lambda x

Four of these questions need the precision decomposed: ``solve``, ``sqrt_solve``, ``logdet`` and ``inverse_diag``.
``factorised()`` decomposes it once and refuses a precision that is not positive definite, naming the parameter. Three more
questions are about what a structure can do: ``as_rows()``, ``layer_bases()`` and ``lower_factor()``. A new structure is a
class here, an entry in the table of :mod:`bayesopt_chain.curvature` (``_structures.py``) and a test.

A precision is held in float32 at least; an answer that is a tree like ``x`` has the dtypes of ``x``. Each class is a named
tuple whose fields are given as pairs, since in a class body a field ``count`` would override the method that tuples have.

The precision of knowing nothing yet, so that a state has a first value before the first increment names a structure.

0 + Lambda = Lambda

The simplest structure ignores every correlation, ``Lambda = diag(d)``, so that it costs what the parameters cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import reduce
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.trees import Tree, flatten, inner, paths, require_like, require_positive, scaled, spread


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


class Precision(ABC):
    """The algebra of precisions; each structure is a NamedTuple of tensors and trees with these methods.

    Attributes:
        count: the number of data behind the precision, a 0-d tensor; ``add`` sums it and ``scale`` scales it.
    """

    __slots__ = ()
    count: Tensor

    @abstractmethod
    def add(self, other: Any) -> Any:
        """Return the sum with another precision over the same tree, such as that of further data.

        Args:
            other: a precision of the same structure. A root may be added to a low-rank precision, a Cholesky factor to a
                dense one.

        Returns:
            A precision of the same structure, whose count is the sum of both.

        Raises:
            TypeError: for another structure.
            ValueError: for another tree (names the leaf).

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Diagonal
            >>> a, b = Diagonal(torch.tensor([1.0, 2.0]), torch.tensor(1.0)), Diagonal(torch.ones(2), torch.tensor(4.0))
            >>> a.add(b).values, a.add(b).count
            (tensor([2., 3.]), tensor(5.))
        """

    @abstractmethod
    def scale(self, factor: float | Tensor) -> Any:
        """Return the precision, and its count, times a non-negative number.

        Args:
            factor: a number or a 0-d tensor: what every datum shall weigh.

        Returns:
            A precision of the same structure, differentiable in ``factor``.

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Diagonal
            >>> Diagonal(torch.tensor([1.0, 2.0]), torch.tensor(1.0)).scale(3.0).values
            tensor([3., 6.])
        """

    @abstractmethod
    def add_diagonal(self, value: Any) -> Any:
        """Return the precision plus a diagonal, such as a prior's.

        Args:
            value: a number, a 0-d tensor, or a tree that broadcasts to the params, in units of the precision (not per
                datum).

        Returns:
            A precision with the same count, of the same structure; a root becomes low rank plus diagonal. It is
            differentiable in ``value``.

        Raises:
            ValueError: for a tree that does not broadcast, or that the structure cannot take up (names the leaf).

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Diagonal
            >>> Diagonal(torch.tensor([1.0, 2.0]), torch.tensor(1.0)).add_diagonal(10.0).values
            tensor([11., 12.])
        """

    @abstractmethod
    def factorised(self) -> Any:
        """Return the same precision decomposed, so that several questions pay for the decomposition once.

        Returns:
            A precision that answers ``solve``, ``sqrt_solve``, ``logdet`` and ``inverse_diag`` without decomposing it again;
            itself where there is nothing to decompose.

        Raises:
            ValueError: where it is not positive definite (names the leaf).

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Dense
            >>> dense = Dense(torch.tensor([[4.0, 0.0], [0.0, 9.0]]), torch.zeros(2), torch.tensor(1.0))
            >>> dense.factorised().factor
            tensor([[2., 0.],
                    [0., 3.]])
        """

    @abstractmethod
    def diag(self) -> Tree:
        """Return the diagonal of the precision.

        Returns:
            A tree like the params, in float32 at least.

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Root
            >>> Root(torch.tensor([[1.0, 2.0], [1.0, 0.0]]), torch.tensor(2.0)).diag()
            tensor([2., 4.])
        """

    def entries(self) -> Tree:
        """Return numbers by which it can be seen whether the precision is finite: the diagonal, or what costs less.

        Returns:
            A tree with one tensor for each leaf.

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Diagonal
            >>> Diagonal(torch.tensor([1.0, float("nan")]), torch.tensor(1.0)).entries().isfinite()
            tensor([ True, False])
        """
        return self.diag()

    @abstractmethod
    def quad(self, tree: Tree) -> Tensor:
        """Return ``x^T Lambda x``.

        Args:
            tree: x, like the params, or a batch of such trees, leaves ``[*lead, *leaf.shape]``.

        Returns:
            ``[*lead]``.

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Diagonal
            >>> Diagonal(torch.tensor([1.0, 2.0]), torch.tensor(1.0)).quad(torch.tensor([[1.0, 1.0], [0.0, 3.0]]))
            tensor([ 3., 18.])
        """

    def times(self, tree: Tree) -> Tree:
        """Return ``Lambda x``.

        Args:
            tree: x, like the params, or a batch of such trees, leaves ``[*lead, *leaf.shape]``.

        Returns:
            A tree like x.

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Diagonal
            >>> Diagonal(torch.tensor([1.0, 2.0]), torch.tensor(1.0)).times(torch.tensor([3.0, 3.0]))
            tensor([3., 6.])
        """
        # Half the gradient of the quadratic form, which every structure has; those that know better override this.
        leaves, structure = optree.tree_flatten(tree)

        def half(leaves: list[Tensor]) -> Tensor:
            return 0.5 * self.quad(optree.tree_unflatten(structure, leaves)).sum()

        return optree.tree_unflatten(structure, torch.func.grad(half)(leaves))

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Return the precision as a matrix, which takes ``P^2`` numbers.

        Returns:
            ``[P, P]``, the leaves flattened in optree order.

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Diagonal
            >>> Diagonal({"a": torch.tensor(1.0), "b": torch.tensor([2.0])}, torch.tensor(1.0)).to_dense()
            tensor([[1., 0.],
                    [0., 2.]])
        """

    def as_rows(self) -> Tree:
        """Return rows with ``Lambda = rows^T rows``, as a square-root filter takes them.

        Returns:
            A tree like the params of leaves ``[M, *leaf.shape]``.

        Raises:
            TypeError: for a structure that is not made of rows.
            ValueError: for an indefinite precision.

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Root
            >>> Root(torch.tensor([[1.0, 2.0]]), torch.tensor(1.0)).as_rows()
            tensor([[1., 2.]])
        """
        raise TypeError(f"a precision of class {type(self).__name__} is not made of rows")

    def layer_bases(self) -> list[LayerBases] | None:
        """Return, leaf by leaf, the basis in which a decomposed precision is diagonal.

        Returns:
            One :class:`LayerBases` for each leaf; None for a structure that correlates leaves or has no such basis.

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Diagonal
            >>> Diagonal(torch.tensor([1.0, 2.0]), torch.tensor(1.0)).layer_bases()[0].values
            tensor([1., 2.])
        """
        return None

    def lower_factor(self) -> Tensor | None:
        """Return L with ``Lambda = L L^T`` where a decomposed precision holds it.

        With it ``J Lambda^-1 J^T = V^T V`` takes one triangular system, ``L V = J^T``, where ``solve`` takes two.

        Returns:
            ``[P, P]``, lower triangular, leaves in optree order; None for a structure that does not hold it.

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Dense
            >>> Dense(torch.tensor([[4.0]]), torch.zeros(1), torch.tensor(1.0)).factorised().lower_factor()
            tensor([[2.]])
        """
        return None

    def solve(self, tree: Tree) -> Tree:
        """Return ``Lambda^-1 x``.

        Args:
            tree: x, like the params, or a batch of such trees, leaves ``[*lead, *leaf.shape]``.

        Returns:
            A tree like x.

        Raises:
            ValueError: for a precision that is not positive definite (names the leaf).

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Diagonal
            >>> Diagonal(torch.tensor([1.0, 2.0]), torch.tensor(1.0)).solve(torch.tensor([3.0, 3.0]))
            tensor([3.0000, 1.5000])
        """
        return self.factorised().solve(tree)

    def sqrt_solve(self, tree: Tree) -> Tree:
        """Return ``R x`` with ``R R^T = Lambda^-1``: of white noise x it makes a draw with the covariance ``Lambda^-1``.

        Args:
            tree: x, like the params, or a batch of such trees, leaves ``[*lead, *leaf.shape]``.

        Returns:
            A tree like x.

        Raises:
            ValueError: for a precision that is not positive definite (names the leaf).

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Diagonal
            >>> Diagonal(torch.tensor([1.0, 4.0]), torch.tensor(1.0)).sqrt_solve(torch.ones(2))
            tensor([1.0000, 0.5000])
        """
        return self.factorised().sqrt_solve(tree)

    def logdet(self) -> Tensor:
        """Return the log determinant ``log |Lambda|``.

        Returns:
            0-d, differentiable in whatever the precision depends on.

        Raises:
            ValueError: for a precision that is not positive definite (names the leaf).

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Diagonal
            >>> Diagonal(torch.tensor([1.0, 2.0]), torch.tensor(1.0)).logdet()
            tensor(0.6931)
        """
        return self.factorised().logdet()

    def inverse_diag(self) -> Tree:
        """Return the diagonal of ``Lambda^-1``: the marginal variances, in the parameters' units squared.

        Returns:
            A tree like the params, in float32 at least.

        Raises:
            ValueError: for a precision that is not positive definite (names the leaf).

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Diagonal
            >>> Diagonal(torch.tensor([1.0, 2.0]), torch.tensor(1.0)).inverse_diag()
            tensor([1.0000, 0.5000])
        """
        return self.factorised().inverse_diag()


def like(tree: Tree, other: Tree) -> Tree:
    """Bring an answer into the dtypes of the question."""
    return optree.tree_map(lambda leaf, asked: leaf.to(asked.dtype), tree, other)


def require_same_structure(left: Precision, right: Any, *accepted: type) -> None:
    """Raise ``TypeError`` unless ``right`` is one of the classes that can be added to ``left``."""
    if not isinstance(right, accepted or (type(left),)):
        raise TypeError(
            f"cannot add {type(right).__name__} to {type(left).__name__}: one posterior has one structure; "
            "build every estimator with the same structure= (and give a new structure a new state)"
        )


class Zero(NamedTuple("_Zero", [("count", Tensor)]), Precision):
    """No data, no structure: the neutral element of ``add``.

    Attributes:
        count: 0-d, the number of data.

    Example:
        >>> import torch
        >>> from bayesopt_chain.precision import Diagonal, Zero
        >>> Zero(torch.tensor(0.0)).add(Diagonal(torch.ones(2), torch.tensor(3.0))).count
        tensor(3.)
    """

    __slots__ = ()

    def add(self, other: Any) -> Any:
        return other

    def scale(self, factor: float | Tensor) -> Zero:
        return Zero(self.count * factor)

    def add_diagonal(self, value: Any) -> Any:
        raise ValueError("no curvature has been accumulated: call update(..., curvature=increment) at least once")

    factorised = diag = to_dense = lambda self: self.add_diagonal(None)

    def quad(self, tree: Any) -> Any:
        return self.add_diagonal(None)


class Diagonalised(Precision):
    """Tensors of eigenvalues, one for each leaf, in a basis in which sums stay diagonal.

    Attributes:
        values: a tree of the structure of the params.
    """

    __slots__ = ()
    values: Tree
    _replace: Any  # of the named tuple

    def add(self, other: Any) -> Any:
        require_same_structure(self, other)
        require_like(other.values, self.values, "the increment")
        values = optree.tree_map(torch.add, self.values, other.values)
        return self._replace(values=values, count=self.count + other.count)

    def scale(self, factor: float | Tensor) -> Any:
        return self._replace(values=scaled(self.values, factor), count=self.count * factor)

    def add_diagonal(self, value: Any) -> Any:
        leaves, structure = optree.tree_flatten(self.values)
        sums = [leaf + d for leaf, d in zip(leaves, self._spread(value))]
        return self._replace(values=optree.tree_unflatten(structure, sums))

    def _spread(self, value: Any) -> list[Tensor]:
        """What a diagonal adds to the eigenvalues of each leaf."""
        return spread(value, self.values, "the diagonal")

    def factorised(self) -> Any:
        for name, leaf in zip(paths(self.values), optree.tree_leaves(self.values)):
            require_positive(leaf, name)
        return self

    def logdet(self) -> Tensor:
        return reduce(torch.add, (leaf.log().sum() for leaf in optree.tree_leaves(self.values)))

    def entries(self) -> Tree:
        return self.values


class Diagonal(NamedTuple("_Diagonal", [("values", Tree), ("count", Tensor)]), Diagonalised):
    """A diagonal precision.

    Attributes:
        values: a tree like the params.
        count: 0-d, the number of data.

    Example:
        >>> import torch
        >>> from bayesopt_chain.precision import Diagonal
        >>> precision = Diagonal({"w": torch.tensor([1.0, 3.0])}, torch.tensor(2.0)).add_diagonal(1.0)
        >>> precision.solve({"w": torch.ones(2)})
        {'w': tensor([0.5000, 0.2500])}
    """

    __slots__ = ()

    def solve(self, tree: Tree) -> Tree:
        return like(optree.tree_map(torch.div, tree, self.values), tree)

    def sqrt_solve(self, tree: Tree) -> Tree:
        return like(optree.tree_map(lambda x, v: x / v.sqrt(), tree, self.values), tree)

    def diag(self) -> Tree:
        return self.values

    def inverse_diag(self) -> Tree:
        return optree.tree_map(torch.reciprocal, self.values)

    def quad(self, tree: Tree) -> Tensor:
        return inner(tree, optree.tree_map(torch.mul, tree, self.values), self.values)

    def times(self, tree: Tree) -> Tree:
        return like(optree.tree_map(torch.mul, tree, self.values), tree)

    def to_dense(self) -> Tensor:
        return torch.diag(flatten(self.values, self.values))

    def layer_bases(self) -> list[LayerBases]:
        return [LayerBases(None, None, values) for values in optree.tree_leaves(self.values)]
