"""Parameter trees as vectors: the few tree operations that every precision needs, each with leading batch axes.

A tree ``x`` is "like" another when it has the same structure and every leaf ends in the shape of its counterpart;
what stands before that shape, ``lead``, is a batch of vectors, the same for all leaves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import reduce
from operator import is_
from types import NoneType
from typing import Any, cast

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.tracing import is_hidden, is_traced, is_transformed

Tree = Any


def paths(tree: Tree) -> list[str]:
    """Name the leaves of a tree, in optree order, as a user would: ``layer.0.weight``; ``parameters`` for a bare tensor."""
    return [".".join(map(str, path)) or "parameters" for path in optree.tree_paths(tree)]


def paths_of(tree: Any) -> tuple[str, ...]:
    """Return the leaves' paths as text: ``['layer']['weight']``; empty for a bare tensor. ``None`` counts as a leaf."""
    return tuple(["".join([f"[{part!r}]" for part in path]) for path in optree.tree_paths(tree, none_is_leaf=True)])


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree, ``None`` among them, each with its path as text, such as ``state/0/trace/w``.

    Raises:
        ValueError: two leaves have the same path.
    """
    accessors, leaves = optree.tree_accessors(tree, none_is_leaf=True), optree.tree_leaves(tree, none_is_leaf=True)
    paths = [[str(getattr(x, "field", x.entry)) for x in accessor] for accessor in accessors]
    named = dict(zip(names := ["/".join(path) or "tensor" for path in paths], leaves))
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise ValueError(f"tree: two leaves are named {twice[0]}; rename a key that contains '/'")
    return named


def are_spread(tree: Any) -> bool:
    """Whether any leaf of a tree is a DTensor."""
    return any(map(is_dtensor, optree.tree_leaves(tree)))


def entries_of(state: Any) -> Sequence[Any]:
    """The entries of a state: of a wrapper's or a step's those of the chain inside, and an entry alone as a list of one."""
    while hasattr(state, "inner"):
        state = state.inner
    is_entry = hasattr(state, "_fields") or not issubclass(type(state), (tuple, list))
    return [state] if is_entry else state


_LEAVES = frozenset((Tensor, torch.nn.Parameter, NoneType))
# structures of one dictionary, list or tuple of tensors, by class and length: the last one met, and its keys in order
_flat: dict[tuple[type, int], tuple[tuple[Any, ...], optree.PyTreeSpec]] = {}


def leaves_of(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of a tree, ``None`` among them, and its structure, as ``optree.tree_flatten`` does.

    optree looks up the class of every leaf. For one container of tensors, like another that was met before, there is nothing
    to look up, and this takes a fraction of the time.
    """
    if (kind := type(tree)) not in (dict, list, tuple):
        return optree.tree_flatten(tree, none_is_leaf=True)
    keys, structure = _flat.get((kind, len(tree)), ((), None))
    if (
        structure is not None
        and all(map(is_, keys, tree))  # equal ones may differ, such as 1 and True
        and _LEAVES.issuperset(map(type, found := structure.flatten_up_to(tree)))
    ):
        return found, structure
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    if spec.num_nodes == len(leaves) + 1:
        _flat[kind, len(tree)] = (*tree,) if kind is dict else (), spec
    return leaves, spec


def has_leaves(tree: Any, structure: optree.PyTreeSpec, leaves: Collection[Any]) -> bool:
    """Whether a tree of this structure holds these very leaves, which takes a tenth of the time of flattening it.

    A dictionary of another class with the same keys counts as of the same structure.
    """
    try:
        found = structure.flatten_up_to(tree)
    except ValueError:
        return False
    return len(found) == len(leaves) and all(map(is_, found, leaves))


def broadcast_prefix(prefix: Any, tree: Any, what: str = "mask (or labels)") -> list[Any]:
    """Return the leaf of ``prefix`` that stands above each leaf of ``tree``, whose top it is like.

    Raises:
        ValueError: the structures do not fit; the message calls the prefix ``what``.
    """
    try:
        return optree.broadcast_prefix(prefix, tree, none_is_leaf=True)
    except ValueError as err:
        raise ValueError(f"{what} is no tree like the parameters, nor a prefix of one: {err}") from None


def outline(structure: optree.PyTreeSpec) -> str:
    """Write a structure as its containers would be written, with a star for each leaf.

    Example:
        >>> outline(optree.tree_structure({"b": (0, 1), "w": 2}))
        "{'b': (*, *), 'w': *}"
    """
    try:
        return repr(structure.unflatten(["*"] * structure.num_leaves)).replace("'*'", "*")
    except Exception:  # a registered class may compute with what it is made of
        return str(structure)


def size(tree: Tree) -> int:
    """Count the numbers in a tree."""
    return sum(leaf.numel() for leaf in optree.tree_leaves(tree))


def copied(tree: Any) -> Any:
    """Copy the tensors of a tree, so that a step in place leaves them alone.

    Example:
        >>> import torch
        >>> from bayesopt_chain.trees import copied
        >>> p = {"w": torch.ones(2, requires_grad=True)}
        >>> copied(p)
        {'w': tensor([1., 1.])}
    """
    return optree.tree_map(lambda x: x.detach().clone(), tree)


@checks.takes(tree=checks.TREE)
def shape_only(tree: Tree) -> Tree:
    """Return zeros of the leaves' shapes that share one element of storage: a template that costs no memory.

    Args:
        tree: of tensors.

    Returns:
        A tree with the same shapes, dtypes and devices.

    Raises:
        AttributeError: a leaf that is no tensor.

    Example:
        >>> import torch
        >>> shape_only([torch.ones(1000, 1000)])[0].untyped_storage().nbytes()
        4
    """
    return optree.tree_map(lambda leaf: leaf.detach().new_zeros(()).expand(leaf.shape), tree)


def widened(tree: Tree) -> Tree:
    """Return :func:`shape_only` of a tree in the dtypes in which sums over data are held."""
    return optree.tree_map(lambda leaf: leaf.detach().new_zeros((), dtype=wide(leaf.dtype)).expand(leaf.shape), tree)


def common_dtype(tree: Tree) -> torch.dtype:
    """Return the dtype in which the leaves of a tree can be held together, float32 at least."""
    return reduce(torch.promote_types, (leaf.dtype for leaf in optree.tree_leaves(tree)), torch.float32)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over data are held: float32 at least, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def upcast(tree: Tree) -> Tree:
    """Bring the leaves into the dtypes of :func:`wide`; ``None`` stays, and so does what is wide."""
    return optree.tree_map(lambda leaf: leaf.to(wide(leaf.dtype)), tree)


def require_positive(values: Tensor, name: str) -> None:
    """Raise ``ValueError`` where values that must be positive are not; inside a transform nothing can be checked."""
    if not is_hidden(values) and not bool((values > 0).all()):
        raise ValueError(
            f"the precision is singular or indefinite at {name} (smallest value {values.min().item():.3g}): "
            "pass a larger prior_precision, or more data"
        )


def require_like(tree: Tree, like: Tree, name: str, batched: bool = False) -> None:
    """Raise unless ``tree`` is like ``like``; the message calls it ``name`` and says which leaf differs."""
    structure, wanted = optree.tree_structure(tree), optree.tree_structure(like)
    if structure != wanted:
        raise ValueError(
            f"{name} has the tree {outline(structure)}, not {outline(wanted)}: pass a tree with the structure of the params"
        )
    for path, leaf, other in zip(paths(like), optree.tree_leaves(tree), optree.tree_leaves(like)):
        tail = leaf.shape[leaf.ndim - other.ndim :] if batched and leaf.ndim >= other.ndim else leaf.shape
        if tail != other.shape:
            raise ValueError(f"{name} at {path} has shape {tuple(leaf.shape)}, the parameter {tuple(other.shape)}")


def flatten(tree: Tree, like: Tree) -> Tensor:
    """Concatenate a tree like ``like`` into one tensor ``[*lead, P]``, the leaves in optree order.

    Args:
        tree: leaves ``[*lead, *leaf.shape]``, with one ``lead`` for all.
        like: the tree that says where the leaves' own axes begin.

    Returns:
        A tensor in the widest dtype of the leaves, float32 at least.

    Raises:
        ValueError: a tree of another structure, or a leaf that does not end in the shape of its counterpart.

    Example:
        >>> import torch
        >>> flatten({"a": torch.ones(2), "b": torch.zeros(1, 1)}, {"a": torch.ones(2), "b": torch.zeros(1, 1)})
        tensor([1., 1., 0.])
    """
    require_like(tree, like, "the tree", batched=True)
    dtype = common_dtype(tree)
    pieces = [
        leaf.reshape(*leaf.shape[: leaf.ndim - other.ndim], other.numel()).to(dtype)
        for leaf, other in zip(optree.tree_leaves(tree), optree.tree_leaves(like))
    ]
    return torch.cat(pieces, dim=-1)


@checks.takes(vector=checks.instance(Tensor, "a tensor [*lead, P]"), like=checks.TREE)
def unflatten(vector: Tensor, like: Tree) -> Tree:
    """Cut ``[*lead, P]`` into leaves ``[*lead, *leaf.shape]`` in the dtypes of ``like``: the inverse of flatten.

    Args:
        vector: ``[*lead, P]``.
        like: a tree with ``P`` numbers.

    Returns:
        A tree like ``like``, on its devices.

    Raises:
        RuntimeError: a vector of another length.

    Example:
        >>> import torch
        >>> unflatten(torch.tensor([1.0, 2.0, 3.0]), {"a": torch.ones(2), "b": torch.zeros(1, 1)})
        {'a': tensor([1., 2.]), 'b': tensor([[3.]])}
    """
    leaves, structure = optree.tree_flatten(like)
    pieces = vector.split([leaf.numel() for leaf in leaves], dim=-1)
    shaped = [
        piece.reshape((*vector.shape[:-1], *leaf.shape)).to(device=leaf.device, dtype=leaf.dtype)
        for piece, leaf in zip(pieces, leaves)
    ]
    return optree.tree_unflatten(structure, shaped)


def is_bit(entry: Any) -> bool:
    """Whether an entry of a mask can be true or false: a number, or a 0-d tensor or array.

    Raises:
        TypeError: it cannot.
    """
    if isinstance(entry, (bool, int)) or getattr(entry, "ndim", None) == 0:
        return True
    raise TypeError(f"masked: mask must be a tree of True and False, or a function to one; it has {entry!r:.80}")


def all_finite(leaves: Iterable[Any]) -> Tensor:
    """Whether no entry of any tensor is NaN or infinite, as a 0-d boolean tensor; what is no tensor does not matter."""
    if is_transformed() or is_traced():
        flags = [torch.isfinite(x).all() for x in _with_fractions(leaves)]
    else:
        flags = [torch.isfinite(torch.stack(x)).all() for x in _extremes(leaves).values()]
    if not flags:
        return torch.ones((), dtype=torch.bool, device="cpu")
    return flags[0] if len(flags) == 1 else torch.stack([ok.to(flags[0].device) for ok in flags]).all()


def found_finite(leaves: Iterable[Any]) -> bool:
    """What ``all_finite`` says, read from each device once; half of its time where the tensors are small."""
    return all(math.isfinite(v) for x in _extremes(leaves).values() for v in torch.stack(x).tolist())


def _extremes(leaves: Iterable[Any]) -> dict[torch.device, list[Tensor]]:
    """The smallest and the largest entry of each tensor, by device: a NaN is both of them at once.

    One pass that allocates nothing, 10 times faster than to look at every entry.
    """
    extremes: dict[torch.device, list[Tensor]] = {}
    for x in _with_fractions(leaves):
        x = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
        extremes.setdefault(x.device, []).extend(torch.aminmax(x))
    return extremes


def _with_fractions(leaves: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that can hold what is not finite, without the zeros of sparse ones that are not stored."""
    for x in leaves:
        if isinstance(x, Tensor) and x.is_sparse:
            x = x.values() if x.is_coalesced() else x.to_dense()
        if isinstance(x, Tensor) and x.numel() and (x.is_floating_point() or x.is_complex()):
            yield x


def as_tensor(value: Any, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """``torch.as_tensor`` that fills a number in on the device: a copy from the host could not be captured."""
    if isinstance(value, (int, float)):
        return torch.full((), value, dtype=dtype, device=device)
    return torch.as_tensor(value, dtype=dtype, device=device)


def scaled(tree: Tree, factor: float | Tensor) -> Tree:
    """Multiply the leaves by a number, each in its own dtype (a 0-d leaf would take on that of a 0-d factor)."""
    return optree.tree_map(lambda leaf: leaf * (factor.to(leaf) if isinstance(factor, Tensor) else factor), tree)


def inner(left: Tree, right: Tree, like: Tree) -> Tensor:
    """Return the inner products ``[*lead]`` of two trees like ``like``."""
    leaves: Any = zip(*map(optree.tree_leaves, (left, right, like)))
    # over one axis more than a leaf has: of no axes torch would take the sum over all
    return reduce(torch.add, [(a * b)[..., None].sum(tuple(range(-1 - other.ndim, 0))) for a, b, other in leaves])


def spread(value: Any, like: Tree, name: str) -> list[Tensor]:
    """Turn a number, a one-element tensor or a tree of tensors that broadcast to the leaves into one tensor a leaf.

    Every tensor gets as many axes as its leaf, or none, and the leaf's dtype, float32 at least; it is not expanded.
    """
    leaves, structure = optree.tree_flatten(like)
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
        return [as_tensor(value, wide(leaf.dtype), leaf.device).reshape(()) for leaf in leaves]
    values, given = optree.tree_flatten(cast(Any, value))
    if given != structure:
        raise ValueError(
            f"{name} has the tree {outline(given)}, not {outline(structure)}: pass a number, or a tree like the params"
        )
    spread_out = []
    for path, entry, leaf in zip(paths(like), values, leaves):
        entry = as_tensor(entry, wide(leaf.dtype), leaf.device)
        if not checks.is_spread(entry.shape, leaf.shape):
            raise ValueError(
                f"{name} at {path} has shape {tuple(entry.shape)}, which does not broadcast to {leaf.shape}"
            )
        spread_out.append(entry.reshape(()) if entry.numel() == 1 else entry)
    return spread_out


def first(rows: Tree) -> Tree:
    """Return the tree of the leaves' first rows: what a tree of rows is rows of."""
    return optree.tree_map(lambda leaf: leaf.detach().new_zeros(()).expand(leaf.shape[1:]), rows)


def combine(coefficients: Tensor, rows: Tree) -> Tree:
    """Return ``coefficients @ rows``: leaves ``[*lead, *leaf.shape]`` from ``[*lead, M]`` and leaves ``[M, *leaf.shape]``."""

    def of_leaf(leaf: Tensor) -> Tensor:  # torch.tensordot takes four times as long for small ones
        flat = leaf.reshape(len(leaf), leaf.shape[1:].numel())
        return (coefficients.to(leaf.dtype) @ flat).reshape((*coefficients.shape[:-1], *leaf.shape[1:]))

    return optree.tree_map(of_leaf, rows)


def project(rows: Tree, tree: Tree) -> Tensor:
    """Return the inner products ``[*lead, M]`` of a tree like ``first(rows)`` with each of the rows."""
    leaves = zip(optree.tree_leaves(tree), optree.tree_leaves(rows))
    each = [x.reshape(*x.shape[: x.ndim - r.ndim + 1], -1) @ r.reshape(r.shape[0], -1).mT for x, r in leaves]
    return reduce(torch.add, each)


def gram(rows: Tree) -> Tensor:
    """Return the matrix ``[M, M]`` of inner products between rows."""
    flat = [row.reshape(row.shape[0], math.prod(row.shape[1:])) for row in optree.tree_leaves(rows)]
    return reduce(torch.add, [x @ x.mT for x in flat])


def spectral(function: Callable[[Tensor], Any], matrix: Tensor) -> Any:
    """Call ``torch.linalg.eigh`` or ``eigvalsh`` on a matrix, and again in float64 where it fails.

    Of some singular matrices in float32 MKL's routines return NaN, or raise, whatever their scale.
    """
    try:
        found = function(matrix)
        # a sum is not finite where an entry is not, and takes a third of the time of a look at every one
        if all(is_hidden(x) or math.isfinite(float(x.sum())) for x in optree.tree_leaves(found)):
            return found
    except RuntimeError:  # LinAlgError is one
        pass
    return optree.tree_map(lambda x: x.to(matrix.dtype), function(matrix.double()))
