r"""The last layer of a module: which parameters it has, and the features it sees.

It is found from the graph of a real forward pass: going back from the output, the first modules with a trained matrix (and no
submodule with parameters) whose outputs are met. One head is one layer; heads whose outputs are put together, such as those of
a mean and of a variance, are the last layer together. A head that ran but does not reach the output is none. Parametrizations
(``torch.nn.utils.parametrize``) belong to the module whose tensors they make. Parameters without a matrix behind the layer
stay as they are, such as a scale or a norm, but for a bias that no such module owns: one that is added to the output,
``(d f / d b)^T v = sum v`` for every v, is the layer's.

A linear last layer makes the model linear in its parameters, ``f = W phi(x) + b``; the features ``phi(x)`` do not depend on
them, so that neither curvature nor predictions have to go through the body more than once.

A posterior over the last layer alone is that of Snoek et al. (2015).

Outputs that are derivatives of what the last layer gives: energies with forces, residuals of linear differential equations.

An interatomic potential has the energy ``e = sum_atoms w . phi(r) + b`` and the forces ``-de/dr``, taken by
``torch.autograd.grad`` inside ``forward``. Both are linear in the last layer theta = (w, b), with known responses:

    f(theta) = f(0) + R theta,          R_p = (f(s u_p) - f(0)) / s          for unit vectors u_p, exactly, for every s

So P + 1 forward passes of a batch give the Jacobian; nothing has to be differentiated twice, and the forces need no graph to
the parameters (``create_graph``). The size s, that of f(0), keeps a large constant energy from swamping the responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayesopt_chain import batches, checks
from bayesopt_chain.curvature._plan import Affine, batch_size, part
from bayesopt_chain.modules import Forward, inner_of
from bayesopt_chain.tracing import is_transformed
from bayesopt_chain.trees import flatten, unflatten

NORMS = (nn.LayerNorm, nn.RMSNorm)  # their weights may have two axes and scale entry by entry


class HeadBatch(NamedTuple):
    """A batch as a linear last layer sees it: features ``[B, *, D]`` and targets."""

    features: Tensor
    targets: Any


class LastLayer(NamedTuple):
    """The parameters of the last layer, by name; those behind it that stay as they are; what the outputs are linear functions
    of: what a linear head sees, responses where they are derivatives, None where neither is known."""

    names: tuple[str, ...]
    behind: tuple[str, ...]
    features: Features | Responses | None


class Call(NamedTuple):
    """One run of a layer: its name, what it was called with, what it returned, and the graph's nodes of that, by then."""

    name: str
    inputs: tuple[Any, ...]
    output: Any
    nodes: list[Any]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` or ``DataParallel`` wrapped, whose layers can be watched; any other as it is.

    Raises:
        ValueError: a compiled module within another; a script module.
    """
    module = inner_of(module.module if isinstance(module, nn.DataParallel) else module)
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            "fit_laplace: the layers of a script module cannot be watched: pass the module it was made from"
        )
    inner = [name for name, layer in module.named_modules() if hasattr(layer, "_orig_mod")]
    if inner:
        raise ValueError(
            f"fit_laplace: {inner[0]} was compiled by torch.compile, so that its layers cannot be watched: put the module "
            f"itself, {inner[0]}._orig_mod, in its place, or compile the whole model"
        )
    return module


def find_last_layer(forward: Forward, params: Mapping[str, Tensor], batch: Any) -> LastLayer:
    """The layers with trained matrices whose outputs reach the module's output through no other such layer.

    A model without a matrix has the layers whose outputs are met first, and a warning.

    Raises:
        ValueError: there is none; matrices that act behind it; a module whose outputs are random, or mix data.
    """
    own, batch = _owners(forward.module, params), part(batch, 0, 2)
    params = {name: p.detach() for name, p in params.items()}
    chosen = {name: p.detach().requires_grad_(p.is_floating_point()) for name, p in params.items()}
    with Differentiated() as differentiated:  # by a forward that may ask its inputs for gradients
        output, calls = _watched(forward, chosen, batches.tree_map(_detached, batch), own)
    if not isinstance(output, Tensor):
        raise ValueError(
            f"fit_laplace: the module returns {type(output).__name__}, not a tensor: pass outputs=, the key of its outputs or "
            "a function from it to them"
        )
    with_matrix = {
        name
        for name, names in own.items()
        if any(map(_is_matrix, (params[n] for n in names if n in params)))
        and not isinstance(forward.module.get_submodule(name), NORMS)
    }
    of = output if differentiated.first is None else differentiated.first
    reached, behind = _reached(of, [call for call in calls if call.name in with_matrix], chosen)
    if matrices := [name for name in behind if _is_matrix(chosen[name]) and _owner(name) not in own]:
        raise ValueError(
            f"fit_laplace: the output depends on {', '.join(sorted(matrices))} behind every layer, so that there is no last "
            "layer that is a module of its own: pass subset= the names to keep, or subset='all'"
        )
    if not reached:
        reached, behind = _reached(output, calls, chosen)
        if not reached:
            raise ValueError(
                "fit_laplace: no layer of the module with trained parameters of its own reaches the output, so that there is "
                f"no last layer: pass subset= the names to keep, of {sorted(params)[:8]}, or subset='all'"
            )
        checks.warn(
            f"fit_laplace: no layer with a matrix reaches the output, so that the last layer is {reached[0].name}, "
            "whose parameters are numbers and vectors alone: pass subset= the names to keep, or subset='all'"
        )
    is_differentiated = differentiated.first is not None
    still: Any = with_gradients(forward) if is_differentiated else forward
    require_still(still, params, batch)
    names = list(dict.fromkeys(name for call in reached for name in own[call.name] if name in params))
    rest = [name for name in behind if name not in names]
    added = [name for name in rest if _owner(name) not in own and _is_added(chosen[name], output)]
    every, behind = (*names, *added), tuple(name for name in rest if name not in added)
    if is_differentiated:
        return LastLayer(every, behind, Responses(forward, params, every))
    layer = forward.module.get_submodule(reached[0].name)
    runs = sum(not set(own[call.name]).isdisjoint(names) for call in calls)
    is_alone = not added and len(reached) == 1 and runs == 1 and len(reached[0].inputs) == 1
    is_head = is_alone and type(layer) is nn.Linear and _is_affine(layer, names, params, reached[0], output)
    return LastLayer(every, behind, Features(forward, params, layer) if is_head else None)


class Differentiated(TorchFunctionMode):
    """Records what a forward function differentiates first, by ``torch.autograd.grad``: ``first``, None where it does not.

    Raises:
        ValueError: ``torch.func`` is used there, inside of which no layer can be watched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.autograd.grad and self.first is None:
            if is_transformed():
                raise ValueError(
                    "fit_laplace: the module differentiates by torch.func, inside of which its last layer cannot be watched: "
                    "write torch.autograd.grad there, or pass subset= the names to keep, with structure='dense'"
                )
            self.first = optree.tree_leaves(args[0])[0]
        return func(*args, **(kwargs or {}))


def with_gradients(forward: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """The same function where gradients are off, for one that takes derivatives itself; data are left as they are."""

    def outputs(params: Any, batch: Any) -> Tensor:
        with torch.enable_grad():
            return forward(params, batches.tree_map(_detached, batch)).detach()

    return outputs


def _owner(name: str) -> str:
    return name.rpartition(".")[0].partition(".parametrizations")[0]


def _is_matrix(parameter: Tensor) -> bool:
    """Whether a parameter mixes entries: it has two axes, and not of three or more all but one of length 1."""
    return parameter.ndim == 2 or (parameter.ndim > 2 and parameter.numel() > max(parameter.shape))


def _is_added(parameter: Tensor, output: Tensor) -> bool:
    """Whether a parameter is a bias of the output: its pullback of random numbers is their sum over what it is added to."""
    if output.ndim < 2 or parameter.shape != output.shape[max(1, output.ndim - parameter.ndim) :]:
        return False
    v = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype, device=output.device).reshape(output.shape)
    (pulled,) = torch.autograd.grad(output, parameter, v, retain_graph=True)
    return torch.allclose(pulled, v.sum_to_size(parameter.shape), rtol=1e-3)


def _is_affine(layer: nn.Linear, names: list[str], params: Mapping[str, Tensor], call: Call, output: Tensor) -> bool:
    """Whether the output is that of the layer's trained weight and bias at its input, whatever hooks it has."""
    wanted = ["weight"] if layer.bias is None else ["bias", "weight"]
    if sorted(name.rpartition(".")[2] for name in names) != wanted or call.inputs[0].shape[:-1] != output.shape[:-1]:
        return False
    with torch.no_grad():
        again = head(tuple(names))(params, call.inputs)
    if again.shape != output.shape or again.dtype != output.dtype:  # some of its outputs alone, or one for several
        return False
    return torch.allclose(again, output, rtol=torch.finfo(again.dtype).eps ** 0.5)


def _owners(module: nn.Module, params: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The parameters of every module that has trained ones and no submodule with any, by the name each was given first.

    What its parametrizations hold counts as the module's own.
    """
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    out = {}
    for name, layer in module.named_modules():
        kept = getattr(layer, "parametrizations", nn.Module())
        mine = [first_names[id(p)] for p in (*layer.parameters(recurse=False), *kept.parameters())]
        below = [p for child in layer.children() if child is not kept for p in child.parameters()]
        if any(n in params for n in mine) and not below and ".parametrizations" not in f".{name}":
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
    """The calls met first from the output on, in the order in which they ran; parameters that are met outside of any call."""
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
        if leaf is not None and id(leaf) in name_of:
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
    size = batch_size(batch)  # which refuses an empty one
    once, again = forward(params, batch), forward(params, batch)
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


@dataclass(frozen=True)
class Features:
    """``features(batch)``: what the last layer sees of a batch.

    They have a graph where the inputs ask for gradients; ``params`` do not.
    """

    forward: Forward
    params: Mapping[str, Tensor]
    layer: nn.Module

    def __call__(self, batch: Any) -> HeadBatch:
        return HeadBatch(seen_by(self.layer, lambda: self.forward(self.params, batch)), batch[1])


def seen_by(layer: nn.Module, run: Callable[[], Any]) -> Tensor:
    """What a layer is called with last while its network runs."""
    seen: list[Tensor] = []
    handle = layer.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
    try:
        run()
    finally:
        handle.remove()
    return seen[-1]


def head(names: tuple[str, ...]) -> Affine:
    """The linear layer whose parameters have these names: ``head(params, (features, targets)) -> outputs``."""
    weight = next(name for name in names if name.rpartition(".")[2] == "weight")
    return Affine(weight, next((name for name in names if name.rpartition(".")[2] == "bias"), None))


LINEAR = 1e3  # rounding units by which outputs may differ from a straight line


@dataclass(frozen=True)
class Responses:
    """``responses(batch)``: of every output its response to each parameter of the last layer, and its value without it.

    They are the features of a :class:`HeadBatch`, ``[B, *event, P + 1]``.
    """

    forward: Forward
    params: Mapping[str, Tensor]
    names: tuple[str, ...]

    @property
    def kept(self) -> dict[str, Tensor]:
        """The parameters of the last layer."""
        return {name: self.params[name] for name in self.names}

    def __call__(self, batch: Any) -> HeadBatch:
        theta = flatten(self.kept, self.kept)
        alone = self.outputs(0 * theta, batch)
        s = float(alone.abs().amax().clamp_min(1))
        units = s * torch.eye(len(theta), dtype=theta.dtype, device=theta.device)
        responses = [(self.outputs(u, batch) - alone) / s for u in units]
        return HeadBatch(torch.stack([*responses, alone], -1), batch[1])

    def outputs(self, theta: Tensor, batch: Any) -> Tensor:
        """The model's outputs with other parameters of the last layer, ``[B, *event]``."""
        return with_gradients(self.forward)({**self.params, **unflatten(theta, self.kept)}, batch)

    def are_linear(self, batch: Any) -> bool:
        """Whether the outputs at twice the parameters lie on a straight line through those at once and at none."""
        theta = flatten(self.kept, self.kept)
        none, once, twice = (self.outputs(k * theta, batch) for k in (0, 1, 2))
        scale = torch.stack([none, once, twice]).abs().amax()
        return bool((twice - 2 * once + none).abs().amax() <= LINEAR * torch.finfo(none.dtype).eps * scale)


def respond(params: Mapping[str, Tensor], batch: HeadBatch) -> Tensor:
    """The outputs, from responses ``[B, *event, P + 1]``."""
    tree: Any = params
    theta = torch.cat([leaf.reshape(-1) for leaf in optree.tree_leaves(tree)])
    return batch[0][..., :-1] @ theta + batch[0][..., -1]
