"""Call the kernels of a compiled step from C++: for several steps, for blocks of chains, and by several threads.

Inductor writes a function in Python that allocates memory and calls its kernels. A small step takes less time than this
function and those around it. Where the function does nothing else, its calls are recorded once, with the addresses of their
arguments, and a loop in C++ makes them (``lane_kernels.cpp``). Each thread has buffers and arguments of its own, so that
threads never wait for one another between two steps.

Products of matrices, which inductor leaves to torch, are recorded as calls of torch's functions for programs in C. These take
handles of tensors, which stay the same from step to step.

Tensors that every call is given anew (*shared* ones: data, and what a step closes over) are known by the storage that a kernel
reads; their addresses are written over those of the recording before a step. What a product reads of them is first copied to
memory that stays.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import _torch
from bayesopt_chain.loop.capture import lane_kernels
from bayesopt_chain.loop.capture.lane_kernels import addresses, array

_MOST = 1024  # arguments of a kernel, as in the source
# what a generated function may call beside its kernels
_CALLS = frozenset(("torch", "clear", "empty_strided_cpu", "reinterpret_tensor"))
# torch's products of matrices, and the functions of the library that call them
_PRODUCTS = {"mm": "product", "bmm": "product", "addmm": "sum_and_product", "baddbmm": "sum_and_product"}
# bytes of the shared tensors that products read, from which on copying them could take longer than Python
_COPIED = 2**20


class CannotBeRecorded(Exception):
    """The function that inductor generated does more than to call kernels and to multiply matrices."""


class Kernels:
    """The kernels of a compiled step, with buffers for each of several threads.

    Args:
        program: what inductor generated, a function of a list of tensors.
        order: for each of its arguments, which of the inputs it is.
        inputs: all inputs. The first thread uses these very tensors, and each other one has copies of them.
        shared: the indices of the inputs that each step is given.
        draws: for the inputs of a thread, the calls that draw normals, before the kernels of a step.
        buffers: the indices of the inputs that are static buffers, those of the batch, rows of tables, and the report.
        threads: the number of threads.
        steps: the number of steps in a call.
        single: how many tensors of the report are not stacked on an axis of steps.
        batches: the number of batches in a call: 1, or one for each step.
        chains: the static buffers of all chains as leaves, if blocks of chains are copied.
        n, block: the number of chains, and of those of a block.

    Raises:
        CannotBeRecorded: the function does more than to call kernels, or multiplies matrices of blocks of chains.
    """

    def __init__(
        self,
        program: Any,
        order: Sequence[int],
        inputs: Sequence[Tensor],
        shared: Sequence[int],
        draws: Callable[[list[Tensor]], list[partial[None]]],
        buffers: Sequence[Sequence[int]] = ((), (), (), ()),
        threads: int = 1,
        *,
        steps: int,
        single: int,
        batches: int,
        chains: Any = (),
        n: int = 1,
        block: int = 1,
    ) -> None:
        made, kernels, places = [], list[Any](), list[Any]()
        self.library: Any = lane_kernels.library()
        self.kept, self.report = list[Any](), [inputs[i] for i in buffers[3]]
        self.strides = [inputs[i].stride() for i in shared]
        for t in range(threads):
            # new memory for the shared ones, by which they are told apart
            mine = [_like(x).copy_(x) if i in shared else x.clone() if t else x for i, x in enumerate(inputs)]
            calls, returned = _recorded(program, [mine[i] for i in order])
            where = {mine[i].untyped_storage().data_ptr(): (k, mine[i].data_ptr()) for k, i in enumerate(shared)}
            if any([not _is_dense(x) or x.untyped_storage().data_ptr() in where for x in returned]):
                raise CannotBeRecorded("it returns what it was given")
            products = [(name, given) for name, given in calls if isinstance(name, str)]
            if products and len(chains):
                raise CannotBeRecorded("products would compete with the threads of the blocks")
            read = {x.untyped_storage().data_ptr() for _, given in products for x in given}
            copied = [mine[i] for i in shared if mine[i].untyped_storage().data_ptr() in read]
            if sum([x.nbytes for x in copied]) > _COPIED or not all(map(_is_dense, copied)):
                raise CannotBeRecorded("products read much that every call is given anew")
            copies = [(self.library.copy, [x.data_ptr(), x, x.nbytes]) for x in copied]
            arguments, kernels, places = list[int](), list[Any](), list[tuple[int, int, int]]()
            drawn: list[tuple[Any, Sequence[Any]]] = [(call.func, call.args) for call in draws(mine)]
            for function, given in (*drawn, *copies, *calls):
                if isinstance(function, str):
                    function, given = self._product(function, given)
                room = max(8, 1 << (len(given) - 1).bit_length())
                kernels.append(lane_kernels.Kernel(ctypes.cast(function, ctypes.c_void_p), room))
                for at, x in enumerate(given, len(arguments)):
                    if isinstance(x, Tensor) and (found := where.get(x.untyped_storage().data_ptr())) and x.numel():
                        places.append((at, found[0], x.data_ptr() - found[1]))
                arguments += [x.data_ptr() if isinstance(x, Tensor) else x for x in given] + [0] * (room - len(given))
            arrays = [addresses([mine[i] for i in indices]) for indices in buffers]
            if returned:
                arrays[3], self.report = addresses(returned), returned
            arrays.append((ctypes.c_void_p * len(arguments))(*arguments))
            made.append(lane_kernels.Thread(*map(ctypes.addressof, arrays)))
            # the shared ones are not kept: data may be large
            self.kept.append((arrays, returned, [x for i, x in enumerate(mine) if i not in shared]))
            self.kept.append([x for _, given in calls for x in given if x.untyped_storage().data_ptr() not in where])
        self.threads, of_kernels = array(lane_kernels.Thread, made), array(lane_kernels.Kernel, kernels)
        slots, self.places = (ctypes.c_int64 * len(places))(*[at for at, *_ in places]), places
        self.given = (lane_kernels.Given * batches)()
        self.shared, self.last = [(ctypes.c_void_p * len(places))() for _ in range(batches)], [list[int]()] * batches
        for given, addresses_of in zip(self.given, self.shared):
            given.shared = _address(addresses_of)
        # of all chains, or of one, whose report is copied as it lies in memory
        many, leaves = bool(len(chains)), list[Any]()
        self.reported = list[tuple[Any, Any, torch.dtype]]()
        for i, x in enumerate(self.report):
            whole = x.new_empty((n, *x.shape[1:]), device="meta") if many else x
            size, by = (x[0].numel(), x.element_size()) if many else (x.nbytes, 1)
            leaves.append(lane_kernels.Leaf(0, size, size, by, n * size * by))
            axis = ((), ()) if i < single else ((steps,), (whole.numel(),))
            self.reported.append(((*axis[0], *whole.shape), (*axis[1], *whole.stride()), x.dtype))
        self.leaves = array(lane_kernels.Leaf, leaves)
        counts = [len(x) for x in (chains, self.leaves, *buffers[1:3], of_kernels, slots, self.given)]
        pointers = [*map(_address, (chains, self.leaves, of_kernels, slots))]
        self.plan = lane_kernels.Plan(*pointers, *counts, n, block)
        self.kept.append((chains, of_kernels, slots))
        self.error = ctypes.create_string_buffer(512)

    def _product(self, name: str, given: Sequence[Any]) -> tuple[Any, list[int]]:
        """The function of the library that calls a product of torch's, and its arguments, which keep the tensors alive.

        Raises:
            CannotBeRecorded: this build of torch has no such function.
        """
        if (function := _torch.function_in_c(f"aoti_torch_cpu_{name}_out")) is None:
            raise CannotBeRecorded(f"torch has no {name} for programs in C")
        handles = _torch.handles(given)
        weakref.finalize(self, _torch.delete_handles, handles).atexit = False
        return getattr(self.library, _PRODUCTS[name]), [function, *handles]

    def give(self, k: int, shared: Sequence[Tensor], batch: Any = (), tables: Any = ()) -> Any:
        """Set the batch of a step, or of all steps.

        Args:
            k: the number of the step.
            shared: the tensors that all chains share.
            batch, tables: leaves and tables of all chains.

        Returns:
            What has to stay alive until the steps are made.
        """
        xs = [x if x.stride() == s else _like(x, s).copy_(x) for x, s in zip(shared, self.strides)]
        at = [*map(Tensor.data_ptr, xs)]
        if at != self.last[k]:
            self.shared[k][:], self.last[k] = [at[i] + by for _, i, by in self.places], at
        if len(batch) + len(tables):
            self.given[k].batch, self.given[k].tables = _address(batch), _address(tables)
        return xs, batch, tables

    def reports(self) -> list[Tensor]:
        """Allocate the reports of all steps, to which the steps write."""
        out = [torch.empty_strided(shape, stride, dtype=dtype, device="cpu") for shape, stride, dtype in self.reported]
        for leaf, x in zip(self.leaves, out):
            leaf.own = x.data_ptr()
        return out

    def run(self, first: int, end: int) -> None:
        """Make the steps from a first one up to another one.

        Raises:
            RuntimeError: a kernel's, for a row that is out of range for its table.
        """
        many, what = min(len(self.threads), torch.get_num_threads()), self.error
        self.library.run_blocks(ctypes.byref(self.plan), self.threads, self.given, first, end, many, what)
        if what[0] != b"\0":
            error, what[0] = what.value.decode(), b"\0"
            raise RuntimeError(error)


def _address(x: Any) -> int:
    """The address of an array in C; 0 for nothing."""
    return ctypes.addressof(x) if len(x) else 0


def _is_dense(x: Tensor) -> bool:
    """Whether the elements of a tensor fill its memory without gaps or overlaps, in any order of its axes."""
    return torch.empty_like(x).stride() == x.stride()


def _like(x: Tensor, stride: Sequence[int] | None = None) -> Tensor:
    """New memory with the shape and dtype of a tensor, and its strides or others."""
    return torch.empty_strided(x.shape, x.stride() if stride is None else stride, dtype=x.dtype, device="cpu")


def _recorded(program: Any, inputs: Sequence[Tensor]) -> tuple[list[tuple[Any, list[Tensor]]], list[Tensor]]:
    """Call a function that inductor generated, and record which kernels it calls.

    Returns:
        For each call the kernel, or the name of a product, and the tensors that it was given, of a product its result first;
        and what the function returned.

    Raises:
        CannotBeRecorded: it does anything else than to call its own kernels, with tensors, in memory that it allocates.
    """
    function = getattr(program, "__func__", program)
    names, space = function.__code__.co_names, function.__globals__
    kernels = {name: space[name] for name in names if name.startswith("cpp_fused") and name in space}
    products = [name for name in names if name in _PRODUCTS]
    replaced = {**kernels, **({"extern_kernels": space["extern_kernels"]} if products else {})}
    others = {name for name in names if not isinstance(getattr(torch, name, None), torch.dtype)}
    if not (others := others - {*replaced, *products}) <= _CALLS:
        raise CannotBeRecorded(sorted(others))
    calls: list[tuple[Any, list[Tensor]]] = []

    def watched(kernel: Any) -> Callable[..., None]:
        library = getattr(getattr(kernel, "__self__", None), "__file__", None)
        if library is None:
            raise CannotBeRecorded("a kernel without a library")
        function = getattr(ctypes.CDLL(library), kernel.__name__)

        def call(*given: Any) -> None:
            calls.append((function, [*given]))
            kernel(*given)

        return call

    def multiplied(name: str) -> Callable[..., None]:
        def call(*given: Tensor, out: Tensor, alpha: float = 1.0, beta: float = 1.0) -> None:
            if (alpha, beta) != (1, 1):
                raise CannotBeRecorded("a multiple of a product")
            calls.append((name, [out, *given]))
            getattr(replaced["extern_kernels"], name)(*given, out=out)

        return call

    try:
        space.update({name: watched(kernel) for name, kernel in kernels.items()})
        if products:
            space["extern_kernels"] = SimpleNamespace(**{name: multiplied(name) for name in products})
        returned = [*program([*inputs])]
    finally:
        space.update(replaced)
    every = [x for _, given in calls for x in given] + returned
    if not all([isinstance(x, Tensor) for x in every]) or any([len(given) > _MOST for _, given in calls]):
        raise CannotBeRecorded("its kernels take numbers, or too many arguments")
    return calls, returned
