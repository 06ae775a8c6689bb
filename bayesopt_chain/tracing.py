"""Whether a tensor's numbers may be looked at: not while it is transformed, traced, compiled or recorded."""

from __future__ import annotations

import torch
from torch import Tensor


def is_transformed() -> bool:
    """Whether a ``torch.func`` transformation (vmap, grad) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def batch_levels(x: Tensor) -> set[int]:
    """The levels of ``vmap`` over which a tensor has an axis of its own."""
    functorch, levels = torch._C._functorch, set()
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            levels.add(functorch.maybe_get_level(x))
        x = functorch.get_unwrapped(x)
    return levels


def is_plain(*tensors: Tensor) -> bool:
    """Whether tensors hold numbers now: nothing is being transformed, traced or compiled."""
    return (
        not is_transformed()
        and not is_traced()
        and not any(isinstance(x, torch._subclasses.FakeTensor) for x in tensors)
    )


def is_hidden(x: Tensor) -> bool:
    """Whether nobody may look at a tensor's value: it is transformed, traced, compiled, or recorded by a CUDA graph."""
    return (
        torch._C._functorch.is_functorch_wrapped_tensor(x)
        or is_traced()
        or isinstance(x, torch._subclasses.FakeTensor)
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def is_traced() -> bool:
    """Whether a compiler or a tracer is watching."""
    return (
        torch.compiler.is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )
