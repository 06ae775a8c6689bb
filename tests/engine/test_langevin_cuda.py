"""The Triton kernel draws and moves as the chain does. On a CPU it runs in Triton's interpreter, in a process of its own."""

import os
import re
import subprocess
import sys

import pytest
import torch

from benchmarks import cuda_ahead
from tests.random.draws import INEXACT, run

pytest.importorskip("triton")

PROGRAM = """
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


@pytest.mark.slow
def test_the_kernel_is_the_chain_in_the_interpreter():
    run(PROGRAM, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_places_behind_two_to_the_thirty_one_elements_do_not_wrap_around(tmp_path):
    program = tmp_path / "places.py"
    program.write_text("""
import torch, triton, triton.language as tl
from bayesopt_chain.engine.langevin_cuda import first_element

@triton.jit
def places(out, first):
    at = tl.arange(0, 64)
    tl.store(out + at, first_element(first + at, 1 << 40, 64))

out = torch.zeros(64, dtype=torch.int64)
places[(1,)](out, 2**29 + 64)
assert out.tolist() == [2**31 + 256 + i for i in range(64)], out
""")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr[-3000:]


def test_the_kernel_moves_twenty_bytes_a_parameter_sixteen_at_a_time():
    """Compiled for Hopper, without a device: a thread's 16 parameters take 12 loads and 8 stores of four floats each, and
    neither the approximate sine, cosine and logarithm, whose errors exceed 1e-6, nor scratch memory."""
    from bayesopt_chain.engine.langevin_cuda import _kernel

    floats = ("lr", "weight_decay", "keep", "momentum", "level", "deferred")
    types = {**dict.fromkeys(("theta", "g", "s"), "*fp32"), **dict.fromkeys(("key", "count"), "*i64")}
    types |= {**dict.fromkeys(("size", "draw"), "i32"), **dict.fromkeys(floats, "fp32")}
    ptx = cuda_ahead.compiled(_kernel, types, {"BLOCKS": 512, "RUN": 64}, 6, 4)["ptx"]  # addresses and size
    assert len(re.findall(r"ld\.global\S*\.v4", ptx)) == 12 and len(re.findall(r"st\.global\S*\.v4", ptx)) == 8
    assert len(re.findall(r"(?:ld|st)\.global", ptx)) == 12 + 8 + 2  # and the key and the count
    assert not re.findall(INEXACT, ptx)


@pytest.mark.slow
@pytest.mark.parametrize("device", cuda_ahead.DEVICES, ids=lambda device: device.name)
def test_memory_bounds_the_step_by_its_machine_code_and_nothing_spills(device):
    found = cuda_ahead.row("SGHMC step", cuda_ahead.kernels()["SGHMC step"], device)
    assert (found["loaded"], found["stored"], found["spilled"]) == (12, 8, 0)
    assert found["registers"] <= 64  # so that a multiprocessor holds 1,024 threads
    assert found["arithmetic_ms"] < found["memory_ms"]


@pytest.mark.gpu
def test_the_kernel_is_the_chain_on_the_device():
    run(PROGRAM, "cuda")


@pytest.mark.slow
def test_what_the_kernel_cannot_take_is_refused():
    program = (
        "import torch\nfrom bayesopt_chain.engine.langevin_cuda import langevin_step_ as f\n"
        "x, k = torch.zeros(4), torch.tensor(0)\n"
        "numbers = dict(lr=0.1, keep=0.9, momentum=1.0, level=0.1, deferred=1.1)\n"
        "for bad, kw in ((x.double(), {}), (torch.zeros(2, 4).t(), {}), (x, {'blocks': 100})):\n"
        "    try:\n        f(bad, x, x, k, k, **numbers, **kw)\n"
        "    except ValueError:\n        continue\n    raise SystemExit(f'{bad} was taken')\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr[-2000:]


@pytest.mark.slow
def test_the_library_does_not_need_triton():
    program = "import sys; sys.modules['triton'] = None\nimport bayesopt_chain, torch"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr[-2000:]
    assert torch is not None
