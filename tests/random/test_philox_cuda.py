"""The Triton kernel draws the stream's normals. On a CPU it runs in Triton's interpreter, in a process of its own."""

import re

import pytest
import torch

from bayesopt_chain.random import philox
from tests.forked import forked
from tests.random.draws import INEXACT, compiled, leaf, machine_code, registers_and_spills, traffic

pytest.importorskip("triton")

PROGRAM = """
import sys, torch
from bayesopt_chain.random.philox import in_tensors, parts_of_leaves
from bayesopt_chain.random.philox_cuda import fill

device = sys.argv[1]
sizes = [0, 1, 7, 64, 65, 255, 300, 1200, 5]
for chains in ((), (3,), (2, 2), (0,)):
    keys, steps = torch.randint(-2**63, 2**63 - 1, chains), torch.randint(0, 2**40, chains)
    out = torch.full((*chains, sum(sizes)), 9.0, device=device)
    flat = [x.reshape(-1).to(device) if x.ndim else x.to(device) for x in (keys, steps)]
    elements = parts_of_leaves(tuple(((0, n),) for n in sizes), tuple(range(250, 259)))
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


@pytest.mark.gpu
@pytest.mark.parametrize("program", [PROGRAM, PIECES], ids=["leaves", "pieces"])
def test_the_kernels_draw_the_stream_on_the_device(program):
    assert forked(program, device="cuda") == ["alike\n"]


@pytest.mark.parametrize("ones", [(), ("key_stride", "count_stride"), ("total",)], ids=str)
@pytest.mark.parametrize("blocks", [64, 128, 256, 512])
def test_it_compiles_without_approximate_functions(ones, blocks):
    """For Hopper, without a device; Triton takes arguments that are 1 as constants."""
    from bayesopt_chain.random.philox_cuda import _normals

    names = ("out", "keys", "counts", "table", "key_stride", "count_stride", "total", "runs", "programs")
    types = {"out": "*fp32", **dict.fromkeys(names[1:4], "*i64"), **dict.fromkeys(names[4:], "i32")}
    ptx = compiled(_normals, types, {"BLOCKS": blocks, "RUN": 64} | dict.fromkeys(ones, 1), 1, 2)["ptx"]
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


# The Triton kernel draws and moves as the chain does. On a CPU it runs in Triton's interpreter, in a process of its own


STEPS = """
import copy, sys, torch
import bayesopt_chain as bc
from bayesopt_chain.engine import engine

device = sys.argv[1]
if device == "cpu":
    engine._has_device_kernel = lambda x: True  # the interpreter takes tensors on the CPU
taken, launch = [], engine.Engine._moves_on_device
def move(*args):
    moves = launch(*args)
    taken.extend([args] * moves)
    return moves
engine.Engine._moves_on_device = move

def loss(params, batch):
    return sum(torch.cos(p).sum() for p in params if p is not None)

def compare(sizes, links, lr=0.1):
    torch.manual_seed(sum(sizes))
    tx = bc.chain(*links, bc.scale_by_neg_lr(lr))
    params = [torch.randn(n, device=device) if n else None for n in sizes]
    state = tx.init(params)
    mine, other = copy.deepcopy((params, state)), (params, state)
    fused, plain = bc.make_step(loss, tx, inplace=True), bc.make_step(loss, tx)
    for k in range(4):
        *mine, _ = fused(*mine, None)
        *other, _ = plain(*other, None)
        for x, y in zip(mine[0], other[0]):
            assert x is y is None or (x - y).abs().max() < 5e-6, (sizes, tx, k)
        for x, y in zip(mine[1], other[1]):
            if hasattr(x, "trace"):
                assert all((v - w).abs().max() < 2e-5 for v, w in zip(x.trace, y.trace) if v.numel())

noise = bc.inject_langevin_noise(0.3)
for n in (1, 8, 64, 65, 700, 3000):
    compare([n], [bc.add_momentum(0.9), noise])
    compare([n], [noise])
compare([70, 300, 5], [bc.links.add_decayed_weights(0.1), bc.add_momentum(0.5), noise])
compare([70, 300, 5], [bc.links.add_decayed_weights(0.1), noise])
compare([300, 0, 70], [bc.add_momentum(0.9), noise])  # an absent leaf
compare([0, 300, 70], [noise])
compare([300, 70], [bc.add_momentum(0.9), bc.inject_langevin_noise(0.3, order=1)])
assert len(taken) == 4 * 17, len(taken)
print("alike")
"""


PLACES = """
import torch, triton, triton.language as tl
from bayesopt_chain.engine.langevin_cuda import first_element

@triton.jit
def places(out, first):
    at = tl.arange(0, 64)
    tl.store(out + at, first_element(first + at, 64))

out = torch.zeros(64, dtype=torch.int64)
places[(1,)](out, 2**29 + 64)
assert out.tolist() == [2**31 + 256 + i for i in range(64)], out
print("alike")
"""


@pytest.mark.slow
def test_in_the_interpreter_the_kernels_draw_the_stream_and_move_as_the_chain_and_no_place_wraps_around(tmp_path):
    """The interpreter is chosen as Triton is imported, and Triton reads a kernel of a test from its file."""
    file = tmp_path / "places.py"
    file.write_text(PLACES)
    programs = PROGRAM, PIECES, STEPS, f"import runpy\nrunpy.run_path({str(file)!r})"
    assert forked(*programs, TRITON_INTERPRET="1") == ["alike\n"] * 4


FLOATS = ("lr", "weight_decay", "keep", "momentum", "level", "deferred")
TYPES = {**dict.fromkeys(("theta", "g", "s"), "*fp32"), **dict.fromkeys(("key", "count"), "*i64")}
TYPES |= {**dict.fromkeys(("size", "draw"), "i32"), **dict.fromkeys(FLOATS, "fp32")}


def of_the_step(capability):
    """The code of a step, whose addresses and size are multiples of 16."""
    from bayesopt_chain.engine.langevin_cuda import _kernel

    return compiled(_kernel, TYPES, {"BLOCKS": 512, "RUN": 64}, 6, 4, capability)


def test_the_kernel_moves_twenty_bytes_a_parameter_sixteen_at_a_time():
    """Compiled for Hopper, without a device: a thread's 16 parameters take 12 loads and 8 stores of four floats each, and
    neither the approximate sine, cosine and logarithm, whose errors exceed 1e-6, nor scratch memory."""
    ptx = of_the_step(90)["ptx"]
    assert len(re.findall(r"ld\.global\S*\.v4", ptx)) == 12 and len(re.findall(r"st\.global\S*\.v4", ptx)) == 8
    assert len(re.findall(r"(?:ld|st)\.global", ptx)) == 12 + 8 + 2  # and the key and the count
    assert not re.findall(INEXACT, ptx)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_memory_bounds_the_step_by_its_machine_code_and_nothing_spills(capability, tmp_path):
    """An A100, H100 and B200 make 191, 148 and 88 instructions at full rate in the time of moving 20 bytes."""
    code = of_the_step(capability)
    registers, spilled = registers_and_spills(code["ptx"], tmp_path)
    assert registers <= 64 and spilled == 0  # so that a multiprocessor holds 1,024 threads
    instructions = machine_code(code["cubin"], tmp_path)
    assert (traffic(instructions, "LDG") - 16, traffic(instructions, "STG")) == (
        16 * 12,
        16 * 8,
    )  # but for key and count
    assert len(instructions) / 16 < 80


@pytest.mark.gpu
def test_the_kernel_is_the_chain_on_the_device():
    assert forked(STEPS, device="cuda") == ["alike\n"]
