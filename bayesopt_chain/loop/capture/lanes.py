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
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.loop.capture import lane_graph, lane_kernels
from bayesopt_chain.loop.capture.buffers import Body, require_as_captured
from bayesopt_chain.loop.capture.graph import trace
from bayesopt_chain.loop.capture.kernels import CannotBeRecorded, Kernels
from bayesopt_chain.loop.capture.lane_kernels import Rows, in_lanes
from bayesopt_chain.loop.capture.replays import Compiled
from bayesopt_chain.loop.interrupts import uninterrupted
from bayesopt_chain.loop.parallel import Parallel
from bayesopt_chain.random.philox_cpu import normals_kernel

# the smallest number of chains that run in lanes: with fewer, copying costs more than lanes save (1.1 times as long with 64)
FEWEST = 256
_LEAST = 64  # smallest number of chains in a block, so that few lanes are empty
_SIZE_OF_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index0/size")  # of a core's first level, as in "48K"
# inductor stores values that the gradient needs again, and does not compute them twice; its kernels are called by one thread
_OPTIONS = {"realize_opcount_threshold": 8, "cpp.threads": 1}


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
    """The program of a block of chains, called for one block after the other, by several threads with blocks of their own.

    Attributes:
        body, step: all chains, with their static buffers.
        axes: the chain axis of every tensor of a step's batch.
        own: for every tensor of a batch and of ``each``, whether it has an axis of chains.
        block: the number of chains of a block.
        kernels: the compiled step of a block.
        rows: for each batch of a call, the row numbers of its tensors that are such.
        gathers: index of the table, index of the row numbers, and the result in lanes, of each operation that gathers.
        loaded: the tensors of a batch that the program reads and that have an axis of chains: index, and buffer in lanes.
    """

    def __init__(self, body: Body, graph: torch.fx.GraphModule) -> None:
        step: Any = body.step
        self.body, self.step, self.axes = body, step, _axes(step, body)
        one = self.tensors_of_step(body.batch.tensors, 0)
        self.own = [d is not None for d in self.axes] + [True] * len(step.each)
        threads = torch.get_num_threads()
        self.block = _block(step.n, lane_graph.bytes_of_a_chain(graph, step.n, _own(body, graph)), threads)
        batch = [_of_block(x, self.block) if own else x for x, own in zip(one, self.own)]
        each = len(self.axes)
        # the step of a block takes the values of ``each`` as a second part of its batch
        part = Body(
            step.of_any(self.block),
            body.params.tree([_of_block(x, self.block) for x in body.params.buffers]),
            body.state.tree([_of_block(x, self.block) for x in body.state.buffers]),
            (body.batch.tree(batch[:each]), tuple(batch[each:])),
            body.steps,
            None,
            body.draws,
        )
        graph, self.closed_over = trace(part)
        self.first = [x.detach() for x in self.closed_over]
        first = len(part.static)
        rows = lane_graph.Rows(graph, self.block, [*[True] * first, *self.own, *[False] * len(self.closed_over)])
        # kernels of this library write rows of tables and normals in lanes, as inputs of the compiled graph
        tables, places = lane_graph.lift_gathers(graph, rows)
        normals, draws = lane_graph.lift_normals(graph, rows)
        report = lane_graph.lift_report(graph, self.block)
        lane_graph.products(graph)
        read = [bool(node.users) for node in graph.graph.find_nodes(op="placeholder")]
        self.loaded = [(i, batch[i]) for i, own in enumerate(self.own) if own and read[first + i]]
        several = body.steps if body.batch.dim is not None else 1
        self.rows = [{j - first: Rows(one[j - first]) for _, j in places} for _ in range(several)]
        self.gathers = [(i - first, j - first, table) for (i, j), table in zip(places, tables)]
        program = Compiled(part, graph, [*self.closed_over, *tables, *normals, *report], _OPTIONS)
        with torch.no_grad():
            program.step(batch)  # the first call finds out how the generated function is called
        if program.order is None:
            raise CannotBeRecorded("inductor's function is called through torch's wrappers")
        inputs = [*part.static, *batch, *self.closed_over, *tables, *normals, *report]
        ends = [*accumulate(map(len, (part.static, batch, self.closed_over, tables, normals, report)))]
        chains, of_batch, closed, of_tables, drawn, out = (range(a, b) for a, b in pairwise([0, *ends]))

        def drawing(mine: list[Tensor]) -> list[partial[None]]:
            """The calls that draw normals in lanes into these inputs."""
            kernel: Any = normals_kernel() if draws else None
            places = zip(drawn, draws)
            return [kernel.in_lanes(mine[i].movedim(0, -1), mine[k], mine[t], *what) for i, (k, t, *what) in places]

        shared = [*[i for i, own in zip(of_batch, self.own) if not own], *closed]
        buffers = chains, [of_batch[i] for i, _ in self.loaded], of_tables, out
        threads = min(threads, -(-step.n // self.block))
        self.kernels = Kernels(
            *(program.program, program.order, inputs, shared, drawing, buffers, threads),
            steps=body.steps,
            single=body.single,
            batches=several,
            chains=lane_kernels.leaves(body.static, part.static),
            n=step.n,
            block=self.block,
        )

    def tensors_of_step(self, batch: Sequence[Tensor], k: int) -> list[Tensor]:
        """Return the tensors of a step's batch and of ``each``, with the axis of chains moved to axis 0."""
        of_step = self.body.batch.of_step(batch, k)
        return [*[x if d is None else x.movedim(d, 0) for x, d in zip(of_step, self.axes)], *self.step.each.values()]

    def __call__(self, batch: list[Tensor]) -> Sequence[Tensor]:
        """Make all steps of a call for all chains, and return the tensors of the report."""
        kept = [self.give(k, self.tensors_of_step(batch, k), rows) for k, rows in enumerate(self.rows)]
        reports = self.kernels.reports()
        with uninterrupted():  # Ctrl-C between two blocks would leave chains at different steps
            self.kernels.run(0, self.body.steps)
        del kept  # until here the kernels may read it
        return reports

    def give(self, k: int, tensors: list[Tensor], rows: dict[int, Rows]) -> Any:
        """Give the kernels the batch of a step.

        Args:
            k: the number of the step.
            tensors: the tensors of the batch, from :meth:`tensors_of_step`.
            rows: by index, where to store the row numbers among them.

        Returns:
            What has to stay alive until the steps are made.

        Raises:
            IndexError: a row number is out of range for its table.
        """
        require_as_captured(self.closed_over, self.first)
        for i, numbers in rows.items():
            numbers.read(tensors[i])
        every = [*tensors, *self.closed_over]
        whole = [tensors[i].contiguous() for i, _ in self.loaded]
        tables = [every[i].contiguous() for i, *_ in self.gathers]
        gathers = [lane_kernels.gather(x, rows[j], lanes) for x, (_, j, lanes) in zip(tables, self.gathers)]
        shared = [*[x for x, own in zip(tensors, self.own) if not own], *self.closed_over]
        leaves = lane_kernels.leaves(whole, [room for _, room in self.loaded])
        return whole, tables, self.kernels.give(k, shared, leaves, lane_kernels.array(lane_kernels.Table, gathers))


def _of_block(x: Tensor, n: int) -> Tensor:
    """Copy the first ``n`` chains of a leaf into lanes."""
    return in_lanes(x, n).copy_(x[:n])


def _block(chains: int, each: int, threads: int) -> int:
    """Return the number of chains in a block.

    It is a multiple of 16, so that vectors are full, unless there are fewer chains. What a step reads of a block fits a core's
    first-level cache, unless 64 chains need more. Blocks are of nearly equal size, so that the last two overlap little, and no
    fewer than there are threads.

    Args:
        chains: the number of all chains.
        each: the number of bytes that a step reads for one chain.
        threads: the number of threads.
    """
    most = min(max(_LEAST, _cache() // each), max(_LEAST, -(-chains // threads)))
    size = -(-chains // -(-chains // most))
    return min(chains, -(-size // 16) * 16)


@cache
def _cache() -> int:
    """Return the bytes of a core's first-level cache for data: what the system says, or 32 KiB."""
    try:
        return int(_SIZE_OF_CACHE.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return 32 << 10
