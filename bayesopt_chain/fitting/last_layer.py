"""The last layer of a module: which parameters it has, and the features it sees.

It is found from the graph of a real forward pass: going back from the output, the first modules without submodules (and with
trained parameters) whose outputs are met. One head is one layer; heads whose outputs are put together, such as those of a
mean and of a variance, are the last layer together. A head that ran but does not reach the output is none.

A linear last layer makes the model linear in its parameters, ``f = W phi(x) + b``; the features ``phi(x)`` do not depend on
them, so that neither curvature nor predictions have to go through the body more than once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from bayesopt_chain.curvature._affine import Affine
from bayesopt_chain.curvature._plan import batch_size, part
from bayesopt_chain.modules.functional import Forward
from bayesopt_chain.predict._joint import needs_graph

Body = Mapping[str, tuple[Tensor, int]]


class HeadBatch(NamedTuple):
    """A batch as a linear last layer sees it: features ``[B, *, D]`` and targets."""

    features: Tensor
    targets: Any


class LastLayer(NamedTuple):
    """The parameters of the last layer, by name; its first module; whether that is a linear layer whose output is the model's;
    what it saw of the batch."""

    names: tuple[str, ...]
    module: nn.Module
    is_head: bool
    inputs: tuple[Any, ...]


class Call(NamedTuple):
    """One run of a layer: its name, what it was called with, what it returned, and the graph's nodes of that, by then."""

    name: str
    inputs: tuple[Any, ...]
    output: Any
    nodes: list[Any]


def find_last_layer(forward: Forward, params: Mapping[str, Tensor], batch: Any) -> LastLayer:
    """The layers with trained parameters whose outputs reach the module's output through no other such layer.

    Raises:
        ValueError: there is none; parameters that act behind it; a module whose outputs are random, or mix data.
    """
    own = _owners(forward.module, params)
    chosen = {name: p.detach().requires_grad_(p.is_floating_point()) for name, p in params.items()}
    output, calls = _watched(forward, chosen, batch, own)
    if not isinstance(output, Tensor):
        raise ValueError(
            f"fit_laplace: the module returns {type(output).__name__}, not a tensor: pass outputs=, the key of its outputs or "
            "a function from it to them"
        )
    reached, behind = _reached(output, calls, chosen)
    if behind:
        raise ValueError(
            f"fit_laplace: the output depends on {', '.join(sorted(behind))} behind every layer, so that there is no last "
            "layer that is a module of its own: pass subset= the names to keep, or subset='all'"
        )
    if not reached:
        raise ValueError(
            "fit_laplace: no layer of the module with trained parameters of its own reaches the output, so that there is no "
            f"last layer: pass subset= the names to keep, of {sorted(params)[:8]}, or subset='all'"
        )
    require_still(forward, params, batch)
    names = tuple(dict.fromkeys(name for call in reached for name in own[call.name] if name in params))
    first = reached[0]
    layer = forward.module.get_submodule(first.name)
    runs = sum(not set(own[call.name]).isdisjoint(names) for call in calls)
    is_alone = len(reached) == 1 and runs == 1 and len(own[first.name]) == len(names) and len(first.inputs) == 1
    is_head = is_alone and type(layer) is nn.Linear and first.output is output and first.nodes == [output.grad_fn]
    return LastLayer(names, layer, is_head, tuple(map(_detached, first.inputs)))


def _owners(module: nn.Module, params: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The parameters of every module that has trained ones and no submodule with any, by the name each was given first."""
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    out = {}
    for name, layer in module.named_modules():
        mine = [first_names[id(p)] for p in layer.parameters(recurse=False)]
        below = [p for child in layer.children() for p in child.parameters()]
        if any(n in params for n in mine) and not below:
            out[name] = mine
    return out


def _watched(
    forward: Forward, params: Mapping[str, Tensor], batch: Any, own: Mapping[str, list[str]]
) -> tuple[Any, list[Call]]:
    """The output with its graph, and the calls of the layers."""
    calls: list[Call] = []

    def remember(name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            # now: what changes the output in place afterwards is another node
            nodes = [x.grad_fn for x in optree.tree_leaves(output) if isinstance(x, Tensor) and x.grad_fn is not None]
            calls.append(Call(name, inputs, output, nodes))

        return hook

    handles = [forward.module.get_submodule(name).register_forward_hook(remember(name)) for name in own]
    try:
        with torch.enable_grad():
            return forward(params, batch), calls
    finally:
        for handle in handles:
            handle.remove()


def _reached(output: Tensor, calls: list[Call], params: Mapping[str, Tensor]) -> tuple[list[Call], list[str]]:
    """The calls met first from the output on, in the order in which they ran; matrices that are met outside of any call.

    Numbers and vectors that act behind the last layer, such as a logit scale or a shift of the output, stay as they are.
    """
    call_of = {node: i for i, call in enumerate(calls) for node in call.nodes}
    name_of = {id(p): name for name, p in params.items()}
    met: set[int] = set()
    behind: list[str] = []
    seen, stack = set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in call_of:
            met.add(call_of[node])
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in name_of and leaf.ndim >= 2:
            behind.append(name_of[id(leaf)])
        stack.extend(following for following, _ in node.next_functions)
    return [calls[i] for i in sorted(met)], behind


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


@torch.no_grad()
def require_still(forward: Forward, params: Mapping[str, Tensor], batch: Any) -> None:
    """Raise unless two data have the same outputs twice, and the first of them alone.

    Raises:
        ValueError: outputs that are random, or that depend on the rest of the batch.
    """
    size, two = batch_size(batch), part(batch, 0, 2)
    once, again = forward(params, two), forward(params, two)
    scale = torch.finfo(once.dtype).eps ** 0.5 * (1 + once.abs().amax())
    if bool((once - again).abs().amax() > scale):
        raise ValueError(
            "fit_laplace: the outputs are random, others for the same inputs and parameters at every call (dropout?): call "
            "module.eval() first, or make the layer deterministic"
        )
    if size > 1:
        alone = forward(params, part(batch, 0, 1))
        if alone.shape[1:] != once.shape[1:] or bool((once[:1] - alone).abs().amax() > scale):
            raise ValueError(
                "fit_laplace: the outputs of a datum depend on the rest of its batch (batch statistics?): call module.eval() "
                "first, or leave that layer out"
            )


def body_of(module: nn.Module, params: Mapping[str, Tensor] | None, names: Iterable[str]) -> Body:
    """All tensors that the features depend on, which are all but the last layer's, each with its version."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers()), **(params or {})}
    last = set(names)
    return {name: (tensor, tensor._version) for name, tensor in own.items() if name not in last}


@dataclass(frozen=True)
class Features:
    """``features(batch)``: what the last layer sees of a batch; a :class:`HeadBatch` is handed through.

    They have a graph where somebody may differentiate them by the inputs.
    """

    forward: Forward
    params: Mapping[str, Tensor]
    layer: nn.Module
    body: Body

    def __call__(self, batch: Any) -> HeadBatch:
        if isinstance(batch, HeadBatch):
            return batch
        seen: list[Tensor] = []
        graph = needs_graph(batch)
        handle = self.layer.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
        try:
            with torch.set_grad_enabled(graph):
                self.forward(self.params, batch)
        finally:
            handle.remove()
        return HeadBatch(seen[-1] if graph else seen[-1].detach(), batch[1])


def head(names: tuple[str, ...]) -> Affine:
    """The linear layer whose parameters have these names: ``head(params, (features, targets)) -> outputs``."""
    weight = next(name for name in names if name.rpartition(".")[2] == "weight")
    return Affine(weight, next((name for name in names if name.rpartition(".")[2] == "bias"), None))
