"""What rules with noise of their own share: a keyed stream, a temperature now, and one way to write results back.

Their states are NamedTuples that begin with ``key`` and ``count`` (0-d, int64), the stream of
:mod:`bayesopt_chain.random.stream`; the other fields are theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import checks, tracing
from bayesopt_chain.core import counters
from bayesopt_chain.core.response import Refused
from bayesopt_chain.random import stream as keyed_stream

ITS_OWN_NOISE = Refused("it brings noise of its own; leave inject_langevin_noise out of this chain")


def start(params: list, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """A fresh key and a count of zero, on the parameters' device."""
    checks.parameters(params, [(i,) for i in range(len(params))])
    device = next(p.device for p in params if p is not None)
    return keyed_stream.new_key(generator, device), torch.zeros((), dtype=torch.int64, device=device)


def draw(state: Any, templates: list, draws: int, kind: str = "gaussian") -> list[list[Tensor]]:
    """``draws`` variables like every template (a leaf or ``None``) for this step of ``state``'s stream."""
    like = [torch.empty(1, 0) if t is None else t.unsqueeze(0) for t in templates]
    return keyed_stream.normals(state.key, state.count, like, [0 if t is None else draws for t in templates], kind)


def tick(count: Tensor, inplace: bool) -> Tensor:
    """The next count."""
    return count.add_(1) if inplace else count + 1


def now(value: Any, count: Tensor) -> float | Tensor:
    """A number as it is; a tensor or a schedule's value as a detached float64 tensor."""
    if isinstance(value, (int, float)):
        return float(value)
    value = value(count) if callable(value) and not torch.is_tensor(value) else value
    return counters.scalar(value, count.device).detach()


def root(value: float | Tensor) -> float | Tensor:
    """Square root of a number or a tensor."""
    return value.sqrt() if torch.is_tensor(value) else value**0.5


def is_zero(value: Any) -> bool:
    """Whether a temperature is the Python number 0."""
    return isinstance(value, (int, float)) and value == 0


def write(old: tuple, new: list, inplace: bool) -> tuple[Tensor, ...]:
    """The new tensors of a state, in the place of the old ones if asked; ``None`` keeps the old one."""
    return tuple(
        o if n is None else o.copy_(n) if inplace else n.to(o.dtype) if n.dtype != o.dtype else n
        for o, n in zip(old, new)
    )


def emit(g: list, moves: list, inplace: bool) -> list:
    """The updates, in the gradients' buffers and dtype."""
    return [None if x is None else x.copy_(m) if inplace else m.to(x.dtype) for x, m in zip(g, moves)]


def positive_temperature(who: str, temperature: Any, why: str) -> None:
    """Refuse temperature 0 for a sampler that is no optimizer there."""
    checks.temperature(temperature)
    value = temperature.item() if torch.is_tensor(temperature) and not tracing.is_hidden(temperature) else temperature
    if is_zero(value):
        raise ValueError(f"{who}: temperature must be positive, got {value}: {why}")
