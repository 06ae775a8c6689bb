"""Tracing: one step as a graph of ATen operations, with every tensor that the step closes over among its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from bayesopt_chain import _torch
from bayesopt_chain.loop.capture.buffers import Body
from bayesopt_chain.loop.capture.errors import CaptureError, describe, first_line, is_about_values, users_line
from bayesopt_chain.loop.module_state import keyed
from bayesopt_chain.random.philox_cpu import normals_kernel


def trace(body: Body) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Trace one step.

    Returns:
        Its graph, a function of (static buffers, batch, closed-over tensors) that writes the buffers; and the closed-over
        tensors.

    Raises:
        CaptureError: the step needs a value or a shape that is known only when it runs, or draws by other numbers than the
            state's key.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    n = len(body.static)
    batch = [x.detach() for x in body.batch.of_step(body.batch.tensors, 0)]  # a tensor given twice is two inputs
    mutations = _Mutations()
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # without symbols: a value or shape it does not know is an error

    def function(*flat):
        with mutations:
            new, report = body.advance(flat[:n], flat[n:])
            report = [x.clone() for x in report]
        body.write(flat[:n], new)
        return report

    try:
        fakes = [mode.from_tensor(x, static_shapes=True) for x in (*body.static, *batch)]
        with torch.no_grad(), _torch.without_mkldnn(), mode:
            graph = make_fx(function)(*fakes)
    except CaptureError:
        raise
    except Exception as err:
        line = users_line(err)
        if line is None or not is_about_values(err):
            raise
        raise CaptureError(
            f"capture: {line} needs a value or a shape that is known only when the step runs ({first_line(err)}). "
            "Write it with tensors (torch.where for a branch, a schedule that is a function of the count), "
            "or leave this step uncaptured"
        ) from err
    finally:
        mutations.undo()
    _require_keyed_draws(graph, body)
    return graph, _lift_constants(graph)


def _require_keyed_draws(graph: torch.fx.GraphModule, body: Body) -> None:
    """Refuse operations that draw by torch's own generator, since a replay would draw other numbers than the step."""
    drawing = [node for node in graph.graph.nodes if _draws(node)]
    if drawing and keyed(body.state.as_tree()):
        raise CaptureError(
            f"capture: the step draws by {drawing[0].target} inside an operation, which cannot follow the state's key (fused "
            "attention, the dropout of an LSTM, in-place draws); give it dropout=0, with dropout layers beside it, or "
            "leave this step uncaptured"
        )


def _draws(node: torch.fx.Node) -> bool:
    """Whether an operation draws by torch's own generator. Fused attention is marked as one that does, and at ``dropout_p=0``
    draws nothing."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    operation: Any = node.target
    defaults = {a.name: a.default_value for a in operation._schema.arguments}
    given: dict[str, Any] = defaults | dict(zip(defaults, node.args)) | dict(node.kwargs)
    return given.get("dropout_p") != 0.0


class _Mutations(TorchDispatchMode):
    """Remembers closed-over tensors before the traced step writes them, such as BatchNorm's statistics, to put them back."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            with _disable_current_modes():
                for x in args:
                    if type(x) in (Tensor, torch.nn.Parameter) and id(x) not in self.before:
                        self.before[id(x)] = x, x.detach().clone()
        return func(*args, **(kwargs or {}))

    def undo(self) -> None:
        with torch.no_grad():
            for x, old in self.before.values():
                x.copy_(old)


def _lift_constants(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that the graph holds as constants into inputs, so that their values are read at every replay."""
    lifted: dict[int, tuple[torch.fx.Node, Tensor]] = {}
    for node in list(graph.graph.nodes):
        if node.op == "get_attr" and torch.is_tensor(value := getattr(graph, node.target, None)):
            if id(value) not in lifted:
                lifted[id(value)] = new_input(graph, f"closed_over_{len(lifted)}", node.meta), value
            node.replace_all_uses_with(lifted[id(value)][0])
            graph.graph.erase_node(node)
    graph.recompile()
    return [value for _, value in lifted.values()]


def new_input(graph: torch.fx.GraphModule, name: str, meta: dict) -> torch.fx.Node:
    """A further input of a graph, behind the others."""
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1:]
    with graph.graph.inserting_after(last[0]) if last else graph.graph.inserting_before(None):
        placeholder = graph.graph.placeholder(name)
    placeholder.meta.update(meta)
    return placeholder


def lift_draws(graph: torch.fx.GraphModule, static: list[Tensor]) -> tuple[list[Tensor], list[Callable[[], None]]]:
    """Have normals drawn into further inputs of the graph: these buffers, and what fills them before the graph runs.

    A draw that allocates its result costs page faults in every call, which for large leaves take as long as the draw. Where
    key and count are static buffers, which stay where they are, the kernel is called with their addresses before the graph:
    torch's way to an operation costs more than the normals of a small step. Other draws stay in the graph.
    """
    buffers, fills = list[Tensor](), list[Callable[[], None]]()
    ops = torch.ops.bayesopt_chain
    places = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    for node in graph.graph.find_nodes(op="call_function", target=ops.philox_normals.default):
        *about, dtype = node.args
        key, step, *numbers = about
        buffer = torch.empty(node.meta["val"].shape, dtype=dtype, device=node.meta["val"].device)
        place = new_input(graph, f"draw_{len(buffers)}", node.meta)
        known = [static[i] for x in (key, step) if (i := places.get(_origin(x), len(static))) < len(static)]
        kernel = normals_kernel() if buffer.device.type == "cpu" else None
        if kernel is not None and len(known) == 2 and all(x.shape == buffer.shape[:-1] and x.ndim < 2 for x in known):
            bind: Any = kernel
            fills.append(bind.bound(buffer, *known, *map(tuple, numbers)))
        else:
            with graph.graph.inserting_before(node):
                graph.graph.call_function(ops.philox_normals_.default, (place, *about))
        node.replace_all_uses_with(place)
        graph.graph.erase_node(node)
        buffers.append(buffer)
    graph.recompile()
    return buffers, fills


def _origin(node: Any) -> Any:
    """Find the node that made a tensor which a node returns under another name."""
    while node.op == "call_function" and node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        node = node.args[0]
    return node


def overwritten(graph: torch.fx.GraphModule, closed_over: list[Tensor]) -> list[Tensor]:
    """The closed-over tensors whose memory the step writes."""
    written = set()
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        for n, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = node.args[n] if n < len(node.args) else node.kwargs.get(argument.name)
                for x in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(x, torch.fx.Node):
                        written.add(_torch.storage_of(x.meta["val"]))
    placeholders = graph.graph.find_nodes(op="placeholder")[-len(closed_over) :] if closed_over else []
    return [x for x, node in zip(closed_over, placeholders) if _torch.storage_of(node.meta["val"]) in written]


def check_devices(graph: torch.fx.GraphModule, body: Body) -> None:
    """Refuse tensors on the CPU, which a CUDA graph would read when it is recorded and never again.

    Literals in the code of the step are constants anyway, and may be there.

    Raises:
        CaptureError: naming the tensor.
    """
    device = body.static[0].device
    placeholders = graph.graph.find_nodes(op="placeholder")
    first = len(body.static) + len(body.batch.tensors)
    for n, node in enumerate(placeholders):
        literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        if not node.users:  # what the state keeps for absent parameters stays as it is
            continue
        if node.meta["val"].device != device and not (n >= first and literal):
            what = (
                "batch" if len(body.static) <= n < first else "params or state" if n < first else "a closed-over tensor"
            )
            raise CaptureError(
                f"capture: {what}: {describe(node.meta['val'])} is not on {device}, so that replays would not see it change; "
                f"move it there first (.to({str(device)!r}))"
            )
