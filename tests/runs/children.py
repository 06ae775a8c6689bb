"""Processes that are killed: forked from a server that has imported torch, so that one starts in milliseconds."""

import os
import signal
import time
from contextlib import suppress

from tests.distributed.ranks import server


def started(target, *args):
    """A process that calls a function of a module."""
    process = server().Process(target=_run, args=(target, *args), daemon=True)
    process.start()
    return process


def _run(target, *args):
    import faulthandler

    import torch

    faulthandler.enable()  # of one that hangs, ``until_it_ends`` asks where
    torch.set_num_threads(1)
    with suppress(KeyboardInterrupt):  # that came when the run had ended
        target(*args)


def until_it_ends(process, seconds=60.0, wall=600.0):
    """How many seconds a process still took, where it is given so much time of a processor.

    On a busy machine a process waits for a processor most of the time, so its own time is what is limited. One that does not
    end says where it is.
    """
    begin, used = time.monotonic(), processor_seconds(process.pid)
    while process.is_alive():
        process.join(0.05)
        took = processor_seconds(process.pid) - used if process.is_alive() else 0.0
        if took > seconds or time.monotonic() - begin > wall:
            os.kill(process.pid, signal.SIGABRT)
            process.join()
            raise AssertionError(f"it has not ended, after {took:.1f} s of a processor")
    return time.monotonic() - begin


def processor_seconds(pid):
    """The time of a processor that a process has had."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def read_so_far():
    """Bytes that this process has read."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])
