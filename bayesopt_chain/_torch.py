"""torch's private functions that this library calls, in one place and with types: what to look at when torch changes.

Each was read in torch 2.11 to 2.13. Whoever needs to know whether a tensor may be read asks :mod:`bayesopt_chain.tracing`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_C: Any = torch._C  # the stubs of these two modules leave out what is used here
_functions: Any = torch
_functorch = _C._functorch
_engine: Any = torch.autograd.Variable._execution_engine


def functorch_is_running() -> bool:
    """Whether the call stands inside ``torch.func``: ``vmap``, ``grad``, ``vjp`` or ``jvp``."""
    return _functorch.peek_interpreter_stack() is not None


def is_wrapped(x: Tensor) -> bool:
    """Whether a tensor is functorch's: one that ``vmap`` maps over, or one that is being differentiated."""
    return _functorch.is_functorch_wrapped_tensor(x)


def is_batched(x: Tensor) -> bool:
    """Whether the outermost wrapper of a tensor is ``vmap``'s."""
    return _functorch.is_batchedtensor(x)


def level(x: Tensor) -> int:
    """The level of the transformation that wrapped a tensor last; 1 is the outermost."""
    return _functorch.maybe_get_level(x)


def unwrapped(x: Tensor) -> Tensor:
    """The tensor below the outermost wrapper."""
    return _functorch.get_unwrapped(x)


def is_fake(x: Any) -> bool:
    """Whether a tensor has a shape and no numbers, as during a trace."""
    return isinstance(x, FakeTensor)


def is_dtensor(x: Any) -> bool:
    """Whether a tensor is a DTensor, spread over ranks; torch's module of them is not imported for it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def proxies_are_recorded() -> bool:
    """Whether ``make_fx`` records the operations."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.PROXY) is not None


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """What ``torch.compiler.disable`` makes of a function, without the import of torch's compiler, which takes longer than that
    of this library: it is imported by the first call, as in torch's own optimizers."""
    return _functions._compile._disable_dynamo(function)


def set_grad_enabled(enabled: bool) -> None:
    """What ``torch.set_grad_enabled`` does, without the microsecond of its object."""
    _C._set_grad_enabled(enabled)


def gradients(out: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradient of a real scalar, ``None`` for inputs that it does not depend on: the call of torch's engine that
    ``torch.autograd.grad`` comes to, behind forty calls of Python for what else it might have been given."""
    if torch.compiler.is_dynamo_compiling():
        return torch.autograd.grad(out, inputs, allow_unused=True)
    start = torch.ones_like(out)  # new at each call, since it may come back as a gradient
    return _engine.run_backward((out,), (start,), False, False, tuple(inputs), True, accumulate_grad=False)


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """No mkldnn on a CPU: its fused LSTM can be neither vmapped nor compiled, while torch's own operations can."""
    before = _C._get_mkldnn_enabled()
    _C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags sets more, with a warning
    try:
        yield
    finally:
        _C._set_mkldnn_enabled(before)


def storage_of(x: Tensor) -> int:
    """A number that tensors share exactly if they share memory; fake tensors have one too."""
    return x.untyped_storage()._cdata


# for lists of tensors: x += alpha y;  x *= factor, a number or a 0-d tensor;  x <- y
foreach_add_: Callable[..., None] = _functions._foreach_add_
foreach_mul_: Callable[[list[Tensor], float | Tensor], None] = _functions._foreach_mul_
foreach_copy_: Callable[[list[Tensor], list[Tensor]], None] = _functions._foreach_copy_


def fused_sgd_(
    params: list[Tensor],
    grads: list[Tensor],
    velocities: list[Tensor],
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
) -> None:
    """torch's fused SGD step without dampening, velocities started before; an empty list without momentum."""
    _functions._fused_sgd_(
        params,
        grads,
        velocities,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        dampening=0.0,
        nesterov=nesterov,
        maximize=maximize,
        is_first_step=False,
    )
