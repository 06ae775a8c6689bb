"""A model at many draws, and averages of what it says: what :meth:`Draws.predict` is made of."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import optree
import torch
from torch import Tensor

Reduce = Literal["mean", "log_mean_exp", "stack"]


def buffered_forward(forward: Any) -> Callable[[Any, Any, Any], Tensor]:
    """A function of params, batch and buffers from what a user passed.

    Raises:
        ValueError: it takes no buffers, or its module is in ``train`` mode.
    """
    if hasattr(forward, "with_buffers"):
        if forward.module.training:
            raise ValueError(
                "predict: the module is in train mode, so that BatchNorm would take the statistics of the batch "
                "instead of those the draws hold; call module.eval() first"
            )
        return lambda params, batch, buffers: forward.with_buffers(params, batch, buffers)[0]
    try:
        inspect.signature(forward).bind(None, None, None)
    except TypeError:
        raise ValueError(
            "predict: these draws hold buffers of their own (BatchNorm's statistics), and this function takes none: pass the "
            "forward of bc.make_functional(module), or a function of (params, batch, buffers)"
        ) from None
    return forward


class Forward:
    """A model at many draws at once by ``vmap``; one by one from the first time that vmap refuses it."""

    def __init__(self, forward: Callable[[Any, Any, Any], Tensor]) -> None:
        self.forward = forward
        self.batched = True

    def __call__(self, draws: Any, batch: Any, buffers: Any) -> Tensor:
        """Outputs ``[S, B, *event]`` for parameters and buffers ``[S, ...]``."""
        size = optree.tree_leaves(draws)[0].shape[0]
        if self.batched and size > 1:
            try:
                return torch.vmap(lambda p, b: self.forward(p, batch, b), randomness="error")(draws, buffers)
            except RuntimeError:
                self.batched = False
        both: Any = (draws, buffers)
        singles = [optree.tree_map(lambda x, i=i: x[i], both) for i in range(size)]
        return torch.stack([self.forward(p, batch, b) for p, b in singles])


class Average:
    """A running mean, log-mean-exp or stack over axis 0 of what is added."""

    def __init__(self, reduce: Reduce) -> None:
        self.reduce = reduce
        self.count = 0
        self.total: Tensor | None = None
        self.parts: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Add a block ``[S, ...]``."""
        self.count += len(x)
        if self.reduce == "stack":
            self.parts.append(x)
            return
        block = x.logsumexp(0) if self.reduce == "log_mean_exp" else x.sum(0)
        if self.total is None:
            self.total = block
        else:
            self.total = torch.logaddexp(self.total, block) if self.reduce == "log_mean_exp" else self.total + block

    @property
    def value(self) -> Tensor:
        """The result so far."""
        if self.reduce == "stack":
            return torch.cat(self.parts)
        if self.total is None:
            raise ValueError("nothing was added yet")
        return self.total - math.log(self.count) if self.reduce == "log_mean_exp" else self.total / self.count


def warn_of_moving_buffers(forward: Any) -> None:
    """Warn where draws hold no buffers, and the module they predict with has statistics that training moved."""
    module = getattr(forward, "module", None)
    if module is not None and any(name.endswith("running_mean") for name, _ in module.named_buffers()):
        warnings.warn(
            "predict: the module has BatchNorm, and these draws hold no statistics of their own: every draw predicts "
            "with those "
            "that the module has now. Keep them with the draws (make_step(..., buffers=), bc.collect), or compute them: "
            "bc.refresh_batch_norm(module, draws, loader)",
            stacklevel=3,
        )
