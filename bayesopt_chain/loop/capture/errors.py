"""The error of a step that cannot be captured, and the search for the user's line that causes it."""

from __future__ import annotations

import os
import traceback
from typing import Any

import optree
import torch

from bayesopt_chain.checks import short


class CaptureError(RuntimeError):
    """The step cannot be captured; the message names the line and what to change.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.sgd(0.1)
        >>> step = bc.make_step(lambda p, batch: p.sum() * p.max().item(), tx)  # .item() asks for a number
        >>> try:
        ...     bc.capture(step, torch.ones(2), tx.init(torch.ones(2)), ())
        ... except bc.CaptureError:
        ...     print("not captured")
        not captured
    """


def describe(x: Any) -> str:
    """Shape, dtype, device and, unless dense, layout of a tensor, for messages; anything else as ``repr`` begins."""
    if not torch.is_tensor(x):
        return short(x)
    return f"{tuple(x.shape)}, {x.dtype} on {x.device}{'' if x.layout is torch.strided else f', {x.layout}'}"


def first_line(err: BaseException) -> str:
    """Return the first line of an error's message, since torch's messages can be pages long."""
    return str(err).strip().split("\n")[0][:200] or type(err).__name__


# with a separator at the end, since torchvision and torchopt are no part of torch
_LIBRARIES = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (torch, optree))
_HERE = os.path.dirname(os.path.dirname(__file__))  # the folder of this package's loop


def users_line(err: BaseException) -> str | None:
    """Return file, number and text of the innermost line of a traceback outside of torch, optree and this package's loop."""
    for frame in reversed(traceback.extract_tb(err.__traceback__)):
        if not frame.filename.startswith((*_LIBRARIES, _HERE)):
            return f"{frame.filename}:{frame.lineno}: `{frame.line}`"
    return None


def is_about_values(err: BaseException) -> bool:
    """Whether an error means that tracing met a value or a shape that is known only when the step runs.

    Some of these errors of torch have no type of their own, so that their messages are searched for certain words.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    known = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
    words = (
        "tracing tensor",
        "data-dependent",
        "data dependent",
        "fake tensor",
        "FakeTensor",
        "not allowed when tracing",
    )
    return isinstance(err, known) or any(word in str(err) for word in words)
