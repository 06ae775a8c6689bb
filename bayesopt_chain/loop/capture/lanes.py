"""Replay a step of many small chains on a CPU block by block, with the chains as the last axis in memory.

If chains of few parameters are stacked on axis 0, vector instructions are mostly empty, and all chains together do not fit the
cache. Here one block of chains after the other is copied into buffers in lanes
(:mod:`bayesopt_chain.loop.capture.lane_kernels`), makes all steps of the call there, and is copied back. All blocks run the
same program and have the same size. The last block therefore overlaps with the block before it: the chains in both are computed
twice, and written once.

Row numbers of the batch are checked before the first block moves, so that a number out of range leaves everything unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import _torch
from bayesopt_chain.loop.capture import lane_graph, lane_kernels
from bayesopt_chain.loop.capture.buffers import Body
from bayesopt_chain.loop.capture.graph import trace
from bayesopt_chain.loop.capture.lane_kernels import Gather, Move, Rows, in_lanes
from bayesopt_chain.loop.capture.replays import Compiled
from bayesopt_chain.loop.interrupts import uninterrupted
from bayesopt_chain.loop.parallel import Parallel

# the smallest number of chains that run in lanes: with fewer, copying costs more than lanes save (1.1 times as long with 64)
FEWEST = 256
_LEAST = 64  # smallest number of chains in a block, so that few lanes are empty
_SIZE_OF_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")  # of a core's second level, as in "1024K"
# with this setting inductor stores values that the gradient needs again, and does not compute them twice
_OPTIONS = {"realize_opcount_threshold": 8}


def unchunked(body: Body) -> Body:
    """Return the body without the step's ``chunk=``, which limits memory as blocks do."""
    if not isinstance(body.step, Parallel) or body.step.chunk is None:
        return body
    other = copy.copy(body)
    other.step = copy.copy(body.step)
    other.step.chunk = None
    return other


def suits(body: Body, graph: torch.fx.GraphModule) -> bool:
    """Whether a step, given its graph, has many small chains and is faster in lanes."""
    if not are_small(body, graph) or lane_kernels.library() is None:
        return False
    if not all([x.is_contiguous() and x.element_size() <= 8 and x.device.type == "cpu" for x in body.static]):
        return False
    return lane_graph.suits(graph, body.step.n, _own(body, graph))


def are_small(body: Body, graph: torch.fx.GraphModule) -> bool:
    """Whether a step, given its graph, has many chains, and products of matrices for each chain that are all small."""
    step = body.step
    many = isinstance(step, Parallel) and step.is_stacked and step.n >= FEWEST
    return many and lane_graph.products_are_small(graph, step.n)


def _own(body: Body, graph: torch.fx.GraphModule) -> list[bool]:
    """Return, for each input of a step's graph, whether its axis 0 is that of the chains."""
    known = [*[True] * len(body.static), *[d is not None for d in _axes(body.step, body)]]
    return known + [False] * (len(graph.graph.find_nodes(op="placeholder")) - len(known))


def _axes(step: Any, body: Body) -> list[int | None]:
    """Return the chain axis of every tensor of a step's batch; ``None`` for a tensor that all chains share."""
    batch = body.batch.tree(body.batch.of_step(body.batch.tensors, 0))
    return [d for d, x in zip(step.chain_axes(batch), body.batch.leaves) if torch.is_tensor(x)]


class Lanes:
    """The program of a block of chains, called for one block after the other.

    Attributes:
        body, step: all chains, with their static buffers.
        axes: the chain axis of every tensor of a step's batch.
        own: for every tensor of a batch and of ``each``, whether it has an axis of chains.
        block: the number of chains of a block.
        batch: the batch of a block: buffers in lanes for tensors with an axis of chains, and the other tensors themselves.
        program: the compiled step of a block.
        rows: for each batch of a call, the row numbers of its tensors that are such.
        gathers: index of the table, index of the row numbers, and the operation that gathers.
        chains: copies the static buffers of a block.
        loaded: indices of the tensors of a batch that the program reads and that have an axis of chains.
    """

    def __init__(self, body: Body, graph: torch.fx.GraphModule) -> None:
        step: Any = body.step
        self.body, self.step, self.axes = body, step, _axes(step, body)
        one = self.tensors_of_step(body.batch.tensors, 0)
        self.own = [d is not None for d in self.axes] + [True] * len(step.each)
        self.block = _block(step.n, lane_graph.bytes_of_a_chain(graph, step.n, _own(body, graph)))
        self.batch = [_of_block(x, self.block) if own else x for x, own in zip(one, self.own)]
        each = len(self.axes)
        # the step of a block takes the values of ``each`` as a second part of its batch
        part = Body(
            step.of_any(self.block),
            body.params.tree([_of_block(x, self.block) for x in body.params.buffers]),
            body.state.tree([_of_block(x, self.block) for x in body.state.buffers]),
            (body.batch.tree(self.batch[:each]), tuple(self.batch[each:])),
            body.steps,
            None,
            body.draws,
        )
        graph, self.closed_over = trace(part)
        first = len(part.static)
        rows = lane_graph.Rows(graph, self.block, [*[True] * first, *self.own, *[False] * len(self.closed_over)])
        # kernels of this library write rows of tables and normals in lanes, as inputs of the compiled graph
        rooms, places = lane_graph.lift_gathers(graph, rows)
        normals, fills = lane_graph.lift_normals(graph, rows, part.static)
        lane_graph.products(graph)
        read = [bool(node.users) for node in graph.graph.find_nodes(op="placeholder")]
        self.program = Compiled(part, graph, [*self.closed_over, *rooms, *normals], _OPTIONS)
        self.program.fills += fills
        several = body.steps if body.batch.dim is not None else 1
        self.rows = [{j - first: Rows(one[j - first]) for _, j in places} for _ in range(several)]
        self.gathers = [(i - first, j - first, Gather(room)) for (i, j), room in zip(places, rooms)]
        self.chains = Move(body.static, part.static)
        self.loaded = [i for i, own in enumerate(self.own) if own and read[first + i]]

    def tensors_of_step(self, batch: Sequence[Tensor], k: int) -> list[Tensor]:
        """Return the tensors of a step's batch and of ``each``, with the axis of chains moved to axis 0."""
        of_step = self.body.batch.of_step(batch, k)
        return [*[x if d is None else x.movedim(d, 0) for x, d in zip(of_step, self.axes)], *self.step.each.values()]

    def __call__(self, batch: list[Tensor]) -> Sequence[Tensor]:
        """Make all steps of a call for all chains, and return the tensors of the report."""
        body, n = self.body, self.step.n
        several = len(self.rows)
        inputs = [self.inputs(self.tensors_of_step(batch, k), rows) for k, rows in enumerate(self.rows)]
        reports: list[list[Sequence[Tensor]]] = [[] for _ in range(body.steps)]
        graded = torch.is_grad_enabled()
        _torch.set_grad_enabled(False)
        try:
            with uninterrupted():  # Ctrl-C between two blocks would leave chains at different steps
                for begin in range(0, n, self.block):
                    start = min(begin, n - self.block)  # the last block overlaps with the one before it
                    self.chains.load(start)
                    for k, report in enumerate(reports):
                        tensors, loads = inputs[k % several]
                        # one batch for all steps of a call is loaded once for each block
                        for load in loads if not k or several > 1 else ():
                            load(start)
                        report.append([x[begin - start :] for x in self.program.step(tensors)])
                    self.chains.store(start, begin - start)
            return body.together([[torch.cat(parts) for parts in zip(*report)] for report in reports])
        finally:
            _torch.set_grad_enabled(graded)

    def inputs(self, tensors: list[Tensor], rows: dict[int, Rows]) -> tuple[list[Tensor], list[Callable[[int], None]]]:
        """Prepare a batch for the program.

        Args:
            tensors: the tensors of a step's batch, from :meth:`tensors_of_step`.
            rows: by index, where to store the row numbers among them.

        Returns:
            The inputs of the program, and functions of the number of a block's first chain that fill the inputs in lanes.

        Raises:
            IndexError: a row number is out of range for its table.
        """
        given = [lanes if own else x for x, lanes, own in zip(tensors, self.batch, self.own)]
        for i, numbers in rows.items():
            numbers.read(tensors[i])
        every = [*tensors, *self.closed_over]
        whole = [tensors[i].contiguous() for i in self.loaded]
        own = Move(whole, [self.batch[i] for i in self.loaded])
        return given, [own.load, *[gather.of(every[i], rows[j]) for i, j, gather in self.gathers]]


def _of_block(x: Tensor, n: int) -> Tensor:
    """Copy the first ``n`` chains of a leaf into lanes."""
    return in_lanes(x, n).copy_(x[:n])


def _block(chains: int, each: int) -> int:
    """Return the number of chains in a block.

    It is a multiple of 16, so that vectors are full, unless there are fewer chains. What a thread reads of a block fills half
    of its core's second-level cache: 5,000 chains with minibatches took 5 to 15 % longer with blocks of twice or four times
    that, and 10 % longer with half of it, since every block's kernels have to be started. The number of chains is divided
    into blocks of nearly equal size, so that the last two overlap little.

    Args:
        chains: the number of all chains.
        each: the number of bytes that a step reads for one chain.
    """
    most = max(_LEAST, torch.get_num_threads() * _cache() // (2 * each))
    size = -(-chains // -(-chains // most))
    return min(chains, -(-size // 16) * 16)


@cache
def _cache() -> int:
    """Return the bytes of a core's second-level cache: what the system says, or 1 MiB."""
    try:
        return int(_SIZE_OF_CACHE.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return 1 << 20
