"""Let another process that captures the same step on a machine of the same kind find the program that inductor compiled.

torch keeps compiled graphs on disk (``torch._inductor.config.fx_graph_cache``, in ``$TORCHINDUCTOR_CACHE_DIR``), by a hash of
the graph, the shapes of the inputs, the version of torch and its settings. It does so only for graphs that are compiled under a
shape environment, and the hash does not contain the instruction set for which the code was generated. :func:`keyed_cache`
provides the shape environment, and adds the instruction set, the number of threads and the versions of Python, torch and this
library to the hash, so that programs for another processor are not found.

torch's folder is by default one in the temporary directory that everybody can write to and whose name everybody knows; torch
takes a folder that another user made there, and runs the programs in it. So programs are kept in a folder of this user's alone
(:func:`bayesopt_chain.random.compiled.private_folder`), unless the user has named one.

torch's other cache, of the wrappers around a compiled graph (``enable_autograd_cache``), is switched off. A program from that
cache comes inside of torch's wrappers, which take longer than a small step, and not as the generated function that
:mod:`.replays` calls.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.random.compiled import private_folder
from bayesopt_chain.version import __version__


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

    The folder is that of the whole process, since kernels of a program may be compiled and loaded as late as at its first call.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from torch._inductor.utils import clear_caches

    shared = os.path.abspath(default_cache_dir())
    named = {name: os.environ.get(name, shared) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    if os.path.abspath(named["TORCHINDUCTOR_CACHE_DIR"]) != shared:
        return  # the user's own choice, or ours
    folder = private_folder() / "inductor"
    folder.mkdir(mode=0o700, exist_ok=True)
    clear_caches()  # paths that torch remembers, such as those of compiled headers
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    if os.path.abspath(named["TRITON_CACHE_DIR"]).startswith(shared):  # or unset: torch derives it from the other
        os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")


def tag(on_cpu: bool = True) -> str:
    """Return a string of everything on which a compiled program depends besides its graph: processor, threads, versions.

    Only a program on a CPU depends on the instruction set. To find it, torch compiles and runs small programs, which can take
    longer than to compile the step. The properties of a CUDA device are in torch's own hash.

    Args:
        on_cpu: whether the program runs on a CPU.

    Example:
        >>> tag() == tag()
        True
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    instructions = str(pick_vec_isa()) if on_cpu else ""
    processor = platform.machine(), torch.backends.cpu.get_cpu_capability(), instructions
    versions = sys.version.split()[0], torch.__version__, __version__
    return " ".join(["bayesopt_chain", *processor, f"{torch.get_num_threads()} threads", *versions])
