"""Roots of the output Hessian, made on demand: a likelihood over many classes has more factors than memory.

For b data with outputs ``[b, *event]`` a root S has K columns a datum, s_kb, and answers without holding them all

    part(k0, k1)   the columns s_k, k0 <= k < k1       ``[k1 - k0, b, *event]``
    combine(w)     sum_k w_kb s_kb                     ``[b, *event]`` for weights ``[b, K]``
    diagonal()     sum_k s_kb^2                        ``[b, *event]``

    Elementwise    s_k = scale_k e_k                       K = E, the number of entries of an event
    Softmax        s_k = sqrt(p_k) (e_k - p)               K = E: classes on the last axis, one softmax a position
    Explicit       columns that are held                   K of them
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class OutputRoot(ABC):
    """A root S of the Hessian of the loss in the outputs, ``sum_k s_k s_k^T``, for a batch of b data.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> root = bc.likelihoods.categorical().root(torch.zeros(1, 2), torch.tensor([0]))
        >>> root.columns, root.diagonal()
        (2, tensor([[0.2500, 0.2500]]))
    """

    separates_positions: bool
    """Whether every column is zero outside of one position, an index of all event axes but the last."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """K, the number of columns of a datum."""

    @abstractmethod
    def part(self, start: int, stop: int) -> Tensor:
        """Return the columns from ``start`` up to ``stop``, ``[stop - start, b, *event]``."""

    @abstractmethod
    def combine(self, weights: Tensor) -> Tensor:
        """Return ``sum_k w_kb s_kb``, ``[b, *event]``, for weights ``[b, K]``."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonal of ``S S^T``, ``[b, *event]``."""


@dataclass(frozen=True)
class Elementwise(OutputRoot):
    """The k-th column is ``scale``, ``[b, *event]``, at the event's k-th entry and 0 elsewhere: independent outputs."""

    scale: Tensor
    separates_positions = True

    @property
    def columns(self) -> int:
        return _entries(self.scale)

    def part(self, start: int, stop: int) -> Tensor:
        return self.scale * _units(self.scale, start, stop)

    def combine(self, weights: Tensor) -> Tensor:
        return self.scale * weights.reshape(self.scale.shape)

    def diagonal(self) -> Tensor:
        return self.scale.square()


@dataclass(frozen=True)
class Softmax(OutputRoot):
    """The root of ``diag(p) - p p^T`` at every position: ``p``, ``[b, *, C]``, are the class probabilities."""

    p: Tensor
    separates_positions = True

    @property
    def columns(self) -> int:
        return _entries(self.p)

    def part(self, start: int, stop: int) -> Tensor:
        b, classes = self.p.shape[0], self.p.shape[-1]
        p = self.p.reshape(b, -1, classes).transpose(0, 1)  # [positions, b, C]
        column = torch.arange(start, stop, device=p.device)
        position, label = column // classes, column % classes
        here = p[position]  # [k, b, C]
        one_hot = (torch.arange(classes, device=p.device) == label[:, None])[:, None]
        root = (here * one_hot).sum(-1, keepdim=True).sqrt()
        columns = root * (one_hot.to(p.dtype) - here)
        zeros = torch.zeros(stop - start, b, p.shape[0], classes, dtype=p.dtype, device=p.device)
        where = position[:, None, None, None].expand(stop - start, b, 1, classes)
        return zeros.scatter(2, where, columns[:, :, None]).reshape(stop - start, *self.p.shape)

    def combine(self, weights: Tensor) -> Tensor:
        scaled = self.p.sqrt() * weights.reshape(self.p.shape)
        return scaled - self.p * scaled.sum(-1, keepdim=True)

    def diagonal(self) -> Tensor:
        return self.p * (1 - self.p)


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

    def combine(self, weights: Tensor) -> Tensor:
        return (self.held * weights.mT.reshape(*self.held.shape[:2], *[1] * (self.held.ndim - 2))).sum(0)

    def diagonal(self) -> Tensor:
        return self.held.square().sum(0)


def _entries(outputs: Tensor) -> int:
    return outputs.shape[1:].numel()


def _units(outputs: Tensor, start: int, stop: int) -> Tensor:
    """Return the unit vectors ``start`` to ``stop`` of an event, ``[stop - start, 1, *event]``."""
    units = torch.zeros(stop - start, _entries(outputs), dtype=outputs.dtype, device=outputs.device)
    units.diagonal(start).fill_(1)
    return units.reshape(stop - start, 1, *outputs.shape[1:])
