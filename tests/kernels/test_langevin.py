"""The Triton kernel draws and moves as the chain does. On a CPU it runs in Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

PROGRAM = """
import sys, torch
import bayesopt_chain as bc
from bayesopt_chain.kernels.langevin import langevin_step_

device = sys.argv[1]
for n in (1, 8, 64, 65, 700, 3000):
    for momentum, temperature in ((0.9, 0.3), (0.0, 0.3), (0.9, 0.0)):
        torch.manual_seed(n)
        links = [bc.inject_langevin_noise(0.3, stream="philox")] if temperature else []
        tx = bc.chain(bc.add_momentum(momentum), *links, bc.scale_by_neg_lr(0.1))
        chain, theta, u = [torch.randn(n, device=device)], None, torch.zeros(n, device=device)
        theta, state = chain[0].clone(), tx.init(chain)
        key = next((s.key for s in state if hasattr(s, "key")), torch.tensor(0, device=device))
        for k in range(4):
            count = torch.tensor(k, device=device)
            langevin_step_(theta, torch.sin(theta), u, key, count, lr=0.1, momentum=momentum, temperature=temperature)
            updates, state = tx.update([torch.sin(chain[0])], state, params=chain, inplace=False)
            chain = [chain[0] + updates[0]]
            assert (theta - chain[0]).abs().max() < 5e-6, (n, momentum, temperature, k)
print("alike")
"""


def run(device, **env):
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM, device], env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr[-3000:]
    assert "alike" in out.stdout


@pytest.mark.slow
def test_the_kernel_is_the_chain_in_the_interpreter():
    run("cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_the_kernel_is_the_chain_on_the_device():
    run("cuda")


def test_what_the_kernel_cannot_take_is_refused():
    program = (
        "import torch\nfrom bayesopt_chain.kernels.langevin import langevin_step_ as f\n"
        "x, k = torch.zeros(4), torch.tensor(0)\n"
        "for bad, kw in ((x.double(), {}), (torch.zeros(2, 4).t(), {}), (x, {'blocks': 100})):\n"
        "    try:\n        f(bad, x, x, k, k, lr=0.1, temperature=0.1, **kw)\n"
        "    except ValueError:\n        continue\n    raise SystemExit(f'{bad} was taken')\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr[-2000:]


def test_the_library_does_not_need_triton():
    program = "import sys; sys.modules['triton'] = None\nimport bayesopt_chain, torch"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr[-2000:]
    assert torch is not None
