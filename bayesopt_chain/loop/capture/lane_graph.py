"""Rewrite the graph of a step of many small chains, so that one vector instruction computes several chains.

A batched product of small matrices, one for each chain (``bmm``), uses few columns at a time. If the chains are the last axis
in memory (:mod:`bayesopt_chain.loop.capture.lane_kernels`), the product is a multiplication and a sum over axes before that of
the chains. Inductor fuses both with the neighbouring operations, and computes as many chains at a time as a vector has lanes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from bayesopt_chain.loop.capture.graph import input_of, new_input, replace_by_input
from bayesopt_chain.loop.capture.lane_kernels import in_lanes
from bayesopt_chain.random.philox_cpu import normals_kernel

aten: Any = torch.ops.aten
_normals: Any = torch.ops.bayesopt_chain.philox_normals.default

# the largest number of multiplications in the product of one chain for lanes; with 12,800 they took 1.13 times as long as bmm
SMALL = 1 << 10
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_NAMES = (  # operations, besides pointwise ones, that inductor computes in any layout, and that fail for no value
    "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data _to_copy _unsafe_view alias amax amin any arange "
    "bmm cat clone copy_ detach empty empty_like expand fill_ full full_like getitem lift_fresh_copy logsumexp mean new_zeros "
    "ones_like permute philox_normals prod reshape scalar_tensor select slice split split_with_sizes squeeze stack sum t "
    "threshold_backward tanh_backward sigmoid_backward transpose unbind unsqueeze view zeros zeros_like"
)
_KNOWN = {*_NAMES.split()}
_DIVISIONS = {"div", "divide", "floor_divide", "fmod", "remainder"}


class Rows:
    """Finds operations ``table[rows]`` in a graph, with a table for all chains and row numbers for each chain.

    Attributes:
        places: the index of each input of the graph.
        chains: the number of chains.
        own: for each input, whether its axis 0 is that of the chains.
    """

    def __init__(self, graph: GraphModule, chains: int, own: Sequence[bool]) -> None:
        inputs = graph.graph.find_nodes(op="placeholder")
        self.places = {node: i for i, node in enumerate(inputs)}
        self.chains, self.own = chains, own

    def found(self, node: Node) -> tuple[int, int] | None:
        """Return the indices of the inputs table and rows if a node is ``table[rows]``, else ``None``."""
        args: Any = node.args
        if node.target is not aten.index.Tensor or len(args[1]) != 1:
            return None
        indices = args[1]
        table, rows = input_of(args[0], self.places), input_of(indices[0], self.places)
        if table is None or rows is None or self.own[table] or not self.own[rows]:
            return None
        numbers, value = indices[0].meta["val"], node.meta["val"]
        # the kernel stores row numbers as int32, and copies elements of up to 8 bytes
        whole = (
            numbers.dtype in (torch.int32, torch.int64)
            and numbers.shape[0] == self.chains
            and value.element_size() <= 8
            and args[0].meta["val"].shape[0] < 2**31
        )
        return (table, rows) if whole and value.shape[0] == self.chains else None


def suits(graph: GraphModule, chains: int, own: Sequence[bool]) -> bool:
    """Whether a step with small products is safe in lanes.

    It is safe if every other operation is one that inductor computes in any layout, and that cannot fail for a value: blocks of
    chains run one after the other, and a failure in a later block would leave the earlier blocks moved.

    Args:
        graph: the graph of one step of all chains.
        chains: the number of chains.
        own: for each input of the graph, whether its axis 0 is that of the chains.
    """
    rows = Rows(graph, chains, own)
    if any(own[i] and node.meta["val"].element_size() > 8 for node, i in rows.places.items()):
        return False
    for node in graph.graph.nodes:
        if node.op != "call_function" or not (node.users or node.is_impure()):  # inductor removes such a node
            continue
        if node.target is _normals:
            if normals_kernel() is None or node.args[2] or any(input_of(x, rows.places) is None for x in node.args[:2]):
                return False
        elif rows.found(node) is None and not _is_known(node):
            return False
    return True


def products_are_small(graph: GraphModule, chains: int) -> bool:
    """Whether the graph of one step of all chains has products of matrices, one for each chain, that are all small."""
    found = graph.graph.find_nodes(op="call_function", target=aten.bmm.default)
    used = [node for node in found if node.users]
    return bool(used) and all([_is_small(node, chains) for node in used])


def bytes_of_a_chain(graph: GraphModule, chains: int, own: Sequence[bool]) -> int:
    """Return the number of bytes that a step reads for each chain: its inputs, its rows of tables, and its normals.

    Args:
        graph: the graph of one step of all chains.
        chains: the number of chains.
        own: for each input of the graph, whether its axis 0 is that of the chains.
    """
    rows = Rows(graph, chains, own)
    inputs = [node for node, i in rows.places.items() if own[i]]
    drawn = [node for node in graph.graph.nodes if node.target is _normals or rows.found(node)]
    return sum([x.numel() * x.element_size() // chains for x in [node.meta["val"] for node in [*inputs, *drawn]]])


def _is_literal(node: Any) -> bool:
    """Whether a tensor is a literal in the code of the step, possibly in another shape."""
    while node is not None and node.target in (*_VIEWS, aten.expand.default, aten.unsqueeze.default):
        node = node.args[0]
    return node is None or node.target is aten.lift_fresh_copy.default


def _is_known(node: Node) -> bool:
    """Whether inductor computes an operation in any layout, and whether it fails for no value."""
    target, args = cast(Any, node.target), cast(Any, node.args)
    if target is operator.getitem:
        return True
    if target is aten.index.Tensor:
        return all(map(_is_literal, args[1]))
    if target is aten.scatter.src:
        return _is_literal(args[2])
    schema = getattr(target, "_schema", None)
    if schema is None or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    name = schema.name.split("::")[1]
    if name.strip("_") in _DIVISIONS and not node.meta["val"].is_floating_point():  # integer division by zero fails
        return False
    return torch.Tag.pointwise in target.tags or name in _KNOWN


def _is_small(node: Node, chains: int) -> bool:
    """Whether a ``bmm`` has one small product for each chain."""
    args: Any = node.args
    a, b = (x.meta["val"].shape for x in args)
    return a[0] == chains and a[1] * a[2] * b[2] <= SMALL


def products(graph: GraphModule) -> None:
    """Replace every ``bmm`` by a multiplication and a sum, with the axis of the chains (``C``) last."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.bmm.default):
        with graph.graph.inserting_before(node):
            call = graph.graph.call_function
            left = call(aten.unsqueeze.default, (call(aten.permute.default, (node.args[0], [1, 2, 0])), 2))  # M K 1 C
            right = call(aten.unsqueeze.default, (call(aten.permute.default, (node.args[1], [1, 2, 0])), 0))  # 1 K N C
            both = call(aten.sum.dim_IntList, (call(aten.mul.Tensor, (left, right)), [1]))  # M N C
            node.replace_all_uses_with(call(aten.permute.default, (both, [2, 0, 1])))
        graph.graph.erase_node(node)
    for node in graph.graph.nodes:  # strides have changed, so that a view may not be possible
        if node.target in _VIEWS:
            node.target = aten.reshape.default


def lift_gathers(graph: GraphModule, rows: Rows) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Replace operations ``table[rows]`` by further inputs of the graph.

    Returns:
        For each new input, a buffer in lanes, and the indices of the inputs table and rows.
    """
    found: dict[tuple[int, int], list[Node]] = {}
    for node in graph.graph.find_nodes(op="call_function", target=aten.index.Tensor):
        if (places := rows.found(node)) is not None:
            found.setdefault(places, []).append(node)
    rooms = [_room(nodes[0], rows.chains) for nodes in found.values()]
    for i, nodes in enumerate(found.values()):
        replace_by_input(graph, nodes, f"rows_{i}")
    return rooms, [*found]


def lift_normals(graph: GraphModule, rows: Rows) -> tuple[list[Tensor], list[tuple[Any, ...]]]:
    """Replace the normal draws of all chains by further inputs of the graph.

    Returns:
        For each new input, a buffer in lanes; and the indices of the inputs that are its key and its count, and the lengths and
        numbers of its draws.
    """
    rooms, draws = list[Tensor](), list[tuple[Any, ...]]()
    for node in graph.graph.find_nodes(op="call_function", target=_normals):
        args: Any = node.args
        *keyed, _, lengths, numbers, _ = args
        rooms.append(_room(node, rows.chains))
        draws.append((*[input_of(x, rows.places) for x in keyed], tuple(lengths), tuple(numbers)))
        replace_by_input(graph, [node], f"draw_{len(rooms)}")
    return rooms, draws


def _room(node: Node, chains: int) -> Tensor:
    """A buffer in lanes for the value of a node."""
    like = node.meta["val"]
    return in_lanes(torch.empty(like.shape, dtype=like.dtype, device="cpu"), chains)


def lift_report(graph: GraphModule, chains: int) -> list[Tensor]:
    """Let the graph write its results into further inputs, and return nothing.

    Returns:
        For each result, a buffer in lanes.
    """
    (output,), rooms = graph.graph.find_nodes(op="output"), list[Tensor]()
    for value in cast(Any, output.args[0]):
        rooms.append(_room(value, chains))
        room = new_input(graph, f"report_{len(rooms)}", value.meta)
        with graph.graph.inserting_before(output):
            graph.graph.call_function(aten.copy_.default, (room, value))
    output.args = ((),)
    return rooms
