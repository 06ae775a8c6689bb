"""Roots of the output Hessian, made on demand: a likelihood over many classes has more factors than memory.

For b data with outputs ``[b, *event]`` a root S has K columns a datum, s_kb, and answers without holding them all

    part(k0, k1)   the columns s_k, k0 <= k < k1       ``[k1 - k0, b, *event]``
    combine(w)     sum_k w_kb s_kb                     ``[b, *event]`` for weights ``[b, K]``
    diagonal()     sum_k s_kb^2                        ``[b, *event]``
    gram()         sum_kbt s_kbt s_kbt^T               ``[C, C]``, over all positions t too, where it is known in closed form

of softmaxes ``diag(sum_bt p_bt) - sum_bt p_bt p_bt^T``.

    Elementwise    s_k = scale_k e_k                               K = E, the number of entries of an event
    Softmax        s_k = d_k (e_k - sum_{j > k} p_j e_j / q_k)     K = E (C - 1) / C: one softmax of C classes a position
    Explicit       columns that are held                           K of them
    Seen           r s_k for columns s_k of another root           for weights r^2 of the data and their positions, axes moved

with ``q_k = sum_{j > k} p_j`` and ``d_k^2 = p_k q_k / (p_k + q_k)``: the Cholesky factor of ``diag(p) - p p^T``, whose rank is
C - 1. The C columns ``sqrt(p_k) (e_k - p)`` are a root as well, and cost one more backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


class OutputRoot(ABC):
    """A root S of the Hessian of the loss in the outputs, ``sum_k s_k s_k^T``, for a batch of b data.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> root = bc.likelihoods.categorical().root(torch.zeros(1, 2), torch.tensor([0]))
        >>> root.columns, root.diagonal()
        (1, tensor([[0.2500, 0.2500]]))
    """

    separates_positions: bool
    """Whether every column is zero outside of one position, an index of all event axes but the last."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """K, the number of columns of a datum."""

    @abstractmethod
    def part(self, start: int, stop: int) -> Tensor:
        """Make some of the columns.

        Args:
            start: the first.
            stop: one behind the last.

        Returns:
            ``[stop - start, b, *event]``.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> bc.likelihoods.gaussian(0.25).root(torch.zeros(1, 2), torch.zeros(1, 2)).part(1, 2)
            tensor([[[0., 2.]]])
        """

    def combine(self, weights: Tensor) -> Tensor:
        """Add up the columns with weights, ``sum_k w_kb s_kb``, in closed form without holding them where there is one.

        Args:
            weights: ``[b, K]``.

        Returns:
            ``[b, *event]``.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> root = bc.likelihoods.gaussian(0.25).root(torch.zeros(1, 2), torch.zeros(1, 2))
            >>> root.combine(torch.tensor([[1.0, -1.0]]))
            tensor([[ 2., -2.]])
        """
        columns = self.part(0, self.columns)
        return (columns * weights.mT.reshape(*columns.shape[:2], *[1] * (columns.ndim - 2))).sum(0)

    def diagonal(self) -> Tensor:
        """The diagonal of ``S S^T``.

        Returns:
            ``[b, *event]``.
        """
        return self.part(0, self.columns).square().sum(0)

    has_gram = False
    """Whether :meth:`gram` is known in closed form."""

    def gram(self, scale: Tensor | None = None) -> Tensor:
        """The sum of ``S S^T`` over data and positions, of all outputs of a position, without a column.

        Args:
            scale: as for :meth:`scaled`, of columns that are multiplied first. Default: 1.

        Returns:
            ``[C, C]`` for outputs ``[b, *, C]``.

        Raises:
            NotImplementedError: where only the columns say it, see :attr:`has_gram`.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> bc.likelihoods.categorical().root(torch.zeros(3, 2), torch.tensor([0, 1, 1])).gram()
            tensor([[ 0.7500, -0.7500],
                    [-0.7500,  0.7500]])
        """
        raise NotImplementedError(f"the columns of {type(self).__name__} alone say it")

    def scaled(self, scale: Tensor) -> OutputRoot:
        """The root of a weighted Hessian: its columns multiplied.

        Args:
            scale: the square roots of the weights, ``[b, *event]``, constant over the entries of one target.

        Returns:
            A new root.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> root = bc.likelihoods.gaussian(0.25).root(torch.zeros(1, 2), torch.zeros(1, 2))
            >>> root.scaled(torch.full((1, 2), 3.0)).diagonal()
            tensor([[36., 36.]])
        """
        return Seen(self, scale=scale)


@dataclass(frozen=True)
class Elementwise(OutputRoot):
    """The k-th column is ``scale``, ``[b, *event]``, at the event's k-th entry and 0 elsewhere: independent outputs."""

    scale: Tensor
    separates_positions = True
    has_gram = True

    @property
    def columns(self) -> int:
        return _entries(self.scale)

    def part(self, start: int, stop: int) -> Tensor:
        return self.scale * _units(self.scale, start, stop)

    def combine(self, weights: Tensor) -> Tensor:
        return self.scale * weights.reshape(self.scale.shape)

    def diagonal(self) -> Tensor:
        return self.scale.square()

    def gram(self, scale: Tensor | None = None) -> Tensor:
        own = self.scale if scale is None else self.scale * scale
        return torch.diag(own.square().flatten(0, -2).sum(0))

    def scaled(self, scale: Tensor) -> OutputRoot:
        return Elementwise(self.scale * scale)


@dataclass(frozen=True)
class Softmax(OutputRoot):
    """The Cholesky factor of ``diag(p) - p p^T`` at every position: ``p``, ``[b, *, C]``, are the class probabilities."""

    p: Tensor
    separates_positions = True
    has_gram = True

    @property
    def labels(self) -> int:
        """The columns of a position, C - 1; a single class has one, which is zero."""
        return max(1, self.p.shape[-1] - 1)

    @property
    def columns(self) -> int:
        return self.p.shape[1:-1].numel() * self.labels

    def part(self, start: int, stop: int) -> Tensor:
        b, classes = self.p.shape[0], self.p.shape[-1]
        first, last = start // self.labels, -(-stop // self.labels)
        p = self.p.reshape(b, -1, classes).transpose(0, 1)[first:last]  # [positions, b, C]
        d, d_over_q = self._scales(p)
        column = torch.arange(start, stop, device=p.device)
        position, label = column // self.labels - first, column % self.labels
        behind = torch.arange(classes, device=p.device) - label[:, None]
        is_label, is_behind = ((mask[:, None]).to(p.dtype) for mask in (behind == 0, behind > 0))
        positions = self.p.shape[1:-1].numel()
        if positions == 1:
            here, after = (scale[0].mT[start:stop, :, None] for scale in (d, d_over_q))
            return (is_label * here - is_behind * after * p).reshape(-1, *self.p.shape)
        here, after = (scale[position, :, label][..., None] for scale in (d, d_over_q))
        columns = is_label * here - is_behind * after * p[position]  # [k, b, C]
        zeros = torch.zeros(stop - start, b, positions, classes, dtype=p.dtype, device=p.device)
        where = (position + first)[:, None, None, None].expand(stop - start, b, 1, classes)
        return zeros.scatter(2, where, columns[:, :, None]).reshape(-1, *self.p.shape)

    def combine(self, weights: Tensor) -> Tensor:
        d, d_over_q = self._scales(self.p)
        weights, classes = weights.reshape(d.shape), self.p.shape[-1]
        before = pad((weights * d_over_q).cumsum(-1), (1, 0))[..., :classes]
        return pad(weights * d, (0, max(0, classes - self.labels))) - self.p * before

    def diagonal(self) -> Tensor:
        return self.p * (1 - self.p)

    def gram(self, scale: Tensor | None = None) -> Tensor:
        p = self.p.flatten(0, -2)
        rows = p if scale is None else p * scale.flatten(0, -2)
        return torch.diag((p if scale is None else rows * scale.flatten(0, -2)).sum(0)) - rows.mT @ rows

    def _scales(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """Return d and d / q, ``[*, labels]``; both are 0 where no probability is left."""
        left = pad(p.flip(-1).cumsum(-1).flip(-1), (0, 1))  # from class k on
        q, with_k = left[..., 1 : self.labels + 1], left[..., : self.labels]
        d = (p[..., : self.labels] * (q / torch.where(with_k > 0, with_k, 1))).sqrt()
        return d, d / torch.where(q > 0, q, 1)


@dataclass(frozen=True)
class Explicit(OutputRoot):
    """Columns that are held: ``held``, ``[K, b, *event]``."""

    held: Tensor
    separates_positions = False

    @property
    def columns(self) -> int:
        return self.held.shape[0]

    def part(self, start: int, stop: int) -> Tensor:
        return self.held[start:stop]


@dataclass(frozen=True)
class Seen(OutputRoot):
    """The columns of ``root``, the event's last axis moved to ``axis`` (counted from the end), times ``scale [b, *event]``."""

    root: OutputRoot
    axis: int = -1
    scale: Tensor | None = None

    @property
    def separates_positions(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.axis == -1 and self.root.separates_positions

    @property
    def columns(self) -> int:
        return self.root.columns

    def part(self, start: int, stop: int) -> Tensor:
        return self._times(self.root.part(start, stop))

    def combine(self, weights: Tensor) -> Tensor:
        return self._times(self.root.combine(weights))

    def diagonal(self) -> Tensor:
        squares = self.root.diagonal().movedim(-1, self.axis)
        return squares if self.scale is None else squares * self.scale.square()

    @property
    def has_gram(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.axis == -1 and self.root.has_gram

    def gram(self, scale: Tensor | None = None) -> Tensor:
        return self.root.gram(_product(self.scale, scale))

    def scaled(self, scale: Tensor) -> OutputRoot:
        return Seen(self.root, self.axis, _product(self.scale, scale))

    def _times(self, columns: Tensor) -> Tensor:
        moved = columns.movedim(-1, self.axis)
        return moved if self.scale is None else moved * self.scale


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The product of what is there."""
    return b if a is None else a if b is None else a * b


def _entries(outputs: Tensor) -> int:
    return outputs.shape[1:].numel()


def _units(outputs: Tensor, start: int, stop: int) -> Tensor:
    """Return the unit vectors ``start`` to ``stop`` of an event, ``[stop - start, 1, *event]``."""
    units = torch.zeros(stop - start, _entries(outputs), dtype=outputs.dtype, device=outputs.device)
    units.diagonal(start).fill_(1)
    return units.reshape(stop - start, 1, *outputs.shape[1:])
