r"""``capture``: record the whole step (gradient, chain, update) as one program over static buffers.

The step is traced once with fake tensors into a graph of ATen operations. Every tensor that it closes over (a temperature, a
learning rate, a model's buffers, data) becomes an input of the graph, so that the next replay sees a change made in place.
New parameters and states are copied into the static buffers at the end of the graph. What is replayed depends on the device:

* On a CUDA device the step is recorded as a CUDA graph. With ``backend="inductor"`` the graph of one step is compiled first,
  which pays for long runs of many small chains: their step is many small operations, of which few kernels are left.
* On a CPU inductor compiles the graph of one step, and fuses update and copy into the kernels of the step. The noise is drawn
  into further buffers. The calls of the kernels of a small step are recorded, and a loop in C++ makes them for all steps of a
  call (:mod:`bayesopt_chain.loop.capture.kernels`). 256 chains or more of small matrices run in blocks, with the chains as the
  last axis in memory, each thread with blocks of its own (:mod:`bayesopt_chain.loop.capture.lanes`).
* On a CPU without a C++ compiler the operations of the graph run one after the other, and a warning says so.

With ``bc.epochs(...)`` the batch of a step is a tensor of row numbers, and ``data[rows]`` is an operation of the program, so
that no batch is made outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.links.wrapper import Foreign
from bayesopt_chain.loop.capture import lane_graph, lanes
from bayesopt_chain.loop.capture.buffers import Body
from bayesopt_chain.loop.capture.captured import Backend, Captured, Modes, Program, rows_ahead
from bayesopt_chain.loop.capture.graph import check_devices, overwritten, trace
from bayesopt_chain.loop.capture.kernels import CannotBeRecorded
from bayesopt_chain.loop.capture.lanes import Lanes
from bayesopt_chain.loop.capture.replays import ALONE, Compiled, CudaGraph, Eager, Interpreted, compiler_found
from bayesopt_chain.loop.parallel import Parallel
from bayesopt_chain.loop.step import Step


@checks.takes(
    step=checks.Kind(
        lambda x: checks.FUNCTION.fits(x) and not isinstance(x, Captured),
        "a step that is not captured yet",
        (Captured,),
        "the one inside of a captured step is captured.step",
    ),
    params=checks.ANY,
    batch_dim=checks.INDEX.or_none(),
    steps=checks.number("[1, 65536]", integer=True),
    draws=checks.BOOL,
    backend=checks.one_of("cuda", "inductor", "eager").or_none(),
    signatures=checks.whole(1),
)
def capture(
    step: Callable,
    params: Any,
    state: Any,
    batch: Any,
    *,
    steps: int = 1,
    batch_dim: int | None = None,
    draws: bool = False,
    backend: Backend | None = None,
    signatures: int = 1,
) -> Captured:
    """Record a step as a program with the same arguments and results, which runs without the step's Python code.

    Results agree with those of the step to rounding (one unit in the last place for each operation; sums over a batch may be
    ordered differently), and the random numbers are the same.

    The recording fixes Python numbers and branches on them, the tensor objects that names refer to, the mode of modules (a
    replay in another mode is refused), autocast and the default dtype. The values of tensors are read at every replay: to
    change one, write into it (``temperature.fill_(0.1)``), or capture again.

    Args:
        step: from :func:`make_step` or :func:`parallel`, or any pure function ``(params, state, batch) -> (params,
            state, Info)``.
        params, state, batch: examples with the structure and shapes of later arguments; none of them is changed. Arguments of
            a replay are copied into the static buffers, unless they are the trees that the last call returned. If ``batch`` is
            a :func:`bayesopt_chain.epochs`, every step makes the next batch of it inside the program, and its position moves
            on. The captured step is then called with it: ``fast(params, state, data)``.
        steps: number of steps in each call. With more than one, loss and aux are stacked on axis 0. Default 1.
        batch_dim: with ``steps``, the axis of the batch's tensors that counts steps; ``None`` (default) gives every step the
            whole batch.
        draws: return the parameters after every step, stacked on axis 0, as ``info.draws``. Default: False.
        backend: ``"cuda"``, ``"inductor"`` or ``"eager"``. Default: the first of these that this machine and the device of the
            parameters allow. On a CUDA device ``"inductor"`` compiles the step, and a CUDA graph records the compiled program:
            the capture can take a minute, and pays for long runs of many small chains. Inductor times its kernels to choose
            among them, so nothing else should run on the device meanwhile.
        signatures: the number of shapes of batches that may be recorded, each at its first call: 2 for a loader whose last
            batch of an epoch is short. All programs use the same static buffers. Default 1: other shapes are refused.

    Returns:
        A callable with the interface of the step. The params and the state that it returns *are static buffers, which the next
        call overwrites*: copy what you keep (``optree.tree_map(torch.clone, params)``). Only the thread that calls it first may
        call it. Temperatures and learning rates that are tensors or schedules may change between calls without a new capture. A
        run can be continued exactly from the state that it returns, with the captured step or with the step itself.

    Raises:
        CaptureError: the step reads the value of a tensor as a Python number, branches on it, or makes shapes that depend on
            values; at a later call, a module is in another mode, or a second thread calls.
        TypeError: an argument has a wrong type; params or state hold anything but dense tensors.
        ValueError: an argument is out of range; the step is captured already; a later call has another structure, shape, dtype
            or device.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.sghmc(0.1, temperature=0.01), {"w": torch.ones(2)}
        >>> step, state = bc.make_step(lambda params, batch: (params["w"] ** 2).sum(), tx), tx.init(params)
        >>> fast = bc.capture(step, params, state, (), steps=4, draws=True, backend="eager")
        >>> params, state, info = fast(params, state, ())
        >>> info.loss.shape, info.draws["w"].shape
        (torch.Size([4]), torch.Size([4, 2]))
    """
    for name, tree in (("params", params), ("state", state), ("batch", batch)):
        if any(isinstance(x, Tensor) and x.layout != torch.strided for x in optree.tree_leaves(tree)):
            raise TypeError(f"capture: {name} holds a sparse tensor, whose memory cannot be kept: call its to_dense()")
    if batch_dim is not None and steps == 1:
        raise ValueError("capture: batch_dim counts steps, so it needs steps > 1")
    # the caller's step is kept for ``Captured.step``; with epochs the program runs one of row numbers
    given, data = step, batch if isinstance(batch, Epochs) else None
    if data is not None:
        if batch_dim is not None:
            raise ValueError(f"capture: each step takes the next batch of {data!r}; leave batch_dim= out")
        step, batch, batch_dim = _by_rows(_pure(step), data), rows_ahead(data, steps), 0 if steps > 1 else None
    body = Body(_pure(step), params, state, batch, steps, batch_dim, draws)
    chosen = backend or _fastest_backend(body)
    return Captured(given, body, partial(_recorded, step, chosen), chosen, signatures, data)


def _recorded(step: Callable, backend: Backend, body: Body) -> Program:
    """Trace a step for one shape of batches, and make its replay.

    Args:
        step: the step, which may update in place.
        backend: the backend.
        body: the pure form of the step on flat lists of tensors.
    """
    with ALONE:
        graphed = backend == "cuda" or (backend == "inductor" and _is_on_cuda(body))
        # blocks of lanes take the place of chunks, so that the step is traced without chunks first
        modes, together = Modes(), lanes.unchunked(body) if backend == "inductor" else body
        with modes.watching():
            graph, closed_over = trace(together)
        if backend == "inductor" and lanes.suits(together, graph):
            with suppress(CannotBeRecorded):
                return Program(together, modes, Lanes(together, graph))
        if together is not body:  # no lanes: the chunks save memory after all
            graph, closed_over = trace(body)
        if graphed:
            check_devices(graph, body)
        written = overwritten(graph, closed_over)
        program: Callable[[list[Tensor]], Sequence[Tensor]]
        if backend == "inductor":
            if graphed and lanes.are_small(body, graph):
                lane_graph.products(graph)
            program = Compiled(body, graph, closed_over)
        elif backend == "cuda":
            program = Eager(body, _in_place(step))
        else:
            program = Interpreted(body, graph, closed_over)
        return Program(body, modes, CudaGraph(body, program, closed_over, written) if graphed else program)


def _pure(step: Any) -> Callable:
    """Return the step without in-place updates, since the program itself copies new values into the static buffers."""
    return replace(step, inplace=False) if isinstance(step, Step) and step.inplace else step


def _in_place(step: Any) -> Callable:
    """Return the step that updates the static buffers in place.

    If a link is not of this library, the pure step is returned: such a link may have kept the parameters that it got, which an
    update in place would change.
    """
    if not isinstance(step, Step) or not isinstance(step.tx, Chain):
        return _pure(step)
    if any(isinstance(link, Foreign) for link in step.tx.links):
        return _pure(step)
    return replace(step, inplace=True)


def _by_rows(step: Callable, data: Epochs) -> Callable:
    """Return the step as a function of (params, state, row numbers), so that the program reads the rows of the data itself.

    Args:
        step: the step of one chain, or a :class:`bayesopt_chain.loop.parallel.Parallel`.
        data: the epochs.

    Raises:
        TypeError: the data are no tree of tensors.
        ValueError: the batches have an axis of chains and the step has none, or the other way round, or the numbers of chains
            differ.
    """
    if data.leaves is None:
        raise TypeError(
            f"capture: {data!r} is of a dataset and gives lists of row numbers: make it of tensors, or capture the step "
            "with a batch of the loader"
        )
    if not isinstance(step, Parallel) and data.chains is not None:
        raise ValueError(
            f"capture: {data!r} gives batches of {data.chains} chains, and the step is one chain's; make it bc.parallel(step, "
            f"{data.chains}, batch_dim=0), or leave chains= out of bc.epochs"
        )
    if isinstance(step, Parallel) and (step.batch_dim, data.chains) not in ((None, None), (0, step.n)):
        raise ValueError(
            f"capture: the step has {step.n} chains with batch_dim={step.batch_dim!r}, and {data!r} gives other batches; take "
            f"bc.parallel(step, {step.n}, batch_dim=0) with bc.epochs(..., chains={step.n}), or neither of the two arguments"
        )

    def of_rows(one: Callable) -> Callable:
        return lambda params, state, rows: one(params, state, data.of_rows(rows))

    return step.mapped(of_rows) if isinstance(step, Parallel) else of_rows(step)


def _is_on_cuda(body: Body) -> bool:
    return bool(body.static) and body.static[0].device.type == "cuda"


def _fastest_backend(body: Body) -> Backend:
    """Return the fastest backend for the device of the parameters; warn if there is no C++ compiler."""
    if _is_on_cuda(body):
        return "cuda"
    if compiler_found():
        return "inductor"
    checks.warn(
        "capture: no C++ compiler found, so the step stays eager; install g++ or clang, or set CXX to a program, without "
        "arguments, which torch would take for a part of its name"
    )
    return "eager"
