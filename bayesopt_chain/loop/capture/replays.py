"""The replays of a captured step: as compiled code, as a CUDA graph, or operation by operation.

Compiled programs are kept, so that another process that captures the same step on a machine of the same kind finds them. torch
keeps compiled graphs on disk (``torch._inductor.config.fx_graph_cache``, in ``$TORCHINDUCTOR_CACHE_DIR``), by a hash of
the graph, the shapes of the inputs, the version of torch and its settings. It does so only for graphs that are compiled under a
shape environment, and the hash does not contain the instruction set for which the code was generated. :func:`keyed_cache`
provides the shape environment, and adds the instruction set, the number of threads and the versions of Python, torch and this
library to the hash, so that programs for another processor are not found.

torch's folder is by default one in the temporary directory that everybody can write to and whose name everybody knows; torch
takes a folder that another user made there, and runs the programs in it. So programs are kept in a folder of this user's alone
(:func:`bayesopt_chain.random.compiled.private_folder`), unless the user has named one.

torch's other cache, of the wrappers around a compiled graph (``enable_autograd_cache``), is switched off. A program from that
cache comes inside of torch's wrappers, which take longer than a small step, and not as the generated function that
:class:`Compiled` calls.
"""

from __future__ import annotations

import gc
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.loop.capture import lane_kernels
from bayesopt_chain.loop.capture.buffers import Body, require_as_captured
from bayesopt_chain.loop.capture.errors import CaptureError, first_line, users_line
from bayesopt_chain.loop.capture.graph import lift_draws, write_out_multiples
from bayesopt_chain.loop.capture.kernels import CannotBeRecorded, Kernels
from bayesopt_chain.loop.interrupts import uninterrupted
from bayesopt_chain.random.compiled import private_folder, temporary_folder
from bayesopt_chain.version import __version__

LARGE = 2**24  # bytes of the inputs of a step from which on Python takes a small part of it
ALONE = threading.RLock()  # for what replaces functions that all threads of the process call: tracing and recording
HELD = 64  # steps of recorded kernels for which Ctrl-C waits; to hold it back takes as long as a fifth of a small step


class Interpreted:
    """The graph of one step, run operation by operation, once for each step."""

    def __init__(self, body: Body, graph: torch.fx.GraphModule, closed_over: list[Tensor]) -> None:
        self.body, self.graph, self.closed_over = body, graph, closed_over

    def __call__(self, batch: list[Tensor]) -> Sequence[Tensor]:
        """Make all steps of a call, and return the tensors of the report."""
        body = self.body
        with torch.no_grad():
            return body.together([self.step(body.batch.of_step(batch, k)) for k in range(body.steps)])

    def step(self, batch: Sequence[Tensor]) -> Sequence[Tensor]:
        """Make one step; gradients must be off."""
        with uninterrupted():  # gradient and writes are one program
            return self.graph(*self.body.static, *batch, *self.closed_over)


class Compiled(Interpreted):
    """The graph of one step, compiled by inductor, and called once for each step.

    Inductor generates a function of the graph's inputs, possibly in another order. torch wraps it in functions for views,
    aliases and gradients, which take longer than a small step. On a CPU the first call goes through the wrappers and records
    what they do. If they passed the inputs and the results on unchanged, later calls call the generated function directly. On
    a CUDA device every call goes through them, since they copy an input whose address kernels cannot read; a CUDA graph, which
    records the call once, has no such costs.

    Args:
        body: the step on flat lists of tensors.
        graph: the graph of one step.
        closed_over: the last inputs of the graph, which the step closes over.
        options: settings of inductor.

    Attributes:
        inputs: all inputs in the order of ``program``.
        batch_at: for each tensor of a batch, its indices in ``inputs``, of which inductor's function may take one twice.
        fills: functions that draw noise into some of the inputs before the program runs.
        program: the function that runs the step, given the inputs.
        order: which inputs, by their indices in the graph, the generated function takes, where it is called directly.
        kernels: the recorded kernels of the program, which make the steps of later calls; ``None`` if it has to be called.
    """

    def __init__(
        self,
        body: Body,
        graph: torch.fx.GraphModule,
        closed_over: list[Tensor],
        options: dict[str, Any] | None = None,
    ) -> None:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def remember(*args, **options):
            """Compile, and keep the generated function."""
            self.generated.append(compile_fx_inner(*args, **options))
            return self.generated[-1]

        super().__init__(body, graph, closed_over)
        self.generated: list[Any] = []
        example = [  # new memory, since later batches share none with the static buffers either
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            for x in body.batch.of_step(body.batch.tensors, 0)
        ]
        self.first = [x.detach() for x in closed_over]
        self.inputs, self.fills = [*body.static, *example, *closed_over], list[partial[None]]()
        on_cpu = all([x.device.type == "cpu" for x in self.inputs])
        if on_cpu:  # a CUDA graph keeps the memory of its draws, and nothing outside of it runs at a replay
            lifted, self.fills = lift_draws(graph, body.static)
            self.inputs += lifted
        write_out_multiples(graph)
        graph.recompile()  # after all changes of the graph
        self.batch_at = [(len(body.static) + i,) for i in range(len(example))]
        inductor: Any = config
        # every call comes with our own buffers, and with batches whose strides ``Batch`` has checked
        settings = {"size_asserts": False, "alignment_asserts": False, **(options or {})}
        with torch.no_grad(), inductor.patch(settings), keyed_cache(on_cpu) as fakes:
            self.compiled: Any = compile_fx(graph, fakes(self.inputs), inner_compile=remember)
        self.program = self._first if on_cpu else self._wrapped
        self.order: list[int] | None = None
        self.kernels: Kernels | None = None

    def __call__(self, batch: list[Tensor]) -> Sequence[Tensor]:
        """Make all steps of a call, and return the tensors of the report."""
        require_as_captured(self.closed_over, self.first)
        if self.kernels is not None:
            return self._by_kernels(self.kernels, batch)
        return super().__call__(batch)

    def _by_kernels(self, kernels: Kernels, batch: list[Tensor]) -> Sequence[Tensor]:
        """Make all steps of a call by the recorded kernels."""
        body = self.body
        # a batch and its addresses stay alive as long as this call
        kept = [kernels.give(k, [*body.batch.of_step(batch, k), *self.closed_over]) for k in range(len(kernels.given))]
        reports = kernels.reports()
        for first in range(0, body.steps, HELD):
            with uninterrupted():
                kernels.run(first, min(first + HELD, body.steps))
        del kept
        return reports

    def step(self, batch: Sequence[Tensor]) -> Sequence[Tensor]:
        """Make one step; gradients must be off."""
        args = self.inputs.copy()
        for places, x in zip(self.batch_at, batch):
            for i in places:
                args[i] = x
        with uninterrupted():
            for fill in self.fills:
                fill()
            return self.program(args)

    def _wrapped(self, args: list[Tensor]) -> Sequence[Tensor]:
        """Call the program through torch's wrappers."""
        return self.compiled(*args)

    def _first(self, args: list[Tensor]) -> Sequence[Tensor]:
        """Make the first call, through torch's wrappers, and choose the program of later calls."""
        with ALONE:
            self.program = self._wrapped
            (made,) = self.generated
            function = made.current_callable
            handed: list = []
            returned: list = []

            def watch(inner_args: list[Tensor]) -> Sequence[Tensor]:
                """Record what the wrappers pass on, and call the generated function."""
                handed.extend(inner_args)
                returned.extend(function(inner_args))
                return tuple(returned)

            made.current_callable = watch
            try:
                out = self.compiled(*args)
            finally:
                made.current_callable = function
            # inductor's function may be called directly if it got each of our tensors itself, in some order
            place = {id(x): i for i, x in enumerate(args)}
            order = [place.get(id(x), -1) for x in handed]
            untouched = len(out) == len(returned) and all(map(is_, out, returned))
            if untouched and len(place) == len(args) and set(order) == set(range(len(args))):
                self.program = function
                self._record(function, order, args)
                self.inputs, self.order = [self.inputs[i] for i in order], order
                self.batch_at = [tuple(k for k, o in enumerate(order) if o == i) for (i,) in self.batch_at]
            return out

    def _record(self, function: Any, order: list[int], inputs: list[Tensor]) -> None:
        """Record the kernels of the generated function, if it does nothing but to call them, and the step is a small one.

        Recorded kernels keep all memory that the function allocates, and a large step does not wait for Python.
        """
        static = self.body.static
        if sum([x.nbytes for x in inputs]) > LARGE or lane_kernels.library() is None:
            return
        shared = range(len(static), len(static) + len(self.batch_at) + len(self.closed_over))
        before = [x.clone() for x in static]
        with suppress(CannotBeRecorded):
            batches = 1 if self.body.batch.dim is None else self.body.steps
            self.kernels = Kernels(
                *(function, order, inputs, shared, lambda _: self.fills),
                steps=self.body.steps,
                single=self.body.single,
                batches=batches,
            )
        for x, old in zip(static, before):
            x.copy_(old)
        # what the kernels write between them may be much larger than the inputs, and stays as long as they do
        if self.kernels is not None and sum({x.data_ptr(): x.nbytes for x in self.kernels.kept[1]}.values()) > LARGE:
            self.kernels = None


class Eager:
    """The steps of one call as Python code, which a CUDA graph records.

    Args:
        body: the step on flat lists of tensors.
        step: a step to run in place of the body's, which may move the static buffers in place.
    """

    def __init__(self, body: Body, step: Callable | None = None) -> None:
        self.body, self.step = body, step

    def __call__(self, batch: list[Tensor]) -> Sequence[Tensor]:
        """Make all steps of a call, write the static buffers, and return the tensors of the report."""
        body, static = self.body, self.body.static
        new, reports = static, []
        with torch.no_grad():
            for k in range(body.steps):
                new, report = body.advance(new, body.batch.of_step(batch, k), self.step)
                reports.append([x.clone() for x in report] if body.steps == 1 or self.step else report)
            info = body.together(reports)
            body.write(static, new)
        return info


class CudaGraph:
    """The steps of one call as one CUDA graph.

    The program first runs a few times on a side stream, since kernels are compiled and tables are made at their first use, and
    neither can be recorded. Every tensor and generator is restored before the recording. A CUDA graph holds addresses of
    memory and does not keep tensors alive. This object therefore holds all tensors that the step may read: a batch, the static
    buffers, and the tensors that the step closes over.

    Args:
        body: the step on flat lists of tensors.
        program: what to record: a function of the tensors of a batch that makes all steps of a call, moves the static buffers
            and returns the tensors of the report.
        closed_over: the tensors that the step closes over.
        overwritten: those of them that the step writes, which are restored after the warm-up.
        warmups: the number of runs before the recording. Default 3.
    """

    def __init__(
        self,
        body: Body,
        program: Callable[[list[Tensor]], Sequence[Tensor]],
        closed_over: list[Tensor],
        overwritten: list[Tensor],
        warmups: int = 3,
    ) -> None:
        self.batch = [x.detach().clone() for x in body.batch.tensors]
        self.program = program
        self.read = [x.detach() for x in closed_over]
        touched = [*body.static, *overwritten]
        before = [t.clone() for t in touched]
        device = body.static[0].device
        rng = torch.cuda.get_rng_state(device)
        with torch.cuda.device(device):
            side = _side_stream(device)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(warmups):
                    self.program(self.batch)
            torch.cuda.current_stream().wait_stream(side)
            with torch.no_grad():
                for t, old in zip(touched, before):
                    t.copy_(old)
            torch.cuda.set_rng_state(rng, device)
            torch.cuda.synchronize()
            gc.collect()  # a garbage collection that frees memory of the device would break the recording
            self.graph = torch.cuda.CUDAGraph()
            self.info = self.recorded(side)

    def recorded(self, stream: Any) -> Sequence[Tensor]:
        """Record the program on a stream of the tensors' device. Other threads, such as data loaders, are not affected.

        Returns:
            The tensors of the report, which every replay overwrites.

        Raises:
            CaptureError: the step waits for the device or copies from the host; the message names the line.
        """
        cause: list[Exception] = []
        try:
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                try:
                    return self.program(self.batch)
                except Exception as err:
                    cause.append(err)  # the end of the recording raises another error, which says less
                    raise
        except Exception as err:
            first = cause[0] if cause else err
            raise CaptureError(
                f"capture: {users_line(first) or 'the step'} cannot be recorded in a CUDA graph ({first_line(first)}). It "
                "must not wait for the device (a decomposition that checks its result, .item()) or copy from the host "
                "(torch.tensor(number, device=...); torch.full fills in on the device): rewrite it, or leave this step "
                "uncaptured"
            ) from first

    def __call__(self, batch: list[Tensor]) -> list[Tensor]:
        """Copy the batch into the graph's own, replay the graph, and return copies of the tensors of the report."""
        for mine, x in zip(self.batch, batch):
            mine.copy_(x.detach())
        self.graph.replay()
        return [x.clone() for x in self.info]  # the next replay overwrites them, and callers collect losses


@cache
def _side_stream(device: torch.device) -> Any:
    """Return one stream for all warm-ups and recordings on a device, since each stream keeps a cuBLAS workspace."""
    return torch.cuda.Stream(device)


def compiler_found() -> bool:
    """Whether inductor finds a C++ compiler on this machine."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except Exception:
        return False


@contextmanager
def keyed_cache(on_cpu: bool = True) -> Iterator[Callable[[Sequence[Tensor]], list[Tensor]]]:
    """Make a context in which ``compile_fx`` finds and keeps programs by a hash that contains :func:`tag`.

    Args:
        on_cpu: whether the program runs on a CPU.

    Yields:
        A function that makes the inputs to compile with: fake tensors of the same shapes, strides and devices.
    """
    from torch._functorch import config as wrappers
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.compiler import config as compiler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    leave_the_shared_folder()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    config: Any = compiler
    wrapped: Any = wrappers
    tagged = config.patch(cache_key_tag=f"{config.cache_key_tag} {tag(on_cpu)}")
    with tagged, wrapped.patch(enable_autograd_cache=False), tracing(TracingContext(mode)):
        yield lambda inputs: [mode.from_tensor(x, static_shapes=True) for x in inputs]


def leave_the_shared_folder() -> None:
    """Have torch keep and find programs in a folder of this user's alone, if it would do so in the shared one.

    Torch writes the folder's path into a command as it is, so that one with spaces or quotes would be taken apart.
    The folder is that of the whole process, since kernels of a program may be compiled and loaded as late as at its first call.
    """
    from torch._inductor import codecache
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from torch._inductor.utils import clear_caches

    shared = os.path.abspath(default_cache_dir())
    named = {name: os.environ.get(name, shared) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    if os.path.abspath(named["TORCHINDUCTOR_CACHE_DIR"]) != shared:
        return  # the user's own choice, or ours
    folder = private_folder()
    if re.search(r"[\s'\"\\]", str(folder)):
        checks.warn(
            f"capture: torch's compiler cannot take the path {folder}; compiling into a private temporary folder, in every "
            "process anew (XDG_CACHE_HOME may name another one)"
        )
        folder = temporary_folder()
    folder = folder / "inductor"
    folder.mkdir(mode=0o700, exist_ok=True)
    clear_caches()  # paths that torch remembers, such as those of compiled headers
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    headers: Any = codecache  # torch compiles these into a folder of the shared one whatever the environment says
    headers._HEADER_DIR = str(folder / "precompiled_headers")
    headers._HEADER_LOCK_DIR = str(folder / "precompiled_headers" / "locks")
    if os.path.abspath(named["TRITON_CACHE_DIR"]).startswith(shared):  # or unset: torch derives it from the other
        os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")


def tag(on_cpu: bool = True) -> str:
    """Return a string of everything on which a compiled program depends besides its graph: processor, threads, versions.

    Only a program on a CPU depends on the instruction set. To find it, torch compiles and runs small programs, which can take
    longer than to compile the step. The properties of a CUDA device are in torch's own hash.

    Args:
        on_cpu: whether the program runs on a CPU.

    Example:
        >>> tag(on_cpu=False).startswith("bayesopt_chain ")
        True
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    instructions = str(pick_vec_isa()) if on_cpu else ""
    processor = platform.machine(), torch.backends.cpu.get_cpu_capability(), instructions
    versions = sys.version.split()[0], torch.__version__, __version__
    return " ".join(["bayesopt_chain", *processor, f"{torch.get_num_threads()} threads", *versions])
