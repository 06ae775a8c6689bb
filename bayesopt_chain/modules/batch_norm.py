r"""BatchNorm's statistics for parameters that were drawn, not trained: means of what the layers see over the data.

A draw has parameters and no statistics: those of the training run belong to other parameters. One pass over the data in
batches of ``n_k``, with ``N_k = n_1 + ... + n_k`` and the batch's own mean and (unbiased) variance ``s_k``,

    S_k = (1 - n_k / N_k) S_(k-1) + (n_k / N_k) s_k,

is the mean of the batches' statistics (Izmailov, Podoprikhin, Garipov, Vetrov and Wilson, 2018, section 3.2), weighted by
their sizes. Dropout and the like are off meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from bayesopt_chain import batches, checks
from bayesopt_chain.modules.functional import Tensors, copied, make_functional

BatchNorm = nn.modules.batchnorm._BatchNorm


@torch.no_grad()
def statistics(
    module: nn.Module,
    size: int,
    read: Callable[[int, int], Tensors],
    buffers: Any,
    loader: Iterable[Any],
    inputs: str | Callable[[Any], Any] | None,
    some: int,
) -> Tensors:
    """Buffers ``[S, ...]`` with fresh statistics for each of ``S`` draws, by one pass over the data.

    Args:
        module, loader, inputs: as in :func:`bayesopt_chain.refresh_batch_norm`.
        size: the number of draws, ``S``.
        read: the parameters of the draws from one number to another, stacked on axis 0.
        buffers: those that the draws have, ``[S, ...]``.
        some: how many draws are read together.

    Raises:
        ValueError: no layer keeps statistics, or no batches.
    """
    module = copied(module).eval()
    layers = {name: x for name, x in module.named_modules() if isinstance(x, BatchNorm) and x.track_running_stats}
    if not layers:
        raise ValueError(
            "refresh_batch_norm: no layer of the module keeps running statistics, so there is nothing to refresh"
        )
    for layer in layers.values():
        layer.train()
        layer.reset_running_stats()
    fresh = {name: b for name, b in module.named_buffers() if name.rpartition(".")[0] in layers}
    forward, _, own = make_functional(module, inputs=inputs)
    found = {name: b.expand(size, *b.shape).clone() for name, b in own.items()}
    found |= {name: b for name, b in buffers.items() if name not in fresh}

    def one(params: Tensors, buffers: Tensors, batch: Any) -> Tensors:
        return forward.with_buffers(params, batch, buffers)[1]

    seen = 0
    for batch in loader:
        n = _size(batch)
        if not n:
            continue
        seen += n
        for layer in layers.values():
            layer.momentum = n / seen  # torch's is the weight of the new statistics
        for low in range(0, size, some):
            high = min(low + some, size)
            own = {name: x[low:high] for name, x in found.items()}
            with checks.blaming("refresh_batch_norm", f"loader, a batch of {n} (drop_last=True leaves one of 1 out)"):
                new = _mapped(one, read(low, high), own, batch, high - low)
            for name, x in new.items():
                found[name] = x if high - low == size else found[name].slice_scatter(x, 0, low, high)
    if not seen:
        raise ValueError("refresh_batch_norm: the loader has no batches; an iterator can be gone through only once")
    return found


@contextmanager
def unshared_statistics() -> Iterator[None]:
    """Refuse BatchNorm layers that write statistics into the module itself meanwhile; the statistics are put back then.

    Raises:
        ValueError: naming the fix.
    """
    before: dict[int, tuple[nn.Module, Any, list[tuple[Tensor, Tensor]]]] = {}

    def look(layer: nn.Module, inputs: Any) -> None:
        moves = isinstance(layer, BatchNorm) and layer.training and isinstance(layer.running_mean, Tensor)
        if moves and id(layer) not in before:
            before[id(layer)] = layer, layer.running_mean, [(b, b.clone()) for b in layer.buffers()]

    hook = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()
        shared = [(layer, kept) for layer, used, kept in before.values() if layer.running_mean is used]
        for _, kept in shared:
            for b, old in kept:
                b.data.copy_(old)
    if shared:
        raise ValueError(
            f"parallel: the chains would share the statistics of {type(shared[0][0]).__name__}, which the module "
            "keeps: take its buffers out with bc.make_functional and make the step with make_step(loss, tx, "
            "buffers=buffers), or call module.eval(); a layer in a list is no submodule (nn.ModuleList makes it one)"
        )


def _mapped(one: Callable[..., Tensors], params: Tensors, buffers: Tensors, batch: Any, size: int) -> Tensors:
    """By ``vmap``, or one after the other where that refuses the model."""
    try:
        return torch.vmap(lambda p, b: one(p, b, batch))(params, buffers)
    except RuntimeError:
        rows = [
            one({k: x[i] for k, x in params.items()}, {k: x[i] for k, x in buffers.items()}, batch) for i in range(size)
        ]
        return {name: torch.stack([row[name] for row in rows]) for name in buffers}


def _size(batch: Any) -> int:
    tensors = [x for x in batches.flatten(batch)[0] if isinstance(x, Tensor) and x.ndim]
    if not tensors:
        raise ValueError("refresh_batch_norm: a batch without tensors")
    return tensors[0].shape[0]
