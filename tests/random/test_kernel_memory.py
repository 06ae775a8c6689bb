"""Kernels check nothing: what is handed to one is compared with what it reads and writes, at every call."""

import importlib

import pytest
import torch

from bayesopt_chain.data import index_stream
from bayesopt_chain.loop.capture import lane_kernels
from bayesopt_chain.random.compiled import require_memory
from bayesopt_chain.random.philox_cpu import normals_kernel

pytestmark = pytest.mark.skipif(normals_kernel() is None, reason="needs a C++ compiler")

I64 = torch.int64


def ints(*shape, dtype=I64, device=None):
    return torch.zeros(shape, dtype=dtype, device=device)


def philox(which):
    """Two rows of five normals, by ``fill`` or by ``bound``, on a CPU or, up to the launch, on a device."""

    def call(**change):
        if which == "cuda":
            kernel = importlib.import_module("bayesopt_chain.random.philox_cuda").fill
        else:
            kernel = normals_kernel() if which == "fill" else normals_kernel().bound
        given = {"out": torch.zeros(2, 5), "keys": ints(2), "steps": ints(), "starts": (0, 3), "lengths": (2, 3)}
        return kernel(*{**given, "draws": (0, 1), **change}.values())

    return call


def philox_in_lanes(**change):
    given = {"out": torch.zeros(5, 3), "keys": ints(3), "steps": ints(3), "lengths": (2, 3), "draws": (0, 1)}
    return normals_kernel().in_lanes(*{**given, **change}.values())


def move(**change):
    given = {"own": [torch.zeros(4, 6)], "lanes": [lane_kernels.in_lanes(torch.zeros(4, 6), 2)], **change}
    lane_kernels.leaves(**given)


def read(rows):
    lane_kernels.Rows(ints(4, 3)).read(rows)


def gather(lanes=None, table=None):
    rows = lane_kernels.Rows(ints(4, 3))
    rows.read(ints(4, 3))
    lanes = lane_kernels.in_lanes(torch.zeros(4, 3, 5), 2) if lanes is None else lanes
    lane_kernels.gather(torch.zeros(7, 5) if table is None else table, rows, lanes)


def permuted(n=6, memory=None):
    index_stream.permutations(3, n, 2, 3, 0, 0, memory)


def subset(n=6):
    index_stream.subsets(3, n, 6, 0, 0)


def langevin(**change):
    step = importlib.import_module("bayesopt_chain.engine.langevin_cuda").langevin_step_
    given = {name: torch.zeros(6) for name in ("theta", "g", "s")} | {"key": ints(), "count": ints()}
    step(**{**given, **change}, lr=0.1, keep=0.9, momentum=1.0, level=0.1, deferred=1.0)


shared = torch.zeros(12)
OF_PHILOX = {
    "a dtype": {"out": torch.zeros(2, 5, dtype=torch.bfloat16)},
    "too small": {"out": torch.zeros(2, 4)},
    "strides": {"out": torch.zeros(5, 2).T},
    "keys of 32 bits": {"keys": ints(2, dtype=torch.int32)},
    "keys of other rows": {"keys": ints(3)},
    "steps elsewhere": {"steps": ints(device="meta")},
    "a negative length": {"lengths": (-2, 7)},
    "a run without a draw": {"draws": (0,)},
}
WRONG = [
    *[
        (philox(which), change, f"{which}, {name}")
        for which in ("fill", "bound", "cuda")
        for name, change in OF_PHILOX.items()
    ],
    (philox_in_lanes, {"out": torch.zeros(5, 3, dtype=torch.float16)}, "a dtype"),
    (philox_in_lanes, {"out": torch.zeros(4, 3)}, "too small"),
    (philox_in_lanes, {"out": torch.zeros(3, 5).T}, "strides"),
    (philox_in_lanes, {"keys": ints()}, "one key"),
    (philox_in_lanes, {"steps": ints(6)[::2]}, "strides of steps"),
    (philox_in_lanes, {"keys": (k := ints(3)), "steps": k}, "keys that are steps"),
    (move, {"own": [torch.zeros(4, 6).double()]}, "a dtype"),
    (move, {"own": [torch.zeros(4, 5)]}, "too small"),
    (move, {"own": [torch.zeros(4, 12)[:, ::2]]}, "strides"),
    (move, {"own": [torch.zeros(4, 6, device="meta")]}, "elsewhere"),
    (move, {"lanes": [torch.zeros(2, 6)]}, "not in lanes"),
    (
        move,
        {"own": [torch.zeros(4, 6)] * 2, "lanes": [lane_kernels.in_lanes(torch.zeros(4, 6), 2)] * 2},
        "lanes that overlap",
    ),
    (read, {"rows": ints(4, 3, dtype=torch.int16)}, "a dtype"),
    (read, {"rows": ints(5, 3)}, "more chains"),
    (read, {"rows": ints(4, 4)}, "more rows"),
    (gather, {"table": torch.zeros(7, 5).double()}, "a dtype"),
    (gather, {"table": torch.zeros(7, 6)}, "wider rows"),
    (gather, {"table": torch.zeros(5, 7).T}, "strides"),
    (gather, {"lanes": torch.zeros(2, 3, 5)}, "not in lanes"),
    (permuted, {"n": 5}, "fewer rows than a batch takes"),
    (permuted, {"memory": ints(2, 3, 3)}, "a dtype"),
    (permuted, {"memory": ints(3, 3, 2, dtype=torch.int32).permute(2, 0, 1)}, "strides"),
    (subset, {"n": 5}, "fewer rows than are wanted"),
    (langevin, {"g": torch.zeros(6).double()}, "a dtype"),
    (langevin, {"theta": torch.zeros(6).double()}, "parameters of another dtype"),
    (langevin, {"theta": torch.zeros(2, 3).t()}, "parameters of other strides"),
    (langevin, {"blocks": 100}, "blocks of no whole runs"),
    (langevin, {"s": torch.zeros(5)}, "too small"),
    (langevin, {"s": torch.zeros(12)[::2]}, "strides"),
    (langevin, {"g": torch.zeros(6, device="meta")}, "elsewhere"),
    (langevin, {"theta": shared[:6], "s": shared[3:9]}, "memory shared"),
    (langevin, {"key": ints(dtype=torch.int32)}, "a key of 32 bits"),
    (langevin, {"count": ints(1)}, "a count with an axis"),
]


@pytest.mark.parametrize("call, change, what", WRONG, ids=[f"{call.__name__}: {what}" for call, _, what in WRONG])
def test_what_does_not_fit_is_refused_before_a_kernel_sees_it(call, change, what):
    with pytest.raises(ValueError, match=r"must be|share memory|cannot be had|each run has"):
        call(**change)


@pytest.mark.parametrize("call", [philox("fill"), philox("bound"), philox_in_lanes, move, gather, permuted, subset])
def test_what_fits_is_taken(call):
    call()
    read(ints(4, 3, dtype=torch.int32))
    require_memory(
        "neighbours", torch.device("cpu"), {"a": (shared[:6], shared.dtype, 6), "b": (shared[6:], shared.dtype, 6)}
    )
