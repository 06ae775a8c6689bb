"""Trace one step into a graph of ATen operations whose inputs include every tensor that the step closes over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from bayesopt_chain import _torch
from bayesopt_chain.loop.capture.buffers import Body
from bayesopt_chain.loop.capture.errors import CaptureError, describe, first_line, is_about_values, users_line
from bayesopt_chain.random.philox_cpu import normals_kernel
from bayesopt_chain.random.stream import keyed


def trace(body: Body) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Trace one step.

    Returns:
        The graph, a function of (static buffers, batch, closed-over tensors) that writes the static buffers; and the
        closed-over tensors.

    Raises:
        CaptureError: the step needs a value or a shape that is known only when it runs, or it has random numbers that are no
            function of the state's key.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    n = len(body.static)
    # detach makes two inputs of a tensor that is in the batch twice
    batch = [x.detach() for x in body.batch.of_step(body.batch.tensors, 0)]
    mutations = _Mutations()
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # without symbols, so that an unknown value or shape is an error

    def function(*flat):
        """Make one step, and write the static buffers."""
        with mutations:
            new, report = body.advance(flat[:n], flat[n:])
            report = [x.clone() for x in report]  # a report may be a view of a buffer, which is written next
        body.write(flat[:n], new)
        return report

    try:
        fakes = [mode.from_tensor(x, static_shapes=True) for x in (*body.static, *batch)]
        with torch.no_grad(), _torch.switched_off(torch.backends.mkldnn), mode:
            graph = make_fx(function)(*fakes)
    except CaptureError:
        raise
    except Exception as err:
        # an error that is not about unknown values is raised as it is; that of chains under vmap has the model's as its cause
        cause = err.__cause__ or err
        line = users_line(cause)
        if line is None or not is_about_values(cause):
            raise
        raise CaptureError(
            f"capture: {line} needs a value or a shape that is known only when the step runs ({first_line(cause)}). "
            "Write it with tensors (torch.where for a branch, a schedule that is a function of the count), "
            "or leave this step uncaptured"
        ) from cause
    finally:
        mutations.undo()
    _require_keyed_draws(graph, body)
    return graph, _lift_constants(graph)


def _require_keyed_draws(graph: torch.fx.GraphModule, body: Body) -> None:
    """Raise CaptureError for operations that use torch's own generator in a step whose state has a key.

    A replay would draw other numbers than the step.
    """
    drawing = [node for node in graph.graph.nodes if _draws(node)]
    if drawing and keyed(body.state.as_tree()):
        raise CaptureError(
            f"capture: the step draws by {drawing[0].target} inside an operation, which cannot follow the state's key (fused "
            "attention, the dropout of an LSTM, in-place draws); give it dropout=0, with dropout layers beside it, or "
            "leave this step uncaptured"
        )


def _draws(node: torch.fx.Node) -> bool:
    """Whether an operation uses torch's own generator.

    Fused attention has the tag of such operations, but does not use the generator at ``dropout_p=0``.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    operation: Any = node.target
    defaults = {a.name: a.default_value for a in operation._schema.arguments}
    given: dict[str, Any] = defaults | dict(zip(defaults, node.args)) | dict(node.kwargs)
    return given.get("dropout_p") != 0.0


class _Mutations(TorchDispatchMode):
    """Copies closed-over tensors before the traced step writes them (BatchNorm's statistics, say), to restore them later."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            given: Any = args, kwargs
            with _disable_current_modes():
                for x in optree.tree_leaves(given):
                    if type(x) in (Tensor, torch.nn.Parameter) and id(x) not in self.before:
                        self.before[id(x)] = x, x.detach().clone()
        return func(*args, **(kwargs or {}))

    def undo(self) -> None:
        """Restore all tensors that were written."""
        with torch.no_grad():
            for x, old in self.before.values():
                x.copy_(old)


def _lift_constants(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that the graph holds as constants into inputs, so that their values are read at every replay."""
    lifted: dict[int, tuple[Tensor, list[torch.fx.Node]]] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        if torch.is_tensor(value := getattr(graph, node.target, None)):
            lifted.setdefault(id(value), (value, []))[1].append(node)
    for i, (_, nodes) in enumerate(lifted.values()):
        replace_by_input(graph, nodes, f"closed_over_{i}")
    graph.recompile()
    return [value for value, _ in lifted.values()]


def replace_by_input(graph: torch.fx.GraphModule, nodes: Sequence[torch.fx.Node], name: str) -> None:
    """Replace nodes, whose values are the same, by one further input of a graph."""
    place = new_input(graph, name, nodes[0].meta)
    for node in nodes:
        node.replace_all_uses_with(place)
        graph.graph.erase_node(node)


def new_input(graph: torch.fx.GraphModule, name: str, meta: dict) -> torch.fx.Node:
    """Add an input to a graph, after its other inputs, with the metadata of another node."""
    last = graph.graph.find_nodes(op="placeholder")[-1:]
    with graph.graph.inserting_after(last[0]) if last else graph.graph.inserting_before(None):
        placeholder = graph.graph.placeholder(name)
    placeholder.meta.update(meta)
    return placeholder


def lift_draws(graph: torch.fx.GraphModule, static: list[Tensor]) -> tuple[list[Tensor], list[partial[None]]]:
    """Replace the normal draws of a graph by further inputs, where their keys and counts are static buffers.

    The kernel is then called before the graph, with addresses that do not change: torch's dispatch of an operation takes longer
    than the draws of a small step, and an operation that allocates its result causes page faults in every call, which for large
    leaves take as long as the draw itself. A draw whose key or count the graph computes stays an operation of the graph.

    Args:
        graph: the graph of a step on a CPU, which is changed.
        static: the static buffers, which are its first inputs.

    Returns:
        The buffers, one for each new input, and the calls that draw into them before the graph runs.
    """
    buffers, fills = list[Tensor](), list[partial[None]]()
    kernel: Any = normals_kernel()
    places = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.bayesopt_chain.philox_normals.default):
        args: Any = node.args
        *keyed, starts, lengths, draws, dtype = args
        shape = node.meta["val"].shape
        found = [input_of(x, places) for x in keyed]
        known = [static[i] for i in found if i is not None and i < len(static)]
        if kernel is None or [x.shape for x in known] != [shape[:-1]] * 2 or len(shape) > 2:
            continue
        buffer = torch.empty(shape, dtype=dtype, device="cpu")
        fills.append(kernel.bound(buffer, *known, tuple(starts), tuple(lengths), tuple(draws)))
        replace_by_input(graph, [node], f"draw_{len(buffers)}")
        buffers.append(buffer)
    return buffers, fills


def write_out_multiples(graph: torch.fx.GraphModule) -> None:
    """Write every ``x + alpha y`` as a product and a sum.

    Inductor fuses a sum with a matrix product into ``addmm`` and loses ``alpha`` by it (torch 2.13; pytorch issue 167313 is the
    same fault in the other direction), so that weight decay of a linear layer would count as 1.
    """
    for target in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
        for node in graph.graph.find_nodes(op="call_function", target=target):
            alpha, y = node.kwargs.get("alpha", 1), node.args[1]
            if alpha != 1 and isinstance(y, torch.fx.Node):
                with graph.graph.inserting_before(node):
                    multiple = graph.graph.call_function(torch.ops.aten.mul.Tensor, (y, alpha))
                node.args, node.kwargs = (node.args[0], multiple), {}


def input_of(node: Any, places: Mapping[torch.fx.Node, int]) -> int | None:
    """Return the index of the input that a node is equal to; ``None`` if it is no input.

    Args:
        node: a node.
        places: the index of each input.
    """
    aten: Any = torch.ops.aten
    while node not in places:
        # operations that return their argument unchanged
        same = node.target in (aten.detach.default, aten.alias.default) or (
            node.target is aten.permute.default and list(node.args[1]) == [*range(len(node.args[1]))]
        )
        if not same:
            return None
        node = node.args[0]
    return places[node]


def overwritten(graph: torch.fx.GraphModule, closed_over: list[Tensor]) -> list[Tensor]:
    """List the closed-over tensors whose memory the step writes."""
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
    """Check that all inputs of a graph are on the device of the parameters.

    A CUDA graph would read a tensor on the CPU only once, when it is recorded. Literals in the code of the step are constants,
    so that they may be on the CPU.

    Raises:
        CaptureError: an input is on another device; the message describes it.
    """
    device = body.static[0].device
    placeholders = graph.graph.find_nodes(op="placeholder")
    first = len(body.static) + len(body.batch.tensors)
    for n, node in enumerate(placeholders):
        literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        if not node.users:  # the state of absent parameters, which no step reads
            continue
        if node.meta["val"].device != device and not (n >= first and literal):
            what = (
                "batch" if len(body.static) <= n < first else "params or state" if n < first else "a closed-over tensor"
            )
            raise CaptureError(
                f"capture: {what}: {describe(node.meta['val'])} is not on {device}, so that replays would not see it change; "
                f"move it there first (.to({str(device)!r}))"
            )
