"""The suite as other processors run it: ``python -m tests.processors [pytest's arguments, by default tests]``.

torch picks its kernels by what the processor can do and MKL its own; both can be told to pretend. Each of the capabilities
that this processor has runs with one thread and with two. What torch compiles is kept apart for each: its cache does not know
the capability and hands out code for another. Exits with 1 unless every run passes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

import torch

KERNELS = {  # torch's kernels, and another summation order in MKL's BLAS with each
    "default": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
}


def available() -> list[str]:
    """The capabilities of this processor, least first."""
    names = list(KERNELS)
    best = torch.backends.cpu.get_cpu_capability().lower()
    return names[: names.index(best) + 1] if best in names else names[:1]


def run(capability: str, threads: int, cache: str, arguments: list[str]) -> tuple[bool, str]:
    """Whether the suite passed, and pytest's last line."""
    own = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_CACHE_DIR": cache}
    environment = {**os.environ, **KERNELS[capability], **own}
    workers = max(1, (os.cpu_count() or 1) // threads)
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), *(arguments or ["tests"])]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout)
    return done.returncode == 0, (done.stdout.strip().splitlines() or ["nothing was printed"])[-1].strip("= ")


def main() -> int:
    """Run every combination and print a line for each."""
    passed = True
    for capability in available():
        with tempfile.TemporaryDirectory() as cache:
            for threads in (1, 2):
                start = time.perf_counter()
                ok, summary = run(capability, threads, cache, sys.argv[1:])
                passed &= ok
                seconds = time.perf_counter() - start
                print(f"{capability:8} {threads} thread(s)  {summary}  ({seconds:.0f} s)", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
