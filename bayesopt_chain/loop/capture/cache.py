"""Programs that inductor compiled once: found again by another process that captures the same step on a machine like this.

torch keeps compiled graphs on disk (``torch._inductor.config.fx_graph_cache``, in ``$TORCHINDUCTOR_CACHE_DIR``), by a hash of
the graph, the inputs' shapes, torch's version and its settings. It does so only for a graph that is compiled under a shape
environment, and its hash does not say for which instruction set the code was generated. The tag of :func:`keyed_cache` does,
with the number of threads and the versions of Python, torch and this library: programs for another processor are not found.

torch's other cache, of what stands around a compiled graph, is left out: a program that it finds comes inside torch's wrappers,
which cost more than a small step, and not as the generated function that :mod:`.replays` calls.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.version import __version__


@contextmanager
def keyed_cache() -> Iterator[Callable[[Sequence[Tensor]], list[Tensor]]]:
    """A context for ``compile_fx`` in which it finds and keeps programs by :func:`tag`.

    Returns:
        A function that makes the inputs to compile with: of the same shapes, strides and devices, without memory.
    """
    from torch._functorch import config as wrappers
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.compiler import config as compiler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    config: Any = compiler
    wrapped: Any = wrappers
    tagged = config.patch(cache_key_tag=f"{config.cache_key_tag} {tag()}")
    with tagged, wrapped.patch(enable_autograd_cache=False), tracing(TracingContext(mode)):
        yield lambda inputs: [mode.from_tensor(x, static_shapes=True) for x in inputs]


def tag() -> str:
    """What a compiled program depends on besides its graph: processor, threads, versions.

    Example:
        >>> tag() == tag()
        True
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    processor = platform.machine(), torch.backends.cpu.get_cpu_capability(), str(pick_vec_isa())
    versions = sys.version.split()[0], torch.__version__, __version__
    return " ".join(["bayesopt_chain", *processor, f"{torch.get_num_threads()} threads", *versions])
