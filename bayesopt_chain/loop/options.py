"""What a step can be asked for besides its gradient: microbatches, autocast, a report of norm and temperature, any aux."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches, tracing
from bayesopt_chain.distributed.shards import whole
from bayesopt_chain.schedules import now, scalar


def check(microbatches: int, autocast: Any, gradients: str, buffers: Mapping[str, Tensor] | None) -> None:
    """Refuse arguments of ``make_step`` that cannot go together."""
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"make_step: microbatches must be a whole number, at least 1, got {microbatches!r}")
    if microbatches > 1 and gradients == "by datum":
        raise ValueError(
            "make_step: this chain takes gradients datum by datum, which microbatches would not save the memory of; pass "
            "smaller batches"
        )
    if gradients and buffers:
        raise ValueError(
            f"make_step: this chain takes gradients {gradients}, for which a module's buffers would be one for all; call "
            "module.eval() and leave buffers= out"
        )
    if autocast is not None and autocast is not torch.bfloat16:
        raise ValueError(
            f"make_step: autocast={autocast!r}; pass torch.bfloat16 (float16 gradients underflow without a scaled loss)"
        )


def under_autocast(loss: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """The loss under ``torch.autocast`` on the parameters' device."""

    def cast(params: Any, *rest: Any) -> Any:
        leaf = optree.tree_leaves(params)[0]
        with torch.autocast(leaf.device.type, dtype=dtype, cache_enabled=tracing.is_plain(leaf)):
            out = loss(params, *rest)
        return out

    return cast


def without_buffers(loss: Callable[..., Any], buffers: Any) -> Callable[..., Any]:
    """The loss of a module without buffers as a function of params and batch."""
    if buffers is None:
        return loss

    def bare(params: Any, batch: Any) -> Any:
        value, _, *aux = loss(params, batch, {})
        return (value, *aux) if aux else value

    return bare


def parts(batch: Any, n: int) -> Iterator[tuple[Any, float]]:
    """The batch cut into ``n`` parts along axis 0, each with its share of the data. 0-d tensors and what is no tensor stay.

    Raises:
        ValueError: tensors of different lengths, or fewer data than parts.
    """
    leaves, structure = batches.flatten(batch)
    cut = [isinstance(x, Tensor) and x.ndim > 0 for x in leaves]
    lengths = {x.shape[0] for x, is_cut in zip(leaves, cut) if is_cut}
    if len(lengths) != 1 or min(lengths) < n:
        raise ValueError(
            f"make_step: {n} microbatches need a batch whose tensors have one length of at least {n} along axis 0, got "
            f"{sorted(lengths)}"
        )
    (size,) = lengths
    pieces = [x.tensor_split(n) if is_cut else [x] * n for x, is_cut in zip(leaves, cut)]
    for i in range(n):
        yield structure.unflatten([p[i] for p in pieces]), len(range(size)[i::n]) / size


class Mean:
    """The weighted mean of gradients and losses that come one after the other; ``aux`` as they came."""

    def __init__(self) -> None:
        self.grads: Any = None
        self.loss: Any = 0.0
        self.aux: list[Any] = []

    def add(self, grads: Any, loss: Tensor, aux: Any, weight: float) -> None:
        """Add a part with its weight."""
        self.loss = self.loss + weight * loss
        self.aux.append(aux)
        with torch.no_grad():
            if self.grads is None:
                self.grads = optree.tree_map(lambda g: g * weight, grads)
            else:
                self.grads = optree.tree_map(lambda t, g: t.add_(g, alpha=weight), self.grads, grads)


def monitored(info: Any, grads: Any, tx: Any, state: Any) -> Any:
    """The report with the gradient's norm and the temperature in force, where it has places for them."""
    if "gradient_norm" not in info._fields:
        return info
    with torch.no_grad():
        norms = [whole(torch.linalg.vector_norm(g)) for g in optree.tree_leaves(grads)]
        norm = torch.linalg.vector_norm(torch.stack([x.to(info.loss.dtype) for x in norms]))
        return info._replace(gradient_norm=norm, temperature=temperature(tx, state, info.loss))


def temperature(tx: Any, state: Any, like: Tensor) -> Tensor:
    """The temperatures of a chain's links at the state's count: 0-d, or one for each of several groups of parameters."""
    links = getattr(getattr(tx, "transformation", tx), "links", ())
    found = [
        scalar(now(link.temperature, entry.count), like.device).to(like.dtype)
        for link, entry in zip(links, getattr(state, "inner", state))
        if hasattr(link, "temperature") and isinstance(getattr(entry, "count", None), Tensor)
    ]
    return found[0] if len(found) == 1 else torch.stack(found) if found else like.new_zeros(())


def split(aux: Any) -> tuple[list[Tensor], list[Any]]:
    """The tensors of a tree, and the rest of it for :func:`joined`."""
    leaves, structure = optree.tree_flatten(aux, none_is_leaf=True)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return tensors, [structure, *[None if isinstance(x, Tensor) else (x,) for x in leaves]]


def joined(tensors: Sequence[Tensor], rest: Sequence[Any]) -> Any:
    """The tree again."""
    structure, *places = rest
    given = iter(tensors)
    return structure.unflatten([next(given) if place is None else place[0] for place in places])


def described(out: Any) -> str:
    """What a loss returned, in short."""
    if isinstance(out, tuple):
        return f"a tuple of {len(out)}: ({', '.join(type(x).__name__ for x in out)})"
    return type(out).__name__
