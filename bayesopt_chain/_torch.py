"""torch's private functions that this library calls, in one place and with types: what to look at when torch changes.

Each was read in torch 2.11 to 2.13. Whoever needs to know whether a tensor may be read asks :mod:`bayesopt_chain.tracing`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # has a shape and no numbers, as during a trace

_C: Any = torch._C  # its stubs leave out what is used here
_functions: Any = torch
_functorch = _C._functorch
_engine: Any = torch.autograd.Variable._execution_engine


# the innermost transformation of ``torch.func`` (``vmap``, ``grad``, ``vjp`` or ``jvp``) that is running, or None
innermost_transformation: Callable[[], Any] = _functorch.peek_interpreter_stack
# whether a tensor is functorch's: one that ``vmap`` maps over, or one that is being differentiated
is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
# whether the outermost wrapper of a tensor is ``vmap``'s
is_batched: Callable[[Tensor], bool] = _functorch.is_batchedtensor
# the level of the transformation that wrapped a tensor last; 1 is the outermost
level: Callable[[Tensor], int] = _functorch.maybe_get_level
# tensors one after the other as a vector, in one call; of one tensor alone it may be a view
flattened: Callable[[Sequence[Tensor]], Tensor] = _C._nn.flatten_dense_tensors
# the tensor below the outermost wrapper
unwrapped: Callable[[Tensor], Tensor] = _functorch.get_unwrapped


@cache
def function_in_c(name: str) -> int | None:
    """The address of one of torch's functions for programs in C; ``None`` if this build has none of that name."""
    files = (Path(torch.__file__).parent / "lib").glob("*torch_cpu.*")
    of = next((str(x) for x in files if x.suffix in (".so", ".dylib", ".dll")), None)  # None: linked into another file
    function = None if of is None else getattr(ctypes.CDLL(of), name, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


def mark_generator(number: int) -> int:
    """Write a number on torch's default generator, where it keeps its seed: its ``initial_seed()`` from now on.

    What it draws stays as it is. The number is part of the generator's state, whose first 64 bits it is.

    Returns:
        What stood there.
    """
    state = torch.default_generator.get_state()
    seed = ctypes.c_uint64.from_address(state.data_ptr())
    before, seed.value = seed.value, number
    torch.default_generator.set_state(state)
    return before


def handles(tensors: Sequence[Tensor]) -> list[int]:
    """Handles of tensors for these functions, which keep them alive until :func:`delete_handles`."""
    read = ctypes.pythonapi.PyCapsule_GetPointer
    read.restype, read.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return [read(x, None) for x in _C._aoti.unsafe_alloc_void_ptrs_from_tensors([*tensors])]


def delete_handles(given: Sequence[int]) -> None:
    """Delete what :func:`handles` made."""
    delete = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(function_in_c("aoti_torch_delete_tensor_object") or 0)
    for handle in given:
        delete(handle)


def gradients_of_columns(
    outputs: Tensor, inputs: Sequence[Tensor], columns: Tensor, *, retain_graph: bool = False
) -> list[Tensor]:
    """The gradients of several cotangents ``[M, *outputs.shape]`` at once, ``[M, *input.shape]``, zeros for an unused input.

    ``torch.autograd.grad(is_grads_batched=True)`` without its walk over trees, which on a small model is half of its time.
    """
    level = _C._vmapmode_increment_nesting()
    try:
        batched = _functions._add_batch_dim(columns, 0, level)
        found = torch.autograd.grad(outputs, inputs, batched, materialize_grads=True, retain_graph=retain_graph)
        return [_functions._remove_batch_dim(x, level, columns.shape[0], 0) for x in found]
    finally:
        _C._vmapmode_decrement_nesting()


def is_dtensor(x: Any) -> bool:
    """Whether a tensor is a DTensor, spread over ranks; torch's module of them is not imported for it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Any) -> Any:
    """This rank's part of a DTensor, no copy; differentiable where gradients are recorded. Anything else as it is."""
    if not is_dtensor(x):
        return x
    if x.requires_grad and torch.is_grad_enabled():
        return x.to_local()
    part = x._local_tensor
    return part if type(part) is Tensor or not hasattr(part, "wait") else part.wait()


def local_parts(leaves: Iterable[Any]) -> list[Any]:
    """This rank's parts of the DTensors among leaves, as :func:`local` gives them; anything else as it is."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    recorded = torch.is_grad_enabled()
    return [
        x
        if type(x) is not kind and not isinstance(x, kind)
        else part
        if type(part := x._local_tensor) is Tensor and not (recorded and x.requires_grad)
        else local(x)
        for x in leaves
    ]


def specs_of(leaves: Iterable[Any]) -> list[Any]:
    """How the DTensors among leaves are laid out; ``None`` for anything else."""
    return [getattr(x, "_spec", None) for x in leaves]


REPLICATED, FLATTENED, SHARDED = "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"


def spread_parts(module: Any, how: str) -> list[Any]:
    """The modules inside one, and itself, that torch spreads over ranks; of what is no module none.

    Args:
        module: any module.
        how: the name of torch's class: ``REPLICATED``, ``FLATTENED`` (FSDP1), or ``SHARDED``, as ``fully_shard`` makes them;
            where torch has not imported it, it was not used.
    """
    rooms = map(sys.modules.get, ("torch.nn.parallel", "torch.distributed.fsdp"))
    kinds = tuple(getattr(room, how) for room in rooms if hasattr(room, how))
    return [part for part in module.modules() if isinstance(part, kinds)] if isinstance(module, torch.nn.Module) else []


def reshard(module: Any) -> None:
    """Let modules under ``fully_shard`` hold their sharded parameters again.

    The outermost of them keeps whole ones behind a forward pass that no backward pass follows.
    """
    for part in spread_parts(module, SHARDED):
        part.reshard()


def whole(x: Any) -> Any:
    """The full value of a 0-d DTensor, such as a loss, as a plain tensor. Anything else is returned as it is."""
    return x.full_tensor() if is_dtensor(x) and x.ndim == 0 else x


def dtensor_of(part: Tensor, spec: Any) -> Any:
    """The DTensor of which this rank has ``part``; nothing is sent or compared."""
    module: Any = sys.modules["torch.distributed.tensor"]
    if part.requires_grad:
        meta = spec.tensor_meta
        return module.DTensor.from_local(
            part, spec.mesh, spec.placements, run_check=False, shape=meta.shape, stride=meta.stride
        )
    kind = module.DTensor  # whose __init__ does nothing, behind a wrapper that costs more than the rest
    return kind.__new__(kind, part, spec, requires_grad=False)


def like(x: Any, part: Any, axes: int = 0) -> Any:
    """Make a DTensor with the layout of ``x`` from a local tensor; if ``x`` is plain, return the local tensor.

    Args:
        x: a leaf.
        part: the local tensor.
        axes: how many further axes it has in front, which every rank has whole.
    """
    return dtensor_of(part, stacked_spec(x._spec, part, axes)) if is_dtensor(x) else part


def stacked_spec(spec: Any, part: Tensor, axes: int) -> Any:
    """The description of a tensor that is spread like another one, with ``axes`` further axes in front, on every rank."""
    meta = spec.tensor_meta
    if not axes and part.dtype == meta.dtype:
        return spec
    shape = torch.Size((*part.shape[:axes], *meta.shape))
    inner: int = meta.shape.numel()
    stride = (*(inner * part.shape[i + 1 : axes].numel() for i in range(axes)), *meta.stride)
    from torch.distributed.tensor._ops.utils import shift_shard_dims_after_insert

    placements = spec.placements
    for _ in range(axes):
        placements = shift_shard_dims_after_insert(placements)
    return type(spec)(spec.mesh, tuple(placements), type(meta)(shape, stride, part.dtype))


# the mode in which ``make_fx`` records the operations, or None
recording_mode: Callable[[], Any] = partial(_C._get_dispatch_mode, _C._TorchDispatchModeKey.PROXY)

# how many modes see every operation of tensors before it runs
dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """What ``torch.compiler.disable`` makes of a function, without the import of torch's compiler, which takes longer than that
    of this library: it is imported by the first call, as in torch's own optimizers."""
    return _functions._compile._disable_dynamo(function)


# whether dynamo, the front of ``torch.compile``, follows this code
is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling


@uncompiled
def run_uncompiled(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function in the middle of what ``torch.compile`` compiles, and let it run as it is."""
    return function(*args, **options)


def traced(function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """The graph of the operations of a function of trees of tensors, by ``make_fx``, without those that lead nowhere.

    That notes a fake tensor at every node, and makes a mode for each of them unless the trace has one: half of its time. Many
    operations of a network's step under ``vmap`` are views that are laid out as what they view: they are left out.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        program = make_fx(function)(*inputs)
    aten = torch.ops.aten
    views = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.detach.default}
    for node in program.graph.nodes:
        if node.target in views:
            view, base = (x.meta.get("val") for x in (node, node.args[0]))
            if base is not None and view.shape == base.shape and view.stride() == base.stride():
                node.replace_all_uses_with(node.args[0])
    program.graph.eliminate_dead_code()
    program.recompile()
    return program


# what ``torch.set_grad_enabled`` does, without the microsecond of its object
set_grad_enabled: Callable[[bool], None] = _C._set_grad_enabled


def gradients(out: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradient of a real scalar, ``None`` for inputs that it does not depend on: the call of torch's engine that
    ``torch.autograd.grad`` comes to, behind forty calls of Python for what else it might have been given."""
    if torch.compiler.is_dynamo_compiling():
        return torch.autograd.grad(out, inputs, allow_unused=True)
    start = torch.ones_like(out)  # new at each call, since it may come back as a gradient
    return _engine.run_backward((out,), (start,), False, False, tuple(inputs), True, accumulate_grad=False)


@contextmanager
def switched_off(*backends: Any) -> Iterator[None]:
    """Do without some of torch's back ends, such as ``torch.backends.mkldnn``: their fused kernels cannot be vmapped, compiled
    or differentiated in every way, while torch's own operations can."""
    before = [backend.enabled for backend in backends]
    try:
        for backend in backends:
            backend.enabled = False
        yield
    finally:
        for backend, was in zip(backends, before):
            backend.enabled = was


def storage_of(x: Tensor) -> int:
    """A number that tensors share exactly if they share memory; fake tensors have one too."""
    return x.untyped_storage()._cdata


# for lists of tensors: x += alpha y;  x += value y z;  x += value y / z;  x *= factor, a number or a 0-d tensor;  x <- y
foreach_add_: Callable[..., None] = _functions._foreach_add_
foreach_addcmul_: Callable[..., None] = _functions._foreach_addcmul_
foreach_addcdiv_: Callable[..., None] = _functions._foreach_addcdiv_
foreach_mul_: Callable[[list[Tensor], float | Tensor], None] = _functions._foreach_mul_
foreach_copy_: Callable[[list[Tensor], list[Tensor]], None] = _functions._foreach_copy_
