"""A precision whose parts ignore one another, each with a structure of its own.

Lambda = blockdiag(Lambda_1, Lambda_2, ...)
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.precision._algebra import Precision, require_same_structure
from bayesopt_chain.trees import Tree, shape_only, spread


class Block(NamedTuple("_Block", [("blocks", Tree), ("count", Tensor)]), Precision):
    """A block-diagonal precision.

    Attributes:
        blocks: a tree with the structure of the params that holds a precision over one bare tensor in the place of
            every leaf.
        count: 0-d, the number of data.

    Example:
        >>> import torch
        >>> from bayesopt_chain.precision import Block, Diagonal
        >>> one = torch.tensor(1.0)
        >>> Block({"a": Diagonal(torch.tensor([2.0]), one), "b": Diagonal(torch.tensor(4.0), one)}, one).diag()
        {'a': tensor([2.]), 'b': tensor(4.)}
    """

    __slots__ = ()

    def add(self, other: Block) -> Block:
        require_same_structure(self, other)
        mine, its = self._structure(), other._structure()
        if mine != its:
            raise ValueError(f"the increment has the blocks {its}, not {mine}: one posterior has one tree")
        blocks = self._named(lambda block, increment: block.add(increment), other._list())
        return Block(optree.tree_unflatten(mine, blocks), self.count + other.count)

    def scale(self, factor: float | Tensor) -> Block:
        return Block(self._each(lambda block: block.scale(factor)), self.count * factor)

    def add_diagonal(self, value: Any) -> Block:
        like = self._each(lambda block: shape_only(block.diag()))
        blocks = [block.add_diagonal(d) for block, d in zip(self._list(), spread(value, like, "the diagonal"))]
        return self._replace(blocks=optree.tree_unflatten(self._structure(), blocks))

    def factorised(self) -> Block:
        blocks = self._named(lambda block: block.factorised())
        return self._replace(blocks=optree.tree_unflatten(self._structure(), blocks))

    def solve(self, tree: Tree) -> Tree:
        return self._each(lambda block, x: block.solve(x), tree)

    def sqrt_solve(self, tree: Tree) -> Tree:
        return self._each(lambda block, x: block.sqrt_solve(x), tree)

    def logdet(self) -> Tensor:
        return reduce(torch.add, (block.logdet() for block in self._list()))

    def diag(self) -> Tree:
        return self._each(lambda block: block.diag())

    def inverse_diag(self) -> Tree:
        return self._each(lambda block: block.inverse_diag())

    def quad(self, tree: Tree) -> Tensor:
        return reduce(torch.add, (block.quad(x) for block, x in zip(self._list(), optree.tree_leaves(tree))))

    def to_dense(self) -> Tensor:
        return torch.block_diag(*(block.to_dense() for block in self._list()))

    def _each(self, function: Any, *trees: Tree) -> Tree:
        return optree.tree_map(function, self.blocks, *trees, is_leaf=_is_block)

    def _named(self, function: Any, *lists: list[Any]) -> list[Any]:
        """Call a function block by block; an error names the block."""
        names = [".".join(map(str, path)) for path in optree.tree_paths(self.blocks, is_leaf=_is_block)]
        results = []
        for name, *arguments in zip(names, self._list(), *lists):
            try:
                results.append(function(*arguments))
            except ValueError as error:
                raise ValueError(f"the block of {name}: {error}") from None
        return results

    def _list(self) -> list[Any]:
        return optree.tree_leaves(self.blocks, is_leaf=_is_block)

    def _structure(self) -> Any:
        return optree.tree_structure(self.blocks, is_leaf=_is_block)


def _is_block(node: Any) -> bool:
    return isinstance(node, Precision)
