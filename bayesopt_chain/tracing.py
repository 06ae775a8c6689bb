"""The one answer to "may this tensor be read now": not while it is transformed, traced, compiled or recorded.

is_hidden(x)      its numbers cannot be had: a check of them is skipped
is_readable(x)    its numbers can be had for nothing: not hidden, and on the CPU, so that no device is waited for
is_transformed()  a ``torch.func`` transformation is running
is_wrapped(x)     one that maps over this tensor or differentiates it
is_plain(*xs)     nothing at all is being transformed or traced: memory addresses mean something too
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayesopt_chain import _torch
from bayesopt_chain._torch import FakeTensor, innermost_transformation, is_wrapped, recording_mode


def is_transformed() -> bool:
    """Whether a ``torch.func`` transformation is running."""
    return innermost_transformation() is not None


def is_hidden(x: Tensor) -> bool:
    """Whether nobody may look at a tensor's value: it is transformed, traced, compiled, without numbers (``meta``, fake), or
    recorded by a CUDA graph."""
    return (
        is_wrapped(x)
        or is_traced()
        or x.is_meta
        or isinstance(x, FakeTensor)
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def is_readable(x: Tensor) -> bool:
    """Whether looking at a tensor's value is possible and costs nothing: on the CPU, and not hidden."""
    return x.device.type == "cpu" and not is_hidden(x)


def is_plain(*tensors: Tensor) -> bool:
    """Whether tensors hold numbers at addresses now: nothing is being transformed, traced or compiled."""
    return not (is_transformed() or is_traced() or any([x.is_meta or isinstance(x, FakeTensor) for x in tensors]))


def is_traced() -> bool:
    """Whether a compiler or a tracer is watching."""
    return torch.compiler.is_compiling() or recording_mode() is not None


def batch_levels(x: Tensor) -> set[int]:
    """The levels of ``vmap`` over which a tensor has an axis of its own."""
    levels = set()
    while is_wrapped(x):
        if _torch.is_batched(x):
            levels.add(_torch.level(x))
        x = _torch.unwrapped(x)
    return levels


def unwrapped(x: Tensor) -> Tensor:
    """The tensor inside all of functorch's wrappers, with the axes that are mapped over."""
    while is_wrapped(x):
        x = _torch.unwrapped(x)
    return x
