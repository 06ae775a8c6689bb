"""The Triton kernel draws the stream's normals. On a CPU it runs in Triton's interpreter, in a process of its own."""

import re

import pytest
import torch

from bayesopt_chain.random import philox
from benchmarks import cuda_ahead
from tests.random.draws import INEXACT, leaf, run

pytest.importorskip("triton")

PROGRAM = """
import sys, torch
from bayesopt_chain.random.philox import in_tensors, whole_leaves
from bayesopt_chain.random.philox_cuda import fill

device = sys.argv[1]
sizes = [0, 1, 7, 64, 65, 255, 300, 1200, 5]
for chains in ((), (3,), (2, 2), (0,)):
    keys, steps = torch.randint(-2**63, 2**63 - 1, chains), torch.randint(0, 2**40, chains)
    out = torch.full((*chains, sum(sizes)), 9.0, device=device)
    flat = [x.reshape(-1).to(device) if x.ndim else x.to(device) for x in (keys, steps)]
    elements = whole_leaves(sizes, [250 + i for i in range(len(sizes))])
    fill(out, *flat, *elements[:3])
    want = in_tensors(keys, steps, elements, torch.float32)
    torch.testing.assert_close(out.cpu(), want.view(out.shape), rtol=0, atol=1e-6)
print("alike")
"""

PIECES = """
import sys, torch
from bayesopt_chain.random.philox import in_tensors, parts_of_leaves
from bayesopt_chain.random.philox_cuda import fill

device = sys.argv[1]
rows = [(5 + 70 * i, 33) for i in range(40)]  # a matrix of rows of 70, cut by columns
runs = (((0, 1), (63, 2), (100, 1200), (4000, 256)), ((2**34 - 300, 300),), (), ((2**33, 1500),), tuple(rows))
some = parts_of_leaves(runs, (7, 2**32 - 1, 11, 8, 9))
none = parts_of_leaves(((),), (7,))
for chains in ((), (3,), (2, 2), (0,)):
    keys, steps = torch.randint(-2**63, 2**63 - 1, chains), torch.randint(0, 2**40, chains)
    flat = [x.reshape(-1).to(device) if x.ndim else x.to(device) for x in (keys, steps)]
    for elements in (some, none):
        out = torch.full((*chains, sum(elements.sizes)), 9.0, device=device)
        fill(out, *flat, *elements[:3])
        want = in_tensors(keys, steps, elements, torch.float32)
        torch.testing.assert_close(out.cpu(), want.view(out.shape), rtol=0, atol=1e-6)
print("alike")
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [PROGRAM, PIECES], ids=["leaves", "pieces"])
def test_the_kernels_draw_the_stream_in_the_interpreter(program):
    run(program, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("program", [PROGRAM, PIECES], ids=["leaves", "pieces"])
def test_the_kernels_draw_the_stream_on_the_device(program):
    run(program, "cuda")


@pytest.mark.parametrize("ones", [(), ("key_stride", "count_stride"), ("total",)], ids=str)
@pytest.mark.parametrize("blocks", [64, 128, 256, 512])
def test_it_compiles_without_approximate_functions(ones, blocks):
    """For Hopper, without a device; Triton takes arguments that are 1 as constants."""
    from bayesopt_chain.random.philox_cuda import _normals

    names = ("out", "keys", "counts", "table", "key_stride", "count_stride", "total", "runs", "programs")
    types = {"out": "*fp32", **dict.fromkeys(names[1:4], "*i64"), **dict.fromkeys(names[4:], "i32")}
    ptx = cuda_ahead.compiled(_normals, types, {"BLOCKS": blocks, "RUN": 64} | dict.fromkeys(ones, 1), 1, 2)["ptx"]
    assert not re.findall(INEXACT, ptx)


@pytest.mark.gpu
def test_stacked_chains_draw_on_the_device_what_each_draws_on_the_host():
    """Through ``vmap``, in float32 by the kernel and in float64 by tensor operations."""
    keys, count = torch.randint(2**63 - 1, (5,)), torch.tensor(3)
    for dtype in (torch.float32, torch.float64):

        def draw(key, step, dtype=dtype):
            return leaf(key, step, 300, 1, dtype)

        device = torch.vmap(draw, in_dims=(0, None))(keys.cuda(), count.cuda())
        host = torch.stack([draw(key, count) for key in keys])
        torch.testing.assert_close(device.cpu(), host, rtol=0, atol=1e-6)


@pytest.mark.gpu
def test_a_leaf_of_more_than_two_to_the_31_entries():
    """What 32 bits cannot address still gets its own normals, and its own place."""
    from bayesopt_chain.engine.langevin_cuda import langevin_step_

    n = 2**31 + 1024
    if torch.cuda.mem_get_info()[0] < 3 * 4 * n + 2**30:
        pytest.skip("needs 27 GB on the device")
    theta, g, s = (torch.zeros(n, device="cuda") for _ in range(3))
    key, count = torch.tensor(123456789, device="cuda"), torch.tensor(7, device="cuda")
    langevin_step_(theta, g, s, key, count, lr=1.0, keep=1.0, momentum=0.0, level=1.0, deferred=1.0)
    element = torch.arange(2**31, n, device="cuda")
    block = 64 * (element // 256) + element % 64
    zero = 0 * block
    words = philox.philox((block & 0xFFFFFFFF, zero, zero + 7, zero), (key, zero))
    normals = [x for i in (0, 2) for x in philox.box_muller(words[i], words[i + 1], torch.float32)]
    want = torch.stack(normals).gather(0, (element % 256 // 64)[None])[0]
    torch.testing.assert_close(theta[2**31 :], -want, rtol=0, atol=1e-6)
    torch.testing.assert_close(s[2**31 :], want, rtol=0, atol=1e-6)
