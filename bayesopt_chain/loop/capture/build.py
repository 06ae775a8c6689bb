r"""``capture``: the whole step (gradient, chain, update) as one program over static buffers, replayed without Python.

The step is traced once with fake tensors into a graph of ATen operations. Every tensor it closes over (a temperature, a
learning rate, a model's buffers, data) becomes an input of the graph, so that a change made in place is seen by the next
replay. New parameters and states are copied into the static buffers at the end of the graph. Then

* on a CUDA device the step is recorded as a CUDA graph;
* on a CPU the graph of one step is compiled by inductor, which fuses update and copy into the kernels of the step, draws
  into buffers of its own, and is called once for each of several steps; 256 chains or more of small matrices run in lanes and
  blocks (:mod:`bayesopt_chain.loop.capture.lanes`);
* where no C++ compiler is found the operations of that graph run one after the other, said once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.fused import sgd as fused
from bayesopt_chain.links.foreign import Foreign
from bayesopt_chain.loop.capture import lanes
from bayesopt_chain.loop.capture.buffers import Body
from bayesopt_chain.loop.capture.captured import Backend, Captured, Program
from bayesopt_chain.loop.capture.graph import check_devices, overwritten, trace
from bayesopt_chain.loop.capture.lanes import Lanes
from bayesopt_chain.loop.capture.modes import Modes
from bayesopt_chain.loop.capture.replays import Compiled, CudaGraph, Interpreted, compiler_found
from bayesopt_chain.loop.capture.source import by_rows, rows_ahead
from bayesopt_chain.loop.step import Step

_UNROLLED = kinds.Kind(
    lambda x: kinds.WHOLE.fits(x) and x <= 1 << 16, "a whole number from 1 to 65536, of steps in one graph", (int,)
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
    clone: bool = False,
    backend: Backend | None = None,
    signatures: int = 1,
) -> Captured:
    """Capture a step: same arguments, same results, none of Python's time.

    Results agree with the step's to rounding (one unit in the last place for each operation; sums over a batch may be
    ordered differently); the random stream is the step's. On a CPU the noise of a chain :func:`with_stream` ``"philox"`` costs
    about a third of what torch's generator asks.

    What is recorded stays as it is: Python numbers and branches on them, which tensor a name is bound to, the modules' mode (a
    replay in another is refused), autocast and default dtype. Tensors are read anew at every replay: write into them
    (``temperature.fill_(0.1)``), or capture again.

    Args:
        step: from :func:`make_step` or :func:`parallel`, or any pure function ``(params, state, batch) -> (params,
            state, Info)``.
        params, state, batch: examples; none of them is changed. The replay continues from whatever it is given: passing
            back what it returned costs nothing, anything else of the same structure and shapes is copied in. A ``batch`` that
            is a :func:`bayesopt_chain.epochs` is taken as the source: every step makes its next batch inside the program, and
            moves its position on. The step is then called with it: ``fast(params, state, data)``.
        steps: steps for each call; the loss and aux are then stacked on axis 0 (:class:`Steps`).
        batch_dim: with ``steps``, the axis of the batch's tensors that counts steps; ``None`` (default) gives every step the
            whole batch.
        draws: return the parameters after every step, stacked on axis 0, as ``info.draws``.
        clone: return copies. By default params and state *alias static buffers that the next call overwrites*, and the step
            belongs to the thread that calls it first.
        backend: ``"cuda"``, ``"inductor"`` or ``"eager"`` (default: the first that is possible here).
        signatures: how many shapes of batches are recorded, each when it comes first: 2 for a loader whose last batch of an
            epoch is short. All programs work on the same static buffers. Default 1: other shapes are refused.

    Returns:
        A callable with the step's interface. Temperatures and learning rates that are tensors or schedules may change
        between calls without a new capture; the state it returns resumes exactly, here or in the eager step.

    Raises:
        CaptureError: the step reads a number off a tensor, branches on one, or makes shapes that depend on values.
        ValueError: a later call with another structure, shape, dtype or device.
        At a later call also CaptureError: a module in another mode, a second thread without ``clone``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.with_stream(bc.sghmc(0.1, temperature=0.01), "philox"), {"w": torch.ones(2)}
        >>> step, state = bc.make_step(lambda params, batch: (params["w"] ** 2).sum(), tx), tx.init(params)
        >>> fast = bc.capture(step, params, state, (), steps=4, draws=True, backend="eager")
        >>> params, state, info = fast(params, state, ())
        >>> info.loss.shape, info.draws["w"].shape
        (torch.Size([4]), torch.Size([4, 2]))
    """
    kinds.require(
        "capture",
        step=(step, kinds.FUNCTION),
        steps=(steps, _UNROLLED),
        draws=(draws, kinds.BOOL),
        clone=(clone, kinds.BOOL),
        backend=(backend, kinds.one_of("cuda", "inductor", "eager").or_none()),
    )
    for name, tree in (("params", params), ("state", state), ("batch", batch)):
        if any(isinstance(x, Tensor) and x.layout != torch.strided for x in optree.tree_leaves(tree)):
            raise TypeError(f"capture: {name} holds a sparse tensor, whose memory cannot be kept: call its to_dense()")
    if batch_dim is not None and steps == 1:
        raise ValueError("capture: batch_dim counts steps, so it needs steps > 1")
    if isinstance(signatures, bool) or not isinstance(signatures, int) or signatures < 1:
        raise ValueError(f"capture: signatures must be a whole number of at least 1, got {signatures!r}")
    given, data = step, batch if isinstance(batch, Epochs) else None
    if data is not None:
        if batch_dim is not None:
            raise ValueError(f"capture: each step takes the next batch of {data!r}; leave batch_dim= out")
        step, batch, batch_dim = by_rows(_pure(step), data), rows_ahead(data, steps), 0 if steps > 1 else None
    body = Body(_pure(step), params, state, batch, steps, batch_dim, draws)
    chosen = backend or _best(body)

    def recorded(body: Body) -> Program:
        modes, together = Modes(), lanes.unchunked(body) if chosen == "inductor" else body
        with modes.watching():
            graph, closed_over = trace(together)
        if chosen == "inductor" and lanes.suits(together, graph):
            return Program(together, modes, Lanes(together, graph))
        if together is not body:
            graph, closed_over = trace(body)
        if chosen == "cuda":
            check_devices(graph, body)
            return Program(body, modes, CudaGraph(body, closed_over, overwritten(graph, closed_over), _in_place(step)))
        replay = Compiled if chosen == "inductor" else Interpreted
        return Program(body, modes, replay(body, graph, closed_over))

    return Captured(given, recorded(body), chosen, clone, recorded, signatures, data)


def _pure(step: Any) -> Callable:
    """The step without writes of its own: the program copies new values into the static buffers."""
    return replace(step, inplace=False, fused=None) if isinstance(step, Step) and step.inplace else step


def _in_place(step: Any) -> Callable:
    """The step that moves the static buffers in place, by the fused kernels if it has them.

    Only if every link is this library's own: a foreign link may have kept the parameters it was shown, which would change
    under it.
    """
    if not isinstance(step, Step) or not isinstance(step.tx, Chain):
        return _pure(step)
    if any(isinstance(link, Foreign) for link in step.tx.links):
        return _pure(step)
    return replace(step, inplace=True, fused=fused.recognise(step.tx))


def _best(body: Body) -> Backend:
    """The fastest back end that is possible here; a missing compiler is warned of once."""
    if body.static and body.static[0].device.type == "cuda":
        return "cuda"
    if compiler_found():
        return "inductor"
    global _said
    if not _said:
        _said = True
        warnings.warn(
            "capture: no C++ compiler found, so the step stays eager; install g++ or clang, or set CXX", stacklevel=3
        )
    return "eager"


_said = False  # whether the missing compiler was mentioned
