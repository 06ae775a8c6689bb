"""Refuse losses that call a module under DistributedDataParallel or ``fully_shard``.

Both wrappers work with ``loss.backward()`` and ``.grad`` only, while a step of this library computes gradients by
``torch.autograd.grad`` or ``torch.func.grad``. These functions do not run the hooks of DistributedDataParallel, so that each
rank would follow the gradient of its own data, without an error. A module under ``fully_shard`` computes with parameters that
it gathers itself and not with those that ``torch.func.functional_call`` gives it, so that the gradient would be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from bayesopt_chain._torch import is_fully_sharded

_AVAILABLE, _NOTHING = dist.is_available(), nullcontext()
_seen: WeakSet[Callable[..., Any]] = WeakSet()  # losses whose first evaluation was watched


def is_replicated(module: Any) -> bool:
    """Whether a module, or a module in it, is wrapped in DistributedDataParallel.

    Args:
        module: any object; what is not a module is not wrapped.
    """
    if not dist.is_available() or not isinstance(module, torch.nn.Module):
        return False
    return any(isinstance(part, torch.nn.parallel.DistributedDataParallel) for part in module.modules())


REFUSAL = (
    "the module is wrapped in DistributedDataParallel, whose hooks see loss.backward() and not the gradients that a step asks "
    "for, so that every rank would follow its own data. Call the module inside (model.module), and average over the ranks with "
    "bc.make_step(loss, tx, mesh=mesh)"
)


FULLY_SHARDED = (
    "the module is under fully_shard and computes with the parameters that it gathers itself, not with those it is handed. "
    "Train it by loss.backward() and an optimizer of bc.optim, such as bc.optim.SGHMC(model.parameters(), lr, temperature=T, "
    "generator=bc.distributed.generator(seed))"
)


def refusing_replicated(loss: Callable[..., Any]) -> AbstractContextManager[None]:
    """A context in which a loss is evaluated, and which refuses modules under DistributedDataParallel or ``fully_shard``.

    Only the first evaluation of each loss is watched, and only if there are several ranks.

    Args:
        loss: the loss.

    Returns:
        The context. Within it, the call of such a module raises a ``ValueError``.
    """
    if not _AVAILABLE or not dist.is_initialized() or dist.get_world_size() == 1 or _known(loss):
        return _NOTHING
    return _watched()


def _known(loss: Callable[..., Any]) -> bool:
    """Whether a loss was seen before. A loss that cannot be hashed or referenced weakly counts as new every time."""
    try:
        if loss in _seen:
            return True
        _seen.add(loss)
    except TypeError:
        pass
    return False


@contextmanager
def _watched() -> Iterator[None]:
    """Refuse the call of a wrapped module by a hook in front of every call of a module."""

    def refuse(module: torch.nn.Module, args: Any) -> None:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise ValueError(f"loss: {REFUSAL}")
        if is_fully_sharded(module):
            raise ValueError(f"loss: {FULLY_SHARDED}")

    hook = torch.nn.modules.module.register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()
