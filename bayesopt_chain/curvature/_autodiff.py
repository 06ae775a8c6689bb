"""torch.func with one return type for each function, and kernels that can be differentiated in every way.

Fused kernels (attention, recurrent nets) are fast and lack forward mode, batching rules, second derivatives, or, for
mkldnn's LSTM in float32, a backward pass that the vmapped one can call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention
from torch.overrides import TorchFunctionMode

from bayesopt_chain._torch import switched_off

UNSUPPORTED = (RuntimeError, NotImplementedError)
"""What torch raises where an operation lacks a derivative or a batching rule."""

_FUSED: Any = (torch.backends.mkldnn, torch.backends.cudnn)  # their recurrent nets are fused
_torch: Any = torch  # whose stubs leave out the recurrent functions
_RECURRENT = frozenset((_torch.lstm, _torch.gru, _torch.rnn_tanh, _torch.rnn_relu))


def vjp(f: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    """Return ``(f(*primals), pull)``; ``pull(u)`` is a tuple, J^T u for every primal."""
    result = torch.func.vjp(f, *primals)
    return result[0], result[1]


@contextmanager
def double_backward() -> Iterator[None]:
    """Swap fused kernels (attention, recurrent nets) for plain ones, which can be differentiated in every way, and name what is
    missing where torch cannot differentiate an operation twice even so."""
    with attention.sdpa_kernel(attention.SDPBackend.MATH), switched_off(*_FUSED):
        try:
            yield
        except UNSUPPORTED as error:
            if "derivative for" not in str(error):
                raise
            raise RuntimeError(
                f"curvature: an operation of the model has no second derivative in torch ({error}); write it with operations "
                "that have one, such as nn.Embedding and a mean for nn.EmbeddingBag, or a sum of squares for torch.cdist"
            ) from error


def call(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a torch function, a recurrent one without its fused kernel."""
    if func not in _RECURRENT:
        return func(*args, **kwargs)
    with switched_off(*_FUSED):
        return func(*args, **kwargs)


class _PlainRecurrence(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return call(func, args, kwargs or {})


def without_fused_recurrence(forward: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Return the same function, its recurrent layers computed without fused kernels; other layers keep theirs."""

    def plain(params: Any, batch: Any) -> Tensor:
        with _PlainRecurrence():
            return forward(params, batch)

    return plain
