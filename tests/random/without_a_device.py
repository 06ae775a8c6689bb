"""What can be known of a Triton kernel where there is no device: its results in the interpreter, its code for Hopper."""

import os
import subprocess
import sys


def run(program: str, device: str = "cpu", **env) -> None:
    """Run a program that prints ``alike``, in a process of its own: the interpreter is chosen as Triton is imported."""
    out = subprocess.run(
        [sys.executable, "-c", program, device], env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr[-3000:]
    assert "alike" in out.stdout


def code_for_hopper(kernel, types: dict[str, str], constants: dict[str, int], aligned: int, warps: int) -> str:
    """PTX of a kernel with these arguments, of which the first ``aligned`` are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        kernel,
        types | dict.fromkeys(constants, "constexpr"),
        constexprs={(list(types | constants).index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(aligned)},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]


INEXACT = r"sin\.approx|cos\.approx|lg2\.approx|ld\.local|st\.local"  # off by more than 1e-6; and scratch memory
