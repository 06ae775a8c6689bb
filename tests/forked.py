"""Programs that need a process of their own, each in a fork of one that has imported torch, which takes most of their time."""

import os
import subprocess
import sys

PARENT = """
import os, sys, torch, torchopt
programs, sys.argv[1:] = sys.argv[2:], sys.argv[1:2]
for program in programs:
    if not os.fork():
        exec(program, {})
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"this program failed: {program}")
    print("\\f", flush=True)
"""


def forked(*programs: str, device: str = "cpu", **environment: str) -> list[str]:
    """What each program prints, which finds the device in ``sys.argv[1]``; one that raises fails here, with what it says."""
    done = subprocess.run(
        [sys.executable, "-c", PARENT, device, *programs],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split("\f\n")[:-1]
