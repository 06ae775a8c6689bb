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
    draws: Callable[[], Iterable[Tensors]],
    buffers: list[Tensors],
    loader: Iterable[Any],
    inputs: str | Callable[[Any], Any] | None,
) -> Tensors:
    """Buffers ``[S, ...]`` with fresh statistics for each of ``S`` draws, by one pass over the data.

    Args:
        module, loader, inputs: as in :func:`bayesopt_chain.refresh_batch_norm`.
        draws: gives the parameters of the draws, one after the other.
        buffers: those that each draw has.

    Raises:
        ValueError: no layer keeps statistics, no batches, or no draws.
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
    forward, _, own = make_functional(module, inputs=inputs)
    fresh = {name: b for name, b in own.items() if name.rpartition(".")[0] in layers}
    found, seen = [{**own, **mine, **fresh} for mine in buffers], 0
    for batch in loader:
        n = batches.size(batch)
        if not n:
            continue
        seen += n
        for layer in layers.values():
            layer.momentum = n / seen  # torch's is the weight of the new statistics
        with checks.blaming("refresh_batch_norm", f"loader, a batch of {n} (drop_last=True leaves one of 1 out)"):
            found = [forward.with_buffers(params, batch, mine)[1] for params, mine in zip(draws(), found)]
    if not seen or not found:
        raise ValueError(
            "refresh_batch_norm: the loader has no batches (an iterator can be gone through only once), or there are no draws"
        )
    return {name: torch.stack([mine[name] for mine in found]) for name in found[0]}


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
