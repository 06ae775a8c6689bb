"""A precision that ignores every correlation, so that it costs what the parameters cost.

Lambda = diag(d)
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.precision._algebra import (
    LayerBases,
    Precision,
    like,
    require_same_structure,
)
from bayesopt_chain.trees import Tree, flatten, inner, paths, require_like, require_positive, scaled, spread


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
