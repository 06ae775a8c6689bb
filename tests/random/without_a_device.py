"""What can be known of a Triton kernel where there is no device: its results in the interpreter, and its code."""

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


INEXACT = r"sin\.approx|cos\.approx|lg2\.approx|ld\.local|st\.local"  # off by more than 1e-6; and scratch memory
