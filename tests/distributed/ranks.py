"""Several processes with a gloo group among them, as ``torchrun`` starts them."""

import collections
import datetime
import functools
import importlib
import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

PATIENCE = 500.0  # seconds; a test takes a few of them where the machine is free


def server():
    """Starts processes that have imported torch and the package already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    return context


def run(function, size, folder, *args, **options):
    """``function(*args, **options)`` in ``size`` processes at once; the list of what they returned, by rank.

    Without ``size``: the one of this process.

    The processes are forked from a server that has imported torch already. Raises what the first of them raised, as text.
    """
    if not size:
        return [function(*args, **options)]
    files, processes = _begun(function, size, folder, args, options)
    end = time.monotonic() + PATIENCE
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            processes[-1].join(0.05)
            if any(_failed(file) for file in files):  # the others wait for it in vain
                break
    finally:
        for process in processes:
            process.kill()
    results = [torch.load(file, weights_only=False) if file.exists() else ("no result", None) for file in files]
    said = [text for text, _ in results if text]
    assert not said, "\n".join(sorted(said, key=lambda text: text == "no result"))
    return [value for _, value in results]


def killed(function, size, folder, victim, *args, **options):
    """Launch ranks; when the first one is dead, kill the others as ``torchrun`` does. Whether the victim killed itself."""
    _, processes = _begun(function, size, folder, args, options)
    end = time.monotonic() + 120
    # a rank that has finished leaves the others to run on
    while time.monotonic() < end and None in (codes := [process.exitcode for process in processes]) and not any(codes):
        time.sleep(0.002)
    processes[victim].join(5)  # the end of another rank, which lost its connection, may be known first
    died = processes[victim].exitcode == -signal.SIGKILL
    for process in processes:
        process.kill()
        process.join()
    return died


def _begun(function, size, folder, args, options):
    meeting, start = folder / f"meeting-{time.monotonic_ns()}", server().Process
    files = [folder / f"{meeting.name}-{rank}.pt" for rank in range(size)]
    processes = [
        start(target=_one, args=(function, r, size, meeting, files[r], args, options), daemon=True) for r in range(size)
    ]
    for process in processes:
        process.start()
    return files, processes


def _failed(file):
    return file.exists() and torch.load(file, weights_only=False)[0] != ""


def _one(function, rank, size, meeting, file, args, options):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120)
        )
        result = ("", function(*args, **options))
        dist.barrier()
    except BaseException:
        result = (f"rank {rank}:\n{traceback.format_exc()}", None)
    torch.save(result, f"{file}.part")
    os.replace(f"{file}.part", file)
    os._exit(0)  # whatever threads of the group are left


def on(*sizes):
    """The body of a test runs on every rank of a launch of each size: asserts hold there, and values are picklable."""

    def decorate(body):
        asked = inspect.signature(body).parameters

        def test(tmp_path, size, **given):
            given |= {name: value for name, value in (("tmp_path", tmp_path), ("size", size)) if name in asked}
            run(_body, size, tmp_path, body.__module__, body.__name__, given)

        functools.update_wrapper(test, body).body = body
        fixtures = {
            **asked,
            **{name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("tmp_path", "size")},
        }
        test.__signature__ = inspect.Signature([x.replace(kind=x.KEYWORD_ONLY) for x in fixtures.values()])
        return pytest.mark.parametrize("size", sizes)(test)

    return decorate


def _body(module, name, given):
    getattr(importlib.import_module(module), name).body(**given)


def world():
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def everywhere(value):
    """What every rank has, by rank."""
    dist.all_gather_object(every := [None] * world()[1], value)
    return every


@functools.cache
def mesh_of(*shape):
    """A mesh over all ranks, the same one every time: each new one of several axes makes process groups of its own."""
    names = ("replicate", "shard", "third")[: len(shape)] if len(shape) > 1 else None
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class Messages(TorchDispatchMode):
    """Counts the collectives inside it, by name; torch's own counter cannot follow a module that runs twice."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.counts[func.__name__.partition(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def message_of(function, *args):
    """What a refusal says, or ``None`` if there was none."""
    try:
        function(*args)
    except (ValueError, TypeError, RuntimeError, FileNotFoundError) as err:
        return f"{type(err).__name__}: {err}"
    return None


def launched(script: Path, folder: Path) -> list[Any]:
    """What a script saved as ``folder / "RANK.pt"`` on each of two ranks under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([*command, script, folder], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
