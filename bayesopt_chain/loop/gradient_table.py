r"""A table of single-datum gradients at a reference, projected onto a few directions, for stored control variates and herding.

With the losses ``l_i`` of ``N`` data and the reference ``theta*``, the table holds

    z_i = Q^T grad l_i(theta*),        Q [P, r] orthonormal,   z [N, r] minus its mean over the data.

Column ``j`` of ``z`` is the derivative of all ``l_i`` along the direction ``q_j``. It is one forward-mode product, which costs
about as much as two forward passes over the data. The directions are those along which the gradients of batches vary most at
``theta*``: ``r`` combinations of the rows of ``R``, the matrix of centred batch gradients, by the leading eigenvectors of
``R R^T``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches
from bayesopt_chain.curvature import jvp
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.loop.loss import Loss, gradient, value
from bayesopt_chain.trees import combine, flatten, gram, unflatten, wide

CHUNK = 1024  # number of data that one forward-mode product takes at once, which bounds its memory


class GradientTable(NamedTuple):
    """The result of :func:`gradient_table`.

    Attributes:
        directions: ``Q``, orthonormal, as a tree of leaves ``[r, *leaf.shape]``.
        numbers: ``z``, ``[N, r]``, with mean zero over the data. The rows of data that the epochs leave out are zero.
        reference: the parameters ``theta*``.
    """

    directions: Any
    numbers: Tensor
    reference: Any


def gradient_table(
    loss: Loss, data: Epochs, reference: Any, *, rank: int = 8, directions: Any = None, max_batches: int = 100
) -> GradientTable:
    """Tabulate the gradients of single data at a reference, along the directions of largest batch noise.

    Args:
        loss: ``loss(params, batch)``, a mean over the data of the batch. It is evaluated for single data under ``torch.vmap``.
        data: ``bc.epochs(...)`` over a tree of tensors.
        reference: parameters ``theta*``, near a minimum of the loss.
        rank: number of directions ``r``. The table takes ``N r`` numbers, and the directions ``P r``. Default 8.
        directions: linearly independent directions, a tree of leaves ``[r, *leaf.shape]``. Default: those of largest noise.
        max_batches: number of batches from whose gradients the directions are computed. As many copies of the parameters are
            held in memory. Default 100.

    Returns:
        :class:`GradientTable`.

    Raises:
        TypeError: ``data`` are not ``bc.epochs(...)`` over tensors.
        ValueError: the data differ from chain to chain; ``rank`` is below 1; the directions are not independent.
        RuntimeError: from torch, if the model draws (dropout), or if one of its operations has no derivative.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [4.0, 0.0], [9.0, 0.0]])
        >>> loss = lambda w, x: ((w - x) ** 2).sum(-1).mean() / 2
        >>> table = bc.gradients.gradient_table(loss, bc.epochs(x, 2), torch.zeros(2), rank=1)
        >>> table.numbers.abs().flatten().round(decimals=4).tolist(), table.directions.abs().round(decimals=4).tolist()
        ([3.0, 2.0, 0.0, 5.0], [[1.0, 0.0]])
    """
    if not isinstance(data, Epochs) or data.leaves is None:
        raise TypeError(
            f"gradient_table: data must be bc.epochs(...) over a tree of tensors, got {type(data).__name__}; the table has a "
            "row for each datum, which the batches name with bc.epochs(..., with_rows=True)"
        )
    if rank < 1:
        raise ValueError(f"gradient_table: rank must be at least 1, got {rank}")
    reference = optree.tree_map(lambda p: p.detach().clone(), reference)
    rows = data.common_rows()
    if directions is None:
        directions = _largest_noise_directions(loss, data, reference, rank, max_batches)
    else:
        directions = _orthonormal(directions, reference)
    z = torch.cat([_derivatives_along(loss, part, reference, directions) for part in data.parts(CHUNK)])
    z = z.to(wide(z.dtype))  # means over batches of narrow numbers would lose digits
    numbers = z.new_zeros(data.size, z.shape[1])
    numbers[rows.to(z.device)] = z - z.mean(0)
    return GradientTable(directions, numbers, reference)


def gradient_table_correction(table: GradientTable, rows: Tensor) -> Any:
    """Return the correction ``Q (mean of z over these rows)``, whose mean over all data is zero.

    Args:
        table: from :func:`gradient_table`.
        rows: the numbers of the data of a batch, int64 ``[b]``.

    Returns:
        A tree like the parameters.
    """
    mean = table.numbers[rows.to(table.numbers.device)].mean(0)
    return combine(mean, table.directions)


def _derivatives_along(loss: Loss, batch: Any, reference: Any, directions: Any) -> Tensor:
    """Compute the derivatives of single-datum losses along the directions, ``[n, r]``, in forward mode."""
    leaves, spec = batches.flatten(batch)
    points, structure = optree.tree_flatten(reference)

    def losses(*params: Tensor) -> Tensor:
        def one(*datum: Tensor) -> Tensor:
            return value(loss, structure.unflatten(params), spec.unflatten([x[None] for x in datum]))[0]

        return torch.vmap(one)(*leaves)

    tangents = zip(*optree.tree_leaves(directions))
    return torch.stack([jvp(losses, tuple(points), along)[1] for along in tangents], dim=1)


def _largest_noise_directions(loss: Loss, data: Epochs, reference: Any, rank: int, most: int) -> Any:
    """Return the ``rank`` orthonormal directions of largest batch noise, or fewer if the noise has a lower rank."""
    found = [gradient(loss, reference, part)[0] for part, _ in zip(data.parts(shuffled=True), range(most))]
    if len(found) < 2:
        raise ValueError("gradient_table: the data make one batch, which has no noise; take smaller batches")
    rows = optree.tree_map(lambda *leaves: torch.stack(leaves), *found)
    rows = optree.tree_map(lambda leaf: leaf - leaf.mean(0), rows)
    # the eigenvectors of R R^T [batches, batches] instead of R^T R [P, P], which may not fit the memory
    values, vectors = torch.linalg.eigh(gram(rows).double())
    largest = values.argsort(descending=True)[:rank]
    largest = largest[values[largest] > 1e-10 * values.amax()]
    if not len(largest):
        raise ValueError("gradient_table: the gradients of all batches are the same; there is nothing to take away")
    return _orthonormal(combine(vectors[:, largest].T, rows), reference)


def _orthonormal(directions: Any, like: Any) -> Any:
    """Orthonormalise directions; raise ValueError if they are not linearly independent."""
    matrix = flatten(directions, like)
    # a small diagonal entry of R belongs to a direction that the earlier ones span
    Q, R = torch.linalg.qr(matrix.mT)
    if matrix.ndim != 2 or not bool((R.diagonal().abs() > 1e-6 * R.diagonal().abs().amax()).all()):
        raise ValueError(
            f"gradient_table: directions must be leaves [r, *leaf.shape] of independent vectors, got {list(matrix.shape)} "
            "that are not independent"
        )
    return unflatten(Q.mT.contiguous(), like)
