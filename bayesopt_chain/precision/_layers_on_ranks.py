r"""Kronecker factors of a model that is sharded over ranks: each rank keeps the factors of some layers, whole.

Lambda = the blocks of all leaves; a block is on one rank, its owner, whatever parts of the leaf the ranks hold.

A factor of a layer couples all elements of its weight, so that no rank can ask anything of it with its part of the weight.
Questions go one leaf after the other:

    x_leaf   all-gather ->  the whole of x_leaf  ->  its owner asks its block  ->  broadcast  ->  each rank's part of the answer

with two messages for each leaf, and no more memory than one whole leaf beside the factors that the rank owns. Sums over leaves
(log determinants, quadratic forms) take one message for all of them. K-FAC: Martens and Grosse (2015); owners of layers: Osawa,
Tsuji, Ueno, Naruse, Yokota and Matsuoka (2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain._torch import is_dtensor, local_of, spec_of, stacked_spec
from bayesopt_chain.precision._algebra import Precision, require_positive, require_same_structure
from bayesopt_chain.precision._kronecker import Eigenbasis, Kronecker, _scalars
from bayesopt_chain.trees import Tree, require_like, wide


class LayersOnRanks(
    NamedTuple("_LayersOnRanks", [("mine", Any), ("like", dict[str, Any]), ("owners", Tensor), ("count", Tensor)]),
    Precision,
):
    """A Kronecker precision over parameters that are spread over ranks, of which each rank owns some leaves.

    :func:`bayesopt_chain.curvature.kronecker_by_backward` makes it. Every method is to be called on all ranks.

    Attributes:
        mine: :class:`Kronecker`, or decomposed :class:`Eigenbasis`, over the leaves that this rank owns, by name.
        like: all parameters by name, DTensors that take no memory.
        owners: for each of them the rank that owns it, by its place in the mesh, ``[leaves]``, int64, on the CPU.
        count: 0-d, the number of data.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> from bayesopt_chain.precision import LayersOnRanks
        >>> LayersOnRanks._fields
        ('mine', 'like', 'owners', 'count')
    """

    __slots__ = ()

    def add(self, other: LayersOnRanks) -> LayersOnRanks:
        require_same_structure(self, other)
        require_like(other.like, self.like, "the increment")
        if not torch.equal(self.owners, other.owners):
            raise ValueError(
                "the two precisions have other owners of their layers: estimate both over the same mesh and the same parameters"
            )
        return self._replace(mine=self.mine.add(other.mine), count=self.count + other.count)

    def scale(self, factor: float | Tensor) -> LayersOnRanks:
        return self._replace(mine=self.mine.scale(factor), count=self.count * factor)

    def add_diagonal(self, value: Any) -> LayersOnRanks:
        scalars = dict(zip(sorted(self.like), _scalars(value, self.like)))
        return self._replace(mine=self.mine.add_diagonal({name: scalars[name] for name in self.mine.like}))

    def factorised(self) -> LayersOnRanks:
        if isinstance(self.mine, Eigenbasis):
            return self
        mine = self.mine.eigenbasis()
        least = self._of_leaves(lambda block: block.values.min(), mine, math.inf, dist.ReduceOp.MIN)
        for name, value in least.items():  # on every rank, whoever owns it
            require_positive(value, name)
        return self._replace(mine=mine)

    def entries(self) -> Tree:
        def seen(block: Any) -> Tensor:
            return torch.stack([(x.detach() * 0).sum() for x in optree.tree_leaves(block)]).sum()

        return self._of_leaves(seen, self.mine, 0.0, dist.ReduceOp.SUM)

    def solve(self, tree: Tree) -> Tree:
        return self.factorised()._answers(lambda block, x: block.solve(x), tree)

    def sqrt_solve(self, tree: Tree) -> Tree:
        return self.factorised()._answers(lambda block, x: block.sqrt_solve(x), tree)

    def diag(self) -> Tree:
        return self._answers(lambda block, x: block.diag())

    def inverse_diag(self) -> Tree:
        return self.factorised()._answers(lambda block, x: block.inverse_diag())

    def logdet(self) -> Tensor:
        decomposed = self.factorised()
        own = [decomposed._block(name).logdet() for name in decomposed.mine.like]
        return decomposed._sum(own, ())

    def quad(self, tree: Tree) -> Tensor:
        require_like(tree, self.like, "the tree", batched=True)
        lead: tuple[int, ...] = ()
        own: list[Tensor] = []
        for name, like in self.like.items():
            x = _whole(tree[name])
            lead = tuple(x.shape[: x.ndim - like.ndim])
            if name in self.mine.like:
                own.append(self._block(name).quad(x))
        return self._sum(own, lead)

    def to_dense(self) -> Tensor:
        """Refuse, since one rank would have to hold the layers of all.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a precision whose layers are on several ranks is not made dense: ask it for solve, diag or logdet"
        )

    def _block(self, name: str, mine: Any = None) -> Any:
        """The precision of one leaf that this rank owns."""
        mine = self.mine if mine is None else mine
        return type(mine)(*[field[name] if isinstance(field, dict) else field for field in mine])

    @property
    def _mesh(self) -> Any:
        return next(iter(self.like.values())).device_mesh

    def _answers(self, ask: Callable[[Any, Any], Tensor], tree: Tree = None) -> Tree:
        """What the owner of each leaf answers to a whole leaf of ``tree``, as DTensors laid out like the parameters."""
        if tree is not None:
            require_like(tree, self.like, "the tree", batched=True)
        out: dict[str, Tensor] = {}
        for (name, like), owner in zip(self.like.items(), self.owners.tolist()):
            x = None if tree is None else _whole(tree[name])
            shape, dtype = (like.shape, wide(like.dtype)) if x is None else (x.shape, x.dtype)
            if name in self.mine.like:
                answer = ask(self._block(name), x).detach().to(dtype).contiguous()
            else:
                answer = torch.empty(shape, dtype=dtype, device=local_of(like).device)
            out[name] = _part(broadcast(answer, self._mesh, owner), like)
        return out

    def _of_leaves(self, ask: Callable[[Any], Tensor], mine: Any, nothing: float, how: Any) -> dict[str, Tensor]:
        """A number that the owner of each leaf finds in its block, 0-d on all ranks; in a minimum NaN is minus infinity."""
        device = local_of(next(iter(self.like.values()))).device
        values = torch.full((len(self.like),), nothing, dtype=torch.float64, device=device)
        for i, name in enumerate(self.like):
            if name in mine.like:
                value = ask(self._block(name, mine)).detach().to(values)
                values[i] = torch.where(value.isnan(), -math.inf, value) if how == dist.ReduceOp.MIN else value
        for axis in range(self._mesh.ndim):
            dist.all_reduce(values, how, group=self._mesh.get_group(axis))
        return dict(zip(self.like, values))

    def _sum(self, own: list[Tensor], lead: tuple[int, ...]) -> Tensor:
        """The sum over the leaves of all ranks."""
        leaves = list(self.like.values())
        dtype = torch.float32
        for leaf in leaves:
            dtype = torch.promote_types(dtype, leaf.dtype)
        total = torch.zeros(lead, dtype=dtype, device=local_of(leaves[0]).device)
        for x in own:
            total = total + x.detach()
        for axis in range(self._mesh.ndim):
            dist.all_reduce(total, group=self._mesh.get_group(axis))
        return total


def owners_of(units: list[list[tuple[int, ...]]], ranks: int) -> list[int]:
    """Which rank owns each layer, so that the decompositions take all ranks about equally long.

    Args:
        units: for each layer the sizes of its factors.
        ranks: how many there are.

    Returns:
        For each layer a rank: the largest layers first, each to the rank that has least to do.

    Example:
        >>> owners_of([[(2, 2)], [(4, 4), (1, 1)], [(3, 3)], [(1, 1)]], 2)
        [1, 0, 1, 1]
    """
    work = [sum(max(size) ** 3 for size in sizes) for sizes in units]
    load, out = [0] * ranks, [0] * len(units)
    for i in sorted(range(len(units)), key=lambda i: (-work[i], i)):
        out[i] = load.index(min(load))
        load[out[i]] += work[i]
    return out


def coordinate_of(place: int, mesh: Any) -> list[int]:
    """The coordinate of a rank in a mesh by its place, counted row by row."""
    out: list[int] = []
    for n in reversed(mesh.shape):
        out.insert(0, place % n)
        place //= n
    return out


def broadcast(x: Tensor, mesh: Any, owner: int) -> Tensor:
    """The owner's tensor on all ranks of a mesh, written over ``x``; a message for each axis."""
    for axis, i in enumerate(coordinate_of(owner, mesh)):  # the last one overwrites what did not come from the owner
        dist.broadcast(x, group=mesh.get_group(axis), group_src=i)
    return x


def collect(x: Tensor, mesh: Any, owner: int) -> Tensor:
    """The sum over all ranks of a mesh, at its owner, written over ``x``; elsewhere what is left of it."""
    for axis, i in enumerate(coordinate_of(owner, mesh)):
        dist.reduce(x, group=mesh.get_group(axis), group_dst=i)
    return x


def _whole(x: Any) -> Tensor:
    if not is_dtensor(x):
        raise ValueError("the tree holds a plain tensor where the parameter is a DTensor: distribute it likewise")
    return x.full_tensor().detach()


def _part(x: Tensor, like: Any) -> Any:
    """A whole tensor, the same on all ranks, laid out like a parameter, with ``x.ndim - like.ndim`` axes in front."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh, axes = like.device_mesh, x.ndim - like.ndim
    placements = stacked_spec(spec_of(like), x, axes).placements
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(mesh, placements)


def kronecker_of_own(units: list[tuple[list[str], Kronecker]], count: Tensor) -> Kronecker:
    """The layers that a rank owns as one precision, by the names of their leaves."""
    left, right, diagonal, like = ({} for _ in range(4))
    for names, block in units:
        for name in names:
            left[name], right[name] = block.left[name], block.right[name]
            diagonal[name], like[name] = block.diagonal[name], block.like[name]
    return Kronecker(left, right, diagonal, like, count)
