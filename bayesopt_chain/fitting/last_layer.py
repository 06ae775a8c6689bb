"""The last layer of a module: which parameters it has, and the features it sees.

A linear last layer makes the model linear in its parameters, ``f = W phi(x) + b``; the features ``phi(x)`` do not depend on
them, so that neither curvature nor predictions have to go through the body more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesopt_chain.curvature._affine import Affine
from bayesopt_chain.modules.functional import Forward

Body = Mapping[str, tuple[Tensor, int]]


class HeadBatch(NamedTuple):
    """A batch as a linear last layer sees it: features ``[B, *, D]``, detached, and targets."""

    features: Tensor
    targets: Any


class LastLayer(NamedTuple):
    """The parameters of the last layer, by name; whether it is linear and its output the model's; what it saw of the batch."""

    names: tuple[str, ...]
    module: nn.Module
    is_head: bool
    inputs: tuple[Any, ...]


def find_last_layer(forward: Forward, params: Mapping[str, Tensor], batch: Any) -> LastLayer:
    """The last of the module's layers with trained parameters to run, seen by running it on a batch.

    Raises:
        ValueError: no layer with parameters of its own ran.
    """
    first_names = {id(parameter): name for name, parameter in forward.module.named_parameters()}
    owners = {
        name: [first_names[id(own)] for _, own in layer.named_parameters(recurse=False)]
        for name, layer in forward.module.named_modules()
    }
    calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def remember(name: str) -> Callable:
        return lambda layer, inputs, output: calls.append((name, inputs, output))

    handles = [
        layer.register_forward_hook(remember(name))
        for name, layer in forward.module.named_modules()
        if any(own in params for own in owners[name])
    ]
    try:
        with torch.no_grad():
            output = forward(params, batch)
    finally:
        for handle in handles:
            handle.remove()
    if not calls:
        raise ValueError(
            "fit_laplace: no layer of the module with trained parameters of its own ran, so that there is no last layer: pass "
            f"subset= the names to keep, of {sorted(params)[:8]}, or subset='all'"
        )
    name, inputs, last = calls[-1]
    layer = forward.module.get_submodule(name)
    names = tuple(own for own in owners[name] if own in params)
    once = sum(not set(owners[called]).isdisjoint(names) for called, *_ in calls) == 1
    whole = len(names) == len(owners[name]) and len(inputs) == 1
    return LastLayer(names, layer, once and whole and type(layer) is nn.Linear and last is output, inputs)


def body_of(module: nn.Module, params: Mapping[str, Tensor] | None, names: Iterable[str]) -> Body:
    """All tensors that the features depend on, which are all but the last layer's, each with its version."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers()), **(params or {})}
    last = set(names)
    return {name: (tensor, tensor._version) for name, tensor in own.items() if name not in last}


@dataclass(frozen=True)
class Features:
    """``features(batch)``: what the last layer sees of a batch; a :class:`HeadBatch` is handed through."""

    forward: Forward
    params: Mapping[str, Tensor]
    layer: nn.Module
    body: Body

    def __call__(self, batch: Any) -> HeadBatch:
        if isinstance(batch, HeadBatch):
            return batch
        seen: list[Tensor] = []
        handle = self.layer.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0].detach()))
        try:
            with torch.no_grad():
                self.forward(self.params, batch)
        finally:
            handle.remove()
        return HeadBatch(seen[-1], batch[1])


def head(names: tuple[str, ...]) -> Affine:
    """The linear layer whose parameters have these names: ``head(params, (features, targets)) -> outputs``."""
    weight = next(name for name in names if name.rpartition(".")[2] == "weight")
    return Affine(weight, next((name for name in names if name.rpartition(".")[2] == "bias"), None))
